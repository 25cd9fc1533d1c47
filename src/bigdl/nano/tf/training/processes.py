"""Keras training in several processes: ``fit``, and decorators for custom training loops.

Afterwards the model has the trained weights and optimizer state, as if trained in this process.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import keras
import numpy as np
import tensorflow as tf

from bigdl.common.errors import UsageError, as_usage_error
from bigdl.common.placeholders import resolve_placeholder
from bigdl.common.private_folders import scratch_directory
from bigdl.nano.acceleration.structure import flatten, is_tensor
from bigdl.nano.tf.serialization import (
    PackedModel,
    dumps,
    packed,
    put_state,
    unpacked,
)
from bigdl.nano.tf.training.feeds import Feed, FeedRows, feed_of
from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
from bigdl.runtime.keras_objects import KerasOptimizer
from bigdl.runtime.worker import DriverConnection, Worker
from bigdl.training.checkpoint import Checkpoint
from bigdl.training.keras.callbacks import Rank0CallbackBridge, as_callbacks
from bigdl.training.keras.data import has_own_step
from bigdl.training.keras.loop import KerasFit, KerasFitSettings
from bigdl.training.keras.reducer import GradientReducer, KerasLoss
from bigdl.training.keras.state import array_of, dump_weights, put_optimizers, put_weights
from bigdl.training.position import StoppingCriterion

if TYPE_CHECKING:
    from bigdl.nano.pytorch.training.options import TrainingOptions

_BACKENDS = {"multiprocessing": "subprocess", "ray": "ray"}


def processes_of(num_processes: int | None, backend: str) -> TrainingOptions:
    """Return the training options for a number of processes and a backend.

    Raises
    ------
    UsageError
        If the number or the backend is invalid.
    """
    from bigdl.nano.pytorch.training.options import TrainingOptions

    if backend not in _BACKENDS:
        raise UsageError(
            f"Backend {backend} is not implemented. Choose one of {', '.join(_BACKENDS)}.",
            code="argument-value",
            argument="backend",
            allowed=list(_BACKENDS),
        )
    return TrainingOptions(num_processes, _BACKENDS[backend])


def fit_in_processes(
    model: keras.Model, processes: TrainingOptions, arguments: Mapping[str, Any]
) -> keras.callbacks.History:
    """Train a model in several processes.

    Parameters
    ----------
    model : keras.Model
        Compiled model.
    processes : TrainingOptions
    arguments : mapping
        Arguments of ``keras.Model.fit``.

    Returns
    -------
    keras.callbacks.History

    Raises
    ------
    UsageError
        If the model, the data or a callback cannot be pickled, or an argument is invalid.
    """
    from bigdl.nano.pytorch.training.processes import run_processes

    if not getattr(model, "compiled", False):
        raise UsageError("The model is not compiled; call compile() before fit()", code="state")
    KerasLoss(model)  # refuses losses that cannot be averaged over processes
    verbose = 2 if arguments["verbose"] == "auto" else arguments["verbose"]
    folder = scratch_directory("bigdl-keras-fit-")
    try:
        feeds = _feeds(arguments, folder)
        feed = feeds["data"]
        if not model.built:  # build it here, so that all processes start with the same weights
            model(feed.row[0])
        callbacks = _callbacks(arguments["callbacks"])
        settings = KerasFitSettings(
            stop_at=StoppingCriterion(epochs=arguments["epochs"] - arguments["initial_epoch"]),
            batch_size=0,  # keeps gradients of embeddings sparse
            seed=int(np.random.randint(2**31 - 1)),
            feature_cols=None,
            label_cols=None,
            num_steps=arguments["validation_steps"],
            initial_epoch=arguments["initial_epoch"],
            steps_per_epoch=feed.steps,
            validation_freq=arguments["validation_freq"],
            class_weight=arguments["class_weight"] or None,
            verbose=verbose,
            checkpoint_trigger=None,
        )
        job = _FitJob(packed(model), feeds, _pickled(callbacks), settings)
        result = run_processes(processes, _fit, processes.count, job)[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    snapshot: Checkpoint = result["snapshot"]
    put_weights(model, snapshot.files["model.pt"])
    if model.optimizer is not None:
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        put_optimizers(model, snapshot.files["optimizer.pt"])
    for callback, attributes in zip(callbacks, result["callbacks"], strict=True):
        vars(callback).update(pickle.loads(attributes))
    return _history(model, snapshot, settings, stopped=result["stopped"])


def _feeds(arguments: Mapping[str, Any], folder: Path) -> dict[str, Feed]:
    x, y, weight = arguments["x"], arguments["y"], arguments["sample_weight"]
    held_out = arguments["validation_data"]
    if arguments["validation_split"] and held_out is None:
        (x, y, weight), held_out = _split(x, y, weight, arguments["validation_split"])
    feeds: dict[str, Feed] = {}
    feeds["data"] = feed_of(
        x,
        y,
        weight,
        folder=folder,
        batch_size=arguments["batch_size"],
        steps=arguments["steps_per_epoch"],
        epochs=arguments["epochs"] - arguments["initial_epoch"],
        shuffle=arguments["shuffle"],
    )
    if held_out is None:
        return feeds
    parts = held_out if isinstance(held_out, (tuple, list)) else (held_out,)
    feeds["validation"] = feed_of(
        *parts,
        folder=folder,
        batch_size=arguments["validation_batch_size"] or arguments["batch_size"],
        steps=arguments["validation_steps"],
        steps_argument="validation_steps",
    )
    return feeds


def _split(x: object, y: object, weight: object, fraction: float) -> tuple[tuple, tuple]:
    """Split off the last rows for validation, as in Keras; return training and validation data."""
    leaves, structure = flatten((x, y, weight))
    if not leaves or not 0 < fraction < 1:
        raise UsageError(
            "validation_split must be a number from 0 to 1, and x must hold arrays",
            code="argument-value",
            argument="validation_split",
        )
    first = int(np.floor(len(leaves[0]) * (1 - fraction)))
    parts = [np.asarray(leaf) for leaf in leaves]
    training = structure.rebuild([part[:first] for part in parts])
    return training, structure.rebuild([part[first:] for part in parts])


def _callbacks(callbacks: object) -> list:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise UsageError(
            "callbacks must be a list of callbacks, not a CallbackList",
            code="argument-type",
            argument="callbacks",
        )
    return as_callbacks(callbacks)


def _pickled(callbacks: list) -> bytes:
    copies = [copy.copy(callback) for callback in callbacks]
    for each in copies:
        each._model = None
    with as_usage_error("The callbacks cannot be sent to another process", code="model-copy"):
        return cloudpickle.dumps(copies)


def _history(model, snapshot, settings, *, stopped: bool) -> keras.callbacks.History:
    entries = snapshot.position.epoch_metrics(0, snapshot.position.epochs_with_metrics)
    history = keras.callbacks.History()
    history.set_model(model)
    history.set_params(
        {
            "verbose": settings.verbose,
            "epochs": settings.initial_epoch + settings.stop_at.epochs,
            "steps": entries[-1]["steps"] if entries else None,
        }
    )
    history.on_train_begin()
    for entry in entries:
        history.on_epoch_end(settings.initial_epoch + entry["epoch"] - 1, entry["logs"])
    model.history = history
    model.stop_training = stopped
    return history


# -- in the other processes -----------------------------------------------------------------------


@dataclass
class _FitJob:
    """Picklable call of ``fit`` that every training process receives.

    Attributes
    ----------
    model : PackedModel
    feeds : dict of str to Feed
        ``data``, and ``validation`` if there is one.
    callbacks : bytes
        Pickled callbacks.
    settings : KerasFitSettings
    """

    model: PackedModel
    feeds: Mapping[str, Feed]
    callbacks: bytes
    settings: KerasFitSettings

    def build(self, *, training: bool) -> keras.Model:
        """Return the unpacked model."""
        return unpacked(self.model)


def _fit(rank: int, count: int, job: _FitJob) -> dict[str, Any] | None:
    driver = DriverConnection()
    worker = Worker(rank, count, shards=dict(job.feeds), driver=driver)
    callbacks = pickle.loads(job.callbacks)
    sync = TorchDistributedSync(worker)

    def open_shard(shard, model):
        rows = shard.open(sync, job.settings.seed)
        is_training = shard is worker.shards.get("data")
        rows.elements_are_batches = has_own_step(
            model, "train_step" if is_training else "test_step"
        )
        return rows

    def open_callbacks(callbacks, model, rank, **params):  # callbacks run on rank 0 for all
        return Rank0CallbackBridge(callbacks, model, sync, **params)

    fit = KerasFit(
        worker,
        sync,
        job,
        job.settings,
        callbacks,
        {},
        open_shard=open_shard,
        open_callbacks=open_callbacks,
    )
    fit.epochs.run()
    if rank:
        return None
    return {
        "snapshot": Checkpoint.unpack(*driver.messages["final"]),
        "stopped": bool(fit.model.stop_training),
        "callbacks": [_attributes_of(callback) for callback in callbacks],
    }


def _attributes_of(callback: keras.callbacks.Callback) -> bytes:
    """Pickle the attributes of a callback that can be pickled."""
    kept = {}
    for name, value in vars(callback).items():
        if name == "_model":
            continue
        with suppress(Exception):  # e.g. open files
            pickle.loads(cloudpickle.dumps(value))
            kept[name] = value
    return cloudpickle.dumps(kept)


def nano_bf16(func: Callable) -> Callable:
    """Decorate a function so that its floating-point arguments are cast to bfloat16.

    Positional tensors and ndarrays are cast; models and other objects are passed unchanged.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from bigdl.nano.tf.keras import nano_bf16
    >>> @tf.function
    ... @nano_bf16
    ... def train_step(x, y):
    ...     return tf.reduce_mean((x - y) ** 2)
    >>> train_step(tf.constant([1.0, 2.0]), tf.constant([1.0, 4.0])).dtype
    tf.bfloat16
    """

    @_wraps(func)
    def cast(*args: object, **kwargs: object) -> object:
        return func(*map(_in_bf16, args), **kwargs)

    return cast


def nano_multiprocessing(func: Callable) -> Callable:
    """Decorate a train step so that its results are combined over all processes of :func:`nano`.

    Floating-point results, e.g. the loss, must be means over the rows of this process and become
    means over the rows of all; integers are summed. Outside of :func:`nano` it has no effect.

    Examples
    --------
    >>> import keras
    >>> import tensorflow as tf
    >>> from bigdl.nano.tf.keras import nano_multiprocessing
    >>> @nano_multiprocessing
    ... def train_step(x, y, model, loss, optimizer):
    ...     with tf.GradientTape() as tape:
    ...         value = loss(y, model(x, training=True))
    ...     gradients = tape.gradient(value, model.trainable_variables)
    ...     optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    ...     return value
    >>> layer = keras.layers.Dense(1, kernel_initializer="zeros")
    >>> model = keras.Sequential([keras.Input((2,)), layer])
    >>> x, y = tf.ones((4, 2)), tf.ones((4, 1))
    >>> float(train_step(x, y, model, keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.1)))
    1.0
    """

    @_wraps(func)
    def together(*args: object, mirrored_strategy: object = None, **kwargs: object) -> object:
        return _merged(func(*args, **kwargs))

    return together


def nano_multiprocessing_loss(**kwargs: Any) -> Callable:
    """Return a decorator that turns a per-row loss function into a ``keras.losses.Loss``.

    Parameters
    ----------
    **kwargs
        Arguments of ``keras.losses.Loss``, e.g. ``name``.

    Returns
    -------
    decorator
        Decorator of a function of targets and predictions that returns a loss for each row. The
        resulting ``keras.losses.Loss`` is the mean over the batch.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from bigdl.nano.tf.keras import nano_multiprocessing_loss
    >>> @nano_multiprocessing_loss()
    ... def squares(y_true, y_pred):
    ...     return tf.reduce_mean((y_true - y_pred) ** 2, axis=-1)
    >>> float(squares(tf.constant([[1.0], [2.0]]), tf.constant([[1.0], [4.0]])))
    2.0
    """
    return functools.partial(_FunctionLoss, **kwargs)


def nano(num_processes: int | None = None, backend: str = "multiprocessing") -> Callable:
    """Return a decorator that runs a training loop in several processes of this machine.

    Positional arguments are handled by type. The ``keras.Model`` is trained and receives the
    weights. An optimizer sums the gradients of all processes, weighted by their rows, and receives
    the state. A ``tf.data.Dataset`` of batches yields each process its rows of every batch. All
    other arguments are pickled. So N processes compute the steps of one, if losses are means over
    the batch and the dataset is iterated in Python.

    Parameters
    ----------
    num_processes : int
    backend : {"multiprocessing", "ray"}

    Returns
    -------
    decorator
        Decorator of the training function. It returns the function's result in the first process.

    Raises
    ------
    UsageError
        If there is not exactly one model among the arguments, or one cannot be pickled.

    Examples
    --------
    >>> import keras
    >>> import tensorflow as tf
    >>> from bigdl.nano.tf.keras import nano
    >>> @nano(num_processes=1)  # 2: two processes, each with half of the rows of a batch
    ... def train(model, dataset, loss, optimizer, epochs):
    ...     for _ in range(epochs):
    ...         for x, y in dataset:
    ...             with tf.GradientTape() as tape:
    ...                 value = loss(y, model(x))
    ...             gradients = tape.gradient(value, model.trainable_variables)
    ...             optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    >>> layer = keras.layers.Dense(1, kernel_initializer="zeros")
    >>> model = keras.Sequential([keras.Input((2,)), layer])
    >>> x = tf.random.uniform((64, 2))
    >>> y = tf.reduce_sum(x, axis=1, keepdims=True)
    >>> dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    >>> loss = keras.losses.MeanSquaredError()
    >>> train(model, dataset, loss, keras.optimizers.Adam(0.05), 20)
    >>> bool(loss(y, model(x)) < 0.1)  # the model is trained
    True
    """
    processes = processes_of(num_processes, backend)

    def decorator(func: Callable) -> Callable:
        @_wraps(func)
        def run(*args: object, **kwargs: object) -> object:
            if processes.count == 1:
                return func(*args, **kwargs)
            return _run(func, processes, args, kwargs)

        return run

    return decorator


def _wraps(func: Callable) -> Callable:
    """Return ``functools.wraps(func)`` that copies no attributes, for a ``tf.function``."""
    return functools.wraps(func, updated=())


class _FunctionLoss(keras.losses.Loss):
    """Loss that is the mean of a function over the rows of a batch."""

    def __init__(self, func: Callable, name: str | None = None, **kwargs: Any):
        super().__init__(name or func.__name__, **kwargs)
        self._func = func

    def __call__(
        self, y_true: tf.Tensor, y_pred: tf.Tensor, sample_weight: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Return the mean loss; unlike in Keras, targets are not cast to floating point."""
        losses = self.call(y_true, y_pred)
        if sample_weight is not None:
            losses *= tf.cast(sample_weight, losses.dtype)
        if self.reduction in (None, "none"):
            return losses
        return tf.reduce_sum(losses) if self.reduction == "sum" else tf.reduce_mean(losses)

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return self._func(y_true, y_pred)

    def get_config(self) -> dict:
        return {**super().get_config(), "func": self._func}

    @classmethod
    def from_config(cls, config: dict) -> _FunctionLoss:
        func = config["func"]  # Keras writes a function as a dict
        if isinstance(func, dict):
            func = keras.saving.deserialize_keras_object(func)
        return cls(**{**config, "func": func})


def _merged(result: object) -> object:
    # A train step is pickled by value with its globals, but this function by reference.
    return result if _session is None else _session.merged(result)


def _in_bf16(value: Any) -> object:
    if not is_tensor(value) or not tf.as_dtype(value.dtype).is_floating:
        return value
    return tf.cast(value, tf.bfloat16)


def _run(
    func: Callable, processes: TrainingOptions, args: tuple, kwargs: Mapping[str, Any]
) -> object:
    from bigdl.nano.pytorch.training.processes import run_processes

    args = tuple(map(resolve_placeholder, args))
    models = [each for each in args if isinstance(each, keras.Model)]
    if len(models) != 1:
        raise UsageError(
            "there should be only one keras.Model in the function parameter list, but got "
            f"{len(models)}",
            code="argument-value",
        )
    folder = scratch_directory("bigdl-keras-loop-")
    try:
        call = _packed_call(func, args, kwargs, folder)
        seed = int(np.random.randint(2**31 - 1))
        trained = run_processes(processes, _work, processes.count, call, seed)[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    put_weights(models[0], trained["weights"])
    for optimizer, state in zip(_optimizers(args), trained["optimizers"], strict=True):
        put_state(optimizer, state, models[0])
    return trained["result"]


def _optimizers(args: tuple) -> list:
    return [each for each in args if isinstance(each, keras.optimizers.Optimizer)]


def _packed_call(func: Callable, args: tuple, kwargs: Mapping[str, Any], folder: Path) -> bytes:
    model = next(each for each in args if isinstance(each, keras.Model))

    def sent(value: object) -> object:
        if isinstance(value, keras.Model):
            return packed(value)
        if isinstance(value, keras.optimizers.Optimizer):
            return KerasOptimizer.of(value, model)
        return feed_of(value, folder=folder) if isinstance(value, tf.data.Dataset) else value

    with as_usage_error(
        "The function or its arguments cannot be sent to another process", code="model-copy"
    ):
        return dumps((func, list(map(sent, args)), dict(kwargs)))


# -- in the other processes -----------------------------------------------------------------------


def _work(rank: int, count: int, call: bytes, seed: int) -> dict[str, Any] | None:
    global _session
    keras.utils.set_random_seed(seed)
    _session = _ProcessSession(TorchDistributedSync(Worker(rank, count)), seed)
    func, sent, kwargs = cloudpickle.loads(call)
    model = next(unpacked(each) for each in sent if isinstance(each, PackedModel))
    args = tuple(_session.received(each, model) for each in sent)
    optimizers = _optimizers(args)
    _session.reducer.attach(model, optimizers)
    result = func(*args, **kwargs)
    if rank:
        return None
    states = [[array_of(variable) for variable in each.variables] for each in optimizers]
    return {"weights": dump_weights(model), "optimizers": states, "result": _plain(result)}


class _ProcessSession:
    """State of one training process: its batches, gradient reduction and merging of results."""

    def __init__(self, sync: GradientSync, seed: int):
        sync.start()
        self._sync, self._seed = sync, seed
        self.reducer = GradientReducer(sync, 0)
        self.reducer.weight = 1.0 / sync.world_size

    def received(self, value: object, model: keras.Model) -> object:
        """Unpack one argument of the training function."""
        if isinstance(value, PackedModel):
            return model
        if isinstance(value, KerasOptimizer):
            return value.made(model)
        if isinstance(value, Feed):
            return _LocalBatches(self.reducer, value.open(self._sync, self._seed))
        return value

    def merged(self, result: object) -> object:
        """Combine nested results over all processes: means of floats, sums of integers."""
        leaves, structure = flatten(result)
        if not leaves:
            return result
        are_means = [leaf.dtype.is_floating for leaf in leaves]

        def summed(*arrays):
            weight = self.reducer.weight
            parts = [
                array * weight if is_mean else array
                for array, is_mean in zip(arrays, are_means, strict=True)
            ]
            return self._sync.sum_arrays(parts, 1.0)

        sent = [tf.cast(leaf, tf.float64) for leaf in leaves]
        sums = tf.numpy_function(summed, sent, [tf.float64] * len(sent))
        merged = []
        for leaf, each in zip(leaves, tf.nest.flatten(sums), strict=True):  # eager: no list of one
            each.set_shape(leaf.shape)
            merged.append(tf.cast(each, leaf.dtype))
        return structure.rebuild(merged)


class _LocalBatches:
    """Iterable over this process's rows of each batch, for Python loops."""

    def __init__(self, reducer: GradientReducer, rows: FeedRows):
        self._reducer, self._rows = reducer, rows
        self._passes = itertools.count()

    def __iter__(self) -> Iterator:
        for part in self._rows.parts(next(self._passes), 0, wrap=False):
            self._reducer.weight = part.rows / part.total
            self._reducer.has_rows = bool(part.rows)
            # a process without rows computes one row with weight 0
            batch = part.batch if part.rows else self._rows.example(None, None)
            batch = keras.tree.map_structure(tf.convert_to_tensor, batch)
            yield batch[0] if len(batch) == 1 else batch

    def __len__(self) -> int:
        return len(self._rows)


def _plain(result: object) -> object:
    """Return a result as picklable arrays, or None if it cannot be pickled."""
    leaves, structure = flatten(result)
    try:
        result = structure.rebuild([np.asarray(leaf) for leaf in leaves]) if leaves else result
        cloudpickle.dumps(result)
    except Exception:
        return None
    return result


_session: _ProcessSession | None = None
