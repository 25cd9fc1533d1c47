"""The rows of one rank of the parameter layer, from which every step takes its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.parameter_layer.plan import Step
from bigdl.training.run_settings import RunSettings
from bigdl.training.tensors import TensorShard

__all__ = ["LayerRows", "Place"]


@dataclass
class Place:
    """What a loader wants to know of its worker."""

    rank: int
    world_size: int
    closers: list[Callable[[], None]] = field(default_factory=list)

    def at_exit(self, close: Callable[[], None]) -> None:
        self.closers.append(close)

    def close(self) -> None:
        """End what was to end at the exit."""
        while self.closers:
            self.closers.pop()()


class LayerRows:
    """What a replica reads batches from.

    Parameters
    ----------
    data : TensorShard or LoaderBatches
    settings : RunSettings
    rank : int
    sampling : str
        See :class:`~bigdl.orca.learn.layer_fit.options.LayerOptions`.
    memory : int, optional
        Bytes that shuffled rows may take; default all rows.  A replica that is made again elsewhere
        shuffles alike, so it must not depend on what is free.

    Raises
    ------
    UsageError
        If the data cannot be sampled like that.
    """

    def __init__(
        self, data: Any, settings: RunSettings, rank: int, sampling: str, memory: int | None
    ):
        if sampling == "window" and not isinstance(data, TensorShard):
            raise UsageError(
                "sampling='window' needs rows that are side by side, and a DataLoader is read "
                "sample by sample; leave sampling= out or pass arrays"
            )
        self._data, self._settings, self._rank = data, settings, rank
        self._is_exact = sampling == "exact"
        self._window = 0 if memory is None else data.window(memory)
        self._order: tuple[int, Any] = (-1, None)

    def describe(self) -> dict:
        """What the driver needs to know; JSON-able."""
        data = self._data
        return {
            "rows": data.rows,
            "fingerprint": data.fingerprint,
            "drop_last": bool(data.drop_last),
            "window": self._window,
            "inputs": data.inputs,
        }

    def batch(self, step: Step, start: int, stop: int):
        """The columns of the rows `start`...`stop` of the epoch's order."""
        settings, data = self._settings, self._data
        if step.epoch != self._order[0]:
            order = data.order(
                settings.shuffle, settings.seed, step.epoch, self._rank, self._window, tuple
            )
            self._order = step.epoch, order
        order = self._order[1]
        if self._is_exact:
            return data.batch(start, stop, order)
        key = [settings.seed, step.epoch, step.number, self._rank]
        first = int(np.random.default_rng(key).integers(data.rows))
        places = (first + np.arange(stop - start)) % data.rows
        if order is not None:
            whole = order if isinstance(order, np.ndarray) else order[0 : data.rows]
            places = whole[places]
        return data.batch(0, stop - start, places)
