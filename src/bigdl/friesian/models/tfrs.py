"""Models of TensorFlow Recommenders, for training on several workers."""

from typing import Any

from bigdl.common.errors import UsageError, require


def TFRSModel(tfrs_model: Any) -> Any:
    """A Keras model around one of TensorFlow Recommenders, whose losses are means of its rows.

    Parameters
    ----------
    tfrs_model : tensorflow_recommenders.models.Model
        Not compiled.  The losses of its tasks are set to no reduction: what its
        ``compute_loss`` returns for each row is averaged here, and the regularisation added.

    Returns
    -------
    keras.Model
        Of the Keras that the model is made of.  It reports ``loss``, ``regularization_loss`` and
        ``total_loss``.

    Raises
    ------
    MissingExtraError
        If TensorFlow is not installed.
    UsageError
        If it is no such model.

    Examples
    --------
    >>> import keras
    >>> import tensorflow as tf
    >>> from bigdl.friesian.models import TFRSModel
    >>> class Recommender(keras.Model):  # stands for one of tensorflow_recommenders.models
    ...     def compute_loss(self, inputs, training=False):
    ...         return tf.constant([1.0, 3.0])  # of each row
    >>> model = TFRSModel(Recommender())
    >>> {name: float(figure) for name, figure in model.test_step({"user": [1, 2]}).items()}
    {'loss': 2.0, 'regularization_loss': 0.0, 'total_loss': 2.0}
    """
    tensorflow = require("tensorflow", "tf")
    base = _keras_model_class(tfrs_model)
    if base is None or not callable(getattr(tfrs_model, "compute_loss", None)):
        raise UsageError(
            "tfrs_model should be a model of TensorFlow Recommenders with a compute_loss, got "
            f"{type(tfrs_model).__name__}",
            code="model-type",
        )
    return _wrapped(tensorflow, base, tfrs_model)


def _keras_model_class(model: Any) -> type | None:
    """The class Model of the Keras that a model is made of, of either generation."""
    models = (each for each in type(model).__mro__ if each.__name__ == "Model")
    packages = ("keras", "tf_keras")
    return next((each for each in models if each.__module__.split(".")[0] in packages), None)


def _losses_per_row(model: Any) -> None:
    """Set the losses of the tasks that a model holds to no reduction."""
    layers = getattr(model, "_flatten_layers", None)
    for layer in layers() if layers is not None else model._layers:
        loss = getattr(layer, "_loss", None)
        if loss is not None and hasattr(loss, "reduction"):
            loss.reduction = "none"


def _wrapped(tf: Any, base: type, inner: Any) -> Any:
    _losses_per_row(inner)

    class RowwiseModel(base):
        def __init__(self):
            super().__init__()
            self.model = inner

        def call(self, inputs):
            return self.model(inputs)

        def _figures(self, inputs, training):
            loss = tf.reduce_mean(self.model.compute_loss(inputs, training=training))
            extra = tf.add_n(self.model.losses) if self.model.losses else tf.zeros_like(loss)
            return {"loss": loss, "regularization_loss": extra, "total_loss": loss + extra}

        def _reported(self, figures):
            return {each.name: each.result() for each in self.model.metrics} | figures

        def train_step(self, inputs):
            with tf.GradientTape() as tape:
                figures = self._figures(inputs, True)
            weights = self.model.trainable_variables
            gradients = tape.gradient(figures["total_loss"], weights)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return self._reported(figures)

        def test_step(self, inputs):
            return self._reported(self._figures(inputs, False))

    return RowwiseModel()
