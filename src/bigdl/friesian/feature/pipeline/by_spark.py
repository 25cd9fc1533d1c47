"""The executor ``catalyst``: plans of Spark, by the operators of :class:`FeatureTable`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bigdl.friesian.feature.operators.columns import col, is_fractional, is_integral, type_of
from bigdl.friesian.feature.pipeline.counting import count_texts, pays
from bigdl.friesian.feature.pipeline.in_batches import mapped, together
from bigdl.friesian.feature.pipeline.learning import Program
from bigdl.friesian.feature.pipeline.requests import (
    Counts,
    Extremes,
    Outcome,
    Quantiles,
    Request,
    TargetSums,
)
from bigdl.friesian.feature.pipeline.scans import from_files, from_rows
from bigdl.friesian.feature.pipeline.step import Field, Fitted, Schema, check_schema, inputs_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, Observation

__all__ = ["answers", "is_hidden", "schema_of", "transformed"]

_HIDDEN = "__bigdl_asked_"
_ACCURACY = 10_000  # of percentile_approx: the rank is exact to one part in so many


def schema_of(df: DataFrame) -> dict[str, Field]:
    """The fields of a DataFrame."""
    return {each.name: Field(each.dataType.simpleString()) for each in df.schema.fields}


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
            method = each.step.training if is_training else each.step.catalyst
            df = method(df, each.before, each.state)
    return df


def answers(df: DataFrame, program: Program) -> dict[tuple[int, str], Any]:
    """Run a program; all counts of values and all figures come out of one job.

    Columns that are asked about are kept under a name of their own, as they are at that place.
    """
    asked: dict[tuple[int, str], Request] = {}
    found: dict[tuple[int, str], Any] = {}
    for each in program:
        if isinstance(each, Fitted):
            df = each.step.catalyst(df, each.before, each.state)
            continue
        for name, request in each.requests.items():
            if isinstance(request, Outcome):
                found[each.step, name] = _outcome(df, request)
                continue
            hidden = [f"{_HIDDEN}{len(asked)}_{i}" for i in range(len(request.columns))]
            df = df.withColumns(dict(zip(hidden, map(col, request.columns), strict=True)))
            asked[each.step, name] = replace(request, columns=tuple(hidden))
    df = df.select(*(name for request in asked.values() for name in request.columns))
    return found | _answers(df, asked)


def _outcome(df: DataFrame, request: Outcome) -> dict[str, str]:
    after = schema_of(request.step.on(df))
    return {name: each.kind for name, each in after.items() if not is_hidden(name)}


def is_hidden(name: str) -> bool:
    """Whether a column is one of those that :func:`answers` keeps."""
    return name.startswith(_HIDDEN)


def _answers(df: DataFrame, asked: Mapping[Any, Request]) -> dict[Any, Any]:
    counts = {key: each for key, each in asked.items() if isinstance(each, Counts)}
    figures = {key: each for key, each in asked.items() if isinstance(each, Extremes | Quantiles)}
    sums = {key: each for key, each in asked.items() if isinstance(each, TargetSums)}
    found = _counts_and_figures(df, counts, figures)
    return found | {key: _target_sums(df, each) for key, each in sums.items()}


def _counts_and_figures(
    df: DataFrame, counts: Mapping[Any, Counts], figures: Mapping[Any, Request]
) -> dict[Any, Any]:
    """The figures are observed while the values are counted, if rows of Spark are counted."""
    from pyspark.sql import Observation

    found = _counts_of_files(df, counts)
    rest = {key: each for key, each in counts.items() if key not in found}
    columns = [each for request in figures.values() for each in _figures(df, request)]
    named = [each.alias(f"f{i}") for i, each in enumerate(columns)]
    if not rest:
        row = df.agg(*named).first().asDict() if named else {}
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
    """What was observed while values were counted.

    Spark observes nothing, and fails when asked, if it sees from the plan that there are no rows.
    Then nothing was counted, so that the figures of such data are computed by themselves.
    """
    if observation is None:
        return {}
    if any(each.num_rows for each in counts):
        return observation.get
    return df.agg(*named).first().asDict()


def _counts_of_files(df: DataFrame, counts: Mapping[Any, Counts]) -> dict[Any, pa.Table]:
    """Those of texts that stand in files as they are; nothing if that does not pay or work."""
    texts = {key: each for key, each in counts.items() if each.separator is None}
    requests = list(texts.values())
    counted = count_texts(df, requests, from_files) if pays(df, requests) else None
    return {} if counted is None else _tables(counted, dict.fromkeys(texts, "value"))


def _counts(
    df: DataFrame, counts: Mapping[Any, Counts], separator: str | None
) -> dict[Any, pa.Table]:
    import re

    from bigdl.friesian.feature.operators.vocabulary import Source, count_values

    requests = list(counts.values())
    if separator is None and pays(df, requests):
        counted = count_texts(df, requests, from_rows)
        return _tables(counted, dict.fromkeys(counts, "value"))
    sources = [Source(str(i), each.columns, each.at_least) for i, each in enumerate(requests)]
    counted, fields = count_values(df, sources, separator and re.escape(separator))
    return _tables(counted, dict(zip(counts, fields, strict=True)))


def _tables(counted: DataFrame, fields: Mapping[Any, str]) -> dict[Any, pa.Table]:
    """The counts of each request, given the column that its values are in."""
    import pyarrow.compute as pc

    table = counted.toArrow()
    found = {}
    for i, (key, field) in enumerate(fields.items()):
        mine = table.filter(pc.equal(table["source"], i))
        found[key] = mine.select([field, "count"]).rename_columns(["value", "count"])
    return found


def _figures(df: DataFrame, request: Extremes | Quantiles) -> list[Column]:
    from pyspark.sql import functions as F

    (name,) = request.columns
    kind, value = type_of(df, name), col(name)
    if is_fractional(kind):
        present = ~F.isnan(value)
        if isinstance(request, Extremes) and request.is_finite:
            present = present & (F.abs(value) < float("inf"))
        value = F.when(present, value)
    if isinstance(request, Extremes):
        value = value if is_integral(kind) else value.cast("double")
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
    from pyspark.sql import functions as F

    split = len(request.columns) - request.targets
    keys, targets = request.columns[:split], request.columns[split:]
    figures = [F.count("*").alias("rows")]
    for i, name in enumerate(targets):
        value = col(name).cast("double")
        if is_fractional(type_of(df, name)):
            value = F.when(~F.isnan(value), value)
        figures += [F.sum(value).alias(f"sum_{i}"), F.count(value).alias(f"count_{i}")]
    named = [col(name).alias(f"key_{i}") for i, name in enumerate(keys)]
    return df.groupBy(*named).agg(*figures).toArrow()
