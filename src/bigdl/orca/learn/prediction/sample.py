"""A few hundred of the rows that are to be predicted, as the model takes them.

No full job runs for them: of a DataFrame and of XShards the first partition is asked, and others
only if it has too few rows.  Within a partition the rows are spread over its first batch or shard.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds import kind_of
from bigdl.orca.learn.prediction.inputs import (
    checked_arrays,
    converted_columns,
    decode_columns,
    fitted_columns,
    rows_of_columns,
    types_of,
    whole_rows,
)
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.values import is_frame

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
        Arrays of shape ``(rows, ...)`` for each argument of the model, by the keys of a map column
        or None.
    """

    columns: list[dict[str | None, np.ndarray]]

    @classmethod
    def of(cls, columns: list) -> Sample:
        """The sample of columns that are an array or a dict of arrays each."""
        return cls([each if isinstance(each, dict) else {None: each} for each in columns])

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns[0].values())))

    @property
    def leaves(self) -> list[list]:
        """``[key, dtype, shape]`` of the arrays of each column, in the form of
        ``BatchSource.types``."""
        return types_of(self.columns)

    def first(self, rows: int) -> list:
        """So many rows as the model takes them; they are repeated if there are fewer."""
        index = np.resize(np.arange(self.rows), rows)
        taken = ({key: array[index] for key, array in c.items()} for c in self.columns)
        return [column.get(None, column) for column in taken]

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
        size = min(max(size, 2), SAMPLE_ROWS)
        index = np.resize(np.arange(self.rows), (-(-self.rows // size), size))
        return [tuple(self._arguments(rows)) for rows in index]

    def _arguments(self, rows):
        import torch

        for column in self.columns:
            tensors = {key: torch.tensor(array[rows]) for key, array in column.items()}
            yield tensors.get(None, tensors)


def sample_of(
    data: Any, config: dict, feature_cols: Sequence[str], known: list | None = None
) -> Sample | None:
    """A sample of an input of any kind that `predict` takes.

    Parameters
    ----------
    data : pyspark.sql.DataFrame, SparkXShards, RayXShards, ray.data.Dataset, \
pandas.DataFrame or arrays
    config : dict
        ``dtype`` is that of the floating inputs.
    feature_cols : sequence of str
    known : list, optional
        Types of the model's inputs in the training, which the sample gets.

    Returns
    -------
    Sample or None
        None where no row was found, or the input is of another kind.

    Raises
    ------
    UsageError
        If the rows cannot become tensors.
    """
    samples: list[Sample] = []
    for partitions in _PARTITIONS:
        taken = _rows_of(data, config, list(feature_cols), partitions, known)
        for columns in taken:
            if isinstance(columns, UsageError):
                raise columns.with_message(str(columns))
        samples = [Sample.of(columns) for columns in taken]
        if len(samples) < partitions or sum(sample.rows for sample in samples) >= SAMPLE_ROWS:
            break
    if not samples:
        return None
    alike = [sample.columns for sample in samples if sample.leaves == samples[0].leaves]
    return Sample(
        [
            {key: np.concatenate([part[key] for part in parts])[:SAMPLE_ROWS] for key in parts[0]}
            for parts in zip(*alike, strict=True)
        ]
    )


def needed_sample(
    data: Any, config: dict, feature_cols: Sequence[str], known: list | None = None
) -> Sample:
    """The same, where there must be rows.

    Raises
    ------
    UsageError
        If there are none.
    """
    rows = sample_of(data, config, feature_cols, known)
    if rows is None:
        raise UsageError(
            "sample must be some rows that predict takes, such as a DataFrame, a pandas "
            f"DataFrame or arrays; got {type(data).__name__} without rows",
            code="data-empty",
            argument="sample",
        )
    return rows


def _rows_of(data, config, names, partitions: int, known: list | None) -> list:
    """Return the columns of some rows of each of the first partitions, or the error of its data."""
    input_type = kind_of(data)
    first = functools.partial(_first_rows, names, config, known)
    if input_type == "Spark DataFrame":
        return _rows_of_frame(data, config, names, partitions, known)
    if input_type == "SparkXShards":
        from bigdl.orca.data.xshards.shards import collected

        return collected(data.rdd.mapPartitions(first), partitions)
    if input_type == "RayXShards":
        import ray

        from bigdl.orca.cluster.ray_launch import ray_get

        task: Any = ray.remote(lambda partition: list(first(partition)))
        calls = [task.remote(each) for each in data.get_partition_refs()[:partitions]]
        return list(itertools.chain.from_iterable(ray_get(calls)))
    if input_type == "Ray Dataset" and names:
        frame = data.limit(SAMPLE_ROWS).to_pandas()
        return list(first([frame])) if len(frame) else []
    if input_type == "array" and not type(data).__module__.startswith("torch"):
        return list(first([data if is_frame(data) else checked_arrays(data, bool(names))[0]]))
    return []


def _rows_of_frame(frame, config, feature_cols, partitions, known):
    import pyarrow as pa

    specs, plain, converted = converted_columns(frame, config, feature_cols, known)
    packed = plain.select(*converted).mapInArrow(_pack, "data binary").take(partitions)
    tables = [pa.ipc.open_stream(row.data).read_all() for row in packed]
    batches = [whole_rows(specs, t.combine_chunks().to_batches()[0].columns) for t in tables]
    return [decode_columns(specs, columns) for columns, rows, _ in batches if rows]


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


def _first_rows(names, config, known, partition) -> Iterator:
    """Yield rows of a partition's first shard that has any, or the error of its data."""
    for shard in partition:
        try:
            columns = fitted_columns(shard, names, config, known)
        except SourceError as error:
            yield error
            return
        rows = len(columns[0][2])
        if rows:
            size = sum(values.nbytes for _, _, values in columns)
            yield rows_of_columns(columns, _spread(rows, size))
            return


def _spread(rows: int, size: int) -> np.ndarray:
    """Indices of as many rows as a sample may have, evenly spaced; `size` is that of all."""
    count = min(rows, SAMPLE_ROWS, max(1, _SAMPLE_BYTES * rows // max(size, 1)))
    return np.linspace(0, rows - 1, count).astype(np.int64)
