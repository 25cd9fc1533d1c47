"""Sizes as BigDL 2.x wrote them."""

from __future__ import annotations

import re

from bigdl.common.errors import UsageError

__all__ = ["resource_to_bytes"]

_UNITS = {"b": 1, "k": 1000, "m": 1000**2, "g": 1000**3}


def resource_to_bytes(resource_str: str | int | None) -> int | None:
    """A size such as ``"10g"`` in bytes; units are decimal, so ``"10k"`` is 10000.

    Parameters
    ----------
    resource_str : str, int or None
        A whole number and one of b, k, m and g; a number is taken as it is.

    Raises
    ------
    UsageError
        For anything else.
    """
    if resource_str is None or type(resource_str) is int:
        return resource_str
    found = re.fullmatch(r"\s*(\d+)\s*([bkmg])\s*", str(resource_str).lower())
    if found is None:
        raise UsageError(
            "object_store_memory can be either b, k, m, g for bytes, kilobytes, megabytes and "
            f'gigabytes, such as "10g", got {resource_str!r}'
        )
    return int(found[1]) * _UNITS[found[2]]
