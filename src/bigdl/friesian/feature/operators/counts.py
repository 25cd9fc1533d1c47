"""How often categories occur."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.code_tables import (
    COUNT,
    LookUp,
    join_codes,
    without_twins,
)
from bigdl.friesian.feature.operators.columns import check_different, col, require_columns
from bigdl.friesian.feature.operators.target import (
    Encoding,
    TargetStatistics,
    encodings_of,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = [
    "COLUMNS",
    "check_counts",
    "count_categories",
    "count_encodings",
    "encode_counts",
    "look_up_counts",
]

COLUMNS = ("count", "frequency")


def count_encodings(cat_cols: Any, normalize: bool, out_cols: Any) -> list[Encoding]:
    """What ``count_encode`` was asked for: one result for each group of columns."""
    if not isinstance(normalize, bool):
        raise UsageError(f"normalize should be a boolean, got {normalize!r}")
    wanted = COLUMNS[normalize]
    found = encodings_of(cat_cols, [wanted], out_cols)
    if out_cols is not None:
        return found
    named = [Encoding(e.categories, {wanted: f"{'_'.join(e.categories)}_{wanted}"}) for e in found]
    # ["a_b", ["a", "b"]] would have one name for both
    names = [name for each in named for name in each.outputs.values()]
    check_different(names, "The names of the counts")
    return named


def count_categories(df: DataFrame, encodings: Sequence[Encoding]) -> list[DataFrame]:
    """Of each group of columns its values, their ``count`` and their ``frequency``.

    One aggregation counts all groups.  Rows with a null or NaN in the group are not counted.
    """
    from pyspark.sql import functions as F

    require_columns(df, [name for each in encodings for name in each.categories])
    _check_names(encodings)
    groups = [Encoding(each.categories, {}) for each in encodings]
    statistics = TargetStatistics(df, groups, [], None, {}, 0)
    tables = []
    for encoding in groups:
        counted = statistics.codes(encoding)
        total = counted.agg(F.sum(COUNT)).first()[0]
        share = F.col(COUNT) / F.lit(total)
        names = [
            col(key).alias(name)
            for key, name in zip(encoding.key_columns, encoding.categories, strict=True)
        ]
        tables.append(counted.select(*names, F.col(COUNT).alias("count"), share.alias("frequency")))
    return tables


def _check_names(encodings: Sequence[Encoding]) -> None:
    taken = [name for e in encodings for name in e.categories if name.lower() in COLUMNS]
    if taken:
        raise UsageError(
            f"The columns {taken} cannot be counted, since a table of counts has columns of these "
            "names; rename them first"
        )


def look_up_counts(encoding: Encoding, table: DataFrame, keys: Sequence[str]) -> LookUp:
    """What rows take out of a table of counts or frequencies: 0 for what it has not.

    Parameters
    ----------
    encoding : Encoding
    table : pyspark.sql.DataFrame
    keys : list of str
        Its columns in the place of the categories.
    """
    from pyspark.sql import functions as F

    ((wanted, output),) = encoding.outputs.items()
    at = {key: col(name) for key, name in zip(keys, encoding.categories, strict=True)}
    return LookUp(table, at, {output: (wanted, F.lit(0))})


def check_counts(tables: Sequence[DataFrame], encodings: Sequence[Encoding]) -> list[DataFrame]:
    """The tables of counts that a user gives, with every combination once."""
    found = []
    for table, encoding in zip(tables, encodings, strict=True):
        wanted = list(encoding.outputs)
        require_columns(table, [*encoding.categories, *wanted], "table of counts")
        found.append(without_twins(table, encoding.categories, wanted))
    return found


def encode_counts(
    df: DataFrame, encodings: Sequence[Encoding], tables: Sequence[DataFrame]
) -> DataFrame:
    """`df` with the counts or frequencies of tables, which have every combination once."""
    require_columns(df, [name for each in encodings for name in each.categories])
    _check_names(encodings)
    found = [
        look_up_counts(encoding, table, encoding.categories)
        for encoding, table in zip(encodings, tables, strict=True)
    ]
    return join_codes(df, found)
