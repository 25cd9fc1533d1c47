import gc
import os
import subprocess
import sys
import textwrap
import weakref

import pytest

from bigdl.common.memory import (
    available_memory,
    freeze_modules,
    glibc_tunables,
    tune_allocator,
)

MB = 1 << 20


def run(program, **environ):
    """Run a program in a process with an untouched allocator and return its output."""
    seen = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return seen.stdout


@pytest.fixture
def machine(tmp_path):
    """Write the system files of a fake machine, passed as path=text, and return its root."""

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def v2(**groups):
    mount = "35 24 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    return {"proc/self/mountinfo": mount, "proc/self/cgroup": "0::/pod/main\n"} | {
        f"sys/fs/cgroup/{name}": text for name, text in groups.items()
    }


# --- the allocator


FAULTS_PER_LARGE_BUFFER = """
import resource
from bigdl.common.memory import tune_allocator
if {tuned}:
    assert tune_allocator()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    for k in range(1, 5):
        bytearray(b"x") * (k * 16 << 20)
step()
before = faults()
step()
step()
print(faults() - before)
"""


@pytest.mark.skipif(not hasattr(os, "confstr"), reason="needs a Unix")
@pytest.mark.linux("the allocator of glibc")
def test_a_tuned_allocator_takes_no_page_faults_for_buffers_of_a_known_size():
    if "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""):
        pytest.skip("needs glibc")
    untuned = int(run(FAULTS_PER_LARGE_BUFFER.format(tuned=False)))
    tuned = int(run(FAULTS_PER_LARGE_BUFFER.format(tuned=True)))
    assert untuned > 1000
    assert tuned < untuned / 10


MEMORY_KEPT_AND_LEFT = """
import numpy as np
import psutil
from bigdl.common.memory import tuned_allocator
def anonymous():
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared
before = anonymous()
with tuned_allocator():
    buffers = [np.ones(1 << 20) for _ in range(32)]
    del buffers
    kept = anonymous() - before
print(kept >> 20, anonymous() - before >> 20)
"""


@pytest.mark.linux("the allocator of glibc")
def test_a_tuned_allocator_gives_back_at_its_end_what_it_kept():
    if "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""):
        pytest.skip("needs glibc")
    kept, left = map(int, run(MEMORY_KEPT_AND_LEFT).split())
    assert kept >= 200
    assert left <= 80


OVERLAPPING = """
import contextlib
import numpy as np
import psutil
from bigdl.common.memory import tuned_allocator
def anonymous():
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared
def megabytes_kept():
    buffers = [np.ones(1 << 20) for _ in range(32)]
    del buffers
    return anonymous() - before >> 20
before = anonymous()
with contextlib.ExitStack() as outer:
    print(outer.enter_context(tuned_allocator()))
    with tuned_allocator() as inner:
        print(inner)
    print(megabytes_kept() > 200)
print(anonymous() - before >> 20 < 80)
"""


@pytest.mark.linux("the allocator of glibc")
def test_an_allocator_stays_tuned_until_the_last_context_ends():
    if "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""):
        pytest.skip("needs glibc")
    assert run(OVERLAPPING).split() == ["True"] * 4


def test_tunables_of_glibc_tune_a_process_from_its_start():
    tunables = ":".join(f"{name}={value}" for name, value in glibc_tunables().items())
    if not tunables:
        pytest.skip("needs glibc")
    untuned = int(run(FAULTS_PER_LARGE_BUFFER.format(tuned=False)))
    tuned = int(run(FAULTS_PER_LARGE_BUFFER.format(tuned=False), GLIBC_TUNABLES=tunables))
    assert tuned < untuned / 10


def test_what_tunables_of_glibc_have_tuned_is_left_alone(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1")
    assert tune_allocator() is False


@pytest.mark.parametrize("library", ["libjemalloc.so.2", "libtcmalloc_minimal.so.4"])
def test_a_preloaded_allocator_is_left_alone(monkeypatch, library):
    monkeypatch.setenv("LD_PRELOAD", f"/usr/lib/{library}")
    assert tune_allocator() is False


def test_another_libc_is_left_alone(monkeypatch):
    class Musl:
        def mallopt(self, parameter, value):
            raise AssertionError("called")

    monkeypatch.setattr("ctypes.CDLL", lambda name: Musl())
    assert tune_allocator() is False


# --- limits


def test_available_memory_is_what_the_tightest_group_has_left_with_its_cache(machine):
    groups = {
        "pod/memory.max": f"{1000 * MB}\n",
        "pod/memory.current": f"{900 * MB}\n",
        "pod/memory.stat": f"anon {600 * MB}\ninactive_file {300 * MB}\n",
        "pod/main/memory.max": f"{800 * MB}\n",
        "pod/main/memory.current": f"{100 * MB}\n",
    }
    root = machine(v2(**groups) | {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 9999999 kB\n"})
    assert available_memory(root) == 400 * MB


def test_available_memory_is_the_machines_where_groups_leave_more(machine):
    groups = {"pod/memory.max": f"{1000 * MB}\n", "pod/memory.current": "0\n"}
    root = machine(v2(**groups) | {"proc/meminfo": "MemAvailable:  1024 kB\n"})
    assert available_memory(root) == MB


def test_available_memory_of_this_machine_is_less_than_all_of_it():
    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_memory() < everything


def test_freeze_modules_spares_the_collector_what_was_loaded_and_only_that():
    program = """
        import gc
        from bigdl.common.memory import freeze_modules
        freeze_modules()
        first = gc.get_freeze_count()
        kept = [[i] for i in range(1000)]
        freeze_modules()
        again = gc.get_freeze_count()
        import decimal
        freeze_modules()
        print(first > 1000, again - first < 100, gc.get_freeze_count() > again + 1000)
    """
    assert run(textwrap.dedent(program)).split() == ["True"] * 3


def test_what_was_frozen_is_freed_when_nothing_refers_to_it():
    class Value:
        pass

    value = Value()
    gone = weakref.ref(value)
    freeze_modules()
    gc.freeze()
    del value
    gc.unfreeze()
    gc.freeze()  # as conftest.py does
    assert gone() is None
