"""Training loops of users, in several processes or in bfloat16, by decorators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle
import keras
import numpy as np
import tensorflow as tf

from bigdl.common.errors import UsageError, one_line
from bigdl.common.stand_ins import actual
from bigdl.nano.acceleration.structure import flatten, is_tensor
from bigdl.nano.tf.training.fit import processes_of, take_home, weights_of
from bigdl.nano.tf.travel import dumps, packed, unpacked

__all__ = ["nano", "nano_bf16", "nano_multiprocessing", "nano_multiprocessing_loss"]


def nano_bf16(func: Callable) -> Callable:
    """Let a function compute in bfloat16: its positional arguments in floating point are cast.

    Tensors and ndarrays are cast; models and other objects are passed as they are.

    Examples
    --------
    >>> @tf.function
    ... @nano_bf16
    ... def train_step(x, y, model, loss, optimizer): ...
    """

    @functools.wraps(func)
    def cast(*args: Any, **kwargs: Any) -> Any:
        return func(*map(_in_bf16, args), **kwargs)

    return cast


def nano_multiprocessing(func: Callable) -> Callable:
    """Make a train step that of all processes of :func:`nano`: what it returns is theirs together.

    Numbers in floating point that it returns, e.g. the loss, are means over the rows of this
    process, and become those over the rows of all; integers are added up. Outside of :func:`nano`
    it changes nothing.
    """

    @functools.wraps(func)
    def together(*args: Any, mirrored_strategy: Any = None, **kwargs: Any) -> Any:
        return _merged(func(*args, **kwargs))

    return together


def nano_multiprocessing_loss(**kwargs: Any) -> Callable:
    """Make a loss of a function of targets and predictions that returns a loss for each row.

    Parameters
    ----------
    **kwargs
        Of ``keras.losses.Loss``, e.g. ``name``.

    Returns
    -------
    decorator
        Turns the function into a ``keras.losses.Loss`` that is the mean over the batch.
    """

    def decorator(func: Callable) -> Any:
        return _FunctionLoss(func, **kwargs)

    return decorator


def nano(num_processes: int | None = None, backend: str = "multiprocessing") -> Callable:
    """Run a training loop in several processes of this machine.

    Positional arguments are recognized by their kind: a ``keras.Model`` is trained and gets its
    weights; an optimizer adds up the gradients of all processes, each weighted by its rows, and
    gets its state; a ``tf.data.Dataset`` of batches gives each process its rows of every batch.
    All else is pickled. So N processes make the steps of one, as long as losses are means over the
    batch, which is iterated in Python.

    Parameters
    ----------
    num_processes : int
    backend : {"multiprocessing", "ray"}

    Returns
    -------
    decorator
        Of a function whose result in the first process is returned.

    Raises
    ------
    UsageError
        If there is not exactly one model among the arguments, or something cannot be sent.

    Examples
    --------
    >>> @nano(num_processes=2)
    ... def train(model, dataset, loss, optimizer, epochs):
    ...     for _ in range(epochs):
    ...         for x, y in dataset:
    ...             train_step(x, y, model, loss, optimizer)
    """
    processes = processes_of(num_processes, backend)

    def decorator(func: Callable) -> Callable:
        @functools.wraps(func)
        def run(*args: Any, **kwargs: Any) -> Any:
            if processes.count == 1:
                return func(*args, **kwargs)
            return _run(func, processes, args, kwargs)

        return run

    return decorator


class _FunctionLoss(keras.losses.Loss):
    """The mean of a function over the rows of a batch."""

    def __init__(self, func: Callable, name: str | None = None, **kwargs: Any):
        super().__init__(name or func.__name__, **kwargs)
        self._func = func

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """The mean; targets keep their type, where Keras would cast them to that of floats."""
        losses = self.call(y_true, y_pred)
        if sample_weight is not None:
            losses *= tf.cast(sample_weight, losses.dtype)
        if self.reduction in (None, "none"):
            return losses
        return tf.reduce_sum(losses) if self.reduction == "sum" else tf.reduce_mean(losses)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self._func(y_true, y_pred)

    def get_config(self) -> dict:
        return {**super().get_config(), "func": self._func}

    @classmethod
    def from_config(cls, config: dict) -> _FunctionLoss:
        return cls(**config)


def _merged(result: Any) -> Any:
    # The step travels by value, with the globals that it had; this function does not.
    return result if _crew is None else _crew.merged(result)


def _in_bf16(value: Any) -> Any:
    if not is_tensor(value) or not tf.as_dtype(value.dtype).is_floating:
        return value
    return tf.cast(value, tf.bfloat16)


def _run(func: Callable, processes: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    args = tuple(map(actual, args))
    models = [each for each in args if isinstance(each, keras.Model)]
    if len(models) != 1:
        raise UsageError(
            "there should be only one keras.Model in the function parameter list, but got "
            f"{len(models)}"
        )
    import shutil

    from bigdl.common.environment import scratch_directory

    room = scratch_directory("bigdl-keras-loop-")
    try:
        order = (_sendable(func, args, kwargs, room), int(np.random.randint(2**31 - 1)))
        home = processes.run(_work, processes.count, *order)[0]
    finally:
        shutil.rmtree(room, ignore_errors=True)
    take_home(models[0], home["weights"], [])
    for optimizer, state in zip(_optimizers(args), home["optimizers"], strict=True):
        if not optimizer.built:
            optimizer.build(models[0].trainable_variables)
        for variable, value in zip(optimizer.variables, state, strict=True):
            variable.assign(value)
    return home["result"]


def _optimizers(args: tuple) -> list:
    return [each for each in args if isinstance(each, keras.optimizers.Optimizer)]


class _Sent:
    """An argument that is made again where it arrives."""

    def __init__(self, kind: str, content: Any):
        self.kind = kind
        self.content = content


def _sendable(func: Callable, args: tuple, kwargs: Mapping[str, Any], room: Any) -> bytes:
    try:
        return dumps((func, [_sent(each, room) for each in args], dict(kwargs)))
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"The function or its arguments cannot be sent to another process: {one_line(error)}"
        ) from error


def _sent(value: Any, room: Any) -> Any:
    from bigdl.nano.tf.training.feeds import feed_of

    if isinstance(value, keras.Model):
        return _Sent("model", packed(value))
    if isinstance(value, keras.optimizers.Optimizer):
        return _Sent("optimizer", _recipe(value))
    if isinstance(value, tf.data.Dataset):
        common = {"batch_size": None, "steps": None, "epochs": 1, "shuffle": False}
        return _Sent("data", feed_of(value, None, None, class_weight=None, folder=room, **common))
    return value


def _recipe(optimizer: Any) -> tuple:
    state = [np.asarray(each) for each in optimizer.variables] if optimizer.built else []
    return type(optimizer), optimizer.get_config(), state


# What follows runs in the other processes.


def _work(rank: int, count: int, content: bytes, seed: int) -> dict[str, Any] | None:
    global _crew
    from bigdl.nano.tf.training.group import Group

    keras.utils.set_random_seed(seed)
    _crew = _Crew(Group(rank, count), seed)
    func, sent, kwargs = cloudpickle.loads(content)
    model = next(unpacked(e.content) for e in sent if isinstance(e, _Sent) and e.kind == "model")
    args = [_crew.received(each, model) for each in sent]
    result = func(*args, **kwargs)
    if rank:
        return None
    weights, _ = weights_of(model)
    states = [[np.asarray(v) for v in each.variables] for each in _optimizers(tuple(args))]
    return {"weights": weights, "optimizers": states, "result": _plain(result)}


class _Crew:
    """This process and the others, and its fraction of the rows of the batch that is under way."""

    def __init__(self, group: Any, seed: int):
        self._group = group
        self._seed = seed
        self._fraction = tf.Variable(1.0 / group.count, trainable=False)

    def received(self, value: Any, model: Any) -> Any:
        if not isinstance(value, _Sent):
            return value
        if value.kind == "model":
            return model
        if value.kind == "data":
            return _Shares(self, value.content.shares(self._group, self._seed))
        return self._optimizer(*value.content, model)

    def _optimizer(self, cls: type, config: dict, state: list, model: Any) -> Any:
        optimizer = cls.from_config(config)
        optimizer.build(model.trainable_variables)
        for variable, value in zip(optimizer.variables, state, strict=False):
            variable.assign(value)
        apply = optimizer.apply

        def shared(gradients: Any, trainable_variables: Any = None) -> Any:
            summed = self._group.sum_gradients(list(gradients), self._fraction)
            return apply(summed, trainable_variables)

        vars(optimizer)["apply"] = shared
        return optimizer

    def begin(self, share: Any) -> None:
        self._fraction.assign(tf.cast(share.mine, tf.float32) / tf.cast(share.everyone, tf.float32))

    def merged(self, result: Any) -> Any:
        """Nested results of this process as those of all."""
        leaves, structure = flatten(result)
        numbers = [tf.cast(leaf, tf.float64) for leaf in leaves]
        weighted = [
            number * tf.cast(self._fraction, tf.float64) if leaf.dtype.is_floating else number
            for leaf, number in zip(leaves, numbers, strict=True)
        ]
        if not weighted:
            return result
        shapes = [leaf.shape for leaf in leaves]
        total = tf.numpy_function(
            lambda *arrays: [a.astype(np.float64) for a in self._group.sum_arrays(arrays)],
            weighted,
            [tf.float64] * len(weighted),
        )
        merged = []
        for leaf, each, shape in zip(leaves, total, shapes, strict=True):
            each.set_shape(shape)
            merged.append(tf.cast(each, leaf.dtype))
        return structure.rebuild(merged)


class _Shares:
    """A dataset of this process's rows of each batch, for loops of Python."""

    def __init__(self, crew: _Crew, dataset: tf.data.Dataset):
        self._crew = crew
        self._dataset = dataset

    def __iter__(self) -> Iterator:
        for share in self._dataset:
            self._crew.begin(share)
            batch = share.batch
            yield batch[0] if len(batch) == 1 else batch

    def __len__(self) -> int:
        return len(self._dataset)


def _plain(result: Any) -> Any:
    """A result that can go home; None if it cannot."""
    leaves, structure = flatten(result)
    try:
        result = structure.rebuild([np.asarray(leaf) for leaf in leaves]) if leaves else result
        cloudpickle.dumps(result)
    except Exception:
        return None
    return result


_crew: _Crew | None = None
