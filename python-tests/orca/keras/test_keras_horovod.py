"""Keras with ``backend="horovod"``, on Spark's tasks and on Ray's actors."""

import os
import signal

import numpy as np
import pytest
from engine_cases import HAS_HOROVOD, Way

from bigdl.common.errors import UsageError
from bigdl.orca.learn.tf2 import Estimator
from bigdl.orca.learn.trigger import SeveralIteration

# every process that meets Keras first imports it, which takes long on a busy machine
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.slow,
    pytest.mark.horovod,
    pytest.mark.skipif(
        not HAS_HOROVOD, reason="no Horovod, in any suite: scripts/install-horovod.sh"
    ),
]

ROWS, BATCH, EPOCHS = 44, 8, 3
SEED = 4


@pytest.fixture(scope="module", params=[False, True], ids=["spark", "ray"])
def way(request, orca_spark):
    """Horovod on every engine, beside a local Spark."""
    way = Way("horovod", request.param)
    way.prepare()
    return way


def net(config):
    import keras

    dense = keras.layers.Dense(6, activation="tanh")
    layers = [dense, keras.layers.Dropout(config.get("dropout", 0.0)), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((4,)), *layers])


def compiled(config):
    import keras

    return {"optimizer": keras.optimizers.Adam(0.05), "loss": "mse", "metrics": ["mae"]}


def estimator(backend="horovod", workers=2, **options):
    return Estimator.from_keras(
        model_creator=net,
        compile_args_creator=compiled,
        workers_per_node=workers,
        backend=backend,
        **options,
    )


def rows():
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    return x, x.sum(1)


def fitted(est, **fit):
    """The weights and the figures."""
    found = est.fit(rows(), **{"epochs": EPOCHS, "batch_size": BATCH, "seed": SEED, **fit})
    return est.get_model().get_weights(), found


RANDOM = {"dropout": 0.3}


@pytest.fixture(scope="module")
def undisturbed(orca_spark):
    """What ``backend="spark"`` makes of two workers that draw random numbers."""
    return fitted(estimator("spark", config=RANDOM))


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_two_workers_make_the_updates_of_one_process(way):
    alone, both = estimator("spark", 1), estimator()
    (expected, known), (found, figures) = (
        fitted(est, batch_size=ROWS, validation_data=rows()) for est in (alone, both)
    )
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
    for name in ("loss", "mae", "val_loss", "val_mae"):
        assert figures[name] == pytest.approx(known[name], rel=1e-5)
    evaluated = both.evaluate(rows())
    assert evaluated["validation_loss"] == pytest.approx(figures["val_loss"][-1], rel=1e-5)
    predicted = both.get_model().predict(rows()[0], verbose=0)
    assert both.predict(rows()[0]) == pytest.approx(predicted, abs=1e-6)


def test_weights_are_those_of_the_other_backends(way, undisturbed):
    found, figures = fitted(estimator(config=RANDOM))
    expected, known = undisturbed
    assert equal(found, expected)
    assert figures["loss"] == known["loss"]


def test_a_run_that_was_cut_in_two_equals_one_that_was_not(way, undisturbed, tmp_path):
    options = {"config": RANDOM, "model_dir": str(tmp_path)}
    fitted(estimator(**options), epochs=1)
    found, figures = fitted(estimator(**options), resume="auto")
    expected, known = undisturbed
    assert equal(found, expected)
    assert figures["loss"] == known["loss"]


def kill(marker):
    """A callback that kills the second worker, which it knows from Horovod itself."""
    import keras

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            import horovod.torch as hvd

            at = int(self.model.optimizer.iterations)
            if at == 9 and hvd.rank() == 1 and not marker.exists():
                marker.write_text("")
                os.kill(os.getpid(), signal.SIGKILL)

    return Kill()


@pytest.mark.fault
def test_a_killed_worker_changes_nothing(way, undisturbed, tmp_path):
    marker = tmp_path / "killed"
    found, figures = fitted(
        estimator(config=RANDOM),
        callbacks=[kill(marker)],
        checkpoint_trigger=SeveralIteration(2),
    )
    assert marker.exists()
    expected, known = undisturbed
    assert equal(found, expected)
    assert figures["loss"] == pytest.approx(known["loss"], rel=1e-6)


def test_compile_args_creator_is_needed(way):
    with pytest.raises(UsageError, match="compile_args_creator should not be None"):
        Estimator.from_keras(model_creator=net, backend="horovod")
