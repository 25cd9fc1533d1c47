"""A small training of Keras by the parameter layer, and ways to disturb it."""

import functools
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil

from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.learn.tf2 import Estimator

ROWS, BATCH, EPOCHS = 40, 8, 3


def rows():
    x = np.random.default_rng(0).standard_normal((ROWS, 4)).astype("float32")
    return x, x.sum(axis=1)


def net(config, disturb=None):
    """A model that calls `disturb` ahead of each of its training steps.

    With ``config["is_plain"]`` rows do not depend on each other, and nothing is drawn.
    """
    import keras
    from keras import layers

    class Net(keras.Model):
        def train_step(self, data):
            if disturb is not None:
                disturb()
            return super().train_step(data)

    first, second = (keras.initializers.GlorotUniform(seed) for seed in (1, 2))
    inputs = keras.Input((4,))
    hidden = layers.Dense(8, activation="tanh", kernel_initializer=first)(inputs)
    if not config.get("is_plain"):
        hidden = layers.Dropout(0.2)(layers.BatchNormalization()(hidden))
    model = Net(inputs, layers.Dense(1, kernel_initializer=second)(hidden))
    model.compile(
        # with a small epsilon a gradient of almost nothing would be a step like any other
        keras.optimizers.Adam(0.05, epsilon=1e-3),
        "mse",
        metrics=["mae"],
        # as Python, or the disturbance would happen once, when TensorFlow traces the step
        run_eagerly=True,
    )
    return model


def fitted(disturb=None, *, config=None, **fit):
    """A training by two workers, wherever they are.

    Returns
    -------
    list of ndarray
        The weights and the state of the optimizer.
    dict
        The figures.
    """
    est = Estimator.from_keras(
        model_creator=functools.partial(net, disturb=disturb),
        workers_per_node=2 // SparkCluster.from_active().nodes,
        backend="bigdl",
        config=config,
    )
    found = est.fit(rows(), **{"epochs": EPOCHS, "batch_size": BATCH, "seed": 3, **fit})
    return state_of(est.get_model()), found


def state_of(model) -> list[np.ndarray]:
    from bigdl.training.keras.state import array_of

    return [np.array(array_of(v)) for v in (*model.weights, *model.optimizer.variables)]


def same(one, other) -> bool:
    """Whether two states are equal to the last bit."""
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


class Disturbance:
    """Something that happens to rank 1 as it begins a training step.

    Parameters
    ----------
    folder : Path
        Of the test: what has happened is counted in files, since processes come and go.
    begun : int
        In which of the steps that rank 1 begins it happens first.
    times : int
        How often, in this and the following steps.
    """

    def __init__(self, folder: Path, begun: int = 8, times: int = 1):
        self.folder, self.begun, self.times = folder, begun, times

    def __call__(self):
        if _rank() != 1:
            return
        if self._count("begun", 1) >= self.begun and self.done() < self.times:
            self._count("done", 1)
            self.act()

    def done(self) -> int:
        """How often it has happened."""
        return self._count("done", 0)

    def act(self):
        raise NotImplementedError

    def _count(self, name, more):
        with open(self.folder / name, "a") as file:
            file.write("." * more)
            return file.tell()


class Kill(Disturbance):
    """The Python process ends at once."""

    def act(self):
        os.kill(os.getpid(), signal.SIGKILL)


class KillExecutor(Disturbance):
    """The JVM that the Python process belongs to ends at once."""

    def act(self):
        process = psutil.Process()
        while process.name() != "java":
            process = process.parent()
        process.kill()
        time.sleep(60)  # Spark ends this process, too


class Sleep(Disturbance):
    """The step takes longer than any other."""

    def __init__(self, *arguments, seconds: float):
        super().__init__(*arguments)
        self.seconds = seconds

    def act(self):
        time.sleep(self.seconds)


def _rank() -> int | None:
    """Of this process; None on the driver, and for a step that its task did not wait for."""
    from pyspark import TaskContext

    task = TaskContext.get()
    return None if task is None else task.partitionId()
