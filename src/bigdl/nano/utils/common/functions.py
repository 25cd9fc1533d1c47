"""Small tools about functions and what is passed to them."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["deprecated", "get_default_args"]


def get_default_args(func: Callable) -> dict[str, Any]:
    """The parameters of a function that have defaults, with their defaults.

    Parameters
    ----------
    func : callable

    Returns
    -------
    dict
    """
    return {
        name: parameter.default
        for name, parameter in inspect.signature(func).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


def deprecated(func_name: str = "", message: str = "") -> Callable[[Callable], Callable]:
    """A decorator: each call of the function gives a DeprecationWarning.

    Parameters
    ----------
    func_name : str, optional
        How the warning names the function, by default the function's own name.
    message : str, optional
        What to use in its place.

    Returns
    -------
    callable
    """

    def decorate(func: Callable) -> Callable:
        text = f"{func_name or func.__qualname__} is deprecated. {message}".rstrip()

        @functools.wraps(func)
        def warn_and_call(*args, **kwargs):
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return func(*args, **kwargs)

        return warn_and_call

    return decorate


def _flatten(nested: Any, out_list: list) -> list:
    """Append the leaves of nested lists, tuples and mappings to `out_list`, in order."""
    if isinstance(nested, Mapping):
        nested = list(nested.values())
    if isinstance(nested, list | tuple):
        for item in nested:
            _flatten(item, out_list)
    else:
        out_list.append(nested)
    return out_list
