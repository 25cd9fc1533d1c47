"""bigdl.nano.utils.tf: the helpers for models of Keras, from where BigDL 2.x had them."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from refusals import refused

from bigdl.common.errors import UsageError, WorkerError
from bigdl.nano.utils import tf as helpers

NAMES = [
    *("KERAS_VERSION_LESS_2_9", "KERAS_VERSION_LESS_2_10", "MultiprocessingBackend"),
    *("as_dataset", "patch_attrs", "patch_compiled", "patch_compiled_and_attrs"),
]


class Doubling(keras.Model):
    """A model with an attribute and a method of its own."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.purpose = "to double"

    def call(self, x):
        return self.dense(x)

    def says(self):
        return self.purpose


def small():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


@pytest.mark.parametrize("name", NAMES)
def test_a_name_imports_from_its_old_place(name):
    exec(f"from bigdl.nano.utils.tf import {name}", {})
    assert name in dir(helpers)


def test_versions_of_keras_are_compared():
    assert helpers.KERAS_VERSION_LESS_2_9 is False
    assert helpers.KERAS_VERSION_LESS_2_10 is False


def test_another_object_gets_what_the_user_has_given_a_model():
    source = Doubling()
    target = helpers.patch_attrs(small(), source)
    assert target.says() == target.purpose == "to double"
    assert target.dense is source.dense
    assert target.predict(np.ones((3, 2)), verbose=0).shape == (3, 1)


def test_what_an_object_has_stays():
    class Named:
        purpose = "my own"

    assert helpers.patch_attrs(Named(), Doubling()).purpose == "my own"


def test_a_model_is_compiled_as_another_one():
    source, x = Doubling(), np.ones((4, 2))
    source.compile("sgd", "mae", metrics=["mse"])
    target = helpers.patch_compiled_and_attrs(small(), source)
    found = target.evaluate(x, np.zeros(4), verbose=0, return_dict=True)
    assert found["mse"] == pytest.approx(found["loss"] ** 2, rel=1e-5)
    assert target.loss is not None
    assert target.says() == "to double"


def test_one_that_is_not_compiled_leaves_the_other_as_it_is():
    assert not helpers.patch_compiled(small(), Doubling()).compiled


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("form", [np.asarray, tf.data.Dataset.from_tensor_slices])
def test_rows_become_a_dataset(form, batch_size):
    x, y = np.arange(6.0).reshape(3, 2), np.arange(3)
    found = list(helpers.as_dataset(form(x), form(y), batch_size).as_numpy_iterator())
    assert len(found) == (3 if batch_size is None else 2)
    assert np.array_equal(np.vstack([each[0] for each in found]), x)
    assert np.hstack([each[1] for each in found]).tolist() == [0, 1, 2]


def test_rows_without_targets_become_a_dataset():
    (first, *_) = helpers.as_dataset({"a": np.arange(3)}).as_numpy_iterator()
    assert first == {"a": 0}


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.ones(3), np.ones(2), ("data-shape",)),
        (np.ones(3), tf.data.Dataset.range(3), ("argument-conflict",)),
    ],
    ids=["rows", "kinds"],
)
def test_rows_that_do_not_belong_together_are_refused(x, y, message):
    with refused(*message):
        helpers.as_dataset(x, y)


@pytest.mark.slow
def test_a_function_runs_in_processes():
    def square_and_name(number):
        import os

        return number**2, os.environ["WHO"]

    backend = helpers.MultiprocessingBackend()
    backend.setup()
    envs = [{"WHO": "first"}, {"WHO": "second"}]
    found = backend.run(square_and_name, args=(3,), nprocs=2, envs=envs)
    backend.shutdown()
    assert found == [(9, "first"), (9, "second")]


@pytest.mark.slow
def test_what_cannot_run_is_refused():
    backend = helpers.MultiprocessingBackend()
    with pytest.raises(UsageError, match="each of 2 processes, got 1"):
        backend.run(print, nprocs=2, envs=[{}])
    with pytest.raises(WorkerError, match="division by zero"):
        backend.run(lambda: 1 / 0)
