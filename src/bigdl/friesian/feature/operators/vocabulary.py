"""Vocabularies: the values of columns with their numbers, all learned by one pass.

Rows become (vocabulary, value) pairs by one ``explode``, and one aggregation counts them.  The
numbers of a vocabulary depend on nothing but the values and their counts.  As long as they are few
they are ranked on the driver, else by a sort of Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.columns import (
    as_names,
    col,
    is_array,
    is_fractional,
    is_textual,
    require_columns,
    temporary,
    type_of,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

__all__ = [
    "DRIVER_VALUES",
    "Source",
    "count_values",
    "distinct_values",
    "learn",
    "number_column",
    "sources_of",
]

# Counted values that are ranked on the driver.  A million short strings take about 30 MB there.
DRIVER_VALUES = 2_000_000


@dataclass(frozen=True)
class Source:
    """One vocabulary to be learned.

    Attributes
    ----------
    name : str
        Of the column of values in the result.
    columns : tuple of str
        Where the values come from.
    at_least : int
        Values that occur less often are left out.
    """

    name: str
    columns: tuple[str, ...]
    at_least: int = 0


def number_column(name: str) -> str:
    """The column of the numbers of a vocabulary: ``id``, unless its values are called so."""
    return "id_number" if name.lower() == "id" else "id"


def sources_of(columns: Sequence[Any], freq_limit: Any) -> list[Source]:
    """What ``gen_string_idx`` was asked for.

    Parameters
    ----------
    columns : list of str or dict
        A dict ``{"src_cols": [...], "col_name": ...}`` means one vocabulary of several columns.
    freq_limit : int, dict of str to int, or None
    """
    if freq_limit is not None and not isinstance(freq_limit, Mapping):
        _check_limit(freq_limit)
    found = []
    for each in columns:
        if isinstance(each, Mapping):
            if "src_cols" not in each:
                raise UsageError(
                    f"src_cols must be provided if columns is a dictionary, but got {dict(each)!r}"
                )
            names = as_names(each["src_cols"], "src_cols")
            name = each.get("col_name") or f"{names[0]}_union"
        else:
            names = as_names(each)
            name = names[0]
        limit = freq_limit.get(name) if isinstance(freq_limit, Mapping) else freq_limit
        found.append(Source(name, tuple(names), 0 if limit is None else _check_limit(limit)))
    return found


def _check_limit(limit: Any) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise UsageError(
            f"freq_limit should be int, dict of str to int, or None, but got {limit!r}"
        )
    return limit


def learn(
    df: DataFrame,
    sources: Sequence[Source],
    order_by_freq: bool,
    separator: str | None,
    id_name: Callable[[str], str] | None = None,
) -> list[DataFrame]:
    """Learn vocabularies.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    sources : list of Source
    order_by_freq : bool
        Number the values by falling count, and equal counts by value; otherwise by value.
    separator : str or None
        Regular expression between the several values of a cell.
    id_name : callable, optional
        The name of the column of numbers by that of the source; default: :func:`number_column`.

    Returns
    -------
    list of pyspark.sql.DataFrame
        Columns: the name of the source, and the numbers (int), which begin with 1.
    """
    counted, fields = count_values(df, sources, separator)
    counted = counted.persist()
    try:
        rank = _ranked_on_driver if counted.count() <= DRIVER_VALUES else _ranked_by_spark
        frames = rank(counted, fields, order_by_freq)
    finally:
        counted.unpersist()
    return [
        frame.toDF(source.name, (id_name or number_column)(source.name))
        for frame, source in zip(frames, sources, strict=True)
    ]


def distinct_values(df: DataFrame, columns: list[str]) -> dict[str, list]:
    """The different values of columns in their order, a null at the end."""
    sources = [Source(name, (name,)) for name in columns]
    counted, fields = count_values(df, sources, None, nulls=True)
    found: dict[str, list] = {name: [] for name in columns}
    for row in counted.collect():
        found[columns[row["source"]]].append(row[fields[row["source"]]])
    return {
        name: sorted(v for v in values if v is not None) + [v for v in values if v is None]
        for name, values in found.items()
    }


def count_values(
    df: DataFrame, sources: Sequence[Source], separator: str | None, nulls: bool = False
) -> tuple[DataFrame, list[str]]:
    """Count the values of all sources by one aggregation.

    Returns
    -------
    counted : pyspark.sql.DataFrame
        Columns ``source`` (int), one ``value_<i>`` for each type that occurs, and ``count``; the
        value is in the column of the type of its source, the others are null.
    fields : list of str
        The column ``value_<i>`` of each source.
    """
    from pyspark.sql import functions as F

    require_columns(df, [name for source in sources for name in source.columns])
    kinds = [_value_type(df, source, separator) for source in sources]
    types = list(dict.fromkeys(kinds))
    fields = [f"value_{types.index(kind)}" for kind in kinds]
    cells = [
        _pairs(df, i, name, kinds[i], types, separator, nulls)
        for i, source in enumerate(sources)
        for name in source.columns
    ]
    every = F.concat(*cells) if separator is not None else F.array(*cells)
    pair = temporary(df, "pair")
    values = [f"value_{i}" for i in range(len(types))]
    rows = df.select(F.explode(every).alias(pair)).select(f"{pair}.*")
    if not nulls:
        present = F.col(values[0]).isNotNull()
        for value in values[1:]:
            present = present | F.col(value).isNotNull()
        rows = rows.filter(present)
    counted = rows.groupBy("source", *values).agg(F.count("*").alias("count"))
    limits = {i: source.at_least for i, source in enumerate(sources) if source.at_least > 1}
    if limits:
        enough = F.lit(True)
        for i, limit in limits.items():
            enough = enough & ((F.col("source") != i) | (F.col("count") >= limit))
        counted = counted.filter(enough)
    return counted, fields


def _value_type(df: DataFrame, source: Source, separator: str | None) -> DataType:
    from pyspark.sql import types as T

    kinds = [type_of(df, name) for name in source.columns]
    for name, kind in zip(source.columns, kinds, strict=True):
        if not isinstance(kind, T.AtomicType):
            hint = "; explode it first" if is_array(kind) else ""
            raise UsageError(
                f"The column {name} of type {kind.simpleString()} has no vocabulary: its cells "
                f"should be single values{hint}"
            )
    if separator is not None or any(map(is_textual, kinds)):
        return T.StringType()
    if len(set(kinds)) == 1:
        return kinds[0]
    return T.DoubleType() if any(map(is_fractional, kinds)) else T.LongType()


def _pairs(
    df: DataFrame,
    i: int,
    name: str,
    kind: DataType,
    types: list[DataType],
    separator: str | None,
    nulls: bool,
) -> Column:
    """What one cell adds to the pairs: a struct, or with a separator an array of structs."""
    from pyspark.sql import functions as F

    value = col(name).cast(kind)
    if is_fractional(type_of(df, name)) and not nulls:
        value = F.when(~F.isnan(col(name)), value)  # NaN is no value of a vocabulary

    def pair(value: Column) -> Column:
        fields = [
            (value if each == kind else F.lit(None).cast(each)).alias(f"value_{j}")
            for j, each in enumerate(types)
        ]
        return F.struct(F.lit(i).alias("source"), *fields)

    if separator is None:
        return pair(value)
    # a null cell has no tokens; concat of a null array would be null
    return F.transform(F.coalesce(F.split(value, separator), F.array().cast("array<string>")), pair)


def _ranked_on_driver(
    counted: DataFrame, fields: list[str], order_by_freq: bool
) -> list[DataFrame]:
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyspark.sql.types import IntegerType, StructField, StructType

    table = counted.toArrow()
    frames = []
    for i, field in enumerate(fields):
        mine = table.filter(pc.equal(table["source"], i)).select([field, "count"])
        order = [("count", "descending")] if order_by_freq else []
        values = mine.sort_by([*order, (field, "ascending")])[field]
        ids = pa.array(range(1, len(values) + 1), pa.int32())
        schema = StructType([counted.schema[field], StructField("id", IntegerType())])
        ranked = pa.table([values, ids], names=schema.names)
        frames.append(counted.sparkSession.createDataFrame(ranked, schema))
    return frames


def _ranked_by_spark(counted: DataFrame, fields: list[str], order_by_freq: bool) -> list[DataFrame]:
    """Ranks by a range-partitioned sort; the sorted values are written once and never sorted again.

    A second sort could cut other ranges, and the offsets of the first would be wrong for it.
    """
    from pyspark.sql import functions as F

    frames = []
    for i, field in enumerate(fields):
        order = [F.col("count").desc()] if order_by_freq else []
        mine = counted.filter(F.col("source") == i).select(F.col(field), F.col("count"))
        laid = mine.orderBy(*order, F.col(field)).localCheckpoint(eager=True)
        numbered = laid.select(
            F.col(field),
            F.spark_partition_id().alias("part"),
            F.monotonically_increasing_id().bitwiseAND((1 << 33) - 1).alias("place"),
        )
        offsets, total = [], 0
        for part, size in sorted(numbered.groupBy("part").count().collect()):
            offsets.append((part, total))
            total += size
        starts = laid.sparkSession.createDataFrame(offsets, "part int, start bigint")
        rank = (F.col("start") + F.col("place") + 1).cast("int")
        ranked = numbered.join(F.broadcast(starts), "part")
        frames.append(ranked.select(F.col(field), rank.alias("id")))
    return frames
