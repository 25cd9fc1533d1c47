"""Samples of a dataset, one or many at a time, with equal results.

A DataLoader without worker processes asks for a whole batch at once (``__getitems__``). Its samples
are then decoded and transformed on all cores, by threads: decoders and transforms release the
interpreter's lock. Each sample has a generator of its own, seeded in the order of the samples, so
that threads, workers and single samples give the same draws.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from bigdl.common.cpu import core_count
from bigdl.nano.pytorch.vision.transforms import draws
from bigdl.nano.pytorch.vision.transforms.base import is_random, is_thread_safe

__all__ = ["SampleDataset", "collate_channels_last"]


class SampleDataset(Dataset, abc.ABC):
    """A dataset whose samples are made by ``sample(index)``."""

    @abc.abstractmethod
    def sample(self, index: int) -> Any:
        """The sample of an index."""

    @property
    @abc.abstractmethod
    def callables(self) -> tuple[Callable | None, ...]:
        """The transforms that `sample` calls."""

    @property
    def deterministic(self) -> bool:
        """Whether a sample is the same each time, as far as can be known."""
        return not any(map(is_random, self.callables))

    @property
    def thread_safe(self) -> bool:
        """Whether samples may be made by threads."""
        return all(map(is_thread_safe, self.callables))

    def __getitem__(self, index: int) -> Any:
        return self._drawn(index, None if self.deterministic else draws.seed())

    def __getitems__(self, indices: Sequence[int]) -> list:
        """The samples of many indices."""
        fixed = self.deterministic
        seeds = [None if fixed else draws.seed() for _ in indices]
        if not self.thread_safe or get_worker_info() is not None or core_count() == 1:
            return [self._drawn(*pair) for pair in zip(indices, seeds, strict=True)]
        return list(_threads(os.getpid()).map(self._drawn, indices, seeds))

    def _drawn(self, index: int, seed: int | None) -> Any:
        with draws.drawing_from(seed):
            return self.sample(index)


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """The threads of this process; a forked one needs its own."""
    return ThreadPoolExecutor(core_count(), thread_name_prefix="bigdl-images")


def collate_channels_last(samples: Sequence[tuple[torch.Tensor, Any]]) -> list:
    """Pairs of images and targets as a batch whose images are in channels-last layout.

    For ``DataLoader(collate_fn=...)`` with ``ToTensor(torch.channels_last)``: values are then
    copied once, in their order, into the layout in which convolutions are fastest.

    Parameters
    ----------
    samples : sequence of (Tensor, target)
        Images ``(C, H, W)`` of one size.

    Returns
    -------
    list
        Images ``(N, C, H, W)`` and targets.
    """
    images = torch.stack([image.permute(1, 2, 0) for image, _ in samples])
    return [images.permute(0, 3, 1, 2), default_collate([target for _, target in samples])]
