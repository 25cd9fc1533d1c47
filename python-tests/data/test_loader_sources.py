"""Test that a TableLoader reads files, lakes and frames at one version."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import refused

from bigdl.data import TableLoader

ROWS = 300
TABLE = pa.table({"id": np.arange(ROWS), "name": [f"row {n}" for n in range(ROWS)]})


def ids(loader):
    rows = [
        (number, name)
        for batch in loader
        for number, name in zip(batch["id"].tolist(), batch["name"], strict=True)
    ]
    assert all(name == f"row {number}" for number, name in rows)
    return sorted(number for number, _ in rows)


def of_pandas(folder):
    return TABLE.to_pandas()


def of_polars(folder):
    return pytest.importorskip("polars").from_arrow(TABLE)


def of_duckdb(folder):
    duckdb = pytest.importorskip("duckdb")
    return duckdb.connect().from_arrow(TABLE)


def of_hugging_face(folder):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset(TABLE).shuffle(seed=1)


def of_lance(folder):
    lance = pytest.importorskip("lance")
    return lance.write_dataset(TABLE, folder / "a.lance", max_rows_per_file=100)


def of_lance_path(folder):
    of_lance(folder)
    return str(folder / "a.lance")


def of_partitions(folder):
    pq.write_to_dataset(TABLE, folder / "parts", partition_cols=["id"], max_partitions=ROWS)
    return str(folder / "parts")


def of_memory_storage(folder):
    import fsspec

    with fsspec.open("memory://clicks/a.parquet", "wb") as file:
        pq.write_table(TABLE, file)
    return "memory://clicks/a.parquet"


@pytest.mark.parametrize(
    "source",
    [
        of_pandas,
        of_polars,
        of_duckdb,
        of_hugging_face,
        of_lance,
        of_lance_path,
        of_memory_storage,
        pytest.param(of_partitions, marks=pytest.mark.slow),
    ],
)
def test_a_source_is_read_row_by_row(source, tmp_path):
    data = source(tmp_path)
    loader = TableLoader(data, batch_size=64)
    assert ids(loader) == list(range(ROWS))
    state = TableLoader(source(tmp_path) if source is of_pandas else data).state_dict()
    loader.load_state_dict(state)


def test_a_delta_table_is_read_at_a_version(tmp_path):
    deltalake = pytest.importorskip("deltalake")
    path = str(tmp_path / "clicks")
    deltalake.write_deltalake(path, TABLE)
    state = TableLoader(path, batch_size=64).state_dict()
    deltalake.DeltaTable(path).delete("id < 100")
    assert ids(TableLoader(path, batch_size=64)) == list(range(100, ROWS))
    pinned = TableLoader(f"{path}@v0", batch_size=64)
    pinned.load_state_dict(state)
    assert ids(pinned) == list(range(ROWS))
    with refused("checkpoint-mismatch", "@v0", "@v1", "pass"):
        TableLoader(path).load_state_dict(state)
    assert ids(TableLoader(deltalake.DeltaTable(path, version=0))) == list(range(ROWS))


@pytest.mark.slow
def test_an_iceberg_table_is_read_at_a_snapshot(tmp_path):
    pytest.importorskip("pyiceberg")
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("test", uri="sqlite://", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("shop")
    table = catalog.create_table("shop.clicks", TABLE.schema)
    table.append(TABLE.slice(0, 100))
    first = table.current_snapshot().snapshot_id
    table.append(TABLE.slice(100))
    folder = table.location().removeprefix("file://")
    assert ids(TableLoader(folder, batch_size=64)) == list(range(ROWS))
    assert ids(TableLoader(f"{folder}@{first}", batch_size=64)) == list(range(100))


def test_the_ranks_of_a_machine_share_one_conversion(tmp_path, monkeypatch):
    """Check that the last loader removes the files, and that a cache keeps them."""
    monkeypatch.setenv("BIGDL_SCRATCH_DIR", "")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = textwrap.dedent(
        """
        import glob, os, sys
        from bigdl.data import TableLoader

        def stores():
            return [f for d, _, fs in os.walk(sys.argv[2]) for f in fs if f == "table.json"]

        options = {"format": "numpy", "cache": sys.argv[3] if len(sys.argv) > 3 else None}
        loaders = [TableLoader(sys.argv[1], rank=r, world_size=2, **options) for r in range(2)]
        for loader in loaders:
            next(iter(loader))
        print(len(stores()), loaders[0]._shared.existed, loaders[1]._shared.existed)
        loaders[0].close()
        print(len(stores()))
        """
    )
    pq.write_table(TABLE, tmp_path / "a.parquet")
    command = [sys.executable, "-c", program, str(tmp_path / "a.parquet"), str(tmp_path)]

    def printed(*more):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert printed() == ["1", "False", "True", "1"]
    left = [f for _, _, files in os.walk(tmp_path) for f in files if f == "table.json"]
    assert left == []
    cache = str(tmp_path / "cache")
    assert printed(cache) == ["1", "False", "True", "1"]
    assert printed(cache) == ["1", "True", "True", "1"]


def test_a_table_larger_than_the_disk_is_read_in_windows(tmp_path, monkeypatch):
    from bigdl.data import loader as module

    pq.write_table(TABLE, tmp_path / "a.parquet", row_group_size=50)
    whole = TableLoader(str(tmp_path / "a.parquet"), batch_size=10)
    usage = module.shutil.disk_usage(tmp_path)
    size = module.record_dtype(whole.fields).itemsize
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=size * ROWS))
    small = TableLoader(str(tmp_path / "a.parquet"), batch_size=10)
    assert ids(small) == list(range(ROWS))
    assert small.state_dict()["order"] == {"kind": "windows", "rows": 80}
    with refused("resource-limit", "window=80"):
        iter(TableLoader(str(tmp_path / "a.parquet"), rank=0, world_size=2))
    with refused("resource-limit", "global"):
        iter(TableLoader(str(tmp_path / "a.parquet"), shuffle="global"))


def test_the_import_needs_pyarrow_and_numpy_only():
    heavy = ["torch", "pyspark", "pandas", "keras", "transformers", "ray"]
    code = f"import sys, bigdl.data; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_frame_with_an_index_gives_its_columns():
    frame = pd.DataFrame({"id": [1, 2, 3]}, index=[7, 8, 9])
    assert list(next(iter(TableLoader(frame)))) == ["id"]
