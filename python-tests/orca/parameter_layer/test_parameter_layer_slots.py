"""Half of the slots belong to somebody else's Spark job."""

import threading
import time

import numpy as np
import pytest
from layer_reference import adam, trained, whole

STEPS = 4
BOUND_S = 120.0


@pytest.fixture
def busy_slot(orca_spark, tmp_path):
    """One of the two slots is taken until the file that is given exists."""
    sc = orca_spark.sparkContext
    begun, done = tmp_path / "begun", tmp_path / "done"

    def occupy(_):
        begun.touch()
        end = time.monotonic() + BOUND_S
        while not done.exists() and time.monotonic() < end:
            time.sleep(0.02)
        return done.exists()

    ended = []
    job = threading.Thread(
        target=lambda: ended.append(sc.parallelize([0], 1).map(occupy).collect()), daemon=True
    )
    job.start()
    wait_for(begun.exists)
    yield done
    done.touch()
    job.join(BOUND_S)
    assert ended == [[True]]


def wait_for(condition):
    end = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.fault
def test_shuffle_goes_on_where_a_barrier_stage_waits(orca_spark, busy_slot):
    """Tasks of a step can run one after the other; a barrier stage begins with all of them."""
    waiting = []
    barrier = threading.Thread(
        target=lambda: waiting.append(trained("barrier", 2, STEPS, STEPS)[0]), daemon=True
    )
    barrier.start()
    tracker = orca_spark.sparkContext.statusTracker()
    wait_for(lambda: len(tracker.getActiveStageIds()) >= 2)
    weights, *_ = trained("shuffle", 2, STEPS, STEPS)
    assert not waiting
    assert not busy_slot.exists()
    expected = whole(adam, 2, STEPS)[0]
    assert np.array_equal(weights, expected)

    busy_slot.touch()
    barrier.join(BOUND_S)
    assert np.array_equal(waiting[0], expected)
    wait_for(lambda: not tracker.getActiveStageIds())
