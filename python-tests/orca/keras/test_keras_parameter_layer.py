"""Keras with ``backend="bigdl"``: gradients of Keras, updates by the parameter layer."""

import dataclasses
import functools
import itertools
import json
import os
import pickle
import subprocess
import sys
import tempfile

import cloudpickle
import numpy as np
import pytest
from plain_workers import spooled
from reference_training import rows_of, union_batches
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.data import XShards
from bigdl.orca.learn.tf2 import Estimator
from bigdl.orca.learn.tf2.parameter_layer import KerasDriverModel
from bigdl.orca.learn.tf2.parts import KerasParts
from bigdl.orca.learn.trigger import SeveralIteration
from bigdl.orca.parameter_layer.fit.loop import ParameterLayerFit, ParameterLayerOptions
from bigdl.orca.parameter_layer.optimizers import cut_state, joined_state, update_slice
from bigdl.orca.parameter_layer.plan import FlatLayout, LayerPlan, Transport
from bigdl.orca.parameter_layer.rank import Rank, RankState
from bigdl.runtime.failure import FailurePolicy
from bigdl.training.checkpoint import CheckpointDirectory
from bigdl.training.keras.backends import Packed
from bigdl.training.keras.loop import KerasFitProgram, KerasFitSettings
from bigdl.training.keras.state import array_of
from bigdl.training.position import StoppingCriterion

# every process that meets Keras first imports it, which takes long on a busy machine
pytestmark = pytest.mark.timeout(900)


# -- the optimizers, without a cluster ------------------------------------------------------------

OPTIMIZERS = {
    "plain": ("SGD", {"learning_rate": 0.1}),
    "momentum": ("SGD", {"learning_rate": 0.1, "momentum": 0.9}),
    "nesterov, decay": (
        "SGD",
        {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "adam": ("Adam", {"learning_rate": 0.05, "epsilon": 1e-3}),
    "amsgrad": ("Adam", {"learning_rate": 0.05, "amsgrad": True}),
    "adamw": ("AdamW", {"learning_rate": 0.05, "weight_decay": 0.1}),
    "adagrad": ("Adagrad", {"learning_rate": 0.1, "epsilon": 1e-2}),
    "rmsprop": ("RMSprop", {"learning_rate": 0.05, "epsilon": 1e-3}),
    "rmsprop, centered": ("RMSprop", {"learning_rate": 0.05, "momentum": 0.5, "centered": True}),
    "averaged": (
        "SGD",
        {"learning_rate": 0.1, "use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 4},
    ),
    "by value": ("Adam", {"learning_rate": 0.05, "clipvalue": 0.2}),
    "numbers of NumPy": (
        "RMSprop",
        {
            "learning_rate": np.float64(0.05),
            "rho": np.float64(0.8),
            "momentum": np.float64(0.5),
            "weight_decay": np.float32(0.1),
        },
    ),
}


@pytest.mark.parametrize(("name", "numbers"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_slices_make_the_updates_of_keras(name, numbers):
    """Three slices, and the state cut and joined again after every step."""
    import keras

    from bigdl.orca.learn.tf2.parameter_layer_optimizer import KerasParameterLayerOptimizer

    rng = np.random.default_rng(0)
    first = [rng.normal(size=shape).astype("float32") for shape in ((4, 3), (5,), ())]
    whole = [keras.Variable(value, name=f"v{i}") for i, value in enumerate(first)]
    known, own = (getattr(keras.optimizers, name)(**numbers) for _ in range(2))
    for optimizer in (known, own):
        if optimizer.weight_decay is not None:
            optimizer.exclude_from_weight_decay(var_names=["v1"])
    known.build(whole)
    mine = KerasParameterLayerOptimizer(
        own, [keras.Variable(v, name=f"v{i}") for i, v in enumerate(first)]
    )
    geometry = FlatLayout([v.size for v in first], 3)
    vector, state = geometry.flatten(first), mine.state()
    for _ in range(12):
        gradients = [rng.normal(size=v.shape).astype("float32") for v in first]
        known.apply([keras.ops.convert_to_tensor(g) for g in gradients], whole)
        flat, made, states = geometry.flatten(gradients), [], []
        if mine.clamp is not None:
            flat = np.clip(flat, *mine.clamp)
        for rank, (low, high) in enumerate(geometry.bounds):
            owned = RankState(vector[low:high].copy(), cut_state(state, geometry, rank))
            plan = LayerPlan(geometry.sizes, mine.groups, mine.sliced, 3)
            segments, gradient = geometry.segments(rank), flat[low:high].copy()
            update_slice(plan, mine.hyper(), segments, owned, gradient, set())
            made.append(owned.weights)
            states.append(owned.optimizer)
        vector = np.concatenate(made)
        state = joined_state(states, geometry, [v.shape for v in first])
        mine.pass_step()
    expected = geometry.flatten([keras.ops.convert_to_numpy(v) for v in whole])
    np.testing.assert_allclose(vector, expected, rtol=1e-5, atol=1e-6)
    mine.put_state(state)
    for theirs, ours in zip(known.variables, own.variables, strict=True):
        theirs, ours = (keras.ops.convert_to_numpy(v) for v in (theirs, ours))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# -- ranks in this process ------------------------------------------------------------------------


class Here(Transport):
    """Carries messages between ranks of this process."""

    keeps_state = True

    def __init__(self, plan, replicas):
        self._plan, self._replicas = plan, replicas

    def rows(self):
        return [replica.describe() for replica in self._replicas]

    def start(self, states):
        self._states = [RankState.unpack(state.message()) for state in states]

    def run(self, steps):
        for state in self._states:
            state.begin_group()
        for step in pickle.loads(cloudpickle.dumps(list(steps))):
            self._step(step)
        return [json.loads(json.dumps(state.records)) for state in self._states]

    def _step(self, step):
        ranks = [Rank(self._plan, number) for number in range(self._plan.ranks)]
        weights = [bytes(r.weights(s)) for r, s in zip(ranks, self._states, strict=True)]
        pieces = []
        for rank, replica, state in zip(ranks, self._replicas, self._states, strict=True):
            made, state.residual = rank.gradients(replica, step, weights, state.residual)
            pieces.append([bytes(piece) for piece in made])
        sums = [rank.reduce([own[rank.rank] for own in pieces]) for rank in ranks]
        told = None
        if self._plan.needs_statistics:
            whole = zip(ranks, sums, self._states, strict=True)
            told = [rank.statistics(found, state) for rank, found, state in whole]
        for rank, found, state in zip(ranks, sums, self._states, strict=True):
            rank.update(step, found, state, told)

    def states(self):
        return self._states

    def close(self):
        for replica in self._replicas:
            replica.close()


def settings_of(epochs=2, batch_size=4, labels=("y",), features=("x",), **settings):
    return KerasFitSettings(
        StoppingCriterion(epochs=epochs), batch_size, 5, features, labels, **settings
    )


def fitted(shards, creator, *, callbacks=(), start=None, group=3, options=None, **settings):
    """Train by ranks of this process; the fit, and the snapshot that it ended with."""
    packed = Packed.of(KerasParts(creator), list(callbacks))
    layer = ParameterLayerOptions(group_size=group, **(options or {}))
    program = KerasFitProgram(packed, {}, None, settings_of(**settings, parameter_layer=layer))
    fit = ParameterLayerFit(program, len(shards), start, KerasDriverModel)
    with tempfile.TemporaryDirectory() as folder:
        replicas = [
            fit.replicas()(rank, {"data": spooled(folder, f"{rank}", shard)})
            for rank, shard in enumerate(shards)
        ]
        with Here(fit.plan, replicas) as transport:
            return fit, fit.run(transport, None, FailurePolicy.of(0), lambda _: None)


def weights_of(fit):
    return fit.model.model.get_weights()


def alone(shards, creator, *, epochs=2, batch_size=4, features=("x",), label="y", weigh=None):
    """Keras in this process, batch by batch: the model, and the figures of the epochs."""
    model, figures = creator({}), []
    model.run_eagerly = True  # there are too few steps for a graph to pay
    for epoch in range(epochs):
        found, rows = [], []
        for batch in union_batches(shards, batch_size, 5, epoch):
            batch = {name: values.numpy() for name, values in batch.items()}
            x = batch["x"] if len(features) == 1 else {name: batch[name] for name in features}
            y = batch[label] if isinstance(label, str) else [batch[name] for name in label]
            weight = None if weigh is None else weigh(batch)
            model.reset_metrics()
            found.append(model.train_on_batch(x, y, sample_weight=weight, return_dict=True))
            rows.append(len(batch["x"]))
        figures.append({k: np.average([each[k] for each in found], weights=rows) for k in found[0]})
    model.optimizer.finalize_variable_values(model.trainable_weights)
    return model, figures


def check_equal(shards, creator, *, label="y", weigh=None, tolerance=1e-5, **settings):
    """Ranks end with the weights, the optimizer's state and the figures of one process."""
    given = {k: v for k, v in settings.items() if k in ("epochs", "batch_size", "features")}
    known, figures = alone(shards, creator, label=label, weigh=weigh, **given)
    done, _ = fitted(shards, creator, **settings)
    pairs = zip(done.model.model.weights, known.weights, strict=True)
    numbers = zip(done.model.model.optimizer.variables, known.optimizer.variables, strict=True)
    for own, expected in itertools.chain(pairs, numbers):
        own, expected = array_of(own), array_of(expected)
        np.testing.assert_allclose(own, expected, rtol=tolerance, atol=tolerance)
    logs = [entry["logs"] for entry in done.state.position.history]
    assert len(logs) == len(figures)
    for own, expected in zip(logs, figures, strict=True):
        assert own.keys() == expected.keys()
        for name in own:
            if not name.endswith("_loss"):  # to Keras each batch counts one there
                assert own[name] == pytest.approx(expected[name], rel=1e-4)


def drawn(model):
    rng = np.random.default_rng(3)
    model.set_weights([0.5 * rng.normal(size=w.shape) for w in model.weights])
    return model


def net(config, limit=None, **options):
    import keras

    dense = keras.layers.Dense(6, activation="tanh")
    model = drawn(keras.Sequential([keras.Input((4,)), dense, keras.layers.Dense(1)]))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **(limit or {}))
    model.compile(**{"optimizer": optimizer, "loss": "mse", "metrics": ["mae"], **options})
    return model


def adam(config):
    import keras

    # without a large epsilon a gradient of almost nothing is a step like any other
    return net(config, optimizer=keras.optimizers.Adam(0.05, epsilon=1e-3))


def scheduled(config):
    import keras

    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.7)
    return net(config, optimizer=keras.optimizers.SGD(schedule, nesterov=True, momentum=0.5))


def averaged(config):
    import keras

    optimizer = keras.optimizers.RMSprop(0.01, use_ema=True, ema_overwrite_frequency=3)
    return net(config, optimizer=optimizer)


def regularized(config):
    model = net(config)
    import keras

    model.layers[0].kernel_regularizer = keras.regularizers.L2(0.1)
    return model


RARE = [averaged, regularized]


def with_own_step(config):
    import keras

    class Halved(keras.Model):
        def train_step(self, data):
            x, y = data[:2]
            found = super().train_step((x, y / 2))
            return {**found, "rows": keras.ops.cast(keras.ops.shape(x)[0], "float32")}

    inner = net(config)
    model = Halved(inner.inputs[0], inner.outputs[0])
    model.compile(optimizer=keras.optimizers.SGD(0.1, loss_scale_factor=8.0), loss="mse")
    return model


def two_by_two(config):
    """Two inputs by name, one of them looked up in a table, and two outputs."""
    import keras

    ids, x = keras.Input((), dtype="int64", name="i"), keras.Input((4,), name="x")
    both = keras.layers.Concatenate()([keras.layers.Embedding(10, 3)(ids), x])
    score = keras.layers.Dense(1, name="score")(both)
    kind = keras.layers.Dense(3, activation="softmax", name="kind")(both)
    model = drawn(keras.Model({"i": ids, "x": x}, [score, kind]))
    losses = ["mse", "sparse_categorical_crossentropy"]
    model.compile(keras.optimizers.SGD(0.1), losses, metrics=["mae", "accuracy"])
    return model


def normed(config):
    import keras

    layers = [keras.layers.Dense(6), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    rng = np.random.default_rng(3)
    model.set_weights([np.abs(rng.normal(size=w.shape)) for w in model.weights])
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


def dropping(config):
    import keras

    layers = [keras.layers.Dense(6), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.Adam(0.05), "mse")
    return model


@pytest.fixture(scope="module")
def drawn_rows():
    """Two ranks; the last batch of an epoch is a smaller one."""
    return rows_of([12, 7], dtype="float32")


SIZES = {"one": [19], "two": [12, 7], "one without rows": [9, 0]}


@pytest.mark.slow_cases("two")
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_ranks_equal_one_process(sizes):
    check_equal(rows_of(sizes, dtype="float32"), net, epochs=3)


@pytest.mark.slow_cases("adam")
@pytest.mark.parametrize(
    "creator", [adam, scheduled, *(pytest.param(c, marks=pytest.mark.slow) for c in RARE)]
)
def test_whatever_is_compiled(drawn_rows, creator):
    check_equal(drawn_rows, creator, epochs=3)


@pytest.mark.parametrize("limit", ["clipnorm", "global_clipnorm"])
def test_whatever_is_limited_by_norms(drawn_rows, limit):
    """The owners of slices tell each other what Keras finds in whole gradients."""
    check_equal(drawn_rows, functools.partial(net, limit={limit: 0.3}), epochs=1)


@pytest.mark.slow
def test_inputs_by_name_and_two_outputs(drawn_rows):
    names = {"features": ("i", "x"), "labels": ("y", "c")}
    check_equal(drawn_rows, two_by_two, label=("y", "c"), epochs=1, **names)


ROWS_OF_TABLES = {
    "SGD": (("SGD", {"learning_rate": 0.1}), True),
    "Adagrad": (("Adagrad", {"learning_rate": 0.1, "epsilon": 1e-2}), True),
    "clipped": (("SGD", {"learning_rate": 0.1, "global_clipnorm": 0.5}), True),
    "all rows move": (("Adam", {"learning_rate": 0.05, "epsilon": 1e-3}), False),
}


@pytest.mark.slow_cases("Adagrad", "all rows move", "clipped")
@pytest.mark.parametrize("case", ROWS_OF_TABLES.values(), ids=ROWS_OF_TABLES.keys())
def test_rows_of_a_table_travel_alone(drawn_rows, case):
    """Where the optimizer changes no others, and a batch reads few of them."""
    import keras
    import tensorflow as tf

    (name, numbers), are_alone = case

    def tables(config):
        model = two_by_two(config)
        model.compile(
            getattr(keras.optimizers, name)(**numbers),
            ["mse", "sparse_categorical_crossentropy"],
            metrics=["mae", "accuracy"],
        )
        # by itself Keras squares the parts of a row that is read twice before it adds them
        object.__setattr__(model.optimizer, "apply", functools.partial(dense, model.optimizer))
        return model

    def dense(optimizer, grads, weights):
        grads = [tf.convert_to_tensor(gradient) for gradient in grads]
        type(optimizer).apply(optimizer, grads, weights)

    names = {"features": ("i", "x"), "labels": ("y", "c")}
    check_equal(drawn_rows, tables, label=("y", "c"), epochs=2, **names)
    done, _ = fitted(drawn_rows, tables, epochs=1, **names)
    assert done.plan.widths == ((3, 0, 0, 0, 0) if are_alone else ())
    done, _ = fitted(drawn_rows, tables, epochs=1, batch_size=8, **names)
    assert not any(done.plan.widths)


def test_a_training_step_of_its_own_returns_what_it_likes(drawn_rows):
    known, _ = alone(drawn_rows, with_own_step, epochs=1)
    done, _ = fitted(drawn_rows, with_own_step, epochs=1)
    for own, expected in zip(done.model.model.weights, known.weights, strict=True):
        np.testing.assert_allclose(array_of(own), array_of(expected), rtol=1e-5, atol=1e-6)
    logs = done.state.position.history[-1]["logs"]
    assert logs.keys() == {"loss", "rows"}
    assert 1 < logs["rows"] < 4  # what a rank has of a batch, on average


def twice(config):
    import keras

    class Twice(keras.Model):
        def train_step(self, data):
            super().train_step(data)
            return super().train_step(data)

    inner = net(config)
    model = Twice(inner.inputs[0], inner.outputs[0])
    model.compile("sgd", "mse")
    return model


def test_a_training_step_of_two_updates_is_refused(drawn_rows):
    with refused("model-unsupported", "train_step", "2"):
        fitted(drawn_rows, twice)


@pytest.mark.parametrize(
    "reduction",
    ["mean_with_sample_weight", "sum", "sum_over_batch_size"],
)
def test_weights_of_rows_and_of_classes(drawn_rows, reduction):
    import keras

    shards = [dict(s, w=1 + (s["i"] % 3).astype("float32")) for s in drawn_rows]
    for shard in shards:
        shard["y"] = (shard["y"] > 0).astype("float32")
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    optimizer = {"optimizer": "sgd", "metrics": []}
    creator = functools.partial(net, loss=loss, **optimizer)

    def weigh(batch):
        return batch["w"] * np.where(batch["y"] > 0, 2.0, 0.25).astype("float32")

    known, _ = alone(shards, creator, weigh=weigh)
    table = {0: 0.25, 1: 2.0}
    done, _ = fitted(shards, creator, labels=("y", "w"), weighted=True, class_weight=table)
    for own, expected in zip(done.model.model.weights, known.weights, strict=True):
        np.testing.assert_allclose(array_of(own), array_of(expected), rtol=1e-5, atol=1e-6)


def test_batch_normalization_of_one_rank_is_that_of_keras():
    check_equal(rows_of([8], dtype="float32"), normed)


def test_averages_of_batch_normalization_are_merged_by_rows():
    shards = rows_of([8, 4], dtype="float32")
    done, _ = fitted(shards, normed, epochs=1, batch_size=12, shuffle=False)
    expected = []
    for shard in shards:
        model = normed({})
        model.train_on_batch(shard["x"], shard["y"])
        expected.append([array_of(w) for w in model.non_trainable_weights])
    for own, first, second in zip(done.model.model.non_trainable_weights, *expected, strict=True):
        merged = (8 * first + 4 * second) / 12
        np.testing.assert_allclose(array_of(own), merged, rtol=1e-5)


@pytest.mark.slow
def test_nothing_depends_on_groups_and_a_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    shards = rows_of([6, 5], dtype="float32")
    fit = {"epochs": 3, "options": {"compression": "int8"}}
    whole, _ = fitted(shards, dropping, group=4, **fit)
    options = {"run_url": str(tmp_path), "keep": 9, "checkpoint_trigger": SeveralIteration(2)}
    done, _ = fitted(shards, dropping, group=3, **fit, **options)
    assert all(map(np.array_equal, weights_of(done), weights_of(whole)))
    inside = CheckpointDirectory(str(tmp_path)).read("checkpoint-000001-00000001")
    again, _ = fitted(shards, dropping, start=inside, **fit)
    assert all(map(np.array_equal, weights_of(again), weights_of(whole)))
    for own, known in zip(again.state.position.history, whole.state.position.history, strict=True):
        assert own["logs"] == pytest.approx(known["logs"])


def test_a_run_does_not_go_on_with_another_optimizer(tmp_path):
    shards = rows_of([6, 5], dtype="float32")
    options = {"run_url": str(tmp_path), "checkpoint_trigger": SeveralIteration(2)}
    fitted(shards, net, epochs=1, **options)
    inside = CheckpointDirectory(str(tmp_path)).latest()[1]
    with refused("checkpoint-mismatch"):
        fitted(shards, adam, start=inside, epochs=2)
    schedule = "optimizer SGD, but the program uses SGD with the schedule ExponentialDecay; resume"
    with pytest.raises(UsageError, match=schedule):
        fitted(shards, scheduled, start=inside, epochs=2)
    lacking = {k: v for k, v in inside.manifest.items() if k != "fingerprint"}
    without = dataclasses.replace(inside, manifest={**lacking, "step": 1, "partial": None})
    with refused("checkpoint-damaged", "'fingerprint'"):
        fitted(shards, net, start=without, epochs=2)


@pytest.mark.slow
def test_an_epoch_of_so_many_steps_goes_on_where_the_last_one_ended(drawn_rows):
    whole, _ = fitted(drawn_rows, net, epochs=2)  # 5 steps each
    pieces, _ = fitted(drawn_rows, net, epochs=5, steps_per_epoch=2)
    assert [entry["steps"] for entry in pieces.state.position.history] == [2] * 5
    assert all(map(np.array_equal, weights_of(pieces), weights_of(whole)))


# -- callbacks ------------------------------------------------------------------------------------


def test_callbacks_of_epochs_are_obeyed(drawn_rows):
    import keras

    rates = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 if epoch < 2 else 0.0)
    stop = keras.callbacks.EarlyStopping("loss", min_delta=1e-6, patience=1)
    creator = functools.partial(net, optimizer="sgd")
    done, _ = fitted(drawn_rows, creator, epochs=9, callbacks=[rates, stop])
    logs = [entry["logs"] for entry in done.state.position.history]
    assert [round(entry["learning_rate"], 6) for entry in logs[:3]] == [0.1, 0.1, 0.0]
    assert len(logs) < 9


def test_weights_that_a_callback_sets_are_trained_on(drawn_rows):
    import keras

    def reset(epoch, logs):
        model = callback.model
        model.set_weights([0 * w for w in model.get_weights()])

    callback = keras.callbacks.LambdaCallback(on_epoch_end=reset)
    done, _ = fitted(drawn_rows, functools.partial(net, optimizer="sgd"), callbacks=[callback])
    assert all(not w.any() for w in weights_of(done))
    # from nothing but zeros the network finds means alone
    second = done.state.position.history[1]["logs"]["loss"]
    assert second == pytest.approx(np.var(np.concatenate([s["y"] for s in drawn_rows])), rel=0.5)


# -- the Estimator --------------------------------------------------------------------------------


COLUMNS = {"feature_cols": ["x"], "label_cols": ["y"]}
ROWS = 20


def estimator(creator=net, **options):
    given = {"model_creator": creator, "workers_per_node": 2, "backend": "bigdl"}
    return Estimator.from_keras(**{**given, **options})


def arrays():
    (shard,) = rows_of([ROWS], dtype="float32")
    return shard["x"], shard["y"]


@pytest.fixture(scope="module")
def frame(orca_spark):
    rows = [(x.tolist(), float(y)) for x, y in zip(*arrays(), strict=True)]
    return orca_spark.createDataFrame(rows, "x array<float>, y float").cache()


@pytest.fixture(scope="module")
def trained(frame):
    """An Estimator after two fits on a DataFrame, and what the first one returned."""
    # by barrier stages fewer processes have to import TensorFlow
    est, fit = estimator(adam), {"batch_size": 6, "transport": "barrier", **COLUMNS}
    found = est.fit(frame, epochs=2, seed=1, profile=True, **fit)
    est.fit(frame, epochs=1, **fit)
    return est, found


@pytest.mark.slow
def test_fit_returns_the_figures_of_all_rows(trained):
    _, found = trained
    assert found["epochs"] == 2
    assert found["steps"] == 4
    assert len(found["loss"]) == len(found["mae"]) == 2
    assert found["loss"][1] < found["loss"][0]
    assert {"epoch_s", "compute_s", "sync_s", "bytes_per_step"} <= found["profile"][0].keys()
    assert all(min(entry["peak_memory_bytes"]) > 2**20 for entry in found["profile"])


def test_a_file_has_the_trained_model_and_its_optimizer(trained, tmp_path):
    est, _ = trained
    other = estimator()
    other.load(est.save(str(tmp_path / "model.keras")))
    assert all(map(np.array_equal, weights(est), weights(other)))
    assert int(array_of(other.get_model().optimizer.iterations)) == 12


@pytest.mark.slow
def test_validation_evaluation_and_prediction_see_the_trained_weights(frame):
    est = estimator(adam)
    found = est.fit(
        frame, epochs=2, batch_size=6, seed=1, validation_data=frame, validation_freq=2, **COLUMNS
    )
    assert len(found["loss"]) == 2
    known = est.evaluate(frame, **COLUMNS)
    assert found["val_loss"] == pytest.approx([known["validation_loss"]], rel=1e-5)
    assert found["val_mae"] == pytest.approx([known["validation_mae"]], rel=1e-5)
    expected = est.get_model().predict(arrays()[0], verbose=0)
    predicted = [row["prediction"] for row in est.predict(frame, feature_cols="x").collect()]
    assert np.array(predicted) == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_barrier_stages_make_the_same_bits_and_resume_goes_on(orca_spark, tmp_path):
    fit = {"batch_size": 6, "seed": 2}
    by_shuffle = estimator(adam)
    found = by_shuffle.fit(arrays(), epochs=2, group_size=3, **fit)
    options = {"transport": "barrier", "resume": "auto", **fit}
    estimator(adam, model_dir=str(tmp_path)).fit(arrays(), epochs=1, **options)
    by_barrier = estimator(adam, model_dir=str(tmp_path))
    by_barrier.fit(arrays(), epochs=2, **options)
    assert all(map(np.array_equal, weights(by_shuffle), weights(by_barrier)))
    other = estimator(adam, backend="spark")
    known = other.fit(arrays(), epochs=2, **fit)
    for own, expected in zip(weights(by_shuffle), weights(other), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-5)
    assert found["loss"] == pytest.approx(known["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["xshards", "loader", "pandas"])
def test_input_of_any_kind_trains(frame, kind):
    data, columns = frame.toPandas(), COLUMNS
    if kind == "xshards":
        x, y = arrays()
        data, columns = XShards.partition({"x": x, "y": y}, num_shards=3), {}
    elif kind == "loader":
        data, columns = loader(), {}
    found = estimator(adam).fit(data, epochs=3, batch_size=6, seed=1, **columns)
    assert found["loss"][-1] < found["loss"][0]


def weights(est):
    return est.get_model().get_weights()


def loader():
    import torch

    x, y = (torch.from_numpy(values) for values in arrays())
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=3)


# -- what cannot work -----------------------------------------------------------------------------


def dataset(config, batch_size):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(arrays()).batch(batch_size)


def with_optimizer(name, **options):
    def creator(config):
        import keras

        return net(config, optimizer=getattr(keras.optimizers, name)(**options))

    return creator


def shapeless(config):
    import keras

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def normalized(config):
    import keras

    layers = [keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("sgd", "mse")
    return model


def with_kernel(**options):
    def creator(config):
        import keras

        layer = keras.layers.Dense(1, **{k: v() for k, v in options.items()})
        model = keras.Sequential([keras.Input((4,)), layer])
        model.compile("sgd", "mse")
        return model

    return creator


def bounded():
    import keras

    return keras.constraints.MaxNorm(2.0)


def of_batches():
    import keras

    class PerBatch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            pass

    return PerBatch()


def writer():
    import keras

    return keras.callbacks.ModelCheckpoint("m.keras", save_freq=10)


WRONG = {
    "optimizer": (with_optimizer("Lion"), {}, "Lion cannot be cut.*SGD, Adam, AdamW, Adagrad, RMS"),
    "accumulation": (
        with_optimizer("SGD", gradient_accumulation_steps=3),
        {},
        "batch_size that is 3 times as large",
    ),
    "no shape": (shapeless, {}, "add a keras.Input"),
    "constraint": (with_kernel(kernel_constraint=bounded), {}, "kernel has a constraint"),
    "float16": (with_kernel(dtype=lambda: "float16"), {}, "float32 weights.*float16"),
    "nothing to train": (with_kernel(trainable=bool), {}, "no trainable weights"),
    "hooks of batches": (net, {"callbacks": of_batches}, "PerBatch has on_train_batch_end"),
    "files of batches": (net, {"callbacks": writer}, "ModelCheckpoint has on_"),
    "transport": (net, {"transport": "pigeon"}, "transport should be one of"),
    "group_size": (net, {"group_size": 0}, "group_size"),
    "no batch size": (net, {"batch_size": None}, "batch_size should be a positive integer"),
    "windows of a loader": (net, {"sampling": "window", "data": loader}, "contiguous rows"),
    "dataset": (net, {"data": lambda: dataset}, "reads rows by index, which a tf.data.Dataset"),
    "too many slices": (
        net,
        {"min_workers": 3, "transport": None},
        "at most the number of workers, 2, got 3",
    ),
    "moments of all": (normalized, {}, "does not support BatchNormalization.*such as"),
    "no rows": (net, {"data": lambda: (np.zeros((0, 4)), np.zeros(0))}, "no rows"),
}


@pytest.mark.parametrize(("creator", "fit", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_work_is_refused(orca_spark, creator, fit, message):
    given = {"data": arrays(), "batch_size": 6, "transport": "barrier", **fit}
    given = {k: v() if callable(v) else v for k, v in given.items()}
    with pytest.raises(UsageError, match=message):
        estimator(creator).fit(**given)


def test_options_of_the_layer_are_for_its_backend(orca_spark):
    with refused("unsupported", "backend='bigdl'"):
        estimator(backend="spark").fit(arrays(), transport="barrier")


# -- the other backend of Keras -------------------------------------------------------------------


@pytest.mark.slow
def test_torch_computes_the_same():
    """A process has one backend of Keras, so these tests run again in one of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    ended = subprocess.run(
        [*command, "-k", "updates_of_keras or equal or compiled or norms or inputs or merged"],
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert " passed" in ended.stdout
