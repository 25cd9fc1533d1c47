"""200 steps by any transport, number of workers and size of a group: the bits of one process."""

import functools

import numpy as np
import pytest
import torch
from layer_reference import SHAPES, grouped, parameters, trained, whole

from bigdl.orca import init_orca_context, stop_orca_context
from bigdl.orca.parameter_layer.optimizers import joined_state

STEPS = 200


def sgd(values):
    return torch.optim.SGD(grouped(values), lr=0.05, momentum=0.9, weight_decay=0.01)


def adam(values):
    return torch.optim.Adam(grouped(values), lr=0.01)


OPTIMIZERS = {"sgd": sgd, "adam": adam}
TRANSPORTS = ("shuffle", "barrier")
RANKS = (1, 2, 3, 4)
GROUPS = (1, 5, 10)


@functools.cache
def oracle(optimizer, ranks):
    weights, whole_optimizer = whole(OPTIMIZERS[optimizer], ranks, STEPS)
    return weights, whole_optimizer.state_dict()["state"]


def check(transport, optimizer, ranks, group):
    weights, states, records, plan = trained(
        transport, ranks, group, STEPS, make=OPTIMIZERS[optimizer]
    )
    known, state = oracle(optimizer, ranks)
    assert len(records) == STEPS
    assert np.array_equal(weights, known)
    shapes = [torch.Size(shape) for shape in SHAPES]
    found = joined_state([s.optimizer for s in states], plan.geometry, shapes)
    assert found.keys() == state.keys() == set(range(len(parameters())))
    for number, values in state.items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(found[number][key]), torch.as_tensor(value)), key


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "optimizer"), [("shuffle", "sgd"), ("barrier", "adam")])
def test_two_workers(orca_spark, transport, optimizer):
    check(transport, optimizer, 2, 50)


@pytest.fixture(scope="module")
def four_slots():
    stop_orca_context()
    yield init_orca_context("local", cores=4, memory="2g")
    stop_orca_context()


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_together(four_slots, transport, optimizer, ranks, group):
    check(transport, optimizer, ranks, group)
