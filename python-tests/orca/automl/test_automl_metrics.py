"""Test the Evaluator against scikit-learn and plain formulas."""

import numpy as np
import pytest
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.automl import metrics
from bigdl.orca.automl.metrics import Evaluator

sklearn_metrics = pytest.importorskip("sklearn.metrics")

SHAPES = [(50,), (50, 1), (50, 3), (50, 4, 2)]
EPSILON = 1e-10


def pair(shape, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.uniform(0.5, 3, shape)
    return y, y + rng.normal(scale=0.2, size=shape)


def of_sklearn(name):
    return {
        "mae": sklearn_metrics.mean_absolute_error,
        "mse": sklearn_metrics.mean_squared_error,
        "rmse": sklearn_metrics.root_mean_squared_error,
        "msle": sklearn_metrics.mean_squared_log_error,
        "r2": sklearn_metrics.r2_score,
    }[name]


FORMULAS = {
    "me": lambda y, p: (y - p).mean(0),
    "mpe": lambda y, p: (100 * (y - p) / (y + EPSILON)).mean(0),
    "mape": lambda y, p: (100 * abs((y - p) / (y + EPSILON))).mean(0),
    "mspe": lambda y, p: (100 * ((y - p) / (y + EPSILON)) ** 2).mean(0),
    "smape": lambda y, p: (100 * abs(y - p) / (abs(y) + abs(p) + EPSILON)).mean(0),
    "mdape": lambda y, p: np.median(100 * abs((y - p) / (y + EPSILON)), 0),
    "smdape": lambda y, p: np.median(100 * abs(y - p) / (abs(y) + abs(p) + EPSILON), 0),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["mae", "mse", "rmse", "msle", "r2"])
def test_metrics_are_those_of_scikit_learn(name, shape):
    y, p = pair(shape)
    flat_y, flat_p = y.reshape(len(y), -1), p.reshape(len(p), -1)
    expected = of_sklearn(name)(flat_y, flat_p, multioutput="raw_values")
    metric = Evaluator.evaluate(name, y, p)
    np.testing.assert_allclose(np.ravel(metric), expected)
    mean = Evaluator.evaluate(name.upper(), y, p, multioutput="uniform_average")
    whole = np.sqrt(np.mean(expected**2)) if name == "rmse" else expected.mean()
    assert mean == pytest.approx(whole)


def test_figures_are_of_double_precision():
    y = np.zeros(10**6, np.float32)
    metric = Evaluator.evaluate("mae", y, y + np.float32(0.1))
    assert metric == pytest.approx(np.float64(np.float32(0.1)), rel=1e-12)


@pytest.mark.parametrize("shape", [(50, 3), (50, 4, 2)], ids=str)
def test_r2_may_be_weighted_by_variances(shape):
    y, p = pair(shape)
    flat_y, flat_p = y.reshape(len(y), -1), p.reshape(len(p), -1)
    expected = sklearn_metrics.r2_score(flat_y, flat_p, multioutput="variance_weighted")
    assert Evaluator.evaluate("r2", y, p, "variance_weighted") == pytest.approx(expected)
    constant = np.ones((4, 2))
    assert Evaluator.evaluate("r2", constant, constant, "variance_weighted") == 1.0
    with refused("argument-value"):
        Evaluator.evaluate("mse", y, p, "variance_weighted")


def test_metrics_are_functions_too():
    y, p = pair((50, 3))
    names = [name for name in metrics.__all__ if name != "Evaluator"]
    assert sorted(map(str.lower, names)) == sorted(Evaluator.metrics_func)
    for name in names:
        metric = getattr(metrics, name)(y, p)
        np.testing.assert_array_equal(metric, Evaluator.evaluate(name, y, p))
    assert metrics.MSE(y, p, multioutput="uniform_average") == pytest.approx(np.mean((y - p) ** 2))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_metrics_are_those_of_their_formulas(name, shape):
    y, p = pair(shape)
    np.testing.assert_allclose(
        Evaluator.evaluate(name, y, p).reshape(-1), FORMULAS[name](y, p).reshape(-1)
    )


@pytest.mark.parametrize(
    ("shape", "expected"), [((9,), ()), ((9, 1), ()), ((9, 3), (3,)), ((9, 4, 2), (4, 2))], ids=str
)
def test_raw_values_have_the_shape_of_a_sample(shape, expected):
    y, p = pair(shape)
    metric = Evaluator.evaluate("mse", y, p, multioutput="raw_values")
    assert np.shape(metric) == expected
    assert np.shape(Evaluator.evaluate("mse", y, p, multioutput="uniform_average")) == ()


def test_constant_targets_have_the_r2_of_scikit_learn():
    y = np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]])
    p = np.array([[1.0, 2.0], [1.0, 3.0], [1.0, 2.0]])
    expected = sklearn_metrics.r2_score(y, p, multioutput="raw_values")
    np.testing.assert_array_equal(Evaluator.evaluate("r2", y, p), expected)


def test_unsigned_targets_do_not_wrap_around():
    assert Evaluator.evaluate("mae", np.array([1, 2], "uint8"), np.array([3, 3], "uint8")) == 1.5


@pytest.mark.parametrize(
    ("y", "p", "expected"),
    [
        ([0, 1, 2, 1], [0, 1, 1, 1], 0.75),  # labels
        ([0, 1, 1], [[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]], 2 / 3),  # scores of classes
        ([[0], [1], [1]], [[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]], 2 / 3),
        ([0, 1, 1, 0], [0.2, 0.7, 0.4, 0.1], 0.75),  # of one class
        ([0, 1], [[0.2], [0.7]], 1.0),
        ([[0], [1]], [[0.2], [0.7]], 1.0),
        ([1.0, 0.0], [1, 1], 0.5),
        ([[0, 1], [1, 1]], [[[0.9, 0.2], [0.1, 0.8]], [[0.3, 0.4], [0.7, 0.6]]], 1.0),
    ],
    ids=range(8),
)
def test_accuracy_takes_labels_and_scores(y, p, expected):
    assert Evaluator.evaluate("accuracy", np.array(y), np.array(p)) == pytest.approx(expected)


def test_modes():
    assert {Evaluator.get_metric_mode(name) for name in ("r2", "Accuracy")} == {"max"}
    assert {Evaluator.get_metric_mode(name) for name in ("me", "mse", "smape")} == {"min"}
    assert Evaluator.check_metric("MSE") == "mse"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Evaluator.evaluate("f1", [1], [1]), "metric f1 is not supported"),
        (lambda: Evaluator.check_metric(None), "is not supported"),
        (lambda: Evaluator.get_metric_mode("f1"), "specify the `metric_mode` parameter"),
        (lambda: Evaluator.evaluate("mse", [1, 2], [1]), "equal shapes"),
        (lambda: Evaluator.evaluate("accuracy", [1, 2], [[1.0], [2.0], [3.0]]), "equal shapes"),
        (lambda: Evaluator.evaluate("mse", [], []), "at least one sample"),
        (lambda: Evaluator.evaluate("msle", [-1.0], [1.0]), "values must not be negative"),
        (
            lambda: Evaluator.evaluate("mse", [1], [1], multioutput="sum"),
            "multioutput should be one of",
        ),
    ],
)
def test_wrong_arguments_say_what_is_wrong(call, message):
    with pytest.raises(UsageError, match=message):
        call()
