"""One trial: a Keras model that is made, trained and judged."""

from __future__ import annotations

import copy
from typing import Any

import keras

from bigdl.common.errors import UsageError, one_line, require
from bigdl.nano.automl.hpo.lazy import Choice, Naming, take
from bigdl.nano.automl.tf.keras.building import build_model
from bigdl.nano.automl.tf.keras.judging import EpochReports, judge_of
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
        several = (fit.get("num_processes") or 1) != 1
        with judge_of(trial, elsewhere=several) as judge:
            report = EpochReports(judge, self._target.name)
            fit["callbacks"] = [*_copies(fit.get("callbacks")), report]
            history = model.fit(**fit)
        if report.pruned:
            raise require("optuna", "automl").TrialPruned(f"pruned after {report.epochs} epochs")
        return self._target.of_history(history.history)


def _copies(callbacks: Any) -> list[Any]:
    """Callbacks of one trial: a callback knows its model, and trials may run at the same time."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    given = [each for each in given if each is not None]
    # The models that they were used with before are not copied.
    models = {id(getattr(each, "_model", None)): None for each in given}
    try:
        return copy.deepcopy(given, models)
    except Exception as error:
        raise UsageError(
            f"Each trial has copies of the callbacks, but one cannot be copied: {one_line(error)}; "
            "give callbacks that were not used before"
        ) from error
