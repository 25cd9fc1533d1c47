"""The figures of a trial's epochs, and the end of those that do not look promising."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from bigdl.common.errors import require

__all__ = ["EpochFigures"]


class EpochFigures(pl.Callback):
    """Keeps metrics of each epoch, and lets a pruner decide after it.

    An epoch is judged when the next one begins: only then is everything logged that its last hooks
    log.

    Parameters
    ----------
    metrics : list of str
    trial : optuna.trial.Trial, optional
        Is told the first metric, and may end the training.

    Attributes
    ----------
    figures : list of dict
        Of each epoch in which all metrics were logged.
    """

    def __init__(self, metrics: list[str], trial: Any = None):
        self._metrics = metrics
        self._trial = trial
        self._begun = self._validated = False
        self.figures: list[dict[str, float]] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._begun:
            self._close_epoch(trainer)
            self._prune()
        self._begun, self._validated = True, False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._begun:
            self._close_epoch(trainer)

    def report(self, trial: Any) -> None:
        """Tell a trial of all epochs."""
        for epoch, figures in enumerate(self.figures):
            trial.report(figures[self._metrics[0]], epoch)

    def _close_epoch(self, trainer: pl.Trainer) -> None:
        if trainer.check_val_every_n_epoch not in (None, 1) and not self._validated:
            return  # figures of the last validation would count twice
        logged = trainer.callback_metrics
        if not self._metrics or any(metric not in logged for metric in self._metrics):
            return
        self.figures.append({metric: float(logged[metric]) for metric in self._metrics})
        if self._trial is not None:
            self._trial.report(self.figures[-1][self._metrics[0]], len(self.figures) - 1)

    def _prune(self) -> None:
        if self._trial is not None and self.figures and self._trial.should_prune():
            epochs = len(self.figures)
            raise require("optuna", "automl").TrialPruned(f"pruned after {epochs} epochs")
