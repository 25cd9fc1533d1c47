"""Whole programs: the one of Fig. 2 of Dai et al., BigDL 2.0 (CVPR 2022), and the examples."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from training_models import QUIET

EXAMPLES = Path(__file__).parents[2] / "examples" / "nano" / "training"

# As printed, but for the arguments of the trainer that keep a test quiet.
FIGURE_2 = """
from bigdl.nano.pytorch.vision.datasets import ImageFolder
from bigdl.nano.pytorch.vision import transforms
from bigdl.nano.pytorch import Trainer
from torch.utils.data import DataLoader

data_transform = transforms.Compose([
    transforms.Resize(256),
    transforms.ColorJitter(),
    transforms.RandomCrop(224),
    transforms.RandomHorizontalFlip(),
    transforms.Resize(128),
    transforms.ToTensor()
])
dataset = ImageFolder(args.data_path, transform=data_transform)
train_loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
net = create_model(args.model, args.quantize)
trainer = Trainer(max_epochs=1, **quiet)
trainer.fit(net, train_loader)
"""


@pytest.fixture
def photographs(tmp_path) -> Path:
    """A folder of six JPEG files in two classes."""
    generator = np.random.default_rng(0)
    for label in ("cats", "dogs"):
        (tmp_path / label).mkdir()
        for number in range(3):
            pixels = generator.integers(0, 256, (300, 280, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / label / f"{number}.jpg")
    return tmp_path


def create_model(name: str, quantize: bool):
    from bigdl.nano.pytorch.vision import models

    class Classifier(models.ImageClassifier):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    return Classifier(getattr(models, name)(pretrained=False), num_classes=2)


def test_the_program_of_figure_2_trains_with_its_imports_changed(photographs):
    args = SimpleNamespace(data_path=photographs, model="mobilenet_v3_small", quantize=False)
    names = {"args": args, "batch_size": 3, "create_model": create_model, "quiet": QUIET}
    exec(FIGURE_2, names)
    trainer = names["trainer"]
    assert trainer.global_step == 2
    assert torch.isfinite(trainer.callback_metrics["train_loss"])
    assert trainer.settings[0] == "float32"  # as plain Lightning's: it is too short to measure


def test_the_example_of_own_loops_learns():
    example = runpy.run_path(str(EXAMPLES / "own_loop.py"))
    found = example["main"](["--epochs", "1"])
    assert min(found.values()) > 0.7
