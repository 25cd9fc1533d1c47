"""Helpers for models of Keras, under the names of BigDL 2.x.

They are thin: what they do is done in :mod:`bigdl.nano.tf`. Keras is imported when a name is first
used.
"""

import importlib
import importlib.metadata
import re

_HOMES = {
    "MultiprocessingBackend": "backend",
    "as_dataset": "datasets",
    "patch_attrs": "attributes",
    "patch_compiled": "attributes",
    "patch_compiled_and_attrs": "attributes",
}
_VERSIONS = ("KERAS_VERSION_LESS_2_9", "KERAS_VERSION_LESS_2_10")

__all__ = [*_HOMES, *_VERSIONS]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    version = re.fullmatch(r"KERAS_VERSION_LESS_(\d+)_(\d+)", name)
    if version is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _release() < tuple(map(int, version.groups()))


def __dir__():
    return sorted({*globals(), *__all__})


def _release() -> tuple[int, ...]:
    """Of the installed Keras; one that is missing is not old."""
    try:
        found = importlib.metadata.version("keras")
    except importlib.metadata.PackageNotFoundError:
        return (1 << 31,)
    return tuple(int(part) for part in found.split(".")[:2])
