"""Trees that were fitted on the features of a pipeline, in a recommender and in a model server."""

import numpy as np
import pandas as pd
import pytest

from bigdl.friesian.feature import FeaturePipeline, FeatureTable
from bigdl.friesian.serving import EmbeddedStore, IndexRecall, ItemIndex, Recommender
from bigdl.nano.serving import Client, ModelRepository, ModelServer, ServedModel
from bigdl.orca.learn.trees import LGBMEstimator, XGBEstimator

FEATURES = ["city", "age", "price", "item"]
PARAMS = {
    "xgboost": (XGBEstimator, "binary:logistic", "ubj"),
    "lightgbm": (LGBMEstimator, "binary", "txt"),
}


@pytest.fixture(scope="module")
def tables():
    """Users with missing ages, items, and their clicks."""
    random = np.random.default_rng(0)
    cities = random.choice(["Oslo", "Rome", "Bonn"], 40)
    users = pd.DataFrame({"user": range(40), "city": cities, "age": random.integers(9, 80, 40)})
    users["age"] = users["age"].astype("float32")
    users["vector"] = list(random.random((40, 4), dtype="float32"))
    prices = random.random(30, dtype="float32") * 50
    items = pd.DataFrame({"item": range(30), "price": prices})
    clicks = pd.merge(users.drop(columns="vector"), items, how="cross")
    clicks["click"] = (clicks.price + 20 * (clicks.city == "Rome") > clicks.age).astype(float)
    return users, items, clicks


@pytest.mark.parametrize("library", list(PARAMS))
def test_served_trees_score_what_the_estimator_predicts(orca_spark, tables, tmp_path, library):
    pytest.importorskip(library, reason=f"{library} is not installed")
    users, items, clicks = tables
    pipeline = FeaturePipeline().category_encode("city").fillna(0, "city").min_max_scale("price")
    train = pipeline.fit_transform(FeatureTable.from_pandas(clicks))
    estimator_class, objective, suffix = PARAMS[library]
    estimator = estimator_class(objective=objective, num_rounds=8)
    estimator.fit(train.df, FEATURES, "click", categorical_cols=["city"])
    offline = estimator.predict(train.df).select("user", "item", "prediction").toPandas()
    offline = offline.set_index(["user", "item"])["prediction"]

    (tmp_path / "trees").mkdir()
    path = estimator.save(str(tmp_path / "trees" / f"model.{suffix}"))
    store = EmbeddedStore(str(tmp_path / "store"))
    store.replace({"user": users, "item": items})
    index = ItemIndex(items["item"].to_numpy(), np.eye(30, 4, dtype="float32"))
    with ServedModel(path) as ranker:
        assert ranker.platform == library
        recall = IndexRecall(store, index, vector_col="vector")
        recommender = Recommender(store, recall, ranker, candidates=30, pipeline=pipeline)
        answers = recommender.recommend([0, 7, 39], k=30)
    for answer in answers:
        assert answer.source == "ranked"
        assert len(answer.item_ids) == 30
        expected = offline.loc[[(answer.user_id, item) for item in answer.item_ids]]
        np.testing.assert_allclose(answer.scores, expected, rtol=1e-6)

    row = pipeline.transform_row(
        {"user": 3, "item": 4, **clicks.loc[3 * 30 + 4, ["city", "age", "price"]]}
    )
    repository = ModelRepository(tmp_path / "trees", name="trees")
    repository.load_all()
    server = ModelServer(repository, http_port=0, grpc_port=None)
    with server, Client(f"http://127.0.0.1:{server.http_port}") as client:
        inputs = {name: np.array([row[name]], "float32") for name in FEATURES}
        answer = client.infer("trees", inputs)
    repository.close()
    assert answer[0] == pytest.approx(offline.loc[3, 4], rel=1e-6)


def test_a_served_model_takes_texts_of_categories_and_arrays(tmp_path):
    pytest.importorskip("xgboost", reason="XGBoost is not installed")
    random = np.random.default_rng(0)
    rows = pd.DataFrame({"size": random.random(300), "city": random.choice(["Oslo", "Rome"], 300)})
    rows["y"] = rows["size"] * (rows.city == "Rome")
    estimator = XGBEstimator(num_rounds=5, backend="local")
    estimator.fit(rows, ["size", "city"], "y", categorical_cols="city")
    with ServedModel(estimator.save(str(tmp_path / "trees.json"))) as model:
        assert [str(each) for each in model.signature.inputs] == [
            "size: FP32[-1]",
            "city: BYTES[-1]",
        ]
        inputs = {"size": rows["size"].to_numpy("float32"), "city": rows["city"].to_numpy(object)}
        np.testing.assert_array_equal(model.predict(inputs), estimator.predict(rows).prediction)
    x = random.random((50, 3), dtype="float32")
    plain = XGBEstimator(num_rounds=3, backend="local")
    plain.fit((x, x[:, 0]))
    with ServedModel(plain.save(str(tmp_path / "plain.ubj"))) as model:
        assert str(model.signature.inputs[0]) == "x: FP32[-1, 3]"
        np.testing.assert_array_equal(model.predict({"x": x}), plain.predict(x))


@pytest.mark.parametrize("library", list(PARAMS))
def test_served_trees_know_the_value_of_missing_features(tmp_path, library):
    pytest.importorskip(library, reason=f"{library} is not installed")
    estimator_class, _, suffix = PARAMS[library]
    x = np.random.default_rng(0).random((300, 2), dtype="float32")
    x[::3, 0] = -1
    y = np.where(x[:, 0] == -1, 5, x[:, 0]).astype("float32")
    estimator = estimator_class(num_rounds=5, missing=-1, backend="local")
    estimator.fit((x, y))
    path = estimator.save(str(tmp_path / f"model.{suffix}"))
    with ServedModel(path) as served:
        np.testing.assert_allclose(served.call([x])[0], estimator.predict(x), rtol=1e-6)
    loaded = estimator_class(backend="local")
    loaded.load(path)
    np.testing.assert_array_equal(loaded.predict(x), estimator.predict(x))
