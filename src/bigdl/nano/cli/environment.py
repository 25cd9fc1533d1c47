"""Environment variables that ``bigdl-nano-init`` and ``bigdl-nano-run`` set and restore.

A :class:`Plan` depends on the options of the command, the machine and the user's variables. Its
changes are recorded in one environment variable: the previous and the new value of each variable,
and the entries added to ``LD_PRELOAD``. A variable that the user has changed since then is not
restored.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from bigdl.common.cpu import passive_waiting
from bigdl.common.errors import UsageError
from bigdl.common.memory import glibc_tunables
from bigdl.common.platform import loss
from bigdl.common.platform import memory as platform_memory
from bigdl.common.platform.memory import PRELOAD, can_preload
from bigdl.nano.cli.libraries import JEMALLOC, OPENMP, TCMALLOC, find_library
from bigdl.nano.runtime import best_thread_count

STATE = "BIGDL_NANO_STATE"
VALUE_OPTIONS = ("-r", "--cores")  # options that take a value
_JEMALLOC_CONF = (
    "oversize_threshold:1,background_thread:false,metadata_thp:always,"
    "dirty_decay_ms:-1,muzzy_decay_ms:-1"
)
_ALLOCATORS = ("libjemalloc", "libtcmalloc", "libmimalloc")
_HOW_TO_INSTALL = {
    "jemalloc": "apt install libjemalloc2, or conda install jemalloc",
    "tcmalloc": "apt install libtcmalloc-minimal4, or conda install gperftools",
}


class _EnvironmentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} -h", code="argument-value")


def make_parser(prog: str, usage: str, description: str) -> argparse.ArgumentParser:
    """Return the argument parser of a command that sets up an environment.

    Parameters
    ----------
    prog : str
        Name of the command.
    usage : str
        Usage text after the name.
    description : str

    Returns
    -------
    argparse.ArgumentParser
        Its namespaces have `help`, `openmp`, `allocator` ("jemalloc", "tcmalloc" or "none"),
        `perf`, `gpu`, `sgx`, `cores` (int or None) and `debug`. Invalid arguments raise a
        UsageError.
    """
    parser = _EnvironmentParser(
        prog, f"{prog} {usage}", description, add_help=False, allow_abbrev=False
    )
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="print_variables this help")
    add(
        "-o", "--disable-openmp", dest="openmp", action="store_false",
        help="do not preload libiomp5 or set OpenMP variables",
    )  # fmt: skip
    allocators = (
        ("-j", "--enable-jemalloc", "jemalloc", "use the jemalloc allocator (the default)"),
        ("-t", "--enable-tcmalloc", "tcmalloc", "use the tcmalloc allocator"),
        ("-c", "--disable-allocator", "none", "do not change the allocator"),
    )
    for short, long, value, text in allocators:
        add(short, long, dest="allocator", action="store_const", const=value, help=text)
    add("-p", "--perf", action="store_true", help="bind each OpenMP thread to a core")
    add("-g", "--gpu", action="store_true", help="use oneAPI and do not change the allocator")
    add("-s", "--sgx", action="store_true", help="also set variables for SGX enclaves")
    add(
        *VALUE_OPTIONS, dest="cores", metavar="N", type=_core_count,
        help="number of OpenMP threads; by default one per usable physical core",
    )  # fmt: skip
    add("-d", "--debug", action="store_true", help="show the values and set nothing")
    parser.set_defaults(allocator="jemalloc")
    return parser


def _core_count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it must be a number of at least 1, not {text!r}")
    return int(text)


@dataclass
class Plan:
    """Environment variables to set, libraries to preload and scripts to source for a command.

    Attributes
    ----------
    values : dict
        Variables and their values, except ``LD_PRELOAD``.
    preload : list of str
        Libraries to add to ``LD_PRELOAD``.
    scripts : list of str
        Shell scripts to source.
    notes : list of str
        Messages for the user, one per line.
    """

    values: dict[str, str] = field(default_factory=dict)
    preload: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def preloads(environ: Mapping[str, str]) -> list[str]:
    """Return the libraries listed in ``LD_PRELOAD``, separated by blanks or colons."""
    return platform_memory.preloads(environ)


def make_plan(options: argparse.Namespace, environ: Mapping[str, str]) -> Plan:
    """Choose the environment variables, libraries and scripts for the options and the machine.

    Parameters
    ----------
    options : argparse.Namespace
        Options from the parser of :func:`make_parser`.
    environ : mapping
        The environment without the changes of an earlier plan.

    Returns
    -------
    Plan
        A variable that the user has set stays unchanged, with a note, unless an option requests
        another value.
    """
    plan = Plan()
    values = {"TF_ENABLE_ONEDNN_OPTS": "1"}
    overridden: set[str] = set()
    if options.openmp:
        values |= _openmp(options, plan, environ)
        if "MKL_NUM_THREADS" in environ:  # it would override the OpenMP setting
            values["MKL_NUM_THREADS"] = values["OMP_NUM_THREADS"]
        if options.cores is not None:
            overridden |= {"MKL_NUM_THREADS", "OMP_NUM_THREADS"}
        if options.perf:
            overridden |= {"KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"}
    if options.gpu:
        _add_oneapi(plan, environ)
    elif options.allocator != "none":
        values |= _allocator(options.allocator, plan, environ)
    for name, value in values.items():
        kept = environ.get(name)
        if kept is None or name in overridden:
            plan.values[name] = value
        elif kept != value:
            plan.notes.append(f"{name}={kept} stays as you set it; {value} was not set")
    return plan


def _openmp(options: argparse.Namespace, plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    values = {"OMP_NUM_THREADS": str(options.cores or best_thread_count())}
    runtime = find_library(OPENMP) if can_preload() else None
    if runtime is not None:
        plan.preload.append(str(runtime))
        binding = "compact,1,0" if options.perf else "none"
        values |= {"KMP_AFFINITY": f"granularity=fine,{binding}", "KMP_BLOCKTIME": "1"}
    else:
        if can_preload():
            plan.notes.append(
                "libiomp5 was not found, so the OpenMP of each library stays in use "
                "(pip install intel-openmp brings it)"
            )
        values |= passive_waiting(environ)
        if options.perf:
            values |= {"OMP_PLACES": "cores", "OMP_PROC_BIND": "close"}
    if options.sgx:
        values |= {
            "MKL_DYNAMIC": "FALSE",
            "MKL_NUM_THREADS": values["OMP_NUM_THREADS"],
            "OMP_PROC_BIND": "close",
            "OMP_SCHEDULE": "STATIC",
        }
    return values


def _allocator(name: str, plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    present = [path for path in preloads(environ) if Path(path).name.startswith(_ALLOCATORS)]
    if present:
        plan.notes.append(f"{present[0]} stays the allocator, as LD_PRELOAD names it")
        return {"MALLOC_CONF": _JEMALLOC_CONF} if "libjemalloc" in present[0] else {}
    if not can_preload():
        plan.notes.append(loss("preloaded allocators of bigdl-nano-run").rstrip("."))
        return {}
    library = find_library({"jemalloc": JEMALLOC, "tcmalloc": TCMALLOC}[name])
    if library is not None:
        plan.preload.append(str(library))
        return {"MALLOC_CONF": _JEMALLOC_CONF} if name == "jemalloc" else {}
    missing = f"{name} was not found ({_HOW_TO_INSTALL[name]})"
    tunables = glibc_tunables()
    if not tunables:
        plan.notes.append(missing)
        return {}
    plan.notes.append(f"{missing}; the glibc allocator is tuned instead")
    plan.values["GLIBC_TUNABLES"] = _merged(environ.get("GLIBC_TUNABLES", ""), tunables)
    return {}


def _merged(present: str, added: Mapping[str, str]) -> str:
    """Add glibc tunables to those that the user has set; the user's values take precedence."""
    parts = [part for part in present.split(":") if part]
    names = {part.partition("=")[0] for part in parts}
    parts += [f"{name}={value}" for name, value in added.items() if name not in names]
    return ":".join(parts)


def _add_oneapi(plan: Plan, environ: Mapping[str, str]) -> None:
    script = os.path.join(environ.get("ONEAPI_ROOT", "/opt/intel/oneapi"), "setvars.sh")
    if os.path.exists(script):
        plan.scripts.append(script)
    else:
        plan.notes.append(f"{script} was not found (ONEAPI_ROOT names the directory of oneAPI)")


def planned(
    parser: argparse.ArgumentParser, options: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[Plan, dict[str, str]] | None:
    """Make a :class:`Plan`, print its notes, and return the plan and the new environment.

    Parameters
    ----------
    parser, options
        A parser of :func:`make_parser`, and its options.
    environ : mapping
        The environment; the new plan replaces an earlier one.

    Returns
    -------
    (Plan, dict) or None
        The plan and the resulting environment; None for ``--help`` and ``--debug``.
    """
    if options.help:
        parser.print_help(sys.stderr)
        return None
    before = restored(environ)
    plan = make_plan(options, before)
    after = applied(plan, before)
    for note in plan.notes:
        print_message(parser.prog, note)
    if options.debug:
        print_variables(changes(before, after))
        return None
    return plan, after


def restored(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the changes of an earlier :class:`Plan`.

    Parameters
    ----------
    environ : mapping

    Returns
    -------
    dict
    """
    result: dict[str, str | None] = dict(environ)
    state = _state(result.pop(STATE, None) or "{}")
    for name, (before, ours) in state["values"].items():
        if result.get(name) == ours:
            result[name] = before
    if state["preload"]:
        kept = [path for path in preloads(environ) if path not in state["preload"]]
        result[PRELOAD] = ":".join(kept) or None
    return {name: value for name, value in result.items() if value is not None}


def applied(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with `plan` applied, and a variable that records the changes."""
    present = preloads(environ)
    added = [path for path in plan.preload if path not in present]
    state = {
        "values": {name: (environ.get(name), value) for name, value in plan.values.items()},
        "preload": added,
    }
    result = dict(environ) | plan.values | {STATE: json.dumps(state)}
    if added:
        result[PRELOAD] = ":".join([*present, *added])
    return result


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Return the changes from one environment to another; the value None removes a variable."""
    names = sorted({*before, *after})
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


def _state(text: str) -> dict:
    try:
        state = json.loads(text)
        values = {str(name): tuple(pair) for name, pair in state["values"].items()}
        if all(len(pair) == 2 for pair in values.values()):
            return {"values": values, "preload": list(state["preload"])}
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return {"values": {}, "preload": []}  # missing or invalid


def code(changes: Mapping[str, str | None], scripts: Iterable[str] = ()) -> str:
    """Return shell commands (bash, zsh and other POSIX shells) that apply changes.

    Parameters
    ----------
    changes : mapping of str to str or None
        Variables to export; None removes one.
    scripts : iterable of str
        Files to source afterwards.

    Returns
    -------
    str
        One command per line.
    """
    lines = [
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
        for name, value in changes.items()
    ]
    lines += [f". {shlex.quote(script)}" for script in scripts]
    return "".join(f"{line}\n" for line in lines)


def print_message(command: str, text: str) -> None:
    """Print a message to stderr, since the shell evaluates stdout."""
    print(f"{command}: {text}", file=sys.stderr)


def print_variables(changes: Mapping[str, str | None]) -> None:
    """Print the changed variables to stderr, one per line."""
    for name, value in changes.items():
        if not name.startswith("BIGDL_NANO_"):  # the record of changes
            print(f"{name}={value}", file=sys.stderr)
