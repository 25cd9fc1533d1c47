import copy
import pickle
import random

import optuna
import pytest
import torch
from refusals import refused
from torch import nn

import bigdl.nano.automl.hpo as hpo
from bigdl.common.errors import UsageError
from bigdl.nano.automl import hpo_config
from bigdl.nano.automl.hpo import space, visualization
from bigdl.nano.automl.hpo.backend import PrunerType, SamplerType, create_hpo_backend


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


@hpo.obj()
class Pair:
    def __init__(self, first, second=2, *, third=3):
        self.values = (first, second, third)


@hpo.obj(second=space.Int(5, 9), third="fixed")
class Partial:
    def __init__(self, first=1, second=2, third=3):
        self.values = (first, second, third)


@hpo.func()
def added(a, b=10):
    return a + b


@hpo.plmodel()
class Net(nn.Module):
    def __init__(self, width):
        super(Net, self).__init__()  # noqa: UP008 - as programs of Python 2 do
        self.fc = nn.Linear(2, width)


def ask(value, **fixed):
    """Return a trial's value, and the trial."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    study.enqueue_trial(fixed)
    trial = study.ask()
    return create_hpo_backend().instantiate(trial, value), trial.params


# --- spaces


@pytest.mark.parametrize(
    ("searched", "default", "possible"),
    [
        (space.Categorical(16, 32), 16, {16, 32}),
        (space.Categorical([64, 256]), 64, {64, 256}),
        (space.Categorical("relu", None, 1.5), "relu", {"relu", None, 1.5}),
        (space.Int(2, 4), 2, {2, 3, 4}),
        (space.Int(2, 4, 3), 3, {2, 3, 4}),
        (space.Int(1, 3, log=True), 1, {1, 2, 3}),
        (space.Bool(), False, {True, False}),
        (space.Bool(default=True), True, {True, False}),
    ],
)
def test_a_space_has_a_default_and_gives_all_its_values(searched, default, possible):
    random.seed(0)
    drawn = [searched.rand for _ in range(60)]

    assert searched.default == default
    assert set(drawn) == possible
    assert {ask(searched)[0] for _ in range(3)} <= possible
    assert searched.cs


def test_a_real_is_between_its_bounds_and_in_log_scale_small_values_are_as_likely():
    random.seed(0)
    plain = [space.Real(1e-4, 1.0).rand for _ in range(200)]
    log = [space.Real(1e-4, 1.0, log=True).rand for _ in range(200)]

    assert all(1e-4 <= value <= 1 for value in plain + log)
    assert sum(value < 0.01 for value in plain) < 20
    assert 60 < sum(value < 0.01 for value in log) < 140
    assert space.Real(1, 2).default == 1.0
    assert isinstance(space.Real(1, 2).default, float)


def test_parameters_are_reported_by_name_and_value():
    model = Pair(
        space.Categorical("a", "b", prefix="dense_1"),
        second=space.Real(0.1, 0.5, prefix="dropout"),
        third=space.Bool(),
    )
    pair, params = ask(model)

    assert list(params) == ["dense_1:first", "dropout:second", "third"]
    assert pair.values == tuple(params.values())


def test_spaces_of_the_same_name_are_chosen_independently():
    layers = [Pair(space.Int(0, 10**6)), Pair(space.Int(0, 10**6)), Pair(space.Categorical(1, 2))]
    made, params = ask(layers)

    assert list(params) == ["first", "first_2", "first_3"]
    assert [pair.values[0] for pair in made] == list(params.values())


def test_one_space_in_two_places_is_one_parameter():
    shared = space.Int(0, 10**6)
    made, params = ask([Pair(shared), Pair(shared)])

    assert list(params) == ["first"]
    assert made[0].values == made[1].values


def test_a_lazy_object_in_two_places_is_one_object():
    inner = Pair(space.Int(1, 3))
    outer = ask(Pair(inner, second=[inner]))[0]

    assert outer.values[0] is outer.values[1][0]


def test_only_the_chosen_one_of_nested_spaces_has_parameters():
    nested = space.Categorical(space.Int(1, 9), Pair(space.Real(0, 1)), "none")
    labels = nested.labels

    assert ask(Pair(first=nested), first=labels[2])[1] == {"first": "none"}
    made, params = ask(Pair(first=nested), first=labels[0])
    assert set(params) == {"first", "first▁0"}
    assert made.values[0] == params["first▁0"]
    made, params = ask(Pair(first=nested), first=labels[1])
    assert set(params) == {"first", "first_2"}
    assert isinstance(made.values[0], Pair)


def test_choices_that_cannot_be_stored_are_reported_by_name():
    choices = space.Categorical(nn.ReLU, nn.Tanh, (3, 3), (3, 3))

    assert choices.labels == ["ReLU", "Tanh", "(3, 3)", "(3, 3) (2)"]
    assert choices.sample(value="Tanh") is nn.Tanh
    assert space.Categorical(1, True).sample(value="True") is True


def test_lists_and_dicts_hold_spaces():
    value = {
        "plain": [1, space.Int(2, 3)],
        "list": space.List(space.Int(4, 5), 6),
        "dict": space.Dict(depth=space.Int(7, 8)),
    }
    made, params = ask(Pair(first=value))

    assert list(params) == ["first▁plain▁1", "first▁list▁0", "first▁dict▁depth"]
    assert made.values[0]["plain"] == [1, params["first▁plain▁1"]]
    assert made.values[0]["list"] == [params["first▁list▁0"], 6]
    assert made.values[0]["dict"] == {"depth": params["first▁dict▁depth"]}
    assert space.SPLITTER == "▁"
    assert list(space.List(space.Int(0, 1), prefix="units").kwspaces) == ["units▁0"]
    assert space.List(space.Int(0, 1), 5).default == [0, 5]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: space.Categorical(), "needs choices"),
        (lambda: space.Int(5, 2), "lower must not be above upper"),
        (lambda: space.Int(1.5, 2), "lower should be an integer, got 1.5"),
        (lambda: space.Real("a", 2), "lower should be a number, got 'a'"),
        (lambda: space.Real(0, float("inf")), "upper should be a number"),
        (lambda: space.Real(0, 1, log=True), "lower must be above 0"),
        (lambda: space.Real(0, 1, default=2), "The default of Real(0, 1)"),
        (lambda: Pair(space.Int(1, 2)).sample(fist=1), "no search space called 'fist'"),
        (lambda: Pair(space.Categorical(1, 2)).sample(first=3), "3 is not one of the choices"),
        (lambda: hpo.obj()(added), "decorates a class"),
        (lambda: hpo.func()(Pair), "decorates a function"),
        (lambda: hpo.plmodel()(Pair), "decorates a LightningModule"),
    ],
)
def test_spaces_that_make_no_sense_are_errors(call, said):
    with pytest.raises(UsageError) as error:
        call()
    assert said in str(error.value)


# --- lazy objects


def test_a_decorated_class_is_the_class_itself():
    assert isinstance(Pair(1), Pair)
    assert Pair(1).values == (1, 2, 3)
    assert pickle.loads(pickle.dumps(Pair(1))).values == (1, 2, 3)
    assert type(Net(3)) is Net
    assert isinstance(copy.deepcopy(Net(3)), Net)


def test_constructed_with_spaces_it_is_lazy():
    lazy = Pair(space.Int(4, 6), third=space.Categorical("a", "b"))

    assert isinstance(lazy, space.AutoObject)
    assert list(lazy.kwspaces) == ["first", "third"]
    assert lazy.default.values == (4, 2, "a")
    assert lazy.sample(third="b").values == (4, 2, "b")
    assert 4 <= lazy.rand.values[0] <= 6
    assert "Pair(Int(4, 6)" in repr(lazy)


def test_a_decorator_may_have_defaults():
    lazy = Partial(first=7)

    assert lazy.sample(second=6).values == (7, 6, "fixed")
    assert Partial(1, 2, 3).values == (1, 2, 3)
    made = lazy.sample()
    assert copy.deepcopy(made).values == pickle.loads(pickle.dumps(made)).values == made.values


def test_functions_are_called_when_their_arguments_are_chosen():
    lazy = added(space.Int(1, 3))

    assert added(1) == 11
    assert lazy.sample() == 11
    assert lazy.sample(a=3) == 13


def test_a_function_of_all_parameters():
    @hpo.args(rate=space.Real(0.1, 1.0), default={"epochs": 2})
    def train(chosen):
        return chosen.rate * chosen["epochs"]

    assert train().sample(rate=0.5) == 1.0
    assert train(rate=0.25, epochs=4).sample() == 1.0


def test_a_lazy_module_makes_a_module_with_parameters():
    lazy = Net(width=space.Categorical(3, 5))

    assert lazy.sample(width=5).fc.weight.shape == (5, 2)
    assert torch.equal(torch.tensor(lazy.default.fc.weight.shape), torch.tensor([3, 2]))


# --- backend, charts, switches


def test_the_backend_makes_samplers_pruners_and_studies():
    backend = create_hpo_backend()
    sampler = backend.create_sampler(SamplerType.Random, {"seed": 1})
    pruner = backend.create_pruner(PrunerType.HyperBand, {"reduction_factor": 2})
    study = backend.create_study(direction="maximize", sampler=sampler, pruner=pruner)

    assert isinstance(sampler, optuna.samplers.RandomSampler)
    assert isinstance(pruner, optuna.pruners.HyperbandPruner)
    assert study.direction.name == "MAXIMIZE"
    assert isinstance(backend.create_sampler(SamplerType.MOTPE), optuna.samplers.TPESampler)


def test_charts_take_names_of_parameters_old_and_new():
    pytest.importorskip("matplotlib").use("Agg")
    study = optuna.create_study()
    lazy = Pair(space.Categorical(1, 2, 3), second=space.Real(0, 1))

    def objective(trial):
        pair = create_hpo_backend().instantiate(trial, lazy)
        trial.report(1.0, 0)
        return sum(pair.values)

    study.optimize(objective, n_trials=6)

    assert visualization.is_available()
    for plot in (
        visualization.plot_optimization_history,
        visualization.plot_intermediate_values,
        visualization.plot_parallel_coordinate,
        visualization.plot_slice,
    ):
        assert plot(study) is not None
    assert visualization.plot_contour(study, params=["first▁choice", "second"]) is not None


def test_switches_are_not_set_directly():
    with pytest.raises(RuntimeError, match="Directly set hpo_tf value is not permitted"):
        hpo_config.hpo_tf = True
    with refused("unsupported", "hpo_pytorch"):
        hpo_config.hpo_pytorch = True
    hpo_config.enable_hpo_pytorch()
    assert hpo_config.hpo_pytorch
    hpo_config.reset()
    assert not hpo_config.hpo_pytorch
    assert not hpo_config.hpo_tf
