"""Columns that stand in the names of folders: ``country=no/day=2024-05-01/part-0.parquet``."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.pipeline.step import Field

__all__ = ["fields_of", "named_in", "typed"]

_NULL = "__HIVE_DEFAULT_PARTITION__"


def named_in(path: str, root: str) -> dict[str, str | None]:
    """The columns in the names of the folders between a root and a file, as text."""
    inside = path[len(root) :].strip("/") if path.startswith(root) else ""
    pairs = [name.partition("=") for name in inside.split("/")[:-1] if "=" in name]
    return {unquote(name): None if value == _NULL else unquote(value) for name, _, value in pairs}


def fields_of(found: Mapping[str, Mapping[str, str | None]]) -> dict[str, Field]:
    """The fields of the columns in the names of the folders of files.

    As with Spark a column is int, bigint, double, date or string: the first that takes all values.

    Parameters
    ----------
    found : dict of str to dict
        Of each file what :func:`named_in` found.
    """
    names = list(next(iter(found.values()), {}))
    for path, values in found.items():
        if list(values) != names:
            raise UsageError(
                f"The folders of all files should name the columns {names}, but those of {path} "
                f"name {list(values)}"
            )
    return {name: Field(_kind([values[name] for values in found.values()])) for name in names}


def typed(values: Mapping[str, str | None], fields: Mapping[str, Field]) -> dict[str, Any]:
    """The values of a file as values of Python."""
    return {
        name: None if text is None else _PARSERS[fields[name].kind](text)
        for name, text in values.items()
    }


def _int(bits: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text) or not -(1 << bits - 1) <= int(text) < 1 << bits - 1:
            raise ValueError(text)
        return int(text)

    return parse


_PARSERS: dict[str, Callable[[str], Any]] = {
    "int": _int(32),
    "bigint": _int(64),
    "double": float,
    "date": datetime.date.fromisoformat,
    "string": str,
}


def _kind(values: Sequence[str | None]) -> str:
    for kind, parse in _PARSERS.items():
        try:
            for value in values:
                if value is not None:
                    parse(value)
        except ValueError:
            continue
        if kind == "string" or any(value is not None for value in values):
            return kind
    return "string"
