"""Arrays and pandas frames of the driver -> shards of columns.

Row i goes to shard ``i mod N``, so that without shuffling the global batches are those of one
process. Workers on the driver's machine map files that the driver wrote; others get the rows
through Spark, in cells.
"""

from __future__ import annotations

import os
import shutil
import tempfile

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds.group import prepare_packed
from bigdl.orca.data.feeds.packing import cell_table, rows_packer
from bigdl.runtime.shards.columns import float_dtype
from bigdl.runtime.shards.feed import Ingest, PackedFeed, SourceError
from bigdl.runtime.shards.shard import Shard
from bigdl.runtime.shards.texts import takes_texts
from bigdl.runtime.shards.values import columns_of, grouped


class ArrayFeed(PackedFeed):
    """Arrays or a pandas DataFrame in the driver's memory as input.

    Parameters
    ----------
    data : pandas.DataFrame, ndarray, tuple, list or dict
        See :mod:`bigdl.runtime.shards.values`.
    feature_cols, label_cols : sequence of str, optional
        Columns of a frame, or arrays of a dict, for the model and targets.
    config : dict, optional
        ``config["dtype"]``: ``"float32"`` (default) or ``"float64"`` for all floating values.
    keep_dtypes : bool
        Leave floating values as they are.
    name : str, optional

    Raises
    ------
    UsageError
        For values that cannot become tensors.
    """

    kind = "array"

    def __init__(
        self,
        data,
        feature_cols=None,
        label_cols=None,
        config=None,
        *,
        keep_dtypes: bool = False,
        name: str | None = None,
    ):
        floats = None if keep_dtypes else float_dtype(config)
        try:
            texts = takes_texts(config)
            columns = columns_of(data, feature_cols, label_cols, floats, texts=texts)
        except SourceError as error:
            raise UsageError(f"{name}: {error}" if name else str(error)) from None
        self.name = name
        named = bool(feature_cols)
        self.feature_cols = tuple(feature_cols) if named else None
        self.label_cols = tuple(label_cols or ()) if named else None
        self.rows = len(columns[0][2])
        self._leaves, self._arrays = grouped(columns)

    def part(self, rank: int, num_workers: int) -> tuple[int, list, list]:
        """Number, leaves and arrays of the rows of a shard."""
        arrays = [np.ascontiguousarray(array[rank::num_workers]) for array in self._arrays]
        return len(range(rank, self.rows, num_workers)), self._leaves, arrays

    def check_local(self) -> None:
        """Accept: the workers read files that the driver writes."""

    def travels(self, cluster) -> bool:
        return not cluster.is_local

    def prepare(self, cluster, num_workers: int, *, name: str = "data") -> Ingest:
        if self.travels(cluster):
            return prepare_packed({name: self}, num_workers)
        folder = tempfile.mkdtemp(dir=cluster.temp_dir, prefix="arrays-")
        shards = []
        try:
            for rank in range(num_workers):
                rows, leaves, arrays = self.part(rank, num_workers)
                files = [os.path.join(folder, f"{rank}-{i}.bin") for i in range(len(arrays))]
                for array, file in zip(arrays, files, strict=True):
                    array.tofile(file)
                shards.append((rows, leaves, files))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

        def read(batches, open_spool):
            writer = open_spool(name, [])
            writer.adopt(*shards[open_spool.place])
            return {name: Shard(writer.finish())}

        return Ingest(None, read, lambda: shutil.rmtree(folder, ignore_errors=True))

    def cells(self, number, num_workers, reference=None):
        from pyspark.sql import SparkSession

        pack = rows_packer(number, self.name, num_workers)
        chunks = [(self._leaves, self._arrays)] if self.rows else []
        spark = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
        table = cell_table(pack(0, chunks))
        return spark.createDataFrame(table), (), lambda: None
