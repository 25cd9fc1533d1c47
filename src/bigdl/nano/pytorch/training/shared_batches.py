"""Batches of a loader that has a sampler of the program's own, dealt out to several processes.

Lightning makes a loader anew for several processes: it replaces the sampler, and each process draws
by itself. A sampler of batches is then lost, and one that draws by chance gives other processes
other rows. Here the first process draws, and the others are sent what it drew.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

__all__ = ["SharedBatches", "with_shared_batches"]

_STEPS = 256  # that are drawn and sent at once: samplers may be long, or have no end

Step = list[list[Any]]
"""The indices of one batch for each process."""


class SharedBatches(Sampler[list[Any]]):
    """Deals out the batches of a sampler to the processes of a training, each row once.

    All processes get the same number of batches, as the exchange of gradients needs it. Batches of
    the last, incomplete round are divided among the processes.

    Parameters
    ----------
    source : iterable
        Gives batches of indices, or single indices if `batch_size` is given.
    rank, world_size : int
        Of this process, and the number of processes.
    batch_size : int, optional
        Rows of a batch in one process, for a source of single indices.
    drop_last : bool
        Leave out the rows of the last, incomplete round of single indices.
    merge_last : bool
        Add single indices that are fewer than the processes to the batches before, instead of
        repeating some.
    """

    def __init__(
        self,
        source: Any,
        rank: int,
        world_size: int,
        batch_size: int | None = None,
        drop_last: bool = False,
        merge_last: bool = True,
    ):
        self.source, self.rank, self.world_size = source, rank, world_size
        self.batch_size, self.drop_last, self.merge_last = batch_size, drop_last, merge_last

    @property
    def sampler(self) -> SharedBatches:
        """This object: what asks a sampler of batches for its sampler wants to set the epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the source and of its sampler, if they have one."""
        for each in (self.source, getattr(self.source, "sampler", None)):
            set_epoch = getattr(each, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    def __len__(self) -> int:
        units = len(self.source)
        if self.batch_size is None:
            return -(-units // self.world_size)
        whole, rest = divmod(units, self.batch_size * self.world_size)
        is_merged = rest < self.world_size and self.merge_last and whole > 0
        return whole + (rest > 0 and not self.drop_last and not is_merged)

    def __iter__(self) -> Iterator[list[Any]]:
        steps = self._steps() if self.rank == 0 else iter(())
        while True:
            drawn = [list(itertools.islice(steps, _STEPS))]
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                dist.broadcast_object_list(drawn, src=0)
            yield from (step[self.rank] for step in drawn[0])
            if len(drawn[0]) < _STEPS:
                return

    def _steps(self) -> Iterator[Step]:
        """Draw all steps; called in the first process."""
        return self._of_batches() if self.batch_size is None else self._of_rows(self.batch_size)

    def _of_batches(self) -> Iterator[Step]:
        batches = map(list, self.source)
        while step := list(itertools.islice(batches, self.world_size)):
            if len(step) == self.world_size:
                yield step
            else:
                yield [
                    part
                    for number, batch in enumerate(step)
                    for part in _divided(batch, _share(self.world_size, len(step), number))
                ]

    def _of_rows(self, batch_size: int) -> Iterator[Step]:
        rows, count = iter(self.source), self.world_size
        held = list(itertools.islice(rows, batch_size * count))
        while held:
            following = list(itertools.islice(rows, batch_size * count))
            is_short = len(held) < batch_size * count
            if is_short and self.drop_last:
                return
            is_too_few = 0 < len(following) < count  # for a step of their own
            if is_too_few and self.merge_last and not self.drop_last:
                held, following = held + following, []
            yield (
                [held[rank::count] for rank in range(count)]
                if len(held) >= count
                else _divided(held, count)
            )
            held = following


def _share(total: int, parts: int, number: int) -> int:
    """Return how many of `total` things the part of a number gets, where shares differ by 1."""
    return total // parts + (number < total % parts)


def _divided(batch: list[Any], count: int) -> Step:
    """Cut a batch into `count` parts; rows of a batch that has fewer are repeated."""
    if len(batch) < count:
        warnings.warn(
            f"The last {len(batch)} rows of a loader are fewer than the processes that share them, "
            f"so {count - len(batch)} of them are repeated",
            stacklevel=2,
        )
        batch = list(itertools.islice(itertools.cycle(batch), count))
    return [batch[part::count] for part in range(count)]


def with_shared_batches(loader: object, rank: int, world_size: int) -> Any:
    """Return a loader that has a sampler of the program's own with its batches dealt out.

    Any other loader is returned as it is: Lightning shares out rows that lie in order or are
    shuffled. A stream is returned with a warning.

    Parameters
    ----------
    loader : object
    rank, world_size : int
        Of this process, and the number of processes.

    Returns
    -------
    object
        A copy of the loader, of its class, or the loader itself.
    """
    if world_size == 1 or not isinstance(loader, DataLoader):
        return loader
    if isinstance(loader.dataset, IterableDataset):
        if rank == 0:
            name = type(loader.dataset).__name__
            warnings.warn(
                f"Each of the {world_size} processes reads the whole {name}, unless it "
                "divides its rows by torch.distributed.get_rank() itself; use a dataset with a "
                "length to have rows divided",
                stacklevel=2,
            )
        return loader
    shared = _shared(loader, rank, world_size)
    if shared is None:
        return loader
    shared_loader = copy.copy(loader)
    vars(shared_loader)["_iterator"] = None  # of workers that a loader keeps
    # A loader refuses to have its sampler replaced once it is made, but a new one of the user's
    # class could need other arguments.
    if loader.batch_sampler is None:
        vars(shared_loader)["sampler"] = _Single(shared)
    else:
        vars(shared_loader)["batch_sampler"] = shared
    return shared_loader


class _Single(Sampler[Any]):
    """The rows of batches of one row each."""

    def __init__(self, batches: SharedBatches):
        self.batches = batches

    def set_epoch(self, epoch: int) -> None:
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return (row for batch in self.batches for row in batch)


def _shared(loader: DataLoader, rank: int, world_size: int) -> SharedBatches | None:
    """Return what deals out the batches of a loader; None if its sampler is an ordinary one."""
    batches = cast("Any", loader.batch_sampler)
    if isinstance(batches, SharedBatches) or isinstance(loader.sampler, _Single):
        return None
    has_own_batches = batches is not None and loader.batch_size is None
    if has_own_batches:
        if isinstance(getattr(batches, "sampler", None), DistributedSampler):
            return None  # the program divides the rows itself
        return SharedBatches(batches, rank, world_size)
    if _is_ordinary(loader.sampler):
        return None
    if batches is None:
        return SharedBatches(loader.sampler, rank, world_size, 1, merge_last=False)
    size, drop_last = cast("int", loader.batch_size), loader.drop_last
    return SharedBatches(loader.sampler, rank, world_size, size, drop_last)


def _is_ordinary(sampler: object) -> bool:
    """True for samplers that give each row once, and those that know of the processes."""
    if isinstance(sampler, RandomSampler):
        is_whole = sampler.num_samples == len(cast("Sequence[Any]", sampler.data_source))
        return not sampler.replacement and is_whole
    return isinstance(sampler, SequentialSampler | DistributedSampler)
