"""How the processes of a training may be started."""

from __future__ import annotations

from bigdl.common.errors import UsageError

__all__ = ["BACKENDS", "check_backend"]

BACKENDS = {"multiprocessing": "subprocess", "ray": "ray"}
"""The launcher behind each name."""


def check_backend(name: str) -> None:
    """Refuse what is no name of a backend.

    Raises
    ------
    UsageError
    """
    if name not in BACKENDS:
        raise UsageError(f"Backend {name} is not implemented. Choose one of {', '.join(BACKENDS)}.")
