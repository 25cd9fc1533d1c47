"""Searches whose trials run on Spark executors."""

import _thread
import collections
import os
import threading
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
        time.sleep(0.1 if trial.number else 5)  # the other task may start late
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


def test_a_trial_can_have_several_tasks(orca_spark):
    def joint(trial):
        import torch
        from pyspark import TaskContext

        trial.init_process_group()
        x = torch.tensor([trial.suggest_float("x", 0, 0.5)])
        torch.distributed.all_reduce(x)
        trial.set_user_attr("tasks", trial.all_gather(TaskContext.get().taskAttemptId()))
        return x.item() + 1000 * trial.rank

    found = study()
    SparkStudy(found).optimize(joint, n_trials=5, workers_per_trial=2)
    assert all(t.value == pytest.approx(2 * t.params["x"]) for t in found.trials)
    assert len({task for t in found.trials for task in t.user_attrs["tasks"]}) == 2
    with pytest.raises(UsageError, match="A trial has 3 workers with 1 cores each"):
        SparkStudy(found).optimize(joint, n_trials=3, workers_per_trial=3)


def test_a_trial_can_start_local_processes(orca_spark):
    def nested(trial):
        import torch

        from bigdl.orca.learn.pytorch import Estimator

        torch.manual_seed(0)
        rate = trial.suggest_float("lr", 0.01, 0.1)
        est = Estimator.from_torch(
            model=torch.nn.Linear(4, 1),
            optimizer=lambda model, config: torch.optim.SGD(model.parameters(), rate),
            loss=torch.nn.MSELoss(),
            backend="local",
            workers_per_node=2,
        )
        x, y = rows()
        return est.fit((x, y[:, None]), epochs=2, batch_size=32)[-1]["train_loss"]

    found = study()
    SparkStudy(found).optimize(nested, n_trials=2, cores_per_trial=2)
    assert [t.state.name for t in found.trials] == ["COMPLETE"] * 2
    assert 0 < found.best_value < 5


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("interrupt", [False, True])
def test_a_timeout_and_an_interrupt_end_a_search_within_seconds(orca_spark, interrupt):
    def endless(trial):
        if trial.number > 1:
            time.sleep(600)
        return 1.0

    found, begin = study(), []

    def press_keys():
        time.sleep(1)  # the next trials are running
        begin.append(time.monotonic())
        _thread.interrupt_main()

    def after(_, trial):
        if interrupt and trial.number == 1:
            threading.Thread(target=press_keys, daemon=True).start()

    if interrupt:
        with pytest.raises(KeyboardInterrupt):
            SparkStudy(found).optimize(endless, n_trials=9, callbacks=[after])
    else:
        begin.append(time.monotonic() + 8)
        SparkStudy(found).optimize(endless, n_trials=9, timeout=8)
    assert time.monotonic() - begin[0] < 30
    states = collections.Counter(t.state.name for t in found.trials)
    assert states["COMPLETE"] <= 2  # a slow machine may not start a trial within the time limit
    assert set(states) <= {"COMPLETE", "FAIL"}
    SparkStudy(found).optimize(lambda trial: 2.0, n_trials=2)  # the study is resumed
    assert len(found.trials) == sum(states.values()) + 2


def test_nano_searches_on_spark(orca_spark):
    from search_models import line
    from training_models import QUIET

    from bigdl.nano.pytorch import Trainer

    trainer = Trainer(use_hpo=True, max_epochs=1, tune_process=False, **QUIET)
    model = trainer.search(line(), target_metric="val_loss", n_trials=4, backend="spark")
    found = trainer.search_summary()
    assert [t.state.name for t in found.trials] == ["COMPLETE"] * 4
    trainer.fit(model)
    loss = trainer.validate(model, verbose=False)[0]["val_loss"]
    assert loss == pytest.approx(found.best_value, rel=1e-5)


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


@pytest.mark.slow
def test_auto_estimator_trains_the_same_models_on_spark(orca_spark, tmp_path):
    expected = fit(search(tmp_path / "local")).trials()
    est = fit(search(tmp_path / "spark", backend="spark"), concurrency=2)
    columns = ["status", "mse", "epochs", "config/lr", "config/units"]
    found = est.trials().set_index("config/lr").sort_index()
    expected = expected.set_index("config/lr").sort_index()
    assert (found[columns[1]] == expected[columns[1]]).all()
    assert list(found["status"]) == ["finished"] * 3
    assert est.get_best_model()(*map(np_to_torch, rows()[:1])).shape == (160, 1)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_two_tasks_train_the_models_of_one(orca_spark, tmp_path, framework):
    """Include a last batch of one row, which only one task sees."""
    if framework == "keras":
        pytest.importorskip("keras")

    def table(name, **parts):
        if framework == "torch":
            est = search(tmp_path / name, **parts)
        else:
            from bigdl.orca.automl.auto_estimator import AutoEstimator

            logs = str(tmp_path / name)
            est = AutoEstimator.from_keras(model_creator=keras_net, logs_dir=logs, **parts)
        goal = {"metric": "mse", "validation_data": rows(61, 1)}
        fit(est, rows(161), **goal, concurrency=1)
        found = est.trials().set_index("config/lr").sort_index()
        assert list(found["status"]) == ["finished"] * 3
        return found["mse"], est.get_best_config()

    one, best = table("one", backend="local")
    two, best_of_two = table("two", backend="spark", workers_per_trial=2)
    np.testing.assert_allclose(two, one, rtol=1e-4)
    assert best_of_two == best


@pytest.mark.slow
def test_an_error_in_the_second_task_of_a_trial_is_that_of_the_trial(orca_spark, tmp_path):
    def creator(config):
        import torch

        layer = torch.nn.Linear(4, 1)

        def forward(x, plain=layer.forward):
            if torch.distributed.get_rank() == 1:
                raise ZeroDivisionError("on the second")
            return plain(x)

        layer.forward = forward
        return layer

    est = search(tmp_path, backend="spark", workers_per_trial=2, model_creator=creator)
    with pytest.raises(UsageError, match="All 2 trials failed, the first with: ZeroDivisionError"):
        fit(est, n_sampling=2)


def keras_net(config):
    import keras

    model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(config["lr"]), "mse")
    return model


def np_to_torch(array):
    import torch

    return torch.from_numpy(array)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_killed_executors_lose_and_double_no_trial(local_cluster):
    def killed(trial):
        import psutil

        x = trial.suggest_float("x", 0, 1)
        time.sleep(0.2)
        if trial.number % 6 == 5 and trial.number < 60 and "retry_of" not in trial.user_attrs:
            psutil.Process(os.getppid()).parent().kill()  # daemon of Python -> JVM
            time.sleep(60)
        return x

    found = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=5))
    SparkStudy(found).optimize(killed, n_trials=60)
    states = collections.Counter(t.state.name for t in found.trials)
    lost = {t.number: t for t in found.trials if t.state.name == "FAIL"}
    repeated = [t for t in found.trials if "retry_of" in t.user_attrs]
    assert states == {"COMPLETE": 60, "FAIL": len(lost)}
    assert len(lost) >= 9  # a number may be that of a repetition, which is not killed
    # once each: those of the killed executors, and others that they ran at that time
    assert sorted(t.user_attrs["retry_of"] for t in repeated) == sorted(lost)
    assert all(t.params == lost[t.user_attrs["retry_of"]].params for t in repeated)
    values = [t.params["x"] for t in found.trials if t.state.name == "COMPLETE"]
    assert len(set(values)) == 60
