"""``Engine.run`` and what it promises, on real Spark."""

import gc
import json
import os
import pickle
import socket
import sys
import threading
import time
from pathlib import Path

import faults
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from bigdl.common.errors import BigDLError, UsageError, WorkerError, WorkerLost
from bigdl.orca.cluster.plan import quiet
from bigdl.orca.cluster.spark_calls import failed_function, job_error
from bigdl.orca.data.feeds import as_feed
from bigdl.orca.data.feeds.spark_dataframe import SparkDataFrameFeed
from bigdl.orca.engine import SparkEngine
from bigdl.orca.engines import spark
from bigdl.runtime.channel import Channel
from bigdl.runtime.task import match, ranks_by_host


@pytest.fixture
def engine(orca_spark):
    return SparkEngine()


# Results ---------------------------------------------------------------------------------------


def test_processes_are_used_again_by_attempts_on_known_spools(engine):
    feed = as_feed((np.zeros(4, np.float32), np.zeros(4, np.float32)))
    with engine.open(lambda worker: os.getpid(), feed, 2, keep_spools=True) as job:
        _, pids, _ = (job.attempt() for _ in range(3))
        assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_default_is_one_worker_per_node(orca_spark):
    assert SparkEngine().run(lambda worker: worker.world_size) == [1]
    assert SparkEngine(workers_per_node=2).run(lambda worker: worker.world_size) == [2, 2]


def test_large_results_come_back(engine):
    size = 80 << 20

    def program(worker):
        block = bytes([worker.rank + 1]) * (1 << 20)
        return block * 80

    zero, one = engine.run(program, num_workers=2)
    assert (len(zero), len(one)) == (size, size)
    assert zero == b"\x01" * size
    assert one == b"\x02" * size


def test_too_large_a_result_is_one_sentence(engine):
    def program(worker):
        from bigdl.runtime import worker as uplink

        uplink.RESULT_LIMIT = 1 << 20
        try:
            return uplink.encode(b"0" * (2 << 20))
        finally:
            uplink.RESULT_LIMIT = 2 << 30

    with refused("data-size", "2", "model_dir"):
        engine.run(program, num_workers=1)


# Refused before anything runs ------------------------------------------------------------------


@pytest.fixture
def no_jobs(orca_spark):
    """No Spark job is started in the test."""
    tracker = orca_spark.sparkContext.statusTracker()
    before = tracker.getJobIdsForGroup(None)
    threads = threading.active_count()
    yield
    assert tracker.getJobIdsForGroup(None) == before
    assert threading.active_count() == threads


@pytest.mark.parametrize("num_workers", [0, -1, 1.5, "2", True])
def test_bad_number_of_workers(engine, no_jobs, num_workers):
    expected = r"^num_workers should be a positive integer, got "
    with pytest.raises(UsageError, match=expected):
        engine.run(lambda worker: 0, num_workers=num_workers)


def test_more_workers_than_slots(engine, no_jobs):
    started = time.monotonic()
    expected = r"^3 workers were asked for but the cluster can run 2 tasks at once; ask for fewer"
    with pytest.raises(UsageError, match=expected):
        engine.run(lambda worker: 0, num_workers=3)
    assert time.monotonic() - started < 5


def test_a_program_that_cannot_be_shipped(engine, no_jobs):
    lock = threading.Lock()
    with refused("model-copy"):
        engine.run(lambda worker: lock, num_workers=1)
    sc = engine.cluster.sc
    with refused("model-copy"):
        engine.run(lambda worker: sc.parallelize([1]), num_workers=1)
    with refused("argument-type"):
        engine.run("program", num_workers=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers_per_node": 0}, ("argument-value", "workers_per_node", "0")),
        ({"channel_port": -1}, ("argument-value", "channel_port", "0", "65535")),
        ({"channel_port": 70000}, ("argument-value", "channel_port", "70000")),
        ({"timeout": 0}, ("argument-value", "0")),
    ],
)
def test_bad_engine_arguments(orca_spark, arguments, message):
    with refused(*message):
        SparkEngine(**arguments)


def test_no_context(monkeypatch):
    from bigdl.orca.cluster import spark

    monkeypatch.setattr(spark, "active_context", lambda: None)
    with pytest.raises(UsageError, match=r"^No active SparkContext"):
        SparkEngine()


def persisted(spark) -> int:
    return spark.sparkContext._jsc.sc().getPersistentRDDs().size()


def test_a_taken_channel_port(orca_spark, no_jobs):
    before = persisted(orca_spark)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        frame = orca_spark.range(4).selectExpr("rand() as x")  # persisted for the time of the job
        feed = SparkDataFrameFeed(frame, ["x"])
        expected = rf"^The driver cannot listen on 127.0.0.1:{port} \(Address already in use\)"
        with pytest.raises(UsageError, match=expected):
            SparkEngine(channel_port=port).run(lambda worker: 0, feed, num_workers=1)
    assert persisted(orca_spark) == before


# What a worker has -----------------------------------------------------------------------------


def test_shards_of_a_frame(orca_spark, engine):
    frame = orca_spark.range(0, 101, 1, 3).selectExpr("double(id) as x", "array(id, id + 1) as a")
    feed = SparkDataFrameFeed(frame, ["x", "a"], config={"dtype": "float64"})

    def program(worker):
        x, a = worker.shard.column("x"), worker.shard.column("a")
        assert (a[:, 0] == x).all()
        assert Path(worker.shard.spool.path).parent == Path(worker.local_dir)
        return x.tobytes()

    parts = [np.frombuffer(part) for part in engine.run(program, feed, num_workers=2)]
    assert sorted(np.concatenate(parts)) == list(range(101))
    assert abs(len(parts[0]) - len(parts[1])) <= 3
    again = [np.frombuffer(part) for part in engine.run(program, feed, num_workers=2)]
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


def test_no_spool_and_no_persisted_frame_stay(orca_spark, engine):
    before = persisted(orca_spark)
    feed = SparkDataFrameFeed(orca_spark.range(40).selectExpr("rand() as x"), ["x"])

    def program(worker):
        assert os.path.exists(worker.shard.spool.path)
        return worker.local_dir

    directories = set(engine.run(program, feed, num_workers=2))
    assert not [p for d in directories for p in Path(d).glob("bigdl-spool-*")]
    assert persisted(orca_spark) == before


def test_spools_are_used_by_the_next_attempt_of_a_job(orca_spark, engine, tmp_path):
    def note(batches):
        with open(tmp_path / "computed", "a") as file:
            file.write("x")
        yield from batches

    frame = orca_spark.range(0, 20, 1, 2)
    feed = SparkDataFrameFeed(frame.mapInArrow(note, frame.schema), ["id"])

    def program(worker):
        if worker.options.get("die") and worker.rank == 1:
            os.kill(os.getpid(), 9)
        return sorted(worker.shard.column("id").tolist())

    with engine.open(program, feed, num_workers=2) as job:
        with pytest.raises(WorkerLost):
            job.attempt({"die": True})
        zero, one = job.attempt()
    assert sorted(zero + one) == list(range(20))
    assert (tmp_path / "computed").read_text() == "xx"


@pytest.mark.slow
def test_worker_lost_while_it_reads_its_input(orca_spark, engine, tmp_path):
    """The stage that reads the input can run again in the next attempt."""

    class Deadly(SparkDataFrameFeed):
        def prepare(self, cluster, num_workers, **options):
            ingest = super().prepare(cluster, num_workers, **options)
            reader, marker = ingest.reader, tmp_path / "killed"

            def read(batches, open_spool):
                if not marker.exists():
                    marker.touch()
                    os.kill(os.getpid(), 9)
                return reader(batches, open_spool)

            ingest.reader = read
            return ingest

    feed = Deadly(orca_spark.range(0, 20, 1, 4), ["id"])
    with engine.open(lambda w: w.shard.column("id").tolist(), feed, num_workers=2) as job:
        with pytest.raises(WorkerLost):
            job.attempt()
        zero, one = job.attempt()
    assert sorted(zero + one) == list(range(20))


@pytest.mark.slow
def test_an_input_without_rows(orca_spark, engine):
    frames = [
        orca_spark.range(5).where("id > 9"),
        orca_spark.range(5).limit(0),
        orca_spark.createDataFrame([], "id long"),
    ]
    for frame in frames:
        feed = SparkDataFrameFeed(frame, ["id"])
        assert engine.run(lambda worker: worker.shard.rows, feed, num_workers=2) == [0, 0]


def test_a_failing_input_is_told_from_a_failing_program(orca_spark, engine):
    def broken(batches):
        for _ in batches:
            raise LookupError("bad source")
        yield None

    frame = orca_spark.range(4).mapInArrow(broken, "id long")
    with pytest.raises(WorkerError, match=r"^The input could not be computed:\n") as error:
        engine.run(lambda worker: 0, SparkDataFrameFeed(frame, ["id"]), num_workers=2)
    text = str(error.value)
    assert "bad source" in text
    assert "\tat " not in text
    assert "org.apache.spark" not in text


@pytest.mark.slow
def test_a_long_function_of_the_input_that_fails_is_not_run_four_times(
    orca_spark, engine, tmp_path
):
    def broken(batches):
        for _ in batches:
            (tmp_path / f"{time.monotonic_ns()}").touch()
            time.sleep(2)
            raise LookupError("bad source")
        yield None

    frame = orca_spark.range(1, numPartitions=1).mapInArrow(broken, "id long")
    with pytest.raises(WorkerError, match=r"^The input could not be computed:\n") as error:
        engine.run(lambda worker: 0, SparkDataFrameFeed(frame, ["id"]), num_workers=1)
    _said, _traceback, *frames = str(error.value).splitlines()
    assert f'File "{__file__}"' in frames[0]
    assert frames[-1] == "LookupError: bad source"
    assert len(frames) < 11
    assert len(list(tmp_path.iterdir())) < 4


# Output ----------------------------------------------------------------------------------------


def test_what_is_printed_before_an_error_arrives(engine, capsys):
    def program(worker):
        print("before")
        raise ValueError

    with pytest.raises(WorkerError):
        engine.run(program, num_workers=1)
    assert "[worker 0] before" in capsys.readouterr().out


def test_log_to_driver_false(orca_spark, capfd):
    def program(worker):
        print("not to be seen")

    SparkEngine(log_to_driver=False).run(program, num_workers=2)
    time.sleep(0.5)
    out, err = capfd.readouterr()
    assert "not to be seen" not in out + err


# Network ---------------------------------------------------------------------------------------


def test_everything_listens_on_loopback_only(engine):
    before = faults.listening()
    inside = []

    def program(worker):
        from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

        sync = TorchDistributedSync(worker)
        sync.start()
        worker.send("ready", {}, b"")
        sync.all_gather([1.0])
        time.sleep(0.5)
        connections = psutil.Process().net_connections("inet")
        ends = [c.laddr.ip for c in connections] + [c.raddr.ip for c in connections if c.raddr]
        sync.all_gather([1.0])
        return [worker.host, sorted({end.removeprefix("::ffff:") for end in ends})]

    def on_event(kind, value):
        if kind != "phase":
            inside.append(faults.listening() - before)

    with engine.open(program, num_workers=2) as job:
        found = job.attempt(on_event=on_event)
    assert found == [["127.0.0.1", ["127.0.0.1"]]] * 2
    assert [{host for host, _ in ports} for ports in inside] == [{"127.0.0.1"}] * 2
    assert faults.listening() == before


def test_a_fixed_channel_port(orca_spark):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    seen = []

    def on_event(kind, value):
        if kind != "phase":
            seen.append(("127.0.0.1", port) in faults.listening())

    for _ in range(2):
        engine = SparkEngine(channel_port=port)
        with engine.open(lambda w: w.send("x", {}, b""), num_workers=1) as job:
            job.attempt(on_event=on_event)
    assert seen == [True, True]
    assert ("127.0.0.1", port) not in faults.listening()


@pytest.mark.slow
def test_no_port_and_no_thread_stay_on_the_driver(engine):
    def fail(worker):
        raise ValueError

    engine.run(lambda worker: 0, num_workers=2)
    with pytest.raises(WorkerError):
        engine.run(fail, num_workers=2)
    gc.collect()
    ports, threads = faults.listening(), threading.active_count()
    kept = []
    for _ in range(5):
        engine.run(lambda worker: 0, num_workers=2)
        with pytest.raises(WorkerError) as error:
            engine.run(fail, num_workers=2)
        kept.append(error)  # its traceback holds the frames of the job
    assert faults.listening() == ports
    assert threading.active_count() == threads


def test_a_driver_that_workers_cannot_reach_is_named(engine, monkeypatch):
    class Elsewhere(Channel):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            self.address = self.address.__class__("127.0.0.1", port, self.address.secret)

    monkeypatch.setattr("bigdl.runtime.jobs.Channel", Elsewhere)
    expected = r"^The worker on \S+ cannot connect to the driver at 127.0.0.1:\d+ .*channel_port="
    with pytest.raises(UsageError, match=expected) as error:
        engine.run(lambda worker: 0, num_workers=2)
    assert "\n" not in str(error.value)


# Python workers are used again -----------------------------------------------------------------


def process_state(worker_or_batches):
    import torch
    import torch.distributed as dist
    from threadpoolctl import threadpool_info

    return {
        "pid": os.getpid(),
        "torch": torch.get_num_threads(),
        "pools": sorted(p["num_threads"] for p in threadpool_info()),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "group": dist.is_initialized(),
        "stdout": type(sys.stdout).__name__,
        "stderr": type(sys.stderr).__name__,
        "threads": sorted(t.name for t in threading.enumerate()),
        "cwd": os.getcwd(),
    }


@pytest.mark.slow
def test_a_reused_python_worker_is_as_before(orca_spark):
    def in_udf(batches):
        import pyarrow as pa

        state = json.dumps(process_state(batches))
        for _ in batches:
            pass
        yield pa.RecordBatch.from_arrays([pa.array([state])], ["state"])

    def states():
        rows = (
            orca_spark.range(0, 2, 1, 2).mapInArrow(in_udf, "state string", barrier=True).collect()
        )
        return {state["pid"]: state for state in (json.loads(row[0]) for row in rows)}

    def program(worker):
        import torch
        import torch.distributed as dist

        group = worker.channel.group_store()
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", store=group, rank=worker.rank, world_size=2)
        os.environ.pop("GLOO_SOCKET_IFNAME")
        inside = process_state(worker)
        dist.all_reduce(torch.ones(2))
        if worker.options.get("fail"):
            raise ValueError
        return inside

    before = states()
    with SparkEngine().open(program, num_workers=2, threads=3) as job:
        inside = job.attempt()
        after = states()
        with pytest.raises(WorkerError):
            job.attempt({"fail": True})
        after_error = states()
    for state in inside:
        assert state["torch"] == 3
        assert set(state["pools"]) == {3}
        assert state["environment"]["OMP_NUM_THREADS"] == "3"
        assert state["group"]
    same = set(before) & set(after) & {state["pid"] for state in inside}
    assert same  # else nothing is tested
    for pid in same:
        assert after[pid] == before[pid]
    for pid in set(before) & set(after_error):
        assert after_error[pid] == before[pid]
    assert set(before) & set(after_error)


# Around the engine -----------------------------------------------------------------------------


def test_a_job_that_somebody_else_cancels_is_no_lost_worker(engine):
    def program(worker):
        worker.send("running", {}, b"")
        time.sleep(60)

    def on_event(kind, value):
        threading.Thread(target=engine.cluster.sc.cancelAllJobs).start()

    expected = r"^The Spark job was cancelled before it finished$"
    job = engine.open(program, num_workers=1)
    with job, pytest.raises(BigDLError, match=expected) as error:
        job.attempt(on_event=on_event)
    assert not isinstance(error.value, WorkerLost | UsageError)


def test_a_stage_that_spark_runs_again_is_void(orca_spark, engine, tmp_path):
    """A shuffle after the stage, which the engine never makes, lets Spark run it again."""

    def program(worker):
        with open(tmp_path / f"ran-{worker.rank}", "a") as file:
            file.write("x")
        if worker.rank == 1:
            os.kill(os.getpid(), 9)
        return 0

    with engine.open(program, num_workers=2) as job, quiet(engine.cluster.sc):
        job.channel.attempt(1).set_json("options", {})
        engine.cluster.sc.setLocalProperty("bigdl.attempt", "1")
        stage = orca_spark.range(0, 2, 1, 2).mapInArrow(
            spark.stage_task(job.spec, is_barrier=True), spark.ROWS, barrier=True
        )
        rows = stage.repartition(1).collect()
        engine.cluster.sc.setLocalProperty("bigdl.attempt", None)
    kinds = {row["rank"]: row["kind"] for row in rows}
    assert kinds[1] == "void"
    # "ok" where Spark keeps what the first run of it left, "copy" where that had ended
    assert kinds[0] in ("void", "ok", "copy")
    assert (tmp_path / "ran-0").read_text() == (tmp_path / "ran-1").read_text() == "x"


def test_two_overlapping_quiet_times_restore_the_levels(orca_spark):
    sc = orca_spark.sparkContext
    log4j = sc._jvm.org.apache.logging.log4j

    def level():
        return str(log4j.LogManager.getLogger("org.apache.spark.executor.Executor").getLevel())

    before = level()
    first, second = quiet(sc), quiet(sc)
    first.__enter__()
    second.__enter__()
    assert level() == "OFF"
    first.__exit__(None, None, None)
    assert level() == "OFF"
    second.__exit__(None, None, None)
    assert level() == before
    sc.setLogLevel("ERROR")  # still follows the root logger
    assert level() == "ERROR"
    sc.setLogLevel("WARN")


# Which task takes which shard ------------------------------------------------------------------


@st.composite
def views(draw):
    """What each task sees of the shards, all of which lie on one machine or another."""
    n = draw(st.integers(1, 8))
    return [sorted(draw(st.sets(st.integers(0, n - 1)))) for _ in range(n)]


@given(views())
@settings(max_examples=300)
def test_match_is_complete_exactly_if_it_can_be(views):
    from itertools import combinations

    found = match(views, range(len(views)))
    tasks = range(len(views))
    # Hall: every set of tasks sees at least as many shards
    possible = all(
        len(set().union(*(views[t] for t in group))) >= size
        for size in range(1, len(views) + 1)
        for group in combinations(tasks, size)
    )
    assert bool(found) == possible
    if found:
        assert sorted(found) == list(tasks)
        assert sorted(found.values()) == list(tasks)
        assert all(found[task] in views[task] for task in tasks)


@given(st.integers(1, 40), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_match_moves_nothing_without_need(n, random):
    views = [sorted({task, *random.choices(range(n), k=3)}) for task in range(n)]
    assert match(views, range(n)) == {task: task for task in range(n)}


def test_match_of_many_tasks():
    n = 2000
    everything = list(range(n))
    assert match([everything] * n, everything) == {task: task for task in range(n)}
    assert match([everything] * n, everything[::-1]) == dict(enumerate(everything[::-1]))
    rotated = [[(task + 1) % n] for task in range(n)]
    assert match(rotated, everything) == {task: (task + 1) % n for task in range(n)}
    chain = [[task, task + 1] for task in range(n - 1)] + [[0]]
    assert len(match(chain, everything)) == n


@pytest.mark.parametrize(
    ("hosts", "ranks"),
    [
        ("abab", [0, 2, 1, 3]),
        ("abcacb", [0, 2, 4, 1, 5, 3]),
        ("aaa", [0, 1, 2]),
        ("cab", [0, 1, 2]),
    ],
)
def test_ranks_of_one_host_lie_side_by_side(hosts, ranks):
    assert ranks_by_host([*hosts]) == ranks
    assert ranks[0] == 0  # which meets the others where the driver cannot be reached


# From Spark's words to ours --------------------------------------------------------------------


TRACEBACK = 'Traceback (most recent call last):\n  File "x", line 1\nKeyError: 1'


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("Python worker exited unexpectedly (crashed)", WorkerLost, "its Python process ended"),
        (
            "ExecutorLostFailure (executor 1 exited) Reason: code 137",
            WorkerLost,
            "its executor was",
        ),
        (
            "ExecutorLostFailure (executor 4 exited) Reason: Container killed by YARN for "
            "exceeding physical memory limits. 1.9 GB of 1.5 GB physical memory used.",
            WorkerLost,
            "its container was killed, probably for exceeding its memory",
        ),
        ("FetchFailed(null, shuffleId=0)", WorkerLost, "its input was lost with an executor"),
        ("Job 3 cancelled as part of cancellation of all jobs", BigDLError, "was cancelled"),
        (
            f"PythonException: {TRACEBACK}\n\n\tat org.a.B.c(D.scala:1)\n",
            WorkerError,
            f"The input could not be computed:\n{TRACEBACK}",
        ),
        (
            "Job aborted: [CANNOT_PARSE] no\n\tat org.a.B",
            WorkerError,
            "Job aborted: [CANNOT_PARSE] no",
        ),
    ],
)
def test_why_a_spark_job_failed(text, kind, message):
    error = job_error(RuntimeError(text), [])
    assert isinstance(error, kind)
    assert message in str(error)
    assert "\tat " not in str(error)


def test_the_error_of_a_function_is_found_in_sparks_words():
    text = f"[PYTHON_EXCEPTION] thrown: {TRACEBACK}\n SQLSTATE: 38000\n\tat org.a.B.c(D.scala:1)\n"
    error = failed_function(text)
    assert isinstance(error, WorkerError)
    assert (error.kind, error.place) == ("KeyError", "a task of Spark")
    assert str(error) == f"KeyError in a task of Spark:\n{TRACEBACK}"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    usage = failed_function(text.replace("KeyError: 1", "bigdl.common.errors.UsageError: pad it"))
    assert isinstance(usage, UsageError)
    assert str(usage) == "pad it"
    assert failed_function("Python worker exited unexpectedly (crashed)") is None


def test_who_was_lost_is_named():
    gone = [{"rank": 1, "pid": 7, "host": "a"}]
    error = job_error(RuntimeError("Python worker exited unexpectedly"), gone)
    assert str(error).startswith("Worker 1 (process 7 on a) was lost: its Python process ended")
    gone = [{"rank": rank, "pid": 7, "host": "a"} for rank in range(5)]
    error = job_error(RuntimeError("Python worker exited unexpectedly"), gone)
    assert "2 (process 7 on a) and 2 more were lost: their Python processes" in str(error)
