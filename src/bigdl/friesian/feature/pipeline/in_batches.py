"""Steps of the executor ``catalyst`` that go through Arrow batches together, on Spark.

A join for each of 26 columns took 27 to 31 seconds of CPU time for a million rows, one way through
Arrow for all of them 11 to 15; of 4 columns the joins took less.  What costs then is the way, so
the steps around go along, by the functions of the executor ``arrow``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bigdl.friesian.feature.operators.dictionary import shared
from bigdl.friesian.feature.pipeline import scans
from bigdl.friesian.feature.pipeline.batches import Batch, Values, batch_of, cut, flat
from bigdl.friesian.feature.pipeline.step import Fitted, Step

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

__all__ = ["can_travel", "mapped", "together"]

_ROWS = 1 << 16  # of a batch on its way back
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
        is_same = not is_training or type(each.step).training is Step.training
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
    """Whether all columns come back from Arrow as they were."""
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
    import pyarrow as pa

    for start in range(0, rows, _ROWS):
        yield pa.record_batch([flat(cut(each, start, _ROWS)) for each in columns], names)


def _spark_type(kind: str) -> Any:
    from pyspark.sql.types import DataType

    return DataType.fromDDL(kind)
