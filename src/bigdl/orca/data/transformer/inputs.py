"""Checks of the data and the columns that a transformer is given."""

from __future__ import annotations

from typing import Any

from bigdl.common.errors import UsageError

__all__ = ["as_columns", "is_spark_frame", "require_columns"]


def as_columns(columns: Any, name: str) -> list[str]:
    """One column name or several, as a list without repetitions."""
    found = [columns] if isinstance(columns, str) else columns
    good = isinstance(found, list | tuple) and found and all(isinstance(c, str) for c in found)
    if not good or len(set(found)) < len(found):
        raise UsageError(
            f"{name} must be the name of a column or a list of different ones, got {columns!r}"
        )
    return list(found)


def is_spark_frame(data: Any) -> bool:
    return any(c.__module__.startswith("pyspark.sql.") for c in type(data).__mro__)


def require_columns(data: Any, columns: list[str]) -> None:
    """Refuse data that are not XShards of pandas frames, or a Spark frame, with these columns."""
    if is_spark_frame(data):
        names = data.columns
    else:
        from bigdl.orca.data.shard import SparkXShards

        if not isinstance(data, SparkXShards):
            raise UsageError(f"The data must be SparkXShards of pandas frames, got {type(data)}")
        schema = data.get_schema()
        if schema is None and len(data):
            raise UsageError(
                f"The data must be XShards of pandas frames, but a shard is a {type(data.first())}"
            )
        if schema is None:  # there is no shard
            return
        names = schema["columns"]
    missing = [column for column in columns if column not in names]
    if missing:
        raise UsageError(f"The data have no column {missing[0]!r}; they have {list(names)}")
