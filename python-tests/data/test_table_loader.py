"""Test that a TableLoader reads each row once per epoch, in an order independent of ranks."""

import json
import os
import pickle
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from bigdl.data import TableLoader

ROWS = 5003  # 64 virtual shards, some with an additional row


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create Parquet files in several row groups, with numbered rows."""
    path = tmp_path_factory.mktemp("clicks")
    for part, numbers in enumerate(np.array_split(np.arange(ROWS), 3)):
        table = pa.table({"id": numbers, "x": numbers.astype("f4") / 2})
        pq.write_table(table, path / f"part-{part}.parquet", row_group_size=700)
    return str(path)


def numbers_of(batches):
    return [number for batch in batches for number in batch["id"].tolist()]


def ranks(source, world_size, **options):
    return [
        TableLoader(source, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


ORDERS = [{"shuffle": True}, {"shuffle": "global"}, {"shuffle": False}, {"window": 900}]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_an_epoch_has_each_row_once(folder, order):
    loader = TableLoader(folder, batch_size=64, **order)
    first, second = numbers_of(loader), numbers_of(loader)
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert (first == second) == (order.get("shuffle") is False)
    assert len(loader) == -(-ROWS // 64)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_one_rank_of_64_and_four_of_16_see_the_same_rows_at_each_step(folder, order):
    one = TableLoader(folder, batch_size=64, **order)
    four = ranks(folder, 4, batch_size=16, **order)
    steps = 0
    for whole, *parts in zip(one, *four, strict=True):
        assert numbers_of([whole]) == numbers_of(parts)
        assert one.global_rows == four[0].global_rows == len(whole["id"])
        steps += 1
    assert steps == len(one) == len(four[0])


tables = pa.table({"id": np.arange(ROWS)})


@given(
    rows=st.integers(1, ROWS),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 3),
    stops=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 700), st.integers(0, 4)), max_size=6
    ),
)
def test_any_ranks_batch_sizes_and_stops_read_one_global_order(rows, order, seed, stops):
    """Read parts of two epochs with other ranks and batch sizes, resumed from a state."""
    table = tables.slice(0, rows)
    whole = TableLoader(table, batch_size=rows, seed=seed, threads=0, **order)
    expected = numbers_of(whole) + numbers_of(whole)
    seen, state = [], None
    for world_size, batch_size, steps in [*stops, (1, 1000, None)]:
        loaders = ranks(table, world_size, batch_size=batch_size, seed=seed, threads=0, **order)
        if state is not None:
            for each in loaders:
                each.load_state_dict(json.loads(json.dumps(state)))
        while loaders[0].epoch < 2 and steps != 0:
            for _, parts in zip(
                range(len(loaders[0]) if steps is None else steps),
                zip(*loaders, strict=True),
                strict=False,
            ):
                seen += numbers_of(parts)
            if steps is not None:
                break
        states = [each.state_dict() for each in loaders]
        assert all(each == states[0] for each in states)
        state = states[0]
        if state["epoch"] >= 2:
            break
    assert seen == expected


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("last", ["keep", "pad"])
def test_a_rank_without_rows_reads_an_empty_or_a_padded_batch(order, last):
    table = tables.slice(0, 1)
    sizes = [
        [len(each["id"]) for each in loader]
        for loader in ranks(table, 3, batch_size=2, last=last, **order)
    ]
    expected = [[0], [0], [1]] if last == "keep" else [[2], [2], [2]]
    assert sorted(sizes) == expected


def test_the_state_counts_what_the_loop_received_and_is_small(folder):
    loader = TableLoader(folder, batch_size=10, threads=2)
    batches = iter(loader)
    assert loader.state_dict()["next"] == 0
    next(batches), next(batches)
    state = loader.state_dict()
    assert (state["epoch"], state["next"], state["step"]) == (0, 20, 2)
    assert len(json.dumps(state)) < 1000
    for _ in batches:
        pass
    assert (loader.state_dict()["epoch"], loader.state_dict()["next"]) == (1, 0)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ({"shuffle": True}, [2733, 558, 3009, 3239, 2523, 1857]),
        ({"shuffle": "global"}, [2160, 3874, 316, 1247, 3668, 4023]),
        ({"window": 900}, [3730, 4282, 4916, 1271, 1994, 2628]),
    ],
    ids=str,
)
def test_a_saved_position_names_the_same_row_in_every_version(order, expected):
    loader = TableLoader(tables.slice(0, 4999), batch_size=6, seed=7, **order)
    assert numbers_of([next(iter(loader))]) == expected


def test_every_order_of_a_small_table_is_as_likely_as_another():
    table = pa.table({"id": np.arange(50)})
    loader = TableLoader(table, batch_size=50, threads=0)
    first = np.array([numbers_of(loader) for _ in range(2000)])
    for position in (0, 17, 49):
        counts = np.bincount(first[:, position], minlength=50)
        assert ((counts - 40) ** 2 / 40).sum() < 95  # with 49 degrees of freedom: once in 10,000


def test_a_loop_that_is_left_begins_the_next_epoch(folder):
    loader = TableLoader(folder, batch_size=100)
    for _ in loader:
        break
    assert loader.state_dict()["next"] == 100
    again = TableLoader(folder, batch_size=100)
    again.set_epoch(1)
    assert numbers_of(loader) == numbers_of(again)


def test_set_epoch_keeps_the_rest_of_the_saved_epoch_only(folder):
    loader = TableLoader(folder, batch_size=1000)
    whole = numbers_of(loader)
    loader.set_epoch(0)
    next(iter(loader))
    state = loader.state_dict()
    resumed = TableLoader(folder, batch_size=1000)
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    assert numbers_of(resumed) == whole[1000:]
    resumed.load_state_dict(state)
    resumed.set_epoch(2)
    assert len(numbers_of(resumed)) == ROWS


@pytest.mark.parametrize("last", ["keep", "drop", "pad"])
def test_the_last_step(last):
    """Read ten rows with two ranks of four: the second step has two rows."""
    table = pa.table({"id": np.arange(9)})
    loaders = ranks(table, 2, batch_size=4, last=last, shuffle=False)
    steps = list(zip(*loaders, strict=True))
    assert len(steps) == len(loaders[0])
    if last == "drop":
        assert len(steps) == 1
        return
    left, right = steps[1]
    if last == "keep":
        assert left["id"].shape == (0,)
        assert right["id"].tolist() == [8]
        assert loaders[0].global_rows == 1
    else:
        assert left["id"].shape == right["id"].shape == (4,)
        weights = [batch["row_weight"].tolist() for pair in steps for batch in pair]
        assert weights == [[1] * 4, [1] * 4, [0] * 4, [1, 0, 0, 0]]
        assert right["id"][0] == 8


def test_columns_of_all_types(tmp_path):
    rows = 300
    numbers = np.arange(rows)
    table = pa.table(
        {
            "id": numbers,
            "flag": numbers % 2 == 0,
            "half": numbers.astype("f2"),
            "unsigned": numbers.astype("u2"),
            "name": [f"row {n} ü" for n in numbers],
            "jpeg": [bytes([n % 256]) * (n % 7) for n in numbers],
            "ragged": [list(range(n % 4)) for n in numbers],
            "equal": [[float(n), n + 0.5] for n in numbers],
            "image": [[[n, n + 1], [n + 2, n + 3]] for n in numbers],
            "fixed": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(rows * 3)), 3),
            "user": [{"age": int(n), "home": {"zip": int(n) + 1}} for n in numbers],
            "kind": pa.array([f"k{n % 3}" for n in numbers]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "all.parquet", row_group_size=64)
    for source in (str(tmp_path), table):
        for options in ({}, {"window": 128}):
            for batch in TableLoader(source, batch_size=50, **options):
                ids = batch["id"]
                assert (batch["flag"] == (ids % 2 == 0)).all()
                assert batch["half"].dtype == torch.float16
                assert batch["unsigned"].dtype == torch.int32
                assert batch["name"] == [f"row {n} ü" for n in ids.tolist()]
                assert batch["jpeg"] == [bytes([n % 256]) * (n % 7) for n in ids.tolist()]
                ragged = [each.tolist() for each in batch["ragged"].unbind()]
                assert ragged == [list(range(n % 4)) for n in ids.tolist()]
                assert batch["equal"].tolist() == [[n, n + 0.5] for n in ids.tolist()]
                assert batch["image"].shape == (len(ids), 2, 2)
                assert (batch["image"][:, 1, 0] == ids + 2).all()
                assert (batch["fixed"] == ids[:, None] * 3 + torch.arange(3)).all()
                assert (batch["user.age"] == ids).all()
                assert (batch["user.home.zip"] == ids + 1).all()
                assert batch["kind"] == [f"k{n % 3}" for n in ids.tolist()]
    some = TableLoader(str(tmp_path), columns=["user.home", "id"], batch_size=rows)
    assert list(next(iter(some))) == ["user.home.zip", "id"]


def test_arrays_without_torch(folder):
    loader = TableLoader({"id": np.arange(4), "a": np.eye(4)}, format="numpy", shuffle=False)
    (batch,) = loader
    assert isinstance(batch["a"], np.ndarray)
    assert np.array_equal(batch["a"], np.eye(4))
    ragged = TableLoader(pa.table({"l": [[1], [2, 3]]}), format="numpy", shuffle=False)
    assert [each.tolist() for each in next(iter(ragged))["l"]] == [[1], [2, 3]]


def test_a_transform_makes_the_batches_in_threads(folder):
    import threading

    def pair(batch):
        return batch["x"], batch["id"] + 1, threading.current_thread().name

    loader = TableLoader(folder, batch_size=500, transform=pair)
    x, y, thread = next(iter(loader))
    assert ((x * 2 + 1) == y).all()
    assert thread.startswith("bigdl-loader")


def test_an_error_in_a_transform_reaches_the_loop(folder):
    loader = TableLoader(folder, transform=lambda batch: batch["missing"])
    with pytest.raises(KeyError, match="missing"):
        next(iter(loader))


def test_batches_are_the_callers(folder):
    """Check that a changed batch affects neither others nor the next epoch."""
    loader = TableLoader(folder, batch_size=100, shuffle=False)
    for batch in loader:
        batch["id"].zero_()
    assert numbers_of(loader) == list(range(ROWS))


def test_another_version_of_the_files_is_refused(tmp_path):
    def write(rows):
        pq.write_table(pa.table({"id": np.arange(rows)}), tmp_path / "a.parquet")

    write(100)
    state = TableLoader(str(tmp_path), batch_size=10).state_dict()
    write(101)
    with refused("checkpoint-mismatch", "100 rows", "101 rows", state["fingerprint"][:12]):
        TableLoader(str(tmp_path)).load_state_dict(state)


@pytest.mark.parametrize("column", ["id", "text"])
def test_a_copy_of_the_files_is_accepted_and_a_changed_value_is_not(tmp_path, column):
    def write(folder, **changed):
        (tmp_path / folder).mkdir()
        columns = {"id": np.arange(100), "text": [f"{i:03d}" for i in range(100)]} | changed
        options = {"use_dictionary": False, "compression": "none", "write_statistics": False}
        pq.write_table(pa.table(columns), tmp_path / folder / "a.parquet", **options)
        return str(tmp_path / folder)

    loader = TableLoader(write("a"), batch_size=30, seed=1)
    batches = iter(loader)
    next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    copy = TableLoader(write("b"), batch_size=30, seed=1)
    copy.load_state_dict(state)
    assert [batch["id"].tolist() for batch in copy] == [batch["id"].tolist() for batch in batches]
    values = {"id": np.arange(100), "text": [f"{i:03d}" for i in range(100)]}[column]
    values[50] = values[51]
    changed = TableLoader(write("c", **{column: values}), batch_size=30, seed=1)
    assert changed.state_dict()["fingerprint"] == state["fingerprint"]  # equal footers
    with refused("checkpoint-mismatch", "other values"):
        changed.load_state_dict(state)


def test_another_table_in_memory_is_refused():
    state = TableLoader(pa.table({"id": [1, 2, 3]})).state_dict()
    TableLoader(pa.table({"id": [0, 1, 2, 3]}).slice(1)).load_state_dict(state)
    with refused("checkpoint-mismatch"):
        TableLoader(pa.table({"id": [1, 2, 4]})).load_state_dict(state)


def test_another_order_or_seed_is_refused(folder):
    state = TableLoader(folder).state_dict()
    with refused("checkpoint-mismatch", "seed=0", "seed=1"):
        TableLoader(folder, seed=1).load_state_dict(state)
    with refused("checkpoint-mismatch", "shuffle="):
        TableLoader(folder, shuffle="global").load_state_dict(state)
    with refused("checkpoint-mismatch", "format"):
        TableLoader(folder).load_state_dict({"epoch": 3})
    windowed = TableLoader(folder, window=900, batch_size=100)
    next(iter(windowed))
    TableLoader(folder).load_state_dict(windowed.state_dict())  # its window is taken
    with refused("checkpoint-mismatch", "window="):
        TableLoader(folder, window=901).load_state_dict(windowed.state_dict())


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        ({"batch_size": 0}, "argument-value", "batch_size"),
        ({"shuffle": "all"}, "argument-value", "global"),
        ({"last": "repeat"}, "argument-value", "keep"),
        ({"rank": 1}, "argument-conflict", "world_size"),
        ({"rank": 2, "world_size": 2}, "argument-value", "rank"),
        ({"columns": ["age"]}, "column-missing", "age"),
        ({"window": 5, "shuffle": "global"}, "argument-conflict", "window"),
        ({"transform": 3}, "argument-type", "transform"),
        ({"format": "numpy", "device": "cpu"}, "argument-conflict", "device"),
    ],
    ids=str,
)
def test_wrong_arguments(folder, options, code, word):
    with refused(code, word):
        TableLoader(folder, **options)


def test_what_cannot_be_loaded_is_named():
    with refused("data-null", "'a'"):
        next(iter(TableLoader(pa.table({"a": [1, None]}))))
    with refused("data-dtype", "'a'", "timestamp"):
        TableLoader(pa.table({"a": pa.array([1], pa.timestamp("s"))}))
    with refused("data-type", "int"):
        TableLoader(3)
    with refused("data-empty"):
        TableLoader(pa.table({"a": pa.array([], pa.int64())}))
    with refused("path-missing"):
        TableLoader("no/such/folder")
    with refused("data-size", "drop"):
        iter(TableLoader(pa.table({"a": [1]}), last="drop"))
    with refused("column-duplicate", "row_weight"):
        TableLoader(pa.table({"row_weight": [1]}), last="pad")


def test_a_worker_of_a_data_loader_is_refused():
    loader = torch.utils.data.DataLoader(
        Rows(TableLoader(pa.table({"a": [1]}))), batch_size=None, num_workers=1
    )
    with pytest.raises(Exception, match="DataLoader"):
        list(loader)


class Rows(torch.utils.data.IterableDataset):
    """Dataset that reads from a loader in the worker process."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


def test_a_loader_travels_to_another_process(folder):
    loader = TableLoader(folder, batch_size=100)
    next(iter(loader))
    copy = pickle.loads(pickle.dumps(loader))
    assert copy.state_dict() == loader.state_dict()
    copy.load_state_dict(loader.state_dict())
    whole = numbers_of(TableLoader(folder, batch_size=100))
    assert numbers_of(copy) == whole[100:]


def test_loops_that_were_left_keep_no_file_and_no_thread(tmp_path):
    def kept():
        threads = [each for each in threading.enumerate() if each.name.startswith("bigdl-loader")]
        return len(os.listdir("/proc/self/fd")), len(threads)

    pq.write_table(pa.table({"x": range(100)}), tmp_path / "x.parquet")
    for source in (pa.table({"x": range(100)}), str(tmp_path / "x.parquet")):
        next(iter(TableLoader(source, batch_size=10)))  # created once
        before = kept()
        for _ in range(3):
            for _batch in TableLoader(source, batch_size=10):
                break
        deadline = time.monotonic() + 10
        while kept() > before and time.monotonic() < deadline:
            time.sleep(0.01)  # threads end after their last task
        assert kept() <= before
