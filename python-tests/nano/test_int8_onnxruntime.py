"""Models in 8-bit integers in ONNX Runtime."""

from itertools import pairwise

import numpy as np
import onnx
import pytest
import torch
from small_models import Convolutional, Encoder, Recurrent, Tabular, images, seeded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.onnx_quantization import has_attention, unsigned_activations
from bigdl.nano.pytorch import InferenceOptimizer
from bigdl.nano.pytorch.inference.source import evaluating

STATIC = ["qlinear", "nncf"]
ALL = [*STATIC, "integer"]
INTEGER = {"ConvInteger", "MatMulInteger", "QuantizeLinear", "DynamicQuantizeLSTM"}


def quantize(model, **options):
    return InferenceOptimizer.quantize(model, accelerator="onnxruntime", **options)


def eager(model, *args):
    with evaluating(model):
        return model(*args)


def nodes(model):
    return list(onnx.load(model.nano_network.file.path).graph.node)


def kinds(model):
    return {node.op_type for node in nodes(model)}


def error(given, expected):
    return float((given - expected).detach().norm() / expected.norm())


def ids(rows, seed=0):
    return torch.randint(50, (rows, 7), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model():
    return seeded(Convolutional)


@pytest.fixture(scope="module", params=ALL)
def quantized(request, model):
    return quantize(model, method=request.param, calib_data=images(32), thread_num=1)


class Outlier(nn.Module):
    """One feature of the second layer's input is large and without effect."""

    def __init__(self):
        super().__init__()
        sizes = [8, 16, 16, 16, 4]
        self.layers = nn.Sequential(
            *(layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.Tanh()))
        )
        with torch.no_grad():
            self.layers[2].weight[:, 3] = 0

    def forward(self, x):
        x = self.layers[0](x)
        outlier = torch.nn.functional.one_hot(torch.tensor(3), 16) * 1e4
        return self.layers[2:](x + outlier)


@pytest.fixture(scope="module")
def outlier():
    model, x = seeded(Outlier), torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    return model, x, eager(model, x)


class Shifted(nn.Module):
    """Attention whose result moves far away and back: 8 bits leave nothing of the sum."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x, far):
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.head((x + far) - far)


def test_what_attention_adds_stays_in_floats_where_8_bits_ruin_it():
    model, x = seeded(Shifted), torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(3))
    far = torch.full((8, 1, 1), 3e3)
    fast = quantize(model, method="qlinear", calib_data=[((x, far), 0)], input_sample=(x, far))
    assert error(fast(x, far), eager(model, x, far)) < 0.05
    assert {node.op_type for node in nodes(fast)} & INTEGER


@pytest.mark.slow_cases("integer", "nncf")
def test_a_quantized_model_is_close_to_the_original(model, quantized):
    x = images(16, seed=1)
    assert error(quantized(x), eager(model, x)) < 0.05
    assert kinds(quantized) & INTEGER
    assert quantized.channels == 3
    assert quantized.session_options.intra_op_num_threads == 1


def test_a_quantized_model_is_the_same_after_loading(model, quantized, tmp_path):
    InferenceOptimizer.save(quantized, tmp_path / "model")
    loaded = InferenceOptimizer.load(tmp_path / "model")
    x = images(3)
    assert torch.equal(loaded(x), quantized(x))
    assert loaded.nano_method == quantized.nano_method
    InferenceOptimizer.save(quantized, tmp_path / "small", compression="bf16")
    loaded = InferenceOptimizer.load(tmp_path / "small", model=model, input_sample=images(1))
    assert error(loaded(x), quantized(x)) < 0.02


@pytest.mark.slow_cases("nncf")
@pytest.mark.parametrize("method", STATIC)
@pytest.mark.linux("instruction sets of x86 in /proc/cpuinfo")
def test_activations_are_unsigned_and_weights_are_signed_by_channel(model, method):
    """The form for which x86 processors have fast kernels."""
    fast = quantize(model, method=method, calib_data=images(8))
    graph = onnx.load(fast.nano_network.file.path).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    activations = [
        constants[node.input[2]].dtype
        for node in graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] not in constants
    ]
    weights = [
        constants[node.input[1]]
        for node in graph.node
        if node.op_type == "DequantizeLinear"
        and node.input[0] in constants
        and constants[node.input[0]].dtype == np.int8
        and constants[node.input[0]].ndim == 4
    ]
    assert set(activations) == {np.dtype(np.uint8)}
    assert [scales.size for scales in weights] == [8, 8]


def test_unsigned_activations_compute_the_same():
    """Of a graph with signed ones, bit for bit."""
    import onnxruntime

    random = np.random.default_rng(0)
    weight = random.integers(-127, 128, (4, 3), np.int8)
    make, array = onnx.helper, onnx.numpy_helper.from_array
    graph = make.make_graph(
        [
            make.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
            make.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
            make.make_node("DequantizeLinear", ["w", "scale", "w_zero"], ["wd"]),
            make.make_node("MatMul", ["d", "wd"], ["y"]),
        ],
        "graph",
        [make.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 4])],
        [make.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 3])],
        [
            array(np.float32(0.02), "scale"),
            array(np.int8(-17), "zero"),
            array(np.int8(0), "w_zero"),
            array(weight, "w"),
        ],
    )
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 18)], ir_version=10)
    x = random.normal(0, 3, (50, 4)).astype(np.float32)

    def run():
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        return session.run(None, {"x": x})[0]

    before = run()
    unsigned_activations(model)
    assert onnx.numpy_helper.to_array(model.graph.initializer[1]) == 111
    assert onnx.numpy_helper.to_array(model.graph.initializer[2]).dtype == np.int8
    assert np.array_equal(run(), before)


@pytest.mark.slow_cases(
    "LSTM-integer",
    "LSTM-nncf",
    "LSTM-qlinear",
    "transformer-integer",
    "transformer-nncf",
    "transformer-qlinear",
)
@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize(
    ("build", "data"),
    [
        pytest.param(Encoder, (ids(32),), id="transformer"),
        pytest.param(Tabular, (torch.rand(32, 5), ids(32)[:, 0] % 10), id="two inputs"),
        pytest.param(Recurrent, (torch.rand(32, 5, 6),), id="LSTM"),
    ],
)
def test_kinds_of_models(build, data, method):
    module = seeded(build)
    given = quantize(module, method=method, calib_data=data)(*data)
    expected = eager(module, *data)
    if isinstance(expected, dict):
        given, expected = given["logits"], expected["logits"]
    assert error(given, expected) < 0.1


@pytest.mark.slow
def test_attention_is_found_in_graphs():
    for build, sample, expected in ((Encoder, ids(2), True), (Convolutional, images(2), False)):
        fast = InferenceOptimizer.trace(seeded(build), sample, accelerator="onnxruntime")
        assert has_attention(fast.nano_network.file.path) is expected


@pytest.mark.slow
def test_dynamic_quantization_needs_no_data_and_leaves_convolutions(model):
    for options in ({"method": "integer"}, {"approach": "dynamic"}):
        fast = quantize(model, input_sample=images(1), **options)
        assert fast.nano_method == "onnxruntime_int8_integer"
        assert {"MatMulInteger", "Conv"} <= kinds(fast)
        assert error(fast(images(5)), eager(model, images(5))) < 0.05


@pytest.mark.slow
def test_weights_that_layers_share_stay_right():
    """ONNX Runtime's quantizer transposes the weight of a Gemm in place."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.embed = nn.Embedding(8, 8)

        def forward(self, x, ids):
            x = self.layer(torch.relu(self.layer(x)))
            return torch.nn.functional.linear(x + self.embed(ids), self.embed.weight)

    module, data = seeded(Tied), (torch.rand(16, 8), torch.arange(16) % 8)
    for method in ALL:
        fast = quantize(module, method=method, calib_data=data)
        assert error(fast(*data), eager(module, *data)) < 0.1


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(images(8), id="tensor"),
        pytest.param((images(8), torch.zeros(8)), id="tuple with labels"),
        pytest.param({"x": images(8)}, id="dict"),
        pytest.param(
            DataLoader(TensorDataset(images(8), torch.zeros(8)), batch_size=3), id="loader"
        ),
        pytest.param([(images(8),)], id="list of batches"),
    ],
)
def test_forms_of_calibration_data(model, data):
    fast = quantize(model, calib_data=data)
    assert error(fast(images(8)), eager(model, images(8))) < 0.05


def test_no_more_batches_are_read_than_hold_the_sample_size(model):
    class Counting(list):
        read = 0

        def __iter__(self):
            for each in super().__iter__():
                self.read += 1
                yield each

    data = Counting((images(4, seed=seed),) for seed in range(20))
    quantize(model, calib_data=data, sample_size=10, input_sample=images(1))
    assert data.read == 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "Calibration data are needed to quantize to int8"),
        ({"calib_data": []}, "The calibration data hold no batch"),
        ({"calib_data": [(torch.rand(2, 4, 16, 16),)]}, "another shape than the network takes"),
        ({"calib_data": images(2), "method": "fx"}, "method 'fx' is invalid for int8"),
        ({"calib_data": images(2), "precision": "bf16"}, "onnxruntime is invalid for BF16"),
        ({"calib_data": images(2), "accuracy_criterion": {"relative": 0.1}}, "needs a metric"),
    ],
)
def test_wrong_arguments_are_refused(model, options, text):
    with pytest.raises(UsageError, match=text):
        quantize(model, input_sample=images(1), **options)


@pytest.mark.slow
def test_nncf_smooths_where_there_is_attention():
    module = seeded(Encoder)
    smooth, plain = (
        InferenceOptimizer.build(module, name, calib_data=ids(32))
        for name in ("onnxruntime_int8_nncf", "onnxruntime_int8_qlinear")
    )
    scaled = [sum(node.op_type == "Mul" for node in nodes(each)) for each in (smooth, plain)]
    assert scaled[0] > scaled[1]


@pytest.mark.slow_cases("qlinear")
@pytest.mark.parametrize("method", STATIC)
def test_a_layer_that_costs_too_much_stays_in_floating_point(outlier, method):
    model, x, expected = outlier
    unchecked = quantize(model, method=method, calib_data=x, strict_check=False)
    assert error(unchecked(x), expected) > 0.1
    scored = []

    def score(fast):
        scored.append(1 - error(fast(x), expected))
        return scored[-1]

    fast = quantize(
        model,
        method=method,
        calib_data=x,
        eval_func=score,
        accuracy_criterion={"absolute": 0.05, "higher_is_better": True},
    )
    assert 1 - error(fast(x), expected) >= 0.95
    assert scored[0] == pytest.approx(1)
    assert scored[1] < 0.9
    assert kinds(fast) & INTEGER


@pytest.mark.slow
def test_a_goal_out_of_reach_is_refused_with_the_figures(outlier):
    model, x, expected = outlier
    with pytest.raises(UsageError, match="the original model scores 1, the best of 2 quantized"):
        quantize(
            model,
            calib_data=x,
            eval_func=lambda fast: 1 - error(fast(x), expected),
            accuracy_criterion={"absolute": 1e-9},
            max_trials=2,
        )


@pytest.mark.slow
def test_a_metric_is_computed_on_the_calibration_data(model):
    x = images(32)
    labels = eager(model, x).argmax(1)

    def accuracy(pred, target):
        return (pred.argmax(1) == target).float().mean()

    loader = DataLoader(TensorDataset(x, labels), batch_size=8)
    fast = quantize(model, calib_data=loader, metric=accuracy, accuracy_criterion={"relative": 0.1})
    assert (fast(x).argmax(1) == labels).float().mean() >= 0.9
