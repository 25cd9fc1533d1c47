"""A torch optimizer that works on one slice of the flat vector.

An optimizer is cut by making one of its class whose parameters are the segments of the slice, as
one-dimensional tensors.  That gives the updates of the whole if every element is updated on its
own, which is known of the classes below and can be said of others by an attribute
``elementwise = True`` of the class.  The state of all slices together is the ``state_dict`` of the
whole optimizer, so it can be cut again for another number of workers.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from bigdl.orca.parameter_layer.plan import FlatLayout, LayerPlan, Segment
    from bigdl.orca.parameter_layer.rank import RankState

_ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
)
# of torch's optimizers: tensors of the state that are one number for the whole parameter
_COUNTERS = ("step", "eta", "mu", "mu_product")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot be cut in slices, and parameters that it cannot hold."""
    import torch

    optimizer_type = type(optimizer)
    is_known = optimizer_type in [getattr(torch.optim, name) for name in _ELEMENTWISE]
    marks = "elementwise", "needs_norms"
    if not is_known and not any(getattr(optimizer_type, mark, False) for mark in marks):
        raise UsageError(
            f"{optimizer_type.__name__} cannot be cut in slices, since it may look at more than "
            f"one number at a time; use one of {', '.join(_ELEMENTWISE)}, LARS, a class that says "
            "elementwise = True, or backend='spark'"
        )
    others = {
        str(p.dtype).removeprefix("torch.")
        for group in optimizer.param_groups
        for p in group["params"]
        if p.dtype != torch.float32
    }
    if others:
        raise UsageError(
            "backend='bigdl' trains parameters of float32, the model has some of "
            f"{', '.join(sorted(others))}; convert it, or use backend='spark'"
        )


def groups_of(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """The parameter group of every parameter, in order."""
    return tuple(i for i, group in enumerate(optimizer.param_groups) for _ in group["params"])


def update_slice(
    plan: LayerPlan,
    hyper: Sequence[dict],
    segments: Sequence[Segment],
    state: RankState,
    gradient: np.ndarray,
    absent: Collection[int],
    norms: Sequence[Sequence[float]] | None = None,
) -> None:
    """One update of the segments of a slice by an optimizer of their own.

    Parameters
    ----------
    plan : LayerPlan
    hyper : sequence of dict
        The parameter groups without their parameters.
    segments : sequence of Segment
    state : RankState
        Its weights, and the optimizer's state of each segment, are changed.
    gradient : ndarray of float32
        Of the slice.
    absent : collection of int
        Parameters without a gradient, which are left alone.
    norms : sequence of (float, float), optional
        Norm of each parameter and of its gradient, for optimizers that need them.
    """
    import torch

    vector, slopes = torch.from_numpy(state.weights), torch.from_numpy(gradient)
    tensors = [vector[s.start : s.stop] for s in segments]
    members: list[list] = [[] for _ in hyper]  # of the parameter groups
    for segment, tensor in zip(segments, tensors, strict=True):
        members[plan.groups[segment.parameter]].append((segment, tensor))
        if segment.parameter not in absent:
            tensor.grad = slopes[segment.start : segment.stop]
    optimizer = plan.optimizer(
        [
            {**group, "params": [tensor for _, tensor in pairs]}
            for group, pairs in zip(hyper, members, strict=True)
            if pairs
        ]
    )
    for tensor, values in zip(tensors, state.optimizer, strict=True):
        if values:
            optimizer.state[tensor] = dict(values)
    if norms is not None:
        optimizer.norms = [norms[segment.parameter] for pairs in members for segment, _ in pairs]
    optimizer.step()
    state.optimizer = [dict(optimizer.state.get(tensor, {})) for tensor in tensors]


# -- the state of the whole optimizer -------------------------------------------------------------


def cut_state(state: Mapping[int, Mapping], geometry: FlatLayout, rank: int) -> list[dict]:
    """The part of an optimizer's state for the segments of a slice.

    Parameters
    ----------
    state : dict
        ``state_dict()["state"]``: by number of parameter.
    """
    low, _ = geometry.bounds[rank]
    states = []
    for segment in geometry.segments(rank):
        size, offset = geometry.sizes[segment.parameter], geometry.offsets[segment.parameter]
        values = state.get(segment.parameter, {})
        first, last = segment.start + low - offset, segment.stop + low - offset
        states.append({k: _cut(k, v, size, first, last) for k, v in values.items()})
    return states


def _cut(key, value, size, first, last):
    import torch

    if isinstance(value, torch.Tensor) and key not in _COUNTERS and value.numel() == size:
        return value.reshape(-1)[first:last].clone()
    return copy.deepcopy(value)


def joined_state(
    states: Sequence[Sequence[dict]], geometry: FlatLayout, shapes: Sequence[tuple[int, ...]]
) -> dict:
    """The inverse of :func:`cut_state` over all slices.

    Parameters
    ----------
    states : sequence of sequence of dict
        Of every rank, of every segment.
    shapes : sequence of tuple
        Of the parameters.
    """
    import torch

    pieces: dict[int, list] = {}
    for rank, segment_states in enumerate(states):
        for segment, values in zip(geometry.segments(rank), segment_states, strict=True):
            pieces.setdefault(segment.parameter, []).append((segment, values))
    joined = {}
    for number, parts in pieces.items():
        first = parts[0][1]
        if not first:
            continue
        joined[number] = {
            key: torch.cat([values[key] for _, values in parts]).reshape(shapes[number])
            if isinstance(value, torch.Tensor) and key not in _COUNTERS
            else copy.deepcopy(value)
            for key, value in first.items()
        }
    return joined
