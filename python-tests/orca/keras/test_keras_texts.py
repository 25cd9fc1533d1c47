"""Texts as features of Keras models, which look them up or cut them in words themselves."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.data import SparkXShards, XShards
from bigdl.orca.data.tf.data import Dataset
from bigdl.orca.learn.pytorch import Estimator as TorchEstimator
from bigdl.orca.learn.tf2 import Estimator
from bigdl.runtime.shards.columns import ArraySpec, column_spec, decode
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.shard import Shard, SpoolWriter
from bigdl.runtime.shards.texts import text_array
from bigdl.runtime.shards.values import columns_of

# every process that meets Keras first imports it, which takes long on a busy machine
pytestmark = pytest.mark.timeout(900)

CITIES = ["Oslo", "Zürich", "東京", "", "Llanfairpwllgwyngyll"]
ROWS, BATCH = 30, 8
FIT = {"epochs": 2, "batch_size": BATCH, "seed": 3}
COLUMNS = {"feature_cols": ["city", "age"], "label_cols": "y"}


# -- models ---------------------------------------------------------------------------------------


def of_city(config):
    """Embeds a city by its name, or by its number among all names."""
    import keras

    age = keras.Input((), name="age")
    kind = "int32" if config.get("numbers") else "string"
    city = keras.Input((), dtype=kind, name="city")
    lookup = keras.layers.StringLookup(vocabulary=CITIES, num_oov_indices=1)
    number = city if config.get("numbers") else lookup(city)
    row = keras.layers.Embedding(len(CITIES) + 1, 4)(number)
    joined = keras.layers.Concatenate()([row, keras.layers.Reshape((1,))(age)])
    model = keras.Model({"city": city, "age": age}, keras.layers.Dense(1)(joined))
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


def of_words(config):
    """Counts words, of a subclass, which learns its shapes from the first batch."""
    import keras

    class Counting(keras.Model):
        def __init__(self):
            super().__init__()
            words = keras.layers.TextVectorization(
                vocabulary=["a", "bad", "good"], output_mode="count"
            )
            self.steps = [words, keras.layers.Dense(1, activation="sigmoid")]

        def call(self, texts):
            for step in self.steps:
                texts = step(texts)
            return texts

    model = Counting()
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return model


def estimator(creator=of_city, **options):
    given = {"model_creator": creator, "workers_per_node": 2, "backend": "spark"}
    return Estimator.from_keras(**{**given, **options})


def weights(est):
    return est.get_model().get_weights()


def assert_equal(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


# -- data -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    number = rng.integers(0, len(CITIES), ROWS)
    return pd.DataFrame(
        {
            "city": [CITIES[i] for i in number],
            "age": rng.normal(size=ROWS).astype("float32"),
            "y": number.astype("float32"),
            "number": number.astype("int32") + 1,
        }
    )


@pytest.fixture(scope="module")
def frame(orca_spark, table):
    return orca_spark.createDataFrame(table).cache()


@pytest.fixture(scope="module")
def trained(frame):
    est = estimator()
    return est, est.fit(frame, validation_data=frame, **FIT, **COLUMNS)


# -- the Estimator --------------------------------------------------------------------------------


@pytest.mark.slow
def test_texts_are_worth_what_their_numbers_are(frame, trained):
    est, found = trained
    other = estimator(config={"numbers": True})
    numbers = frame.drop("city").withColumnRenamed("number", "city")
    assert other.fit(numbers, validation_data=numbers, **FIT, **COLUMNS) == found
    assert_equal(weights(est), weights(other))
    figures = other.evaluate(numbers, **COLUMNS)
    assert est.evaluate(frame, **COLUMNS) == pytest.approx(figures, rel=1e-5)


def test_prediction_keeps_the_texts(frame, table, trained):
    import tensorflow as tf

    est, _ = trained
    found = est.predict(frame, feature_cols=COLUMNS["feature_cols"]).toPandas()
    pd.testing.assert_frame_equal(found[list(table.columns)], table)
    arrays = {"city": table.city.to_numpy(str), "age": table.age.to_numpy()}
    scores = est.predict(arrays, feature_cols=["city", "age"])
    np.testing.assert_allclose(scores, np.stack(found.prediction), rtol=1e-6)
    tensors = {name: tf.constant(values.tolist()) for name, values in arrays.items()}
    both = est.get_model().predict(tensors, verbose=0)
    np.testing.assert_allclose(both, scores, rtol=1e-6)


@pytest.mark.slow_cases("arrays")
@pytest.mark.parametrize("form", ["pandas", "shards of pandas", "arrays", "Dataset", "parquet"])
def test_kinds_of_input_give_the_same_figures(frame, table, trained, form, tmp_path):
    est, _ = trained
    named = {n: table[n].to_numpy() for n in ("city", "age")}
    data, columns = table.astype({"city": "string"}), COLUMNS
    if form == "shards of pandas":
        halves = [table[:11], table[11:]]
        data = SparkXShards(frame.sparkSession.sparkContext.parallelize(halves, 2))
    elif form == "parquet":
        data = str(tmp_path / "rows.parquet")
        table.to_parquet(data)
    elif form == "arrays":
        data, columns = {"x": named, "y": table.y.to_numpy()}, {}
    elif form == "Dataset":
        shards = XShards.partition({**named, "y": table.y.to_numpy()}, num_shards=2)
        taken = Dataset.from_tensor_slices(shards).map(
            lambda row: ({"city": row["city"], "age": row["age"]}, row["y"])
        )
        data, columns = taken, {}
    expected = est.evaluate(frame, **COLUMNS)
    assert est.evaluate(data, **columns) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_words_are_cut_by_the_model(orca_spark):
    rows = [("a good one", 1.0), ("bad, a bad one", 0.0), ("good good", 1.0), ("", 0.0)] * 4
    data = orca_spark.createDataFrame(rows, "text string, y float")
    est = estimator(of_words)
    found = est.fit(data, epochs=2, batch_size=8, seed=1, feature_cols="text", label_cols="y")
    assert len(found["loss"]) == 2
    predicted = [row.prediction[0] for row in est.predict(data, feature_cols="text").collect()]
    assert predicted[0] == predicted[4] != predicted[1]
    assert est.get_model().layers  # built from a row of the remembered form


@pytest.mark.slow
def test_what_is_no_text_is_refused(orca_spark, frame, trained):
    est, _ = trained
    rows = [(None, 1.0, 1.0), ("a", 1.0, 1.0)]
    nulls = orca_spark.createDataFrame(rows, "city string, age float, y float")
    with pytest.raises(UsageError, match="'city' holds nulls"):
        est.fit(nulls, **FIT, **COLUMNS)
    numbers = frame.drop("city").withColumnRenamed("number", "city")
    with refused("data-schema", "'city'", "validation_data"):
        est.fit(frame, validation_data=numbers, **FIT, **COLUMNS)
    with refused("data-dtype", "'city'", "int32"):
        est.fit(numbers, **FIT, **COLUMNS)
    with pytest.raises(UsageError, match="'city' takes int32 and the data has text"):
        estimator(config={"numbers": True}).fit(frame, **FIT, **COLUMNS)
    with pytest.raises(UsageError, match="'city' of the targets holds text"):
        est.fit(frame, **FIT, feature_cols=["city", "age"], label_cols="city")


# -- other backends -------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_parameter_layer_trains_the_same(frame, trained):
    est = estimator(backend="bigdl")
    est.fit(frame, validation_data=frame, **FIT, **COLUMNS)
    for own, other in zip(weights(est), weights(trained[0]), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_run_goes_on_as_if_nothing_had_been(frame, trained, tmp_path):
    options = {"batch_size": BATCH, "seed": 3, "validation_data": frame, **COLUMNS}
    first = estimator(model_dir=str(tmp_path))
    first.fit(frame, epochs=1, **options)
    second = estimator(model_dir=str(tmp_path))
    second.fit(frame, epochs=2, resume="auto", **options)
    assert_equal(weights(second), weights(trained[0]))


@pytest.mark.slow
def test_a_function_may_return_texts(orca_spark, table):
    def rows(config, batch_size):
        import tensorflow as tf

        inputs = {"city": table.city.tolist(), "age": table.age.to_numpy()}
        return tf.data.Dataset.from_tensor_slices((inputs, table.y.to_numpy())).batch(batch_size)

    figures = [
        estimator(workers_per_node=n).fit(rows, epochs=2, batch_size=BATCH, seed=3)["loss"]
        for n in (1, 2)
    ]
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)


# -- how they travel ------------------------------------------------------------------------------


def test_texts_are_refused_where_they_cannot_be_computed_with(frame):
    import torch

    est = TorchEstimator.from_torch(
        model=lambda config: torch.nn.Linear(1, 1),
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), 0.1),
        loss=torch.nn.MSELoss(),
    )
    with refused("data-dtype", "'city'", "StringIndexer"):
        est.fit(frame, epochs=1, batch_size=4, feature_cols="city", label_cols="y")
    with refused("data-dtype"):
        est.fit((np.array(CITIES, object), np.arange(5.0)), epochs=1, batch_size=4)


def spec_of(spark_type):
    return column_spec("t", spark_type, "float32", texts=True)


def test_arrow_strings_become_bytes_of_one_width():
    from pyspark.sql import types as T

    strings = pa.array(["x", *CITIES, "x"])[1:-1]
    for column in (strings, strings.cast(pa.large_string())):
        ((key, found),) = decode(spec_of(T.StringType()), column)
        assert key is None
        assert found.dtype == "S32"
        assert [each.decode() for each in found] == CITIES
    lists = pa.array([["a", "b"], ["", "ä"]])
    ((_, found),) = decode(spec_of(T.ArrayType(T.StringType())), lists)
    assert found.tolist() == [[b"a", b"b"], [b"", "ä".encode()]]
    maps = pa.array([[("k", "v")], [("k", "w")]], pa.map_(pa.string(), pa.string()))
    ((key, found),) = decode(spec_of(T.MapType(T.StringType(), T.StringType())), maps)
    assert (key, found.tolist()) == ("k", [b"v", b"w"])
    with refused("data-value", "'t'", "0000"):
        decode(spec_of(T.StringType()), pa.array(["a\0"]))
    with refused("data-size", "'t'", "65537", "65536"):
        decode(spec_of(T.StringType()), pa.array(["a" * 65537]))


def test_texts_of_numpy_and_pandas():
    for values in (
        np.array(CITIES),
        np.array(CITIES, object),
        np.array([c.encode() for c in CITIES]),
        pd.Series(CITIES, dtype="category").to_numpy(),
    ):
        assert text_array(values, "t").tolist() == [c.encode() for c in CITIES]
    lists = pd.DataFrame({"t": [["a", "b"], ["c", "d"]], "u": ["e", "f"]})
    found = columns_of(lists, ["t", "u"], None, "float32", texts=True)
    assert found[0][2].tolist() == [[b"a", b"b"], [b"c", b"d"]]
    assert found[1][2].tolist() == [b"e", b"f"]
    for bad, message in (
        (["a", None], "holds nulls \\(1 of 2\\)"),
        (["a", float("nan")], "holds nulls"),
        (["a", 1], "other values among its texts"),
    ):
        with pytest.raises(SourceError, match=message):
            text_array(np.array(bad, object), "'t'")


@pytest.mark.parametrize("arrival", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_a_spool_is_as_wide_as_its_widest_text(tmp_path, arrival):
    chunks = [["a", "b"], ["c" * 20], ["d", "e" * 9, "f"]]
    writer = SpoolWriter(str(tmp_path), 1, "data-0", [])
    for number in arrival:
        texts = text_array(np.array(chunks[number]), "t")
        leaves = [ArraySpec("t", None, f"S{texts.itemsize}", ()), ArraySpec("n", None, "int64", ())]
        arrays = [texts, np.full(len(texts), number)]
        writer.append(0, number, len(texts), leaves, arrays)
    shard = Shard(writer.finish())
    assert shard.column("t").dtype == "S32"
    assert [t.decode() for t in shard.column("t")] == [t for chunk in chunks for t in chunk]
    assert shard.column("n").tolist() == [0, 0, 1, 2, 2, 2]
    other = SpoolWriter(str(tmp_path), 1, "data-1", [])
    other.append(0, 0, 1, [ArraySpec("t", None, "S8", ())], [np.array([b"a"], "S8")])
    with refused("data-schema", "int64"):
        other.append(0, 1, 1, [ArraySpec("t", None, "int64", ())], [np.arange(1)])
    other.discard()


def test_order_of_arrival_leaves_no_trace(tmp_path):
    prints = set()
    for job, arrival in enumerate(([0, 1], [1, 0])):
        writer = SpoolWriter(str(tmp_path), job, "data-0", [])
        for number in arrival:
            texts = text_array(np.array(["t" * (9 + 20 * number)]), "t")
            leaf = ArraySpec("t", None, f"S{texts.itemsize}", ())
            writer.append(0, number, 1, [leaf], [texts])
        prints.add(writer.finish().fingerprint)
    assert len(prints) == 1
