"""Spark DataFrame -> shards of columns.

Columns are converted in the JVM, cross to Python as Arrow record batches and are spooled.  Two
ways lead to exactly N shards, since a barrier stage accepts no ``coalesce``:

*direct*
    A cached frame of N near-equal partitions is read as it is, inside the barrier stage.
*packed*
    Otherwise an ordinary stage converts the rows, cuts every record batch in N parts (row i of
    source partition p goes to shard ``(i + p) mod N``, so the shards are equal to a row per
    partition) and packs each part in one binary cell.  Spark's shuffle then moves a few large
    cells instead of many small rows.

Every chunk carries (source partition, sequence number) from before the exchange, and the spool is
ordered by it, so the order of the rows does not depend on the network.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Sequence

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.cluster import plan as spark_plan
from bigdl.orca.data.feeds.base import Feed, Ingest, SourceError
from bigdl.orca.data.feeds.columns import Leaf, column_spec, decode_batch, float_dtype, project
from bigdl.orca.data.feeds.shard import Shard
from bigdl.orca.data.feeds.spool import SpoolWriter

__all__ = ["FeedGroup", "SparkDataFrameFeed", "check_columns"]

logger = logging.getLogger("bigdl.orca")

_PACKED = "target int, part int, source int, seq long, meta string, data binary"
_PIECE = 32 << 20  # bytes of one binary cell at most
_NEAR = 1.05  # largest partition over the mean for "near-equal"


class SparkDataFrameFeed(Feed):
    """A Spark DataFrame as input of training, evaluation or ``Engine.run``.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
        Of a classic (not Spark Connect) session.
    feature_cols, label_cols : sequence of str
        Columns for the model and targets, in the model's order.
    config : dict, optional
        ``config["dtype"]``: ``"float32"`` (default) or ``"float64"`` for all floating columns.
    balance : bool
        False keeps the partitions as they are, whatever their sizes; the frame must be of as many
        partitions as there are workers.

    Raises
    ------
    UsageError
        For a missing column, a type that cannot become a tensor, or a Spark Connect frame.
    """

    def __init__(self, frame, feature_cols, label_cols=(), config=None, *, balance: bool = True):
        self.frame = frame
        self.feature_cols = tuple(feature_cols)
        self.label_cols = tuple(label_cols or ())
        self.balance = balance
        self.columns = list(dict.fromkeys([*self.feature_cols, *self.label_cols]))
        schema = check_columns(frame, self.columns)
        floats = float_dtype(config)
        self.specs = [column_spec(name, schema[name], floats) for name in self.columns]

    def prepare(self, cluster, num_workers: int, *, name: str = "data") -> Ingest:
        if not self.balance or self._is_balanced(num_workers):
            frame = project(self.frame, self.specs)
            return Ingest(frame, _direct_reader(name, self.specs))
        return _prepare_packed([(name, self)], num_workers)

    def _is_balanced(self, num_workers):
        if not spark_plan.is_cached(self.frame):
            return False
        if self.frame.rdd.getNumPartitions() != num_workers:
            return False
        from pyspark.sql import functions as F

        counts = [
            row[1]
            for row in self.frame.select(F.spark_partition_id().alias("p"))
            .groupBy("p")
            .count()
            .collect()
        ]
        mean = sum(counts) / num_workers
        return bool(counts) and max(counts) <= mean * _NEAR + 1


class FeedGroup(Feed):
    """Several DataFrames that travel together, e.g. training and validation data.

    Parameters
    ----------
    feeds : dict of str to SparkDataFrameFeed
    """

    def __init__(self, feeds: dict[str, SparkDataFrameFeed]):
        self.feeds = feeds

    def prepare(self, cluster, num_workers: int, *, name: str = "data") -> Ingest:
        if len(self.feeds) == 1:
            ((only, feed),) = self.feeds.items()
            return feed.prepare(cluster, num_workers, name=only)
        return _prepare_packed(list(self.feeds.items()), num_workers)


def check_columns(frame, columns: Sequence[str]) -> dict:
    """Types of `columns` by name; a UsageError when the frame cannot give them."""
    module = type(frame).__module__
    if module.startswith("pyspark.sql.connect"):
        raise UsageError(
            "A Spark Connect DataFrame cannot feed distributed training, which needs barrier "
            "stages of a classic SparkSession; create the DataFrame with the session of "
            "init_orca_context"
        )
    if not columns:
        raise UsageError(
            "feature_cols is required for a Spark DataFrame; pass the names of the columns that "
            f"the model takes, of {list(frame.columns)}"
        )
    types: dict = {}
    doubled = set()
    for field in frame.schema.fields:
        if field.name in types:
            doubled.add(field.name)
        types[field.name] = field.dataType
    for column in columns:
        if not isinstance(column, str):
            raise UsageError(f"Column names must be strings, got {column!r}")
        if column in doubled:
            raise UsageError(f"The DataFrame has more than one column '{column}'; rename one first")
        if column not in types:
            near = difflib.get_close_matches(column, types, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise UsageError(
                f"The DataFrame has no column '{column}'; it has {list(frame.columns)}{hint}"
            )
    return types


def _direct_reader(name, specs):
    def read(batches, open_spool):
        from pyspark import TaskContext

        source = TaskContext.get().partitionId()
        writer: SpoolWriter = open_spool(name, specs)
        for sequence, batch in enumerate(batches):
            if batch.num_rows:
                leaves, arrays = decode_batch(specs, batch)
                writer.append(source, sequence, batch.num_rows, leaves, arrays)
        return {name: Shard(writer.finish())}

    return read


def _prepare_packed(feeds, num_workers):
    frames, kept = [], []
    for part, (_, feed) in enumerate(feeds):
        frame = project(feed.frame, feed.specs)
        if not spark_plan.is_deterministic(feed.frame):
            # a retry that had to run this plan again would see other rows
            frame = frame.persist()
            kept.append(frame)
        frames.append(frame.mapInArrow(_packer(part, feed.specs, num_workers), _PACKED))
    packed = frames[0]
    for frame in frames[1:]:
        packed = packed.union(frame)
    packed = spark_plan.exchange(packed, num_workers, "target")

    def close():
        while kept:
            kept.pop().unpersist()

    names = [name for name, _ in feeds]
    specs = {name: feed.specs for name, feed in feeds}
    return Ingest(packed, _packed_reader(names, specs), close)


def _packer(part, specs, num_workers):
    def pack(batches):
        import pyarrow as pa
        from pyspark import TaskContext

        source = TaskContext.get().partitionId()
        schema = pa.schema(
            [
                ("target", pa.int32()),
                ("part", pa.int32()),
                ("source", pa.int32()),
                ("seq", pa.int64()),
                ("meta", pa.string()),
                ("data", pa.binary()),
            ]
        )

        def cell(target, seq, meta, data):
            values = [[target], [part], [source], [seq], [meta], [data]]
            arrays = [pa.array(v, f.type) for v, f in zip(values, schema, strict=True)]
            return pa.RecordBatch.from_arrays(arrays, schema=schema)

        offset = sequence = 0
        try:
            for batch in batches:
                if not batch.num_rows:
                    continue
                leaves, arrays = decode_batch(specs, batch)
                meta = json.dumps([[x.column, x.key, x.dtype, x.shape] for x in leaves])
                width = sum(a.nbytes for a in arrays) // batch.num_rows
                step = max(1, _PIECE // max(width, 1)) * num_workers
                for low in range(0, batch.num_rows, step):
                    high = min(low + step, batch.num_rows)
                    for target in range(num_workers):
                        first = low + (target - source - offset - low) % num_workers
                        if first >= high:
                            continue
                        rows = slice(first, high, num_workers)
                        data = b"".join([np.ascontiguousarray(a[rows]).data for a in arrays])
                        yield cell(target, sequence, meta, data)
                    sequence += 1
                offset += batch.num_rows
        except SourceError as error:
            yield cell(0, sequence, json.dumps({"error": str(error)}), b"")

    return pack


def _packed_reader(names, specs):
    def read(batches, open_spool):
        writers = {name: open_spool(name, specs[name]) for name in names}
        known: dict[str, tuple] = {}
        for batch in batches:
            columns = [batch.column(c) for c in ("part", "source", "seq", "meta", "data")]
            for part, source, sequence, meta, data in zip(*columns, strict=True):
                text = meta.as_py()
                if text not in known:
                    known[text] = _layout(text)
                leaves, widths = known[text]
                view = memoryview(data.as_buffer())
                rows = view.nbytes // sum(widths)
                arrays, start = [], 0
                for width in widths:
                    arrays.append(view[start : start + width * rows])
                    start += width * rows
                writers[names[part.as_py()]].append(
                    source.as_py(), sequence.as_py(), rows, leaves, arrays
                )
        return {name: Shard(writer.finish()) for name, writer in writers.items()}

    return read


def _layout(text):
    doc = json.loads(text)
    if isinstance(doc, dict):
        raise SourceError(doc["error"])
    leaves = [Leaf.from_json(x) for x in doc]
    widths = [int(np.prod(x.shape, dtype=np.int64)) * np.dtype(x.dtype).itemsize for x in leaves]
    return leaves, widths
