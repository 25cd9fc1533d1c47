"""All methods of each framework, by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.method import Method

__all__ = ["find_method", "methods"]

# The module of each framework that holds METHODS, a list in the order in which they are tried.
_MODULES = {"torch": "bigdl.nano.pytorch.methods", "keras": "bigdl.nano.tf.methods"}


@cache
def methods(framework: str = "torch") -> Mapping[str, Method]:
    """The methods of a framework in the order in which ``optimize`` tries them.

    Parameters
    ----------
    framework : str
        ``"torch"`` or ``"keras"``.

    Returns
    -------
    mapping of str to Method
        Read-only.
    """
    listed = importlib.import_module(_MODULES[framework]).METHODS
    return MappingProxyType({method.name: method for method in listed})


def find_method(name: str, framework: str = "torch") -> Method:
    """The method of this name.

    Raises
    ------
    UsageError
        If there is none.
    """
    known = methods(framework)
    if name not in known:
        raise UsageError(f"There is no method {name!r}; choose one of {', '.join(known)}")
    return known[name]
