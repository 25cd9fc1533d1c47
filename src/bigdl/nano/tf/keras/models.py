"""``Sequential`` and ``Model`` of Keras that can train in several processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

import keras
from keras.src.models.functional import Functional  # which has no public name

__all__ = ["Model", "Sequential"]


if TYPE_CHECKING:
    from keras import Model as _Base
else:
    _Base = object


class _NanoModel(_Base):
    """A model of Keras that trains in several processes too."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        made = super().__new__(cls, *args, **kwargs)
        # Keras wraps the method of each object, and refuses the arguments of BigDL 2.x in it.
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
        """Train, in this process or in several of this machine.

        Several processes make the steps of one: `batch_size`, or the batch of the dataset, is that
        of all of them together, each computes its share, and gradients are averaged over the rows.

        Parameters
        ----------
        x, y, batch_size, epochs, verbose, callbacks, validation_split, validation_data, shuffle
            As of ``keras.Model.fit``.
        class_weight, sample_weight, initial_epoch, steps_per_epoch, validation_steps
            As of ``keras.Model.fit``.
        validation_batch_size, validation_freq
            As of ``keras.Model.fit``.
        max_queue_size, workers, use_multiprocessing
            Accepted; Keras 3 takes them from its ``PyDataset``.
        num_processes : int, optional
            Processes that train; None and 1 train in this one.
        backend : {"multiprocessing", "ray"}
            How the processes are started.

        Returns
        -------
        keras.callbacks.History
            Figures are those of all rows.

        Raises
        ------
        UsageError
            If an argument is wrong, or the model, the data or a callback cannot be sent.
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
        """Deprecated: ``InferenceOptimizer.trace``."""
        return _optimizer_instead("trace").trace(self, *args, **kwargs)

    def quantize(self, *args: object, **kwargs: object) -> keras.Model | None:
        """Deprecated: ``InferenceOptimizer.quantize``; with a mode, that of ``keras.Model``."""
        if isinstance(kwargs.get("mode", args[0] if args else None), str):
            return super().quantize(*args, **kwargs)
        return _optimizer_instead("quantize").quantize(self, *args, **kwargs)


def _optimizer_instead(name: str) -> Any:
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
    """A functional model, as ``Model(inputs, outputs)`` makes it."""


@keras.saving.register_keras_serializable(package="bigdl")
class Model(_NanoModel, keras.Model):
    """``keras.Model`` with ``fit(num_processes=...)``: to be subclassed, or of inputs and outputs.

    ``Model(inputs, outputs)`` is a functional model as it is in Keras.

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

    def __init__(self, *args: Any, **kwargs: Any):
        if not _is_functional(args, kwargs):
            super().__init__(*args, **kwargs)
            return
        # Keras would make this class a functional one for everybody.
        _become_functional(type(self))
        FunctionalModel.__init__(self, *args, **kwargs)


def _is_functional(args: tuple, kwargs: dict) -> bool:
    return (
        len(args) == 2
        or (len(args) == 1 and "outputs" in kwargs)
        or ("inputs" in kwargs and "outputs" in kwargs)
    )


def _become_functional(cls: type) -> None:
    """Exchange ``Model`` for its functional relative in the bases of a user's class."""
    if Model in cls.__bases__:
        cls.__bases__ = tuple(FunctionalModel if base is Model else base for base in cls.__bases__)
        return
    for base in cls.__bases__:
        if issubclass(base, Model):
            _become_functional(base)
