"""Loaders whose batches are dicts: what goes to the model by name, and what are the targets."""

import sys

import cloudpickle
import pytest
import torch
from reference_training import largest_difference
from refusals import refused
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from bigdl.orca.learn.metrics import MSE
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import MainCallback
from bigdl.orca.learn.pytorch.forward import BatchColumns, check_keywords
from bigdl.orca.learn.pytorch.lightning import LightningForward

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROWS = 13
GENERATOR = torch.Generator().manual_seed(0)
LEFT, RIGHT, SIZE = torch.rand(3, ROWS, generator=GENERATOR)
COUNTS = torch.arange(ROWS) % 3 + 1.0


def sample(i):
    return {"size": SIZE[i], "right": RIGHT[i], "left": LEFT[i], "counts": COUNTS[i]}


class Samples(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return sample(i)


class Stream(IterableDataset):
    def __iter__(self):
        return map(sample, range(ROWS))


class Difference(nn.Module):
    """Takes its inputs by name or in order; the two do not commute."""

    def __init__(self, config=None):
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(2, 1)

    def forward(self, left, right):
        return self.inner(torch.stack([left, left - right], 1))[:, 0]


class Everything(nn.Module):
    """Takes any inputs by name."""

    def __init__(self, config=None):
        super().__init__()
        self.inner = Difference()

    def forward(self, **columns):
        return self.inner(columns["left"], columns["right"])


def estimator(model=Difference, **options):
    return Estimator.from_torch(
        model=model,
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=nn.MSELoss(),
        config={"shuffle": False},
        log_to_driver=False,
        **options,
    )


NAMES = {"feature_cols": ["left", "right"], "label_cols": "size"}


@pytest.mark.parametrize("data", [Samples, Stream])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_a_batch_by_name_trains_as_one_by_place(orca_spark, data, weighted):
    target = (SIZE, COUNTS) if weighted else (SIZE,)
    by_place = DataLoader(TensorDataset(LEFT, RIGHT, *target), 4, collate_fn=placed)
    by_name = DataLoader(data(), 4)
    weight = {"weight_col": "counts"} if weighted else {}
    found, expected = estimator(metrics=[MSE()]), estimator(metrics=[MSE()])
    options = {"epochs": 2, "batch_size": 4}
    stats = found.fit(by_name, validation_data=by_name, **options, **NAMES, **weight)
    label = {**weight, "label_cols": "size"} if weighted else {}
    other = expected.fit(by_place, validation_data=by_place, **options, **label)
    assert (
        largest_difference(found.get_model().state_dict(), expected.get_model().state_dict()) == 0
    )
    assert [s["val_mse"] for s in stats] == [s["val_mse"] for s in other]
    figures = found.evaluate(by_name, batch_size=5, **NAMES, **weight)
    assert float(figures["MSE"]) == pytest.approx(figures["val_loss"], rel=1e-6)
    assert figures["val_loss"] == pytest.approx(stats[-1]["val_loss"], rel=1e-6)


def placed(samples):
    left, right, *target = (torch.stack(column) for column in zip(*samples, strict=True))
    return left, right, target[0] if len(target) == 1 else target


def test_without_names_of_features_all_others_are_given(orca_spark):
    (stats,) = estimator(Everything).fit(Samples(), label_cols="size")
    assert stats["num_samples"] == ROWS


class Own(MainCallback):
    def on_iter_forward(self, runner):
        runner.output = runner.model(runner.batch["left"], runner.batch["right"])
        runner.loss = nn.functional.mse_loss(runner.output, runner.batch["size"])


def test_a_step_of_ones_own_gets_the_dict(orca_spark):
    (stats,) = estimator().fit(Samples(), callbacks=[Own()])
    assert stats["num_samples"] == ROWS


def test_what_is_missing_is_said_before_the_model_runs(orca_spark):
    with refused("argument-missing", "label_cols="):
        estimator().fit(Samples())


BATCH = {"left": 1, "right": 2, "size": 3}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ((), ("argument-missing", "label_cols")),
        ((None, ["sizes"]), ("column-missing", "'sizes'")),
        ((["lefts"], ["size"]), ("column-missing", "'lefts'")),
    ],
)
def test_keys_must_be_there(columns, message):
    with refused(*message):
        BatchColumns(*columns).split(BATCH)


@pytest.mark.parametrize("named", [{"left": 1}, {"left": 1, "right": 2, "size": 3}])
def test_a_model_must_take_the_keys(named):
    with refused("model-input", "feature_cols=", "MainCallback"):
        check_keywords(Difference(), named)


def test_several_targets_are_a_tuple():
    assert BatchColumns(labels=["size", "left"]).split(BATCH) == ([], {"right": 2}, (3, 1))
    assert BatchColumns().split([1, 2, 3]) == ([1, 2], {}, 3)


class Steps(nn.Module):
    def training_step(self, batch, index):
        return batch["left"] - batch["size"]


@pytest.mark.parametrize(("labels", "target"), [(None, None), (["size"], 3)])
def test_the_step_of_a_lightning_module_gets_the_dict(labels, target):
    assert LightningForward(Steps(), BatchColumns(labels=labels)).forward(BATCH, 0) == (
        None,
        target,
        -2,
    )
