"""Binary values as rows of a DataFrame, with large values split into pieces.

With Spark Connect a row must fit in one message, and a shuffle mixes rows of several partitions.
So each piece has a target and a position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from bigdl.orca.cluster.spark_calls import one_row
from bigdl.orca.cluster.versions import frame_of_arrow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PIECE = 4 << 20
"""Maximum bytes of a value in a row or a plan; larger values are sent in pieces or files."""

PIECES = "target int, source int, number int, index int, ends boolean, data binary"
"""Schema of the rows: target partition, source partition and number of the value, piece index, True
for the last piece, and bytes."""


def pieces(target: int, key: tuple[int, int], data: bytes) -> Iterator[Any]:
    """Split a value into record batches of :data:`PIECES`; `key` is ``(partition, number)``."""
    starts = range(0, max(len(data), 1), PIECE)
    for index, start in enumerate(starts):
        row = target, *key, index, start == starts[-1], data[start : start + PIECE]
        yield one_row(row, PIECES)


def whole_values(batches: Iterable) -> Iterator[tuple[tuple[int, int], bytes]]:
    """Yield the key and bytes of each value as soon as all pieces of the value have arrived."""
    parts: dict[tuple[int, int], dict[int, bytes]] = {}
    sizes: dict[tuple[int, int], int] = {}
    for batch in batches:
        columns = (batch.column(n) for n in ("source", "number", "index", "ends", "data"))
        for cells in zip(*columns, strict=True):
            source, number, index, ends, data = (cell.as_py() for cell in cells)
            key = source, number
            pieces_of_value = parts.setdefault(key, {})
            pieces_of_value[index] = data
            if ends:
                sizes[key] = index + 1
            if len(pieces_of_value) == sizes.get(key):
                yield key, b"".join(pieces_of_value[i] for i in range(sizes.pop(key)))
                del parts[key]


def pieces_frame(
    session: SparkSession, values: Iterable[tuple[int, tuple[int, int], bytes]]
) -> DataFrame:
    """Return a DataFrame of :data:`PIECES` for ``(target, key, value)`` tuples."""
    import pyarrow as pa

    batches = [batch for value in values for batch in pieces(*value)]
    if not batches:
        return session.createDataFrame([], PIECES)
    return frame_of_arrow(session, pa.Table.from_batches(batches))
