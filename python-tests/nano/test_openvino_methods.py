"""Models of PyTorch in OpenVINO: converted, called, saved and loaded."""

import copy
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.structure import flatten
from bigdl.nano.openvino.network import write_network
from bigdl.nano.pytorch import InferenceOptimizer

pytest.importorskip("openvino")


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8, 4)
        self.channels = 3

    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))

    def report(self):
        return f"{self.channels} channels"


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, extra=None, scale=2, *, flip=False):
        hidden = self.linear(x) * scale
        if extra is not None:
            hidden = hidden + extra["a"] * extra["b"][0]
        if flip:
            hidden = -hidden
        return {"out": hidden, "steps": [hidden, (hidden + 1, {"twice": 2 * hidden})], "count": 3}


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y):
        return self.linear(x) + y, x


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, ids):
        return {"hidden": self.encoder(self.embedding(ids))}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)

    def forward(self, x):
        steps, (hidden, _) = self.lstm(x)
        return steps[:, -1], hidden


class Branching(nn.Module):
    """Goes one of two ways, by its data."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        if x.sum() > 0:
            return self.linear(x) * 2
        return self.linear(x) - 1


class BranchingInADict(Branching):
    def forward(self, x):
        return {"y": super().forward(x)}


class Unconvertible(nn.Module):
    def forward(self, x):
        return torch.linalg.matrix_exp(torch.linalg.eigvals(x).real[:, None] * x)


def _extra(rows):
    return {"a": torch.randn(rows, 4), "b": [torch.randn(rows, 4)]}


MODELS = {
    "convolutions": (Convolutions, lambda n: (torch.randn(n, 3, 8, 8),)),
    "nested": (Nested, lambda n: (torch.randn(n, 4), _extra(n))),
    "two inputs": (TwoInputs, lambda n: (torch.randn(n, 4), torch.randn(n, 4))),
    "transformer": (Transformer, lambda n: (torch.randint(0, 50, (n, 5)),)),
    "recurrent": (Recurrent, lambda n: (torch.randn(n, 5, 8),)),
}


def make(name):
    torch.manual_seed(0)
    cls, sample = MODELS[name]
    return cls(), sample


def trace(model, sample, **keywords):
    return InferenceOptimizer.trace(model, sample, accelerator="openvino", **keywords)


def assert_close(expected, given, decimal=5):
    left, shape = flatten(expected)
    right, other = flatten(given)
    assert shape == other
    for one, two in zip(left, right, strict=True):
        np.testing.assert_almost_equal(one.detach().numpy(), np.asarray(two), decimal)


@pytest.fixture(scope="module")
def convolutions():
    """Return a model, its sample, and the model in OpenVINO with one thread."""
    model, sample = make("convolutions")
    model.train()
    (x,) = sample(2)
    return model, x, trace(model, x, thread_num=1)


@pytest.mark.slow_cases("convolutions", "nested", "recurrent", "transformer")
@pytest.mark.parametrize("name", MODELS)
def test_results_are_the_models_own_with_any_batch_size_and_after_load(name, tmp_path):
    model, sample = make(name)
    fast = trace(model, sample(2))
    InferenceOptimizer.save(fast, tmp_path / "saved")
    loaded = InferenceOptimizer.load(tmp_path / "saved")
    model.eval()
    for rows in (2, 1, 5):
        args = sample(rows)
        with torch.no_grad():
            expected = model(*args)
        assert_close(expected, fast(*args))
        assert_close(expected, loaded(*args))
    assert not list(tmp_path.rglob("*.pkl"))


@pytest.mark.slow
def test_equal_shapes_give_equal_bits_and_copies_work(convolutions):
    _, _, fast = convolutions
    inputs = [torch.randn(rows, 3, 8, 8) for rows in (1, 2, 3, 4, 5, 6)]
    first = [fast(x) for x in inputs]
    assert all(torch.equal(one, fast(x)) for one, x in zip(first, inputs, strict=True))
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert_close(first[1], twin(inputs[1]))


@pytest.mark.slow
def test_keywords_and_defaults_are_those_of_forward():
    model, sample = make("nested")
    x, extra = sample(2)
    fast = trace(model, (x, extra), example_kwarg_inputs={"flip": True})
    model.eval()
    with torch.no_grad():
        expected = model(x, extra, flip=True)
    assert_close(expected, fast(x, extra=extra))
    assert_close(expected, fast(extra=extra, x=x, flip=True))
    assert_close(expected, fast(x, extra, 2))
    with pytest.raises(RuntimeError, match="You shouldn't pass arguement x as it has been passed"):
        fast(x, extra, x=x)
    with pytest.raises(UsageError, match="'scale' was fixed at 2"):
        fast(x, extra, scale=3)


@pytest.mark.slow
def test_a_branch_that_depends_on_data_is_kept():
    model = Branching()
    fast = trace(model, torch.ones(2, 3))
    for x in (torch.ones(4, 3), -torch.ones(1, 3)):
        assert_close(model(x), fast(x))


@pytest.mark.slow
def test_a_branch_that_cannot_be_kept_is_said_to_be_lost():
    with pytest.warns(UserWarning, match="BranchingInADict branches on its data"):
        trace(BranchingInADict(), torch.ones(2, 3))


@pytest.mark.slow
def test_why_a_model_cannot_be_converted_is_one_line():
    with pytest.raises(UsageError, match="Unconvertible cannot be converted to OpenVINO: ") as info:
        trace(Unconvertible(), torch.randn(2, 2))
    assert "\n" not in str(info.value)


def test_the_users_model_stays_as_it_is_and_may_be_trained_on(convolutions):
    model, x, fast = convolutions
    assert all(part.training for part in model.modules())
    before = fast(x)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        model.head.weight.add_(1)
    assert torch.equal(fast(x), before)
    model.load_state_dict(weights)


def test_attributes_of_the_model_are_found(convolutions, tmp_path):
    model, _, fast = convolutions
    assert fast.channels == 3
    assert fast.report() == "3 channels"
    assert fast.forward_args == ["x"]
    text = "'PytorchOpenVINOModel' object has no attribute 'width'"
    with pytest.raises(AttributeError, match=text):
        _ = fast.width
    InferenceOptimizer.save(fast, tmp_path)
    with pytest.raises(AttributeError, match="no attribute 'channels'"):
        _ = InferenceOptimizer.load(tmp_path).channels
    assert InferenceOptimizer.load(tmp_path, model=model).channels == 3


def test_threads_hold_in_openvino_in_the_context_and_after_load(convolutions, tmp_path):
    _, _, fast = convolutions
    InferenceOptimizer.save(fast, tmp_path)
    for model in (fast, InferenceOptimizer.load(tmp_path)):
        assert model.nano_network.num_threads == 1
        with InferenceOptimizer.get_context(model) as context:
            assert torch.get_num_threads() == context.thread_num == 1


def test_properties_of_openvino_are_applied_and_saved(tmp_path):
    config = {"PERFORMANCE_HINT": "THROUGHPUT", "CACHE_DIR": str(tmp_path / "cache")}
    fast = InferenceOptimizer.build(
        nn.Linear(3, 2), "openvino_fp32", input_sample=torch.ones(1, 3), openvino_config=config
    )
    assert fast.additional_config == config
    InferenceOptimizer.save(fast, tmp_path / "saved")
    loaded = InferenceOptimizer.load(tmp_path / "saved", cache_dir=str(tmp_path / "other"))
    assert loaded.final_config["PERFORMANCE_HINT"] == "THROUGHPUT"
    assert loaded.final_config["INFERENCE_PRECISION_HINT"] == "f32"
    assert list((tmp_path / "other").iterdir())


@pytest.mark.slow
def test_results_may_be_ndarrays(convolutions):
    model, x, _ = convolutions
    fast = trace(model, x, output_tensors=False)
    result = fast(x.numpy())
    assert isinstance(result, np.ndarray)
    assert fast(x[:1].double())[0] == pytest.approx(result[0], abs=1e-6)


@pytest.mark.slow
def test_sizes_are_fixed_unless_dynamic_axes_say_otherwise():
    model = nn.Sequential(nn.ReLU(), nn.Softmax(-1))
    x = torch.ones(2, 3)
    fixed = trace(model, x, dynamic_axes=False)
    with pytest.raises(RuntimeError, match=r"takes .*\[2,3\], but got"):
        fixed(torch.ones(1, 3))
    wide = trace(model, x, dynamic_axes={"input": {1: "width"}, "output": {1: "width"}})
    assert wide(torch.ones(2, 7)).shape == (2, 7)
    with pytest.raises(RuntimeError):
        wide(torch.ones(3, 7))
    for wrong, text in (({"z": [0]}, "inputs are input"), ({"input": [2]}, "gives .2.")):
        with pytest.raises(UsageError, match=text):
            trace(model, x, dynamic_axes=wrong)


@pytest.mark.slow
def test_reshape_does_nothing_for_equal_shapes_and_says_why_it_fails(convolutions):
    model, x, _ = convolutions
    fast = trace(model, x)
    compiled = fast.nano_network.compiled
    assert fast.reshape("x[?,3,8,8]") == (True, None)
    assert fast.nano_network.compiled is compiled
    ok, error = fast.reshape("x[?,5,8,8]")
    assert not ok
    assert "Failed to reshape this model." in error
    assert fast.nano_network.compiled is compiled
    assert fast.reshape("[1,3,16,16]") == (True, None)
    assert fast(torch.ones(1, 3, 16, 16)).shape == (1, 4)
    with pytest.raises(RuntimeError):
        fast(x)


@pytest.mark.slow
def test_many_inputs_are_predicted_in_order():
    model, sample = make("nested")
    fast = trace(model, sample(2))
    model.eval()
    inputs = [sample(rows) for rows in (1, 4, 2)]
    with torch.no_grad():
        expected = [model(*args) for args in inputs]
    given = [inputs[0], {"x": inputs[1][0], "extra": inputs[1][1]}, list(inputs[2])]
    for requests in (0, 2):
        for one, other in zip(expected, fast.async_predict(given, requests), strict=True):
            assert_close(one, other)
    with pytest.raises(UsageError, match="extra"):
        fast.async_predict([inputs[0], inputs[1][0]])


def test_bf16_computes_in_bf16(convolutions):
    model, x, exact = convolutions
    fast = InferenceOptimizer.quantize(
        model, precision="bf16", accelerator="openvino", input_sample=x
    )
    assert fast.additional_config["INFERENCE_PRECISION_HINT"] == "bf16"
    difference = (fast(x) - exact(x)).abs().max()
    assert 0 < difference < 0.02
    with refused("unsupported", "bfloat16"):
        InferenceOptimizer.quantize(model, precision="bf16", accelerator="openvino", device="GPU")


def test_fp16_halves_the_files(tmp_path):
    model, x = nn.Linear(256, 256), torch.randn(2, 256)
    half = InferenceOptimizer.quantize(model, precision="fp16", input_sample=x)
    assert_close(model(x), half(x), decimal=2)
    weights = []
    for name, fast in (("fp16", half), ("fp32", trace(model, x))):
        InferenceOptimizer.save(fast, tmp_path / name)
        weights.append((tmp_path / name / "ov_saved_model.bin").stat().st_size)
    assert weights[0] < 0.6 * weights[1]
    assert_close(half(x), InferenceOptimizer.load(tmp_path / "fp16")(x))


@pytest.mark.slow
def test_compression_halves_the_directory_and_needs_the_model(tmp_path):
    model, x = nn.Linear(256, 256), torch.randn(2, 256)
    fast = trace(model, x, thread_num=1, dynamic_axes={"input": [0]})
    before = fast(x)
    InferenceOptimizer.save(fast, tmp_path / "fp32")
    InferenceOptimizer.save(fast, tmp_path / "bf16", compression="bf16")
    assert torch.equal(fast(x), before)
    sizes = [sum(f.stat().st_size for f in (tmp_path / n).iterdir()) for n in ("bf16", "fp32")]
    assert sizes[0] < 0.8 * sizes[1]
    for keywords, name in (({"input_sample": x}, "model"), ({"model": model}, "input_sample")):
        with pytest.raises(RuntimeError) as info:
            InferenceOptimizer.load(tmp_path / "bf16", **keywords)
        assert str(info.value) == (
            f"You must pass {name} when loading this model which was saved with compression "
            "precision."
        )
    loaded = InferenceOptimizer.load(tmp_path / "bf16", model=nn.Linear(256, 256), input_sample=x)
    assert_close(before, loaded(x), decimal=1)
    assert (before - loaded(x)).abs().max() < 5e-2
    assert loaded.nano_network.num_threads == 1
    again = InferenceOptimizer.load(tmp_path / "fp32")
    with pytest.raises(UsageError, match="pass model when loading"):
        InferenceOptimizer.save(again, tmp_path / "again", compression="bf16")


def test_shapes_and_device_are_chosen_at_load(convolutions, tmp_path):
    _, x, fast = convolutions
    InferenceOptimizer.save(fast, tmp_path)
    loaded = InferenceOptimizer.load(tmp_path, shapes="x[1,3,8,8]")
    assert_close(fast(x[:1]), loaded(x[:1]))
    with pytest.raises(RuntimeError):
        loaded(x)
    with refused("processor-unsupported", "GPU.7"):
        InferenceOptimizer.load(tmp_path, device="GPU.7")


class _Trap:
    def __reduce__(self):
        return Path.touch, (Path("trapped"),)


@pytest.mark.slow
def test_a_directory_of_bigdl_2_is_read_without_its_pickle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, sample = make("two inputs")
    args = sample(2)
    saved = tmp_path / "old"
    write_network(trace(model, args).ov_model, saved)
    (saved / "matadata.pkl").write_bytes(pickle.dumps(_Trap()))
    (saved / "nano_model_meta.yml").write_text(
        "ModelType: PytorchOpenVINOModel\nxml_path: ov_saved_model.xml\n"
        "weight_path: ov_saved_model.bin\nmetadata_path: matadata.pkl\n"
        "config: {CPU_THREADS_NUM: '1'}\ndevice: CPU\noutput_tensors: true\n",
        encoding="utf-8",
    )
    with pytest.warns(UserWarning, match="written by BigDL 2"):
        loaded = InferenceOptimizer.load(saved)
    assert loaded.forward_args == ["x", "y"]
    assert loaded.thread_num == loaded.nano_network.num_threads == 1
    assert_close(model(*args), loaded(args[0], y=args[1]))
    assert not Path("trapped").exists()


MEAN, SCALE = [1.0, 2.0, 3.0], [2.0, 4.0, 8.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "keywords",
    [
        {"mean_value": MEAN, "scale_values": SCALE},
        {"mean_value": "[1,2,3]", "scale_values": "x[2,4,8]", "layout": "NCHW"},
        {"mean_value": {"x": MEAN}, "scale": tuple(SCALE), "layout": {"x": "nchw"}},
    ],
    ids=["lists", "text", "mappings"],
)
def test_means_and_scales_are_built_in(convolutions, keywords):
    model, x, exact = convolutions
    fast = trace(model, x, **keywords)
    mean, scale = (torch.tensor(each)[:, None, None] for each in (MEAN, SCALE))
    assert_close(exact((x - mean) / scale), fast(x))


@pytest.mark.slow
def test_layouts_channels_shapes_and_types_are_built_in(convolutions):
    model, x, exact = convolutions
    turned = trace(model, x, layout="nchw->nhwc", strict_check=False)
    assert_close(exact(x), turned(x.permute(0, 2, 3, 1).contiguous()))
    assert_close(exact(x.flip(1)), trace(model, x, reverse_input_channels=True)(x))
    shaped = trace(model, x, input="x", input_shape=[2, 3, 8, 8], data_type="FP16")
    assert str(shaped.ov_model.inputs[0].partial_shape) == "[2,3,8,8]"
    assert_close(exact(x), shaped(x), decimal=2)


@pytest.mark.slow_cases(
    "data_type-data_type must be",
    "input-input_shape-names 1 inputs",
    "input-no input 'z'",
    "input_shape-cannot have inputs",
    "layout-do not fit",
    "layout-layout is text",
    "mean_value-are numbers",
    "mean_value-do not fit",
    "mean_value-no input 'z'",
    "openvino_config-cannot compile",
    "opset_version-'opset_version' is no keyword",
)
@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"opset_version": 13}, "'opset_version' is no keyword"),
        ({"mean_value": "[a]"}, "are numbers"),
        ({"mean_value": [1.0, 2.0]}, "do not fit"),
        ({"mean_value": {"z": [1]}}, "no input 'z'"),
        ({"layout": "->"}, "layout is text"),
        ({"layout": "NC"}, "do not fit"),
        ({"data_type": "INT7"}, "data_type must be"),
        ({"input": "z"}, "no input 'z'"),
        ({"input": "x", "input_shape": "[1,3,8,8],[1]"}, "names 1 inputs"),
        ({"input_shape": "[1,5,8,8]"}, "cannot have inputs"),
        ({"device": "GPU.9"}, "Your machine don't have GPU.9 device"),
        ({"device": "TPU"}, "only support CPU, GPU and VPUX"),
        ({"openvino_config": {"NO_SUCH": 1}}, "cannot compile"),
        ({"thread_num": 0}, "thread_num"),
        ({"simplification": False}, "does not apply"),
    ],
    ids=lambda value: "-".join(f"{k}" for k in value) if isinstance(value, dict) else value,
)
def test_what_does_not_fit_is_refused(convolutions, keywords, text):
    model, x, _ = convolutions
    with pytest.raises(UsageError, match=text):
        trace(model, x, **keywords)


def test_a_vpu_needs_means_to_quantize(convolutions):
    model, x, _ = convolutions
    with refused("argument-missing", "mean_value"):
        InferenceOptimizer.quantize(
            model, precision="fp16", accelerator="openvino", device="VPUX", input_sample=x
        )


def test_a_model_in_openvino_is_not_converted_twice(convolutions):
    model, x, fast = convolutions
    with pytest.raises(UsageError, match="not traced or quantized"):
        trace(fast, x)
    half = InferenceOptimizer.quantize(fast, precision="bf16", accelerator="openvino")
    assert_close(fast(x), half(x), decimal=2)
    assert half.channels == model.channels


@pytest.mark.slow
def test_no_warning_reaches_the_user():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(Recurrent(), torch.randn(2, 5, 8))
