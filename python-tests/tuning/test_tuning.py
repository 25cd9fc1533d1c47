import math
import os
import signal
import subprocess
import sys
import textwrap
import time

import optuna
import pandas as pd
import psutil
import pytest

from bigdl.common.errors import UsageError, WorkerLost
from bigdl.tuning import (
    PrunerType,
    SamplerType,
    create_pruner,
    create_sampler,
    open_study,
    run_trials,
    trial_table,
)
from bigdl.tuning.study import check_description

FAR = 250.0  # seconds that anything here may take on a machine that is busy


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


@pytest.fixture
def database(tmp_path):
    return f"sqlite:///{tmp_path}/search.db"


@pytest.fixture(scope="module")
def two_studies(tmp_path_factory):
    url = f"sqlite:///{tmp_path_factory.mktemp('studies')}/search.db"
    open_study(storage=url, name="one")
    open_study(storage=url, name="two")
    return url


def states(study):
    return [trial.state.name for trial in study.trials]


def parabola(trial):
    x = trial.suggest_float("x", -4, 4)
    return (x - 1) ** 2 + trial.suggest_int("y", 0, 3)


def test_a_seeded_search_is_repeatable_and_gets_better():
    def search():
        study = open_study(sampler=create_sampler("tpe", seed=3))
        run_trials(study, parabola, 30)
        return study

    one, two = search(), search()

    assert [trial.params for trial in one.trials] == [trial.params for trial in two.trials]
    assert one.best_value < 0.5


@pytest.mark.parametrize("name", [name for name in SamplerType if name != "CmaEs"])
def test_samplers_have_names(name):
    needed = {"Grid": {"search_space": {"x": [1]}}, "PartialFixed": {"fixed_params": {"x": 1}}}
    sampler = create_sampler(name, **needed.get(name, {}))

    assert isinstance(sampler, optuna.samplers.BaseSampler)
    assert create_sampler(sampler) is sampler
    assert type(create_sampler(str(name).lower(), **needed.get(name, {}))) is type(sampler)


def test_cma_es_works_where_its_package_is_installed():
    pytest.importorskip("cmaes")

    assert isinstance(create_sampler("CmaEs"), optuna.samplers.CmaEsSampler)


@pytest.mark.parametrize("name", list(PrunerType))
def test_pruners_have_names(name):
    needed = {
        "Percentile": {"percentile": 20.0},
        "Threshold": {"lower": 0.0},
        "Patient": {"patience": 2},
    }
    pruner = create_pruner(name, **needed.get(name, {}))

    assert isinstance(pruner, optuna.pruners.BasePruner)
    assert create_pruner(pruner) is pruner


def test_by_default_nothing_is_pruned():
    study = open_study()

    assert isinstance(study.sampler, optuna.samplers.TPESampler)
    assert isinstance(study.pruner, optuna.pruners.NopPruner)


def test_a_grid_ends_by_itself_when_all_was_visited(database):
    grid = create_sampler("Grid", search_space={"x": [1, 2, 3], "y": ["a", "b"]})

    def objective(trial):
        trial.suggest_categorical("y", ["a", "b"])
        return trial.suggest_int("x", 1, 3)

    study = open_study(sampler=grid)
    run_trials(study, objective)

    visited = {tuple(sorted(trial.params.items())) for trial in study.trials}
    assert len(study.trials) == len(visited) == 6


def test_the_table_has_a_row_for_each_trial_and_parameters_by_name_and_value():
    study = open_study(directions=["minimize", "maximize"], metric_names=["loss", "accuracy"])

    def objective(trial):
        name = trial.suggest_categorical("kind", ["wide", "deep"])
        depth = trial.suggest_int("depth", 2, 4) if name == "deep" else 1
        return 1 / depth, depth

    run_trials(study, objective, 8)
    table = trial_table(study)

    assert list(table.columns[:4]) == ["state", "loss", "accuracy", "seconds"]
    assert list(table.index) == list(range(8))
    assert set(table["kind"]) <= {"wide", "deep"}
    assert (table["depth"].isna() == (table["kind"] == "wide")).all()
    assert (table["loss"] * table["accuracy"]).round(6).eq(1).all()


def test_the_table_of_a_study_without_trials_is_empty():
    table = trial_table(open_study())

    assert isinstance(table, pd.DataFrame)
    assert list(table.columns) == ["state", "value", "seconds"]
    assert table.empty


def test_a_study_in_a_database_goes_on_where_it_was(database):
    run_trials(open_study(storage=database, name="one"), parabola, 4)
    study = open_study(storage=database, resume=True)
    run_trials(study, parabola, 3)

    assert study.study_name == "one"
    assert states(study) == ["COMPLETE"] * 7


def test_a_study_that_does_not_exist_is_made_by_resuming(database):
    study = open_study(storage=database, name="new", directions=["maximize"], resume=True)

    assert study.trials == []
    assert study.direction.name == "MAXIMIZE"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda url: create_sampler("best"), "sampler must be one of 'TPE'"),
        (lambda url: create_sampler("TPE", speed=1), "cannot be created with {'speed': 1}"),
        (lambda url: create_sampler("Grid"), "search_space"),
        (lambda url: create_pruner("gardener"), "pruner must be one of 'HyperBand'"),
        (lambda url: create_pruner("Percentile", percentile=200), "between 0 and 100"),
        (lambda url: open_study(directions=["up"]), "'minimize' or 'maximize', not 'up'"),
        (lambda url: open_study(storage="sqlite:////no/such/dir/x.db"), "cannot be opened"),
        (lambda url: open_study(storage="spreadsheet"), "cannot be opened"),
        (lambda url: open_study(storage=url, name="one"), "resume=True to resume"),
        (lambda url: open_study(storage=url, resume=True), "by study_name"),
        (
            lambda url: open_study(storage=url, name="one", directions=["maximize"], resume=True),
            "has the directions ['minimize'], not ['maximize']",
        ),
        (lambda url: run_trials(open_study(), parabola), "A search needs an end"),
        (
            lambda url: run_trials(open_study(), parabola, 0),
            "n_trials should be a positive",
        ),
        (lambda url: run_trials(open_study(), parabola, 2, processes=2), "in memory"),
        (
            lambda url: run_trials(open_study(storage=url), parabola, 2, processes=2, threads=2),
            "not in both",
        ),
    ],
)
def test_what_makes_no_sense_is_said(two_studies, call, said):
    with pytest.raises(UsageError) as error:
        call(two_studies)
    assert said in str(error.value)


def test_errors_of_an_objective_end_the_search_unless_they_are_caught():
    def objective(trial):
        if trial.number == 1:
            raise ZeroDivisionError("a trial like no other")
        return 1.0

    study = open_study()
    with pytest.raises(ZeroDivisionError, match="like no other"):
        run_trials(study, objective, 4)
    run_trials(study, objective, 2)

    assert states(study) == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]

    study = open_study()
    run_trials(study, objective, 4, catch=(ZeroDivisionError,))

    assert states(study) == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]


def remote(trial):
    """Record the process of a trial; be pruned, fail or die on request."""
    x = trial.suggest_float("x", 0, 1)
    trial.set_user_attr("pid", os.getpid())
    trial.report(x, 0)
    if trial.number == 2:
        raise optuna.TrialPruned("not promising")
    if trial.number == 3:
        raise ArithmeticError("not a number")
    if trial.number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


@pytest.mark.slow
def test_two_processes_lose_no_trial_to_one_that_is_killed(database):
    seen = []
    study = open_study(storage=database, pruner=create_pruner("Median"))
    run_trials(
        study,
        remote,
        8,
        processes=2,
        catch=(ArithmeticError,),
        callbacks=[lambda study, trial: seen.append(trial.number)],
    )

    assert sorted(seen) == list(range(9))
    assert states(study).count("COMPLETE") == 6
    assert study.trials[2].state.name == "PRUNED"
    assert study.trials[3].state.name == study.trials[5].state.name == "FAIL"
    [again] = [trial for trial in study.trials if trial.user_attrs.get("retry_of") == 5]
    assert again.params == study.trials[5].params
    assert again.state.name == "COMPLETE"
    pids = {trial.user_attrs["pid"] for trial in study.trials}
    assert os.getpid() not in pids
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert len({trial.params["x"] for trial in study.trials}) == 8


@pytest.mark.slow
def test_an_error_in_a_process_is_the_objectives_own(database):
    study = open_study(storage=database)

    def objective(trial):
        raise LookupError(f"trial {trial.number} found nothing")

    with pytest.raises(LookupError, match="found nothing") as error:
        run_trials(study, objective, 4, processes=2)
    assert "in objective" in "".join(error.value.__notes__)


@pytest.mark.slow
def test_a_trial_that_kills_its_process_twice_is_given_up(database):
    def deadly(trial):
        trial.suggest_int("x", 0, 9)
        os._exit(7)

    study = open_study(storage=database)
    with pytest.raises(WorkerLost, match="exit code 7"):
        run_trials(study, deadly, 2, processes=2)

    # the search ends with the first of them, maybe before the other is tried again
    lost = [trial for trial in study.trials if trial.state.name == "FAIL"]
    (first, *_) = (trial for trial in lost if "retry_of" in trial.user_attrs)
    assert first.user_attrs["retry_of"] in [trial.number for trial in lost]
    again = [t.user_attrs["retry_of"] for t in study.trials if "retry_of" in t.user_attrs]
    assert len(again) == len(set(again)) <= 2


SEARCH = """
    import os, sys, time

    from bigdl.tuning import open_study, run_trials

    def objective(trial):
        x = trial.suggest_float("x", 0, 1)
        if trial.number == 3:
            open(sys.argv[2], "w").close()
            time.sleep(600)
        return x

    study = open_study(storage=sys.argv[1], name="killed")
    run_trials(study, objective, 10, processes=int(sys.argv[3]), catch=(Exception,))
"""


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_search_resumes_without_losing_finished_trials(database, tmp_path, processes):
    program, reached = tmp_path / "search.py", tmp_path / "reached"
    program.write_text(textwrap.dedent(SEARCH))
    command = [sys.executable, program, database, reached, str(processes)]
    search = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        give_up = time.monotonic() + FAR
        while not reached.exists():
            assert search.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.05)
    finally:
        search.kill()
        search.wait(FAR)
    before = optuna.load_study(study_name="killed", storage=database).trials
    finished = [trial for trial in before if trial.state.name == "COMPLETE"]
    lost = [trial for trial in before if trial.state.name == "RUNNING"]

    study = open_study(storage=database, name="killed", resume=True)
    run_trials(study, lambda trial: trial.suggest_float("x", 0, 1), 4)

    assert len(finished) >= 2
    assert 3 in [trial.number for trial in lost]
    after = study.trials
    assert [after[trial.number].values for trial in finished] == [t.values for t in finished]
    assert {after[trial.number].state.name for trial in lost} == {"FAIL"}
    repeated = [trial for trial in after if "retry_of" in trial.user_attrs]
    again = {trial.user_attrs["retry_of"]: trial for trial in repeated}
    assert sorted(again) == [trial.number for trial in lost]
    for number, trial in again.items():  # one that had just begun may have had no parameters
        assert after[number].params.items() <= trial.params.items()
    assert all(trial.state.name == "COMPLETE" for trial in again.values())
    assert len(after) == len(before) + 4
    assert math.isclose(study.best_value, min(trial.value for trial in after if trial.value))


GRID = """
    import os, sys

    from bigdl.tuning import create_sampler, open_study, run_trials

    grid = create_sampler("Grid", search_space={"x": [1, 2, 3]})
    study = open_study(storage=sys.argv[1], name="grid", sampler=grid)

    def objective(trial):
        return trial.suggest_int("x", 1, 3) if trial.number < 2 else os._exit(0)

    run_trials(study, objective)
"""


def test_a_killed_search_of_a_grid_visits_what_was_left(database, tmp_path):
    program = tmp_path / "grid.py"
    program.write_text(textwrap.dedent(GRID))
    subprocess.run([sys.executable, program, database], check=True, timeout=FAR)

    grid = create_sampler("Grid", search_space={"x": [1, 2, 3]})
    study = open_study(storage=database, name="grid", sampler=grid, resume=True)
    run_trials(study, lambda trial: trial.suggest_int("x", 1, 3))

    assert states(study)[:4] == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]
    finished = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    assert {trial.params["x"] for trial in finished} == {1, 2, 3}


def test_trials_of_processes_that_live_are_left_alone(database):
    study = open_study(storage=database, name="shared")
    resumed = []

    def objective(trial):
        resumed.append(open_study(storage=database, name="shared", resume=True).trials)
        return 0.0

    run_trials(study, objective, 1)

    assert [trial.state.name for trial in resumed[0]] == ["RUNNING"]
    assert states(study) == ["COMPLETE"]


@pytest.mark.slow
def test_a_search_that_is_interrupted_leaves_no_process(database, tmp_path):
    program, reached = tmp_path / "search.py", tmp_path / "reached"
    program.write_text(textwrap.dedent(SEARCH))
    search = subprocess.Popen(
        [sys.executable, program, database, reached, "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    try:
        give_up = time.monotonic() + FAR
        while not reached.exists():
            assert search.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.05)
        children = psutil.Process(search.pid).children(recursive=True)
        search.send_signal(signal.SIGINT)
        output, _ = search.communicate(timeout=FAR)
    finally:
        search.kill()
        search.wait(FAR)

    assert len(children) == 2
    assert "KeyboardInterrupt" in output
    psutil.wait_procs(children, timeout=FAR)
    assert not any(child.is_running() for child in children)
    left = optuna.load_study(study_name="killed", storage=database).trials
    assert "RUNNING" not in {trial.state.name for trial in left}
    assert len(left) <= 11
    assert [trial.state.name for trial in left].count("FAIL") <= 2


def test_a_study_is_compared_with_the_arguments_of_its_search():
    study = open_study()
    check_description(study, {"metric": "mae", "epochs": 2}, "The search")
    run_trials(study, parabola, 1)
    check_description(study, {"metric": "mae", "epochs": 2}, "The search")
    with pytest.raises(UsageError, match="The search has epochs 2, this one has 3") as refusal:
        check_description(study, {"metric": "mae", "epochs": 3}, "The search")
    assert refusal.value.code == "checkpoint-mismatch"
    other = open_study()
    run_trials(other, parabola, 1)
    with pytest.raises(UsageError, match="of another program") as refusal:
        check_description(other, {"metric": "mae"}, "The search")
    assert refusal.value.code == "checkpoint-mismatch"
