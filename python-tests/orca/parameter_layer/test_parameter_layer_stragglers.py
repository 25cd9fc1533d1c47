"""Contributions that come too late are left out, and what is left is weighted exactly."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from layer_reference import OnRows, adam, opened, plan_of, states_of, steps_of, whole
from reference_training import largest_difference
from refusals import refused
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.parameter_layer.stragglers import DropStragglers, StragglerLimit, run_within

# -- how long is too long -------------------------------------------------------------------------


def step_of(*seconds):
    """What the ranks say of a step; None for one that came too late."""
    return [
        {"rows": 0, "compute_s": 9.0, "dropped": 4} if s is None else {"rows": 4, "compute_s": s}
        for s in seconds
    ]


def test_the_limit_drops_the_share_of_contributions_that_was_asked_for():
    limit = StragglerLimit(DropStragglers(0.25, 0.5, batchsize=4, warmup_iteration=2))
    for _ in range(2):
        limit.add(step_of(50.0, 50.0))  # they warm up
    for number in range(3):
        limit.add(step_of(number, 10 + number))
        assert limit.seconds is None
    limit.add(step_of(3.0, 13.0))
    assert limit.seconds == 12.0, "a quarter of the eight are 13.0 and 12.0"
    for seconds in (1.0, 2.0, 3.0):
        limit.add(step_of(seconds, seconds))
    limit.add(step_of(None, 4.0))
    assert limit.seconds == 4.0, "one was dropped, so one more is"
    for _ in range(4):
        limit.add(step_of(None, 1.0))
    assert limit.seconds == pytest.approx(4.04), "enough were dropped"


def test_without_a_rule_or_enough_steps_nobody_is_late():
    limit = StragglerLimit(None)
    limit.add(step_of(1.0, 100.0))
    assert limit.seconds is None


def test_ranks_without_rows_are_not_fast():
    limit = StragglerLimit(DropStragglers(0.5, 0.5, batchsize=1, warmup_iteration=0))
    limit.add([{"rows": 0, "compute_s": 0.0}, {"rows": 3, "compute_s": 2.0}, *step_of(1.0)])
    assert limit.seconds == 2.0


WRONG = {
    "nothing": ({}, "should be a dict with drop_percentage"),
    "another key": (
        {"drop_percentage": 0.1, "max_drop_percentage": 0.5, "batch_size": 3},
        "should be a dict with drop_percentage",
    ),
    "zero": (
        {"drop_percentage": 0, "max_drop_percentage": 0.5},
        "above 0 and at most 1",
    ),
    "text": (
        {"drop_percentage": "few", "max_drop_percentage": 0.5},
        "above 0 and at most 1",
    ),
    "more than the most": (
        {"drop_percentage": 0.6, "max_drop_percentage": 0.5},
        "from 0.6 to 1",
    ),
    "more than all": (
        {"drop_percentage": 0.5, "max_drop_percentage": 1.5},
        "from 0.5 to 1",
    ),
    "no steps": (
        {"drop_percentage": 0.1, "max_drop_percentage": 0.5, "batchsize": 0},
        "batchsize of drop_stragglers should be a positive integer, got 0",
    ),
    "warmup": (
        {"drop_percentage": 0.1, "max_drop_percentage": 0.5, "warmup_iteration": -1},
        "warmup_iteration .* at least 0",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rules_are_refused(case):
    given, message = WRONG[case]
    with pytest.raises(UsageError, match=message):
        DropStragglers.of(given)


def test_a_share_of_less_than_one_contribution_is_refused():
    with refused("argument-value", "20"):
        DropStragglers(0.04, 0.5, batchsize=10).check(2)


# -- waiting --------------------------------------------------------------------------------------


def test_the_next_computation_waits_for_one_that_is_late():
    may_end, order = threading.Event(), []

    def slow():
        may_end.wait(30)
        order.append("slow")

    assert run_within(0.01, slow) is None
    assert run_within(0.01, lambda: order.append("too early")) is None
    may_end.set()
    assert run_within(None, lambda: order.append("next") or "done") == "done"
    assert order == ["slow", "next"]


def test_what_a_late_computation_raises_comes_with_the_next():
    may_end = threading.Event()

    def failing():
        may_end.wait(30)
        raise ArithmeticError("on purpose")

    assert run_within(0.01, failing) is None
    may_end.set()
    with pytest.raises(ArithmeticError, match="on purpose"):
        run_within(30.0, lambda: 1)
    assert run_within(30.0, lambda: 1) == 1


# -- steps ----------------------------------------------------------------------------------------

LATE = (2,)
LIMIT_S = 1.0


class Slow(OnRows):
    """Rank 1 sleeps in some steps."""

    def compute(self, step, weights, buffers):
        if self.rank == 1 and step.number in LATE:
            time.sleep(2 * LIMIT_S)
        return super().compute(step, weights, buffers)


def limited(first, last):
    """Every step has a limit; the first may have to load a model."""
    steps = [replace(step, limit=LIMIT_S) for step in steps_of(first, last)]
    return [replace(steps[0], limit=None), *steps[1:]] if first == 0 else steps


def dropped_of(records):
    """Ranks that were dropped in every step."""
    return [
        [rank for rank, source in enumerate(record["sources"]) if "dropped" in source]
        for record in records[0]
    ]


def oracle(dropped):
    """One process without the contributions that were dropped."""
    rows = {
        number: [0 if rank in ranks else 1 for rank in range(2)]
        for number, ranks in enumerate(dropped)
    }
    return whole(adam, 2, len(dropped), rows.__getitem__)[0]


@pytest.mark.slow_cases("shuffle")
@pytest.mark.parametrize("transport", ["shuffle", pytest.param("barrier", marks=pytest.mark.slow)])
def test_weights_are_those_of_a_training_without_the_late_contributions(orca_spark, transport):
    plan = plan_of(2, max_drop=0.5)
    with opened(transport, plan, Slow) as layer:
        layer.start(states_of(plan))
        records = layer.run(limited(0, 6))
        weights = np.concatenate([state.weights for state in layer.states()])
    dropped = dropped_of(records)
    assert all(1 in dropped[number] for number in LATE)
    assert dropped[0] == []
    assert not any(record["is_void"] for record in records[0])
    assert np.array_equal(weights, oracle(dropped))


@pytest.mark.parametrize("transport", [pytest.param("shuffle", marks=pytest.mark.slow), "barrier"])
def test_a_discarded_step_and_those_after_it_change_nothing(orca_spark, transport):
    plan = plan_of(2, max_drop=0.1, norm=0.5)
    with opened(transport, plan, Slow) as layer:
        layer.start(states_of(plan))
        records = layer.run(limited(0, 6))
        assert [record["is_void"] for record in records[0]] == [False] * 2 + [True] * 4
        layer.run(steps_of(2, 4))
        weights = np.concatenate([state.weights for state in layer.states()])
    with opened(transport, plan) as layer:
        layer.start(states_of(plan))
        layer.run(steps_of(0, 4))
        expected = np.concatenate([state.weights for state in layer.states()])
    assert np.array_equal(weights, expected)


# -- the Estimator --------------------------------------------------------------------------------

ROWS = 40


class Sleepy(nn.Module):
    """The second worker sleeps in some of its forward passes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.passes = nn.Linear(4, 1), 0

    def forward(self, x):
        from pyspark import TaskContext

        self.passes += 1
        task = TaskContext.get()  # None for a pass that began when its task had ended
        if task is not None and task.partitionId() == 1 and self.passes in (7, 8):
            time.sleep(2.0)
        return self.layer(x)


def sleepy(config):
    return Sleepy()


def sgd(model, config):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def fitted(**fit):
    x = np.random.default_rng(0).standard_normal((ROWS, 4)).astype(np.float32)
    est = Estimator.from_torch(
        model=sleepy, optimizer=sgd, loss=nn.MSELoss(), workers_per_node=2, backend="bigdl"
    )
    stats = est.fit((x, x.sum(axis=1)), epochs=3, batch_size=8, seed=3, group_size=2, **fit)
    return est.get_model().state_dict(), stats


def rule(share):
    shares = {"drop_percentage": share, "max_drop_percentage": share}
    return {"drop_stragglers": {**shares, "batchsize": 2, "warmup_iteration": 2}}


@pytest.mark.slow  # on a loaded machine everybody is late
def test_the_figures_of_an_epoch_say_what_was_dropped(orca_spark):
    _, stats = fitted(**rule(0.5))
    assert sum(e["dropped_contributions"] + e["discarded_steps"] for e in stats) >= 1
    for epoch in stats:
        assert epoch["num_samples"] + epoch["dropped_rows"] == ROWS


@pytest.mark.slow  # on a loaded machine everybody is late
def test_a_discarded_step_is_made_again_by_all(orca_spark):
    """A quarter of two workers is nobody: whenever one is late the step is discarded."""
    weights, stats = fitted(transport="barrier", **rule(0.25))
    expected, known = fitted()
    assert sum(epoch["discarded_steps"] for epoch in stats) >= 1
    assert [epoch["dropped_rows"] for epoch in stats] == [0] * 3
    assert largest_difference(weights, expected) == 0
    assert "dropped_rows" not in known[0]


@pytest.mark.slow
def test_a_late_worker_is_waited_for_by_default(orca_spark):
    plan = plan_of(2)
    with opened("shuffle", plan, Slow) as layer:
        layer.start(states_of(plan))
        records = layer.run(steps_of(0, 3))
    assert dropped_of(records) == [[], [], []]
