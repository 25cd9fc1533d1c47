"""A pipeline as text, and as the schema that models are sized from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigdl.friesian.feature.pipeline import kinds
from bigdl.friesian.feature.pipeline.step import Field, Fitted, Schema, State, Step, executors_of
from bigdl.friesian.feature.schema import Feature, FeatureSchema

__all__ = ["explain", "feature_schema"]

_SHOWN = 4  # names of columns in a line


def feature_schema(fields: Schema) -> FeatureSchema:
    """Fields as features."""
    return FeatureSchema({name: _feature(field) for name, field in fields.items()})


def _feature(field: Field) -> Feature:
    kind, shape = field.kind, []
    while kinds.is_array(kind):
        shape.append(None if shape else field.length)
        kind = kinds.element_of(kind)
    return Feature(kind, field.cardinality, tuple(shape))


def explain(steps: Sequence[Step], fitted: Sequence[Fitted] | None) -> str:
    """See :meth:`FeaturePipeline.explain`."""
    rows = [("step", "reads", "makes", "executors", "learned")]
    for place, step in enumerate(steps):
        executors = ", ".join(executors_of(step))
        name = f"{place + 1} {step.method}"
        if fitted is None:
            read = "all that fit" if step.reads is None else _few(step.reads)
            rows.append((name, read, "", executors, "nothing yet"))
            continue
        each = fitted[place]
        made = [cell.output for cell in each.cells] or [
            name for name in each.after if each.after[name] != each.before.get(name)
        ]
        read = dict.fromkeys(name for cell in each.cells for name in cell.inputs)
        read |= dict.fromkeys(step.reads or ())
        rows.append((name, _few(list(read)), _few(made), executors, _size(each.state)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = [
        "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
    if fitted:
        shown = (f"{name} {_described(field)}" for name, field in fitted[-1].after.items())
        lines.append(f"result: {', '.join(shown)}")
    return "\n".join(line.rstrip() for line in lines)


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _described(field: Field) -> str:
    return field.kind if field.cardinality is None else f"{field.kind} ({field.cardinality} values)"


def _size(state: State) -> str:
    tables = [value for value in state.values() if hasattr(value, "num_rows")]
    figures = sum(map(_figures, (v for v in state.values() if not hasattr(v, "num_rows"))))
    parts = []
    if tables:
        rows, size = sum(each.num_rows for each in tables), sum(each.nbytes for each in tables)
        parts.append(f"{rows} rows ({_bytes(size)})")
    if figures:
        parts.append(f"{figures} figures")
    return ", ".join(parts) or "-"


def _figures(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_figures, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_figures, value))
    return 1


def _bytes(size: int) -> str:
    return f"{-(-size // 1000)} kB" if size < 1e6 else f"{size / 1e6:.1f} MB"
