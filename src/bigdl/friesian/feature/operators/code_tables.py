"""Tables that say something about combinations of values, and rows that take it out of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from bigdl.friesian.feature.operators.columns import col, replace, temporary

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["COUNT", "LookUp", "join_codes", "look_up_codes", "without_twins"]

COUNT = "target_encode_count"  # how many rows a category had, in a table of codes


@dataclass(frozen=True)
class LookUp:
    """What rows take out of a table.

    Attributes
    ----------
    table : pyspark.sql.DataFrame
        One row for each combination of keys.
    at : dict of str to Column
        By the columns of its keys what the rows have in their place.
    outputs : dict of str to (str, Column)
        By the name of the result the column of the table, and what stands in for a combination that
        it has not.
    """

    table: DataFrame
    at: Mapping[str, Column]
    outputs: Mapping[str, tuple[str, Column]]


def join_codes(df: DataFrame, look_ups: Sequence[LookUp]) -> DataFrame:
    """`df` with what some tables say about its rows.

    No result takes the place of a column before all are there, since the column may be a key of
    this or another table.
    """
    from pyspark.sql import functions as F

    rows, results, gone = df, {}, []
    for i, each in enumerate(look_ups):
        if not each.outputs:
            continue
        found = [*each.at, *dict.fromkeys(code for code, _ in each.outputs.values())]
        hidden = {name: temporary(rows, f"found{i}_{j}") for j, name in enumerate(found)}
        table = each.table.select(*(col(name).alias(other) for name, other in hidden.items()))
        same = (value == col(hidden[name]) for name, value in each.at.items())
        rows = rows.join(table, reduce(lambda a, b: a & b, same), "left")
        for output, (code, default) in each.outputs.items():
            results[output] = F.coalesce(col(hidden[code]), default)
        gone += hidden.values()
    return replace(rows, results).drop(*gone)


def look_up_codes(
    codes: DataFrame,
    keys: Sequence[str],
    categories: Sequence[str],
    out_target_mean: Mapping[str, tuple[str, float]],
    targets: Sequence[str] | None,
) -> LookUp:
    """What rows take out of a :class:`TargetCode`: the codes of all targets, or of some of them.

    Parameters
    ----------
    codes : pyspark.sql.DataFrame
    keys : list of str
        Its columns of categories.
    categories : list of str
        The columns of the rows in their place.
    out_target_mean : dict of str to (str, float)
    targets : list of str or None
    """
    from pyspark.sql import functions as F

    outputs = {
        output: (output, F.lit(mean).cast("double"))
        for output, (target, mean) in out_target_mean.items()
        if targets is None or target in targets
    }
    at = {key: col(name) for key, name in zip(keys, categories, strict=True)}
    return LookUp(codes, at, outputs)


def without_twins(table: DataFrame, keys: Sequence[str], values: Sequence[str]) -> DataFrame:
    """One row for each combination of keys: that with the largest count, then values.

    A table that a user made or united with another may have a combination twice, and a join would
    multiply rows.
    """
    from pyspark.sql import functions as F

    if not values:
        return table
    order = [COUNT] if COUNT in table.columns and COUNT not in (*keys, *values) else []
    most = F.max(F.struct(*(col(name).alias(name) for name in (*order, *values))))
    best = temporary(table, "best")
    found = table.groupBy(*map(col, keys)).agg(most.alias(best))
    shown = [F.col(best).getField(name).alias(name) for name in values]
    return found.select(*map(col, keys), *shown)
