"""Batches from a DataLoader that every worker has, with the face of a ``TensorShard``."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.runtime.shards.batches import permutation
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.shard import LoaderShard, Shard, SpoolWriter
from bigdl.runtime.shards.values import columns_of, grouped
from bigdl.training.batches import KeyedShard, TensorShard, form_of, in_form

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from bigdl.runtime.worker import Worker

__all__ = ["LoaderBatches", "as_loader", "open_batches", "open_loader", "spooled"]

_SEED_OF_EVALUATION = 0


def open_batches(
    shard: Shard | LoaderShard,
    feature_cols: Sequence[str] | None,
    label_cols: Sequence[str] | None,
    worker: Worker,
    config: dict,
    batch_size: int,
) -> TensorShard | LoaderBatches:
    """Open the source of a loop's batches.

    Parameters
    ----------
    shard : Shard or LoaderShard
    feature_cols, label_cols : sequence of str or None
        Of batches that are dicts, their keys.
    worker : Worker
    config : dict
        For a function that makes a loader.
    batch_size : int
        Of a global batch.

    Returns
    -------
    TensorShard or LoaderBatches
    """
    if not isinstance(shard, LoaderShard):
        return TensorShard(shard, feature_cols, label_cols)
    import cloudpickle

    size = worker.world_size
    loader = as_loader(cloudpickle.loads(shard.payload()), config, max(1, batch_size // size))
    return open_loader(loader, shard, feature_cols, label_cols, worker)


def open_loader(
    loader: DataLoader,
    shard: LoaderShard,
    feature_cols: Sequence[str] | None,
    label_cols: Sequence[str] | None,
    worker: Worker,
) -> TensorShard | LoaderBatches:
    """Open the source of a loop's batches over a loader that the worker has made.

    Parameters
    ----------
    loader : torch.utils.data.DataLoader
    shard, feature_cols, label_cols, worker
        See :func:`open_batches`.
    """
    from torch.utils.data import IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        made, keys = spooled(loader, shard, feature_cols, label_cols)
        return TensorShard(made, None, None) if keys is None else KeyedShard(made, keys)
    batches = LoaderBatches(loader, worker.rank, worker.world_size)
    worker.at_exit(batches.close)
    return batches


def as_loader(loader: Any, config: dict, batch_size: int) -> DataLoader:
    """The DataLoader that an input stands for.

    Parameters
    ----------
    loader : DataLoader, Dataset or callable
    config : dict
        For a function, and ``num_workers``, ``collate_fn``, ... for the loader of a Dataset.
    batch_size : int
        Of this worker, which is an argument of a function.

    Raises
    ------
    UsageError
        If it is something else, or a loader whose batches cannot be cut anew.
    """
    from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

    if not isinstance(loader, DataLoader | Dataset):
        loader = loader(config, batch_size)
    if isinstance(loader, Dataset) and not isinstance(loader, DataLoader):
        options = {k: config[k] for k in _OPTIONS if k in config}
        is_map = not isinstance(loader, IterableDataset)
        shuffle = {"shuffle": config.get("shuffle", True)} if is_map else {}
        loader = DataLoader(loader, batch_size=batch_size, **shuffle, **options)
    if not isinstance(loader, DataLoader):
        raise UsageError(
            "The function given as data must return a DataLoader or a Dataset, it returned "
            f"{type(loader).__name__}"
        )
    if isinstance(loader.dataset, IterableDataset):
        return loader
    if loader.batch_sampler is None or type(loader.batch_sampler) is not BatchSampler:
        raise UsageError(
            "A DataLoader with batch_sampler= or without a batch size cannot be shared out, since "
            "the batches are cut by the batch_size of fit; pass sampler= instead"
        )
    return loader


_OPTIONS = ("num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn")


class _Epoch:
    """The order of one epoch, and the batches that are being loaded ahead."""

    def __init__(self, indices: np.ndarray, seeds: tuple[int, ...], ahead: Iterator | None):
        self.indices, self.seeds, self.ahead = indices, seeds, ahead


class LoaderBatches:
    """A worker's part of a map-style DataLoader, read live.

    Parameters
    ----------
    loader : torch.utils.data.DataLoader
    rank, world_size : int

    Attributes
    ----------
    rows : int
    drop_last : bool
    """

    inputs = targets = None

    def __init__(self, loader: DataLoader, rank: int, world_size: int):
        from torch.utils.data import RandomSampler, SequentialSampler
        from torch.utils.data.distributed import DistributedSampler

        self._loader, self._rank, self._size = loader, rank, world_size
        sampler = loader.sampler
        self._sampler: Any = sampler
        self._shuffles = False
        dataset: Any = loader.dataset
        count = len(dataset)
        if type(sampler) is SequentialSampler:
            self._sampler = None
        elif type(sampler) is RandomSampler:
            plain = not sampler.replacement and sampler.num_samples == count
            self._sampler, self._shuffles = (None, True) if plain else (sampler, False)
        elif type(sampler) is DistributedSampler:  # we share out ourselves, without its padding
            self._sampler, self._shuffles = None, sampler.shuffle
        if self._sampler is not None:
            count = len(self._sampler)
        self._count = count
        self.rows = len(range(rank, count, world_size))
        self.drop_last = bool(loader.drop_last)
        self.fingerprint = zlib.crc32(str(count).encode())
        self._current: _Epoch | None = None  # whose batches are loaded ahead
        self._processes: _Processes | None = None
        self._form: Any = None  # of the first batch
        self._like: LoaderBatches | None = None
        self._one_by_one = _BatchMaker(loader.dataset, loader.collate_fn)

    def take_types(
        self, inputs: list | None, targets: list | None, training: TensorShard | LoaderBatches
    ) -> None:
        """Give out numbers in the dtypes of the batches of `training`, as far as it made any."""
        self._like = training if isinstance(training, LoaderBatches) else None

    def window(self, memory: int) -> int:
        """Nothing is shuffled in windows: samples are read where they are."""
        return 0

    def has_label(self, value: float) -> bool:
        """Return True: nobody has read the targets."""
        return True

    def order(
        self, shuffle: bool, seed: int, epoch: int, rank: int, window: int, ranges: Callable
    ) -> _Epoch:
        """The order of an epoch; the batches of `ranges` (start, stop) are loaded ahead."""
        indices = self._indices(self._shuffles, seed, epoch)
        return self._start(indices, (seed, epoch), ranges())

    def in_order(self, batch_size: int) -> _Epoch:
        """The order of an evaluation in batches of so many rows."""
        starts = range(0, self.rows, batch_size)
        ranges = ((start, min(start + batch_size, self.rows)) for start in starts)
        return self._start(self._indices(False, _SEED_OF_EVALUATION, 0), (0, 0), ranges)

    def _indices(self, shuffle, seed, epoch):
        """Return the samples that this worker takes, in its order."""
        if self._sampler is None:
            indices = np.arange(self._rank, self._count, self._size)
            return indices[permutation(self.rows, seed, epoch, self._rank)] if shuffle else indices
        with seeded(seed, epoch):
            generator = getattr(self._sampler, "generator", None)
            if generator is not None:
                generator.manual_seed(_seed(seed, epoch))
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            drawn = list(itertools.islice(iter(self._sampler), self._count))
        if len(drawn) != self._count:
            raise UsageError(
                f"The sampler gave {len(drawn)} samples in an epoch, but its length is "
                f"{self._count}; make both equal"
            )
        out = np.empty(self.rows, object)
        out[:] = drawn[self._rank :: self._size]
        return out

    def _start(self, indices, seeds, ranges):
        if self._current is not None:
            self._current.ahead = None  # its next batches are made one by one
        self._current = epoch = _Epoch(indices, seeds, None)
        if self._loader.num_workers:
            if self._processes is None:
                self._processes = _Processes(self._loader)
            self._processes.close_epoch()
            items = ((r, self._item(epoch, *r)) for r in ranges if r[1] > r[0])
            epoch.ahead = self._processes.load(items)
        return epoch

    def _item(self, epoch, start, stop):
        seeds = (*epoch.seeds, self._rank, start)
        return seeds, epoch.indices[start:stop].tolist()

    def batch(self, start: int, stop: int, order: _Epoch | None = None) -> list:
        """The batch of rows `start`...`stop` of an order; default that of an evaluation."""
        if order is None:
            order = _Epoch(self._indices(False, _SEED_OF_EVALUATION, 0), (0, 0), None)
        loaded = None
        if order.ahead is not None:
            expected, loaded = next(order.ahead, (None, None))
            if expected != (start, stop):
                order.ahead = loaded = None  # somebody reads in another order than was announced
        if loaded is None:
            loaded = self._one_by_one[self._item(order, start, stop)]
        loaded = list(loaded) if isinstance(loaded, tuple | list) else loaded
        if self._form is None:
            self._form = form_of(loaded)
        if self._like is not None and self._like._form is not None:
            loaded = in_form(loaded, self._like._form)
        return loaded

    def close(self) -> None:
        """End the processes that load."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None


class _BatchMaker:
    """Makes batches of samples, each under a seed of its own; in this or in another process."""

    def __init__(self, dataset, collate):
        from torch.utils.data import TensorDataset, default_collate

        self.dataset, self.collate = dataset, collate
        self._is_plain = type(dataset) is TensorDataset and collate is default_collate

    def __getitem__(self, item):
        seeds, indices = item
        if self._is_plain:
            import torch

            index = torch.as_tensor(indices)
            return tuple(t.index_select(0, index) for t in self.dataset.tensors)
        with seeded(*seeds):
            fetch = getattr(self.dataset, "__getitems__", None)
            samples = fetch(indices) if fetch else [self.dataset[i] for i in indices]
            return self.collate(samples)

    def __getstate__(self):
        import cloudpickle

        # a class of a notebook or of __main__ is pickled by value
        return cloudpickle.dumps((self.dataset, self.collate))

    def __setstate__(self, data):
        import cloudpickle

        self.__init__(*cloudpickle.loads(data))


class _Processes:
    """The loader's own processes; they live until the end of the fit or evaluation.

    They are forked from a server that has imported torch and done nothing else: those forked from
    this process would inherit locks of its threads. The server goes with this process.
    """

    def __init__(self, loader):
        import multiprocessing

        from torch.utils.data import DataLoader

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", __name__])
        self._items: Iterator = iter(())
        self._under_way: Iterator | None = None
        self._ranges: list = []
        init = loader.worker_init_fn
        self._loader = DataLoader(
            _BatchMaker(loader.dataset, loader.collate_fn),
            sampler=_Stream(self),
            batch_size=None,
            num_workers=loader.num_workers,
            collate_fn=_unchanged,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=None if init is None else _PickledByValue(init),
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=True,
            multiprocessing_context=context,
        )

    def load(self, items):
        """Pairs (range, batch) of pairs (range, item), loaded ahead."""
        self._items, self._ranges = items, []
        with seeded(0):  # torch draws a seed for the processes, which need none
            self._under_way = iter(self._loader)
        for loaded in self._under_way:
            yield self._ranges.pop(0), loaded

    def close_epoch(self):
        """Announce nothing more of the epoch before."""
        self._items = iter(())

    def next_item(self):
        for range_, item in self._items:
            self._ranges.append(range_)
            yield item

    def close(self):
        iterator, self._under_way = self._loader._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None


class _Stream:
    def __init__(self, owner):
        self._owner = owner

    def __iter__(self):
        return self._owner.next_item()


class _PickledByValue:
    """A function that is pickled by value."""

    def __init__(self, function):
        self._function = function

    def __call__(self, *args):
        return self._function(*args)

    def __getstate__(self):
        import cloudpickle

        return cloudpickle.dumps(self._function)

    def __setstate__(self, data):
        import cloudpickle

        self._function = cloudpickle.loads(data)


def _unchanged(batch):
    return batch


@contextlib.contextmanager
def seeded(*values: int) -> Iterator[None]:
    """Seed Python, numpy and torch for a block; what was drawn before goes on after it."""
    import random

    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed = _seed(*values)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _seed(*values: int) -> int:
    return int(np.random.SeedSequence(values).generate_state(1, np.uint64)[0] >> np.uint64(1))


# -- iterable data ------------------------------------------------------------------------------


def spooled(
    loader: DataLoader,
    shard: LoaderShard,
    feature_cols: Sequence[str] | None,
    label_cols: Sequence[str] | None,
) -> tuple[Shard, list[str] | None]:
    """The rows of an iterable loader, read to its end, beside the pickled loader.

    Returns
    -------
    Shard, list of str or None
        The keys of batches that are dicts: those that are named, or all of them.
    """
    writer = SpoolWriter(shard.spool.path, 0, "rows", [])
    keys = None
    for sequence, batch in enumerate(_batches_of(loader)):
        if isinstance(batch, Mapping):
            batch = dict(batch)
            keys = [*feature_cols, *(label_cols or ())] if feature_cols else list(batch)
        elif not isinstance(batch, tuple | list):
            raise UsageError(
                "The batches of iterable data must be tuples (*features, target) or dicts, got "
                f"{type(batch).__name__}"
            )
        else:
            batch = tuple(batch)
        try:
            leaves, arrays = grouped(columns_of(batch, keys, None, None))
            ready = [np.ascontiguousarray(a) for a in arrays]
            writer.append(0, sequence, len(ready[0]), leaves, ready)
        except SourceError as error:
            raise UsageError(f"Iterable data must give numbers of equal shapes: {error}") from None
    return Shard(writer.finish()), keys


def _batches_of(loader):
    """The loader without processes: a stream that is not cut for them would come several times."""
    from torch.utils.data import DataLoader

    if loader.num_workers == 0:
        return loader
    return DataLoader(loader.dataset, loader.batch_size, collate_fn=loader.collate_fn)
