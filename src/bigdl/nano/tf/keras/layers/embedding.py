"""Embedding layer with sparse gradients."""

import warnings
from typing import Any

import keras


@keras.saving.register_keras_serializable(package="bigdl")
class Embedding(keras.layers.Embedding):
    """Embedding layer whose gradient contains only the rows used in a batch.

    A regularizer of the whole table would have a gradient for every row. So it is applied to the
    vectors of the batch instead, with a warning.

    Parameters
    ----------
    input_dim, output_dim : int
        Vocabulary size, and length of the vectors.
    embeddings_initializer, embeddings_constraint, mask_zero
        See ``keras.layers.Embedding``.
    embeddings_regularizer
        Used as `activity_regularizer`.
    activity_regularizer
        Regularizer of the vectors of a batch.
    input_length : int, optional
        Accepted for compatibility; Keras 3 ignores it.
    **kwargs
        Further arguments of ``keras.layers.Embedding``.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from bigdl.nano.tf.keras.layers import Embedding
    >>> layer = Embedding(1000, 8, activity_regularizer="l2")
    >>> with tf.GradientTape() as tape:
    ...     loss = tf.reduce_sum(layer(tf.constant([3, 7])))
    >>> gradient = tape.gradient(loss, layer.embeddings)
    >>> gradient.indices.numpy().tolist(), gradient.dense_shape.numpy().tolist()
    ([3, 7], [1000, 8])
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: object = "uniform",
        embeddings_regularizer: object = None,
        activity_regularizer: object = None,
        embeddings_constraint: object = None,
        mask_zero: bool = False,
        input_length: int | None = None,
        **kwargs: Any,
    ):
        if embeddings_regularizer is not None:
            warnings.warn(
                "embeddings_regularizer makes the gradient of an embedding dense, so it is applied "
                "to the vectors of the batch as activity_regularizer",
                stacklevel=2,
            )
            if activity_regularizer is None:
                activity_regularizer = embeddings_regularizer
        super().__init__(
            input_dim,
            output_dim,
            embeddings_initializer=embeddings_initializer,
            embeddings_constraint=embeddings_constraint,
            mask_zero=mask_zero,
            **kwargs,
        )
        self.activity_regularizer = keras.regularizers.get(activity_regularizer)

    def get_config(self) -> dict:
        config = super().get_config()
        config["activity_regularizer"] = keras.regularizers.serialize(self.activity_regularizer)
        return config
