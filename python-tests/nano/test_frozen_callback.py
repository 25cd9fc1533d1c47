"""The frozen prefix in a Trainer: which samples it takes, and what it tells."""

import logging

import pytest
import pytorch_lightning as pl
import torch
from refusals import refused
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from training_models import QUIET, trainer

from bigdl.nano.openvino.network import supports_bf16
from bigdl.nano.pytorch.frozen import FrozenPrefixCallback
from bigdl.nano.pytorch.vision.models import ImageClassifier

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode at the start of training"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:The .(train|val)_dataloader. does not have many workers"),
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The networks are too small for more, which would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Classifier(ImageClassifier):
    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), 0.1)


def classifier(kind=Classifier) -> ImageClassifier:
    """A frozen trunk from images to 8 features, and a head."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU()]
    trunk = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return kind(trunk.requires_grad_(False).eval(), 2, head=nn.Linear(8, 2))


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.rand(8, 3, 16, 16, generator=generator), torch.arange(8) % 2)


# -- what was done ---------------------------------------------------------------------------------


def test_the_settings_and_the_log_name_the_prefix(rows, caplog):
    callback = FrozenPrefixCallback(threads=1, precision="bf16")
    run = trainer(max_epochs=1, callbacks=[callback])
    with caplog.at_level(logging.INFO):
        run.fit(classifier(), DataLoader(rows, batch_size=4))
    method = "openvino_bf16" if supports_bf16() else "openvino_fp32"
    assert run.settings[-1] == f"frozen prefix {method}"
    assert f"Frozen prefix {method}: backbone: {method}, relative error" in caplog.text
    assert callback.report == callback.prefix.report()
    run.fit_loop.max_epochs = 2
    run.fit(classifier(), DataLoader(rows, batch_size=4))
    assert run.settings.count(f"frozen prefix {method}") == 1


def test_the_settings_say_that_there_was_nothing_to_replace(rows):
    callback = FrozenPrefixCallback()
    model = classifier()
    model.backbone.train()
    run = trainer(max_epochs=1, callbacks=[callback])
    run.fit(model, DataLoader(rows, batch_size=4))
    assert run.settings[-1] == "no frozen prefix"
    assert "is in train mode, so its statistics follow" in callback.report


@pytest.mark.slow
def test_report_and_settings_come_home_from_two_processes(rows):
    callback = FrozenPrefixCallback(precision="fp32")
    run = trainer(num_processes=2, max_epochs=1, callbacks=[callback])
    run.fit(classifier(), DataLoader(rows, batch_size=2))
    assert callback.prefix is None
    assert callback.report == "backbone: eager, relative error 0"
    assert run.settings[-1] == "frozen prefix eager"


# -- data without an index -------------------------------------------------------------------------


class Stream(IterableDataset):
    """Samples that can be asked for once."""

    def __init__(self, rows):
        self.left = iter([rows[index] for index in range(len(rows))])

    def __iter__(self):
        return self.left


@pytest.mark.parametrize("kind", [pl.Trainer, trainer], ids=["lightning", "nano"])
def test_a_stream_loses_no_row_to_the_sample(rows, kind):
    seen = []

    class Counting(Classifier):
        def training_step(self, batch, batch_idx):
            seen.extend(batch[1].tolist())
            return super().training_step(batch, batch_idx)

    callback = FrozenPrefixCallback(precision="fp32")
    run = kind(max_epochs=1, accelerator="cpu", callbacks=[callback], **QUIET)
    run.fit(classifier(Counting), DataLoader(Stream(rows), batch_size=2))
    assert seen == rows.tensors[1].tolist()
    assert [segment.reason for segment in callback.prefix.segments] == [None]
    assert callback.report == "backbone: eager, relative error 0"


def test_a_dataset_that_makes_its_own_batches_is_accelerated(rows):
    batches = [(rows.tensors[0][:4], rows.tensors[1][:4])] * 2
    callback = FrozenPrefixCallback(precision="fp32")
    run = trainer(max_epochs=1, callbacks=[callback])
    run.fit(classifier(), DataLoader(batches, batch_size=None))
    assert [segment.reason for segment in callback.prefix.segments] == [None]


def test_int8_is_not_calibrated_on_a_stream(rows):
    run = trainer(max_epochs=1, callbacks=[FrozenPrefixCallback(precision="int8")])
    with refused("argument-missing", "calib_data"):
        run.fit(classifier(), DataLoader(Stream(rows), batch_size=2))


# -- cached features -------------------------------------------------------------------------------


class Counted(Dataset):
    """Samples that count how often they are asked for."""

    def __init__(self, rows, deterministic=True):
        self.rows, self.deterministic, self.asked = rows, deterministic, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.asked += 1
        return self.rows[index]


def fitted(data, callback, kind=trainer, model=Classifier, **arguments):
    """The model after two epochs over shuffled rows, with a validation on images."""
    module = classifier(model)
    torch.manual_seed(3)
    loader = DataLoader(data, batch_size=2, shuffle=True)
    options = {"max_epochs": 2, "accelerator": "cpu", **QUIET, **arguments}
    run = kind(callbacks=[callback] if callback else [], **options)
    run.fit(module, loader, DataLoader(data, batch_size=4))
    return module, run


@pytest.mark.parametrize("kind", [pl.Trainer, trainer], ids=["lightning", "nano"])
def test_a_fit_on_cached_features_learns_what_one_on_images_learns(rows, tmp_path, kind):
    precision = {} if kind is pl.Trainer else {"precision": 32}
    plain, run = fitted(rows, FrozenPrefixCallback(precision="fp32"), kind, **precision)
    data, figure = Counted(rows), run.callback_metrics["val_loss"].item()
    asked = []
    for said in ("computed into", "read from"):
        callback = FrozenPrefixCallback(precision="fp32", cache_dir=tmp_path)
        before = data.asked
        cached, run = fitted(data, callback, kind, **precision)
        asked.append(data.asked - before)
        assert f"features of 8 samples {said} {tmp_path}" in callback.report
        assert "_prepare_dataloader" not in vars(run._data_connector)
        for own, their in zip(cached.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, their, rtol=1e-6, atol=1e-6)
        assert run.callback_metrics["val_loss"].item() == pytest.approx(figure, rel=1e-5)
    assert asked[0] - asked[1] == len(rows)


@pytest.mark.slow
def test_two_processes_share_cached_features(rows, tmp_path):
    callback = FrozenPrefixCallback(precision="fp32", cache_dir=tmp_path)
    _, run = fitted(rows, callback, num_processes=2, max_epochs=1)
    assert "features of 8 samples computed into" in callback.report
    assert run.settings[-1] == "frozen prefix eager with cached features"


class Normalizing(Classifier):
    def training_step(self, batch, batch_idx):
        images, labels = batch
        return super().training_step((images - 0.5, labels), batch_idx)


class ChangingBatches(Classifier):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] - 0.5, batch[1]]


def random_samples(rows):
    return Counted(rows, deterministic=False)


NOT_CACHED = {
    "random samples": (random_samples, Classifier, "draws random numbers"),
    "a hook on batches": (Counted, ChangingBatches, "on_after_batch_transfer may change images"),
    "a stream": (Stream, Classifier, "samples have no index"),
}


@pytest.mark.parametrize("name", NOT_CACHED)
def test_the_report_says_why_features_are_not_cached(rows, tmp_path, name):
    make, model, reason = NOT_CACHED[name]
    callback = FrozenPrefixCallback(precision="fp32", cache_dir=tmp_path)
    run = trainer(max_epochs=1, callbacks=[callback])
    run.fit(classifier(model), DataLoader(make(rows), batch_size=2))
    assert run.global_step == 4
    assert "features are not cached: " in callback.report
    assert reason in callback.report
    assert run.settings[-1] == "frozen prefix eager"


def test_a_loader_that_collates_in_its_own_way_is_not_cached(rows, tmp_path):
    from torch.utils.data import default_collate

    loader = DataLoader(rows, batch_size=2, collate_fn=lambda samples: default_collate(samples))
    callback = FrozenPrefixCallback(precision="fp32", cache_dir=tmp_path)
    trainer(max_epochs=1, callbacks=[callback]).fit(classifier(), loader)
    assert "collate_fn is not torch's" in callback.report


def test_a_step_that_changes_images_is_refused_cached_features(rows, tmp_path):
    callback = FrozenPrefixCallback(precision="fp32", cache_dir=tmp_path)
    module = classifier(Normalizing)
    with refused("argument-conflict", "training_step"):
        trainer(max_epochs=1, callbacks=[callback]).fit(module, DataLoader(rows, batch_size=2))
    assert not any("forward" in vars(part) for part in module.modules())
    assert not module.backbone._forward_pre_hooks
