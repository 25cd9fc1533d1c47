"""The codes of categories that ``target_encode`` learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.base import Table
from bigdl.friesian.feature.operators.columns import as_names, require_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["TargetCode"]


class TargetCode(Table):
    """Codes of categories, for :meth:`FeatureTable.encode_target`.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        One row for each category: the columns of `cat_col`, ``target_encode_count`` (how many rows
        it had), and those of the codes.
    cat_col : str or list of str
        The column of the categories, or the columns that form them.
    out_target_mean : dict of str to (str, float)
        For each column of codes the target and its mean over all rows, which is the code of a
        category that is not in the table.
    key_cols : str or list of str, optional
        The columns of `df` that hold the categories, if they are not called as `cat_col`.
    """

    def __init__(
        self,
        df: DataFrame,
        cat_col: str | list[str],
        out_target_mean: Mapping[str, tuple[str, float]],
        key_cols: str | list[str] | None = None,
    ):
        super().__init__(df)
        categories = as_names(cat_col, "cat_col")
        self.key_cols = categories if key_cols is None else as_names(key_cols, "key_cols")
        if len(self.key_cols) != len(categories):
            raise UsageError(
                f"key_cols should be as many columns as cat_col, {categories}, got {key_cols!r}"
            )
        require_columns(df, self.key_cols)
        if not isinstance(out_target_mean, Mapping):
            raise UsageError(
                "out_target_mean should be a dict from a column to a target and its mean, but got "
                f"{out_target_mean!r}"
            )
        require_columns(df, out_target_mean)
        self.cat_col = list(cat_col) if isinstance(cat_col, tuple) else cat_col
        self.out_target_mean = dict(out_target_mean)

    def _clone(self, df: DataFrame) -> Self | Table:
        if {*self.key_cols, *self.out_target_mean} <= set(df.columns):
            return type(self)(df, self.cat_col, self.out_target_mean, self.key_cols)
        return Table(df)

    def rename(self, columns: dict[str, str]) -> TargetCode:
        """Give columns new names; `cat_col` and `out_target_mean` follow.

        Parameters
        ----------
        columns : dict of str to str
            From old to new names.
        """
        renamed = Table(self.df).rename(columns)
        cat_col = (
            columns.get(self.cat_col, self.cat_col)
            if isinstance(self.cat_col, str)
            else [columns.get(name, name) for name in self.cat_col]
        )
        means = {columns.get(name, name): each for name, each in self.out_target_mean.items()}
        keys = [columns.get(name, name) for name in self.key_cols]
        return type(self)(renamed.df, cat_col, means, keys)
