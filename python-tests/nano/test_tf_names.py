"""Names of Nano for Keras: where they are, and what the classes behind them are."""

from __future__ import annotations

import importlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from refusals import refused

from bigdl.nano.tf import patch_tensorflow, unpatch_tensorflow
from bigdl.nano.tf.keras import Input, Model, Sequential
from bigdl.nano.tf.keras.layers import Dense, Embedding
from bigdl.nano.tf.optimizers import SparseAdam

PLACES = {
    "bigdl.nano.tf": "patch_tensorflow unpatch_tensorflow",
    "bigdl.nano.tf.keras": (
        "InferenceOptimizer Input Model Sequential nano nano_bf16 nano_multiprocessing "
        "nano_multiprocessing_loss"
    ),
    "bigdl.nano.tf.keras.layers": "Conv2D Dense Dropout Embedding Flatten LSTM",
    "bigdl.nano.tf.keras.activations": "relu softmax",
    "bigdl.nano.tf.optimizers": "Adam RMSprop SGD SparseAdam",
}
NAMES = [(module, name) for module, names in PLACES.items() for name in names.split()]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(pair) for pair in NAMES])
def test_a_name_imports_from_its_old_place(module, name):
    exec(f"from {module} import {name}", {})
    assert name in dir(importlib.import_module(module))


@pytest.mark.parametrize("module", PLACES)
def test_a_name_that_is_not_there_is_refused(module):
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec(f"from {module} import Nothing", {})


def test_importing_the_packages_loads_no_framework():
    modules = ", ".join(PLACES)
    heavy = "{'tensorflow', 'keras', 'torch', 'openvino', 'onnxruntime'}"
    program = f"import sys, {modules}; print(sorted({heavy} & set(sys.modules)))"
    seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert seen.stdout == "[]\n", seen.stderr


def functional(cls=Model):
    x = Input((4,))
    return cls(x, Dense(2)(x))


def test_models_are_keras_models_that_fit_in_processes():
    model = functional()
    assert isinstance(model, keras.Model)
    assert "num_processes" in model.fit.__code__.co_varnames
    assert "num_processes" in Sequential([Dense(1)]).fit.__code__.co_varnames
    assert "num_processes" not in keras.Model.fit.__code__.co_varnames


def test_a_functional_model_does_not_change_what_others_are():
    class OfInputs(Model):
        pass

    class OfLayers(Model):
        def __init__(self):
            super().__init__()
            self.dense = Dense(3)

        def call(self, x):
            return self.dense(x)

    x = np.ones((2, 4), np.float32)
    assert functional(OfInputs)(x).shape == (2, 2)
    assert functional(OfInputs).inputs[0].shape == (None, 4)
    assert functional()(x).shape == (2, 2)
    assert OfLayers()(x).shape == (2, 3)
    assert isinstance(OfLayers(), Model)


@pytest.mark.parametrize("make", [functional, lambda: Sequential([Input((4,)), Embedding(5, 2)])])
def test_models_are_saved_as_keras_saves_them(make, tmp_path):
    model = make()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x = np.ones((2, 4), np.float32)
    assert type(loaded) is type(model)
    assert np.array_equal(loaded(x), model(x))


def test_the_gradient_of_an_embedding_holds_the_rows_of_the_batch():
    with pytest.warns(UserWarning, match="applied to the vectors of the batch"):
        layer = Embedding(10, 3, embeddings_regularizer="l2", input_length=2)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(np.array([[1, 4], [4, 1]]))) + tf.add_n(layer.losses)
    gradient = tape.gradient(loss, layer.embeddings.value)
    assert isinstance(gradient, tf.IndexedSlices)
    assert set(np.asarray(gradient.indices)) == {1, 4}


def steps_of(optimizer, gradients, start=1.0, rows=4):
    variable = keras.Variable(np.full((rows, 2), start, np.float32))
    optimizer.build([variable])
    for gradient in gradients:
        optimizer.apply([gradient], [variable])
    return np.asarray(variable)


def slices(rows):
    values = tf.constant([[0.5 * row, 1.0] for row in rows], tf.float32)
    return tf.IndexedSlices(values, tf.constant(rows), tf.constant([4, 2]))


def test_sparse_adam_is_adam_for_dense_gradients():
    gradients = [tf.random.stateless_normal((4, 2), (seed, 0)) for seed in range(3)]
    expected = steps_of(keras.optimizers.Adam(0.1), gradients)
    assert np.array_equal(steps_of(SparseAdam(0.1), gradients), expected)


def test_sparse_adam_moves_the_touched_rows_as_adam_would_and_no_other():
    touched, more = [3, 1, 3], [1]
    found = steps_of(SparseAdam(0.1), [slices(touched), slices(more)])
    dense = [tf.convert_to_tensor(slices(rows)) for rows in (touched, more)]
    expected = steps_of(keras.optimizers.Adam(0.1), dense)
    first = steps_of(keras.optimizers.Adam(0.1), dense[:1])
    assert np.allclose(found[1], expected[1], atol=1e-6)
    assert np.allclose(found[3], first[3], atol=1e-6)  # the second batch has not touched it
    assert np.array_equal(found[[0, 2]], np.ones((2, 2)))
    with refused("unsupported"):
        SparseAdam(amsgrad=True)


def test_programs_are_patched_and_unpatched():
    originals = (keras.Model, keras.Sequential, keras.layers.Embedding, keras.optimizers.Adam)
    try:
        patch_tensorflow("mixed_bfloat16")
        patch_tensorflow("mixed_bfloat16")
        assert keras.Sequential is tf.keras.Sequential is Sequential
        assert keras.models.Model is Model
        assert tf.keras.layers.Embedding is Embedding
        assert tf.keras.optimizers.Adam is SparseAdam
        assert keras.layers.Dense(1).compute_dtype == "bfloat16"
    finally:
        unpatch_tensorflow()
    now = (keras.Model, keras.Sequential, keras.layers.Embedding, keras.optimizers.Adam)
    assert now == originals
    assert keras.layers.Dense(1).compute_dtype == "float32"
    for change in (patch_tensorflow, unpatch_tensorflow):
        with refused("argument-value"):
            change("float64")


@pytest.mark.parametrize("verb", ["trace", "quantize"])
def test_verbs_of_models_are_deprecated(verb):
    pytest.importorskip("tf2onnx")
    model = functional()
    with pytest.warns(DeprecationWarning, match=f"use InferenceOptimizer.{verb}"):
        made = getattr(model, verb)(accelerator="onnxruntime")
    assert type(made).__name__ == "KerasONNXRuntimeModel"
