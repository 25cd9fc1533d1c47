"""What a shard is: its class, its length, its columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Summary", "class_name", "known_class_name", "length", "schema", "summarize"]

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
    classes : list of str
        Names of their classes, in the order of first appearance.
    schema : dict or None
        Of the first shard.
    """

    lengths: list[int] = field(default_factory=list)
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
    yield summary
