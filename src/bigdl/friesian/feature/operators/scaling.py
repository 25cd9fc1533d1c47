"""Numbers scaled to a range, each column (or each position of an array) by its own extremes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
        from pyspark.sql import functions as F

        return F.when(col(name).isNotNull(), vector_to_array(col(name)))
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
    scaling = _Scaling(float(minimum), float(maximum), clip)
    scaled = {}
    for name, (low, high) in extremes.items():
        kind = type_of(df, name)
        _check_scalable(name, kind)
        if is_numeric(kind) != (not isinstance(low, list | tuple)):
            raise UsageError(
                f"The extremes of the column {name} of type {kind.simpleString()} should be "
                f"{'numbers' if is_numeric(kind) else 'lists'}, got {low!r} and {high!r}"
            )
        if is_numeric(kind):
            scaled[name] = scaling.of_number(col(name).cast("double"), low, high).cast("float")
            continue
        values = scaling.of_array(_as_array(df, name), low, high)
        scaled[name] = _like_vector(name, values) if _is_vector(kind) else values
    return replace(df, scaled)


def _like_vector(name: str, values: Column) -> Column:
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F

    return F.when(col(name).isNotNull(), array_to_vector(values))


class _Scaling:
    """A range to scale to."""

    def __init__(self, minimum: float, maximum: float, clip: bool):
        self.minimum, self.maximum, self.clip = minimum, maximum, clip

    def of_number(self, value: Column, low: float | None, high: float | None) -> Column:
        from pyspark.sql import functions as F

        terms = (F.lit(each).cast("double") for each in self._terms(low, high))
        return self._scaled(value, *terms)

    def of_array(self, values: Column, low: Sequence, high: Sequence) -> Column:
        """Position by position; the terms are literal arrays, so that the plan stays small."""
        from pyspark.sql import functions as F

        terms = [self._terms(a, b) for a, b in zip(low, high, strict=True)]
        arrays = [
            F.array(*map(F.lit, each)).cast("array<double>")
            for each in (zip(*terms, strict=True) if terms else [()] * 4)
        ]
        return F.transform(
            values, lambda value, i: self._scaled(value, *(F.get(each, i) for each in arrays))
        )

    def _terms(self, low: float | None, high: float | None) -> tuple:
        """Low, span, factor and offset of ``(x - low) / span * factor + offset``."""
        if low is None or high is None:
            return None, None, None, None  # there was no value
        low, high = float(low), float(high)
        if not low <= high or math.isinf(high - low):
            raise UsageError(f"The extremes should be finite and in order, got {low} and {high}")
        if low == high:
            return low, 1.0, 0.0, (self.minimum + self.maximum) / 2
        return low, high - low, self.maximum - self.minimum, self.minimum

    def _scaled(
        self, value: Column, low: Column, span: Column, factor: Column, offset: Column
    ) -> Column:
        from pyspark.sql import functions as F

        scaled = (value - low) / span * factor + offset
        if not self.clip:
            return scaled
        bounded = F.greatest(F.least(scaled, F.lit(self.maximum)), F.lit(self.minimum))
        # greatest and least skip nulls, and NaN is the greatest number of Spark
        return F.when(scaled.isNull() | F.isnan(scaled), scaled).otherwise(bounded)
