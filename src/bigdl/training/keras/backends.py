"""Keras backends TensorFlow, torch and JAX: selection, seeds and compiled steps.

Steps call the model's ``train_step``, ``test_step`` and ``predict_step``, so overridden steps are
respected.

JAX workers do not use ``jax.distributed``: it needs the same number of rows on every process (else
it hangs), installs a SIGTERM handler, and a process can join only once, before its first
computation, while Spark tasks and Ray actors are reused for the next fit.  A step is compiled for
one process and calls the GradientSync before it passes the gradients to the optimizer.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import cloudpickle
import numpy as np

from bigdl.common.environment import quiet_tensorflow
from bigdl.common.errors import LazyModule, UsageError, require
from bigdl.runtime.serialization import pickled_by_value

if TYPE_CHECKING:
    import keras
    import tensorflow as tf
    import torch

    from bigdl.common.types import Tensors
else:
    keras = LazyModule("keras", "tf")
    tf = LazyModule("tensorflow", "tf")
    torch = LazyModule("torch", "orca")


Logs: TypeAlias = "dict[str, Any]"
"""Metrics by name, as a step of Keras returns them: numbers or tensors."""

KerasBatch: TypeAlias = "tuple[Any, ...] | dict[str, Any]"
"""Batch of a step: ``(x, y, sample_weight)``, or a dict for a model with its own step."""

_BACKENDS = ("tensorflow", "torch", "jax")


def backend_of_program() -> str:
    """Return the Keras backend of the driver, which the workers use as well.

    Raises
    ------
    UsageError
        If the workers cannot train with it.
    """
    keras = require("keras", "tf")
    name: str = keras.backend.backend()
    if name not in _BACKENDS:
        raise UsageError(
            f"Keras computes with {name!r} here, which workers cannot train with; set "
            'KERAS_BACKEND to "tensorflow", "torch" or "jax" before Keras is imported',
            code="unsupported",
            allowed=["tensorflow", "torch", "jax"],
        )
    return name


def use_backend(
    name: str, config: dict[str, Any] | None = None, threads: int | None = None
) -> None:
    """Import Keras with the driver's backend, before anything else imports it.

    Parameters
    ----------
    name : str
    config : dict, optional
        ``intra_op_parallelism`` and ``inter_op_parallelism`` of TensorFlow.
    threads : int, optional
        Threads of this worker.

    Raises
    ------
    UsageError
        If this process has imported Keras with another backend.
    """
    quiet_tensorflow()
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = name
    if name == "jax":
        require("jax", "jax")
        if threads is not None:
            # XLA's CPU client sizes its thread pools by this variable only
            os.environ.setdefault("NPROC", str(threads))
    keras = require("keras", "tf")
    imported = keras.backend.backend()
    if imported != name:
        raise UsageError(
            f"Keras computes with {imported!r} in this worker and with {name!r} in the driver; set "
            f"KERAS_BACKEND={name} in the environment of the workers",
            code="cluster-config",
        )
    if name != "tensorflow" or threads is None:
        return
    config = config or {}
    with contextlib.suppress(RuntimeError):  # a process that has already computed keeps its pools
        # while one operation waits for other workers, another can compute
        tf.config.threading.set_inter_op_parallelism_threads(
            int(config.get("inter_op_parallelism", 2))
        )
        tf.config.threading.set_intra_op_parallelism_threads(
            int(config.get("intra_op_parallelism", threads))
        )


def seed_keras(seed: int, rank: int = 0) -> None:
    """Seed Keras, its backend, NumPy and random, differently on each rank."""
    from bigdl.training.state import seed_everything

    keras.utils.set_random_seed(seed_everything(seed, rank))


@dataclass(frozen=True)
class Packed:
    """Pickled objects for a process that may not have imported Keras.

    Attributes
    ----------
    backend : str
        Keras backend of the driver.
    payload : bytes
    """

    backend: str
    payload: bytes

    @classmethod
    def of(cls, *objects: object) -> Packed:
        """Pickle objects by value, including lambdas and notebook classes."""
        failure = "The model or a callback cannot be shipped to the workers"
        advice = "create such objects inside the model creator instead"
        return cls(backend_of_program(), pickled_by_value(objects, failure, advice))

    def unpack(
        self, config: dict[str, Any] | None = None, threads: int | None = None
    ) -> tuple[Any, ...]:
        """Select the backend and unpickle the objects."""
        use_backend(self.backend, config, threads)
        objects: tuple[Any, ...] = cloudpickle.loads(self.payload)
        return objects


# -- steps ----------------------------------------------------------------------------------------


class Steps:
    """Uncompiled training, test and prediction steps of a model, for the torch backend.

    Parameters
    ----------
    model : keras.Model
    """

    def __init__(self, model: keras.Model):
        self._model = model

    def train(self, batch: KerasBatch) -> Any:  # the user's train_step determines it
        """Run the model's ``train_step`` and return its result, which is usually the logs."""
        self._model.train()
        return self._model.train_step(_map(_torch_tensor, batch))

    def test(self, batch: KerasBatch) -> Logs:
        """Return the logs of a test step."""
        self._model.eval()
        with torch.no_grad():
            logs: Logs = self._model.test_step(_map(_torch_tensor, batch))
        return logs

    def predict(self, inputs: Tensors) -> Tensors:
        """Return the predictions for ``x`` as arrays."""
        self._model.eval()
        with torch.no_grad():
            outputs = self._model.predict_step((_map(_torch_tensor, inputs),))
        return _map(lambda tensor: tensor.detach().cpu().float().numpy(), outputs)


class _TensorFlowSteps(Steps):
    """Steps traced once to TensorFlow graphs that accept any number of rows."""

    def __init__(self, model: keras.Model):
        super().__init__(model)
        self._traced: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def train(self, batch: KerasBatch) -> Any:
        return self._run("train_step", batch)

    def test(self, batch: KerasBatch) -> Logs:
        logs: Logs = self._run("test_step", batch)
        return logs

    def predict(self, inputs: Tensors) -> Tensors:
        return _map(_array, self._run("predict_step", (inputs,)))

    def _run(self, name: str, batch: KerasBatch) -> Any:
        batch, step = _map(_tf_tensor, batch), getattr(self._model, name)
        if self._model.run_eagerly:
            return step(batch)
        specs = _map(_any_rows, batch)
        key = name, repr(specs)
        if key not in self._traced:
            # XLA would compile again for every number of rows
            function = tf.function(lambda data: step(data), autograph=False, jit_compile=False)
            self._traced[key] = function.get_concrete_function(specs)
        return self._traced[key](batch)


class _JaxSteps(Steps):
    """Steps compiled by JAX, once for each number of rows.

    They are the functions of Keras ``fit``, so a custom ``train_step(state, data)`` is respected.
    """

    def train(self, batch: KerasBatch) -> Any:
        model = self._model
        model.make_train_function()
        optimizer = () if model.optimizer is None else model.optimizer.variables
        return self._run(model.train_function, batch, optimizer, model.metrics_variables)

    def test(self, batch: KerasBatch) -> Logs:
        model = self._model
        model.make_test_function()
        logs: Logs = self._run(model.test_function, batch, model.metrics_variables)
        return logs

    def predict(self, inputs: Tensors) -> Tensors:
        return self._model.predict_on_batch(_map(jax_array, inputs))

    def _run(self, function: Callable[..., Any], batch: KerasBatch, *more: Sequence[Any]) -> Any:
        import jax

        model = self._model
        groups = [model.trainable_variables, model.non_trainable_variables, *more]
        # the old state's memory is donated to the new state
        state = tuple([variable.value for variable in group] for group in groups)
        logs, state = function(state, iter([_map(jax_array, batch)]))
        jax.block_until_ready(state)  # gradients are in flight until then
        for group, values in zip(groups, state, strict=True):
            for variable, value in zip(group, values, strict=True):
                variable.assign(value)
        return logs


def steps_of(model: keras.Model) -> Steps:
    """Return a model's training, test and prediction steps for the current Keras backend."""
    classes = {"tensorflow": _TensorFlowSteps, "torch": Steps, "jax": _JaxSteps}
    return classes[keras.backend.backend()](model)


def _map(function: Callable[[Any], Any], value: object) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), value)


def _array(value: object) -> np.ndarray:
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def jax_array(value: object) -> np.ndarray:
    """Convert a value to an array for JAX; raise an error if 64-bit integers would be truncated."""
    import jax

    array, is_wide = _array(value), jax.config.read("jax_enable_x64")
    if array.dtype in (np.int64, np.uint64) and array.size and not is_wide:
        low, high = int(array.min()), int(array.max())
        limits = np.iinfo(np.int32 if array.dtype == np.int64 else np.uint32)
        if low < limits.min or high > limits.max:
            raise UsageError(
                f"JAX computes with integers of 32 bits, a batch has numbers from {low} to {high}; "
                "hash them to fewer bits, or set JAX_ENABLE_X64=1",
                code="data-value",
            )
    return array


def _torch_tensor(value: object) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(_array(value)))


def _tf_tensor(value: object) -> tf.Tensor:
    return value if tf.is_tensor(value) else tf.convert_to_tensor(_array(value))


def _any_rows(tensor: tf.Tensor) -> tf.TypeSpec:
    if not isinstance(tensor, tf.Tensor):  # a ragged or sparse tensor
        return tf.type_spec_from_value(tensor)
    return tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype)
