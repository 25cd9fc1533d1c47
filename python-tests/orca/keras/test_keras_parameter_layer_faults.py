"""Keras by the parameter layer loses processes, and leaves out what comes too late."""

from dataclasses import replace

import keras_faults
import numpy as np
import pytest

from bigdl.orca.learn.tf2 import parameter_layer
from bigdl.orca.parameter_layer.fit.loop import ParameterLayerStep

# every process that meets Keras first imports it, which takes long on a busy machine
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


@pytest.fixture(scope="module")
def undisturbed(orca_spark):
    return keras_faults.fitted()


@pytest.mark.fault
@pytest.mark.parametrize(("transport", "times"), [("shuffle", 4), ("barrier", 1)])
def test_a_job_that_was_lost_is_taken_up_again(undisturbed, tmp_path, transport, times):
    """Spark gives up after four losses of a task; the fit goes on from the last state."""
    kill = keras_faults.Kill(tmp_path, times=times)
    state, found = keras_faults.fitted(kill, transport=transport, group_size=4)
    expected, figures = undisturbed
    assert kill.done() == times
    assert keras_faults.same(state, expected)
    assert found["loss"] == pytest.approx(figures["loss"])
    assert found["mae"] == pytest.approx(figures["mae"])


# -- contributions that come too late -------------------------------------------------------------


def rule(share):
    shares = {"drop_percentage": share, "max_drop_percentage": share}
    return {"drop_stragglers": {**shares, "batchsize": 2, "warmup_iteration": 2}}


def test_a_discarded_step_is_made_again_by_all(undisturbed, tmp_path):
    """A quarter of two workers is nobody: whenever one is late the step is discarded."""
    sleep = keras_faults.Sleep(tmp_path, 7, 2, seconds=5.0)
    fit = {"transport": "barrier", "group_size": 2, **rule(0.25)}
    state, found = keras_faults.fitted(sleep, **fit)
    expected, figures = undisturbed
    assert sum(found["discarded_steps"]) >= 1
    assert found["dropped_contributions"] == found["dropped_rows"] == [0] * keras_faults.EPOCHS
    assert keras_faults.same(state, expected)
    assert found["loss"] == pytest.approx(figures["loss"])
    assert "dropped_rows" not in figures


LIMIT_S = 4.0


class Limited(ParameterLayerStep):
    """Waits only so long for a rank, but in the first step, and keeps what the ranks say."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.made = []

    def _next_steps(self, triggers):
        steps, is_due = super()._next_steps(triggers)
        first, *others = (replace(step, limit=LIMIT_S) for step in steps)
        return [first if self.made else replace(first, limit=None), *others], is_due

    def _run(self, steps):
        found = super()._run(steps)
        for step, record in zip(steps, found[0], strict=True):
            ranks = [r for r, own in enumerate(record["sources"]) if "dropped" not in own]
            self.made.append((step, ranks))
        return found


@pytest.fixture
def loops(monkeypatch):
    """The loops that fits make."""
    made = []

    def limited(*arguments, **options):
        made.append(Limited(*arguments, **options))
        return made[-1]

    run = replace(parameter_layer.run_by_parameter_layer, step=limited)
    monkeypatch.setattr(parameter_layer, "run_by_parameter_layer", run)
    return made


def without_the_late(loop, config):
    """The state of Keras in this process, which sees of every batch what was in time."""
    model, columns = keras_faults.net(config), keras_faults.rows()
    for step, ranks in loop.made:
        # every second row is of the same rank
        parts = [[c[rank::2][slice(*step.ranges[rank])] for c in columns] for rank in ranks]
        model.train_on_batch(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    return keras_faults.state_of(model)


@pytest.mark.parametrize("transport", ["shuffle", "barrier"])
def test_weights_are_those_of_a_training_without_what_was_late(
    orca_spark, tmp_path, loops, transport
):
    sleep = keras_faults.Sleep(tmp_path, 3, seconds=2 * LIMIT_S)
    config = {"is_plain": True, "shuffle": False}
    fit = {"transport": transport, "group_size": 3, **rule(0.5)}
    state, found = keras_faults.fitted(sleep, config=config, **fit)
    (loop,) = loops
    assert len(loop.made) == keras_faults.EPOCHS * keras_faults.ROWS // keras_faults.BATCH
    assert sum(found["dropped_contributions"]) == sum(len(ranks) < 2 for _, ranks in loop.made)
    assert sum(found["dropped_contributions"]) + sum(found["discarded_steps"]) >= 1
    for own, known in zip(state, without_the_late(loop, config), strict=True):
        np.testing.assert_allclose(own, known, rtol=1e-4, atol=1e-5)
