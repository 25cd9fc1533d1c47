import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from refusals import refused

from bigdl.common.cpu import THREAD_VARIABLES, WAIT_VARIABLES, split_cores, usable_cores
from bigdl.common.errors import WorkerError, WorkerLost
from bigdl.runtime.launch import LaunchTimeout, launch

PATH = {"PYTHONPATH": os.pathsep.join(sys.path)}


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def note_pid(folder, name):
    """Write the id of this process to a file for the test."""
    aside = folder / f".{name}"
    aside.write_text(str(os.getpid()))
    aside.rename(folder / f"{name}.pid")


def noted_pids(folder):
    return [int(path.read_text()) for path in sorted(folder.glob("*.pid"))]


def sleep_noted(rank, folder):
    note_pid(folder, rank)
    time.sleep(600)


# --- what travels


def test_results_come_in_rank_order():
    def late_first(rank, pause):
        time.sleep(pause * (2 - rank))
        return rank * 10

    assert launch(late_first, 3, (0.1,)) == [0, 10, 20]


def test_lambdas_closures_and_local_classes_travel_both_ways():
    class Scaled:
        def __init__(self, value):
            self.value = value

    factor = 3
    argument = Scaled(2)
    results = launch(lambda rank, scaled: Scaled(scaled.value * factor + rank), 2, (argument,))
    assert [result.value for result in results] == [6, 7]
    assert all(type(result) is Scaled for result in results)


def test_a_callable_object_is_a_function_too():
    class Adder:
        def __call__(self, rank, more):
            return rank + more

    assert launch(Adder(), 1, [4]) == [4]


@pytest.mark.parametrize("as_file", [True, False])
def test_functions_and_classes_of_the_main_program_travel(tmp_path, as_file):
    program = (
        "from bigdl.runtime.launch import launch\n"
        "class Pair:\n"
        "    def __init__(self, *both): self.both = both\n"
        "def helper(rank): return Pair(rank, __name__)\n"
        "def work(rank): return helper(rank)\n"
        "results = launch(work, 2)\n"
        "assert all(isinstance(result, Pair) for result in results)\n"
        "print([result.both[0] for result in results])\n"
    )
    (tmp_path / "program.py").write_text(program)
    how = [tmp_path / "program.py"] if as_file else ["-c", program]
    seen = subprocess.run(
        [sys.executable, *how], env=os.environ | PATH, capture_output=True, text=True, timeout=60
    )
    assert (seen.stdout, seen.stderr) == ("[0, 1]\n", "")


def test_workers_import_what_the_caller_can_import(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def work(rank): return f'here {rank}'\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    assert launch(only_here.work, 1) == ["here 0"]


def test_large_arguments_and_results_travel():
    data = os.urandom(1 << 20) * 24
    returned = launch(lambda rank, received: received + bytes([rank]), 2, (data,))
    assert returned == [data + b"\0", data + b"\1"]


def test_a_launch_works_in_a_worker_and_in_a_thread():
    results = []

    def outer(rank):
        return launch(lambda inner: (rank, inner), 2)

    thread = threading.Thread(target=lambda: results.extend(launch(outer, 1)))
    thread.start()
    thread.join(60)
    assert results == [[(0, 0), (0, 1)]]


def test_a_launch_works_after_an_openmp_region_in_the_parent():
    import torch

    torch.mm(torch.ones(300, 300), torch.ones(300, 300)).sum()

    def step(rank):
        import torch

        weights = torch.ones(300, 300, requires_grad=True)
        torch.mm(weights, weights).sum().backward()
        return float(weights.grad[0, 0])

    assert launch(step, 2, timeout=120) == [600.0, 600.0]


# --- cores and environment


def surroundings(rank):
    return {
        "cores": sorted(os.sched_getaffinity(0)),
        "heavy": {"torch", "numpy"} & set(sys.modules),
        "environ": dict(os.environ),
    }


def test_each_worker_has_its_own_cores_before_anything_heavy_is_loaded():
    seen = launch(surroundings, 2)
    assert [worker["cores"] for worker in seen] == split_cores(2)
    assert [worker["heavy"] for worker in seen] == [set(), set()]


def test_thread_counts_follow_the_given_cores():
    core = usable_cores()[0]
    seen = launch(surroundings, 2, cores=[[core], {core}])
    for worker in seen:
        assert worker["cores"] == [core]
        assert {worker["environ"][name] for name in THREAD_VARIABLES} == {"1"}


def test_more_workers_than_cores_share_them():
    cores = usable_cores()
    core = [cores[0]]
    assert [worker["cores"] for worker in launch(surroundings, 3, cores=[core] * 3)] == [core] * 3


def test_env_adds_overrides_and_removes(monkeypatch):
    monkeypatch.setenv("LEFT_OUT", "1")
    monkeypatch.setenv("INHERITED", "1")
    changes = {"ADDED": "yes", "OMP_NUM_THREADS": "7", "LEFT_OUT": None}
    (worker,) = launch(surroundings, 1, env=changes)
    environ = worker["environ"]
    assert (environ["ADDED"], environ["INHERITED"]) == ("yes", "1")
    assert environ["OMP_NUM_THREADS"] == "7"
    assert "LEFT_OUT" not in environ


@pytest.mark.parametrize(
    ("outside", "changes", "expected"),
    [
        ({}, {}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ({"GOMP_SPINCOUNT": "1000"}, {}, {"GOMP_SPINCOUNT": "1000"}),
        ({}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_threads_of_a_worker_sleep_while_they_wait_unless_the_user_says_how(
    monkeypatch, outside, changes, expected
):
    for name in WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in outside.items():
        monkeypatch.setenv(name, value)
    (worker,) = launch(surroundings, 1, env=changes)
    actual = {name: worker["environ"].get(name) for name in WAIT_VARIABLES}
    assert {name: value for name, value in actual.items() if value is not None} == expected


def test_pinning_of_the_parent_does_not_reach_workers(monkeypatch):
    monkeypatch.setenv("KMP_AFFINITY", "granularity=fine,proclist=[0],explicit")
    assert "KMP_AFFINITY" not in launch(surroundings, 1)[0]["environ"]


@pytest.mark.parametrize("value", [None, "/some/where"])
def test_programs_that_a_worker_starts_see_the_callers_pythonpath(monkeypatch, value):
    if value is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", value)
    assert launch(surroundings, 1)[0]["environ"].get("PYTHONPATH") == value


# --- what workers print


def speak(rank):
    print(f"out of {rank}")
    print(f"err of {rank}", file=sys.stderr)
    sys.stdout.write("one\rtwo\r\nthe end")


def test_lines_of_workers_appear_with_their_rank(capsys):
    launch(speak, 2)
    printed = capsys.readouterr()
    for rank in (0, 1):
        mine = [
            line for line in printed.out.splitlines(keepends=True) if line.startswith(f"[{rank}] ")
        ]
        assert "".join(mine) == (
            f"[{rank}] out of {rank}\n[{rank}] one\r[{rank}] two\r\n[{rank}] the end\n"
        )
        assert f"[{rank}] err of {rank}\n" in printed.err


def test_lines_of_workers_can_go_to_files_only(capsys, monkeypatch, tmp_path):
    """Check that whole lines reach the files, also without Python's buffering."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    launch(speak, 2, log_dir=tmp_path / "logs", stream_output=False)
    assert capsys.readouterr() == ("", "")
    for rank in (0, 1):
        log = (tmp_path / "logs" / f"worker-{rank}.log").read_bytes().decode()
        assert f"out of {rank}\n" in log
        assert f"err of {rank}\n" in log
        assert "one\rtwo\r\nthe end" in log


def test_lines_appear_while_workers_run(capsys, tmp_path):
    def print_and_wait(rank, sign):
        print("started")
        while not sign.exists():
            time.sleep(0.02)

    sign = tmp_path / "sign"
    printed = []

    def answer():
        wait_for(lambda: printed.append(capsys.readouterr().out) or "[0] started\n" in printed)
        sign.touch()

    thread = threading.Thread(target=answer)
    thread.start()
    launch(print_and_wait, 1, (sign,), timeout=30)
    thread.join()


def test_much_output_and_a_long_line_pass(capsys):
    def flood(rank):
        sys.stdout.write("x" * 3_000_000 + "\n")
        sys.stderr.write("y\n" * 100_000)

    launch(flood, 1)
    printed = capsys.readouterr()
    assert printed.out.count("x") == 3_000_000
    assert printed.err == "[0] y\n" * 100_000


# --- failures


def test_the_first_exception_is_reported_once_and_the_others_are_stopped(capsys, tmp_path):
    def fail_or_sleep(rank, folder):
        if rank != 1:
            sleep_noted(rank, folder)
        wait_for(lambda: len(noted_pids(folder)) == 2)
        raise KeyError("a name to look for")

    with pytest.raises(WorkerError) as caught:
        launch(fail_or_sleep, 3, (tmp_path,))
    error = caught.value
    assert (error.rank, error.kind) == (1, "KeyError")
    assert error.traceback.startswith("Traceback (most recent call last):\n")
    assert 'raise KeyError("a name to look for")' in error.traceback
    assert "_worker_main" not in error.traceback
    assert "a name to look for" not in "".join(capsys.readouterr())
    assert [gone(pid) for pid in noted_pids(tmp_path)] == [True, True]


def test_of_several_exceptions_the_earliest_is_reported(tmp_path):
    def fail_in_turn(rank, folder):
        if rank == 1:
            (folder / "failed").touch()
            raise ValueError("first")
        wait_for((folder / "failed").exists)
        time.sleep(0.5)  # the other is about to raise
        raise ValueError("second")

    with pytest.raises(WorkerError, match="first"):
        launch(fail_in_turn, 2, (tmp_path,))


def test_sys_exit_in_a_worker_is_an_error_of_the_worker():
    with pytest.raises(WorkerError) as caught:
        launch(lambda rank: sys.exit(3), 1)
    assert caught.value.kind == "SystemExit"


def test_a_result_that_cannot_be_pickled_is_an_error_of_the_worker():
    with pytest.raises(WorkerError, match="pickle"):
        launch(lambda rank: threading.Lock(), 1)


@pytest.mark.fault
def test_a_killed_worker_is_lost_and_the_others_are_stopped(tmp_path):
    def die_or_sleep(rank, folder):
        if rank != 0:
            sleep_noted(rank, folder)
        wait_for(lambda: len(noted_pids(folder)) == 1)
        print("the last words", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerLost, match=r"worker 0 .* SIGKILL") as caught:
        launch(die_or_sleep, 2, (tmp_path,))
    assert str(caught.value).endswith("\nthe last words")
    assert [gone(pid) for pid in noted_pids(tmp_path)] == [True]


@pytest.mark.fault
def test_a_crashed_worker_tells_where_it_crashed():
    def crash(rank):
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(WorkerLost, match="SIGSEGV") as caught:
        launch(crash, 1)
    assert "in crash" in str(caught.value)


@pytest.mark.fault
def test_a_lost_worker_is_reported_rather_than_the_errors_that_it_causes(tmp_path):
    def die_or_notice(rank, folder):
        if rank == 1:
            note_pid(folder, rank)
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for(lambda: noted_pids(folder) and gone(noted_pids(folder)[0]))
        raise ConnectionError("the peer is gone")

    with pytest.raises(WorkerLost, match="worker 1"):
        launch(die_or_notice, 2, (tmp_path,))


def test_a_worker_that_leaves_without_a_result_is_lost():
    with pytest.raises(WorkerLost, match="exit code 4 before its function returned; its stderr"):
        launch(lambda rank: os._exit(4), 1)


@pytest.mark.fault
def test_a_result_counts_though_the_worker_crashes_when_it_shuts_down():
    def crash_at_exit(rank):
        import atexit

        atexit.register(os.kill, os.getpid(), signal.SIGKILL)
        return "result"

    assert launch(crash_at_exit, 1) == ["result"]


@pytest.mark.fault
def test_a_worker_that_ignores_sigterm_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr("bigdl.runtime.launch.LAUNCH_GRACE_S", 0.3)

    def ignore(rank, folder):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 0:
            sleep_noted(rank, folder)
        wait_for(lambda: noted_pids(folder))
        raise ValueError

    with pytest.raises(WorkerError):
        launch(ignore, 2, (tmp_path,))
    assert [gone(pid) for pid in noted_pids(tmp_path)] == [True]


def test_processes_that_a_worker_started_end_with_it():
    def leave_one_behind(rank):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    (pid,) = launch(leave_one_behind, 1, timeout=30)
    wait_for(lambda: gone(pid))


def test_a_timeout_says_who_was_late_in_one_sentence(tmp_path):
    def late(rank, folder):
        if rank == 1:
            sleep_noted(rank, folder)

    with pytest.raises(LaunchTimeout) as caught:
        launch(late, 2, (tmp_path,), timeout=5)
    assert str(caught.value) == (
        "1 of 2 workers (rank 1) had not ended after 5 s and were stopped; "
        "raise timeout if they need longer"
    )
    assert isinstance(caught.value, TimeoutError)
    assert all(gone(pid) for pid in noted_pids(tmp_path))


# --- the parent's end

PARENT = """
import os, pathlib, signal, sys, time
from bigdl.runtime.launch import launch

def work(rank, folder, stubborn):
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    aside = folder / f".{rank}"
    aside.write_text(str(os.getpid()))
    aside.rename(folder / f"{rank}.pid")
    time.sleep(600)

launch(work, 2, (pathlib.Path(sys.argv[1]), sys.argv[2] == "stubborn"))
"""


@pytest.fixture
def parent(tmp_path):
    """Start a program that launches two endless workers; yield it once they run."""
    started = []

    def start(manner="docile"):
        process = subprocess.Popen(
            [sys.executable, "-c", PARENT, tmp_path, manner],
            env=os.environ | PATH,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        wait_for(lambda: len(noted_pids(tmp_path)) == 2 or process.poll() is not None)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for pid in noted_pids(tmp_path):  # there is one only if the test has failed
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.fault
@pytest.mark.parametrize("manner", ["docile", "stubborn"])
@pytest.mark.parametrize("death", ["SIGKILL", "SIGTERM"])
def test_no_worker_survives_a_killed_parent(parent, tmp_path, death, manner):
    parent(manner).send_signal(getattr(signal, death))
    pids = noted_pids(tmp_path)
    assert len(pids) == 2
    wait_for(lambda: all(gone(pid) for pid in pids), seconds=5)


@pytest.mark.fault
def test_no_worker_survives_an_interrupted_parent(parent, tmp_path):
    process = parent()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    pids = noted_pids(tmp_path)
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)
    assert errors.count("KeyboardInterrupt") == 1
    assert process.returncode == -signal.SIGINT


@pytest.mark.fault
def test_a_second_interrupt_does_not_wait_for_stubborn_workers(parent, tmp_path):
    process = parent("stubborn")
    pids = noted_pids(tmp_path)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.7)
    assert not any(gone(pid) for pid in pids)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert time.monotonic() - start < 4
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("outcome", ["result", "error", "loss"])
def test_a_launch_leaves_no_descriptor_file_or_child_behind(monkeypatch, tmp_path, outcome):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def work(rank):
        if outcome == "error":
            raise ValueError
        if outcome == "loss":
            os._exit(1)

    def once():
        if outcome == "result":
            launch(work, 2)
        else:
            with pytest.raises((WorkerError, WorkerLost)):
                launch(work, 2)

    once()
    before = sorted(os.listdir("/proc/self/fd"))
    children = psutil.Process().children()  # a Spark of other tests, maybe
    once()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []
    assert psutil.Process().children() == children


# --- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nprocs": 0}, ("argument-value", "0")),
        ({"nprocs": "2"}, ("argument-type",)),
        ({"fn": 5}, ("argument-type", "5")),
        ({"timeout": 0}, ("argument-value",)),
        ({"cores": [usable_cores()]}, ("argument-value", "2")),
        ({"cores": [usable_cores(), []]}, ("argument-value",)),
        ({"cores": [usable_cores(), [100000]]}, ("argument-value", "100000")),
        ({"args": (threading.Lock(),)}, ("model-copy",)),
    ],
)
def test_what_cannot_be_launched_is_refused_in_a_sentence(options, message):
    with refused(*message):
        launch(**{"fn": surroundings, "nprocs": 2} | options)
