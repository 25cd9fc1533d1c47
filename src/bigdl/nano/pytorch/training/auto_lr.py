"""Learning rates for the larger batch of several processes."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from pytorch_lightning import Callback
from pytorch_lightning.utilities.types import LRSchedulerConfig

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.training.optimizers import scale_rates, scale_schedule, warmup_factor

__all__ = ["AutoLr"]

_WARMUP = "warmup_epochs"


class AutoLr:
    """What the argument ``auto_lr`` of a Trainer asks for.

    Rates are multiplied by the number of processes. They grow to that during the first tenth of
    all epochs, or of all steps where a tenth is less than an epoch, unless the user has schedulers
    of her own.

    Parameters
    ----------
    wish : bool or dict
        The dict may name ``"warmup_epochs"``.

    Raises
    ------
    UsageError
        If it is neither, or the epochs are no int of at least 0.
    """

    def __init__(self, wish: bool | dict):
        if not isinstance(wish, (bool, dict)):
            raise UsageError(
                "auto_lr must be True, False or a dict such as {'warmup_epochs': 3}, "
                f"not {wish!r}"
            )
        options = wish if isinstance(wish, dict) else {}
        unknown = [name for name in options if name != _WARMUP]
        if unknown:
            warnings.warn(
                f"auto_lr takes {_WARMUP!r} only; {', '.join(map(repr, unknown))} has no effect",
                stacklevel=4,
            )
        epochs = options.get(_WARMUP)
        if epochs is not None and (
            isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 0
        ):
            raise UsageError(
                f"warmup_epochs of auto_lr must be an int of at least 0, but it is {epochs!r}"
            )
        self._wanted = wish is not False
        self._epochs = epochs
        self._said: list[str] = []

    def apply(self, trainer, strategy) -> None:
        """Scale the rates of a strategy's optimizers, and warm them up."""
        count = strategy.world_size
        self._said = []
        if not self._wanted or count == 1 or not strategy.optimizers:
            return
        scale_rates(strategy.optimizers, count)
        self._said = [f"learning rates × {count}"]
        if strategy.lr_scheduler_configs:
            for config in strategy.lr_scheduler_configs:
                scale_schedule(config.scheduler, count)
            warnings.warn(
                "The model has schedulers of its own: auto_lr multiplies learning rates by the "
                f"number of processes ({count}) and does not warm them up",
                stacklevel=2,
            )
            return
        interval, length = self._warmup(trainer)
        if length:
            self._warm_up(trainer, strategy, interval, length, count)
            self._said = [f"learning rates × {count} after a warm-up of {length} {interval}s"]

    def told(self) -> list[str]:
        """What was done, for the report."""
        return self._said

    def _warmup(self, trainer) -> tuple[str, int]:
        if self._epochs is not None:
            return "epoch", self._epochs
        epochs = trainer.max_epochs
        if epochs is not None and epochs >= 10:
            return "epoch", epochs // 10
        steps = trainer.estimated_stepping_batches
        return "step", 0 if steps == float("inf") else int(steps) // 10

    @staticmethod
    def _warm_up(trainer, strategy, interval: str, length: int, count: int) -> None:
        factor = functools.partial(warmup_factor, length=length, processes=count)
        schedulers = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
            for optimizer in strategy.optimizers
        ]
        strategy.lr_scheduler_configs = [
            LRSchedulerConfig(scheduler, name="auto_lr", interval=interval)
            for scheduler in schedulers
        ]
        if not trainer.lightning_module.automatic_optimization:
            # The loop of such a module steps no scheduler.
            trainer.callbacks.append(_ManualWarmUp(schedulers, interval))


class _ManualWarmUp(Callback):
    def __init__(self, schedulers: list[Any], interval: str):
        self._schedulers, self._interval = schedulers, interval

    def on_train_batch_end(self, *args: Any) -> None:
        self._step("step")

    def on_train_epoch_end(self, *args: Any) -> None:
        self._step("epoch")

    def _step(self, interval: str) -> None:
        if interval == self._interval:
            for scheduler in self._schedulers:
                scheduler.step()
