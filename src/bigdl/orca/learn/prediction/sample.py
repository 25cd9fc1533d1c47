"""Sample of a few hundred input rows, in the format of model inputs.

Sampling runs no full job: it reads the first partition of a DataFrame or XShards, and more only if
that has too few rows. Within a partition, the rows are spread evenly over its first batch or shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.learn.prediction.predictor import (
    PredictOptions,
    columns_as_trained,
    converted_columns,
    decode_columns,
    drop_null_rows,
    leaf_types,
    take_rows,
)
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.shards.feed import Feed, SourceError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SAMPLE_ROWS = 256
_SAMPLE_BYTES = 64 << 20
_PARTITIONS = (1, 4, 16)
"""Numbers of partitions to read, in turn, until there are enough rows."""


@dataclass(frozen=True)
class Sample:
    """Sampled rows of a model's inputs.

    Attributes
    ----------
    columns : list
        Per model argument, a dict of arrays of shape ``(rows, ...)``. The keys are those of a map
        column, or None for a plain column.
    """

    columns: list[dict[str | None, np.ndarray]]

    @classmethod
    def of(cls, columns: list) -> Sample:
        """Build a sample from columns that are arrays or dicts of arrays."""
        return cls([each if isinstance(each, dict) else {None: each} for each in columns])

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns[0].values())))

    @property
    def leaves(self) -> list[list]:
        """``[key, dtype, shape]`` of every array, in one list per column."""
        return leaf_types(self.columns)

    def first(self, rows: int) -> list:
        """Return the first `rows` rows as model inputs, repeating rows if necessary."""
        index = np.resize(np.arange(self.rows), rows)
        taken = ({key: array[index] for key, array in c.items()} for c in self.columns)
        return [column.get(None, column) for column in taken]

    def batches(self, size: int) -> list[tuple]:
        """Return all rows as batches of tensors, repeating rows to fill the last batch.

        Parameters
        ----------
        size : int
            Number of rows per batch. It is raised to at least 2, since a model that squeezes its
            output would drop the row dimension, and limited to :data:`SAMPLE_ROWS`.

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


@dataclass(frozen=True)
class Sampler:
    """Samples rows from the first partitions of an input.

    Attributes
    ----------
    options : PredictOptions
        Its ``inputs`` determine the types of the sample.
    rows : int
        Maximum number of rows in a sample.
    """

    options: PredictOptions
    rows: int = SAMPLE_ROWS

    def take_from_frame(self, frame: DataFrame, partitions: int) -> list:
        """Sample the first partitions of a DataFrame; return a list of columns per partition."""
        import pyarrow as pa

        names, known = self.options.feature_cols, self.options.inputs
        specs, plain, converted = converted_columns(frame, self.options.config, names, known)
        packed = plain.select(*converted).mapInArrow(_pack, "data binary").take(partitions)
        tables = [pa.ipc.open_stream(row.data).read_all() for row in packed]
        batches = [
            drop_null_rows(specs, t.combine_chunks().to_batches()[0].columns) for t in tables
        ]
        return [decode_columns(specs, columns) for columns, rows, _ in batches if rows]

    def take_from_shards(self, partition: Iterable) -> Iterator:
        """Yield sampled rows of a partition's first non-empty shard, or the error it raises."""
        names, config, known = self.options.feature_cols, self.options.config, self.options.inputs
        for shard in partition:
            try:
                columns = columns_as_trained(shard, names, config, known)
            except SourceError as error:
                yield error
                return
            rows = len(columns[0][2])
            if rows:
                size = sum(values.nbytes for _, _, values in columns)
                yield take_rows(columns, _spread(rows, size))
                return

    def sample_of(self, feed: Feed, cluster: Cluster) -> Sample | None:
        """Return a sample of an input, or None if it has no rows that can be read cheaply.

        Raises
        ------
        UsageError
            If the rows cannot be converted to tensors.
        """
        samples: list[Sample] = []
        for partitions in _PARTITIONS:
            taken = feed.sample(self, partitions, cluster)
            for columns in taken:
                if isinstance(columns, UsageError):
                    raise columns.with_message(str(columns))
            samples = [Sample.of(columns) for columns in taken]
            if len(samples) < partitions or sum(each.rows for each in samples) >= SAMPLE_ROWS:
                break
        if not samples:
            return None
        alike = [each.columns for each in samples if each.leaves == samples[0].leaves]
        return Sample(
            [
                {k: np.concatenate([part[k] for part in parts])[: self.rows] for k in parts[0]}
                for parts in zip(*alike, strict=True)
            ]
        )


def _pack(batches):
    """Yield rows sampled from the first non-empty Arrow batch, serialized as one IPC stream."""
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


def _spread(rows: int, size: int) -> np.ndarray:
    """Return evenly spaced indices of rows to sample; `size` is the size of all rows in bytes."""
    count = min(rows, SAMPLE_ROWS, max(1, _SAMPLE_BYTES * rows // max(size, 1)))
    return np.linspace(0, rows - 1, count).astype(np.int64)
