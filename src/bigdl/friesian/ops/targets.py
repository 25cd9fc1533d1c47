"""Target encoding and count encoding of categories.

In target encoding each row contributes to the codes of other rows only. One aggregation by grouping
sets computes the sums and counts of all categories and folds. Everything else follows from that
table: overall means, codes for new data, and out-of-fold codes.
"""

from __future__ import annotations

import dataclasses
import datetime
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import UsageError
from bigdl.friesian.ops import column_types, spark, vocabulary
from bigdl.friesian.ops.batches import TargetSums
from bigdl.friesian.ops.column_types import Field, Schema, require_columns, require_type
from bigdl.friesian.ops.operator import (
    Function,
    Operator,
    OutputColumn,
    State,
    Statistic,
    register_operator,
)
from bigdl.friesian.ops.spark import F, as_names, check_string, col, dtype_of, schema_of
from bigdl.friesian.ops.vocabulary import DRIVER_VALUES, LookUp, Vocabulary, check_categories
from bigdl.orca.cluster.versions import by_sets, computed, frame_of_arrow, to_arrow

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

    from bigdl.common.types import ColumnNames

COUNT = "target_encode_count"  # column of a code table with the rows of each category
_COUNTS = ("count", "frequency")
_TARGETS = "target_cols should be numeric"  # as BigDL 2.x says
_RELATIVE_ERROR = 0.001  # of the quantiles at which times are split


# -- tables of codes -------------------------------------------------------------------------------


def drop_duplicate_keys(table: DataFrame, keys: Sequence[str], values: Sequence[str]) -> DataFrame:
    """Keep one row per combination of keys: the largest by count, then by `values`.

    A table that a user made or united with another may contain a combination twice, and a join
    would then multiply rows.
    """
    if not values:
        return table
    order = [COUNT] if COUNT in table.columns and COUNT not in (*keys, *values) else []
    most = F.max(F.struct(*(col(name).alias(name) for name in (*order, *values))))
    best = spark.unused_name(table, "best")
    rows = table.groupBy(*map(col, keys)).agg(most.alias(best))
    shown = [F.col(best).getField(name).alias(name) for name in values]
    return rows.select(*map(col, keys), *shown)


ArrayT = TypeVar("ArrayT", "Column", np.ndarray)

# -- means of targets ------------------------------------------------------------------------------


def smoothed(total: ArrayT, count: ArrayT, mean: ArrayT, smooth: float) -> ArrayT:
    """Return smoothed category means, as if `smooth` more rows had the overall mean.

    The arguments are Spark columns or arrays.
    """
    return (total + mean * smooth) / (count + smooth)


def target_aggregates(df: DataFrame, targets: Sequence[str]) -> list[Column]:
    """Return aggregate expressions: the row count, and the sum and count of each target."""
    aggregates = [F.count("*").alias("rows")]
    for i, name in enumerate(targets):
        value = spark.without_nan(col(name).cast("double"), dtype_of(df, name))
        aggregates += [F.sum(value).alias(f"sum_{i}"), F.count(value).alias(f"count_{i}")]
    return aggregates


@dataclass(frozen=True)
class Encoding:
    """Group of category columns, and the output name for each target."""

    categories: tuple[str, ...]
    outputs: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by target

    @property
    def key_columns(self) -> list[str]:
        """Category column names in a code table; names that clash with outputs are replaced."""
        taken = {COUNT, *self.outputs.values()}
        free = [name for name in self.categories if name not in taken]
        return [
            name if name in free else spark.unused_name([*taken, *free], f"key{i}")
            for i, name in enumerate(self.categories)
        ]


def _group_names(
    cat_cols: object, targets: Sequence[str], out_cols: object, infix: str
) -> tuple[list[list[str]], list[list[str]]]:
    """Return the groups of category columns, and for each group an output name per target.

    Parameters
    ----------
    cat_cols : str, list of str, or list whose elements may be lists of str (groups of columns)
    targets : list of str
        Targets that each group has an output for.
    out_cols : str, list of str, or list of lists of str, optional
        Output names. By default column and target names, joined by `infix`.
    infix : str
    """
    if isinstance(cat_cols, str):
        cat_cols = [cat_cols]
    if not isinstance(cat_cols, list | tuple) or not cat_cols:
        raise UsageError(
            f"cat_cols should be str, list of str or nested list, got {cat_cols!r}",
            code="argument-type",
            argument="cat_cols",
        )
    groups = [as_names(each, "each element of cat_cols") for each in cat_cols]
    if out_cols is not None:
        return groups, spark.names_of_results(
            out_cols, len(groups), len(targets), "cat_cols", "target_cols"
        )
    names = [[f"{'_'.join(group)}{infix}{target}" for target in targets] for group in groups]
    # ["a_b", ["a", "b"]] would give the same name twice
    spark.check_different([name for row in names for name in row], "The names of the codes")
    return groups, names


def _check_means(target_mean: object, targets: Sequence[str]) -> dict[str, float]:
    """Return the target means that the user passed, as floats; raise if they are invalid."""
    if target_mean is None:
        return {}
    if not isinstance(target_mean, Mapping):
        raise UsageError(
            f"target_mean should be a dict of str to number, got {target_mean!r}",
            code="argument-type",
            argument="target_mean",
        )
    missing = [target for target in targets if target not in target_mean]
    if missing:
        raise UsageError(
            f"target_mean has no entry for {missing}, got {dict(target_mean)!r}",
            code="argument-value",
            argument="target_mean",
            columns=missing,
        )
    try:
        return {each: float(check_number("mean", target_mean[each])) for each in targets}
    except UsageError:
        raise UsageError(
            f"mean in target_mean should be numeric, got {dict(target_mean)!r}",
            code="argument-type",
            argument="target_mean",
        ) from None


def _with_folds(df: DataFrame, kfold: int, fold_seed: int | None, fold_col: str) -> DataFrame:
    """Add a column of fold numbers from 0 to kfold - 1, unless `df` already has `fold_col`."""
    if fold_col in df.columns:
        rule = "fold_col should be integer type"
        require_type(
            schema_of(df), [fold_col], column_types.is_integral, "whole numbers", rule=rule
        )
        return df
    if fold_seed is None:
        fold = F.monotonically_increasing_id() % kfold
    else:
        fold = F.floor(F.rand(fold_seed) * kfold)
    return df.withColumn(fold_col, fold.cast("int"))


class TargetStatistics:
    """Sums and counts of targets for each category and fold.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    encodings : list of Encoding
        All with the same targets.
    fold_col : str or None
        None for no folds.
    means : dict of str to float
        Means of targets; other targets take the mean of the data.
    smooth : float
        Number of rows with the overall mean that are added to every category.
    """

    def __init__(
        self,
        df: DataFrame,
        encodings: Sequence[Encoding],
        fold_col: str | None = None,
        means: Mapping[str, float] | None = None,
        smooth: float = 0.0,
    ):
        self.encodings, self.targets = list(encodings), list(encodings[0].outputs)
        self.smooth = float(smooth)
        self._fold_col, self._chosen_means = fold_col, means or {}
        columns = list(dict.fromkeys(name for e in encodings for name in e.categories))
        self._key_of = {name: f"key_{i}" for i, name in enumerate(columns)}
        self._table = _materialized(self._aggregated(df, columns))
        self.means = {**self._means_of_data(), **self._chosen_means}

    def _aggregated(self, df: DataFrame, columns: list[str]) -> DataFrame:
        """Aggregate targets to one row per category combination, fold and encoding (``source``)."""
        rows = df.select(
            *(col(name).alias(self._key_of[name]) for name in columns),
            (F.lit(0) if self._fold_col is None else col(self._fold_col)).alias("fold"),
            *(col(name).alias(f"target_{i}") for i, name in enumerate(self.targets)),
        )
        aggregates = target_aggregates(rows, [f"target_{i}" for i in range(len(self.targets))])
        keys = [self._key_of[name] for name in columns]
        sets = [[*(self._key_of[name] for name in e.categories), "fold"] for e in self.encodings]
        distinct = [list(each) for each in dict.fromkeys(map(tuple, sets))]
        return by_sets(rows, [*keys, "fold"], distinct, aggregates)

    def _source(self, encoding: Encoding) -> int:
        """Return the Spark grouping id of an encoding: one bit per key, 1 if the key is omitted."""
        keys = list(self._key_of)
        bits = [int(name not in encoding.categories) for name in keys] + [0]
        return int("".join(map(str, bits)), 2)

    def _rows_of(self, encoding: Encoding) -> DataFrame:
        return self._table.filter(F.col("source") == self._source(encoding))

    def _means_of_data(self) -> dict[str, float | None]:
        sums = [(F.sum(f"sum_{i}"), F.sum(f"count_{i}")) for i in range(len(self.targets))]
        means = [F.when(count > 0, total / count) for total, count in sums]
        values = spark.aggregate_values(self._rows_of(self.encodings[0]), means)
        return dict(zip(self.targets, values, strict=True))

    def _mean(self, target: str) -> Column:
        return F.lit(self.means[target]).cast("double")

    def _code(self, total: Column, count: Column, mean: Column) -> Column:
        code = smoothed(F.coalesce(total, F.lit(0.0)), count, mean, self.smooth)
        return F.when(count + F.lit(self.smooth) > 0, code).otherwise(mean)

    def codes(self, encoding: Encoding) -> DataFrame:
        """Return the code table for new data: categories, row count and a code per target."""
        keys = [self._key_of[name] for name in encoding.categories]
        rows = self._rows_of(encoding).dropna(subset=keys)
        aggregates = [F.sum("rows").alias(COUNT)]
        for i, target in enumerate(self.targets):
            code = self._code(F.sum(f"sum_{i}"), F.sum(f"count_{i}"), self._mean(target))
            aggregates.append(code.alias(encoding.outputs[target]))
        grouped = rows.groupBy(*keys).agg(*aggregates)
        names = encoding.key_columns
        named = [F.col(key).alias(name) for key, name in zip(keys, names, strict=True)]
        return grouped.select(*named, COUNT, *map(col, encoding.outputs.values()))

    def encode(self, df: DataFrame) -> DataFrame:
        """Add the out-of-fold codes of each row to `df`."""
        return vocabulary.join(df, [self._look_up(encoding) for encoding in self.encodings])

    def _look_up(self, encoding: Encoding) -> LookUp:
        keys = [self._key_of[name] for name in encoding.categories]
        codes = [self._code_of_fold(i, keys).alias(f"code_{i}") for i in range(len(self.targets))]
        table = self._rows_of(encoding).dropna(subset=keys).select(*keys, "fold", *codes)
        at = {key: col(name) for key, name in zip(keys, encoding.categories, strict=True)}
        fold = F.lit(0)
        if self._fold_col is not None:
            at["fold"] = fold = col(self._fold_col)
        outputs = {
            encoding.outputs[target]: (f"code_{i}", self._prior(target, fold))
            for i, target in enumerate(self.targets)
        }
        return LookUp(table, at, outputs)

    def _prior(self, target: str, fold: Column) -> Column:
        """Return the code of unknown categories for the rows of a fold."""
        return self._mean(target)

    def _code_of_fold(self, i: int, keys: Sequence[str]) -> Column:
        """Return the code of a category in one fold, computed from all other folds."""
        from pyspark.sql import Window

        mean = self._mean(self.targets[i])
        total, count = F.col(f"sum_{i}"), F.col(f"count_{i}")
        if self._fold_col is None:
            return self._code(total, count, mean)
        whole = Window.partitionBy(*keys)
        total = F.sum(total).over(whole) - F.coalesce(total, F.lit(0.0))
        count = F.sum(count).over(whole) - count
        # avoid a rounding error where no rows remain
        return F.when(count > 0, self._code(total, count, mean)).otherwise(mean)


@spark.action
def _materialized(table: DataFrame) -> DataFrame:
    """Compute a table and keep the result: on the driver if small, else on the executors."""
    counted = table.persist()
    try:
        if counted.count() > DRIVER_VALUES:
            return computed(counted)
        return frame_of_arrow(table.sparkSession, to_arrow(counted), table.schema)
    finally:
        counted.unpersist()


# -- means of earlier times ------------------------------------------------------------------------


def time_folds(df: DataFrame, time_col: str, folds: object, fold_col: str) -> DataFrame:
    """Return `df` with a column of time folds, numbered from 0.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    time_col : str
        Column of numbers, dates or timestamps.
    folds : int, or list of times
        Number of folds with about equally many rows, or the start times of all folds but the first.
    fold_col : str
        Name of the new column.
    """
    spark.require_times(df, time_col)
    dtype = dtype_of(df, time_col)
    time = spark.as_number(col(time_col), dtype)
    if isinstance(folds, int) and not isinstance(folds, bool):
        edges = _edges_of_equal_parts(df.select(time.alias("time")), folds)
    else:
        edges = _edges_from_times(folds, df, dtype)
    begun = F.size(F.filter(F.array(*map(F.lit, edges)), lambda edge: edge <= time))
    message = f"The column {time_col} has nulls; drop or fill them first"
    fold = spark.value_or_error(begun, time.isNotNull(), message, "int")
    return df.withColumn(fold_col, fold if edges else F.lit(0))


def _edges_of_equal_parts(times: DataFrame, folds: int) -> list[float]:
    if folds < 2:
        raise UsageError(
            f"folds should be an integer from 2 on or a list of times, got {folds!r}",
            code="argument-value",
            argument="folds",
        )
    shares = [i / folds for i in range(1, folds)]
    return sorted(set(times.approxQuantile("time", shares, _RELATIVE_ERROR)))


def _edges_from_times(folds: Any, df: DataFrame, dtype: str) -> list[float]:
    are_numbers = column_types.is_number(dtype)
    is_list = isinstance(folds, list | tuple) and len(folds) > 0
    types: Any = int | float if are_numbers else str | datetime.date
    if not is_list or not all(isinstance(e, types) and not isinstance(e, bool) for e in folds):
        raise UsageError(
            "folds should be an integer from 2 on or a list of "
            f"{'numbers' if are_numbers else 'dates, timestamps or their texts'}, got {folds!r}",
            code="argument-type",
            argument="folds",
        )
    # Spark converts them in the time zone of the session
    dtype = "double" if are_numbers else dtype
    times = df.sparkSession.range(1).select(*(spark.as_number(F.lit(e), dtype) for e in folds))
    edges = list(cast("Row", times.first()))
    if any(a >= b for a, b in pairwise(edges)):
        raise UsageError(
            f"The times in folds should be ascending, got {folds!r}",
            code="argument-value",
            argument="folds",
        )
    return edges


class TimeStatistics(TargetStatistics):
    """Sums and counts of targets for each category and time fold.

    The code of a row uses the rows of all earlier folds only. So does the mean that fills in for
    unknown categories. Nothing from the row's fold or from the future leaks into its code. These
    are the ordered target statistics of CatBoost (Prokhorenkova et al., "CatBoost: unbiased
    boosting with categorical features", NeurIPS 2018), ordered by time, in folds instead of rows.

    The parameters are those of :class:`TargetStatistics`; folds are numbered in time order.
    """

    @cached_property
    def _earlier(self) -> dict[str, list[float | None]]:
        """Codes of unknown categories by target: the passed mean, or the mean before each fold."""
        return {
            target: [self.means[target]] if target in self._chosen_means else self._means_before(i)
            for i, target in enumerate(self.targets)
        }

    def _means_before(self, i: int) -> list[float | None]:
        """Return, for each fold, the mean of a target over all earlier folds.

        The first fold uses its local mean. That is a constant, so no row learns about another.
        """
        aggregates = [F.sum(f"sum_{i}"), F.sum(f"count_{i}")]
        sums = self._rows_of(self.encodings[0]).groupBy("fold").agg(*aggregates).collect()
        totals, counts = np.zeros((2, max((fold for fold, _, _ in sums), default=0) + 1))
        for fold, total, count in sums:
            totals[fold], counts[fold] = total or 0.0, count or 0
        totals, counts = totals.cumsum(), counts.cumsum()
        first = np.searchsorted(counts, 1)  # the first fold with a target value
        if first == len(counts):
            return [None]
        earlier = np.maximum(np.arange(len(counts)) - 1, first)
        return (totals[earlier] / counts[earlier]).tolist()

    def _prior(self, target: str, fold: Column) -> Column:
        means = self._earlier[target]
        if len(means) == 1:
            return F.lit(means[0]).cast("double")
        return F.get(F.array(*map(F.lit, means)), fold)

    def _code_of_fold(self, i: int, keys: Sequence[str]) -> Column:
        """Return the code of a category in one fold, computed from all earlier folds."""
        from pyspark.sql import Window

        earlier = Window.partitionBy(*keys).orderBy("fold")
        earlier = earlier.rowsBetween(Window.unboundedPreceding, -1)
        total, count = F.sum(f"sum_{i}").over(earlier), F.sum(f"count_{i}").over(earlier)
        prior = self._prior(self.targets[i], F.col("fold"))
        return self._code(total, F.coalesce(count, F.lit(0)), prior)


# -- operators -------------------------------------------------------------------------------------


class Codes(Function):
    """Function that looks up the code of a value or combination of values in a table.

    Parameters
    ----------
    table : pyarrow.Table
        Code table with the values in the columns ``key_<i>``.
    code : str
        Code column of the table.
    default : float, int or None
        Code of combinations that the table lacks.
    """

    is_costly = True

    def __init__(self, table: pa.Table, code: str, default: float | Sequence[float] | None):
        self.keys = [table[name].combine_chunks() for name in _keys(table)]
        self.codes, self.default = table[code].combine_chunks(), default
        self._vocabulary = Vocabulary(self.keys[0], self.codes)

    @cached_property
    def _by_keys(self) -> dict[tuple, Any]:
        keys = zip(*map(pa.Array.to_pylist, self.keys), strict=True)
        return dict(zip(keys, self.codes.to_pylist(), strict=True))

    def array(self, *values: pa.Array) -> pa.Array:
        if len(values) == 1:
            codes = self._vocabulary.find(*values)
            return codes if self.default is None else codes.fill_null(self.default)
        of_keys = self.single()
        return pa.array(map(of_keys, *map(pa.Array.to_pylist, values)), self.codes.type)

    def single(self, *input_types: str) -> Callable[..., Any]:
        known, default = self._by_keys, self.default
        return lambda *keys: known.get(keys, default)


def _keys(table: pa.Table) -> list[str]:
    return [name for name in table.column_names if name.startswith("key_")]


def _known(sums: pa.Table) -> pa.Table:
    """Keep the sums of category combinations that occur and contain no null, sorted by key."""
    keys = _keys(sums)
    sums = sums.filter(pc.greater(sums["rows"], 0))
    for name in keys:
        sums = sums.filter(pc.is_valid(sums[name]))
    return sums.sort_by([(name, "ascending") for name in keys])


def _total(sums: pa.Table, name: str) -> float:
    return pc.sum(sums[name]).as_py() or 0


class GroupEncode(Operator, ABC):
    """Base class of operators that look up codes for each group of categories in a table.

    The state maps the index of each group to its table.

    Attributes
    ----------
    groups : list of list of str
    code_type : str
        Spark type name of the codes.
    """

    groups: list[list[str]]
    code_type: str

    @property
    def categories(self) -> list[str]:
        """Columns of all groups, without repetition."""
        return list(dict.fromkeys(name for group in self.groups for name in group))

    @abstractmethod
    def codes(self, i: int, state: State | None) -> dict[str, tuple[str, Any]]:
        """Return the code column and the default code for each output of group `i`."""

    def cells(self, before: Schema, state: State | None) -> list[OutputColumn]:
        check_categories(before, self.categories)
        cells = []
        for i, group in enumerate(self.groups):
            for output, code in self.codes(i, state).items():
                function = None if state is None else Codes(state[str(i)], *code)
                cells.append(OutputColumn(tuple(group), output, Field(self.code_type), function))
        return cells

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        look_ups = []
        for i in range(len(self.groups)):
            keys = _keys(state[str(i)])
            columns = dict.fromkeys(column for column, _ in self.codes(i, state).values())
            table = frame_of_arrow(df.sparkSession, state[str(i)].select([*keys, *columns]))
            look_ups.append(self.look_up(i, table, keys, state))
        return vocabulary.join(df, look_ups).drop(*self.dropped)

    def look_up(
        self, i: int, table: DataFrame, keys: Sequence[str], state: State | None = None
    ) -> LookUp:
        """Return a LookUp that joins group `i` with a table on the key columns `keys`."""
        at = {key: col(name) for key, name in zip(keys, self.groups[i], strict=True)}
        outputs = {
            output: (column, F.lit(default).cast(self.code_type))
            for output, (column, default) in self.codes(i, state).items()
        }
        return LookUp(table, at, outputs)


@register_operator
@dataclass(frozen=True)
class TargetEncode(GroupEncode):
    """Operator that implements ``target_encode``; its state holds code tables and means.

    Attributes
    ----------
    groups : list of list of str
    targets : list of str
    out_cols : list of list of str
        Output names, one list per group with a name per target.
    """

    groups: list[list[str]]
    targets: list[str]
    out_cols: list[list[str]]
    target_mean: dict[str, float]
    smooth: float
    drop_cat: bool
    kfold: int = 1
    fold_seed: int | None = None
    fold_col: str = ""
    drop_fold: bool = True
    method = "target_encode"
    code_type = "double"

    @classmethod
    def of(
        cls,
        cat_cols: object,
        target_cols: ColumnNames,
        target_mean: object,
        out_cols: object,
        *options: Any,  # fields of the class
    ) -> TargetEncode:
        """Build the operator from the user's arguments."""
        targets = as_names(target_cols, "target_cols")
        groups, names = _group_names(cat_cols, targets, out_cols, "_te_")
        return cls(groups, targets, names, _check_means(target_mean, targets), *options)

    def __post_init__(self) -> None:
        if self.fold_seed is not None:
            check_integer("fold_seed", self.fold_seed)
        try:
            check_integer("kfold", self.kfold, 1)
        except UsageError:  # the message of BigDL 2.x
            raise UsageError(
                f"kfold should be an integer larger than 0, got {self.kfold!r}",
                code="argument-value",
                argument="kfold",
            ) from None
        check_number("smooth", self.smooth, 0)
        check_string(self.fold_col, "fold_col")
        if any(self.fold_col in outputs for outputs in self.out_cols):
            raise UsageError(
                f"out_cols and fold_col should differ, but both have {self.fold_col!r}",
                code="column-duplicate",
                argument="fold_col",
                column=self.fold_col,
            )

    @property
    def reads(self) -> list[str]:
        return self.categories + self.targets

    def requests(self, before: Schema) -> dict[str, Statistic]:
        check_categories(before, self.categories)
        require_type(before, self.targets, column_types.is_numeric, "numbers", rule=_TARGETS)
        count = len(self.targets)
        return {
            str(i): TargetSums((*group, *self.targets), count)
            for i, group in enumerate(self.groups)
        }

    def fit_state(self, before: Schema, statistics: Mapping[str, Any]) -> State:
        first = next(iter(statistics.values()))
        means = {}
        for i, name in enumerate(self.targets):
            count = _total(first, f"count_{i}")
            mean = _total(first, f"sum_{i}") / count if count else None
            means[name] = self.target_mean.get(name, mean)
        return {"means": means} | {
            key: self._codes(_known(sums), list(means.values())) for key, sums in statistics.items()
        }

    def _codes(self, sums: pa.Table, means: Sequence[float | None]) -> pa.Table:
        """Convert a group's table of sums and counts to a code table."""
        table = sums.select([*_keys(sums), "rows"])
        for i, mean in enumerate(means):
            codes = pa.nulls(len(sums), pa.float64())
            if mean is not None:
                total = sums[f"sum_{i}"].fill_null(0.0).to_numpy()
                count, smooth = sums[f"count_{i}"].to_numpy(), float(self.smooth)
                with np.errstate(all="ignore"):
                    code = smoothed(total, count, mean, smooth)
                    codes = pa.array(np.where(count + smooth > 0, code, mean))
            table = table.append_column(f"code_{i}", codes)
        return table

    def codes(self, i: int, state: State | None) -> dict[str, tuple[str, Any]]:
        means = {} if state is None else state["means"]
        return {
            output: (f"code_{j}", means.get(target))
            for j, (target, output) in enumerate(zip(self.targets, self.out_cols[i], strict=True))
        }

    @property
    def dropped(self) -> set[str]:
        """Category columns to remove, except columns that an output column replaces."""
        outputs = {name for row in self.out_cols for name in row}
        return set(self.categories) - outputs if self.drop_cat else set()

    def training(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        if self.kfold == 1:
            return self.catalyst(df, before, state)
        return dataclasses.replace(self, target_mean=state["means"]).by_folds(df)[0]

    def by_folds(self, df: DataFrame) -> tuple[DataFrame, TargetStatistics]:
        """Return a table with out-of-fold codes, and the per-category sums."""
        self._check(df)
        if self.kfold == 1:
            return self._encoded(TargetStatistics, df, None)
        rows = _with_folds(df, self.kfold, self.fold_seed, self.fold_col)
        rows, statistics = self._encoded(TargetStatistics, rows, self.fold_col)
        if self.drop_fold and self.fold_col not in df.columns:
            rows = rows.drop(self.fold_col)
        return rows, statistics

    def by_times(
        self, df: DataFrame, time_col: str, folds: object
    ) -> tuple[DataFrame, TargetStatistics]:
        """Return a table with codes from earlier time folds, and the per-category sums."""
        self._check(df)
        fold_col = spark.unused_name(df, "time_fold")
        rows = time_folds(df, time_col, folds, fold_col)
        rows, statistics = self._encoded(TimeStatistics, rows, fold_col)
        return rows.drop(fold_col), statistics

    def _encoded(
        self, of: type[TargetStatistics], rows: DataFrame, fold_col: str | None
    ) -> tuple[DataFrame, TargetStatistics]:
        encodings = [
            Encoding(tuple(group), dict(zip(self.targets, outputs, strict=True)))
            for group, outputs in zip(self.groups, self.out_cols, strict=True)
        ]
        statistics = of(rows, encodings, fold_col, self.target_mean, self.smooth)
        return statistics.encode(rows).drop(*self.dropped), statistics

    def _check(self, df: DataFrame) -> None:
        require_type(schema_of(df), self.targets, column_types.is_number, "numbers", rule=_TARGETS)
        require_columns(df.columns, self.categories)


@register_operator
@dataclass(frozen=True)
class CountEncode(GroupEncode):
    """Operator that implements ``count_encode``; its state holds a table of counts per group."""

    groups: list[list[str]]
    normalize: bool
    out_cols: list[str]
    method = "count_encode"

    @classmethod
    def of(cls, cat_cols: object, normalize: bool, out_cols: object) -> CountEncode:
        """Build the operator from the user's arguments, with one output per group."""
        if not isinstance(normalize, bool):
            raise UsageError(
                f"normalize should be a boolean, got {normalize!r}",
                code="argument-type",
                argument="normalize",
            )
        groups, names = _group_names(cat_cols, [_COUNTS[normalize]], out_cols, "_")
        return cls(groups, normalize, [name for row in names for name in row])

    @property
    def reads(self) -> list[str]:
        return self.categories

    def requests(self, before: Schema) -> dict[str, Statistic]:
        check_categories(before, self.categories)
        return {str(i): TargetSums(tuple(group), 0) for i, group in enumerate(self.groups)}

    def fit_state(self, before: Schema, statistics: Mapping[str, Any]) -> State:
        tables = {}
        for key, sums in statistics.items():
            known = _known(sums).rename_columns({"rows": "count"})
            share = known["count"].to_numpy() / max(_total(known, "count"), 1)
            tables[key] = known.append_column("frequency", pa.array(share))
        return tables

    @property
    def code_type(self) -> str:  # type: ignore[override]  # depends on an argument
        return "double" if self.normalize else "bigint"

    def codes(self, i: int, state: State | None) -> dict[str, tuple[str, Any]]:
        return {self.out_cols[i]: (_COUNTS[self.normalize], 0.0 if self.normalize else 0)}

    def count(self, df: DataFrame) -> list[DataFrame]:
        """Return the values of each group with their ``count`` and ``frequency``.

        One aggregation counts all groups. Rows with a null or NaN in the group are not counted.
        """
        self._check(df)
        statistics = TargetStatistics(df, [Encoding(tuple(group)) for group in self.groups])
        tables = []
        for encoding in statistics.encodings:
            counted = statistics.codes(encoding).toDF(*encoding.categories, "count")
            (total,) = spark.aggregate_values(counted, [F.sum("count")])
            tables.append(counted.withColumn("frequency", F.col("count") / F.lit(total)))
        return tables

    def encode(self, df: DataFrame, tables: Sequence[DataFrame], is_unique: bool) -> DataFrame:
        """Return `df` with counts or frequencies from one table per group.

        Pass `is_unique` if the tables are known to have every combination once.
        """
        self._check(df)
        wanted = _COUNTS[self.normalize]
        look_ups = []
        for i, (table, group) in enumerate(zip(tables, self.groups, strict=True)):
            if not is_unique:
                require_columns(table.columns, [*group, wanted], "table of counts")
                table = drop_duplicate_keys(table, group, [wanted])
            look_ups.append(self.look_up(i, table, group))
        return vocabulary.join(df, look_ups)

    def _check(self, df: DataFrame) -> None:
        require_columns(df.columns, self.categories)
        taken = [name for name in self.categories if name.lower() in _COUNTS]
        if taken:
            raise UsageError(
                f"The columns {taken} cannot be counted, since a table of counts has columns of "
                "these names; rename them first",
                code="column-duplicate",
                columns=taken,
            )
