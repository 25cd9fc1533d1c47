"""What programs of BigDL 2.x do with accelerated models."""

import io

import pytest
import pytorch_lightning as pl
import torch
from refusals import refused
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch import InferenceOptimizer, Trainer
from bigdl.nano.pytorch.encryption import load, save
from bigdl.nano.pytorch.vision.models import ImageClassifier
from bigdl.nano.pytorch.vision.models.vision import resnet18

pytest.importorskip("openvino")

rows = TensorDataset(torch.randn(10, 6), torch.arange(10) % 3)
loader = DataLoader(rows, 4)
x = rows.tensors[0]


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.called_by = type(self.trainer).__name__
        self.log("loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch, index):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer():
    return Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.fixture(scope="module")
def fitted():
    model = Classifier()
    trainer().fit(model, loader)
    return model.eval()


@pytest.mark.parametrize("accelerator", ["openvino", "jit"])
def test_a_loader_is_a_sample(accelerator):
    model = Classifier()
    fast = InferenceOptimizer.trace(model, loader, accelerator=accelerator)
    torch.testing.assert_close(fast(x), model(x), check_layout=False)


@pytest.mark.slow
def test_a_sample_comes_from_the_trainer_of_a_trained_module(fitted):
    fast = InferenceOptimizer.trace(fitted, accelerator="openvino")
    torch.testing.assert_close(fast(x), fitted(x))


@pytest.mark.slow
def test_a_loader_of_pairs_is_predicted():
    model = nn.Linear(6, 2)
    fast = InferenceOptimizer.trace(model, x[:1], accelerator="openvino")
    results = fast.async_predict(loader)
    torch.testing.assert_close(torch.cat(results), model(x))


@pytest.mark.slow
def test_an_accelerated_module_runs_its_steps_in_the_trainer(fitted):
    fast = InferenceOptimizer.trace(fitted, x, accelerator="openvino")
    calls = []
    run = type(fast).nano_run
    counting = type("Counting", (type(fast),), {})
    counting.nano_run = lambda self, *each: calls.append(1) or run(self, *each)
    fast.__class__ = counting
    for verb in ("validate", "test"):
        (figures,) = getattr(trainer(), verb)(fast, loader, verbose=False)
        (expected,) = getattr(trainer(), verb)(fitted, loader, verbose=False)
        assert figures == pytest.approx(expected)
    predicted = torch.cat(trainer().predict(fast, loader))
    torch.testing.assert_close(predicted, fitted(x).detach())
    assert len(calls) == 3 * len(loader)


@pytest.mark.slow
def test_a_trainer_says_what_it_cannot_run():
    fast = InferenceOptimizer.trace(nn.Linear(6, 3), x, accelerator="openvino")
    with refused("model-type", "LightningModule"):
        trainer().predict(fast, loader)


@pytest.mark.slow
def test_ipex_needs_no_sample(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    fast = InferenceOptimizer.trace(model, use_ipex=True)
    torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)
    InferenceOptimizer.save(fast, tmp_path)
    again = InferenceOptimizer.load(tmp_path, model)
    torch.testing.assert_close(again(x), model(x), atol=1e-5, rtol=1e-5)


def test_backbones_take_x():
    image = torch.randn(1, 3, 32, 32)
    model = ImageClassifier(resnet18(), 4).eval()
    torch.testing.assert_close(model(x=image), model(image))


def test_an_encrypted_buffer_that_was_just_written_is_loaded():
    fernet = pytest.importorskip("cryptography.fernet")
    key, buffer = fernet.Fernet.generate_key(), io.BytesIO()
    save({"step": 3}, buffer, encryption_key=key)
    assert load(buffer, decryption_key=key) == {"step": 3}
    plain = io.BytesIO()
    save({"step": 4}, plain)
    assert load(plain) == {"step": 4}


@pytest.mark.slow
def test_generate_of_a_graph_is_refused_by_name():
    class GenerationMixin:
        def generate(self):
            return self(torch.ones(1, 6))

    class Decoder(GenerationMixin, nn.Linear):
        pass

    model = Decoder(6, 2)
    fast = InferenceOptimizer.trace(model, x, accelerator="openvino")
    with pytest.raises(UsageError, match="generate of Decoder needs a cache that grows"):
        fast.generate()
