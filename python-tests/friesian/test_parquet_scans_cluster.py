"""Tests that executors of a cluster read Parquet columns by pyarrow."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bigdl.friesian.executors import scans
from bigdl.friesian.ops.batches import decoded
from bigdl.orca.cluster.versions import to_arrow


def same(batch):
    yield pa.record_batch({name: decoded(batch[name]) for name in batch.names})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_executors_look_into_files_and_read_them(local_cluster, tmp_path):
    for part in range(3):
        rows = range(part * 50, part * 50 + 50)
        table = pa.table({"text": [f"text {n % 7}" for n in rows], "row": rows})
        pq.write_table(table, tmp_path / f"{part}.parquet", row_group_size=20)
    df = local_cluster.read.parquet(str(tmp_path))
    found = scans.from_files(df, same, df.schema)
    assert to_arrow(found).equals(to_arrow(df))
