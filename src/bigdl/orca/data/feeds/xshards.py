"""XShards -> shards of columns.

The elements of the RDD are converted to arrays where they are and travel in the cells of
:mod:`~bigdl.orca.data.feeds.packing`, so that every worker gets its part of the rows whatever the
shards' number and sizes are, and nothing goes through the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bigdl.common.memory import freeze_modules
from bigdl.orca.data.feeds.group import prepare_packed
from bigdl.orca.data.feeds.packing import CELL, rows_packer
from bigdl.runtime.shards.columns import float_dtype
from bigdl.runtime.shards.feed import Feed, Ingest, PackedFeed
from bigdl.runtime.shards.texts import takes_texts
from bigdl.runtime.shards.values import columns_of, grouped


class ShardsFeed(Feed):
    """Shards that are Python objects as input, wherever they are.

    Parameters
    ----------
    shards : SparkXShards, RayXShards or ray.data.Dataset
        Of pandas frames, of dicts ``{"x": ..., "y": ...}``, or of tuples of arrays; see
        :mod:`bigdl.runtime.shards.values`. A shard may have no rows.
    feature_cols, label_cols : sequence of str, optional
        Columns of frames, or arrays of dicts, for the model and targets.
    config : dict, optional
        ``config["dtype"]``: ``"float32"`` (default) or ``"float64"`` for all floating values.
    name : str, optional
    """

    def __init__(
        self,
        shards: Any,
        feature_cols: Sequence[str] | None = None,
        label_cols: Sequence[str] | None = None,
        config: dict[str, Any] | None = None,
        *,
        name: str | None = None,
    ):
        self.shards = shards
        self.name = name
        self._named = (
            list(feature_cols) if feature_cols else None,
            list(label_cols) if label_cols else None,
        )
        self.feature_cols = tuple(feature_cols) if feature_cols else None
        self.label_cols = tuple(label_cols or ()) if feature_cols else None
        self._dtypes = {"floats": float_dtype(config), "texts": takes_texts(config)}


class XShardsFeed(ShardsFeed, PackedFeed):
    """``SparkXShards`` as input."""

    kind = "SparkXShards"

    def prepare(self, cluster, num_workers: int, *, name: str = "data") -> Ingest:
        return prepare_packed({name: self}, num_workers)

    def cells(self, number, num_workers, reference=None):
        from pyspark.sql import SparkSession

        named, dtypes = self._named, self._dtypes
        pack = rows_packer(number, self.name, num_workers)

        def pack_shards(source, shards):
            freeze_modules()
            for targets, *values in pack(source, chunks_of(shards, *named, dtypes)):
                for target in targets:
                    yield (target, *values)

        spark = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
        cells = self.shards.rdd.mapPartitionsWithIndex(pack_shards)
        return spark.createDataFrame(cells, CELL, verifySchema=False), (), lambda: None


def chunks_of(
    shards: Iterable,
    feature_cols: Sequence[str] | None,
    label_cols: Sequence[str] | None,
    dtypes: Mapping[str, Any],
) -> Iterator[tuple[list, list]]:
    """Leaves and arrays of every shard that has rows."""
    for shard in shards:
        columns = columns_of(shard, feature_cols, label_cols, **dtypes)
        if len(columns[0][2]):
            yield grouped(columns)
