"""Values as rows of a DataFrame: large ones in pieces, each with its target and its place.

Over Spark Connect one row must fit a message, and rows of several partitions mix in an exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from bigdl.orca.cluster.spark_calls import one_row
from bigdl.orca.cluster.versions import frame_of_arrow

PIECE = 4 << 20
"""Bytes of one value that travels in a row, or in a plan; larger ones travel in pieces or files."""

PIECES = "target int, source int, number int, place int, ends boolean, data binary"
"""Schema of the rows: the partition that a value goes to, the partition and number that it had, the
place of the piece in it, True for the last one, and bytes."""


def pieces(target: int, key: tuple[int, int], data: bytes) -> Iterator[Any]:
    """A value as record batches of :data:`PIECES`, a row each; `key` is its source and number."""
    starts = range(0, max(len(data), 1), PIECE)
    for place, start in enumerate(starts):
        row = target, *key, place, start == starts[-1], data[start : start + PIECE]
        yield one_row(row, PIECES)


def whole_values(batches: Iterable) -> Iterator[tuple[tuple[int, int], bytes]]:
    """Keys and values of the pieces in some batches, each once all of its pieces are there."""
    parts: dict[tuple[int, int], dict[int, bytes]] = {}
    sizes: dict[tuple[int, int], int] = {}
    for batch in batches:
        columns = (batch.column(n) for n in ("source", "number", "place", "ends", "data"))
        for cells in zip(*columns, strict=True):
            source, number, place, ends, data = (cell.as_py() for cell in cells)
            key = source, number
            of_value = parts.setdefault(key, {})
            of_value[place] = data
            if ends:
                sizes[key] = place + 1
            if len(of_value) == sizes.get(key):
                yield key, b"".join(of_value[i] for i in range(sizes.pop(key)))
                del parts[key]


def pieces_frame(session: Any, values: Iterable[tuple[int, tuple[int, int], bytes]]) -> Any:
    """A DataFrame of :data:`PIECES` of values that are given with their targets and keys."""
    import pyarrow as pa

    batches = [batch for value in values for batch in pieces(*value)]
    if not batches:
        return session.createDataFrame([], PIECES)
    return frame_of_arrow(session, pa.Table.from_batches(batches))
