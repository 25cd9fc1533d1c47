"""Methods of ONNX Runtime: conversion, calls, session options, saved directories."""

import copy
import io
import logging
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from refusals import refused
from small_models import (
    Branching,
    Convolutional,
    Encoder,
    Nested,
    Recurrent,
    Tabular,
    images,
    seeded,
)
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration import methods
from bigdl.nano.pytorch import InferenceOptimizer
from bigdl.nano.pytorch.inference.source import evaluating


class Wide(nn.Module):
    """Weights that are worth compressing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))

    def forward(self, x):
        return self.layers(x)


def trace(model, sample, **options):
    return InferenceOptimizer.trace(model, sample, accelerator="onnxruntime", **options)


def eager(model, *args, **kwargs):
    with evaluating(model):
        return model(*args, **kwargs)


def assert_close(given, expected):
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-4)


def ids(rows, length=7):
    return torch.arange(rows * length).reshape(rows, length) % 50


@pytest.fixture(scope="module")
def model():
    return seeded(Convolutional)


@pytest.fixture(scope="module")
def traced(model):
    return trace(model, images(1), thread_num=2)


@pytest.fixture(scope="module")
def nested():
    module = seeded(Nested)
    sample = (torch.ones(1, 6), {"a": torch.ones(1, 4), "b": torch.ones(1, 2)})
    return module, trace(module, sample)


def save(model, path, **options):
    InferenceOptimizer.save(model, path, **options)
    return path


# -- conversion ------------------------------------------------------------------------------------


def test_the_names_of_onnx_runtime_are_there_in_order():
    found = {name: m for name, m in methods("torch").items() if m.accelerator == "onnxruntime"}
    assert list(found) == [
        "onnxruntime_fp32",
        "onnxruntime_int8_qlinear",
        "onnxruntime_int8_integer",
        "onnxruntime_int8_nncf",
    ]
    assert [m.default for m in found.values()] == [True, True, False, False]
    assert found["onnxruntime_fp32"].option == "onnxruntime"
    assert found["onnxruntime_int8_qlinear"].option == "inc + onnxruntime + qlinear"


def test_a_traced_model_agrees_with_the_original_for_any_batch(model, traced):
    for rows in (1, 2, 5):
        assert_close(traced(images(rows)), eager(model, images(rows)))


def test_tracing_changes_nothing_in_the_model():
    module = seeded(Convolutional).train()
    module.features.eval()
    before = copy.deepcopy(module.state_dict())
    trace(module, images(1))
    assert module.training
    assert not module.features.training
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())


@pytest.mark.slow_cases("LSTM", "transformer", "transformer with mask")
@pytest.mark.parametrize(
    ("build", "sample", "call"),
    [
        pytest.param(Recurrent, torch.ones(1, 5, 6), (torch.rand(3, 5, 6),), id="LSTM"),
        pytest.param(
            Tabular,
            (torch.ones(1, 5), torch.ones(1, dtype=torch.int64)),
            (torch.rand(4, 5), torch.tensor([0, 9, 3, 1])),
            id="two inputs",
        ),
        pytest.param(Encoder, ids(1), (ids(3),), id="transformer"),
        pytest.param(
            Encoder,
            (ids(2), torch.ones(2, 7)),
            (ids(3), torch.tensor([[1.0] * 7, [1.0] * 5 + [0] * 2, [1.0] + [0] * 6])),
            id="transformer with mask",
        ),
    ],
)
def test_kinds_of_models(build, sample, call):
    module = seeded(build)
    assert_close(trace(module, sample)(*call), eager(module, *call))


def test_nested_inputs_and_outputs_keep_their_form(nested):
    module, fast = nested
    x, more = torch.rand(3, 6), {"b": torch.rand(3, 2), "a": torch.rand(3, 4)}
    given, expected = fast(x, more), eager(module, x, more)
    assert_close(given, expected)
    assert isinstance(given["parts"], list)
    assert isinstance(given["parts"][1], tuple)
    assert given["parts"][1][1].shape == ()
    assert fast.forward_args == ["x", "more.a", "more.b"]
    assert [port.name for port in fast.ortsess.get_inputs()] == ["x", "more_a", "more_b"]


def test_arguments_come_by_position_and_by_name(nested):
    module, fast = nested
    x, more = torch.rand(2, 6), {"a": torch.rand(2, 4), "b": torch.rand(2, 2)}
    expected = eager(module, x, more)
    assert_close(fast(x, more=more), expected)
    assert_close(fast(more=more, x=x), expected)
    assert_close(fast(x, more, scale=2.0), expected)
    with refused("argument-conflict"):
        fast(x, more, x=x)
    with refused("model-input", "'scale'", "2.0"):
        fast(x, more, scale=3.0)


def test_an_input_that_the_model_does_not_use_is_still_an_argument():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x, ignored):
            return self.linear(x), x

    module, x = seeded(Picky), torch.rand(3, 4)
    sample = (torch.ones(2, 4), torch.ones(2, 1))
    for options in ({}, {"dynamo": False}):
        fast = trace(module, sample, **options)
        assert_close(fast(x, torch.ones(3, 1)), eager(module, x, None))


def test_a_model_with_control_flow_is_traced_and_the_log_says_so(caplog):
    module = seeded(Branching)
    with caplog.at_level(logging.WARNING):
        fast = trace(module, torch.ones(2, 4))
    assert_close(fast(torch.ones(5, 4)), eager(module, torch.ones(5, 4)))
    (record,) = (r for r in caplog.records if r.name.startswith("bigdl"))
    assert "Branching was traced for ONNX" in record.getMessage()
    assert "\n" not in record.getMessage()
    with refused("model-unsupported"):
        trace(module, torch.ones(2, 4), dynamo=True)


@pytest.mark.slow
def test_the_first_dimensions_may_differ_between_inputs():
    class Scores(nn.Module):
        def forward(self, users, items):
            return users @ items.T

    users, items = torch.rand(5, 3), torch.rand(7, 3)
    fast = trace(Scores(), (users[:2], items[:4]))
    assert_close(fast(users, items), users @ items.T)


def test_dynamic_axes_false_keeps_the_shape_of_the_sample(model):
    fast = trace(model, images(2), dynamic_axes=False)
    assert_close(fast(images(2)), eager(model, images(2)))
    with refused("model-input", "3", "2"):
        fast(images(3))


@pytest.mark.slow
def test_dynamic_axes_names_dimensions_of_inputs():
    module = seeded(Encoder)
    fast = trace(module, ids(1), dynamic_axes={"input_ids": {0: "batch", 1: "length"}})
    assert_close(fast(ids(3, 9)), eager(module, ids(3, 9)))
    fast = trace(module, ids(1), dynamic_axes={"input_ids": [1]})
    assert_close(fast(ids(1, 9)), eager(module, ids(1, 9)))
    with pytest.raises(UsageError, match="another shape"):
        fast(ids(3, 9))


def test_keywords_of_the_exporter_are_passed_on(model):
    import onnx

    fast = trace(model, images(1), opset_version=18, simplification=False)
    assert onnx.load(fast.nano_network.file.path).opset_import[0].version == 18
    assert_close(fast(images(2)), eager(model, images(2)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"opset": 18}, "There is no argument 'opset', neither here nor of torch.onnx.export"),
        ({"input_names": ["x"]}, "'input_names' of torch.onnx.export cannot be passed on"),
        ({"dynamic_axes": {"y": [0]}}, "dynamic_axes names 'y', but the inputs are x"),
        ({"dynamic_axes": {"x": [4]}}, "dynamic_axes gives .4. for 'x', which has 4 dimensions"),
        ({"dynamic_axes": "batch"}, "dynamic_axes must be True, False or a dict"),
        ({"onnxruntime_session_options": {}}, "must be an onnxruntime.SessionOptions, not a dict"),
        ({"thread_num": 0}, "thread_num should be a positive integer"),
        ({"openvino_config": {"a": 1}}, "openvino_config=.* does not apply to method"),
        ({"inplace": True}, "inplace=True does not apply to method 'onnxruntime_fp32'"),
    ],
)
def test_wrong_options_are_refused(model, options, text):
    with pytest.raises(UsageError, match=text):
        trace(model, images(1), **options)


def test_what_onnx_does_not_know_is_refused_in_one_sentence():
    class Complex(nn.Module):
        def forward(self, x):
            return torch.linalg.eigvals(x)

    with refused("model-unsupported") as refusal:
        trace(Complex(), torch.eye(3))
    assert "\n" not in str(refusal.value)


# -- calls -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_number_types_are_cast_or_refused(model, traced):
    x = images(2)
    assert_close(traced(x.double()), eager(model, x))
    assert_close(traced(x.numpy()), eager(model, x))
    assert_close(
        traced(x.numpy().astype(np.float16)).round(decimals=1), traced(x).round(decimals=1)
    )
    module = seeded(Encoder)
    fast = trace(module, ids(1))
    assert_close(fast(ids(3).int()), eager(module, ids(3)))
    with refused("model-input", "'input_ids'", "int64"):
        fast(ids(3).float())


def test_inputs_need_not_lie_in_one_piece(model, traced):
    x = images(4).contiguous(memory_format=torch.channels_last)[::2]
    assert_close(traced(x), eager(model, x))


@pytest.mark.parametrize("x", [images(2)[0], images(2)[:, :, :9], images(2)[:, :2]])
def test_a_wrong_shape_is_refused_in_one_sentence(traced, x):
    with refused("model-input") as refusal:
        traced(x)
    assert "\n" not in str(refusal.value)


def test_results_may_be_arrays(model):
    fast = trace(model, images(1), output_tensors=False)
    given = fast(images(3))
    assert isinstance(given, np.ndarray)
    np.testing.assert_almost_equal(given, eager(model, images(3)).numpy(), decimal=5)


def test_results_belong_to_the_caller(traced):
    first = traced(images(2))
    kept = first.clone()
    traced(images(2, seed=1))
    assert torch.equal(first, kept)
    first += 1  # writable


def test_attributes_of_the_original_are_there(traced):
    assert traced.channels == 3
    assert traced.classify.out_features == 4
    with pytest.raises(
        AttributeError, match="'PytorchONNXRuntimeModel' object has no attribute 'width'"
    ):
        _ = traced.width


def test_threads_may_call_at_once(model, traced):
    inputs = [images(2, seed=seed) for seed in range(8)]
    found = [None] * len(inputs)

    def call(position):
        found[position] = traced(inputs[position])

    callers = [threading.Thread(target=call, args=(i,)) for i in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for x, y in zip(inputs, found, strict=True):
        assert_close(y, eager(model, x))


def test_a_copy_works_as_the_model_does(traced):
    assert torch.equal(copy.deepcopy(traced)(images(2)), traced(images(2)))


@pytest.mark.slow
def test_converting_says_nothing(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import logging, warnings\n"
        "warnings.simplefilter('error')\n"
        "from small_models import Convolutional, images, seeded\n"
        "from bigdl.nano.pytorch import InferenceOptimizer\n"
        "model = seeded(Convolutional)\n"
        "InferenceOptimizer.trace(model, images(1), accelerator='onnxruntime')\n"
        "InferenceOptimizer.quantize(model, accelerator='onnxruntime', calib_data=images(4))\n"
        "assert not logging.getLogger().handlers\n"
    )
    done = subprocess.run(
        [sys.executable, program],
        env={
            **os.environ,
            "PYTHONPATH": os.path.dirname(sys.modules["small_models"].__file__),
            "PYTHONWARNINGS": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- threads and session options -------------------------------------------------------------------


def test_thread_num_holds_for_the_session_and_for_the_context(traced):
    options = traced.session_options
    assert options.intra_op_num_threads == options.inter_op_num_threads == 2
    before = torch.get_num_threads()
    with InferenceOptimizer.get_context(traced):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_without_thread_num_there_are_no_more_threads_than_cores(model):
    fast = trace(model, images(1))
    assert 1 <= fast.session_options.intra_op_num_threads <= len(os.sched_getaffinity(0))
    assert fast.thread_num is None


@pytest.mark.slow
def test_session_options_of_the_user_are_used(model):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    fast = trace(model, images(1), onnxruntime_session_options=options)
    assert fast.session_options is options
    assert fast.session_options.intra_op_num_threads == 1
    assert fast.thread_num == 1
    fast = trace(model, images(1), onnxruntime_session_options=options, thread_num=2)
    assert options.intra_op_num_threads == options.inter_op_num_threads == 2
    assert_close(fast(images(2)), eager(model, images(2)))


# -- saved directories -----------------------------------------------------------------------------


def test_a_saved_model_needs_nothing_else(traced, tmp_path):
    path = save(traced, tmp_path / "model")
    assert {file.name for file in path.iterdir()} == {
        "nano_model_meta.yml",
        "onnx_saved_model.onnx",
    }
    meta = yaml.safe_load((path / "nano_model_meta.yml").read_text())
    assert meta["ModelType"] == "PytorchONNXRuntimeModel"
    assert meta["onnx_path"] == "onnx_saved_model.onnx"
    assert meta["intra_op_num_threads"] == meta["inter_op_num_threads"] == 2
    loaded = InferenceOptimizer.load(path)
    shutil.rmtree(path)
    assert torch.equal(loaded(images(3)), traced(images(3)))
    options = loaded.session_options
    assert options.intra_op_num_threads == options.inter_op_num_threads == loaded.thread_num == 2
    again = InferenceOptimizer.load(save(loaded, tmp_path / "again"))
    assert torch.equal(again(images(3)), traced(images(3)))


def test_attributes_are_there_again_with_the_original(model, traced, tmp_path):
    path = save(traced, tmp_path / "model")
    with pytest.raises(AttributeError, match="PytorchONNXRuntimeModel"):
        _ = InferenceOptimizer.load(path).channels
    assert InferenceOptimizer.load(path, model=model).channels == 3


def test_nesting_survives_saving(nested, tmp_path):
    module, fast = nested
    loaded = InferenceOptimizer.load(save(fast, tmp_path / "model"))
    x, more = torch.rand(2, 6), {"a": torch.rand(2, 4), "b": torch.rand(2, 2)}
    assert_close(loaded(x, more=more), eager(module, x, more))


def test_a_directory_may_be_a_dict_of_files(traced, tmp_path):
    path = save(traced, tmp_path / "model")
    files = {file.name: io.BytesIO(file.read_bytes()) for file in path.iterdir()}
    assert torch.equal(InferenceOptimizer.load(files)(images(1)), traced(images(1)))


def test_compression_halves_the_directory(tmp_path):
    module, x = seeded(Wide), torch.rand(4, 64)
    fast = trace(module, x, thread_num=1)
    before = fast(x)
    plain, small = save(fast, tmp_path / "plain"), tmp_path / "small"
    InferenceOptimizer.save(fast, small, compression="bf16")
    assert torch.equal(fast(x), before)
    assert size_of(small) < 0.6 * size_of(plain)
    loaded = InferenceOptimizer.load(small, model=module, input_sample=x)
    torch.testing.assert_close(loaded(x), before, atol=1e-2, rtol=0)
    assert loaded.session_options.intra_op_num_threads == 1
    for options, missing in [
        ({}, "model"),
        ({"input_sample": x}, "model"),
        ({"model": module}, "input_sample"),
    ]:
        with pytest.raises(RuntimeError) as refusal:
            InferenceOptimizer.load(small, **options)
        assert str(refusal.value) == (
            f"You must pass {missing} when loading this model which was saved with compression "
            "precision."
        )


def size_of(path):
    return sum(file.stat().st_size for file in path.iterdir())


def test_weights_that_are_too_large_for_one_file_are_in_a_second_one(tmp_path, monkeypatch):
    from bigdl.nano.acceleration import onnx_quantization

    monkeypatch.setattr(onnx_quantization, "MOST_BYTES", 0)
    module, x = seeded(Wide), torch.rand(4, 64)
    path = save(trace(module, x), tmp_path / "model", compression="bf16")
    data = path / "onnx_saved_model.onnx.data"
    assert data.stat().st_size >= 2 * 64 * 256
    loaded = InferenceOptimizer.load(path, module, x)
    again = save(loaded, tmp_path / "again")
    data.unlink()
    assert torch.equal(InferenceOptimizer.load(again, module, x)(x), loaded(x))


def test_a_directory_of_bigdl_2_is_read(model, traced, tmp_path):
    path = save(traced, tmp_path / "model")
    old = {
        "ModelType": "PytorchONNXRuntimeModel",
        "onnx_path": "onnx_saved_model.onnx",
        "metadata_path": "matadata.pkl",
        "intra_op_num_threads": 1,
        "inter_op_num_threads": 1,
        "output_tensors": True,
    }
    (path / "nano_model_meta.yml").write_text(yaml.safe_dump(old))
    (path / "matadata.pkl").write_bytes(b"cos\nabort\n(tR.")  # would end the process
    loaded = InferenceOptimizer.load(path, model=model)
    assert_close(loaded(images(3)), eager(model, images(3)))
    assert_close(loaded(x=images(3)), eager(model, images(3)))
    assert loaded.session_options.intra_op_num_threads == loaded.thread_num == 1
    assert loaded.channels == 3


def test_several_results_of_bigdl_2_come_as_a_tuple(nested, tmp_path):
    module, fast = nested
    path = save(fast, tmp_path / "model")
    meta = {"ModelType": "PytorchONNXRuntimeModel", "onnx_path": "onnx_saved_model.onnx"}
    (path / "nano_model_meta.yml").write_text(yaml.safe_dump(meta))
    with pytest.warns(UserWarning, match="the model returns a tuple"):
        loaded = InferenceOptimizer.load(path)
    x, a, b = torch.rand(2, 6), torch.rand(2, 4), torch.rand(2, 2)
    expected = eager(module, x, {"a": a, "b": b})
    hidden, (total, (more, mean)) = expected.values()
    assert_close(loaded(x, a, b), (hidden, total, more, mean))


@pytest.mark.parametrize(
    "options", [{"device": "GPU"}, {"cache_dir": "cache"}, {"shapes": "x[1,3,16,16]"}]
)
def test_options_of_openvino_do_not_apply_to_loading(traced, tmp_path, options):
    path = save(traced, tmp_path / "model")
    with refused("argument-conflict", "'onnxruntime_fp32'"):
        InferenceOptimizer.load(path, **options)


def test_a_damaged_file_is_refused(traced, tmp_path):
    path = save(traced, tmp_path / "model")
    (path / "onnx_saved_model.onnx").write_bytes(b"nothing")
    with refused("model-unsupported"):
        InferenceOptimizer.load(path)
    (path / "onnx_saved_model.onnx").unlink()
    with refused("path-missing", "onnx_saved_model"):
        InferenceOptimizer.load(path)


def test_temporary_files_go_with_the_model(model):
    fast = trace(model, images(1))
    folder = fast.nano_network.file.path.parent
    assert folder.exists()
    del fast
    assert not folder.exists()
