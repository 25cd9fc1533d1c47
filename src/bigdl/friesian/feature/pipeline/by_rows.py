"""The executor ``row``: one row at a time, in Python alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.pipeline import kinds
from bigdl.friesian.feature.pipeline.step import Fitted, Schema, inputs_of

__all__ = ["RowExecutor"]


class RowExecutor:
    """Steps prepared for rows.

    Parameters
    ----------
    fitted : list of Fitted
    schema : dict of str to Field
        Of the rows.
    """

    def __init__(self, fitted: Sequence[Fitted], schema: Schema):
        self._kinds = {name: each.kind for name, each in schema.items()}
        self._needed = inputs_of(fitted)
        self._steps = [(each.cells, tuple(each.after)) for each in fitted]

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        missing = [name for name in self._needed if name not in row]
        if missing:
            raise UsageError(f"The row has no {missing}, which the pipeline reads; give None")
        values = {
            name: kinds.coerced(row[name], kind, name)
            for name, kind in self._kinds.items()
            if name in row
        }
        for cells, names in self._steps:
            made = {}
            for cell in cells:
                if cell.function is not None:
                    made[cell.output] = cell.function.value(*(values[each] for each in cell.inputs))
                elif cell.inputs[0] in values:
                    made[cell.output] = values[cell.inputs[0]]
            values |= made
            values = {name: values[name] for name in names if name in values}
        return values
