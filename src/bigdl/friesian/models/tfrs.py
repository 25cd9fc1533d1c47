"""Adapter of TensorFlow Recommenders models, for training on several workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigdl.common.errors import UsageError, require

if TYPE_CHECKING:
    from types import ModuleType

    import keras


def TFRSModel(tfrs_model: keras.Model) -> keras.Model:
    """Wrap a TensorFlow Recommenders model as a Keras model with per-row losses.

    Parameters
    ----------
    tfrs_model : tensorflow_recommenders.models.Model
        Uncompiled model. The losses of its tasks are set to no reduction. The wrapper averages the
        per-row result of ``compute_loss`` and adds the regularisation.

    Returns
    -------
    keras.Model
        Model of the same Keras generation. It reports ``loss``, ``regularization_loss`` and
        ``total_loss``.

    Raises
    ------
    MissingExtraError
        If TensorFlow is not installed.
    UsageError
        If `tfrs_model` is not such a model.

    Examples
    --------
    >>> import keras
    >>> import tensorflow as tf
    >>> from bigdl.friesian.models import TFRSModel
    >>> class RatingModel(keras.Model):  # in place of a tensorflow_recommenders.models.Model
    ...     def compute_loss(self, inputs, training=False):
    ...         return tf.constant([1.0, 3.0])  # one loss per row
    >>> model = TFRSModel(RatingModel())
    >>> {name: float(value) for name, value in model.test_step({"user": [1, 2]}).items()}
    {'loss': 2.0, 'regularization_loss': 0.0, 'total_loss': 2.0}
    """
    tensorflow = require("tensorflow", "tf")
    base = _keras_model_class(tfrs_model)
    if base is None or not callable(getattr(tfrs_model, "compute_loss", None)):
        raise UsageError(
            "tfrs_model should be a TensorFlow Recommenders model with a compute_loss, got "
            f"{type(tfrs_model).__name__}",
            code="model-type",
        )
    return _wrapped(tensorflow, base, tfrs_model)


def _keras_model_class(model: object) -> type | None:
    """Return the ``Model`` base class of a model, from ``keras`` or ``tf_keras``, or None."""
    models = (each for each in type(model).__mro__ if each.__name__ == "Model")
    packages = ("keras", "tf_keras")
    return next((each for each in models if each.__module__.split(".")[0] in packages), None)


def _losses_per_row(model: keras.Model) -> None:
    """Disable the reduction of the losses of a model's tasks, so that each row has a loss."""
    layers = getattr(model, "_flatten_layers", None)
    for layer in layers() if layers is not None else model._layers:
        loss = getattr(layer, "_loss", None)
        if loss is not None and hasattr(loss, "reduction"):
            loss.reduction = "none"


def _wrapped(tf: ModuleType, base: type, inner: keras.Model) -> keras.Model:
    _losses_per_row(inner)

    class RowwiseModel(base):
        def __init__(self):
            super().__init__()
            self.model = inner

        def call(self, inputs):
            return self.model(inputs)

        def _step_losses(self, inputs, training):
            loss = tf.reduce_mean(self.model.compute_loss(inputs, training=training))
            extra = tf.add_n(self.model.losses) if self.model.losses else tf.zeros_like(loss)
            return {"loss": loss, "regularization_loss": extra, "total_loss": loss + extra}

        def _with_metrics(self, losses):
            return {each.name: each.result() for each in self.model.metrics} | losses

        def train_step(self, inputs):
            with tf.GradientTape() as tape:
                losses = self._step_losses(inputs, True)
            weights = self.model.trainable_variables
            gradients = tape.gradient(losses["total_loss"], weights)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return self._with_metrics(losses)

        def test_step(self, inputs):
            return self._with_metrics(self._step_losses(inputs, False))

    return RowwiseModel()
