"""Checks that raise a :class:`~bigdl.common.errors.UsageError`."""

from __future__ import annotations

from typing import NoReturn

from bigdl.common.errors import UsageError

__all__ = ["invalidInputError", "invalidOperationError"]


def invalidInputError(condition: object, errMsg: str, fixMsg: str | None = None) -> None:
    """Raise an error unless `condition` is true.

    Parameters
    ----------
    condition : object
    errMsg : str
        What is wrong: the text of the error.
    fixMsg : str, optional
        What to do; shown below the error.

    Raises
    ------
    UsageError
        A RuntimeError and a ValueError.
    """
    if not condition:
        _raise(UsageError(errMsg), fixMsg)


def invalidOperationError(
    condition: object,
    errMsg: str,
    fixMsg: str | None = None,
    cause: BaseException | None = None,
) -> None:
    """Raise an error unless `condition` is true: `cause` if it is given.

    Parameters
    ----------
    condition : object
    errMsg : str
        What is wrong: the text of the error, or a note to `cause`.
    fixMsg : str, optional
        What to do; shown below the error.
    cause : BaseException, optional
        The exception to raise in place of a UsageError.

    Raises
    ------
    UsageError
        A RuntimeError and a ValueError.
    """
    if condition:
        return
    if cause is None:
        _raise(UsageError(errMsg), fixMsg)
    cause.add_note(errMsg)
    _raise(cause, fixMsg)


def _raise(error: BaseException, advice: str | None) -> NoReturn:
    if advice:
        error.add_note(f"What to do: {advice}")
    raise error
