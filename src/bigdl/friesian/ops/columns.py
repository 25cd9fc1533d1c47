"""Columns of a DataFrame: their names and types, new columns in their place, which to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from bigdl.common.errors import UsageError
from bigdl.friesian.ops import kinds
from bigdl.friesian.ops.operator import (
    Cell,
    Field,
    Operator,
    Schema,
    TableOperator,
    require_fields,
    require_kind,
)
from bigdl.friesian.ops.spark import F

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = [
    "HIDDEN",
    "Drop",
    "Filter",
    "Rename",
    "Select",
    "as_names",
    "check_count",
    "check_different",
    "check_string",
    "col",
    "common_text",
    "is_column",
    "kind_of",
    "names_of",
    "names_of_results",
    "numeric_columns",
    "random_seed",
    "renamed",
    "replace",
    "require_columns",
    "schema_of",
    "temporary",
]


def col(name: str) -> Column:
    """The column of exactly this name, whatever characters it has."""

    return F.col("`" + name.replace("`", "``") + "`")


def as_names(columns: Any, what: str = "columns") -> list[str]:
    """A name or a list of names, as a list."""
    if isinstance(columns, str):
        return [columns]
    if (
        not isinstance(columns, list | tuple)
        or not columns
        or not all(isinstance(each, str) for each in columns)
    ):
        shown = None if columns in ([], ()) else columns
        raise UsageError(f"{what} should be str or a list of str, but got {shown}.")
    return list(columns)


def check_string(value: Any, what: str) -> str:
    """`value`, which must be a str."""
    if not isinstance(value, str):
        found = "None" if value is None else type(value).__name__
        raise UsageError(f"{what} should be str, but get {found}")
    return value


def check_count(value: Any, what: str, at_least: int) -> int:
    """`value`, which must be a whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise UsageError(f"{what} should be an integer from {at_least} on, got {value!r}")
    return value


def check_different(names: Sequence[str], what: str) -> None:
    """Check that no two results have one name: one of them would be lost."""
    twins = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twins:
        raise UsageError(f"{what} should differ from each other, but {twins} are there twice")


def require_columns(df: DataFrame, columns: Iterable[str], where: str = "Table") -> None:
    """Check that all columns exist."""
    missing = [name for name in dict.fromkeys(columns) if name not in df.columns]
    if missing:
        raise UsageError(f"{missing} do not exist in this {where}, whose columns are {df.columns}")


def schema_of(df: DataFrame) -> dict[str, Field]:
    """Return the fields of a DataFrame."""
    return {each.name: Field(each.dataType.simpleString()) for each in df.schema.fields}


def kind_of(df: DataFrame, column: str) -> str:
    """Return the type of a column, as Spark writes it."""
    return df.schema[column].dataType.simpleString()


def is_column(value: Any) -> bool:
    """Return True for a Column of Spark, of either of its two clients."""
    from pyspark.sql import Column

    return isinstance(value, Column)


def numeric_columns(df: DataFrame) -> list[str]:
    """Names of the columns of numbers."""
    return [name for name, field in schema_of(df).items() if kinds.is_number(field.kind)]


def names_of(
    df: DataFrame,
    columns: Any,
    is_kind: Callable[[str], bool],
    kind: str,
    what: str = "columns",
    advice: str = "",
) -> list[str]:
    """Names of columns that exist and are of one kind.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    columns : str or list of str
    is_kind : callable
        Such as :func:`kinds.is_number`.
    kind : str
        What a message calls it, such as ``"numbers"``.
    what : str
        What a message calls the argument.
    advice : str
        What to do otherwise.
    """
    names = as_names(columns, what)
    require_kind(schema_of(df), names, is_kind, kind, advice)
    return names


def names_of_results(
    out_cols: Any, rows: int, columns: int, of_rows: str, of_columns: str
) -> list[list[str]]:
    """Names that a user gives to results which have two indices.

    Parameters
    ----------
    out_cols : str, list of str, or list of lists of str
        A flat list is one row, or one column.
    rows, columns : int
        How many of each there should be.
    of_rows, of_columns : str
        The arguments that they belong to, for the message.
    """
    grid = [out_cols] if isinstance(out_cols, str) else out_cols
    if isinstance(grid, list | tuple) and all(isinstance(each, str) for each in grid):
        grid = [grid] if rows == 1 else [[each] for each in grid]
    shaped = (
        isinstance(grid, list | tuple)
        and len(grid) == rows
        and all(
            isinstance(row, list | tuple)
            and len(row) == columns
            and all(isinstance(each, str) for each in row)
            for row in grid
        )
    )
    if not shaped:
        raise UsageError(
            f"out_cols should have {rows} lists, one for each of {of_rows}, of {columns} names, "
            f"one for each of {of_columns}, but got {out_cols!r}"
        )
    check_different([name for row in grid for name in row], "out_cols")
    return [list(row) for row in grid]


def common_text(df: DataFrame, columns: list[str]) -> list[Column]:
    """Columns that can be put in one array: if any holds strings, all become strings.

    In ANSI mode Spark would cast the strings to the other type instead, and fail.
    """
    textual = [kinds.is_text(kind_of(df, name)) for name in columns]
    if any(textual) and not all(textual):
        return [col(name).cast("string") for name in columns]
    return [col(name) for name in columns]


def replace(df: DataFrame, columns: Mapping[str, Column]) -> DataFrame:
    """New values for columns, all at once; those that exist keep their place, others come last."""
    kept = [columns[name].alias(name) if name in columns else col(name) for name in df.columns]
    added = [value.alias(name) for name, value in columns.items() if name not in df.columns]
    return df.select(*kept, *added)


def renamed(df: DataFrame, columns: Mapping[str, str]) -> DataFrame:
    """`df` with new names for columns, all at once, so that two can swap theirs."""
    names = [columns.get(name, name) for name in df.columns]
    new = {columns[name] for name in df.columns if name in columns}
    twins = sorted(name for name in new if names.count(name) > 1)
    if twins:
        raise UsageError(f"There would be several columns {twins}; drop or rename the others")
    if new.isdisjoint(df.columns):
        return df.withColumnsRenamed(dict(columns))
    return df.toDF(*names)


def temporary(df: DataFrame | Iterable[str], purpose: str) -> str:
    """A column name that the table has not, for the time of an operator."""
    taken = {name.lower() for name in cast("Iterable[str]", getattr(df, "columns", df))}
    name, number = f"__bigdl_{purpose}", 0
    while name.lower() in taken:
        number += 1
        name = f"__bigdl_{purpose}_{number}"
    return name


def random_seed(seed: int | None) -> int:
    """`seed`, or a new one, so that a plan gives the same values whenever it is computed again."""
    import random

    if seed is None:
        return random.getrandbits(62)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"seed should be an integer or None, got {seed!r}")
    return seed


# -- operators -------------------------------------------------------------------------------------

HIDDEN = "__bigdl_asked_"  # begins the names of columns that a fit has asked about


@dataclass(frozen=True)
class Select(Operator):
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

    def cells(self, before: Schema, state: Any) -> list[Cell]:
        return []

    def after(self, before: Schema, state: Any) -> Schema:
        return {name: each for name, each in before.items() if name not in self.columns}

    def catalyst(self, df: DataFrame, before: Schema, state: Any) -> DataFrame:
        return df.drop(*self.columns)


@dataclass(frozen=True)
class Rename(Operator):
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
        return renamed(df, self._found(before))


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
