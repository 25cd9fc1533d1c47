"""Test the error messages of AutoEstimator for wrong inputs."""

import numpy as np
import pytest
import torch
from refusals import refused
from small_searches import fit, model, rows, search

from bigdl.common.errors import UsageError
from bigdl.orca.automl import hp
from bigdl.orca.automl.auto_estimator import AutoEstimator

pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'bigdl[automl]'")

X, Y = rows()


def batches_of_one_length():
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(data, batch_sampler=[[0, 1], [2]])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"optimizer": "adam"}, "valid torch optimizer name"),
        ({"optimizer": "Optimizer"}, "valid torch optimizer name"),
        ({"optimizer": torch.optim.Adam}, "valid torch optimizer name or a function"),
        ({"loss": "MSE"}, "valid torch loss name"),
        ({"loss": torch.nn.MSELoss}, "valid torch loss name, an instance"),
        ({"model_creator": torch.nn.Linear(1, 1)}, "model_creator must be a function"),
        ({"backend": "dask"}, "backend should be one of 'ray', 'spark', 'local'"),
        ({"name": "a/b"}, "name must be the name of a folder"),
        ({"resources_per_trial": {"cpu": "two"}}, "resources_per_trial must be a dict"),
        ({"resources_per_trial": 2}, "resources_per_trial must be a dict"),
        ({"workers_per_trial": 0}, "workers_per_trial should be a positive integer"),
        (
            {"workers_per_trial": 2, "resources_per_trial": {"cpu": 3}},
            "3 cpu, which cannot be divided evenly among the 2 workers of a trial",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_wrong_parts_are_refused_at_once(tmp_path, parts, message):
    with pytest.raises(UsageError, match=message):
        search(tmp_path, **parts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": None}, "You must input a valid metric value for fit_eval."),
        ({"metric": "f1"}, r"specify the `metric_mode` parameter in AutoEstimator.fit\(\)"),
        ({"metric": "f1", "metric_mode": "max"}, "metric f1 is not supported"),
        ({"metric": np.mean}, "You must specify `metric_mode` for your metric function"),
        ({"metric": "mse", "metric_mode": "best"}, "metric_mode must be 'min' or 'max'"),
        ({"metric": ["mse", "mae"], "metric_mode": "min"}, "for every metric"),
        ({"metric": ["mse", "MSE"]}, "the same name"),
        ({"metric": 3}, "metric must be a name or a function"),
        ({"metric_threshold": "low"}, "metric_threshold should be a number"),
        ({"epochs": 0}, "epochs should be a positive integer"),
        ({"n_sampling": -1}, "n_sampling should be a positive integer"),
        ({"concurrency": 0}, "concurrency should be a positive integer"),
        ({"resume": "yes"}, "resume must be True, False or 'auto'"),
        ({"search_space": [1]}, "search_space must be a dict"),
        ({"search_alg": "hyperopt"}, "needs backend='ray'"),
        ({"search_alg_params": {"seed": 1}}, "no effect without search_alg"),
        ({"search_alg": "optuna", "search_alg_params": {"no": 1}}, "cannot be created with"),
        ({"scheduler": "pbt"}, "scheduler 'pbt' needs backend='ray'"),
        ({"scheduler": "asha", "scheduler_params": {"no": 1}}, "has no 'no'"),
        ({"search_space": {"batch_size": 0}}, "batch_size of a configuration should be"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_wrong_arguments_of_fit_say_what_is_wrong(tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        fit(search(tmp_path), **options)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (3, {}, "data must be a tuple"),
        (X, {}, "data has no targets"),
        ((X, Y[:-1]), {}, "equal numbers of rows"),
        ((X[:0], Y[:0]), {}, "data has no rows"),
        ((np.array(["a", "b"]), np.zeros(2)), {}, "cannot become a tensor"),
        (({"a": X}, Y), {}, "cannot be a dict"),
        (lambda config: 3, {}, "must return a torch DataLoader"),
        (lambda config: batches_of_one_length(), {}, "DataLoader with batch_sampler="),
        ((X, Y), {"validation_data": (X, Y[:-1])}, "validation_data: .*equal numbers"),
    ],
    ids=[
        *("number", "no targets", "lengths", "no rows", "strings", "dict", "function"),
        *("batch sampler", "validation"),
    ],
)
def test_wrong_data_say_what_is_wrong(tmp_path, data, options, message):
    with pytest.raises(UsageError, match=message):
        fit(search(tmp_path), data, **options)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model_creator": lambda config: 3}, ("search-failed", "model_creator")),
        ({"optimizer": lambda model, config: 3}, ("search-failed",)),
        ({"loss": lambda config: 3}, ("search-failed",)),
    ],
    ids=["model", "optimizer", "loss"],
)
def test_wrong_creators_say_what_they_returned(tmp_path, parts, message):
    with refused(*message):
        fit(search(tmp_path, **parts), n_sampling=1)


def test_a_metric_that_is_never_a_number_fails_the_trial(tmp_path):
    def undefined(y_true, y_pred):
        return float("nan")

    with refused("search-failed"):
        fit(search(tmp_path), metric=undefined, metric_mode="min", n_sampling=1)


def test_an_estimator_is_fitted_once(tmp_path):
    est = search(tmp_path)
    for ask in (est.get_best_model, est.get_best_config, est.trials, est.get_best_trials):
        with refused("not-fitted"):
            ask()
    fit(est, n_sampling=1, epochs=1)
    with pytest.raises(UsageError, match="has already been fitted and cannot fit again"):
        fit(est)
    with refused("argument-value", "7"):
        est.get_model(7)
    with refused("path-unusable"):
        est.plot_history(tmp_path / "none" / "chart.html")


def test_an_estimator_is_made_by_its_constructors():
    with refused("argument-type", "from_torch", "from_keras"):
        AutoEstimator(model)


def test_this_machine_alone_has_one_worker_in_a_trial(tmp_path):
    with refused("unsupported", "workers_per_trial=2", "backend='ray' or 'spark'"):
        fit(search(tmp_path, workers_per_trial=2))
    assert not any(tmp_path.iterdir())


def test_domains_that_are_no_space_are_refused_before_a_search_begins(tmp_path):
    with refused("search-space", "search_space"):
        fit(search(tmp_path), search_space=hp.uniform(0, 1))
    assert not any(tmp_path.iterdir())
