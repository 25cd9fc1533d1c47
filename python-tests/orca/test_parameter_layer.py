"""The parts of the parameter layer, without a cluster."""

import numpy as np
import pytest
import torch
from slices import SHAPES, SIZES, Given, grouped, hyper_of, parameters, whole

from bigdl.orca.sync.parameter_layer.optimizers import check_optimizer, cut_state, joined_state
from bigdl.orca.sync.parameter_layer.rank import LayerPlan, Rank, Step, Sum
from bigdl.orca.sync.parameter_layer.state import RankState

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01}),
}


class Sliced:
    """All ranks of a layer in this process, and the gradients of a rank given by a function."""

    def __init__(self, make, ranks, gradient=None, **plan):
        self.parameters = parameters()
        self.optimizer = make(self.parameters)
        groups = tuple(i for i, g in enumerate(self.optimizer.param_groups) for _ in g["params"])
        self.plan = LayerPlan(SIZES, groups, type(self.optimizer), ranks, **plan)
        self.geometry = self.plan.geometry
        self.ranks = [Rank(self.plan, n) for n in range(ranks)]
        vector = self.geometry.flatten([p.detach().numpy() for p in self.parameters])
        state = self.optimizer.state_dict()["state"]
        self.states = [
            RankState(vector[low:high].copy(), cut_state(state, self.geometry, n))
            for n, (low, high) in enumerate(self.geometry.bounds)
        ]
        self.gradient = gradient

    def step(self, number):
        step = Step(0, number, hyper_of(self.optimizer))
        weights = [r.weights(s) for r, s in zip(self.ranks, self.states, strict=True)]
        pieces = []
        for rank, state in zip(self.ranks, self.states, strict=True):
            own, state.residual = rank.gradients(
                self.gradient(rank.rank), step, weights, state.residual
            )
            pieces.append(own)
        sums = [r.reduce([p[r.rank] for p in pieces]) for r in self.ranks]
        sums = [Sum.unpack(s.pack()) for s in sums]
        statistics = None
        if self.plan.needs_statistics:
            statistics = [
                r.statistics(s, t) for r, s, t in zip(self.ranks, sums, self.states, strict=True)
            ]
        for n, (rank, found) in enumerate(zip(self.ranks, sums, strict=True)):
            self.states[n] = RankState.unpack(self.states[n].pack(), self.states[n].residual)
            rank.update(step, found, self.states[n], statistics)

    @property
    def weights(self):
        return np.concatenate([s.weights for s in self.states])


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slices_make_the_updates_of_the_whole_to_the_last_bit(name, ranks):
    kind, options = OPTIMIZERS[name]

    def make(values):
        return kind(grouped(values), **options)

    layer = Sliced(make, ranks, Given)
    check_optimizer(layer.optimizer)
    for number in range(12):
        layer.step(number)
    expected, optimizer = whole(make, ranks, 12)
    assert np.array_equal(layer.weights, expected)
    state = joined_state([s.optimizer for s in layer.states], layer.geometry, SHAPES)
    known = optimizer.state_dict()["state"]
    assert state.keys() == known.keys()
    for number, values in known.items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(state[number][key]), torch.as_tensor(value)), key
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
