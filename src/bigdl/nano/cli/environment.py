"""The environment that ``bigdl-nano-init`` and ``bigdl-nano-run`` set, and how to get back.

The options of the commands, the machine and what the user has set make a :class:`Plan`. What it
changes is remembered in the environment itself, in one variable: for each name the value before
and the value set, and the entries added to ``LD_PRELOAD``. A variable that the user has changed
since then is the user's and stays.
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
from bigdl.nano.cli.libraries import JEMALLOC, OPENMP, TCMALLOC, find_library
from bigdl.nano.runtime import best_thread_count

STATE = "BIGDL_NANO_STATE"
VALUE_OPTIONS = ("-r", "--cores")  # those that take a value
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
    """Return the parser of a command that sets an environment.

    Parameters
    ----------
    prog : str
        Name of the command.
    usage : str
        What follows it.
    description : str

    Returns
    -------
    argparse.ArgumentParser
        Its namespaces hold `help`, `openmp`, `allocator` ("jemalloc", "tcmalloc" or "none"),
        `perf`, `gpu`, `sgx`, `cores` (int or None) and `debug`; what it cannot parse is a
        UsageError.
    """
    parser = _EnvironmentParser(
        prog, f"{prog} {usage}", description, add_help=False, allow_abbrev=False
    )
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this")
    add(
        "-o", "--disable-openmp", dest="openmp", action="store_false",
        help="preload no libiomp5 and set no variable of OpenMP",
    )  # fmt: skip
    allocators = (
        ("-j", "--enable-jemalloc", "jemalloc", "allocate memory by jemalloc (the default)"),
        ("-t", "--enable-tcmalloc", "tcmalloc", "allocate memory by tcmalloc"),
        ("-c", "--disable-allocator", "none", "leave the allocator alone"),
    )
    for short, long, value, text in allocators:
        add(short, long, dest="allocator", action="store_const", const=value, help=text)
    add("-p", "--perf", action="store_true", help="bind each OpenMP thread to a core")
    add("-g", "--gpu", action="store_true", help="use oneAPI and leave the allocator alone")
    add("-s", "--sgx", action="store_true", help="set variables for SGX enclaves as well")
    add(
        *VALUE_OPTIONS, dest="cores", metavar="N", type=_core_count,
        help="number of OpenMP threads; by default one for each usable physical core",
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
    """Variables, libraries and scripts that are to be set.

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
    """Return the libraries that ``LD_PRELOAD`` names; blanks and colons separate them."""
    return environ.get("LD_PRELOAD", "").replace(":", " ").split()


def make_plan(options: argparse.Namespace, environ: Mapping[str, str]) -> Plan:
    """Decide about each variable.

    Parameters
    ----------
    options : argparse.Namespace
        As :func:`make_parser` makes it.
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
        wanted |= _openmp(options, plan, environ)
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


def _openmp(options: argparse.Namespace, plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    wanted = {"OMP_NUM_THREADS": str(options.cores or best_thread_count())}
    runtime = find_library(OPENMP)
    if runtime is not None:
        plan.preload.append(str(runtime))
        binding = "compact,1,0" if options.perf else "none"
        wanted |= {"KMP_AFFINITY": f"granularity=fine,{binding}", "KMP_BLOCKTIME": "1"}
    else:
        plan.notes.append(
            "libiomp5 was not found, so the OpenMP of each library stays in use "
            "(pip install intel-openmp brings it)"
        )
        wanted |= passive_waiting(environ)
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


def _merged(present: str, added: Mapping[str, str]) -> str:
    """Return the user's tunables, and those of ours that the user has not set."""
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
    """Make a plan, say what the user should know, and apply it.

    Parameters
    ----------
    parser, options
        As :func:`make_parser` makes them.
    environ : mapping
        An earlier plan may have been applied to it; the new one replaces that.

    Returns
    -------
    (Plan, dict) or None
        The plan and the environment with it; None if the user only wants to see something.
    """
    if options.help:
        parser.print_help(sys.stderr)
        return None
    before = restored(environ)
    plan = make_plan(options, before)
    after = applied(plan, before)
    for note in plan.notes:
        say(parser.prog, note)
    if options.debug:
        show(changes(before, after))
        return None
    return plan, after


def restored(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment as it would be if no plan had been applied.

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
        result["LD_PRELOAD"] = ":".join(kept) or None
    return {name: value for name, value in result.items() if value is not None}


def applied(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with a plan applied to it, and a record of what that changed."""
    present = preloads(environ)
    added = [path for path in plan.preload if path not in present]
    state = {
        "values": {name: (environ.get(name), value) for name, value in plan.values.items()},
        "preload": added,
    }
    result = dict(environ) | plan.values | {STATE: json.dumps(state)}
    if added:
        result["LD_PRELOAD"] = ":".join([*present, *added])
    return result


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Return what to set, and with None what to remove, to get from one environment to another."""
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
    return {"values": {}, "preload": []}  # none, or not written here


def code(changes: Mapping[str, str | None], scripts: Iterable[str] = ()) -> str:
    """Return commands for bash, zsh and any other POSIX shell.

    Parameters
    ----------
    changes : mapping of str to str or None
        Variables to export; None removes one.
    scripts : iterable of str
        Files to source afterwards.

    Returns
    -------
    str
        A command a line.
    """
    lines = [
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
        for name, value in changes.items()
    ]
    lines += [f". {shlex.quote(script)}" for script in scripts]
    return "".join(f"{line}\n" for line in lines)


def say(command: str, text: str) -> None:
    """Show a line to the user; stdout is read by the shell."""
    print(f"{command}: {text}", file=sys.stderr)


def show(changes: Mapping[str, str | None]) -> None:
    """Show the variables that the user may care about, a line each."""
    for name, value in changes.items():
        if not name.startswith("BIGDL_NANO_"):  # our own record
            print(f"{name}={value}", file=sys.stderr)
