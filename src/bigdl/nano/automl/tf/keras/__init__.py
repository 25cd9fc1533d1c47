"""Keras models whose arguments may be search spaces."""

from bigdl.nano.automl.tf.keras.models import Model, Sequential

__all__ = ["Model", "Sequential"]
