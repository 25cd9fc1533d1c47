"""The parameter layer loses an executor."""

import functools
import logging
import time

import numpy as np
import pytest
import torch
from layer_reference import (
    ROWS,
    KilledOnce,
    adam,
    opened,
    plan_of,
    states_of,
    steps_of,
    trained,
    whole,
)
from reference_training import largest_difference
from spark_executors import Executors

from bigdl.common.errors import WorkerLost
from bigdl.orca.data.feeds import as_feed
from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import Callback

# -- executors that come and go -------------------------------------------------------------------
#
# These are first: once executors were killed, Spark's master gives no more when it is asked.


class Shrink(Callback):
    """Gives one of the two executors back after the first epoch, and takes one after the second."""

    def __init__(self, cluster):
        self.cluster = cluster

    def after_train_epoch(self, runner):
        if runner.epochs == 0:
            self.cluster.give_back()
        elif runner.epochs == 1:
            self.cluster.take()


@pytest.fixture
def executors(local_cluster):
    found = Executors(local_cluster)
    yield found
    found.take()


def small(config):
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    )


def adam_of(model, config):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def fitted(**fit):
    x = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
    est = Estimator.from_torch(
        model=small, optimizer=adam_of, loss=torch.nn.MSELoss(), workers_per_node=1, backend="bigdl"
    )
    est.fit((x, x.sum(axis=1)), epochs=3, batch_size=8, seed=3, group_size=5, **fit)
    return est.get_state_dict()


@pytest.mark.slow
@pytest.mark.fault
def test_fewer_executors_own_fewer_slices_and_the_result_is_the_same(executors, caplog):
    executors.need_first()
    expected = fitted()
    with caplog.at_level(logging.INFO, "bigdl.orca"):
        found = fitted(min_workers=1, callbacks=[Shrink(executors)])
    said = [r.getMessage() for r in caplog.records if "cut in" in r.getMessage()]
    # once more after each return to a checkpoint
    assert list(dict.fromkeys(said)) == [
        "The weights are split into 1 slices instead of 2",
        "The weights are split into 2 slices instead of 1",
    ]
    assert largest_difference(found["models"][0], expected["models"][0]) == 0
    moments, others = (s["optimizers"][0]["state"] for s in (found, expected))
    for number, state in others.items():
        assert torch.equal(moments[number]["exp_avg_sq"], state["exp_avg_sq"])


# -- executors that are killed ---------------------------------------------------------------------


@pytest.mark.fault
@pytest.mark.slow
def test_rows_and_state_of_a_killed_executor_come_back_by_lineage(local_cluster, tmp_path):
    frame = local_cluster.range(0, ROWS, 1, 3).selectExpr("float(id) as x", "float(id) as y")
    feed = FeedGroup({"data": as_feed(frame, ["x"], ["y"])})
    program = functools.partial(KilledOnce, folder=str(tmp_path), step=12, victim="executor")
    weights, _, records, _ = trained("shuffle", 2, 5, 20, program=program, feed=feed)
    assert (tmp_path / "killed").exists()
    assert np.array_equal(weights, whole(adam, 2, 20)[0])
    seen = [sorted(source["seen"]) for source in records[-1]["sources"]]
    assert sorted(row for own in seen for row in own) == list(range(ROWS))


@pytest.mark.fault
@pytest.mark.slow
def test_the_state_of_a_killed_executor_is_with_another_one_too(local_cluster, tmp_path):
    program = functools.partial(KilledOnce, folder=str(tmp_path), step=7, victim="executor")
    plan = plan_of(2)
    with opened("barrier", plan, program) as layer:
        layer.start(states_of(plan))
        layer.run(steps_of(0, 5))
        for first, last in ((5, 12), (12, 20)):
            until_done(layer, functools.partial(layer.run, steps_of(first, last)))
        states = until_done(layer, layer.states)
    assert (tmp_path / "killed").exists()
    assert np.array_equal(np.concatenate([s.weights for s in states]), whole(adam, 2, 20)[0])


def until_done(layer, call):
    """Call until no executor is lost meanwhile; one that comes instead may not be there at once."""
    end = time.monotonic() + 120
    while True:
        try:
            return call()
        except WorkerLost:
            assert layer.keeps_state
            assert time.monotonic() < end
            time.sleep(0.5)
