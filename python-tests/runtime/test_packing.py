"""Packing of rows in cells and unpacking in shards, for any partitions and workers."""

import itertools

import numpy as np
import pyarrow as pa
import pyspark
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from bigdl.orca.data.feeds import packing
from bigdl.orca.data.feeds.packing import packed_reader, packer
from bigdl.runtime.shards.columns import ColumnSpec
from bigdl.runtime.shards.shard import SpoolWriter

SPECS = [
    ColumnSpec("id", "plain", "int64", 0, "bigint"),
    ColumnSpec("pair", "plain", "float32", 1, "array<float>"),
]

# a source partition is a list of record batches, given by their numbers of rows
partitions = st.lists(st.lists(st.integers(0, 12), max_size=4), min_size=1, max_size=5)
workers = st.integers(1, 6)


class Task:
    def __init__(self, partition):
        self.partition = partition

    def partitionId(self):
        return self.partition


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as context:
        yield context


def batches(sizes, start=0, length=2):
    """Return record batches of consecutive ids from `start` on."""
    for rows in sizes:
        ids = np.arange(start, start + rows)
        start += rows
        pairs = [[float(i)] * length for i in ids]
        yield pa.RecordBatch.from_arrays(
            [pa.array(ids), pa.array(pairs, pa.list_(pa.float32()))], ["c0", "c1"]
        )


def pack(patch, parts, num_workers, part=0, **options):
    """Return the cells of all source partitions, by shard."""
    cells = {target: [] for target in range(num_workers)}
    start = 0
    for source, sizes in enumerate(parts):
        patch.setattr(pyspark.TaskContext, "get", lambda source=source: Task(source))
        packed = packer(part, None, SPECS, num_workers)(batches(sizes, start, **options))
        for batch in packed:
            for i, target in enumerate(batch.column("target").to_pylist()):
                cells[target].append(batch.slice(i, 1))
        start += sum(sizes)
    return cells


def unpack(directory, cells, names=("data",)):
    """Return the shards that a worker makes of its cells."""

    def open_spool(name, specs):
        return SpoolWriter(str(directory), 0, name, specs)

    return packed_reader(names, [SPECS] * len(names))(iter(cells), open_spool)


def expected(parts, num_workers):
    """Return the ids of each shard: row i of partition p belongs to shard (i + p) mod N."""
    shards = [[] for _ in range(num_workers)]
    ids = itertools.count()
    for source, sizes in enumerate(parts):
        for i in range(sum(sizes)):
            shards[(i + source) % num_workers].append(next(ids))
    return shards


@settings(max_examples=60)
@given(parts=partitions, num_workers=workers, piece=st.sampled_from([1, 16, 48, 1 << 20]))
def test_every_row_is_in_one_shard_once_and_in_order(
    tmp_path_factory, patch, parts, num_workers, piece
):
    patch.setattr(packing, "PIECE", piece)
    cells = pack(patch, parts, num_workers)
    directory = tmp_path_factory.mktemp("spools")
    shards = [unpack(directory, cells[target])["data"] for target in range(num_workers)]
    assert [s.column("id").tolist() for s in shards] == expected(parts, num_workers)
    for shard in filter(len, shards):
        np.testing.assert_array_equal(shard.column("pair")[:, :1], shard.column("id")[:, None])


@settings(max_examples=40)
@given(parts=partitions, num_workers=workers, data=st.data())
def test_the_order_of_arrival_does_not_matter(tmp_path_factory, patch, parts, num_workers, data):
    cells = pack(patch, parts, num_workers)[0]
    directory = tmp_path_factory.mktemp("spools")
    straight = unpack(directory, cells)["data"]
    shuffled = unpack(directory, data.draw(st.permutations(cells)))["data"]
    assert shuffled.column("id").tolist() == straight.column("id").tolist()
    assert shuffled.fingerprint == straight.fingerprint


@given(sizes=st.lists(st.integers(0, 50), max_size=20), num_workers=st.integers(1, 12))
def test_shards_differ_by_a_row_per_source_partition_at_most(sizes, num_workers):
    shards = [len(s) for s in expected([[n] for n in sizes], num_workers)]
    assert max(shards) - min(shards) <= sum(n % num_workers > 0 for n in sizes)


@given(size=st.integers(0, 50), count=st.integers(0, 20), num_workers=st.integers(1, 12))
def test_with_equal_source_partitions_shards_differ_by_half_of_n_rows_at_most(
    size, count, num_workers
):
    shards = [len(s) for s in expected([[size]] * count, num_workers)]
    assert max(shards) - min(shards) <= max(1, num_workers // 2)


@settings(max_examples=30)
@given(parts=partitions, num_workers=workers, piece=st.sampled_from([16, 48, 200]))
def test_a_cell_is_no_larger_than_a_piece_or_a_row(patch, parts, num_workers, piece):
    patch.setattr(packing, "PIECE", piece)
    cells = itertools.chain(*pack(patch, parts, num_workers).values())
    assert all(len(cell.column("data")[0].as_py()) <= max(piece, 16) for cell in cells)


def test_frames_that_travel_together_do_not_mix(tmp_path, patch):
    first = pack(patch, [[5], [3]], 1, part=0)[0]
    second = pack(patch, [[2], [6]], 1, part=1, length=4)[0]
    mixed = [cell for pair in itertools.zip_longest(second, first) for cell in pair if cell]
    shards = unpack(tmp_path, mixed, ("data", "validation"))
    assert list(shards) == ["data", "validation"]
    assert [len(shards["data"]), len(shards["validation"])] == [8, 8]
    assert shards["data"].column("pair").shape == (8, 2)
    assert shards["validation"].column("pair").shape == (8, 4)


def test_a_shard_without_rows_knows_the_lengths_of_the_arrays(tmp_path, patch):
    cells = pack(patch, [[1]], 3)
    shapes = [unpack(tmp_path, cells[t])["data"].column("pair").shape for t in range(3)]
    assert shapes == [(1, 2), (0, 2), (0, 2)]


def test_arrays_of_other_lengths_in_another_shard_are_refused_by_all(tmp_path, patch):
    short = pack(patch, [[1]], 2, length=2)
    long = pack(patch, [[], [1]], 2, length=3)
    for target in range(2):
        with refused("data-schema", "2", "3"):
            unpack(tmp_path, short[target] + long[target])


def test_bad_rows_are_told_to_every_shard_under_the_name_of_their_frame(tmp_path, patch):
    patch.setattr(pyspark.TaskContext, "get", lambda: Task(0))
    (good,) = batches([4])
    ids = pa.array([1, None], pa.int64())
    bad = pa.RecordBatch.from_arrays([ids, good.column(1).slice(0, 2)], ["c0", "c1"])
    cells = list(packer(0, "validation_data", SPECS, 3)(iter([good, bad, good])))
    for target in range(3):
        local = [
            batch.slice(i, 1)
            for batch in cells
            for i, t in enumerate(batch.column("target").to_pylist())
            if t == target
        ]
        with refused("data-null", "validation_data", "'id'"):
            unpack(tmp_path, local)
