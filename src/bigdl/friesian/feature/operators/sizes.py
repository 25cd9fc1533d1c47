"""The largest values and the lengths of arrays of all columns, by one aggregation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigdl.friesian.feature.operators.columns import col, is_array, is_integral, type_of
from bigdl.friesian.feature.schema import Feature, FeatureSchema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

__all__ = ["feature_schema"]


def feature_schema(df: DataFrame, names: Sequence[str]) -> FeatureSchema:
    """What models have to know of columns; see :meth:`FeatureTable.feature_schema`."""
    figures: dict[str, Column] = {}
    for i, name in enumerate(names):
        for figure, column in _figures(col(name), type_of(df, name)).items():
            figures[f"{i}_{figure}"] = column
    found = {}
    if figures:
        row = df.agg(*(column.alias(name) for name, column in figures.items())).first()
        found = row.asDict()
    return FeatureSchema(
        {name: _feature(type_of(df, name), i, found) for i, name in enumerate(names)}
    )


def _figures(value: Column, kind: DataType) -> dict[str, Column]:
    """The aggregates that tell the extremes of a column and the lengths at each depth."""
    from pyspark.sql import functions as F

    figures, depth = {}, 0
    while is_array(kind):
        lengths = F.array(F.when(value.isNotNull(), F.size(value)))
        if depth:  # the elements of `value` are the arrays of this depth
            inner = F.filter(value, lambda each: each.isNotNull())
            lengths, value = F.transform(inner, lambda each: F.size(each)), F.flatten(inner)
        figures[f"shortest_{depth}"] = F.min(F.array_min(lengths))
        figures[f"longest_{depth}"] = F.max(F.array_max(lengths))
        kind, depth = kind.elementType, depth + 1
    if is_integral(kind):
        low, high = (F.array_min(value), F.array_max(value)) if depth else (value, value)
        figures |= {"smallest": F.min(low), "largest": F.max(high)}
    return figures


def _feature(kind: DataType, i: int, figures: dict) -> Feature:
    shape: list[int | None] = []
    while is_array(kind):
        short, long = (figures[f"{i}_{each}_{len(shape)}"] for each in ("shortest", "longest"))
        shape.append(short if short == long else None)
        kind = kind.elementType
    smallest, largest = (figures.get(f"{i}_{each}") for each in ("smallest", "largest"))
    if not is_integral(kind):
        cardinality = None
    elif largest is None:
        cardinality = 0
    else:
        cardinality = largest + 1 if smallest >= 0 else None
    return Feature(kind.simpleString(), cardinality, tuple(shape))
