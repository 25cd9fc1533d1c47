"""Both transports of the parameter layer make the weights of one process, to the last bit."""

import functools

import numpy as np
import pytest
import torch
from slices import SIZES, Given, grouped, hyper_of, parameters, whole

from bigdl.common.errors import WorkerError
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.data.feeds import as_feed
from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.engine.spark import SparkEngine
from bigdl.orca.sync.parameter_layer.barrier import BarrierTransport
from bigdl.orca.sync.parameter_layer.optimizers import groups_of, joined_state
from bigdl.orca.sync.parameter_layer.rank import LayerPlan, Step
from bigdl.orca.sync.parameter_layer.shuffle import ShuffleTransport
from bigdl.orca.sync.parameter_layer.state import RankState

ROWS = 22


def adam(values):
    return torch.optim.Adam(grouped(values), lr=0.01)


class OnRows(Given):
    """Says what it has seen of its rows."""

    def __init__(self, rank, shards):
        super().__init__(rank)
        found = shards["data"].arrays[0]  # both columns in one matrix
        self.seen = found[:, 0].tolist()

    def describe(self):
        return {"rows": len(self.seen)}

    def compute(self, step, weights, buffers):
        found = super().compute(step, weights, buffers)
        found.record = {"seen": self.seen, "step": step.number}
        return found


class Broken(OnRows):
    def compute(self, step, weights, buffers):
        if self.rank == 1 and step.number == 2:
            raise ZeroDivisionError("on purpose")
        return super().compute(step, weights, buffers)


def data():
    values = np.arange(ROWS, dtype=np.float32)
    return FeedGroup({"data": as_feed((values, values))})


def opened(transport, plan, program=OnRows, feed=None):
    feed = feed or data()
    if transport == "barrier":
        return BarrierTransport(SparkEngine(), plan, program, feed)
    return ShuffleTransport(SparkCluster.from_active(), plan, program, feed)


def states_of(plan):
    vector = plan.geometry.flatten([p.detach().numpy() for p in parameters()])
    return [
        RankState(vector[low:high].copy(), [{} for _ in plan.geometry.segments(n)])
        for n, (low, high) in enumerate(plan.geometry.bounds)
    ]


def plan_of(ranks, make=adam, **options):
    optimizer = make(parameters())
    return LayerPlan(SIZES, groups_of(optimizer), type(optimizer), ranks, **options)


def steps_of(first, last, make=adam):
    hyper = hyper_of(make(parameters()))
    return [Step(0, number, hyper) for number in range(first, last)]


def trained(transport, ranks, group, steps, **options):
    plan = plan_of(ranks, **options)
    with opened(transport, plan) as layer:
        assert sum(known["rows"] for known in layer.rows()) == ROWS
        layer.start(states_of(plan))
        records = []
        for first in range(0, steps, group):
            records += layer.run(steps_of(first, min(first + group, steps)))[0]
        states = layer.states()
    return np.concatenate([s.weights for s in states]), states, records, plan


@functools.cache
def expected(ranks, steps):
    return whole(adam, ranks, steps)


@pytest.mark.parametrize(
    ("transport", "ranks", "group", "steps"),
    [
        ("shuffle", 1, 5, 10),
        ("shuffle", 2, 1, 4),
        ("shuffle", 2, 10, 50),
        ("shuffle", 3, 5, 15),
        ("shuffle", 4, 10, 20),
        ("barrier", 1, 5, 10),
        ("barrier", 2, 1, 3),
        ("barrier", 2, 10, 20),
    ],
)
def test_weights_are_those_of_one_process(orca_spark, transport, ranks, group, steps):
    weights, states, records, plan = trained(transport, ranks, group, steps)
    known, optimizer = expected(ranks, steps)
    assert np.array_equal(weights, known)
    assert [r["sources"][0]["step"] for r in records] == list(range(steps))
    seen = [set(source["seen"]) for source in records[0]["sources"]]
    assert set().union(*seen) == set(range(ROWS))
    assert sum(map(len, seen)) == ROWS
    shapes = [p.shape for p in parameters()]
    state = joined_state([s.optimizer for s in states], plan.geometry, shapes)
    for number, values in optimizer.state_dict()["state"].items():
        assert torch.equal(state[number]["exp_avg"], values["exp_avg"])


@pytest.mark.parametrize("compression", ["bf16", "int8"])
def test_transports_agree_on_compressed_numbers(orca_spark, compression):
    options = {"compression": compression, "norm": 0.5}
    one, states, *_ = trained("shuffle", 2, 3, 6, **options)
    other, others, *_ = trained("barrier", 2, 6, 6, **options)
    assert np.array_equal(one, other)
    if compression == "int8":
        for a, b in zip(states, others, strict=True):
            assert np.array_equal(a.residual, b.residual)


@pytest.mark.parametrize("transport", ["shuffle", "barrier"])
def test_an_error_of_user_code_comes_once_and_changes_nothing(orca_spark, transport):
    plan = plan_of(2)
    with opened(transport, plan, Broken) as layer:
        layer.start(states_of(plan))
        layer.run(steps_of(0, 2))
        before = [s.pack() for s in layer.states()]
        with pytest.raises(WorkerError, match="on purpose"):
            layer.run(steps_of(2, 4))
        assert [s.pack() for s in layer.states()] == before
