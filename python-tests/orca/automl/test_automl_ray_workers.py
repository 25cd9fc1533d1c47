"""Test trials with several workers on Ray against trials with one worker."""

import os
import signal
import time

import numpy as np
import pytest
import ray_models as rays
import torch
from small_searches import fit, model, mse, rows, search

from bigdl.common.errors import UsageError
from bigdl.orca.automl import hp

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")
pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'bigdl[automl]'")

VALIDATION = rows(61, 1)
COLUMNS = ["mse", "epochs", "config/lr", "config/units"]
UNITS = {"lr": 0.01, "units": hp.grid_search([4, 8, 5])}


@pytest.fixture(scope="module", autouse=True)
def on_ray():
    return rays.active_ray()


def shared(logs_dir, **parts):
    """Return a search whose trials have two workers each."""
    return search(logs_dir, backend="ray", workers_per_trial=2, **parts)


@pytest.mark.slow
def test_two_workers_find_what_one_worker_finds(tmp_path):
    """Include a last batch of one row, which only one worker sees."""
    data = rows(161)
    one = fit(search(tmp_path / "one"), data, validation_data=VALIDATION)
    two = fit(shared(tmp_path / "two"), data, validation_data=VALIDATION)
    table = two.trials()
    assert table["status"].tolist() == ["finished"] * 3
    assert np.allclose(table[COLUMNS], one.trials()[COLUMNS], rtol=1e-5, atol=1e-6)
    assert two.get_best_config() == one.get_best_config()
    assert mse(two.get_best_model(), VALIDATION) == pytest.approx(table["mse"].min(), rel=1e-5)


@pytest.mark.slow
def test_a_loss_counts_as_in_one_worker(tmp_path):
    """Use losses that are means over rows, means weighted by class, and sums."""
    from torch.nn import CrossEntropyLoss

    losses = {
        "rows": CrossEntropyLoss(),
        "weights": CrossEntropyLoss(weight=torch.tensor([0.1, 2.0])),
        "ignored": CrossEntropyLoss(ignore_index=0),
        "sum": CrossEntropyLoss(reduction="sum"),
    }

    def classifier(config):
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))

    def error(y_true, y_pred):
        return float(np.abs(y_pred).sum())

    def classes(*how):
        x, y = rows(*how)
        return x, (y > 0.5).astype("int64")

    parts = {"model_creator": classifier, "loss": lambda config: losses[config["loss"]]}
    options = {
        "search_space": {"loss": hp.grid_search(list(losses)), "lr": 0.01},
        "validation_data": classes(61, 1),
        "n_sampling": 1,
        "metric": error,
        "metric_mode": "min",
    }
    one = fit(search(tmp_path / "one", **parts), classes(161), **options).trials()
    two = fit(shared(tmp_path / "two", **parts), classes(161), **options).trials()
    assert np.allclose(one["error"], two["error"], rtol=1e-5)
    assert len(set(one["error"].round(4))) == 4


@pytest.mark.slow
def test_loaders_are_shared_batch_by_batch(tmp_path):
    """Check that all workers shuffle a loader alike, although their random numbers differ."""

    def loader(count, seed, shuffle):
        def make(config):
            tensors = map(torch.from_numpy, rows(count, seed))
            data = torch.utils.data.TensorDataset(*tensors)
            return torch.utils.data.DataLoader(data, 32, shuffle=shuffle)

        return make

    train, held_out = loader(161, 0, True), loader(61, 1, False)
    options = {"validation_data": held_out, "search_space": UNITS, "n_sampling": 1}
    one = fit(search(tmp_path / "one"), train, **options).trials()
    two = fit(shared(tmp_path / "two"), train, **options).trials()
    assert np.allclose(one["mse"], two["mse"], rtol=1e-5)


@pytest.mark.slow
def test_statistics_of_batches_and_dropout_are_those_of_all_workers(tmp_path):
    """Check that all workers train one model; it differs from one worker's by rounding."""

    def normal(config):
        import torch

        parts = torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), *parts)

    data, options = rows(400), {"n_sampling": 1, "search_space": {"lr": 0.02}, "epochs": 4}
    est = fit(shared(tmp_path, model_creator=normal), data, validation_data=VALIDATION, **options)
    table = est.trials()
    assert table["mse"][0] < 2.0  # the mean's is 5
    best = est.get_best_model()
    assert mse(best, VALIDATION) == pytest.approx(table["mse"][0], rel=1e-5)
    assert int(best[1].num_batches_tracked) <= 4 * 13


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_workers_train_the_keras_model_of_one(tmp_path):
    """Train on arrays and on datasets, with a last batch of one row and with random layers."""
    pytest.importorskip("keras", reason="Keras is not installed: pip install 'bigdl[tf]'")
    tf = pytest.importorskip("tensorflow")
    from bigdl.orca.automl.auto_estimator import AutoEstimator

    def creator(config):
        import keras

        layers = [keras.layers.Input((4,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)]
        if config["kind"] == "draws":
            layers[2:2] = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)]
        reduction = "sum" if config["kind"] == "sum" else "sum_over_batch_size"
        made = keras.Sequential(layers)
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        made.compile(keras.optimizers.Adam(0.01), loss=loss, metrics=["mae"])
        return made

    def dataset(count, seed):
        return lambda config: tf.data.Dataset.from_tensor_slices(rows(count, seed)).batch(32)

    def searched(folder, data, validation, model_types, **where):
        est = AutoEstimator.from_keras(model_creator=creator, logs_dir=str(folder), **where)
        space = {"kind": hp.grid_search(model_types), "shuffle": False}
        options = {"metric": ["mse", "mae"], "concurrency": 1, "epochs": 2}
        est.fit(data, validation_data=validation, search_space=space, **options)
        return est

    two = {"backend": "ray", "workers_per_trial": 2}
    arrays, made = (rows(161), VALIDATION), (dataset(161, 0), dataset(61, 1))
    one = searched(tmp_path / "one", *arrays, ["mean", "sum"], backend="local").trials()
    est = searched(tmp_path / "arrays", *arrays, ["mean", "sum", "draws"], **two)
    of_datasets = searched(tmp_path / "datasets", *made, ["mean"], **two).trials()
    metrics = ["mse", "mae"]
    assert np.allclose(est.trials()[metrics][:2], one[metrics], rtol=1e-4)
    assert np.allclose(of_datasets[metrics], one[metrics][:1], rtol=1e-4)
    x, y = VALIDATION
    error = np.abs(est.get_model(2).predict(x, verbose=0)[:, 0] - y).mean()
    assert est.trials()["mae"][2] == pytest.approx(error, rel=1e-4)


@pytest.mark.slow
def test_trials_that_pause_go_on_with_all_their_workers(tmp_path):
    space = {"lr": hp.grid_search([0.05, 1e-6, 1e-6])}
    options = {"epochs": 3, "n_sampling": 1, "search_space": space, "concurrency": None}
    est = fit(shared(tmp_path, optimizer="SGD"), scheduler="hyperband", **options)
    assert set(est.trials()["status"]) <= {"finished", "stopped early"}
    assert est.get_best_config() == {"lr": 0.05}


@pytest.mark.slow
def test_what_fails_in_one_worker_fails_the_trial(tmp_path):
    def picky(config):
        def refuse(*_):
            if config["units"] == 8 and torch.distributed.get_rank() == 1:
                raise ArithmeticError("not eight")

        made = model(config)
        made.register_forward_pre_hook(refuse)
        return made

    est = fit(shared(tmp_path, model_creator=picky), epochs=1, n_sampling=1, search_space=UNITS)
    table = est.trials()
    assert table["status"].tolist() == ["finished", "failed", "finished"]
    assert table["failure"][1] == "ArithmeticError: not eight"


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("rank", [0, 1])
def test_a_trial_that_loses_a_worker_is_tried_again(tmp_path, rank):
    marker, pids = tmp_path / "killed", tmp_path / "pids"
    pids.mkdir()

    def deadly(config):
        def kill(*_):
            is_it = config["units"] == 8 and torch.distributed.get_rank() == rank
            if is_it and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        (pids / str(os.getpid())).touch()
        made = model(config)
        made.register_forward_pre_hook(kill)
        return made

    est = shared(tmp_path / "logs", model_creator=deadly)
    table = fit(est, epochs=1, n_sampling=1, search_space=UNITS).trials()
    assert table["status"].tolist() == ["finished", "lost", "finished", "finished"]
    assert table["config/units"].tolist() == [4, 8, 5, 8]
    assert_gone([int(path.name) for path in pids.iterdir()])


def assert_gone(pids):
    import psutil

    give_up = time.monotonic() + 120
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < give_up, f"workers {left} of trials are left"
        time.sleep(0.2)


@pytest.mark.slow
def test_trials_that_the_nodes_have_no_room_for_are_refused(tmp_path):
    est = search(tmp_path, backend="ray", workers_per_trial=3)
    with pytest.raises(UsageError, match=r"3 workers, each of which takes .* have capacity for 2"):
        fit(est)
