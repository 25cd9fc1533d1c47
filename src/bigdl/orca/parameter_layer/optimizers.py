"""A torch optimizer that works on one slice of the flat vector.

An optimizer is cut by making one of its class whose parameters are the segments of the slice, as
one-dimensional tensors.  That gives the updates of the whole if every element is updated on its
own, which is known of the classes below and can be said of others by an attribute
``elementwise = True`` of the class.  The state of all slices together is the ``state_dict`` of the
whole optimizer, so it can be cut again for another number of workers.

A table, whose gradients have some rows alone, is cut between rows.  Its segment is a tensor of two
dimensions, and its gradient a sparse one: so an optimizer may look at whole rows, if it says
``by_row = True``, too.  It must change no others.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.orca.parameter_layer.plan import ranges_of

if TYPE_CHECKING:
    import numpy as np
    import torch

    from bigdl.orca.parameter_layer.messages import RankState
    from bigdl.orca.parameter_layer.plan import FlatLayout, LayerPlan, ParameterSegment

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
_SPARSE_ONLY = ("SparseAdam",)  # of torch's optimizers: these refuse dense gradients
_SPARSE_TOO = ("SGD", "Adagrad")  # they change no other rows, without momentum and weight decay
# of torch's optimizers: tensors of the state that are one number for the whole parameter
_COUNTERS = ("step", "eta", "mu", "mu_product")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot be cut in slices, and parameters that it cannot hold."""
    import torch

    optimizer_type = type(optimizer)
    names = *_ELEMENTWISE, *_SPARSE_ONLY
    is_known = optimizer_type in [getattr(torch.optim, name) for name in names]
    marks = "elementwise", "needs_norms"
    if not is_known and not any(getattr(optimizer_type, mark, False) for mark in marks):
        raise UsageError(
            f"{optimizer_type.__name__} cannot be cut in slices, since it may look at more than "
            f"one number at a time; use one of {', '.join(names)}, LARS, a class that says "
            "elementwise = True, or backend='spark'",
            code="optimizer-unsupported",
            allowed=list(names),
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
            f"{', '.join(sorted(others))}; convert it, or use backend='spark'",
            code="model-unsupported",
        )


def updates_rows(optimizer: torch.optim.Optimizer, widths: Sequence[int]) -> bool:
    """Return True if it takes gradients of some rows of tables, and changes no others.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        With the numbers of the next step.
    widths : sequence of int
        0 for those of its parameters that are no tables.
    """
    import torch

    if is_by_row(type(optimizer)):
        return True
    numbers = zip(groups_of(optimizer), widths, strict=True)
    groups = [optimizer.param_groups[number] for number, width in numbers if width]
    changing = ("momentum", "weight_decay", "fused")
    is_known = type(optimizer) in [getattr(torch.optim, name) for name in _SPARSE_TOO]
    return is_known and not any(group.get(name) for group in groups for name in changing)


def is_by_row(optimizer_type: type) -> bool:
    """Return True if an optimizer looks at whole rows of what has a sparse gradient."""
    import torch

    is_torch = optimizer_type in [getattr(torch.optim, name) for name in _SPARSE_ONLY]
    return is_torch or getattr(optimizer_type, "by_row", False)


def groups_of(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """The parameter group of every parameter, in order."""
    return tuple(i for i, group in enumerate(optimizer.param_groups) for _ in group["params"])


def update_slice(
    plan: LayerPlan,
    hyper: Sequence[dict],
    segments: Sequence[ParameterSegment],
    state: RankState,
    gradient: np.ndarray,
    absent: Collection[int],
    norms: Sequence[Sequence[float]] | None = None,
    touched: Mapping[int, np.ndarray] | None = None,
) -> None:
    """One update of the segments of a slice by an optimizer of their own.

    Parameters
    ----------
    plan : LayerPlan
    hyper : sequence of dict
        The parameter groups without their parameters.
    segments : sequence of ParameterSegment
    state : RankState
        Its weights, and the optimizer's state of each segment, are changed.
    gradient : ndarray of float32
        Of the slice; of tables the touched rows alone.
    absent : collection of int
        Parameters without a gradient, which are left alone.
    norms : sequence of (float, float), optional
        Norm of each parameter and of its gradient, for optimizers that need them.
    touched : dict of int to ndarray, optional
        The touched rows of every table, counted from the first one of its segment.
    """
    import torch

    if not segments:  # a row that is longer than a slice lies in another one
        return
    vector, slopes = torch.from_numpy(state.weights), torch.from_numpy(gradient)
    tensors, rows = [], touched or {}
    members: list[list] = [[] for _ in hyper]  # of the parameter groups
    for segment, place in zip(segments, ranges_of(segments, rows), strict=True):
        tensor, slope = segment.of(vector), slopes[place]
        if segment.width:
            numbers = torch.from_numpy(rows[segment.parameter])[None]
            slope_rows = slope.view(-1, segment.width)
            slope = torch.sparse_coo_tensor(
                numbers, slope_rows, tensor.shape, check_invariants=False, is_coalesced=True
            )
        tensors.append(tensor)
        members[plan.groups[segment.parameter]].append((segment, tensor))
        if segment.parameter not in absent:
            tensor.grad = slope
    groups = [
        {**group, "params": [tensor for _, tensor in pairs]}
        for group, pairs in zip(hyper, members, strict=True)
        if pairs
    ]
    optimizer = _made(plan.optimizer, groups, has_state=bool(plan.widths) and all(state.optimizer))
    for tensor, values in zip(tensors, state.optimizer, strict=True):
        if values:
            optimizer.state[tensor] = dict(values)
    if norms is not None:
        optimizer.norms = [norms[segment.parameter] for pairs in members for segment, _ in pairs]
    # as torch does by itself, with a warning
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        optimizer.step()
    state.optimizer = [dict(optimizer.state.get(tensor, {})) for tensor in tensors]


def _made(optimizer_type: type, groups: list[dict], has_state: bool) -> Any:
    """An optimizer of some groups; where it has state already it does not make a first one.

    That of Adagrad is made with the optimizer, and may be as large as a table.
    """
    import torch

    if not has_state:
        return optimizer_type(groups)
    others = [{**group, "params": [torch.empty(0) for _ in group["params"]]} for group in groups]
    optimizer = optimizer_type(others)
    optimizer.state.clear()
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        own["params"] = group["params"]
    return optimizer


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
        width = segment.width
        states.append({k: _cut(k, v, size, first, last, width) for k, v in values.items()})
    return states


def _cut(key, value, size, first, last, width):
    """The part of a value for some elements; with a width for their rows."""
    import torch

    if isinstance(value, torch.Tensor) and key not in _COUNTERS:
        if width and value.dim() and len(value) == size // width:  # a number or a row for each
            return value[first // width : last // width].clone()
        if value.numel() == size:
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
        width = geometry.widths[number]
        joined[number] = {
            key: _joined([values[key] for _, values in parts], shapes[number], width)
            if isinstance(value, torch.Tensor) and key not in _COUNTERS
            else copy.deepcopy(value)
            for key, value in first.items()
        }
    return joined


def _joined(parts, shape, width):
    import torch

    whole = torch.cat(parts)
    # of a table there may be one number for every row
    return whole if width and whole.dim() == 1 else whole.reshape(shape)
