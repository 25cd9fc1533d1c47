"""Models of Keras, served in memory, from a saved directory and from a file."""

import numpy as np
import pytest

from bigdl.nano.serving import ServedModel

pytestmark = pytest.mark.slow

ROWS = {
    "first": np.random.default_rng(0).random((5, 3), dtype=np.float32),
    "second": np.random.default_rng(1).random((5, 2), dtype=np.float32),
}


@pytest.fixture(scope="module")
def model():
    import keras

    first, second = keras.Input((3,), name="first"), keras.Input((2,), name="second")
    joined = keras.layers.Concatenate()([first, second])
    hidden = keras.layers.Dense(8, activation="relu")(joined)
    outputs = {"score": keras.layers.Dense(1)(hidden), "kind": keras.layers.Dense(4)(hidden)}
    return keras.Model([first, second], outputs)


def check(served, model):
    expected = model.predict([ROWS["first"], ROWS["second"]], verbose=0)
    assert [spec.name for spec in served.signature.inputs] == ["first", "second"]
    assert served.joins_requests
    answer = served.predict(ROWS)
    assert set(answer) == {"score", "kind"}
    for name, values in answer.items():
        np.testing.assert_allclose(values, expected[name], atol=1e-5)


@pytest.mark.parametrize("method", ["original", "openvino_fp32", "onnxruntime_fp32"])
def test_a_model_in_memory_is_served(model, method):
    with ServedModel(model, method=method) as served:
        assert served.platform == {"original": "tensorflow"}.get(method, method.split("_")[0])
        check(served, model)


@pytest.mark.parametrize("method", [None, "openvino_fp32"])
def test_a_saved_directory_is_served(model, method, tmp_path):
    from bigdl.nano.tf.keras import InferenceOptimizer

    fast = model if method is None else InferenceOptimizer.build(model, method)
    InferenceOptimizer.save(fast, tmp_path / "model")
    with ServedModel(tmp_path / "model") as served:
        check(served, model)


def test_a_file_of_keras_is_served(model, tmp_path):
    model.save(tmp_path / "model.keras")
    with ServedModel(tmp_path) as served:
        check(served, model)


def test_a_saved_model_that_writes_files_does_not_get_into_a_server(tmp_path):
    import keras
    import tensorflow as tf

    from bigdl.common.errors import UsageError
    from bigdl.nano.tf.keras import InferenceOptimizer

    class Writing(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32)])
        def serve(self, x):
            tf.io.write_file(str(tmp_path / "victim"), "written")
            return x

    module = Writing()
    tf.saved_model.save(module, str(tmp_path / "graph"), signatures={"serve": module.serve})
    x = keras.Input((2,))
    layer = keras.layers.TFSMLayer(str(tmp_path / "graph"), call_endpoint="serve")
    InferenceOptimizer.save(keras.Model(x, layer(x)), tmp_path / "model")
    (tmp_path / "victim").unlink(missing_ok=True)
    for load in (InferenceOptimizer.load, ServedModel):
        with pytest.raises(UsageError, match="TFSMLayer"):
            load(tmp_path / "model")
    with pytest.raises(UsageError, match="holds no model"):
        ServedModel(tmp_path / "graph")
    assert not (tmp_path / "victim").exists()
