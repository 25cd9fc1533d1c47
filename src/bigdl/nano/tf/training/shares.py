"""A model in one of several processes that make the steps of one.

Each batch is that of all processes. A process gets its rows of it together with both numbers, as a
:class:`Share`, and weights its gradients, which are means over its rows, by its fraction of them;
added up they are the gradient of the whole batch. A process that gets no row, of a last batch that
is smaller than the number of processes, computes a row that counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from bigdl.common.errors import UsageError
from bigdl.nano.tf.training.group import Group

__all__ = ["Share", "SharedTraining", "check_losses", "share_of"]

_MEANS = ("sum_over_batch_size", "mean")


class Share(NamedTuple):
    """One process's part of a batch.

    Attributes
    ----------
    mine : tf.Tensor
        Number of rows that count.
    everyone : tf.Tensor
        Number of rows of the whole batch.
    batch
        What a train step takes.
    """

    mine: Any
    everyone: Any
    batch: Any


def share_of(rows: Any, group: Group) -> tuple[Any, Any, Any]:
    """The rows of a batch that are one process's.

    Parameters
    ----------
    rows : tf.Tensor
        Number of rows of the batch.
    group : Group

    Returns
    -------
    first, last : tf.Tensor
        The rows to take: one that does not count if there is none.
    count : tf.Tensor
        Those that count.
    """
    each, more = rows // group.count, rows % group.count
    first = group.rank * each + tf.minimum(tf.cast(group.rank, rows.dtype), more)
    count = each + tf.cast(group.rank < more, rows.dtype)
    first = tf.where(count > 0, first, tf.zeros_like(first))
    return first, first + tf.maximum(count, 1), count


class SharedTraining:
    """Makes a compiled model train and evaluate on shares; call :meth:`take_part` once.

    Parameters
    ----------
    model : keras.Model
    group : Group
    """

    def __init__(self, model: Any, group: Group):
        self._model = model
        self._group = group
        self._fraction: Any = None
        self._suspended = False

    def take_part(self) -> None:
        """Change the model's steps, its optimizer and its figures, of this instance only."""
        model = self._model
        own = vars(model)
        own["train_step"] = self._step(model.train_step)
        own["test_step"] = self._step(model.test_step)
        own["get_metrics_result"] = self._figures(model.get_metrics_result)
        optimizer = model.optimizer
        vars(optimizer)["apply"] = self._apply(optimizer.apply)
        model.train_function = model.test_function = None  # made of the steps as they were

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """What is done meanwhile, by a callback say, is this process's own affair."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def _step(self, step: Callable) -> Callable:
        def shared(data: Any) -> Any:
            if not isinstance(data, Share):
                return step(data)
            fraction = tf.cast(data.mine, tf.float32) / tf.cast(data.everyone, tf.float32)
            before, self._fraction = self._fraction, fraction
            states = [variable.value for variable in self._states()]
            kept = [tf.identity(state) for state in states]
            logs = step(data.batch)
            for state, value in zip(states, kept, strict=True):
                state.assign(tf.where(data.mine > 0, state, value))
            self._fraction = before
            return logs

        return shared

    def _apply(self, apply: Callable) -> Callable:
        def shared(gradients: Any, trainable_variables: Any = None) -> Any:
            gradients = list(gradients)
            if self._fraction is not None:
                gradients = self._group.sum_gradients(gradients, self._fraction)
            return apply(gradients, trainable_variables)

        return shared

    def _figures(self, figures: Callable) -> Callable:
        def merged() -> Any:
            if self._suspended or not tf.executing_eagerly():
                return figures()
            self._average_statistics()
            states = [state.value for state in self._states()]
            own = [np.asarray(state) for state in states]
            for state, total in zip(states, self._group.sum_arrays(own), strict=True):
                state.assign(tf.cast(total, state.dtype))
            found = {
                name: float(np.asarray(v)) if np.ndim(v) == 0 else v
                for name, v in figures().items()
            }
            for state, value in zip(states, own, strict=True):
                state.assign(value)
            return found

        return merged

    def _states(self) -> list:
        return [variable for metric in self._model.metrics for variable in metric.variables]

    def _average_statistics(self) -> None:
        """Moving averages of layers such as BatchNormalization, each of which saw its own rows."""
        variables = [
            variable
            for variable in self._model.non_trainable_weights
            if variable.dtype.startswith("float")
        ]
        totals = self._group.sum_arrays([np.asarray(variable) for variable in variables])
        for variable, total in zip(variables, totals, strict=True):
            variable.assign((total / self._group.count).astype(variable.dtype))


def check_losses(losses: Any) -> None:
    """Refuse losses that are not means over the rows.

    Raises
    ------
    UsageError
    """
    for loss in keras.tree.flatten(losses):
        reduction = getattr(loss, "reduction", "mean")
        if reduction not in _MEANS:
            raise UsageError(
                f"Loss {getattr(loss, 'name', loss)!r} has the reduction {reduction!r}, but "
                "several processes need losses that are means over the rows; give it "
                "reduction='sum_over_batch_size'"
            )
