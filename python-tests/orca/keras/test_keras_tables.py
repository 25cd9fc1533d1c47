"""Embeddings of Keras in slices on the workers: they train as ordinary ones do."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import ray_models
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.keras import GrowingEmbedding, ShardedEmbedding
from bigdl.orca.learn.tf2 import Estimator
from bigdl.orca.learn.trigger import SeveralIteration
from bigdl.training.embedding_tables.placement import TablePlacement, table_placement

RNG = np.random.default_rng(0)
IDS = np.stack([RNG.integers(0, 30, 61), RNG.integers(0, 10, 61)], 1).astype("int32")
TARGETS = (IDS.sum(1, keepdims=True) % 5).astype("float32")
OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
}


def creator(config):
    """A model of two tables; with `first`, of ordinary ones with these weights."""
    keras.utils.set_random_seed(1)
    ids = keras.Input((2,), dtype="int32")
    if "first" in config:
        both = keras.layers.Embedding(40, 3)(ids + keras.ops.convert_to_tensor([[0, 30]]))
        items = keras.layers.Embedding(10, 2)(9 - ids[:, 1])
    else:
        options = {**config.get("table", {})}
        both, items = tables_of(config.get("growing"), options, ids)
    hidden = keras.layers.Concatenate()([keras.layers.Flatten()(both), items])
    hidden = keras.layers.Dropout(config.get("dropout", 0.0))(hidden)
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile(OPTIMIZERS[config.get("optimizer", "SGD")](), "mse")
    if "first" in config:
        model.set_weights(config["first"])
    return model


def tables_of(growing, options, ids):
    """Rows of two tables for ids; where they grow, all first values are zero, and ids are large."""
    if growing is None:
        zeros = {"embeddings_initializer": options.pop("init")} if "init" in options else {}
        both = ShardedEmbedding([30, 10], 3, **zeros, **options)(ids)
        more = {"embeddings_initializer": "normal"} | zeros
        return both, ShardedEmbedding(10, 2, **more, **options)(9 - ids[:, 1])
    options = {"embeddings_initializer": options.pop("init", "zeros"), **growing, **options}
    both = GrowingEmbedding(3, fields=2, **options)(ids * 7919 - 100_000)
    return both, GrowingEmbedding(2, **options)(9 - ids[:, 1])


def estimator_of(workers, model_dir, backend="local", **config):
    return Estimator.from_keras(
        model_creator=creator,
        config=config,
        backend=backend,
        workers_per_node=workers,
        model_dir=None if model_dir is None else str(model_dir),
    )


def fit(estimator, epochs=2, **options):
    return estimator.fit((IDS, TARGETS), epochs=epochs, batch_size=8, seed=3, verbose=0, **options)


def weights_of(estimator, *, set_weights=True):
    return estimator.get_model(set_weights=set_weights).get_weights()


def assert_equal(some, others, tolerance=1e-6):
    assert [each.shape for each in some] == [each.shape for each in others]
    for one, other in zip(some, others, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=0)


@pytest.fixture(scope="module")
def ordinary():
    """Figures and weights of ordinary embeddings, by the number of workers and the optimizer."""
    known = {}

    def of(workers, optimizer):
        if (workers, optimizer) not in known:
            first = weights_of(estimator_of(1, None), set_weights=False)
            estimator = estimator_of(workers, None, first=first, optimizer=optimizer)
            known[workers, optimizer] = fit(estimator), weights_of(estimator)
        return known[workers, optimizer]

    return of


@pytest.mark.slow_cases("1-Adagrad", "1-SGD", "2-SGD", "3-Adagrad", "3-SGD")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_they_learn_as_ordinary_embeddings(ordinary, tmp_path, workers, optimizer):
    figures, weights = ordinary(workers, optimizer)
    estimator = estimator_of(workers, tmp_path, optimizer=optimizer)
    np.testing.assert_allclose(fit(estimator)["loss"], figures["loss"], rtol=1e-6)
    assert_equal(weights_of(estimator), weights)
    # so do what reads the rows from their owners, and what has them all
    model = estimator.get_model()
    loss = model.evaluate(IDS, TARGETS, verbose=0)
    assert estimator.evaluate((IDS, TARGETS))["validation_loss"] == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(estimator.predict(IDS), model.predict(IDS, verbose=0), atol=1e-6)


@pytest.mark.slow_cases("spark")
@pytest.mark.parametrize("backend", ["spark", pytest.param("ray", marks=pytest.mark.slow)])
def test_backends_learn_the_same(orca_spark, tmp_path, backend):
    if backend == "ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")
        ray_models.active_ray()
    estimator = estimator_of(2, tmp_path, backend)
    fit(estimator)
    assert_equal(weights_of(estimator), weights_of_local(tmp_path / "local"))


def weights_of_local(folder, **config):
    estimator = estimator_of(2, folder, **config)
    fit(estimator)
    return weights_of(estimator)


@pytest.mark.slow
def test_a_validation_leaves_the_training_as_it_is(ordinary, tmp_path):
    estimator = estimator_of(2, tmp_path)
    figures = fit(estimator, validation_data=(IDS[:3], TARGETS[:3]))
    assert figures["val_loss"][-1] == pytest.approx(
        estimator.evaluate((IDS[:3], TARGETS[:3]))["validation_loss"], rel=1e-6
    )
    assert_equal(weights_of(estimator), ordinary(2, "SGD")[1])


@pytest.mark.slow
def test_more_workers_than_rows_of_a_batch(tmp_path):
    few = IDS[:5], TARGETS[:5]
    results = []
    for workers in (1, 3):
        estimator = estimator_of(workers, tmp_path / str(workers), optimizer="Adagrad")
        estimator.fit(few, epochs=3, batch_size=5, seed=3, verbose=0)
        results.append(weights_of(estimator))
    assert_equal(*results)


@pytest.mark.slow
@pytest.mark.parametrize("table", [{}, {"optimizer": "rowwise_adagrad", "storage": "mmap"}])
def test_a_run_that_is_resumed_equals_one_that_was_not(tmp_path, table):
    config = {"table": table, "dropout": 0.3, "optimizer": "Adagrad"}
    whole = weights_of_local(tmp_path / "whole", **config)
    fit(estimator_of(2, tmp_path / "cut", **config), epochs=1)
    estimator = estimator_of(2, tmp_path / "cut", **config)
    fit(estimator, resume="auto")
    assert_equal(weights_of(estimator), whole, tolerance=0)


@pytest.mark.slow
def test_a_worker_that_is_killed_changes_nothing(tmp_path):
    config = {"optimizer": "Adagrad", "dropout": 0.3}
    whole = weights_of_local(tmp_path / "whole", **config)
    estimator = estimator_of(2, tmp_path / "killed", **config)
    marker = tmp_path / "once"

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 11:
                with contextlib.suppress(FileExistsError):
                    marker.touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)

    fit(estimator, callbacks=[Kill()], checkpoint_trigger=SeveralIteration(3))
    assert marker.exists()
    assert_equal(weights_of(estimator), whole, tolerance=0)


@pytest.mark.slow
def test_another_number_of_workers_goes_on(tmp_path):
    few = IDS[:8], TARGETS[:8]  # one batch, so that workers have the same ones
    results = []
    for first, second in ((1, 1), (3, 2)):
        for workers, epochs in ((first, 2), (second, 4)):
            estimator = estimator_of(workers, tmp_path / str(first), optimizer="Adagrad")
            estimator.fit(few, epochs, batch_size=8, seed=3, verbose=0, resume="auto")
        results.append(weights_of(estimator))
    assert_equal(*results)


@pytest.mark.slow
def test_adam_is_that_of_keras_where_all_rows_are_read(tmp_path):
    ids = np.arange(12, dtype="int32")[:, None]
    rows = ids, ids.astype("float32") % 3

    def model(config):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((1,), dtype="int32")
        table = keras.layers.Flatten()(ShardedEmbedding(12, 2)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(table))
        model.compile(keras.optimizers.Adam(0.05), "mse")
        return model

    alone = model({})
    alone.fit(*rows, epochs=5, batch_size=12, shuffle=False, verbose=0)
    estimator = Estimator.from_keras(
        model_creator=model, backend="local", workers_per_node=2, model_dir=str(tmp_path)
    )
    estimator.fit(rows, epochs=5, batch_size=12, verbose=0)
    assert_equal(weights_of(estimator), alone.get_weights(), tolerance=1e-5)


@pytest.mark.slow
def test_files_have_the_whole_table(tmp_path):
    estimator = estimator_of(2, tmp_path / "models", optimizer="Adagrad")
    fit(estimator)
    weights = weights_of(estimator)
    estimator.save(str(tmp_path / "model.keras"))
    assert_equal(keras.saving.load_model(tmp_path / "model.keras").get_weights(), weights, 0)
    estimator.save_checkpoint(str(tmp_path / "state"))
    newest = Estimator.latest_checkpoint(str(tmp_path / "models"))
    further = []
    for path in (newest, str(tmp_path / "state")):
        other = estimator_of(3, tmp_path / "others", optimizer="Adagrad")
        other.load_checkpoint(path)
        assert_equal(weights_of(other), weights, 0)
        loss = other.evaluate((IDS, TARGETS))["validation_loss"]
        assert loss == pytest.approx(estimator.evaluate((IDS, TARGETS))["validation_loss"])
        fit(other)
        further.append(weights_of(other))
    assert_equal(*further, 0)  # rows have what their optimizer kept of them
    instance = Estimator.from_keras(
        model=keras.saving.load_model(tmp_path / "model.keras"),
        backend="local",
        workers_per_node=2,
        model_dir=str(tmp_path / "instance"),
    )
    assert_equal(weights_of(instance), weights, 0)
    assert instance.evaluate((IDS, TARGETS))["validation_loss"] == pytest.approx(loss)
    assert fit(instance, epochs=8)["loss"][-1] < loss


@pytest.mark.slow
def test_large_tables_are_predicted_from_their_files(tmp_path, monkeypatch):
    estimator = estimator_of(2, tmp_path)
    fit(estimator)
    expected = estimator.predict(IDS)
    monkeypatch.setattr("bigdl.training.slices.BROADCAST", 0)
    estimator.shutdown()
    np.testing.assert_array_equal(estimator.predict(IDS), expected)
    packed, _ = estimator.packed_model(IDS)
    assert len(packed) > 40 * 3 * 4  # it outlives the checkpoint


BACKEND = """
    import sys
    sys.path.insert(0, {tests!r})
    import keras
    import numpy as np
    from test_keras_tables import (
        IDS, assert_equal, estimator_of, fit, weights_of, weights_of_zeros
    )
    for optimizer in ("SGD", "Adagrad"):
        first = weights_of(estimator_of(1, None), set_weights=False)
        ordinary = estimator_of(2, None, first=first, optimizer=optimizer)
        estimator = estimator_of(2, {folder!r}, optimizer=optimizer)
        fit(ordinary), fit(estimator)
        assert_equal(weights_of(estimator), weights_of(ordinary))
    growing = estimator_of(2, {folder!r} + "-growing", growing={{}}, optimizer="Adagrad")
    fit(growing)
    assert_equal(weights_of(growing)[2:], weights_of_zeros({folder!r} + "-zeros")[2:])
    np.testing.assert_allclose(
        growing.predict(IDS), growing.get_model().predict(IDS, verbose=0), atol=1e-6
    )
    print(keras.backend.backend(), "equals")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_other_backends_of_keras(tmp_path, backend):
    if backend == "jax":
        pytest.importorskip("jax")
    program = tmp_path / "program.py"
    text = BACKEND.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "models"))
    program.write_text("\n".join(line[4:] for line in text.splitlines()))
    paths = [*sys.path, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{backend} equals" in done.stdout


# Tables that grow --------------------------------------------------------------------------------


def weights_of_zeros(folder):
    """The weights of a model whose tables begin with zeros."""
    estimator = estimator_of(2, folder, table={"init": "zeros"}, optimizer="Adagrad")
    fit(estimator)
    return weights_of(estimator)


def rows_of(model, layer, ids):
    """Rows of a growing table, as a model has them all."""
    table = next(each for each in model.layers if each.name.startswith(layer))
    return keras.ops.convert_to_numpy(table(np.asarray(ids)))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_table_that_grows_learns_as_one_that_has_all_rows(tmp_path, workers):
    estimator = estimator_of(workers, tmp_path / "growing", growing={}, optimizer="Adagrad")
    figures = fit(estimator)
    whole = estimator_of(workers, tmp_path / "all", table={"init": "zeros"}, optimizer="Adagrad")
    np.testing.assert_allclose(figures["loss"], fit(whole)["loss"], rtol=1e-6)
    model, other = estimator.get_model(), whole.get_model()
    assert_equal(model.get_weights()[2:], other.get_weights()[2:])
    both = rows_of(model, "growing", np.stack([np.arange(10)] * 2, 1) * 7919 - 100_000)
    users, items = np.split(other.get_weights()[0], [30])
    is_read = np.isin(np.arange(10), IDS[:, 0])
    np.testing.assert_allclose(both[:, 0], users[:10] * is_read[:, None], atol=1e-6)
    np.testing.assert_allclose(
        both[:, 1], items * np.isin(np.arange(10), IDS[:, 1])[:, None], atol=1e-6
    )
    loss = model.evaluate(IDS, TARGETS, verbose=0)
    assert estimator.evaluate((IDS, TARGETS))["validation_loss"] == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(estimator.predict(IDS), model.predict(IDS, verbose=0), atol=1e-6)


GROWTH = {"admit_after": 3, "expire_after": 5, "storage": "mmap", "optimizer": "rowwise_adagrad"}


@pytest.mark.slow
def test_ids_come_and_go_as_they_do_in_one_process(tmp_path):
    found = []
    for workers in (1, 2):
        estimator = estimator_of(
            workers, tmp_path / str(workers), growing=GROWTH, table={"init": "uniform"}
        )
        few = IDS[:8], TARGETS[:8]  # one batch, so that workers have the same ones
        for rows in (few, (IDS[8:16], TARGETS[8:16])):
            estimator.fit(rows, epochs=4, batch_size=8, seed=3, verbose=0)
        tables = [each for each in estimator.get_model().layers if "growing" in each.name]
        found.append([each.to_arrow(field=0).to_pydict() for each in tables])
        assert_equal(*(weights_of(estimator)[2:], weights_of(estimator)[2:]))
    for one, other in zip(*found, strict=True):
        assert one["id"] == other["id"]
        np.testing.assert_allclose(one["vector"], other["vector"], atol=1e-6)
    ids = found[0][0]["id"]
    assert 0 < len(ids) <= len(np.unique(IDS[:16, 0]))


@pytest.mark.slow
def test_a_growing_table_is_resumed_to_the_bit(tmp_path):
    config = {"growing": GROWTH, "table": {"init": "uniform"}, "dropout": 0.3}
    whole = estimator_of(2, tmp_path / "whole", **config)
    fit(whole)
    fit(estimator_of(2, tmp_path / "cut", **config), epochs=1)
    estimator = estimator_of(2, tmp_path / "cut", **config)
    fit(estimator, resume="auto")
    np.testing.assert_array_equal(estimator.predict(IDS), whole.predict(IDS))


@pytest.mark.slow
def test_files_have_the_whole_growing_table(tmp_path, monkeypatch):
    config = {"growing": {}, "table": {"init": "uniform"}, "optimizer": "Adagrad"}
    estimator = estimator_of(2, tmp_path / "models", **config)
    fit(estimator)
    expected = estimator.predict(IDS)
    estimator.save(str(tmp_path / "model.keras"))
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(IDS, verbose=0), expected, atol=1e-6)
    estimator.save_checkpoint(str(tmp_path / "state"))
    further = []
    for path in (Estimator.latest_checkpoint(str(tmp_path / "models")), str(tmp_path / "state")):
        other = estimator_of(3, tmp_path / "others", **config)
        other.load_checkpoint(path)
        np.testing.assert_allclose(other.predict(IDS), expected, atol=1e-6)
        fit(other)
        further.append(other.predict(IDS))
    np.testing.assert_allclose(*further, atol=1e-6)  # rows have what their optimizer kept of them
    instance = Estimator.from_keras(
        model=loaded, backend="local", workers_per_node=2, model_dir=str(tmp_path / "instance")
    )
    np.testing.assert_allclose(instance.predict(IDS), expected, atol=1e-6)
    loss = estimator.evaluate((IDS, TARGETS))["validation_loss"]
    assert instance.evaluate((IDS, TARGETS))["validation_loss"] == pytest.approx(loss)
    assert fit(instance, epochs=8)["loss"][-1] < loss
    monkeypatch.setattr("bigdl.training.slices.BROADCAST", 0)
    np.testing.assert_allclose(estimator.predict(IDS), expected, atol=1e-6)


def test_integers_that_jax_would_cut_are_refused():
    pytest.importorskip("jax")
    from bigdl.training.keras.backends import jax_array

    narrow = np.array([[-(1 << 31), (1 << 31) - 1]])
    assert jax_array(narrow) is narrow
    with refused("data-value", "32", "0", "2147483648"):
        jax_array(np.array([0, 1 << 31]))


def test_the_parameter_layer_refuses_a_table_that_would_not_grow(orca_spark, tmp_path):
    estimator = estimator_of(2, tmp_path, "bigdl", growing={})
    with refused("unsupported", "backend='bigdl'"):
        fit(estimator)


# The layer by itself ----------------------------------------------------------------------------


def test_elsewhere_it_is_an_ordinary_embedding():
    table = ShardedEmbedding([3, 2], 4, mask_zero=True)
    rows = table(np.array([[2, 1], [0, 0]]))
    assert rows.shape == (2, 2, 4)
    (weights,) = table.get_weights()
    np.testing.assert_array_equal(rows[0], weights[[2, 4]])
    assert table.compute_mask(np.array([0, 3])).numpy().tolist() == [False, True]
    copy = ShardedEmbedding.from_config(table.get_config())
    assert copy.get_config() == table.get_config()


def test_rows_of_a_field_as_arrow():
    table = ShardedEmbedding([3, 2], 4)
    with refused("unsupported", "get_model"):
        table.to_arrow()
    table.build()
    found = table.to_arrow("item", "row", field=1)
    assert found.column_names == ["item", "row"]
    assert found["item"].to_pylist() == [0, 1]
    np.testing.assert_array_equal(found["row"].to_pylist(), table.get_weights()[0][3:])
    with table_placement(TablePlacement()):
        of_worker = ShardedEmbedding(3, 4)
        of_worker.build()
    with refused("unsupported"):
        of_worker.to_arrow()


def test_first_values_do_not_depend_on_the_number_of_workers(monkeypatch):
    monkeypatch.setattr("bigdl.training.embedding_tables.sharded.CHUNK_ROWS", 4)

    def rows(rank, size):
        keras.utils.set_random_seed(7)
        with table_placement(TablePlacement(rank, size)):
            table = ShardedEmbedding(11, 3)
            table.build()
        assert table.embeddings.shape == (0, 3)
        return table.sharded_rows.table.weight.detach().numpy()

    whole = rows(0, 1)
    assert len(np.unique(whole, axis=0)) == 11  # chunks have values of their own
    assert np.abs(whole).max() <= 0.05
    for rank in range(3):
        np.testing.assert_array_equal(rows(rank, 3), whole[rank::3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_dim": 0}, ("argument-value", "input_dim")),
        ({"input_dim": []}, ("argument-value",)),
        ({"output_dim": 0}, ("argument-value", "output_dim")),
        ({"optimizer": "rmsprop"}, ("argument-value", "rowwise_adagrad")),
        ({"learning_rate": 0}, ("argument-value", "learning_rate")),
        ({"storage": "disk"}, ("argument-value",)),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, message):
    with refused(*message):
        ShardedEmbedding(**{"input_dim": 3, "output_dim": 2, **arguments})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GrowingEmbedding(0), "output_dim"),
        (lambda: GrowingEmbedding(2, fields=0), "fields"),
        (lambda: GrowingEmbedding(2, admit_after=0), "admit_after"),
        (lambda: GrowingEmbedding(2, expire_after=0), "expire_after"),
        (lambda: GrowingEmbedding(2, dtype="float16")(np.array([1])), "float32 or float64"),
    ],
)
def test_wrong_growing_tables_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_a_growing_table_elsewhere_reads_what_it_has():
    table = GrowingEmbedding(2, fields=2, mask_zero=True)
    assert not keras.ops.convert_to_numpy(table(np.array([[1 << 40, -3]]))).any()
    assert table.to_arrow(field=1).num_rows == 0
    copy = GrowingEmbedding.from_config(table.get_config())
    assert copy.get_config() == table.get_config()


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), "without momentum"),
        (lambda: keras.optimizers.RMSprop(), "the model's optimizer is RMSprop"),
        (lambda: keras.optimizers.SGD(0.1, clipnorm=1.0), "clipnorm of the model's optimizer"),
        (
            lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
            "gradient_accumulation_steps",
        ),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "bfloat16"),
    ],
)
def test_optimizers_that_rows_cannot_follow_are_refused(optimizer, message):
    with table_placement(TablePlacement()):
        table = ShardedEmbedding(3, 2)
        table.build()
    with pytest.raises(UsageError, match=message):
        table.table_optimizer(optimizer())


def test_rows_may_have_an_optimizer_of_their_own():
    with table_placement(TablePlacement()):
        table = ShardedEmbedding(3, 2, optimizer="rowwise_adagrad", learning_rate=0.3)
        table.build()
    optimizer = table.table_optimizer(keras.optimizers.RMSprop(clipnorm=1.0))
    assert type(optimizer).__name__ == "RowwiseAdagrad"
    assert optimizer.param_groups[0]["lr"] == 0.3


@pytest.mark.slow
def test_what_does_not_go_with_them_is_refused(tmp_path):
    with pytest.raises(UsageError, match="needs model_dir="):
        fit(estimator_of(2, None))
    stopping = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    with pytest.raises(UsageError, match="restore_best_weights"):
        fit(estimator_of(2, tmp_path), callbacks=[stopping])
    saving = keras.callbacks.ModelCheckpoint(str(tmp_path / "m.keras"))
    with pytest.raises(UsageError, match="cannot save the model"):
        fit(estimator_of(2, tmp_path), callbacks=[saving])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_an_id_that_is_not_there_is_told(tmp_path, workers):
    estimator = estimator_of(workers, tmp_path)
    ids = IDS.copy()
    ids[-1] = 30, 0
    with refused("data-value", "30"):
        estimator.fit((ids, TARGETS), epochs=1, batch_size=8, verbose=0)
    fit(estimator_of(workers, tmp_path / "again"))  # nothing is left of it
