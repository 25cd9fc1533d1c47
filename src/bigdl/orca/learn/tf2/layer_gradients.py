"""The gradients of a Keras model's own training step, instead of the update that it makes."""

from __future__ import annotations

from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.learn.tf2.state import array_of
from bigdl.orca.learn.tf2.steps import steps_of

__all__ = ["GradientStep"]


class GradientStep:
    """Runs ``train_step`` of a model and takes what it hands to the optimizer.

    So losses, weights of rows, regularization and a training step of the user's own are those of
    any other training.  The model's metrics take note of the batch; its weights stay as they are,
    but for what its layers change themselves.

    Parameters
    ----------
    model : keras.Model
        Its optimizer makes no updates any more.
    """

    def __init__(self, model):
        self._model = model
        self._numbers = {id(weight): i for i, weight in enumerate(model.trainable_weights)}
        self._scale = model.optimizer.loss_scale_factor
        self._found: list[dict[int, Any]] = []
        object.__setattr__(model.optimizer, "apply", self._take)
        self._steps = steps_of(self)

    def __call__(self, batch) -> tuple[dict, dict[int, np.ndarray]]:
        """What a batch gives.

        Returns
        -------
        dict
            What the step returned.
        dict of int to ndarray
            Gradients by the number of the weight; those that do not depend on it have none.
        """
        logs, gradients = self._steps.train(batch)
        self._check()
        scale = self._scale
        arrays = {number: array_of(gradient) for number, gradient in gradients.items()}
        return logs, arrays if scale is None else {n: a / scale for n, a in arrays.items()}

    # -- what the steps of a backend ask a model -----------------------------------------------

    @property
    def run_eagerly(self) -> bool:
        return self._model.run_eagerly

    def train(self) -> None:
        """Turn the training mode of torch on."""
        self._model.train()

    def train_step(self, batch) -> tuple[dict, dict]:
        """The model's own, with the gradients."""
        self._found.clear()
        logs = self._model.train_step(batch)
        return logs, self._found[0] if self._found else {}

    def _take(self, grads, trainable_variables=None):
        variables = trainable_variables or self._model.trainable_weights
        self._found.append(
            {
                self._numbers.get(id(variable), -1): _dense(gradient)
                for gradient, variable in zip(grads, variables, strict=True)
                if gradient is not None
            }
        )

    def _check(self):
        """Refuse other steps; not inside of a step, where TensorFlow makes another error of it."""
        if len(self._found) != 1:
            raise UsageError(
                f"The train_step of {type(self._model).__name__} makes {len(self._found)} updates; "
                "backend='bigdl' makes one in a step, so use backend='spark'"
            )
        if -1 in self._found[0]:
            raise UsageError(
                f"The train_step of {type(self._model).__name__} updates what is not a trainable "
                "weight of the model; use backend='spark'"
            )


def _dense(gradient):
    """A gradient of an embedding may be sparse."""
    if type(gradient).__name__ != "IndexedSlices":
        return gradient
    import tensorflow as tf

    return tf.convert_to_tensor(gradient)
