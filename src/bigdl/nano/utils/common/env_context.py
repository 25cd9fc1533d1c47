"""Environment variables that hold for a while."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["EnvContext"]


class EnvContext:
    """A context in which environment variables have given values; it nests.

    Parameters
    ----------
    env : mapping of str to str or None, optional
        Values of any type are taken as their text; None removes a variable.

    Notes
    -----
    The environment belongs to the process: threads that hold such contexts at the same time must
    not name the same variables.
    """

    def __init__(self, env: Mapping[str, object | None] | None = None):
        self.env = dict(env or {})
        self._before: list[dict[str, str | None]] = []

    def __enter__(self) -> EnvContext:
        self._before.append({name: os.environ.get(name) for name in self.env})
        _set(self.env)
        return self

    def __exit__(self, *exception) -> None:
        _set(self._before.pop())


def _set(variables: Mapping[str, object | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)
