"""Arrays and pandas frames of the driver -> shards of columns.

Row i goes to shard ``i mod N``, so that without shuffling the global batches are those of one
process. Workers on the driver's machine map files that the driver wrote; others get the rows
through Spark, in cells.
"""

import os
import tempfile

import numpy as np

from bigdl.orca.cluster.connect import active_spark
from bigdl.orca.cluster.versions import frame_of_arrow
from bigdl.orca.data.feeds.packing import PackedFeed, cell_table, rows_packer
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.shards.feed import InputPlan, SourceError
from bigdl.runtime.shards.shard import Shard, write_array
from bigdl.runtime.shards.values import columns_of, grouped


class ArrayFeed(PackedFeed):
    """Arrays or a pandas DataFrame in the driver's memory as input.

    Parameters
    ----------
    data : pandas.DataFrame, ndarray, tuple, list, dict or TensorDataset
        See :mod:`bigdl.runtime.shards.values`. Those of a TensorDataset keep their dtypes.
    feature_cols, label_cols : sequence of str, optional
        Columns of a frame, or arrays of a dict, for the model and targets.
    config : dict, optional
        ``config["dtype"]``: ``"float32"`` (default) or ``"float64"`` for all floating values.
    name : str, optional

    Raises
    ------
    UsageError
        For values that cannot become tensors.
    """

    kind = "array"

    def __init__(self, data, feature_cols=None, label_cols=None, config=None, *, name=None):
        super().__init__(feature_cols, label_cols, config, name=name)
        if type(data).__name__ == "TensorDataset":
            data, self.feature_cols, self.label_cols = tuple(data.tensors), None, None
            self.dtypes["floats"] = None
        try:
            columns = columns_of(data, self.feature_cols, self.label_cols, **self.dtypes)
        except SourceError as error:
            raise error.with_message(f"{name}: {error}" if name else str(error)) from None
        self.rows = len(columns[0][2])
        self._leaves, self._arrays = grouped(columns)

    def part(self, rank: int, num_workers: int) -> tuple[int, list, list]:
        """Number, leaves and arrays of the rows of a shard."""
        arrays = [np.ascontiguousarray(array[rank::num_workers]) for array in self._arrays]
        return len(range(rank, self.rows, num_workers)), self._leaves, arrays

    def check_local(self) -> None:
        """Accept: the workers read files that the driver writes."""

    def travels(self, cluster) -> bool:
        return cluster.moves_rows_by == "spark" and not cluster.is_local

    def prepare(self, cluster: Cluster, num_workers: int, *, name: str = "data") -> InputPlan:
        if self.travels(cluster):
            return super().prepare(cluster, num_workers, name=name)
        if cluster.moves_rows_by == "ray":
            return self._through_ray(num_workers, name)
        folder = tempfile.TemporaryDirectory(
            dir=cluster.temp_dir, prefix="arrays-", ignore_cleanup_errors=True
        )
        shards = []
        for rank in range(num_workers):
            rows, leaves, arrays = self.part(rank, num_workers)
            files = [os.path.join(folder.name, f"{rank}-{i}.bin") for i in range(len(arrays))]
            for array, path in zip(arrays, files, strict=True):
                with open(path, "wb", buffering=0) as file:
                    write_array(file, array, 0)
            shards.append((rows, leaves, files))

        def read(batches, open_spool):
            writer = open_spool(name, [])
            writer.adopt(*shards[open_spool.rank])
            return {name: Shard(writer.finish())}

        return InputPlan(None, read, folder.cleanup)

    def _through_ray(self, num_workers, name):
        """One block for each worker, in Ray's object store."""
        import ray

        blocks = [ray.put(self.part(rank, num_workers)) for rank in range(num_workers)]

        def read(batches, open_spool):
            import ray

            writer = open_spool(name, [])
            writer.append(0, 0, *ray.get(blocks[open_spool.rank]))
            return {name: Shard(writer.finish())}

        return InputPlan(None, read)

    def cells(self, number, num_workers, reference=None):
        pack = rows_packer(number, self.name, num_workers)
        chunks = [(self._leaves, self._arrays)] if self.rows else []
        spark = active_spark().spark
        table = cell_table(pack(0, chunks))
        return frame_of_arrow(spark, table), (), lambda: None
