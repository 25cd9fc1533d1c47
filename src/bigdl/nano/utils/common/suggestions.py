"""Advice that is collected while a program runs and shown once, when it ends."""

from __future__ import annotations

import atexit
import sys

__all__ = ["output_suggestions", "register_suggestion"]

_suggestions: dict[str, None] = {}


def register_suggestion(msg: str) -> None:
    """Keep a piece of advice for the end of the program; one that is known already is not kept.

    Parameters
    ----------
    msg : str
    """
    atexit.unregister(output_suggestions)  # so that it is registered once
    atexit.register(output_suggestions)
    _suggestions[msg] = None


def output_suggestions() -> None:
    """Show what was registered on stderr, and forget it."""
    for suggestion in _suggestions:
        print(f"bigdl.nano suggests: {suggestion}", file=sys.stderr)
    _suggestions.clear()
