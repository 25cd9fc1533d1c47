"""Environment variables that hold for a while."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["EnvContext", "set_variables"]


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
        self._before.append(set_variables(self.env))
        return self

    def __exit__(self, *exception) -> None:
        set_variables(self._before.pop())


def set_variables(variables: Mapping[str, object | None]) -> dict[str, str | None]:
    """Set variables, or unset those that are None; returns what they were."""
    before = {name: os.environ.get(name) for name in variables}
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)
    return before
