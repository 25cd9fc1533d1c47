"""Feed that converts arrays and pandas frames in the driver to shards of columns.

Row i goes to shard ``i mod N``, so without shuffling the global batches equal those of a single
process. Workers on the driver's machine memory-map files that the driver writes; other workers
receive the rows through Spark, packed in cells.
"""

from __future__ import annotations

import functools
import operator
import os
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import UsageError, raise_first_usage_error, value_or_usage_error
from bigdl.orca.cluster.connect import active_spark
from bigdl.orca.cluster.versions import frame_of_arrow
from bigdl.orca.data.feeds.packing import PackedFeed, cell_table, rows_packer
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.shards.feed import (
    InputPlan,
    RowPredictor,
    RowSampler,
    SourceError,
    not_predicted,
)
from bigdl.runtime.shards.shard import Shard, write_array
from bigdl.runtime.shards.values import (
    arrays_of,
    columns_of,
    grouped,
    is_frame,
    join_shards,
    map_arrays,
    split_evenly,
)

if TYPE_CHECKING:
    import pandas as pd


class ArrayFeed(PackedFeed):
    """Feed of arrays or a pandas DataFrame in the driver's memory.

    Parameters
    ----------
    data : pandas.DataFrame, ndarray, tuple, list, dict or TensorDataset
        See :mod:`bigdl.runtime.shards.values`. Tensors of a TensorDataset keep their dtypes.
    feature_cols, label_cols : sequence of str, optional
        Columns of a frame, or keys of a dict, for features and targets.
    config : dict, optional
        ``config["dtype"]``: ``"float32"`` (default) or ``"float64"`` for all floating-point values.
    name : str, optional
        Name of the input in messages.

    Raises
    ------
    UsageError
        If values cannot be converted to tensors.
    """

    kind = "array"

    def __init__(self, data, feature_cols=None, label_cols=None, config=None, *, name=None):
        is_dataset = type(data).__name__ == "TensorDataset"
        columns = (None, None) if is_dataset else (feature_cols, label_cols)
        super().__init__(*columns, config, name=name)
        self.data = data

    @functools.cached_property
    def _columns(self) -> tuple[int, list, list]:
        """Number of rows, followed by the column specs and arrays of features and targets."""
        data = self.data
        dtypes = self.dtypes
        if type(data).__name__ == "TensorDataset":
            data, dtypes = tuple(data.tensors), {**dtypes, "floats": None}
        try:
            columns = columns_of(data, self.feature_cols, self.label_cols, **dtypes)
        except SourceError as error:
            message = f"{self.name}: {error}" if self.name else str(error)
            raise error.with_message(message) from None
        return len(columns[0][2]), *grouped(columns)

    def check(self) -> None:
        self._columns  # noqa: B018 - computes and caches it

    def part(self, rank: int, num_workers: int) -> tuple[int, list, list]:
        """Return the number of rows, the column specs and the arrays of one shard."""
        rows, leaves, arrays = self._columns
        shard_arrays = [np.ascontiguousarray(array[rank::num_workers]) for array in arrays]
        return len(range(rank, rows, num_workers)), leaves, shard_arrays

    def check_local(self) -> None:
        """Do nothing: local workers are supported, since they read files that the driver writes."""

    def needs_packing(self, cluster) -> bool:
        return cluster.moves_rows_by == "spark" and not cluster.is_local

    def prepare(self, cluster: Cluster, num_workers: int, *, name: str = "data") -> InputPlan:
        if self.needs_packing(cluster):
            return super().prepare(cluster, num_workers, name=name)
        if cluster.moves_rows_by == "ray":
            return self._prepare_on_ray(num_workers, name)
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

    def _prepare_on_ray(self, num_workers, name):
        """Return an input plan that stores one block per worker in Ray's object store."""
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
        rows, leaves, arrays = self._columns
        chunks = [(leaves, arrays)] if rows else []
        spark = active_spark().spark
        table = cell_table(pack(0, chunks))
        return frame_of_arrow(spark, table), (), lambda: None

    def predict(
        self, predictor: RowPredictor, cluster: Cluster
    ) -> pd.DataFrame | np.ndarray | dict[str, np.ndarray]:
        """Return a frame with predictions, or the predictions alone for arrays."""
        if type(self.data).__module__.startswith("torch"):
            raise not_predicted(type(self.data).__name__)
        predict = predictor.shard_predictor(cluster.threads_per_task)
        data = self.data
        if is_frame(data):
            rows = len(data)
        else:
            data, rows = input_arrays(data, bool(self.feature_cols))
        cuts = split_evenly(rows, max(1, min(rows, cluster.slots())))
        if is_frame(data):
            shards = [data.iloc[low:high] for low, high in cuts]
        else:
            shards = [map_arrays(data, operator.itemgetter(slice(*ends))) for ends in cuts]
        outcomes = cluster.map_shards(
            lambda part: [value_or_usage_error(list, predict(part))], shards
        )
        predicted = [shard for each in raise_first_usage_error(outcomes) for shard in each]
        if is_frame(data):
            import pandas as pd

            return pd.concat(predicted)
        joined = join_shards([{k: v for k, v in s.items() if k not in data} for s in predicted])
        return joined["prediction"] if list(joined) == ["prediction"] else joined

    def sample(self, sampler: RowSampler, partitions: int, cluster: Cluster) -> list:
        if type(self.data).__module__.startswith("torch"):
            return []
        data = self.data
        if not is_frame(data):
            data, _ = input_arrays(data, bool(self.feature_cols))
        return list(sampler.take_from_shards([data]))


def input_arrays(data: Any, named: bool) -> tuple[dict, int]:
    """Select the model's input arrays and return them with their number of rows.

    Parameters
    ----------
    data : ndarray, or a tuple, list or dict of them
    named : bool
        True if the user passed the names of the model's inputs in a dict.

    Raises
    ------
    UsageError
        If values are not arrays with rows, or have different numbers of rows.
    """
    if not named and not isinstance(data, dict):
        data = {"x": data}
    data = {key: value for key, value in data.items() if named or key == "x"}
    arrays = list(arrays_of(data))
    for array in arrays:
        if not isinstance(array, np.ndarray) or not array.ndim:
            raise UsageError(
                f"predict needs numpy arrays with rows, but one input is {type(array).__name__}",
                code="data-type",
            )
    sizes = [len(array) for array in arrays]
    if len(set(sizes)) != 1:
        raise UsageError(
            f"The arrays must have equal numbers of rows, but have {sizes}", code="data-shape"
        )
    return data, sizes[0]
