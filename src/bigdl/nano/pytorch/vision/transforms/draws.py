"""Random draws of transforms: from torch's default generator, or from one that a thread has set.

A loader that transforms many samples on many threads gives each sample a generator of its own, so
that the result depends on the seed alone and not on which thread was first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["below", "chance", "drawing_from", "noise", "permutation", "seed", "uniform"]

_thread = threading.local()


@contextmanager
def drawing_from(seed: int | None) -> Iterator[None]:
    """Inside, this thread draws from a generator of its own; nothing changes if `seed` is None."""
    before = _generator()
    if seed is not None:
        _thread.generator = torch.Generator().manual_seed(seed)
    try:
        yield
    finally:
        _thread.generator = before


def _generator() -> torch.Generator | None:
    return getattr(_thread, "generator", None)


def seed() -> int:
    """A seed for another generator."""
    return int(torch.randint(2**62, (), generator=_generator()))


def uniform(low: float, high: float) -> float:
    """A number in ``[low, high)``; `low` if they are equal."""
    return float(torch.empty(()).uniform_(low, high, generator=_generator()))


def below(count: int) -> int:
    """An int in ``[0, count)``."""
    return int(torch.randint(count, (), generator=_generator()))


def chance(probability: float) -> bool:
    """True with this probability."""
    return bool(torch.rand((), generator=_generator()) < probability)


def permutation(count: int) -> list[int]:
    """The ints below `count` in random order."""
    return torch.randperm(count, generator=_generator()).tolist()


def noise(shape: tuple[int, ...], normal: bool = False) -> torch.Tensor:
    """Floats of the standard normal distribution, or uniform in ``[0, 1)``."""
    return (torch.randn if normal else torch.rand)(shape, generator=_generator())
