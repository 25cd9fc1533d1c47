"""Batches of data, split into the arguments of a model and what is left over as targets."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.inference.inputs import ForwardInputs, forward_parameters
from bigdl.nano.pytorch.inference.structure import flatten

__all__ = ["Batch", "batches_of", "rows_of", "split_batch"]


class Batch(NamedTuple):
    """One batch.

    Attributes
    ----------
    args, kwargs
        The model's arguments.
    targets : tuple
        What came with them.
    """

    args: tuple
    kwargs: dict
    targets: tuple = ()


def batches_of(
    model: torch.nn.Module, data: Any, inputs: ForwardInputs | None = None
) -> Iterator[Batch]:
    """Batches of whatever a user gives as data.

    Parameters
    ----------
    model : Module
    data : DataLoader, iterable of batches, Tensor, ndarray, tuple or dict
        A tensor, a tuple and a dict are one batch. For the forms of a batch see
        :func:`split_batch`.
    inputs : ForwardInputs, optional
        What a sample of the model's input holds.

    Raises
    ------
    UsageError
        If it is none of these.
    """
    if isinstance(data, (torch.Tensor, np.ndarray, tuple, Mapping)):
        yield split_batch(model, data, inputs)
    elif isinstance(data, Iterable):
        for element in data:
            yield split_batch(model, element, inputs)
    else:
        raise UsageError(
            "Data must be a DataLoader, a tensor, a tuple or a dict of tensors, not a "
            f"{type(data).__name__}"
        )


def split_batch(model: torch.nn.Module, element: Any, inputs: ForwardInputs | None = None) -> Batch:
    """The arguments of a model in one element of a data loader.

    Parameters
    ----------
    model : Module
    element : Tensor, tuple, list or dict
        ``x``; ``(x,)``; ``(x, y)`` where `x` may be a tuple or a dict of several inputs;
        ``(x1, …, xk, y…)`` for a model of k inputs; or a dict of keyword arguments, of which those
        that forward does not take are targets.
    inputs : ForwardInputs, optional
        What a sample of the model's input holds: an argument with a default that was a tensor
        there is an input, else a target.
    """
    described = forward_parameters(model) if inputs is None else inputs.describe()
    parameters = described.values()
    if isinstance(element, Mapping):
        return _split_mapping(element, parameters)
    if not isinstance(element, (tuple, list)):
        return Batch((element,), {})
    first = element[0] if element else None
    if len(element) == 2 and isinstance(first, (tuple, list)) and _positional_count(parameters) > 1:
        return Batch(tuple(first), {}, (element[1],))
    if len(element) <= 2 and isinstance(first, Mapping):
        batch = _split_mapping(first, parameters)
        return batch._replace(targets=(*batch.targets, *element[1:]))
    wanted = _positional_count(parameters) + (0 if inputs is None else inputs.star_count)
    count = max(1, min(len(element), wanted))
    return Batch(tuple(element[:count]), {}, tuple(element[count:]))


def rows_of(batch: Batch) -> int:
    """Number of samples in a batch: the length of its first tensor, 1 if that is a scalar."""
    leaves, _ = flatten((batch.args, batch.kwargs))
    return len(leaves[0]) if leaves and leaves[0].ndim else 1


def _split_mapping(element, parameters) -> Batch:
    names = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    known = {key: value for key, value in element.items() if key in names}
    if not known:  # the dict itself is what the model takes
        return Batch((dict(element),), {})
    return Batch((), known, tuple(v for key, v in element.items() if key not in names))


def _positional_count(parameters) -> int:
    """Arguments that have to be given by position."""
    return sum(
        p.default is inspect.Parameter.empty
        and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in parameters
    )
