"""CPU affinity, threads, instruction sets and control groups.

Functions that read system files take a `root`, the directory that contains ``proc`` and ``sys``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from bigdl.common.timeouts import SYSCTL_S

_NUMA = "sys/devices/system/node"
_SYSCTL_FLAGS = {
    "arm.AdvSIMD": "asimd",
    "arm.FEAT_BF16": "bf16",
    "arm.FEAT_DotProd": "asimddp",
    "arm.FEAT_FP16": "asimdhp",
    "arm.FEAT_I8MM": "i8mm",
    "arm.FEAT_SME": "sme",
    "sse2": "sse2",
    "avx1_0": "avx",
    "avx2_0": "avx2",
    "fma": "fma",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512vl": "avx512vl",
    "avx512vnni": "avx512_vnni",
}
"""Names of macOS below ``hw.optional``, and of Linux."""

_WINDOWS_FLAGS = {
    10: "sse2",
    19: "asimd",
    39: "avx",
    40: "avx2",
    41: "avx512f",
    43: "asimddp",
}
"""Numbers of ``IsProcessorFeaturePresent``, and names of Linux."""


def read_text(path: Path) -> str:
    """Return the content of a system file, or an empty string if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# Affinity -----------------------------------------------------------------------------------------


def usable_cores() -> list[int]:
    """Return the ids of the logical cores on which this process may run, in increasing order.

    Where a process cannot be pinned, the ids are 0 to the number of cores minus 1; of Apple's
    processors only the performance cores count, as the others are several times slower.
    """
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    if affinity is not None:
        return sorted(affinity(0))
    if sys.platform == "win32":
        import psutil

        return sorted(psutil.Process().cpu_affinity())
    return list(range(_sysctl_number("hw.perflevel0.logicalcpu") or os.cpu_count() or 1))


def pin_process(cores: Iterable[int]) -> bool:
    """Pin the calling thread and all threads that it starts to cores; return False if impossible.

    On Windows this pins the process.
    """
    set_affinity: Callable[[int, Iterable[int]], None] | None
    set_affinity = getattr(os, "sched_setaffinity", None)
    if set_affinity is not None:
        set_affinity(0, cores)
        return True
    if sys.platform == "win32":
        import psutil

        psutil.Process().cpu_affinity(list(cores))
        return True
    return False


def can_pin_threads() -> bool:
    """Return True if running threads can be pinned to cores."""
    return hasattr(os, "sched_setaffinity") and os.path.isdir("/proc/self/task")


@contextlib.contextmanager
def pinned_threads(chosen: Callable[[set[int]], set[int]]) -> Iterator[None]:
    """Context manager that restricts all threads of this process to a subset of their cores.

    Parameters
    ----------
    chosen : callable
        Maps the cores of a thread to a subset.

    Notes
    -----
    Only if :func:`can_pin_threads`. Threads that start in the block get the affinity that the
    calling thread had.
    """
    if sys.platform == "win32" or sys.platform == "darwin":
        yield
        return
    of_caller = os.sched_getaffinity(0)
    before = {}
    for thread in _thread_ids():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            before[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, chosen(before[thread]))
    try:
        yield
    finally:
        for thread in _thread_ids():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, before.get(thread, of_caller))


def _thread_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def thread_count() -> int:
    """Return the number of threads of this process, including those of native libraries."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    import psutil

    return int(psutil.Process().num_threads())


def has_thread(native_id: int) -> bool:
    """Return True if the kernel lists a thread of this process."""
    return os.path.exists(f"/proc/self/task/{native_id}")


# Topology -----------------------------------------------------------------------------------------


def node_of_cores(root: str | Path = "/") -> dict[int, int]:
    """Return the NUMA node of each logical core; empty if the system does not report them."""
    return {
        core: int(directory.name.removeprefix("node"))
        for directory in Path(root, _NUMA).glob("node[0-9]*")
        for core in parse_ids(read_text(directory / "cpulist"))
    }


def numa_numbers(
    groups: Sequence[Sequence[int]], root: str | Path = "/"
) -> dict[int, Sequence[int]]:
    """Return the usable cores of each NUMA node, by the kernel's node number.

    Parameters
    ----------
    groups : sequence of sequence of int
        Logical cores of each node.
    root : str or Path
        Directory that contains ``sys``.
    """
    nodes = {}
    for cores in groups:
        entries = list(Path(root, _NUMA).glob(f"node*/cpu{cores[0]}"))
        nodes[int(entries[0].parent.name[4:]) if entries else 0] = cores
    return nodes


def siblings_of_core(core: int, usable: Sequence[int], root: str | Path = "/") -> set[int]:
    """Return the hyperthread siblings of a core that the system reports, without the core itself.

    Parameters
    ----------
    core : int
    usable : sequence of int
        Usable logical cores.
    root : str or Path
        Directory that contains ``sys``.
    """
    if sys.platform == "win32":
        import psutil

        width = (os.cpu_count() or 1) // (psutil.cpu_count(logical=False) or 1)
        return {each for each in usable if width > 1 and each // width == core // width} - {core}
    about = _topology_directory(core, root)
    listed = read_text(about / "core_cpus_list") or read_text(about / "thread_siblings_list")
    return set(parse_ids(listed)) - {core}


def socket_of_core(core: int, root: str | Path = "/") -> int:
    """Return the number of the socket that contains a core, or 0."""
    text = read_text(_topology_directory(core, root) / "physical_package_id").strip()
    return int(text) if text.isdigit() else 0


def _topology_directory(core: int, root: str | Path) -> Path:
    return Path(root, f"sys/devices/system/cpu/cpu{core}/topology")


def parse_ids(text: str) -> list[int]:
    """Parse a kernel list of ids such as ``0-3,8``."""
    ids: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            ids += range(int(first), int(last or first) + 1)
    return ids


# Instruction sets ---------------------------------------------------------------------------------


def isa_flags(root: str | Path = "/") -> frozenset[str]:
    """Return the instruction-set extensions that all processors of the machine have.

    Parameters
    ----------
    root : str or Path
        Directory that contains ``proc``.

    Returns
    -------
    frozenset of str
        Names as Linux spells them: ``avx2``, ``avx512f``, ``avx512_vnni``, ``avx512_bf16``,
        ``amx_tile``, …; on ARM ``asimd``, ``sve``, ``bf16``, ``i8mm``, …. Empty if the system does
        not report them.
    """
    lines = (line.partition(":") for line in read_text(Path(root, "proc/cpuinfo")).splitlines())
    processors = {value for name, _, value in lines if name.strip() in ("flags", "Features")}
    sets = [frozenset(value.lower().split()) for value in processors]
    if sets:
        return frozenset.intersection(*sets)
    return _other_flags() if str(root) == "/" else frozenset()


@functools.cache
def _other_flags() -> frozenset[str]:
    if sys.platform == "win32":
        import ctypes

        has = ctypes.windll.kernel32.IsProcessorFeaturePresent
        return frozenset(name for number, name in _WINDOWS_FLAGS.items() if has(number))
    return flags_of_sysctl(_sysctl("hw.optional"))


def flags_of_sysctl(text: str) -> frozenset[str]:
    """Return Linux's names of the features in the output of ``sysctl hw.optional`` on macOS."""
    flags = set()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        flag = _SYSCTL_FLAGS.get(name.removeprefix("hw.optional."))
        if flag is not None and value.strip() == "1":
            flags.add(flag)
    return frozenset(flags)


@functools.cache
def processor_name(root: str | Path = "/") -> str:
    """Return the vendor, family, model and name of the machine's first processor.

    Parameters
    ----------
    root : str or Path
        Directory that contains ``proc``.

    Returns
    -------
    str
        Empty if the system does not report them.
    """
    text = read_text(Path(root, "proc/cpuinfo")).partition("\n\n")[0]
    lines = (line.partition(":") for line in text.splitlines())
    facts = {name.strip(): value.strip() for name, _, value in lines}
    known = ("vendor_id", "CPU implementer", "cpu family", "model", "CPU part", "model name")
    return " ".join(facts[name] for name in known if name in facts)


def processor_type() -> str:
    """Return the name of the processor's type, such as ``"x86_64"`` or ``"arm64"``."""
    return platform.processor() or platform.machine()


@functools.cache
def _sysctl(*arguments: str) -> str:
    """Return the output of ``sysctl``, or an empty string where it does not know the names."""
    if sys.platform == "win32":
        return ""
    try:
        run = subprocess.run(
            ["/usr/sbin/sysctl", *arguments], capture_output=True, text=True, timeout=SYSCTL_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout if run.returncode == 0 else ""


def _sysctl_number(name: str) -> int | None:
    text = _sysctl("-n", name).strip()
    return int(text) if text.isdigit() else None


def has_nvidia_driver() -> bool:
    """Return True if Linux has loaded the driver of NVIDIA's GPUs."""
    return os.path.exists("/proc/driver/nvidia")


# Control groups -----------------------------------------------------------------------------------


def cpu_quota(root: str | Path = "/") -> float | None:
    """Return the lowest CPU quota, in cores, of this process's control group and its ancestors.

    Parameters
    ----------
    root : str or Path
        Directory that contains ``proc`` and ``sys``.

    Returns
    -------
    float or None
        The lowest of ``cpu.max`` (cgroup v2) and ``cpu.cfs_quota_us / cpu.cfs_period_us`` (v1),
        e.g. 1.5; None if there is no limit.
    """
    quotas = []
    for directory in cgroup_directories("cpu", root):
        words = read_text(directory / "cpu.max").split()
        if not words:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [read_text(directory / name).strip() for name in names]
        if len(words) == 2 and all(word.isdigit() for word in words):  # else "max" or -1
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def cgroup_directories(controller: str, root: str | Path = "/") -> list[Path]:
    """Return the cgroup directories that contain one controller's limits for this process.

    Parameters
    ----------
    controller : str
        ``"cpu"`` or ``"memory"``.
    root : str or Path
        Directory that contains ``proc`` and ``sys``.

    Returns
    -------
    list of Path
        The process's group, then its visible ancestors, in both v1 and v2 hierarchies: many
        machines mount both.
    """
    root = Path(root)
    group_paths: dict[str, str] = {}
    path: str | None
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        group_paths.update(dict.fromkeys(controllers.split(","), path))  # v2 has no controllers: ""
    directories = []
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        fields, _, mount = line.partition(" - ")
        filesystem, _, options = mount.split(" ", 2)
        if filesystem == "cgroup2":
            path = group_paths.get("")
        elif filesystem == "cgroup" and controller in options.split(","):
            path = group_paths.get(controller)
        else:
            continue
        mounted, mount_point = fields.split()[3:5]
        mounted = mounted.rstrip("/")
        if path is None:
            continue
        # A container may mount only a branch of the tree, while the process's group path is still
        # the one on the host.
        inside = path == mounted or path.startswith(mounted + "/")
        parts = Path(path[len(mounted) :].lstrip("/")).parts if inside else ()
        top = root / mount_point.lstrip("/")
        chain = [top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
        directories += [directory for directory in chain if directory.is_dir()]
    return directories
