"""Keras' ``Sequential`` and ``Model`` with multi-process training."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

import keras
from keras.src.models.functional import Functional  # it has no public name

__all__ = ["Model", "Sequential"]


if TYPE_CHECKING:
    from keras import Model as _Base

else:
    _Base = object


class _NanoModel(_Base):
    """Mix-in that adds multi-process training to a Keras model."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        made = super().__new__(cls, *args, **kwargs)
        # Keras wraps the method in each object, and the wrapper refuses arguments of BigDL 2.x.
        vars(made).pop("quantize", None)
        return made

    def fit(
        self,
        x: object = None,
        y: object = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | Literal["auto"] = "auto",
        callbacks: list[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
        validation_split: float = 0.0,
        validation_data: object = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: object = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Iterable[int] = 1,
        max_queue_size: int = 10,
        workers: int = 1,
        use_multiprocessing: bool = False,
        num_processes: int | None = None,
        backend: Literal["multiprocessing", "ray"] = "multiprocessing",
    ) -> keras.callbacks.History:
        """Train the model in this process, or in several processes of this machine.

        Several processes compute the same steps as one: `batch_size`, or the batch of the dataset,
        is the global batch. Each process computes its share, and gradients are averaged over the
        rows.

        Parameters
        ----------
        x, y, batch_size, epochs, verbose, callbacks, validation_split, validation_data, shuffle
            See ``keras.Model.fit``.
        class_weight, sample_weight, initial_epoch, steps_per_epoch, validation_steps
            See ``keras.Model.fit``.
        validation_batch_size, validation_freq
            See ``keras.Model.fit``.
        max_queue_size, workers, use_multiprocessing
            Accepted for compatibility; Keras 3 reads them from its ``PyDataset``.
        num_processes : int, optional
            Number of training processes. None and 1 train in this process.
        backend : {"multiprocessing", "ray"}
            How to start the processes.

        Returns
        -------
        keras.callbacks.History
            Metrics over the rows of all processes.

        Raises
        ------
        UsageError
            If an argument is invalid, or the model, the data or a callback cannot be pickled.
        """
        if (max_queue_size, workers, use_multiprocessing) != (10, 1, False):
            warnings.warn(
                "max_queue_size, workers and use_multiprocessing have no effect; Keras 3 takes "
                "them from a keras.utils.PyDataset",
                stacklevel=2,
            )
        of_keras: dict[str, Any] = {
            "x": x,
            "y": y,
            "batch_size": batch_size,
            "epochs": epochs,
            "verbose": verbose,
            "callbacks": callbacks,
            "validation_split": validation_split,
            "validation_data": validation_data,
            "shuffle": shuffle,
            "class_weight": class_weight,
            "sample_weight": sample_weight,
            "initial_epoch": initial_epoch,
            "steps_per_epoch": steps_per_epoch,
            "validation_steps": validation_steps,
            "validation_batch_size": validation_batch_size,
            "validation_freq": validation_freq,
        }
        if num_processes is None and backend in ("multiprocessing", "ray"):
            return super().fit(**of_keras)
        from bigdl.nano.tf.training.processes import fit_in_processes, processes_of

        processes = processes_of(num_processes, backend)
        if processes.count == 1:
            return super().fit(**of_keras)
        return fit_in_processes(self, processes, of_keras)

    def trace(self, *args: object, **kwargs: object) -> keras.Model:
        """Call ``InferenceOptimizer.trace`` (deprecated)."""
        return _deprecated_for_optimizer("trace").trace(self, *args, **kwargs)

    def quantize(self, *args: object, **kwargs: object) -> keras.Model | None:
        """Call ``InferenceOptimizer.quantize`` (deprecated), or Keras' method if `mode` is set."""
        if isinstance(kwargs.get("mode", args[0] if args else None), str):
            return super().quantize(*args, **kwargs)
        return _deprecated_for_optimizer("quantize").quantize(self, *args, **kwargs)


def _deprecated_for_optimizer(name: str) -> Any:
    message = f"model.{name} is deprecated; use InferenceOptimizer.{name}"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    from bigdl.nano.tf.inference.optimizer import InferenceOptimizer

    return InferenceOptimizer


@keras.saving.register_keras_serializable(package="bigdl")
class Sequential(_NanoModel, keras.Sequential):
    """``keras.Sequential`` with ``fit(num_processes=...)``.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.tf.keras import Sequential
    >>> from bigdl.nano.tf.keras.layers import Dense
    >>> model = Sequential([Dense(1)])
    >>> model.compile(optimizer="sgd", loss="mse")
    >>> x = np.random.rand(64, 2)
    >>> history = model.fit(x, x.sum(axis=1), epochs=2, batch_size=8, verbose=0)
    >>> history.history["loss"][1] < history.history["loss"][0]
    True

    With ``fit(..., num_processes=2)`` two processes share each batch.
    """


@keras.saving.register_keras_serializable(package="bigdl")
class FunctionalModel(_NanoModel, Functional):
    """A functional model, the result of ``Model(inputs, outputs)``."""


@keras.saving.register_keras_serializable(package="bigdl")
class Model(_NanoModel, keras.Model):
    """``keras.Model`` with ``fit(num_processes=...)``, for subclasses and functional models.

    ``Model(inputs, outputs)`` is a functional model, as in Keras.

    Examples
    --------
    >>> import keras
    >>> from bigdl.nano.tf.keras import Model
    >>> inputs = keras.Input((4,))
    >>> model = Model(inputs, keras.layers.Dense(2)(inputs))
    >>> model.output_shape
    (None, 2)

    Or as the base of a class:

    >>> class Scores(Model):
    ...     def __init__(self, classes):
    ...         super().__init__()
    ...         self.layer = keras.layers.Dense(classes)
    ...
    ...     def call(self, x):
    ...         return self.layer(x)
    >>> Scores(3)(keras.ops.ones((5, 4))).shape
    TensorShape([5, 3])
    """

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        if cls is Model and _is_functional(args, kwargs):
            return FunctionalModel(*args, **kwargs)
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any):  # args: of keras.Model
        if not _is_functional(args, kwargs):
            super().__init__(*args, **kwargs)
            return
        # Keras would change this class itself into a functional one.
        _become_functional(type(self))
        FunctionalModel.__init__(self, *args, **kwargs)


def _is_functional(args: tuple, kwargs: dict) -> bool:
    return (
        len(args) == 2
        or (len(args) == 1 and "outputs" in kwargs)
        or ("inputs" in kwargs and "outputs" in kwargs)
    )


def _become_functional(cls: type) -> None:
    """Replace ``Model`` by ``FunctionalModel`` in the bases of a user's class."""
    if Model in cls.__bases__:
        cls.__bases__ = tuple(FunctionalModel if base is Model else base for base in cls.__bases__)
        return
    for base in cls.__bases__:
        if issubclass(base, Model):
            _become_functional(base)
