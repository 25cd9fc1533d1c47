"""``Engine.run`` on real Ray actors."""

import os
import signal
import time

import numpy as np
import psutil
import pytest
import rays

from bigdl.common.errors import UsageError, WorkerError, WorkerLost
from bigdl.orca.data.feeds import as_feed
from bigdl.orca.engine.ray import RayEngine

pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")


@pytest.fixture
def engine():
    rays.active_ray()
    return RayEngine(workers_per_node=2)


def pid_of(worker):
    return os.getpid()


def test_results_come_in_rank_order(engine):
    def program(worker):
        time.sleep(0.2 * (1 - worker.rank))
        return [worker.rank, worker.world_size]

    assert engine.run(program) == [[0, 2], [1, 2]]


def test_results_are_bytes_or_json(engine):
    values = [b"", b"\x00\xff", None, "ü", [1, {"a": [True]}]]
    with engine.open(lambda worker: values[worker.options["i"]], num_workers=1) as job:
        assert [job.attempt({"i": i}) for i in range(len(values))] == [[v] for v in values]
    with pytest.raises(UsageError, match="must return bytes or JSON-able values, got object"):
        engine.run(lambda worker: object(), num_workers=1)


def test_processes_live_from_one_program_to_the_next(engine):
    first = set(engine.run(pid_of))
    assert len(first) == 2
    assert set(engine.run(pid_of)) == first
    assert set(engine.run(pid_of, num_workers=1)) < first


def test_waiting_workers_hold_no_cpu(engine):
    import ray

    engine.run(pid_of)
    give_up = time.monotonic() + 10
    while ray.available_resources().get("CPU") != 2 and time.monotonic() < give_up:
        time.sleep(0.05)
    assert ray.available_resources()["CPU"] == 2


def test_every_row_reaches_one_worker_in_order(engine):
    feed = as_feed((np.arange(7, dtype=np.float32), np.arange(7)))

    def program(worker):
        return [array.tolist() for array in worker.shard.arrays]

    assert engine.run(program, feed) == [
        [[0, 2, 4, 6], [0, 2, 4, 6]],
        [[1, 3, 5], [1, 3, 5]],
    ]


def test_what_a_worker_prints_is_shown_once(engine, capfd):
    engine.run(lambda worker: print("hello from", worker.rank))
    time.sleep(0.5)
    shown = capfd.readouterr().out
    assert [shown.count(f"hello from {rank}") for rank in (0, 1)] == [1, 1]
    assert "[worker 1] hello from 1" in shown


def test_the_error_of_a_worker_is_that_of_the_program(engine):
    def program(worker):
        if worker.rank == 1:
            raise KeyError("this one")
        worker.line.meet("never", worker.world_size)

    with pytest.raises(WorkerError, match="KeyError in worker 1:\nTraceback") as error:
        engine.run(program)
    assert (error.value.rank, error.value.kind) == (1, "KeyError")


def test_a_usage_error_stays_one(engine):
    def program(worker):
        raise UsageError("there is no such thing; take another")

    with pytest.raises(UsageError, match=r"^there is no such thing; take another$"):
        engine.run(program)


@pytest.mark.fault
def test_a_killed_worker_is_named_and_replaced(engine):
    def program(worker):
        if worker.rank == 1 and not worker.options:
            os.kill(os.getpid(), signal.SIGKILL)
        worker.line.meet("end", worker.world_size)
        return os.getpid()

    with engine.open(program) as job:
        with pytest.raises(
            WorkerLost, match=r"^Worker 1 \(process \d+ on 127.0.0.1\) was lost: its"
        ):
            job.attempt()
        assert len(set(job.attempt({"again": True}))) == 2


@pytest.mark.fault
@pytest.mark.slow
def test_a_retry_reads_the_spools_of_the_first_attempt(engine):
    feed = as_feed((np.arange(9, dtype=np.float32), np.arange(9)))

    def program(worker):
        if worker.rank == 1 and not worker.options:
            os.kill(os.getpid(), signal.SIGKILL)
        worker.line.meet("end", worker.world_size)
        return [worker.rank, worker.shard.spool.path, worker.shard.fingerprint]

    with engine.open(program, feed, keep_spools=True) as job:
        with pytest.raises(WorkerLost):
            job.attempt()
        first, second = job.attempt({"again": True}), job.attempt({"again": True})
        assert sorted(first) == sorted(second)
        assert all(os.path.isdir(path) for _, path, _ in first)
    assert not any(os.path.isdir(path) for _, path, _ in first)


@pytest.mark.fault
@pytest.mark.slow
def test_an_error_ends_a_peer_that_does_not_look(engine):
    """Native code that holds the interpreter's lock."""

    def program(worker):
        import re

        worker.line.meet("all", worker.world_size)
        if worker.rank == 1:
            raise KeyError("this one")
        worker.line.set("pid", str(os.getpid()))
        re.match(r"(a+)+$", "a" * 64 + "b")

    with engine.open(program) as job:
        with pytest.raises(WorkerError, match="KeyError in worker 1"):
            job.attempt()
        pid = int(job._lines[-1].get("pid"))
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RayEngine().run(pid_of, num_workers=3), r"^3 workers were asked for but the clus"),
        (lambda: RayEngine().run(pid_of, num_workers=0), "num_workers should be an integer of at"),
        (lambda: RayEngine().run(3), "fn should be a function of a worker, got int"),
        (lambda: RayEngine(workers_per_node=0), "workers_per_node should be an integer of at leas"),
        (lambda: RayEngine(timeout=0), "timeout should be a positive number of seconds, got 0"),
        (lambda: RayEngine(channel_port=-1), "channel_port should be an integer from 0 to 65535"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_run_is_refused(engine, call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_cpus_that_others_use_are_waited_for_but_not_for_ever(engine):
    import ray

    @ray.remote(num_cpus=1)
    class Busy:
        def ready(self):
            return True

    busy = Busy.remote()
    ray.get(busy.ready.remote())
    patient = RayEngine(workers_per_node=2, patience=0.5)
    with pytest.raises(UsageError, match="2 workers of 1 CPUs were asked for, but others use too"):
        patient.run(pid_of)
    ray.kill(busy)
    assert len(engine.run(pid_of)) == 2
