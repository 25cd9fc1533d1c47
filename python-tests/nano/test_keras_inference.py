"""`bigdl.nano.tf.keras.InferenceOptimizer`: Keras models in other runtimes."""

from __future__ import annotations

import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_models import Subclassed, convolutional, flat, images, nested, tables
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration import PRECISIONS, WeightOptions
from bigdl.nano.tf.keras import InferenceOptimizer

pytest.importorskip("tf2onnx")
pytestmark = pytest.mark.timeout(900)

ALL = [
    *("original", "static_int8", "bf16"),
    *(f"openvino_{kind}" for kind in ("fp32", "bf16", "fp16", "int8")),
    *(f"onnxruntime_{kind}" for kind in ("fp32", "int8_qlinear", "int8_integer")),
]
CLOSE = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 3e-2, "int8": 3e-2}
EXACT = ["openvino_fp32", "onnxruntime_fp32"]


@pytest.fixture(scope="module")
def model():
    return convolutional()


@pytest.fixture(scope="module")
def built(model):
    """Models by their methods, each made when it is first asked for."""
    made = {}

    def get(name: str) -> keras.Model:
        if name not in made:
            made[name] = InferenceOptimizer.build(model, name, x=images(32, seed=1))
        return made[name]

    return get


@pytest.fixture(scope="module")
def fast(model):
    """Return a model in ONNX Runtime, which is the fastest to build."""
    return InferenceOptimizer.trace(model, accelerator="onnxruntime", thread_num=1)


def test_there_are_ten_methods_and_all_are_tried_unasked():
    assert list(InferenceOptimizer.ALL_INFERENCE_ACCELERATION_METHOD) == ALL
    assert list(InferenceOptimizer.DEFAULT_INFERENCE_ACCELERATION_METHOD) == ALL


@pytest.mark.slow_cases("openvino_fp32", "openvino_int8", "static_int8")
@pytest.mark.parametrize("name", ALL[1:])
def test_a_method_computes_what_the_model_does(built, model, name):
    x = images(5)
    found, method = built(name), InferenceOptimizer.ALL_INFERENCE_ACCELERATION_METHOD[name]
    result = found(x)
    assert tf.is_tensor(result)
    assert result.dtype == tf.float32
    assert np.allclose(result, model(x), atol=CLOSE[method.precision])
    assert np.allclose(found.predict(x, batch_size=2, verbose=0), result, atol=1e-2)


@pytest.mark.slow_cases("openvino_fp32")
@pytest.mark.parametrize("name", EXACT)
def test_nests_of_inputs_and_outputs_are_kept_also_by_a_saved_model(name, tmp_path):
    model, x = nested(), tables()
    expected = model(x)
    found = InferenceOptimizer.build(model, name)
    InferenceOptimizer.save(found, tmp_path / "model")
    for each in (found, InferenceOptimizer.load(tmp_path / "model")):
        result = each(x)
        assert list(result) == ["score", "more"]
        assert isinstance(result["more"], list)
        assert all(map(np.array_equal, map(np.shape, flat(result)), map(np.shape, flat(expected))))
        predicted = each.predict(x, batch_size=4, verbose=0)
        for one, two, original in zip(flat(result), flat(predicted), flat(expected), strict=True):
            assert np.allclose(one, original, atol=1e-5)
            assert np.allclose(two, original, atol=1e-5)


@pytest.mark.slow
def test_inputs_may_be_given_as_keras_takes_them(fast, model):
    x = images(3)
    for given in (x, tf.constant(x), [x], {"image": x}, x.astype(np.float64), x.tolist()):
        assert np.allclose(fast(given), model(x), atol=1e-5)
    batches = tf.data.Dataset.from_tensor_slices(x).batch(2)
    assert np.allclose(fast.predict(batches, verbose=0), model(x), atol=1e-5)
    assert np.allclose(fast.predict_on_batch(x), model(x), atol=1e-5)
    in_a_graph = tf.function(lambda each: fast(each))
    assert np.allclose(in_a_graph(tf.constant(x)), model(x), atol=1e-5)


def test_weights_in_4_bits_need_no_data(tmp_path):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((128,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(4)]
    model, x = keras.Sequential(layers), np.random.default_rng(0).normal(size=(8, 128))
    fast = InferenceOptimizer.quantize(model, precision="int4")
    options = WeightOptions(group_size=None, symmetric=False)
    coarse = InferenceOptimizer.quantize(model, precision="int4", weight_options=options)
    expected = model(x)
    errors = [np.linalg.norm(each(x) - expected) for each in (fast, coarse)]
    assert 0 < errors[0] < PRECISIONS["int4"].error_bound * np.linalg.norm(expected)
    assert errors[0] != errors[1]
    InferenceOptimizer.save(fast, tmp_path / "model")
    loaded = InferenceOptimizer.load(tmp_path / "model")
    assert loaded.nano_network.precision == "int4"
    assert np.array_equal(loaded(x), fast(x))


def test_predict_calls_callbacks_and_stops_after_its_steps(fast):
    seen = []
    callback = keras.callbacks.LambdaCallback()
    callback.on_predict_batch_end = lambda batch, logs=None: seen.append(logs["outputs"].shape)
    found = fast.predict(images(7), batch_size=3, verbose=0, steps=2, callbacks=[callback])
    assert found.shape == (6, 3)
    assert seen == [(3, 3), (3, 3)]


def test_a_model_evaluates_as_it_was_compiled(fast, model, tmp_path):
    x, y = images(10), np.arange(10) % 3
    expected = model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    InferenceOptimizer.save(fast, tmp_path / "model")
    for each in (fast, InferenceOptimizer.load(tmp_path / "model")):
        found = each.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
        assert found == pytest.approx(expected, abs=1e-5)
    fast.compile(loss="sparse_categorical_crossentropy")
    loss = np.ravel(fast.evaluate(x, y, verbose=0))[0]
    assert loss == pytest.approx(expected["loss"], abs=1e-5)


def test_a_subclass_is_described_by_a_spec_or_by_data():
    model, x = Subclassed(), np.ones((3, 5), np.float32)
    expected = model(x)
    spec = tf.TensorSpec((None, 5), tf.float32)
    found = InferenceOptimizer.trace(model, accelerator="onnxruntime", input_spec=spec)
    assert np.allclose(found(x), expected, atol=1e-5)
    found = InferenceOptimizer.quantize(model, x=x, precision="bf16")
    assert np.allclose(found(x), expected, atol=5e-2)
    with refused("argument-missing", "input_spec"):
        InferenceOptimizer.trace(Subclassed(), accelerator="onnxruntime")


def test_attributes_of_the_original_are_found_where_it_is_known(tmp_path):
    model = Subclassed()
    spec = tf.TensorSpec((None, 5), tf.float32)
    found = InferenceOptimizer.trace(model, accelerator="onnxruntime", input_spec=spec)
    assert (found.width, found.describe()) == (4, "4 wide")
    with pytest.raises(AttributeError, match="'KerasONNXRuntimeModel' object has no attribute 'w'"):
        _ = found.w
    InferenceOptimizer.save(found, tmp_path / "model")
    with pytest.raises(AttributeError, match="has no attribute 'width'"):
        _ = InferenceOptimizer.load(tmp_path / "model").width
    assert InferenceOptimizer.load(tmp_path / "model", model).width == 4


def test_threads_are_those_asked_for_also_after_loading(fast, tmp_path):
    InferenceOptimizer.save(fast, tmp_path / "model")
    for each in (fast, InferenceOptimizer.load(tmp_path / "model")):
        options = each.session_options
        assert options.intra_op_num_threads == options.inter_op_num_threads == 1
    again = InferenceOptimizer.load(tmp_path / "model", thread_num=2)
    assert again.session_options.intra_op_num_threads == 2


@pytest.mark.slow
def test_a_network_of_openvino_is_shaped_and_serves_many(built, model):
    found = built("openvino_fp32")
    assert found.final_config["INFERENCE_PRECISION_HINT"] == "f32"
    results = found.async_predict([images(2, seed) for seed in range(3)])
    for seed, result in enumerate(results):
        assert np.allclose(result, model(images(2, seed)), atol=1e-5)
    assert found.reshape("image[?,8,8,3]") == (True, None)
    ok, error = found.reshape("image[1,8,8,4]")
    assert not ok
    assert "Failed to reshape this model." in error


@pytest.mark.parametrize("name", ["bf16", "openvino_fp32"])
def test_a_saved_model_is_complete(built, name, tmp_path):
    found, x = built(name), images(3)
    InferenceOptimizer.save(found, tmp_path / "model")
    assert not list((tmp_path / "model").glob("*.pkl"))
    loaded = InferenceOptimizer.load(tmp_path / "model")
    assert type(loaded) is type(found)
    assert np.array_equal(loaded(x), found(x))


def test_a_plain_model_is_saved_and_loaded(model, tmp_path):
    InferenceOptimizer.save(model, tmp_path / "model")
    assert np.array_equal(InferenceOptimizer.load(tmp_path / "model")(images()), model(images()))


def test_an_accelerated_model_is_pickled(fast):
    twin = pickle.loads(pickle.dumps(fast))
    assert np.array_equal(twin(images()), fast(images()))


def test_the_user_s_model_is_not_changed():
    model = convolutional()
    before = (model.get_weights(), set(vars(model)), model.dtype_policy.name)
    InferenceOptimizer.quantize(model, precision="bf16")
    InferenceOptimizer.trace(model, accelerator="onnxruntime")
    after = (model.get_weights(), set(vars(model)), model.dtype_policy.name)
    assert all(map(np.array_equal, before[0], after[0]))
    assert before[1:] == after[1:]


def test_int8_keeps_the_accuracy_or_is_refused(model):
    x, y = images(24), np.argmax(model(images(24)), -1)
    metric = keras.metrics.SparseCategoricalAccuracy()
    common = {"x": x, "y": y, "accelerator": "onnxruntime", "metric": metric}
    found = InferenceOptimizer.quantize(model, **common, accuracy_criterion={"relative": 0.3})
    assert np.mean(np.argmax(found(x), -1) == y) >= 0.7
    impossible = {"absolute": -0.5}
    with refused("accuracy"):
        InferenceOptimizer.quantize(model, **common, accuracy_criterion=impossible, max_trials=1)


@pytest.mark.parametrize("name", ["fit", "train_on_batch", "save", "summary", "get_layer"])
def test_what_an_accelerated_model_cannot_do_is_said(fast, name):
    with pytest.raises(UsageError, match=f"KerasONNXRuntimeModel has no {name}"):
        getattr(fast, name)(None)


def quantize(**keywords):
    return lambda model: InferenceOptimizer.quantize(model, **keywords)


def trace(**keywords):
    return lambda model: InferenceOptimizer.trace(model, **keywords)


WRONG = {
    "precision": (quantize(precision="int2"), "no support for int2"),
    "approach": (quantize(approach="dynamic"), "Only 'static' approach is supported now."),
    "bf16": (quantize(precision="bf16", accelerator="onnxruntime"), "is invalid for BF16."),
    "fp16": (
        quantize(precision="fp16", accelerator="onnxruntime"),
        "fp16 is not supported on onnxruntime accelerator.",
    ),
    "accelerator": (trace(accelerator="jit"), "Accelerator jit is invalid."),
    "device of bf16": (
        quantize(precision="bf16", accelerator="openvino", device="GPU"),
        "Device GPU don't support bfloat16.",
    ),
    "precision of trace": (trace(precision="int8"), "Don't pass precision when call"),
    "nothing to do": (trace(), "pass accelerator='openvino' or 'onnxruntime'"),
    "method": (quantize(accelerator="openvino", method="qlinear"), "method 'qlinear' is invalid"),
    "criterion alone": (quantize(accuracy_criterion={"relative": 0.1}), "needs a metric"),
    "device": (trace(accelerator="onnxruntime", device="GPU"), "accelerator 'openvino' only"),
    "config": (
        trace(accelerator="onnxruntime", openvino_config={"NUM_STREAMS": 1}),
        "does not apply to method 'onnxruntime_fp32'",
    ),
    "threads": (
        trace(accelerator="onnxruntime", thread_num=0),
        "thread_num should be a positive integer",
    ),
    "keyword": (trace(accelerator="onnxruntime", axes=3), "has no argument axes"),
    "several specs": (
        trace(accelerator="onnxruntime", input_spec=[tf.TensorSpec((None, 1))] * 2),
        "describes 2 inputs, but the model has 1",
    ),
    "training": (
        lambda model: InferenceOptimizer.trace(model, "onnxruntime")(images(1), training=True),
        "only predicts",
    ),
    "no model": (lambda model: InferenceOptimizer.trace(3, "onnxruntime"), "be a Keras Model"),
    "traced twice": (
        lambda model: InferenceOptimizer.trace(
            InferenceOptimizer.trace(model, "onnxruntime"), "openvino"
        ),
        "not traced or quantized",
    ),
    "no directory": (lambda model: InferenceOptimizer.load("nowhere"), "nowhere doesn't exist."),
    "no search": (lambda model: InferenceOptimizer().summary(), "You should call .optimize()"),
    "direction": (
        lambda model: InferenceOptimizer().optimize(model, images(), direction="up"),
        "Only support direction 'min', 'max'.",
    ),
    "metric": (
        lambda model: InferenceOptimizer().optimize(model, images(), metric=3),
        "metric should be a tf.keras.metrics.Metric or a Callable",
    ),
    "no targets": (
        lambda model: InferenceOptimizer().optimize(
            model, images(), metric=keras.metrics.MeanSquaredError()
        ),
        "needs data that hold targets",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_in_one_sentence(model, case):
    call, sentence = WRONG[case]
    with pytest.raises(UsageError) as raised:
        call(model)
    assert sentence in str(raised.value)


@pytest.mark.slow
def test_a_search_measures_scores_and_explains(model, tmp_path, capsys):
    x, y = images(24), np.arange(24) % 3
    optimizer = InferenceOptimizer()
    optimizer.optimize(
        model,
        x,
        validation_data=tf.data.Dataset.from_tensor_slices((x, y)).batch(8),
        metric=keras.metrics.SparseCategoricalAccuracy(),
        batch_size=4,
        thread_num=1,
        latency_sample_num=5,
        includes=["bf16", "onnxruntime_fp32"],
        output_filename=str(tmp_path / "table.txt"),
    )
    assert "onnxruntime_fp32" in capsys.readouterr().out
    table = optimizer.results()
    assert list(table.index) == ["original", "bf16", "onnxruntime_fp32"]
    assert table["status"].isin(["successful", "early stopped"]).all()
    assert table.loc["onnxruntime_fp32", "difference"] < 1e-4
    expected = model.evaluate(x, y, verbose=0, return_dict=True)["accuracy"]
    assert table.loc["original", "accuracy"] == pytest.approx(expected)
    assert optimizer.get_model("original") is model
    assert np.allclose(optimizer.get_model("onnxruntime_fp32")(x), model(x), atol=1e-5)
    best, option = optimizer.get_best_model(accelerator="onnxruntime", accuracy_criterion=0.5)
    assert option == "onnxruntime"
    assert type(best).__name__ == "KerasONNXRuntimeModel"
    with pytest.raises(UsageError, match="it was not tried"):
        optimizer.get_model("static_int8")


def half_off(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), -1) / 2


def test_losses_and_metrics_of_the_user_s_own_are_evaluated():
    model = convolutional()
    metric = keras.metrics.MeanMetricWrapper(half_off, name="wrapped")
    model.compile(loss=half_off, metrics=[half_off, metric])
    found = InferenceOptimizer.trace(model, accelerator="onnxruntime")
    x, y = images(6), np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1, 2]]
    expected = model.evaluate(x, y, verbose=0)
    assert len(expected) == 3
    assert found.evaluate(x, y, verbose=0) == pytest.approx(expected, abs=1e-5)


def subclassed() -> keras.Model:
    class Head(keras.Model):
        def __init__(self, factor):
            super().__init__()
            self.factor, self.out = factor, keras.layers.Dense(2)

        def call(self, x):
            return self.out(x) * self.factor

    return Head(3.0)


def test_bf16_of_a_subclassed_model_goes_by_an_earlier_call():
    model, x = subclassed(), np.random.default_rng(0).random((8, 4), "float32")
    model(x)
    found = InferenceOptimizer.quantize(model, precision="bf16")
    assert np.allclose(found(x), model(x), atol=3e-2)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_constants_of_a_normalization_layer_are_in_the_network_of_onnxruntime(precision):
    x = np.random.default_rng(0).normal(5, 3, (64, 4)).astype("float32")
    normalization = keras.layers.Normalization()
    normalization.adapt(x)
    model = keras.Sequential([keras.Input((4,)), normalization, keras.layers.Dense(2)])
    if precision == "fp32":
        found = InferenceOptimizer.trace(model, accelerator="onnxruntime")
    else:
        found = InferenceOptimizer.quantize(model, x, accelerator="onnxruntime")
    assert np.allclose(found(x), model(x), atol=1e-5 if precision == "fp32" else 0.2)


def test_a_dataset_of_pairs_calibrates_and_scores_a_network_that_is_in_openvino_already():
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    pairs = tf.data.Dataset.from_tensor_slices((x, model(x).numpy())).batch(16)
    traced = InferenceOptimizer.trace(model, accelerator="openvino")
    found = InferenceOptimizer.quantize(
        traced,
        pairs,
        accelerator="openvino",
        metric=keras.metrics.MeanSquaredError(),
        accuracy_criterion={"absolute": 0.1, "higher_is_better": False},
    )
    assert np.mean(np.square(found(x) - model(x))) < 0.1
    with pytest.raises(UsageError, match="not traced or quantized"):
        InferenceOptimizer.trace(traced, accelerator="onnxruntime")


def hashed_ids(vocabulary: int = 10, modulo: int | None = None) -> keras.Model:
    ids = keras.Input((3,), dtype="int64")
    keys = ids if modulo is None else keras.ops.mod(ids, modulo)
    table = keras.layers.Embedding(vocabulary, 1, embeddings_initializer="uniform")
    return keras.Model(ids, keras.layers.Flatten()(table(keys)))


def test_ids_beyond_32_bits_are_hashed_as_by_the_original():
    model = hashed_ids(modulo=10)
    fast = InferenceOptimizer.trace(model, accelerator="openvino")
    for ids in ([[1, 2, 3]], [[5, 123456789012345, 2**40 + 7]], [[16777217, 33554433, 2**31 + 1]]):
        np.testing.assert_allclose(fast.predict(np.array(ids)), model(np.array(ids)), rtol=1e-6)


@pytest.mark.parametrize("accelerator", ["openvino", "onnxruntime"])
def test_ids_outside_of_a_table_are_refused(accelerator):
    fast = InferenceOptimizer.trace(hashed_ids(), accelerator=accelerator)
    for wrong in (10, 2**40):
        with pytest.raises(UsageError):
            fast.predict(np.array([[1, 2, wrong]]))


def test_an_id_that_does_not_fit_the_input_is_refused():
    ids = keras.Input((3,), dtype="int32")
    model = keras.Model(ids, keras.layers.Embedding(10, 1)(ids))
    fast = InferenceOptimizer.trace(model, accelerator="openvino")
    with refused("data-value", "1099511627776"):
        fast.predict(np.array([[1, 2, 2**40]]))


def test_a_first_row_whose_results_are_near_zero_is_judged_with_others():
    keras.utils.set_random_seed(0)
    layers = keras.layers.Dense(32, "relu"), keras.layers.Dense(2)
    model = keras.Sequential([keras.Input((8,)), *layers])
    x = np.random.default_rng(0).standard_normal((64, 8)).astype("float32")
    layers[1].bias.assign(-model(x[:1])[0] + 1e-5)
    for accelerator in ("openvino", "onnxruntime"):
        fast = InferenceOptimizer.quantize(model, accelerator=accelerator, x=x)
        same = fast.predict(x).argmax(1) == np.asarray(model(x)).argmax(1)
        assert same.mean() > 0.9
