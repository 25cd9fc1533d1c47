"""``fit(exact="bits")``: one SHA-256 of the weights for any number of workers, engine and cut."""

import os
import signal

import numpy as np
import pandas as pd
import pytest
import torch
from engine_cases import ENGINES
from refusals import refused
from same_bits_models import MODELS, ROWS, estimator, fitted, random_rows, sgd, sha256
from torch import nn

from bigdl.orca.learn.pytorch.callbacks import Callback
from bigdl.orca.learn.trigger import SeveralIteration


@pytest.fixture(scope="module")
def rows():
    return random_rows()


@pytest.mark.slow_cases("cnn")
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_one_two_and_four_workers_give_the_same_bits(rows, model):
    x, y = rows
    options = {"validation_data": (x[:50], y[:50])}
    one, two, four = (fitted(rows, model, workers, fit=options) for workers in (1, 2, 4))
    assert one == two == four
    assert one[1][0]["train_loss"] != one[1][1]["train_loss"]


@pytest.mark.parametrize("engine_way", ENGINES, indirect=True)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.slow_cases(
    *(f"{model}-{engine}" for model in ("cnn", "transformer") for engine in ("spark", "ray")),
    *(f"{model}-local" for model in MODELS),
)
def test_all_engines_give_the_same_bits(rows, engine_way, model, orca_spark):
    here = fitted(rows, model, 2)
    assert fitted(rows, model, 2, backend=engine_way.backend) == here


@pytest.mark.slow_cases("ignored labels", "of one's own", "sum")
@pytest.mark.parametrize(
    ("loss", "fit"),
    [
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2])), {}),
        (nn.CrossEntropyLoss(ignore_index=1), {}),
        (nn.CrossEntropyLoss(reduction="sum"), {"batch_size": 16}),
        (
            lambda output, y: (
                nn.functional.cross_entropy(output, y, reduction="none") ** 2
            ).mean(),
            {},
        ),
    ],
    ids=["weights of classes", "ignored labels", "sum", "of one's own"],
)
def test_losses_of_any_form_give_the_same_bits(rows, loss, fit):
    one, four = (fitted(rows, workers=n, loss=loss, optimizer=sgd, fit=fit) for n in (1, 4))
    assert one == four


@pytest.mark.slow
def test_five_rows_on_four_workers_give_the_same_bits(rows):
    few = tuple(each[:5] for each in rows)
    fit = {"batch_size": 3, "virtual_shards": 8}
    plain = lambda config: nn.Linear(16, 3)  # noqa: E731  batch normalization needs two rows
    one, four = (fitted(few, plain, n, fit=fit) for n in (1, 4))
    assert one == four


def test_order_partitions_and_kind_of_the_data_do_not_matter(rows, orca_spark):
    from bigdl.orca.data import XShards

    x, y = rows
    shuffled = np.random.default_rng(1).permutation(ROWS)
    expected = fitted((x, y))
    assert fitted((x[shuffled], y[shuffled]), workers=2) == expected
    shards = XShards.partition({"x": x, "y": y}, num_shards=3)
    assert fitted(shards, workers=2, backend="spark") == expected


def test_a_frame_has_the_same_bits_in_any_partitions(rows, orca_spark):
    x, y = rows
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": y})

    def two(config):
        return Two()

    options = {"feature_cols": ["a", "b"], "label_cols": "y"}
    data = orca_spark.createDataFrame(frame)
    results = [
        fitted(data.repartition(parts), two, workers, backend="spark", fit=options)
        for parts, workers in ((1, 1), (5, 2))
    ]
    assert results[0] == results[1]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, a, b):
        return self.layer(torch.stack([a, b], 1))


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("others", [1, 2])
def test_a_fit_that_is_resumed_within_an_epoch_by_other_workers_is_the_undisturbed_one(
    rows, others, tmp_path
):
    expected = fitted(rows, workers=2)
    first = estimator(workers=4, model_dir=str(tmp_path))
    options = {"batch_size": 64, "seed": 3, "virtual_shards": 4, "exact": "bits"}
    first.fit(rows, max_steps=6, checkpoint_trigger=SeveralIteration(1), **options)
    second = estimator(workers=others, model_dir=str(tmp_path))
    history = second.fit(rows, epochs=2, resume="auto", **options)
    losses = [{k: v for k, v in each.items() if "loss" in k} for each in history]
    assert (sha256(second), losses) == expected


class Kill(Callback):
    """Kills worker 1 once, in the second step of the second epoch."""

    def __init__(self, path):
        self.path = path

    def after_train_iter(self, runner):
        if runner.rank == 1 and runner.global_step == 6 and not os.path.exists(self.path):
            open(self.path, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.fault
def test_a_killed_worker_changes_no_bit(rows, tmp_path):
    options = {
        "callbacks": [Kill(str(tmp_path / "killed"))],
        "checkpoint_trigger": SeveralIteration(1),
    }
    killed = fitted(rows, workers=2, model_dir=str(tmp_path / "run"), fit=options)
    assert killed == fitted(rows, workers=1)
    assert os.path.exists(tmp_path / "killed")


def test_a_second_fit_goes_on_from_the_first(rows):
    def twice(workers):
        trained = estimator(workers=workers)
        for _ in range(2):
            trained.fit(rows, batch_size=64, seed=3, exact="bits", virtual_shards=4)
        return sha256(trained)

    assert twice(1) == twice(2)


@pytest.mark.parametrize(
    ("fit", "code", "named"),
    [
        ({"exact": "digits"}, "argument-value", "'digits'"),
        ({"virtual_shards": 6}, "argument-value", "6"),
        ({"virtual_shards": 2}, "argument-value", "1 or 2 workers, here are 4"),
        ({"accumulate_grad_batches": 2}, "argument-conflict", "accumulate_grad_batches=2"),
        ({"local_steps": 3}, "argument-conflict", "local_steps=3"),
    ],
)
def test_what_would_change_bits_is_refused(rows, fit, code, named):
    with refused(code, named):
        estimator(workers=4).fit(rows, **{"exact": "bits", **fit})


def test_a_loader_and_sparse_gradients_are_refused(rows):
    x, y = map(torch.from_numpy, rows)
    dataset = torch.utils.data.TensorDataset(x, y)
    with refused("data-type", 'exact="bits"'):
        estimator().fit(torch.utils.data.DataLoader(dataset, batch_size=8), exact="bits")

    def embedding(config):
        return nn.Sequential(nn.EmbeddingBag(5, 3, sparse=True))

    with refused("argument-conflict", "sparse"):
        estimator(embedding, optimizer=sgd).fit(
            (np.zeros((8, 1), dtype="int64"), np.zeros(8, dtype="int64")), exact="bits"
        )
