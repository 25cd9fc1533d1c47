"""What the commands print: shell code on stdout, words for the user on stderr."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping

__all__ = ["code", "say", "show"]


def code(changes: Mapping[str, str | None], scripts: Iterable[str] = ()) -> str:
    """Commands for bash, zsh and any other POSIX shell.

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
