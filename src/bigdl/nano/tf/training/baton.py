"""The user's callbacks, which one process runs for all."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from bigdl.nano.tf.training.group import Group
from bigdl.nano.tf.training.shares import SharedTraining

__all__ = ["Baton"]

_PHASES = ("train", "epoch", "train_batch", "test", "test_batch", "predict", "predict_batch")
_HOOKS = [f"on_{phase}_{edge}" for phase in _PHASES for edge in ("begin", "end")]
# Where the processes take over what rank 0 has; elsewhere callbacks only look on.
_ALL = ("on_train_begin", "on_epoch_begin")
_FLAG = ("on_epoch_end", "on_train_batch_end")


class Baton(keras.callbacks.Callback):
    """Runs callbacks in the process of rank 0, and hands on to the others what they have changed.

    That is, at the begin of the fit and of each epoch, all weights and the state of the optimizer
    with its learning rate, and after each batch and each epoch whether the fit is to stop.

    Parameters
    ----------
    callbacks : list of keras.callbacks.Callback
        Empty but for rank 0.
    anywhere : bool
        Whether rank 0 has any.
    group : Group
    training : SharedTraining
    """

    def __init__(self, callbacks: list, anywhere: bool, group: Group, training: SharedTraining):
        super().__init__()
        self._callbacks = callbacks
        self._anywhere = anywhere
        self._group = group
        self._training = training

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        for callback in self._callbacks:
            callback.set_params(params)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        for callback in self._callbacks:
            callback.set_model(model)

    def _pass_on(self, hook: str, *arguments: Any, **keywords: Any) -> None:
        with self._training.suspended():
            for callback in self._callbacks:
                getattr(callback, hook)(*arguments, **keywords)
        if hook in _ALL:
            self._hand_on_everything()
        if self._anywhere and hook in _FLAG:
            self.model.stop_training = self._group.of_first(bool(self.model.stop_training))

    def _hand_on_everything(self) -> None:
        optimizer = self.model.optimizer
        state = optimizer.variables if optimizer.built else []
        variables = [*self.model.weights, *state]
        values = None
        if self._group.rank == 0:
            values = [np.asarray(variable) for variable in variables]
        values = self._group.of_first(values)
        if self._group.rank:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)


def _hook(name: str) -> Any:
    def passed_on(self: Baton, *arguments: Any, **keywords: Any) -> None:
        self._pass_on(name, *arguments, **keywords)

    passed_on.__name__ = name
    return passed_on


for _name in _HOOKS:
    setattr(Baton, _name, _hook(_name))
