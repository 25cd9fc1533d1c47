"""Methods that stay with PyTorch: channels last, bf16, TorchScript, TorchInductor, int8."""

import os
import pickle
import shutil
import subprocess
import sys
import zipfile

import cloudpickle
import pytest
import torch
from refusals import refused
from small_models import Branching, Convolutional, Encoder, Nested, Recurrent, images, seeded

from bigdl.common.errors import UsageError
from bigdl.common.trust import UntrustedFileError
from bigdl.nano.acceleration import methods
from bigdl.nano.openvino.network import supports_bf16
from bigdl.nano.pytorch import InferenceOptimizer
from bigdl.nano.pytorch.inference.source import evaluating
from bigdl.testing.methods import AccelerationMethodContract


def both(stem):
    return [stem, f"{stem}_channels_last"]


OLD_NAMES = [
    "original",
    "fp32_channels_last",
    *both("fp32_ipex"),
    *both("bf16"),
    *both("bf16_ipex"),
    *("static_int8", "static_int8_ipex"),
    *both("jit_fp32"),
    *both("jit_bf16"),
    *both("jit_fp32_ipex"),
    *both("jit_bf16_ipex"),
    *both("jit_int8"),
]
CHEAP = ["fp32_channels_last", "bf16", "bf16_channels_last", "jit_fp32", "jit_bf16_channels_last"]


@pytest.fixture(scope="module")
def model():
    return seeded(Convolutional)


@pytest.fixture(scope="module")
def compiled(model):
    """One model of TorchInductor, which takes seconds to compile."""
    return InferenceOptimizer.trace(
        model, images(1), accelerator="jit", use_ipex=True, thread_num=1
    )


@pytest.fixture(scope="module")
def quantized(model):
    return InferenceOptimizer.quantize(model, calib_data=images(8), thread_num=1)


def eager(model, *args, **kwargs):
    with evaluating(model):
        return model(*args, **kwargs)


def test_the_old_names_of_pytorch_are_there_in_order():
    names = [name for name in methods("torch") if name in OLD_NAMES]
    assert names == OLD_NAMES


class TestCheapMethods(AccelerationMethodContract):
    optimizer = InferenceOptimizer

    @pytest.fixture(params=CHEAP, autouse=True)
    def _method(self, request):
        self.method = request.param
        self.tolerance = 2e-2 if "bf16" in self.method else 1e-5

    def model(self):
        return seeded(Convolutional)

    def sample(self, rows):
        return [images(rows)]


@pytest.mark.parametrize("name", CHEAP)
def test_attributes_of_the_original_are_those_of_the_accelerated_model(model, name, tmp_path):
    fast = InferenceOptimizer.build(model, name, input_sample=images(1))
    assert fast.channels == 3
    assert fast.describe() == "3 channels"
    owner = "Convolutional" if name in ("bf16", "bf16_channels_last") else type(fast).__name__
    with pytest.raises(AttributeError, match=f"'{owner}' object has no attribute 'width'"):
        fast.width  # noqa: B018
    InferenceOptimizer.save(fast, tmp_path / "m")
    assert InferenceOptimizer.load(tmp_path / "m", model=model).channels == 3


def test_a_loaded_model_computes_with_its_threads(model, tmp_path):
    fast = InferenceOptimizer.build(model, "jit_fp32", input_sample=images(1), thread_num=1)
    InferenceOptimizer.save(fast, tmp_path / "m")
    with InferenceOptimizer.get_context(InferenceOptimizer.load(tmp_path / "m", model=model)):
        assert torch.get_num_threads() == 1


@pytest.mark.slow
def test_a_compiled_model_agrees_with_the_original_for_any_batch(model, compiled):
    for rows in (1, 2, 7):
        torch.testing.assert_close(compiled(images(rows)), eager(model, images(rows)))


@pytest.mark.slow
def test_a_compiled_model_checks_what_compiled_code_does_not(compiled):
    with refused("model-input", "'x'", "'any'", "3"):
        compiled(torch.rand(2, 3, 17, 16))
    torch.testing.assert_close(compiled(images(2).double()), compiled(images(2)))


@pytest.mark.slow
def test_a_compiled_model_is_loaded_without_the_original_and_in_another_process(compiled, tmp_path):
    InferenceOptimizer.save(compiled, tmp_path / "m")
    assert sorted(os.listdir(tmp_path / "m")) == ["compiled.pt2", "nano_model_meta.yml"]
    torch.save(images(3), tmp_path / "x")
    program = (
        "import sys, torch\n"
        "from bigdl.nano.pytorch import InferenceOptimizer\n"
        "model = InferenceOptimizer.load(sys.argv[1] + '/m')\n"
        "with InferenceOptimizer.get_context(model):\n"
        "    y = model(torch.load(sys.argv[1] + '/x'))\n"
        "torch.save(y, sys.argv[1] + '/y')\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    assert torch.equal(torch.load(tmp_path / "y"), compiled(images(3)))


@pytest.mark.slow
def test_a_compiled_model_is_refused_on_a_lesser_processor(compiled, tmp_path):
    InferenceOptimizer.save(compiled, tmp_path / "m")
    meta = tmp_path / "m" / "nano_model_meta.yml"
    meta.write_text(meta.read_text().replace("isa:", "isa:\n- avx9000"))
    with pytest.raises(UsageError, match="compiled for a processor with avx9000"):
        InferenceOptimizer.load(tmp_path / "m")


EVIL = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) { fclose(fopen("VICTIM", "w")); }
"""


@pytest.mark.slow
def test_a_library_that_somebody_put_into_a_compiled_model_does_not_run(compiled, tmp_path):
    InferenceOptimizer.save(compiled, tmp_path / "m")
    package, victim = tmp_path / "m" / "compiled.pt2", tmp_path / "victim"
    (tmp_path / "evil.c").write_text(EVIL.replace("VICTIM", str(victim)))
    library = tmp_path / "evil.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "evil.c"], check=True)
    shutil.move(package, tmp_path / "old.pt2")
    with zipfile.ZipFile(tmp_path / "old.pt2") as old, zipfile.ZipFile(package, "w") as new:
        for name in old.namelist():
            data = library.read_bytes() if name.endswith(".so") else old.read(name)
            new.writestr(name, data)
    with pytest.raises(UntrustedFileError, match=r"compiled.pt2' is compiled code, which can run"):
        InferenceOptimizer.load(tmp_path / "m")
    assert not victim.exists()
    with pytest.raises(RuntimeError, match="undefined symbol"):  # so the attack is one
        InferenceOptimizer.load(tmp_path / "m", trust=True)
    assert victim.exists()


@pytest.mark.slow
def test_static_int8_agrees_with_the_original_and_is_saved(model, quantized, tmp_path):
    x = images(6, seed=1)
    expected = eager(model, x)
    torch.testing.assert_close(
        quantized(x), expected, atol=0.05 * float(expected.abs().max()), rtol=0
    )
    assert not torch.equal(quantized(x), expected)
    InferenceOptimizer.save(quantized, tmp_path / "m")
    loaded = InferenceOptimizer.load(tmp_path / "m")
    assert torch.equal(loaded(x), quantized(x))
    assert type(loaded).__name__ == "PytorchQuantizedModel"


@pytest.mark.slow
def test_static_int8_leaves_out_layers_to_keep_the_accuracy(model, quantized):
    x = images(32, seed=2)
    y = eager(model, x)

    def closeness(prediction, target):
        return 1 - float((prediction - target).abs().max() / target.abs().max())

    data = [(x, y)]
    kept = InferenceOptimizer.quantize(
        model, calib_data=data, metric=closeness, accuracy_criterion={"absolute": 2e-3}
    )
    assert closeness(quantized(x), y) < 1 - 2e-3 <= closeness(kept(x), y)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchao_int8", "int8_weight_only", "neural_compressor_int8"])
def test_the_newer_int8_methods_agree_with_the_original(name):
    if name.startswith("neural_compressor"):
        pytest.importorskip("neural_compressor")
    model, x = seeded(Convolutional), images(4)
    data = {"calib_data": x} if name.startswith("neural") else {}
    fast = InferenceOptimizer.build(model, name, input_sample=x, **data)
    torch.testing.assert_close(fast(x), eager(model, x), atol=0.05, rtol=0)


@pytest.mark.parametrize("name", ["jit_fp32", "bf16", "fp32_channels_last"])
def test_nested_inputs_defaults_and_outputs_survive(name):
    model = seeded(Nested)
    x, more = torch.rand(3, 6), {"a": torch.rand(3, 4), "b": torch.rand(3)}
    fast = InferenceOptimizer.build(model, name, input_sample=(x, more))
    found, expected = fast(x, more), eager(model, x, more)
    assert list(found) == ["hidden", "parts"]
    assert isinstance(found["parts"], list)
    assert isinstance(found["parts"][1], tuple)
    tolerance = 5e-2 if name == "bf16" else 1e-5
    torch.testing.assert_close(
        found, expected, atol=tolerance, rtol=tolerance, check_dtype=name != "bf16"
    )
    torch.testing.assert_close(fast(more=more, x=x), found)


def test_a_value_that_was_fixed_is_not_silently_kept():
    model = seeded(Nested)
    x, more = torch.rand(3, 6), {"a": torch.rand(3, 4), "b": torch.rand(3)}
    fast = InferenceOptimizer.build(model, "jit_fp32", input_sample=(x, more))
    with refused("model-input", "'scale'", "2.0", "3.0"):
        fast(x, more, scale=3.0)
    with refused("argument-conflict"):
        fast(x, more, x=x)
    with refused("argument-unknown", "'z'"):
        fast(x, more, z=1)


def test_control_flow_is_scripted_not_lost():
    model = seeded(Branching)
    fast = InferenceOptimizer.trace(model, torch.ones(2, 4), accelerator="jit")
    for x in (torch.ones(2, 4), -torch.ones(2, 4)):
        torch.testing.assert_close(fast(x), eager(model, x))


@pytest.mark.slow
def test_control_flow_is_compiled_in_parts(tmp_path):
    model = seeded(Branching)
    fast = InferenceOptimizer.build(model, "inductor_fp32", input_sample=torch.ones(2, 4))
    for x in (torch.ones(2, 4), -torch.ones(2, 4)):
        torch.testing.assert_close(fast(x), eager(model, x))
    InferenceOptimizer.save(fast, tmp_path / "m")
    with pytest.raises(UsageError, match="must pass model"):
        InferenceOptimizer.load(tmp_path / "m")
    loaded = InferenceOptimizer.load(tmp_path / "m", model=model)
    torch.testing.assert_close(loaded(torch.ones(2, 4)), fast(torch.ones(2, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inductor_fp32", "inductor_bf16"])
@pytest.mark.parametrize("cls", [Encoder, Recurrent])
def test_encoders_and_recurrent_networks_are_compiled(cls, name):
    model = seeded(cls)
    sample = torch.randint(0, 50, (2, 7)) if cls is Encoder else torch.rand(2, 5, 6)
    if cls is Recurrent and name == "inductor_bf16" and not supports_bf16():
        with pytest.raises(UsageError, match=r"does not run on the sample: .* LSTM"):
            InferenceOptimizer.build(model, name, input_sample=sample)
        return
    fast = InferenceOptimizer.build(model, name, input_sample=sample)
    torch.testing.assert_close(
        fast(sample), eager(model, sample), atol=5e-2, rtol=5e-2, check_dtype=False
    )


def test_bf16_runs_in_bf16_inside_its_context_and_out_of_it(model):
    fast = InferenceOptimizer.quantize(model, precision="bf16", input_sample=images(1))
    assert fast(images(1)).dtype is torch.float32
    with InferenceOptimizer.get_context(fast):
        assert fast(images(1)).dtype is torch.bfloat16
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.bfloat16
    assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32


def test_bf16_gives_what_autocast_gives(model):
    fast = InferenceOptimizer.quantize(model, precision="bf16", input_sample=images(1))
    with evaluating(model), torch.autocast("cpu", torch.bfloat16):
        expected = model(images(4))
    assert torch.equal(fast(images(4)), expected.float())


def test_channels_last_is_told_for_each_input():
    class Two(torch.nn.Module):
        def forward(self, volume, row):
            return volume.mean((1, 2, 3, 4)) + row.sum(1)

    fast = InferenceOptimizer.trace(
        Two(), (torch.rand(2, 3, 4, 4, 4), torch.rand(2, 5)), channels_last=True
    )
    assert fast.channels_last_available == ["channels_last_3d", "original"]


def test_the_compressed_directory_is_smaller_and_the_model_is_unchanged(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200))
    x = torch.rand(2, 200)
    before = eager(model, x)
    sizes = {}
    for compression in ("fp32", "bf16"):
        InferenceOptimizer.save(model, tmp_path / compression, compression=compression)
        sizes[compression] = sum(f.stat().st_size for f in (tmp_path / compression).iterdir())
    assert sizes["bf16"] < 0.8 * sizes["fp32"]
    assert torch.equal(eager(model, x), before)
    loaded = InferenceOptimizer.load(tmp_path / "bf16", model=model)
    torch.testing.assert_close(eager(loaded, x), before, atol=5e-2, rtol=0)


def test_a_model_is_loaded_from_a_dict_of_files(model, tmp_path):
    fast = InferenceOptimizer.trace(model, images(1), accelerator="jit")
    InferenceOptimizer.save(fast, tmp_path / "m")
    files = {file.name: file.open("rb") for file in (tmp_path / "m").iterdir()}
    loaded = InferenceOptimizer.load(files)
    for file in files.values():
        file.close()
    assert torch.equal(loaded(images(2)), fast(images(2)))


def test_saving_again_replaces_a_model_and_keeps_other_files(model, tmp_path):
    place = tmp_path / "mine"
    place.mkdir()
    (place / "notes.txt").write_text("keep")
    InferenceOptimizer.save(model, place)
    assert (place / "notes.txt").read_text() == "keep"
    fast = InferenceOptimizer.trace(model, images(1), accelerator="jit")
    InferenceOptimizer.save(fast, tmp_path / "other")
    InferenceOptimizer.save(model, tmp_path / "other")
    assert sorted(os.listdir(tmp_path / "other")) == ["nano_model_meta.yml", "saved_weight.pt"]
    assert sorted(os.listdir(tmp_path)) == ["mine", "other"]


WRONG = {
    "nothing to do": (lambda m: InferenceOptimizer.trace(m, images()), "nothing to do"),
    "precision in trace": (
        lambda m: InferenceOptimizer.trace(m, images(), precision="int8"),
        "Don't pass precision when call InferenceOptimizer.trace",
    ),
    "unknown accelerator": (
        lambda m: InferenceOptimizer.trace(m, images(), accelerator="tpu"),
        "Accelerator tpu is invalid",
    ),
    "unknown precision": (
        lambda m: InferenceOptimizer.quantize(m, "int2"),
        "Only support 'int8', 'bf16', 'fp16', 'int4' now, no support for int2.",
    ),
    "unknown approach": (
        lambda m: InferenceOptimizer.quantize(m, approach="slow"),
        "Approach should be 'static' or 'dynamic', slow is invalid.",
    ),
    "unknown jit method": (
        lambda m: InferenceOptimizer.trace(m, images(), accelerator="jit", jit_method="x"),
        "jit_method x is invalid.",
    ),
    "a device without openvino": (
        lambda m: InferenceOptimizer.trace(m, images(), accelerator="jit", device="GPU"),
        "Device GPU is available with accelerator 'openvino' only",
    ),
    "no calibration data": (
        lambda m: InferenceOptimizer.quantize(m, input_sample=images()),
        "Calibration data are needed",
    ),
    "no sample": (
        lambda m: InferenceOptimizer.trace(m, accelerator="jit"),
        "pass input_sample",
    ),
    "a sample of another shape": (
        lambda m: InferenceOptimizer.trace(m, torch.rand(2, 4), accelerator="jit"),
        "Convolutional fails on the sample of its input: RuntimeError",
    ),
    "an argument of another runtime": (
        lambda m: InferenceOptimizer.quantize(m, "bf16", openvino_config={"a": "b"}),
        "openvino_config={'a': 'b'} does not apply to method 'bf16'",
    ),
    "an unknown method": (
        lambda m: InferenceOptimizer.build(m, "faster"),
        "There is no method 'faster'",
    ),
    "a criterion without metric": (
        lambda m: InferenceOptimizer.quantize(
            m, calib_data=images(), accuracy_criterion={"relative": 0.1}
        ),
        "accuracy_criterion needs a metric",
    ),
    "a strange criterion": (
        lambda m: InferenceOptimizer.quantize(
            m, calib_data=images(), eval_func=lambda m: 1.0, accuracy_criterion={"drop": 1}
        ),
        "accuracy_criterion must be",
    ),
    "no model": (lambda m: InferenceOptimizer.trace("m", accelerator="jit"), "nn module"),
    "an accelerated model": (
        lambda m: InferenceOptimizer.trace(
            InferenceOptimizer.trace(m, images(), accelerator="jit"), accelerator="jit"
        ),
        "Expect a nn.Module instance that is not traced or quantized",
    ),
    "threads": (
        lambda m: InferenceOptimizer.trace(m, images(), accelerator="jit", thread_num=0),
        "thread_num should be a positive integer",
    ),
    "a missing directory": (lambda m: InferenceOptimizer.load("/no/dir"), "/no/dir doesn't exist."),
    "an unknown compression": (
        lambda m: InferenceOptimizer.save(m, "/tmp/x", compression="zip"),
        "compression must be 'fp32' or 'bf16'",
    ),
    "a context of nothing": (lambda m: InferenceOptimizer.get_context("m"), "takes models"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_gets_one_sentence(model, case):
    call, text = WRONG[case]
    with pytest.raises(UsageError) as caught:
        call(model)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_contexts_nest_and_restore():
    one = InferenceOptimizer.quantize(
        torch.nn.Linear(2, 2), "bf16", input_sample=torch.ones(1, 2), thread_num=1
    )
    two = InferenceOptimizer.trace(
        torch.nn.Linear(2, 2), torch.ones(1, 2), accelerator="jit", thread_num=2
    )
    before = torch.get_num_threads()
    with InferenceOptimizer.get_context(two) as outer:
        assert torch.get_num_threads() == outer.thread_num == 2
        with InferenceOptimizer.get_context(one):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        assert not torch.is_grad_enabled()
    assert torch.get_num_threads() == before
    assert torch.is_grad_enabled()
    with pytest.warns(UserWarning, match="different numbers of threads"):
        merged = InferenceOptimizer.get_context(one, [two])
    assert merged.thread_num == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp32_ipex", "fp32_ipex_channels_last"])
def test_compiled_graphs_take_tensors_of_any_strides(name):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 2)
    ).eval()
    x = torch.rand(2, 3, 8, 8)
    fast = InferenceOptimizer.build(model, name, input_sample=x)
    expected = model(x).detach()
    for same in (x, x.contiguous(memory_format=torch.channels_last), x.mT.contiguous().mT):
        torch.testing.assert_close(fast(same), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_forward_of_any_number_of_arguments_is_quantized(tmp_path):
    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(4, 2)

        def forward(self, *parts):
            return self.head(sum(parts))

    torch.manual_seed(0)
    model, pair = seeded(Sum), (torch.rand(6, 4), torch.rand(6, 4))
    fast = InferenceOptimizer.build(
        model, "openvino_int8", input_sample=pair, calib_data=[(*pair, torch.zeros(6))]
    )
    torch.testing.assert_close(fast(*pair), eager(model, *pair), atol=0.05, rtol=0)
    InferenceOptimizer.save(fast, tmp_path / "m")
    assert torch.equal(InferenceOptimizer.load(tmp_path / "m")(*pair), fast(*pair))


def _in_place(y):
    y[y < 0.1] = 0


def _summed(y):
    total = y
    total += 1


def _head(y):
    torch.nn.Linear(y.shape[-1], 2)(y).sum().backward()


@pytest.mark.parametrize("name", [*CHEAP, "openvino_fp32", "onnxruntime_fp32"])
def test_results_can_be_changed_and_be_features_of_a_head(model, name):
    fast = InferenceOptimizer.build(model, name, input_sample=images(1))
    for use in (_in_place, _summed, _head):
        use(fast(images(2)))
        with InferenceOptimizer.get_context(fast):
            inside = fast(images(2))
        use(inside.float())


@pytest.mark.parametrize("name", [*CHEAP, "onnxruntime_fp32", "onnxruntime_int8_integer"])
def test_models_are_pickled(model, name):
    fast = InferenceOptimizer.build(model, name, input_sample=images(1), thread_num=1)
    for module in (pickle, cloudpickle):
        again = module.loads(module.dumps(fast))
        assert torch.equal(again(images(2)), fast(images(2)))
        assert again.thread_num == 1


def test_compiled_models_are_pickled(compiled):
    again = pickle.loads(pickle.dumps(compiled))
    assert torch.equal(again(images(2)), compiled(images(2)))


def test_settings_of_a_session_are_pickled(model):
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    fast = InferenceOptimizer.trace(
        model, images(1), accelerator="onnxruntime", onnxruntime_session_options=options
    )
    again = pickle.loads(pickle.dumps(fast))
    level = again.session_options.graph_optimization_level
    assert level == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL


class Shifted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) + 10


def test_a_script_needs_no_sample(tmp_path):
    model, x = seeded(Branching), torch.rand(3, 4)
    fast = InferenceOptimizer.trace(model, accelerator="jit", jit_method="script")
    InferenceOptimizer.save(fast, tmp_path / "model")
    for each in (
        fast,
        InferenceOptimizer.load(tmp_path / "model"),
        pickle.loads(pickle.dumps(fast)),
    ):
        for sign in (1, -1):
            torch.testing.assert_close(each(sign * x), eager(model, sign * x))
    lowered = InferenceOptimizer.quantize(Shifted(), "bf16", accelerator="jit", jit_method="script")
    assert lowered(x).dtype is torch.float32


def test_dynamic_quantization_needs_no_sample(tmp_path):
    model, x = seeded(Shifted), torch.rand(5, 4)
    fast = InferenceOptimizer.quantize(model, approach="dynamic")
    torch.testing.assert_close(fast(x), eager(model, x), atol=0.05, rtol=0)
    InferenceOptimizer.save(fast, tmp_path / "model")
    loaded = InferenceOptimizer.load(tmp_path / "model", model=model)
    for each in (loaded, pickle.loads(pickle.dumps(fast))):
        assert torch.equal(each(x), fast(x))


def test_a_number_is_added_to_a_quantized_layer():
    model, x = seeded(Shifted), torch.rand(32, 4)
    fast = InferenceOptimizer.quantize(model, calib_data=x)
    torch.testing.assert_close(fast(x), eager(model, x), atol=0.1, rtol=0)


class Optional(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x, weight=None, scale=2.0):
        y = self.layer(x) * scale
        return y if weight is None else y * weight


@pytest.mark.parametrize("accelerator", ["openvino", "onnxruntime", "jit"])
def test_batches_fill_arguments_with_the_default_none(accelerator):
    model, x, weight, y = seeded(Optional), torch.rand(8, 4), torch.rand(8, 1), torch.ones(8)
    for tensors, inputs in (((x, weight, y), (x, weight)), ((x, y), (x,))):
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*tensors), 4)
        fast = InferenceOptimizer.trace(model, loader, accelerator=accelerator)
        torch.testing.assert_close(fast(*inputs), eager(model, *inputs))
