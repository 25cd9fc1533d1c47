"""Test sampling from search spaces."""

import functools
import json
import math
import random
from collections import UserDict, namedtuple

import numpy as np
import pytest
from refusals import refused

from bigdl.orca.automl import hp
from bigdl.orca.automl.strategy import from_ray
from bigdl.tuning.spaces import SearchSpace

DRAWS = 400
Pair = namedtuple("Pair", "a b")


def drawn(space, count=DRAWS, seed=0):
    searched = SearchSpace(space, convert=from_ray)
    return [
        searched.resolve(searched.random_parameters(seed, number), seed, number)
        for number in range(count)
    ]


def values(domain, count=DRAWS):
    return [config["a"] for config in drawn({"a": domain}, count)]


def test_uniform_stays_within_its_bounds():
    samples = values(hp.uniform(2, 3))
    assert 2 <= min(samples) < 2.1
    assert 2.9 < max(samples) <= 3


def test_loguniform_is_even_by_the_logarithm():
    samples = np.log10(values(hp.loguniform(1e-4, 1e-2)))
    assert np.allclose(np.histogram(samples, 4, (-4, -2))[0] / DRAWS, 0.25, atol=0.1)


def test_randint_includes_both_bounds():
    assert set(values(hp.randint(1, 4))) == {1, 2, 3, 4}
    assert all(type(value) is int for value in values(hp.randint(1, 4), 5))


@pytest.mark.parametrize(
    ("domain", "q"),
    [
        (hp.quniform(0.1, 0.9, 0.1), 0.1),
        (hp.quniform(-1, 1, 0.3), 0.3),
        (hp.qloguniform(1, 100, 5), 5),
        (hp.qrandint(3, 17, 4), 4),
        (hp.qrandn(10, 2, 0.5), 0.5),
    ],
    ids=["quniform", "negative", "qloguniform", "qrandint", "qrandn"],
)
def test_steps_are_multiples_within_the_bounds(domain, q):
    samples = values(domain)
    assert all(math.isclose(value / q, round(value / q), abs_tol=1e-9) for value in samples)
    if hasattr(domain, "lower"):
        assert min(samples) >= domain.lower - 1e-12
        assert max(samples) <= domain.upper + 1e-12


def test_a_step_of_tenths_has_no_rounding_error():
    assert set(values(hp.quniform(0.1, 0.4, 0.1))) == {0.1, 0.2, 0.3, 0.4}


@pytest.mark.slow
def test_randn_has_the_mean_and_the_deviation():
    samples = values(hp.randn(5.0, 2.0), 2000)
    assert np.mean(samples) == pytest.approx(5, abs=0.3)
    assert np.std(samples) == pytest.approx(2, abs=0.3)


def test_choice_gives_the_objects_themselves():
    options = [np.tanh, None, (1, 2)]
    assert {id(value) for value in values(hp.choice(options))} == {id(each) for each in options}


def test_choice_n_gives_lists_of_every_allowed_length_in_order():
    samples = values(hp.choice_n(["a", "b", "c"], 1, 3))
    assert {len(value) for value in samples} == {1, 2, 3}
    assert all(value == sorted(set(value)) for value in samples)


def test_sample_from_sees_the_other_values():
    space = {
        "half": hp.sample_from(lambda spec: spec.config.whole // 2),
        "whole": hp.randint(2, 20),
        "quarter": hp.sample_from(lambda spec: spec.config["half"] // 2),
        "noise": hp.sample_from(lambda spec: np.random.rand() + random.random()),
    }
    first, again = drawn(space, 20), drawn(space, 20)
    assert first == again
    assert all(c["half"] == c["whole"] // 2 and c["quarter"] == c["half"] // 2 for c in first)
    assert len({c["noise"] for c in first}) == 20


def test_grids_are_tried_in_all_combinations():
    space = SearchSpace({"a": hp.grid_search([1, 2]), "b": {"c": hp.grid_search(["x", "z"])}})
    assert space.grid_size == 4
    configs = [space.resolve(space.random_parameters(0, n), 0, n) for n in range(4)]
    assert configs == [{"a": a, "b": {"c": c}} for a in (1, 2) for c in ("x", "z")]


def test_spaces_nest_in_dicts_and_lists():
    space = {"layers": [{"units": hp.choice([4, 8])}, hp.randint(1, 2)], "fixed": {"a": [1]}}
    (config,) = drawn(space, 1)
    assert config["layers"][0]["units"] in (4, 8)
    assert config["layers"][1] in (1, 2)
    assert config["fixed"] == {"a": [1]}


CONDITIONAL = {
    "arch": hp.choice(
        [
            {"kind": "deep", "layers": [hp.randint(1, 4), {"units": hp.choice([8, 16])}]},
            {"kind": "wide", "units": hp.sample_from(lambda spec: 2 * spec.config.arch.half)}
            | {"half": hp.randint(3, 5)},
            hp.choice_n([hp.randint(10, 19), "b"], 2, 2),
        ]
    )
}


def test_spaces_in_the_options_of_a_choice_are_drawn():
    types = set()
    for arch in (config["arch"] for config in drawn(CONDITIONAL, 60)):
        if isinstance(arch, list):
            types.add("list")
            assert 10 <= arch[0] <= 19
            assert arch[1] == "b"
        elif arch["kind"] == "deep":
            types.add("deep")
            assert 1 <= arch["layers"][0] <= 4
            assert arch["layers"][1]["units"] in (8, 16)
        else:
            types.add("wide")
            assert arch["units"] == 2 * arch["half"]
    assert types == {"list", "deep", "wide"}


def test_a_trial_has_the_parameters_of_its_option_alone():
    optuna = pytest.importorskip("optuna")
    space = SearchSpace(CONDITIONAL)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    for number in range(15):
        trial = study.ask()
        config = space.resolve(trial, 0, number)
        assert config == space.resolve(json.loads(json.dumps(trial.params)), 0, number)
        names = {name.split("/")[1] for name in trial.params if "/" in name}
        assert {name.split(":")[0] for name in names} == {str(trial.params["arch"])}
        shown = space.json_values(trial.params)
        if trial.params["arch"] != 1:  # a function is displayed by its name
            assert shown["arch"] == config["arch"]
        study.tell(trial, 0.0)


def test_grids_take_the_spaces_of_their_options_and_try_each_once():
    inner = {"kind": "deep", "depth": hp.grid_search([1, 2]), "rate": hp.uniform(0, 1)}
    space = SearchSpace({"arch": hp.grid_search([inner, {"kind": "wide"}])})
    assert space.grid_size == 3
    configs = [space.resolve(space.random_parameters(0, n), 0, n)["arch"] for n in range(3)]
    assert [(c["kind"], c.get("depth")) for c in configs] == [
        ("deep", 1),
        ("deep", 2),
        ("wide", None),
    ]
    assert all(0 <= config["rate"] <= 1 for config in configs[:2])


def test_mappings_of_other_types_in_options_are_searched():
    assert {value["b"] for value in values(hp.choice([UserDict(b=hp.randint(1, 2))]), 20)} == {1, 2}


def test_one_domain_in_two_options_is_two_parameters():
    width = hp.randint(1, 1000)
    (config,) = drawn({"a": hp.choice([[width, width]])}, 1)
    assert config["a"][0] != config["a"][1]


def test_domains_of_ray_in_options_are_drawn():
    tune = pytest.importorskip("ray.tune")
    samples = values(tune.choice([{"depth": tune.randint(1, 4)}]), 30)
    assert {value["depth"] for value in samples} == {1, 2, 3}


@pytest.mark.parametrize(
    "option",
    [{hp.randint(1, 2)}, functools.partial(dict, a=hp.randint(1, 2)), Pair(hp.uniform(0, 1), 2)],
    ids=lambda option: type(option).__name__,
)
def test_spaces_where_they_are_not_found_are_refused(option):
    with refused("search-space", "'a/0/b'"):
        SearchSpace({"a": hp.choice([{"b": option, "c": hp.randint(1, 2)}])})
    with refused("search-space"):
        SearchSpace({"a": hp.choice([option])})


def test_a_function_that_returns_a_space_is_refused():
    with refused("search-space", "'a'", "1..4"):
        drawn({"a": hp.sample_from(lambda spec: hp.randint(1, 4))}, 1)


def test_draws_depend_on_the_seed_and_the_number_alone_and_travel_as_json():
    space = SearchSpace(
        {
            "a": hp.loguniform(1, 9),
            "b": hp.choice_n([1, 2, 3], 1, 2),
            "c": hp.choice([np.tanh, np.sin]),
            "d": hp.qrandn(0, 1, 0.1),
            "e": hp.grid_search([5, 6]),
        }
    )
    for number in range(5):
        drawn = space.random_parameters(3, number)
        assert drawn == space.random_parameters(3, number) != space.random_parameters(4, number)
        read = json.loads(json.dumps(drawn))
        assert space.resolve(read, 3, number) == space.resolve(drawn, 3, number)
    assert space.json_values({"c": 1}) == {"c": "sin"}


def test_optuna_suggests_what_every_domain_takes():
    optuna = pytest.importorskip("optuna")
    space = SearchSpace(
        {
            "a": hp.uniform(1, 2),
            "b": hp.qloguniform(1, 9, 0.5),
            "c": hp.qrandint(2, 8, 2),
            "d": hp.randn(1, 2),
            "e": hp.choice([None, [1]]),
            "f": hp.choice_n(["x", "y", "z"], 1, 2),
        }
    )
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    configs = [space.resolve(study.ask(), 0, n) for n in range(30)]
    assert {config["c"] for config in configs} == {2, 4, 6, 8}
    assert {len(config["f"]) for config in configs} == {1, 2}
    assert {str(config["e"]) for config in configs} == {"None", "[1]"}


def test_domains_of_ray_become_ours():
    tune = pytest.importorskip("ray.tune")
    space = {
        "a": tune.uniform(1, 2),
        "b": tune.quniform(0, 1, 0.25),
        "c": tune.randint(1, 3),
        "d": tune.qrandint(2, 6, 2),
        "e": tune.choice(["x", "y"]),
        "f": tune.grid_search([7, 8]),
        "g": tune.sample_from(lambda spec: spec.config.c * 10),
        "h": tune.loguniform(1e-3, 1e-1),
        "i": tune.randn(3, 1),
    }
    configs = drawn(space, 60)
    assert {config["b"] for config in configs} == {0, 0.25, 0.5, 0.75, 1}
    assert {config["c"] for config in configs} == {1, 2}  # Ray's upper bound is exclusive
    assert {config["d"] for config in configs} == {2, 4, 6}
    assert {config["f"] for config in configs} == {7, 8}
    assert all(config["g"] == config["c"] * 10 for config in configs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hp.uniform(2, 1), ("search-space",)),
        (lambda: hp.uniform("a", 1), ("argument-type",)),
        (lambda: hp.randint(0.5, 1), ("argument-type",)),
        (lambda: hp.loguniform(0, 1), ("search-space", "0")),
        (lambda: hp.quniform(1, 2, 0), ("argument-value",)),
        (lambda: hp.qrandint(1, 3, 5), ("search-space", "5")),
        (lambda: hp.randn(0, 0), ("argument-value",)),
        (lambda: hp.choice([]), ("search-space",)),
        (lambda: hp.choice("abc"), ("argument-type",)),
        (lambda: hp.choice_n([1, 2], 1, 3), ("search-space", "0", "2")),
        (lambda: hp.sample_from(3), ("argument-type",)),
        (lambda: hp.grid_search(3), ("argument-type",)),
        (lambda: SearchSpace([1]), ("search-space", "search_space")),
        (lambda: SearchSpace({1: 2}), ("search-space",)),
        (
            lambda: drawn({"a": hp.sample_from(lambda spec: spec.config.none)}, 1),
            ("search-space", "AttributeError"),
        ),
        (
            lambda: drawn(
                {
                    "a": hp.sample_from(lambda spec: spec.config.b),
                    "b": hp.sample_from(lambda spec: spec.config.a),
                },
                1,
            ),
            ("search-space",),
        ),
    ],
)
def test_wrong_spaces_say_what_is_wrong(make, message):
    with refused(*message):
        make()
