"""Adam for models with large embeddings and dense layers."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from bigdl.common.errors import UsageError


@keras.saving.register_keras_serializable(package="bigdl")
class SparseAdam(keras.optimizers.Adam):
    """Adam (Kingma and Ba, 2015) that updates only the rows in a sparse gradient.

    For a ``tf.IndexedSlices``, the gradient of an embedding, only the rows in it and their moments
    are updated ("lazy Adam"). Dense gradients are updated exactly like in Keras' Adam.

    Parameters
    ----------
    learning_rate : float or schedule
    beta_1, beta_2 : float
        Decay rates of the first and second moment.
    epsilon : float
    amsgrad : bool
        Not supported.
    name : str
    **kwargs
        Further arguments of ``keras.optimizers.Adam``.

    Raises
    ------
    UsageError
        If `amsgrad` is True.

    Examples
    --------
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> from bigdl.nano.tf.keras.layers import Embedding
    >>> from bigdl.nano.tf.optimizers import SparseAdam
    >>> layer, optimizer = Embedding(1000, 8), SparseAdam(learning_rate=0.01)
    >>> with tf.GradientTape() as tape:
    ...     loss = tf.reduce_sum(layer(tf.constant([3, 7])))
    >>> before = layer.embeddings.numpy().copy()
    >>> optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
    >>> np.flatnonzero((layer.embeddings.numpy() != before).any(axis=1))  # only rows of the batch
    array([3, 7])
    """

    def __init__(
        self,
        learning_rate: object = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        name: str = "SparseAdam",
        **kwargs: Any,
    ):
        if amsgrad:
            raise UsageError(
                "SparseAdam does not support amsgrad; use keras.optimizers.Adam",
                code="unsupported",
                argument="amsgrad",
            )
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, name=name, **kwargs)

    def update_step(
        self, gradient: object, variable: keras.Variable, learning_rate: object
    ) -> None:
        """Update one variable."""
        if not isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, learning_rate)
            return
        index = self._get_variable_index(variable)
        momentum, velocity = (each[index].value for each in (self._momentums, self._velocities))
        rows, values = _summed_by_row(gradient)
        dtype = variable.dtype
        values = tf.cast(values, dtype)
        step = tf.cast(self.iterations + 1, dtype)
        mean = self.beta_1 * tf.gather(momentum, rows) + (1 - self.beta_1) * values
        square = self.beta_2 * tf.gather(velocity, rows) + (1 - self.beta_2) * values**2
        rate = tf.cast(learning_rate, dtype) * tf.sqrt(1 - tf.pow(self.beta_2, step))
        rate /= 1 - tf.pow(self.beta_1, step)
        momentum.scatter_update(tf.IndexedSlices(mean, rows))
        velocity.scatter_update(tf.IndexedSlices(square, rows))
        change = rate * mean / (tf.sqrt(square) + self.epsilon)
        self.assign_sub(variable, tf.IndexedSlices(change, rows))


def _summed_by_row(gradient: tf.IndexedSlices) -> tuple[Any, Any]:
    """Sum the values of a sparse gradient by row; return the unique row indices and the sums."""
    rows, segments = tf.unique(gradient.indices)
    return rows, tf.math.unsorted_segment_sum(gradient.values, segments, tf.shape(rows)[0])
