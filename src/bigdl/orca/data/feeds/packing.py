"""Packing of rows into binary cells for a Spark or Ray shuffle, and unpacking in workers.

A *cell* is one row of the shuffled frame: a binary value with many rows of the same shard.  Spark
moves, sorts and copies a few large cells, which is faster than many small rows.
"""

from __future__ import annotations

import contextlib
import functools
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.common.memory import freeze_modules
from bigdl.orca.cluster.connect import ConnectCluster
from bigdl.orca.cluster.plan import is_connect
from bigdl.orca.cluster.spark_calls import one_row
from bigdl.orca.cluster.versions import by_partition
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.shards.columns import ArraySpec, decode_batch, float_dtype, nulls_are_missing
from bigdl.runtime.shards.feed import Feed, InputPlan, SourceError
from bigdl.runtime.shards.shard import Shard
from bigdl.runtime.shards.texts import takes_texts

CELL = "target int, part int, source int, seq long, meta string, data binary"
"""Spark schema of a cell: shard, frame, source partition, sequence number, specs and values."""

PIECE = 32 << 20  # maximum bytes of a cell with more than one row


def packer(part: int, name: str | None, specs, num_workers: int):
    """Return a function for ``mapInArrow`` that packs a partition's rows into binary cells.

    Parameters
    ----------
    part : int
        Number of the frame among the frames of the exchange.
    name : str or None
        Name of the frame, for error messages.
    specs : sequence of ColumnSpec
        Conversions of the columns.
    num_workers : int
    """
    pack = rows_packer(part, name, num_workers)

    def pack_batches(batches):
        from pyspark import TaskContext

        freeze_modules()  # there may be far more partitions than cores
        chunks = (decode_batch(specs, batch) for batch in batches if batch.num_rows)
        for cell in pack(TaskContext.get().partitionId(), chunks):
            yield one_row(cell, CELL)

    return pack_batches


def rows_packer(part: int, name: str | None, num_workers: int):
    """Return a function that packs a source partition's row arrays into cells for each shard.

    Row i of source partition p goes to shard ``(i + p) mod N``.

    Returns
    -------
    callable
        ``pack(source, chunks)`` takes non-empty (leaves, arrays) and yields cells as tuples in
        the order of :data:`CELL`.
    """
    piece = PIECE  # captured by the pickled function

    def to_all(source, sequence, meta):
        return ((target, part, source, sequence, meta, b"") for target in range(num_workers))

    def pack(source, chunks):
        offset = sequence = 0
        known = set()
        try:
            for leaves, arrays in chunks:
                num_rows = len(arrays[0])
                meta = json.dumps([vars(leaf) for leaf in leaves])
                if meta not in known:
                    # every shard gets the array specs, even without rows
                    known.add(meta)
                    yield from to_all(source, sequence, meta)
                for low, high in _pieces(arrays, num_rows, num_workers, piece):
                    for target in range(num_workers):
                        first = low + (target - source - offset - low) % num_workers
                        if first >= high:
                            continue
                        rows = slice(first, high, num_workers)
                        data = b"".join([np.ascontiguousarray(a[rows]).data for a in arrays])
                        yield target, part, source, sequence, meta, data
                    sequence += 1
                offset += num_rows
        except SourceError as error:
            message = f"{name}: {error}" if name else str(error)
            meta = json.dumps({"error": message, "code": error.code, "facts": error.facts})
            yield from to_all(source, sequence, meta)

    return pack


def cell_table(cells):
    """Convert cells of :func:`rows_packer` to an Arrow table."""
    import pyarrow as pa

    return pa.Table.from_batches(one_row(cell, CELL) for cell in cells)


def _pieces(arrays, rows, num_workers, limit):
    """Split rows into ranges that give each shard at most `limit` bytes, but at least one row."""
    width = sum(a.nbytes for a in arrays) // rows
    step = max(1, limit // max(width, 1)) * num_workers
    return [(low, min(low + step, rows)) for low in range(0, rows, step)]


def packed_reader(names, specs):
    """Return an ``InputPlan.reader`` that unpacks a worker's cells into its spool files on disk.

    Parameters
    ----------
    names : sequence of str
        Names of the frames of the exchange, in the order of their numbers.
    specs : sequence of sequence of ColumnSpec
        Columns of each frame.
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
    """Parse a cell's JSON metadata; return its array specs and the bytes per row of each array."""
    doc = json.loads(text)
    if isinstance(doc, dict):
        raise SourceError(doc["error"], code=doc["code"], **doc["facts"])
    leaves = [ArraySpec.from_json(x) for x in doc]
    widths = [int(np.prod(x.shape, dtype=np.int64)) * np.dtype(x.dtype).itemsize for x in leaves]
    return leaves, widths


class ColumnFeed(Feed):
    """Base class of feeds whose values are converted by :mod:`bigdl.runtime.shards.columns`.

    Parameters
    ----------
    feature_cols, label_cols : sequence of str, optional
        Feature and target columns, in the model's order.
    config : dict, optional
        ``config["dtype"]``: ``"float32"`` (default) or ``"float64"`` for all floating-point values;
        ``config["nulls_are_missing"]``: convert nulls of scalar features to NaN.
    name : str, optional
        Name of the input in messages, e.g. ``"validation_data"``.
    """

    def __init__(self, feature_cols=None, label_cols=None, config=None, *, name=None):
        self.feature_cols = tuple(feature_cols) if feature_cols else None
        self.label_cols = tuple(label_cols or ()) if feature_cols else None
        self.name = name
        self.config = config or {}

    @functools.cached_property
    def dtypes(self) -> dict[str, Any]:
        """Keyword arguments for the conversion of values to columns, such as the float dtype."""
        config = self.config
        dtypes: dict[str, Any] = {"floats": float_dtype(config), "texts": takes_texts(config)}
        if nulls_are_missing(config):  # for models that support NaN
            dtypes["missing"] = self.feature_cols or ()
        return dtypes


class PackedFeed(ColumnFeed):
    """Base class of feeds that can pack their rows into binary cells, alone or with other feeds."""

    def check_local(self) -> None:
        raise UsageError(
            f'{self.name or "data"} is a {self.kind}, which backend="local" does not support; '
            'pass a path of Parquet files, arrays or a pandas DataFrame, or use backend="spark"',
            code="data-type",
            argument=self.name,
        )

    @abstractmethod
    def cells(
        self, number: int, num_workers: int, reference: PackedFeed | None = None
    ) -> tuple[Any, Sequence, Callable[[], None]]:
        """Return a DataFrame of binary cells that contain the packed rows.

        Parameters
        ----------
        number : int
            The ``part`` of the cells.
        num_workers : int
        reference : PackedFeed, optional
            Feed whose column types the columns of the same name must have.

        Returns
        -------
        frame, specs, close
            The frame of cells; the :class:`~bigdl.runtime.shards.columns.ColumnSpec` of each
            column, if known; and a function that unpersists cached data.
        """

    def needs_packing(self, cluster) -> bool:
        """Return True if rows must be packed into cells to reach the cluster's workers."""
        return True

    def from_files(
        self,
        cluster: Cluster,
        num_workers: int,
        name: str,
        reference: PackedFeed | None = None,
    ) -> InputPlan | None:
        """Return an input plan in which workers read rows from files, or None if they cannot.

        Parameters
        ----------
        cluster : Cluster
        num_workers : int
        name : str
            Name of the input's shards.
        reference : PackedFeed, optional
            See :meth:`cells`.
        """
        return None

    def prepare(self, cluster: Cluster, num_workers: int, *, name: str = "data") -> InputPlan:
        return prepare_packed({name: self}, cluster, num_workers)


def prepare_packed(
    feeds: Mapping[str, PackedFeed], cluster: Cluster, num_workers: int
) -> InputPlan:
    """Send the rows of all feeds to their shards in one shuffle by Spark or Ray."""
    specs: list[Sequence] = []
    first = next(iter(feeds.values()))
    cells: Any = None
    with contextlib.ExitStack() as opened:
        for number, feed in enumerate(feeds.values()):
            frame, columns, close = feed.cells(number, num_workers, first if number else None)
            opened.callback(close)
            if is_connect(frame) and not isinstance(cluster, ConnectCluster):
                raise UsageError(
                    f"{feed.name or 'data'} is a Spark Connect frame, which this backend's workers "
                    'cannot read; use backend="spark", or pass a path of Parquet files',
                    code="data-type",
                    argument=feed.name,
                )
            specs.append(columns)
            cells = frame if cells is None else cells.union(frame)
        reader = packed_reader(list(feeds), specs)
        if cluster.moves_rows_by != "ray":
            exchanged = by_partition(cells, num_workers, "target")
            return InputPlan(exchanged, reader, opened.pop_all().close)
        from bigdl.orca.data.xshards.ray_exchange import cells_to_ray

        return blocks_input(reader, cells_to_ray(cells, cast("Any", cluster), num_workers))


def blocks_input(reader: Callable, blocks: Sequence[Sequence]) -> InputPlan:
    """Return an input plan for cells that are tables in Ray's object store."""

    def read(batches, open_spool):
        import ray

        tables = (ray.get(block) for block in blocks[open_spool.rank])
        cells = (batch for table in tables if table is not None for batch in table.to_batches())
        return reader(cells, open_spool)

    return InputPlan(None, read)
