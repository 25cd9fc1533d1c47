"""The options of ``bigdl-nano-init`` and ``bigdl-nano-run``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from bigdl.common.errors import UsageError

__all__ = ["VALUE_OPTIONS", "make_parser"]

VALUE_OPTIONS = ("-r", "--cores")
"""Those that take a value."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} -h")


def make_parser(prog: str, usage: str, description: str) -> argparse.ArgumentParser:
    """The parser of a command that sets an environment.

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
    parser = _Parser(prog, f"{prog} {usage}", description, add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this")
    add(
        "-o", "--disable-openmp", dest="openmp", action="store_false",
        help="preload no libiomp5 and set no variable of OpenMP",
    )  # fmt: skip
    allocators: Sequence[tuple[str, str, str, str]] = (
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
