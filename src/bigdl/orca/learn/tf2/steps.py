"""Training, test and prediction steps of a Keras model, as its backend runs them.

They call the model's own ``train_step``, ``test_step`` and ``predict_step``, so that a model which
overrides them is trained as it says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bigdl.orca.learn.tf2.jax_steps import JaxSteps

__all__ = ["steps_of"]


def steps_of(model):
    """The steps of a model under the backend of this process.

    Returns
    -------
    TensorFlowSteps, TorchSteps or JaxSteps
        ``train(batch)`` and ``test(batch)`` of a batch ``(x, y, sample_weight)`` of torch tensors,
        arrays or tensors of TensorFlow give a dict of numbers; ``predict(x)`` gives arrays.
    """
    import keras

    steps = {"tensorflow": TensorFlowSteps, "torch": TorchSteps, "jax": JaxSteps}
    return steps[keras.backend.backend()](model)


class TensorFlowSteps:
    """Steps as graphs; one of each is traced for batches of any number of rows."""

    def __init__(self, model):
        self._model = model
        self._functions: dict[str, Any] = {}
        self._traced: dict[tuple, Callable] = {}

    def train(self, batch) -> dict:
        return self._run("train_step", batch)

    def test(self, batch) -> dict:
        return self._run("test_step", batch)

    def predict(self, inputs):
        import tensorflow as tf

        found = self._run("predict_step", (inputs,))
        return tf.nest.map_structure(_array, found)

    def _run(self, name, batch):
        import tensorflow as tf

        batch = tf.nest.map_structure(_tensor, batch)
        if self._model.run_eagerly:
            return getattr(self._model, name)(batch)
        return self._trace(name, batch)(batch)

    def _trace(self, name, batch):
        import tensorflow as tf

        specs = tf.nest.map_structure(_any_rows, batch)
        key = name, repr(specs)
        if key not in self._traced:
            if name not in self._functions:
                step = tf.autograph.experimental.do_not_convert(getattr(self._model, name))
                # XLA would compile again for every number of rows
                self._functions[name] = tf.function(lambda data: step(data), jit_compile=False)
            self._traced[key] = self._functions[name].get_concrete_function(specs)
        return self._traced[key]


def _tensor(value):
    import tensorflow as tf

    if value is None or tf.is_tensor(value):
        return value
    return tf.convert_to_tensor(value.numpy() if hasattr(value, "numpy") else value)


def _any_rows(tensor):
    import tensorflow as tf

    if not isinstance(tensor, tf.Tensor):  # nothing, or a ragged or sparse tensor
        return None if tensor is None else tf.type_spec_from_value(tensor)
    return tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype)


def _array(value):
    return value.numpy() if hasattr(value, "numpy") else value


class TorchSteps:
    """Steps as they are."""

    def __init__(self, model):
        self._model = model

    def train(self, batch) -> dict:
        self._model.train()
        return self._model.train_step(_map(_torch_tensor, batch))

    def test(self, batch) -> dict:
        import torch

        self._model.eval()
        with torch.no_grad():
            return self._model.test_step(_map(_torch_tensor, batch))

    def predict(self, inputs):
        import torch

        self._model.eval()
        with torch.no_grad():
            found = self._model.predict_step((_map(_torch_tensor, inputs),))
        return _map(lambda tensor: tensor.detach().cpu().float().numpy(), found)


def _map(function, value):
    import keras

    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), value)


def _torch_tensor(value):
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        return value
    return torch.from_numpy(np.array(value.numpy() if hasattr(value, "numpy") else value))
