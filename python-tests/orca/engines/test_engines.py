"""What ``Engine.run`` promises on every engine: results, messages, output, errors, lost workers."""

import contextlib
import os
import signal
import socket
import time

import faults
import psutil
import pytest
from engine_cases import crossed

from bigdl.common.errors import UsageError, WorkerError, WorkerLost
from bigdl.testing.engines import EngineContract

WAIT_S = 60  # seconds that something may take which takes a moment on an idle machine


@pytest.fixture
def engine(engine_way):
    return engine_way.engine()


def rank_of(worker):
    return worker.rank


class TestEngines(EngineContract):
    @pytest.fixture(autouse=True)
    def _way(self, engine_way):
        self.way = engine_way

    def engine(self):
        return self.way.engine()


for _name, _cases in {
    "test_results_are_bytes_or_json": ["local", "spark"],
    "test_every_row_reaches_one_worker_in_order": ["local", "ray"],
    "test_the_threads_of_a_worker_are_its_share_of_the_cores": ["local", "ray"],
    "test_programs_of_several_threads_of_the_driver": ["local", "ray"],
    "test_a_job_runs_again_with_other_options": ["ray"],
    "test_usage_error_of_a_worker_stays_one": ["ray"],
    "test_the_cause_is_reported_and_not_what_it_did_to_others": ["local"],
    "test_a_killed_worker_is_named_and_the_next_attempt_reads_its_spool": ["local", "ray"],
}.items():
    pytest.mark.slow_cases(*_cases)(getattr(TestEngines, _name))
pytest.mark.fault(TestEngines.test_the_cause_is_reported_and_not_what_it_did_to_others)
pytest.mark.fault(TestEngines.test_a_killed_worker_is_named_and_the_next_attempt_reads_its_spool)


# -- results ------------------------------------------------------------------------------------


# -- between driver and workers -----------------------------------------------------------------


@pytest.mark.slow_cases("ray")
def test_an_error_in_on_event_ends_the_job(engine, tmp_path):
    def program(worker):
        (tmp_path / "pid").write_text(str(os.getpid()))
        worker.send("topic", {}, b"")
        while True:
            pass

    def on_event(kind, value):
        if kind == "message":  # phases come before the program has started
            raise KeyError("mine")

    with engine.open(program, num_workers=1) as job, pytest.raises(KeyError, match="mine"):
        job.attempt(on_event=on_event)
    assert_ends(int((tmp_path / "pid").read_text()))


def assert_ends(pid: int) -> None:
    give_up = time.monotonic() + WAIT_S
    while faults.is_running(pid) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not faults.is_running(pid)


# -- refused ------------------------------------------------------------------------------------


@pytest.mark.slow_cases(
    "local----^3 workers were asked for but the cluster can run 2 tasks at once; ask"
)
@pytest.mark.parametrize(
    ("options", "fn", "workers", "message"),
    [
        ({}, rank_of, 3, r"^3 workers were asked for but the cluster can run 2 tasks at once; ask"),
        ({"workers_per_node": 0}, rank_of, 1, "^workers_per_node should be a positive integer"),
        ({"timeout": 0}, rank_of, 1, "^timeout should be a positive number, got 0"),
        ({"channel_port": -1}, rank_of, 1, "^channel_port should be an integer from 0 to 65535"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_run_is_refused(engine_way, options, fn, workers, message):
    if "cluster can run" in message and not engine_way.has_slots:
        assert engine_way.engine(**options).run(fn, num_workers=workers) == list(range(workers))
        return
    with pytest.raises(UsageError, match=message):
        engine_way.engine(**options).run(fn, num_workers=workers)


# -- errors and lost workers --------------------------------------------------------------------


def blocked_in_python(worker):
    while True:
        pass


def blocked_in_a_collective(worker):
    from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

    sync = TorchDistributedSync(worker)
    sync.start()
    while True:
        sync.all_gather([1.0])


def blocked_in_native_code(worker):
    """A regular expression that holds the interpreter's lock, so that no other thread runs."""
    import re

    re.match(r"(a+)+$", "a" * 64 + "b")


BLOCKED = (blocked_in_python, blocked_in_a_collective, blocked_in_native_code)


def join_group_if(block, worker):
    if block is blocked_in_a_collective:
        from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

        TorchDistributedSync(worker).start()


@pytest.mark.slow_cases(
    *("local-blocked_in_a_collective", "local-blocked_in_native_code", "local-blocked_in_python"),
    *("spark-blocked_in_native_code", "spark-blocked_in_python"),
)
@pytest.mark.fault
@pytest.mark.parametrize(
    ("engine_way", "block"),
    crossed(*BLOCKED, fast_on_ray=["blocked_in_a_collective"]),
    indirect=["engine_way"],
)
def test_dead_worker_does_not_hang_its_peers(engine, tmp_path, block):
    def program(worker):
        (tmp_path / f"pid-{worker.rank}").write_text(str(os.getpid()))
        worker.channel.barrier("all", worker.world_size)
        if worker.rank == 0:
            block(worker)
        join_group_if(block, worker)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerLost, match=r"^Workers? [01]"):
        engine.run(program)
    assert_leaves(int((tmp_path / "pid-0").read_text()), block)


@pytest.mark.slow_cases(
    *("local-blocked_in_native_code", "local-blocked_in_python"),
    *("ray-blocked_in_native_code", "spark-blocked_in_python"),
)
@pytest.mark.fault
@pytest.mark.parametrize(
    ("engine_way", "block"),
    crossed(*BLOCKED, fast_on_ray=["blocked_in_native_code"]),
    indirect=["engine_way"],
)
def test_error_frees_the_peers(engine, tmp_path, block):
    def program(worker):
        (tmp_path / f"pid-{worker.rank}").write_text(str(os.getpid()))
        worker.channel.barrier("all", worker.world_size)
        if worker.rank == 0:
            block(worker)
        join_group_if(block, worker)
        time.sleep(0.5)
        raise KeyError("this one")

    with pytest.raises(WorkerError, match="KeyError in worker 1:\nTraceback") as error:
        engine.run(program)
    assert (error.value.rank, error.value.kind) == (1, "KeyError")
    assert_leaves(int((tmp_path / "pid-0").read_text()), block)


def assert_leaves(pid: int, block) -> None:
    """The worker is gone, or idle after an error that a collective gave it."""
    give_up = time.monotonic() + WAIT_S
    while faults.is_running(pid) and time.monotonic() < give_up:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
            process = psutil.Process(pid)
            if block is blocked_in_a_collective and process.cpu_percent(0.3) < 50:
                return
        time.sleep(0.1)
    assert not faults.is_running(pid)


@pytest.mark.slow_cases("ray")
@pytest.mark.fault
def test_error_with_a_collective_under_way_is_reported(engine):
    def program(worker):
        import torch
        import torch.distributed as dist

        from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

        TorchDistributedSync(worker).start()
        if worker.rank == 0:
            blocked_in_python(worker)
        worker.pending = dist.all_reduce(torch.ones(1_000_000), async_op=True)
        raise KeyError("this one")

    with pytest.raises(WorkerError, match="KeyError in worker 1"):
        engine.run(program)


@pytest.mark.slow_cases("ray", "spark")
@pytest.mark.fault
def test_error_of_a_process_that_its_clean_up_ends_is_reported(engine):
    def program(worker):
        if worker.rank == 0:
            blocked_in_python(worker)
        worker.at_exit(os.abort)
        raise KeyError("this one")

    with pytest.raises(WorkerError, match="KeyError in worker 1"):
        engine.run(program)


def say_what_nobody_asked(port):
    """Garbage, a request without a proof, and what is far too long, each to a port."""
    for said in (os.urandom(300), bytes(300), b'["set","1:abort"]', b"\xff" * (1 << 20)):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as one:
            one.sendall(said)


@pytest.mark.slow_cases("spark")
def test_what_strangers_say_to_its_ports_changes_nothing(engine, tmp_path, caplog):
    """Those of the channel, and those at which the workers reduce their gradients."""
    before = {port for _, port in faults.listening()}
    said = tmp_path / "said"

    def program(worker):
        from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

        sync = TorchDistributedSync(worker)
        sync.start()
        worker.send("started", {"pid": os.getpid()}, b"")
        total = 0.0
        while not min(each for (each,) in sync.all_gather([said.exists()])):
            total = sum(each for (each,) in sync.all_gather([worker.rank + 1.0]))
        return total

    pids = []

    def attack(kind, value):
        if kind != "message":
            return
        pids.append(value[0]["pid"])
        if len(pids) == 2:
            ports = {port for _, port in faults.listening()} - before
            for port in sorted(ports):
                say_what_nobody_asked(port)
            for pid in pids:
                for each in psutil.Process(pid).net_connections():
                    if each.status == psutil.CONN_LISTEN:
                        say_what_nobody_asked(each.laddr.port)
            said.touch()

    with engine.open(program, num_workers=2) as job:
        assert job.attempt(on_event=attack) == [3.0, 3.0]
    told = [
        message
        for message in caplog.messages
        if "channel, which does not belong to this job" in message
    ]
    assert len(told) == 4
