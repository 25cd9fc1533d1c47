"""Both transports of the parameter layer make the weights of one process, to the last bit."""

import functools

import numpy as np
import pytest
import torch
from slices import (
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
from bigdl.orca.sync.parameter_layer.optimizers import joined_state


class Broken(OnRows):
    def compute(self, step, weights, buffers):
        if self.rank == 1 and step.number == 2:
            raise ZeroDivisionError("on purpose")
        return super().compute(step, weights, buffers)


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
        pytest.param("barrier", 1, 5, 10, marks=pytest.mark.slow),
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


@pytest.mark.parametrize("compression", [pytest.param("bf16", marks=pytest.mark.slow), "int8"])
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


# -- losses ---------------------------------------------------------------------------------------


@pytest.mark.fault
def test_a_killed_worker_is_recovered_by_lineage(orca_spark, tmp_path):
    """The job goes on: Spark runs the task again, on what the shuffle has kept."""
    program = functools.partial(KilledOnce, folder=str(tmp_path), step=7)
    weights, *_ = trained("shuffle", 2, 10, 20, program=program)
    assert (tmp_path / "killed").exists()
    assert np.array_equal(weights, expected(2, 20)[0])


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
