"""The Keras Estimator on Spark: its verbs, its inputs, and what survives of a training."""

import os
import signal

import numpy as np
import pytest
from refusals import refused

from bigdl.common.errors import UsageError, WorkerError
from bigdl.orca.data import XShards
from bigdl.orca.data.tf.data import Dataset
from bigdl.orca.learn.tf2 import Estimator
from bigdl.orca.learn.trigger import SeveralIteration

# every process that meets Keras first imports it, which takes long on a busy machine
pytestmark = pytest.mark.timeout(900)

ROWS, BATCH = 44, 8
COLUMNS = {"feature_cols": ["x"], "label_cols": ["y"]}


def net(config):
    import keras

    dropout = keras.layers.Dropout(config.get("dropout", 0.0))
    dense = keras.layers.Dense(6, activation="tanh")
    model = keras.Sequential([keras.Input((4,)), dense, dropout, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(config.get("lr", 0.05)), "mse", metrics=["mae"])
    return model


def two_by_two(config):
    """Two inputs by name and two outputs."""
    import keras

    user, item = (keras.Input((), dtype="int32", name=n) for n in ("user", "item"))
    tables = keras.layers.Embedding(10, 3), keras.layers.Embedding(10, 3)
    both = keras.layers.Concatenate()([t(i) for t, i in zip(tables, (user, item), strict=True)])
    score = keras.layers.Dense(1, name="score")(both)
    kind = keras.layers.Dense(3, activation="softmax", name="kind")(both)
    model = keras.Model({"user": user, "item": item}, [score, kind])
    model.compile("adam", ["mse", "sparse_categorical_crossentropy"], metrics=["mae", "accuracy"])
    return model


def estimator(creator=net, **options):
    given = {"model_creator": creator, "workers_per_node": 2, "backend": "spark"}
    return Estimator.from_keras(**{**given, **options})


def weights(est):
    return est.get_model().get_weights()


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype("float32")
    return {
        "x": x,
        "y": (x @ np.array([1, 2, -1, 0.5], "float32") + 0.3).astype("float32"),
        "user": rng.integers(0, 10, ROWS).astype("int32"),
        "item": rng.integers(0, 10, ROWS).astype("int32"),
        "kind": rng.integers(0, 3, ROWS).astype("int32"),
    }


@pytest.fixture(scope="module")
def frame(orca_spark, rows):
    columns = [rows[k].tolist() for k in ("x", "y", "user", "item", "kind")]
    schema = "x array<float>, y float, user int, item int, kind int"
    return orca_spark.createDataFrame(list(zip(*columns, strict=True)), schema).cache()


@pytest.fixture(scope="module")
def trained(frame):
    """An Estimator after a fit of three epochs, and what the fit returned."""
    est = estimator()
    found = est.fit(
        frame, epochs=3, batch_size=BATCH, validation_data=frame, seed=1, profile=True, **COLUMNS
    )
    return est, found


@pytest.mark.slow
def test_fit_returns_lists_of_figures(trained):
    _, found = trained
    assert found["epochs"] == 3
    assert found["steps"] == -(-ROWS // BATCH)
    for name in ("loss", "mae", "val_loss", "val_mae"):
        assert len(found[name]) == 3
    assert found["loss"][-1] < found["loss"][0]
    memory = [entry["peak_memory_bytes"] for entry in found["profile"]]
    assert all(len(each) == 2 and min(each) > 2**20 for each in memory)


@pytest.mark.slow
def test_evaluation_is_that_of_the_last_validation(trained, frame):
    est, found = trained
    figures = est.evaluate(frame, **COLUMNS)
    assert set(figures) == {"validation_loss", "validation_mae"}
    assert figures["validation_loss"] == pytest.approx(found["val_loss"][-1], rel=1e-5)


@pytest.mark.parametrize("form", ["frame", "pandas", "dict shards", "arrays", "parquet"])
def test_every_kind_of_input_gives_the_same_figures(trained, frame, rows, form, tmp_path):
    est, _ = trained
    expected = est.evaluate(frame, **COLUMNS)
    data, columns = frame, COLUMNS
    xy = {"x": rows["x"], "y": rows["y"]}
    if form == "pandas":
        data = frame.toPandas()
    elif form == "dict shards":
        data, columns = XShards.partition(xy, 3), {}
    elif form == "arrays":
        data, columns = (rows["x"], rows["y"]), {}
    elif form == "parquet":
        data = str(tmp_path / "rows.parquet")
        frame.write.parquet(data)
    assert est.evaluate(data, **columns) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_predictions_are_those_of_the_model(trained, frame, rows):
    est, _ = trained
    expected = est.get_model().predict(rows["x"], verbose=0)
    found = est.predict(frame, feature_cols="x").collect()
    assert [tuple(row.x) for row in found] == [tuple(x) for x in rows["x"].tolist()]
    assert np.array([row.prediction for row in found]) == pytest.approx(expected, abs=1e-6)
    assert est.predict(rows["x"]) == pytest.approx(expected, abs=1e-6)
    shards = est.predict(XShards.partition({"x": rows["x"]}, 3)).collect()
    joined = np.concatenate([shard["prediction"] for shard in shards])
    assert joined == pytest.approx(expected, abs=1e-6)


def ids(config):
    import keras

    item = keras.Input((), dtype="int64", name="item")
    text = keras.layers.StringLookup(vocabulary=["a", "b"], invert=True)(item % 3)
    outputs = {"next": item + 2, "share": keras.ops.cast(item, "float64") / 3, "text": text}
    return keras.Model(item, outputs)


@pytest.mark.slow
def test_outputs_keep_their_dtypes_and_inputs_theirs():
    est = Estimator.from_keras(model_creator=ids, backend="local")
    for rows in (np.array([16777215, 2**40 + 1]), np.array([4.0, 5.0]), np.array([], int)):
        found = est.predict(rows)
        assert [array.dtype for array in found.values()] == [np.int64, np.float64, object]
        assert found["next"].tolist() == [int(row) + 2 for row in rows]
    assert est.predict(np.array([1, 2]))["text"].tolist() == ["a", "b"]
    for row in (1.5, 2.0**40):
        with refused("data-value", "'item'", "int64", "1"):
            est.predict(np.array([row, 2.0]))


@pytest.mark.slow
def test_a_function_of_sql_and_a_packed_model_predict_the_same(trained, frame):
    est, _ = trained
    expected = est.predict(frame, feature_cols="x").collect()
    score = est.as_udf("x", sample=frame)
    given = frame.select("x", score("x").alias("prediction")).collect()
    assert [row.prediction for row in given] == [list(row.prediction) for row in expected]
    with refused("unsupported", "accelerate='openvino_fp32'"):
        est.as_udf("x", accelerate="openvino_fp32", sample=frame)
    data, options = est.packed_model(frame, feature_cols="x")
    assert list(options.feature_cols) == ["x"]
    assert equal(weights(type(est).of_packed_model(data, "local")), weights(est))


@pytest.mark.slow
def test_a_stream_gets_the_predictions_of_a_frame(trained, frame, orca_spark, tmp_path):
    est, _ = trained
    rows = frame.select("x").limit(4)
    rows.write.parquet(str(tmp_path / "rows"))
    stream = orca_spark.readStream.schema(rows.schema).parquet(str(tmp_path / "rows"))
    answered = est.predict_stream(stream, feature_cols="x").writeStream
    query = answered.format("memory").queryName("answers").start()
    query.processAllAvailable()
    query.stop()
    expected = est.predict(rows, feature_cols="x").collect()
    assert sorted(orca_spark.table("answers").collect()) == sorted(expected)


@pytest.mark.slow
def test_another_fit_goes_on(frame):
    options = {"batch_size": BATCH, **COLUMNS}
    once, twice = estimator(config={"dropout": 0.5}), estimator(config={"dropout": 0.5})
    whole = once.fit(frame, epochs=3, seed=3, **options)
    first = twice.fit(frame, epochs=2, seed=3, **options)
    then = twice.fit(frame, epochs=1, **options)
    assert first["loss"] + then["loss"] == whole["loss"]
    assert equal(weights(once), weights(twice))


@pytest.mark.slow
def test_inputs_by_name_and_two_outputs(frame, rows):
    est = estimator(two_by_two)
    columns = {"feature_cols": ["user", "item"], "label_cols": ["y", "kind"]}
    found = est.fit(frame, epochs=1, batch_size=BATCH, seed=1, **columns)
    assert "kind_accuracy" in found
    model = est.get_model()
    score, kind = model.predict({n: rows[n] for n in ("user", "item")}, verbose=0)
    out = est.predict(frame, feature_cols=["user", "item"], output_cols=["s", "k"]).collect()
    assert np.array([row.s for row in out]) == pytest.approx(score, abs=1e-6)
    assert np.array([row.k for row in out]) == pytest.approx(kind, abs=1e-6)


def named_outputs(config):
    """Two outputs in a dict whose keys are not in alphabetical order."""
    import keras

    x = keras.Input((4,))
    heads = {name: keras.layers.Dense(1, name=name)(x) for name in config["outputs"]}
    model = keras.Model(x, heads)
    model.compile("sgd", dict.fromkeys(heads, "mse"))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [["y", "user"], ["second", "first"]])
def test_targets_belong_to_the_outputs_by_name_or_in_their_order(frame, rows, outputs):
    est = estimator(named_outputs, config={"outputs": outputs})
    labels = ["user", "y"] if "y" in outputs else ["y", "user"]
    found = est.evaluate(frame, feature_cols=["x"], label_cols=labels)
    model = est.get_model()
    predicted = model.predict(rows["x"], verbose=0)
    expected = sum(
        np.mean((predicted[output][:, 0] - rows[column]) ** 2)
        for output, column in zip(outputs, ["y", "user"], strict=True)
    )
    assert found["validation_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_rows_weigh_what_their_column_says(frame):
    doubled = frame.selectExpr("x", "y", "if(kind = 0, 2.0, 1.0) as w")
    repeated = frame.select("x", "y").union(frame.where("kind = 0").select("x", "y"))
    est = estimator()
    weighted = est.evaluate(doubled, weight_col="w", **COLUMNS)["validation_loss"]
    plain = est.evaluate(repeated, **COLUMNS)["validation_loss"]
    # Keras divides by the number of rows, not by the sum of their weights
    assert weighted * ROWS == pytest.approx(plain * repeated.count(), rel=1e-4)


# -- tf.data ---------------------------------------------------------------------------------------


def numbers(config, batch_size):
    """A dataset that shuffles, in a function."""
    import tensorflow as tf

    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 4)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x.sum(1))).shuffle(30)
    return data.batch(batch_size)


@pytest.mark.slow
def test_a_dataset_is_shared_out_whatever_the_number_of_workers(orca_spark):
    found = []
    for workers in (1, 2):
        est = estimator(workers_per_node=workers)
        figures = est.fit(numbers, epochs=2, batch_size=8, seed=2, validation_data=numbers)
        found.append((figures["loss"] + figures["val_loss"], weights(est)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_dataset_itself_travels_as_its_graph(orca_spark):
    import tensorflow as tf

    est = estimator()
    data = numbers({}, 8).map(lambda x, y: (x, 2 * y)).repeat()
    found = est.fit(data, epochs=2, batch_size=8, steps_per_epoch=3, seed=2)
    assert found["steps"] == 3
    assert len(found["loss"]) == 2
    generated = tf.data.Dataset.from_generator(
        lambda: iter(()), output_signature=(tf.TensorSpec((None, 4)), tf.TensorSpec((None,)))
    )
    with pytest.raises(UsageError, match="pass a function"):
        est.fit(generated)


@pytest.mark.slow
def test_a_dataset_without_an_end_needs_a_number_of_batches(orca_spark):
    def endless(config, batch_size):
        return numbers(config, batch_size).repeat()

    est = estimator()
    for data in (endless, endless({}, 8)):
        with refused("data-endless", "steps_per_epoch"):
            est.fit(data, batch_size=8)
    with refused("data-endless", "validation_steps"):
        est.fit(numbers, batch_size=8, validation_data=endless)
    with refused("data-endless", "num_steps"):
        est.evaluate(endless, batch_size=8)
    found = est.fit(
        endless, batch_size=8, steps_per_epoch=2, validation_data=endless, validation_steps=2
    )
    assert found["steps"] == 2
    assert len(found["val_loss"]) == 1
    assert np.isfinite(est.evaluate(endless, batch_size=8, num_steps=2)["validation_loss"])


@pytest.mark.slow
def test_loaders_of_torch_are_taken_too(trained, frame, rows):
    est, _ = trained

    def creator(config, batch_size):
        import torch

        x, y = (torch.from_numpy(rows[name]) for name in ("x", "y"))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size)

    assert est.evaluate(creator) == pytest.approx(est.evaluate(frame, **COLUMNS), rel=1e-5)
    with refused("function-result", "DataLoader"):
        est.evaluate(lambda config, batch_size: 3)


@pytest.mark.slow
def test_a_worker_may_read_its_own_part(orca_spark):
    def own(config, batch_size):
        import tensorflow as tf

        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        data = numbers(config, 4).unbatch().shard(config["size"], config["rank"])
        return data.batch(4).with_options(options)

    def different(config, batch_size):

        return numbers(config, 4).map(lambda x, y: (x, y + config["rank"]))

    est = estimator()
    found = est.fit(own, epochs=1, batch_size=8, profile=True)
    assert found["steps"] == 4
    with pytest.raises(UsageError, match="different rows"):
        est.fit(different, epochs=1)


@pytest.mark.slow
def test_the_rows_of_an_orca_dataset(orca_spark, rows):
    shards = XShards.partition({k: rows[k] for k in ("user", "item", "y")}, 3)
    data = Dataset.from_tensor_slices(shards).map(
        lambda row: ({"user": row["user"], "item": row["item"]}, (row["y"], row["item"] % 3))
    )
    est = estimator(two_by_two)
    found = est.fit(data, epochs=1, batch_size=BATCH, steps_per_epoch=4)
    assert np.isfinite(found["loss"]).all()
    predicted = est.predict(data).collect()
    assert sum(len(shard["prediction"][0]) for shard in predicted) == ROWS


def test_a_pass_that_goes_on_in_another_order_is_warned_about(rows, tmp_path, caplog):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = str(tmp_path / "rows.parquet")
    pq.write_table(pa.table({"x": list(rows["x"]), "y": rows["y"]}), path)
    est = estimator(backend="local", workers_per_node=1)
    options = {"epochs": 1, "batch_size": BATCH, "steps_per_epoch": 3}
    est.fit({"x": rows["x"] + 1, "y": rows["y"]}, **options)
    est.fit(path, **options, **COLUMNS)  # the saved state has no order of a table
    assert "may repeat or miss rows" in caplog.text
    caplog.clear()
    est.fit(path, **options, **COLUMNS)
    assert "may repeat or miss rows" not in caplog.text


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.slow_cases("folder", "m.keras")
@pytest.mark.parametrize(
    "name",
    ["m.keras", "m.h5", "folder"],
)
def test_a_saved_model_is_loaded_without_its_creator(trained, frame, tmp_path, name):
    import tensorflow as tf

    est, _ = trained
    path = est.save(str(tmp_path / name))
    other = Estimator.from_keras(workers_per_node=2, backend="spark")
    other.load(path)
    assert equal(weights(other), weights(est))
    found, expected = other.evaluate(frame, **COLUMNS), est.evaluate(frame, **COLUMNS)
    if name == "m.h5":  # it names metrics by their functions
        found = dict(zip(expected, found.values(), strict=True))
    assert found == pytest.approx(expected, rel=1e-5)
    with refused("path-exists"):
        est.save(path, overwrite=False)
    if name == "folder":
        served = tf.saved_model.load(path)
        assert served.serve(np.zeros((2, 4), "float32")).shape == (2, 1)


@pytest.mark.slow
def test_weights_and_checkpoints_are_files(trained, frame, tmp_path):
    est, _ = trained
    for name in ("w.h5", "prefix"):
        path = est.save_weights(str(tmp_path / name))
        other = estimator()
        other.load_weights(path)
        assert equal(weights(other), weights(est))
    est.save_checkpoint(str(tmp_path / "checkpoint"))
    other = estimator()
    other.load_checkpoint(str(tmp_path / "checkpoint"))
    more = {"epochs": 1, "batch_size": BATCH, "seed": 1, **COLUMNS}
    then = other.fit(frame, **more)["loss"]
    assert int(other.get_model().optimizer.iterations) == 4 * -(-ROWS // BATCH)
    again = estimator()
    again.load_checkpoint(str(tmp_path / "checkpoint"))
    assert again.fit(frame, **more)["loss"] == then


# -- going on --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.fault
def test_a_run_that_was_killed_equals_one_that_was_not(frame, tmp_path):
    config, options = {"dropout": 0.3}, {"epochs": 3, "batch_size": BATCH, "seed": 4, **COLUMNS}
    marker = tmp_path / "killed"

    def kill():
        import keras

        class Kill(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                at = int(self.model.optimizer.iterations)
                if at == 9 and not marker.exists():
                    marker.write_text("")
                    os.kill(os.getpid(), signal.SIGKILL)

        return Kill()

    whole, killed = estimator(config=config), estimator(config=config)
    expected = whole.fit(frame, **options)
    found = killed.fit(frame, callbacks=[kill()], checkpoint_trigger=SeveralIteration(2), **options)
    assert marker.exists()
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert equal(weights(whole), weights(killed))


@pytest.mark.slow
def test_a_program_that_is_run_again_goes_on(frame, tmp_path):
    options = {"batch_size": BATCH, "seed": 4, "resume": "auto", **COLUMNS}
    expected = estimator(config={"dropout": 0.3})
    whole = expected.fit(frame, epochs=4, batch_size=BATCH, seed=4, **COLUMNS)
    for epochs in (2, 4):
        est = estimator(config={"dropout": 0.3}, model_dir=str(tmp_path))
        found = est.fit(frame, epochs=epochs, **options)
    assert found["loss"] == whole["loss"]
    assert equal(weights(est), weights(expected))
    other = estimator()
    other.load_checkpoint(Estimator.latest_checkpoint(str(tmp_path)))
    assert equal(weights(other), weights(est))


# -- callbacks -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_callbacks_of_keras(frame, tmp_path):
    import keras

    callbacks = [
        keras.callbacks.EarlyStopping("loss", min_delta=1e9, patience=1),
        keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras")),
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 / (1 + epoch)),
    ]
    est = estimator()
    found = est.fit(frame, epochs=9, batch_size=BATCH, callbacks=callbacks, **COLUMNS)
    assert len(found["loss"]) == 2
    assert float(est.get_model().optimizer.learning_rate) == pytest.approx(0.005)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["1.keras", "2.keras", "log.csv"]
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
    saved = keras.saving.load_model(tmp_path / "2.keras")
    assert equal(saved.get_weights(), weights(est))
    assert Estimator.latest_checkpoint(str(tmp_path)) == str(tmp_path / "2.keras")


@pytest.mark.slow
def test_callbacks_write_to_any_url(frame, tmp_path):
    import keras

    callbacks = [
        keras.callbacks.ModelCheckpoint(
            f"file://{tmp_path}/models/{{epoch}}.weights.h5", save_weights_only=True
        ),
        keras.callbacks.CSVLogger(f"file://{tmp_path}/log.csv"),
    ]
    est = estimator()
    est.fit(frame, epochs=2, batch_size=BATCH, callbacks=callbacks, **COLUMNS)
    assert sorted(p.name for p in (tmp_path / "models").iterdir()) == [
        "1.weights.h5",
        "2.weights.h5",
    ]
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
    other = estimator()
    other.load_weights(str(tmp_path / "models" / "2.weights.h5"))
    assert equal(weights(other), weights(est))


@pytest.mark.slow
@pytest.mark.fault
def test_callbacks_go_on_counting_after_a_loss(frame, tmp_path):
    marker = tmp_path / "killed"

    def callbacks():
        import keras

        class Kill(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 2 and not marker.exists():
                    marker.write_text("")
                    os.kill(os.getpid(), signal.SIGKILL)

        # no epoch is ever better than the first one
        return [Kill(), keras.callbacks.EarlyStopping("loss", min_delta=1e9, patience=3)]

    est = estimator()
    found = est.fit(frame, epochs=9, batch_size=BATCH, callbacks=callbacks(), **COLUMNS)
    assert marker.exists()
    assert len(found["loss"]) == 4


@pytest.mark.slow
def test_the_numbers_of_epochs_that_callbacks_see(frame):
    def collect():
        import keras

        class Collect(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                logs["number"] = epoch
                self.model.optimizer.learning_rate.assign(epoch / 100)

        return Collect()

    est = estimator()
    found = est.fit(
        frame,
        epochs=5,
        initial_epoch=3,
        callbacks=[collect()],
        validation_data=frame,
        validation_freq=[5],
        batch_size=BATCH,
        **COLUMNS,
    )
    assert len(found["loss"]) == 2
    assert found["number"] == [3, 4]
    assert len(found["val_loss"]) == 1
    assert float(est.get_model().optimizer.learning_rate) == pytest.approx(0.04)


@pytest.mark.slow
def test_steps_per_epoch_cut_the_rows(frame):
    one, other = estimator(), estimator()
    steps = -(-ROWS // BATCH)
    whole = one.fit(frame, epochs=2, batch_size=BATCH, seed=1, **COLUMNS)
    cut = other.fit(
        frame, epochs=4, batch_size=BATCH, seed=1, steps_per_epoch=steps // 2, **COLUMNS
    )
    assert len(cut["loss"]) == 4
    assert whole["steps"] == steps
    assert equal(weights(one), weights(other)) == (steps % 2 == 0)


# -- what the papers and documents show ------------------------------------------------------------


@pytest.fixture(scope="module")
def ratings(frame, tmp_path_factory):
    """The path of Parquet files of users, items and labels."""
    path = str(tmp_path_factory.mktemp("paper") / "data.parquet")
    frame.selectExpr("user", "item", "kind as label").write.parquet(path)
    return path


@pytest.mark.slow
def test_a_frame_is_fitted_as_the_paper_shows(orca_spark, ratings):
    """Figure 9 of the paper of BigDL 2.0: a DataFrame is the input of a compiled model."""
    from bigdl.orca.learn.tf2 import Estimator

    model = rating_model()
    df = orca_spark.read.parquet(ratings)
    est = Estimator.from_keras(keras_model=model)
    before = model.get_weights()
    stats = est.fit(data=df, feature_cols=["user", "item"], label_cols=["label"])

    assert len(stats["loss"]) == len(stats["accuracy"]) == 1
    assert equal(before, model.get_weights())
    assert not equal(before, weights(est))


@pytest.mark.slow
def test_a_frame_is_predicted_as_the_paper_shows(orca_spark, ratings):
    """Figure 11 of the paper of BigDL 2.0: from Parquet files to predictions."""
    from pyspark.sql import functions as sf

    from bigdl.orca.learn.tf2 import Estimator

    train_df = orca_spark.read.parquet(ratings).withColumn("label", sf.col("label") % 2)
    test_df = orca_spark.read.parquet(ratings).limit(9)
    model = rating_model(kinds=2)
    est = Estimator.from_keras(keras_model=model)
    est.fit(train_df, feature_cols=["user", "item"], label_cols=["label"])
    found = est.predict(test_df, feature_cols=["user", "item"])

    predicted = found.toPandas()
    asked = [predicted[name].to_numpy().reshape(-1, 1) for name in ("user", "item")]
    expected = est.get_model().predict(asked, verbose=0)
    assert np.stack(predicted["prediction"]) == pytest.approx(expected, abs=1e-6)
    assert expected.shape == (9, 2)


def rating_model(kinds=3):
    """A model of users and items as the paper compiles it."""
    from tensorflow import keras

    user, item = (keras.Input((1,), dtype="int32") for _ in range(2))
    tables = [keras.layers.Flatten()(keras.layers.Embedding(10, 4)(each)) for each in (user, item)]
    hidden = keras.layers.Dense(8, activation="relu")(keras.layers.Concatenate()(tables))
    outputs = keras.layers.Dense(kinds, activation="softmax")(hidden)
    model = keras.Model(inputs=[user, item], outputs=outputs)
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def test_an_instance_brings_its_own_classes_along(frame):
    import keras

    class Twice(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    def halved(y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_true - y_pred)) / 2

    model = keras.Sequential([keras.Input((4,)), Twice(), keras.layers.Dense(1)])
    model.compile("sgd", halved, metrics=["mse"])
    est = Estimator.from_keras(model=model, workers_per_node=2)
    found = est.fit(frame, epochs=1, batch_size=BATCH, **COLUMNS)
    assert found["loss"][0] == pytest.approx(found["mse"][0] / 2, rel=1e-5)


def test_compile_args_come_from_a_function(frame):
    def plain(config):
        import keras

        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

    def arguments(config):
        return {"optimizer": "sgd", "loss": "mse"}

    est = estimator(plain, compile_args_creator=arguments)
    assert len(est.fit(frame, epochs=1, **COLUMNS)["loss"]) == 1
    with refused("argument-missing"):
        estimator(plain).fit(frame, **COLUMNS)


def test_a_model_may_learn_its_shapes_from_the_rows(frame, rows):
    def shapeless(config):
        import keras

        model = keras.Sequential([keras.layers.Dense(3, activation="relu"), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    est = estimator(shapeless)
    with refused("model-unbuilt"):
        est.predict(frame, feature_cols="x")
    est.fit(frame, epochs=1, batch_size=BATCH, **COLUMNS)
    expected = est.get_model().predict(rows["x"], verbose=0)
    assert est.predict(rows["x"]) == pytest.approx(expected, abs=1e-6)


# -- wrong inputs ----------------------------------------------------------------------------------

NOTHING = {"model_creator": None}
WRONG = {
    "no model": (NOTHING, {}, "Must provide callable function for model_creator"),
    "batch_size in config": ({"config": {"batch_size": 4}}, {}, "do not specify batch_size"),
    "backend": (
        {"backend": "mpi"},
        {},
        "The backends are .*'bigdl'.*'local'",
    ),
    "cpu binding": ({"cpu_binding": True}, {}, "cpu_binding should not be True"),
    "an instance": ({"model_creator": 3}, {}, "must be a function model_creator"),
    "no model instance": ({**NOTHING, "model": 3}, {}, "must be a keras.Model"),
    "unknown argument": ({"worker_per_node": 2}, {}, "did you mean workers_per_node"),
    "batch size": ({}, {"batch_size": 0}, "batch_size should be a positive integer"),
    "no batch size": ({}, {"batch_size": None}, "batch_size should be a positive integer"),
    "epochs": ({}, {"epochs": 2, "initial_epoch": 2}, "should be more than initial_epoch"),
    "labels": ({}, {"label_cols": None}, "label_cols is required"),
    "column": ({}, {"feature_cols": ["z"]}, "z"),
    "class weight": ({}, {"class_weight": [1]}, "class_weight should be a dict"),
    "frequency": ({}, {"validation_freq": "2"}, "validation_freq should be"),
    "no epochs to validate": ({}, {"validation_freq": []}, "validation_freq should be"),
    "epoch 0": ({}, {"validation_freq": [0, 2]}, "validation_freq should be"),
    "callbacks": ({}, {"callbacks": [print]}, "keras.callbacks.Callback"),
    "data": ({}, {"data": 5}, "data must be"),
    "resume": ({}, {"resume": "auto"}, "needs model_dir"),
    "keyword": ({}, {"steps": 2}, "fit has no argument 'steps'"),
    "kinds": (
        {},
        {"validation_data": np.zeros((3, 4))},
        "should have the same type with train data",
    ),
    "weight column": ({}, {"weight_col": 3}, "weight_col should be the name"),
}


@pytest.mark.parametrize(("options", "arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_inputs_are_refused_in_one_sentence(frame, options, arguments, message):
    with pytest.raises(UsageError, match=message):
        estimator(**options).fit(**{"data": frame, **COLUMNS, **arguments})


@pytest.mark.parametrize(
    ("creator", "message"),
    [
        (lambda config: 3, ("model-type",)),
        (lambda config: two_by_two(config), ("model-input",)),
    ],
    ids=["no model", "other inputs"],
)
def test_models_that_do_not_fit_are_refused(frame, creator, message):
    with refused(*message):
        estimator(creator).fit(frame, **COLUMNS)


def test_what_a_creator_raises_is_told(frame):
    def broken(config):
        raise KeyError("no such setting")

    with pytest.raises(WorkerError, match="no such setting"):
        estimator(broken).fit(frame, **COLUMNS)


def test_tables_without_rows(frame, trained):
    est, _ = trained
    nothing = frame.limit(0)
    for verb in (estimator().fit, est.evaluate):
        with refused("data-empty"):
            verb(nothing, **COLUMNS)
    assert est.predict(nothing, feature_cols="x").count() == 0
