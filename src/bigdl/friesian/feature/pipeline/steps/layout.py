"""Steps that choose columns and their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.pipeline.step import Cell, Schema, Step, require_fields

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Drop", "Rename", "Select"]


@dataclass(frozen=True)
class Select(Step):
    """``select``."""

    columns: list[str]
    method = "select"

    def __post_init__(self) -> None:
        twins = sorted({name for name in self.columns if self.columns.count(name) > 1})
        if twins:
            raise UsageError(f"cols should have every column once, but got {twins} several times")

    def cells(self, before: Schema, state: Any) -> list[Cell]:
        require_fields(before, self.columns)
        return []

    def after(self, before: Schema, state: Any) -> Schema:
        require_fields(before, self.columns)
        return {name: before[name] for name in self.columns}

    def catalyst(self, df: DataFrame, before: Schema, state: Any) -> DataFrame:
        return _selected(df, self.columns)


@dataclass(frozen=True)
class Drop(Step):
    """``drop``."""

    columns: list[str]
    method = "drop"

    @property
    def reads(self) -> list[str]:
        return []

    def cells(self, before: Schema, state: Any) -> list[Cell]:
        return []

    def after(self, before: Schema, state: Any) -> Schema:
        return {name: each for name, each in before.items() if name not in self.columns}

    def catalyst(self, df: DataFrame, before: Schema, state: Any) -> DataFrame:
        return df.drop(*self.columns)


@dataclass(frozen=True)
class Rename(Step):
    """``rename``."""

    columns: dict[str, str]
    method = "rename"

    def cells(self, before: Schema, state: Any) -> list[Cell]:
        found = self._found(before)
        kept = [name for name in before if name not in found]
        names = [*kept, *found.values()]
        twins = sorted({name for name in names if names.count(name) > 1})
        if twins:
            raise UsageError(f"There would be several columns {twins}; drop or rename the others")
        return [Cell((old,), new, before[old], None) for old, new in found.items()]

    def _found(self, before: Schema) -> dict[str, str]:
        return {old: new for old, new in self.columns.items() if old in before}

    def after(self, before: Schema, state: Any) -> Schema:
        found = self._found(before)
        return {found.get(name, name): each for name, each in before.items()}

    def catalyst(self, df: DataFrame, before: Schema, state: Any) -> DataFrame:
        from bigdl.friesian.feature.operators.columns import renamed

        return renamed(df, self._found(before))


def _selected(df: DataFrame, names: list[str]) -> DataFrame:
    """The columns of these names that are there, and those that a fit has asked about."""
    from bigdl.friesian.feature.operators.columns import col
    from bigdl.friesian.feature.pipeline.by_spark import is_hidden

    hidden = [name for name in df.columns if is_hidden(name)]
    return df.select(*(col(name) for name in names if name in df.columns), *map(col, hidden))
