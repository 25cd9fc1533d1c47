"""Operations on several rows or tables: joins, group-by, lags and list sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import UsageError, hide_frames
from bigdl.friesian.feature.relations import Table, check_table
from bigdl.friesian.ops import column_types, spark
from bigdl.friesian.ops.column_types import require_columns, require_type
from bigdl.friesian.ops.spark import F, as_names, col, dtype_of, schema_of
from bigdl.orca.cluster.versions import shuffle, try_cast

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from bigdl.common.types import ColumnNames


_ARITHMETIC: tuple[str, ...] = ("sum", "avg", "mean", "sum_distinct", "stddev", "stddev_pop")
_ARITHMETIC += ("variance", "var_pop", "skewness", "kurtosis")
_OTHERS = ("max", "min", "count", "collect_list", "collect_set", "first", "last")
_AGGREGATES = {
    **{name: name for name in (*_ARITHMETIC, *_OTHERS, "approx_count_distinct")},
    "sumDistinct": "sum_distinct",
    "approxCountDistinct": "approx_count_distinct",
}
# prefixes of Spark's result names where they differ from the function name
_SHOWN = {"mean": "avg(", "sum_distinct": "sum(DISTINCT "}


@hide_frames
class JoinMethods(Table):
    """Table methods for joins, group-by, lags and list sampling."""

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
            Columns of both tables; required unless `how` is ``"cross"``.
        how : str, default "inner"
            Any join type that Spark supports.
        lsuffix, rsuffix : str, optional
            Suffixes for columns other than `on` that both tables have.
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
            left = spark.rename_columns(left, {name: name + lsuffix for name in shared})
        if rsuffix is not None:
            right = spark.rename_columns(right, {name: name + rsuffix for name in shared})
        return self._clone(left.crossJoin(right) if keys is None else left.join(right, keys, how))

    def join_as_of(
        self, table: Table, on: str | list[str], time_col: str = "time", ttl: float | None = None
    ) -> Self:
        """Join each row with the latest row of another table at or before the time of the row.

        No later value leaks into a row.

        Parameters
        ----------
        table : Table
            Also has the columns `on` and `time_col`. Of rows with equal times any one is taken.
        on : str or list of str
            Key columns. Null matches nothing.
        time_col : str, default "time"
            Column of numbers, dates or timestamps; cast strings first.
        ttl : float, optional
            Maximum age of the joined row: in the unit of the numbers, or in seconds.

        Returns
        -------
        FeatureTable
            With the other columns of `table`, taken from its latest row that is not later than the
            row; null if there is none.

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
        dtype, other_dtype = dtype_of(self.df, time_col), dtype_of(table.df, time_col)
        if column_types.is_number(dtype) != column_types.is_number(other_dtype):
            raise UsageError(
                f"{time_col} should hold numbers in both tables or in none, but its types are "
                f"{dtype} and {other_dtype}",
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
                f"The other table has no columns except {[*keys, time_col]}", code="data-schema"
            )
        if ttl is not None:
            check_number("ttl", ttl, 0)
        known = spark.all_of(col(name).isNotNull() for name in (*keys, time_col))
        names = [f"key_{i}" for i in range(len(keys))]
        shown = [col(key).alias(name) for key, name in zip(keys, names, strict=True)]
        row, fact = (F.struct(*map(col, frame.columns)) for frame in (self.df, table.df))
        shown.append(col(time_col).alias("time"))
        rows = self.df.select(*shown, F.lit(True).alias("is_query"), row.alias("row"))
        facts = table.df.filter(known)
        facts = facts.select(*shown, F.lit(False).alias("is_query"), fact.alias("fact"))
        # at equal times facts sort first, so that a row sees the facts of its time
        window = Window.partitionBy(*names).orderBy("time", "is_query")
        window = window.rowsBetween(Window.unboundedPreceding, Window.currentRow)
        both = rows.unionByName(facts, allowMissingColumns=True)
        both = both.withColumn("fact", F.last("fact", ignorenulls=True).over(window)).filter(
            "is_query"
        )
        fact = F.col("fact")
        if ttl is not None:
            age = spark.as_number(F.col("time"), dtype) - spark.as_number(fact[time_col], dtype)
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
            Group keys. By default the whole table is one group.
        agg : str, list of str, or dict of str to one of them, default "count"
            One or several of max, min, count, sum, avg, mean, sumDistinct, stddev, stddev_pop,
            variance, var_pop, skewness, kurtosis, collect_list, collect_set, approx_count_distinct,
            first, last. A dict has the aggregates by column; otherwise they apply to all other
            columns.
        join : bool, default False
            Join the aggregates to the rows of the table, also for groups of null.

        Returns
        -------
        FeatureTable
            The aggregates have Spark's names, such as ``sum(price)``, also for strings that hold
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
        aggregates = [
            _aggregate(self.df, name, each) for name, each in _wanted_aggregates(self.df, keys, agg)
        ]
        if not aggregates:
            raise UsageError(
                f"There is nothing to aggregate: all columns of {self.df.columns} are keys",
                code="argument-value",
                argument="columns",
            )
        grouped = self.df.groupBy(*map(col, keys)).agg(*aggregates)
        return self._clone(spark.join_groups(self.df, grouped, keys, "left") if join else grouped)

    def filter_by_frequency(
        self, columns: str | list[str], min_freq: int = 2, keep_rows: bool = False
    ) -> Self:
        """Keep combinations of values in `columns` that occur in at least `min_freq` rows.

        Parameters
        ----------
        columns : str or list of str
        min_freq : int, default 2
            Minimum number of rows with the same combination of `columns`.
        keep_rows : bool, default False
            Return all columns of all rows with such values, instead of the distinct values only.
        """
        names = as_names(columns)
        require_columns(self.df.columns, names)
        check_integer("min_freq", min_freq)
        count = spark.unused_name(self.df, "count")
        counted = self.df.groupBy(*map(col, names)).agg(F.count("*").alias(count))
        frequent = counted.filter(F.col(count) >= min_freq).drop(count)
        if not keep_rows:
            return self._clone(frequent)
        return self._clone(spark.join_groups(self.df, frequent, names, "left_semi"))

    def difference_lag(
        self,
        columns: str | list[str],
        sort_cols: str | list[str],
        shifts: int | Sequence[int] = 1,
        partition_cols: str | list[str] | None = None,
        out_cols: ColumnNames | Sequence[Sequence[str]] | None = None,
    ) -> Self:
        """Add columns with the difference between each number and the number in an earlier row.

        Parameters
        ----------
        columns : str or list of str
        sort_cols : str or list of str
            Order of the rows; equal rows keep the order of the table.
        shifts : int or list of int, default 1
            Distance to the earlier row; negative for later rows.
        partition_cols : str or list of str, optional
            Compare rows with equal values in these columns only. Without them a single task has to
            sort the whole table.
        out_cols : str, list of str, or list of lists of str, optional
            Output names, for each column one per shift. Default:
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
        require_type(schema_of(self.df), names, column_types.is_number, "numbers", rule=rule)
        steps = spark.as_list([shifts])
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
        position = spark.unused_name(self.df, "position")
        rows = self.df.withColumn(position, F.monotonically_increasing_id())
        keys = [*map(col, groups)] or [F.lit(0)]
        window = Window.partitionBy(*keys).orderBy(*map(col, order), position)
        differences = {
            outputs[i][j]: (col(name) - F.lag(col(name), step).over(window)).cast(
                dtype_of(self.df, name)
            )
            for i, name in enumerate(names)
            for j, step in enumerate(steps)
        }
        return self._clone(spark.replace(rows, differences).drop(position))

    def sample_listwise(
        self,
        columns: str | list[str],
        num_sampled_list: int,
        num_sampled_item: int,
        random_seed: int | None = None,
        replace: bool = True,
    ) -> Self:
        """Sample several random sublists of each list.

        Parameters
        ----------
        columns : str or list of str
            Array columns. The arrays of a row must have the same length, or the job fails.
        num_sampled_list : int
            Number of sublists per row; each becomes a row.
        num_sampled_item : int
            Number of distinct positions in a sublist, the same positions in all columns. Rows with
            shorter arrays are left out.
        random_seed : int, optional
            The same seed gives the same samples for the same rows in the same partitions and order.
        replace : bool, default True
            Replace the arrays in place. Otherwise add ``sampled_<column>``.

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
        require_type(schema_of(self.df), names, column_types.is_array, "arrays", rule=rule)
        check_integer("num_sampled_list", num_sampled_list, 1)
        check_integer("num_sampled_item", num_sampled_item, 1)
        seed = spark.random_seed(random_seed)
        draw, positions = (spark.unused_name(self.df, each) for each in ("draw", "positions"))
        long_enough = F.size(col(names[0])) >= num_sampled_item
        if len(names) > 1:
            lengths = F.array(*(F.coalesce(F.size(col(name)), F.lit(-1)) for name in names))
            equal = F.array_min(lengths) == F.array_max(lengths)
            message = (
                "Each row of the FeatureTable should have the same array length in all of columns"
            )
            long_enough = spark.value_or_error(long_enough, equal, message, "boolean")
        rows = self.df.filter(long_enough)
        rows = rows.withColumn(draw, F.explode(F.sequence(F.lit(1), F.lit(num_sampled_list))))
        shuffled = shuffle(F.sequence(F.lit(0), F.size(col(names[0])) - 1), seed)
        rows = rows.withColumn(positions, F.slice(shuffled, 1, num_sampled_item))

        def at_positions(name: str) -> Column:
            return F.transform(col(positions), lambda position: F.get(col(name), position))

        samples = {name if replace else f"sampled_{name}": at_positions(name) for name in names}
        rows = spark.replace(rows, samples).drop(draw, positions)
        return self._clone(rows)


def _wanted_aggregates(df: DataFrame, keys: list[str], agg: object) -> list[tuple[str, str]]:
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
    if function in _ARITHMETIC and column_types.is_text(dtype_of(df, name)):
        number = try_cast(col(name), "double")  # strings that are not numbers count as null
        begin = _SHOWN.get(function, f"{function}(")
        return getattr(F, function)(number).alias(f"{begin}{name})")
    return getattr(F, function)(col(name))
