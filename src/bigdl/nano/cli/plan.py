"""Which variables pay, given the options, the machine and what the user has set."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bigdl.common.memory import glibc_tunables
from bigdl.nano.cli.libraries import JEMALLOC, OPENMP, TCMALLOC, find_library
from bigdl.nano.runtime.threads import best_thread_count

__all__ = ["Plan", "make_plan", "preloads"]

_JEMALLOC_CONF = (
    "oversize_threshold:1,background_thread:false,metadata_thp:always,"
    "dirty_decay_ms:-1,muzzy_decay_ms:-1"
)
_ALLOCATORS = ("libjemalloc", "libtcmalloc", "libmimalloc")
_HOW_TO_INSTALL = {
    "jemalloc": "apt install libjemalloc2, or conda install jemalloc",
    "tcmalloc": "apt install libtcmalloc-minimal4, or conda install gperftools",
}


@dataclass
class Plan:
    """What is to be set.

    Attributes
    ----------
    values : dict
        Variables and their values, ``LD_PRELOAD`` apart.
    preload : list of str
        Libraries to add to ``LD_PRELOAD``.
    scripts : list of str
        Shell scripts to source.
    notes : list of str
        What the user should know, a line each.
    """

    values: dict[str, str] = field(default_factory=dict)
    preload: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def preloads(environ: Mapping[str, str]) -> list[str]:
    """The libraries that ``LD_PRELOAD`` names; blanks and colons separate them."""
    return environ.get("LD_PRELOAD", "").replace(":", " ").split()


def make_plan(options: argparse.Namespace, environ: Mapping[str, str]) -> Plan:
    """Decide about each variable.

    Parameters
    ----------
    options : argparse.Namespace
        As :func:`bigdl.nano.cli.options.make_parser` makes it.
    environ : mapping
        The environment without anything that an earlier plan has set.

    Returns
    -------
    Plan
        A variable that the user has set stays as it is, and a note says so, unless an option
        asks for another value.
    """
    plan = Plan()
    wanted = {"TF_ENABLE_ONEDNN_OPTS": "1"}
    asked_for: set[str] = set()
    if options.openmp:
        wanted |= _openmp(options, plan)
        if "MKL_NUM_THREADS" in environ:  # it would count, where it differs from OpenMP's
            wanted["MKL_NUM_THREADS"] = wanted["OMP_NUM_THREADS"]
        if options.cores is not None:
            asked_for |= {"MKL_NUM_THREADS", "OMP_NUM_THREADS"}
        if options.perf:
            asked_for |= {"KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"}
    if options.gpu:
        _add_oneapi(plan, environ)
    elif options.allocator != "none":
        wanted |= _allocator(options.allocator, plan, environ)
    for name, value in wanted.items():
        kept = environ.get(name)
        if kept is None or name in asked_for:
            plan.values[name] = value
        elif kept != value:
            plan.notes.append(f"{name}={kept} stays as you set it; {value} was not set")
    return plan


def _openmp(options: argparse.Namespace, plan: Plan) -> dict[str, str]:
    wanted = {"OMP_NUM_THREADS": str(options.cores or best_thread_count())}
    runtime = find_library(OPENMP) if sys.platform == "linux" else None
    if runtime is not None:
        plan.preload.append(str(runtime))
        binding = "compact,1,0" if options.perf else "none"
        wanted |= {"KMP_AFFINITY": f"granularity=fine,{binding}", "KMP_BLOCKTIME": "1"}
    else:
        plan.notes.append(
            "libiomp5 was not found, so the OpenMP of each library stays in use "
            "(pip install intel-openmp brings it)"
        )
        if options.perf:
            wanted |= {"OMP_PLACES": "cores", "OMP_PROC_BIND": "close"}
    if options.sgx:
        wanted |= {
            "MKL_DYNAMIC": "FALSE",
            "MKL_NUM_THREADS": wanted["OMP_NUM_THREADS"],
            "OMP_PROC_BIND": "close",
            "OMP_SCHEDULE": "STATIC",
        }
    return wanted


def _allocator(name: str, plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    if sys.platform != "linux":
        plan.notes.append("an allocator is preloaded on Linux only")
        return {}
    mine = [path for path in preloads(environ) if Path(path).name.startswith(_ALLOCATORS)]
    if mine:
        plan.notes.append(f"{mine[0]} stays the allocator, as LD_PRELOAD names it")
        return {"MALLOC_CONF": _JEMALLOC_CONF} if "libjemalloc" in mine[0] else {}
    library = find_library({"jemalloc": JEMALLOC, "tcmalloc": TCMALLOC}[name])
    if library is not None:
        plan.preload.append(str(library))
        return {"MALLOC_CONF": _JEMALLOC_CONF} if name == "jemalloc" else {}
    missing = f"{name} was not found ({_HOW_TO_INSTALL[name]})"
    tunables = glibc_tunables()
    if not tunables:
        plan.notes.append(missing)
        return {}
    plan.notes.append(f"{missing}; the allocator of glibc is tuned in its place")
    plan.values["GLIBC_TUNABLES"] = _merged(environ.get("GLIBC_TUNABLES", ""), tunables)
    return {}


def _merged(own: str, added: Mapping[str, str]) -> str:
    """The user's tunables, and those of ours that the user has not set."""
    parts = [part for part in own.split(":") if part]
    names = {part.partition("=")[0] for part in parts}
    parts += [f"{name}={value}" for name, value in added.items() if name not in names]
    return ":".join(parts)


def _add_oneapi(plan: Plan, environ: Mapping[str, str]) -> None:
    script = os.path.join(environ.get("ONEAPI_ROOT", "/opt/intel/oneapi"), "setvars.sh")
    if os.path.exists(script):
        plan.scripts.append(script)
    else:
        plan.notes.append(f"{script} was not found (ONEAPI_ROOT names the directory of oneAPI)")
