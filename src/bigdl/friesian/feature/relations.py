"""Relational operations on one Spark table: columns, rows, order and statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Self

from bigdl.common.errors import UsageError, hide_frames
from bigdl.friesian.executors.spark import run_operator, statistics_of
from bigdl.friesian.feature.files import TableOutput
from bigdl.friesian.feature.methods import CellMethods
from bigdl.friesian.ops import column_types, spark
from bigdl.friesian.ops.cells import medians_of
from bigdl.friesian.ops.column_types import require_columns
from bigdl.friesian.ops.spark import F, as_names, check_string, col, dtype_of, schema_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

    from bigdl.common.types import ColumnNames
    from bigdl.friesian.ops.operator import Operator

_STATS = ("min", "max", "avg", "sum", "count")


@hide_frames
class Table(CellMethods, TableOutput):
    """Table backed by a Spark DataFrame, with relational operations.

    Methods that change the table return a new table of the same class. Only :meth:`broadcast`
    changes the table itself. The columns of a table are also its attributes.

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

    def _clone(self, df: DataFrame) -> Self:
        return type(self)(df)

    def with_operator(self, operator: Operator) -> Self:
        return self._clone(run_operator(self.df, operator))

    # -- columns -------------------------------------------------------------------------------

    @property
    def schema(self) -> StructType:
        """Schema of the DataFrame."""
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
        # While copying or unpickling, `_df` is not set yet.
        if not name.startswith("__") and "_df" in self.__dict__ and name in self.df.columns:
            return self.df[spark.quoted(name)]
        raise AttributeError(f"{type(self).__name__} has no attribute or column {name!r}")

    def col(self, name: str) -> Column:
        """Return a Spark column expression for a name; it is not bound to this table."""
        return col(name)

    def select(self, *cols: str | Column | list) -> Self:
        """Select columns or expressions.

        Parameters
        ----------
        *cols : str, Column, or a list of them
        """
        return self._clone(self.df.select(*self._chosen(cols)))

    def _chosen(self, cols: Sequence[Any]) -> list[Any]:
        """Return the user's `cols` as a list of names and Spark columns; raise for other types."""
        columns = spark.as_list(cols)
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
        # other names are struct fields, or Spark raises an error for them
        known = self.df.columns
        return [col(each) if isinstance(each, str) and each in known else each for each in columns]

    def merge_cols(self, columns: list[str], target: str) -> Self:
        """Replace several columns by one array column of their values.

        Parameters
        ----------
        columns : list of str
            If one column holds strings, all elements are cast to strings.
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
        # in ANSI mode Spark casts strings to the other type, which may fail
        has_text = any(column_types.is_text(dtype_of(self.df, name)) for name in names)
        cells = (col(name).cast("string") if has_text else col(name) for name in names)
        merged = spark.replace(self.df, {target: F.array(*cells)})
        return self._clone(merged.drop(*(name for name in names if name != target)))

    def append_column(self, name: str, column: Column) -> Self:
        """Add a column, or replace the existing column of that name.

        Parameters
        ----------
        name : str
        column : pyspark.sql.Column
            For example ``pyspark.sql.functions.lit(0)``.
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
        """Add a constant to numeric columns; an integer column plus 1.5 becomes double."""
        names = spark.names_of(self.df, columns, column_types.is_number, "numbers")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(
                f"value should be a number, got {value!r}", code="argument-type", argument="value"
            )
        return self._clone(
            spark.replace(self.df, {name: col(name) + F.lit(value) for name in names})
        )

    # -- rows ----------------------------------------------------------------------------------

    def limit(self, num: int) -> Self:
        """Keep at most `num` rows."""
        return self._clone(self.df.limit(num))

    def filter(self, condition: str | Column) -> Self:
        """Keep the rows for which a SQL expression or a Column is true."""
        if not isinstance(condition, str) and not spark.is_column(condition):
            raise UsageError(
                f"condition should be str or Column, but got {condition!r}",
                code="argument-type",
                argument="condition",
            )
        return self._clone(self.df.filter(condition))

    def distinct(self) -> Self:
        """Remove duplicate rows."""
        return self._clone(self.df.distinct())

    def drop_duplicates(
        self,
        subset: str | list[str] | None = None,
        sort_cols: str | list[str] | None = None,
        keep: str = "min",
    ) -> Self:
        """Keep one row for each combination of values in the columns `subset`.

        Parameters
        ----------
        subset : str or list of str, optional
            Columns to compare. Default: all columns.
        sort_cols : str or list of str, optional
            Keep the first row by these columns; of equal rows the first in the table. Without it
            any row is kept.
        keep : {"min", "max"}
            Sort ascending (``"min"``) or descending (``"max"``).

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
        position, rank = spark.unused_name(self.df, "position"), spark.unused_name(self.df, "rank")
        sorting = [col(name).asc() if keep == "min" else col(name).desc() for name in order]
        window = Window.partitionBy(*map(col, names)).orderBy(*sorting, position)
        ranked = self.df.withColumn(position, F.monotonically_increasing_id())
        ranked = ranked.withColumn(rank, F.row_number().over(window))
        return self._clone(ranked.filter(F.col(rank) == 1).drop(position, rank))

    def concat(
        self, tables: Table | list[Table], mode: str = "inner", distinct: bool = False
    ) -> Self:
        """Concatenate the rows of several tables, matching columns by name.

        Parameters
        ----------
        tables : Table or list of Table
            Their rows come before those of this table.
        mode : {"inner", "outer"}
            Keep the columns that all tables have, or those of any table, with nulls where one lacks
            them.
        distinct : bool, default False
            Remove duplicate rows.

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
        others = spark.as_list([tables])
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
        frames = _with_equal_types([*(each.df for each in others), self.df])
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
        """Return the distinct rows that another table does not have."""
        return self._clone(self.df.subtract(check_table("other", other).df))

    def intersect(self, other: Table) -> Self:
        """Return the distinct rows that another table also has."""
        return self._clone(self.df.intersect(check_table("other", other).df))

    def sample(self, fraction: float, replace: bool = False, seed: int | None = None) -> Self:
        """Return a random sample with about `fraction` of the rows."""
        return self._clone(self.df.sample(replace, float(fraction), seed))

    def random_split(self, weights: list[float], seed: int | None = None) -> list[Self]:
        """Split the rows at random.

        Parameters
        ----------
        weights : list of float
            Relative sizes of the parts. They are normalised; the sizes are approximate.
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
        """Sort the rows.

        Parameters
        ----------
        *cols : str, Column, or a list of them
        ascending : bool or list of bool, default True
            A list has one value per column.
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
        """Shuffle the rows within each partition.

        Parameters
        ----------
        seed : int, optional
            The same seed gives the same order.
        """
        return self._clone(self.df.sortWithinPartitions(F.rand(spark.random_seed(seed))))

    def repartition(self, num_partitions: int) -> Self:
        """Redistribute the rows over `num_partitions` partitions."""
        return self._clone(self.df.repartition(num_partitions))

    def coalesce(self, num_partitions: int) -> Self:
        """Merge partitions until there are at most `num_partitions`."""
        return self._clone(self.df.coalesce(num_partitions))

    def get_partition_row_number(self) -> Table:
        """Return a table with the ``partitionId`` and row ``count`` of each non-empty partition."""
        partition = F.spark_partition_id().alias("partitionId")
        return Table(self.df.select(partition).groupBy("partitionId").count())

    def broadcast(self) -> None:
        """Mark this table as small enough for Spark to broadcast it in joins."""
        self._df = F.broadcast(self.df)

    # -- statistics ----------------------------------------------------------------------------

    def get_stats(
        self, columns: str | list[str] | None, aggr: ColumnNames | Mapping[str, ColumnNames]
    ) -> dict[str, Any]:
        """Return statistics of columns, computed in one job.

        Parameters
        ----------
        columns : str, list of str or None
            None for all numeric columns.
        aggr : str, list of str, or dict of str to one of them
            One or several of min, max, avg, sum and count. A dict has those of each column; entries
            for other columns of the table are ignored.

        Returns
        -------
        dict of str to value or list
            By column; a list, in the order of `aggr`, if there are several statistics.

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
            if needs_numbers and not column_types.is_number(dtype_of(self.df, name)):
                raise UsageError(
                    f"{sorted(needs_numbers)} need numbers, but the column {name} is of type "
                    f"{dtype_of(self.df, name)}",
                    code="data-dtype",
                    column=name,
                )
        aggregates = [
            getattr(F, stat)(col(name)) for name, stats in wanted.items() for stat in stats
        ]
        values = iter(spark.aggregate_values(self.df, aggregates))
        of_columns = {name: [next(values) for _ in stats] for name, stats in wanted.items()}
        return {name: each[0] if len(each) == 1 else each for name, each in of_columns.items()}

    def min(self, columns: str | list[str] | None = None) -> Table:
        """Return the smallest values as a table of ``column`` (string) and ``min`` (double)."""
        return self._extremes(columns, "min")

    def max(self, columns: str | list[str] | None = None) -> Table:
        """Return the largest values as a table of ``column`` (string) and ``max`` (double)."""
        return self._extremes(columns, "max")

    def _extremes(self, columns: str | list[str] | None, stat: str) -> Table:
        if columns is not None:
            spark.names_of(self.df, columns, column_types.is_number, "numbers")
        stats = self.get_stats(columns, stat)
        rows = [(name, None if value is None else float(value)) for name, value in stats.items()]
        return Table(self.df.sparkSession.createDataFrame(rows, f"column string, `{stat}` double"))

    def median(self, columns: str | list[str] | None = None) -> Self:
        """Return approximate medians of columns, with a rank error of at most 0.1 % of the rows.

        Parameters
        ----------
        columns : str or list of str, optional
            Default: all numeric columns.

        Returns
        -------
        Self
            Columns ``column`` (string) and ``median`` (double), null for a column of nulls.
        """
        names = None if columns is None else as_names(columns)
        medians = statistics_of(self.df, medians_of(schema_of(self.df), names))
        rows = [(name, each[0] if each else None) for name, each in medians.items()]
        schema = "column string, median double"
        return self._clone(self.df.sparkSession.createDataFrame(rows, schema))


def _with_equal_types(frames: list[DataFrame]) -> list[DataFrame]:
    """Cast columns that are strings in at least one frame to strings in all frames.

    In ANSI mode Spark would otherwise parse the strings.
    """
    fields = [each for frame in frames for each in schema_of(frame).items()]
    texts = {name for name, field in fields if column_types.is_text(field.kind)}
    return [
        frame.withColumns({name: col(name).cast("string") for name in texts & {*frame.columns}})
        for frame in frames
    ]


def _stats_of(aggr: ColumnNames | Mapping[str, ColumnNames], column: str) -> list[str]:
    if isinstance(aggr, Mapping):
        if column not in aggr:
            raise UsageError(
                f"aggr has no entry for the column {column}: {dict(aggr)!r}",
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


def check_table(name: str, value: object) -> Table:
    """Return `value`; raise a UsageError unless it is a Table."""
    if not isinstance(value, Table):
        raise UsageError(
            f"{name} should be a Table, but got {type(value).__name__}",
            code="argument-type",
            argument=name,
        )
    return value
