"""Tuning of the running process."""

import gc
import os
import subprocess
import sys
import textwrap
import threading

import pytest
from refusals import refused

from bigdl.common.cpu import Topology
from bigdl.nano import runtime
from bigdl.nano.runtime import best_thread_count, tune

NOTHING = {"allocator": False, "threads": False}
needs_glibc = pytest.mark.skipif(
    "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="needs glibc"
)


def python(program, **environ):
    """Run a program in a process whose settings nobody has touched; returns what it printed."""
    dropped = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GLIBC_TUNABLES")
    own = {name: value for name, value in os.environ.items() if name not in dropped}
    seen = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=own | environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return seen.stdout


# --- the report


def test_a_report_has_a_line_for_each_setting_that_was_asked_for():
    with tune(threads=1) as report:
        names = [setting.name for setting in report.settings]
        assert names == ["allocator", "threads"]
        assert str(report).splitlines()[1] == "threads: 1 for PyTorch, OpenMP and BLAS"
        assert report.applied.keys() | report.skipped.keys() == set(names)
    with tune(**NOTHING) as report:
        assert str(report) == ""


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", None])
def test_a_wrong_number_of_threads_is_refused(threads):
    with refused("argument-value", "1"):
        tune(threads=threads)


def test_undoing_twice_is_undoing_once(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    report = tune(**NOTHING | {"threads": 1})
    assert os.environ["OMP_NUM_THREADS"] == "1"
    report.undo()
    os.environ["OMP_NUM_THREADS"] = "9"
    report.undo()
    assert os.environ["OMP_NUM_THREADS"] == "9"


def test_a_tuning_lasts_though_nobody_keeps_its_report(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    tune(**NOTHING | {"threads": 1})
    gc.collect()
    assert os.environ["OMP_NUM_THREADS"] == "1"
    (tuning_of_this_test,) = runtime.lasting_tunings
    tuning_of_this_test.undo()
    assert os.environ["OMP_NUM_THREADS"] == "7"


# --- settings

FAULTS = """
    import resource
    from bigdl.nano.runtime import tune
    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for k in range(1, 5):
            bytearray(b"x") * (k * 16 << 20)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    faults()
    with tune(threads=False) as report:
        faults()
        tuned = faults()
    print(report.applied["allocator"], "|", tuned < 1000 < faults())
"""


@needs_glibc
@pytest.mark.linux("the allocator of glibc")
def test_a_tuned_process_reuses_its_memory_until_it_is_undone():
    assert python(FAULTS) == "keeps freed memory in this process | True\n"


FITS = """
    import os, resource, threading, time
    import psutil
    from bigdl.nano import runtime
    from bigdl.nano.runtime import tuned_fit
    def fit():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        with tuned_fit():
            buffers = [bytearray(b"x") * (16 << 20) for _ in range(16)]
            del buffers
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    def anonymous():
        memory = psutil.Process().memory_info()
        return memory.rss - memory.shared
    def kept():
        return anonymous() - before > 200 << 20
    before = anonymous()
    first = fit()
"""


@needs_glibc
@pytest.mark.linux("the allocator of glibc")
def test_a_fit_finds_the_memory_of_the_one_before_it_until_it_is_released():
    program = """
    second = fit()
    print(second < first / 10, kept())
    runtime.release_memory()
    print(kept(), fit() > first / 2, threading.active_count())
    runtime.release_memory()
    runtime.release_memory()
    print(kept(), threading.active_count())
    """
    seen = python(FITS + program).split("\n")
    assert seen[:3] == ["True True", "False True 2", "False 1"]


@needs_glibc
def test_memory_that_no_fit_asks_for_is_given_back():
    program = """
    runtime._keep_memory(0.05)
    until = time.monotonic() + 120
    while kept() and time.monotonic() < until:
        time.sleep(0.01)
    print(kept(), fit() > first / 2)
    """
    assert python(FITS + program) == "False True\n"


@needs_glibc
@pytest.mark.linux("the allocator of glibc")
def test_a_copy_of_a_process_that_keeps_memory_can_fit_and_release_it():
    program = """
    copy = os.fork()
    if copy == 0:
        fit()
        runtime.release_memory()
        os._exit(kept())
    print(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]), kept())
    """
    assert python(FITS + program) == "0 True\n"


def test_a_fit_in_a_task_of_spark_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(runtime, "in_task_of_spark", lambda: True)
    before = threading.active_count()
    with runtime.tuned_fit():
        pass
    assert threading.active_count() == before


@needs_glibc
def test_a_process_that_its_environment_has_tuned_is_left_alone():
    program = """
        from bigdl.nano.runtime import tune
        print(tune(threads=False).skipped["allocator"])
    """
    seen = python(program, GLIBC_TUNABLES="glibc.malloc.mmap_threshold=1073741824")
    assert seen == "it is not glibc's, or GLIBC_TUNABLES has tuned it\n"


@needs_glibc
@pytest.mark.linux("the allocator of glibc")
def test_in_a_task_of_spark_only_some_memory_is_kept(monkeypatch):
    monkeypatch.setattr(runtime, "in_task_of_spark", lambda: True)
    with tune(threads=False) as report:
        assert "keeps up to 128 MiB of freed memory" in report.applied["allocator"]


def test_a_program_without_spark_is_no_task_of_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "pyspark", raising=False)
    assert not runtime.in_task_of_spark()


THREADS = """
    from bigdl.nano.runtime import tune
    import torch
    torch.set_num_threads({before})
    with tune(allocator=False, threads={threads}) as report:
        inside = torch.get_num_threads()
    print(inside, torch.get_num_threads(), "threads" in report.applied)
"""


@pytest.mark.slow_cases("5-False-5-False")
@pytest.mark.parametrize(
    ("before", "threads", "inside", "applied"),
    [
        (best_thread_count() + 3, True, best_thread_count(), True),
        (1, True, 1, False),
        (1, 2, 2, True),
        (5, False, 5, False),
    ],
)
def test_threads_are_lowered_to_the_cores_or_set_to_a_number(before, threads, inside, applied):
    seen = python(THREADS.format(before=before, threads=threads))
    assert seen == f"{inside} {before} {applied}\n"


def test_omp_num_threads_of_the_user_counts(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with tune(allocator=False) as report:
        assert report.skipped == {"threads": "OMP_NUM_THREADS is 1"}


def test_denormals_are_flushed_inside_only():
    import torch

    tiny = torch.tensor([1e-40])
    with tune(**NOTHING, flush_denormals=True) as report:
        assert report.applied.keys() == {"flush_denormals"}
        assert (tiny * 0.5).item() == 0
        with tune(**NOTHING, flush_denormals=True) as inner:
            assert inner.skipped == {"flush_denormals": "they are flushed already"}
        assert (tiny * 0.5).item() == 0
    assert (tiny * 0.5).item() > 0


# --- pinning


def hyperthreads_of(*cores):
    return lambda: Topology(numa_nodes=(cores,), cores=(cores,))


def test_all_threads_stay_off_second_hyperthreads_until_it_is_undone(monkeypatch):
    import threading

    everywhere = os.sched_getaffinity(0)
    if len(everywhere) < 2:
        pytest.skip("needs two logical cores")
    monkeypatch.setattr(runtime, "topology", hyperthreads_of(*sorted(everywhere)))
    first = {min(everywhere)}
    step = threading.Barrier(2)
    seen = []

    def work():
        for _ in range(2):
            step.wait()
            seen.append(os.sched_getaffinity(0))
            step.wait()

    older = threading.Thread(target=work)
    older.start()
    with tune(**NOTHING, pin=True) as report:
        assert report.applied == {"pin": f"to cores {sorted(first)}"}
        assert os.sched_getaffinity(0) == first
        step.wait()
        step.wait()
        waiting = threading.Event()
        younger = threading.Thread(target=waiting.wait)
        younger.start()
    assert os.sched_getaffinity(0) == os.sched_getaffinity(younger.native_id) == everywhere
    step.wait()
    step.wait()
    waiting.set()
    older.join()
    younger.join()
    assert seen == [first, everywhere]


def test_a_machine_without_hyperthreads_needs_no_pinning(monkeypatch):
    cores = tuple(sorted(os.sched_getaffinity(0)))
    machine = Topology((cores,), tuple((core,) for core in cores))
    monkeypatch.setattr(runtime, "topology", lambda: machine)
    with tune(**NOTHING, pin=True) as report:
        assert report.skipped == {"pin": "there are no hyperthreads"}
