"""Tests of the import lines of BigDL 2.x programs."""

import importlib
import importlib.util
import subprocess
import sys

import pytest
from refusals import refused

from bigdl.common.errors import MissingExtraError

NAMES = {
    "bigdl.friesian.feature": ["FeatureTable", "StringIndex", "TargetCode"],
    "bigdl.friesian.feature.table": ["FeatureTable", "StringIndex", "Table", "TargetCode"],
    "bigdl.friesian.feature.utils": ["featuretable_to_xshards"],
    "bigdl.friesian.models": ["TFRSModel"],
    "bigdl.friesian.utils": ["SafePickle"],
}
HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None


@pytest.mark.parametrize("module", NAMES)
def test_names_are_where_they_were(module):
    found = importlib.import_module(module)
    assert all(hasattr(found, name) for name in NAMES[module])


def test_models_import_torch_when_one_is_used():
    code = "import sys, bigdl.friesian.models as m; m.TFRSModel; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.skipif(HAS_TENSORFLOW, reason="TensorFlow is installed")
def test_what_a_model_of_tensorflow_needs_is_said():
    from bigdl.friesian.models import TFRSModel

    with pytest.raises(MissingExtraError, match=r"pip install 'bigdl\[tf\]'"):
        TFRSModel(object())


@pytest.mark.skipif(not HAS_TENSORFLOW, reason="TensorFlow is not installed")
def test_losses_of_a_model_of_tensorflow_are_means_of_rows():
    import keras
    import numpy as np
    import tensorflow as tf

    from bigdl.friesian.models import TFRSModel

    class Task(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self._loss = keras.losses.MeanSquaredError(reduction="sum")

        def call(self, labels, predictions):
            return self._loss(labels, predictions)

    class Ratings(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, kernel_regularizer="l2")
            self.task = Task()

        def call(self, inputs):
            return self.dense(inputs["x"])

        def compute_loss(self, inputs, training=False):
            return self.task(inputs["y"], self(inputs, training=training))

    with refused("model-type", "TensorFlow"):
        TFRSModel(object())
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 3)).astype("float32")
    y = x.sum(1, keepdims=True)
    model = TFRSModel(Ratings())
    model.compile(optimizer=keras.optimizers.Adam(0.05))
    rows = tf.data.Dataset.from_tensor_slices({"x": x, "y": y}).batch(16)
    before = model.evaluate(rows, return_dict=True, verbose=0)
    history = model.fit(rows, epochs=20, verbose=0).history
    after = model.evaluate(rows, return_dict=True, verbose=0)
    assert set(before) >= {"loss", "regularization_loss", "total_loss"}
    assert after["loss"] < 0.3 * before["loss"]
    assert len(history["total_loss"]) == 20
