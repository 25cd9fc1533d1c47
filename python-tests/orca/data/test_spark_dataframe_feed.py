"""Test Spark DataFrames as the input of workers: rows, their order, and leftover files."""

import itertools
import os
import random
import sys

import cloudpickle
import numpy as np
import pytest
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions as F
from pyspark.sql.types import StructType
from refusals import refused

from bigdl.common.errors import UsageError, WorkerError
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.cluster.versions import data_type
from bigdl.orca.data.feeds import as_feed, packing
from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.engines.spark import SparkEngine
from bigdl.runtime.shards.columns import ArraySpec
from bigdl.runtime.shards.shard import SpoolWriter

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def engine(orca_spark):
    return SparkEngine(log_to_driver=False)


def ids(worker):
    return worker.shard.column("id").tolist()


def run_ids(engine, frame, num_workers=2):
    return engine.run(ids, as_feed(frame, "id"), num_workers)


def interleaved(partitions, num_workers=2):
    """Assign row i of partition p to shard (i + p) mod N; partitions and rows keep their order."""
    shards = [[] for _ in range(num_workers)]
    for p, rows in enumerate(partitions):
        for i, row in enumerate(rows):
            shards[(i + p) % num_workers].append(row)
    return shards


def cut(rows, partitions):
    """Return the partitions of ``spark.range(0, rows, 1, partitions)``."""
    ends = [i * rows // partitions for i in range(partitions + 1)]
    return [list(range(low, high)) for low, high in itertools.pairwise(ends)]


# Every row once ---------------------------------------------------------------------------------

FRAMES = {
    "200 partitions": lambda s: s.range(0, 500, 1, 200),
    "a union": lambda s: s.range(0, 300, 1, 3).union(s.range(300, 401, 1, 2)),
    "a filter": lambda s: s.range(0, 1000, 1, 8).filter("id % 7 = 0"),
    "a skewed partition": lambda s: s.range(0, 900, 1, 1).union(s.range(900, 1000, 1, 3)),
    "empty partitions": lambda s: s.range(0, 100, 1, 8).filter("id < 13"),
    "a shuffle": lambda s: s.range(1000).groupBy((F.col("id") % 37).alias("id")).count(),
    "a limit": lambda s: s.range(0, 100, 1, 4).limit(17),
    "an order": lambda s: s.range(0, 100, 1, 4).orderBy(F.desc("id")),
    "a coalesce": lambda s: s.range(0, 100, 1, 4).coalesce(2),
    "a cached coalesce": lambda s: s.range(0, 100, 1, 4).coalesce(2).cache(),
    "a cached union": lambda s: s.range(0, 50, 1, 1).union(s.range(50, 100, 1, 1)).cache(),
    "fewer rows than workers": lambda s: s.range(1),
    "local rows": lambda s: s.createDataFrame([(i,) for i in range(7)], "id int"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_each_row_reaches_one_worker_and_shards_are_balanced(orca_spark, engine, name):
    frame = FRAMES[name](orca_spark)
    shards = run_ids(engine, frame)
    assert sorted(itertools.chain(*shards)) == sorted(row[0] for row in frame.collect())
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= frame.rdd.getNumPartitions()
    frame.unpersist()


def test_one_worker_gets_everything_in_order(orca_spark, engine):
    assert run_ids(engine, orca_spark.range(0, 100, 1, 7), 1) == [list(range(100))]


@pytest.mark.parametrize("adaptive", ["true", "false"])
@pytest.mark.parametrize("empty", ["no row passes a filter", "limit 0", "no partition"])
def test_an_empty_frame_makes_empty_shards(orca_spark, engine, empty, adaptive):
    frame = {
        "no row passes a filter": orca_spark.range(0, 10, 1, 3).filter("id < 0"),
        "limit 0": orca_spark.range(10).limit(0),
        "no partition": orca_spark.createDataFrame([], "id long"),
    }[empty]
    orca_spark.conf.set("spark.sql.adaptive.enabled", adaptive)
    try:
        assert run_ids(engine, frame) == [[], []]
    finally:
        orca_spark.conf.unset("spark.sql.adaptive.enabled")


def test_rows_larger_than_a_piece_travel_in_several_cells(orca_spark, engine, monkeypatch):
    monkeypatch.setattr(packing, "PIECE", 1000)
    frame = orca_spark.range(0, 60, 1, 3).select("id", F.array_repeat("id", 70).alias("wide"))

    def look(worker):
        wide = worker.shard.column("wide")
        assert (wide == worker.shard.column("id")[:, None]).all()
        return [list(wide.shape), worker.shard.column("id").tolist()]

    shapes, rows = zip(*engine.run(look, as_feed(frame, ["id", "wide"]), 2), strict=True)
    assert list(shapes) == [[30, 70], [30, 70]]
    assert list(rows) == interleaved(cut(60, 3))


def test_every_kind_of_column_arrives(orca_spark, engine):
    rows = [
        (i % 2 == 0, i, i / 3, Vectors.dense(float(i), 1.0), [[i], [0]], {"b": 1.0 * i, "a": 0.5})
        for i in range(10)
    ]
    fields = {"flag": "boolean", "i": "int", "d": "double", "v": None}
    fields |= {"grid": "array<array<bigint>>", "m": "map<string, float>"}
    schema = StructType()
    for name, type_name in fields.items():
        schema.add(name, data_type(type_name) if type_name else VectorUDT())
    frame = orca_spark.createDataFrame(rows, schema)

    def look(worker):
        shard = worker.shard
        columns = {name: shard.column(name) for name in shard.names if name != "m"}
        columns.update(shard.column("m"))
        return {name: [c.dtype.name, list(c.shape[1:]), c.tolist()] for name, c in columns.items()}

    feed = as_feed(frame, list(fields), "i", {"dtype": "float64"})
    first, second = engine.run(look, feed, 2)
    assert {name: spec[:2] for name, spec in first.items()} == {
        "flag": ["bool", []],
        "i": ["int32", []],
        "d": ["float64", []],
        "v": ["float64", [2]],
        "grid": ["int64", [2, 1]],
        "a": ["float64", []],
        "b": ["float64", []],
    }
    both = {name: first[name][2] + second[name][2] for name in first}
    assert sorted(both["i"]) == list(range(10))
    for row, i in enumerate(both["i"]):
        values = [both[name][row] for name in ("flag", "d", "v", "grid", "a", "b")]
        assert values == [i % 2 == 0, i / 3, [i, 1.0], [[i], [0]], 0.5, i]


# Order ------------------------------------------------------------------------------------------


def test_rows_keep_the_order_of_their_partition_and_the_partitions_theirs(orca_spark, engine):
    assert run_ids(engine, orca_spark.range(0, 101, 1, 5)) == interleaved(cut(101, 5))


def test_two_runs_give_the_same_shards_and_fingerprints(orca_spark, engine, tmp_path):
    frame = orca_spark.range(0, 1000, 1, 4)

    def look(worker):
        return [worker.shard.fingerprint, worker.shard.column("id").tolist()]

    first, second = (engine.run(look, as_feed(frame, "id"), 2) for _ in range(2))
    assert first == second
    assert first == expected_shards(tmp_path, cut(1000, 4))


def expected_shards(directory, partitions):
    """Compute fingerprint and ids of both shards from the same chunks, without Spark."""
    out = []
    for shard in range(2):
        writer = SpoolWriter(str(directory), 0, str(shard), [])
        for p, rows in enumerate(partitions):
            values = np.array(rows[(shard - p) % 2 :: 2], np.int64)
            writer.append(p, 0, len(values), [ArraySpec("id", None, "int64", ())], [values])
        out.append([writer.finish().fingerprint, interleaved(partitions)[shard]])
    return out


# Cached frames ----------------------------------------------------------------------------------


def test_a_cached_frame_of_n_equal_partitions_is_read_as_it_is(orca_spark, engine):
    frame = orca_spark.range(0, 100, 1, 2).cache()
    assert run_ids(engine, frame) == cut(100, 2)
    frame.unpersist()


@pytest.mark.parametrize("condition", ["id < 60", "id < 50"])
def test_a_cached_frame_of_unequal_partitions_is_balanced(orca_spark, engine, condition):
    frame = orca_spark.range(0, 100, 1, 2).filter(condition).cache()
    sizes = [len(shard) for shard in run_ids(engine, frame)]
    assert sum(sizes) == frame.count()
    assert max(sizes) - min(sizes) <= 2
    frame.unpersist()


# Training and validation data -------------------------------------------------------------------


def group(train, validation, features="id", labels=None):
    return FeedGroup(
        {
            "data": as_feed(train, features, labels),
            "validation": as_feed(validation, features, labels, name="validation_data"),
        }
    )


def both(worker):
    return {
        key: [shard.column("id").dtype.name, shard.column("id").tolist()]
        for key, shard in worker.shards.items()
    }


def test_training_and_validation_data_do_not_mix(orca_spark, engine):
    train, validation = orca_spark.range(0, 40, 1, 3), orca_spark.range(1000, 1007, 1, 2)
    shards = engine.run(both, group(train, validation), 2)
    assert [shard["data"][1] for shard in shards] == interleaved(cut(40, 3))
    rows = [shard["validation"][1] for shard in shards]
    assert sorted(rows[0] + rows[1]) == list(range(1000, 1007))
    assert abs(len(rows[0]) - len(rows[1])) <= 2


@pytest.mark.parametrize("empty", ["data", "validation"])
def test_one_of_two_frames_may_be_empty(orca_spark, engine, empty):
    frames = {"data": orca_spark.range(4), "validation": orca_spark.range(4)}
    frames[empty] = frames[empty].limit(0)
    shards = engine.run(both, group(*frames.values()), 2)
    sizes = {key: sum(len(shard[key][1]) for shard in shards) for key in frames}
    assert sizes == {key: 0 if key == empty else 4 for key in frames}


@pytest.mark.parametrize(
    ("train", "validation", "dtype"),
    [
        ("int", "bigint", "int32"),
        ("bigint", "smallint", "int64"),
        ("double", "int", "float32"),
        ("float", "decimal(9, 2)", "float32"),
        ("int", "double", "int32"),
    ],
)
def test_validation_data_takes_the_types_of_the_training_data(
    orca_spark, engine, train, validation, dtype
):
    frames = [orca_spark.range(3).select(F.col("id").cast(t)) for t in (train, validation)]
    for shard in engine.run(both, group(*frames), 2):
        assert {dtype} == {shard[key][0] for key in ("data", "validation")}


def test_a_validation_value_that_does_not_fit_the_training_type_is_refused(orca_spark, engine):
    train, validation = orca_spark.range(3), orca_spark.range(3).select(F.expr("id + 0.5 AS id"))
    with refused("data-value", "validation_data", "'id'", "0"):
        engine.run(both, group(train, validation), 2)


def test_a_validation_column_of_another_kind_is_refused(orca_spark):
    validation = orca_spark.range(3).select(F.expr("id > 0 AS id"))
    with refused("data-schema", "'id'", "validation_data"):
        group(orca_spark.range(3), validation).prepare(SparkCluster.from_active(), 2)


def test_a_validation_frame_without_a_column_is_refused_by_name(orca_spark):
    frame = orca_spark.range(3)
    with refused("column-missing", "validation_data", "'y'"):
        group(frame.withColumn("y", F.lit(1)), frame, labels="y")


# Bad rows ---------------------------------------------------------------------------------------


def null_vector(spark):
    rows = [(i, Vectors.dense(1.0, i) if i != 3 else None) for i in range(4)]
    return spark.createDataFrame(rows, StructType().add("id", "long").add("x", VectorUDT()))


BAD = {
    "a null": (lambda s: s.range(0, 9, 1, 3).selectExpr("id", "nullif(id, 8) AS x"), "holds nulls"),
    "a null vector": (null_vector, "holds nulls"),
    "a null in a direct shard": (
        lambda s: s.range(0, 8, 1, 2).selectExpr("id", "nullif(id, 7) AS x").cache(),
        "holds nulls",
    ),
    "ragged arrays in two shards": (
        lambda s: s.range(0, 2, 1, 2).selectExpr("id", "array_repeat(0, 2 + int(id)) AS x"),
        r"different lengths \([23] and [23]\)",
    ),
    "other map keys in two partitions": (
        lambda s: s.range(0, 8, 1, 2).selectExpr("id", "map('k' || (id div 4), 1.0f) AS x"),
        "a map whose keys differ",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_a_usage_error_in_one_sentence(orca_spark, engine, name):
    make, message = BAD[name]
    frame = make(orca_spark)
    with pytest.raises(UsageError, match=message) as caught:
        engine.run(ids, as_feed(frame, ["id", "x"]), 2)
    assert "Column 'x'" in str(caught.value)
    assert "\n" not in str(caught.value)
    frame.unpersist()


# Leftover files ------------------------------------------------------------------------------


def spools(directory):
    return [name for name in os.listdir(directory) if name.startswith("bigdl-spool-")]


@pytest.fixture
def local_dir(engine):
    """Return the workers' directory, after a check that it has no spools."""
    (directory,) = engine.run(lambda worker: worker.local_dir, None, 1)
    assert spools(directory) == []
    return directory


def test_spools_exist_during_a_job_and_not_after_it(orca_spark, engine, local_dir):
    def look(worker):
        return spools(worker.local_dir)

    during = engine.run(look, group(orca_spark.range(4), orca_spark.range(4)), 2)
    assert max(map(len, during)) == 4
    assert spools(local_dir) == []


def test_a_failing_program_leaves_no_spool(orca_spark, engine, local_dir):
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        engine.run(lambda worker: 1 // 0, as_feed(orca_spark.range(4), "id"), 2)
    assert spools(local_dir) == []


def test_bad_rows_leave_no_spool(orca_spark, engine, local_dir):
    frame = orca_spark.range(0, 100, 1, 4).selectExpr("nullif(id, 99) AS id")
    with refused("data-null"):
        run_ids(engine, frame)
    assert spools(local_dir) == []


def test_the_next_job_removes_what_dead_ones_left(orca_spark, engine, local_dir):
    stale = os.path.join(local_dir, "bigdl-spool-0-data-0-0123456789abcdef")
    later = os.path.join(local_dir, "bigdl-spool-99999999-data-0-0123456789abcdef")
    os.mkdir(stale)
    os.mkdir(later)
    run_ids(engine, orca_spark.range(4))
    assert not os.path.exists(stale)
    assert os.path.exists(later)
    os.rmdir(later)


# Plans that give other rows each time -----------------------------------------------------------


def persistent(spark):
    return spark.sparkContext._jsc.getPersistentRDDs().size()


@pytest.mark.parametrize(
    "make", [lambda f: f.select(F.rand().alias("id")), lambda f: f.limit(7), lambda f: f.offset(3)]
)
def test_a_nondeterministic_frame_is_kept_for_the_time_of_the_job_only(orca_spark, engine, make):
    before = persistent(orca_spark)
    frame = make(orca_spark.range(50))
    with engine.open(ids, as_feed(frame, "id"), 2) as job:
        job.attempt()
        assert persistent(orca_spark) == before + 1
    assert persistent(orca_spark) == before


def test_a_nondeterministic_frame_is_the_same_when_it_is_read_again(orca_spark):
    draw = F.udf(lambda _: random.getrandbits(40), "long").asNondeterministic()
    frame = orca_spark.range(0, 20, 1, 2).select(draw("id").alias("id"))
    ingest = as_feed(frame, "id").prepare(SparkCluster.from_active(), 2)
    cells = [sorted(bytes(row.data) for row in ingest.frame.collect()) for _ in range(2)]
    ingest.close()
    ingest.close()
    assert cells[0] == cells[1]


def test_a_deterministic_or_cached_frame_is_not_kept(orca_spark, engine):
    before = persistent(orca_spark)
    cached = orca_spark.range(50).select(F.rand().alias("id")).cache()
    for frame in (orca_spark.range(50), cached):
        feed = as_feed(frame, "id")
        with engine.open(ids, feed, 2) as job:
            job.attempt()
            assert persistent(orca_spark) == before + (frame is cached)
    cached.unpersist()


def test_no_plan_is_inspected_when_that_is_switched_off(orca_spark, engine, monkeypatch):
    monkeypatch.setenv("BIGDL_NO_PLAN_INSPECTION", "1")
    before = persistent(orca_spark)
    frame = orca_spark.range(0, 50, 1, 2).select("id", F.rand().alias("x"))
    with engine.open(ids, as_feed(frame, ["id", "x"]), 2) as job:
        assert job.attempt() == interleaved(cut(50, 2))
        assert persistent(orca_spark) == before
    cached = orca_spark.range(0, 100, 1, 4).coalesce(2).cache()
    assert sorted(itertools.chain(*run_ids(engine, cached))) == list(range(100))
    cached.unpersist()


# Memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("shuffled", [False, True])
def test_writing_to_a_batch_changes_no_later_epoch(orca_spark, engine, rows, shuffled):
    frame = orca_spark.range(0, 5, 1, 1).selectExpr("id", "id AS twin", "array(id, id) AS pair")

    def two_epochs(worker):
        from bigdl.training.batches import TensorShard

        data = TensorShard(worker.shard, ["id", "twin", "pair"], [])
        order = np.array([3, 1, 4, 0, 2], np.int32) if shuffled else None
        epochs = []
        for _ in range(2):
            batches = [data.batch(i, min(i + rows, 5), order) for i in range(0, 5, rows)]
            epochs.append([[column.tolist() for column in batch] for batch in batches])
            for column in itertools.chain(*batches):
                column.fill_(-1)
        return epochs

    ((first, second),) = engine.run(two_epochs, as_feed(frame, ["id", "twin", "pair"]), 1)
    assert first == second
    assert -1 not in np.concatenate([batch[0] for batch in first])


@pytest.mark.slow
def test_an_epoch_over_a_shard_takes_the_memory_of_its_batches(orca_spark, engine):
    wide = F.array_repeat(F.col("id").cast("float"), 1000).alias("x")
    frame = orca_spark.range(0, 20_000, 1, 4).select(wide)  # 80 MB

    def epoch(worker):
        import psutil

        x = worker.shard.column("x")
        before = psutil.Process().memory_info()
        order = np.random.default_rng(0).permutation(len(x))
        total = 0.0
        for start in range(0, len(x), 500):
            batch = x[order[start : start + 500]]
            total += float(batch[:, 0].sum(dtype=np.float64))
            batch[:] = 0
        after = psutil.Process().memory_info()
        anonymous = after.rss - before.rss - (after.shared - before.shared)
        return [total, int(x[order[0], 0] == order[0]), anonymous]

    ((total, unchanged, growth),) = engine.run(epoch, as_feed(frame, "x"), 1)
    assert total == sum(range(20_000))
    assert unchanged
    assert growth < 20 << 20
