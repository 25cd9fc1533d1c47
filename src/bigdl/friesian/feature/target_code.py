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
    """

    def __init__(
        self,
        df: DataFrame,
        cat_col: str | list[str],
        out_target_mean: Mapping[str, tuple[str, float]],
    ):
        super().__init__(df)
        require_columns(df, as_names(cat_col, "cat_col"))
        if not isinstance(out_target_mean, Mapping):
            raise UsageError(
                "out_target_mean should be a dict from a column to a target and its mean, but got "
                f"{out_target_mean!r}"
            )
        require_columns(df, out_target_mean)
        self.cat_col = list(cat_col) if isinstance(cat_col, tuple) else cat_col
        self.out_target_mean = dict(out_target_mean)

    def _clone(self, df: DataFrame) -> Self | Table:
        if {*as_names(self.cat_col), *self.out_target_mean} <= set(df.columns):
            return type(self)(df, self.cat_col, self.out_target_mean)
        return Table(df)

    def rename(self, columns: dict[str, str]) -> TargetCode:
        """Give columns new names; `cat_col` and `out_target_mean` follow.

        Parameters
        ----------
        columns : dict of str to str
            From old to new names.
        """
        if not isinstance(columns, dict):
            raise UsageError(
                "columns should be a dictionary of {'old_name1': 'new_name1', 'old_name2': "
                f"'new_name2'}}, but got {columns!r}"
            )
        cat_col = (
            columns.get(self.cat_col, self.cat_col)
            if isinstance(self.cat_col, str)
            else [columns.get(name, name) for name in self.cat_col]
        )
        means = {columns.get(name, name): each for name, each in self.out_target_mean.items()}
        return type(self)(self.df.withColumnsRenamed(columns), cat_col, means)
