"""Slices of tables are files of NumPy's, and a damaged one is refused."""

import fsspec
import numpy as np
import pytest

from bigdl.common.errors import UsageError
from bigdl.training.slices import SavedSlices, file_name, write_slice


@pytest.fixture
def saved(tmp_path):
    """A function that writes rows as the only slice of an array; returns its slices and file."""

    def write(rows):
        path = tmp_path / file_name("table", 0)
        described = write_slice(fsspec.filesystem("file"), str(path), rows)
        return SavedSlices(str(tmp_path), {"table": [described]}), path

    return write


@pytest.mark.parametrize("dtype", ["<f4", "<i8", "|b1", "|V2", "<f2"])
@pytest.mark.parametrize("shape", [(5, 3), (0, 4), (2, 3, 4)])
def test_a_slice_is_read_back_and_by_numpy(saved, dtype, shape):
    rows = np.arange(np.prod(shape, dtype=int) * 8, dtype=np.uint8)
    rows = rows[: np.prod(shape, dtype=int) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
    slices, path = saved(rows)
    for found in (slices.read("table"), np.load(path), slices.mapped("table", at_random=False)[0]):
        assert found.dtype == rows.dtype
        assert found.shape == shape
        assert found.tobytes() == rows.tobytes()
    assert slices.size == path.stat().st_size


def test_a_file_that_is_damaged_anywhere_is_refused(saved):
    slices, path = saved(np.arange(6, dtype="<f4").reshape(2, 3))
    whole = path.read_bytes()
    flipped = [
        whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :]
        for place in range(len(whole))
        for bit in (1, 16, 128)
    ]
    for content in (*flipped, *(whole[:length] for length in range(len(whole)))):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"rows\.table\.00000\.npy cannot be read") as caught:
            slices.read("table")
        assert caught.value.code == "checkpoint-damaged"


def test_a_file_of_other_rows_is_refused(saved):
    slices, path = saved(np.zeros((2, 3), "<f4"))
    for other in (np.zeros((3, 2), "<f4"), np.zeros((2, 3), "<i4"), np.zeros((2, 3), "<f4").T):
        np.save(path, other)
        with pytest.raises(UsageError, match="differs from the manifest"):
            slices.read("table")
