"""Keras by the parameter layer on executors that are killed, and on fewer and more of them."""

import logging

import keras_faults
import pytest
from spark_executors import Executors

# every process that meets Keras first imports it, which takes long on a busy machine
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow, pytest.mark.fault]


@pytest.fixture(scope="module")
def undisturbed(local_cluster):
    return keras_faults.fitted()


@pytest.fixture
def executors(local_cluster):
    found = Executors(local_cluster)
    yield found
    found.take()


# First: once executors were killed, Spark's master gives no more when it is asked.


def shrink():
    """A callback that gives an executor back after the first epoch, and takes one after the next.

    It is copied before the fit, which a SparkSession cannot be.
    """
    import keras

    def change(epoch, logs):
        from bigdl.orca import OrcaContext

        executors = Executors(OrcaContext.get_spark_session())
        if epoch == 0:
            executors.give_back()
        elif epoch == 1:
            executors.take()

    return keras.callbacks.LambdaCallback(on_epoch_end=change)


def test_fewer_executors_own_fewer_slices_and_the_result_is_the_same(
    executors, undisturbed, caplog
):
    executors.need_first()
    with caplog.at_level(logging.INFO, "bigdl.orca"):
        state, found = keras_faults.fitted(min_workers=1, callbacks=[shrink()])
    said = [r.getMessage() for r in caplog.records if "cut in" in r.getMessage()]
    # once more after each return to a checkpoint
    assert list(dict.fromkeys(said)) == [
        "The weights are split into 1 slices instead of 2",
        "The weights are split into 2 slices instead of 1",
    ]
    expected, figures = undisturbed
    assert keras_faults.same(state, expected)
    assert found["loss"] == pytest.approx(figures["loss"])


@pytest.mark.parametrize("transport", ["shuffle", "barrier"])
def test_a_killed_executor_changes_nothing(executors, undisturbed, tmp_path, transport):
    kill = keras_faults.KillExecutor(tmp_path)
    state, found = keras_faults.fitted(kill, transport=transport, group_size=4)
    expected, figures = undisturbed
    assert kill.done() == 1
    assert keras_faults.same(state, expected)
    assert found["loss"] == pytest.approx(figures["loss"])
    assert found["mae"] == pytest.approx(figures["mae"])
