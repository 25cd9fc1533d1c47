"""Text tensors: conversion between the bytes of a request and the strings of a runtime."""

from __future__ import annotations

import numpy as np

from bigdl.common.errors import UsageError

__all__ = ["as_strings"]


def as_strings(array: np.ndarray, name: str) -> np.ndarray:
    """Return a text tensor as an object array of `str`; bytes are decoded as UTF-8.

    Parameters
    ----------
    array : ndarray
        Strings or bytes, of any shape.
    name : str
        Name of the input, for error messages.

    Returns
    -------
    ndarray of object
        The shape of `array`.

    Raises
    ------
    UsageError
        If an element is neither text nor bytes, or its bytes are not valid UTF-8.
    """
    if array.dtype.kind == "U":
        return array.astype(object)
    if array.dtype.kind not in "OS":
        raise UsageError(
            f"Input {name!r} takes texts, but an array of {array.dtype} was given",
            code="model-input",
            argument=name,
        )
    strings = np.empty(array.size, object)
    strings[:] = [_string(each, name) for each in array.flat]
    return strings.reshape(array.shape)


def _string(value: object, name: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes | bytearray | memoryview):
        raise UsageError(
            f"Input {name!r} takes texts, but holds {value!r} of type {type(value).__name__}",
            code="model-input",
            argument=name,
        )
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"Input {name!r} takes texts in UTF-8, but holds {bytes(value)[:40]!r}: {error.reason}",
            code="data-value",
            argument=name,
        ) from None
