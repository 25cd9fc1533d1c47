"""Rows of Arrow batches are filtered exactly as by pyarrow, also fixed-size lists."""

import numpy as np
import pyarrow as pa
import pytest

from bigdl.data.lake_tables.expressions import filter_rows


@pytest.mark.parametrize("rows", [0, 1, 7, 500])
def test_filtered_rows_equal_those_of_pyarrow(rows):
    draw = np.random.default_rng(rows)
    mask = pa.array([None if each < 0.1 else each < 0.6 for each in draw.random(rows)], pa.bool_())
    columns = {
        "equal": pa.array([[float(i)] * 3 for i in range(rows + 2)], pa.list_(pa.float32()))[1:-1],
        "large": pa.array([[i, None] for i in range(rows + 2)], pa.large_list(pa.int64()))[2:],
        "unequal": pa.array([[i] * (i % 3) for i in range(rows)], pa.list_(pa.int64())),
        "nulls": pa.array([[i, i] if i % 4 else None for i in range(rows)], pa.list_(pa.int64())),
        "texts": pa.array([["a", "bc"]] * rows, pa.list_(pa.string())),
        "nested": pa.array([[[1, 2], [3]]] * rows, pa.list_(pa.list_(pa.int8()))),
        "number": pa.array(range(rows)),
    }
    batch = pa.RecordBatch.from_pydict(columns)
    filtered = filter_rows(batch, mask)
    filtered.validate(full=True)
    assert filtered.schema == batch.schema
    assert filtered.equals(batch.filter(mask))
