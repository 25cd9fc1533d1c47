"""Test that the best trials stopped by successive halving are trained to their end."""

import pytest
from refusals import refused
from small_searches import SPACE, fit, model, search

from bigdl.common.errors import UsageError
from bigdl.orca.automl import hp
from bigdl.orca.automl.strategy import Strategy

pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'bigdl[automl]'")

# the second is better than it seems after an epoch; the others are bad
GRID = {"lr": hp.grid_search([0.05, 0.01, 1e-6, 1e-6])}


def halved(est, finalists=None, **options):
    params = {"grace_period": 1, "reduction_factor": 4}
    if finalists is not None:
        params["finalists"] = finalists
    arguments = {"epochs": 4, "n_sampling": 1, "search_space": GRID, "scheduler": "asha", **options}
    return fit(est, scheduler_params=params, **arguments)


def test_the_best_of_the_stopped_trials_is_trained_to_its_end(tmp_path):
    table = halved(search(tmp_path / "halved"), 1).trials()
    assert table["status"].tolist() == ["finished", *["stopped early"] * 3, "finished"]
    assert table["epochs"].tolist() == [4, 1, 1, 1, 4]
    assert table["config/lr"][4] == 0.01
    full = fit(search(tmp_path / "full"), epochs=4, n_sampling=1, search_space=GRID).trials()
    assert table["mse"][4] == pytest.approx(full["mse"][1], rel=1e-6)


@pytest.mark.parametrize(("finalists", "rows"), [(0, 4), (2, 6), (9, 7)])
def test_there_are_as_many_finalists_as_there_shall_be_and_can_be(tmp_path, finalists, rows):
    table = halved(search(tmp_path), finalists).trials()
    assert len(table) == rows
    assert table["status"].tolist()[4:] == ["finished"] * (rows - 4)
    assert not set(table["config/lr"][4:]) - set(table["config/lr"][1:4])


def test_a_repeated_trial_is_among_the_best_once(tmp_path):
    est = halved(search(tmp_path), 1)
    assert [trial.number for trial in est._records.ranked()] == [0, 4, 2, 3]


def test_proposals_of_a_sampler_are_repeated_as_they_were(tmp_path):
    options = {"search_alg": "optuna", "search_space": SPACE, "n_sampling": 4}
    table = halved(search(tmp_path), 1, **options).trials()
    again = table.loc[4]
    twins = table[:4].query("status == 'stopped early'")["config/lr"]
    assert again["config/lr"] in set(twins)
    assert again["epochs"] == 4


def test_a_search_that_was_interrupted_among_its_finalists_goes_on(tmp_path):
    gate = tmp_path / "gate"
    made = []

    def interrupted(config):
        made.append(config["lr"])
        if made.count(0.01) == 2 and not gate.exists():
            gate.touch()
            raise KeyboardInterrupt
        return model(config)

    with pytest.raises(KeyboardInterrupt):
        halved(search(tmp_path / "logs", model_creator=interrupted), 2)
    est = halved(search(tmp_path / "logs", model_creator=interrupted), 2, resume=True)
    table = est.trials()
    finished = table.query("status == 'finished'")
    assert sorted(finished["config/lr"]) == [1e-6, 0.01, 0.05]
    assert finished["epochs"].tolist() == [4, 4, 4]


def test_a_tenth_of_the_trials_are_finalists_by_default():
    strategy = Strategy(scheduler="AsyncHyperBand")
    assert [strategy.finalists(count) for count in (3, 10, 20, 100)] == [0, 1, 2, 10]
    assert Strategy(scheduler="hyperband").finalists(100) == 0
    assert Strategy().finalists(100) == 0


def test_trials_are_compared_after_a_ninth_of_their_epochs_by_default(tmp_path):
    options = {"epochs": 18, "n_sampling": 1, "search_space": GRID, "scheduler": "asha"}
    table = fit(search(tmp_path), **options).trials()
    assert table["epochs"].tolist() == [18, 2, 2, 2]


@pytest.mark.parametrize("finalists", [-1, 1.5, True, "all"])
def test_wrong_numbers_of_finalists_are_refused(tmp_path, finalists):
    with pytest.raises(UsageError, match="finalists in scheduler_params should be"):
        halved(search(tmp_path), finalists)
    assert not any(tmp_path.iterdir())


def test_other_schedulers_have_no_finalists(tmp_path):
    with refused("argument-unknown", "'finalists'"):
        halved(search(tmp_path), 1, scheduler="hyperband")
