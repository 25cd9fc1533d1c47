"""Application of a torch optimizer to one slice of the flat weight vector.

Each slice has an optimizer of the same class, whose parameters are the segments of the slice as
one-dimensional tensors.  Its updates equal those of the whole optimizer if every element is updated
independently.  That holds for the classes below, and for classes with the attribute
``elementwise = True``.  The states of all slices together form the ``state_dict`` of the whole
optimizer, so they can be split again for another number of workers.

Tables with sparse gradients are split between rows.  A segment of a table is a two-dimensional
tensor with a sparse gradient, so an optimizer may also update whole rows if its class has
``by_row = True``.  It must not change other rows.
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
_SPARSE_ONLY = ("SparseAdam",)  # torch optimizers that reject dense gradients
_SPARSE_TOO = ("SGD", "Adagrad")  # keep other rows if momentum and weight decay are 0
# state of torch's optimizers with one number for the whole parameter
_COUNTERS = ("step", "eta", "mu", "mu_product")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise an error if an optimizer cannot be sliced or a parameter is not float32."""
    import torch

    optimizer_type = type(optimizer)
    names = *_ELEMENTWISE, *_SPARSE_ONLY
    is_known = optimizer_type in [getattr(torch.optim, name) for name in names]
    marks = "elementwise", "needs_norms"
    if not is_known and not any(getattr(optimizer_type, mark, False) for mark in marks):
        raise UsageError(
            f"{optimizer_type.__name__} cannot be sliced, since its updates may not be "
            f"elementwise; use one of {', '.join(names)}, LARS, a class with "
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
            "backend='bigdl' trains float32 parameters, the model has some of "
            f"{', '.join(sorted(others))}; convert it, or use backend='spark'",
            code="model-unsupported",
        )


def updates_rows(optimizer: torch.optim.Optimizer, widths: Sequence[int]) -> bool:
    """Return True if the optimizer updates only the rows that a sparse gradient contains.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Optimizer with the hyper-parameters of the next step.
    widths : sequence of int
        Row width of each table parameter, 0 for other parameters.
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
    """Return True if an optimizer updates whole rows of a table with a sparse gradient."""
    import torch

    is_torch = optimizer_type in [getattr(torch.optim, name) for name in _SPARSE_ONLY]
    return is_torch or getattr(optimizer_type, "by_row", False)


def groups_of(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Return the parameter group of every parameter, in order."""
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
    """Update the segments of a slice with a temporary optimizer.

    Parameters
    ----------
    plan : LayerPlan
    hyper : sequence of dict
        Parameter groups without their parameters.
    segments : sequence of ParameterSegment
    state : RankState
        Slice state, whose weights and optimizer state are updated in place.
    gradient : ndarray of float32
        Gradient of the slice; for tables only the touched rows.
    absent : collection of int
        Parameters without a gradient, which are not updated.
    norms : sequence of (float, float), optional
        Norms of each parameter and of its gradient, for optimizers that need them.
    touched : dict of int to ndarray, optional
        Touched rows of every table, relative to the first row of its segment.
    """
    import torch

    if not segments:  # a row that is longer than a slice belongs to another slice
        return
    vector, slopes = torch.from_numpy(state.weights), torch.from_numpy(gradient)
    tensors, rows = [], touched or {}
    members: list[list] = [[] for _ in hyper]  # members of each parameter group
    for segment, span in zip(segments, ranges_of(segments, rows), strict=True):
        tensor, slope = segment.of(vector), slopes[span]
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
    has_state = bool(plan.widths) and all(state.optimizer)
    optimizer = _create_optimizer(plan.optimizer, groups, has_state=has_state)
    for tensor, values in zip(tensors, state.optimizer, strict=True):
        if values:
            optimizer.state[tensor] = dict(values)
    if norms is not None:
        optimizer.norms = [norms[segment.parameter] for pairs in members for segment, _ in pairs]
    # torch's default, without its warning
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        optimizer.step()
    state.optimizer = [dict(optimizer.state.get(tensor, {})) for tensor in tensors]


def _create_optimizer(optimizer_type: type, groups: list[dict], has_state: bool) -> Any:
    """Create an optimizer for parameter groups; if `has_state`, leave its state empty.

    Adagrad allocates its state in the constructor, which may be as large as a table.
    """
    import torch

    if not has_state:
        return optimizer_type(groups)
    others = [{**group, "params": [torch.empty(0) for _ in group["params"]]} for group in groups]
    optimizer = optimizer_type(others)
    optimizer.state.clear()
    for new_group, group in zip(optimizer.param_groups, groups, strict=True):
        new_group["params"] = group["params"]
    return optimizer


# -- the state of the whole optimizer -------------------------------------------------------------


def cut_state(state: Mapping[int, Mapping], geometry: FlatLayout, rank: int) -> list[dict]:
    """Return the optimizer state of one rank's slice, as one dict per parameter segment.

    Parameters
    ----------
    state : dict
        ``state_dict()["state"]``, by parameter number.
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
    """Slice an optimizer state value to the elements `first` to `last`, or to their table rows."""
    import torch

    if isinstance(value, torch.Tensor) and key not in _COUNTERS:
        if width and value.dim() and len(value) == size // width:  # a number or row per row
            return value[first // width : last // width].clone()
        if value.numel() == size:
            return value.reshape(-1)[first:last].clone()
    return copy.deepcopy(value)


def joined_state(
    states: Sequence[Sequence[dict]], geometry: FlatLayout, shapes: Sequence[tuple[int, ...]]
) -> dict:
    """Join the optimizer states of all slices; the inverse of :func:`cut_state`.

    Parameters
    ----------
    states : sequence of sequence of dict
        States of every segment of every rank.
    shapes : sequence of tuple
        Shapes of the parameters.
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
    # a table may have one number per row
    return whole if width and whole.dim() == 1 else whole.reshape(shape)
