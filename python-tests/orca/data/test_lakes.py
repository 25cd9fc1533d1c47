"""Test Delta Lake and Iceberg tables that workers read directly."""

import datetime
import itertools
import json
import logging
import os
import shutil
import signal
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray_models as rays
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.data.lake_tables.table import DataFile, RowRange, cut
from bigdl.friesian.feature import FeatureTable
from bigdl.orca.data.feeds import as_feed
from bigdl.orca.data.lake_tables import open_table
from bigdl.orca.data.lake_tables.frames import arrow_table
from bigdl.orca.data.pandas import read_parquet
from bigdl.orca.engine import LocalEngine
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import Callback

deltalake = pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")

LAKES = Path("/tmp/bigdl-lakes")  # Iceberg's metadata has absolute paths
COLUMNS = {"feature_cols": ["x"], "label_cols": ["y"]}
EMPTY = pa.schema([("id", pa.int64()), ("x", pa.list_(pa.float32())), ("y", pa.float32())])


@pytest.fixture(scope="module")
def lakes():
    """Return tables that Spark has changed, with the rows that it reads at each version."""
    if not LAKES.exists():
        archive = Path(os.environ.get("BIGDL_DATA", ""), "lakes", "lakes.tar.xz")
        if not archive.exists():
            pytest.skip("there is no lakes/lakes.tar.xz in BIGDL_DATA")
        with tarfile.open(archive) as tar:
            tar.extractall("/tmp", filter="data")
    return LAKES


def versions_of(root: Path) -> dict[str, str]:
    """Return the path of each version, by the file name of the rows that Spark reads."""
    paths = {f"delta-clicks-v{n}": f"{root}/delta/clicks@v{n}" for n in (0, 1, 5)}
    paths["delta-plain"] = f"{root}/delta/plain"
    for form in (2, 3):
        listed = pq.read_table(root / f"expected/iceberg-clicks_v{form}-snapshots").to_pylist()
        for each in listed:
            name = f"iceberg-clicks_v{form}-s{each['k']}"
            paths[name] = f"{root}/iceberg/db/clicks_v{form}@{each['snapshot']}"
    return paths


def rows(count: int, first: int = 0) -> pa.Table:
    ids = np.arange(first, first + count)
    x = [[float(np.float32(np.sin(i))), float(i % 5)] for i in ids]
    return pa.table({"id": ids, "x": x, "y": np.cos(ids)}).cast(EMPTY)


def ids_of_workers(data, workers: int) -> list[list[int]]:
    """Return the ids that each worker reads."""
    feed = as_feed(data, ["id"], [])
    return LocalEngine().run(lambda w: w.shard.column("id").tolist(), feed, num_workers=workers)


@pytest.fixture
def catalog(tmp_path):
    from pyiceberg.catalog.memory import InMemoryCatalog

    catalog = InMemoryCatalog("tests", warehouse=f"file://{tmp_path}/warehouse")
    catalog.create_namespace("db")
    return catalog


# What Spark reads ---------------------------------------------------------------------------------


def test_every_version_is_what_spark_reads(lakes):
    versions = versions_of(lakes)
    assert len(versions) == 12
    for name, path in versions.items():
        read = arrow_table(open_table(path)).sort_by("id")
        expected = pq.read_table(lakes / "expected" / name).sort_by("id")
        assert read.schema.names == expected.schema.names, name
        assert read.schema.types == expected.schema.types, name
        assert read.combine_chunks().equals(expected.combine_chunks()), name


@pytest.mark.slow_cases("delta-clicks-v5", "iceberg-clicks_v3-s1")
@pytest.mark.parametrize(
    "name", ["delta-clicks-v5", "iceberg-clicks_v2-s3", "iceberg-clicks_v3-s1"]
)
def test_workers_get_equal_shares_of_what_is_not_deleted(lakes, name):
    shares = ids_of_workers(versions_of(lakes)[name], 3)
    sizes = [len(each) for each in shares]
    assert max(sizes) - min(sizes) <= 1
    expected = pq.read_table(lakes / "expected" / name).column("id").to_pylist()
    assert sorted(itertools.chain(*shares)) == sorted(expected)


def test_the_newest_version_is_read_without_a_name(lakes):
    assert open_table(lakes / "delta/clicks").version.endswith("/delta/clicks@v5")
    newest = open_table(f"iceberg:{lakes}/iceberg/db/clicks_v3")
    assert newest.version.endswith("@3133510590994512212:schema=3")


def test_an_old_schema_of_iceberg_can_be_asked_for(lakes):
    path = f"{lakes}/iceberg/db/clicks_v2@2483606461781834904:schema=0"
    table = arrow_table(open_table(path))
    assert table.schema.names == ["id", "item", "price", "embedding", "day", "label"]
    assert table.schema.field("item").type == pa.int32()


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    parts=st.integers(1, 5),
)
@settings(max_examples=100)
def test_every_row_that_counts_is_in_one_part(sizes, seed, parts):
    rng = np.random.default_rng(seed)
    file, ranges, expected = DataFile("a"), [], []
    for group, size in enumerate(sizes):
        gone = np.flatnonzero(rng.random(size) < rng.random())
        whole = RowRange(file, group, 0, size, gone if len(gone) else None)
        if whole.rows:
            ranges.append(whole)
        expected += [(group, i) for i in range(size) if i not in gone]
    shares = cut(ranges, parts)
    read = [
        [
            (each.group, i)
            for each in share
            for i in range(each.start, each.stop)
            if each.deleted is None or i not in each.deleted
        ]
        for share in shares
    ]
    assert [row for share in read for row in share] == expected
    assert [len(share) for share in read] == [sum(r.rows for r in s) for s in shares]
    assert max(map(len, read)) - min(map(len, read)) <= 1


# Tables of other writers --------------------------------------------------------------------------


def test_partition_values_and_added_columns_of_delta(tmp_path):
    path = str(tmp_path / "a table")
    nested = [{"a": 1, "b": [{"c": 2.5}]}, None] * 3
    first = {
        "id": range(6),
        "name": ["a b", "c/d", "e%f", None, "g=h", "ü"],
        "day": [datetime.date(2020, 1, 1)] * 6,
        "nested": nested,
    }
    deltalake.write_deltalake(path, pa.table(first), partition_by=["name", "day"])
    more = {key: values[:1] for key, values in first.items()} | {"id": [9], "added": [1.5]}
    deltalake.write_deltalake(path, pa.table(more), mode="append", schema_mode="merge")
    expected = deltalake.DeltaTable(path).to_pyarrow_table().sort_by("id")
    read = arrow_table(open_table(path)).select(expected.column_names).sort_by("id")
    assert read.to_pylist() == expected.to_pylist()
    for old in (f"{path}@v0", deltalake.DeltaTable(path, version=0)):
        assert sorted(itertools.chain(*ids_of_workers(old, 2))) == [*range(6)]


def test_structs_of_iceberg_keep_their_fields_when_they_are_renamed(catalog):
    from pyiceberg.types import LongType, StringType

    data = {"id": [1, 2], "at": [{"lat": 1.5, "n": 3}, None], "tags": [[{"k": "a"}], []]}
    types = [("id", pa.int32()), ("at", pa.struct([("lat", pa.float64()), ("n", pa.int32())]))]
    types += [("tags", pa.list_(pa.struct([("k", pa.string())])))]
    old = pa.table(data, pa.schema(types))
    table = catalog.create_table("db.places", old.schema)
    table.append(old)
    with table.update_schema() as update:
        update.rename_column(("at", "lat"), "latitude")
        update.update_column(("at", "n"), LongType())
        update.update_column("id", LongType())
        update.add_column(("at", "name"), StringType())
        update.rename_column(("tags", "element", "k"), "key")
    read = arrow_table(open_table(table))
    assert read.schema.field("id").type == pa.int64()
    assert read.to_pylist() == table.scan().to_arrow().to_pylist()
    assert read.column("at").to_pylist() == [{"latitude": 1.5, "n": 3, "name": None}, None]
    assert read.column("tags").to_pylist() == [[{"key": "a"}], []]


def test_files_without_ids_are_read_by_the_names_of_the_table(catalog, tmp_path):
    pq.write_table(rows(4), tmp_path / "plain.parquet")
    table = catalog.create_table("db.added", EMPTY)
    table.add_files([f"file://{tmp_path}/plain.parquet"])
    with table.update_schema() as update:
        update.rename_column("id", "key")
    assert arrow_table(open_table(table)).column("key").to_pylist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_scan_of_iceberg_names_columns_and_a_snapshot(catalog):
    table = catalog.create_table("db.scanned", EMPTY)
    table.append(rows(4))
    first = table.current_snapshot().snapshot_id
    table.append(rows(4, 4))
    opened = open_table(table.scan(selected_fields=("id", "y"), snapshot_id=first))
    assert opened.schema.names == ["id", "y"]
    assert arrow_table(opened).num_rows == 4
    assert len(ids_of_workers(table, 1)[0]) == 8
    with refused("unsupported", "row_filter"):
        open_table(table.scan(row_filter="id > 2"))


def test_equality_deletes_are_refused(catalog):
    from pyiceberg.manifest import DataFileContent

    table = catalog.create_table("db.equal", EMPTY)
    table.append(rows(4))
    (task,) = table.scan().plan_files()
    task.file[0] = DataFileContent.EQUALITY_DELETES
    with table.transaction() as change, change.update_snapshot().fast_append() as append:
        append.append_data_file(task.file)
    with refused("unsupported"):
        as_feed(table, ["x"], ["y"])


# Estimators ---------------------------------------------------------------------------------------


class ChangeTheTable(Callback):
    """Callback that appends to a Delta table and kills its worker once, after the first epoch."""

    def __init__(self, path: str, kill: bool):
        self.path, self.kill = path, kill

    def after_train_epoch(self, runner):
        marker = Path(f"{self.path}-changed")
        if runner.rank == 0 and not marker.exists():
            marker.write_text("")
            deltalake.write_deltalake(self.path, rows(50, 100), mode="append")
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)


def estimator(folder: Path | None, backend: str = "local"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0))
    return Estimator.from_torch(
        model=model,
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), 0.05),
        loss=torch.nn.MSELoss(),
        model_dir=None if folder is None else str(folder),
        backend=backend,
        workers_per_node=2,
    )


def weights(est) -> list[list[float]]:
    return [p.flatten().tolist() for p in est.get_model().state_dict().values()]


def data_of_checkpoint(folder: Path) -> dict:
    manifest = Path(Estimator.latest_checkpoint(str(folder)), "manifest.json")
    return json.loads(manifest.read_text())["data"]


@pytest.mark.slow
def test_a_fit_that_goes_on_reads_the_version_that_its_checkpoint_names(tmp_path):
    path = str(tmp_path / "clicks")
    deltalake.write_deltalake(path, rows(100))
    options = {**COLUMNS, "batch_size": 20, "seed": 3}
    alone = estimator(None)
    alone.fit(path, epochs=4, **options)
    first = estimator(tmp_path / "models")
    first.fit(path, epochs=2, **options)
    assert data_of_checkpoint(tmp_path / "models") == {"data": f"delta:{path}@v0"}
    deltalake.write_deltalake(path, rows(50, 100), mode="append")
    again = estimator(tmp_path / "models")
    metrics = again.fit(path, epochs=4, resume="auto", **options)
    assert metrics[-1]["num_samples"] == 100
    assert weights(again) == weights(alone)
    assert data_of_checkpoint(tmp_path / "models") == {"data": f"delta:{path}@v0"}
    # a new fit and an evaluation read the newest version
    assert again.fit(path, **options)[-1]["num_samples"] == 150
    assert again.evaluate(path, **COLUMNS)["num_samples"] == 150


def warned(caplog) -> str:
    messages = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return "\n".join(message for message in messages if "checkpoint was trained on" in message)


def test_a_resume_says_that_its_data_are_other_ones_of_the_same_name(tmp_path, caplog):
    path, files = str(tmp_path / "clicks"), tmp_path / "files"
    options = {**COLUMNS, "batch_size": 20, "seed": 3, "resume": "auto"}
    logging.getLogger("bigdl.orca").addHandler(caplog.handler)
    deltalake.write_deltalake(path, rows(100))
    files.mkdir()
    pq.write_table(rows(40), files / "1.parquet")
    for name, data in (("delta", path), ("parquet", str(files))):
        estimator(tmp_path / name).fit(data, epochs=1, **options)
        estimator(tmp_path / name).fit(data, epochs=2, **options)
    assert warned(caplog) == ""
    shutil.rmtree(path)  # recreated: the version is v0 again, but the rows differ
    deltalake.write_deltalake(path, rows(60, 500))
    pq.write_table(rows(40, 100), files / "1.parquet")
    metrics = estimator(tmp_path / "delta").fit(path, epochs=3, **options)
    assert metrics[-1]["num_samples"] == 60
    assert "but the table was recreated since (its id was" in warned(caplog)
    estimator(tmp_path / "parquet").fit(str(files), epochs=3, **options)
    assert "was trained on other files of" in warned(caplog)
    logging.getLogger("bigdl.orca").removeHandler(caplog.handler)


@pytest.mark.slow
@pytest.mark.fault
def test_a_worker_that_is_lost_while_the_table_changes_goes_on_with_its_rows(tmp_path):
    options = {**COLUMNS, "batch_size": 20, "seed": 3, "epochs": 3}
    results = []
    for name, kill in [("kept", False), ("lost", True)]:
        path = str(tmp_path / name)
        deltalake.write_deltalake(path, rows(100))
        est = estimator(tmp_path / f"{name}-models")
        metrics = est.fit(path, callbacks=[ChangeTheTable(path, kill)], **options)
        assert Path(f"{path}-changed").exists()
        assert [each["num_samples"] for each in metrics] == [100, 100, 100]
        results.append(weights(est))
    assert results[0] == results[1]


@pytest.mark.slow
def test_spark_trains_and_predicts_on_a_changed_table(orca_spark, lakes):
    path = f"{lakes}/delta/clicks"
    names = {"feature_cols": ["embedding"], "label_cols": ["amount"]}
    model = torch.nn.Sequential(torch.nn.Linear(8, 1), torch.nn.Flatten(0))
    est = Estimator.from_torch(model=model, loss=torch.nn.MSELoss(), backend="spark")
    assert est.evaluate(path, batch_size=1000, **names)["num_samples"] == 20000
    predicted = est.predict(path, feature_cols=["embedding"])
    expected = orca_spark.read.parquet(f"{lakes}/expected/delta-clicks-v5")
    assert predicted.schema[:-1] == expected.schema
    assert predicted.drop("prediction").exceptAll(expected).isEmpty()
    assert predicted.count() == 20000


@pytest.mark.slow
def test_tables_become_feature_tables_and_shards(orca_spark, lakes):
    path = f"{lakes}/iceberg/db/clicks_v3"
    assert FeatureTable.read_parquet(path).size() == 20000
    shards = read_parquet(path, columns=["id", "country"])
    assert sum(map(len, shards.collect())) == 20000
    assert list(shards.collect()[0].columns) == ["id", "country"]
    with pytest.raises(UsageError, match=r"schema cannot be passed.*omit it"):
        read_parquet(path, schema="id long")


@pytest.mark.slow
def test_ray_trains_and_predicts_on_a_changed_table(lakes):
    rays.active_ray()
    path = f"{lakes}/iceberg/db/clicks_v2"
    model = torch.nn.Sequential(torch.nn.Linear(8, 1), torch.nn.Flatten(0))
    est = Estimator.from_torch(model=model, loss=torch.nn.MSELoss(), backend="ray")
    names = {"feature_cols": ["embedding"], "label_cols": ["amount"]}
    assert est.evaluate(path, batch_size=1000, **names)["num_samples"] == 20000
    predicted = est.predict(path, feature_cols=["embedding"]).to_pandas()
    expected = pq.read_table(lakes / "expected/iceberg-clicks_v2-s3")
    assert sorted(predicted["id"]) == sorted(expected.column("id").to_pylist())


# What is said of wrong names ----------------------------------------------------------------------


@pytest.mark.slow
def test_versions_that_are_not_there(tmp_path, catalog):
    path = str(tmp_path / "clicks")
    deltalake.write_deltalake(path, rows(3))
    for wrong, message in {
        f"{path}@v7": "cannot be opened at version 7: the newest is delta:.*@v0",
        f"{path}@old": "a Delta version is written @v<number>, .* got @old",
        f"iceberg:{path}": "There is no Iceberg table at .*; pass the folder",
        "delta:/tmp/nowhere": "The Delta table /tmp/nowhere cannot be opened",
        "/tmp/nowhere@v3": "There is nothing at /tmp/nowhere@v3",
    }.items():
        with pytest.raises(UsageError, match=f"(?i){message}"):
            as_feed(wrong, ["x"], ["y"])
    with pytest.raises(UsageError, match="A list may contain only Parquet paths"):
        as_feed([path, path], ["x"], ["y"])
    table = catalog.create_table("db.empty", EMPTY)
    with pytest.raises(UsageError, match="has no snapshot, so it has no rows"):
        as_feed(table, ["x"], ["y"])
    table.append(rows(3))
    folder = table.location().removeprefix("file://")
    assert ids_of_workers(folder, 1) == [[0, 1, 2]]
    with refused("name-unknown", "'12'"):
        as_feed(f"{folder}@12", ["x"], ["y"])


def test_files_that_vacuum_removed_are_named(tmp_path):
    path = tmp_path / "clicks"
    deltalake.write_deltalake(path, rows(3))
    for file in path.glob("*.parquet"):
        file.unlink()
    with refused("path-missing", "v0"):
        as_feed(str(path), ["x"], ["y"])
