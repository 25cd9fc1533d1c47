"""Distribution of a custom sampler's batches to several processes.

For several processes Lightning replaces a loader's sampler, and each process draws indices itself.
Custom batch samplers get lost, and random samplers draw different rows in each process. Here, rank
0 draws and broadcasts the indices.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

T = TypeVar("T")

__all__ = ["SharedBatches", "with_shared_batches"]

_STEPS = 256  # drawn and sent at once; samplers may be long or infinite

Step = list[list[Any]]


class SharedSource(Protocol):
    """A sampler of rows, or of batches of rows."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


"""The indices of one batch for each process."""


class SharedBatches(Sampler[list[Any]]):
    """Sampler that distributes another sampler's batches to processes without duplicates.

    All processes get the same number of batches, because gradients are all-reduced. Batches of the
    last, incomplete round are split among the processes.

    Parameters
    ----------
    source : iterable
        Yields batches of indices, or single indices if `batch_size` is given.
    rank, world_size : int
        Rank of this process and number of processes.
    batch_size : int, optional
        Batch size per process, for a source of single indices.
    drop_last : bool
        Drop the last, incomplete round of single indices.
    merge_last : bool
        If the last round has fewer indices than processes, add them to the previous round instead
        of repeating some.
    """

    def __init__(
        self,
        source: SharedSource,
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
        """The sampler itself, so that ``batch_sampler.sampler.set_epoch`` reaches it."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the original sampler and of its inner sampler, if they support it."""
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
        """Yield the batches of all ranks for each step of an epoch; runs on rank 0 only."""
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
                    for part in _split_batch(batch, _part_size(self.world_size, len(step), number))
                ]

    def _of_rows(self, batch_size: int) -> Iterator[Step]:
        rows, count = iter(self.source), self.world_size
        held = list(itertools.islice(rows, batch_size * count))
        while held:
            following = list(itertools.islice(rows, batch_size * count))
            is_short = len(held) < batch_size * count
            if is_short and self.drop_last:
                return
            is_too_few = 0 < len(following) < count  # for a separate step
            if is_too_few and self.merge_last and not self.drop_last:
                held, following = held + following, []
            yield (
                [held[rank::count] for rank in range(count)]
                if len(held) >= count
                else _split_batch(held, count)
            )
            held = following


def _part_size(total: int, parts: int, number: int) -> int:
    """Return the size of part `number` when `total` items are split into nearly equal parts."""
    return total // parts + (number < total % parts)


def _split_batch(batch: list[Any], count: int) -> Step:
    """Split a batch into `count` parts; repeat rows if there are fewer than `count`."""
    if len(batch) < count:
        warnings.warn(
            f"The last batch of a loader has {len(batch)} rows for {count} processes, so "
            f"{count - len(batch)} of them are repeated",
            stacklevel=2,
        )
        batch = list(itertools.islice(itertools.cycle(batch), count))
    return [batch[part::count] for part in range(count)]


def with_shared_batches(loader: T, rank: int, world_size: int) -> T | DataLoader:
    """Return a copy of a loader whose custom sampler is shared by all processes.

    Any other loader is returned unchanged: Lightning distributes sequential and shuffled rows
    itself. An iterable dataset causes a warning.

    Parameters
    ----------
    loader : object
    rank, world_size : int
        Rank of this process and number of processes.

    Returns
    -------
    object
        A copy of the loader (same class), or the loader itself.
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
    shared = _shared_batches_of(loader, rank, world_size)
    if shared is None:
        return loader
    shared_loader = copy.copy(loader)
    vars(shared_loader)["_iterator"] = None  # iterator of persistent workers
    # DataLoader forbids setting its sampler, but constructing a new object of the user's class
    # could need other arguments.
    if loader.batch_sampler is None:
        vars(shared_loader)["sampler"] = _SingleRows(shared)
    else:
        vars(shared_loader)["batch_sampler"] = shared
    return shared_loader


class _SingleRows(Sampler[Any]):
    """Sampler of row indices, taken from batches of one row each."""

    def __init__(self, batches: SharedBatches):
        self.batches = batches

    def set_epoch(self, epoch: int) -> None:
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return (row for batch in self.batches for row in batch)


def _shared_batches_of(loader: DataLoader, rank: int, world_size: int) -> SharedBatches | None:
    """Return the sampler that shares a loader's batches, or None for a standard sampler."""
    batches = cast("Any", loader.batch_sampler)
    if isinstance(batches, SharedBatches) or isinstance(loader.sampler, _SingleRows):
        return None
    has_batch_sampler = batches is not None and loader.batch_size is None
    if has_batch_sampler:
        if isinstance(getattr(batches, "sampler", None), DistributedSampler):
            return None  # the program divides the rows itself
        return SharedBatches(batches, rank, world_size)
    if _is_standard(loader.sampler):
        return None
    if batches is None:
        return SharedBatches(
            cast("SharedSource", loader.sampler), rank, world_size, 1, merge_last=False
        )
    size, drop_last = cast("int", loader.batch_size), loader.drop_last
    return SharedBatches(cast("SharedSource", loader.sampler), rank, world_size, size, drop_last)


def _is_standard(sampler: object) -> bool:
    """Return True for sequential, plain random and distributed samplers."""
    if isinstance(sampler, RandomSampler):
        is_whole = sampler.num_samples == len(cast("Sequence[Any]", sampler.data_source))
        return not sampler.replacement and is_whole
    return isinstance(sampler, SequentialSampler | DistributedSampler)
