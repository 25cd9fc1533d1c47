"""Calls of the operating system, and the features that each system lacks.

No other package names an operating system or uses a call that only some of them have
(``python-tests/common/test_platform_calls.py`` checks this). A module here looks for the call
itself (``hasattr(os, "memfd_create")``), so it also works where a container or a Python build
hides one. It asks for the name of the system only if two systems have the same call with another
meaning. Linux keeps its fastest calls; the others get portable ones.

``cores``
    Affinity, threads, instruction sets, control groups.
``files``
    Locks, owners, preallocation, mappings, files in memory.
``memory``
    The C library's allocator, memory of the process and of the machine.
``network``
    Shared ports, local sockets, host names.
``processes``
    Workers that end with their parent, process groups, forks, limits, signals.
"""

from __future__ import annotations

import sys

__all__ = ["LOSSES", "loss", "system_name"]

MACOS = "macOS"
WINDOWS = "Windows"
ARM = "Linux on ARM"

LOSSES: dict[str, dict[str, str]] = {
    "CPU affinity": {
        MACOS: "Workers are not pinned to cores; only their numbers of threads are set.",
        WINDOWS: "Threads that already run are not pinned, only processes.",
    },
    "CPU topology": {
        MACOS: "Efficiency cores are not used for threads; their number comes from sysctl.",
        WINDOWS: "NUMA nodes are not read; hyperthreads of one core are those with adjacent ids.",
    },
    "instruction sets": {
        MACOS: "They are read from sysctl.",
        WINDOWS: "AVX-512 VNNI and AMX are not reported, so int8 on x86 uses 7-bit weights.",
        ARM: "OpenVINO and PyTorch compute most int8 layers in floating point.",
    },
    "CPU and memory limits of containers": {
        MACOS: "There are none: containers run in a Linux machine.",
        WINDOWS: "Limits of job objects are not read.",
    },
    "large objects between processes": {
        MACOS: "They are copied through the pipe instead of being mapped.",
        WINDOWS: "They are copied through the pipe instead of being mapped.",
    },
    "gradients in shared memory": {
        MACOS: "The memory is a mapped temporary file, so pages can be written to the disk.",
        WINDOWS: "The memory is a mapped temporary file, so pages can be written to the disk.",
    },
    "tables in memory": {
        MACOS: "Records are in an unlinked temporary file.",
        WINDOWS: "Records are in a temporary file that is deleted when it is closed.",
    },
    "end of workers with their parent": {
        MACOS: "A thread of the worker looks for the parent, so a worker that holds the GIL in "
        "native code ends only when it releases it.",
        WINDOWS: "A job object ends the workers of a process.",
    },
    "temporary files of killed programs": {
        WINDOWS: "They are removed by the next program of the user.",
    },
    "tables mapped by all workers of a machine": {
        WINDOWS: "Each worker of a fit takes rows that it has read, or copies of others.",
    },
    "private files": {
        WINDOWS: "The access rights of the parent folder apply, as there are no owners and modes.",
    },
    "preallocated files": {
        MACOS: "A full disk is noticed while writing.",
        WINDOWS: "A full disk is noticed while writing.",
    },
    "read-ahead of mapped files": {
        WINDOWS: "The system chooses it.",
    },
    "memory of the allocator": {
        MACOS: "Freed memory is not kept for the next step: the C library is not glibc.",
        WINDOWS: "Freed memory is not kept for the next step: the C library is not glibc.",
    },
    "preloaded allocators of bigdl-nano-run": {
        MACOS: "None is preloaded; thread counts are set.",
        WINDOWS: "None is preloaded; thread counts are set.",
    },
    "peak memory of a trial": {
        MACOS: "It is sampled.",
        WINDOWS: "It is sampled.",
    },
    "forked training processes": {
        MACOS: "distributed_backend='fork' needs Linux, as macOS libraries do not survive a fork; "
        "use 'subprocess'.",
        WINDOWS: "distributed_backend='fork' needs Linux, as Windows has no fork; use "
        "'subprocess'.",
    },
    "several processes of a server": {
        MACOS: "Serving (also bigdl-friesian-serve) with several workers needs Linux, whose "
        "kernel distributes the connections of a shared port; use one worker.",
        WINDOWS: "Serving (also bigdl-friesian-serve) with several workers needs Linux, whose "
        "kernel distributes the connections of a shared port; use one worker.",
    },
    "standalone Spark cluster": {
        MACOS: 'init_orca_context("standalone") needs Linux, whose kernel ends the daemons with '
        'their supervisor; use "local".',
        WINDOWS: 'init_orca_context("standalone") needs Linux, whose kernel ends the daemons '
        'with their supervisor; use "local", or run in WSL 2.',
    },
    "Ray on Spark": {
        MACOS: 'Ray on Spark executors needs executors on Linux; use init_orca_context("ray").',
        WINDOWS: "Ray on Spark executors needs executors on Linux; use "
        'init_orca_context("ray"), or run in WSL 2.',
    },
    "MXNet": {
        MACOS: "Its last release has no wheels for macOS; port the model to PyTorch.",
        WINDOWS: "Its last release has no wheels for Windows; port the model to PyTorch.",
    },
}
"""Losses by feature and system; a system that is not listed has the whole feature.

WSL 2 is Linux and loses nothing.
"""


def system_name() -> str:
    """Return ``"Linux"``, ``"macOS"``, ``"Windows"`` or another value of ``sys.platform``."""
    names = {"linux": "Linux", "darwin": MACOS, "win32": WINDOWS}
    return names.get(sys.platform, sys.platform)


def loss(feature: str) -> str:
    """Return the sentence of :data:`LOSSES` for a feature that this system lacks."""
    losses = LOSSES[feature]
    return losses.get(system_name(), losses[MACOS])
