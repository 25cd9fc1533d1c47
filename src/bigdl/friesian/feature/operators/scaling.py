"""Numbers scaled to a range, each column (or each position of an array) by its own extremes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.columns import (
    as_names,
    col,
    is_array,
    is_fractional,
    is_numeric,
    replace,
    require_columns,
    type_of,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

__all__ = ["apply_min_max", "fit_min_max"]


def fit_min_max(df: DataFrame, columns: Any) -> dict[str, tuple]:
    """The extremes of columns, without nulls and NaN.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    columns : str or list of str
        Columns of numbers, of arrays of numbers, or of vectors.

    Returns
    -------
    dict of str to (min, max)
        Two floats for a column of numbers, two lists of floats for one of arrays or vectors; None
        for a column that has no value.
    """
    names = as_names(columns)
    require_columns(df, names)
    for name in names:
        _check_scalable(name, type_of(df, name))
    scalars = [name for name in names if is_numeric(type_of(df, name))]
    found = _scalar_extremes(df, scalars) if scalars else {}
    arrays = [name for name in names if name not in found]
    found |= _array_extremes(df, arrays) if arrays else {}
    return {name: found[name] for name in names}


def _check_scalable(name: str, kind: DataType) -> None:
    inner = kind.elementType if is_array(kind) else kind
    if not is_numeric(inner) and not _is_vector(kind):
        raise UsageError(
            f"The column {name} of type {kind.simpleString()} cannot be scaled; it should hold "
            "numbers, arrays of numbers or vectors"
        )


def _is_vector(kind: DataType) -> bool:
    return kind.typeName() in ("udt", "vectorudt") or kind.simpleString() == "vector"


def _number(value: Column, kind: DataType) -> Column:
    from pyspark.sql import functions as F

    value = value.cast("double")
    return F.when(~F.isnan(value), value) if is_fractional(kind) else value


def _scalar_extremes(df: DataFrame, names: list[str]) -> dict[str, tuple]:
    from pyspark.sql import functions as F

    figures = []
    for i, name in enumerate(names):
        value = _number(col(name), type_of(df, name))
        figures += [F.min(value).alias(f"min{i}"), F.max(value).alias(f"max{i}")]
    row = df.agg(*figures).first()
    return {name: (row[2 * i], row[2 * i + 1]) for i, name in enumerate(names)}


def _array_extremes(df: DataFrame, names: list[str]) -> dict[str, tuple]:
    from pyspark.sql import functions as F

    def tagged(i: int, name: str) -> Column:
        def one(value: Column, place: Column) -> Column:
            value = F.when(~F.isnan(value), value)
            return F.struct(F.lit(i).alias("column"), place.alias("place"), value.alias("value"))

        return F.transform(F.coalesce(_as_array(df, name), F.array().cast("array<double>")), one)

    cells = [tagged(i, name) for i, name in enumerate(names)]
    rows = df.select(F.explode(F.concat(*cells)).alias("cell")).select("cell.*")
    grouped = rows.groupBy("column", "place").agg(F.min("value"), F.max("value"))
    found: dict[str, tuple] = {name: ([], []) for name in names}
    for i, _, low, high in sorted(grouped.collect(), key=lambda row: row[:2]):
        found[names[i]][0].append(low)
        found[names[i]][1].append(high)
    return found


def _as_array(df: DataFrame, name: str) -> Column:
    """A column of arrays or vectors as array<double>."""
    if _is_vector(type_of(df, name)):
        from pyspark.ml.functions import vector_to_array

        return vector_to_array(col(name))
    return col(name).cast("array<double>")


def apply_min_max(
    df: DataFrame,
    extremes: Mapping[str, tuple],
    minimum: float,
    maximum: float,
    clip: bool = False,
) -> DataFrame:
    """Scale columns by extremes that were learned from this or another frame.

    Numbers become float, arrays array<double>, vectors stay vectors; nulls stay nulls, and where
    the extremes are equal every value becomes the middle of the range.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    extremes : dict of str to (min, max)
    minimum, maximum : float
        The range.
    clip : bool, default False
        Values outside the extremes become the ends of the range.
    """
    require_columns(df, extremes)
    for bound, what in ((minimum, "min"), (maximum, "max")):
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise UsageError(f"{what} should be a number, got {bound!r}")
    if not minimum < maximum:
        raise UsageError(f"min should be smaller than max, but got {minimum} and {maximum}")
    scaled = {}
    for name, (low, high) in extremes.items():
        _check_scalable(name, type_of(df, name))
        if is_numeric(type_of(df, name)):
            value = col(name).cast("double")
            scaled[name] = _scaled(value, low, high, minimum, maximum, clip).cast("float")
        else:
            scaled[name] = _scaled_array(df, name, low, high, (minimum, maximum, clip))
    return replace(df, scaled)


def _scaled(
    value: Column, low: Any, high: Any, minimum: float, maximum: float, clip: bool
) -> Column:
    from pyspark.sql import functions as F

    if low is None or high is None:
        return F.lit(None).cast("double")  # the column had no value
    if low == high:
        middle = F.lit((minimum + maximum) / 2)
        return F.when(value.isNotNull(), F.when(F.isnan(value), value).otherwise(middle))
    span = _span(low, high)
    result = (value - F.lit(float(low))) / F.lit(span) * F.lit(float(maximum - minimum))
    result = result + F.lit(float(minimum))
    if clip:
        bounded = F.greatest(F.least(result, F.lit(float(maximum))), F.lit(float(minimum)))
        result = F.when(result.isNotNull() & ~F.isnan(result), bounded).otherwise(result)
    return result


def _span(low: float, high: float) -> float:
    span = float(high) - float(low)
    if not math.isfinite(span) or span <= 0:
        raise UsageError(f"The extremes should be finite and in their order, got {low!r}, {high!r}")
    return span


def _scaled_array(df: DataFrame, name: str, low: Any, high: Any, target: tuple) -> Column:
    """Position by position; the extremes are literal arrays, so the length of the plan is fixed."""
    from pyspark.sql import functions as F

    minimum, maximum, clip = target
    if not isinstance(low, list | tuple) or not isinstance(high, list | tuple):
        raise UsageError(
            f"The extremes of the column of arrays {name} should be lists, got {low!r}"
        )
    if len(low) != len(high):
        raise UsageError(f"The extremes of {name} have {len(low)} and {len(high)} values")
    constant = [None if a is None else a == b for a, b in zip(low, high, strict=True)]
    spans = [
        1.0 if c or c is None else _span(a, b) for a, b, c in zip(low, high, constant, strict=True)
    ]
    lows = F.array(*map(F.lit, low)).cast("array<double>")
    widths = F.array(*map(F.lit, spans)).cast("array<double>")
    flags = F.array(*map(F.lit, constant)).cast("array<boolean>")

    def one(value: Column, place: Column) -> Column:
        scaled = (value - F.get(lows, place)) / F.get(widths, place)
        scaled = scaled * F.lit(float(maximum - minimum)) + F.lit(float(minimum))
        if clip:
            bounded = F.greatest(F.least(scaled, F.lit(float(maximum))), F.lit(float(minimum)))
            scaled = F.when(scaled.isNotNull() & ~F.isnan(scaled), bounded).otherwise(scaled)
        middle = F.when(F.isnan(value), value).otherwise(F.lit((minimum + maximum) / 2))
        middle = F.when(value.isNotNull(), middle)
        return F.when(F.get(flags, place), middle).otherwise(scaled)

    values = F.transform(_as_array(df, name), one)
    if _is_vector(type_of(df, name)):
        from pyspark.ml.functions import array_to_vector

        return F.when(col(name).isNotNull(), array_to_vector(values))
    return values
