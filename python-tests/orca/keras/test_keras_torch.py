"""Keras that computes with torch, from the driver to the workers.

A process has one backend of Keras, so this is a program of its own.
"""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

PROGRAM = """
import sys
import numpy as np
from bigdl.orca import init_orca_context, stop_orca_context
from bigdl.orca.learn.tf2 import Estimator

def net(config):
    import keras
    assert keras.backend.backend() == "torch"
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model

init_orca_context("local", cores=2)
x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
data = x, x.sum(1)
found = []
for workers in (1, 2):
    est = Estimator.from_keras(model_creator=net, workers_per_node=workers, backend="spark")
    losses = est.fit(data, epochs=3, batch_size=24, seed=1)["loss"]
    model = est.get_model()
    assert np.allclose(est.predict(x), model.predict(x, verbose=0), atol=1e-6)
    assert abs(est.evaluate(data)["validation_loss"] - model.evaluate(*data, verbose=0)[0]) < 1e-5
    found.append(losses)
assert np.allclose(found[0], found[1], rtol=1e-5)
assert "tensorflow" not in sys.modules
stop_orca_context()
print("equal")
"""


def test_workers_compute_with_the_backend_of_the_driver(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, program],
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.split()[-1] == "equal"
