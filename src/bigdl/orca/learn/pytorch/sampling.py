"""A few hundred of the rows that are to be predicted, as the model takes them.

No full job runs for them: of a DataFrame and of XShards the first partition is asked, and others
only if it has too few rows.  Within a partition the rows are spread over its first batch or shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds import kind_of
from bigdl.orca.learn.prediction.dataframe import converted_columns, decode_columns
from bigdl.orca.learn.prediction.shards import checked_arrays, rows_of_columns
from bigdl.runtime.shards.columns import float_dtype
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.values import columns_of, is_frame

__all__ = ["SAMPLE_ROWS", "Sample", "sample_of"]

SAMPLE_ROWS = 256
_SAMPLE_BYTES = 64 << 20
_PARTITIONS = (1, 4, 16)
"""How many partitions are asked, until there are enough rows."""


@dataclass(frozen=True)
class Sample:
    """Rows of a model's inputs.

    Attributes
    ----------
    columns : list
        One array of shape ``(rows, ...)`` for each argument of the model, or a dict of arrays for
        a map column.
    """

    columns: list

    @property
    def leaves(self) -> list[list]:
        """``[key, dtype, shape]`` of the arrays of each column, in the form of
        ``TensorShard.inputs``."""
        return [
            [[key, array.dtype.name, list(array.shape[1:])] for key, array in _leaves(column)]
            for column in self.columns
        ]

    @property
    def kind(self) -> str:
        """Types and shapes in one line."""
        return repr(self.leaves)

    def batches(self, size: int) -> list[tuple]:
        """All rows as batches of tensors; rows are repeated to fill the last one.

        Parameters
        ----------
        size : int
            Rows of a batch. It has at least 2, since a model that squeezes its output hides the
            dimension of a single row, and at most :data:`SAMPLE_ROWS`.

        Returns
        -------
        list of tuple
            The model's arguments.
        """
        import torch

        size = min(max(size, 2), SAMPLE_ROWS)
        rows = len(_leaves(self.columns[0])[0][1])
        index = np.resize(np.arange(rows), (-(-rows // size), size))
        return [
            tuple(_map(column, lambda a, i=each: torch.tensor(a[i])) for column in self.columns)
            for each in index
        ]


def sample_of(data: Any, config: dict, feature_cols: Sequence[str], cluster) -> Sample | None:
    """A sample of an input of any kind that `predict` takes.

    Parameters
    ----------
    data : pyspark.sql.DataFrame, SparkXShards, RayXShards, ray.data.Dataset, \
pandas.DataFrame or arrays
    config : dict
        ``dtype`` is that of the floating inputs.
    feature_cols : sequence of str
    cluster : SparkCluster

    Returns
    -------
    Sample or None
        None where no row was found, or the input is of another kind.

    Raises
    ------
    UsageError
        If the rows cannot become tensors.
    """
    kind = kind_of(data)
    try:
        if kind == "Spark DataFrame":
            return _of_frame(data, config, feature_cols)
        if kind == "SparkXShards":
            return _of_shards(data, config, feature_cols)
        if kind == "RayXShards":
            return _of_ray_shards(data, config, feature_cols)
        if kind == "Ray Dataset" and feature_cols:
            return _of_dataset(data, config, feature_cols)
        if kind == "array" and not type(data).__module__.startswith("torch"):
            return _of_arrays(data, config, feature_cols)
    except SourceError as error:
        raise UsageError(str(error)) from None
    return None


def _of_frame(frame, config, feature_cols):
    import pyarrow as pa

    specs, plain, converted = converted_columns(frame, config, feature_cols)
    packed = plain.select(*converted).mapInArrow(_pack, "data binary")

    def take(partitions):
        tables = [pa.ipc.open_stream(row.data).read_all() for row in packed.take(partitions)]
        return [decode_columns(specs, t.combine_chunks().to_batches()[0]) for t in tables]

    return _gathered(take)


def _pack(batches):
    """Rows of the first Arrow batch of a partition, as one message."""
    import pyarrow as pa

    for batch in batches:
        if batch.num_rows:
            rows = batch.take(pa.array(_spread(batch.num_rows, batch.nbytes)))
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, rows.schema) as writer:
                writer.write_batch(rows)
            message = pa.array([sink.getvalue().to_pybytes()], pa.binary())
            yield pa.RecordBatch.from_arrays([message], ["data"])
            return


def _of_shards(shards, config, feature_cols):
    first = _first_of(config, feature_cols)
    return _gathered(lambda partitions: _good(shards.rdd.mapPartitions(first).take(partitions)))


def _of_ray_shards(shards, config, feature_cols):
    first = _first_of(config, feature_cols)

    def take(partitions):
        import ray

        task = ray.remote(lambda partition: list(first(partition)))
        calls = [task.remote(each) for each in shards.get_partition_refs()[:partitions]]
        return _good([rows for found in ray.get(calls) for rows in found])

    return _gathered(take)


def _first_of(config, feature_cols) -> Callable:
    """What finds the rows of the first shard of a partition that has any, or why it cannot."""
    floats, names = float_dtype(config), list(feature_cols)

    def first(partition):
        for shard in partition:
            try:
                columns = columns_of(shard, names, None, floats, with_labels=False)
            except SourceError as error:
                yield str(error)
                return
            if len(columns[0][2]):
                yield _rows(columns)
                return

    return first


def _good(found: list) -> list:
    for each in found:
        if isinstance(each, str):
            raise UsageError(each)
    return found


def _of_dataset(dataset, config, feature_cols):
    frame = dataset.limit(SAMPLE_ROWS).to_pandas()
    return _of_arrays(frame, config, feature_cols) if len(frame) else None


def _of_arrays(data, config, feature_cols):
    if not is_frame(data):
        data, _ = checked_arrays(data, bool(feature_cols))
    columns = columns_of(data, list(feature_cols), None, float_dtype(config), with_labels=False)
    return Sample(_rows(columns)) if len(columns[0][2]) else None


def _rows(columns) -> list:
    size = sum(values.nbytes for _, _, values in columns)
    return rows_of_columns(columns, _spread(len(columns[0][2]), size))


def _spread(rows: int, size: int) -> np.ndarray:
    """Indices of as many rows as a sample may have, evenly spaced; `size` is that of all."""
    count = min(rows, SAMPLE_ROWS, max(1, _SAMPLE_BYTES * rows // max(size, 1)))
    return np.linspace(0, rows - 1, count).astype(np.int64)


def _gathered(take: Callable[[int], list]) -> Sample | None:
    """The rows that the first partitions have, those of one shape."""
    found: list = []
    for partitions in _PARTITIONS:
        found = take(partitions)
        if len(found) < partitions or sum(map(_size, found)) >= SAMPLE_ROWS:
            break
    if not found:
        return None
    kind = Sample(found[0]).kind
    alike = [columns for columns in found if Sample(columns).kind == kind]
    joined = [_joined(parts) for parts in zip(*alike, strict=True)]
    return Sample(joined)


def _size(columns) -> int:
    return len(_leaves(columns[0])[0][1])


def _joined(parts):
    if isinstance(parts[0], dict):
        return {key: _joined([part[key] for part in parts]) for key in parts[0]}
    return np.concatenate(parts)[:SAMPLE_ROWS]


def _leaves(column) -> list[tuple]:
    return list(column.items()) if isinstance(column, dict) else [(None, column)]


def _map(column, func):
    return {k: func(a) for k, a in column.items()} if isinstance(column, dict) else func(column)
