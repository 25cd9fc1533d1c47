"""Backbones have the names, shapes and counts of the published weights; classifiers train."""

import copy
import importlib
import subprocess
import sys
from urllib.error import URLError

import pytest
import torch
from refusals import refused
from torch import nn

from bigdl.nano.pytorch.vision import models

# Published parameter counts, with the 1,000 classes of ImageNet.
PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnext50_32x4d": 25_028_904,
    "resnext101_32x8d": 88_791_336,
    "wide_resnet50_2": 68_883_240,
    "wide_resnet101_2": 126_886_696,
    "mobilenet_v2": 3_504_872,
    "mobilenet_v3_large": 5_483_032,
    "mobilenet_v3_small": 2_542_856,
    "shufflenet_v2_x0_5": 1_366_792,
    "shufflenet_v2_x1_0": 2_278_604,
    "shufflenet_v2_x1_5": 3_503_624,
    "shufflenet_v2_x2_0": 7_393_996,
}
FEATURES = {
    "resnet18": 512,
    "resnet34": 512,
    "mobilenet_v2": 1280,
    "mobilenet_v3_large": 960,
    "mobilenet_v3_small": 576,
    "shufflenet_v2_x0_5": 1024,
    "shufflenet_v2_x1_0": 1024,
    "shufflenet_v2_x1_5": 1024,
}
SMALL = ["resnet18", "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x0_5"]

# What Lightning and torch's own exporter warn of, wherever they are used like this.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode at the start of training"),
]

# Names and shapes of entries of published state dicts.
ENTRIES = {
    "resnet18": {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_mean": (64,),
        "layer1.0.conv1.weight": (64, 64, 3, 3),
        "layer1.1.bn2.num_batches_tracked": (),
        "layer2.0.downsample.0.weight": (128, 64, 1, 1),
        "layer2.0.downsample.1.running_var": (128,),
        "fc.weight": (1000, 512),
        "fc.bias": (1000,),
    },
    "resnet50": {
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.2.conv3.weight": (256, 64, 1, 1),
        "layer3.5.conv2.weight": (256, 256, 3, 3),
        "layer4.0.bn3.bias": (2048,),
        "fc.weight": (1000, 2048),
    },
    "resnext50_32x4d": {"layer1.0.conv2.weight": (128, 4, 3, 3)},
    "wide_resnet50_2": {"layer1.0.conv2.weight": (128, 128, 3, 3)},
    "mobilenet_v2": {
        "features.0.0.weight": (32, 3, 3, 3),
        "features.0.1.running_mean": (32,),
        "features.1.conv.0.0.weight": (32, 1, 3, 3),
        "features.1.conv.1.weight": (16, 32, 1, 1),
        "features.1.conv.2.bias": (16,),
        "features.2.conv.0.0.weight": (96, 16, 1, 1),
        "features.2.conv.1.0.weight": (96, 1, 3, 3),
        "features.2.conv.2.weight": (24, 96, 1, 1),
        "features.17.conv.3.running_var": (320,),
        "features.18.0.weight": (1280, 320, 1, 1),
        "classifier.1.weight": (1000, 1280),
    },
    "mobilenet_v3_large": {
        "features.0.0.weight": (16, 3, 3, 3),
        "features.1.block.0.0.weight": (16, 1, 3, 3),
        "features.1.block.1.0.weight": (16, 16, 1, 1),
        "features.4.block.1.0.weight": (72, 1, 5, 5),
        "features.4.block.2.fc1.weight": (24, 72, 1, 1),
        "features.4.block.2.fc2.bias": (72,),
        "features.4.block.3.1.weight": (40,),
        "features.16.0.weight": (960, 160, 1, 1),
        "classifier.0.weight": (1280, 960),
        "classifier.3.weight": (1000, 1280),
    },
    "mobilenet_v3_small": {
        "features.1.block.1.fc1.weight": (8, 16, 1, 1),
        "features.4.block.2.fc1.weight": (24, 96, 1, 1),
        "features.12.0.weight": (576, 96, 1, 1),
        "classifier.3.weight": (1000, 1024),
    },
    "shufflenet_v2_x1_0": {
        "conv1.0.weight": (24, 3, 3, 3),
        "conv1.1.running_mean": (24,),
        "stage2.0.branch1.0.weight": (24, 1, 3, 3),
        "stage2.0.branch1.2.weight": (58, 24, 1, 1),
        "stage2.0.branch2.0.weight": (58, 24, 1, 1),
        "stage2.0.branch2.3.weight": (58, 1, 3, 3),
        "stage2.1.branch2.5.weight": (58, 58, 1, 1),
        "stage3.7.branch2.6.weight": (116,),
        "conv5.0.weight": (1024, 464, 1, 1),
        "fc.weight": (1000, 1024),
    },
}


def make(name: str, **arguments) -> models.BackboneModule:
    torch.manual_seed(0)
    return getattr(models, name)(**arguments)


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_as_many_as_published(name):
    with torch.device("meta"):
        whole = make(name, include_top=True)
        trunk = make(name)
    assert sum(p.numel() for p in whole.parameters()) == PARAMETERS[name]
    assert whole.get_output_size() == 1000
    assert trunk.get_output_size() == FEATURES.get(name, 2048)
    kept = [key for key in whole.state_dict() if not key.startswith(whole.top_name + ".")]
    assert list(trunk.state_dict()) == kept


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_have_the_names_and_shapes_of_published_weights(name):
    with torch.device("meta"):
        state = make(name, include_top=True).state_dict()
    shapes = {key: tuple(state[key].shape) for key in ENTRIES[name]}
    assert shapes == ENTRIES[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_state_dict_is_torchvisions(name):
    try:
        torchvision = importlib.import_module("torchvision.models")
    except Exception as error:  # a torchvision for another torch fails in many ways
        pytest.skip(f"no working torchvision: {error}")
    with torch.device("meta"):
        theirs = getattr(torchvision, name)().state_dict()
        ours = make(name, include_top=True).state_dict()
    assert [(k, v.shape) for k, v in ours.items()] == [(k, v.shape) for k, v in theirs.items()]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("include_top", [False, True])
def test_output_is_a_vector_per_image_and_equal_in_eval_mode(name, include_top, images):
    model = make(name, include_top=include_top).eval()
    with torch.inference_mode():
        first, again = model(images), model(images)
        alone = model(images[:1])
    assert first.shape == (2, model.get_output_size())
    assert torch.equal(first, again)
    torch.testing.assert_close(first[:1], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.slow_cases("mobilenet_v3_small")
@pytest.mark.parametrize("name", SMALL)
def test_backbone_can_be_exported(name, images):
    model = make(name).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (images,), dynamic_shapes=({0: batch},))
    more = torch.cat([images, images.flip(-1), images.flip(-2)])
    with torch.inference_mode():
        torch.testing.assert_close(program.module()(more), model(more))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "shufflenet_v2_x0_5"])
def test_backbone_converts_to_onnx(name, images, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = make(name).eval()
    path = str(tmp_path / "model.onnx")
    torch.onnx.export(model, (images,), path, verbose=False)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    with torch.inference_mode():
        torch.testing.assert_close(torch.from_numpy(found), model(images), rtol=1e-3, atol=1e-4)


def test_frozen_backbone_neither_learns_nor_changes_its_statistics(images):
    model = make("resnet18", freeze=True)
    assert not any(p.requires_grad for p in model.parameters())
    before = copy.deepcopy(model.state_dict())
    model.train()
    model(images)
    assert not any(layer.training for layer in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model.unfreeze()
    assert all(p.requires_grad for p in model.parameters())
    assert model.bn1.training


@pytest.mark.parametrize("include_top", [False, True])
def test_weights_load_from_a_file(include_top, images, tmp_path):
    source = make("shufflenet_v2_x0_5", include_top=True)
    source(images)  # so that the statistics differ from fresh ones
    path = tmp_path / "weights.pth"
    torch.save(source.state_dict(), path)
    model = models.shufflenet_v2_x0_5(True, include_top, True, weights=path)
    if not include_top:
        source.fc = nn.Identity()
    with torch.inference_mode():
        assert torch.equal(model(images), source.eval()(images))


def test_published_weights_are_asked_for_by_name_and_hash(monkeypatch, images):
    asked = []
    state = make("resnet18", include_top=True).state_dict()

    def load(url, check_hash=False, **_):
        asked.append((url, check_hash))
        return state

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", load)
    model = models.resnet18(pretrained=True)
    assert asked == [("https://download.pytorch.org/models/resnet18-f37072fd.pth", True)]
    assert torch.equal(model.conv1.weight, state["conv1.weight"])


def test_weights_that_cannot_be_downloaded_are_asked_for_as_a_file(monkeypatch):
    def load(url, **_):
        raise URLError("no route to host")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", load)
    with refused("cluster-unreachable", "resnet18"):
        models.resnet18(pretrained=True)


def saved(path, content) -> str:
    torch.save(content, path)
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda _: {"weights": "nowhere.pth"}, ("path-missing", "'nowhere.pth'")),
        (lambda path: {"weights": saved(path, [1])}, ("file-format",)),
        (
            lambda path: {"weights": saved(path, make("resnet34").state_dict())},
            ("model-mismatch", "ResNet", "layer1", "2"),
        ),
    ],
    ids=["no file", "no state dict", "another model"],
)
def test_wrong_weights_are_refused(arguments, words, tmp_path):
    with refused(*words):
        models.resnet18(**arguments(tmp_path / "weights.pth"))


def test_old_path_has_the_same_names():
    old = importlib.import_module("bigdl.nano.pytorch.vision.models.vision")
    assert old.resnet50 is models.resnet50
    assert old.ImageClassifier is models.ImageClassifier
    assert set(models.__all__) <= set(vars(old))


@pytest.mark.slow
def test_backbones_do_not_import_lightning():
    program = (
        "import sys; from bigdl.nano.pytorch.vision.models import resnet18; resnet18();"
        "assert 'pytorch_lightning' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A classifier of dark and bright images with a frozen backbone, and its trainer."""
    lightning = pytest.importorskip("pytorch_lightning")
    from torch.utils.data import DataLoader, TensorDataset

    class Classifier(models.ImageClassifier):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    labels = torch.arange(20) % 2
    images = torch.rand(20, 3, 32, 32) * 0.2 + labels.reshape(-1, 1, 1, 1)
    loader = DataLoader(TensorDataset(images, labels), batch_size=8)
    backbone = models.shufflenet_v2_x0_5(freeze=True)
    model = Classifier(backbone, num_classes=2)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path_factory.mktemp("lightning"),
    )
    before = copy.deepcopy(backbone.state_dict())
    trainer.fit(model, loader)
    return trainer, model, loader, before


def test_classifier_logs_its_figures_over_all_images(trained):
    trainer, model, loader, _ = trained
    assert "train_loss" in trainer.logged_metrics
    (figures,) = trainer.test(model, loader, verbose=False)
    assert set(figures) == {"test_acc", "test_loss"}
    images, labels = loader.dataset.tensors
    with torch.inference_mode():
        scores = model.eval()(images)
    right = (scores.argmax(1) == labels).float().mean().item()
    assert figures["test_acc"] == pytest.approx(right)
    loss = nn.functional.cross_entropy(scores, labels).item()
    assert figures["test_loss"] == pytest.approx(loss, rel=1e-4)


def test_frozen_backbone_of_a_classifier_keeps_its_state(trained):
    _, model, _, before = trained
    state = model.backbone.state_dict()
    assert all(torch.equal(state[key], value) for key, value in before.items())


def test_classifier_takes_a_head_and_a_criterion(images):
    head = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 5))
    model = models.ImageClassifier(nn.Identity(), 5, head, nn.MultiMarginLoss())
    assert model(images).shape == (2, 5)
    assert isinstance(model.criterion, nn.MultiMarginLoss)


@pytest.mark.parametrize(
    ("backbone", "classes", "words"),
    [
        (nn.Identity, 2, ("argument-missing", "get_output_size")),
        (models.resnet18, 0, ("argument-value", "num_classes", "0")),
        (models.resnet18, "2", ("argument-type", "num_classes", "'2'")),
    ],
    ids=["backbone", "zero", "text"],
)
def test_wrong_classifiers_are_refused(backbone, classes, words):
    with refused(*words):
        models.ImageClassifier(backbone(), classes)
