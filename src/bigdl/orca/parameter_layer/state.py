"""BatchNorm statistics and other buffers, which every rank makes from its own rows.

They are merged after every step, so that they depend neither on the transport nor on the size of
a group.  Only buffers that some rank has changed are sent at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bigdl.orca.parameter_layer.messages import Message, unpack
from bigdl.orca.parameter_layer.optimizers import cut_state
from bigdl.orca.parameter_layer.plan import LayerPlan

__all__ = ["RankState", "changed", "merge", "merged", "states_of"]


def changed(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    """Return those of `after` that differ from `before`, to the last bit."""
    return {
        number: new
        for number, (old, new) in enumerate(zip(before, after, strict=True))
        if old.tobytes() != new.tobytes()
    }


def merge(values: Sequence[np.ndarray], rows: Sequence[int]) -> np.ndarray:
    """One buffer from those of several ranks.

    A floating one becomes the mean weighted by the rows of each rank, an integer one (a counter)
    the largest.
    """
    first = values[0]
    if all(value.tobytes() == first.tobytes() for value in values[1:]):
        return first.copy()
    if not np.issubdtype(first.dtype, np.inexact):
        return np.maximum.reduce(values)
    wide = np.result_type(first.dtype, np.float64)
    total = sum(rows)
    mean = np.zeros(first.shape, wide)
    for value, count in zip(values, rows, strict=True):
        mean += value.astype(wide) * (count / total)
    return mean.astype(first.dtype)


def merged(contributions: Sequence[tuple[int, Mapping[int, np.ndarray]]]) -> dict[int, np.ndarray]:
    """All buffers that ranks have changed, given the rows and the changes of each."""
    numbers = sorted({number for _, buffers in contributions for number in buffers})
    return {
        number: merge(
            [buffers[number] for _, buffers in contributions if number in buffers],
            [rows for rows, buffers in contributions if number in buffers],
        )
        for number in numbers
    }


@dataclass
class RankState:
    """A slice of the weights with all that belongs to it.

    Attributes
    ----------
    weights : ndarray of float32
        The slice, in full precision whatever is sent.
    optimizer : list of dict
        State of the optimizer, for each segment.
    buffers : dict of int to ndarray
        Those buffers of the model that are merged here and have changed since the start.
    residual : ndarray of float32 or None
        What encoding has taken from this rank's gradients, of all parameters.
    records : list of dict
        Times of the steps of this group, and on rank 0 what every rank had to say of its batch.
    is_halted : bool
        True if a step of this group was discarded: those after it are not made.
    """

    weights: np.ndarray
    optimizer: list[dict]
    buffers: dict[int, np.ndarray] = field(default_factory=dict)
    residual: np.ndarray | None = None
    records: list[dict] = field(default_factory=list)
    is_halted: bool = False

    def begin_group(self) -> None:
        """Forget what was only about the group before."""
        self.records, self.is_halted = [], False

    @property
    def has_weights(self) -> bool:
        """False for one that was packed without."""
        return bool(len(self.weights))

    def pack(self) -> bytes:
        """Return it as bytes; see :meth:`message`."""
        return bytes(self.message())

    def message(self, *, with_weights: bool = True) -> Message:
        """A view of all but the residual, which another part of a step changes."""
        import torch

        arrays, listed = [self.weights if with_weights else self.weights[:0]], []
        for values in self.optimizer:
            kinds = {}
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    kinds[key] = ["tensor", len(arrays)]
                    arrays.append(value.detach().numpy())
                else:
                    kinds[key] = ["number", value]
            listed.append(kinds)
        places = {number: len(arrays) + i for i, number in enumerate(self.buffers)}
        arrays += self.buffers.values()
        doc = {
            "optimizer": listed,
            "buffers": list(places.items()),
            "records": self.records,
            "is_halted": self.is_halted,
        }
        return Message(doc, arrays)

    @classmethod
    def unpack(cls, data: Any, residual: np.ndarray | None = None) -> RankState:
        """The inverse of :meth:`pack`."""
        import torch

        doc, arrays = unpack(data)
        optimizer = [
            {
                key: torch.from_numpy(arrays[value].copy()) if kind == "tensor" else value
                for key, (kind, value) in values.items()
            }
            for values in doc["optimizer"]
        ]
        buffers = {number: arrays[place].copy() for number, place in doc["buffers"]}
        return cls(arrays[0].copy(), optimizer, buffers, residual, doc["records"], doc["is_halted"])


def states_of(
    plan: LayerPlan,
    vector: np.ndarray,
    optimizer: Mapping[int, Mapping],
    buffers: Mapping[int, np.ndarray],
    residuals: Sequence[np.ndarray] | None = None,
) -> list[RankState]:
    """The states of all owners of slices, cut from those of a whole model.

    Parameters
    ----------
    plan : LayerPlan
    vector : ndarray of float32
        All parameters.
    optimizer : mapping of int to mapping
        The state of every parameter by its number.
    buffers : mapping of int to ndarray
        Those that have changed since the start.
    residuals : sequence of ndarray, optional
        Of every rank; those of another number of ranks are of no use.
    """
    geometry, owners = plan.geometry, plan.owners
    kept: Sequence[np.ndarray | None] = [None] * owners
    if residuals is not None and len(residuals) == owners:
        kept = residuals
    return [
        RankState(
            vector[low:high].copy(),
            cut_state(optimizer, geometry, rank),
            {n: b for n, b in buffers.items() if n % owners == rank},
            kept[rank],
        )
        for rank, (low, high) in enumerate(geometry.bounds)
    ]
