"""Pickling of Keras objects by value, with custom classes and functions."""

import functools
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from refusals import refused

from bigdl.runtime.keras_objects import KerasArchive
from bigdl.runtime.serialization import dumps_by_value

ops = keras.ops
X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
Y = np.ones((8, 1), "float32")


def copy_of(value):
    return pickle.loads(dumps_by_value(value))


def outputs(model, *inputs):
    return keras.tree.map_structure(ops.convert_to_numpy, model(*inputs))


def compiled(*layers, **arguments):
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **arguments})
    return model


def check_copy(model, *inputs):
    copy = copy_of(model)
    assert copy.built
    assert copy.compiled
    pairs = zip(
        keras.tree.flatten(outputs(model, *inputs)),
        keras.tree.flatten(outputs(copy, *inputs)),
        strict=True,
    )
    for expected, result in pairs:
        np.testing.assert_allclose(result, expected, rtol=1e-5)
    return copy


def scale(factor, name="Scale"):
    class Layer(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, x):
            return x * self.w * factor

    Layer.__name__ = name
    return Layer


def test_a_layer_with_build_and_one_that_takes_no_arguments_of_keras_are_copied():
    class Power(keras.layers.Layer):
        def __init__(self, exponent):
            super().__init__()
            self.exponent = exponent

        def call(self, x):
            return ops.abs(x) ** self.exponent

    check_copy(compiled(scale(2.0)(), Power(3)), X)


def test_classes_and_functions_of_one_name_stay_apart():
    def relu(x):
        return x * 7

    dense = functools.partial(keras.layers.Dense, 3)
    layers = [scale(2.0)(), scale(3.0)(), dense(activation=relu), dense(activation="relu")]
    check_copy(compiled(*layers), X)


def test_lambdas_keep_what_they_refer_to():
    factor = 3.0
    layers = [
        keras.layers.Lambda(lambda x: ops.abs(x) * factor),
        keras.layers.Dense(3, activation=lambda x: ops.tanh(x) * factor),
    ]
    model = compiled(*layers, loss=lambda y, p: ops.mean(ops.abs(y - p)) * factor)
    copy = check_copy(model, X)
    assert copy.evaluate(X, Y, verbose=0) == pytest.approx(model.evaluate(X, Y, verbose=0))
    assert layers[1].activation.__name__ == "<lambda>"  # the program's own is as it was


def test_what_a_model_was_compiled_with_is_copied():
    class Focal(keras.losses.Loss):
        def __init__(self, gamma=2.0, **options):
            super().__init__(**options)
            self.gamma = gamma

        def call(self, y, p):
            return ops.mean(ops.abs(y - p) ** self.gamma, -1)

        def get_config(self):
            return {**super().get_config(), "gamma": self.gamma}

    class Difference(keras.metrics.Mean):
        def update_state(self, y, p, sample_weight=None):
            return super().update_state(ops.mean(y - p))

    class Halving(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self, rate):
            self.rate = rate

        def __call__(self, step):
            return self.rate / (1 + ops.cast(step, "float32"))

        def get_config(self):
            return {"rate": self.rate}

    class Own(keras.optimizers.SGD):
        pass

    def error(y, p, times=1.0):
        return ops.mean((y - p) ** 2) * times

    model = compiled(optimizer=Own(Halving(0.1)), loss=Focal(3.0), metrics=[Difference(), error])
    model.fit(X, Y, epochs=2, verbose=0)
    copy = check_copy(model, X)
    assert copy.evaluate(X, Y, verbose=0) == pytest.approx(model.evaluate(X, Y, verbose=0))
    assert type(copy.optimizer) is Own
    assert int(copy.optimizer.iterations) == 2
    partial = compiled(loss=functools.partial(error, times=5.0))
    expected = partial.evaluate(X, Y, verbose=0)
    assert copy_of(partial).evaluate(X, Y, verbose=0) == pytest.approx(expected)


class Subclassed(keras.Model):
    """Model with arguments that Keras does not save, and with many types of parts."""

    def __init__(self, units, factor=1.0, options=None):
        super().__init__()
        self.factor, self.options = factor, options or {}
        self.embed = keras.layers.Embedding(10, 4)
        self.hidden = [keras.layers.Dense(4), scale(2.0)()]
        self.out = keras.layers.Dense(units)
        self.shift = self.add_weight(shape=(units,), initializer="ones")

    def call(self, inputs, training=False):
        x = ops.concatenate([self.embed(inputs["id"]), inputs["x"]], -1)
        for layer in self.hidden:
            x = layer(x)
        return {"y": self.out(x) * self.factor + self.shift}


def test_a_subclassed_model_keeps_arguments_weights_and_state():
    inputs = {"id": np.arange(8), "x": X}
    model = Subclassed(2, factor=5.0, options={"a": [1]})
    model.compile("adam", "mse")
    model.fit(inputs, {"y": X[:, :2]}, verbose=0)
    copy = check_copy(model, inputs)
    assert copy.factor == 5.0
    assert copy.options == {"a": [1]}
    assert [w.path.split("/")[-1] for w in copy.weights] == [
        w.path.split("/")[-1] for w in model.weights
    ]
    for one, other in zip(model.optimizer.variables, copy.optimizer.variables, strict=True):
        np.testing.assert_allclose(one, other)
    assert model.out.kernel is not copy.out.kernel


def test_a_subclassed_model_of_several_arguments_is_copied():
    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.other = keras.layers.Dense(1), keras.layers.Dense(1)

        def call(self, a, b):
            return self.one(a) - self.other(b)

    model = Pair()
    model.compile("sgd", "mse")
    model(X, X)
    check_copy(model, X, X)


def test_a_model_that_was_not_called_yet_is_copied():
    model = Subclassed(1, factor=2.0)
    model.compile("sgd", "mse")
    copy = copy_of(model)
    assert copy.compiled
    assert copy.factor == 2.0


def test_what_an_own_compile_has_set_is_copied():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(1)

        def compile(self, other, function, weight):
            super().compile(loss="mse")
            self.other, self.function, self.weight = other, function, weight

        def call(self, x):
            return self.out(x)

    model = Own()
    model.compile(keras.optimizers.Adam(0.1), lambda y, p: y - p, 5.0)
    model(X)
    model.other.build(model.trainable_variables)
    model.other.iterations.assign(3)
    copy = check_copy(model, X)
    assert copy.weight == 5.0
    assert copy.function(3, 1) == 2
    assert copy.other is not model.other
    assert int(copy.other.iterations) == 3


def test_names_under_which_a_program_has_registered_its_classes_are_those_of_files():
    @keras.saving.register_keras_serializable("mine")
    class Twice(keras.layers.Layer):
        def call(self, x):
            return x * 2

    archive = KerasArchive.of(compiled(Twice()))
    assert archive.registered["mine>Twice"] is Twice
    assert b"mine>Twice" not in archive.content  # where another class may have that name
    assert keras.saving.get_registered_name(Twice) == "mine>Twice"


def test_what_cannot_be_copied_is_named():
    import threading

    model = Subclassed(1)
    model.guard = threading.Lock()
    with refused("model-copy", "'guard'"):
        KerasArchive.of(model)


def test_a_tf_function_is_traced_again_where_it_arrives():
    factor = 3.0

    @tf.function(reduce_retracing=True)
    def times(x):
        return x * factor

    assert float(copy_of(times)(tf.constant(2.0))) == 6.0
