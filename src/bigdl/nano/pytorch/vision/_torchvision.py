"""What torchvision has and BigDL has not, where the user has a working torchvision."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["of_torchvision"]


def of_torchvision(module: str, name: str, asked: str) -> Any:
    """An attribute of a module of torchvision, for the ``__getattr__`` of another module.

    Parameters
    ----------
    module : str
        Name within torchvision.
    name : str
        Of the attribute.
    asked : str
        Name of the module that was asked for it.

    Raises
    ------
    AttributeError
        If torchvision is not installed, does not fit the installed torch, or has no such name.
    """
    missing = f"module {asked!r} has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(missing)
    try:
        found = importlib.import_module(f"torchvision.{module}")
    except (ImportError, RuntimeError, OSError) as error:  # one that is built for another torch
        raise AttributeError(
            f"{missing}, and torchvision, which may have it, cannot be imported ({error})"
        ) from error
    if not hasattr(found, name):
        raise AttributeError(f"{missing}, and neither has torchvision.{module}")
    return getattr(found, name)
