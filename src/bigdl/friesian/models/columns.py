"""What a model of a framework of any kind asks the schema of a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    from bigdl.friesian.feature.schema import FeatureSchema

__all__ = ["cardinalities", "check_numbers"]


def cardinalities(schema: FeatureSchema, names: Iterable[str]) -> dict[str, int]:
    """How many different numbers the columns of categories have."""
    return {name: schema.cardinality(name) for name in names}


def check_numbers(schema: FeatureSchema, names: Iterable[str]) -> list[str]:
    """Columns of single numbers; a UsageError if one holds something else."""
    names = list(names)
    for name in names:
        feature = schema[name]
        if feature.shape or feature.dtype in ("string", "boolean"):
            raise UsageError(f"{name} should hold numbers, but its type is {feature}")
    return names
