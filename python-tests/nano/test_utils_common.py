"""Names of ``bigdl.nano.utils.common``."""

import importlib.metadata
import operator
import os
import subprocess
import sys
import types

import pytest

from bigdl.common import cpu
from bigdl.common.cpu import Topology, isa_flags, topology, usable_cores
from bigdl.common.errors import UsageError, WorkerError
from bigdl.nano.utils import common

# --- imports


def python(program, **environ):
    return subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environ, capture_output=True, text=True
    )


def test_importing_changes_nothing_and_loads_no_framework():
    seen = python(
        "import logging, os, sys, warnings\n"
        "def settings(): return (dict(os.environ), list(warnings.filters),\n"
        "                        logging.root.level, list(logging.root.handlers))\n"
        "before = settings()\n"
        "import bigdl.nano.utils.common, bigdl.nano.runtime\n"
        "print(settings() == before, {'torch', 'numpy', 'openvino'} & set(sys.modules))"
    )
    assert seen.stdout == "True set()\n", seen.stderr


# --- checks and advice


@pytest.mark.parametrize("check", [common.invalidInputError, common.invalidOperationError])
def test_a_check_raises_unless_its_condition_holds(check):
    check(True, "wrong")
    with pytest.raises(UsageError, match="wrong") as caught:
        check(False, "wrong", "do right")
    assert isinstance(caught.value, RuntimeError)
    assert str(caught.value) == "wrong"
    assert caught.value.__notes__ == ["What to do: do right"]


def test_suggestions_are_shown_once_when_the_program_ends():
    seen = python(
        "from bigdl.nano.utils.common import register_suggestion\n"
        "for text in ['use more', 'use less', 'use more']: register_suggestion(text)\n"
        "print('last line')"
    )
    assert seen.stdout == "last line\n"
    lines = ["bigdl.nano suggests: use more", "bigdl.nano suggests: use less"]
    assert seen.stderr.splitlines() == lines


def test_suggestions_that_were_shown_are_not_shown_again(capsys):
    common.register_suggestion("rest")
    common.output_suggestions()
    common.output_suggestions()
    assert capsys.readouterr().err == "bigdl.nano suggests: rest\n"


# --- environment


def test_environment_holds_inside_and_is_restored_after_an_error(monkeypatch):
    monkeypatch.setenv("KEPT", "old")
    monkeypatch.delenv("ADDED", raising=False)
    context = common.EnvContext(env={"KEPT": "new", "ADDED": 3})

    def fail_inside():
        with context:
            assert (os.environ["KEPT"], os.environ["ADDED"]) == ("new", "3")
            with common.EnvContext({"KEPT": None}):
                assert "KEPT" not in os.environ
                with context:
                    assert os.environ["KEPT"] == "new"
                assert "KEPT" not in os.environ
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert os.environ["KEPT"] == "old"
    assert "ADDED" not in os.environ


# --- processor and packages


def test_instruction_sets_are_those_of_the_processor():
    info, flags = common.CPUInfo(), isa_flags()
    assert info.flags == flags
    assert info.has_avx512 == common._avx512_checker() == ("avx512f" in flags)
    assert info.has_avx2 == common._avx2_checker() == ("avx2" in flags)
    assert info.has_bf16 == common._bf16_checker() == bool({"avx512_bf16", "amx_bf16"} & flags)
    assert info.has_vnni == bool({"avx512_vnni", "avx_vnni"} & flags)


def test_a_version_is_compared_without_importing_the_package():
    seen = python(
        "import operator, sys\n"
        "from bigdl.nano.utils.common import compare_version\n"
        "print(compare_version('torch', operator.ge, '2.0'), 'torch' in sys.modules)"
    )
    assert seen.stdout == "True False\n", seen.stderr


@pytest.mark.parametrize(
    ("package", "op", "version", "base", "holds"),
    [
        ("fake", operator.ge, "2.0.0", False, False),
        ("fake", operator.ge, "2.0.0", True, True),
        ("fake", operator.lt, "2.0.0", False, True),
        ("fake", operator.eq, "2.0.0rc1+cpu", False, True),
        ("PIL", operator.ge, "1.0", False, True),  # module and distribution differ
        ("never-installed", operator.ge, "0", False, False),
    ],
)
def test_versions_compare(monkeypatch, package, op, version, base, holds):
    fake = types.ModuleType("fake")
    fake.__version__ = "2.0.0rc1+cpu"
    monkeypatch.setitem(sys.modules, "fake", fake)
    assert common.compare_version(package, op, version, base) is holds


def test_a_package_counts_when_it_is_installed(monkeypatch):
    for name in ("neural_compressor", "onnxruntime", "openvino"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert common._inc_checker()
    assert common._onnxruntime_checker()
    assert common._openvino_checker()
    assert not common._is_installed("never_installed")


@pytest.mark.parametrize(
    ("ipex", "torch", "fits"),
    [("2.8.0+cpu", "2.8.1", True), ("2.8.0", "2.13.0", False), (None, "2.13.0", False)],
)
def test_ipex_counts_only_beside_its_own_torch(monkeypatch, ipex, torch, fits):
    def version(package):
        found = {"intel_extension_for_pytorch": ipex, "torch": torch}[package]
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert common._ipex_checker() is fits


# --- cores

MACHINE = Topology(
    numa_nodes=((0, 1, 4, 5), (2, 3, 6, 7)),
    cores=((0, 4), (1, 5), (2, 6), (3, 7)),
)


@pytest.fixture
def four_cores(monkeypatch):
    """Two sockets of two physical cores with hyperthreads."""
    monkeypatch.setattr(cpu, "topology", lambda: MACHINE)


def test_affinity_core_num_is_the_size_of_the_mask():
    assert common.get_affinity_core_num() == len(os.sched_getaffinity(0))


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("workers", "per_worker", "cores"),
    [
        (1, None, [[0, 1, 2, 3]]),
        (2, None, [[0, 1], [2, 3]]),
        (4, None, [[0], [1], [2], [3]]),
        (3, 1, [[0], [1], [2]]),
        (1, 3, [[0, 1, 2]]),
        (2, 2, [[0, 1], [2, 3]]),
    ],
)
def test_each_worker_gets_one_logical_core_of_each_of_its_physical_ones(workers, per_worker, cores):
    assert common.schedule_workers(workers, per_worker) == cores


@pytest.mark.usefixtures("four_cores")
def test_all_physical_cores_are_given_to_some_worker():
    shares = common.schedule_workers(3)
    assert sorted(core for share in shares for core in share) == [0, 1, 2, 3]
    assert {len(share) for share in shares} == {1, 2}


@pytest.mark.usefixtures("four_cores")
def test_omp_num_threads_is_not_a_number_of_cores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert common.schedule_workers(2) == [[0, 1], [2, 3]]


def test_workers_of_this_machine_get_usable_cores():
    count = len(topology().cores)
    shares = common.schedule_workers(count)
    assert {core for share in shares for core in share} <= set(usable_cores())
    assert len(shares) == count


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("workers", "per_worker", "message"),
    [
        (5, None, "number of processes must be less or equal to the number of physical cores"),
        (2, 0, "`cores_per_worker` must be greater than 0, not 0"),
        (2, 3, "cores requested must be smaller or equal than the physical cores available"),
        (0, None, "`num_workers` must be greater than 0, not 0"),
    ],
)
@pytest.mark.parametrize("function", [common.schedule_workers, common.schedule_processors])
def test_more_than_there_is_cannot_be_scheduled(function, workers, per_worker, message):
    with pytest.raises(UsageError, match=message):
        function(workers, per_worker)


@pytest.mark.usefixtures("four_cores")
def test_processors_are_environments(monkeypatch):
    monkeypatch.setenv("OWN", "kept")
    first, second = common.schedule_processors(2)
    assert first["KMP_AFFINITY"] == "granularity=fine,proclist=[0,1],explicit"
    assert second["KMP_AFFINITY"] == "granularity=fine,proclist=[2,3],explicit"
    assert (first["OMP_NUM_THREADS"], first["PROCESS_IDX"], second["PROCESS_IDX"]) == (
        ("2", "0", "1")
    )
    assert first["OWN"] == "kept"
    assert "PROCESS_IDX" not in os.environ


# --- a process of its own


@pytest.mark.slow
def test_a_new_process_counts_threads_by_its_environment():
    def count(scale, *, plus=0):
        import torch

        return scale * torch.get_num_threads() + plus

    run = common.spawn_new_process(count)
    assert run(10, plus=5, env_var={"OMP_NUM_THREADS": 1}) == 15


def test_a_new_process_has_the_environment_of_its_parent(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("OWN", "1")
    environ = common.spawn_new_process(lambda: dict(os.environ))(env_var={"OWN": None, "B": "2"})
    assert (environ["OMP_NUM_THREADS"], environ["B"]) == ("7", "2")
    assert not {"OWN", "MKL_NUM_THREADS"} & environ.keys()


def test_a_new_process_is_another_one_and_may_use_all_cores():
    pid, cores = common.spawn_new_process(lambda: (os.getpid(), os.sched_getaffinity(0)))()
    assert pid != os.getpid()
    assert cores == os.sched_getaffinity(0)


def test_an_exception_of_the_new_process_is_raised_with_its_traceback():
    def fail():
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost") as caught:
        common.spawn_new_process(fail)()
    (note,) = caught.value.__notes__
    assert "in fail" in note


def test_an_exception_that_cannot_travel_is_raised_as_text():
    class Stubborn(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one}{two}")

    def fail():
        raise Stubborn("so", "so")

    with pytest.raises(WorkerError, match="soso"):
        common.spawn_new_process(fail)()


# --- functions


def test_default_arguments_are_those_with_a_default():
    def function(a, b=None, *args, c=3, **kwargs):
        pass

    assert common.get_default_args(function) == {"b": None, "c": 3}


def test_a_deprecated_function_warns_its_caller_and_works():
    @common.deprecated("old", message="Use new.")
    def function(x):
        """Text."""
        return x + 1

    with pytest.warns(DeprecationWarning, match=r"^old is deprecated\. Use new\.$") as seen:
        assert function(1) == 2
    assert seen[0].filename == __file__
    assert function.__doc__ == "Text."


def test_leaves_are_flattened_in_order():
    leaves = [0]
    common._flatten({"a": [1, (2, {"b": 3})], "c": 4, "d": []}, leaves)
    assert leaves == [0, 1, 2, 3, 4]


def test_latency_is_in_milliseconds_and_complete():
    calls = []
    latency, complete = common.latency_calculate_helper(
        10, 60.0, lambda *args: calls.append(args), "model", "sample", 7
    )
    assert complete
    assert 0 <= latency < 1000
    assert calls == [("model", "sample", 7)] * 12


def test_latency_of_a_call_that_is_far_too_slow_is_given_up():
    calls = []
    _, complete = common.latency_calculate_helper(100, 0.0, lambda *args: calls.append(1), 0, 0)
    assert not complete
    assert len(calls) == 5
