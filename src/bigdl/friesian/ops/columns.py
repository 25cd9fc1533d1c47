"""Operators that choose, drop and rename columns, or choose rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_choice, check_integer
from bigdl.common.errors import UsageError
from bigdl.friesian.ops.kinds import Schema, require_columns
from bigdl.friesian.ops.operator import Cell, Operator, TableOperator
from bigdl.friesian.ops.spark import check_new_names, col, renamed, twins_in

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

HIDDEN = "__bigdl_asked_"  # begins the names of columns that a fit has asked about


@dataclass(frozen=True)
class Select(Operator):
    """``select``."""

    columns: list[str]
    method = "select"

    def __post_init__(self) -> None:
        twins = sorted(twins_in(self.columns))
        if twins:
            raise UsageError(f"cols should have every column once, but got {twins} several times")

    def after(self, before: Schema, state: Any) -> Schema:
        require_columns(before, self.columns)
        return {name: before[name] for name in self.columns}

    def catalyst(self, df: DataFrame, before: Schema, state: Any) -> DataFrame:
        hidden = [name for name in df.columns if name.startswith(HIDDEN)]
        kept = (name for name in self.columns if name in df.columns)
        return df.select(*map(col, kept), *map(col, hidden))


@dataclass(frozen=True)
class Drop(Operator):
    """``drop``."""

    columns: list[str]
    method = "drop"

    @property
    def reads(self) -> list[str]:
        return []

    @property
    def dropped(self) -> set[str]:
        return set(self.columns)


@dataclass(frozen=True)
class Rename(Operator):
    """``rename``."""

    columns: dict[str, str]
    method = "rename"

    def cells(self, before: Schema, state: Any) -> list[Cell]:
        names = self._names(before)
        check_new_names([*(old for old in before if old not in names), *names.values()])
        return [Cell((old,), new, before[old], None) for old, new in names.items()]

    def _names(self, before: Schema) -> dict[str, str]:
        return {old: new for old, new in self.columns.items() if old in before}

    def after(self, before: Schema, state: Any) -> Schema:
        names = self._names(before)
        return {names.get(name, name): each for name, each in before.items()}

    def catalyst(self, df: DataFrame, before: Schema, state: Any) -> DataFrame:
        return renamed(df, self._names(before))


@dataclass(frozen=True)
class Filter(TableOperator):
    """``filter``, by an expression of SQL."""

    condition: str
    method = "filter"

    @property
    def reads(self) -> list[str]:
        """The condition, of which only Spark knows what columns it names."""
        return [self.condition]

    def catalyst(self, df: DataFrame, before: Schema, state: Any) -> DataFrame:
        return df.filter(self.condition)


@dataclass(frozen=True)
class DropNa(TableOperator):
    """``dropna``."""

    columns: list[str] | None
    how: str
    thresh: int | None
    method = "dropna"

    def __post_init__(self) -> None:
        check_choice("how", self.how, ("any", "all"))
        if self.thresh is not None:
            check_integer("thresh", self.thresh)

    def catalyst(self, df: DataFrame, before: Schema, state: Any) -> DataFrame:
        names = df.columns if self.columns is None else self.columns
        require_columns(df.columns, names)
        quoted = [f"`{name.replace('`', '``')}`" for name in names]
        return df.dropna(how=self.how, thresh=self.thresh, subset=quoted)
