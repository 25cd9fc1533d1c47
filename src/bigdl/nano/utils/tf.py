"""Helpers for Keras models, under the names of BigDL 2.x."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from bigdl.common.errors import UsageError, require

require("tensorflow", "nano,tf")
require("keras", "nano,tf")

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from bigdl.common.placeholders import resolve_placeholder  # noqa: E402
from bigdl.nano.lazy_names import public_names  # noqa: E402
from bigdl.nano.tf.serialization import compiled_like, is_of_keras  # noqa: E402
from bigdl.runtime.launch import launch  # noqa: E402

if TYPE_CHECKING:
    pass

T = TypeVar("T")

KERAS_VERSION_LESS_2_9 = KERAS_VERSION_LESS_2_10 = False


def patch_attrs(target: T, source: keras.Model) -> T:
    """Copy the public attributes and methods that a user added to `source` to `target`.

    Existing attributes of the object stay.

    Parameters
    ----------
    target : object
    source : keras.Model

    Returns
    -------
    object
        `target`.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> import keras
    >>> from bigdl.nano.utils.tf import patch_attrs
    >>> model = keras.Sequential()
    >>> model.labels = ["cat", "dog"]
    >>> list(patch_attrs(SimpleNamespace(), model).labels)
    ['cat', 'dog']
    """
    source = resolve_placeholder(source)
    classes = [each for each in type(source).__mro__ if not is_of_keras(each)]
    names = set(vars(source)).union(*map(vars, classes))
    for name in sorted(names - set(dir(keras.Model()))):
        if not name.startswith("_") and not hasattr(target, name):
            setattr(target, name, getattr(source, name))
    return target


def patch_compiled(target: keras.Model, source: keras.Model) -> keras.Model:
    """Compile `target` for evaluation like `source`, with copies of its losses and metrics.

    Parameters
    ----------
    target : keras.Model
    source : keras.Model
        If it was not compiled, `target` stays unchanged.

    Returns
    -------
    keras.Model
        `target`.

    Examples
    --------
    >>> import keras
    >>> from bigdl.nano.utils.tf import patch_compiled
    >>> source = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> source.compile(loss="mse")
    >>> target = patch_compiled(keras.models.clone_model(source), source)
    >>> target.evaluate(keras.ops.zeros((4, 2)), keras.ops.ones((4, 1)), verbose=0)
    1.0
    """
    return compiled_like(target, resolve_placeholder(source))


def patch_compiled_and_attrs(target: keras.Model, source: keras.Model) -> keras.Model:
    """Call :func:`patch_compiled` and :func:`patch_attrs`.

    Examples
    --------
    >>> import keras
    >>> from bigdl.nano.utils.tf import patch_compiled_and_attrs
    >>> source = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> source.compile(loss="mse")
    >>> source.version = 3
    >>> target = patch_compiled_and_attrs(keras.models.clone_model(source), source)
    >>> target.compiled, target.version
    (True, 3)
    """
    return patch_attrs(patch_compiled(target, source), source)


class MultiprocessingBackend:
    """Backend that runs a function in new processes of this machine.

    See :func:`bigdl.runtime.launch.launch` for how they start and end.

    Examples
    --------
    >>> from bigdl.nano.utils.tf import MultiprocessingBackend
    >>> MultiprocessingBackend().run(max, args=[3, 5], nprocs=1)
    [5]
    """

    def setup(self) -> None:
        """Do nothing; the backend needs no preparation."""

    def run(
        self,
        target: Callable,
        args: Iterable[Any] = (),
        nprocs: int = 1,
        envs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a function in every process and return the results in rank order.

        Parameters
        ----------
        target : callable
            Function called as ``target(*args)``; it may be defined in a script or a notebook.
        args : iterable
        nprocs : int
            Number of processes.
        envs : sequence of mappings, optional
            Environment variables to add, one mapping per process.

        Returns
        -------
        list

        Raises
        ------
        UsageError
            If the length of `envs` is not `nprocs`.
        WorkerError
            If `target` raised.
        """
        if envs is not None and len(envs) != nprocs:
            raise UsageError(
                f"envs must be one for each of {nprocs} processes, got {len(envs)}",
                code="argument-value",
                argument="envs",
            )
        return launch(_call, nprocs, (target, tuple(args), envs))

    def shutdown(self) -> None:
        """Do nothing; no process remains after a run."""


def _call(rank: int, target: Callable, args: tuple, envs: Sequence[Mapping] | None) -> object:
    if envs is not None:
        os.environ.update({name: str(value) for name, value in envs[rank].items()})
    return target(*args)


def as_dataset(
    x: Any,
    y: Any = None,
    batch_size: int | None = None,
) -> tf.data.Dataset:
    """Return rows of ``x`` and ``y`` as a ``tf.data.Dataset`` of ``(x, y)``, or of ``x`` alone.

    Parameters
    ----------
    x : array, tensor, nest of them, or tf.data.Dataset
    y : array, tensor, nest of them, or tf.data.Dataset, optional
        Targets; a dataset if and only if `x` is one.
    batch_size : int, optional
        Rows of an element. Default: single rows; elements of a dataset stay as they are.

    Returns
    -------
    tf.data.Dataset

    Raises
    ------
    UsageError
        If only one of `x` and `y` is a dataset, or their numbers of rows differ.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.utils.tf import as_dataset
    >>> dataset = as_dataset(np.ones((5, 2)), np.zeros(5), batch_size=4)
    >>> [tuple(x.shape) for x, y in dataset]
    [(4, 2), (1, 2)]
    """
    both = (x,) if y is None else (x, y)
    are_datasets = [isinstance(each, tf.data.Dataset) for each in both]
    if len(set(are_datasets)) > 1:
        types = " and ".join(type(each).__name__ for each in both)
        raise UsageError(
            f"x and y must both be arrays or both be datasets, got {types}",
            code="argument-conflict",
            argument="y",
        )
    if are_datasets[0]:
        dataset = x if y is None else tf.data.Dataset.zip((x, y))
    else:
        rows = sorted({len(leaf) for leaf in tf.nest.flatten(both)})
        if len(rows) > 1:
            raise UsageError(
                f"x and y must have the same number of rows, got {rows}", code="data-shape"
            )
        dataset = tf.data.Dataset.from_tensor_slices(both if y is not None else x)
    return dataset if batch_size is None else dataset.batch(batch_size)


__all__ = ["KERAS_VERSION_LESS_2_9", "KERAS_VERSION_LESS_2_10", *public_names(__name__)]
