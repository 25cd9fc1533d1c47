"""Spools: order of the columns' rows, lifetime and cost."""

import errno
import json
import os
import stat

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.runtime.shards.columns import ArraySpec, ColumnSpec
from bigdl.runtime.shards.shard import (
    Shard,
    Spool,
    SpoolWriter,
    remove_spool,
    remove_stale_spools,
)
from bigdl.runtime.task import reopen

SPECS = [
    ColumnSpec("x", "plain", "float32", 1, "array<float>"),
    ColumnSpec("flag", "plain", "bool", 0, "boolean"),
    ColumnSpec("m", "map", "int64", 0, "map<string,bigint>"),
]


def leaves(width=3, keys=("a",)):
    return [
        ArraySpec("x", None, "float32", (width,)),
        ArraySpec("flag", None, "bool", ()),
        *[ArraySpec("m", key, "int64", ()) for key in keys],
    ]


def chunk(source, sequence, rows, width=3):
    """Return values that identify their chunk and row."""
    number = 1000 * source + 100 * sequence + np.arange(rows)
    x = np.repeat(number[:, None], width, axis=1).astype(np.float32)
    return [x, number % 2 == 0, -number]


def write(directory, chunks, job=0):
    """Write chunks (source, sequence, rows) in this order of arrival and return the shard."""
    writer = SpoolWriter(str(directory), job, "data-0", SPECS)
    for source, sequence, rows in chunks:
        writer.append(source, sequence, rows, leaves(), chunk(source, sequence, rows))
    return Shard(writer.finish())


@pytest.fixture
def one_array(tmp_path):
    """Return a function that writes chunks of one array and returns the shard."""

    def make(*chunks):
        writer = SpoolWriter(str(tmp_path), 0, "data-0", [])
        for number, values in enumerate(chunks):
            leaf = ArraySpec("x", None, values.dtype.name, values.shape[1:])
            writer.append(0, number, len(values), [leaf], [values])
        return Shard(writer.finish())

    return make


places = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 5)), unique=True, min_size=1, max_size=8
)


# Order ------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(data=st.data())
def test_rows_are_in_the_order_of_their_places_whatever_the_order_of_arrival(
    tmp_path_factory, data
):
    chunks = [(*index, data.draw(st.integers(0, 4))) for index in data.draw(places)]
    arrived = data.draw(st.permutations(chunks))
    directory = tmp_path_factory.mktemp("spool")
    shard, reference = write(directory, arrived), write(directory, sorted(chunks))
    expected = [chunk(*c) for c in sorted(chunks)]
    assert shard.rows == len(shard) == sum(c[2] for c in chunks)
    np.testing.assert_array_equal(shard.column("x"), np.concatenate([c[0] for c in expected]))
    np.testing.assert_array_equal(shard.column("flag"), np.concatenate([c[1] for c in expected]))
    np.testing.assert_array_equal(shard.column("m")["a"], np.concatenate([c[2] for c in expected]))
    assert shard.fingerprint == reference.fingerprint


def test_the_fingerprint_tells_rows_that_changed_places(one_array):
    even, odd = np.arange(0, 100, 2), np.arange(1, 100, 2)
    assert one_array(even, odd).fingerprint != one_array(odd, even).fingerprint
    assert one_array(even, odd).fingerprint == one_array(even, odd).fingerprint


def test_the_fingerprint_tells_other_values(one_array):
    values = np.arange(100)
    assert one_array(values).fingerprint != one_array(values + 1).fingerprint


def test_a_spool_is_for_its_owner_only(tmp_path):
    before = os.umask(0)
    try:
        writer = SpoolWriter(str(tmp_path), 1, "data", [ColumnSpec("x", "plain", "float32", 1, "")])
        rows = np.ones((2, 3), np.float32)
        for sequence in (1, 0):
            writer.append(0, sequence, 2, [ArraySpec("x", None, "float32", (3,))], [rows])
        spool = writer.finish()
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(spool.path).st_mode) == 0o700
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in os.scandir(spool.path)} == {0o600}


def test_a_description_survives_json(tmp_path):
    spool = write(tmp_path, [(0, 0, 3)]).spool
    assert Spool.from_json(json.loads(json.dumps(spool.to_json()))) == spool


def test_columns_that_share_an_array_are_found_by_name(tmp_path):
    specs = [ColumnSpec(name, "plain", "int32", 0, "int") for name in "abc"]
    writer = SpoolWriter(str(tmp_path), 0, "data-0", specs)
    values = np.arange(12, dtype=np.int32).reshape(4, 3)
    writer.append(0, 0, 4, [ArraySpec(("a", "b", "c"), None, "int32", (3,))], [values])
    shard = Shard(Spool.from_json(json.loads(json.dumps(writer.finish().to_json()))))
    assert shard.names == ["a", "b", "c"]
    np.testing.assert_array_equal(shard.column("b"), values[:, 1])
    with refused("column-missing", "'d'", "'a'", "'b'"):
        shard.column("d")


# Chunks that do not fit together ----------------------------------------------------------------


def test_chunks_of_different_lengths_are_refused_with_both(tmp_path):
    writer = SpoolWriter(str(tmp_path), 0, "data-0", SPECS)
    writer.append(0, 0, 2, leaves(3), chunk(0, 0, 2, 3))
    with refused("data-schema", "'x'", "3", "4"):
        writer.append(0, 1, 2, leaves(4), chunk(0, 1, 2, 4))


def test_chunks_with_different_map_keys_are_refused(tmp_path):
    writer = SpoolWriter(str(tmp_path), 0, "data-0", SPECS)
    writer.append(0, 0, 2, leaves(), chunk(0, 0, 2))
    for keys in (("b",), ("a", "b"), ()):
        with refused("data-schema", "'m'"):
            writer.append(0, 1, 2, leaves(keys=keys), chunk(0, 1, 2))


def test_a_chunk_without_rows_only_says_what_the_others_look_like(tmp_path):
    writer = SpoolWriter(str(tmp_path), 0, "data-0", SPECS)
    writer.append(3, 0, 0, leaves(7, ("k",)), [b"", b"", b""])
    with refused("data-schema", "7", "3"):
        writer.append(0, 0, 2, leaves(3, ("k",)), chunk(0, 0, 2))
    shard = Shard(writer.finish())
    assert shard.column("x").shape == (0, 7)
    assert {key: a.shape for key, a in shard.column("m").items()} == {"k": (0,)}


def test_a_shard_without_any_chunk_has_empty_columns_of_the_right_dtype(tmp_path):
    shard = Shard(SpoolWriter(str(tmp_path), 0, "data-0", SPECS).finish())
    assert shard.rows == shard.fingerprint == 0
    assert shard.names == ["x", "flag", "m"]
    assert (shard.column("x").shape, shard.column("x").dtype) == ((0, 0), np.float32)
    assert (shard.column("flag").shape, shard.column("flag").dtype) == ((0,), np.bool_)
    assert shard.column("m") == {}


# Life -------------------------------------------------------------------------------------------


def test_a_spool_is_here_only_under_its_own_nonce_and_when_complete(tmp_path):
    writer = SpoolWriter(str(tmp_path), 0, "data-0", SPECS)
    writer.append(0, 0, 1, leaves(), chunk(0, 0, 1))
    unfinished = Spool(writer.path, "whatever", 1)
    assert not unfinished.is_here()
    spool = writer.finish()
    assert spool.is_here()
    assert not Spool(spool.path, "another", spool.rows).is_here()
    for content in ("", "[1]", "{}", "null"):
        (tmp_path / os.path.basename(spool.path) / "spool.json").write_text(content)
        assert not spool.is_here()
    remove_spool(spool.path)
    assert not spool.is_here()


def test_a_spool_that_is_being_removed_is_not_opened(tmp_path):
    shard = write(tmp_path, [(0, 0, 3)])
    document = {"data": shard.spool.to_json()}
    opened = reopen(document)["data"]
    os.remove(os.path.join(shard.spool.path, "0.bin"))
    assert shard.spool.is_here()  # what describes it goes last
    assert reopen(document) is None
    remove_spool(shard.spool.path)
    assert reopen(document) is None
    np.testing.assert_equal(opened.column("x"), chunk(0, 0, 3)[0])
    np.testing.assert_equal(opened.column("flag"), [True, False, True])
    np.testing.assert_equal(opened.column("m"), {"a": [0, -1, -2]})


def test_discard_and_remove_leave_nothing(tmp_path):
    remove_spool(write(tmp_path, [(0, 0, 3)]).spool.path)
    writer = SpoolWriter(str(tmp_path), 0, "data-0", SPECS)
    writer.append(0, 0, 2, leaves(), chunk(0, 0, 2))
    writer.discard()
    assert os.listdir(tmp_path) == []


def test_a_spool_stays_readable_after_it_was_removed(tmp_path):
    shard = write(tmp_path, [(0, 1, 3), (0, 0, 2)])
    remove_spool(shard.spool.path)
    np.testing.assert_array_equal(shard.column("m")["a"], [0, -1, -100, -101, -102])


def test_stale_spools_go_and_everything_else_stays(tmp_path):
    stale = [write(tmp_path, [(0, 0, 1)], job=job).spool.path for job in (0, 3, 10)]
    kept = [write(tmp_path, [(0, 0, 1)], job=job).spool.path for job in (5, 11, 12)]
    for name in ("bigdl-spool-x-data-0-ab", "bigdl-spool-3", "xbigdl-spool-3-data-0-ab", "blocks"):
        (tmp_path / name).mkdir()
        kept.append(str(tmp_path / name))
    (tmp_path / "temp_shuffle_3").write_text("")
    kept.append(str(tmp_path / "temp_shuffle_3"))
    remove_stale_spools(str(tmp_path), 11, {5})
    assert [path for path in stale if os.path.exists(path)] == []
    assert [path for path in kept if not os.path.exists(path)] == []


def test_removing_does_not_follow_a_foreign_name_or_a_missing_directory(tmp_path):
    (tmp_path / "data").mkdir()
    remove_spool(str(tmp_path / "data"))
    assert (tmp_path / "data").exists()
    remove_stale_spools(str(tmp_path / "nothing"), 1, set())


def test_only_the_owner_may_read_a_spool(tmp_path):
    assert os.stat(write(tmp_path, [(0, 0, 1)]).spool.path).st_mode & 0o077 == 0


# Resources --------------------------------------------------------------------------------------


def test_a_full_disk_is_reported_as_such(tmp_path):
    writer = SpoolWriter(str(tmp_path), 0, "data-0", SPECS)
    os.symlink("/dev/full", os.path.join(writer.path, "1.bin"))
    with refused("path-unusable", "0", "spark.local") as caught:
        writer.append(0, 0, 2, leaves(), chunk(0, 0, 2))
    assert caught.value.__cause__.errno == errno.ENOSPC
    writer.discard()


def test_a_spool_of_more_arrays_than_open_files_are_allowed_raises_the_limit(tmp_path):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    names = [f"c{i}" for i in range(400)]
    many = [ArraySpec(name, None, "int64", ()) for name in names]
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        writer = SpoolWriter(str(tmp_path), 0, "data-0", [])
        writer.append(0, 0, 2, many, [np.arange(2) + i for i in range(400)])
        arrays = writer.finish().arrays()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [int(a[1]) for a in arrays] == list(range(1, 401))


def test_more_arrays_than_the_machine_allows_files_are_refused(tmp_path, monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (300, 300))
    writer = SpoolWriter(str(tmp_path), 0, "data-0", [])
    with pytest.raises(UsageError, match=r"the 400 arrays .*ulimit -n .*VectorAssembler"):
        writer.append(0, 0, 0, [ArraySpec("x", str(i), "int64", ()) for i in range(400)], [])
    writer.discard()


@pytest.mark.linux("private mappings without reserved memory")
def test_a_shard_larger_than_the_memory_can_be_mapped(tmp_path):
    rows = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8
    with open(tmp_path / "0.bin", "wb") as file:
        file.truncate(rows * 8)  # a sparse file
    (array,) = Spool(str(tmp_path), "", rows, [ArraySpec("x", None, "int64", ())]).arrays()
    assert (len(array), array[-1]) == (rows, 0)


def test_reading_a_shard_takes_no_memory_of_the_process(one_array):
    shard = one_array(np.ones((100, 1 << 17), np.float32))  # 50 MB
    before = psutil.Process().memory_info()
    assert shard.column("x").sum(dtype=np.float64) == 100 << 17
    after = psutil.Process().memory_info()
    mapped = after.shared - before.shared
    assert mapped > 40 << 20
    assert after.rss - before.rss - mapped < 10 << 20


def test_writing_to_a_column_changes_neither_the_file_nor_another_map(one_array):
    shard = one_array(np.zeros(1000))
    shard.column("x")[:] = 1
    assert Shard(shard.spool).column("x").sum() == 0
