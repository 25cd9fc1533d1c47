"""Tables that fitted encoders return: ids of values, and target encodings of categories."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self, cast

import pyarrow as pa

from bigdl.common.errors import UsageError, hide_frames
from bigdl.friesian.feature.relations import Table
from bigdl.friesian.ops import spark
from bigdl.friesian.ops.column_types import require_columns
from bigdl.friesian.ops.spark import as_names, check_string
from bigdl.friesian.ops.targets import TargetStatistics
from bigdl.friesian.ops.vocabulary import Dictionary, number_column
from bigdl.orca.cluster.versions import frame_of_arrow
from bigdl.orca.data.pandas.readers import paths_for_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@hide_frames
class StringIndex(Table):
    """Vocabulary of a column: distinct values with integer ids from 1.

    Operators that keep both columns return a StringIndex, the others a Table.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        Columns `col_name` and ``id``.
    col_name : str
        Name of the value column. If it is ``"id"``, the id column is ``id_number``.

    Examples
    --------
    >>> from bigdl.friesian.feature import StringIndex
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> index = StringIndex.from_dict({"Oslo": 1, "Rome": 2}, "city")
    >>> index.write_parquet("vocabularies")
    >>> sorted(StringIndex.read_parquet("vocabularies/city.parquet").to_dict().items())
    [('Oslo', 1), ('Rome', 2)]
    """

    def __init__(self, df: DataFrame, col_name: str):
        super().__init__(df)
        check_string(col_name, "col_name")
        for name in (number_column(col_name), col_name):
            if name not in df.columns:
                raise UsageError(
                    f"{name} should be a column of the DataFrame, but its columns are {df.columns}",
                    code="column-missing",
                    column=name,
                    allowed=list(df.columns),
                )
        self.col_name = col_name
        self._dictionaries: dict[str, Dictionary] = {}

    def _clone(self, df: DataFrame) -> Self:
        if {number_column(self.col_name), self.col_name} <= set(df.columns):
            return type(self)(df, self.col_name)
        return cast("Self", Table(df))  # without these columns it is a plain Table

    def rename(self, columns: dict[str, str]) -> StringIndex:
        """Rename columns; `col_name` is updated.

        Parameters
        ----------
        columns : dict of str to str
            Old to new names.
        """
        if not isinstance(columns, dict):
            return Table(self.df).rename(columns)  # raises the error for a wrong type
        col_name = columns.get(self.col_name, self.col_name)
        numbers = {number_column(self.col_name): number_column(col_name)}
        return type(self)(Table(self.df).rename({**numbers, **columns}).df, col_name)

    def dictionary_of(self, column: str) -> Dictionary:
        """Return a cached Dictionary that maps the values of a column to ids."""
        dictionary = self._dictionaries.get(column)
        if dictionary is None or dictionary.df is not self.df:
            number = number_column(self.col_name)
            dictionary = self._dictionaries[column] = Dictionary(self.df, column, number)
        return dictionary

    @classmethod
    def read_parquet(cls, paths: str | list[str], col_name: str | None = None) -> StringIndex:
        """Read a StringIndex that :meth:`write_parquet` wrote.

        Parameters
        ----------
        paths : str or list of str
        col_name : str, optional
            Name of the value column. Default: the file name up to its first dot.

        Returns
        -------
        StringIndex
        """
        first = cast("str", paths[0] if isinstance(paths, list | tuple) and paths else paths)
        if col_name is None:
            col_name = os.path.basename(os.fspath(first).rstrip("/")).split(".")[0]
        return cls(spark.active_spark().read.parquet(*paths_for_spark(paths)), col_name)

    @classmethod
    def from_dict(cls, indices: dict[str, int], col_name: str) -> StringIndex:
        """Build a StringIndex from a dict of values to ids.

        Parameters
        ----------
        indices : dict of str to int
        col_name : str
            Name of the value column.

        Returns
        -------
        StringIndex
        """
        if not isinstance(indices, dict):
            raise UsageError(
                f"indices should be dict, but get {type(indices).__name__}",
                code="argument-type",
                argument="indices",
            )
        check_string(col_name, "col_name")
        if not all(isinstance(each, str) for each in indices):
            raise UsageError(
                f"The keys of indices should be str, but got {list(indices)[:5]!r}",
                code="argument-type",
                argument="indices",
            )
        try:
            ids = pa.array(indices.values(), pa.int32())
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise UsageError(
                f"The values of indices should be 32-bit int: {error}",
                code="argument-value",
                argument="indices",
            ) from error
        number = number_column(col_name)
        table = pa.table({col_name: pa.array(indices, pa.string()), number: ids})
        schema = f"{spark.quoted(col_name)} string, {number} int"
        return cls(frame_of_arrow(spark.active_spark(), table, schema), col_name)

    def to_dict(self) -> dict[str, int]:  # type: ignore[override]  # as in BigDL 2.x
        """Return a dict from values to ids."""
        number = number_column(self.col_name)
        columns = self._columns([self.col_name, number])
        return dict(zip(columns[self.col_name], columns[number], strict=True))

    def write_parquet(self, path: str, mode: str = "overwrite") -> None:
        """Write the StringIndex to the folder ``<path>/<col_name>.parquet``.

        Parameters
        ----------
        path : str
        mode : {"append", "overwrite", "error", "ignore"}
        """
        super().write_parquet(f"{os.fspath(path).rstrip('/')}/{self.col_name}.parquet", mode)


@hide_frames
class TargetCode(Table):
    """Table of target encodings of categories, for :meth:`FeatureTable.encode_target`.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        One row per category: the columns of `cat_col`, ``target_encode_count`` (the number of rows
        of the category), and the code columns.
    cat_col : str or list of str
        Category column, or the columns that form a combined category.
    out_target_mean : dict of str to (str, float)
        Code column to its target and the target's overall mean. Categories that the table lacks get
        the mean.
    key_cols : str or list of str, optional
        Category columns of `df`, if their names differ from `cat_col`.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> clicks = pd.DataFrame({"city": ["Oslo", "Oslo", "Rome", "Rome"], "click": [1, 1, 0, 1]})
    >>> table, codes = FeatureTable.from_pandas(clicks).target_encode("city", "click", smooth=0)
    >>> code = codes[0]  # a TargetCode
    >>> sorted(code.select("city", "city_te_click", "target_encode_count").to_list("city_te_click"))
    [0.5, 1.0]
    >>> code.out_target_mean
    {'city_te_click': ('click', 0.75)}
    """

    def __init__(
        self,
        df: DataFrame,
        cat_col: str | list[str],
        out_target_mean: Mapping[str, tuple[str, float | None]],
        key_cols: str | list[str] | None = None,
    ):
        super().__init__(df)
        categories = as_names(cat_col, "cat_col")
        self.key_cols = categories if key_cols is None else as_names(key_cols, "key_cols")
        if len(self.key_cols) != len(categories):
            raise UsageError(
                f"key_cols should be as many columns as cat_col, {categories}, got {key_cols!r}",
                code="argument-value",
                argument="key_cols",
            )
        require_columns(df.columns, self.key_cols)
        if not isinstance(out_target_mean, Mapping):
            raise UsageError(
                "out_target_mean should be a dict from a column to a target and its mean, but got "
                f"{out_target_mean!r}",
                code="argument-type",
                argument="out_target_mean",
            )
        require_columns(df.columns, out_target_mean)
        self.cat_col = list(cat_col) if isinstance(cat_col, tuple) else cat_col
        self.out_target_mean = dict(out_target_mean)

    def _clone(self, df: DataFrame) -> Self:
        if {*self.key_cols, *self.out_target_mean} <= set(df.columns):
            return type(self)(df, self.cat_col, self.out_target_mean, self.key_cols)
        return cast("Self", Table(df))  # without these columns it is a plain Table

    def rename(self, columns: dict[str, str]) -> TargetCode:
        """Rename columns; `cat_col` and `out_target_mean` are updated.

        Parameters
        ----------
        columns : dict of str to str
            Old to new names.
        """
        renamed = Table(self.df).rename(columns)
        names = [columns.get(name, name) for name in as_names(self.cat_col)]
        cat_col = names[0] if isinstance(self.cat_col, str) else names
        means = {columns.get(name, name): each for name, each in self.out_target_mean.items()}
        keys = [columns.get(name, name) for name in self.key_cols]
        return type(self)(renamed.df, cat_col, means, keys)


def dictionary_of(index: object, name: str) -> Dictionary:
    if isinstance(index, Mapping):
        index = StringIndex.from_dict(dict(index), name)
    if not isinstance(index, Table):
        raise UsageError(
            f"indices should be StringIndex or dict, or a list of them, got {index!r}",
            code="argument-type",
            argument="indices",
        )
    number = number_column(name)
    if name not in index.df.columns or number not in index.df.columns:
        raise UsageError(
            f"The index for the column {name} should have a column of this name and {number}, but "
            f"its columns are {index.df.columns}; rename them",
            code="column-missing",
            column=name,
            allowed=list(index.df.columns),
        )
    if not isinstance(index, StringIndex):
        index = StringIndex(index.df, name)
    return index.dictionary_of(name)


def codes_of(statistics: TargetStatistics) -> list[TargetCode]:
    return [
        TargetCode(
            statistics.codes(each),
            each.categories[0] if len(each.categories) == 1 else list(each.categories),
            {output: (name, statistics.means[name]) for name, output in each.outputs.items()},
            each.key_columns,
        )
        for each in statistics.encodings
    ]
