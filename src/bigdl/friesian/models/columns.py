"""Questions of models of any framework to the schema of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    from bigdl.friesian.ops.schema import FeatureSchema


def cardinalities(schema: FeatureSchema, names: Iterable[str]) -> dict[str, int]:
    """Return the numbers of different values of columns of categories."""
    return {name: schema.cardinality(name) for name in names}


def check_numbers(schema: FeatureSchema, names: Iterable[str]) -> list[str]:
    """Columns of single numbers; a UsageError if one holds something else."""
    names = list(names)
    for name in names:
        feature = schema[name]
        if feature.shape or feature.dtype in ("string", "boolean"):
            raise UsageError(f"{name} should hold numbers, but its type is {feature}")
    return names


def check_tasks(tasks: Sequence[str]) -> None:
    """A UsageError if they are no names of outputs."""
    if isinstance(tasks, str) or not tasks:
        raise UsageError(f"tasks should be a list of names, got {tasks!r}")
