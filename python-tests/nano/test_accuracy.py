"""What bf16 and int8 cost in accuracy: the benchmark of it, made small."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bigdl.common.cpu import thread_scope
from bigdl.nano.acceleration.accuracy import relative_error
from bigdl.nano.pytorch import InferenceOptimizer
from bigdl.nano.pytorch.inference import methods as torch_methods
from bigdl.nano.pytorch.inference.graphs import CompiledGraph

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import nano_accuracy

# Of 2400 items; the benchmark, with more of them and a longer training, asks for -1.
LOOSE = -2.0


@pytest.fixture(scope="module")
def digits():
    """A trained network, calibration images, test images and labels."""
    (images, labels), (x, y) = nano_accuracy.digits(seed=0, copies=4)
    with thread_scope(1):  # small layers: threads wait for each other on a busy machine
        model, calibration = nano_accuracy.trained(0, images, labels, epochs=5)
    return model, calibration[:256], x, y


@pytest.mark.slow_cases("onnxruntime_int8_qlinear", "openvino_int8", "static_int8")
@pytest.mark.parametrize("method", nano_accuracy.METHODS)
def test_a_method_keeps_the_accuracy(digits, method):
    model, calibration, x, y = digits
    exact = (nano_accuracy.classes(model, x) == y).numpy()
    fast = nano_accuracy.build(model, method, x[:8], calibration)
    found = nano_accuracy.row(
        method, 0, exact, (nano_accuracy.classes(fast, x) == y).numpy(), len(x) // 4
    )
    assert found["items"] == 2400
    assert 80 < found["fp32"] < 99
    assert found["difference"] > LOOSE, found


def test_the_interval_of_no_difference_is_a_point():
    assert nano_accuracy.interval(np.zeros(60), images=20) == (0, 0)


def test_the_interval_is_over_images_and_not_over_their_copies():
    difference = np.repeat([[0.0] * 90 + [-1.0] * 10], 8, axis=0)
    low, high = nano_accuracy.interval(difference.ravel(), images=100)
    once = nano_accuracy.interval(difference[0], images=100)
    assert (low, high) == once  # copies that agree add nothing
    assert low < -10 < high


@pytest.mark.slow
def test_code_that_computes_something_else_is_refused(digits, monkeypatch):
    class Wrong(CompiledGraph):
        def __init__(self):
            pass

        @classmethod
        def compile(cls, program, names):
            return cls()

        def __call__(self, tensors):
            return [torch.zeros(len(tensors[0]), 10)]

    model, calibration, *_ = digits
    monkeypatch.setattr(torch_methods.graphs, "CompiledGraph", Wrong)
    with pytest.raises(RuntimeError, match="compiles the quantized Convolutional into something"):
        InferenceOptimizer.build(model, "static_int8", calib_data=calibration)


class Masked(nn.Module):
    """Attention of one head with a mask that is added to its scores."""

    def __init__(self, hidden: float):
        super().__init__()
        self.hidden = hidden
        self.given = nn.Linear(16, 48)
        self.made = nn.Linear(16, 16)

    def forward(self, x, mask):
        query, key, value = self.given(x).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / 4
        scores = scores + torch.where(mask > 0, 0.0, self.hidden)[:, None]
        return self.made(scores.softmax(-1) @ value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["openvino_int8", "onnxruntime_int8_qlinear"],
)
@pytest.mark.parametrize(
    "hidden", [-1e4, torch.finfo(torch.float32).min, -float("inf")], ids=["large", "lowest", "inf"]
)
def test_masks_of_attention_leave_its_scores_as_they_are(method, hidden):
    torch.manual_seed(0)
    model = Masked(hidden).eval()
    x, mask = 2 * torch.randn(32, 6, 16), torch.arange(6).repeat(32, 1)
    mask = (mask < torch.arange(32)[:, None] % 3 + 4).long()
    fast = InferenceOptimizer.build(model, method, input_sample=(x, mask), calib_data=(x, mask))
    with InferenceOptimizer.get_context(model, fast):
        exact, found = model(x, mask), fast(x, mask)
    assert relative_error([exact.numpy()], [found.numpy()]) < 0.05


class Residual(nn.Module):
    """A residual block whose ReLU runs twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.second(self.relu(self.first(x))) + x)


@pytest.mark.slow
def test_a_module_that_runs_twice_is_quantized():
    torch.manual_seed(0)
    model, x = Residual().eval(), torch.rand(16, 4, 6, 6)
    fast = InferenceOptimizer.build(model, "static_int8", input_sample=x[:1], calib_data=x)
    with InferenceOptimizer.get_context(model, fast):
        exact, found = model(x), fast(x)
    assert 0 < relative_error([exact.numpy()], [found.numpy()]) < 0.05
