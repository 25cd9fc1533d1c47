"""The Keras Estimator on Ray: the same loop on actors, which live from one call to the next."""

import numpy as np
import pytest
import ray_models as rays

from bigdl.orca.data.xshards.ray import RayXShards
from bigdl.orca.learn.tf2 import Estimator

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")

# every process of Ray that meets Keras first imports it, which takes long on a busy machine
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

ROWS, BATCH = 30, 8


def net(config):
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def data():
    rays.active_ray()
    x, y = rays.rows(ROWS)
    return x.astype("float32"), y.astype("float32")


@pytest.fixture(scope="module")
def trained(data):
    """An Estimator of two workers, and what its two fits returned."""
    est = Estimator.from_keras(model_creator=net, workers_per_node=2, backend="tf2")
    found = [est.fit(data, epochs=n, batch_size=BATCH, seed=1)["loss"] for n in (1, 2)]
    yield est, found[0] + found[1]
    est.shutdown()


def test_workers_on_ray_make_the_updates_of_one(data, trained):
    _, losses = trained
    alone = Estimator.from_keras(model_creator=net, workers_per_node=1, backend="ray")
    assert len(losses) == 3
    options = {"epochs": 3, "batch_size": ROWS, "seed": 1}
    both = Estimator.from_keras(model_creator=net, workers_per_node=2, backend="ray")
    expected, found = alone.fit(data, **options)["loss"], both.fit(data, **options)["loss"]
    assert found == pytest.approx(expected, rel=1e-6)
    for a, b in zip(alone.get_model().get_weights(), both.get_model().get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_evaluate_and_predict_on_what_is_in_ray(data, trained):
    est, _ = trained
    x, y = data
    model = est.get_model()
    loss, mae = model.evaluate(x, y, verbose=0)
    shards = RayXShards([ray.put([{"x": x[a::3], "y": y[a::3]}]) for a in range(3)])
    for given in (data, shards):
        found = est.evaluate(given, batch_size=BATCH)
        assert found["validation_loss"] == pytest.approx(loss, rel=1e-5)
        assert found["validation_mae"] == pytest.approx(mae, rel=1e-5)
    expected = model.predict(x, verbose=0)
    assert est.predict(x) == pytest.approx(expected, abs=1e-6)
    parts = est.predict(shards).collect()
    for a, part in enumerate(parts):
        assert part["prediction"] == pytest.approx(expected[a::3], abs=1e-6)


def test_a_function_makes_a_dataset_in_the_actors(data, trained):
    est, _ = trained
    x, y = data

    def creator(config, batch_size):
        import tensorflow as tf

        assert config["size"] == 2
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS).batch(batch_size)

    found = est.fit(creator, epochs=1, batch_size=BATCH, validation_data=creator)
    assert found["steps"] == -(-ROWS // BATCH)
    assert len(found["val_loss"]) == 1


def of_names(config):
    import keras

    name = keras.Input((), dtype="string")
    number = keras.layers.StringLookup(vocabulary=["a", "b"])(name)
    model = keras.Model(name, keras.layers.Dense(1)(keras.layers.Embedding(3, 2)(number)))
    model.compile("sgd", "mse")
    return model


def test_texts_come_from_ray(data):
    """Also those of a row that nobody knows."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"t": ["a", "b", "longer than others"] * 4, "y": np.arange(12.0)})
    est = Estimator.from_keras(model_creator=of_names, workers_per_node=2, backend="ray")
    columns = {"feature_cols": "t", "label_cols": "y"}
    est.fit(ray.data.from_pandas(frame), epochs=1, batch_size=6, seed=1, **columns)
    shards = RayXShards([ray.put([frame[:5]]), ray.put([frame[5:]])])
    found = est.evaluate(shards, **columns)
    assert found == pytest.approx(est.evaluate(frame, **columns), rel=1e-6)
    parts = est.predict(shards, feature_cols="t").collect()
    assert [len(part) for part in parts] == [5, 7]
    whole = pandas.concat(parts)
    assert whole.t.tolist() == frame.t.tolist()
    scores = np.array(whole.prediction.tolist()).reshape(-1, 3)
    np.testing.assert_allclose(scores, scores[:1].repeat(4, 0), rtol=1e-6)
    dataset = est.predict(ray.data.from_pandas(frame), feature_cols="t").to_pandas()
    assert dataset.t.tolist() == frame.t.tolist()
