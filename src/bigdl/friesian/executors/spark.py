"""The executor ``catalyst``: plans of Spark, by the operators of :class:`FeatureTable`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from bigdl.friesian.executors import scans
from bigdl.friesian.executors.tallies import tally
from bigdl.friesian.ops import kinds
from bigdl.friesian.ops.batches import Batch, Values, batch_of, cut, flat
from bigdl.friesian.ops.columns import HIDDEN, col, kind_of, schema_of
from bigdl.friesian.ops.lookup import shared
from bigdl.friesian.ops.operator import (
    Ask,
    Counts,
    Extremes,
    Fitted,
    Operator,
    Outcome,
    Program,
    Quantiles,
    Request,
    Schema,
    TargetSums,
    check_schema,
    inputs_of,
)
from bigdl.friesian.ops.spark import F

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Observation

__all__ = ["answer", "answers", "can_travel", "mapped", "run", "transformed"]

_ACCURACY = 10_000  # of percentile_approx: the rank is exact to one part in so many


def run(df: DataFrame, operator: Operator) -> DataFrame:
    """Return a DataFrame behind an operator that learns from it."""
    before = schema_of(df)
    state: Mapping[str, Any] = {}
    if operator.is_row_wise:
        state = operator.settled(before, answer(df, operator.requests(before)))
    return applied(df, operator, before, state)


def applied(
    df: DataFrame, operator: Operator, before: Schema, state: Any, is_training: bool = False
) -> DataFrame:
    """Return a DataFrame behind a step, through Arrow batches where that is faster."""
    batched, rest = operator.divided(state)
    if batched is not None and can_travel(df):
        df, operator = mapped(df, [Fitted(batched, before, state)]), rest
    method = operator.training if is_training else operator.catalyst
    return method(df, before, state)


def answer(df: DataFrame, requests: dict[str, Request]) -> dict[str, Any]:
    """Return the answers to requests about a DataFrame."""
    found = answers(df, [Ask(0, requests)]) if requests else {}
    return {name: found[0, name] for name in requests}


def transformed(
    df: DataFrame, fitted: Sequence[Fitted], schema: Schema, is_training: bool = False
) -> DataFrame:
    """A DataFrame behind all steps.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        May lack columns that no step reads; columns that were not there at ``fit`` are left out.
    fitted : list of Fitted
    schema : dict of str to Field
        Of the data at ``fit``.
    is_training : bool
        Whether these are the very rows that the steps learned from.
    """
    check_schema(schema_of(df), schema, inputs_of(fitted))
    df = df.select(*(col(name) for name in schema if name in df.columns))
    for in_batches, run in together(df, fitted, is_training):
        if in_batches:
            df = mapped(df, run)
            continue
        for each in run:
            df = applied(df, each.step, each.before, each.state, is_training)
    return df


def answers(df: DataFrame, program: Program) -> dict[tuple[int, str], Any]:
    """Run a program; all counts of values and all figures come out of one job.

    Columns that are asked about are kept under a name of their own, as they are at that place.
    """
    asked: dict[tuple[int, str], Request] = {}
    found: dict[tuple[int, str], Any] = {}
    for each in program:
        if isinstance(each, Fitted):
            df = applied(df, each.step, each.before, each.state)
            continue
        for name, request in each.requests.items():
            if isinstance(request, Outcome):
                after = schema_of(request.step.catalyst(df, schema_of(df), {}))
                found[each.step, name] = {name: field.kind for name, field in after.items()}
                continue
            hidden = [f"{HIDDEN}{len(asked)}_{i}" for i in range(len(request.columns))]
            df = df.withColumns(dict(zip(hidden, map(col, request.columns), strict=True)))
            asked[each.step, name] = replace(request, columns=tuple(hidden))
    df = df.select(*(name for request in asked.values() for name in request.columns))
    return found | _answers(df, asked)


def _answers(df: DataFrame, asked: Mapping[Any, Request]) -> dict[Any, Any]:
    counts = {key: each for key, each in asked.items() if isinstance(each, Counts)}
    figures = {key: each for key, each in asked.items() if isinstance(each, Extremes | Quantiles)}
    sums = {key: each for key, each in asked.items() if isinstance(each, TargetSums)}
    found = _counts_and_figures(df, counts, figures)
    return found | {key: _target_sums(df, each) for key, each in sums.items()}


def _counts_and_figures(
    df: DataFrame, counts: Mapping[Any, Counts], figures: Mapping[Any, Extremes | Quantiles]
) -> dict[Any, Any]:
    """The figures are observed while the values are counted, if rows of Spark are counted."""
    from pyspark.sql import Observation

    found = _counts_of_files(df, counts)
    rest = {key: each for key, each in counts.items() if key not in found}
    columns = [each for request in figures.values() for each in _figures(df, request)]
    named = [each.alias(f"f{i}") for i, each in enumerate(columns)]
    if not rest:
        row = cast("Any", df.agg(*named).first()).asDict() if named else {}
        return found | _read_figures(figures, row)
    observation = Observation() if named else None
    rows = df if observation is None else df.observe(observation, *named)
    counted: dict[Any, pa.Table] = {}
    # cells with several values and others cannot be exploded by the same expression
    for separator in dict.fromkeys(each.separator for each in rest.values()):
        mine = {key: each for key, each in rest.items() if each.separator == separator}
        counted |= _counts(rows, mine, separator)
    row = _observed(observation, df, named, counted.values())
    return found | counted | _read_figures(figures, row)


def _observed(
    observation: Observation | None, df: DataFrame, named: list[Column], counts: Iterable[pa.Table]
) -> dict[str, Any]:
    """Return the figures that were observed while values were counted.

    Spark observes nothing, and fails when asked, if it sees from the plan that there are no rows.
    Then nothing was counted, so that the figures of such data are computed by themselves.
    """
    if observation is None:
        return {}
    if any(each.num_rows for each in counts):
        return observation.get
    return cast("Any", df.agg(*named).first()).asDict()


def _counts_of_files(df: DataFrame, counts: Mapping[Any, Counts]) -> dict[Any, pa.Table]:
    """Those of texts that stand in files as they are; nothing if that does not pay or work."""
    texts = {key: each for key, each in counts.items() if each.separator is None}
    requests = list(texts.values())
    counted = count_texts(df, requests, scans.from_files) if pays(df, requests) else None
    return {} if counted is None else _tables(counted, dict.fromkeys(texts, "value"))


def _counts(
    df: DataFrame, counts: Mapping[Any, Counts], separator: str | None
) -> dict[Any, pa.Table]:
    import re

    from bigdl.friesian.ops.vocabulary import Source, count_values

    requests = list(counts.values())
    if separator is None and pays(df, requests):
        counted: Any = count_texts(df, requests, scans.from_rows)
        return _tables(counted, dict.fromkeys(counts, "value"))
    sources = [Source(str(i), each.columns, each.at_least) for i, each in enumerate(requests)]
    counted, fields = count_values(df, sources, separator and re.escape(separator))
    return _tables(counted, dict(zip(counts, fields, strict=True)))


def _tables(counted: DataFrame, fields: Mapping[Any, str]) -> dict[Any, pa.Table]:
    """The counts of each request, given the column that its values are in."""

    table = counted.toArrow()
    found = {}
    for i, (key, field) in enumerate(fields.items()):
        mine = table.filter(pc.equal(table["source"], i))
        found[key] = mine.select([field, "count"]).rename_columns(["value", "count"])
    return found


def _figures(df: DataFrame, request: Extremes | Quantiles) -> list[Column]:

    (name,) = request.columns
    kind, value = kind_of(df, name), col(name)
    if kinds.is_fractional(kind):
        present = ~F.isnan(value)
        if isinstance(request, Extremes) and request.is_finite:
            present = present & (F.abs(value) < float("inf"))
        value = F.when(present, value)
    if isinstance(request, Extremes):
        value = value if kinds.is_integral(kind) else value.cast("double")
        return [F.min(value), F.max(value)]
    shares = F.array(*map(F.lit, request.shares))
    return [F.percentile_approx(value.cast("double"), shares, F.lit(_ACCURACY))]


def _read_figures(figures: Mapping[Any, Request], row: Mapping[str, Any]) -> dict[Any, Any]:
    values = iter(row[f"f{i}"] for i in range(len(row)))
    return {
        key: (next(values), next(values))
        if isinstance(request, Extremes)
        else list(next(values) or [])
        for key, request in figures.items()
    }


def _target_sums(df: DataFrame, request: TargetSums) -> pa.Table:

    split = len(request.columns) - request.targets
    keys, targets = request.columns[:split], request.columns[split:]
    figures = [F.count("*").alias("rows")]
    for i, name in enumerate(targets):
        value = col(name).cast("double")
        if kinds.is_fractional(kind_of(df, name)):
            value = F.when(~F.isnan(value), value)
        figures += [F.sum(value).alias(f"sum_{i}"), F.count(value).alias(f"count_{i}")]
    named = [col(name).alias(f"key_{i}") for i, name in enumerate(keys)]
    return df.groupBy(*named).agg(*figures).toArrow()


# -- texts counted in batches ----------------------------------------------------------------------

_COLUMNS = 8  # from which it is faster than rows of Spark


def pays(df: DataFrame, requests: Sequence[Counts]) -> bool:
    """Return True if all columns are text, and many."""
    columns = [name for request in requests for name in request.columns]
    return len(columns) >= _COLUMNS and all(kind_of(df, name) == "string" for name in columns)


def count_texts(
    df: DataFrame, requests: Sequence[Counts], way: Callable[..., DataFrame | None]
) -> DataFrame | None:
    """Count the values of columns of text, without nulls.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    requests : list of Counts
        Without separators.
    way : callable
        A function of :mod:`~bigdl.friesian.executors.scans`.

    Returns
    -------
    pyspark.sql.DataFrame or None
        Columns ``source`` (int), the place of the request, ``value`` and ``count``; values that
        occur too rarely are left out.  None if the way is none for this DataFrame.
    """

    def count(batch: Batch) -> Iterator[pa.RecordBatch]:
        for place, request in enumerate(requests):
            counts = tally(request, batch)
            places = pa.repeat(pa.scalar(place, pa.int32()), len(counts))
            yield from counts.add_column(0, "source", places).to_batches()

    names = dict.fromkeys(name for request in requests for name in request.columns)
    found = way(df.select(*map(col, names)), count, "source int, value string, count bigint")
    if found is None:
        return None
    found = found.groupBy("source", "value").agg(F.sum("count").alias("count"))
    limits = F.lit(True)
    for place, request in enumerate(requests):
        if request.at_least > 1:
            limits = limits & ((F.col("source") != place) | (F.col("count") >= request.at_least))
    return found.filter(limits)


# -- steps in batches ------------------------------------------------------------------------------

_BATCH_ROWS = 1 << 16  # of a batch on its way back
_PLAIN = ("decimal(", "timestamp")
_NAMES = ("tinyint", "smallint", "int", "bigint", "float", "double", "boolean", "string", "date")


def together(
    df: DataFrame, fitted: Sequence[Fitted], is_training: bool
) -> Iterator[tuple[bool, list[Fitted]]]:
    """Cut steps into runs: whether they go through Arrow together, and the steps.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        In front of the steps.
    fitted : list of Fitted
    is_training : bool
        Whether these are the rows that the steps learned from.
    """
    run: list[Fitted] = []
    for each in fitted:
        is_same = not is_training or type(each.step).training is Operator.training
        if each.step.is_row_wise and is_same:
            run.append(each)
            continue
        yield from _run(df, run)
        run = []
        yield False, [each]
    yield from _run(df, run)


def _run(df: DataFrame, run: list[Fitted]) -> Iterator[tuple[bool, list[Fitted]]]:
    if run:
        yield any(each.step.pays_in_batches(each.state) for each in run) and can_travel(df), run


def can_travel(df: DataFrame) -> bool:
    """Return True if all columns come back from Arrow as they were."""
    return all(_is_plain(each.dataType.simpleString()) for each in df.schema)


def _is_plain(kind: str) -> bool:
    while kind.startswith("array<"):
        kind = kind[len("array<") : -1]
    return kind in _NAMES or kind.startswith(_PLAIN)


def mapped(df: DataFrame, fitted: Sequence[Fitted]) -> DataFrame:
    """A DataFrame behind steps that are row-wise.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        May lack columns that no step reads, and have others, which come last.
    fitted : list of Fitted
    """
    from pyspark.sql.types import StructField, StructType

    types = {each.name: each.dataType for each in df.schema}
    made = {cell.output: cell.field.kind for each in fitted for cell in each.cells}
    others = [name for name in types if name not in fitted[0].before]
    known = {name: () for name in types if name not in others}
    names = batch_of(known).behind(fitted).names
    fields = [
        StructField(name, _spark_type(made[name]) if name in made else types[name])
        for name in [*names, *others]
    ]
    steps = shared(list(fitted), df.sparkSession)

    def run(batch: Batch) -> Iterator[pa.RecordBatch]:
        found = batch.select(known).behind(steps.value)
        columns = [found[name] for name in names] + [batch[name] for name in others]
        yield from _record_batches([*names, *others], columns, batch.rows)

    return scans.map_batches(df, run, StructType(fields))


def _record_batches(names: list[str], columns: list[Values], rows: int) -> Iterator[pa.RecordBatch]:

    for start in range(0, rows, _BATCH_ROWS):
        yield pa.record_batch([flat(cut(each, start, _BATCH_ROWS)) for each in columns], names)


def _spark_type(kind: str) -> Any:
    from pyspark.sql.types import DataType

    return DataType.fromDDL(kind)
