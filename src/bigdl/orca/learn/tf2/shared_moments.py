"""Moments of BatchNormalization over the rows of all workers.

``keras.layers.BatchNormalization(synchronized=True)``, which Keras has for TensorFlow, asks
``tf.distribute`` for the moments of all replicas, and a worker is one replica to it.  Here such a
layer sends its row count and its sums to the other workers inside the graph of the training step,
and so do the gradients on their way back through them.  N workers normalize as one process does.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from bigdl.orca.learn.tf2.reducer import GradientReducer

__all__ = ["SharedMoments", "synchronized_layers"]


def synchronized_layers(model) -> list:
    """The layers of a model, at any depth, that want the moments of all workers."""
    import keras

    return [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized
    ]


class SharedMoments:
    """Lets the layers of one worker's model know the moments of the whole batch.

    Parameters
    ----------
    reducer : GradientReducer
        Knows what this worker's rows and its loss weigh in a step.
    """

    def __init__(self, reducer: GradientReducer):
        self._reducer = reducer

    def attach(self, model) -> None:
        """Let the layers that want it ask all workers."""
        for layer in synchronized_layers(model):
            # the instance keeps its class, so a file of the model tells nothing of this
            object.__setattr__(layer, "_moments", partial(self._moments, layer))

    def detach(self, model) -> None:
        """Leave the layers as they came."""
        for layer in synchronized_layers(model):
            vars(layer).pop("_moments", None)

    def _moments(self, layer, inputs, mask) -> tuple[Any, Any]:
        """Mean and variance of a layer's inputs on all workers."""
        import tensorflow as tf
        from keras import ops

        if mask is None:
            mean, variance = ops.moments(inputs, axes=layer._reduction_axes)
            count = tf.size(inputs) / tf.size(mean)
        else:
            mean, variance = type(layer)._moments(layer, inputs, mask)
            count = tf.reduce_sum(tf.cast(mask, tf.float64))
        # sums of squares would cancel in the layer's own precision
        count = tf.reshape(tf.cast(count, tf.float64), (1,))
        own_mean = tf.reshape(tf.cast(mean, tf.float64), (-1,))
        own_square = tf.reshape(tf.cast(variance, tf.float64), (-1,)) + own_mean**2
        sums = self._sum(tf.concat([count, count * own_mean, count * own_square], 0))
        count, *sums = tf.split(sums, [1, tf.size(own_mean), tf.size(own_mean)])
        both_mean, both_square = (each / count for each in sums)
        both_variance = tf.maximum(both_square - both_mean**2, 0)
        return tuple(
            tf.reshape(tf.cast(new, old.dtype), tf.shape(old))
            for new, old in ((both_mean, mean), (both_variance, variance))
        )

    def _sum(self, values):
        """The sum over all workers, with its gradient."""
        import tensorflow as tf

        @tf.custom_gradient
        def summed(values):
            return called(self._forward, values), partial(called, self._backward)

        def called(function, values):
            found = tf.numpy_function(function, [values], values.dtype, stateful=True)
            found.set_shape(values.shape)
            return found

        return summed(values)

    def _forward(self, values):
        return self._reducer.sum_array(values, float(self._reducer.has_rows))

    def _backward(self, gradient):
        """The gradient of the batch's loss, as that of this worker's before it is weighed."""
        weight = self._reducer.weight if self._reducer.has_rows else 0.0
        found = self._reducer.sum_array(gradient, weight)
        return found / weight if weight else np.zeros_like(found)
