"""8-bit models in OpenVINO: calibrated, within an accuracy, or with their weights only."""

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration import PRECISIONS, WeightOptions
from bigdl.nano.openvino import OpenVINOModel
from bigdl.nano.openvino.quantization import has_attention
from bigdl.nano.pytorch import InferenceOptimizer

pytest.importorskip("openvino")
pytest.importorskip("nncf")

ROWS = 32


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x, y=None):
        hidden = torch.relu(self.first(x))
        return {"out": self.second(hidden if y is None else hidden * y)}


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, ids):
        return self.encoder(self.embedding(ids)).mean(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        steps, (hidden, _) = self.lstm(x)
        return self.head(steps[:, -1]), hidden


class Outliers(nn.Module):
    """A chain whose second layer has inputs with one channel a thousand times larger than others,
    which its weights make up for: in 8 bits the others are lost."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.hurt = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)
        with torch.no_grad():
            self.first.weight[0] *= 1000
            self.hurt.weight[:, 0] /= 1000

    def forward(self, x):
        x = torch.relu(self.hurt(torch.relu(self.first(x))))
        return self.last(torch.relu(self.third(x)))


def quantize(model, calib_data=None, **keywords):
    return InferenceOptimizer.quantize(
        model, accelerator="openvino", calib_data=calib_data, **keywords
    )


def error(model, fast, *args):
    with torch.no_grad():
        expected = model.eval()(*args)
    return float((fast(*args) - expected).norm() / expected.norm())


def quantizers(fast):
    return sum(op.get_type_name() == "FakeQuantize" for op in fast.ov_model.get_ops())


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(0)
    return torch.randn(ROWS, 3, 8, 8)


@pytest.fixture(scope="module")
def convolutions():
    torch.manual_seed(0)
    return Convolutions()


@pytest.fixture(scope="module")
def quantized(convolutions, images):
    return quantize(convolutions, images, thread_num=1)


def test_int8_is_near_the_model_for_any_batch_size(convolutions, quantized, images):
    assert quantizers(quantized) >= 2
    assert error(convolutions, quantized, images) < 0.05
    assert quantized(images[:3]).shape == (3, 4)
    assert quantized.nano_network.num_threads == 1


def test_int8_is_the_same_after_load(quantized, images, tmp_path):
    InferenceOptimizer.save(quantized, tmp_path, compression="bf16")
    assert torch.equal(InferenceOptimizer.load(tmp_path)(images), quantized(images))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["loader", "labelled loader", "batch and label", "list", "dict"])
def test_calibration_data_come_in_any_form(convolutions, quantized, images, form):
    labels = torch.zeros(ROWS)
    data = {
        "loader": DataLoader(TensorDataset(images), batch_size=8),
        "labelled loader": DataLoader(TensorDataset(images, labels), batch_size=ROWS),
        "batch and label": (images, labels),
        "list": [images[:16].numpy(), images[16:].numpy()],
        "dict": {"x": images},
    }[form]
    fast = quantize(convolutions, data, input_sample=images[:1])
    np.testing.assert_allclose(fast(images), quantized(images), atol=0.03)


@pytest.mark.slow
def test_no_more_samples_are_taken_than_asked_for(convolutions, images):
    taken = []

    class Counted(torch.utils.data.Dataset):
        def __len__(self):
            return ROWS

        def __getitem__(self, index):
            taken.append(index)
            return images[index]

    quantize(convolutions, DataLoader(Counted(), batch_size=4), sample_size=8)
    assert len(set(taken)) == 8


@pytest.mark.slow
def test_a_fixed_shape_may_differ_from_the_batches_of_the_data(convolutions, images):
    fast = quantize(convolutions, images, input_sample=images[:1], dynamic_axes=False)
    assert fast(images[:1]).shape == (1, 4)
    with pytest.raises(RuntimeError):
        fast(images)


@pytest.mark.slow
def test_two_inputs_and_a_dict_of_results():
    torch.manual_seed(0)
    model, x, y = TwoInputs(), torch.randn(ROWS, 4), torch.rand(ROWS, 8)
    data = DataLoader(TensorDataset(x, y), batch_size=8)
    fast = quantize(model, data, input_sample=(x[:1], y[:1]))
    with torch.no_grad():
        expected = model(x, y)["out"]
    assert (fast(x, y=y)["out"] - expected).norm() < 0.05 * expected.norm()


@pytest.mark.slow
def test_a_model_in_openvino_can_be_quantized(convolutions, quantized, images):
    traced = InferenceOptimizer.trace(convolutions, images[:1], accelerator="openvino")
    fast = quantize(traced, [(images, torch.zeros(ROWS))])
    assert torch.equal(fast(images), quantized(images))
    assert quantizers(traced) == 0


@pytest.mark.slow
def test_a_transformer_is_smoothed_only_where_that_helps():
    torch.manual_seed(0)
    model, ids = Transformer(), torch.randint(0, 50, (ROWS, 6))
    fast = quantize(model, ids)
    assert has_attention(fast.ov_model)
    plain = OpenVINOModel(InferenceOptimizer.trace(model, ids, accelerator="openvino").ov_model)
    forced = [plain.pot([ids.numpy()], smooth=smooth) for smooth in (True, False)]
    errors = [error(model, lambda x, each=each: torch.from_numpy(each(x)), ids) for each in forced]
    assert error(model, fast, ids) == pytest.approx(min(errors), rel=0.05)
    assert min(errors) < 0.05


class Graph(nn.Module):
    """A layer of a graph convolution: messages are divided by the degree of their target."""

    def __init__(self):
        super().__init__()
        self.message, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, edges):
        sources, targets = edges[0], edges[1]
        ones = torch.ones(edges.shape[1])
        degree = torch.zeros(x.shape[0]).index_add(0, targets, ones).clamp(min=1)
        messages = self.message(x)[sources] / degree[targets, None]
        received = torch.zeros(x.shape[0], 8).index_add(0, targets, messages)
        return self.head(torch.relu(received))


@pytest.mark.slow
def test_degrees_and_sums_over_edges_stay_in_floating_point():
    torch.manual_seed(0)
    model = Graph().eval()

    def graph(targets):
        ends = torch.randint(0, 12, (60,)), torch.randint(0, targets, (60,))
        return torch.randn(12, 6), torch.stack(ends)

    calibrated = [(graph(12), 0) for _ in range(16)]
    fast = InferenceOptimizer.quantize(
        model, accelerator="openvino", calib_data=calibrated, input_sample=graph(12)
    )
    for _ in range(4):  # one node is the target of all edges
        assert error(model, fast, *graph(1)) < 0.05
    light = InferenceOptimizer.build(model, "openvino_int8_weight_only", input_sample=graph(12))
    assert 0 < error(model, light, *graph(1)) < 0.05  # 0: nothing would have been compressed


@pytest.mark.slow
def test_the_last_state_of_a_recurrent_model_is_right():
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(ROWS, 5, 8)
    fast = quantize(model, x)
    with torch.no_grad():
        expected = model(x)
    for given, wanted in zip(fast(x), expected, strict=True):
        assert (given - wanted).norm() < 0.05 * wanted.norm()


@pytest.fixture(scope="module")
def outliers():
    """Return a model that loses accuracy in int8, data, and its score: 1 - relative error."""
    torch.manual_seed(1)
    model, x = Outliers().eval(), torch.randn(ROWS, 8)
    with torch.no_grad():
        expected = model(x)

    @torch.no_grad()
    def score(fast):
        return float(1 - (fast(x) - expected).norm() / expected.norm())

    return model, x, score


@pytest.mark.slow
def test_layers_that_cost_accuracy_stay_in_floating_point(outliers):
    model, x, score = outliers
    plain = quantize(model, x)
    kept = quantize(model, x, eval_func=score, accuracy_criterion={"absolute": 0.03})
    assert score(plain) < 0.9
    assert score(kept) >= 0.97
    assert 0 < quantizers(kept) < quantizers(plain)


@pytest.mark.slow
def test_an_accuracy_that_cannot_be_kept_is_refused_with_figures(outliers):
    model, x, score = outliers
    with pytest.raises(UsageError, match=r"original model scores 1, the best of [2-9] .*at least"):
        quantize(model, x, eval_func=score, accuracy_criterion={"absolute": 1e-9})
    with pytest.raises(UsageError, match="the best of 1 quantized"):
        quantize(model, x, eval_func=score, accuracy_criterion={"relative": 0.001}, max_trials=1)


def test_a_metric_of_predictions_and_targets_judges(convolutions, images):
    with torch.no_grad():
        targets = convolutions(images).argmax(1)

    def accuracy(pred, target):
        return (pred.argmax(1) == target).float().mean()

    data = DataLoader(TensorDataset(images, targets), batch_size=8)
    fast = quantize(convolutions, data, metric=accuracy, accuracy_criterion={"relative": 0.2})
    assert quantizers(fast)


def test_the_rest_may_compute_in_bf16(convolutions, images):
    fast = InferenceOptimizer.build(convolutions, "openvino_int8_bf16", calib_data=images)
    assert fast.final_config["INFERENCE_PRECISION_HINT"] == "bf16"
    assert error(convolutions, fast, images) < 0.05


@pytest.mark.slow
def test_weights_alone_need_no_data(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)), torch.randn(4, 256)
    fast = quantize(model, input_sample=x, method="weight_only")
    assert error(model, fast, x) < 0.05
    InferenceOptimizer.save(fast, tmp_path)
    assert (tmp_path / "ov_saved_model.bin").stat().st_size < 0.3 * 4 * 256 * 260
    assert torch.equal(InferenceOptimizer.load(tmp_path)(x), fast(x))
    with torch.no_grad():
        expected = model(x)
    kept = quantize(
        model,
        x,
        method="weight_only",
        eval_func=lambda each: float((each(x).detach() - expected).norm() / expected.norm()),
        accuracy_criterion={"absolute": 0.5, "higher_is_better": False},
    )
    assert torch.equal(kept(x), fast(x))


def test_weights_in_4_bits_are_half_of_those_in_8(tmp_path):
    torch.manual_seed(0)
    layers = [nn.Embedding(50, 96), nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, 256)]
    model, x = nn.Sequential(*layers, nn.Linear(256, 4)), torch.randint(0, 50, (4, 3))
    fast = InferenceOptimizer.quantize(model, precision=PRECISIONS["int4"], input_sample=x)
    assert fast.nano_network.precision == "int4"
    assert error(model, fast, x) < PRECISIONS["int4"].error_bound
    InferenceOptimizer.save(fast, tmp_path)
    assert (tmp_path / "ov_saved_model.bin").stat().st_size < 0.65 * 256 * (96 + 256)
    assert "precision: int4\n" in (tmp_path / "nano_model_meta.yml").read_text()
    loaded = InferenceOptimizer.load(tmp_path)
    assert loaded.nano_network.precision == "int4"
    assert torch.equal(loaded(x), fast(x))
    old_name = quantize(model, input_sample=x, method="int4_weight_only")
    assert torch.equal(old_name(x), fast(x))


def test_options_of_weights_decide_about_groups_and_bits():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))
    x = torch.randn(32, 128)

    def constants(**options):
        fast = InferenceOptimizer.quantize(
            model, "int4", calib_data=x, weight_options=WeightOptions(**options)
        )
        ops = [op for op in fast.ov_model.get_ops() if op.get_type_name() == "Constant"]
        return error(model, fast, x), {
            (op.get_element_type().get_type_name(), *op.shape) for op in ops
        }

    coarse, of_rows = constants(group_size=None)
    fine, of_groups = constants(group_size=32, symmetric=False)
    assert fine < coarse
    assert ("i4", 128, 128) in of_rows
    assert ("u4", 128, 4, 32) in of_groups
    estimated, _ = constants(group_size=None, awq=True, scale_estimation=True)
    assert estimated != coarse


def test_options_of_weights_that_cannot_be_are_refused():
    for options, text in (
        ({"group_size": 0}, "group_size"),
        ({"int8_ratio": 1.0}, "int8_ratio"),
        ({"awq": "yes"}, "awq"),
    ):
        with pytest.raises(UsageError, match=text):
            WeightOptions(**options)
    model, x = nn.Linear(8, 8), torch.ones(2, 8)
    groups = {"input_sample": x, "weight_options": WeightOptions(group_size=32)}
    with refused("argument-conflict", "does not go with int8"):
        quantize(model, **groups, method="weight_only")
    with refused("argument-conflict", "weight_options"):
        quantize(model, x, weight_options=WeightOptions())
    with refused("argument-missing"):
        InferenceOptimizer.quantize(
            model, "int4", input_sample=x, weight_options=WeightOptions(awq=True)
        )


@pytest.mark.slow_cases("empty", "misfit", "no data", "number")
@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({}, "Calibration data are needed"),
        ({"calib_data": []}, "hold no batch"),
        ({"calib_data": torch.ones(4, 5, 8, 8)}, "NNCF cannot quantize"),
        ({"calib_data": 3}, "Data must be"),
        ({"method": "qlinear"}, "method 'qlinear' is invalid"),
        ({"approach": "dynamic"}, "approach 'static' only"),
        ({"accuracy_criterion": {"relative": 0.1}}, "needs a metric"),
    ],
    ids=["no data", "empty", "misfit", "number", "method", "dynamic", "criterion"],
)
def test_what_cannot_be_quantized_is_refused(convolutions, images, keywords, text):
    with pytest.raises(UsageError, match=text):
        quantize(convolutions, input_sample=images[:1], **keywords)
