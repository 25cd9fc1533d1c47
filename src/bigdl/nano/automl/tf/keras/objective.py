"""One trial: a Keras model that is made, trained and judged."""

from __future__ import annotations

from typing import Any

import keras

from bigdl.common.errors import require
from bigdl.nano.automl.hpo.lazy import Choice, Naming, take
from bigdl.nano.automl.tf.keras.building import build_model
from bigdl.nano.automl.tf.keras.targets import Target

__all__ = ["KerasObjective"]


class KerasObjective:
    """Makes a model with what a trial proposes, trains it, and returns its figure.

    It travels to the processes of a parallel search.

    Parameters
    ----------
    subject : dict
        What is lazy: the ``model``, and the arguments of ``compile`` and ``fit``.
    target : Target
    """

    def __init__(self, subject: dict[str, Any], target: Target):
        self._subject = subject
        self._target = target

    def __call__(self, trial: Any) -> float:
        made = take(self._subject, Choice.of_trial(Naming(self._subject), trial))
        model = build_model(made)
        fit = {"verbose": 0, **made["fit"]}
        report = _EpochReports(trial, self._target.name)
        if (fit.get("num_processes") or 1) == 1:
            fit["callbacks"] = [*_listed(fit.get("callbacks")), report]
        history = model.fit(**fit)
        if report.pruned:
            raise require("optuna", "automl").TrialPruned(f"pruned after {report.epochs} epochs")
        return self._target.of_history(history.history)


class _EpochReports(keras.callbacks.Callback):
    """Tells a trial of each epoch, and ends the training if the trial does not look promising."""

    def __init__(self, trial: Any, metric: str):
        super().__init__()
        self._trial = trial
        self._metric = metric
        self.epochs = 0
        self.pruned = False

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.epochs = epoch + 1
        if self._metric not in (logs or {}):
            return
        self._trial.report(float(logs[self._metric]), epoch)
        if self._trial.should_prune():
            self.pruned = True
            self.model.stop_training = True


def _listed(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
