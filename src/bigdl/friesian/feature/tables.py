"""Tables: DataFrames of Spark behind methods that return new tables; vocabularies and codes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Self, cast

import pyarrow as pa

from bigdl.common.checks import check_choice
from bigdl.common.errors import UsageError
from bigdl.friesian.executors import spark
from bigdl.friesian.feature.methods import CellMethods
from bigdl.friesian.ops import kinds
from bigdl.friesian.ops.cells import medians_of
from bigdl.friesian.ops.kinds import require_columns
from bigdl.friesian.ops.lookup import Dictionary
from bigdl.friesian.ops.spark import (
    F,
    active_spark,
    as_names,
    check_string,
    col,
    is_column,
    kind_of,
    listed,
    names_of,
    numeric_columns,
    random_seed,
    replace,
    schema_of,
    temporary,
)
from bigdl.friesian.ops.vocabulary import number_column
from bigdl.orca.data.pandas.readers import for_spark

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import Column, DataFrame, Row
    from pyspark.sql.types import StructType

    from bigdl.friesian.ops.operator import Operator

_STATS = ("min", "max", "avg", "sum", "count")
_MODES = ("append", "overwrite", "error", "errorifexists", "ignore")


class Table(CellMethods):
    """A table on Spark.

    Every method that changes something returns a new table of the same class; only
    :meth:`broadcast` changes the table itself.  The columns of a table are also its attributes.

    Parameters
    ----------
    df : pyspark.sql.DataFrame

    Attributes
    ----------
    df : pyspark.sql.DataFrame
        What the ``fit`` of an Estimator takes.
    """

    def __init__(self, df: DataFrame):
        if not hasattr(df, "sparkSession"):
            raise UsageError(f"df should be a DataFrame of Spark, but got {type(df).__name__}")
        self.df = df

    def _clone(self, df: DataFrame) -> Self:
        return type(self)(df)

    def _apply(self, operator: Operator) -> Self:
        return self._clone(spark.run(self.df, operator))

    # -- columns -------------------------------------------------------------------------------

    @property
    def schema(self) -> StructType:
        """The schema of the DataFrame."""
        return self.df.schema

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return self.df.columns

    @property
    def dtypes(self) -> list[tuple[str, str]]:
        """Names and types of the columns."""
        return self.df.dtypes

    def __getattr__(self, name: str) -> Column:
        # Before `df` is set (while copying or unpickling) there is no column to look for.
        if not name.startswith("__") and "df" in self.__dict__ and name in self.df.columns:
            return self.df[f"`{name}`"]
        raise AttributeError(f"{type(self).__name__} has no attribute or column {name!r}")

    def col(self, name: str) -> Column:
        """The column of this name, not bound to this table."""
        return col(name)

    def select(self, *cols: str | Column | list) -> Self:
        """Some of the columns, or expressions.

        Parameters
        ----------
        *cols : str, Column, or a list of them
        """
        return self._clone(self.df.select(*self._chosen(cols)))

    def _chosen(self, cols: Sequence[Any]) -> list[Any]:
        """Columns that a user names: any name that the table has, an expression, or ``*``."""
        columns = listed(cols)
        if not columns:
            raise UsageError("cols should be str or a list of str, but got None.")
        for column in columns:
            if not is_column(column) and not isinstance(column, str):
                raise UsageError(f"cols should be str or a list of str, but got {column!r}.")
        # other names are fields of a struct, or for Spark to say that there are none
        known = self.df.columns
        return [col(each) if isinstance(each, str) and each in known else each for each in columns]

    def merge_cols(self, columns: list[str], target: str) -> Self:
        """Put columns into one column of arrays, and leave them out.

        Parameters
        ----------
        columns : list of str
            If one of them holds strings, all elements become strings.
        target : str
            Name of the new column.
        """

        if not isinstance(columns, list):
            raise UsageError(f"columns must be a list of column names, but got {columns!r}")
        names = as_names(columns)
        require_columns(self.columns, names)
        check_string(target, "target")
        # in ANSI mode Spark would cast strings to the other type, and fail
        has_text = any(kinds.is_text(kind_of(self.df, name)) for name in names)
        cells = (col(name).cast("string") if has_text else col(name) for name in names)
        merged = replace(self.df, {target: F.array(*cells)})
        return self._clone(merged.drop(*(name for name in names if name != target)))

    def append_column(self, name: str, column: Column) -> Self:
        """Add a column.

        Parameters
        ----------
        name : str
            One that exists is replaced in its place.
        column : pyspark.sql.Column
            For instance ``pyspark.sql.functions.lit(0)``.
        """
        check_string(name, "name")
        if not is_column(column):
            raise UsageError(f"column should be a pyspark.sql.Column, but got {column!r}")
        return self._clone(self.df.withColumn(name, column))

    def add(self, columns: str | list[str], value: float = 1) -> Self:
        """Add a constant to columns of numbers; a whole number plus 1.5 becomes double."""

        names = names_of(self.df, columns, kinds.is_number, "numbers")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"value should be a number, got {value!r}")
        return self._clone(replace(self.df, {name: col(name) + F.lit(value) for name in names}))

    # -- rows ----------------------------------------------------------------------------------

    def limit(self, num: int) -> Self:
        """At most so many rows."""
        return self._clone(self.df.limit(num))

    def filter(self, condition: str | Column) -> Self:
        """The rows for which a condition holds, an expression of SQL or a Column."""
        if not isinstance(condition, str) and not is_column(condition):
            raise UsageError(f"condition should be str or Column, but got {condition!r}")
        return self._clone(self.df.filter(condition))

    def distinct(self) -> Self:
        """Every different row once."""
        return self._clone(self.df.distinct())

    def drop_duplicates(
        self,
        subset: str | list[str] | None = None,
        sort_cols: str | list[str] | None = None,
        keep: str = "min",
    ) -> Self:
        """One row of each group of rows that are equal in some columns.

        Parameters
        ----------
        subset : str or list of str, optional
            Default: all columns.
        sort_cols : str or list of str, optional
            The row that comes first by these columns is kept; of equal ones the one that comes
            first in the table.  Without it any row is kept.
        keep : {"min", "max"}
            Ascending or descending order.
        """
        from pyspark.sql import Window

        if keep not in ("min", "max"):
            raise UsageError(f"keep should be either min or max, but got {keep!r}")
        names = self.df.columns if subset is None else as_names(subset, "subset")
        require_columns(self.df.columns, names)
        if sort_cols is None:
            return self._clone(self.df.dropDuplicates(names))
        order = as_names(sort_cols, "sort_cols")
        require_columns(self.df.columns, order)
        place, rank = temporary(self.df, "place"), temporary(self.df, "rank")
        sorting = [col(name).asc() if keep == "min" else col(name).desc() for name in order]
        window = Window.partitionBy(*map(col, names)).orderBy(*sorting, place)
        ranked = self.df.withColumn(place, F.monotonically_increasing_id())
        ranked = ranked.withColumn(rank, F.row_number().over(window))
        return self._clone(ranked.filter(F.col(rank) == 1).drop(place, rank))

    def concat(
        self, tables: Table | list[Table], mode: str = "inner", distinct: bool = False
    ) -> Self:
        """The rows of several tables, by the names of the columns.

        Parameters
        ----------
        tables : Table or list of Table
            Their rows come before those of this table.
        mode : {"inner", "outer"}
            The columns that all tables have, or those of any table, with nulls where one has none.
        distinct : bool, default False
            Every different row once.
        """
        others = tables if isinstance(tables, list | tuple) else [tables]
        if not all(isinstance(each, Table) for each in others):
            raise UsageError(f"tables should be a Table or a list of Tables, but got {tables!r}")
        if mode not in ("inner", "outer"):
            raise UsageError(f"concat mode should be either outer or inner, but got {mode!r}")
        frames = _with_equal_kinds([*(each.df for each in others), self.df])
        if mode == "inner":
            common = [
                name for name in frames[0].columns if all(name in each.columns for each in frames)
            ]
            if not common:
                raise UsageError("The tables have no column in common; use mode='outer'")
            frames = [each.select(*map(col, common)) for each in frames]
        united = reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), frames)
        return self._clone(united.distinct() if distinct else united)

    def subtract(self, other: Table) -> Self:
        """The different rows that another table has not."""
        return self._clone(self.df.subtract(check_table("other", other).df))

    def intersect(self, other: Table) -> Self:
        """The different rows that another table has too."""
        return self._clone(self.df.intersect(check_table("other", other).df))

    def sample(self, fraction: float, replace: bool = False, seed: int | None = None) -> Self:
        """Random rows, about `fraction` of them."""
        return self._clone(self.df.sample(replace, float(fraction), seed))

    def random_split(self, weights: list[float], seed: int | None = None) -> list[Self]:
        """Split the rows by chance.

        Parameters
        ----------
        weights : list of float
            Shares of the parts, which are normalised; the sizes agree approximately.
        seed : int, optional
            The same seed gives the same parts of the same table.

        Returns
        -------
        list of Table
        """
        if not isinstance(weights, list | tuple) or not weights:
            raise UsageError(f"weights should be a list of numbers, but got {weights!r}")
        parts = self.df.randomSplit([float(weight) for weight in weights], seed)
        return [self._clone(part) for part in parts]

    split = random_split

    # -- order and partitions ------------------------------------------------------------------

    def sort(self, *cols: str | Column | list, ascending: bool | Sequence[bool] = True) -> Self:
        """Order the rows.

        Parameters
        ----------
        *cols : str, Column, or a list of them
        ascending : bool or list of bool, default True
            A list has one for each column.
        """
        names = self._chosen(cols)
        flags = ascending if isinstance(ascending, bool) else [bool(each) for each in ascending]
        if not isinstance(flags, bool) and len(flags) != len(names):
            raise UsageError(
                f"ascending should have one value for each of {len(names)} columns, got {flags}"
            )
        return self._clone(self.df.sort(*names, ascending=flags))

    order_by = sort

    def ordinal_shuffle_partition(self, seed: int | None = None) -> Self:
        """The rows of every partition in random order; none moves to another partition.

        Parameters
        ----------
        seed : int, optional
            The same seed gives the same order.
        """
        return self._clone(self.df.sortWithinPartitions(F.rand(random_seed(seed))))

    def repartition(self, num_partitions: int) -> Self:
        """Distribute the rows anew over partitions."""
        return self._clone(self.df.repartition(num_partitions))

    def coalesce(self, num_partitions: int) -> Self:
        """Unite partitions until there are at most so many."""
        return self._clone(self.df.coalesce(num_partitions))

    def get_partition_row_number(self) -> Table:
        """A table of ``partitionId`` and ``count``, of the partitions that have rows."""

        partition = F.spark_partition_id().alias("partitionId")
        return Table(self.df.select(partition).groupBy("partitionId").count())

    # -- where the rows are --------------------------------------------------------------------

    def broadcast(self) -> None:
        """Mark this table as small enough to be sent to all executors when it is joined."""

        self.df = F.broadcast(self.df)

    def cache(self) -> Self:
        """Keep the rows in the memory of the executors once they are computed."""
        self.df.cache()
        return self

    def uncache(self) -> Self:
        """Free the memory that :meth:`cache` took."""
        if self.df.is_cached:
            self.df.unpersist()
        return self

    # -- figures, files and objects of Python --------------------------------------------------

    def compute(self) -> Self:
        """Compute every row now; returns this table."""
        self.df.write.format("noop").mode("overwrite").save()
        return self

    def size(self) -> int:
        """Number of rows, which is counted anew every time."""
        return self.df.count()

    def show(self, n: int = 20, truncate: bool | int = True) -> None:
        """Print the first rows."""
        self.df.show(n, truncate)

    def to_spark_df(self) -> DataFrame:
        """The DataFrame of Spark, which is also the attribute ``df``."""
        return self.df

    def to_pandas(self) -> pd.DataFrame:
        """All rows as a frame of pandas."""
        return self.df.toPandas()

    def collect(self) -> list[Row]:
        """All rows."""
        return self.df.collect()

    def to_list(self, column: str) -> list:
        """All values of one column.

        Parameters
        ----------
        column : str

        Returns
        -------
        list
        """
        if not isinstance(column, str):
            raise UsageError(f"Column should be of str type, but got {type(column).__name__}")
        require_columns(self.columns, [column])
        return self._columns([column])[column]

    def to_dict(self) -> dict[str, list]:
        """All values of all columns, by the name of the column."""
        return self._columns(self.df.columns)

    def _columns(self, names: list[str]) -> dict[str, list]:
        chosen = self.df.select(*map(col, names))
        if all(_is_same_in_arrow(kind_of(self.df, name)) for name in names):
            table = chosen.toArrow()
            return {name: table.column(i).to_pylist() for i, name in enumerate(names)}
        rows = chosen.collect()
        return {name: [row[i] for row in rows] for i, name in enumerate(names)}

    def get_stats(self, columns: str | list[str] | None, aggr: Any) -> dict[str, Any]:
        """Figures of columns, all by one job.

        Parameters
        ----------
        columns : str, list of str or None
            None for all columns of numbers.
        aggr : str, list of str, or dict of str to one of them
            Of min, max, avg, sum and count.  A dict has those of each column; it may have those of
            other columns of the table, which are not used.

        Returns
        -------
        dict of str to value or list
            By column; a list, in the order of `aggr`, if there are several figures.
        """
        names = numeric_columns(self.df) if columns is None else as_names(columns)
        require_columns(self.df.columns, [*names, *(aggr if isinstance(aggr, Mapping) else ())])
        wanted = {name: _stats_of(aggr, name) for name in names}
        for name, stats in wanted.items():
            needs_numbers = {"avg", "sum"} & set(stats)
            if needs_numbers and not kinds.is_number(kind_of(self.df, name)):
                raise UsageError(
                    f"{sorted(needs_numbers)} need numbers, but the column {name} is of type "
                    f"{kind_of(self.df, name)}"
                )
        if not names:
            return {}
        figures = [getattr(F, stat)(col(name)) for name, stats in wanted.items() for stat in stats]
        row = self.df.agg(*(each.alias(str(i)) for i, each in enumerate(figures))).first()
        values = iter(cast("Row", row))
        of_columns = {name: [next(values) for _ in stats] for name, stats in wanted.items()}
        return {name: each[0] if len(each) == 1 else each for name, each in of_columns.items()}

    def min(self, columns: str | list[str] | None = None) -> Table:
        """Smallest values: a table of ``column`` (string) and ``min`` (double)."""
        return self._extremes(columns, "min")

    def max(self, columns: str | list[str] | None = None) -> Table:
        """Largest values: a table of ``column`` (string) and ``max`` (double)."""
        return self._extremes(columns, "max")

    def _extremes(self, columns: str | list[str] | None, stat: str) -> Table:
        if columns is not None:
            names_of(self.df, columns, kinds.is_number, "numbers")
        stats = self.get_stats(columns, stat)
        rows = [(name, None if value is None else float(value)) for name, value in stats.items()]
        return Table(self.df.sparkSession.createDataFrame(rows, f"column string, `{stat}` double"))

    def median(self, columns: str | list[str] | None = None) -> Table:
        """Medians, whose rank is exact to a thousandth of the rows.

        Parameters
        ----------
        columns : str or list of str, optional
            Default: all columns of numbers.

        Returns
        -------
        Table
            Columns ``column`` (string) and ``median`` (double), null for a column of nulls.
        """
        names = None if columns is None else as_names(columns)
        medians = spark.answer(self.df, medians_of(schema_of(self.df), names))
        rows = [(name, each[0] if each else None) for name, each in medians.items()]
        return Table(self.df.sparkSession.createDataFrame(rows, "column string, median double"))

    def write_parquet(self, path: str, mode: str = "overwrite") -> None:
        """Write a folder of Parquet files.

        Parameters
        ----------
        path : str
            Of any file system that Spark knows.
        mode : {"append", "overwrite", "error", "ignore"}
            What to do if it exists.
        """
        check_choice("mode", mode, _MODES)
        self.df.write.parquet(os.fspath(path), mode=mode)

    def write_csv(
        self,
        path: str,
        delimiter: str = ",",
        mode: str = "overwrite",
        header: bool = True,
        num_partitions: int | None = None,
    ) -> None:
        """Write a folder of CSV files.

        Parameters
        ----------
        path : str
        delimiter : str, default ","
        mode : {"append", "overwrite", "error", "ignore"}
        header : bool, default True
        num_partitions : int, optional
            Number of files; default: one for each partition.
        """
        check_choice("mode", mode, _MODES)
        df = self.df if num_partitions is None else self.df.repartition(num_partitions)
        df.write.csv(os.fspath(path), mode=mode, header=header, sep=delimiter)


def _with_equal_kinds(frames: list[DataFrame]) -> list[DataFrame]:
    """A column of strings in one frame becomes one in all: ANSI mode would parse the strings."""
    textual: dict[str, set[bool]] = {}
    for frame in frames:
        for name, field in schema_of(frame).items():
            textual.setdefault(name, set()).add(kinds.is_text(field.kind))
    mixed = [name for name, answers in textual.items() if len(answers) > 1]
    return [
        frame.withColumns(
            {name: col(name).cast("string") for name in mixed if name in frame.columns}
        )
        for frame in frames
    ]


def _stats_of(aggr: Any, column: str) -> list[str]:
    if isinstance(aggr, Mapping):
        if column not in aggr:
            raise UsageError(f"aggr has nothing for the column {column}: {dict(aggr)!r}")
        aggr = aggr[column]
    stats = as_names(aggr, "aggr")
    for stat in stats:
        if stat not in _STATS:
            raise UsageError(f"aggr should be one of {', '.join(_STATS)}, but get {stat!r}")
    return stats


def check_table(name: str, value: Any) -> Table:
    """Return `value`, which must be a table."""
    if not isinstance(value, Table):
        raise UsageError(f"{name} should be a Table, but got {type(value).__name__}")
    return value


def _is_same_in_arrow(kind: str) -> bool:
    """Return True if Arrow gives the same Python objects as the rows of Spark, only faster."""
    kind, _ = kinds.innermost(kind)
    return kinds.is_number(kind) or kinds.is_text(kind) or kind == "boolean"


class StringIndex(Table):
    """The different values of a column with their numbers, which begin with 1.

    Operators that keep both columns return a StringIndex, the others a Table.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        Columns `col_name` and ``id``.
    col_name : str
        If this is ``"id"`` itself, the column of the numbers is ``id_number``.
    """

    def __init__(self, df: DataFrame, col_name: str):
        super().__init__(df)
        check_string(col_name, "col_name")
        for name in (number_column(col_name), col_name):
            if name not in df.columns:
                raise UsageError(
                    f"{name} should be a column of the DataFrame, but its columns are {df.columns}"
                )
        self.col_name = col_name
        self._dictionaries: dict[str, Dictionary] = {}

    def _clone(self, df: DataFrame) -> Self:
        if {number_column(self.col_name), self.col_name} <= set(df.columns):
            return type(self)(df, self.col_name)
        return cast("Self", Table(df))  # what is left is none of this kind

    def rename(self, columns: dict[str, str]) -> StringIndex:
        """Give columns new names; `col_name` follows.

        Parameters
        ----------
        columns : dict of str to str
            From old to new names.
        """
        if not isinstance(columns, dict):
            return Table(self.df).rename(columns)  # which says what it should be
        col_name = columns.get(self.col_name, self.col_name)
        numbers = {number_column(self.col_name): number_column(col_name)}
        return type(self)(Table(self.df).rename({**numbers, **columns}).df, col_name)

    def dictionary_of(self, column: str) -> Dictionary:
        """The numbers by the values of a column, for look-ups; what they collect is kept."""
        dictionary = self._dictionaries.get(column)
        if dictionary is None or dictionary.df is not self.df:
            number = number_column(self.col_name)
            dictionary = self._dictionaries[column] = Dictionary(self.df, column, number)
        return dictionary

    @classmethod
    def read_parquet(cls, paths: str | list[str], col_name: str | None = None) -> StringIndex:
        """Read what :meth:`write_parquet` wrote.

        Parameters
        ----------
        paths : str or list of str
        col_name : str, optional
            Default: the name of the file up to its first dot.

        Returns
        -------
        StringIndex
        """
        first = cast("str", paths[0] if isinstance(paths, list | tuple) and paths else paths)
        if col_name is None:
            col_name = os.path.basename(os.fspath(first).rstrip("/")).split(".")[0]
        return cls(active_spark().read.parquet(*for_spark(paths)), col_name)

    @classmethod
    def from_dict(cls, indices: dict[str, int], col_name: str) -> StringIndex:
        """Make a vocabulary.

        Parameters
        ----------
        indices : dict of str to int
        col_name : str

        Returns
        -------
        StringIndex
        """
        if not isinstance(indices, dict):
            raise UsageError(f"indices should be dict, but get {type(indices).__name__}")
        check_string(col_name, "col_name")
        if not all(isinstance(each, str) for each in indices):
            raise UsageError(f"The keys of indices should be str, but got {list(indices)[:5]!r}")
        try:
            ids = pa.array(indices.values(), pa.int32())
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise UsageError(f"The values of indices should be 32-bit int: {error}") from error
        number = number_column(col_name)
        table = pa.table({col_name: pa.array(indices, pa.string()), number: ids})
        schema = f"`{col_name}` string, {number} int"
        return cls(active_spark().createDataFrame(table, schema), col_name)

    def to_dict(self) -> dict[str, int]:  # type: ignore[override]  # as in BigDL 2.x
        """The number of each value."""
        number = number_column(self.col_name)
        columns = self._columns([self.col_name, number])
        return dict(zip(columns[self.col_name], columns[number], strict=True))

    def write_parquet(self, path: str, mode: str = "overwrite") -> None:
        """Write the folder ``<path>/<col_name>.parquet``.

        Parameters
        ----------
        path : str
        mode : {"append", "overwrite", "error", "ignore"}
        """
        super().write_parquet(f"{os.fspath(path).rstrip('/')}/{self.col_name}.parquet", mode)


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
        out_target_mean: Mapping[str, tuple[str, float | None]],
        key_cols: str | list[str] | None = None,
    ):
        super().__init__(df)
        categories = as_names(cat_col, "cat_col")
        self.key_cols = categories if key_cols is None else as_names(key_cols, "key_cols")
        if len(self.key_cols) != len(categories):
            raise UsageError(
                f"key_cols should be as many columns as cat_col, {categories}, got {key_cols!r}"
            )
        require_columns(df.columns, self.key_cols)
        if not isinstance(out_target_mean, Mapping):
            raise UsageError(
                "out_target_mean should be a dict from a column to a target and its mean, but got "
                f"{out_target_mean!r}"
            )
        require_columns(df.columns, out_target_mean)
        self.cat_col = list(cat_col) if isinstance(cat_col, tuple) else cat_col
        self.out_target_mean = dict(out_target_mean)

    def _clone(self, df: DataFrame) -> Self:
        if {*self.key_cols, *self.out_target_mean} <= set(df.columns):
            return type(self)(df, self.cat_col, self.out_target_mean, self.key_cols)
        return cast("Self", Table(df))  # what is left is none of this kind

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
