"""Keras that computes with JAX, from the driver to the workers.

A process has one backend of Keras, so nothing here computes in the process of the tests. What holds
for every backend, ``test_keras_exactness`` looks at.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
from plain_workers import Crew

from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
from bigdl.runtime.engine import PeerLost

pytestmark = pytest.mark.timeout(900)

pytest.importorskip("jax")


@pytest.fixture(scope="module")
def crew():
    with Crew(2) as crew:
        yield crew


def together(crew, use):
    """``use(sync, keras)`` on both ranks, which compute with JAX."""

    def program(worker):
        os.environ["KERAS_BACKEND"] = "jax"
        import keras

        sync = TorchDistributedSync(worker)
        sync.start()
        return use(sync, keras)

    results, _ = crew.run(program, [{}] * 2)
    return results


def net(keras, dtype=None):
    first, second = (keras.initializers.GlorotUniform(seed) for seed in (1, 2))
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6, activation="tanh", kernel_initializer=first),
            layers.Dense(1, kernel_initializer=second, dtype=dtype),
        ]
    )
    model.compile(keras.optimizers.Adam(0.05, clipnorm=0.5), "mse")
    return model


def rows(count, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype("float32")
    return x, x.sum(1)


def reduced(sync, model, count):
    from bigdl.training.keras.backends import steps_of
    from bigdl.training.keras.data import build_for
    from bigdl.training.keras.reducer import GradientReducer

    reducer = GradientReducer(sync, count)
    build_for(model, rows(1))
    reducer.attach(model)
    return reducer, steps_of(model)


@pytest.mark.slow
def test_compiled_steps_of_two_workers_make_the_updates_of_one(crew):
    def use(sync, keras):
        x, y = rows(51)
        own = slice(0, 30) if sync.rank == 0 else slice(30, 51)
        model, alone = net(keras), net(keras)
        reducer, steps = reduced(sync, model, 51)
        reducer.weight = len(x[own]) / 51
        for _ in range(6):
            steps.train((x[own], y[own]))
            reducer.errors.check()
        alone.fit(x, y, batch_size=51, epochs=6, verbose=0)
        return model.get_weights(), alone.get_weights()

    first, second = together(crew, use)
    for found, wanted in (first, second):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
    for one, other in zip(first[0], second[0], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_gradients_in_bfloat16_are_summed_alike_on_both(crew):
    def use(sync, keras):
        model = net(keras, "bfloat16")
        reducer, steps = reduced(sync, model, 16)
        for _ in range(2):
            steps.train(rows(8, sync.rank))
            reducer.errors.check()
        return [np.asarray(weight, "float32") for weight in model.get_weights()]

    for one, other in zip(*together(crew, use), strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_peer_that_went_away_is_named_and_the_process_trains_on(crew):
    def use(sync, keras):
        reducer, steps = reduced(sync, net(keras), 8)
        steps.train(rows(8))
        reducer.check()
        if sync.rank == 1:
            sync.stop()
            return "left"
        steps.train(rows(8))
        try:
            reducer.errors.check()
        except PeerLost:
            return "lost"
        return "nothing"

    assert together(crew, use) == ["lost", "left"]

    def use_again(sync, keras):
        reducer, steps = reduced(sync, net(keras), 8)
        logs = steps.train(rows(8))
        reducer.check()
        return bool(np.isfinite(float(logs["loss"])))

    assert together(crew, use_again) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bigdl", "horovod"])
def test_a_backend_that_cannot_train_it_is_refused(crew, backend):
    def use(sync, keras):
        from bigdl.common.errors import UsageError
        from bigdl.orca.learn.tf2 import Estimator

        try:
            Estimator.from_keras(
                model_creator=net, compile_args_creator=dict, backend=backend, config={}
            )
        except UsageError as error:
            return str(error)

    expected = (
        f"backend='{backend}' does not train Keras models on JAX; use "
        "backend='spark' or 'ray', which give the same updates"
    )
    assert together(crew, use) == [expected] * 2


# -- programs on a cluster ------------------------------------------------------------------------

COMMON = """
import sys
import numpy as np
from bigdl.common.errors import UsageError
from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
from bigdl.orca.learn.tf2 import Estimator

x = np.random.default_rng(0).normal(size=(51, 4)).astype("float32")
data = x, x.sum(1)

def net(config):
    import keras
    assert keras.backend.backend() == "jax"
    first, second = (keras.initializers.GlorotUniform(seed) for seed in (1, 2))
    model = keras.Sequential([keras.Input((4,))])
    model.add(keras.layers.Dense(6, activation="tanh", kernel_initializer=first))
    if config.get("broken"):
        model.add(keras.layers.Lambda(lambda x: 1 / 0, output_shape=(6,)))
    if config.get("dropout"):
        model.add(keras.layers.Dropout(0.5))
    model.add(keras.layers.Dense(1, kernel_initializer=second))
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model

def estimator(workers=2, **options):
    return Estimator.from_keras(model_creator=net, workers_per_node=workers, **options)
"""

ON_SPARK = """
init_orca_context("local", cores=2)
try:
    estimator(backend="spark", config={"broken": True}).fit(data)
except UsageError as error:
    assert "division by zero" in str(error), error
else:
    raise AssertionError("it was trained")

# 51 rows are 26 and 25 of the one batch
est = estimator(backend="spark")
found = est.fit(data, epochs=4, batch_size=51, validation_data=data)
alone = net({})
wanted = alone.fit(*data, epochs=4, batch_size=51, validation_data=data, verbose=0)
for name, values in wanted.history.items():
    np.testing.assert_allclose(found[name], values, rtol=2e-6, err_msg=name)
model = est.get_model()
for own, other in zip(model.get_weights(), alone.get_weights()):
    np.testing.assert_allclose(own, other, atol=1e-6)
np.testing.assert_allclose(est.predict(x), model.predict(x, verbose=0), atol=1e-6)
est.save(sys.argv[1] + "/m.keras")
loaded = Estimator.from_keras(backend="spark")
loaded.load(sys.argv[1] + "/m.keras")
assert abs(loaded.evaluate(data)["validation_mae"] - found["val_mae"][-1]) < 1e-5

# one that was interrupted equals one that was not
spark = OrcaContext.get_spark_session()
rows = [(row.tolist(), float(row.sum())) for row in x]
rows = spark.createDataFrame(rows, "x ARRAY<FLOAT>, y FLOAT").coalesce(2)
fit = {"batch_size": 16, "seed": 1, "feature_cols": ["x"], "label_cols": ["y"]}
dropout, folder = {"config": {"dropout": True}, "backend": "spark"}, sys.argv[1] + "/run"
whole = estimator(**dropout).fit(rows, epochs=3, **fit)
estimator(model_dir=folder, **dropout).fit(rows, epochs=1, **fit)
rest = estimator(model_dir=folder, **dropout).fit(rows, epochs=3, resume="auto", **fit)
assert rest["loss"][-1] == whole["loss"][-1], (rest, whole)
stop_orca_context()
print("equal")
"""

ON_RAY = """
found = []
init_orca_context(runtime="ray", cores=2)
for workers in (1, 2):
    est = estimator(workers, backend="ray")
    losses = est.fit(data, epochs=2, batch_size=51, seed=1)["loss"]
    losses += est.fit(data, epochs=1, batch_size=51)["loss"]
    figures = est.evaluate(data)
    other = est.get_model().evaluate(*data, verbose=0, return_dict=True)
    assert abs(figures["validation_mae"] - other["mae"]) < 1e-5
    found.append(losses)
np.testing.assert_allclose(*found, rtol=2e-6)
stop_orca_context()
print("equal")
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [ON_SPARK, ON_RAY], ids=["spark", "ray"])
def test_a_cluster_trains_as_one_process(tmp_path, program):
    script, folder = tmp_path / "program.py", tmp_path / "work"
    folder.mkdir()
    script.write_text(COMMON + program)
    ended = subprocess.run(
        [sys.executable, script, folder],
        env={**os.environ, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.split()[-1] == "equal"
