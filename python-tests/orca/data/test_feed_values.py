"""Test arrays, frames and Parquet files as columns of shards, without Spark."""

import itertools

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds import as_feed
from bigdl.runtime.shards.batches import WindowedOrder
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.shard import SpoolWriter, describe_difference
from bigdl.runtime.shards.values import columns_of, grouped, structured_columns

X = np.arange(12.0).reshape(6, 2)
Y = np.arange(6)


def shapes(data, features=None, labels=None, **options):
    columns = columns_of(data, features, labels, "float32", **options)
    return [(name, key, values.dtype.name, values.shape) for name, key, values in columns]


# Values in memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [(X, Y), [X, Y], {"x": X, "y": Y}, {"x": [X], "y": (Y,)}])
def test_forms_of_one_feature_and_one_target(data):
    assert shapes(data) == [
        ("x[0]", None, "float32", (6, 2)),
        ("y[0]", None, "int64", (6,)),
    ]


def test_several_features_keys_and_targets():
    columns = shapes({"x": (X, {"b": Y, "a": Y}), "y": [Y, X]})
    assert [(name, key) for name, key, *_ in columns] == [
        ("x[0]", None),
        ("x[1]", "a"),
        ("x[1]", "b"),
        ("y[0]", None),
        ("y[1]", None),
    ]
    assert [name for name, *_ in shapes((X, X, Y))] == ["x[0]", "x[1]", "y[0]"]
    assert [name for name, *_ in shapes((X, Y), with_labels=False)] == ["x[0]", "x[1]"]


def test_the_order_of_many_columns_is_theirs():
    names = [f"x[{i}]" for i in range(12)] + ["y[0]", "other"]
    assert structured_columns(names[::-1]) == (names[:12], ["y[0]"])


def test_columns_of_a_frame():
    frame = pd.DataFrame({"a": [1, 2], "b": [0.5, 1.5], "v": [np.ones(3), np.zeros(3)]})
    assert shapes(frame, ["v", "b"], ["a"]) == [
        ("v", None, "float32", (2, 3)),
        ("b", None, "float32", (2,)),
        ("a", None, "int64", (2,)),
    ]
    assert shapes(pd.DataFrame({"n": pd.array([1, 2], "Int16")}), ["n"]) == [
        ("n", None, "int16", (2,))
    ]


@pytest.mark.parametrize(
    ("data", "features", "message"),
    [
        ((X, Y[:3]), None, "equal numbers of rows"),
        ((X,), None, "must end with the targets"),
        ({"a": X}, None, 'must hold the features as "x"'),
        ({"x": [1, 2], "y": Y}, None, "must be a numpy array, got int"),
        ({"x": np.array(["a"]), "y": Y}, None, "cannot become a tensor"),
        (pd.DataFrame({"a": [1]}), None, "feature_cols is required"),
        (pd.DataFrame({"a": [1]}), ["b"], "no column 'b'; there are"),
        (pd.DataFrame({"a": ["u"]}), ["a"], "strings|cannot become a tensor"),
        (pd.DataFrame({"a": pd.array([1, None], "Int64")}), ["a"], "holds nulls"),
        (pd.DataFrame({"a": [np.ones(2), np.ones(3)]}), ["a"], "arrays of different shapes"),
        (X, ["a"], "feature_cols belongs to"),
    ],
)
def test_values_that_cannot_be_columns_are_refused(data, features, message):
    with pytest.raises(SourceError, match=message):
        columns_of(data, features, None, "float32")


def test_shards_of_two_dtypes_are_told_apart():
    one, two = (grouped(columns_of((X, y), None, None, None))[0] for y in (Y, Y * 1.0))
    assert "is int64 in some of the data and float64" in describe_difference(one, two)


# The order of rows that are larger than memory --------------------------------------------------


@given(
    rows=st.integers(0, 2000),
    window=st.integers(1, 900),
    seed=st.integers(0, 99),
    cuts=st.lists(st.integers(0, 2000), max_size=6),
)
@settings(max_examples=60)
def test_windows_hold_every_row_once_however_they_are_read(rows, window, seed, cuts):
    order = WindowedOrder(rows, window, seed, 3, 1)
    whole = order[0:rows]
    assert sorted(whole.tolist()) == list(range(rows))
    again = WindowedOrder(rows, window, seed, 3, 1)
    ends = [0, *sorted(min(c, rows) for c in cuts), rows]
    pieces = [again[a:b] for a, b in itertools.pairwise(ends)]
    assert np.array_equal(np.concatenate(pieces), whole)


def test_a_window_is_small_and_differs_between_epochs():
    orders = [WindowedOrder(64_000, 6400, 0, epoch)[0:64_000] for epoch in range(2)]
    assert not np.array_equal(*orders)
    blocks = {int(row) // 100 for row in orders[0][:6400]}
    assert len(blocks) == 64


# Parquet files ----------------------------------------------------------------------------------


def read(paths, directory, num_workers, features, labels=(), config=None):
    """Return the columns of each worker as lists."""
    feed = as_feed(paths, features, labels, config)
    ingest = feed.prepare(None, num_workers)
    assert ingest.frame is None
    shards = []
    for rank in range(num_workers):

        def open_spool(name, specs, rank=rank):
            return SpoolWriter(str(directory), 0, f"{name}-{rank}", specs)

        open_spool.rank, open_spool.world_size = rank, num_workers
        shards.append(ingest.reader(iter(()), open_spool)["data"])
    return shards


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    group=st.integers(1, 5),
    num_workers=st.integers(1, 5),
)
@settings(max_examples=25)
def test_parquet_rows_are_cut_evenly_and_keep_their_order(
    tmp_path_factory, sizes, group, num_workers
):
    folder = tmp_path_factory.mktemp("parquet")
    count = itertools.count()
    for i, size in enumerate(sizes):
        ids = pa.array([next(count) for _ in range(size)], pa.int64())
        pq.write_table(pa.table({"id": ids}), folder / f"{i}.parquet", row_group_size=group)
    spools = tmp_path_factory.mktemp("spools")
    shards = read(str(folder), spools, num_workers, "id")
    rows = [s.rows for s in shards]
    assert max(rows) - min(rows) <= 1
    ids = [i for s in shards for i in (s.column("id").tolist() if s.rows else [])]
    assert ids == list(range(sum(sizes)))


def test_parquet_types_partitions_and_projection(tmp_path):
    vectors = [
        {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]},
        {"type": 0, "size": 3, "indices": [2], "values": [5.0]},
    ]
    fields = [("type", pa.int8()), ("size", pa.int32())]
    fields += [("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
    table = pa.table(
        {
            "tiny": pa.array([1, 2], pa.int8()),
            "real": [0.5, 1.5],
            "list": [[1, 2], [3, 4]],
            "fixed": pa.array([[1.0], [2.0]], pa.list_(pa.float64(), 1)),
            "vector": pa.array(vectors, pa.struct(fields)),
            "map": pa.array([[("a", 1.0)], [("a", 2.0)]], pa.map_(pa.string(), pa.float64())),
            "text": ["not", "read"],
        }
    )
    for day in (1, 2):
        (tmp_path / "t" / f"day={day}").mkdir(parents=True)
        pq.write_table(table, tmp_path / "t" / f"day={day}" / "a.parquet")
    columns = ["tiny", "real", "list", "fixed", "vector", "map", "day"]
    (shard,) = read(str(tmp_path / "t"), tmp_path, 1, columns)
    assert shard.column("day").tolist() == [1, 1, 2, 2]
    assert shard.column("tiny").dtype == np.int32
    assert shard.column("real").dtype == np.float32
    assert shard.column("list").tolist() == [[1, 2], [3, 4]] * 2
    assert shard.column("fixed").shape == (4, 1)
    assert shard.column("vector").tolist() == [[1, 2, 3], [0, 0, 5]] * 2
    assert shard.column("map")["a"].tolist() == [1, 2, 1, 2]
    (double,) = read(str(tmp_path / "t"), tmp_path, 1, "real", config={"dtype": "float64"})
    assert double.column("real").dtype == np.float64


def test_a_list_of_files_keeps_its_order(tmp_path):
    for i in range(3):
        pq.write_table(pa.table({"id": [i]}), tmp_path / f"{i}.parquet")
    (shard,) = read([tmp_path / "2.parquet", tmp_path / "0.parquet"], tmp_path, 1, "id")
    assert shard.column("id").tolist() == [2, 0]


def test_parquet_that_cannot_be_read_is_refused(tmp_path):
    pq.write_table(pa.table({"a": [1], "n": pa.array([None], pa.int64())}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"a": ["x"], "s": ["x"]}), tmp_path / "1.parquet")
    (tmp_path / "empty").mkdir()
    (tmp_path / "table.csv").write_text("a\n1\n")
    one = str(tmp_path / "0.parquet")
    for path, columns, message in [
        (str(tmp_path / "none"), "a", "There is nothing at"),
        (str(tmp_path / "empty"), "a", "no Parquet file"),
        (str(tmp_path / "table.csv"), "a", "cannot be read as Parquet; read other formats with"),
        (one, [], "feature_cols is required"),
        (one, "A", "did you mean 'a'"),
        (str(tmp_path / "1.parquet"), "s", "has type string"),
        ([one, str(tmp_path / "1.parquet")], "a", "is string in the file .* but int64 in"),
    ]:
        with pytest.raises(UsageError, match=message):
            as_feed(path, columns)
    with refused("data-null", "'n'"):
        read(one, tmp_path, 1, "n")
