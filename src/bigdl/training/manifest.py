"""Manifests of checkpoints and the validation of their fields.

Anybody can edit or truncate a manifest, or write one with another program, so its fields are
validated when it is read, before a training relies on them.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import numpy as np

from bigdl.training.metrics import EpochSums
from bigdl.training.remaining_rows import IDS

FORMAT = 1

_Check = Callable[[Any], bool]
_SUMS = {each.name for each in fields(EpochSums)}
_COUNT = "an integer of at least 0"
_REQUIRED = ("files", "epoch", "step", "global_step")


def check_manifest(manifest: object) -> None:
    """Raise an error if this version cannot read a manifest.

    Parameters
    ----------
    manifest : dict
        Parsed JSON of the manifest.

    Raises
    ------
    ValueError
        Names the field, what it should be and what it is.

    Examples
    --------
    >>> from bigdl.training.manifest import check_manifest
    >>> check_manifest({"format": 1, "files": {}, "epoch": -1, "step": 0, "global_step": 0})
    Traceback (most recent call last):
        ...
    ValueError: its manifest's 'epoch' should be an integer of at least 0, got -1
    """
    if not isinstance(manifest, dict):
        raise ValueError(f"its manifest should be a JSON object, got {type(manifest).__name__}")
    if "format" not in manifest:
        raise ValueError("its manifest has no 'format'")
    if manifest["format"] != FORMAT:
        raise ValueError(f"it is of format {manifest['format']!r}, this version reads {FORMAT}")
    check_fields(manifest, _REQUIRED)
    for name, (expected, holds) in _FIELDS.items():
        if name in manifest and not holds(manifest[name]):
            raise ValueError(
                f"its manifest's {name!r} should be {expected}, got {_short(manifest[name])}"
            )
    if "model.pt" not in manifest["files"]:
        raise ValueError("its manifest's 'files' has no 'model.pt'")
    lengths = {name: len(manifest[name]) for name in _OF_WORKERS if name in manifest}
    if len(set(lengths.values())) > 1:
        counts = " and ".join(f"{count} in {name!r}" for name, count in lengths.items())
        raise ValueError(f"its manifest has entries of different numbers of workers: {counts}")


def check_fields(manifest: dict[str, Any], names: Iterable[str]) -> None:
    """Raise a ValueError if a manifest lacks one of the fields."""
    missing = [repr(name) for name in names if name not in manifest]
    if missing:
        raise ValueError(f"its manifest has no {', '.join(missing)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:56]} ..."


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _list_of(holds: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(holds, value))


def _dict_of(holds: _Check) -> _Check:
    return lambda value: isinstance(value, dict) and all(map(holds, value.values()))


def _has(**checks: _Check) -> _Check:
    """Return a function that checks that a dict has these keys with valid values."""
    return lambda value: (
        isinstance(value, dict)
        and all(name in value and holds(value[name]) for name, holds in checks.items())
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _has_sizes(order: dict[str, object]) -> bool:
    """Return True if the sizes of an order's shards or windows are valid."""
    sizes = [order.get(name, 1) for name in ("shards", "rows")]
    return all(isinstance(size, int) and _is_count(size) and size > 0 for size in sizes)


def _is_dtype(value: object) -> bool:
    try:
        return isinstance(value, str) and np.dtype(value) is not None
    except TypeError:
        return False


def _are_files(value: Any) -> bool:
    sizes = _dict_of(_has(size=_is_count, crc32=_is_count))
    return sizes(value) and all(posixpath.basename(name) == name != "" for name in value)


def _are_sums(value: Any) -> bool:
    return _list_of(_dict_of(_is_number))(value) and all(set(each) <= _SUMS for each in value)


def _is_shape(value: Any) -> bool:
    return _list_of(_is_count)(value) and len(value) > 0


_are_metrics = _has(epoch=_is_count, global_step=_is_count)
_are_slices = _list_of(_has(shape=_is_shape, dtype=_is_dtype, size=_is_count, crc32=_is_count))
_is_order = _has(kind=_is_text, table=_is_text, table_rows=_is_count, fingerprint=_is_text)
_SLICES = "the slices of arrays, each with shape, dtype, size and crc32"
_OF_WORKERS = ("sums", "rows_since_merge")
_FIELDS: dict[str, tuple[str, _Check]] = {
    **dict.fromkeys(("epoch", "step", "global_step"), (_COUNT, _is_count)),
    "seed": ("an integer", lambda value: value is None or _is_integer(value)),
    "history": (
        "a list of epoch metrics, each with epoch and global_step",
        _list_of(_are_metrics),
    ),
    "partial": (
        "null, or an epoch's metrics with epoch and global_step",
        lambda value: value is None or _are_metrics(value),
    ),
    "ends": ("a dict of numbers of epochs", _dict_of(_is_count)),
    "files": ("a dict of file names, each with size and crc32", _are_files),
    "rows": ("a list of numbers of rows", _list_of(_is_count)),
    "rows_since_merge": ("a list of numbers of rows", _list_of(_is_count)),
    "sums": ("a list of sums of workers", _are_sums),
    "order": (
        "null, or an order with kind, table, table_rows and fingerprint",
        lambda value: value is None or (_is_order(value) and _has_sizes(value)),
    ),
    "slices": (_SLICES, _dict_of(_are_slices)),
    IDS: (_SLICES, _are_slices),
}
"""By field name: a description of valid values, and the check of a value."""
