"""Tests of feature stores in folders and in Redis, during changes and writer crashes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from refusals import refused
from served_catalogue import free_port, items_frame, random_users, start_redis, users_frame

from bigdl.common.errors import UsageError
from bigdl.friesian.serving import EmbeddedStore, open_store

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed"
)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    process, port = start_redis(tmp_path_factory.mktemp("redis"))
    yield f"redis://127.0.0.1:{port}"
    process.terminate()
    process.wait()


@pytest.fixture(params=["folder", pytest.param("redis", marks=needs_redis)])
def store(request, tmp_path):
    if request.param == "folder":
        made = EmbeddedStore(tmp_path / "store")
    else:
        made = open_store(request.getfixturevalue("redis_url"), prefix=f"{tmp_path.name}_")
    with made:
        yield made


def assert_rows_equal(features, frame, ids, id_col):
    """Check that each row belongs to its id, or has the defaults."""
    known = frame.set_index(id_col)
    assert features.ids.tolist() == list(ids)
    assert features.found.tolist() == [each in known.index for each in ids]
    rows = known.reindex(ids)
    found = features.found
    for name in known.columns:
        column = features[name]
        values = np.array(column.to_pylist(), object) if isinstance(column, pa.Array) else column
        for value, wanted, is_known in zip(values, rows[name], found, strict=True):
            if is_known and isinstance(wanted, float) and np.isnan(wanted):
                assert value is None or np.isnan(value)
            elif is_known:
                assert np.array_equal(value, wanted)


def test_rows_come_in_the_order_of_the_ids_repeated_and_unknown_ones_too(store):
    users, items = users_frame(), items_frame()
    store.replace({"user": users, "item": items})
    ids = random_users(10_000)
    assert_rows_equal(store.read("user", ids), users, ids, "user")
    items_asked = ids[:500] * 3
    assert_rows_equal(store.read("item", items_asked), items, items_asked, "item")


def test_unknown_ids_have_defaults_or_are_an_error(store):
    frame = pd.DataFrame(
        {"user": [1], "age": [30], "name": ["x"], "vector": [[1.0, 2.0]], "tags": [["a"]]}
    )
    store.replace({"user": frame}, defaults={"user": {"age": 18, "vector": [0.5, 0.5]}})
    row = store.read("user", [2])
    assert row["age"].tolist() == [18]
    assert row["vector"].tolist() == [[0.5, 0.5]]
    assert row["user"].tolist() == [2]
    assert row["name"].to_pylist() == [""]
    assert not row.found[0]
    with refused("data-value", "1", "2"):
        store.read("user", [1, 2, 2], missing="error")


def test_updates_change_and_add_rows(store):
    items = items_frame()
    store.replace({"item": items})
    changed = items.head(7).assign(price=np.float32(2), item=[*items["item"][:5], 10_000, 10_001])
    store.update({"item": changed})
    wanted = pd.concat([items[~items["item"].isin(changed["item"])], changed])
    ids = [10_001, 10_000, *items["item"][:10], 10_002]
    assert_rows_equal(store.read("item", ids), wanted, ids, "item")
    assert store.size("item") == len(items) + 2


def test_rows_are_deleted(store):
    users = users_frame()
    store.replace({"user": users})
    store.update({"user": users.head(3)})
    gone = users["user"][[0, 1, 100]].tolist()
    store.delete("user", [*gone, 2])
    ids = users["user"].tolist()
    assert_rows_equal(store.read("user", ids), users[~users["user"].isin(gone)], ids, "user")
    store.update({"user": users.head(1)})
    assert store.size("user") == len(users) - 2
    with refused("name-unknown", "'item'"):
        store.delete("item", [1])


def test_versions_are_swapped_and_rolled_back(store):
    def ages():
        return store.read("user", [1, 2])["age"].tolist()

    for age in (10, 20, 30):
        store.replace({"user": pd.DataFrame({"user": [1], "age": [age]})})
    assert (store.version, store.versions(), ages()) == (3, [2, 3], [30, 0])
    assert store.rollback() == 2
    assert ages() == [20, 0]
    store.activate(3)
    assert ages() == [30, 0]
    with refused("argument-value", "1"):
        store.activate(1)
    store.rollback()
    with refused("state", "2"):
        store.rollback()


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ({"user": [1, 1], "age": [1, 2]}, ("data-order", "1")),
        ({"user": [1.5], "age": [1]}, ("data-dtype",)),
        ({"user": pa.array([1, None]), "age": [1, 2]}, ("data-null",)),
        ({"id": [1], "age": [1]}, ("column-missing", "'user'")),
        ({"user": [1], "when": [pd.Timestamp("2024-05-01")]}, ("data-dtype",)),
    ],
)
def test_rows_that_cannot_be_kept_are_refused_and_nothing_changes(store, frame, message):
    store.replace({"user": pd.DataFrame({"user": [5], "age": [50]})})
    with refused(*message):
        store.replace({"user": pa.table(frame)})
    assert store.version == 1
    assert store.read("user", [5])["age"].tolist() == [50]


def test_updates_that_do_not_fit_are_refused(store):
    store.replace({"user": pd.DataFrame({"user": [5], "age": np.int32([50])})})
    for frame, message in (
        ({"user": [5]}, "lack the columns \\['age'\\]"),
        ({"user": [5], "age": [1 << 40]}, "should be of int32 without nulls"),
        ({"user": [5], "age": ["x"]}, "should be of int32 without nulls"),
        ({"user": [5], "age": pa.array([None], pa.int32())}, "with 1 nulls"),
    ):
        with pytest.raises(UsageError, match=message):
            store.update({"user": pa.table(frame)})
    with refused("name-unknown", "'item'"):
        store.update({"item": pa.table({"item": [1]})})
    assert store.read("user", [5])["age"].tolist() == [50]


def test_ids_are_whole_numbers(store):
    store.replace({"user": pd.DataFrame({"user": [5], "age": [50]})})
    for wrong in ("5", [5.0], [None], [True], [1 << 64]):
        with pytest.raises(UsageError, match=r"whole number|64 bits"):
            store.read("user", wrong)
    assert len(store.read("user", [])) == 0
    with refused("column-missing", "'agge'"):
        store.read("user", [5], ["agge"])


def test_another_reader_sees_an_update_at_once(tmp_path):
    writer, reader = EmbeddedStore(tmp_path / "s"), EmbeddedStore(tmp_path / "s")
    writer.replace({"user": pd.DataFrame({"user": [1], "age": [1]})})
    for age in range(2, 40):  # more than files are kept for
        writer.update({"user": pd.DataFrame({"user": [1, age], "age": [age, age]})})
        assert reader.read("user", [1, age])["age"].tolist() == [age, age]
    assert reader.size("user") == 39
    assert len(list((tmp_path / "s").glob("v*.arrow"))) <= 18


@pytest.mark.slow
def test_tables_of_spark_and_files_are_read(orca_spark, tmp_path):
    from pyspark.ml.linalg import Vectors

    rows = [(1, Vectors.dense([1.0, 2.0]), "a"), (4, Vectors.dense([3.0, 4.0]), None)]
    df = orca_spark.createDataFrame(rows, ["user", "prediction", "city"])
    store = EmbeddedStore(tmp_path / "s")
    df.coalesce(1).write.parquet(str(tmp_path / "files"))
    for source in (df, str(tmp_path / "files")):
        store.replace({"user": source})
        row = store.read("user", [4, 1])
        assert row["prediction"].tolist() == [[3.0, 4.0], [1.0, 2.0]]
        assert row["city"].to_pylist() == [None, "a"]


def test_a_damaged_file_is_refused_while_the_old_version_is_read(tmp_path, caplog):
    store = EmbeddedStore(tmp_path / "s")
    store.replace({"user": pd.DataFrame({"user": [1], "age": [1]})})
    store.read("user", [1])
    manifest = tmp_path / "s" / "store.json"
    content = json.loads(manifest.read_text())
    content["versions"]["1"]["user"]["files"] = ["v1-user-none.arrow"]
    manifest.write_text(json.dumps(content))
    assert store.read("user", [1])["age"].tolist() == [1]
    assert "stays in use" in caplog.text
    with refused("path-missing"):
        EmbeddedStore(tmp_path / "s")
    manifest.write_text("{")
    with refused("file-damaged"):
        EmbeddedStore(tmp_path / "s")


def test_a_folder_with_other_files_is_no_store(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with refused("path-exists"):
        EmbeddedStore(tmp_path).replace({"user": pd.DataFrame({"user": [1], "age": [1]})})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["notes.txt"]


def test_a_full_disk_leaves_the_version_before(tmp_path):
    store = EmbeddedStore(tmp_path / "s")
    store.replace({"user": pd.DataFrame({"user": [1], "age": [1]})})
    code = """
import resource, sys
import pandas as pd
from bigdl.friesian.serving import EmbeddedStore
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    EmbeddedStore(sys.argv[1]).replace({"user": pd.DataFrame({"user": range(9000), "age": 2})})
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")], capture_output=True, text=True
    )
    assert "cannot be written" in done.stdout, done.stderr
    assert EmbeddedStore(tmp_path / "s").read("user", [1])["age"].tolist() == [1]
    assert len(list((tmp_path / "s").glob("v*.arrow"))) == 1


WRITER = """
import sys
import numpy as np, pandas as pd
from bigdl.friesian.serving import open_store

store = open_store(sys.argv[1], **({"prefix": sys.argv[2]} if "://" in sys.argv[1] else {}))
number = store.read("user", [0])["mark"][0]
print("begin", flush=True)
while True:
    number += 1
    frame = pd.DataFrame({"user": range(200), "mark": np.int64(number)})
    store.update({"user": frame, "item": frame.rename(columns={"user": "item"})})
    if number % 7 == 0:
        store.replace({"user": frame, "item": frame.rename(columns={"user": "item"})})
"""


@pytest.mark.slow_cases("folder")
@pytest.mark.fault
@pytest.mark.parametrize(
    "kind", ["folder", pytest.param("redis", marks=[needs_redis, pytest.mark.slow])]
)
def test_a_killed_writer_leaves_all_of_a_batch_or_nothing(kind, tmp_path, request):
    where = str(tmp_path / "s") if kind == "folder" else request.getfixturevalue("redis_url")
    prefix = {} if kind == "folder" else {"prefix": "killed_"}
    store = open_store(where, **prefix)
    frame = pd.DataFrame({"user": range(200), "mark": np.zeros(200, np.int64)})
    store.replace({"user": frame, "item": frame.rename(columns={"user": "item"})})
    mixed, ended, before = [], threading.Event(), 0

    def look():
        while not ended.is_set():
            marks = np.unique(store.read("user", range(200))["mark"])
            if len(marks) > 1:
                mixed.append(marks)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for wait in (0.1, 0.27):
            command = [sys.executable, "-c", WRITER, where, "killed_"]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
                assert writer.stdout.readline() == b"begin\n"
                end = time.monotonic() + 60  # of a machine that is busy
                while store.read("user", [0])["mark"][0] <= before and time.monotonic() < end:
                    time.sleep(0.01)
                time.sleep(wait)
                writer.send_signal(signal.SIGKILL)
            if kind == "redis":  # the lock of the one that died
                import redis

                redis.Redis.from_url(where).delete("killed_lock")
            fresh = open_store(where, **prefix)
            marks = {
                name: np.unique(fresh.read(name, range(200))["mark"]) for name in ("user", "item")
            }
            assert [len(each) for each in marks.values()] == [1, 1]
            assert marks["user"] == marks["item"]
            assert marks["user"][0] >= before
            before = marks["user"][0]
    finally:
        ended.set()
        watcher.join()
    assert mixed == []
    assert before > 0
    store.replace({"user": frame})
    if kind == "folder":
        named = json.dumps(json.loads((tmp_path / "s" / "store.json").read_text()))
        assert all(each.name in named for each in (tmp_path / "s").glob("v*"))


@needs_redis
@pytest.mark.fault
def test_redis_may_go_and_come_back(tmp_path):
    frame = pd.DataFrame({"user": [1], "age": [1]})
    process, port = start_redis(tmp_path, "--save", "3600 1", "--appendonly", "yes")
    store = open_store(f"redis://127.0.0.1:{port}")
    store.replace({"user": frame})
    process.send_signal(signal.SIGTERM)
    process.wait()
    with pytest.raises(Exception, match=r"refused|closed|reset"):
        store.read("user", [1])
    with pytest.raises(UsageError, match="does not answer"):
        open_store(f"redis://127.0.0.1:{port}")
    process, _ = start_redis(tmp_path, "--appendonly", "yes", port=port)
    try:
        assert store.read("user", [1])["age"].tolist() == [1]
    finally:
        process.terminate()
        process.wait()


@needs_redis
def test_keys_are_those_of_bigdl_2(redis_url):
    import redis

    with open_store(redis_url, prefix="2tower_") as store:
        store.replace({"user": pd.DataFrame({"user": [29], "age": [50]})})
    plain = redis.Redis.from_url(redis_url)
    assert plain.get("2tower_user") == b"user,age"
    assert plain.get("2tower_user:29") == np.int64(50).tobytes()


@needs_redis
def test_urls_that_mean_nothing_are_refused():
    for url, message in (
        ("http://host", "begins with redis://"),
        ("redis+sentinel://host:26379", "ends with the name of the master"),
    ):
        with pytest.raises(UsageError, match=message):
            open_store(url)


@needs_redis
@pytest.mark.slow
def test_sentinels_say_where_the_master_is(tmp_path):
    process, port = start_redis(tmp_path)
    at = free_port()
    conf = tmp_path / "sentinel.conf"
    conf.write_text(f"port {at}\nsentinel monitor main 127.0.0.1 {port} 1\n")
    sentinel = subprocess.Popen(
        ["redis-server", str(conf), "--sentinel"], stdout=subprocess.DEVNULL
    )
    try:
        users = users_frame()
        url = f"redis+sentinel://127.0.0.1:{at}/main"
        store = _when_ready(lambda: open_store(url))
        store.replace({"user": users})
        ids = random_users(1000)
        assert_rows_equal(store.read("user", ids), users, ids, "user")
    finally:
        for each in (sentinel, process):
            each.terminate()
            each.wait()


@needs_redis
@pytest.mark.slow
def test_a_cluster_holds_a_store(tmp_path):
    nodes = []
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        nodes.append(start_redis(folder, "--cluster-enabled", "yes"))
    try:
        hosts = [f"127.0.0.1:{port}" for _, port in nodes]
        create = ["redis-cli", "--cluster", "create", *hosts, "--cluster-yes"]
        subprocess.run(create, check=True, capture_output=True)
        users = users_frame()
        store = _when_ready(lambda: open_store(f"redis+cluster://{hosts[0]}", prefix="p_"))
        for _ in range(3):
            store.replace({"user": users})
        store.update({"user": users.head(3)})
        ids = random_users(1000)
        assert_rows_equal(store.read("user", ids), users, ids, "user")
        assert (store.rollback(), store.size("user")) == (2, len(users))
    finally:
        for process, _ in nodes:
            process.terminate()
            process.wait()


def _when_ready(make):
    give_up = time.monotonic() + 30
    while True:
        try:
            return make()
        except UsageError:
            assert time.monotonic() < give_up, "it was not ready within 30 s"
            time.sleep(0.2)


def test_nothing_is_held_open(tmp_path):
    """Test that files of removed versions are closed."""
    store = EmbeddedStore(tmp_path / "s", keep=1)
    for age in range(30):
        store.replace({"user": pd.DataFrame({"user": [1], "age": [age]})})
        store.read("user", [1])
    maps = Path(f"/proc/{os.getpid()}/maps").read_text()
    assert maps.count(str(tmp_path / "s")) <= 2
