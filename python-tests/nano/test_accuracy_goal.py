"""The search for the layers that stay in floating point, on models that are sets of names."""

import numpy as np
import pytest
from refusals import refused

from bigdl.nano.acceleration.accuracy import AccuracyGoal, keep_accuracy, relative_error

LAYERS = tuple(f"layer{i}" for i in range(20))


def search(needed, *, layers=LAYERS, ranked=True, **goal):
    """Search where the first `needed` layers cost 0.1 each; what was built, and the result."""
    built = []

    def build(excluded):
        built.append(excluded)
        return frozenset(excluded)

    def score(model):
        if model == "original":
            return 1.0
        return 1.0 - 0.1 * len(set(layers[:needed]) - model)

    goal = AccuracyGoal(score, **{"relative": 0.01, **goal})
    found = keep_accuracy(build, lambda: layers if ranked else pytest.fail("no"), goal, "original")
    return found, built


def test_a_model_that_is_good_enough_at_once_needs_no_ranking():
    found, built = search(0, ranked=False)
    assert found == frozenset()
    assert built == [()]


@pytest.mark.parametrize("needed", range(1, 20))
def test_the_fewest_layers_are_left_out_in_few_trials(needed):
    found, built = search(needed)
    assert found == frozenset(LAYERS[:needed])
    assert len(built) <= 11
    assert len(set(built)) == len(built)


def test_a_bound_that_cannot_be_kept_is_refused_with_its_figures():
    with refused("accuracy", "1", "0.9", "19"):
        search(20)


def test_lower_scores_can_be_better():
    goal = AccuracyGoal(lambda model: 2.0 if model == "original" else 3.0, False, 0.1)
    with refused("accuracy", "2", "3", "2.2"):
        keep_accuracy(lambda excluded: "int8", lambda: ["a", "b"], goal, "original")


def test_no_more_models_are_tried_than_allowed():
    with refused("accuracy", "1"):
        search(1, max_trials=1, ranked=False)
    with refused("accuracy", "3"):
        search(5, max_trials=3)
    assert search(5, max_trials=5)[0] == frozenset(LAYERS[:8])  # the first that is good enough


def test_after_the_timeout_no_further_model_is_begun():
    with refused("accuracy", "1"):
        search(5, timeout=1e-9, ranked=False)


def test_a_score_that_is_no_number_is_refused():
    goal = AccuracyGoal(lambda model: float("nan"))
    with refused("metric-unsupported", "NaN"):
        keep_accuracy(lambda excluded: "int8", list, goal, "original")


def test_relative_error():
    ones = [np.ones((2, 2), np.float32), np.array([3])]
    assert relative_error(ones, ones) == 0
    assert relative_error(ones, [ones[0] * 1.5, ones[1]]) == pytest.approx(0.5)
    assert relative_error(ones, [ones[0] * np.inf, ones[1]]) == np.inf
    assert relative_error([np.zeros(1)], [np.full(1, 2.0)]) == 2
