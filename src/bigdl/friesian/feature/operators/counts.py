"""How often categories occur."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.columns import col, require_columns, temporary
from bigdl.friesian.feature.operators.target import (
    COUNT,
    Encoding,
    TargetStatistics,
    encodings_of,
    join_codes,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["COLUMNS", "count_categories", "count_encodings", "encode_counts"]

COLUMNS = ("count", "frequency")


def count_encodings(cat_cols: Any, normalize: bool, out_cols: Any) -> list[Encoding]:
    """What ``count_encode`` was asked for: one result for each group of columns."""
    if not isinstance(normalize, bool):
        raise UsageError(f"normalize should be a boolean, got {normalize!r}")
    wanted = COLUMNS[normalize]
    found = encodings_of(cat_cols, [wanted], out_cols)
    if out_cols is not None:
        return found
    return [Encoding(e.categories, {wanted: f"{'_'.join(e.categories)}_{wanted}"}) for e in found]


def count_categories(df: DataFrame, encodings: Sequence[Encoding]) -> list[DataFrame]:
    """Of each group of columns its values, their ``count`` and their ``frequency``.

    One aggregation counts all groups.  Rows with a null or NaN in the group are not counted.
    """
    from pyspark.sql import functions as F

    require_columns(df, [name for each in encodings for name in each.categories])
    groups = [Encoding(each.categories, {}) for each in encodings]
    statistics = TargetStatistics(df, groups, [], None, {}, 0)
    tables = []
    for encoding in groups:
        counted = statistics.codes(encoding)
        total = counted.agg(F.sum(COUNT)).first()[0]
        share = F.col(COUNT) / F.lit(total)
        names = map(col, encoding.categories)
        tables.append(counted.select(*names, F.col(COUNT).alias("count"), share.alias("frequency")))
    return tables


def encode_counts(df: DataFrame, encoding: Encoding, table: DataFrame) -> DataFrame:
    """`df` with the counts or frequencies of a table, and 0 for what it has not."""
    from pyspark.sql import functions as F

    require_columns(df, encoding.categories)
    ((wanted, output),) = encoding.outputs.items()
    require_columns(table, [*encoding.categories, wanted], "table of counts")
    hidden = [temporary(df, f"key{i}") for i in range(len(encoding.categories))]
    counted = table.select(
        *(col(name).alias(other) for name, other in zip(encoding.categories, hidden, strict=True)),
        col(wanted).alias(output),
    )
    same = [col(a) == col(b) for a, b in zip(encoding.categories, hidden, strict=True)]
    return join_codes(df, counted, same, {output: F.lit(0)}).drop(*hidden)
