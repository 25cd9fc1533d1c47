"""Checks of arguments that raise a :class:`~bigdl.common.errors.UsageError`."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable
from typing import Any, TypeVar, cast

from bigdl.common.errors import UsageError
from bigdl.common.platform import loss, system_name

MOST_PORT = 65535
"""The largest number of a TCP port."""

T = TypeVar("T")
_A = {"integer": "an", "number": "a"}
_HOLDS = {
    "of at least": operator.ge,
    "above": operator.gt,
    "at most": operator.le,
    "below": operator.lt,
}


def check_integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return `value` as an int; raise if it is not an integer within the bounds.

    Parameters
    ----------
    name : str
        Name of the argument in the error message.
    value : int or numpy integer
        A bool is refused.
    least, most : int, optional
        Inclusive bounds.

    Raises
    ------
    UsageError
    """
    _check(name, value, numbers.Integral, "integer", {"of at least": least, "at most": most})
    return int(value)


def check_positive(name: str, value: object, *, minimum: int = 1) -> int:
    """Return `value` as an int of at least `minimum`; raise otherwise."""
    return check_integer(name, value, minimum)


def check_number(
    name: str,
    value: object,
    least: float | None = None,
    most: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """Return `value`; raise if it is not a finite number within the bounds.

    Parameters
    ----------
    name : str
        Name of the argument in the error message.
    value : int, float or a NumPy scalar
        A bool is refused.
    least, most : float, optional
        Inclusive bounds.
    above, below : float, optional
        Exclusive bounds.

    Raises
    ------
    UsageError
    """
    bounds = {"of at least": least, "above": above, "at most": most, "below": below}
    _check(name, value, numbers.Real, "number", bounds)
    return cast("float", value)


def check_choice(name: str, value: T, choices: Iterable[T]) -> T:
    """Return `value`; raise if it is not among `choices`."""
    choices = list(choices)
    if value not in choices:
        raise UsageError(
            f"{name} should be one of {', '.join(map(repr, choices))}, got {value!r}",
            code="argument-value",
            argument=name,
            given=value,
            allowed=choices,
        )
    return value


def _check(
    name: str, value: Any, number_type: type, noun: str, bounds: dict[str, float | None]
) -> None:
    named = {word: bound for word, bound in bounds.items() if bound is not None}
    is_number = isinstance(value, number_type) and not isinstance(value, bool)
    if (
        is_number
        and math.isfinite(value)
        and all(_HOLDS[word](value, bound) for word, bound in named.items())
    ):
        return
    if named == ({"of at least": 1} if noun == "integer" else {"above": 0}):
        wanted = f"a positive {noun}"
    elif {"of at least", "at most"} <= named.keys():
        wanted = f"{_A[noun]} {noun} from {named['of at least']:g} to {named['at most']:g}"
    else:
        limits = " and ".join(f"{word} {bound:g}" for word, bound in named.items())
        wanted = f"{_A[noun]} {noun} {limits}".rstrip()
    code = "argument-value" if is_number else "argument-type"
    raise UsageError(
        f"{name} should be {wanted}, got {value!r}", code=code, argument=name, given=value
    )


def invalidInputError(condition: object, errMsg: str, fixMsg: str | None = None) -> None:
    """Raise an error unless `condition` is true.

    Parameters
    ----------
    condition : object
    errMsg : str
        Text of the error: what is wrong.
    fixMsg : str, optional
        What to do; shown below the error.

    Raises
    ------
    UsageError
        A RuntimeError and a ValueError.

    Examples
    --------
    >>> from bigdl.dllib.utils.log4Error import invalidInputError
    >>> batch_size = 0
    >>> try:
    ...     invalidInputError(batch_size > 0, "batch_size should be positive, got 0", "pass 32")
    ... except ValueError as error:
    ...     print(str(error).splitlines()[0])
    batch_size should be positive, got 0
    """
    invalidOperationError(condition, errMsg, fixMsg)


def invalidOperationError(
    condition: object,
    errMsg: str,
    fixMsg: str | None = None,
    cause: BaseException | None = None,
) -> None:
    """Raise `cause`, or else a UsageError, unless `condition` is true.

    Parameters
    ----------
    condition : object
    errMsg : str
        Text of the error, or a note that is added to `cause`.
    fixMsg : str, optional
        What to do; shown below the error.
    cause : BaseException, optional
        The exception to raise instead of a UsageError.

    Raises
    ------
    UsageError
        A RuntimeError and a ValueError.

    Examples
    --------
    >>> from bigdl.dllib.utils.log4Error import invalidOperationError
    >>> try:
    ...     invalidOperationError(False, "The model is not trained", cause=KeyError("weights"))
    ... except KeyError as error:
    ...     print(error, error.__notes__)
    'weights' ['The model is not trained']
    """
    if condition:
        return
    if cause is None:
        cause = UsageError(errMsg)
    else:
        cause.add_note(errMsg)
    if fixMsg:
        cause.add_note(f"What to do: {fixMsg}")
    raise cause


def check_supported(feature: str, is_supported: bool) -> None:
    """Raise a UsageError with the sentence of ``platform.LOSSES`` about an unsupported feature.

    Parameters
    ----------
    feature : str
        Key of :data:`bigdl.common.platform.LOSSES`.
    is_supported : bool
        Whether the calls that the feature needs exist.

    Raises
    ------
    UsageError
        If it is not supported.
    """
    if not is_supported:
        reason = loss(feature).rstrip(".")
        raise UsageError(f"{reason} (this system is {system_name()})", code="unsupported")
