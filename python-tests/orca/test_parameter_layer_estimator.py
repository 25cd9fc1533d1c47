"""The Estimator with ``backend="bigdl"``."""

import numpy as np
import pytest
import torch
from alone import largest_difference
from torch import nn

from bigdl.orca.learn.pytorch import Estimator

ROWS = 40
COLUMNS = {"feature_cols": ["x"], "label_cols": ["y"]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)
        )

    def forward(self, x):
        return self.layers(x)


def net(config):
    return Net()


def normed(config):
    return Normed()


def adam(model, config):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def stepped(optimizer, config):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def estimator(backend="bigdl", **options):
    given = {"model": net, "optimizer": adam, "loss": nn.MSELoss(), "workers_per_node": 2}
    return Estimator.from_torch(**{**given, "backend": backend, **options})


def arrays():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 4)).astype(np.float32)
    return x, (x.sum(axis=1) + 0.1).astype(np.float32)


@pytest.fixture(scope="module")
def frame(orca_spark):
    x, y = arrays()
    rows = [(a.tolist(), float(b)) for a, b in zip(x, y, strict=True)]
    return orca_spark.createDataFrame(rows, "x array<float>, y float")


def fitted(data=None, *, epochs=2, options=None, **fit):
    est = estimator(**(options or {}))
    stats = est.fit(data or arrays(), epochs=epochs, batch_size=8, seed=3, **fit)
    return est, stats


def weights(est):
    return est.get_model().state_dict()


def same(one, other):
    return largest_difference(weights(one), weights(other)) == 0


# -- results --------------------------------------------------------------------------------------


def test_shuffle_gives_the_weights_of_torch_distributed(orca_spark):
    """Both sum two gradients of equal rows, so not even the last bit differs much."""
    one, stats = fitted(options={"scheduler_creator": stepped, "scheduler_step_freq": "batch"})
    options = {"scheduler_creator": stepped, "scheduler_step_freq": "batch", "backend": "spark"}
    other, known = fitted(options=options)
    assert largest_difference(weights(one), weights(other)) < 1e-6
    assert [s["num_samples"] for s in stats] == [ROWS, ROWS]
    for a, b in zip(stats, known, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-5)
        assert a.keys() == b.keys()
    state, others = one.get_state_dict(), other.get_state_dict()
    assert state["schedulers"][0]["_last_lr"] == others["schedulers"][0]["_last_lr"]


@pytest.fixture(scope="module")
def by_shuffle(orca_spark):
    return fitted(options={"model": normed}, group_size=3)


@pytest.mark.parametrize(
    "fit", [{"group_size": 10}, {"transport": "barrier"}], ids=["longer group", "barrier"]
)
def test_weights_and_buffers_depend_on_nothing_but_the_rows(by_shuffle, fit):
    est, stats = by_shuffle
    other, others = fitted(options={"model": normed}, **fit)
    assert same(est, other)
    assert [s["train_loss"] for s in stats] == [s["train_loss"] for s in others]
    assert not torch.equal(weights(est)["layers.1.running_mean"], torch.zeros(8))
    assert int(weights(est)["layers.1.num_batches_tracked"]) == 10
