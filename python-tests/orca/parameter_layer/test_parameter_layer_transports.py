"""Both transports of the parameter layer make the weights of one process, to the last bit."""

import functools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from layer_reference import (
    ROWS,
    KilledOnce,
    OnRows,
    adam,
    opened,
    parameters,
    plan_of,
    states_of,
    steps_of,
    trained,
    whole,
)

from bigdl.common.errors import WorkerError, WorkerLost
from bigdl.orca.parameter_layer.optimizers import joined_state
from bigdl.orca.parameter_layer.plan import LayerPlan
from bigdl.orca.parameter_layer.rank import Contribution, RankState


class Broken(OnRows):
    def compute(self, step, weights, buffers):
        if self.rank == 1 and step.number == 2:
            raise ZeroDivisionError("on purpose")
        return super().compute(step, weights, buffers)


@functools.cache
def expected(ranks, steps):
    return whole(adam, ranks, steps)


@pytest.mark.slow_cases("shuffle-2-10-50", "shuffle-4-10-20")
@pytest.mark.parametrize(
    ("transport", "ranks", "group", "steps"),
    [
        pytest.param("shuffle", 1, 5, 10, marks=pytest.mark.slow),
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


@pytest.mark.slow_cases("bf16")
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


class Large:
    """A gradient of as many numbers as the plan has."""

    def __init__(self, rank, shards, size):
        self.size = size

    def describe(self):
        return {"rows": 1}

    def compute(self, step, weights, buffers):
        return Contribution(np.ones(self.size, np.float32), counted=1.0, rows=1)


class Overheard:
    """A job of an engine, and the bytes that go to its workers and come from them."""

    def __init__(self, job):
        self.job, self.heard = job, 0

    def attempt(self, options, state=None):
        found = self.job.attempt(options, state)
        self.heard += len(state or b"") + sum(map(len, found))
        return found


def driver_bytes(spark, transport, size):
    """What the driver is sent for two steps, beside the state that it begins with."""
    sc, (step, *_) = spark.sparkContext, steps_of(0, 1)
    plan = LayerPlan((size,), (0,), torch.optim.Adam, 2)
    with opened(transport, plan, functools.partial(Large, size=size)) as layer:
        layer.rows()
        bounds = plan.geometry.bounds
        layer.start([RankState(np.zeros(high - low, np.float32), [{}]) for low, high in bounds])
        layer.run([step])
        heard = layer.job = Overheard(getattr(layer, "job", None))
        group = f"{transport} {size}"
        sc.setJobGroup(group, "steps whose results are counted")
        try:
            layer.run([step] * 2)
        finally:
            sc.setLocalProperty("spark.jobGroup.id", None)
    tracker, store = sc.statusTracker(), sc._jsc.sc().statusStore()
    stages = [s for j in tracker.getJobIdsForGroup(group) for s in tracker.getJobInfo(j).stageIds]
    assert stages
    return heard.heard + sum(store.lastStageAttempt(stage).resultSize() for stage in stages)


@pytest.mark.slow_cases("shuffle")
@pytest.mark.parametrize("transport", ["shuffle", "barrier"])
def test_what_goes_through_the_driver_does_not_grow_with_the_model(orca_spark, transport):
    small, large = (driver_bytes(orca_spark, transport, size) for size in (1_000, 1_000_000))
    assert large < small + 2_000  # a slice has 2 MB, a moment another 2


# -- losses ---------------------------------------------------------------------------------------


@pytest.mark.fault
def test_a_killed_worker_is_recovered_by_lineage(orca_spark, tmp_path):
    """The job goes on: Spark runs the task again, on what the shuffle has kept."""
    program = functools.partial(KilledOnce, folder=str(tmp_path), step=7)
    weights, *_ = trained("shuffle", 2, 10, 20, program=program)
    assert (tmp_path / "killed").exists()
    assert np.array_equal(weights, expected(2, 20)[0])


@pytest.mark.slow
@pytest.mark.fault
def test_a_group_whose_worker_was_killed_is_run_again(orca_spark, tmp_path):
    program = functools.partial(KilledOnce, folder=str(tmp_path), step=7)
    plan = plan_of(2)
    with opened("barrier", plan, program) as layer:
        layer.start(states_of(plan))
        layer.run(steps_of(0, 5))
        with pytest.raises(WorkerLost):
            layer.run(steps_of(5, 20))
        layer.run(steps_of(5, 20))
        weights = np.concatenate([state.weights for state in layer.states()])
    assert np.array_equal(weights, expected(2, 20)[0])


def folders_of_states(_):
    directories = os.environ["SPARK_LOCAL_DIRS"].split(",")
    return [str(f) for d in directories for f in Path(d).glob("bigdl-spool-*-state-*")]


@pytest.mark.slow
@pytest.mark.fault
def test_weights_that_no_executor_has_any_more_are_given_again(orca_spark):
    plan = plan_of(2)
    with opened("barrier", plan) as layer:
        layer.start(states_of(plan))
        layer.run(steps_of(0, 5))
        states = layer.states()
        folders = orca_spark.sparkContext.parallelize([0], 1).flatMap(folders_of_states).collect()
        assert folders
        for folder in folders:
            shutil.rmtree(folder)
        with pytest.raises(WorkerLost, match="The weights were lost"):
            layer.run(steps_of(5, 20))
        assert not layer.keeps_state
        layer.start(states)
        layer.run(steps_of(5, 20))
        weights = np.concatenate([state.weights for state in layer.states()])
    assert np.array_equal(weights, expected(2, 20)[0])
    assert orca_spark.sparkContext.parallelize([0], 1).flatMap(folders_of_states).collect() == []


def exchanging(rank, ranks, place, near):
    """Exchange messages of several sizes, some of them large; True if all came as they were."""
    import torch.distributed as dist

    from bigdl.orca.parameter_layer.barrier import MessageExchange
    from bigdl.orca.parameter_layer.messages import ArrayMessage, unpack
    from bigdl.runtime.collectives.host_memory import HostExchange
    from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
    from bigdl.runtime.worker import Worker

    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=ranks)
    sync = TorchDistributedSync(Worker(rank, ranks))
    sync.start()
    others = [source for source in range(ranks) if source != rank]
    neighbours = dict(sync.neighbours)
    assert list(neighbours) == others
    if near == "some":  # as if rank 0 was on another machine
        neighbours = {n: p for n, p in neighbours.items() if rank and n}
    host = HostExchange(neighbours)
    exchange = MessageExchange(sync, None if near == "none" else host)

    def message(source, target, turn):
        size = turn * 500_000 if (source + target) % 2 else 3  # of float32: large or small
        return np.full(size, 100 * turn + 10 * source + target, np.float32)

    for turn in (1, 2, 3, 0, 4, 1):
        given = exchange([ArrayMessage(message(rank, target, turn)) for target in range(ranks)])
        if not all(np.array_equal(unpack(given[n]), message(n, rank, turn)) for n in others):
            return False
    for beside in (0, 5_000, 500_000):  # in a letter, by itself, and too large for that
        doc = {"before": np.full(beside, rank), "large": np.full(1_000_000, rank)}
        given = exchange([ArrayMessage(doc)] * ranks)
        for name, size in (("before", beside), ("large", 1_000_000)):
            arrays = [unpack(each)[name] for each in given]
            if not all(np.array_equal(arrays[n], np.full(size, n)) for n in range(ranks)):
                return False
    given, coming = exchange.begin([ArrayMessage(message(rank, n, 9)) for n in range(ranks)])
    arrays = [unpack(each) for each in given]
    for there in coming:
        here = slice(there // 4)
        if not all(np.array_equal(arrays[n][here], message(n, rank, 9)[here]) for n in others):
            return False
    sync.all_gather([0.0])
    host.close()
    return all(np.array_equal(arrays[n], message(n, rank, 9)) for n in others)


@pytest.mark.slow
@pytest.mark.parametrize(("near", "ranks"), [("all", 3), ("some", 3), ("none", 3), ("none", 2)])
def test_messages_of_all_sizes_arrive(near, ranks, tmp_path):
    from bigdl.runtime.launch import launch

    assert launch(exchanging, ranks, (ranks, str(tmp_path / "meet"), near)) == [True] * ranks
