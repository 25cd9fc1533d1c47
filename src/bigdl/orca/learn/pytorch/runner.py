"""What a callback sees of the worker that it is called in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigdl.orca.learn.position import Position

__all__ = ["Runner"]


class Runner:
    """A worker's part of a fit or of an evaluation.

    Attributes
    ----------
    rank, size : int
        This worker, and how many there are.
    config : dict
        The ``config`` of the Estimator.
    model, optimizer, scheduler, criterion
        Of this worker; the optimizer and scheduler are None in an evaluation.
    epochs : int
        Finished epochs, counted over all fits of the Estimator.
    num_epochs : int
        The count at which this fit ends.
    global_step : int
        Optimizer steps done, counted over all fits of the Estimator.
    batch, batch_idx, output, target, loss
        Of the current iteration; all but `batch_idx` are None on a worker that has no rows in this
        step, and `output` is None for the training step of a LightningModule.
    epoch_stats : dict
        Figures of the epoch that ended last, of all workers together.
    stop : bool
        Set it on any rank to end the training after the current step.
    """

    def __init__(self, worker, config: dict, callbacks: Sequence[Any]):
        self.rank, self.size = worker.rank, worker.world_size
        self.config = config
        self.callbacks = list(callbacks)
        self.position = Position()
        self.num_epochs = 0
        self.model: Any = None
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.criterion: Any = None
        self.batch = self.batch_idx = self.output = self.target = self.loss = None
        self.epoch_stats: dict = {}
        self.stop = False

    @property
    def epochs(self) -> int:
        return self.position.epoch

    @property
    def global_step(self) -> int:
        return self.position.global_step

    def call(self, hook: str) -> None:
        """Call one hook of every callback, in their order."""
        for callback in self.callbacks:
            getattr(callback, hook)(self)
