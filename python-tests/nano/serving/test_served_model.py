"""Models of every kind, served in process with batching across threads."""

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.friesian.models import DeepFM
from bigdl.nano.pytorch import InferenceOptimizer
from bigdl.nano.serving import (
    BatchingOptions,
    ClosedError,
    DeadlineError,
    ServedModel,
)
from bigdl.nano.serving.batching import MicroBatcher


@pytest.fixture(scope="module")
def ranker():
    torch.manual_seed(0)
    return DeepFM({"user": 50, "item": 80}, ["age"], dim=4, hidden=[8]).eval()


def ranker_rows(rows, seed=0):
    random = np.random.default_rng(seed)
    return {
        "user": random.integers(0, 50, rows),
        "item": random.integers(0, 80, rows),
        "age": random.random(rows, dtype=np.float32),
    }


def expected_of(model, inputs):
    with torch.inference_mode():
        return model(*map(torch.from_numpy, inputs.values())).numpy()


SAMPLE = tuple(map(torch.from_numpy, ranker_rows(4).values()))


@pytest.fixture(scope="module")
def served(ranker):
    with ServedModel(ranker, sample=SAMPLE) as model:
        yield model


@pytest.mark.slow_cases("openvino_fp32")
@pytest.mark.parametrize(
    "method",
    [
        *("openvino_fp32", "onnxruntime_fp32", "original"),
        pytest.param("onnxruntime_int8_integer", marks=pytest.mark.slow),
    ],
)
def test_a_recommender_is_called_by_its_columns(ranker, method):
    inputs = ranker_rows(33)
    with ServedModel(ranker, sample=SAMPLE, method=method) as model:
        assert [spec.name for spec in model.signature.inputs] == ["user", "item", "age"]
        assert model.method == method
        scores = model.predict(inputs)
    tolerance = 0.05 if "int8" in method else 1e-5
    np.testing.assert_allclose(scores, expected_of(ranker, inputs), atol=tolerance)


@pytest.mark.slow
def test_int8_takes_calibration_data(ranker):
    inputs = ranker_rows(33)
    calibration = [tuple(map(torch.from_numpy, ranker_rows(20, seed=3).values()))]
    with ServedModel(
        ranker, sample=SAMPLE, method="openvino_int8", calib_data=calibration
    ) as model:
        scores = model.predict(inputs)
    np.testing.assert_allclose(scores, expected_of(ranker, inputs), atol=0.1)


def test_each_thread_gets_its_own_rows(ranker):
    requests = [ranker_rows(1 + seed % 7, seed) for seed in range(200)]
    reports = []
    with ServedModel(
        ranker, sample=SAMPLE, method="original", batching=BatchingOptions(32, 5)
    ) as model:
        model.observe(reports.append)
        with ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(model.predict, requests))
    for inputs, answer in zip(requests, answers, strict=True):
        np.testing.assert_allclose(answer, expected_of(ranker, inputs), atol=1e-5)
    assert len(reports) < len(requests)
    assert sum(len(report.waits) for report in reports) == len(requests)
    assert max(report.rows for report in reports) <= 32


@pytest.mark.slow
def test_a_saved_directory_is_served_with_the_names_of_its_outputs(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 2)

        def forward(self, x):
            return {"logits": self.net(x), "norm": x.norm(dim=1)}

    module, x = Two().eval(), torch.rand(4, 3)
    fast = InferenceOptimizer.trace(module, x, accelerator="openvino")
    InferenceOptimizer.save(fast, tmp_path / "model")
    with ServedModel(tmp_path / "model") as model:
        answer = model.predict(x.numpy())
        assert [str(spec) for spec in model.signature.inputs] == ["x: FP32[-1, 3]"]
    assert set(answer) == {"logits", "norm"}
    np.testing.assert_allclose(answer["logits"], module(x)["logits"].detach(), atol=1e-5)


def test_a_saved_graph_of_pytorch_is_served_with_described_inputs(tmp_path):
    x = torch.rand(4, 3)
    fast = InferenceOptimizer.trace(nn.Linear(3, 2), x, accelerator="jit")
    InferenceOptimizer.save(fast, tmp_path / "model")
    with refused("argument-missing"):
        ServedModel(tmp_path / "model")
    with ServedModel(tmp_path / "model", inputs="input: FP32[-1, 3]") as model:
        np.testing.assert_allclose(model.predict(x.numpy()), fast(x), atol=1e-6)


@pytest.mark.slow
def test_onnx_and_openvino_files_are_served(tmp_path):
    import openvino

    module, x = nn.Linear(3, 2).eval(), torch.rand(4, 3)
    fast = InferenceOptimizer.trace(module, x, accelerator="onnxruntime")
    shutil.copy(fast.nano_network.file.path, tmp_path / "model.onnx")
    network = openvino.convert_model(tmp_path / "model.onnx")
    openvino.save_model(network, tmp_path / "other.xml", compress_to_fp16=False)
    for path in (tmp_path, tmp_path / "model.onnx", tmp_path / "other.xml"):
        with ServedModel(path) as model:
            np.testing.assert_allclose(model.predict(x.numpy()), module(x).detach(), atol=1e-5)


@pytest.mark.slow
def test_rows_that_depend_on_each_other_are_not_joined():
    class OverRows(nn.Module):
        def forward(self, x):
            return torch.softmax(x, 0)

    with ServedModel(OverRows(), sample=torch.rand(2, 3)) as model:
        assert not model.joins_requests
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(model.predict, [np.zeros((1, 3), "float32")] * 50))
    assert all((answer == 1).all() for answer in answers)


@pytest.mark.slow_cases("inputs0-takes the inputs user, item, age, but got user, item")
@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"user": [1], "item": [2]}, "takes the inputs user, item, age, but got user, item"),
        ({"user": [1], "item": [2], "age": ["x"]}, "Input 'age' is of type FP32"),
        ({"user": [[1]], "item": [2], "age": [0.5]}, r"'user' has the shape \[-1\]"),
        ({"user": [1], "item": [2, 3], "age": [0.5]}, "same number of rows, but got user 1, item"),
        ({"user": [], "item": [], "age": []}, "."),
        (np.zeros(3), "none by name"),
    ],
)
def test_wrong_inputs_are_refused_in_a_sentence(served, inputs, sentence):
    with pytest.raises(UsageError, match=sentence):
        served.predict(inputs)


def test_wrong_models_are_refused_in_a_sentence(ranker, tmp_path):
    (tmp_path / "empty").mkdir()
    InferenceOptimizer.save(ranker, tmp_path / "weights")
    for model, sentence in [
        (tmp_path / "none", "There is no model at"),
        (tmp_path / "empty", "holds no model"),
        (tmp_path / "weights", "weights only"),
        (ranker, "A sample of the input of DeepFM is needed"),
        (object(), "not object"),
    ]:
        with pytest.raises(UsageError, match=sentence):
            ServedModel(model)


@pytest.mark.slow
def test_a_damaged_model_is_refused(tmp_path):
    module = nn.Linear(3, 2)
    with torch.no_grad():
        module.weight.fill_(float("nan"))
    with pytest.raises(UsageError, match="no finite number"):
        ServedModel(module, sample=torch.rand(1, 3))


# The batcher itself ---------------------------------------------------------------------------


class Gate:
    """A model that waits until it may go on, and counts the rows of its calls."""

    def __init__(self):
        self.entered, self.open, self.rows = threading.Semaphore(0), threading.Event(), []

    def __call__(self, arrays):
        self.rows.append(len(arrays[0]))
        self.entered.release()
        assert self.open.wait(30)
        if (arrays[0] < 0).any():
            raise ValueError("below zero")
        return [arrays[0] * 2]


def one(value):
    return [np.full((1, 1), value, "float32")]


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open.set()


def busy(gate, **options):
    """Return a batcher whose model is computing a request."""
    batcher = MicroBatcher(gate, BatchingOptions(**options))
    first = batcher.submit(one(1.0))
    assert gate.entered.acquire(timeout=30)
    return batcher, first


def test_what_comes_meanwhile_is_one_batch(gate):
    batcher, first = busy(gate, max_batch_size=8)
    others = [batcher.submit(one(number)) for number in range(10)]
    gate.open.set()
    assert [float(each.result(30)[0][0, 0]) for each in others] == [2.0 * n for n in range(10)]
    assert first.result(30)[0].tolist() == [[2.0]]
    batcher.close()
    assert gate.rows == [1, 8, 2]


def test_a_full_queue_refuses_at_once(gate):
    batcher, first = busy(gate, max_queue=2)
    waiting = [batcher.submit(one(2.0)) for _ in range(2)]
    with refused("server-busy", "2"):
        batcher.call(one(3.0))
    gate.open.set()
    assert [each.result(30)[0].tolist() for each in (first, *waiting)] == [[[2.0]], *[[[4.0]]] * 2]
    batcher.close()


def test_a_request_whose_time_is_over_is_not_computed(gate):
    batcher, first = busy(gate)
    with pytest.raises(DeadlineError, match=r"within its time of 0\.02 s"):
        batcher.call(one(2.0), timeout=0.02)
    late = batcher.submit(one(3.0), timeout=0.01)
    time.sleep(0.03)
    gate.open.set()
    with pytest.raises(DeadlineError):
        late.result(30)
    first.result(30)
    batcher.close()
    assert gate.rows == [1]


def test_requests_whose_time_is_over_leave_room_in_the_queue(gate):
    batcher, first = busy(gate, max_queue=2)
    late = batcher.submit(one(2.0), timeout=0.01)
    back = batcher.submit(one(2.0))
    back.cancel()
    time.sleep(0.03)
    waiting = [batcher.submit(one(3.0)) for _ in range(2)]
    with pytest.raises(DeadlineError, match=r"within its time of 0\.01 s"):
        late.result(0)
    gate.open.set()
    assert [each.result(30)[0].tolist() for each in (first, *waiting)] == [[[2.0]], *[[[6.0]]] * 2]
    batcher.close()


def test_an_error_of_one_request_is_not_that_of_others(gate):
    batcher, _ = busy(gate)
    good, bad = batcher.submit(one(2.0)), batcher.submit(one(-1.0))
    gate.open.set()
    assert good.result(30)[0].tolist() == [[4.0]]
    with pytest.raises(ValueError, match="below zero"):
        bad.result(30)
    batcher.close()


def test_closing_answers_what_waits(gate):
    batcher, first = busy(gate, max_batch_size=1)
    waiting = [batcher.submit(one(number)) for number in range(5)]
    waiting[3].cancel()
    closing = threading.Thread(target=batcher.close)
    closing.start()
    gate.open.set()
    closing.join(30)
    assert not closing.is_alive()
    assert [each.done() for each in (first, *waiting)] == [True] * 6
    with pytest.raises(ClosedError):
        batcher.submit(one(1.0))
    with pytest.raises(ClosedError):
        batcher.call(one(1.0))


def test_rows_of_other_shapes_go_into_other_batches(gate):
    batcher, _ = busy(gate)
    short = [batcher.submit([np.zeros((1, 2), "float32")]) for _ in range(2)]
    long = [batcher.submit([np.zeros((2, 3), "float32")]) for _ in range(2)]
    gate.open.set()
    assert {each.result(30)[0].shape for each in short} == {(1, 2)}
    assert {each.result(30)[0].shape for each in long} == {(2, 3)}
    batcher.close()
    assert gate.rows == [1, 2, 4]


def test_a_delay_waits_for_others(gate):
    gate.open.set()
    batcher = MicroBatcher(gate, BatchingOptions(max_batch_size=4, max_delay_ms=10_000))
    waiting = [batcher.submit(one(number)) for number in range(4)]
    assert [float(each.result(30)[0][0, 0]) for each in waiting] == [0.0, 2.0, 4.0, 6.0]
    last = batcher.submit(one(9.0))
    batcher.close()  # does not wait for the delay
    assert last.result(0)[0].tolist() == [[18.0]]
    assert gate.rows == [4, 1]


def test_a_call_with_a_limit_is_given_up_though_nobody_waits(slow_model):
    with ServedModel(slow_model.runner) as model:
        slow_model.close()
        with pytest.raises(DeadlineError, match=r"within its time of 0\.02 s"):
            model.predict(np.ones((1, 3), "float32"), timeout=0.02)
        slow_model.open.set()
