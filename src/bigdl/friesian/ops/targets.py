"""Categories replaced by what is known about them: means of a target, and how often they occur.

Of a target, each row helps to form the means of others only.  One aggregation by grouping sets
gives the sums and counts of all categories and folds.  Everything else is computed from that table:
means of all rows, codes for new data, and codes without the rows of the own fold.
"""

from __future__ import annotations

import dataclasses
import datetime
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

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
from bigdl.friesian.ops.spark import F, as_names, check_string, col, kind_of, schema_of
from bigdl.friesian.ops.vocabulary import DRIVER_VALUES, LookUp, Vocabulary, check_categories
from bigdl.orca.cluster.versions import by_sets, computed, frame_of_arrow, to_arrow

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

COUNT = "target_encode_count"  # how many rows a category had, in a table of codes
_COUNTS = ("count", "frequency")
_TARGETS = "target_cols should be numeric"  # as BigDL 2.x says
_RELATIVE_ERROR = 0.001  # of the rank that an edge of times has


# -- tables of codes -------------------------------------------------------------------------------


def without_twins(table: DataFrame, keys: Sequence[str], values: Sequence[str]) -> DataFrame:
    """One row for each combination of keys: that with the largest count, then values.

    A table that a user made or united with another may have a combination twice, and a join would
    multiply rows.
    """
    if not values:
        return table
    order = [COUNT] if COUNT in table.columns and COUNT not in (*keys, *values) else []
    most = F.max(F.struct(*(col(name).alias(name) for name in (*order, *values))))
    best = spark.temporary(table, "best")
    rows = table.groupBy(*map(col, keys)).agg(most.alias(best))
    shown = [F.col(best).getField(name).alias(name) for name in values]
    return rows.select(*map(col, keys), *shown)


# -- means of targets ------------------------------------------------------------------------------


def smoothed(total: Any, count: Any, mean: Any, smooth: float) -> Any:
    """Return the code of a category as if `smooth` more rows had the mean: Columns or arrays."""
    return (total + mean * smooth) / (count + smooth)


def target_figures(df: DataFrame, targets: Sequence[str]) -> list[Column]:
    """The aggregates of some rows: their number, and of each target the sum and the count."""
    figures = [F.count("*").alias("rows")]
    for i, name in enumerate(targets):
        value = spark.without_nan(col(name).cast("double"), kind_of(df, name))
        figures += [F.sum(value).alias(f"sum_{i}"), F.count(value).alias(f"count_{i}")]
    return figures


@dataclass(frozen=True)
class Encoding:
    """A group of category columns, and the name of the result for each target."""

    categories: tuple[str, ...]
    outputs: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by target

    @property
    def key_columns(self) -> list[str]:
        """Names of the categories in a table of codes: their own, unless a code has that name."""
        taken = {COUNT, *self.outputs.values()}
        free = [name for name in self.categories if name not in taken]
        return [
            name if name in free else spark.temporary([*taken, *free], f"key{i}")
            for i, name in enumerate(self.categories)
        ]


def _named_groups(
    cat_cols: Any, targets: Sequence[str], out_cols: Any, infix: str
) -> tuple[list[list[str]], list[list[str]]]:
    """Return the groups of categories, and of each the names of its results.

    Parameters
    ----------
    cat_cols : str, list of str, or list whose elements may be lists of str (groups of columns)
    targets : list of str
        What each group has a result for.
    out_cols : str, list of str, or list of lists of str, optional
        The names; default: those of the columns and of the target with `infix` between them.
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
    # ["a_b", ["a", "b"]] would have one name for both
    spark.check_different([name for row in names for name in row], "The names of the codes")
    return groups, names


def _check_means(target_mean: Any, targets: Sequence[str]) -> dict[str, float]:
    """The means that the user gives for targets."""
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
            f"target_mean has nothing for {missing}, got {dict(target_mean)!r}",
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
    """`df` with a column of folds 0 … kfold − 1, unless it has one."""
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
    """Sums and counts of targets for each category, of every fold.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    encodings : list of Encoding
        All of the same targets.
    fold_col : str or None
        None if there are no folds.
    means : dict of str to float
        Of targets; those of the data are taken for the others.
    smooth : float
        How many rows with the mean are added to every category.
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
        self._table = _computed(self._aggregated(df, columns))
        self.means = {**self._means_of_data(), **self._chosen_means}

    def _aggregated(self, df: DataFrame, columns: list[str]) -> DataFrame:
        """One row for each category, fold and group of columns (``source``)."""
        rows = df.select(
            *(col(name).alias(self._key_of[name]) for name in columns),
            (F.lit(0) if self._fold_col is None else col(self._fold_col)).alias("fold"),
            *(col(name).alias(f"target_{i}") for i, name in enumerate(self.targets)),
        )
        figures = target_figures(rows, [f"target_{i}" for i in range(len(self.targets))])
        keys = [self._key_of[name] for name in columns]
        sets = [[*(self._key_of[name] for name in e.categories), "fold"] for e in self.encodings]
        distinct = [list(each) for each in dict.fromkeys(map(tuple, sets))]
        return by_sets(rows, [*keys, "fold"], distinct, figures)

    def _source(self, encoding: Encoding) -> int:
        """The grouping id: a bit for each key, from the first one down, set if it is left out."""
        keys = list(self._key_of)
        bits = [int(name not in encoding.categories) for name in keys] + [0]
        return int("".join(map(str, bits)), 2)

    def _rows_of(self, encoding: Encoding) -> DataFrame:
        return self._table.filter(F.col("source") == self._source(encoding))

    def _means_of_data(self) -> dict[str, float | None]:
        sums = [(F.sum(f"sum_{i}"), F.sum(f"count_{i}")) for i in range(len(self.targets))]
        means = [F.when(count > 0, total / count) for total, count in sums]
        values = spark.figures_of(self._rows_of(self.encodings[0]), means)
        return dict(zip(self.targets, values, strict=True))

    def _mean(self, target: str) -> Column:
        return F.lit(self.means[target]).cast("double")

    def _code(self, total: Column, count: Column, mean: Column) -> Column:
        code = smoothed(F.coalesce(total, F.lit(0.0)), count, mean, self.smooth)
        return F.when(count + F.lit(self.smooth) > 0, code).otherwise(mean)

    def codes(self, encoding: Encoding) -> DataFrame:
        """Codes for new data: the categories, the number of rows, and a code for each target."""
        keys = [self._key_of[name] for name in encoding.categories]
        rows = self._rows_of(encoding).dropna(subset=keys)
        figures = [F.sum("rows").alias(COUNT)]
        for i, target in enumerate(self.targets):
            code = self._code(F.sum(f"sum_{i}"), F.sum(f"count_{i}"), self._mean(target))
            figures.append(code.alias(encoding.outputs[target]))
        grouped = rows.groupBy(*keys).agg(*figures)
        names = encoding.key_columns
        named = [F.col(key).alias(name) for key, name in zip(keys, names, strict=True)]
        return grouped.select(*named, COUNT, *map(col, encoding.outputs.values()))

    def encode(self, df: DataFrame) -> DataFrame:
        """`df` with the codes of its rows, each by the rows of other folds."""
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
        """The code of a row of this fold, of whose category nothing is known."""
        return self._mean(target)

    def _code_of_fold(self, i: int, keys: Sequence[str]) -> Column:
        """The code of a category for the rows of one fold, by those of all others."""
        from pyspark.sql import Window

        mean = self._mean(self.targets[i])
        total, count = F.col(f"sum_{i}"), F.col(f"count_{i}")
        if self._fold_col is None:
            return self._code(total, count, mean)
        whole = Window.partitionBy(*keys)
        total = F.sum(total).over(whole) - F.coalesce(total, F.lit(0.0))
        count = F.sum(count).over(whole) - count
        # no rounding error in place of nothing
        return F.when(count > 0, self._code(total, count, mean)).otherwise(mean)


@spark.action
def _computed(table: DataFrame) -> DataFrame:
    """A table that is computed once: on the driver if it is small, else on the executors."""
    counted = table.persist()
    try:
        if counted.count() > DRIVER_VALUES:
            return computed(counted)
        return frame_of_arrow(table.sparkSession, to_arrow(counted), table.schema)
    finally:
        counted.unpersist()


# -- means of earlier times ------------------------------------------------------------------------


def time_folds(df: DataFrame, time_col: str, folds: Any, fold_col: str) -> DataFrame:
    """`df` with a column of the fold in which the time of each row is, from 0 on.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    time_col : str
        Numbers, dates or timestamps.
    folds : int, or list of times
        How many folds of about as many rows each, or where the second and all later ones begin.
    fold_col : str
        Name of the new column.
    """
    spark.require_times(df, time_col)
    kind = kind_of(df, time_col)
    time = spark.as_number(col(time_col), kind)
    if isinstance(folds, int) and not isinstance(folds, bool):
        edges = _edges_of_equal_parts(df.select(time.alias("time")), folds)
    else:
        edges = _given_edges(folds, df, kind)
    begun = F.size(F.filter(F.array(*map(F.lit, edges)), lambda edge: edge <= time))
    message = f"The column {time_col} has nulls; drop or fill them first"
    fold = spark.or_error(begun, time.isNotNull(), message, "int")
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


def _given_edges(folds: Any, df: DataFrame, kind: str) -> list[float]:
    are_numbers = column_types.is_number(kind)
    is_list = isinstance(folds, list | tuple) and len(folds) > 0
    types: Any = int | float if are_numbers else str | datetime.date
    if not is_list or not all(isinstance(e, types) and not isinstance(e, bool) for e in folds):
        raise UsageError(
            "folds should be an integer from 2 on or a list of "
            f"{'numbers' if are_numbers else 'dates, timestamps or their texts'}, got {folds!r}",
            code="argument-type",
            argument="folds",
        )
    # by Spark, in the time zone of the session
    kind = "double" if are_numbers else kind
    times = df.sparkSession.range(1).select(*(spark.as_number(F.lit(e), kind) for e in folds))
    edges = list(cast("Row", times.first()))
    if any(a >= b for a, b in pairwise(edges)):
        raise UsageError(
            f"The times in folds should be ascending, got {folds!r}",
            code="argument-value",
            argument="folds",
        )
    return edges


class TimeStatistics(TargetStatistics):
    """Sums and counts of targets for each category, of every fold of time.

    The code of a row is made of the rows of all earlier folds, and so is the mean that stands in
    for what a category does not tell, so that nothing of its own time or of the future reaches it:
    the ordered target statistics of CatBoost (Prokhorenkova et al., "CatBoost: unbiased boosting
    with categorical features", NeurIPS 2018) in the order of time, by folds instead of rows.

    The parameters are those of :class:`TargetStatistics`; folds have numbers in the order of time.
    """

    @cached_property
    def _earlier(self) -> dict[str, list[float | None]]:
        """Of each target its mean, or a mean for every fold."""
        return {
            target: [self.means[target]] if target in self._chosen_means else self._means_before(i)
            for i, target in enumerate(self.targets)
        }

    def _means_before(self, i: int) -> list[float | None]:
        """Of every fold the mean of a target in all earlier ones.

        The first fold has its own: a constant, which tells its rows nothing about each other.
        """
        figures = [F.sum(f"sum_{i}"), F.sum(f"count_{i}")]
        sums = self._rows_of(self.encodings[0]).groupBy("fold").agg(*figures).collect()
        totals, counts = np.zeros((2, max((fold for fold, _, _ in sums), default=0) + 1))
        for fold, total, count in sums:
            totals[fold], counts[fold] = total or 0.0, count or 0
        totals, counts = totals.cumsum(), counts.cumsum()
        first = np.searchsorted(counts, 1)  # the first fold that has a target at all
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
        """The code of a category for the rows of one fold, by those of all earlier ones."""
        from pyspark.sql import Window

        earlier = Window.partitionBy(*keys).orderBy("fold")
        earlier = earlier.rowsBetween(Window.unboundedPreceding, -1)
        total, count = F.sum(f"sum_{i}").over(earlier), F.sum(f"count_{i}").over(earlier)
        prior = self._prior(self.targets[i], F.col("fold"))
        return self._code(total, F.coalesce(count, F.lit(0)), prior)


# -- operators -------------------------------------------------------------------------------------


class Codes(Function):
    """The code of a value, or of several values together, in a table.

    Parameters
    ----------
    table : pyarrow.Table
        Its columns ``key_<i>`` are the values.
    code : str
        Column of the table.
    default : float, int or None
        For combinations that are not in the table.
    """

    is_costly = True

    def __init__(self, table: pa.Table, code: str, default: Any):
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
    """The combinations without a null that occur, in their order."""
    keys = _keys(sums)
    sums = sums.filter(pc.greater(sums["rows"], 0))
    for name in keys:
        sums = sums.filter(pc.is_valid(sums[name]))
    return sums.sort_by([(name, "ascending") for name in keys])


def _total(sums: pa.Table, name: str) -> Any:
    return pc.sum(sums[name]).as_py() or 0


class GroupEncode(Operator, ABC):
    """An operator that adds columns of a table of codes for each group of categories.

    The state has the tables by the places of the groups.

    Attributes
    ----------
    groups : list of list of str
    kind : str
        Of the codes.
    """

    groups: list[list[str]]
    kind: str

    @property
    def categories(self) -> list[str]:
        """The columns of all groups."""
        return list(dict.fromkeys(name for group in self.groups for name in group))

    @abstractmethod
    def codes(self, i: int, state: State | None) -> dict[str, tuple[str, Any]]:
        """By the results of a group the column of its table, and the code of unknown categories."""

    def cells(self, before: Schema, state: State | None) -> list[OutputColumn]:
        check_categories(before, self.categories)
        cells = []
        for i, group in enumerate(self.groups):
            for output, code in self.codes(i, state).items():
                function = None if state is None else Codes(state[str(i)], *code)
                cells.append(OutputColumn(tuple(group), output, Field(self.kind), function))
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
        """Return the look-up of a group in a table, whose columns `keys` are its categories."""
        at = {key: col(name) for key, name in zip(keys, self.groups[i], strict=True)}
        outputs = {
            output: (column, F.lit(default).cast(self.kind))
            for output, (column, default) in self.codes(i, state).items()
        }
        return LookUp(table, at, outputs)


@register_operator
@dataclass(frozen=True)
class TargetEncode(GroupEncode):
    """``target_encode``; the state has a table of codes for each group, and the means.

    Attributes
    ----------
    groups : list of list of str
    targets : list of str
    out_cols : list of list of str
        For each group a name for each target.
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
    kind = "double"

    @classmethod
    def of(
        cls, cat_cols: Any, target_cols: Any, target_mean: Any, out_cols: Any, *options: Any
    ) -> TargetEncode:
        """Return the operator for the arguments that users give."""
        targets = as_names(target_cols, "target_cols")
        groups, names = _named_groups(cat_cols, targets, out_cols, "_te_")
        return cls(groups, targets, names, _check_means(target_mean, targets), *options)

    def __post_init__(self) -> None:
        if self.fold_seed is not None:
            check_integer("fold_seed", self.fold_seed)
        try:
            check_integer("kfold", self.kfold, 1)
        except UsageError:  # in the words of BigDL 2.x
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

    def fit_state(self, before: Schema, answers: Mapping[str, Any]) -> State:
        first = next(iter(answers.values()))
        means = {}
        for i, name in enumerate(self.targets):
            count = _total(first, f"count_{i}")
            mean = _total(first, f"sum_{i}") / count if count else None
            means[name] = self.target_mean.get(name, mean)
        return {"means": means} | {
            place: self._codes(_known(sums), list(means.values()))
            for place, sums in answers.items()
        }

    def _codes(self, sums: pa.Table, means: Sequence[float | None]) -> pa.Table:
        """The table of codes by sums and counts."""
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
        """The categories that no code has taken the place of, if they are left out."""
        outputs = {name for row in self.out_cols for name in row}
        return set(self.categories) - outputs if self.drop_cat else set()

    def training(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        if self.kfold == 1:
            return self.catalyst(df, before, state)
        return dataclasses.replace(self, target_mean=state["means"]).by_folds(df)[0]

    def by_folds(self, df: DataFrame) -> tuple[DataFrame, TargetStatistics]:
        """Return a table with codes which a row's own fold does not help to form, and the sums."""
        self._check(df)
        if self.kfold == 1:
            return self._encoded(TargetStatistics, df, None)
        rows = _with_folds(df, self.kfold, self.fold_seed, self.fold_col)
        rows, statistics = self._encoded(TargetStatistics, rows, self.fold_col)
        if self.drop_fold and self.fold_col not in df.columns:
            rows = rows.drop(self.fold_col)
        return rows, statistics

    def by_times(
        self, df: DataFrame, time_col: str, folds: Any
    ) -> tuple[DataFrame, TargetStatistics]:
        """Return a table with codes which only rows of an earlier time help to form."""
        self._check(df)
        fold_col = spark.temporary(df, "time_fold")
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
    """``count_encode``; the state has a table of counts for each group."""

    groups: list[list[str]]
    normalize: bool
    out_cols: list[str]
    method = "count_encode"

    @classmethod
    def of(cls, cat_cols: Any, normalize: bool, out_cols: Any) -> CountEncode:
        """Return the operator for the arguments that users give: a result for each group."""
        if not isinstance(normalize, bool):
            raise UsageError(
                f"normalize should be a boolean, got {normalize!r}",
                code="argument-type",
                argument="normalize",
            )
        groups, names = _named_groups(cat_cols, [_COUNTS[normalize]], out_cols, "_")
        return cls(groups, normalize, [name for row in names for name in row])

    @property
    def reads(self) -> list[str]:
        return self.categories

    def requests(self, before: Schema) -> dict[str, Statistic]:
        check_categories(before, self.categories)
        return {str(i): TargetSums(tuple(group), 0) for i, group in enumerate(self.groups)}

    def fit_state(self, before: Schema, answers: Mapping[str, Any]) -> State:
        tables = {}
        for place, sums in answers.items():
            known = _known(sums).rename_columns({"rows": "count"})
            share = known["count"].to_numpy() / max(_total(known, "count"), 1)
            tables[place] = known.append_column("frequency", pa.array(share))
        return tables

    @property
    def kind(self) -> str:  # type: ignore[override]  # it depends on an argument
        return "double" if self.normalize else "bigint"

    def codes(self, i: int, state: State | None) -> dict[str, tuple[str, Any]]:
        return {self.out_cols[i]: (_COUNTS[self.normalize], 0.0 if self.normalize else 0)}

    def count(self, df: DataFrame) -> list[DataFrame]:
        """Return of each group its values, their ``count`` and their ``frequency``.

        One aggregation counts all groups.  Rows with a null or NaN in the group are not counted.
        """
        self._check(df)
        statistics = TargetStatistics(df, [Encoding(tuple(group)) for group in self.groups])
        tables = []
        for encoding in statistics.encodings:
            counted = statistics.codes(encoding).toDF(*encoding.categories, "count")
            (total,) = spark.figures_of(counted, [F.sum("count")])
            tables.append(counted.withColumn("frequency", F.col("count") / F.lit(total)))
        return tables

    def encode(self, df: DataFrame, tables: Sequence[DataFrame], is_unique: bool) -> DataFrame:
        """Return `df` with the counts or frequencies of a table for each group.

        `is_unique` tells that the tables surely have every combination once.
        """
        self._check(df)
        wanted = _COUNTS[self.normalize]
        look_ups = []
        for i, (table, group) in enumerate(zip(tables, self.groups, strict=True)):
            if not is_unique:
                require_columns(table.columns, [*group, wanted], "table of counts")
                table = without_twins(table, group, [wanted])
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
