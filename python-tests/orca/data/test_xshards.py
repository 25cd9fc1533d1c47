"""Test XShards on Spark: their contents, their lifetime, and moves of shards."""

import gc
import random
import sys
import tempfile
import time

import cloudpickle
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused

from bigdl.common.errors import UsageError, WorkerError
from bigdl.common.trust import user_key, user_signature
from bigdl.orca import OrcaContext
from bigdl.orca.data import SharedValue, SparkXShards, XShards
from bigdl.orca.data.utils import partition_get_data_label, process_spark_xshards
from bigdl.orca.data.xshards.persistence import release_dropped

cloudpickle.register_pickle_by_value(sys.modules[__name__])

few = settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def sc(orca_spark):
    return orca_spark.sparkContext


def kept(sc):
    release_dropped()
    return {int(key) for key in sc._jsc.getPersistentRDDs()}


def numbers(sc, partitions=2):
    return SparkXShards(sc.parallelize(range(4), partitions))


def jitter(shard):
    return shard + random.random() + time.time_ns() % 1000


# partition --------------------------------------------------------------------------------------


@few
@given(rows=st.integers(3, 20), shards=st.integers(1, 3))
def test_partition_cuts_like_array_split_and_keeps_the_container(sc, rows, shards):
    data = {"x": np.arange(rows), "y": [np.ones((rows, 2)), (np.arange(rows) * 2.0,)]}
    parts = XShards.partition(data, shards).collect()
    for part, x in zip(parts, np.array_split(data["x"], shards), strict=True):
        np.testing.assert_array_equal(part["x"], x)
        assert type(part["y"]) is list
        assert type(part["y"][1]) is tuple
        assert len(part["y"][0]) == len(part["y"][1][0]) == len(x)


def test_partition_makes_a_shard_per_core(sc):
    assert XShards.partition(np.arange(6)).num_partitions() == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.arange(1), "smaller than the total number of shards"),
        ([np.arange(3), np.arange(4)], "must all have the same size in first dimension"),
        ("text", "should be a numpy array"),
        ({"x": [1, 2]}, "should be a numpy array"),
        ([], "no array"),
    ],
)
def test_partition_says_what_is_wrong(sc, data, message):
    with pytest.raises(UsageError, match=message):
        XShards.partition(data, 2)


# Transforms and what is kept --------------------------------------------------------------------


@pytest.mark.slow
def test_transform_gives_the_arguments_and_the_value_of_a_shared_one(sc):
    class OfThisProgram:
        def __init__(self, number):
            self.number = number

    shared = SharedValue(OfThisProgram(10))
    assert shared.value.number == 10
    made = numbers(sc).transform_shard(lambda s, a, b: s * a + b.number, 2, shared)
    assert made.collect() == [10, 12, 14, 16]
    shared.unpersist()
    assert made.to_lazy().transform_shard(lambda s, b: b.number, shared).collect() == [10] * 4


def test_a_function_that_reads_the_value_of_a_shared_value_gets_the_shared_value(sc):
    def minus(shard, factor, shared):
        return shard * factor - shared.value

    def minus_inside(shard, shared):
        return (lambda: shard - shared.value)()

    shared = SharedValue(1)
    assert numbers(sc).transform_shard(minus, 2, shared).collect() == [-1, 1, 3, 5]
    assert numbers(sc).transform_shard(minus_inside, shared).collect() == [-1, 0, 1, 2]
    assert numbers(sc).transform_shard(np.add, shared).collect() == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_random_transform_runs_once(sc):
    made = numbers(sc).transform_shard(jitter)
    assert made.is_cached()
    assert made.collect() == made.collect()
    assert made.transform_shard(lambda s: s).collect() == made.collect()


@pytest.mark.slow
def test_a_lazy_transform_runs_at_every_use(sc):
    lazy = numbers(sc).to_lazy().transform_shard(jitter)
    assert lazy.is_lazy
    assert not lazy.is_cached()
    assert lazy.collect() != lazy.collect()


def test_nothing_is_kept_without_eager_mode(sc):
    before = kept(sc)
    OrcaContext._eager_mode = False
    try:
        made = numbers(sc).transform_shard(lambda s: s + 1)
        assert kept(sc) == before
        assert made.collect() == [1, 2, 3, 4]
        assert made.compute().is_cached()
    finally:
        OrcaContext._eager_mode = True


@pytest.mark.slow
def test_kept_shards_are_released_when_nobody_can_use_them(sc):
    gc.collect()
    before = kept(sc)
    first = numbers(sc).transform_shard(jitter)
    gc.collect()
    assert len(kept(sc) - before) == 1, "the parent of computed shards is not needed"
    values = first.collect()
    lazy = first.to_lazy().transform_shard(lambda s: s)
    selected = SparkXShards(sc.parallelize([[v] for v in values], 2))[0]
    del first
    gc.collect()
    assert lazy.collect() == values, "a lazy child still reads its parent"
    assert selected.collect() == values
    del lazy, selected
    gc.collect()
    assert kept(sc) == before


def test_a_spark_frame_outlives_the_shards_that_it_was_made_of(sc):
    import pandas as pd

    made = numbers(sc).transform_shard(lambda s: pd.DataFrame({"a": [jitter(s)]}))
    values = [frame["a"][0] for frame in made.collect()]
    frame = made.to_spark_df().select("a")
    del made
    gc.collect()
    release_dropped()
    assert [row[0] for row in frame.collect()] == values


@pytest.mark.slow
def test_an_rdd_that_its_owner_keeps_stays_kept(sc):
    rdd = sc.parallelize([1, 2]).cache()
    SparkXShards(rdd)
    gc.collect()
    kept(sc)
    assert rdd.getStorageLevel().useMemory
    rdd.unpersist()


def test_cache_and_uncache(sc):
    shards = numbers(sc)
    assert shards.uncache() is shards
    assert not shards.is_cached()
    assert shards.cache().is_cached()
    assert shards.uncache().collect() == [0, 1, 2, 3]


# What is in them --------------------------------------------------------------------------------


def test_len_counts_rows_keys_and_objects(sc):
    shards = [np.zeros((3, 2)), {"a": 1, "b": 2}, 5, [1, 2, 3, 4]]
    assert len(SparkXShards(sc.parallelize(shards, 3))) == 3 + 2 + 1 + 4
    assert len(SparkXShards(sc.parallelize([], 2))) == 0


def test_first_and_take(sc):
    assert numbers(sc).first() == 0
    assert numbers(sc).take(3) == [0, 1, 2]
    with refused("data-empty"):
        SparkXShards(sc.parallelize([], 1)).first()


def test_a_key_selects_and_a_wrong_one_is_named(sc):
    shards = SparkXShards(sc.parallelize([{"a": 1}, {"a": 2}], 2))
    assert shards["a"].collect() == [1, 2]
    assert not shards["a"].is_cached()
    with refused("column-missing", "'b'"):
        shards["b"]
    with pytest.raises(UsageError, match="No selection operation available"):
        numbers(sc)["a"]


def test_a_failed_transform_shows_the_users_frames_and_runs_once_on_a_shard(sc, tmp_path):
    def fails(shard):
        (tmp_path / f"{min(shard)}-{time.monotonic_ns()}").touch()
        return shard[0] / 0

    shards = XShards.partition(np.arange(8), 2)
    with pytest.raises(WorkerError, match=r"^ZeroDivisionError in partition 0 of the XShards") as e:
        shards.transform_shard(lambda shard: fails(shard.tolist()))
    assert len(list(tmp_path.iterdir())) == 2
    first = "Traceback (most recent call last):\n  File "
    assert f'{first}"{__file__}"' in str(e.value)
    assert len(str(e.value).splitlines()) <= 12
    assert "pyspark" in e.value.traceback
    with refused("worker-error", "ZeroDivisionError"):
        shards.to_lazy().transform_shard(lambda shard: fails(shard.tolist())).collect()


@pytest.mark.parametrize(
    ("use", "runs"),
    [
        (SparkXShards.collect, 1),
        (SparkXShards.first, 1),
        (len, 1),
        (SparkXShards.to_spark_df, 1),
        (lambda shards: shards.head(10), 4),
        (lambda shards: shards.zip(shards), 1),
        (lambda shards: shards.cache().collect(), 4),
        (lambda shards: shards.save_pickle(f"{tempfile.mkdtemp()}/shards"), 4),
    ],
)
def test_a_function_that_fails_in_a_lazy_shard_ends_with_the_users_frames(
    sc, tmp_path, capfd, use, runs
):
    import pandas as pd

    def fails(frame):
        (tmp_path / f"{time.monotonic_ns()}").touch()
        raise KeyError("row 3")

    frame = pd.DataFrame({"x": [1, 2, 3]})
    shards = SparkXShards(sc.parallelize([frame], 1)).to_lazy().transform_shard(fails)
    with pytest.raises(WorkerError, match=r"^KeyError in ") as caught:
        use(shards)
    _first, *frames = str(caught.value).splitlines()
    assert f'File "{__file__}"' in frames[1]
    assert frames[-1] == "KeyError: 'row 3'"
    assert len(frames) < 12
    assert len(list(tmp_path.iterdir())) <= runs
    assert "org.apache.spark" not in capfd.readouterr().err


# split, zip, repartition ------------------------------------------------------------------------


@pytest.mark.slow
def test_zip_and_split_are_inverse(sc):
    one, two = numbers(sc), numbers(sc).transform_shard(str)
    pair = one.zip(two)
    assert pair.collect() == [(0, "0"), (1, "1"), (2, "2"), (3, "3")]
    assert [each.collect() for each in pair.split()] == [one.collect(), two.collect()]


@pytest.mark.slow
def test_split_needs_items_of_one_number(sc):
    for shards in ([(1, 2), (1, 2, 3)], [{"a": 1}], [(1,), 2], [(), ()]):
        made = SparkXShards(sc.parallelize(shards, 2))
        assert made.split() == [made]


@pytest.mark.slow
def test_zip_says_what_does_not_fit(sc):
    with pytest.raises(UsageError, match="other should be a SparkXShards"):
        numbers(sc).zip([1])
    with pytest.raises(UsageError, match="the same number of partitions"):
        numbers(sc).zip(numbers(sc, 3))
    other = SparkXShards(sc.parallelize(range(5), 2))
    with pytest.raises(UsageError, match="same number of elements in each partition"):
        numbers(sc).zip(other)


CONTENTS = {
    "arrays": (lambda rows: np.array(rows), np.concatenate),
    "lists": (list, lambda parts: [row for part in parts for row in part]),
    "dicts": (
        lambda rows: {"x": np.array(rows), "y": (np.array(rows) * 2,)},
        lambda parts: np.concatenate([part["x"] for part in parts]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("content", CONTENTS)
@few
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4), number=st.integers(1, 6))
def test_repartition_keeps_every_row_in_order(sc, content, sizes, number):
    make, join = CONTENTS[content]
    rows = iter(range(sum(sizes)))
    shards = [make([next(rows) for _ in range(size)]) for size in sizes]
    made = SparkXShards(sc.parallelize(shards, 2)).to_lazy().repartition(number)
    parts = made.rdd.glom().collect()
    assert [len(part) for part in parts] == [1] * number
    counts = [len(part[0]["x"] if content == "dicts" else part[0]) for part in parts]
    assert max(counts) - min(counts) <= 1
    assert list(join([part[0] for part in parts])) == list(range(sum(sizes)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 3, 7])
def test_repartition_keeps_other_shards_whole(sc, number):
    shards = [(np.arange(i), str(i)) for i in range(5)]
    made = SparkXShards(sc.parallelize(shards, 2)).repartition(number)
    assert made.num_partitions() == number
    assert [shard[1] for shard in made.collect()] == list("01234")


@pytest.mark.slow
def test_repartition_of_nothing(sc):
    made = SparkXShards(sc.parallelize([], 2)).repartition(3)
    assert (made.num_partitions(), made.collect()) == (3, [])
    with pytest.raises(UsageError, match="num_partitions should be a positive integer"):
        numbers(sc).repartition(0)


@pytest.mark.slow
def test_samples_are_stacked(sc):
    samples = [(np.full((2, 3), i), i) for i in range(5)]
    (one, two) = SparkXShards(sc.parallelize(samples, 2)).stack_feature_labels().collect()
    x = np.concatenate([one["x"], two["x"]])
    assert x.shape == (5, 2, 3)
    assert x.dtype == np.float32
    np.testing.assert_array_equal(np.concatenate([one["y"], two["y"]]), np.arange(5))


# Pickles and helpers ----------------------------------------------------------------------------


@pytest.mark.slow
def test_pickles_of_this_user_come_back_and_foreign_ones_need_trust(sc, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/home")
    path = f"{tmp_path}/user files"
    shards = numbers(sc)
    assert shards.save_pickle(path) is shards
    user_key.cache_clear()  # as in a later process
    assert sorted(XShards.load_pickle(path).collect()) == [0, 1, 2, 3]
    assert sorted(XShards.load_pickle(f"{tmp_path}/u*").collect()) == [0, 1, 2, 3]
    foreign = f"{tmp_path}/foreign"
    sc.parallelize([1, 2]).saveAsPickleFile(foreign)
    with pytest.raises(UsageError, match="pass trust=True"):
        XShards.load_pickle(foreign)
    assert sorted(XShards.load_pickle(foreign, trust=True).collect()) == [1, 2]
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/home of another user")
    with pytest.raises(UsageError, match="no program of this user has signed"):
        XShards.load_pickle(path)
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/home")
    part = next((tmp_path / "user files").glob("part-*"))
    part.write_bytes(b"changed")
    with pytest.raises(UsageError, match="no program of this user has signed"):
        SparkXShards.load_pickle(path)


def test_a_key_that_others_can_read_signs_for_this_process_only(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    signature = user_signature("text")
    (key,) = (tmp_path / "bigdl/keys").iterdir()
    assert key.stat().st_mode & 0o777 == 0o600
    user_key.cache_clear()
    assert user_signature("text") == signature
    key.chmod(0o640)
    user_key.cache_clear()
    assert user_signature("text") != signature
    assert "others can read or change it; remove it" in caplog.text


def test_shards_of_a_partition_become_one_of_each():
    shards = [{"x": [np.arange(2), np.ones(2)], "y": np.arange(2)}] * 2
    data, label = partition_get_data_label(shards, allow_list=False)
    assert type(data) is tuple
    np.testing.assert_array_equal(data[0], [0, 1, 0, 1])
    np.testing.assert_array_equal(label, [0, 1, 0, 1])


@pytest.mark.slow
def test_every_worker_gets_a_partition(sc):
    shards = XShards.partition(np.arange(8), 2)
    assert process_spark_xshards(shards, 3).num_partitions() == 3
    assert process_spark_xshards(shards, 1) is shards
