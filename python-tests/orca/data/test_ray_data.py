"""Test data exchange between Spark and Ray, and RayXShards."""

import numpy as np
import pandas as pd
import pytest
import ray_models as rays
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.data import SharedValue, SparkXShards, XShards, spark_df_to_ray_dataset
from bigdl.orca.data.feeds import as_feed
from bigdl.orca.data.pandas import read_csv, read_json, read_parquet
from bigdl.orca.data.xshards.ray import RayXShards, assign_evenly
from bigdl.orca.engines.ray import RayEngine
from bigdl.orca.engines.spark import SparkEngine

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")


@pytest.fixture(scope="module")
def active(orca_spark):
    """Start Ray in addition to Spark; starting Spark again would stop it."""
    return rays.active_ray()


@pytest.fixture
def shards(active):
    """Return five shards in two partitions."""
    return RayXShards([ray.put([0, 1, 2]), ray.put([3, 4])])


@pytest.fixture
def alone(monkeypatch):
    """Simulate a program with Ray and without Spark."""
    rays.active_ray()
    monkeypatch.setattr("bigdl.orca.cluster.ray.active_context", lambda: None)


# -- without Spark ------------------------------------------------------------------------------


@pytest.mark.slow
def test_files_are_read_by_pandas_on_ray(alone, tmp_path):
    frames = [pd.DataFrame({"a": [i, i + 1], "b": ["x", "y"]}) for i in range(3)]
    for number, frame in enumerate(frames):
        frame.to_csv(tmp_path / f"{number}.csv", index=False)
        frame.to_json(tmp_path / f"{number}.json", orient="records")
        (tmp_path / "parquet").mkdir(exist_ok=True)
        frame.to_parquet(tmp_path / "parquet" / f"{number}.parquet")
    expected = pd.concat(frames, ignore_index=True)
    results = {
        "csv": read_csv(str(tmp_path / "*.csv")),
        "json": read_json(str(tmp_path / "*.json"), orient="records"),
        "parquet": read_parquet(str(tmp_path / "parquet"), columns=["a", "b"]),
    }
    for name, shards in results.items():
        assert isinstance(shards, RayXShards), name
        assert shards.num_partitions() == 2, name
        joined = pd.concat(shards.collect(), ignore_index=True)
        pd.testing.assert_frame_equal(joined, expected, check_dtype=False)
    with refused("path-missing"):
        read_csv(str(tmp_path / "nothing.csv"))


def test_a_shared_value_reaches_every_shard(alone):
    shards = XShards.partition({"x": np.arange(6)}, num_shards=3)
    assert isinstance(shards, RayXShards)
    index = SharedValue({"offset": 10})
    moved = shards.transform_shard(lambda shard, index: shard["x"] + index["offset"], index)
    assert np.concatenate(moved.collect()).tolist() == [10, 11, 12, 13, 14, 15]
    assert index.value == {"offset": 10}
    index.unpersist()
    again = shards.transform_shard(lambda shard, index: len(index), index)
    assert again.collect() == [1, 1, 1]


def test_a_shared_value_of_spark_reaches_shards_in_ray(shards):
    moved = shards.transform_shard(lambda shard, index: shard + index["by"], SharedValue({"by": 7}))
    assert moved.collect() == [7, 8, 9, 10, 11]


# -- RayXShards ---------------------------------------------------------------------------------


def test_shards_keep_their_order_and_partitions(shards):
    assert shards.num_partitions() == 2
    assert shards.collect() == [0, 1, 2, 3, 4]
    assert shards.collect_partitions() == [[0, 1, 2], [3, 4]]
    assert ray.get(shards.get_refs()) == [0, 1, 2, 3, 4]
    assert ray.get(shards.get_partition_refs()) == [[0, 1, 2], [3, 4]]
    assert shards.transform_shard(lambda x, by: x * by, 10).collect() == [0, 10, 20, 30, 40]


def test_partitions_are_made_of_references(active):
    made = RayXShards.from_partition_refs({"a": [1], "b": [0]}, {0: ray.put(["x"]), 1: ray.put([])})
    assert made.collect_partitions() == [["x"], []]
    assert ray.get(made.get_refs()) == ["x"]
    with refused("argument-conflict", "ip2part_id", "0", "part_id2ref"):
        RayXShards.from_partition_refs({"a": [0]}, {1: ray.put([])})


class Adder:
    def __init__(self, base):
        self._base = base

    def add(self, partition):
        return [shard + self._base for shard in partition]

    def sum(self, *partitions):
        return sum(shard for partition in partitions for shard in partition)

    def products(self, left, right):
        pairs = zip(ray.get(left), ray.get(right), strict=True)
        return [a * b for x, y in pairs for a, b in zip(x, y, strict=True)]


@pytest.fixture(scope="module")
def actors(active):
    remote = ray.remote(num_cpus=0)(Adder)
    made = [remote.remote(100), remote.remote(100)]
    yield made
    for actor in made:
        ray.kill(actor)


@pytest.mark.slow
def test_actors_work_on_partitions(shards, actors):
    changed = shards.transform_shards_with_actors(
        actors, lambda actor, part: actor.add.remote(part)
    )
    assert changed.collect() == [100, 101, 102, 103, 104]
    sums = shards.reduce_partitions_for_actors(
        actors, lambda actor, parts: actor.sum.remote(*parts)
    )
    assert sorted(sums) == [3, 7]
    references = shards.reduce_partitions_for_actors(
        actors, lambda actor, parts: actor.sum.remote(*parts), return_refs=True
    )
    assert sorted(ray.get(references)) == [3, 7]
    products = shards.zip_reduce_shards_with_actors(
        shards, actors, lambda actor, left, right: actor.products.remote(left, right)
    )
    assert sorted(products) == [[0, 1, 4], [9, 16]]


@pytest.mark.slow
def test_partitions_are_shared_out_evenly(shards, actors):
    assigned, addresses, chosen = shards.assign_partitions_to_actors(actors)
    assert sorted(assigned) == [[0], [1]]
    assert chosen == list(actors)
    assert addresses == ["127.0.0.1"] * 2
    one = RayXShards(shards.get_partition_refs()[:1])
    assert one.assign_partitions_to_actors(actors)[::2] == ([[0]], actors[:1])
    with refused("argument-value", "1"):
        one.reduce_partitions_for_actors(actors, None)
    with pytest.raises(UsageError, match="should have the same number of partitions"):
        one.zip_reduce_shards_with_actors(shards, actors, None)


NODES = st.sampled_from(["a", "b", "c"])


@given(st.lists(st.lists(NODES, max_size=2), min_size=1, max_size=20), st.lists(NODES, min_size=1))
def test_every_partition_has_one_actor_and_shares_differ_by_one(homes, nodes):
    nodes = nodes[: len(homes)]
    assigned = assign_evenly(homes, nodes)
    assert sorted(n for each in assigned for n in each) == list(range(len(homes)))
    sizes = [len(each) for each in assigned]
    assert max(sizes) - min(sizes) <= 1


def test_partitions_stay_on_their_nodes_where_that_is_even():
    assert assign_evenly([["b"], ["a"], ["b"], ["a"]], ["a", "b"]) == [[1, 3], [0, 2]]


# -- with Spark ---------------------------------------------------------------------------------


def places(worker):
    return [worker.rank, worker.shard.rows, worker.shard.fingerprint]


@pytest.fixture
def engines(orca_spark, active):
    return SparkEngine(workers_per_node=2), RayEngine(workers_per_node=2)


@pytest.mark.slow
def test_the_shards_of_a_spark_dataframe_are_those_of_spark(orca_spark, engines):
    frame = orca_spark.range(0, 101, 1, 3).selectExpr("array(sin(id), cos(id)) x", "double(id) y")
    actual = [engine.run(places, as_feed(frame, ["x"], ["y"])) for engine in engines]
    assert actual[0] == actual[1]
    assert sum(rows for _, rows, _ in actual[0]) == 101


@pytest.mark.slow
def test_the_shards_of_xshards_are_those_of_spark(orca_spark, engines):
    shards = [{"x": np.ones((3, 2)) * i, "y": np.ones(3) * i} for i in range(4)]
    on_spark = SparkXShards(orca_spark.sparkContext.parallelize(shards, 3))
    on_ray = RayXShards.from_spark_xshards(on_spark)
    actual = [engines[0].run(places, as_feed(on_spark))]
    actual += [engines[1].run(places, as_feed(each)) for each in (on_spark, on_ray)]
    assert actual[0] == actual[1] == actual[2]


@pytest.mark.slow
def test_shards_go_to_ray_and_come_back(orca_spark, active):
    frames = [pd.DataFrame({"a": [i, i + 1], "b": ["x", "y"]}) for i in range(3)]
    on_spark = SparkXShards(orca_spark.sparkContext.parallelize(frames, 2))
    on_ray = RayXShards.from_spark_xshards(on_spark)
    assert on_ray.num_partitions() == 2
    back = on_ray.transform_shard(lambda frame: frame.assign(a=frame["a"] * 2)).to_spark_xshards()
    assert back.num_partitions() == 2
    for frame, actual in zip(frames, back.collect(), strict=True):
        pd.testing.assert_frame_equal(actual, frame.assign(a=frame["a"] * 2))


@pytest.mark.slow
def test_a_dataframe_becomes_a_dataset_with_a_block_for_every_partition(orca_spark, active):
    from pyspark.ml.functions import array_to_vector

    frame = orca_spark.range(0, 10, 1, 3).selectExpr(
        "id", "cast(id as string) s", "array(double(id) / 2) v"
    )
    frame = frame.withColumn("v", array_to_vector("v")).where("id < 3 or id > 6")
    dataset = spark_df_to_ray_dataset(frame)
    actual = dataset.to_pandas()
    assert actual["id"].tolist() == [0, 1, 2, 7, 8, 9]
    assert actual["s"].tolist() == list("012789")
    assert [list(v) for v in actual["v"]] == [[i / 2] for i in (0, 1, 2, 7, 8, 9)]
    assert dataset.materialize().num_blocks() == 3


def test_what_is_not_of_spark_is_refused(orca_spark, active):
    with refused("data-type", "DataFrame"):
        spark_df_to_ray_dataset(pd.DataFrame())
    with refused("data-type", "from_spark_xshards", "SparkXShards"):
        RayXShards.from_spark_xshards([])
    shards = RayXShards([ray.put([{"x": np.ones(3), "y": np.ones(3)}])])
    with refused("data-type", 'backend="ray"'):
        SparkEngine().run(places, as_feed(shards))
