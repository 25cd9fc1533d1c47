"""The batches of a model of PyTorch, of which each worker of a trial takes its part.

All workers go through the same batches in the same order, so that several make the update of one.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.automl.model.base import batch_size_of
from bigdl.orca.automl.model.rows import Creator, Rows

__all__ = ["Batch", "CommonNumbers", "batches_of_loader", "batches_of_rows", "loader_of"]


@dataclass(frozen=True)
class Batch:
    """The rows of a batch, before they are made.

    Attributes
    ----------
    rows : int
    take : callable
        ``take(start, stop)`` gives ``(*features, target)`` of some of its rows as tensors.
    """

    rows: int
    take: Callable[[int, int], tuple]


def batches_of_rows(
    rows: Rows, config: Mapping[str, Any], epoch: int | None, device
) -> Iterator[Batch]:
    """Batches of arrays; without an epoch in order.

    Parameters
    ----------
    rows : Rows
    config : dict
        ``batch_size``, ``shuffle`` and ``seed``.
    epoch : int, optional
        Which the order depends on.
    device : torch.device
    """
    import torch

    from bigdl.runtime.shards.batches import permutation

    size, count = batch_size_of(config), len(rows)
    shuffle = epoch is not None and config.get("shuffle", True)
    order = permutation(count, config.get("seed", 0), epoch, 0) if shuffle else None

    def tensor(array, start, stop):
        # a copy in both cases: arrays that processes share cannot be written to
        taken = array[start:stop].copy() if order is None else array[order[start:stop]]
        return torch.from_numpy(taken).to(device)

    def batch(first):
        def take(start, stop):
            x, y = (
                tuple(tensor(each, first + start, first + stop) for each in arrays)
                for arrays in (rows.features, rows.targets)
            )
            return *x, y[0] if len(y) == 1 else y

        return Batch(min(size, count - first), take)

    yield from map(batch, range(0, count, size))


def batches_of_loader(loader, device, numbers: CommonNumbers | None = None) -> Iterator[Batch]:
    """What a DataLoader gives.

    Parameters
    ----------
    loader : torch.utils.data.DataLoader
    device : torch.device
    numbers : CommonNumbers, optional
        What several workers draw from, each of which goes through the whole loader.
    """
    drawn = contextlib.nullcontext if numbers is None else numbers.drawn
    with drawn():
        found = iter(loader)
    while True:
        with drawn():
            given = next(found, None)
        if given is None:
            return
        yield _of_loader(_checked(given), device)


def _of_loader(values: list, device) -> Batch:
    rows = _rows_of(values)

    def take(start, stop):
        whole = start == 0 and stop == rows
        return tuple(_moved(each if whole else _cut(each, start, stop), device) for each in values)

    return Batch(rows, take)


def loader_of(data: Creator, config: Mapping[str, Any]):
    """The DataLoader of a configuration.

    Raises
    ------
    UsageError
        If the function gives something else.
    """
    import torch

    loader = data.make(dict(config))
    if not isinstance(loader, torch.utils.data.DataLoader):
        raise UsageError(
            "The function given as data must return a torch DataLoader, it returned "
            f"{type(loader).__name__}"
        )
    return loader


class CommonNumbers:
    """Random numbers that all workers draw alike, beside the ones that each draws by itself.

    Those of the moment when it is made, which must be the same on all workers.
    """

    def __init__(self):
        self._state = _state()

    @contextlib.contextmanager
    def drawn(self):
        """Draw from them for the time of the block."""
        own = _state()
        _set_state(self._state)
        try:
            yield
        finally:
            self._state = _state()
            _set_state(own)


def _state() -> tuple:
    import torch

    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_state(state) -> None:
    import torch

    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def _checked(batch) -> list:
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        raise UsageError(
            f"The batches of a DataLoader must be (*features, target), got {type(batch).__name__}"
        )
    *features, target = batch
    if len(features) == 1 and isinstance(features[0], list | tuple):
        features = features[0]
    return [*features, target]


def _rows_of(value) -> int:
    while isinstance(value, list | tuple) and value:
        value = value[-1]
    return len(value) if getattr(value, "ndim", 0) else 1


def _cut(value, start, stop):
    if isinstance(value, list | tuple):
        return tuple(_cut(each, start, stop) for each in value)
    return value[start:stop] if getattr(value, "ndim", 0) else value


def _moved(value, device):
    if isinstance(value, list | tuple):
        return tuple(_moved(each, device) for each in value)
    return value.to(device) if hasattr(value, "to") else value
