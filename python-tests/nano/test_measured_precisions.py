"""Precisions of inference that are measured on this processor, and warnings of slow ones."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from bigdl.nano.acceleration import autotune
from bigdl.nano.openvino import CompiledNetwork
from bigdl.nano.openvino.network import supports_bf16
from bigdl.nano.pytorch import InferenceOptimizer
from bigdl.nano.pytorch.frozen import accelerate_frozen_prefix

needs_bf16 = pytest.mark.skipif(
    not supports_bf16(), reason="the processor does not multiply bfloat16"
)
X = torch.rand(4, 8)


@pytest.fixture
def race(monkeypatch):
    """Let each way take as many seconds as one says, 1 by default."""
    seconds = {}
    asked = []

    def timed(calls, budget_s=1.0):
        for call in calls.values():
            call()
        asked.append(list(calls))
        return {name: [seconds.get(name, 1.0)] * 5 for name in calls}

    monkeypatch.setattr(autotune, "benchmark", timed)
    seconds["asked"] = asked
    return seconds


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def quantized(**arguments):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        InferenceOptimizer.quantize(net(), input_sample=X, **arguments)
    return [each for each in caught if "times as long" in str(each.message)]


def test_a_precision_that_is_slower_than_the_original_is_warned_of_once(race):
    race["bf16"] = 1.8
    (warning,) = quantized(precision="bf16")
    assert "bf16 takes 1.80 times as long as the original on this processor" in str(warning.message)
    assert warning.filename == __file__
    assert len(quantized(precision="bf16")) == 1
    assert race["asked"] == [["original", "bf16"]]  # the second time it is known


def test_a_precision_that_is_as_fast_is_not_warned_of(race):
    assert not quantized(precision="bf16")
    assert race["asked"]


def test_nothing_is_measured_for_fp32(race):
    InferenceOptimizer.trace(net(), X, accelerator="onnxruntime")
    assert not race["asked"]


def test_ways_are_timed_in_turn():
    order = []
    seconds = autotune.benchmark({name: lambda name=name: order.append(name) for name in "ab"}, 0.0)
    assert [len(each) for each in seconds.values()] == [3, 3]
    runs = [name for place, name in enumerate(order) if not place or order[place - 1] != name]
    assert runs[-4:] in (["a", "b", "a", "b"], ["b", "a", "b", "a"])


@needs_bf16
@pytest.mark.parametrize("device", ["CPU", "AUTO", "AUTO:CPU", "HETERO:CPU", "MULTI:CPU"])
def test_a_network_in_fp32_computes_in_float32_on_every_device_of_openvino(device):
    import openvino
    from openvino import opset13

    x = opset13.parameter([2, 64], np.float32, name="x")
    rng = np.random.default_rng(0)
    weights, rows = (rng.random(shape, np.float32) for shape in ((64, 64), (2, 64)))
    network = openvino.Model([opset13.matmul(x, weights, False, False)], [x], "net")
    (result,) = CompiledNetwork(network, device).infer([rows])
    np.testing.assert_allclose(result, rows @ weights, rtol=1e-5)


@pytest.mark.parametrize("fastest", ["eager", "openvino_fp32"])
def test_a_frozen_prefix_runs_in_what_is_fastest(race, fastest):
    race[fastest] = 0.5
    backbone = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 6))
    model = torch.nn.Sequential(backbone.requires_grad_(False), torch.nn.Linear(6, 2))
    with accelerate_frozen_prefix(model, X, threads=1) as prefix:
        assert prefix.segments[0].method == fastest
        assert "eager" in race["asked"][0]


@needs_bf16
@pytest.mark.parametrize("faster", ["f32", "bf16"])
def test_what_int8_of_keras_leaves_computes_in_what_is_faster(race, faster):
    keras = pytest.importorskip("keras")
    from bigdl.nano.tf.keras import InferenceOptimizer as KerasOptimizer

    race[faster] = 0.5
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Softmax()])
    x = np.random.default_rng(0).random((16, 8), np.float32)
    fast = KerasOptimizer.quantize(model, x)
    assert fast.nano_network.final_config["INFERENCE_PRECISION_HINT"] == faster
    assert ["f32", "bf16"] in race["asked"]
