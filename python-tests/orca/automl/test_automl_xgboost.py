"""Test metrics, data and best models of AutoXGBClassifier and AutoXGBRegressor."""

import numpy as np
import pandas as pd
import pytest
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.automl import hp

xgboost = pytest.importorskip("xgboost", reason="XGBoost is not installed: bigdl[xgboost]")
sklearn_metrics = pytest.importorskip("sklearn.metrics")
pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'bigdl[automl]'")

from bigdl.orca.automl.auto_estimator import AutoEstimator  # noqa: E402
from bigdl.orca.automl.model.data import TrialRows  # noqa: E402
from bigdl.orca.automl.trial import SearchGoal, TrialJob  # noqa: E402
from bigdl.orca.automl.xgboost import (  # noqa: E402
    AutoXGBClassifier,
    AutoXGBRegressor,
    XGBoostModelBuilder,
)
from bigdl.orca.data import SparkXShards  # noqa: E402
from bigdl.runtime.worker import Worker  # noqa: E402

SPACE = {"max_depth": hp.grid_search([1, 3])}


def numbers(count=300, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 5))
    return x, 10 + x[:, 0] * x[:, 1] + x[:, 2]


def classes(count=300, of=2, seed=0):
    x, y = numbers(count, seed)
    return x, np.digitize(y, np.quantile(y, np.arange(1, of) / of))


def fit(make, tmp_path, data, validation, **options):
    est = make(logs_dir=str(tmp_path), n_estimators=8, backend="local")
    arguments = {"search_space": SPACE, "concurrency": 1, "validation_data": validation, **options}
    est.fit(data, **arguments)
    return est


def test_the_best_regressor_has_the_default_metric_rmse(tmp_path):
    validation = numbers(100, 1)
    est = fit(AutoXGBRegressor, tmp_path, numbers(), validation)
    best = est.get_best_model()
    assert isinstance(best, xgboost.XGBRegressor)
    metric = sklearn_metrics.root_mean_squared_error(validation[1], best.predict(validation[0]))
    assert est.trials()["rmse"].min() == pytest.approx(metric, rel=1e-5)
    assert est.get_best_config() == {"max_depth": 3}
    assert (best.max_depth, best.n_estimators) == (3, 8)


@pytest.mark.parametrize("of", [2, 3], ids=["two classes", "three classes"])
def test_the_best_classifier_has_the_default_metric_logloss(tmp_path, of):
    validation = classes(100, of, 1)
    est = fit(AutoXGBClassifier, tmp_path, classes(of=of), validation)
    best = est.get_best_model()
    assert isinstance(best, xgboost.XGBClassifier)
    metric = sklearn_metrics.log_loss(validation[1], best.predict_proba(validation[0]))
    assert est.trials()["logloss"].min() == pytest.approx(metric, rel=1e-4)
    assert set(best.predict(validation[0])) <= set(range(of))


@pytest.mark.slow_cases("auc-<lambda>")
@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("error", lambda y, p, s: np.mean(y != p)),
        ("auc", lambda y, p, s: sklearn_metrics.roc_auc_score(y, s)),
        ("error@0.7", lambda y, p, s: np.mean(y != (s > 0.7))),
        ("accuracy", lambda y, p, s: np.mean(y == p)),
    ],
)
def test_classifiers_take_metrics_of_xgboost_and_of_the_evaluator(tmp_path, metric, expected):
    x, y = classes(100, seed=1)
    est = fit(AutoXGBClassifier, tmp_path, classes(), (x, y), metric=metric)
    expected_metrics = [
        expected(y, model.predict(x), model.predict_proba(x)[:, 1])
        for model in map(est.get_model, est.trials().index)
    ]
    assert est.trials()[metric].tolist() == pytest.approx(expected_metrics, rel=1e-5)
    best = max if metric in ("auc", "accuracy") else min
    assert est.get_best_trials()[0][metric] == pytest.approx(best(expected_metrics), rel=1e-5)


def test_regressors_take_functions_and_several_metrics(tmp_path):
    def worst(y_true, y_pred):
        return abs(y_true - y_pred).max()

    options = {"metric": ["mae", "r2", worst], "metric_mode": ["min", "max", "min"]}
    validation = x, y = numbers(100, 1)
    est = fit(AutoXGBRegressor, tmp_path, numbers(), validation, **options)
    for number, row in est.trials().iterrows():
        predicted = est.get_model(number).predict(x)
        assert row["mae"] == pytest.approx(abs(y - predicted).mean(), rel=1e-5)
        assert row["r2"] == pytest.approx(sklearn_metrics.r2_score(y, predicted), rel=1e-5)
        assert row["worst"] == pytest.approx(abs(y - predicted).max(), rel=1e-5)


def test_trees_are_grown_in_parts_of_epochs(tmp_path):
    """Check that three thirds equal the whole, without random parts."""
    space = {"max_depth": 3, "subsample": 1, "colsample_bytree": 1}
    validation = numbers(100, 1)
    parts, whole = (
        fit(
            AutoXGBRegressor,
            tmp_path / str(epochs),
            numbers(),
            validation,
            search_space=space,
            epochs=epochs,
        )
        for epochs in (3, 1)
    )
    assert parts.get_best_model().get_booster().num_boosted_rounds() == 8
    assert parts.trials()["epochs"].tolist() == [3]
    assert parts.trials()["rmse"][0] == pytest.approx(whole.trials()["rmse"][0], rel=1e-5)


def test_columns_of_frames_become_one_matrix(tmp_path):
    def frame(x, y):
        return pd.DataFrame({"a": x[:, 0], "bc": list(x[:, 1:3]), "d": x[:, 3], "y": y})

    data, validation = numbers(), numbers(100, 1)
    names = {"feature_cols": ["a", "bc", "d"], "label_cols": "y"}
    by_frame = fit(AutoXGBRegressor, tmp_path / "f", frame(*data), frame(*validation), **names)
    cut = [(x[:, :4], y) for x, y in (data, validation)]
    by_array = fit(AutoXGBRegressor, tmp_path / "a", *cut)
    assert by_frame.trials()["rmse"].tolist() == by_array.trials()["rmse"].tolist()


def test_x_and_y_may_be_a_frame_and_a_series(tmp_path):
    def framed(x, y):
        return pd.DataFrame(x[:, :4], columns=list("abcd")), pd.Series(y)

    data, validation = framed(*numbers()), framed(*numbers(100, 1))
    by_frame = fit(AutoXGBRegressor, tmp_path / "f", data, validation)
    cut = [(x.to_numpy(), y.to_numpy()) for x, y in (data, validation)]
    by_array = fit(AutoXGBRegressor, tmp_path / "a", *cut)
    assert by_frame.trials()["rmse"].tolist() == by_array.trials()["rmse"].tolist()
    best = by_frame.get_best_model()
    assert best.predict(validation[0]).tolist() == best.predict(cut[1][0]).tolist()


def test_lr_is_the_learning_rate(tmp_path):
    etas = [
        fit(
            AutoXGBRegressor,
            tmp_path / name,
            numbers(),
            numbers(100, 1),
            search_space={name: 0.3, "max_depth": 2},
        )
        for name in ("lr", "learning_rate")
    ]
    assert etas[0].trials()["rmse"][0] == etas[1].trials()["rmse"][0]
    assert etas[0].get_best_model().learning_rate == 0.3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: AutoXGBRegressor(cpus_per_trial=0), "cpus_per_trial should be"),
        (
            lambda path: AutoEstimator(
                XGBoostModelBuilder("regressor", 1, {}), workers_per_trial=2
            ),
            "is supported for PyTorch and Keras only",
        ),
        (
            lambda path: fit(
                AutoXGBRegressor, path, numbers(), None, search_space={"n_estimators": 0}
            ),
            "n_estimators should be a positive integer",
        ),
        (
            lambda path: fit(AutoXGBRegressor, path, numbers(), numbers(), metric="f1"),
            "specify the `metric_mode` parameter",
        ),
        (
            lambda path: fit(
                AutoXGBRegressor, path, numbers(), numbers(), metric="f1", metric_mode="max"
            ),
            "metric f1 is not supported",
        ),
        (
            lambda path: fit(AutoXGBRegressor, path, lambda config: None, numbers()),
            "must be arrays, DataFrames",
        ),
    ],
    ids=["cpus", "workers", "trees", "no mode", "no metric", "function"],
)
def test_wrong_arguments_say_what_is_wrong(tmp_path, call, message):
    with pytest.raises(UsageError, match=message):
        call(tmp_path)


def with_nulls():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.integers(0, 9, 120), "b": rng.random(120)})
    frame["y"] = frame["a"] + frame["b"]
    return frame.assign(
        a=frame["a"].astype("Int64").mask(frame.index % 5 == 0),
        b=frame["b"].where(frame.index % 3 > 0),
    )


FRAME_OPTIONS = {"feature_cols": ["a", "b"], "label_cols": "y", "search_space": {"max_depth": 2}}


def test_nulls_are_missing_values_from_frames_files_spark_and_shards(tmp_path, orca_spark):
    frame = with_nulls()
    path = str(tmp_path / "nulls.parquet")
    frame.to_parquet(path)
    objects = frame.assign(b=frame["b"].astype(object).where(frame["b"].notna(), None))
    shards = SparkXShards(orca_spark.sparkContext.parallelize([objects], 1))
    scores = [
        fit(AutoXGBRegressor, tmp_path / str(i), data, data, **FRAME_OPTIONS)
        .trials()["rmse"]
        .tolist()
        for i, data in enumerate([frame, objects, path, orca_spark.read.parquet(path), shards])
    ]
    pair, space = (frame[["a", "b"]], frame["y"]), FRAME_OPTIONS["search_space"]
    est = fit(AutoXGBRegressor, tmp_path / "pair", pair, pair, search_space=space)
    scores.append(est.trials()["rmse"].tolist())
    for score in scores[1:]:
        assert score == pytest.approx(scores[0], rel=1e-4)


def test_the_validation_data_stop_the_growth_early(tmp_path):
    x, y = numbers(300)
    search = AutoXGBRegressor(
        logs_dir=str(tmp_path), backend="local", n_estimators=400, early_stopping_rounds=3
    )
    validation = numbers(100, 1)
    options = {"search_space": {"max_depth": 3}, "concurrency": 1}
    search.fit((x, y), validation_data=validation, **options)
    best = search.get_best_model()
    assert best.best_iteration < 390
    predicted = best.predict(validation[0])
    score = sklearn_metrics.root_mean_squared_error(validation[1], predicted)
    assert search.trials()["rmse"].iloc[0] == pytest.approx(score, rel=1e-4)
    search = AutoXGBRegressor(logs_dir=str(tmp_path), backend="local", early_stopping_rounds=3)
    with refused("search-failed", "early_stopping_rounds", "validation_data"):
        search.fit((x, y), **options)


def test_functions_of_the_configuration_make_the_data(tmp_path):
    x, y = numbers(200)

    est = fit(
        AutoXGBRegressor,
        tmp_path,
        lambda config: (x, y),
        lambda config: (x, y),
        search_space={"max_depth": 2},
    )
    alone = fit(AutoXGBRegressor, tmp_path, (x, y), (x, y), search_space={"max_depth": 2})
    assert est.trials()["rmse"].tolist() == alone.trials()["rmse"].tolist()
    with refused("search-failed"):
        fit(AutoXGBRegressor, tmp_path, lambda config: 5, None, search_space={"max_depth": 2})


def with_categories(count=200, seed=0):
    """Return rows whose target depends on an unordered letter; every seventh one is missing."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"n": rng.random(count), "c": rng.choice(list("badc"), count)})
    frame["y"] = frame["c"].map({"a": 9.0, "b": 0.0, "c": 7.0, "d": 1.0}) + frame["n"]
    return frame.assign(c=frame["c"].where(frame.index % 7 > 0).astype("category"))


CATEGORY_OPTIONS = {
    "feature_cols": ["c", "n"],
    "label_cols": "y",
    "search_space": {"max_depth": 3, "subsample": 1, "colsample_bytree": 1},
}


def test_categories_of_frames_reach_xgboost_as_categories(tmp_path):
    data = with_categories()
    validation = with_categories(80, 1)
    # equal values with other codes
    validation["c"] = validation["c"].cat.set_categories(["d", "c", "a", "b"])
    est = fit(AutoXGBRegressor, tmp_path, data, validation, epochs=2, **CATEGORY_OPTIONS)
    best = est.get_best_model()
    booster = best.get_booster()
    assert dict(zip(booster.feature_names, booster.feature_types, strict=True)) == {
        "c": "c",
        "n": "float",
    }
    alone = xgboost.XGBRegressor(**{**best.get_params(), "enable_categorical": True})
    alone.fit(data[["c", "n"]], data["y"])
    recoded = validation.assign(c=validation["c"].cat.set_categories(data["c"].cat.categories))
    predicted = best.predict(recoded[["c", "n"]])
    assert predicted == pytest.approx(alone.predict(recoded[["c", "n"]]), rel=1e-4)
    score = sklearn_metrics.root_mean_squared_error(validation["y"], predicted)
    assert est.trials()["rmse"].tolist() == pytest.approx([score], rel=1e-4)


def test_categories_of_numbers_are_categories_in_x_and_y_and_in_dicts(tmp_path):
    """Use unordered numbers with early stopping, array cells and missing numbers."""
    frame = with_categories()
    frame["c"] = frame["c"].cat.rename_categories([30, 10, 40, 20])
    frame["n"] = (frame["n"] * 9).round().astype("Int64").mask(frame.index % 5 == 0)
    x, y = frame[["c", "n"]], frame["y"] > 4
    names = {"feature_cols": ["c", "n"], "label_cols": ["y"]}
    scores = []
    for position, (data, options) in enumerate(
        [((x, y), {}), (dict(frame.assign(y=y)), names), (lambda config: (x, y), {})]
    ):
        est = AutoXGBClassifier(
            str(tmp_path / str(position)), backend="local", n_estimators=8, early_stopping_rounds=4
        )
        arguments = {**options, "search_space": {"max_depth": 2}, "concurrency": 1}
        est.fit(
            data,
            validation_data=data,
            metric=["logloss", "accuracy"],
            **arguments,
            metric_mode=["min", "max"],
        )
        assert est.get_model(0).get_booster().feature_types[0] == "c"
        scores.append(est.trials()["logloss"][0])
    assert scores == pytest.approx([scores[0]] * 3, rel=1e-4)
    cells = frame.assign(n=[[i, 1.5] for i in range(len(frame))])
    est = fit(AutoXGBRegressor, tmp_path / "cells", cells, cells, **CATEGORY_OPTIONS)
    assert est.get_best_model().get_booster().feature_names == ["c", "n_0", "n_1"]


def test_categories_that_do_not_fit_are_refused(tmp_path):
    data = with_categories()
    other = data.assign(c=data["c"].cat.rename_categories(list("abcz")))
    texts = data.assign(c=data["c"].astype(object).fillna("a"))
    for validation, message in [
        (other, r"'c' of validation_data has categories that data lacks: \['z'\]"),
        (data.assign(c=1.0), r"must have the same categorical columns, but have \['c'\] and \[\]"),
        (texts, "holds strings, which cannot become a tensor; encode them as numbers first"),
    ]:
        with pytest.raises(UsageError, match=message):
            fit(AutoXGBRegressor, tmp_path, data, validation, **CATEGORY_OPTIONS)


@pytest.mark.parametrize("of", [0, 2, 3], ids=["numbers", "two classes", "three classes"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_rows_that_do_not_fit_in_memory_grow_the_same_trees(monkeypatch, of, epochs):
    def rows(count, seed):
        x, y = classes(count, of, seed) if of else numbers(count, seed)
        x[::7, 0] = -9
        return TrialRows({"a": x[:, 0], "rest": x[:, 1:].astype("float32")}, {"y": y})

    options = {"n_estimators": 30, "early_stopping_rounds": 3, "learning_rate": 0.3, "missing": -9}
    if epochs > 1:  # a new part continues other random numbers
        options.update(subsample=1, colsample_bytree=1)
    model_type = "classifier" if of else "regressor"
    metrics = ["logloss", "accuracy"] if of else ["rmse", "r2"]
    builder = XGBoostModelBuilder(model_type, 1, options)
    goal = SearchGoal.of(metrics, [None, "max"], known=builder.knows)
    job = TrialJob(builder, rows(300, 0), rows(100, 1), goal, epochs)
    models, scores, weights = [], [], []
    for memory in (1 << 40, 1):
        monkeypatch.setattr("bigdl.orca.learn.trees.matrix.available_memory", lambda m=memory: m)
        worker = Worker(0, 1)
        model = builder.build({}, job, worker)
        scores.append(np.array([model.epoch() for _ in range(epochs)]))
        weights.append(model.weights())
        models.append(builder.load({}, weights[-1]))
        worker.clean_up()
    np.testing.assert_allclose(scores[1], scores[0], rtol=1e-6)
    assert weights[0] == weights[1]
    x, _ = numbers(50, 2)
    np.testing.assert_array_equal(models[0].predict(x), models[1].predict(x))
