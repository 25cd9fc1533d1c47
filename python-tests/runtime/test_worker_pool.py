import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
from refusals import refused

from bigdl.common.cpu import THREAD_VARIABLES, usable_cores
from bigdl.common.errors import WorkerLost
from bigdl.runtime.messages import decode, encode
from bigdl.runtime.pool import CpuSlot, PoolStage, TaskError, WorkerPool

CORE = usable_cores()[0]
LARGE = 1 << 18  # float64 numbers: 2 MB


def stage(function, workers=1, name="work", core=CORE):
    return PoolStage(name, lambda: function, [CpuSlot((core,), 1)] * workers)


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pids, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, "a worker was left behind"
        time.sleep(0.02)


def flat(pool):
    return [pid for stage in pool.pids for pid in stage]


def kill(pool, rank):
    """Kill an idle worker of the first stage."""
    process = pool.manager.workers[0][rank].process
    process.kill()
    # Its first thread may be gone, and its socket not yet closed, as long as other threads end.
    process.wait(20)


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def tricky(item):
    """Fail, exit or sleep as `item` requests."""
    if not isinstance(item, str):
        return item
    if item == "raise":
        raise KeyError("no such thing")
    if item == "exit":
        os._exit(3)
    if item == "sleep":
        time.sleep(600)
    return item


@pytest.fixture(scope="module")
def two():
    with WorkerPool([stage(tricky, 2)]) as pool:
        yield pool


# --- what comes back


def test_results_come_in_the_order_of_the_items():
    def late_first(item):
        time.sleep(0.2 if item == 0 else 0)
        return item

    with WorkerPool([stage(late_first, 2)]) as pool:
        assert pool.run(range(7)) == list(range(7))
        assert pool.run([]) == []


def test_items_go_through_all_stages_in_processes_of_their_own():
    def note(item):
        return [*item, os.getpid()]

    with WorkerPool([stage(note, 2, "a"), stage(note, 1, "b"), stage(note, 2, "c")]) as pool:
        ways = list(zip(*pool.run([] for _ in range(20)), strict=True))
        for way, pids in zip(ways, pool.pids, strict=True):
            assert set(way) <= set(pids)
        assert len(set(flat(pool))) == 5


def test_a_worker_is_pinned_and_has_its_threads_from_the_start():
    core = usable_cores()[-1]

    def find():
        actual = sorted(os.sched_getaffinity(0)), [os.environ[name] for name in THREAD_VARIABLES]
        return lambda item: actual

    with WorkerPool([PoolStage("work", find, [CpuSlot((core,), 1)])]) as pool:
        assert pool.run([0]) == [([core], ["1"] * len(THREAD_VARIABLES))]


def test_items_are_drawn_as_they_are_needed():
    drawn = []
    results = []

    def items():
        for item in range(10):
            drawn.append(item)
            yield item

    def slow(item):
        time.sleep(0.05)
        return item

    with WorkerPool([stage(lambda item: item), stage(slow)]) as pool:
        watcher = threading.Thread(target=lambda: results.extend(pool.run(items())))
        watcher.start()
        time.sleep(0.15)
        assert len(drawn) < 10  # a stage that is behind stops those before it
        watcher.join()
    assert results == drawn == list(range(10))


def test_large_arrays_arrive_whole_and_may_be_written_to(two):
    inputs = np.arange(LARGE, dtype=float)
    (actual,) = two.run([inputs])
    np.testing.assert_array_equal(actual, inputs)
    actual[0] = -1
    assert inputs[0] == 0


def test_calls_leave_no_descriptor_and_so_no_shared_memory(two):
    two.run([np.zeros(LARGE)])
    gc.collect()  # what other tests left, which may be collected at any time
    calls = 10  # more than the descriptors that threads of earlier tests may open meanwhile
    before = descriptors()
    for _ in range(calls):
        two.run([np.zeros(LARGE)] * 3)
    deadline = time.monotonic() + 10
    while descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert descriptors() < before + calls


def test_arrays_travel_without_memory_files_too(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    inputs = {"a": np.arange(LARGE), "b": [np.ones(3), "text"]}
    message = encode(inputs)
    assert message.memory is None
    np.testing.assert_array_equal(decode(message)["a"], inputs["a"])


def test_threads_of_the_caller_take_turns(two):
    results = {}

    def call(number):
        results[number] = two.run([number] * 5)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [number] * 5 for number in range(4)}


# --- what goes wrong


def test_an_exception_is_raised_with_its_place_and_the_pool_goes_on(two):
    with pytest.raises(TaskError, match="no such thing") as caught:
        two.run([0, 1, "raise", *range(50)])
    error = caught.value
    assert (error.stage, error.item, error.kind) == ("work", 2, "KeyError")
    assert isinstance(error.original, KeyError)
    assert "tricky" in error.traceback
    assert "_worker_main" not in error.traceback
    assert two.run([1, 2, 3]) == [1, 2, 3]


def test_the_first_item_that_failed_is_told(two):
    with pytest.raises(TaskError) as caught:
        two.run(["raise", "raise"])
    assert caught.value.item == 0


def test_an_exception_that_cannot_travel_is_told_all_the_same():
    def awkward(item):
        class Awkward(Exception):
            def __init__(self, one, two):
                super().__init__("awkward")

        raise Awkward(1, 2)

    with WorkerPool([stage(awkward)]) as pool, pytest.raises(TaskError, match="awkward") as caught:
        pool.run([0])
    assert caught.value.original is None


def test_an_exception_of_the_items_themselves_passes(two):
    def items():
        yield 1
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        two.run(items())
    assert two.run([5]) == [5]


def test_an_item_that_cannot_be_pickled_is_said(two):
    with refused("model-copy", "1"):
        two.run([0, threading.Lock(), 2])
    assert two.run([1]) == [1]


def test_a_function_that_cannot_be_pickled_is_said():
    lock = threading.Lock()
    with refused("model-copy"):
        WorkerPool([stage(lambda item: lock)])


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_item():
    with (
        WorkerPool([stage(lambda item: threading.Lock())]) as pool,
        pytest.raises(TaskError, match="cannot pickle"),
    ):
        pool.run([0])


def test_a_function_that_cannot_be_made_leaves_no_worker():
    def make():
        raise ImportError("no such model")

    before = psutil.Process().children()
    with pytest.raises(TaskError, match="no such model"):
        WorkerPool([PoolStage("work", make, [CpuSlot((CORE,), 1)] * 2)])
    assert psutil.Process().children() == before


@pytest.mark.fault
def test_a_worker_that_ends_in_a_call_is_told_and_replaced(two):
    before = two.pids
    with pytest.raises(WorkerLost, match="exit code 3"):
        two.run(["exit", 1, 2])
    assert two.run([1, 2, 3]) == [1, 2, 3]
    assert two.pids != before


@pytest.mark.slow
@pytest.mark.fault
def test_a_worker_killed_in_a_call_is_told_and_replaced():
    with WorkerPool([stage(tricky, 2)]) as pool:
        victims = flat(pool)
        killer = threading.Timer(0.3, lambda: [os.kill(pid, signal.SIGKILL) for pid in victims])
        killer.start()
        with pytest.raises(WorkerLost, match="SIGKILL"):
            pool.run(["sleep", "sleep"])
        killer.join()
        assert pool.run([1, 2]) == [1, 2]
        assert not set(flat(pool)) & set(victims)


@pytest.mark.fault
def test_a_worker_killed_between_two_calls_is_not_noticed(two):
    two.run([0])
    kill(two, 0)
    assert two.run(range(10)) == list(range(10))


@pytest.mark.fault
def test_an_idle_worker_killed_in_a_run_is_replaced_at_once():
    def items():
        yield 0.5  # for the first worker
        kill(pool, 1)
        yield from [0.0] * 5

    def nap(seconds):
        time.sleep(seconds)
        return seconds

    with WorkerPool([stage(nap, 2)]) as pool:
        before = flat(pool)
        assert pool.run(items()) == [0.5] + [0.0] * 5
        assert flat(pool)[0] == before[0]
        assert flat(pool)[1] != before[1]


# --- how it ends


def test_close_ends_the_workers_and_what_they_started():
    def child(item):
        return subprocess.Popen(["sleep", "600"]).pid

    pool = WorkerPool([stage(child)])
    pids = [*flat(pool), *pool.run([0])]
    before = descriptors()
    pool.close()
    pool.close()
    wait_until_gone(pids)
    assert descriptors() < before
    with refused("state"):
        pool.run([1])


def test_workers_end_with_the_last_reference():
    pool = WorkerPool([stage(tricky)])
    pids = flat(pool)
    del pool
    gc.collect()
    wait_until_gone(pids)


@pytest.mark.fault
@pytest.mark.parametrize(
    "end", ["pass", "raise SystemExit(1)", "os._exit(1)", "os.kill(os.getpid(), 9)"]
)
@pytest.mark.parametrize("busy", [False, True])
def test_no_worker_outlives_the_program(end, busy):
    program = (
        "import os, threading, time\n"
        "from bigdl.runtime.pool import CpuSlot, PoolStage, WorkerPool\n"
        f"pool = WorkerPool([PoolStage('a', lambda: time.sleep, [CpuSlot(({CORE},), 1)] * 2)])\n"
        "print(*pool.pids[0], flush=True)\n"
        f"if {busy}:\n"
        "    threading.Thread(target=pool.run, args=([600, 600],), daemon=True).start()\n"
        "    time.sleep(0.3)\n"
        f"{end}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    wait_until_gone(pids)


@pytest.mark.fault
def test_an_interrupted_run_leaves_a_pool_that_works():
    program = (
        "import signal, threading, time\n"
        "from bigdl.runtime.pool import CpuSlot, PoolStage, WorkerPool\n"
        # a program that was started in the background ignores the signal
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"pool = WorkerPool([PoolStage('a', lambda: time.sleep, [CpuSlot(({CORE},), 1)])])\n"
        "main = threading.main_thread().ident\n"
        "threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT]).start()\n"
        "try:\n"
        "    pool.run([600])\n"
        "except KeyboardInterrupt:\n"
        "    print(pool.run([0]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[None]\n", done.stderr


def test_a_forked_child_does_not_end_the_workers_of_its_parent(two):
    two.run([0])
    before = two.pids
    pid = os.fork()
    if pid == 0:
        two.manager.end()
        os._exit(0)
    os.waitpid(pid, 0)
    assert two.run([1]) == [1]
    assert two.pids == before
