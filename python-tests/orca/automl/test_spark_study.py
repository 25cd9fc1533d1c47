"""Searches whose trials run on Spark executors."""

import collections
import os
import time
from pathlib import Path

import numpy as np
import optuna
import pytest
from small_searches import fit, rows, search

from bigdl.common.errors import UsageError
from bigdl.tuning import SparkStudy


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


def objective(trial):
    x = trial.suggest_float("x", -4, 4)
    for step in range(3):
        trial.report((x - 1) ** 2 + 1 / (step + 1), step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return (x - 1) ** 2


def study(**options):
    sampler = optuna.samplers.TPESampler(seed=5)
    return optuna.create_study(sampler=sampler, pruner=optuna.pruners.MedianPruner(3), **options)


def facts(of):
    return [(t.number, t.state.name, t.params, t.values, t.intermediate_values) for t in of.trials]


def test_one_slot_runs_the_trials_of_plain_optuna(orca_spark):
    expected, found = study(), study()
    expected.optimize(objective, n_trials=20)
    SparkStudy(found).optimize(objective, n_trials=20, concurrency=1)
    assert facts(found) == facts(expected)


def test_trials_share_long_lived_tasks(orca_spark, tmp_path):
    """Two tasks run all trials of a study in a database, which the tasks do not open."""

    def record(trial):
        from pyspark import TaskContext

        trial.set_user_attr("task", TaskContext.get().taskAttemptId())
        time.sleep(0.1)
        return objective(trial)

    found = study(storage=f"sqlite:///{tmp_path}/study.db")
    SparkStudy(found).optimize(record, n_trials=14)
    assert sorted(t.number for t in found.trials) == list(range(14))
    assert len({t.user_attrs["task"] for t in found.trials}) == 2


def test_a_trial_can_have_all_cores(orca_spark):
    def threads(trial):
        import torch

        return torch.get_num_threads()

    found = study()
    SparkStudy(found).optimize(threads, n_trials=3, cores_per_trial=2)
    assert {t.value for t in found.trials} == {2}
    assert len(found.trials) == 3
    with pytest.raises(UsageError, match="A worker needs 3 cores"):
        SparkStudy(found).optimize(threads, n_trials=3, cores_per_trial=3)


def test_trials_of_a_machine_share_the_data(orca_spark):
    def mapped(trial, data):
        maps = Path("/proc/self/maps").read_text().splitlines()
        trial.set_user_attr("file", next(line.split()[-1] for line in maps if "data-" in line))
        with pytest.raises(ValueError, match="read-only"):
            data["x"][0] = 5
        time.sleep(0.2)
        return float(data["x"].sum() + data["y"][0])

    found, data = study(), {"x": np.ones(200_000), "y": [1.5]}
    SparkStudy(found).optimize(mapped, n_trials=4, data=data)
    assert {t.value for t in found.trials} == {200_001.5}
    files = {t.user_attrs["file"] for t in found.trials}
    assert len(files) == 1  # of both processes
    assert not os.path.exists(files.pop())


def test_auto_estimator_trains_the_same_models_on_spark(orca_spark, tmp_path):
    expected = fit(search(tmp_path / "local")).trials()
    est = fit(search(tmp_path / "spark", backend="spark"), concurrency=2)
    columns = ["status", "mse", "epochs", "config/lr", "config/units"]
    found = est.trials().set_index("config/lr").sort_index()
    expected = expected.set_index("config/lr").sort_index()
    assert (found[columns[1]] == expected[columns[1]]).all()
    assert list(found["status"]) == ["finished"] * 3
    assert est.get_best_model()(*map(np_to_torch, rows()[:1])).shape == (160, 1)


def np_to_torch(array):
    import torch

    return torch.from_numpy(array)


def test_auto_estimator_reads_rows_of_a_cluster(local_cluster, tmp_path):
    x, y = rows()
    names = [f"x{i}" for i in range(4)]
    table = [(*map(float, row), float(value)) for row, value in zip(x, y, strict=True)]
    frame = local_cluster.createDataFrame(table, [*names, "y"]).coalesce(1)
    columns = {"feature_cols": names, "label_cols": "y"}
    est = search(tmp_path, backend="spark", model_creator=by_columns)
    fit(est, frame, n_sampling=2, validation_data=None, metric="mse", **columns)
    assert list(est.trials()["status"]) == ["finished"] * 2


def by_columns(config):
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, *columns):
            return self.layer(torch.stack([c.float().reshape(-1) for c in columns], 1))

    return Net()


def test_killed_executors_lose_no_trial(local_cluster):
    def killed(trial):
        import psutil

        x = trial.suggest_float("x", 0, 1)
        time.sleep(0.2)
        if trial.number in (3, 7):
            psutil.Process(os.getppid()).parent().kill()  # daemon of Python -> JVM
            time.sleep(60)
        return x

    found = study()
    SparkStudy(found).optimize(killed, n_trials=14)
    states = collections.Counter(t.state.name for t in found.trials)
    assert states["COMPLETE"] == 14
    lost = {t.number: t for t in found.trials if t.state.name == "FAIL"}
    repeated = {t.user_attrs["retry_of"]: t for t in found.trials if "retry_of" in t.user_attrs}
    assert {3, 7} <= set(lost) == set(repeated)  # a trial of the same executor may be lost, too
    assert all(repeated[number].params == lost[number].params for number in lost)
