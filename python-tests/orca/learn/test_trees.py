"""Boosted trees: those of plain XGBoost, on spooled rows, by one or several workers."""

import os

import numpy as np
import pandas as pd
import pytest
from refusals import refused

from bigdl.common.errors import WorkerError
from bigdl.orca.data import XShards
from bigdl.orca.learn.trees import XGBEstimator

xgboost = pytest.importorskip("xgboost")

LOGISTIC = {"objective": "binary:logistic", "eval_metric": ["logloss", "auc"], "max_depth": 4}


def made(rows=3000, seed=0):
    """Rows with missing values and a noisy label."""
    random = np.random.default_rng(seed)
    x = random.random((rows, 5), dtype="float32")
    margin = x[:, 0] + x[:, 1] * x[:, 2] + random.normal(0, 0.1, rows)
    y = (margin > 0.8).astype("float32")
    x[random.random(x.shape) < 0.05] = np.nan
    return x, y


def local(workers=1, **options):
    options = {**LOGISTIC, "num_rounds": 12, "backend": "local", **options}
    return XGBEstimator(workers_per_node=workers, **options)


def plain(x, y, rounds=12, params=LOGISTIC, **options):
    return xgboost.train(params, xgboost.DMatrix(x, y, **options), rounds)


@pytest.mark.parametrize("external", [False, True], ids=["memory", "file"])
def test_one_worker_grows_the_trees_of_xgboost(external):
    x, y = made()
    estimator = local()
    history = estimator.fit((x, y), validation_data=made(500, 1), external_memory=external)
    expected = plain(x, y)
    np.testing.assert_array_equal(estimator.predict(x), expected.predict(xgboost.DMatrix(x, y)))
    assert [entry["round"] for entry in history] == list(range(1, 13))
    assert set(history[0]) == {
        "round",
        *("train_logloss", "train_auc", "validation_logloss", "validation_auc"),
    }
    measured = estimator.evaluate((x, y), metrics=["auc"])
    assert measured == {"auc": history[-1]["train_auc"]}
    measured = estimator.evaluate((x, y))  # the metrics of the fit
    assert measured == {name: history[-1][f"train_{name}"] for name in ("logloss", "auc")}


def test_two_workers_are_as_good_as_one():
    (x, y), (held, target) = made(6000), made(3000, 1)
    scores = {}
    for workers in (1, 2):
        estimator = local(workers)
        estimator.fit((x, y), external_memory=workers == 2)
        scores[workers] = estimator.evaluate((held, target), metrics="auc")["auc"]
        booster = estimator.get_model()
        booster.set_param({"eval_metric": "auc"})
        exact = booster.eval(xgboost.DMatrix(held, target)).split("auc:")[-1]
        assert scores[workers] == pytest.approx(float(exact), abs=2e-3)
    assert abs(scores[1] - scores[2]) < 2e-3


def test_another_program_resumes_a_fit_from_model_dir(tmp_path):
    x, y = made(1500)

    calls = []

    def failing(predictions, matrix):
        calls.append(1)
        if len(calls) == 10:
            raise MemoryError("the end of this program")
        return "accuracy", float(((predictions > 0.5) == matrix.get_label()).mean())

    def fitted(metric, resume=None, folder=tmp_path, **options):
        estimator = local(eval_metric=metric, subsample=0.5, seed=3, model_dir=folder, **options)
        return estimator.fit((x, y), checkpoint_rounds=4, resume=resume), estimator

    def accuracy(predictions, matrix):
        return "accuracy", float(((predictions > 0.5) == matrix.get_label()).mean())

    with pytest.raises(WorkerError, match="the end of this program"):
        fitted(failing)
    history, estimator = fitted(accuracy, "auto")
    expected, undisturbed = fitted(accuracy, folder=tmp_path / "other")
    assert history == expected
    np.testing.assert_array_equal(estimator.predict(x), undisturbed.predict(x))
    assert fitted(failing, "auto")[0] == history  # that fit is complete
    longer, estimator = fitted(accuracy, "auto", num_rounds=16)
    assert longer == fitted(accuracy, folder=tmp_path / "longer", num_rounds=16)[0]
    assert longer[:12] == history
    with refused("argument-conflict", "16 rounds, more than 12"):
        fitted(accuracy, "auto")
    assert estimator.fit((x, y), num_rounds=2, resume="auto")[-1]["round"] == 18
    with refused("argument-conflict", "began with 16 rounds, but this model has 0"):
        fitted(accuracy, "auto")
    with refused("argument-conflict", "other parameters"):
        fitted(accuracy, "auto", max_bin=64)


@pytest.mark.fault
@pytest.mark.slow
def test_fit_resumes_from_its_checkpoint_after_a_lost_worker(tmp_path):
    x, y = made()
    marker = str(tmp_path / "killed")
    folder = str(tmp_path)

    def metric(predictions, matrix):  # runs once per round
        rounds = os.path.join(folder, f"round-{os.getpid()}")
        with open(rounds, "a") as file:
            file.write(".")
        if os.path.getsize(rounds) == 8 and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), 9)
        return "accuracy", float(((predictions > 0.5) == matrix.get_label()).mean())

    options = {"eval_metric": metric, "subsample": 0.5, "seed": 3}
    disturbed, undisturbed = local(2, **options), local(2, **options)
    history = disturbed.fit((x, y), checkpoint_rounds=3)
    assert os.path.exists(marker)
    assert undisturbed.fit((x, y), checkpoint_rounds=3) == history
    np.testing.assert_allclose(disturbed.predict(x), undisturbed.predict(x), atol=1e-5)


def test_early_stopping_keeps_the_best_round_and_a_fit_continues(tmp_path):
    x, y = made(600)
    estimator = local(num_rounds=60, eta=0.9, eval_metric="logloss")
    history = estimator.fit((x, y), validation_data=made(400, 1), early_stopping_rounds=4)
    scores = [entry["validation_logloss"] for entry in history]
    best = int(np.argmin(scores)) + 1
    assert len(history) == best + 4
    assert estimator.get_model().num_boosted_rounds() == best
    path = estimator.save(str(tmp_path / "trees.ubj"))
    kept = local(num_rounds=60, eta=0.9, eval_metric="logloss", model_dir=str(tmp_path))
    options = {"validation_data": made(400, 1), "early_stopping_rounds": 4, "resume": "auto"}
    assert kept.fit((x, y), **options) == history
    kept = local(num_rounds=70, eta=0.9, eval_metric="logloss", model_dir=str(tmp_path))
    assert kept.fit((x, y), **options) == history  # it stopped before both limits
    kept = local(num_rounds=60, eta=0.9, eval_metric="logloss", model_dir=str(tmp_path))
    with refused("argument-conflict", "other early_stopping_rounds"):
        kept.fit((x, y), **{**options, "early_stopping_rounds": 9})
    loaded = local(eta=0.9)
    loaded.load(path)
    assert loaded.fit((x, y), num_rounds=2)[-1]["round"] == best + 2
    expected = xgboost.train(
        {**LOGISTIC, "eta": 0.9}, xgboost.DMatrix(x, y), 2, xgb_model=estimator.get_model()
    )
    np.testing.assert_allclose(loaded.predict(x), expected.predict(xgboost.DMatrix(x)), atol=1e-6)


def test_weights_margins_categories_and_custom_objective_equal_xgboost():
    x, y = made()
    random = np.random.default_rng(1)
    frame = pd.DataFrame(x, columns=list("abcde"))
    frame["text"] = random.choice(["red", "green", "blue"], len(x))
    frame["w"], frame["m"], frame["y"] = random.random((3, len(x)))
    frame["y"] = np.where(frame.text == "red", 1 - y, y)
    features = [*"abcde", "text"]

    def squares(predictions, matrix):
        return predictions - matrix.get_label(), np.ones_like(predictions)

    estimator = XGBEstimator(
        objective=squares, backend="local", num_rounds=8, monotone_constraints={"a": 1}
    )
    estimator.fit(
        frame, features, "y", weight_col="w", base_margin_col="m", categorical_cols="text"
    )
    codes = pd.Categorical(frame.text).codes  # sorted, as ours
    block = np.column_stack([x, codes]).astype("float32")
    matrix = xgboost.DMatrix(
        block,
        frame.y,
        weight=frame.w,
        base_margin=frame.m,
        feature_types=["q"] * 5 + ["c"],
        feature_names=features,
        enable_categorical=True,
    )
    params = {"monotone_constraints": {"a": 1}}
    expected = xgboost.train(params, matrix, 8, obj=squares).predict(matrix)
    predicted = estimator.predict(frame, base_margin_col="m")
    np.testing.assert_allclose(predicted.prediction, expected, atol=1e-6)
    shap = np.stack(estimator.shap_values(frame[:50]).shap)
    margins = estimator.predict(frame[:50], output="margin").prediction
    np.testing.assert_allclose(shap.sum(1), margins, atol=1e-4)
    assert set(estimator.feature_importances().feature) == set(features)


def test_ranking_reads_whole_groups():
    random = np.random.default_rng(0)
    frame = pd.DataFrame(random.random((2000, 3)), columns=list("abc")).astype("float32")
    frame["g"] = random.integers(0, 150, 2000)
    frame["y"] = (frame.a * 3).round()
    estimator = XGBEstimator(objective="rank:ndcg", backend="local", num_rounds=6)
    estimator.fit(frame, list("abc"), "y", group_col="g")
    rows = frame.sort_values("g", kind="stable")
    matrix = xgboost.DMatrix(rows[list("abc")].to_numpy(), rows.y, qid=rows.g)
    expected = xgboost.train({"objective": "rank:ndcg"}, matrix, 6).predict(matrix)
    np.testing.assert_allclose(estimator.predict(rows).prediction, expected, atol=1e-6)


def test_two_workers_exchange_rows_so_that_groups_are_whole(tmp_path):
    random = np.random.default_rng(0)
    frame = pd.DataFrame(random.random((2000, 2)), columns=list("ab")).astype("float32")
    frame["g"] = random.integers(-70, 70, 2000)
    frame["text"] = np.where(np.arange(2000) < 1000, "x", "longer")
    frame["y"] = (frame.a * 3).round()
    folder = str(tmp_path)

    def metric(predictions, matrix):
        np.save(f"{folder}/{os.getpid()}", np.diff(matrix.get_uint_info("group_ptr")))
        return "zero", 0.0

    estimator = XGBEstimator(
        {"objective": "rank:ndcg", "eval_metric": metric},
        backend="local",
        workers_per_node=2,
        num_rounds=3,
    )
    features = ["a", "b", "text"]
    estimator.fit(frame, features, "y", group_col="g", categorical_cols="text")
    sizes = [np.load(each) for each in tmp_path.iterdir()]
    assert sorted(np.concatenate(sizes)) == sorted(frame.g.value_counts())
    assert len(sizes) == 2
    assert min(len(each) for each in sizes) > 30
    measured = estimator.evaluate(frame, features, "y", group_col="g", metrics="ndcg")
    rows = frame.sort_values("g", kind="stable")
    codes = pd.Categorical(rows.text).codes
    block = np.column_stack([rows[["a", "b"]], codes]).astype("float32")
    types = ["q", "q", "c"]
    matrix = xgboost.DMatrix(
        block, rows.y, qid=rows.g + 70, feature_types=types, feature_names=features
    )
    booster = estimator.get_model()
    booster.set_param({"eval_metric": "ndcg"})
    expected = float(booster.eval(matrix).rpartition(":")[2])
    assert measured["ndcg"] == pytest.approx(expected, abs=1e-5)


def test_spark_rows_are_kept_and_nulls_are_missing_values(orca_spark):
    x, y = made(1000)
    frame = pd.DataFrame(x, columns=list("abcde")).astype("float64")
    frame["id"], frame["y"] = np.arange(len(x)), y.astype(float)
    frame["text"] = np.where(y > 0, "yes", "no")
    rows = orca_spark.createDataFrame(frame).selectExpr(
        "id", "nanvl(a, null) a", "b", "c", "d", "e", "text", "y"
    )
    estimator = XGBEstimator(LOGISTIC, num_rounds=4)
    estimator.fit(rows, [*"abcde", "text"], "y", categorical_cols="text")
    predicted = estimator.predict(rows).toPandas()
    assert predicted.id.tolist() == frame.id.tolist()
    np.testing.assert_array_equal(predicted.prediction, estimator.predict(frame).prediction)
    assert not predicted.prediction.isna().any()
    rows.createOrReplaceTempView("tree_rows")
    estimator.register("trees", output="class")
    sql = orca_spark.sql("select id, trees(a, b, c, d, e, text) p, y from tree_rows").toPandas()
    np.testing.assert_array_equal(sql.p, predicted.prediction > 0.5)
    shards = XShards.partition({"x": x, "y": y}, num_shards=2)
    of_shards = local(backend="spark", num_rounds=4)
    of_shards.fit(shards)
    parts = of_shards.predict(shards).collect()
    expected = plain(x, y, 4).predict(xgboost.DMatrix(x))
    np.testing.assert_array_equal(np.concatenate([part["prediction"] for part in parts]), expected)


def test_wrong_inputs_are_one_sentence():
    x, y = made(50)
    frame = pd.DataFrame({"a": x[:, 0], "text": "t", "y": y})
    with refused("argument-value", "binary:logistik"):
        local(objective="binary:logistik")
    with refused("argument-unknown", "max_deptth"):
        local(max_deptth=3)
    with refused("argument-unknown", "n_estimators", "num_rounds"):
        local(n_estimators=3)
    with refused("unsupported", "exact"):
        local(tree_method="exact")
    with refused("argument-missing", "label_cols"):
        local().fit(frame, "a")
    with refused("data-dtype", "text"):
        local().fit(frame, ["a", "text"], "y")
    with refused("data-value", "labels", "from 5 to 6"):
        local().fit((x, y + 5))
    with refused("not-fitted"):
        local().predict(x)
    with refused("argument-missing", "validation_data"):
        local().fit((x, y), early_stopping_rounds=3)


def test_early_stopping_ignores_rounds_whose_metric_is_nan():
    x, y = made(300)
    values = iter([np.nan, 0.5, 0.3, 0.4, np.nan, np.nan])

    def metric(predictions, matrix):
        return "loss", next(values) if matrix.num_row() == 100 else 0.0

    params = {"eval_metric": metric, "disable_default_eval_metric": True}
    estimator = local(**params)
    rows = {"validation_data": made(100, 1), "early_stopping_rounds": 3}
    assert len(estimator.fit((x, y), **rows)) == 6
    assert estimator.get_model().num_boosted_rounds() == 3
    without = local(eval_metric=[], disable_default_eval_metric=True)
    with refused("argument-missing", "needs a metric", "eval_metric="):
        without.fit((x, y), **rows)
    with refused("argument-conflict", "booster='dart'", "early_stopping_rounds"):
        local(booster="dart").fit((x, y), **rows)


def test_predictions_of_the_faster_runtime_know_the_missing_value(monkeypatch):
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed: bigdl[nano]")
    monkeypatch.setattr("bigdl.nano.acceleration.tree_network.LEAST_GAIN", 0)
    x, y = made(300)
    rows = np.where(np.isnan(x), np.float32(-9), x)
    estimator = local(missing=-9)
    estimator.fit((rows, y))
    expected = plain(x, y).predict(xgboost.DMatrix(x))
    np.testing.assert_allclose(estimator.predict(rows, accelerate="auto"), expected, atol=1e-6)
