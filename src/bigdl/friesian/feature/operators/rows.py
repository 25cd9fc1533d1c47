"""Operators that choose, order and unite rows."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.columns import (
    as_names,
    col,
    is_textual,
    random_seed,
    renamed,
    require_columns,
    temporary,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = [
    "concat",
    "drop_duplicates",
    "filter_by_frequency",
    "join",
    "shuffle_partitions",
]


def concat(frames: list[DataFrame], mode: str, distinct: bool) -> DataFrame:
    """The rows of all frames, by the names of their columns; see :meth:`Table.concat`."""
    if mode not in ("inner", "outer"):
        raise UsageError(f"concat mode should be either outer or inner, but got {mode!r}")
    frames = _with_equal_kinds(frames)
    if mode == "inner":
        common = [
            name for name in frames[0].columns if all(name in each.columns for each in frames)
        ]
        if not common:
            raise UsageError("The tables have no column in common; use mode='outer'")
        frames = [each.select(*map(col, common)) for each in frames]
    united = reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), frames)
    return united.distinct() if distinct else united


def _with_equal_kinds(frames: list[DataFrame]) -> list[DataFrame]:
    """A column of strings in one frame becomes one in all: ANSI mode would parse the strings."""
    kinds: dict[str, set[bool]] = {}
    for frame in frames:
        for field in frame.schema.fields:
            kinds.setdefault(field.name, set()).add(is_textual(field.dataType))
    mixed = [name for name, found in kinds.items() if len(found) > 1]
    return [
        frame.withColumns(
            {name: col(name).cast("string") for name in mixed if name in frame.columns}
        )
        for frame in frames
    ]


def drop_duplicates(df: DataFrame, subset: Any, sort_cols: Any, keep: str) -> DataFrame:
    """One row of each group of equal ones; see :meth:`Table.drop_duplicates`."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    if keep not in ("min", "max"):
        raise UsageError(f"keep should be either min or max, but got {keep!r}")
    names = df.columns if subset is None else as_names(subset, "subset")
    require_columns(df, names)
    if sort_cols is None:
        return df.dropDuplicates(names)
    order = as_names(sort_cols, "sort_cols")
    require_columns(df, order)
    place, rank = temporary(df, "place"), temporary(df, "rank")
    sorting = [col(name).asc() if keep == "min" else col(name).desc() for name in order]
    window = Window.partitionBy(*map(col, names)).orderBy(*sorting, place)
    ranked = df.withColumn(place, F.monotonically_increasing_id())
    ranked = ranked.withColumn(rank, F.row_number().over(window))
    return ranked.filter(F.col(rank) == 1).drop(place, rank)


def filter_by_frequency(df: DataFrame, columns: Any, min_freq: int, keep_rows: bool) -> DataFrame:
    """Values, or their rows, that occur often enough; see :meth:`FeatureTable`."""
    from pyspark.sql import functions as F

    names = as_names(columns)
    require_columns(df, names)
    if isinstance(min_freq, bool) or not isinstance(min_freq, int):
        raise UsageError(f"min_freq should be an integer, but got {min_freq!r}")
    count = temporary(df, "count")
    counted = df.groupBy(*map(col, names)).agg(F.count("*").alias(count))
    frequent = counted.filter(F.col(count) >= min_freq).drop(count)
    if not keep_rows:
        return frequent
    hidden = {name: temporary([*df.columns], f"key{i}") for i, name in enumerate(names)}
    frequent = frequent.withColumnsRenamed(hidden)
    same = reduce(
        lambda a, b: a & b, (col(name).eqNullSafe(col(key)) for name, key in hidden.items())
    )
    return df.join(frequent, same, "left_semi")


def shuffle_partitions(df: DataFrame, seed: int | None) -> DataFrame:
    """The rows of each partition in random order; none moves to another partition."""
    from pyspark.sql import functions as F

    return df.sortWithinPartitions(F.rand(random_seed(seed)))


def join(
    left: DataFrame,
    right: DataFrame,
    on: Any,
    how: str,
    lsuffix: str | None,
    rsuffix: str | None,
) -> DataFrame:
    """The join of two frames; see :meth:`FeatureTable.join`."""
    keys = None if on is None or on == [] else as_names(on, "on")
    if keys is None and how != "cross":
        raise UsageError(f"on should be str or a list of str for a join of type {how!r}; got None")
    if keys is not None:
        require_columns(left, keys)
        require_columns(right, keys)
    shared = [name for name in left.columns if name in right.columns and name not in (keys or [])]
    if lsuffix is not None:
        left = renamed(left, {name: name + lsuffix for name in shared})
    if rsuffix is not None:
        right = renamed(right, {name: name + rsuffix for name in shared})
    if keys is None:
        return left.crossJoin(right)
    return left.join(right, keys, how)
