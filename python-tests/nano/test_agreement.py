"""Accelerated models give what the original gives, or are refused in one sentence."""

import warnings

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.agreement import difference, typical_magnitudes
from bigdl.nano.pytorch import InferenceOptimizer

pytest.importorskip("openvino")

x = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.layer = nn.Linear(6, 4)


class Branch(Layer):
    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else -2 * self.layer(x) + 1


class NumberOfRows(Layer):
    def forward(self, x):
        return {"y": self.layer(x), "rows": x.shape[0]}


class NumberOfData(Layer):
    def forward(self, x):
        y = self.layer(x)
        return y, float(y.mean())


class LoopOverRows(Layer):
    def forward(self, x):
        return torch.stack([self.layer(x[row]) * (row + 1) for row in range(x.shape[0])])


class NumpyInside(Layer):
    def forward(self, x):
        return self.layer(x) + torch.from_numpy(np.sort(x.detach().numpy(), 1)[:, :4].copy())


class Counting(Layer):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * self.calls


class BufferState(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        self.total += self.layer(x).sum(0)
        return self.layer(x) + self.total


class Noise(Layer):
    def forward(self, x):
        return self.layer(nn.functional.dropout(x, 0.5, training=True))


class Cache:
    def __init__(self, keys):
        self.keys = keys


class ReturnsCache(Layer):
    def forward(self, x):
        y = self.layer(x)
        return {"y": y, "past": Cache(2 * y)}


class Complex(Layer):
    def forward(self, x):
        return torch.fft.rfft(self.layer(x))


class UsesRowCount(Layer):
    def forward(self, x):
        return self.layer(x) / len(x) + int(x.shape[0])


class Squeezed(Layer):
    def forward(self, x):
        return self.layer(x).squeeze()


class ChangesInput(Layer):
    def forward(self, x):
        return self.layer(x.add_(1.0))


class SetsAttribute(Layer):
    def forward(self, x):
        self.last = self.layer(x)
        return self.last * 2


class ReturnsInput(Layer):
    def forward(self, x):
        return x, x.view(-1), None, self.layer(x), True


class OperationNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 4)

    def forward(self, cat, mean):
        return self.layer(torch.cat([cat, mean], 1)).mean(1) + cat.mean()


class CellInLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(6, 5)

    def forward(self, x):
        hidden = torch.zeros(x.shape[0], 5)
        for step in range(x.shape[1]):
            hidden = self.cell(x[:, step], hidden)
        return hidden


slow = pytest.mark.slow
METHODS = [
    "jit_fp32",
    *(pytest.param(f"{r}_fp32", marks=slow) for r in ("openvino", "onnxruntime")),
]
REFUSED = [
    (NumberOfRows, "'rows' is 2 instead of 3"),
    (NumberOfData, "'1' is .* instead of"),
    (NumpyInside, "other values: it differs by .* %"),
    (Counting, "keeps state between calls in 'calls'"),
    (BufferState, "keeps state between calls in 'total'"),
    (ReturnsCache, "object of the class .*Cache at 'past'"),
]


def build(model, method, sample=x, **others):
    return InferenceOptimizer.build(model, method, input_sample=sample, **others)


def agrees(model, fast, *inputs):
    with torch.no_grad():
        expected = model(*(each.clone() for each in inputs))
    return difference(expected, fast(*(each.clone() for each in inputs)), 1e-4) is None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("cls", "words"), REFUSED, ids=lambda each: getattr(each, "__name__", ""))
def test_what_a_conversion_would_fix_is_refused_in_one_sentence(cls, words, method):
    with pytest.raises(UsageError, match=words) as refused:
        build(cls(), method)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.filterwarnings("ignore:This processor has no instructions")
@pytest.mark.parametrize("cls", [NumberOfData, Counting, BufferState, ReturnsCache, Noise])
def test_what_runs_the_models_code_is_not_refused(cls):
    model = cls().eval()
    fast = build(model, "bf16")
    assert type(fast(x)) is type(model(x))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cls", [Branch, UsesRowCount, Squeezed, ReturnsInput])
def test_another_way_of_conversion_is_taken_where_one_is_wrong(cls, method):
    model = cls().eval()
    fast = build(model, method)
    for other in (x, -x, torch.randn(5, 6), torch.ones(1, 6)):
        assert agrees(model, fast, other)


def test_a_loop_over_rows_is_scripted():
    model = LoopOverRows().eval()
    assert agrees(model, build(model, "jit_fp32"), torch.randn(5, 6))


@pytest.mark.slow
def test_a_number_of_rows_stays_one_in_openvino():
    model = UsesRowCount().eval()
    fast = build(model, "openvino_fp32")
    for rows in (1, 2, 5):
        assert agrees(model, fast, torch.randn(rows, 6))


@pytest.mark.slow
def test_frozen_noise_is_refused():
    with pytest.raises(UsageError, match="different results for one input"):
        build(Noise(), "openvino_fp32")


@slow
def test_complex_results_are_refused_where_they_become_pairs():
    with pytest.raises(UsageError, match="for the sample: it has the shape"):
        build(Complex(), "openvino_fp32")


@pytest.mark.slow_cases("openvino_fp32")
@pytest.mark.parametrize("method", ["jit_fp32", "openvino_fp32"])
def test_an_input_that_the_model_changes_is_told_and_the_sample_stays(method):
    sample = x.clone()
    with pytest.warns(UserWarning, match="changes its input in place"):
        fast = build(ChangesInput(), method, sample)
    assert torch.equal(sample, x)
    assert agrees(ChangesInput(), fast, torch.randn(3, 6))


@pytest.mark.slow
def test_an_attribute_that_the_model_sets_is_told_and_the_original_is_unchanged():
    model = SetsAttribute().eval()
    with pytest.warns(UserWarning, match="sets 'last' when it is called"):
        build(model, "openvino_fp32")
    assert not hasattr(model, "last")


@pytest.mark.filterwarnings("ignore:This processor has no instructions")
def test_the_random_numbers_of_the_caller_are_not_drawn():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    build(Noise(), "bf16")
    assert torch.equal(torch.rand(2), expected)


def test_arguments_may_be_named_as_operations():
    model, inputs = OperationNames().eval(), (x, x + 1)
    fast = build(model, "onnxruntime_fp32", inputs)
    assert agrees(model, fast, x - 1, 2 * x)
    assert agrees(model, fast, mean := torch.randn(3, 6), mean)


def test_a_trace_takes_no_length_for_which_it_is_wrong(tmp_path):
    model = CellInLoop().eval()
    fast = build(model, "jit_fp32", torch.randn(2, 5, 6))
    assert agrees(model, fast, torch.randn(4, 5, 6))
    InferenceOptimizer.save(fast, tmp_path)
    for each in (fast, InferenceOptimizer.load(tmp_path)):
        with refused("model-input"):
            each(torch.randn(2, 7, 6))


def test_rows_that_a_trace_cannot_compute_are_refused_in_one_sentence():
    class Pair(Layer):
        def forward(self, x):
            one, two = self.layer(x).unbind()
            return one + two, x.sum()

    fast = build(Pair().eval(), "jit_fp32")
    with refused("model-input", "TorchScript", "RuntimeError"):
        fast(torch.randn(3, 6))


def test_a_trace_takes_images_of_any_size():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    fast = build(model, "jit_fp32", torch.randn(1, 3, 8, 8))
    assert agrees(model, fast, torch.randn(2, 3, 11, 9))


@slow
def test_lengths_are_compared_where_they_may_change():
    with pytest.raises(UsageError, match=r"other sizes: it differs by .* dynamic_axes=False"):
        build(CellInLoop(), "openvino_fp32", torch.randn(2, 5, 6), dynamic_axes={"x": [0, 1]})


@slow
def test_int8_is_refused_for_what_its_float_network_does_wrong():
    with pytest.raises(UsageError, match=r"at most 0\.01 % in fp32"):
        InferenceOptimizer.build(
            NumpyInside(), "openvino_int8", calib_data=torch.randn(8, 6), input_sample=x
        )


def test_the_comparison_can_be_left_out():
    fast = build(NumberOfRows(), "jit_fp32", strict_check=False)
    assert fast(torch.randn(3, 6))["rows"] == 2


@slow
def test_a_search_says_what_differs():
    optimizer = InferenceOptimizer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.optimize(NumberOfRows(), x, includes=["openvino_fp32"], cache=False)
    row = optimizer.results().loc["openvino_fp32"]
    assert row["status"] == "differs"
    assert "'rows' is 2 instead of 3" in row["reason"]


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (torch.ones(2), torch.ones(2), None),
        (torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5]), "differs in 25 % of its elements"),
        (torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0]), None),
        (torch.tensor([1.0, 1.0]), torch.tensor([torch.nan, 1.0]), "not finite"),
        (torch.ones(2), torch.ones(2, dtype=torch.int64), "is of int64 instead of float32"),
        (torch.ones(2), torch.ones(2, dtype=torch.bfloat16), None),
        ({"a": None}, {"a": torch.ones(1)}, "'a' is a ndarray"),
        ((1, "word", None), (1, "word", None), None),
        ((), (), None),
    ],
)
def test_differences_are_told_in_words(one, other, words):
    found = difference(one, other, 1e-4)
    assert (found is None) if words is None else words in found.description


class TwoClasses(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
        self.body = nn.Sequential(*layers).eval()
        self.rows = torch.randn(64, 20, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():  # the logits of the first row are near zero
            self.body[4].bias -= self.body(self.rows[:1])[0] - 1e-5

    def forward(self, x):
        return self.body(x)


def test_a_sample_whose_results_are_near_zero_is_judged_with_others():
    model = TwoClasses()
    for accelerator in ("openvino", "onnxruntime"):
        fast = InferenceOptimizer.quantize(
            model, accelerator=accelerator, calib_data=model.rows, input_sample=model.rows[:1]
        )
        same = fast(model.rows).argmax(1) == model(model.rows).argmax(1)
        assert same.float().mean() > 0.9


def test_usual_sizes_are_medians_over_samples():
    sizes = typical_magnitudes([{"y": np.full(2, value), "n": 3} for value in (1e-6, 2.0, 3.0)])
    assert sizes == {"y": 2.0}
    near_zero = np.array([1e-6, -1e-6])
    assert difference(near_zero, near_zero + 1e-4, 1e-3) is not None
    assert difference(near_zero, near_zero + 1e-4, 1e-3, {"": 2.0}) is None
    assert difference(near_zero, near_zero + 1e-2, 1e-3, {"": 2.0}) is not None


def test_a_refusal_counts_the_rows_of_which_the_class_is_the_same():
    with refused("accuracy", "4"):
        build(NumpyInside(), "jit_fp32")


class Padded(nn.Module):
    def __init__(self, pool):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.net = nn.TransformerEncoder(layer, 1)
        self.pool = pool
        self.eval()

    def forward(self, x, padding):
        y = self.net(x, src_key_padding_mask=padding)
        return y[:, 0] if self.pool else y


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("accelerator", ["openvino", "onnxruntime"])
def test_padded_positions_do_not_count(pool, accelerator):
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    model, words = Padded(pool), torch.rand(2, 5, 8)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fast = InferenceOptimizer.trace(model, (words, padding), accelerator=accelerator)
    assert any("at padded positions" in str(each.message) for each in seen) is not pool
    expected, actual = model(words, padding), fast(words, padding)
    if not pool:
        expected, actual = expected[~padding], actual[~padding]
    torch.testing.assert_close(actual, expected.detach(), atol=1e-5, rtol=1e-4)


class Labelled(Layer):
    def forward(self, ids, mask=None, labels=None):
        y = self.layer(ids if mask is None else ids * mask)
        return y if labels is None else (nn.functional.cross_entropy(y, labels), y)


@pytest.mark.parametrize("with_sample", [False, True])
def test_labels_of_calibration_data_are_no_inputs(with_sample):
    model = Labelled()
    rows = [{"ids": torch.randn(6), "mask": torch.ones(6), "labels": i % 4} for i in range(16)]
    inputs = {key: torch.stack([row[key] for row in rows[:4]]) for key in ("ids", "mask")}
    sample = {"input_sample": inputs} if with_sample else {}
    loader = torch.utils.data.DataLoader(rows, 8)
    for accelerator in ("openvino", "onnxruntime"):
        int8 = InferenceOptimizer.quantize(
            model, accelerator=accelerator, calib_data=loader, **sample
        )
        assert int8(**inputs).shape == (4, 4)
        assert list(int8.forward_args) == ["ids", "mask"]


def test_labels_of_the_sample_are_inputs():
    model = Labelled()
    sample = {"ids": torch.randn(4, 6), "labels": torch.arange(4)}
    fast = InferenceOptimizer.trace(model, sample, accelerator="onnxruntime")
    torch.testing.assert_close(fast(**sample)[0], model(**sample)[0].detach())
