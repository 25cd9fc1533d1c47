"""Test Spark DataFrames as the input of workers in separate executors."""

import itertools
import os
import sys

import cloudpickle
import numpy as np
import pytest
from pyspark.sql import functions as F
from refusals import refused

from bigdl.common.errors import WorkerError
from bigdl.orca.data.feeds import as_feed, packing
from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.engines.spark import SparkEngine
from bigdl.runtime.shards.columns import ArraySpec
from bigdl.runtime.shards.shard import SpoolWriter

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def engine(local_cluster):
    return SparkEngine(log_to_driver=False)


def ids(worker):
    return worker.shard.column("id").tolist()


@pytest.mark.slow
def test_shards_are_those_of_local_mode_to_the_fingerprint(local_cluster, engine, tmp_path):
    def look(worker):
        return [worker.shard.fingerprint, ids(worker)]

    expected = []
    for shard in range(2):
        writer = SpoolWriter(str(tmp_path), 0, str(shard), [])
        for p in range(6):  # the partitions of the range, one chunk each
            values = np.arange(100 * p + (shard - p) % 2, 100 * p + 100, 2)
            writer.append(p, 0, len(values), [ArraySpec("id", None, "int64", ())], [values])
        spool = writer.finish()
        expected.append([spool.fingerprint, spool.arrays()[0].tolist()])
    feed = as_feed(local_cluster.range(0, 600, 1, 6), "id")
    assert [engine.run(look, feed, 2) for _ in range(2)] == [expected, expected]


@pytest.mark.slow
def test_large_and_uneven_partitions_arrive_in_order(local_cluster, engine, monkeypatch):
    monkeypatch.setattr(packing, "PIECE", 20_000)
    large = local_cluster.range(0, 25_000, 1, 1).union(local_cluster.range(25_000, 25_100, 1, 7))
    frame = large.withColumn("x", F.array_repeat(F.col("id").cast("float"), 10))

    def look(worker):
        rows = worker.shard.column("id")
        assert (worker.shard.column("x") == rows[:, None]).all()
        return [len(rows), int(rows.sum()), bool((np.diff(rows) > 0).all())]

    shards = engine.run(look, as_feed(frame, ["id", "x"]), 2)
    assert sum(n for n, _, _ in shards) == 25_100
    assert sum(total for _, total, _ in shards) == sum(range(25_100))
    assert abs(shards[0][0] - shards[1][0]) <= 8
    assert all(ordered for _, _, ordered in shards)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda s: s.range(0, 500, 1, 9).groupBy((F.col("id") % 41).alias("id")).count(),
        lambda s: s.range(0, 100, 1, 4).coalesce(2).cache(),
        lambda s: s.range(0, 100, 1, 4).limit(7),
    ],
)
def test_each_row_reaches_one_worker(local_cluster, engine, make):
    frame = make(local_cluster)
    rows = list(itertools.chain(*engine.run(ids, as_feed(frame, "id"), 2)))
    assert len(rows) == len(set(rows)) == frame.count()
    frame.unpersist()


@pytest.mark.slow
def test_a_cached_frame_of_n_equal_partitions_is_read_as_it_is(local_cluster, engine):
    frame = local_cluster.range(0, 100, 1, 2).cache()
    shards = engine.run(ids, as_feed(frame, "id"), 2)
    assert shards == [list(range(50)), list(range(50, 100))]
    frame.unpersist()


def spools(directory):
    return [name for name in os.listdir(directory) if name.startswith("bigdl-spool-")]


@pytest.fixture
def local_dirs(engine):
    """Return the executors' directories on this machine, after a check for spools."""
    directories = engine.run(lambda worker: worker.local_dir, None, 2)
    assert len(set(directories)) == 2
    assert [spools(d) for d in directories] == [[], []]
    return directories


@pytest.mark.slow
def test_a_job_leaves_no_spool_on_any_executor(local_cluster, engine, local_dirs):
    feed = FeedGroup(
        {name: as_feed(local_cluster.range(9), "id") for name in ("data", "validation")}
    )

    def look(worker):
        return len(spools(worker.local_dir))

    assert engine.run(look, feed, 2) == [2, 2]
    assert [spools(d) for d in local_dirs] == [[], []]


@pytest.mark.slow
def test_a_failed_job_leaves_no_spool_on_any_executor(local_cluster, engine, local_dirs):
    def fail(worker):
        worker.channel.barrier("spooled", worker.world_size)
        return 1 // 0

    rows = as_feed(local_cluster.range(4), "id")
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        engine.run(fail, rows, 2)
    assert [spools(d) for d in local_dirs] == [[], []]
    bad = local_cluster.range(0, 100, 1, 4).selectExpr("nullif(id, 99) AS id")
    with refused("data-null", "'id'"):
        engine.run(ids, as_feed(bad, "id"), 2)
    engine.run(ids, rows, 2)  # the other worker may have been stopped while it wrote
    assert [spools(d) for d in local_dirs] == [[], []]


@pytest.mark.slow
def test_each_executor_removes_what_dead_jobs_left_on_it(local_cluster, engine, local_dirs):
    stale = [os.path.join(d, "bigdl-spool-0-data-0-0123456789abcdef") for d in local_dirs]
    for path in stale:
        os.mkdir(path)
    engine.run(ids, as_feed(local_cluster.range(4), "id"), 2)
    assert [os.path.exists(path) for path in stale] == [False, False]
