"""Batches of tensors over the mapped columns of a shard."""

import numpy as np
import pytest
import torch

from bigdl.runtime.shards.columns import ArraySpec
from bigdl.runtime.shards.shard import Shard, SpoolWriter
from bigdl.training.batches import TensorShard

ROWS = 31
NAMES = ("a", "b", "c", "d", "e", "f", "g", "h")


def shard(directory, values, column) -> TensorShard:
    leaf = ArraySpec(column, None, values.dtype.name, values.shape[1:])
    writer = SpoolWriter(str(directory), 0, "rows", [])
    writer.append(0, 0, len(values), [leaf], [np.ascontiguousarray(values)])
    names = [column] if isinstance(column, str) else list(column)
    return TensorShard(Shard(writer.finish()), names, [])


@pytest.mark.parametrize("dtype", ["int32", "float32", "int16", "bool", "int64", "complex64"])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
def test_rows_of_any_width_are_gathered_as_they_are(tmp_path, dtype, width):
    values = np.random.default_rng(0).integers(-99, 99, (ROWS, width)).astype(dtype)
    order = np.random.default_rng(1).permutation(ROWS)
    matrix = shard(tmp_path, values, NAMES[:width])
    for start, stop in ((0, 7), (7, 8), (8, ROWS)):
        found = matrix.batch(start, stop, order)
        assert all(column.is_contiguous() for column in found)
        assert torch.equal(torch.stack(found, 1), torch.from_numpy(values[order[start:stop]]))
    (found,) = shard(tmp_path, values, "a").batch(3, 9, order)
    assert torch.equal(found, torch.from_numpy(values[order[3:9]]))


def test_a_batch_is_a_copy(tmp_path):
    values = np.arange(8, dtype=np.int32).reshape(4, 2)
    rows = shard(tmp_path, values, "a")
    for order in (None, np.arange(4)):
        (found,) = rows.batch(0, 4, order)
        found.zero_()
        assert torch.equal(rows.batch(0, 4, order)[0], torch.from_numpy(values))
