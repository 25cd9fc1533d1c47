"""What ``Engine.run`` promises on every engine: results, messages, output, errors, lost workers."""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time

import faults
import numpy as np
import psutil
import pytest
from engine_cases import crossed
from refusals import refused

from bigdl.common.errors import JobStopped, UsageError, WorkerError, WorkerLost
from bigdl.orca.data.feeds import as_feed
from bigdl.orca.engine import Engine

WAIT_S = 60  # seconds that something may take which takes a moment on an idle machine


@pytest.fixture
def engine(engine_way):
    return engine_way.engine()


def rank_of(worker):
    return worker.rank


# -- results ------------------------------------------------------------------------------------


def test_results_come_in_rank_order(engine):
    assert isinstance(engine, Engine)

    def program(worker):
        time.sleep(0.2 * (1 - worker.rank))
        return [worker.rank, worker.world_size]

    assert engine.run(program) == [[0, 2], [1, 2]]


@pytest.mark.slow_cases("local", "spark")
def test_results_are_bytes_or_json(engine):
    values = [b"", b"\x00\xff", None, 1.5, "ü", [1, {"a": [True]}], {"nan": 1}, bytearray(b"ab")]
    with engine.open(lambda worker: values[worker.options["i"]], num_workers=1) as job:
        assert [job.attempt({"i": i}) for i in range(len(values))] == [[v] for v in values]
    for value in (object(), {1, 2}, 1j, {"a": b"b"}):
        expected = "^A program run by an engine must return bytes or JSON-able values, got "
        with pytest.raises(UsageError, match=expected + type(value).__name__):
            engine.run(lambda worker, value=value: value, num_workers=1)


def test_functions_and_classes_of_a_notebook_work(engine):
    code = """
class Thing:
    def __init__(self, value):
        self.value = value

def helper(worker):
    return Thing(worker.rank).value * 10

program = lambda worker: helper(worker)
"""
    cell = {"__name__": "__main__"}
    exec(code, cell)
    assert engine.run(cell["program"]) == [0, 10]


@pytest.mark.slow_cases("local", "ray")
def test_every_row_reaches_one_worker_in_order(engine):
    feed = as_feed((np.arange(7, dtype=np.float32), np.arange(7)))

    def program(worker):
        return [array.tolist() for array in worker.shard.arrays]

    assert engine.run(program, feed) == [[[0, 2, 4, 6], [0, 2, 4, 6]], [[1, 3, 5], [1, 3, 5]]]


@pytest.mark.slow_cases("local", "ray")
def test_the_threads_of_a_worker_are_its_share_of_the_cores(engine):
    def program(worker):
        import torch

        return [worker.threads, torch.get_num_threads()]

    cores = engine.cluster.cores_per_node
    assert engine.run(program, num_workers=1) == [[cores, cores]]
    half = max(1, cores // 2)
    assert engine.run(program, num_workers=2) == [[half, half]] * 2


@pytest.mark.slow_cases("local", "ray")
def test_programs_of_several_threads_of_the_driver(engine):
    found = {}

    def run(n):
        found[n] = engine.run(lambda worker: [n, worker.rank])

    threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    assert found == {n: [[n, 0], [n, 1]] for n in range(3)}


# -- between driver and workers -----------------------------------------------------------------


def test_options_state_progress_and_messages(engine):
    events = []

    def program(worker):
        worker.send("hello", {"n": worker.rank}, b"x" * worker.rank)
        for step in range(3):
            worker.progress(step=step)
            time.sleep(0.6)
        worker.progress(step="end")
        return [worker.options, worker.state().decode(), worker.shard]

    with engine.open(program, num_workers=1) as job:
        options = {"a": [1, {"b": None}]}
        found = job.attempt(options, b"state", lambda kind, value: events.append((kind, value)))
    assert found == [[options, "state", None]]
    assert ("message", ({"topic": "hello", "rank": 0, "n": 0}, b"")) in events
    steps = [value["step"] for kind, value in events if kind == "progress"]
    assert steps[-1] == "end"
    assert steps[:-1] == sorted(steps[:-1])


@pytest.mark.slow_cases("ray")
def test_a_job_runs_again_with_other_options(engine):
    with engine.open(lambda worker: worker.options["n"] * 2) as job:
        assert [job.attempt({"n": n}) for n in range(3)] == [[0, 0], [2, 2], [4, 4]]


def test_an_error_in_on_event_ends_the_job(engine, tmp_path):
    def program(worker):
        (tmp_path / "pid").write_text(str(os.getpid()))
        worker.send("topic", {}, b"")
        while True:
            pass

    def on_event(kind, value):
        raise KeyError("mine")

    with engine.open(program, num_workers=1) as job, pytest.raises(KeyError, match="mine"):
        job.attempt(on_event=on_event)
    assert_ends(int((tmp_path / "pid").read_text()))


def assert_ends(pid: int) -> None:
    give_up = time.monotonic() + WAIT_S
    while faults.is_running(pid) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not faults.is_running(pid)


def test_what_workers_print_arrives_once(engine, capsys):
    def program(worker):
        print("one", worker.rank)
        print("two\nthree", end="")
        sys.stderr.write("\nto stderr\n")
        sys.stdout.write("10%\r50%\r100%\n")
        logging.getLogger("anything").warning("logged %d", worker.rank)
        print("last", end="")

    engine.run(program)
    lines = capsys.readouterr().out.splitlines()
    for rank in (0, 1):
        mine = [
            x.removeprefix(f"[worker {rank}] ") for x in lines if x.startswith(f"[worker {rank}]")
        ]
        expected = [f"one {rank}", "two", "three", "to stderr", "100%", f"logged {rank}", "last"]
        assert mine == expected


# -- refused ------------------------------------------------------------------------------------


@pytest.mark.slow_cases(
    "local----^3 workers were asked for but the cluster can run 2 tasks at once; ask"
)
@pytest.mark.parametrize(
    ("options", "fn", "workers", "message"),
    [
        ({}, rank_of, 3, r"^3 workers were asked for but the cluster can run 2 tasks at once; ask"),
        ({}, rank_of, 0, "^num_workers should be a positive integer, got 0"),
        ({}, rank_of, 1.5, "^num_workers should be a positive integer, got 1.5"),
        ({}, rank_of, True, "^num_workers should be a positive integer, got True"),
        ({}, "program", 1, "^fn should be a function of a worker, got str"),
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


def test_a_program_that_cannot_be_shipped_is_refused(engine):
    lock = threading.Lock()
    with refused("model-copy"):
        engine.run(lambda worker: lock)


# -- errors and lost workers --------------------------------------------------------------------


@pytest.mark.slow_cases("ray")
def test_usage_error_of_a_worker_stays_one(engine):
    def program(worker):
        raise UsageError("there is no such thing; take another")

    with pytest.raises(UsageError, match=r"^there is no such thing; take another$"):
        engine.run(program)


def test_os_exit_names_its_status_and_is_not_tried_again(engine, tmp_path):
    def program(worker):
        (tmp_path / f"{worker.rank}-{time.monotonic_ns()}").touch()
        if worker.rank == 1:
            os._exit(7)
        while True:
            time.sleep(1)

    with pytest.raises(WorkerError, match=r"^SystemExit in worker 1:\n") as error:
        engine.run(program)
    assert str(error.value).endswith("SystemExit: os._exit(7) was called")
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["0", "1"]


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
    "local-blocked_in_a_collective", "local-blocked_in_native_code", "local-blocked_in_python"
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
        worker.line.barrier("all", worker.world_size)
        if worker.rank == 0:
            block(worker)
        join_group_if(block, worker)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerLost, match=r"^Workers? [01]"):
        engine.run(program)
    assert_leaves(int((tmp_path / "pid-0").read_text()), block)


@pytest.mark.slow_cases("local-blocked_in_native_code", "local-blocked_in_python")
@pytest.mark.fault
@pytest.mark.parametrize(
    ("engine_way", "block"),
    crossed(*BLOCKED, fast_on_ray=["blocked_in_native_code"]),
    indirect=["engine_way"],
)
def test_error_frees_the_peers(engine, tmp_path, block):
    def program(worker):
        (tmp_path / f"pid-{worker.rank}").write_text(str(os.getpid()))
        worker.line.barrier("all", worker.world_size)
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


@pytest.mark.fault
def test_error_of_a_process_that_its_clean_up_ends_is_reported(engine):
    def program(worker):
        if worker.rank == 0:
            blocked_in_python(worker)
        worker.at_exit(os.abort)
        raise KeyError("this one")

    with pytest.raises(WorkerError, match="KeyError in worker 1"):
        engine.run(program)


@pytest.mark.slow_cases("local")
@pytest.mark.fault
def test_the_cause_is_reported_and_not_what_it_did_to_others(engine):
    """Also where a program uses torch.distributed by itself and sees a RuntimeError of gloo."""

    def program(worker):
        import torch
        import torch.distributed as dist

        from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

        TorchDistributedSync(worker).start()
        if worker.rank == 1:
            raise KeyError("this one")
        try:
            dist.all_reduce(torch.ones(4))
        except RuntimeError as error:
            raise OSError("a consequence") from error

    for _ in range(3):
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
    told = [message for message in caplog.messages if "channel that is not of this run" in message]
    assert len(told) == 4


def test_an_order_to_stop_is_no_loss(engine):
    def program(worker):
        if worker.rank == 1:
            worker.line.set("abort", "the budget is spent")
        time.sleep(WAIT_S)

    with pytest.raises(JobStopped, match=r"^The job was stopped: the budget is spent$"):
        engine.run(program)


@pytest.mark.slow_cases("local", "ray")
@pytest.mark.fault
def test_a_killed_worker_is_named_and_the_next_attempt_reads_its_spool(engine):
    feed = as_feed((np.arange(9, dtype=np.float32), np.arange(9)))

    def program(worker):
        if worker.rank == 1 and not worker.options:
            os.kill(os.getpid(), signal.SIGKILL)
        worker.line.barrier("end", worker.world_size)
        return [worker.rank, worker.shard.spool.path, worker.shard.fingerprint]

    with engine.open(program, feed, keep_spools=True) as job:
        expected = r"^Worker 1 \(process \d+ on 127.0.0.1\) was lost: its Python process ended une"
        with pytest.raises(WorkerLost, match=expected):
            job.attempt()
        first, second = job.attempt({"again": True}), job.attempt({"again": True})
        assert sorted(first) == sorted(second)
        assert all(os.path.isdir(path) for _, path, _ in first)
    assert not any(os.path.isdir(path) for _, path, _ in first)
