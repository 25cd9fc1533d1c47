"""Executor ``catalyst``: runs the operators of tables and pipelines as Spark query plans."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from bigdl.friesian.executors import scans
from bigdl.friesian.ops.batches import (
    Counts,
    LazyBatch,
    MinMax,
    PositionMinMax,
    Quantiles,
    TargetSums,
    decoded,
    lazy_batch,
    slice_rows,
)
from bigdl.friesian.ops.cells import HIDDEN
from bigdl.friesian.ops.column_types import PLAIN, Schema, innermost, is_fractional, is_integral
from bigdl.friesian.ops.numbers import as_array
from bigdl.friesian.ops.operator import (
    FittedOperator,
    Operator,
    OutputSchema,
    Program,
    State,
    Statistic,
    StatisticsQuery,
    check_schema,
    inputs_of,
)
from bigdl.friesian.ops.spark import (
    F,
    action,
    broadcast_value,
    col,
    dtype_of,
    schema_of,
    without_nan,
)
from bigdl.friesian.ops.targets import target_aggregates
from bigdl.friesian.ops.vocabulary import (
    VocabularySource,
    count_values,
    counts_of_sources,
    keep_frequent,
)
from bigdl.orca.cluster.versions import data_type, observed, to_arrow

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

_ACCURACY = 10_000  # accuracy of percentile_approx: the rank error is at most 1 / _ACCURACY


def run_operator(df: DataFrame, operator: Operator, state: State | None = None) -> DataFrame:
    """Apply an operator to a DataFrame; fit it on the DataFrame if no state is passed."""
    if state is None:
        state = fit_operator(df, operator) if operator.is_row_wise else {}
    return apply_operator(df, operator, schema_of(df), state)


def fit_operator(df: DataFrame, operator: Operator) -> State:
    """Fit an operator on a DataFrame and return its state."""
    before = schema_of(df)
    return operator.fit_state(before, statistics_of(df, operator.requests(before)))


def apply_operator(
    df: DataFrame, operator: Operator, before: Schema, state: Any, is_training: bool = False
) -> DataFrame:  # state: the operator's
    """Apply a fitted operator to a DataFrame, in Arrow batches where that is faster."""
    batched, remainder = operator.split_for_arrow(state)
    if batched is not None and is_arrow_safe(df):
        df = apply_in_batches(df, [FittedOperator(batched, before, state)])
    else:
        remainder = operator
    if remainder is None:
        return df
    return (remainder.training if is_training else remainder.catalyst)(df, before, state)


def statistics_of(df: DataFrame, requests: Mapping[str, Statistic]) -> dict[str, Any]:
    """Compute the requested statistics of a DataFrame; return them by name."""
    results = compute_statistics(df, [StatisticsQuery(0, dict(requests))]) if requests else {}
    return {name: results[0, name] for name in requests}


def transform(
    df: DataFrame, fitted: Sequence[FittedOperator], schema: Schema, is_training: bool = False
) -> DataFrame:
    """Apply all fitted operators to a DataFrame.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        May lack columns that no operator reads; columns that ``fit`` has not seen are left out.
    fitted : list of FittedOperator
    schema : dict of str to Field
        Schema of the data at ``fit``.
    is_training : bool
        True if these are the rows that the operators were fitted on.
    """
    check_schema(schema_of(df), schema, inputs_of(fitted))
    df = df.select(*(col(name) for name in schema if name in df.columns))

    def can_batch(each: FittedOperator) -> bool:
        is_same = not is_training or type(each.step).training is Operator.training
        return each.step.is_row_wise and is_same

    for are_row_wise, run in groupby(fitted, can_batch):
        steps = list(run)
        pays = are_row_wise and any(
            each.step.split_for_arrow(each.state)[1] is None for each in steps
        )
        if pays and is_arrow_safe(df):
            df = apply_in_batches(df, steps)
            continue
        for each in steps:
            df = apply_operator(df, each.step, each.before, each.state, is_training)
    return df


@action
def compute_statistics(df: DataFrame, program: Program) -> dict[tuple[int, str], Any]:
    """Compute the requested statistics; one job computes all counts and aggregates.

    Each requested column is copied under a temporary name at its step, because later steps may
    change it.
    """
    pending: dict[tuple[int, str], Statistic] = {}
    outcomes: dict[tuple[int, str], Any] = {}
    for each in program:
        if isinstance(each, FittedOperator):
            df = apply_operator(df, each.step, each.before, each.state)
            continue
        for name, request in each.requests.items():
            if isinstance(request, OutputSchema):
                after = schema_of(request.step.catalyst(df, schema_of(df), {}))
                outcomes[each.step, name] = {name: field.kind for name, field in after.items()}
                continue
            hidden = [f"{HIDDEN}{len(pending)}_{i}" for i in range(len(request.columns))]
            df = df.withColumns(dict(zip(hidden, map(col, request.columns), strict=True)))
            pending[each.step, name] = replace(request, columns=tuple(hidden))
    for request in pending.values():
        if not isinstance(request, (Counts, MinMax, Quantiles, *_SEPARATE_JOBS)):
            raise TypeError(f"No Spark plan for {type(request).__name__}; add it to _SEPARATE_JOBS")
    df = df.select(*(name for request in pending.values() for name in request.columns))
    counts = {key: each for key, each in pending.items() if isinstance(each, Counts)}
    aggregates = {
        key: each for key, each in pending.items() if isinstance(each, MinMax | Quantiles)
    }
    others = {
        key: _SEPARATE_JOBS[type(each)](df, each)
        for key, each in pending.items()
        if type(each) in _SEPARATE_JOBS
    }
    return outcomes | others | _counts_and_aggregates(df, counts, aggregates)


def _counts_and_aggregates(
    df: DataFrame, counts: Mapping[Any, Counts], aggregates: Mapping[Any, MinMax | Quantiles]
) -> dict[Any, Any]:
    """Compute value counts and aggregates; the counting job also computes the aggregates.

    They are observed only where Spark rows are counted.
    """
    from pyspark.sql import Observation

    texts = {key: each for key, each in counts.items() if each.separator is None}
    counted = _counts_of_texts(df, texts, scans.from_files)
    rest = {key: each for key, each in counts.items() if key not in counted}
    named = [_aggregate(df, each).alias(f"f{i}") for i, each in enumerate(aggregates.values())]
    observation = Observation() if named and rest else None
    rows = df if observation is None else df.observe(observation, *named)
    # cells with and without a separator need different explode expressions
    for separator in dict.fromkeys(each.separator for each in rest.values()):
        mine = {key: each for key, each in rest.items() if each.separator == separator}
        counted |= _counts(rows, mine, separator)
    # without rows in the plan Spark records no observation, and `get` would fail
    if observation is not None and any(counted[key].num_rows for key in rest):
        row = observed(observation)
    else:
        row = cast("Row", df.agg(*named).first()).asDict() if named else {}
    return counted | {key: row[f"f{i}"] or [] for i, key in enumerate(aggregates)}


def _counts(
    df: DataFrame, counts: Mapping[Any, Counts], separator: str | None
) -> dict[Any, pa.Table]:
    if separator is None and (of_texts := _counts_of_texts(df, counts, scans.from_rows)):
        return of_texts
    requests = counts.values()
    sources = [
        VocabularySource(str(i), each.columns, each.at_least) for i, each in enumerate(requests)
    ]
    counted, fields = count_values(df, sources, separator and re.escape(separator))
    return dict(zip(counts, counts_of_sources(counted, fields), strict=True))


def _aggregate(df: DataFrame, request: MinMax | Quantiles) -> Column:
    """Return the Spark aggregate expression for a statistic; its value is an array."""
    (name,) = request.columns
    dtype = dtype_of(df, name)
    value = without_nan(col(name), dtype)
    if isinstance(request, MinMax) and request.is_finite and is_fractional(dtype):
        value = F.when(F.abs(value) < float("inf"), value)
    if isinstance(request, MinMax):
        value = value if is_integral(dtype) else value.cast("double")
        return F.array(F.min(value), F.max(value))
    shares = F.array(*map(F.lit, request.shares))
    return F.percentile_approx(value.cast("double"), shares, F.lit(_ACCURACY))


def _target_sums(df: DataFrame, request: TargetSums) -> pa.Table:
    split = len(request.columns) - request.targets
    named = [col(name).alias(f"key_{i}") for i, name in enumerate(request.columns[:split])]
    return to_arrow(df.groupBy(*named).agg(*target_aggregates(df, request.columns[split:])))


def _position_extremes(df: DataFrame, request: PositionMinMax) -> tuple[list, list]:
    (name,) = request.columns
    cells = df.select(F.posexplode(as_array(col(name), dtype_of(df, name))))
    value = without_nan(F.col("col"), "double")
    grouped = cells.groupBy("pos").agg(F.min(value).alias("min"), F.max(value).alias("max"))
    table = to_arrow(grouped.sort("pos"))
    return table["min"].to_pylist(), table["max"].to_pylist()


_SEPARATE_JOBS: dict[type[Statistic], Callable[..., Any]] = {
    TargetSums: _target_sums,
    PositionMinMax: _position_extremes,
}
"""Statistics that need a separate job each."""


# -- string columns counted in batches -------------------------------------------------------------

_COLUMNS = 8  # minimum number of columns for which batches are faster than Spark rows


def _counts_of_texts(
    df: DataFrame, counts: Mapping[Any, Counts], scan: Callable[..., DataFrame | None]
) -> dict[Any, pa.Table]:
    """Count the values of string columns in Arrow batches; nulls are not counted.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    counts : dict of object to Counts
        Without separators.
    scan : callable
        ``from_files`` or ``from_rows`` of :mod:`~bigdl.friesian.executors.scans`.

    Returns
    -------
    dict of object to pyarrow.Table
        Empty if a column is no string, if there are few columns, or if `scan` does not support the
        DataFrame.
    """
    requests = list(counts.values())
    names = dict.fromkeys(name for request in requests for name in request.columns)
    if len(names) < _COLUMNS or any(dtype_of(df, name) != "string" for name in names):
        return {}

    def count(batch: LazyBatch) -> Iterator[pa.RecordBatch]:
        for index, request in enumerate(requests):
            table = cast("pa.Table", request.partial_result(batch))
            source = pa.repeat(pa.scalar(index, pa.int32()), len(table))
            yield from table.add_column(0, "source", source).to_batches()

    rows = scan(df.select(*map(col, names)), count, "source int, value string, count bigint")
    if rows is None:
        return {}
    counted = rows.groupBy("source", "value").agg(F.sum("count").alias("count"))
    frequent = keep_frequent(counted, (request.at_least for request in requests))
    tables = counts_of_sources(frequent, ["value"] * len(counts))
    return dict(zip(counts, tables, strict=True))


# -- operators in Arrow batches --------------------------------------------------------------------

_BATCH_ROWS = 1 << 16  # rows of a batch that is returned to Spark


def is_arrow_safe(df: DataFrame) -> bool:
    """Return True if all columns keep their types through Arrow."""
    inner = [innermost(field.kind)[0] for field in schema_of(df).values()]
    return all(dtype in PLAIN or dtype.startswith(("decimal(", "timestamp")) for dtype in inner)


def apply_in_batches(df: DataFrame, fitted: Sequence[FittedOperator]) -> DataFrame:
    """Apply row-wise operators to a DataFrame in Arrow batches.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        May lack columns that no operator reads. Columns that the operators do not know come last.
    fitted : list of FittedOperator
    """
    from pyspark.sql.types import StructField, StructType

    types = {each.name: each.dataType for each in df.schema}
    new_types = {cell.output: cell.field.kind for each in fitted for cell in each.cells}
    others = [name for name in types if name not in fitted[0].before]
    known = {name: () for name in types if name not in others}
    names = lazy_batch(known).after_all(fitted).names
    fields = [
        StructField(name, data_type(new_types[name]) if name in new_types else types[name])
        for name in [*names, *others]
    ]
    steps = broadcast_value(list(fitted), df.sparkSession)

    def run(batch: LazyBatch) -> Iterator[pa.RecordBatch]:
        results = batch.select(known).after_all(steps.value)
        columns = [results[name] for name in names] + [batch[name] for name in others]
        for start in range(0, batch.rows, _BATCH_ROWS):
            rows = [decoded(slice_rows(each, start, _BATCH_ROWS)) for each in columns]
            yield pa.record_batch(rows, [*names, *others])

    return scans.map_batches(df, run, StructType(fields))
