"""States of NumPy, lazy layers, and checkpoints that belong to another optimizer."""

import warnings

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

from bigdl.common.errors import UsageError, WorkerError
from bigdl.orca.learn.pytorch import Estimator
from bigdl.training.state import dumps, loads

X = np.random.default_rng(0).normal(size=(54, 6)).astype("float32")
DATA = X, X[:, :1]


def estimator(model, optimizer=None, workers=1, **options):
    return Estimator.from_torch(
        model=model,
        optimizer=optimizer or (lambda m, config: torch.optim.SGD(m.parameters(), lr=0.01)),
        loss=nn.MSELoss(),
        backend="local",
        workers_per_node=workers,
        **options,
    )


class Remembers(nn.Linear):
    def get_extra_state(self):
        return {"bins": np.arange(3.0), "count": np.int64(4), "names": {"a", "b"}}

    def set_extra_state(self, state):
        assert state["bins"].tolist() == [0.0, 1.0, 2.0]
        self.kept = state["count"], state["names"]


def test_numpy_in_the_state_of_model_optimizer_and_schedule_is_kept():
    def schedule(optimizer, config):
        first = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: np.cos(n / 10))
        second = torch.optim.lr_scheduler.MultiStepLR(optimizer, np.array([1, 2]))
        return torch.optim.lr_scheduler.ChainedScheduler([first, second])

    est = estimator(
        lambda config: Remembers(6, 1),
        lambda m, config: torch.optim.SGD(m.parameters(), lr=np.float64(0.01)),
        scheduler_creator=schedule,
        workers=2,
    )
    est.fit(DATA, epochs=2, batch_size=20)
    est.fit(DATA, epochs=1, batch_size=20)
    assert est.get_model().kept == (4, {"a", "b"})


@pytest.mark.parametrize(
    "value",
    [np.float32(1.5), np.arange(6).reshape(2, 3), np.array(["a", "bc"]), {1, 2}, 1 + 2j],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_go_through_a_state(value):
    back = loads(dumps({"a": [value]}))["a"][0]
    assert type(back) is type(value)
    assert np.array_equal(back, value)


class Runs:
    def __reduce__(self):
        return eval, ("this must not run",)


def test_an_object_in_a_state_runs_no_code_and_is_named(capsys):
    before = set(torch.serialization.get_safe_globals())
    with refused("model-copy"):
        loads(dumps({"a": Runs(), "b": np.float64(1)}))
    assert capsys.readouterr().out == ""
    assert set(torch.serialization.get_safe_globals()) == before


def lazy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(1))


@pytest.mark.parametrize("workers", [1, 2])
def test_lazy_layers_take_their_sizes_from_a_row(workers):
    for model in (lambda config: lazy(), lazy()):
        est = estimator(model, workers=workers)
        est.fit(DATA, epochs=1, batch_size=20)
        assert est.evaluate(DATA)["num_samples"] == 54
        with torch.no_grad():
            expected = est.get_model().eval()(torch.from_numpy(X))
        assert np.allclose(est.predict(X), expected[:, 0], atol=1e-5)


def test_lazy_layers_without_a_row_are_a_sentence():
    with refused("model-unbuilt"):
        estimator(lambda config: lazy()).predict(X)


def test_a_checkpoint_of_another_optimizer_is_refused_by_name(tmp_path):
    def fit(optimizer, **options):
        linear = estimator(lambda config: nn.Linear(6, 1), optimizer, model_dir=str(tmp_path))
        linear.fit(DATA, batch_size=20, **options)
        return linear

    first = fit(lambda m, config: torch.optim.SGD(m.parameters(), lr=0.01), epochs=1)
    message = "has the state of the optimizer SGD, but the program creates Adam; use SGD"
    with pytest.raises((UsageError, WorkerError), match=message):
        fit(lambda m, config: torch.optim.Adam(m.parameters()), epochs=2, resume="auto")
    schedule = estimator(
        lambda config: nn.Linear(6, 1),
        model_dir=str(tmp_path),
        scheduler_creator=lambda o, config: torch.optim.lr_scheduler.StepLR(o, 1),
    )
    with pytest.raises((UsageError, WorkerError), match=r"scheduler StepLR.* checkpoint has none"):
        schedule.fit(DATA, batch_size=20, epochs=2, resume="auto")
    # a file that does not name the class
    first.save_checkpoint(str(tmp_path / "full.pt"))
    other = estimator(
        lambda config: nn.Linear(6, 1), lambda m, config: torch.optim.Adam(m.parameters())
    )
    other.load_checkpoint(str(tmp_path / "full.pt"))
    with pytest.raises((UsageError, WorkerError), match=r"it has no .*betas.*, which Adam needs"):
        other.fit(DATA, epochs=1, batch_size=20)


@pytest.mark.slow_cases("3")
@pytest.mark.parametrize("workers", [2, 3])
def test_batch_normalisation_takes_a_short_last_batch(workers):
    est = estimator(lambda config: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)), None, workers)
    (entry,) = est.fit(DATA, epochs=1, batch_size=26)
    assert entry["num_samples"] == 54


def test_batch_normalisation_of_single_rows_says_what_to_do():
    est = estimator(lambda config: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)), None, 2)
    with pytest.raises(WorkerError, match="at least two rows per worker"):
        est.fit(DATA, epochs=1, batch_size=2)
