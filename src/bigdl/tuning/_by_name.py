"""Objects of Optuna by the names that users give."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, TypeVar

from bigdl.common.errors import UsageError, require

__all__ = ["member", "optuna", "quietly", "quietly_made"]

Kind = TypeVar("Kind", bound=StrEnum)


def optuna() -> Any:
    """The library, or an error that says how to install it."""
    return require("optuna", "automl")


def member(kind: type[Kind], name: Any, argument: str) -> Kind:
    """The member of an enumeration that a user has named, in any case.

    Raises
    ------
    UsageError
        If there is none.
    """
    wanted = str(name).lower()
    for each in kind:
        if wanted in (each.value.lower(), str(each).lower()):
            return each
    names = ", ".join(repr(each.value) for each in kind)
    raise UsageError(f"{argument} must be one of {names}, or an object of Optuna, not {name!r}")


@contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings that something of Optuna is experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna().exceptions.ExperimentalWarning)
        yield


def quietly_made(cls: type, arguments: Mapping[str, Any], argument: str) -> Any:
    """An object of a class of Optuna, which may be experimental.

    Raises
    ------
    UsageError
        If it does not take the arguments.
    """
    try:
        with quietly():
            return cls(**arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{argument} cannot be made of {dict(arguments)!r}: {error}; see optuna's "
            f"{cls.__name__}"
        ) from error
