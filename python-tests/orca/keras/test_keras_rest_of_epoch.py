"""An epoch that some workers begin and others end: Keras reads each row once, too."""

import keras
import numpy as np
import pytest

from bigdl.common.errors import WorkerError
from bigdl.orca.learn.tf2 import Estimator
from bigdl.orca.learn.trigger import SeveralIteration

ROWS, BATCH = 50, 6
DATA = np.arange(ROWS), np.arange(ROWS, dtype="float32")[:, None]


def mean_output(true, output):
    return keras.ops.mean(output)


def target(true, output):
    return true[:, 0]


def creator(config):
    """Every row has a weight of its own, from which SGD takes what it weighs in its batch."""
    row = keras.Input((1,), dtype="int32")
    weights = keras.layers.Embedding(ROWS, 1, "zeros")(row)
    model = keras.Model(row, keras.layers.Reshape((1,))(weights))
    model.compile(keras.optimizers.SGD(1.0), mean_output, metrics=[target])
    return model


class FailAfter(keras.callbacks.Callback):
    def __init__(self, batches):
        super().__init__()
        self._batches = batches

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self._batches:
            raise ValueError("no more")


def visits(estimator):
    (weights,) = estimator.get_model().get_weights()
    return np.rint(-BATCH * weights[:, 0]).astype(int)


@pytest.mark.slow
def test_each_row_is_read_once_and_metrics_are_those_of_all_rows(tmp_path):
    options = {"batch_size": BATCH, "seed": 5, "epochs": 1, "verbose": 0}

    def estimator(workers):
        return Estimator.from_keras(
            model_creator=creator,
            backend="local",
            workers_per_node=workers,
            model_dir=str(tmp_path),
        )

    options["checkpoint_trigger"] = SeveralIteration(1)
    for workers, batches in ((2, 3), (3, 5), (1, 7)):
        est, resume = estimator(workers), "auto" if batches > 3 else None
        with pytest.raises(WorkerError, match="no more"):
            est.fit(DATA, callbacks=[FailAfter(batches)], resume=resume, **options)
    est = estimator(2)
    figures = est.fit(DATA, resume="auto", **options)
    assert sorted(visits(est)) == [1] * (ROWS - 2) + [3] * 2  # the last batch has two rows
    np.testing.assert_allclose(figures["target"][-1], DATA[1].mean(), rtol=1e-6)
    est.shutdown()
