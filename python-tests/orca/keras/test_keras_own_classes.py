"""Models whose classes, losses and steps are the program's own, and targets by names."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from refusals import refused

from bigdl.orca.learn.tf2 import Estimator

ops = keras.ops
rng = np.random.default_rng(0)
X = rng.normal(size=(40, 6)).astype("float32")
Y = X[:, :1]


def own_classes():
    """Classes that only this process has, as those of a script or a notebook."""

    class Scale(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, x):
            return x * self.w

    class Net(keras.Model):
        def __init__(self, units, factor=1.0):
            super().__init__()
            self.factor, self.scale = factor, Scale()
            self.out = keras.layers.Dense(units)

        def call(self, x):
            return self.out(self.scale(x)) * self.factor

    def error(y, p):
        return ops.mean((y - p) ** 2)

    return Scale, Net, error


def test_an_instance_and_a_loaded_model_of_own_classes_train_and_predict(tmp_path):
    Scale, _, error = own_classes()
    model = keras.Sequential([keras.Input((6,)), Scale(), keras.layers.Dense(1)])
    model.compile("sgd", error, metrics=[error])
    est = Estimator.from_keras(model=model, backend="local")
    np.testing.assert_allclose(est.predict(X), model.predict(X, verbose=0), rtol=1e-5)
    path = str(tmp_path / "model.keras")
    est.save(path)
    est.load(path, custom_objects={"Scale": Scale, "error": error})
    assert est.fit((X, Y), epochs=1, verbose=0)["loss"][0] > 0
    assert type(est.get_model().layers[0]) is Scale


def test_a_subclassed_instance_keeps_its_arguments_in_the_workers():
    _, Net, error = own_classes()
    model = Net(1, factor=3.0)
    model.compile("sgd", error)
    model(X)
    est = Estimator.from_keras(model=model, backend="local")
    np.testing.assert_allclose(est.predict(X), model.predict(X, verbose=0), rtol=1e-5)
    figures = est.evaluate((X, Y), verbose=0)
    assert figures["validation_loss"] == pytest.approx(model.evaluate(X, Y, verbose=0), rel=1e-5)
    assert figures["val_loss"] == figures["validation_loss"] == figures.get("val_loss")
    assert json.loads(json.dumps(figures)) == {"validation_loss": figures["val_loss"]}
    assert est.num_workers == 1


def two_outputs(as_dict):
    def creator(config):
        keras.utils.set_random_seed(0)
        left = keras.Input((6,))
        reg = keras.layers.Dense(1, name="reg")(left)
        cls = keras.layers.Dense(3, "softmax", name="cls")(left)
        model = keras.Model(left, {"reg": reg, "cls": cls} if as_dict else [reg, cls])
        losses = {"reg": "mse", "cls": "sparse_categorical_crossentropy"}
        model.compile("sgd", loss=losses)
        return model

    return creator


@pytest.mark.parametrize("as_dict", [True, False])
def test_targets_belong_to_outputs_by_their_names(as_dict):
    creator = two_outputs(as_dict)
    cls, expected = rng.integers(0, 3, 40), creator(None)
    ordered = {"reg": Y, "cls": cls} if as_dict else [Y, cls]
    loss = expected.evaluate(X, ordered, batch_size=40, verbose=0, return_dict=True)["loss"]
    est = Estimator.from_keras(model_creator=creator, backend="local")
    figures = est.evaluate((X, {"cls": cls, "reg": Y}), verbose=0)
    assert figures["validation_loss"] == pytest.approx(loss, rel=1e-4)
    if not as_dict:  # as columns of names in another order
        import pandas as pd

        frame = pd.DataFrame({"x": list(X), "cls": cls, "reg": Y[:, 0]})
        names = {"feature_cols": ["x"], "label_cols": ["cls", "reg"]}
        assert est.evaluate(frame, verbose=0, **names)["validation_loss"] == pytest.approx(
            loss, rel=1e-4
        )


def test_targets_of_unknown_names_or_in_another_order_are_refused_by_name():
    est = Estimator.from_keras(model_creator=two_outputs(True), backend="local")
    with refused("model-output", "'class'"):
        est.fit((X, {"class": Y, "reg": Y}), verbose=0)
    wrong = (rng.integers(0, 3, 40), Y - 9)  # cls, reg
    with refused("model-output"):
        est.fit((X, wrong), verbose=0)


class OwnStep(keras.Model):
    """Learns from batches that are dicts."""

    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(1)
        self.mean = keras.metrics.Mean(name="error")

    def build(self, shape=None):
        self.out.build((None, 6))
        self.built = True

    def call(self, x):
        return self.out(x)

    @property
    def metrics(self):
        return [self.mean]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = ops.mean((self(data["x"]) - data["y"]) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.mean.update_state(loss)
        return {"error": self.mean.result()}


def test_elements_that_are_dicts_reach_a_train_step_of_the_models_own():
    def creator(config):
        model = OwnStep()
        model.build()
        model.compile("sgd")
        return model

    dataset = tf.data.Dataset.from_tensor_slices({"x": X, "y": Y}).batch(20)
    est = Estimator.from_keras(model_creator=creator, backend="local")
    errors = est.fit(dataset, epochs=2, verbose=0)["error"]
    assert errors[1] < errors[0]
    with refused("data-structure", "test_step"):
        est.evaluate(dataset, verbose=0)
