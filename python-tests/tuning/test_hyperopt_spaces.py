"""Spaces of hyperopt: the same values with the same probabilities in Optuna's trials."""

import math
from types import SimpleNamespace

import numpy as np
import optuna
import pytest

from bigdl.common.errors import UsageError
from bigdl.tuning import from_hyperopt, optimize

DRAWS = 10_000


def node(name, *inputs, **named):
    """A node with the attributes of hyperopt's graphs."""
    pairs = [[key, as_node(value)] for key, value in named.items()]
    inputs = [as_node(each) for each in inputs]
    return SimpleNamespace(name=name, pos_args=inputs, named_args=pairs)


def as_node(value):
    if hasattr(value, "pos_args"):
        return value
    if isinstance(value, dict):
        return node("dict", **value)
    if isinstance(value, list | tuple):
        return node("pos_args", *value)
    return SimpleNamespace(name="literal", obj=value, pos_args=[], named_args=[])


def param(name, label, *arguments):
    return node("hyperopt_param", label, node(name, *arguments))


def choice(label, options):
    return node("switch", param("randint", label, len(options)), *options)


def pchoice(label, pairs):
    index = param("categorical", label, [p for p, _ in pairs])
    return node("switch", index, *(option for _, option in pairs))


def rounded(values, q):
    return np.round(values / q) * q


# The distributions by their definitions in hyperopt's documentation.
CASES = {
    "uniform": ((-2, 3), lambda g, n: g.uniform(-2, 3, n)),
    "quniform": ((0.3, 9.2, 2.0), lambda g, n: rounded(g.uniform(0.3, 9.2, n), 2.0)),
    "uniformint": ((1, 4), lambda g, n: rounded(g.uniform(1, 4, n), 1)),
    "loguniform": ((-7, 1), lambda g, n: np.exp(g.uniform(-7, 1, n))),
    "qloguniform": ((0, 3, 4), lambda g, n: rounded(np.exp(g.uniform(0, 3, n)), 4)),
    "normal": ((2, 3), lambda g, n: g.normal(2, 3, n)),
    "qnormal": ((2, 3, 2), lambda g, n: rounded(g.normal(2, 3, n), 2)),
    "lognormal": ((0, 1), lambda g, n: np.exp(g.normal(0, 1, n))),
    "qlognormal": ((1, 1, 2), lambda g, n: rounded(np.exp(g.normal(1, 1, n)), 2)),
    "randint": ((5,), lambda g, n: g.integers(0, 5, n)),
}


def draws(space, n=DRAWS):
    """Values of a space in random trials, without the time that a study needs for each."""
    sampler, study = optuna.samplers.RandomSampler(seed=1), optuna.create_study()

    class Trial:
        def suggest_float(self, name, low, high, log=False):
            distribution = optuna.distributions.FloatDistribution(low, high, log=log)
            return sampler.sample_independent(study, None, name, distribution)

        def suggest_int(self, name, low, high):
            distribution = optuna.distributions.IntDistribution(low, high)
            return sampler.sample_independent(study, None, name, distribution)

        def suggest_categorical(self, name, choices):
            distribution = optuna.distributions.CategoricalDistribution(choices)
            return sampler.sample_independent(study, None, name, distribution)

    converted, trial = from_hyperopt(space), Trial()
    return [converted.suggest(trial) for _ in range(n)]


def distance(ours, theirs):
    """The largest difference of the two distribution functions (Kolmogorov and Smirnov)."""
    points = np.unique(np.concatenate([ours, theirs]))
    sides = [np.searchsorted(np.sort(s), points, side="right") / len(s) for s in (ours, theirs)]
    return np.abs(sides[0] - sides[1]).max()


LIMIT = 2.2 * math.sqrt(2 / DRAWS)  # exceeded by one of 8,000 pairs of samples


@pytest.mark.parametrize("name", CASES)
def test_values_have_the_documented_distribution(name):
    arguments, reference = CASES[name]
    ours = np.array(draws(param(name, "x", *arguments)), float)
    theirs = reference(np.random.default_rng(0), DRAWS)
    assert distance(ours, theirs) < LIMIT
    if "q" in name or "int" in name:
        assert set(ours) == set(theirs) or "normal" in name


@pytest.mark.parametrize("name", [*CASES, "choice", "pchoice"])
def test_values_have_the_distribution_of_hyperopt(name):
    hyperopt = pytest.importorskip("hyperopt", reason="hyperopt is not installed")
    from hyperopt.pyll.stochastic import sample

    create = getattr(hyperopt.hp, name)
    if name == "choice":
        space = create("x", [10, 20, hyperopt.hp.uniform("y", 0, 5)])
    elif name == "pchoice":
        space = create("x", [(0.2, 10), (0.5, 20), (0.3, 30)])
    else:
        space = create("x", *CASES[name][0])
    generator = np.random.default_rng(3)
    theirs = np.array([sample(space, generator) for _ in range(DRAWS)], float)
    assert distance(np.array(draws(space), float), theirs) < LIMIT


def test_nested_spaces_draw_only_the_chosen_option():
    lr = node("float", param("loguniform", "lr", -5, 0))
    space = {
        "model": choice(
            "model", [{"type": "tree", "depth": param("randint", "depth", 1, 9)}, "linear"]
        ),
        "optimizer": [pchoice("weights", [(0.1, "sgd"), (0.9, "adam")]), lr],
        "half": node("truediv", lr, 2),
        "epochs": 3,
    }
    converted = from_hyperopt(space)
    assert sorted(converted.labels) == ["depth", "lr", "model", "weights"]
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    seen = []

    def objective(trial):
        config = converted.suggest(trial)
        seen.append(config)
        assert ("depth" in trial.params) == (config["model"] != "linear")
        assert config["half"] == config["optimizer"][1] / 2
        return config["optimizer"][1]

    study.optimize(objective, n_trials=20)
    assert {str(each["model"])[0] for each in seen} == {"{", "l"}
    assert converted.values(study.best_params) in seen


def test_points_of_hyperopt_are_tried_first():
    space = from_hyperopt(
        {
            "n": param("quniform", "n", 1, 9, 2),
            "z": param("qlognormal", "z", 1, 1, 2),
            "c": choice("c", ["a", "b"]),
            "p": pchoice("p", [(0.3, "x"), (0.7, "y")]),
        }
    )
    study = optuna.create_study()
    study.enqueue_trial(space.params({"n": 8.0, "z": 4.0, "c": 1, "p": 1}))
    optimize(
        study,
        lambda trial: 1.0 if space.suggest(trial) == {"n": 8, "z": 4, "c": "b", "p": "y"} else 0.0,
        1,
        backend="local",
        concurrency=1,
    )
    assert study.best_value == 1.0
    with pytest.raises(UsageError, match="no label 'q'"):
        space.params({"q": 1})


@pytest.mark.parametrize(
    ("space", "text"),
    [
        ([param("uniform", "x", 0, 1), param("uniform", "x", 0, 2)], "used for two distributions"),
        (node("sort", param("uniform", "x", 0, 1)), "a node 'sort'"),
        (param("triangular", "x", 0, 1), "'triangular'"),
        (param("uniform", "x", 0, param("uniform", "y", 0, 1)), "bounds must be numbers"),
    ],
)
def test_what_cannot_be_converted_raises_an_error(space, text):
    with pytest.raises(UsageError, match=text):
        from_hyperopt(space)
