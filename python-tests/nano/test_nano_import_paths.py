"""Names of Nano's inference, imported from where programs for BigDL 2.x import them."""

import importlib.util
import subprocess
import sys

import pytest
import torch
from refusals import refused
from small_models import Convolutional, Encoder, Nested, Tabular, images, seeded
from torch.utils.data import DataLoader, TensorDataset

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch import InferenceOptimizer
from bigdl.nano.utils import pytorch as helpers

PLACES = {
    "bigdl.nano.pytorch": (
        "InferenceOptimizer Pipeline Trainer TorchNano nano patch_torch unpatch_torch"
    ),
    "bigdl.nano.pytorch.algorithms": "SelectiveBackprop",
    "bigdl.nano.pytorch.algorithms.selective_backprop": "SelectiveBackprop",
    "bigdl.nano.pytorch.encryption": "EncryptedDataset load save",
    "bigdl.nano.pytorch.lightning": "LightningModule",
    "bigdl.nano.pytorch.optim": "SparseAdam",
    "bigdl.nano.pytorch.patching": (
        "patch_torch unpatch_torch patch_cuda unpatch_cuda get_cuda_status patch_dtype "
        "patch_encryption"
    ),
    "bigdl.nano.pytorch.torch_nano": "TorchNano nano",
    "bigdl.nano.pytorch.trainer": "Trainer",
    "bigdl.nano.pytorch.inference": "InferenceOptimizer Pipeline",
    "bigdl.nano.pytorch.inference.optimizer": "InferenceOptimizer",
    "bigdl.nano.pytorch.inference.pipeline": "Pipeline",
    "bigdl.nano": "automl pytorch utils",
    "bigdl.nano.automl": "hpo hpo_config pytorch",
    "bigdl.nano.automl.hpo": "args backend func obj plmodel space visualization",
    "bigdl.nano.automl.hpo.backend": "PrunerType SamplerType create_hpo_backend",
    "bigdl.nano.automl.hpo.space": "AutoObject Bool Categorical Dict Int List Real Space",
    "bigdl.nano.automl.hpo.visualization": (
        "plot_contour plot_intermediate_values plot_optimization_history plot_parallel_coordinate "
        "plot_param_importances"
    ),
    "bigdl.nano.automl.pytorch": "HPOSearcher",
    "bigdl.nano.pytorch.vision": "datasets models transforms",
    "bigdl.nano.pytorch.vision.datasets": "ImageFolder OxfordIIITPet SegmentationImageFolder",
    "bigdl.nano.pytorch.vision.models": "ImageClassifier resnet18 vision",
    "bigdl.nano.pytorch.vision.models.vision": "resnet18 resnet50 mobilenet_v3_large",
    "bigdl.nano.pytorch.vision.transforms": "Compose RandomResizedCrop ToTensor transforms",
    "bigdl.nano.pytorch.vision.transforms.transforms": "Compose RandomResizedCrop ToTensor",
    "bigdl.nano.openvino": "OpenVINOModel",
    "bigdl.nano.utils.common": (
        "invalidInputError invalidOperationError register_suggestion output_suggestions EnvContext "
        "CPUInfo _avx512_checker _avx2_checker _bf16_checker _inc_checker _ipex_checker "
        "_onnxruntime_checker _openvino_checker schedule_workers schedule_processors "
        "get_affinity_core_num spawn_new_process compare_version deprecated get_default_args "
        "_flatten latency_calculate_helper"
    ),
    "bigdl.nano.utils.pytorch": (
        "TORCH_VERSION_LESS_1_10 TORCH_VERSION_LESS_1_11 TORCH_VERSION_LESS_1_12 "
        "TORCH_VERSION_LESS_1_13 TORCH_VERSION_LESS_2_0 TORCHVISION_VERSION_LESS_1_12 "
        "TORCHVISION_VERSION_LESS_1_14 generate_channels_last_available apply_proper_channels_last "
        "get_forward_args get_forward_defaults get_forward_annotations get_conditional_args "
        "get_input_example complement_input_sample export_to_onnx save_model load_model "
        "patch_attrs_from_model_to_object MetaData jit_convert"
    ),
}
LAYOUTS = ("", "_channels_last")
NAMES = [(module, name) for module, names in PLACES.items() for name in names.split()]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(pair) for pair in NAMES])
def test_a_name_imports_from_its_old_place(module, name):
    exec(f"from {module} import {name}", {})


def test_one_name_is_one_object_at_all_of_its_places():
    for name in ("InferenceOptimizer", "Pipeline", "Trainer"):
        places = [module for module, listed in NAMES if listed == name]
        assert len({id(getattr(importlib.import_module(place), name)) for place in places}) == 1


def test_transforms_of_both_places_are_the_same():
    from bigdl.nano.pytorch.vision import transforms
    from bigdl.nano.pytorch.vision.transforms import transforms as old

    assert sorted(old.__all__) == sorted(transforms.__all__)
    assert all(getattr(old, name) is getattr(transforms, name) for name in old.__all__)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("bigdl.nano.pytorch.vision.datasets", "CIFAR10"),
        ("bigdl.nano.pytorch.vision.transforms", "AutoAugment"),
        ("bigdl.nano.pytorch.vision.transforms.transforms", "AutoAugment"),
    ],
)
def test_what_is_torchvision_s_says_how_to_install_it(module, name):
    if importlib.util.find_spec("torchvision") is not None:
        pytest.skip("torchvision is installed")
    sentence = f"{name} is torchvision's, which is not installed; run: pip install torchvision"
    with pytest.raises(ImportError) as refusal:
        exec(f"from {module} import {name}", {})
    assert str(refusal.value) == sentence
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec(f"from {module} import Nothing", {})


def test_importing_the_packages_loads_no_framework():
    light = [
        *("bigdl.nano", "bigdl.nano.pytorch", "bigdl.nano.pytorch.inference", "bigdl.nano.utils"),
        *("bigdl.nano.utils.common", "bigdl.nano.openvino"),
    ]
    heavy = ["torch", "openvino", "onnx", "onnxruntime", "nncf", "torchao", "pytorch_lightning"]
    program = f"import sys, {', '.join(light)}; print(sorted(set({heavy}) & set(sys.modules)))"
    seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert seen.stdout == "[]\n", seen.stderr


def test_the_registry_has_the_27_names_and_11_defaults():
    every = InferenceOptimizer.ALL_INFERENCE_ACCELERATION_METHOD
    unasked = InferenceOptimizer.DEFAULT_INFERENCE_ACCELERATION_METHOD
    assert len(every) == 27
    assert set(unasked) == {
        "original",
        "bf16",
        "static_int8",
        *(f"jit_{kind}_ipex{layout}" for kind in ("fp32", "bf16") for layout in LAYOUTS),
        *("openvino_fp32", "openvino_int8", "onnxruntime_fp32", "onnxruntime_int8_qlinear"),
    }
    assert set(unasked) <= set(every)


# --- bigdl.nano.utils.pytorch


def test_versions_of_torch_are_compared_and_a_missing_package_is_not_older():
    assert helpers.TORCH_VERSION_LESS_2_0 is False
    assert helpers.TORCH_VERSION_LESS_1_13 is False
    assert helpers.TORCHVISION_VERSION_LESS_1_14 is False


def test_a_signature_is_taken_apart():
    model = seeded(Nested)
    assert helpers.get_forward_args(model) == ["x", "more", "scale", "mask"]
    assert helpers.get_forward_defaults(model) == (2.0, None)
    assert set(helpers.get_forward_annotations(model)) == {"scale"}
    assert helpers.get_conditional_args(model, include=(float, None)) == ["scale", "mask"]
    assert helpers.get_conditional_args(model, exclude=(float, None)) == ["x", "more"]


@pytest.mark.slow
def test_the_signature_of_an_accelerated_model_is_the_original_s():
    model = seeded(Tabular)
    sample = (torch.rand(2, 5), torch.tensor([1, 2]))
    fast = InferenceOptimizer.trace(model, sample, accelerator="onnxruntime")
    assert helpers.get_forward_args(fast) == helpers.get_forward_args(model)


def test_a_sample_is_found_where_there_is_one():
    model = seeded(Convolutional)
    x = images(4)
    loader = DataLoader(TensorDataset(x, torch.zeros(4)), batch_size=2)
    assert torch.equal(helpers.get_input_example(model, x), x)
    assert torch.equal(helpers.get_input_example(model, loader, ["x"]), x[:2])
    model.example_input_array = x
    assert torch.equal(helpers.get_input_example(model, None), x)
    model.example_input_array = None
    model.train_dataloader = lambda: loader
    assert torch.equal(helpers.get_input_example(model, None), x[:2])
    del model.train_dataloader
    with pytest.raises(UsageError, match="pass input_sample"):
        helpers.get_input_example(model, None)


def test_a_sample_of_several_inputs_keeps_its_form():
    model = seeded(Tabular)
    numbers, category = torch.rand(2, 5), torch.tensor([1, 2])
    assert helpers.get_input_example(model, (numbers, category)) == (numbers, category)
    named = helpers.get_input_example(model, {"category": category, "numbers": numbers})
    assert named == {"numbers": numbers, "category": category}


def test_a_sample_is_completed_by_defaults():
    model = seeded(Nested)
    x, more = torch.rand(2, 6), {"a": torch.rand(2, 4), "b": torch.rand(2)}
    assert helpers.complement_input_sample(model, (x, more)) == (x, more, 2.0, None)
    with refused("argument-missing", "'more'"):
        helpers.complement_input_sample(model, x)


@pytest.mark.slow
def test_an_onnx_file_computes_what_the_module_does(tmp_path):
    import onnxruntime

    model = seeded(Convolutional).eval()
    helpers.export_to_onnx(model, images(2), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    x = images(5, seed=1)  # another batch size
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(found), model(x), atol=1e-5)


@pytest.mark.parametrize("method", [None, "trace", "script"])
def test_torchscript_computes_what_the_module_does(method):
    model = seeded(Convolutional)
    script = helpers.jit_convert(model, images(2), method)
    assert model.training
    assert torch.allclose(script(images(5)), model.eval()(images(5)), atol=1e-6)


def test_torchscript_takes_samples_by_name():
    model = seeded(Encoder).eval()
    ids, mask = torch.arange(6).reshape(2, 3), torch.ones(2, 3)
    sample = {"example_kwarg_inputs": {"attention_mask": mask}}
    script = helpers.jit_convert(model, ids, "trace", jit_strict=False, **sample)
    found = script(input_ids=ids, attention_mask=mask)["logits"]
    assert torch.allclose(found, model(ids, mask)["logits"], atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("blend",), ("argument-value", "jit_method")),
        (("trace",), ("model-unsupported", "input_sample")),
    ],
)
def test_wrong_arguments_of_a_conversion_are_refused(arguments, sentence):
    with refused(*sentence):
        helpers.jit_convert(seeded(Convolutional), None, *arguments)


def test_layouts_are_chosen_by_the_number_of_dimensions():
    inputs = [torch.rand(2, 3, 4, 5, 6), torch.rand(2, 3, 4, 5), torch.rand(2, 3), "no tensor"]
    flags = helpers.generate_channels_last_available(inputs)
    assert flags == ["channels_last_3d", "channels_last", "original", "original"]
    moved = helpers.apply_proper_channels_last(flags[1], inputs[1])
    assert moved.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(moved, inputs[1])
    assert helpers.apply_proper_channels_last("original", inputs[2]) is inputs[2]
    with refused("argument-value", "'nchw'"):
        helpers.apply_proper_channels_last("nchw", inputs[1])


def test_outputs_are_taken_apart_and_put_together_again():
    outputs = {"logits": torch.rand(2), "more": [torch.rand(1), (torch.rand(3), "text")]}
    nesting = helpers.MetaData.construct_matadata(outputs)
    flat = [outputs["logits"], outputs["more"][0], outputs["more"][1][0]]
    assert helpers.MetaData.reconstruct_output(flat, nesting) == outputs
    single = helpers.MetaData.construct_matadata(flat[0])
    assert helpers.MetaData.reconstruct_output(flat[0], single) is flat[0]


def test_a_model_is_saved_and_loaded_again(tmp_path):
    model = seeded(Convolutional).eval()
    helpers.save_model(model, tmp_path / "model", compression="bf16")
    loaded = helpers.load_model(tmp_path / "model", Convolutional()).eval()
    assert torch.allclose(loaded(images()), model(images()), atol=5e-2)


def test_attributes_are_set_on_another_object():
    class Other:
        channels = 1

    other = Other()
    helpers.patch_attrs_from_model_to_object(seeded(Convolutional), other)
    assert other.describe() == "3 channels"  # the method is bound to the module
    assert other.channels == 1  # what was there stays
    assert not hasattr(other, "forward")
