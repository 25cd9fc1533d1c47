"""Lazy imports of a package's public names, and lists for ``__all__``."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from bigdl.common.errors import require

__all__ = ["lazy_names", "public_names"]


def lazy_names(
    package: str, homes: Mapping[str, str], otherwise: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` that import names on first access (PEP 562).

    Parameters
    ----------
    package : str
        The package's ``__name__``.
    homes : mapping of str to str
        Module that defines each name.
    otherwise : str, optional
        Module in which all other names are looked up.

    Returns
    -------
    tuple of two functions
        ``__getattr__`` and ``__dir__``.
    """

    def find(name: str) -> Any:
        missing = AttributeError(f"module {package!r} has no attribute {name!r}")
        if name in homes:
            if package.startswith("bigdl.nano.tf"):
                require("tensorflow", "nano,tf")  # imports it without TensorFlow's log lines
            return getattr(importlib.import_module(homes[name]), name)
        if otherwise is None or name.startswith("__"):
            raise missing
        try:
            return getattr(importlib.import_module(otherwise), name)
        except AttributeError:
            raise missing from None

    def names() -> list[str]:
        others = () if otherwise is None else dir(importlib.import_module(otherwise))
        return sorted({*vars(sys.modules[package]), *homes, *others})

    return find, names


def public_names(module: str) -> list[str]:
    """Return the public classes and functions that a module defines, for its ``__all__``.

    Call it at the end of the module.

    Parameters
    ----------
    module : str
        The module's ``__name__``.
    """
    return [
        name
        for name, value in vars(sys.modules[module]).items()
        if callable(value) and value.__module__ == module and not name.startswith("_")
    ]
