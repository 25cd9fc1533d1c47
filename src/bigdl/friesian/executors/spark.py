"""The executor ``catalyst``: plans of Spark, by the operators of :class:`FeatureTable`."""

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
    batch_of,
    cut,
    flat,
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
from bigdl.friesian.ops.spark import F, action, col, kind_of, schema_of, shared, without_nan
from bigdl.friesian.ops.targets import target_figures
from bigdl.friesian.ops.vocabulary import VocabularySource, count_values, counts_of_sources, enough
from bigdl.orca.cluster.versions import data_type, observed, to_arrow

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

_ACCURACY = 10_000  # of percentile_approx: the rank is exact to one part in so many


def run(df: DataFrame, operator: Operator, state: State | None = None) -> DataFrame:
    """Return a DataFrame behind an operator, which learns from it if it is not given a state."""
    if state is None:
        state = learned(df, operator) if operator.is_row_wise else {}
    return applied(df, operator, schema_of(df), state)


def learned(df: DataFrame, operator: Operator) -> State:
    """Return the state of an operator that learns from a DataFrame."""
    before = schema_of(df)
    return operator.fit_state(before, answer(df, operator.requests(before)))


def applied(
    df: DataFrame, operator: Operator, before: Schema, state: Any, is_training: bool = False
) -> DataFrame:
    """Return a DataFrame behind a step, through Arrow batches where that is faster."""
    batched, rest = operator.split_for_arrow(state)
    if batched is not None and can_travel(df):
        df = mapped(df, [FittedOperator(batched, before, state)])
    else:
        rest = operator
    if rest is None:
        return df
    return (rest.training if is_training else rest.catalyst)(df, before, state)


def answer(df: DataFrame, requests: Mapping[str, Statistic]) -> dict[str, Any]:
    """Return the answers to requests about a DataFrame."""
    results = answers(df, [StatisticsQuery(0, dict(requests))]) if requests else {}
    return {name: results[0, name] for name in requests}


def transformed(
    df: DataFrame, fitted: Sequence[FittedOperator], schema: Schema, is_training: bool = False
) -> DataFrame:
    """A DataFrame behind all steps.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        May lack columns that no step reads; columns that were not there at ``fit`` are left out.
    fitted : list of FittedOperator
    schema : dict of str to Field
        Of the data at ``fit``.
    is_training : bool
        Whether these are the very rows that the steps learned from.
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
        if pays and can_travel(df):
            df = mapped(df, steps)
            continue
        for each in steps:
            df = applied(df, each.step, each.before, each.state, is_training)
    return df


@action
def answers(df: DataFrame, program: Program) -> dict[tuple[int, str], Any]:
    """Run a program; all counts of values and all figures come out of one job.

    Columns that are asked about are kept under a name of their own, as they are at that place.
    """
    asked: dict[tuple[int, str], Statistic] = {}
    outcomes: dict[tuple[int, str], Any] = {}
    for each in program:
        if isinstance(each, FittedOperator):
            df = applied(df, each.step, each.before, each.state)
            continue
        for name, request in each.requests.items():
            if isinstance(request, OutputSchema):
                after = schema_of(request.step.catalyst(df, schema_of(df), {}))
                outcomes[each.step, name] = {name: field.kind for name, field in after.items()}
                continue
            hidden = [f"{HIDDEN}{len(asked)}_{i}" for i in range(len(request.columns))]
            df = df.withColumns(dict(zip(hidden, map(col, request.columns), strict=True)))
            asked[each.step, name] = replace(request, columns=tuple(hidden))
    for request in asked.values():
        if not isinstance(request, (Counts, MinMax, Quantiles, *_OF_ITS_OWN)):
            raise TypeError(f"Spark has no plan for {type(request).__name__}; add it here")
    df = df.select(*(name for request in asked.values() for name in request.columns))
    counts = {key: each for key, each in asked.items() if isinstance(each, Counts)}
    figures = {key: each for key, each in asked.items() if isinstance(each, MinMax | Quantiles)}
    others = {
        key: _OF_ITS_OWN[type(each)](df, each)
        for key, each in asked.items()
        if type(each) in _OF_ITS_OWN
    }
    return outcomes | others | _counts_and_figures(df, counts, figures)


def _counts_and_figures(
    df: DataFrame, counts: Mapping[Any, Counts], figures: Mapping[Any, MinMax | Quantiles]
) -> dict[Any, Any]:
    """The figures are observed while the values are counted, if rows of Spark are counted."""
    from pyspark.sql import Observation

    texts = {key: each for key, each in counts.items() if each.separator is None}
    counted = _counts_of_texts(df, texts, scans.from_files)
    rest = {key: each for key, each in counts.items() if key not in counted}
    named = [_figure(df, each).alias(f"f{i}") for i, each in enumerate(figures.values())]
    observation = Observation() if named and rest else None
    rows = df if observation is None else df.observe(observation, *named)
    # cells with several values and others cannot be exploded by the same expression
    for separator in dict.fromkeys(each.separator for each in rest.values()):
        mine = {key: each for key, each in rest.items() if each.separator == separator}
        counted |= _counts(rows, mine, separator)
    # Spark observes nothing, and fails when asked, if it sees from the plan that there are no rows
    if observation is not None and any(counted[key].num_rows for key in rest):
        row = observed(observation)
    else:
        row = cast("Row", df.agg(*named).first()).asDict() if named else {}
    return counted | {key: row[f"f{i}"] or [] for i, key in enumerate(figures)}


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


def _figure(df: DataFrame, request: MinMax | Quantiles) -> Column:
    """The aggregate that answers a request: an array."""
    (name,) = request.columns
    kind = kind_of(df, name)
    value = without_nan(col(name), kind)
    if isinstance(request, MinMax) and request.is_finite and is_fractional(kind):
        value = F.when(F.abs(value) < float("inf"), value)
    if isinstance(request, MinMax):
        value = value if is_integral(kind) else value.cast("double")
        return F.array(F.min(value), F.max(value))
    shares = F.array(*map(F.lit, request.shares))
    return F.percentile_approx(value.cast("double"), shares, F.lit(_ACCURACY))


def _target_sums(df: DataFrame, request: TargetSums) -> pa.Table:
    split = len(request.columns) - request.targets
    named = [col(name).alias(f"key_{i}") for i, name in enumerate(request.columns[:split])]
    return to_arrow(df.groupBy(*named).agg(*target_figures(df, request.columns[split:])))


def _position_extremes(df: DataFrame, request: PositionMinMax) -> tuple[list, list]:
    (name,) = request.columns
    cells = df.select(F.posexplode(as_array(col(name), kind_of(df, name))))
    value = without_nan(F.col("col"), "double")
    grouped = cells.groupBy("pos").agg(F.min(value).alias("min"), F.max(value).alias("max"))
    table = to_arrow(grouped.sort("pos"))
    return table["min"].to_pylist(), table["max"].to_pylist()


_OF_ITS_OWN: dict[type[Statistic], Callable[..., Any]] = {
    TargetSums: _target_sums,
    PositionMinMax: _position_extremes,
}
"""Requests that take a job of their own."""


# -- texts counted in batches ----------------------------------------------------------------------

_COLUMNS = 8  # from which it is faster than rows of Spark


def _counts_of_texts(
    df: DataFrame, counts: Mapping[Any, Counts], way: Callable[..., DataFrame | None]
) -> dict[Any, pa.Table]:
    """Count the values of columns of text, without nulls.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    counts : dict of object to Counts
        Without separators.
    way : callable
        A function of :mod:`~bigdl.friesian.executors.scans`.

    Returns
    -------
    dict of object to pyarrow.Table
        Nothing if not all columns are text and many, or the way is none for this DataFrame.
    """
    requests = list(counts.values())
    names = dict.fromkeys(name for request in requests for name in request.columns)
    if len(names) < _COLUMNS or any(kind_of(df, name) != "string" for name in names):
        return {}

    def count(batch: LazyBatch) -> Iterator[pa.RecordBatch]:
        for place, request in enumerate(requests):
            table = request.of_batch(batch)
            places = pa.repeat(pa.scalar(place, pa.int32()), len(table))
            yield from table.add_column(0, "source", places).to_batches()

    rows = way(df.select(*map(col, names)), count, "source int, value string, count bigint")
    if rows is None:
        return {}
    counted = rows.groupBy("source", "value").agg(F.sum("count").alias("count"))
    frequent = enough(counted, (request.at_least for request in requests))
    tables = counts_of_sources(frequent, ["value"] * len(counts))
    return dict(zip(counts, tables, strict=True))


# -- steps in batches ------------------------------------------------------------------------------

_BATCH_ROWS = 1 << 16  # of a batch on its way back


def can_travel(df: DataFrame) -> bool:
    """Return True if all columns come back from Arrow as they were."""
    inner = [innermost(field.kind)[0] for field in schema_of(df).values()]
    return all(kind in PLAIN or kind.startswith(("decimal(", "timestamp")) for kind in inner)


def mapped(df: DataFrame, fitted: Sequence[FittedOperator]) -> DataFrame:
    """A DataFrame behind steps that are row-wise.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        May lack columns that no step reads, and have others, which come last.
    fitted : list of FittedOperator
    """
    from pyspark.sql.types import StructField, StructType

    types = {each.name: each.dataType for each in df.schema}
    made = {cell.output: cell.field.kind for each in fitted for cell in each.cells}
    others = [name for name in types if name not in fitted[0].before]
    known = {name: () for name in types if name not in others}
    names = batch_of(known).after_all(fitted).names
    fields = [
        StructField(name, data_type(made[name]) if name in made else types[name])
        for name in [*names, *others]
    ]
    steps = shared(list(fitted), df.sparkSession)

    def run(batch: LazyBatch) -> Iterator[pa.RecordBatch]:
        after_all = batch.select(known).after_all(steps.value)
        columns = [after_all[name] for name in names] + [batch[name] for name in others]
        for start in range(0, batch.rows, _BATCH_ROWS):
            rows = [flat(cut(each, start, _BATCH_ROWS)) for each in columns]
            yield pa.record_batch(rows, [*names, *others])

    return scans.map_batches(df, run, StructType(fields))
