"""Inputs derived from a sample, and calls of a module that leave it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

# Of a sample with few rows more others are derived: its results may be near zero.
_FEW_ROWS = 4
_OTHER_SAMPLES = 4


class Derived(NamedTuple):
    """One kind of input that differs from the sample.

    Attributes
    ----------
    words : str
    resized : bool
        True if sizes differ.
    candidates : list of list of Tensor
        Flat inputs; the first that the model takes counts.
    """

    words: str
    resized: bool
    candidates: list[list[torch.Tensor]]


def derived_inputs(
    sample: Sequence[torch.Tensor], axes: Sequence[Sequence[int]]
) -> Iterator[Callable[[Sequence[torch.Tensor]], Derived | None]]:
    """Yield functions that derive inputs, each from the last input that the model took.

    Parameters
    ----------
    sample : sequence of Tensor
    axes : sequence of sequence of int
        Dimensions of each tensor whose sizes may change.
    """
    yield _other_values
    if sample and (not sample[0].ndim or len(sample[0]) <= _FEW_ROWS):
        for seed in range(1, _OTHER_SAMPLES):
            yield partial(_other_values, seed=seed)
    if any(axes):
        yield lambda inputs: other_sizes(inputs, axes)
        yield lambda inputs: _one_row(inputs, sample, axes)


def _other_values(inputs: Sequence[torch.Tensor], seed: int = 0) -> Derived | None:
    shuffled = [_shuffled(each, seed) for each in inputs]
    if all(map(_same, shuffled, inputs)):
        return None
    real = [each.is_floating_point() or each.is_complex() for each in inputs]
    reals = [
        other if is_real else one
        for other, one, is_real in zip(shuffled, inputs, real, strict=True)
    ]
    rolled = [
        other if is_real or not one.ndim else one.roll(1, 0)
        for other, one, is_real in zip(shuffled, inputs, real, strict=True)
    ]
    # whole numbers may be places of others: ids go anywhere, edges of a graph do not
    candidates = [shuffled, rolled, reals]
    distinct = [each for each in candidates if not all(map(_same, each, inputs))]
    return Derived("other values", False, distinct)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _shuffled(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a tensor of the same range with other values in other places."""
    if not tensor.numel():
        return tensor
    generator = torch.Generator().manual_seed(tensor.numel() + 7919 * seed)
    order = torch.randperm(tensor.numel(), generator=generator)
    mixed = tensor.reshape(-1)[order].reshape(tensor.shape)
    if not tensor.is_floating_point():
        return mixed
    finite = bool(torch.isfinite(tensor).all())
    low, high = (float(tensor.min()), float(tensor.max())) if finite else (0.0, 0.0)
    if not finite or low == high == 0.0:  # a mask; an initial state
        noise = torch.rand(tensor.shape, generator=generator).to(tensor.dtype)
        return mixed if not finite else noise
    if low == high:
        factor = 0.5 + torch.rand(tensor.shape, generator=generator)
        return tensor * factor.to(tensor.dtype)
    if seed:
        drawn = torch.rand(tensor.shape, generator=generator).to(tensor.dtype)
        return low + (high - low) * drawn
    # mirrored, so that sums and means differ, too
    return (low + high - mixed).clamp(low, high)


def other_sizes(inputs: Sequence[torch.Tensor], axes: Sequence[Sequence[int]]) -> Derived | None:
    """Return inputs of other sizes: all that may change, larger or smaller, or rows only."""
    rows = _rows(inputs, axes)
    grown = {_key(size, place): size + _step(size, place) for size, place in _sizes(inputs, axes)}
    shrunk = {
        _key(size, place): max(1, size - _step(size, place)) if place else size + 1
        for size, place in _sizes(inputs, axes)
    }
    only_rows = {_key(rows, 0): rows + 1} if rows is not None else {}
    others = [_resized(inputs, axes, each) for each in (grown, shrunk, only_rows) if each]
    several = any(dimension for each in axes for dimension in each)
    words = "other sizes" if several or rows is None else f"{rows + 1} rows"
    return Derived(words, True, others) if others else None


def _one_row(inputs, sample, axes) -> Derived | None:
    rows = _rows(sample, axes)
    if rows is None or rows == 1:
        return None
    return Derived("one row", True, [_resized(inputs, axes, {_key(rows, 0): 1})])


def _rows(sample, axes) -> int | None:
    """Return the size of the first first dimension that may change."""
    sizes = (tensor.shape[0] for tensor, each in zip(sample, axes, strict=True) if 0 in each)
    return next(sizes, None)


def _sizes(sample, axes) -> list[tuple[int, int]]:
    return [
        (tensor.shape[dimension], dimension)
        for tensor, each in zip(sample, axes, strict=True)
        for dimension in each
    ]


def _key(size: int, dimension: int) -> tuple[int, bool]:
    """Equal sizes are one size of the model, rows and lengths apart."""
    return size, dimension == 0


def _step(size: int, dimension: int) -> int:
    """Rows change by one; sizes of images by what they are a multiple of."""
    if dimension == 0:
        return 2 if size == 1 else 1
    return next(step for step in (32, 16, 8, 4, 2, 1) if size % step == 0)


def _resized(inputs, axes, sizes: dict) -> list[torch.Tensor]:
    resized = []
    for tensor, each in zip(inputs, axes, strict=True):
        for dimension in each:
            size = tensor.shape[dimension]
            wanted = sizes.get(_key(size, dimension), size)
            if wanted != size and size:
                tensor = tensor.index_select(dimension, torch.arange(wanted) % size)
        resized.append(tensor)
    return resized


@contextmanager
def unchanged(model: torch.nn.Module | None) -> Iterator[set[str]]:
    """A context after which a module's attributes and buffers are what they were.

    Yields
    ------
    set of str
        Filled at the end: the names of those that were changed.
    """
    changed: set[str] = set()
    modules = [] if model is None else list(model.named_modules())
    before = [(name, module, dict(vars(module)), _contents(module)) for name, module in modules]
    try:
        yield changed
    finally:
        for name, module, attributes, contents in before:
            prefix = f"{name}." if name else ""
            for key, value in list(vars(module).items()):
                if key not in attributes or attributes[key] is not value:
                    changed.add(prefix + key)
                    vars(module).pop(key)
            vars(module).update(attributes)
            for (owner, key), value in contents.items():
                changed.update({prefix + str(key)} if _put_back(owner, key, value, module) else ())


def _contents(module: torch.nn.Module) -> dict[tuple[str, str], Any]:
    """Return copies of what can be changed in place: buffers, and tensors and containers."""
    contents: dict[tuple[str, str], Any] = {}
    for key, value in module._buffers.items():
        if value is not None:
            contents["_buffers", key] = (value, value.detach().clone())
    for key, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            contents["", key] = (value, value.detach().clone())
        elif isinstance(value, (list, dict, set)) and not key.startswith("_"):
            contents["", key] = (value, value.copy())
    return contents


def _put_back(owner: str, key: str, kept: tuple[Any, Any], module: torch.nn.Module) -> bool:
    value, copy = kept
    changed = False
    if owner and module._buffers.get(key) is not value:
        module._buffers[key] = value
        changed = True
    if isinstance(value, torch.Tensor):
        if value.shape == copy.shape and not _equal(value, copy):
            with torch.no_grad():
                value.copy_(copy)
            changed = True
    elif len(value) != len(copy):
        value.clear()
        value.extend(copy) if isinstance(value, list) else value.update(copy)
        changed = True
    return changed


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.device.type == "meta" or one.is_quantized or one.layout is not torch.strided:
        return True
    if one.is_floating_point():  # nan is equal to nan
        one, other = one.nan_to_num(), other.nan_to_num()
    return torch.equal(one, other)


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """A context in which PyTorch's random numbers are those of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        yield
