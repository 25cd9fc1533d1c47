"""Checks of arguments that raise a :class:`~bigdl.common.errors.UsageError`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

from bigdl.common.errors import UsageError

T = TypeVar("T")


def check_integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return `value` as an int, or refuse what is no integer within the bounds.

    Parameters
    ----------
    name : str
        Of the argument, for the error.
    value : int or numpy integer
        A bool is refused.
    least, most : int, optional
        Bounds, both allowed.

    Raises
    ------
    UsageError
    """
    wrong = isinstance(value, bool) or not isinstance(value, numbers.Integral)
    if wrong or (least is not None and value < least) or (most is not None and value > most):
        if least == 1 and most is None:
            kind = "a positive integer"
        else:
            kind = "an integer" + _bounds(least, most)
        raise UsageError(f"{name} should be {kind}, got {value!r}")
    return int(value)


def check_positive(name: str, value: Any, *, minimum: int = 1) -> int:
    """Return `value` as an int of at least `minimum`, or raise a UsageError."""
    return check_integer(name, value, minimum)


def check_number(
    name: str,
    value: Any,
    least: float | None = None,
    most: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """Return `value`, or refuse what is no finite number within the bounds.

    Parameters
    ----------
    name : str
        Of the argument, for the error.
    value : int, float or a NumPy scalar
        A bool is refused.
    least, most : float, optional
        Bounds that are allowed.
    above, below : float, optional
        Bounds that are not.

    Raises
    ------
    UsageError
    """
    wrong = isinstance(value, bool) or not isinstance(value, numbers.Real)
    if (
        wrong
        or not math.isfinite(value)
        or (least is not None and value < least)
        or (most is not None and value > most)
        or (above is not None and value <= above)
        or (below is not None and value >= below)
    ):
        if above == 0 and most is None and below is None:
            kind = "a positive number"
        else:
            kind = "a number" + _bounds(least, most, above, below)
        raise UsageError(f"{name} should be {kind}, got {value!r}")
    return value


def check_choice(name: str, value: T, choices: Iterable[T]) -> T:
    """Return `value`, or refuse what is not among `choices`."""
    choices = list(choices)
    if value not in choices:
        raise UsageError(f"{name} should be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def _bounds(
    least: float | None, most: float | None, above: float | None = None, below: float | None = None
) -> str:
    if least is not None and most is not None:
        return f" from {least:g} to {most:g}"
    words = [
        f"{word} {bound:g}"
        for word, bound in (
            ("of at least", least),
            ("above", above),
            ("at most", most),
            ("below", below),
        )
        if bound is not None
    ]
    return " " + " and ".join(words) if words else ""


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
