"""Tables: DataFrames of Spark behind methods that return new tables; vocabularies and codes.

A :class:`FeatureTable` has everything that a user does to prepare data for recommenders.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial, reduce
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import pyarrow as pa

from bigdl.common.checks import check_choice, check_integer, check_number
from bigdl.common.errors import MissingExtraError, UsageError
from bigdl.common.storage import writing
from bigdl.friesian.executors.spark import answer, learned, run
from bigdl.friesian.feature.methods import CellMethods, FeatureMethods
from bigdl.friesian.ops import kinds, spark, vocabulary
from bigdl.friesian.ops.batches import MinMax
from bigdl.friesian.ops.cells import Cast, medians_of
from bigdl.friesian.ops.kinds import require_columns, require_kind
from bigdl.friesian.ops.numbers import CutBins, MinMaxScale
from bigdl.friesian.ops.schema import Feature, FeatureSchema
from bigdl.friesian.ops.spark import F, as_names, check_string, col, kind_of, schema_of
from bigdl.friesian.ops.targets import CountEncode, TargetEncode, TargetStatistics, without_twins
from bigdl.friesian.ops.vocabulary import Dictionary, number_column
from bigdl.orca.cluster.spark_calls import check_frame, silent_when_closed
from bigdl.orca.cluster.versions import frame_of_arrow, shuffle, to_arrow, try_cast
from bigdl.orca.data.pandas.readers import paths_for_spark
from bigdl.orca.data.tables import is_lake, open_table

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import Column, DataFrame, Row
    from pyspark.sql.types import DataType, StructType

    from bigdl.friesian.ops.operator import Operator

__all__ = ["FeatureTable", "StringIndex", "Table", "TargetCode"]

_STATS = ("min", "max", "avg", "sum", "count")
_MODES = ("append", "overwrite", "error", "errorifexists", "ignore")
_ARITHMETIC: tuple[str, ...] = ("sum", "avg", "mean", "sum_distinct", "stddev", "stddev_pop")
_ARITHMETIC += ("variance", "var_pop", "skewness", "kurtosis")
_OTHERS = ("max", "min", "count", "collect_list", "collect_set", "first", "last")
_AGGREGATES = {
    **{name: name for name in (*_ARITHMETIC, *_OTHERS, "approx_count_distinct")},
    "sumDistinct": "sum_distinct",
    "approxCountDistinct": "approx_count_distinct",
}
# what Spark calls the results of functions, where it is not their own name
_SHOWN = {"mean": "avg(", "sum_distinct": "sum(DISTINCT "}


class Table(CellMethods):
    """A table on Spark.

    Every method that changes something returns a new table of the same class; only
    :meth:`broadcast` changes the table itself.  The columns of a table are also its attributes.

    Parameters
    ----------
    df : pyspark.sql.DataFrame

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> table = FeatureTable.from_pandas(pd.DataFrame({"price": [10, 30], "age": [31, 40]}))
    >>> table.max("price").to_dict()  # a Table
    {'column': ['price'], 'max': [30.0]}
    >>> table.filter("price > 20").select("age").to_list("age")
    [40]
    """

    def __init__(self, df: DataFrame):
        if not hasattr(df, "sparkSession"):
            raise UsageError(
                f"df should be a DataFrame of Spark, but got {type(df).__name__}",
                code="argument-type",
                argument="df",
            )
        self._df = df

    @property
    def df(self) -> DataFrame:
        """The DataFrame, which the ``fit`` of an Estimator takes.

        Raises
        ------
        UsageError
            If its Spark context has been stopped.
        """
        check_frame(self._df)
        return self._df

    @df.setter
    def df(self, df: DataFrame) -> None:
        self._df = df

    def _clone(self, df: DataFrame) -> Self:
        return type(self)(df)

    def _apply(self, operator: Operator) -> Self:
        return self._clone(run(self.df, operator))

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
        if not name.startswith("__") and "_df" in self.__dict__ and name in self.df.columns:
            return self.df[spark.quoted(name)]
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
        columns = spark.listed(cols)
        if not columns:
            raise UsageError(
                "cols should be str or a list of str, but got None.",
                code="argument-missing",
                argument="cols",
            )
        for column in columns:
            if not spark.is_column(column) and not isinstance(column, str):
                raise UsageError(
                    f"cols should be str or a list of str, but got {column!r}.",
                    code="argument-type",
                    argument="cols",
                )
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
            raise UsageError(
                f"columns must be a list of column names, but got {columns!r}",
                code="argument-type",
                argument="columns",
            )
        names = as_names(columns)
        require_columns(self.columns, names)
        check_string(target, "target")
        # in ANSI mode Spark would cast strings to the other type, and fail
        has_text = any(kinds.is_text(kind_of(self.df, name)) for name in names)
        cells = (col(name).cast("string") if has_text else col(name) for name in names)
        merged = spark.replace(self.df, {target: F.array(*cells)})
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
        if not spark.is_column(column):
            raise UsageError(
                f"column should be a pyspark.sql.Column, but got {column!r}",
                code="argument-type",
                argument="column",
            )
        return self._clone(self.df.withColumn(name, column))

    def add(self, columns: str | list[str], value: float = 1) -> Self:
        """Add a constant to columns of numbers; a whole number plus 1.5 becomes double."""
        names = spark.names_of(self.df, columns, kinds.is_number, "numbers")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(
                f"value should be a number, got {value!r}", code="argument-type", argument="value"
            )
        return self._clone(
            spark.replace(self.df, {name: col(name) + F.lit(value) for name in names})
        )

    # -- rows ----------------------------------------------------------------------------------

    def limit(self, num: int) -> Self:
        """At most so many rows."""
        return self._clone(self.df.limit(num))

    def filter(self, condition: str | Column) -> Self:
        """The rows for which a condition holds, an expression of SQL or a Column."""
        if not isinstance(condition, str) and not spark.is_column(condition):
            raise UsageError(
                f"condition should be str or Column, but got {condition!r}",
                code="argument-type",
                argument="condition",
            )
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

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"user": [1, 1], "time": [3, 5]}))
        >>> table.drop_duplicates("user", sort_cols="time", keep="max").to_dict()
        {'user': [1], 'time': [5]}
        """
        from pyspark.sql import Window

        if keep not in ("min", "max"):
            raise UsageError(
                f"keep should be either min or max, but got {keep!r}",
                code="argument-value",
                argument="keep",
                allowed=["min", "max"],
            )
        names = self.df.columns if subset is None else as_names(subset, "subset")
        require_columns(self.df.columns, names)
        if sort_cols is None:
            return self._clone(self.df.dropDuplicates(names))
        order = as_names(sort_cols, "sort_cols")
        require_columns(self.df.columns, order)
        place, rank = spark.temporary(self.df, "place"), spark.temporary(self.df, "rank")
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

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> old = FeatureTable.from_pandas(pd.DataFrame({"user": [1], "age": [31]}))
        >>> new = FeatureTable.from_pandas(pd.DataFrame({"user": [2]}))
        >>> new.concat(old, mode="outer").sort("user").to_list("age")
        [31, None]
        """
        others = spark.listed([tables])
        if not all(isinstance(each, Table) for each in others):
            raise UsageError(
                f"tables should be a Table or a list of Tables, but got {tables!r}",
                code="argument-type",
                argument="tables",
            )
        if mode not in ("inner", "outer"):
            raise UsageError(
                f"concat mode should be either outer or inner, but got {mode!r}",
                code="argument-value",
                argument="mode",
                allowed=["outer", "inner"],
            )
        frames = _with_equal_kinds([*(each.df for each in others), self.df])
        if mode == "inner":
            common = [
                name for name in frames[0].columns if all(name in each.columns for each in frames)
            ]
            if not common:
                raise UsageError(
                    "The tables have no column in common; use mode='outer'", code="data-schema"
                )
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
            raise UsageError(
                f"weights should be a list of numbers, but got {weights!r}",
                code="argument-type",
                argument="weights",
            )
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
                f"ascending should have one value for each of {len(names)} columns, got {flags}",
                code="argument-value",
                argument="ascending",
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
        return self._clone(self.df.sortWithinPartitions(F.rand(spark.random_seed(seed))))

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
        self._df = F.broadcast(self.df)

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

    @spark.action
    def compute(self) -> Self:
        """Compute every row now; returns this table."""
        self.df.write.format("noop").mode("overwrite").save()
        return self

    @spark.action
    def size(self) -> int:
        """Number of rows, which is counted anew every time."""
        return self.df.count()

    @spark.action
    def show(self, n: int = 20, truncate: bool | int = True) -> None:
        """Print the first rows."""
        self.df.show(n, truncate)

    def to_spark_df(self) -> DataFrame:
        """The DataFrame of Spark, which is also the attribute ``df``."""
        return self.df

    @spark.action
    def to_pandas(self) -> pd.DataFrame:
        """All rows as a frame of pandas."""
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "toPandas attempted"
            )  # and the error in Java's frames
            return self.df.toPandas()

    @spark.action
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
        require_columns(self.columns, [check_string(column, "column")])
        return self._columns([column])[column]

    def to_dict(self) -> dict[str, list]:
        """All values of all columns, by the name of the column."""
        return self._columns(self.df.columns)

    @spark.action
    def _columns(self, names: list[str]) -> dict[str, list]:
        chosen = self.df.select(*map(col, names))
        if all(_is_same_in_arrow(kind_of(self.df, name)) for name in names):
            table = to_arrow(chosen)
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

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> sales = pd.DataFrame({"price": [10, 12, 8], "age": [31, 40, 22]})
        >>> table = FeatureTable.from_pandas(sales)
        >>> table.get_stats(None, {"price": ["min", "max"], "age": "avg"})
        {'price': [8, 12], 'age': 31.0}
        """
        names = spark.numeric_columns(self.df) if columns is None else as_names(columns)
        require_columns(self.df.columns, [*names, *(aggr if isinstance(aggr, Mapping) else ())])
        wanted = {name: _stats_of(aggr, name) for name in names}
        for name, stats in wanted.items():
            needs_numbers = {"avg", "sum"} & set(stats)
            if needs_numbers and not kinds.is_number(kind_of(self.df, name)):
                raise UsageError(
                    f"{sorted(needs_numbers)} need numbers, but the column {name} is of type "
                    f"{kind_of(self.df, name)}",
                    code="data-dtype",
                    column=name,
                )
        figures = [getattr(F, stat)(col(name)) for name, stats in wanted.items() for stat in stats]
        values = iter(spark.figures_of(self.df, figures))
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
            spark.names_of(self.df, columns, kinds.is_number, "numbers")
        stats = self.get_stats(columns, stat)
        rows = [(name, None if value is None else float(value)) for name, value in stats.items()]
        return Table(self.df.sparkSession.createDataFrame(rows, f"column string, `{stat}` double"))

    def median(self, columns: str | list[str] | None = None) -> Self:
        """Medians, whose rank is exact to a thousandth of the rows.

        Parameters
        ----------
        columns : str or list of str, optional
            Default: all columns of numbers.

        Returns
        -------
        Self
            Columns ``column`` (string) and ``median`` (double), null for a column of nulls.
        """
        names = None if columns is None else as_names(columns)
        medians = answer(self.df, medians_of(schema_of(self.df), names))
        rows = [(name, each[0] if each else None) for name, each in medians.items()]
        schema = "column string, median double"
        return self._clone(self.df.sparkSession.createDataFrame(rows, schema))

    @spark.action
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
        with writing("The table", path):
            self.df.write.parquet(os.fspath(path), mode=mode)

    @spark.action
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
        with writing("The table", path):
            df.write.csv(os.fspath(path), mode=mode, header=header, sep=delimiter)


def _with_equal_kinds(frames: list[DataFrame]) -> list[DataFrame]:
    """A column of strings in one frame becomes one in all: ANSI mode would parse the strings."""
    fields = [each for frame in frames for each in schema_of(frame).items()]
    texts = {name for name, field in fields if kinds.is_text(field.kind)}
    return [
        frame.withColumns({name: col(name).cast("string") for name in texts & {*frame.columns}})
        for frame in frames
    ]


def _stats_of(aggr: Any, column: str) -> list[str]:
    if isinstance(aggr, Mapping):
        if column not in aggr:
            raise UsageError(
                f"aggr has nothing for the column {column}: {dict(aggr)!r}",
                code="argument-value",
                argument="aggr",
                column=column,
            )
        aggr = aggr[column]
    stats = as_names(aggr, "aggr")
    for stat in stats:
        if stat not in _STATS:
            raise UsageError(
                f"aggr should be one of {', '.join(_STATS)}, but get {stat!r}",
                code="argument-value",
                argument="aggr",
                allowed=list(_STATS),
            )
    return stats


def check_table(name: str, value: Any) -> Table:
    """Return `value`, which must be a table."""
    if not isinstance(value, Table):
        raise UsageError(
            f"{name} should be a Table, but got {type(value).__name__}",
            code="argument-type",
            argument=name,
        )
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
        return cls(spark.active_spark().read.parquet(*paths_for_spark(paths)), col_name)

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
        return cast("Self", Table(df))  # what is left is none of this kind

    def rename(self, columns: dict[str, str]) -> TargetCode:
        """Give columns new names; `cat_col` and `out_target_mean` follow.

        Parameters
        ----------
        columns : dict of str to str
            From old to new names.
        """
        renamed = Table(self.df).rename(columns)
        names = [columns.get(name, name) for name in as_names(self.cat_col)]
        cat_col = names[0] if isinstance(self.cat_col, str) else names
        means = {columns.get(name, name): each for name, each in self.out_target_mean.items()}
        keys = [columns.get(name, name) for name in self.key_cols]
        return type(self)(renamed.df, cat_col, means, keys)


class FeatureTable(FeatureMethods, Table):
    """A table of features on Spark.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> ratings = pd.DataFrame({"city": ["Oslo", "Rome", "Oslo"], "price": [10.0, None, 20.0]})
    >>> table = FeatureTable.from_pandas(ratings).fillna(0.0, "price")
    >>> table, index = table.category_encode("city")
    >>> table, extremes = table.min_max_scale("price")
    >>> table.to_dict(), extremes
    ({'city': [1, 2, 1], 'price': [0.5, 0.0, 1.0]}, {'price': (0.0, 20.0)})
    """

    # -- readers -------------------------------------------------------------------------------

    @classmethod
    def read_parquet(cls, paths: str | list[str]) -> FeatureTable:
        """Read Parquet files, or a Delta Lake or Iceberg table.

        Parameters
        ----------
        paths : str or list of str
            Files, folders or patterns, of any file system that Spark knows; or the path of one
            table, such as ``clicks@v5``, as the Estimators take it.
        """
        if is_lake(paths):
            from bigdl.orca.data.tables.frames import spark_frame

            return cls(spark_frame(open_table(paths), spark.active_spark()))
        return cls(spark.active_spark().read.parquet(*paths_for_spark(paths)))

    @classmethod
    def read_json(cls, paths: str | list[str], cols: str | list[str] | None = None) -> FeatureTable:
        """Read files with an object of JSON in every line.

        Parameters
        ----------
        paths : str or list of str
        cols : str or list of str, optional
            Default: all columns.
        """
        df = spark.active_spark().read.json(paths_for_spark(paths))
        return cls(df if cols is None else df.select(*as_names(cols, "cols")))

    @classmethod
    def read_csv(
        cls,
        paths: str | list[str],
        delimiter: str = ",",
        header: bool = False,
        names: str | list[str] | None = None,
        dtype: str | list[str] | Mapping[str, str] | None = None,
    ) -> FeatureTable:
        """Read CSV files.

        Parameters
        ----------
        paths : str or list of str
        delimiter : str, default ","
        header : bool, default False
            Whether the first line of a file has the names of the columns.
        names : str or list of str, optional
            Names for all columns.
        dtype : str, list of str, or dict of str to str, optional
            The type of all columns, of each of them, or of some; as in :meth:`cast`.  Other types
            are inferred, by another pass over the data.
        """
        reader = spark.active_spark().read.option("sep", delimiter).option("header", header)
        df = reader.csv(paths_for_spark(paths))  # all strings, after a look at the first line
        if names is not None:
            names = as_names(names, "names")
            spark.check_lengths("names", names, "the columns", df.columns)
        some = dtype is None or isinstance(dtype, Mapping)
        if some and not set(names or df.columns) <= set(dtype or ()):
            # a pass over the data finds the other types
            df = reader.csv(paths_for_spark(paths), inferSchema=True)
        df = df if names is None else df.toDF(*names)
        return cls(df if dtype is None else _with_types(df, dtype))

    @classmethod
    def read_text(cls, paths: str | list[str], col_name: str = "value") -> FeatureTable:
        """Read files of lines.

        Parameters
        ----------
        paths : str or list of str
        col_name : str, default "value"
            The name of the one column.
        """
        check_string(col_name, "col_name")
        return cls(
            spark.active_spark()
            .read.text(paths_for_spark(paths))
            .withColumnRenamed("value", col_name)
        )

    @staticmethod
    def from_pandas(pandas_df: pd.DataFrame) -> FeatureTable:
        """Make a table of a frame of pandas, without its index; missing values become null."""
        import pandas as pd

        if not isinstance(pandas_df, pd.DataFrame):
            raise UsageError(
                f"pandas_df should be a DataFrame of pandas, but got {type(pandas_df).__name__}",
                code="argument-type",
                argument="pandas_df",
            )
        return FeatureTable(spark.active_spark().createDataFrame(pandas_df))

    # -- scaling -------------------------------------------------------------------------------

    def min_max_scale(
        self, columns: str | list[str], min: float = 0.0, max: float = 1.0
    ) -> tuple[Self, dict[str, tuple]]:
        """Scale numbers to a range.

        Parameters
        ----------
        columns : str or list of str
            Columns of numbers, which become float, of arrays, which become array<double> and are
            scaled by position, or of vectors.
        min, max : float, default 0.0 and 1.0
            The range.  A column whose values are all equal gets its middle.

        Returns
        -------
        table : FeatureTable
            Nulls and NaN stay.
        extremes : dict of str to (min, max)
            The extremes before, without the range, for :meth:`transform_min_max_scale`; lists for
            arrays.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> train = FeatureTable.from_pandas(pd.DataFrame({"price": [10.0, 15.0, 20.0]}))
        >>> train, extremes = train.min_max_scale("price")
        >>> train.to_list("price"), extremes
        ([0.0, 0.5, 1.0], {'price': (10.0, 20.0)})
        >>> test = FeatureTable.from_pandas(pd.DataFrame({"price": [12.5, 30.0]}))
        >>> test.transform_min_max_scale("price", extremes, clip=True).to_list("price")
        [0.25, 1.0]
        """
        operator = MinMaxScale(as_names(columns), min, max, False)
        extremes = operator.extremes_of_arrays(self.df)
        numbers = {name: MinMax((name,)) for name in operator.columns if name not in extremes}
        for name, (low, high) in answer(self.df, numbers).items():
            extremes[name] = (None, None) if low is None else (float(low), float(high))
        extremes = {name: extremes[name] for name in operator.columns}
        return self._scaled(operator, extremes), extremes

    def transform_min_max_scale(
        self,
        columns: str | list[str],
        min_max_dict: Mapping[str, tuple],
        min: float = 0.0,
        max: float = 1.0,
        clip: bool = False,
    ) -> Self:
        """Scale numbers by the extremes of other data.

        Parameters
        ----------
        columns : str or list of str
        min_max_dict : dict of str to (min, max)
            What :meth:`min_max_scale` returned.
        min, max : float, default 0.0 and 1.0
            The range: give that of :meth:`min_max_scale` again, since `min_max_dict` has it not.
        clip : bool, default False
            Bring numbers outside of the extremes to the ends of the range.
        """
        names = as_names(columns)
        missing = [name for name in names if name not in min_max_dict]
        if missing:
            raise UsageError(
                f"min_max_dict has nothing for {missing}, got {dict(min_max_dict)!r}",
                code="argument-value",
                argument="min_max_dict",
                columns=missing,
            )
        extremes = {name: min_max_dict[name] for name in names}
        return self._scaled(MinMaxScale(names, min, max, clip), extremes)

    def _scaled(self, operator: MinMaxScale, extremes: Mapping[str, tuple]) -> Self:
        state = {"extremes": extremes}
        return self._clone(operator.catalyst(self.df, schema_of(self.df), state))

    # -- joins and groups ----------------------------------------------------------------------

    def join(
        self,
        table: Table,
        on: str | list[str] | None = None,
        how: str = "inner",
        lsuffix: str | None = None,
        rsuffix: str | None = None,
    ) -> Self:
        """Join with another table.

        Parameters
        ----------
        table : Table
        on : str or list of str, optional
            Columns of both tables; needed unless `how` is ``"cross"``.
        how : str, default "inner"
            Any type of join that Spark knows.
        lsuffix, rsuffix : str, optional
            For the names that both tables have beside `on`.
        """
        keys = None if on is None or on == [] else as_names(on, "on")
        if keys is None and how != "cross":
            raise UsageError(
                f"on should be str or a list of str for a join of type {how!r}; got None",
                code="argument-missing",
                argument="on",
            )
        left, right = self.df, check_table("table", table).df
        require_columns(left.columns, keys or ())
        require_columns(right.columns, keys or ())
        shared = (set(left.columns) & set(right.columns)).difference(keys or ())
        if lsuffix is not None:
            left = spark.renamed(left, {name: name + lsuffix for name in shared})
        if rsuffix is not None:
            right = spark.renamed(right, {name: name + rsuffix for name in shared})
        return self._clone(left.crossJoin(right) if keys is None else left.join(right, keys, how))

    def join_as_of(
        self, table: Table, on: str | list[str], time_col: str = "time", ttl: float | None = None
    ) -> Self:
        """Add to each row what another table knew at its time, and nothing of the future.

        Parameters
        ----------
        table : Table
            Has the columns `on` and `time_col` too; of equal ones any row is taken.
        on : str or list of str
            Whose facts they are.  A null has none.
        time_col : str, default "time"
            Numbers, dates or timestamps; times as text have to be cast.
        ttl : float, optional
            How old facts may be: in the unit of the numbers, or in seconds.

        Returns
        -------
        FeatureTable
            With the other columns of `table`: of its latest row that is not later than the row, or
            null.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> sales = FeatureTable.from_pandas(pd.DataFrame({"item": [7, 7], "time": [5, 9]}))
        >>> prices = FeatureTable.from_pandas(
        ...     pd.DataFrame({"item": [7, 7], "time": [1, 8], "price": [10.0, 12.0]})
        ... )
        >>> sales.join_as_of(prices, on="item").sort("time").to_list("price")
        [10.0, 12.0]
        """
        check_table("table", table)
        from pyspark.sql import Window

        keys = as_names(on, "on")
        for frame in (self.df, table.df):
            require_columns(frame.columns, keys)
            spark.require_times(frame, time_col)
        kind, other_kind = kind_of(self.df, time_col), kind_of(table.df, time_col)
        if kinds.is_number(kind) != kinds.is_number(other_kind):
            raise UsageError(
                f"{time_col} should hold numbers in both tables or in none, but its types are "
                f"{kind} and {other_kind}",
                code="data-dtype",
                column=time_col,
            )
        added = [name for name in table.df.columns if name not in (*keys, time_col)]
        shared = [name for name in added if name in self.df.columns]
        if shared:
            raise UsageError(
                f"Both tables have the columns {shared}; rename those of one of them",
                code="column-duplicate",
                columns=shared,
            )
        if not added:
            raise UsageError(
                f"The other table has no columns beside {[*keys, time_col]}", code="data-schema"
            )
        if ttl is not None:
            check_number("ttl", ttl, 0)
        known = spark.all_of(col(name).isNotNull() for name in (*keys, time_col))
        names = [f"key_{i}" for i in range(len(keys))]
        shown = [col(key).alias(name) for key, name in zip(keys, names, strict=True)]
        row, fact = (F.struct(*map(col, frame.columns)) for frame in (self.df, table.df))
        shown.append(col(time_col).alias("time"))
        rows = self.df.select(*shown, F.lit(True).alias("asks"), row.alias("row"))
        facts = table.df.filter(known)
        facts = facts.select(*shown, F.lit(False).alias("asks"), fact.alias("fact"))
        # at the same time the facts come first: what is known at that time counts
        window = Window.partitionBy(*names).orderBy("time", "asks")
        window = window.rowsBetween(Window.unboundedPreceding, Window.currentRow)
        both = rows.unionByName(facts, allowMissingColumns=True)
        both = both.withColumn("fact", F.last("fact", ignorenulls=True).over(window)).filter("asks")
        fact = F.col("fact")
        if ttl is not None:
            age = spark.as_number(F.col("time"), kind) - spark.as_number(fact[time_col], kind)
            fact = F.when(age <= F.lit(ttl), fact)
        ours = (F.col("row").getField(name).alias(name) for name in self.df.columns)
        return self._clone(both.select(*ours, *(fact.getField(name).alias(name) for name in added)))

    def group_by(
        self,
        columns: str | Sequence[str] = (),
        agg: str | list[str] | Mapping[str, Any] = "count",
        join: bool = False,
    ) -> Self:
        """Aggregate groups of rows.

        Parameters
        ----------
        columns : str or list of str
            What makes a group; by default the whole table is one.
        agg : str, list of str, or dict of str to one of them, default "count"
            Of max, min, count, sum, avg, mean, sumDistinct, stddev, stddev_pop, variance, var_pop,
            skewness, kurtosis, collect_list, collect_set, approx_count_distinct, first, last: for
            all other columns, or for those in the dict.
        join : bool, default False
            Add the figures to the rows of the table; the groups of nulls have theirs too.

        Returns
        -------
        FeatureTable
            The figures have Spark's names, such as ``sum(price)``, also those of texts that hold
            numbers.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"user": [1, 2, 1], "price": [5, 3, 4]}))
        >>> table.group_by("user", agg={"price": ["sum", "max"]}).sort("user").to_dict()
        {'user': [1, 2], 'sum(price)': [9, 3], 'max(price)': [5, 3]}
        """
        keys = as_names(columns) if columns else []
        require_columns(self.df.columns, keys)
        if join and not keys:
            raise UsageError(
                "columns should not be empty if join is True: there is nothing to join on",
                code="argument-missing",
                argument="columns",
            )
        figures = [
            _aggregate(self.df, name, each) for name, each in _wanted_aggregates(self.df, keys, agg)
        ]
        if not figures:
            raise UsageError(
                f"There is nothing to aggregate: all columns of {self.df.columns} are keys",
                code="argument-value",
                argument="columns",
            )
        grouped = self.df.groupBy(*map(col, keys)).agg(*figures)
        return self._clone(spark.join_groups(self.df, grouped, keys, "left") if join else grouped)

    # -- sizes ---------------------------------------------------------------------------------

    def feature_schema(self, columns: str | list[str] | None = None) -> FeatureSchema:
        """Return types, sizes and lengths of the columns, by one job.

        Parameters
        ----------
        columns : str or list of str, optional
            Default: all columns.

        Returns
        -------
        FeatureSchema
            Types, largest values and lengths of arrays, from which
            :mod:`bigdl.friesian.models` size their layers.  Nulls do not count.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"user": [0, 6], "age": [31.5, 40.0]}))
        >>> schema = table.feature_schema()
        >>> schema["user"].cardinality, schema["age"].dtype
        (7, 'double')
        """
        names = self.columns if columns is None else as_names(columns)
        require_columns(self.columns, names)
        of_columns = {name: kind_of(self.df, name) for name in names}
        figures = [each for name, kind in of_columns.items() for each in _figures(col(name), kind)]
        values = iter(spark.figures_of(self.df, figures))
        return FeatureSchema({name: _feature(kind, values) for name, kind in of_columns.items()})

    # -- functions -----------------------------------------------------------------------------

    def apply(
        self,
        in_col: str | list[str],
        out_col: str,
        func: Callable,
        dtype: str | DataType = "string",
        vectorized: bool = False,
    ) -> Self:
        """Add a column of what a function of Python returns.

        Parameters
        ----------
        in_col : str or list of str
        out_col : str
            One that exists is replaced in its place.
        func : callable
            Takes a value, or for a list of columns the list of their values, which keep their own
            types.
        dtype : str or DataType of Spark, default "string"
            The type of the result, such as ``"int"`` or ``"array<float>"``.
        vectorized : bool, default False
            `func` takes a Series of pandas, or a list of them, and returns one: many times faster.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"a": [1, 2], "b": [10, 20]}))
        >>> table.apply(["a", "b"], "total", sum, "long").to_list("total")
        [11, 22]
        """
        check_string(out_col, "out_col")
        if not callable(func):
            raise UsageError(
                f"func should be a function, got {func!r}", code="argument-type", argument="func"
            )
        names = as_names(in_col, "in_col")
        require_columns(self.df.columns, names)
        is_single = isinstance(in_col, str)

        def on_values(*values):
            return func(values[0] if is_single else list(values))

        def on_series(*series):
            import pandas as pd

            results = on_values(*series)
            return results if isinstance(results, pd.Series) else pd.Series(results)

        udf: Any = F.pandas_udf if vectorized else F.udf
        function = udf(silent_when_closed(on_series if vectorized else on_values), dtype)
        return self._clone(spark.replace(self.df, {out_col: function(*map(col, names))}))

    def string_embed(
        self,
        columns: str | list[str],
        bert_model: str | Callable = "distilbert-base-uncased",
        reduce_dim: int | None = None,
        replace: bool = True,
    ) -> Self:
        """Turn texts into arrays of numbers.

        Parameters
        ----------
        columns : str or list of str
        bert_model : str or callable, default "distilbert-base-uncased"
            A model of sentence-transformers, which every Python worker loads once, or a function
            from a list of texts to a matrix with a row for each.
        reduce_dim : int, optional
            Keep only so many principal components.
        replace : bool, default True
            Put the arrays in the place of the texts, otherwise into ``<column>_embed``.

        Returns
        -------
        FeatureTable
            With columns of array<double>; null for a null.

        Examples
        --------
        >>> import numpy as np
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> def embed(texts):  # or the name of a model of sentence-transformers
        ...     return np.array([[len(text), text.count("a")] for text in texts], dtype=float)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"title": ["banana", "fig"]}))
        >>> table.string_embed("title", embed).to_list("title")
        [[6.0, 3.0], [3.0, 0.0]]
        """
        names = spark.names_of(self.df, columns, kinds.is_text, "strings")
        if not callable(bert_model):
            check_string(bert_model, "bert_model")
            if importlib.util.find_spec("sentence_transformers") is None:
                raise MissingExtraError(
                    "sentence_transformers is not installed; run: pip install "
                    "sentence-transformers, or pass a function from a list of texts to a matrix "
                    "as bert_model"
                )
            bert_model = partial(_by_sentence_transformer, bert_model)
        outputs = {name: name if replace else f"{name}_embed" for name in names}
        function = _embedding_function(bert_model)
        vectors = {output: function(col(name)) for name, output in outputs.items()}
        df = spark.replace(self.df, vectors)
        if reduce_dim is not None:
            for output in outputs.values():
                df = _reduced(df, output, reduce_dim)
        return self._clone(df)

    # -- vocabularies --------------------------------------------------------------------------

    def gen_string_idx(
        self,
        columns: str | Mapping | list,
        freq_limit: int | Mapping[str, int] | None = None,
        order_by_freq: bool = False,
        do_split: bool = False,
        sep: str = ",",
    ) -> StringIndex | list[StringIndex]:
        """Learn the vocabularies of columns, all by one pass over the data.

        Numbers begin with 1, so that 0 is free for unknown values, and depend on nothing but the
        data: they follow the order of the values, or of the counts.  Nulls and NaN have none.

        Parameters
        ----------
        columns : str, dict or list of them
            A dict ``{"src_cols": [...], "col_name": ...}`` means one vocabulary of several columns,
            whose name is by default that of the first with ``_union``.
        freq_limit : int or dict of str to int, optional
            Values that occur less often are left out; a dict has the limits of some vocabularies.
        order_by_freq : bool, default False
            Number the values by falling count, equal counts by value.
        do_split : bool, default False
            Cells are text of several values. Arrays of values are numbered without it.
        sep : str, default ","
            Regular expression between them.

        Returns
        -------
        StringIndex or list of StringIndex
            A list if `columns` is one.  The numbers are in the column ``id``, or ``id_number`` if
            the values are in one called ``id``.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> cities = pd.DataFrame({"city": ["Rome", "Oslo", "Rome", "Bern"]})
        >>> table = FeatureTable.from_pandas(cities)
        >>> index = table.gen_string_idx("city", order_by_freq=True)
        >>> sorted(index.to_dict().items(), key=lambda item: item[1])
        [('Rome', 1), ('Bern', 2), ('Oslo', 3)]
        >>> table.encode_string("city", index).to_list("city")
        [1, 3, 1, 2]
        """
        sources = vocabulary.sources_of(columns, freq_limit)
        separator = check_string(sep, "sep") if do_split else None
        learned = vocabulary.learn(self.df, sources, order_by_freq, separator)
        indices = [
            StringIndex(each, source.name) for each, source in zip(learned, sources, strict=True)
        ]
        return indices if isinstance(columns, list | tuple) else indices[0]

    def encode_string(
        self,
        columns: str | list[str],
        indices: StringIndex | Mapping[str, int] | list,
        broadcast: bool = True,
        do_split: bool = False,
        sep: str = ",",
        sort_for_array: bool = False,
        keep_most_frequent: bool = False,
        oov_buckets: int = 0,
    ) -> Self:
        """Replace the values of columns by their numbers, in the place of the columns.

        Parameters
        ----------
        columns : str or list of str
        indices : StringIndex, dict of str to int, or list of them
            One for each column.  Of equal values in an index the smallest number counts.
        broadcast : bool, default True
            Send the vocabulary to all executors, unless it has more than a million values.  Then,
            and without it, Spark chooses the kind of join.
        do_split : bool, default False
            Cells hold several values: they become arrays of the numbers of those that are known.
        sep : str, default ","
            Regular expression between them.
        sort_for_array : bool, default False
            Order the numbers of an array; otherwise they follow the values.
        keep_most_frequent : bool, default False
            Of an array only the smallest number, that of the most frequent value if the vocabulary
            is ordered by frequency.
        oov_buckets : int, default 0
            So many numbers behind the largest one are given to values that are not in the
            vocabulary, by their hash; not with `do_split`.

        Returns
        -------
        FeatureTable
            Nulls for what is not in the vocabulary, and for cells without any known value.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"city": ["Rome", "Bern"]}))
        >>> index = {"Oslo": 1, "Rome": 2}
        >>> table.encode_string("city", index).to_list("city")
        [2, None]
        >>> table.encode_string("city", index, oov_buckets=1).to_list("city")
        [2, 3]
        """
        vocabulary.check_oov_buckets(oov_buckets, do_split)
        names = as_names(columns)
        chosen = spark.listed([indices])
        spark.check_lengths("columns", names, "indices", chosen)
        message = (
            "The column {name} of type {kind} cannot be encoded: its cells should be single "
            "values, arrays of them, or with do_split their text; explode it, or use "
            "add_value_features"
        )
        before = schema_of(self.df)
        kinds.check_kinds(before, names, vocabulary.is_atomic_or_list, message)
        lists = [name for name in names if kinds.is_array(before[name].kind)]
        if lists and (do_split or oov_buckets):
            raise UsageError(
                f"{'do_split' if do_split else 'oov_buckets'} cannot be used with {lists}, whose "
                "cells are arrays; leave it out",
                code="argument-conflict",
                columns=lists,
            )
        dictionaries = {
            name: _dictionary(index, name) for name, index in zip(names, chosen, strict=True)
        }
        if lists:
            of_lists = {name: dictionaries.pop(name) for name in lists}
            df = vocabulary.encode_lists(self.df, of_lists, sort_for_array, keep_most_frequent)
            return self._clone(vocabulary.encode(df, dictionaries, broadcast))
        if not do_split:
            return self._clone(vocabulary.encode(self.df, dictionaries, broadcast, oov_buckets))
        options = check_string(sep, "sep"), broadcast, sort_for_array, keep_most_frequent
        return self._clone(vocabulary.encode_tokens(self.df, dictionaries, *options))

    def category_encode(
        self,
        columns: str | list[str],
        freq_limit: int | Mapping[str, int] | None = None,
        order_by_freq: bool = False,
        do_split: bool = False,
        sep: str = ",",
        sort_for_array: bool = False,
        keep_most_frequent: bool = False,
        broadcast: bool = True,
    ) -> tuple[Self, StringIndex | list[StringIndex]]:
        """:meth:`gen_string_idx` and :meth:`encode_string` in one.

        Returns
        -------
        (FeatureTable, StringIndex or list of StringIndex)
            A list if `columns` is one.
        """
        indices = self.gen_string_idx(columns, freq_limit, order_by_freq, do_split, sep)
        encoded = self.encode_string(
            columns, indices, broadcast, do_split, sep, sort_for_array, keep_most_frequent
        )
        return encoded, indices

    def joint_encode(
        self,
        columns: str | list[str],
        freq_limit: int | None = None,
        order_by_freq: bool = False,
        name: str | None = None,
        index: StringIndex | None = None,
    ) -> tuple[Self, StringIndex]:
        """Replace the values of several columns by numbers of one vocabulary.

        Parameters
        ----------
        columns : str or list of str
            Such as a user and a friend of hers.
        freq_limit, order_by_freq
            As in :meth:`gen_string_idx`; the counts of all columns are added.
        name : str, optional
            Of the vocabulary; default: that of the first column with ``_union``.
        index : StringIndex, optional
            The vocabulary that this method returned for other data.

        Returns
        -------
        (FeatureTable, StringIndex)
            Nulls for what is not in the vocabulary.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> pairs = pd.DataFrame({"user": ["u1", "u2"], "friend": ["u2", "u3"]})
        >>> table = FeatureTable.from_pandas(pairs)
        >>> encoded, index = table.joint_encode(["user", "friend"])
        >>> encoded.to_dict()  # u2 has one number
        {'user': [1, 2], 'friend': [2, 3]}
        """
        names = as_names(columns)
        require_columns(self.columns, names)
        if index is None:
            source = {"src_cols": names, "col_name": name}
            indices = self.gen_string_idx([source], freq_limit, order_by_freq)
            index = cast("list[StringIndex]", indices)[0]
        elif not isinstance(index, StringIndex):
            raise UsageError(
                f"index should be a StringIndex, but got {type(index).__name__}",
                code="argument-type",
                argument="index",
            )
        dictionary = index.dictionary_of(index.col_name)
        return self._clone(
            vocabulary.encode(self.df, dict.fromkeys(names, dictionary), True)
        ), index

    def get_vocabularies(self, columns: str | list[str]) -> dict[str, list]:
        """The different values of columns, in their order; a null comes last.

        Returns
        -------
        dict of str to list
        """
        return vocabulary.distinct_values(self.df, as_names(columns))

    def gen_reindex_mapping(
        self, columns: str | Sequence[str] = (), freq_limit: int | Mapping[str, int] | None = 10
    ) -> list[Any]:
        """Number the values of columns by falling count, all by one pass over the data.

        Parameters
        ----------
        columns : str or list of str
        freq_limit : int or dict of str to int, default 10
            Values that occur less often are left out; a dict has the limit of every column.

        Returns
        -------
        list of FeatureTable
            For each column its values and, as ``<column>_new``, their numbers from 1 on.
        """
        names = as_names(columns)
        if isinstance(freq_limit, Mapping) and set(names) - set(freq_limit):
            raise UsageError(
                f"freq_limit should have a limit for each of {names}, but got {dict(freq_limit)!r}",
                code="argument-value",
                argument="freq_limit",
            )
        sources = vocabulary.sources_of(names, freq_limit)
        learned = vocabulary.learn(self.df, sources, True, None)
        return [
            self._clone(each.toDF(name, f"{name}_new"))
            for name, each in zip(names, learned, strict=True)
        ]

    def reindex(self, columns: str | Sequence[str] = (), index_tbls: Any = ()) -> Self:
        """Replace values by what :meth:`gen_reindex_mapping` found; unknown ones by 0, nulls stay.

        Parameters
        ----------
        columns : str or list of str
        index_tbls : Table or list of Table
            One for each column.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"item": [700, 900, 900]}))
        >>> mappings = table.gen_reindex_mapping("item", freq_limit=2)
        >>> table.reindex("item", mappings).to_list("item")  # 700 occurs only once
        [0, 1, 1]
        """
        names = as_names(columns)
        tables = spark.listed([index_tbls])
        spark.check_lengths("columns", names, "index_tbls", tables)
        table = self
        for name, each in zip(names, tables, strict=True):
            number = spark.temporary(table.df, "number")
            numbered = table.add_value_features(name, each, name, number).df
            known = F.when(F.col(name).isNotNull(), F.col(number))
            table = table._clone(numbered.withColumn(name, known).drop(number))
        return table

    def filter_by_frequency(
        self, columns: str | list[str], min_freq: int = 2, keep_rows: bool = False
    ) -> Self:
        """The values that occur often enough.

        Parameters
        ----------
        columns : str or list of str
        min_freq : int, default 2
            How often the values of `columns` have to occur together.
        keep_rows : bool, default False
            Return all columns of all rows with such values, instead of the different values only.
        """
        names = as_names(columns)
        require_columns(self.df.columns, names)
        check_integer("min_freq", min_freq)
        count = spark.temporary(self.df, "count")
        counted = self.df.groupBy(*map(col, names)).agg(F.count("*").alias(count))
        frequent = counted.filter(F.col(count) >= min_freq).drop(count)
        if not keep_rows:
            return self._clone(frequent)
        return self._clone(spark.join_groups(self.df, frequent, names, "left_semi"))

    # -- bins ----------------------------------------------------------------------------------

    def quantile_edges(self, columns: str | list[str], parts: int) -> dict[str, list[float]]:
        """Edges that cut columns into bins of about as many rows each, for :meth:`cut_bins`.

        Parameters
        ----------
        columns : str or list of str
            Columns of numbers; nulls and NaN are not counted.
        parts : int
            How many bins.  Equal edges of a frequent value are one, so that there can be fewer.

        Returns
        -------
        dict of str to list of float
            At most ``parts - 1`` ascending edges for each column, exact to a thousandth of the
            rows.  One job finds all of them.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"price": range(1, 101)}))
        >>> edges = table.quantile_edges("price", 4)
        >>> edges
        {'price': [25.0, 50.0, 75.0]}
        >>> table.cut_bins("price", edges).to_list("price_bin")[::30]
        [0, 1, 2, 3]
        """
        parts = check_integer("parts", parts, 2)
        operator = CutBins.of(columns, parts, None, None, drop=True, by_quantiles=True)
        return learned(self.df, operator)["edges"]

    # -- targets and counts --------------------------------------------------------------------

    def target_encode(
        self,
        cat_cols: str | list,
        target_cols: str | list[str],
        target_mean: Mapping[str, float] | None = None,
        smooth: float = 20,
        kfold: int = 2,
        fold_seed: int | None = None,
        fold_col: str = "__fold__",
        drop_cat: bool = False,
        drop_fold: bool = True,
        out_cols: str | list | None = None,
    ) -> tuple[Self, list[TargetCode]]:
        """Codes of categories: means of a target, which a row's own fold does not help to form.

        The code of a category with count n and sum s is ``(s + mean * smooth) / (n + smooth)``;
        nulls of the target count for nothing.  One aggregation finds everything.

        Parameters
        ----------
        cat_cols : str, list of str, or list with lists of str
            A list inside the list means the combination of its columns.
        target_cols : str or list of str
            Columns of numbers.
        target_mean : dict of str to float, optional
            The mean of every target; default: that of the data.
        smooth : float, default 20
        kfold : int, default 2
            Number of folds.  With 1 each row has the code of all rows, also of itself.
        fold_seed : int, optional
            Assign rows to folds by chance; default: in turn.  Both go by the place of a row, so
            :meth:`cache` a table that comes out of a join or an aggregation, or give it a column of
            folds.
        fold_col : str, default "__fold__"
            A column of folds (int) that the table has is used, otherwise it is made.
        drop_cat : bool, default False
            Leave out the category columns.
        drop_fold : bool, default True
            Leave out the column of folds, unless the table had it.
        out_cols : str, list of str, or list of lists of str, optional
            Names of the codes, for each of `cat_cols` those of all targets; default
            ``<column>_te_<target>`` or ``<column>_<column>_te_<target>``.  The name of a column
            replaces it in its place, also if it is a category: all codes are of the values before.

        Returns
        -------
        table : FeatureTable
            With the codes as double columns.
        codes : list of TargetCode
            Of each of `cat_cols`, by all rows, for :meth:`encode_target`.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> clicks = pd.DataFrame({"city": ["Oslo", "Oslo", "Rome", "Rome"], "click": [1, 1, 0, 1]})
        >>> table, codes = FeatureTable.from_pandas(clicks).target_encode(
        ...     "city", "click", kfold=1, smooth=0
        ... )
        >>> table.to_list("city_te_click")
        [1.0, 1.0, 0.5, 0.5]
        >>> new = FeatureTable.from_pandas(pd.DataFrame({"city": ["Rome", "Bern"]}))
        >>> new.encode_target(codes).to_list("city_te_click")  # of Bern the mean of all clicks
        [0.5, 0.75]
        """
        folds = kfold, fold_seed, fold_col, drop_fold
        operator = TargetEncode.of(
            cat_cols, target_cols, target_mean, out_cols, smooth, drop_cat, *folds
        )
        df, statistics = operator.by_folds(self.df)
        return self._clone(df), _codes_of(statistics)

    def target_encode_by_time(
        self,
        cat_cols: str | list,
        target_cols: str | list[str],
        time_col: str,
        folds: int | list = 10,
        target_mean: Mapping[str, float] | None = None,
        smooth: float = 20,
        drop_cat: bool = False,
        out_cols: str | list | None = None,
    ) -> tuple[Self, list[TargetCode]]:
        """Codes of categories: means of a target, which only rows of an earlier time help to form.

        Parameters
        ----------
        cat_cols, target_cols, target_mean, smooth, drop_cat, out_cols
            As in :meth:`target_encode`.  Without a `target_mean` the mean is that of all rows of
            earlier folds.
        time_col : str
            Numbers, dates or timestamps.  A null makes the job fail.
        folds : int or list of times, default 10
            Time is cut in so many folds of about as many rows each, or at these times, at each of
            which a fold begins.  The more there are, the fresher are the codes.

        Returns
        -------
        table : FeatureTable
            With the codes as double columns.  Rows of the first fold have the mean.
        codes : list of TargetCode
            Of each of `cat_cols`, by all rows, for :meth:`encode_target` on later data.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> clicks = pd.DataFrame({"city": ["Oslo"] * 3, "day": [1, 2, 3], "click": [1, 0, 1]})
        >>> table, codes = FeatureTable.from_pandas(clicks).target_encode_by_time(
        ...     "city", "click", "day", folds=[2, 3], target_mean={"click": 0.5}, smooth=0
        ... )
        >>> table.sort("day").to_list("city_te_click")  # what was known before each day
        [0.5, 1.0, 0.5]
        """
        operator = TargetEncode.of(cat_cols, target_cols, target_mean, out_cols, smooth, drop_cat)
        df, statistics = operator.by_times(self.df, time_col, folds)
        return self._clone(df), _codes_of(statistics)

    def count_encode(
        self,
        cat_cols: str | list,
        normalize: bool = False,
        out_cols: str | list[str] | None = None,
        counts: Table | Sequence[Table] | None = None,
    ) -> tuple[Self, list[Table]]:
        """Add how often categories occur.

        Parameters
        ----------
        cat_cols : str, list of str, or list with lists of str
            A list inside the list means the combination of its columns.
        normalize : bool, default False
            Their share of the rows that have a category, instead of the number of rows.
        out_cols : str or list of str, optional
            Default: ``<column>_count`` or ``<column>_frequency``, with the names of combined
            columns joined by ``_``.  The name of a column replaces it, as in :meth:`target_encode`.
        counts : Table or list of Table, optional
            What this method returned for other data, whose counts are taken.

        Returns
        -------
        table : FeatureTable
            Counts are bigint, frequencies double; 0 for a null, NaN, or a category that does not
            occur.
        counts : list of Table
            Of each of `cat_cols` its values, their ``count`` and their ``frequency``.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"city": ["Oslo", "Rome", "Oslo"]}))
        >>> counted, counts = table.count_encode("city")
        >>> counted.to_list("city_count")
        [2, 1, 2]
        """
        operator = CountEncode.of(cat_cols, normalize, out_cols)
        tables = spark.listed([counts])
        if counts is None:
            tables = [Table(each) for each in operator.count(self.df)]
        groups = operator.groups
        if len(tables) != len(groups) or not all(isinstance(each, Table) for each in tables):
            raise UsageError(
                f"counts should be {len(groups)} Tables, one for each of cat_cols, but got "
                f"{counts!r}",
                code="argument-value",
                argument="counts",
            )
        df = operator.encode(self.df, [each.df for each in tables], counts is None)
        return self._clone(df), tables

    def encode_target(
        self,
        targets: TargetCode | Sequence[TargetCode],
        target_cols: str | list[str] | None = None,
        drop_cat: bool = True,
    ) -> Self:
        """Codes that were learned from other data.

        Parameters
        ----------
        targets : TargetCode or list of TargetCode
        target_cols : str or list of str, optional
            Only the codes of these targets.
        drop_cat : bool, default True
            Leave out the category columns.

        Returns
        -------
        FeatureTable
            An unknown category has the mean of the target.  Of several rows of a category in a
            TargetCode that of the most rows counts.
        """
        codes = spark.listed([targets])
        if not codes or not all(isinstance(each, TargetCode) for each in codes):
            raise UsageError(
                f"targets should be TargetCode or a list of them, got {targets!r}",
                code="argument-type",
                argument="targets",
            )
        wanted = None if target_cols is None else as_names(target_cols, "target_cols")
        known = {of for code in codes for of, _ in code.out_target_mean.values()}
        typos = [name for name in wanted or () if name not in known]
        if typos:
            raise UsageError(
                f"targets have no codes of {typos}, but of {sorted(known)}",
                code="column-missing",
                columns=typos,
                allowed=list(known),
            )
        look_ups, done = [], []
        for code in codes:
            names = as_names(code.cat_col)
            for name in names:
                if name not in self.columns:
                    raise UsageError(
                        f"{name} in TargetCode.cat_col in targets does not exist in Table, whose "
                        f"columns are {self.columns}",
                        code="column-missing",
                        column=name,
                        allowed=list(self.columns),
                    )
            once = without_twins(code.df, code.key_cols, list(code.out_target_mean))
            outputs = {
                output: (output, F.lit(mean).cast("double"))
                for output, (target, mean) in code.out_target_mean.items()
                if wanted is None or target in wanted
            }
            at = dict(zip(code.key_cols, map(col, names), strict=True))
            look_ups.append(vocabulary.LookUp(once, at, outputs))
            done += names
        made = [name for each in look_ups for name in each.outputs]
        spark.check_different(made, "The codes of targets")
        df = vocabulary.join(self.df, look_ups)
        return self._clone(df.drop(*(set(done) - set(made))) if drop_cat else df)

    # -- arrays and other rows -----------------------------------------------------------------

    def add_value_features(
        self, columns: str | list[str], dict_tbl: Table, key: str, value: str
    ) -> Self:
        """Look up what a table says about the values of columns.

        Parameters
        ----------
        columns : str or list of str
            Columns of values, of arrays, or of arrays of arrays.
        dict_tbl : Table
            Its columns `key` and `value`; if it has not both of them, the first two.
        key, value : str
            The result is called as the column with `key` replaced by `value`: ``item_hist_seq``
            becomes ``category_hist_seq``.  A column that keeps its name is replaced.

        Returns
        -------
        FeatureTable
            Values without an entry, and nulls, become 0, or null if the entries are no numbers.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> histories = FeatureTable.from_pandas(pd.DataFrame({"item_hist_seq": [[1, 2], [2]]}))
        >>> items = FeatureTable.from_pandas(pd.DataFrame({"item": [1, 2], "category": [10, 20]}))
        >>> table = histories.add_value_features("item_hist_seq", items, "item", "category")
        >>> table.to_list("category_hist_seq")
        [[10, 20], [20]]
        """
        names = as_names(columns)
        require_columns(self.columns, names)
        check_table("dict_tbl", dict_tbl)
        check_string(key, "key")
        check_string(value, "value")
        known = dict_tbl.columns
        if len(known) < 2:
            raise UsageError(
                f"dict_tbl should have 2 columns, but its columns are {known}",
                code="data-schema",
                argument="dict_tbl",
                columns=known,
            )
        source = (key, value) if key in known and value in known and key != value else known[:2]
        dictionary = vocabulary.Dictionary(dict_tbl.df, *source)
        default = 0 if kinds.is_number(dictionary.value_type) else None
        outputs = {name: name.replace(key, value) for name in names}
        spark.check_different(list(outputs.values()), "The names of the results")
        return self._clone(vocabulary.value_features(self.df, outputs, dictionary, default))

    def sample_listwise(
        self,
        columns: str | list[str],
        num_sampled_list: int,
        num_sampled_item: int,
        random_seed: int | None = None,
        replace: bool = True,
    ) -> Self:
        """Several random parts of each list.

        Parameters
        ----------
        columns : str or list of str
            Columns of arrays that have the same length in every row, or the job fails.
        num_sampled_list : int
            How many parts of each row, each of which becomes a row.
        num_sampled_item : int
            How many different places of the arrays are in a part, the same ones in all columns.
            Rows with shorter arrays are left out.
        random_seed : int, optional
            The same seed gives the same places to the same rows at the same places.
        replace : bool, default True
            Put the parts in the place of the arrays, otherwise into ``sampled_<column>``.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> ratings = pd.DataFrame({"items": [[7, 8, 9]], "stars": [[1, 3, 5]]})
        >>> table = FeatureTable.from_pandas(ratings)
        >>> lists = table.sample_listwise(["items", "stars"], 2, 2, random_seed=1)
        >>> [len(items) for items in lists.to_list("items")]  # two lists of two items each
        [2, 2]
        """
        names = as_names(columns)
        missing = [name for name in names if name not in self.columns]
        if missing:
            raise UsageError(
                f"{missing[0]} does not exist in this FeatureTable. Its columns: {self.columns}",
                code="column-missing",
                column=missing[0],
                allowed=list(self.columns),
            )
        rule = "Each column should be of list type"
        require_kind(schema_of(self.df), names, kinds.is_array, "arrays", rule=rule)
        check_integer("num_sampled_list", num_sampled_list, 1)
        check_integer("num_sampled_item", num_sampled_item, 1)
        seed = spark.random_seed(random_seed)
        draw, places = (spark.temporary(self.df, each) for each in ("draw", "places"))
        long_enough = F.size(col(names[0])) >= num_sampled_item
        if len(names) > 1:
            lengths = F.array(*(F.coalesce(F.size(col(name)), F.lit(-1)) for name in names))
            equal = F.array_min(lengths) == F.array_max(lengths)
            message = (
                "Each row of the FeatureTable should have the same array length in all of columns"
            )
            long_enough = spark.or_error(long_enough, equal, message, "boolean")
        rows = self.df.filter(long_enough)
        rows = rows.withColumn(draw, F.explode(F.sequence(F.lit(1), F.lit(num_sampled_list))))
        shuffled = shuffle(F.sequence(F.lit(0), F.size(col(names[0])) - 1), seed)
        rows = rows.withColumn(places, F.slice(shuffled, 1, num_sampled_item))

        def at_places(name: str) -> Column:
            return F.transform(col(places), lambda place: F.get(col(name), place))

        samples = {name if replace else f"sampled_{name}": at_places(name) for name in names}
        rows = spark.replace(rows, samples).drop(draw, places)
        return self._clone(rows)

    def difference_lag(
        self,
        columns: str | list[str],
        sort_cols: str | list[str],
        shifts: int | Sequence[int] = 1,
        partition_cols: str | list[str] | None = None,
        out_cols: Any = None,
    ) -> Self:
        """Add how much numbers differ from those of an earlier row.

        Parameters
        ----------
        columns : str or list of str
        sort_cols : str or list of str
            The order of the rows; equal ones keep the order of the table.
        shifts : int or list of int, default 1
            How many rows earlier; later ones if negative.
        partition_cols : str or list of str, optional
            The order is that of the rows with the same values here.  Without them a single task
            has to sort the whole table.
        out_cols : str, list of str, or list of lists of str, optional
            For each column a name for each shift; default
            ``<sort columns joined by _>_diff_lag_<column>_<shift>``.

        Returns
        -------
        FeatureTable
            With columns of the same types; null where either value is missing.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.friesian.feature import FeatureTable
        >>> from bigdl.orca import init_orca_context
        >>> sc = init_orca_context("local", cores=2)
        >>> table = FeatureTable.from_pandas(pd.DataFrame({"day": [1, 2, 3], "price": [10, 12, 9]}))
        >>> table.difference_lag("price", "day").to_list("day_diff_lag_price_1")
        [None, 2, -3]
        """
        from pyspark.sql import Window

        names, order = as_names(columns), as_names(sort_cols, "sort_cols")
        groups = [] if partition_cols is None else as_names(partition_cols, "partition_cols")
        require_columns(self.columns, [*order, *groups])
        rule = "columns should be numeric"
        require_kind(schema_of(self.df), names, kinds.is_number, "numbers", rule=rule)
        steps = spark.listed([shifts])
        if not steps or not all(type(step) is int for step in steps):
            raise UsageError(
                f"shifts should be int or a list of int, but got {shifts!r}",
                code="argument-type",
                argument="shifts",
            )
        if out_cols is None:
            prefix = "_".join(order) + "_diff_lag"
            outputs = [[f"{prefix}_{name}_{step}" for step in steps] for name in names]
        else:
            outputs = spark.names_of_results(out_cols, len(names), len(steps), "columns", "shifts")
        place = spark.temporary(self.df, "place")
        rows = self.df.withColumn(place, F.monotonically_increasing_id())
        keys = [*map(col, groups)] or [F.lit(0)]
        window = Window.partitionBy(*keys).orderBy(*map(col, order), place)
        differences = {
            outputs[i][j]: (col(name) - F.lag(col(name), step).over(window)).cast(
                kind_of(self.df, name)
            )
            for i, name in enumerate(names)
            for j, step in enumerate(steps)
        }
        return self._clone(spark.replace(rows, differences).drop(place))


def _dictionary(index: Any, name: str) -> Dictionary:
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


def _codes_of(statistics: TargetStatistics) -> list[TargetCode]:
    return [
        TargetCode(
            statistics.codes(each),
            each.categories[0] if len(each.categories) == 1 else list(each.categories),
            {output: (name, statistics.means[name]) for name, output in each.outputs.items()},
            each.key_columns,
        )
        for each in statistics.encodings
    ]


def _with_types(df: DataFrame, dtype: Any) -> DataFrame:
    if isinstance(dtype, str):
        dtype = dict.fromkeys(df.columns, dtype)
    if isinstance(dtype, list | tuple):
        spark.check_lengths("dtype", dtype, "the columns", df.columns)
        dtype = dict(zip(df.columns, dtype, strict=True))
    if not isinstance(dtype, Mapping):
        raise UsageError(
            f"dtype should be str, list of str or dict, but got {dtype!r}",
            code="argument-type",
            argument="dtype",
        )
    for name, kind in dtype.items():
        df = Cast([name], kind).catalyst(df, schema_of(df), {})
    return df


def _wanted_aggregates(df: DataFrame, keys: list[str], agg: Any) -> list[tuple[str, str]]:
    if isinstance(agg, Mapping):
        require_columns(df.columns, agg)
        return [(name, each) for name, some in agg.items() for each in as_names(some, "agg")]
    if not isinstance(agg, str | list | tuple):
        raise UsageError(
            f"agg should be str, list or dict, but got {agg!r}",
            code="argument-type",
            argument="agg",
        )
    others = [name for name in df.columns if name not in keys]
    return [(name, each) for each in as_names(agg, "agg") for name in others]


def _aggregate(df: DataFrame, name: str, agg: str) -> Column:
    if agg not in _AGGREGATES:
        raise UsageError(
            f"agg should be one of {', '.join(_AGGREGATES)}, but got {agg!r}",
            code="argument-value",
            argument="agg",
            allowed=list(_AGGREGATES),
        )
    function = _AGGREGATES[agg]
    if function in _ARITHMETIC and kinds.is_text(kind_of(df, name)):
        number = try_cast(col(name), "double")  # text without a number counts as null
        begin = _SHOWN.get(function, f"{function}(")
        return getattr(F, function)(number).alias(f"{begin}{name})")
    return getattr(F, function)(col(name))


def _figures(value: Column, kind: str) -> list[Column]:
    """The aggregates of a column: the extremes of the lengths at each depth, then of the values."""
    figures, depth = [], 0
    while kinds.is_array(kind):
        lengths = F.array(F.when(value.isNotNull(), F.size(value)))
        if depth:  # the elements of `value` are the arrays of this depth
            inner = F.filter(value, lambda each: each.isNotNull())
            lengths, value = F.transform(inner, lambda each: F.size(each)), F.flatten(inner)
        figures += [F.min(F.array_min(lengths)), F.max(F.array_max(lengths))]
        kind, depth = kinds.element_of(kind), depth + 1
    if kinds.is_integral(kind):
        low, high = (F.array_min(value), F.array_max(value)) if depth else (value, value)
        figures += [F.min(low), F.max(high)]
    return figures


def _feature(kind: str, figures: Iterator[Any]) -> Feature:
    """The feature of a column of a kind, by the values of its :func:`_figures`."""
    shape: list[int | None] = []
    while kinds.is_array(kind):
        short, long = next(figures), next(figures)
        shape.append(short if short == long else None)
        kind = kinds.element_of(kind)
    cardinality = None
    if kinds.is_integral(kind):
        smallest, largest = next(figures), next(figures)
        if (smallest or 0) >= 0:
            cardinality = 0 if largest is None else largest + 1
    return Feature(kind, cardinality, tuple(shape))


def _embedding_function(encoder: Callable) -> Callable:
    def embed(texts):
        import pandas as pd

        distinct = texts.dropna().unique().tolist()
        matrix = np.asarray(encoder(distinct), dtype=float) if distinct else []
        vectors = dict(zip(distinct, map(list, matrix), strict=True))
        cells = [vectors.get(text) if isinstance(text, str) else None for text in texts]
        return pd.Series(cells, dtype=object)

    return F.pandas_udf(silent_when_closed(embed), "array<double>")  # type: ignore[call-overload]  # pyspark's stubs lack a default


@cache
def _sentence_transformer(name: str) -> Any:
    """A model of sentence-transformers, loaded by each Python worker when it first needs it."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(name)


def _by_sentence_transformer(name: str, texts: list[str]) -> Any:
    return _sentence_transformer(name).encode(texts)


def _reduced(df: DataFrame, name: str, dimensions: int) -> DataFrame:
    """Arrays projected on their principal components."""
    from pyspark.ml.feature import PCA
    from pyspark.ml.functions import array_to_vector

    check_integer("reduce_dim", dimensions, 1)
    present = df.filter(col(name).isNotNull())
    first = present.select(F.size(col(name))).first()
    if first is None:
        return df
    if first[0] < dimensions:
        raise UsageError(
            f"source vector size {first[0]} must be no less than k={dimensions}: reduce_dim can "
            "only make embeddings shorter",
            code="data-shape",
        )
    vectors = present.select(array_to_vector(col(name)).alias("vector"))
    components = PCA(k=dimensions, inputCol="vector", outputCol="out").fit(vectors).pc.toArray()
    rows = [F.array(*(F.lit(float(x)) for x in column)) for column in components.T]

    def product(row: Column) -> Column:
        pairs = F.zip_with(col(name), row, lambda a, b: a * b)
        return F.aggregate(pairs, F.lit(0.0), lambda total, each: total + each)

    projected = F.array(*(product(row) for row in rows))
    return spark.replace(df, {name: F.when(col(name).isNotNull(), projected)})
