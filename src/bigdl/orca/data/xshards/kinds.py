"""What a shard is: its class, its length, its columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bigdl.orca.data.xshards.arrays import arrays_of

__all__ = [
    "DATA_FRAME",
    "SERIES",
    "Summary",
    "class_name",
    "known_class_name",
    "length",
    "rows",
    "schema",
    "summarize",
]

DATA_FRAME = "pandas.core.frame.DataFrame"
SERIES = "pandas.core.series.Series"
_NAMES = {"pandas.DataFrame": DATA_FRAME, "pandas.Series": SERIES}


def class_name(shard: Any) -> str:
    """Name of a shard's class as BigDL 2.x wrote it, e.g. ``"pandas.core.frame.DataFrame"``."""
    module, name = type(shard).__module__, type(shard).__qualname__
    return known_class_name(name if module == "builtins" else f"{module}.{name}")


def known_class_name(name: str) -> str:
    """`name` in the spelling of :func:`class_name`."""
    return _NAMES.get(name, name)


def length(shard: Any) -> int:
    """``len(shard)``, and 1 for what has no length."""
    try:
        return len(shard)
    except TypeError:
        return 1


def rows(shard: Any) -> int | None:
    """Number of rows of a shard that can be cut by rows, None of any other.

    Frames, Series, arrays and lists can be cut, and dicts (nested or not) of arrays of one length.
    """
    name = class_name(shard)
    if name in (DATA_FRAME, SERIES, "list"):
        return len(shard)
    if name not in ("numpy.ndarray", "dict"):
        return None
    sizes = {
        len(each) if class_name(each) == "numpy.ndarray" and each.ndim else None
        for each in arrays_of(shard)
    }
    return sizes.pop() if len(sizes) == 1 else None


def schema(shard: Any) -> dict | None:
    """``{"columns": [...], "dtypes": {...}}`` of a pandas frame, None of anything else."""
    if class_name(shard) != DATA_FRAME:
        return None
    return {"columns": list(shard.columns), "dtypes": shard.dtypes.to_dict()}


@dataclass
class Summary:
    """What is known of the shards of one partition.

    Attributes
    ----------
    lengths : list of int
        Length of each shard.
    rows : list of int or None
        Number of rows of each shard that can be cut by rows.
    classes : list of str
        Names of their classes, in the order of first appearance.
    schema : dict or None
        Of the first shard.
    """

    lengths: list[int] = field(default_factory=list)
    rows: list[int | None] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    schema: dict | None = None


def summarize(shards: Iterable) -> Iterator[Summary]:
    """The :class:`Summary` of a partition, as the one element of it."""
    summary = Summary()
    for shard in shards:
        name = class_name(shard)
        if not summary.classes:
            summary.schema = schema(shard)
        if name not in summary.classes:
            summary.classes.append(name)
        summary.lengths.append(length(shard))
        summary.rows.append(rows(shard))
    yield summary
