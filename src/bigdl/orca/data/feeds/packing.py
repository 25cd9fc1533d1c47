"""Rows packed in cells for Spark's shuffle, and unpacked in the worker.

A *cell* is one row of the frame that is shuffled: all values of some rows of one record batch that
go to the same shard, as one binary value.  Spark moves, sorts and copies a few large cells where
it would have to handle many small rows.
"""

from __future__ import annotations

import json

import numpy as np

from bigdl.common.memory import freeze_modules
from bigdl.runtime.shards.columns import Leaf, decode_batch
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.shard import Shard

CELL = "target int, part int, source int, seq long, meta string, data binary"
"""Spark's schema of a cell: its shard, the number of its frame, its place (source partition,
sequence number), what the values are, and the values."""

PIECE = 32 << 20  # bytes of one cell at most, but for a single larger row


def packer(part: int, name: str | None, specs, num_workers: int):
    """What packs the rows of a source partition, for ``mapInArrow``.

    Parameters
    ----------
    part : int
        Number of the frame among those that travel together.
    name : str or None
        Name of the frame, for messages about its rows.
    specs : sequence of ColumnSpec
    num_workers : int
    """
    pack = rows_packer(part, name, num_workers)

    def pack_batches(batches):
        from pyspark import TaskContext

        freeze_modules()  # there may be many more partitions than cores
        chunks = (decode_batch(specs, batch) for batch in batches if batch.num_rows)
        for targets, *values in pack(TaskContext.get().partitionId(), chunks):
            yield _cells(targets, *values)

    return pack_batches


def rows_packer(part: int, name: str | None, num_workers: int):
    """What packs the rows of a source partition that are there as arrays.

    Row i of source partition p goes to shard ``(i + p) mod N``.

    Returns
    -------
    callable
        ``pack(source, chunks)`` of iterables of (leaves, arrays), all with rows; it yields the
        shards that a cell goes to and what follows ``target`` in :data:`CELL`.
    """
    piece = PIECE  # shipped by value

    def pack(source, chunks):
        offset = sequence = 0
        known = set()
        try:
            for leaves, arrays in chunks:
                num_rows = len(arrays[0])
                meta = json.dumps([[x.column, x.key, x.dtype, x.shape] for x in leaves])
                if meta not in known:
                    # every shard learns what the rows look like, also one that gets none of them
                    known.add(meta)
                    yield range(num_workers), part, source, sequence, meta, b""
                for low, high in _pieces(arrays, num_rows, num_workers, piece):
                    for target in range(num_workers):
                        first = low + (target - source - offset - low) % num_workers
                        if first >= high:
                            continue
                        rows = slice(first, high, num_workers)
                        data = b"".join([np.ascontiguousarray(a[rows]).data for a in arrays])
                        yield [target], part, source, sequence, meta, data
                    sequence += 1
                offset += num_rows
        except SourceError as error:
            meta = json.dumps({"error": f"{name}: {error}" if name else str(error)})
            yield range(num_workers), part, source, sequence, meta, b""

    return pack


def cell_table(cells):
    """Cells of :func:`rows_packer` as an Arrow table."""
    import pyarrow as pa

    return pa.Table.from_batches([_cells(targets, *values) for targets, *values in cells])


def _pieces(arrays, rows, num_workers, limit):
    """Ranges of rows of which no shard gets more than `limit` bytes, or a row if that is larger."""
    width = sum(a.nbytes for a in arrays) // rows
    step = max(1, limit // max(width, 1)) * num_workers
    return [(low, min(low + step, rows)) for low in range(0, rows, step)]


def _cells(targets, *values):
    """The same cell for each of some shards, as a record batch."""
    import pyarrow as pa

    types = (pa.int32(), pa.int32(), pa.int32(), pa.int64(), pa.string(), pa.binary())
    names = [field.split()[0] for field in CELL.split(", ")]
    columns = [list(targets), *([value] * len(targets) for value in values)]
    arrays = [pa.array(column, t) for column, t in zip(columns, types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names)


def packed_reader(names, specs):
    """What writes the cells of a worker to its spools, as an ``Ingest.reader``.

    Parameters
    ----------
    names : sequence of str
        Names of the frames that travel together, in the order of their numbers.
    specs : sequence of sequence of ColumnSpec
        The columns of each.
    """

    def read(batches, open_spool):
        writers = [open_spool(*each) for each in zip(names, specs, strict=True)]
        layouts: dict[str, tuple] = {}
        for batch in batches:
            columns = [batch.column(c) for c in ("part", "source", "seq", "meta", "data")]
            for part, source, sequence, meta, data in zip(*columns, strict=True):
                text = meta.as_py()
                if text not in layouts:
                    layouts[text] = _layout(text)
                leaves, widths = layouts[text]
                view = memoryview(data.as_buffer())
                rows = view.nbytes // sum(widths) if view else 0
                arrays, start = [], 0
                for width in widths:
                    arrays.append(view[start : start + width * rows])
                    start += width * rows
                writer = writers[part.as_py()]
                writer.append(source.as_py(), sequence.as_py(), rows, leaves, arrays)
        return {name: Shard(w.finish()) for name, w in zip(names, writers, strict=True)}

    return read


def _layout(text):
    """The leaves of a cell and the bytes of a row of each."""
    doc = json.loads(text)
    if isinstance(doc, dict):
        raise SourceError(doc["error"])
    leaves = [Leaf.from_json(x) for x in doc]
    widths = [int(np.prod(x.shape, dtype=np.int64)) * np.dtype(x.dtype).itemsize for x in leaves]
    return leaves, widths
