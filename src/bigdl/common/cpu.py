"""The CPU cores that this process may use, and its thread counts.

Three limits count instead of the machine's number of processors: the affinity mask (``taskset``,
cpusets, Slurm), the CPU quota of the control group (Docker, Kubernetes), and hyperthreads, which
share the vector units that limit numeric code.

Functions that read system files take a `root`, the directory that contains ``proc`` and ``sys``.
"""

import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from bigdl.common.checks import check_positive, invalidInputError
from bigdl.common.environment import EnvContext
from bigdl.common.platform import cores
from bigdl.common.platform.cores import cpu_quota, isa_flags, processor_name

__all__ = [
    "THREAD_VARIABLES",
    "Topology",
    "check_cores",
    "core_count",
    "cpu_quota",
    "isa_flags",
    "passive_waiting",
    "processor_name",
    "saturates_int8",
    "schedule_workers",
    "split_cores",
    "thread_scope",
    "topology",
    "usable_cores",
    "wait_passively",
]

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Environment variables that set the thread counts of numeric libraries when they load."""

WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables that control how OpenMP threads wait for each other."""


def usable_cores() -> list[int]:
    """Return the ids of the logical cores on which this process may run.

    Returns
    -------
    list of int
        The affinity mask in increasing order. A CPU quota does not shorten it: a quota limits
        time, not cores (see :func:`core_count`).

    Examples
    --------
    >>> from bigdl.orca.cpu_info import get_cgroup_cpuset  # the name of BigDL 2.x
    >>> len(get_cgroup_cpuset()) >= 1
    True
    """
    return cores.usable_cores()


def core_count(root: str | Path = "/") -> int:
    """Return the number of logical cores that this process can keep busy.

    Parameters
    ----------
    root : str or Path
        Directory that contains ``proc`` and ``sys``.

    Returns
    -------
    int
        The size of the affinity mask, or the CPU quota if that is less; at least 1. A quota is
        rounded down: one thread too many throttles the group in every period, and all threads
        wait at each barrier.
    """
    count = len(usable_cores())
    quota = cpu_quota(root)
    return count if quota is None else max(1, min(count, math.floor(quota)))


def check_cores(value: object) -> int:
    """Return a validated number of cores; all usable cores for None and ``"*"``."""
    if value is None or value == "*":
        return core_count()
    text = isinstance(value, str) and value.strip()
    return check_positive(
        'cores, if it is not "*",', int(text) if text and text.isdigit() else value
    )


@dataclass(frozen=True)
class Topology:
    """NUMA nodes and physical cores of the usable logical cores.

    Every usable logical core is in exactly one tuple of each attribute.

    Attributes
    ----------
    numa_nodes : tuple of tuple of int
        Logical cores of each NUMA node.
    cores : tuple of tuple of int
        Hyperthread siblings of each physical core, ordered by socket and NUMA node.
    """

    numa_nodes: tuple[tuple[int, ...], ...]
    cores: tuple[tuple[int, ...], ...]

    def physical_count(self, logical: Iterable[int]) -> int:
        """Return the number of physical cores that contain the given logical cores."""
        chosen = set(logical)
        return sum(1 for siblings in self.cores if not chosen.isdisjoint(siblings))


def topology(root: str | Path = "/", usable: Iterable[int] | None = None) -> Topology:
    """Return the NUMA nodes and physical cores of the usable logical cores.

    Parameters
    ----------
    root : str or Path
        Directory that contains ``sys``. Missing information (containers hide parts of it) means
        one socket, one NUMA node, and no hyperthreads.
    usable : iterable of int, optional
        Logical cores to describe, :func:`usable_cores` by default.

    Returns
    -------
    Topology
    """
    usable = sorted(set(usable_cores() if usable is None else usable))
    node_of = cores.node_of_cores(root)
    siblings_of: dict[int, tuple[int, ...]] = {}
    for core in usable:
        if core in siblings_of:
            continue
        # A core belongs to the first physical core that lists it, even if the files disagree.
        listed = cores.siblings_of_core(core, usable, root)
        siblings = {core, *listed}.intersection(usable).difference(siblings_of)
        siblings_of.update(dict.fromkeys(siblings, tuple(sorted(siblings))))

    def sort_key(siblings: tuple[int, ...]) -> tuple[Any, ...]:
        first = siblings[0]
        return cores.socket_of_core(first, root), node_of.get(first, 0), siblings

    nodes: dict[int, list[int]] = {}
    for core in usable:
        nodes.setdefault(node_of.get(core, 0), []).append(core)
    return Topology(
        numa_nodes=tuple(sorted(map(tuple, nodes.values()))),
        cores=tuple(sorted(set(siblings_of.values()), key=sort_key)),
    )


def split_cores(n: int, machine: Topology | None = None) -> list[list[int]]:
    """Split the usable cores into one set for each of `n` processes.

    Parameters
    ----------
    n : int
        Number of processes.
    machine : Topology, optional
        The machine to split, :func:`topology` by default.

    Returns
    -------
    list of list of int
        Logical cores of each process. The sets are disjoint, differ by at most one physical core,
        keep siblings together and follow sockets and NUMA nodes. With more processes than
        physical cores, siblings are separated; with more processes than logical cores, process i
        gets logical core i modulo their number.

    Raises
    ------
    UsageError
        If `n` is less than 1.
    """
    check_positive("The number of processes that share cores", n)
    units = [list(siblings) for siblings in (machine or topology()).cores]
    if n > len(units):
        units = [[core] for siblings in units for core in siblings]
    if n > len(units):
        return [units[index % len(units)] for index in range(n)]
    bounds = [index * len(units) // n for index in range(n + 1)]
    return [
        [core for unit in units[start:stop] for core in unit] for start, stop in pairwise(bounds)
    ]


def schedule_workers(num_workers: int, cores_per_worker: int | None = None) -> list[list[int]]:
    """Return disjoint cores for each worker, one logical core per physical core.

    Only the affinity mask limits the assigned cores; ``OMP_NUM_THREADS`` does not.

    Parameters
    ----------
    num_workers : int
    cores_per_worker : int, optional
        Physical cores of each worker. By default all of them are split evenly, and neighbours
        by socket and NUMA node stay together.

    Returns
    -------
    list of list of int
        Ids of logical cores.

    Raises
    ------
    UsageError
        If a number is less than 1 or exceeds the usable physical cores.

    Examples
    --------
    >>> from bigdl.nano.utils.common import schedule_workers
    >>> cores = schedule_workers(num_workers=1, cores_per_worker=1)  # one list for each worker
    >>> len(cores), len(cores[0])
    (1, 1)
    """
    machine = topology()
    first_siblings = tuple(siblings[:1] for siblings in machine.cores)
    have = f"{len(first_siblings)} of them may be used"
    invalidInputError(num_workers > 0, f"`num_workers` must be greater than 0, not {num_workers}")
    invalidInputError(
        num_workers <= len(first_siblings),
        "The number of processes must be less or equal to the number of physical cores, "
        f"but {num_workers} processes were asked for and {have}",
    )
    if cores_per_worker is None:
        return split_cores(num_workers, replace(machine, cores=first_siblings))
    invalidInputError(
        cores_per_worker > 0, f"`cores_per_worker` must be greater than 0, not {cores_per_worker}"
    )
    wanted = num_workers * cores_per_worker
    invalidInputError(
        wanted <= len(first_siblings),
        "The total number of cores requested must be smaller or equal than the physical cores "
        f"available, but {num_workers} × {cores_per_worker} were asked for and {have}",
    )
    order = [core for siblings in first_siblings for core in siblings]
    return [order[start : start + cores_per_worker] for start in range(0, wanted, cores_per_worker)]


def saturates_int8() -> bool:
    """Return True if int8 products are added in saturating 16-bit integers on this CPU.

    x86 without VNNI does. Its sums are exact if one factor of each product has 7 bits.

    Examples
    --------
    >>> from bigdl.common.cpu import isa_flags, saturates_int8
    >>> saturates_int8() and "avx512_vnni" in isa_flags()
    False
    """
    flags = isa_flags()
    return "sse2" in flags and not flags.intersection(("avx512_vnni", "avx_vnni", "amx_int8"))


def passive_waiting(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variable that makes waiting OpenMP threads sleep.

    By default they spin. If other processes use the same cores, a spinning thread blocks the thread
    that it waits for, and steps take ten to a hundred times as long. All OpenMP runtimes (GNU's, in
    the wheels of torch, Intel's and LLVM's) read the variable when they load.

    Parameters
    ----------
    variables : mapping of str to str, optional
        The environment; default: that of this process.

    Returns
    -------
    dict of str to str
        Empty if the environment already sets the waiting policy.

    Examples
    --------
    >>> from bigdl.common.cpu import passive_waiting
    >>> passive_waiting({})
    {'OMP_WAIT_POLICY': 'PASSIVE'}
    >>> passive_waiting({"GOMP_SPINCOUNT": "1000"})
    {}
    """
    variables = os.environ if variables is None else variables
    if any(name in variables for name in WAIT_VARIABLES):
        return {}
    return {WAIT_VARIABLES[0]: "PASSIVE"}


def wait_passively() -> None:
    """Make waiting OpenMP threads of this process sleep, unless torch is already loaded.

    For processes that run BigDL code only: its workers.
    """
    if "torch" not in sys.modules:
        os.environ.update(passive_waiting())


def thread_scope(num_threads: int) -> AbstractContextManager[None]:
    """Return a context manager that makes numeric libraries use `num_threads` threads.

    The count applies to torch if it is imported, and to every loaded OpenMP and BLAS library if
    ``threadpoolctl`` is installed. Environment variables apply it to libraries that load later and
    to child processes. The exit restores everything, also after an exception. Scopes nest.

    The environment and BLAS pools belong to the process, OpenMP's count to the calling thread. So
    scopes of two threads must not overlap in time. Entering costs about a millisecond.

    Parameters
    ----------
    num_threads : int
        Threads of each library's pool, at least 1.

    Raises
    ------
    UsageError
        If `num_threads` is not a positive int.
    """
    return _limited_threads(check_positive("num_threads", num_threads))


@contextmanager
def _limited_threads(num_threads: int) -> Iterator[None]:
    with ExitStack() as stack:
        had_torch = "torch" in sys.modules
        if had_torch:  # its counts are OpenMP's, which the limits below change
            stack.callback(_set_torch_counts, *_torch_counts())
        else:
            stack.callback(_set_default_torch_count)
        stack.enter_context(EnvContext(dict.fromkeys(THREAD_VARIABLES, num_threads)))
        with suppress(ImportError):
            from threadpoolctl import threadpool_limits

            stack.enter_context(threadpool_limits(num_threads))
        if had_torch:
            import torch

            torch.set_num_threads(num_threads)
        yield


_T = TypeVar("_T")


def _torch_counts() -> tuple[int, int]:
    """Return torch's thread counts for this thread and for new threads."""
    import torch

    return torch.get_num_threads(), in_new_thread(torch.get_num_threads)


def _set_torch_counts(count: int, of_later_threads: int) -> None:
    import torch

    torch.set_num_threads(count)  # for this thread, and for later ones
    if of_later_threads != count:
        in_new_thread(lambda: torch.set_num_threads(of_later_threads))


def in_new_thread(function: Callable[[], _T]) -> _T:
    """Run a function in a new thread and return its value."""
    results: list[_T] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def _set_default_torch_count() -> None:
    """Set torch's default thread count if torch was first imported inside a thread-limit scope."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):
        wanted = os.environ.get("OMP_NUM_THREADS", "")
        machine = topology()
        default = min(machine.physical_count(usable_cores()), core_count())
        torch.set_num_threads(int(wanted) if wanted.isdigit() and int(wanted) else default)
