"""Test the display of a running search in a terminal, in a notebook and in logs."""

import optuna
import pytest
from refusals import refused

from bigdl.tuning import SearchDisplay, open_study


def objective(trial):
    x = trial.suggest_int("x", 0, 3)
    trial.report(float(x), 2)
    if x == 2:
        raise optuna.TrialPruned
    if x == 3:
        raise ValueError("three")
    return x


@pytest.fixture
def study():
    study = open_study(directions=["maximize"])
    for x in range(4):
        study.enqueue_trial({"x": x})
    return study


def run(study, display):
    study.optimize(objective, n_trials=4, catch=(ValueError,), callbacks=[display])


def test_each_trial_is_a_line_outside_of_terminals(study, capsys):
    display = SearchDisplay(latest=2)
    run(study, display)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trial")]
    assert lines[0] == "trial 0 finished: 0; x=0 (1 finished)"
    assert lines[3] == "trial 3 failed: 3 at step 2; x=3 (2 finished, 1 pruned, 1 failed)"
    assert display.text(study).splitlines() == [
        "2 finished, 1 pruned, 1 failed",
        "best of trial 1: 1; x=1",
        "trial 2 pruned: 2; x=2",
        "trial 3 failed: 3 at step 2; x=3",
    ]


def test_running_trials_are_counted(study):
    study.ask()
    assert SearchDisplay().text(study).startswith("1 running")


def test_a_terminal_shows_one_block_that_is_drawn_again(study, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    run(study, SearchDisplay(latest=1))
    text = capsys.readouterr().err
    assert text.count("\x1b[3A") == 3
    assert "2 finished, 1 pruned, 1 failed" in text.rpartition("\x1b[3A\x1b[J")[2]


def test_lines_are_no_longer_than_the_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "24")
    study = open_study()
    study.enqueue_trial({"text": "a\nb\x1b[1m"})
    display = SearchDisplay()
    study.optimize(
        lambda trial: len(trial.suggest_categorical("text", ["a\nb\x1b[1m"])),
        n_trials=1,
        callbacks=[display],
    )
    lines = capsys.readouterr().err.splitlines()
    assert [len(line) for line in lines if "trial 0" in line] == [23, 23]
    assert display.text(study).splitlines()[-1] == r"trial 0 finished: 7; text=a\nb\x1b[1m"


def test_several_metrics_have_several_best_trials():
    study = open_study(directions=["minimize", "maximize"])
    display = SearchDisplay()

    def both(trial):
        x = trial.suggest_int("x", 0, 1)
        return x, x

    for x in (0, 1):
        study.enqueue_trial({"x": x})
    study.optimize(both, n_trials=2, callbacks=[display])
    best = [line for line in display.text(study).splitlines() if line.startswith("best")]
    assert sorted(best) == ["best of trial 0: 0, 0; x=0", "best of trial 1: 1, 1; x=1"]


def test_the_number_of_latest_trials_is_checked():
    with refused("argument-value", "latest"):
        SearchDisplay(latest=0)
