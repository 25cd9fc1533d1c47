"""Trials in processes of this machine whose study stays in the program."""

import _thread
import os
import signal
import threading
import time

import optuna
import pytest

from bigdl.common.errors import UsageError, WorkerError, WorkerLost
from bigdl.tuning import optimize


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


def objective(trial):
    x = trial.suggest_float("x", -4, 4)
    rate = trial.suggest_float("rate", 1e-5, 1, log=True)
    trial.suggest_categorical("category", ["a", 2, None, True, 0.5])
    units = trial.suggest_int("units", 1, 9, step=2)
    for step in range(4):
        trial.report((x - 1) ** 2 + rate + units / (step + 1), step)
        if trial.should_prune():
            raise optuna.TrialPruned("enough")
    trial.set_user_attr("units", units)
    return (x - 1) ** 2 + rate + units / 10


def study(**options):
    options.setdefault("sampler", optuna.samplers.TPESampler(seed=3))
    return optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=4), **options)


def facts(of):
    trials = of.trials
    return [(t.number, t.state.name, t.params, t.values, t.intermediate_values) for t in trials]


def run(of, function=objective, n_trials=6, **options):
    optimize(of, function, n_trials, **{"backend": "local", "concurrency": 1, **options})
    return of


@pytest.mark.parametrize("sampler", ["TPESampler", "RandomSampler", "NSGAIISampler"])
def test_one_worker_runs_the_trials_of_plain_optuna(sampler):
    def create():
        return study(sampler=getattr(optuna.samplers, sampler)(seed=3))

    expected = create()
    expected.optimize(objective, n_trials=25)
    assert facts(run(create(), n_trials=25)) == facts(expected)
    assert {"PRUNED", "COMPLETE"} == {trial.state.name for trial in expected.trials}


@pytest.mark.slow
def test_several_workers_run_each_trial_once_with_a_database(tmp_path):
    def record(trial):
        trial.set_user_attr("pid", os.getpid())
        time.sleep(0.05)
        return objective(trial)

    found = run(study(storage=f"sqlite:///{tmp_path}/study.db"), record, 12, concurrency=2)
    assert [t.number for t in found.trials] == list(range(12))
    assert {t.state.name for t in found.trials} <= {"PRUNED", "COMPLETE"}
    assert os.getpid() not in {t.user_attrs["pid"] for t in found.trials}
    run(found, n_trials=2)
    assert len(found.trials) == 14


def test_a_grid_and_a_callback_end_a_search():
    grid = optuna.samplers.GridSampler({"x": [1, 2, 3]})
    found = run(study(sampler=grid), lambda trial: trial.suggest_int("x", 1, 3), None)
    assert sorted(t.params["x"] for t in found.trials) == [1, 2, 3]

    seen = []

    def stop(of, trial):
        seen.append(trial.value)
        if trial.number == 2:
            of.stop()

    found = run(study(), lambda trial: trial.number, 10, callbacks=[stop])
    assert seen == [0, 1, 2]
    found = run(study(), lambda trial: trial.study.stop() or 1.0, 10)
    assert len(found.trials) == 1


def test_a_killed_worker_repeats_its_trial_once():
    def killed(trial):
        x = trial.suggest_float("x", 0, 1)
        if trial.number in (2, 3):  # the repetition, too
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    found = run(study(), killed, 6)
    assert [t.state.name for t in found.trials] == ["COMPLETE"] * 2 + ["FAIL"] * 2 + [
        "COMPLETE"
    ] * 3
    assert found.trials[3].params == found.trials[2].params
    assert found.trials[3].user_attrs["retry_of"] == 2


@pytest.mark.slow
def test_a_search_whose_workers_always_die_ends():
    def killed(trial):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerLost, match="All workers of the search were lost"):
        run(study(), killed, 6)


class CustomError(Exception):
    pass


def fail(trial):
    if trial.number == 1:
        raise CustomError("no such model")
    if trial.number == 2:
        raise ZeroDivisionError("a division")
    return None if trial.number == 3 else float(trial.number)


@pytest.mark.filterwarnings("ignore:The value None")
def test_errors_end_a_search_unless_they_are_caught():
    with pytest.raises(WorkerError, match="CustomError in trial 1"):
        run(study(), fail)
    with pytest.raises(ZeroDivisionError, match="a division"):
        run(study(), fail, catch=CustomError)
    found = run(study(), fail, catch=(CustomError, ArithmeticError))
    assert [t.state.name for t in found.trials] == ["COMPLETE"] + ["FAIL"] * 3 + ["COMPLETE"] * 2


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("interrupt", [False, True])
def test_a_timeout_and_an_interrupt_end_running_trials(interrupt):
    def endless(trial):
        if trial.number:
            time.sleep(600)
        return 1.0

    found = study()
    begin = time.monotonic()
    if interrupt:
        done = threading.Event()

        def press_keys():  # a trial is running after the first has finished
            time.sleep(1)
            _thread.interrupt_main()
            while not done.wait(20):  # one that arrives in a finalizer is lost
                _thread.interrupt_main()

        thread = threading.Thread(target=press_keys, daemon=True)
        with pytest.raises(KeyboardInterrupt):
            run(found, endless, callbacks=[lambda *_: thread.start()])
        done.set()
        thread.join()
    else:
        run(found, endless, timeout=6)
    assert time.monotonic() - begin < 60
    assert [t.state.name for t in found.trials] == ["COMPLETE", "FAIL"]
    assert found.best_value == 1.0


@pytest.mark.slow
def test_objectives_use_the_interface_of_optuna():
    def many(trial):
        trial.set_constraint("c", -1.0)
        trial.suggest_int("n", 1, 4)
        assert trial.params == {"n": trial.suggest_int("n", 1, 4)}
        assert trial.distributions == {"n": optuna.distributions.IntDistribution(1, 4)}
        assert trial.study.direction.name == "MINIMIZE"
        with pytest.raises(ValueError, match="low"):
            trial.suggest_float("bad", 2, 1)
        assert trial.study.best_params == {"n": 1}
        trial.suggest_categorical("object", [object()])

    found = study()
    found.enqueue_trial({"n": 1})
    run(found, lambda trial: trial.suggest_int("n", 1, 4), 1)
    with pytest.raises(UsageError, match="for other categories, suggest their index"):
        run(found, many, 1)
    assert found.trials[-1].constraints == {"c": -1.0}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n_trials": None}, "A search needs an end"),
        ({"n_trials": 0}, "n_trials should be"),
        ({"concurrency": 0}, "concurrency should be"),
        ({"cores_per_trial": 4096}, "A worker needs 4096 cores"),
        ({"timeout": -1}, "timeout"),
        ({"backend": "dask"}, "backend"),
    ],
)
def test_invalid_arguments_raise_an_error(options, text):
    with pytest.raises(UsageError, match=text):
        run(study(), **options)


def several(trial):
    """A trial of several workers, which train one model by gradients of all of them."""
    import torch
    from torch import distributed

    trial.init_process_group()
    x, rate = trial.suggest_float("x", -4, 4), trial.suggest_float("rate", 0.1, 0.9)
    category = trial.suggest_categorical("category", ["a", 2, None])
    parts = trial.all_gather([trial.rank, x, category])
    assert parts == [[rank, x, category] for rank in range(trial.world_size)]
    for step in range(4):
        total = torch.tensor([float(trial.rank + 1)])
        distributed.all_reduce(total)
        trial.report((x - total.item()) ** 2 + rate + (100 if trial.rank else 0), step)
        if trial.should_prune():
            raise optuna.TrialPruned("enough")
    trial.set_user_attr("pids", trial.all_gather(os.getpid()))
    return (x - total.item()) ** 2 + rate + (1000 if trial.rank else 0)


def alone(trial):
    x, rate = trial.suggest_float("x", -4, 4), trial.suggest_float("rate", 0.1, 0.9)
    trial.suggest_categorical("category", ["a", 2, None])
    for step in range(4):
        trial.report((x - 3.0) ** 2 + rate, step)
        if trial.should_prune():
            raise optuna.TrialPruned("enough")
    return (x - 3.0) ** 2 + rate


def test_several_workers_of_a_trial_share_its_parameters_and_its_decisions():
    expected = study()
    expected.optimize(alone, n_trials=16)
    found = run(study(), several, 16, workers_per_trial=2)
    assert facts(found) == facts(expected)
    assert {t.state.name for t in found.trials} == {"PRUNED", "COMPLETE"}
    pids = [t.user_attrs["pids"] for t in found.trials if "pids" in t.user_attrs]
    assert {len(set(each)) for each in pids} == {2}


def test_a_lost_worker_of_several_repeats_their_trial_once():
    def killed(trial):
        x = trial.suggest_float("x", 0, 1)
        if trial.number == 2 and trial.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        trial.init_process_group()
        return x

    found = run(study(), killed, 5, workers_per_trial=2)
    assert [t.state.name for t in found.trials] == ["COMPLETE"] * 2 + ["FAIL"] + ["COMPLETE"] * 3
    assert found.trials[3].params == found.trials[2].params
    assert found.trials[3].user_attrs["retry_of"] == 2


def test_an_error_of_one_of_several_workers_ends_the_search():
    def fail(trial):
        trial.init_process_group()
        if trial.number == 1 and trial.rank == 1:
            raise ZeroDivisionError("a division")
        trial.all_gather(0)
        trial.suggest_float("x", 0, 1)
        return 1.0

    found = study()
    with pytest.raises(ZeroDivisionError, match="a division"):
        run(found, fail, 5, workers_per_trial=2)
    assert [t.state.name for t in found.trials] == ["COMPLETE", "FAIL"]

    def disordered(trial):
        names = ["a", "b"] if trial.rank else ["b", "a"]
        return sum(trial.suggest_float(name, 0, 1) for name in names)

    with pytest.raises(UsageError, match="in the same order, but rank 1 called a suggestion of"):
        run(study(), disordered, 2, workers_per_trial=2)

    def longer(trial):
        return trial.broadcast(trial.rank) if trial.rank else 0.0

    with pytest.raises(UsageError, match="rank 1 called broadcast after rank 0 had ended"):
        run(study(), longer, 2, workers_per_trial=2)


def test_a_trial_needs_as_many_cores_as_its_workers():
    with pytest.raises(UsageError, match="A trial has 99 workers with 1 cores each"):
        run(study(), n_trials=2, workers_per_trial=99)
