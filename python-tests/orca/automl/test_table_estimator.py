"""Test AutoEstimator.from_table: columns, folds, models, limits, files and Spark."""

import numpy as np
import pandas as pd
import pytest
from refusals import refused

from bigdl.orca.automl.auto_estimator import AutoEstimator
from bigdl.orca.automl.table.columns import TableFeatures, TableTarget
from bigdl.orca.automl.table.estimator import TableEstimator
from bigdl.orca.automl.table.folds import create_folds
from bigdl.orca.automl.table.model import TrainingSettings
from bigdl.orca.automl.table.search import TableJob
from bigdl.orca.automl.table.trees import ForestModel

pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'bigdl[automl]'")
pytest.importorskip("xgboost", reason="XGBoost is not installed: pip install 'bigdl[xgboost]'")


def customers(count=400, seed=0):
    """Return rows with numbers, texts, dates, booleans and missing values of all of them."""
    random = np.random.default_rng(seed)
    rows = pd.DataFrame(
        {
            "age": random.normal(size=count),
            "visits": random.integers(0, 5, count).astype(float),
            "city": random.choice(["Oslo", "Rome", None], count),
            "name": [f"user {index}" for index in range(count)],
            "since": pd.Timestamp("2024-01-01")
            + pd.to_timedelta(random.integers(0, 500, count), "D"),
            "member": random.random(count) > 0.5,
        }
    )
    value = rows.age + rows.visits * (rows.city == "Oslo") + rows.member
    rows.loc[::7, ["age", "visits"]] = np.nan
    rows.loc[::9, "since"] = pd.NaT
    rows["spent"] = value + 0.3 * random.normal(size=count)
    rows["tier"] = np.where(value > 2, "high", np.where(value > 0.5, "mid", "low"))
    rows["paid"] = value > 1
    return rows


FEATURES = ["age", "visits", "city", "name", "since", "member"]


def fit(rows, label, models=("linear", "xgboost"), n_trials=3, **options):
    names = (
        {"feature_cols": FEATURES}
        if "age" in getattr(rows, "columns", "") and "feature_cols" not in options
        else {}
    )
    usual = {"models": list(models), "n_trials": n_trials, "folds": 3, "cpus_per_trial": 1}
    return AutoEstimator.from_table(rows, label, **{**usual, **names, **options})


@pytest.mark.parametrize(
    ("label", "task", "metric"),
    [("paid", "binary", "auc"), ("tier", "multiclass", "logloss"), ("spent", "regression", "rmse")],
)
@pytest.mark.slow_cases("paid-binary-auc", "spent-regression-rmse")
def test_every_model_beats_the_constant_on_each_task(label, task, metric, tmp_path):
    models = ["linear", "xgboost", "forest", "net"]
    table = fit(customers(), label, models, n_trials=5)
    board = table.leaderboard()
    assert table.task == task
    assert sorted(board["model"]) == sorted(["constant", *models])
    assert board["model"].iloc[-1] == "constant"
    assert board["model"].iloc[0] == table.best_model
    assert (board["status"] == "finished").all()
    assert board[metric].is_monotonic_decreasing == (metric == "auc")
    held_out = customers(200, 1)
    result = table.evaluate(held_out)
    assert result["accuracy" if label != "spent" else "r2"] > 0.7
    again = TableEstimator.load(table.save(tmp_path / "best.table"))
    predicted = table.predict(held_out)
    pd.testing.assert_frame_equal(again.predict(held_out), predicted)
    pd.testing.assert_frame_equal(predicted.drop(columns="prediction"), held_out)
    assert repr(again) == repr(table)
    assert predicted["prediction"].dtype == held_out[label].dtype


@pytest.mark.parametrize("name", ["lightgbm", "net", "forest", "xgboost", "linear"])
@pytest.mark.slow_cases("net", "forest", "linear")
def test_models_are_saved_without_code(name, tmp_path):
    if name == "lightgbm":
        pytest.importorskip("lightgbm", reason="LightGBM is not installed")
    rows = customers(200)
    table = fit(rows, "tier", [name], n_trials=2)
    assert table.best_model == name
    again = TableEstimator.load(table.save(tmp_path / "model"))
    probabilities = again.predict(rows, output="probability")["prediction"].tolist()
    assert probabilities == table.predict(rows, output="probability")["prediction"].tolist()
    assert np.allclose(np.sum(probabilities, axis=1), 1)
    assert again.classes == ["high", "low", "mid"]


def test_random_labels_are_not_learned_from_ids_categories_or_rows_of_a_fold():
    rows = customers(500)
    random = np.random.default_rng(5)
    rows["code"] = random.choice([f"code {i}" for i in range(120)], len(rows))
    rows["luck"] = random.random(len(rows)) > 0.5
    table = fit(
        rows, "luck", ["linear", "xgboost", "forest"], 4, feature_cols=[*FEATURES, "code"], folds=5
    )
    assert table.leaderboard()["auc"].max() < 0.58


def test_rows_of_a_group_are_never_on_both_sides():
    random = np.random.default_rng(0)
    group = np.repeat(np.arange(60), 6)
    rows = pd.DataFrame({"group": group, "x": random.normal(size=60)[group]})
    rows["label"] = (random.random(60) > 0.5)[group]
    mixed = fit(rows.drop(columns="group"), "label", ["xgboost"], 2)
    grouped = fit(rows, "label", ["xgboost"], 2, group_col="group")
    assert mixed.leaderboard()["auc"].max() > 0.9
    assert grouped.leaderboard()["auc"].max() < 0.7
    assert grouped.feature_cols == ["x"]
    labels = rows["label"].to_numpy(int)
    for fold in create_folds(labels, 4, 0, is_classification=True, groups=group):
        parts = [set(group[each]) for each in (fold.train, fold.held_out, fold.test)]
        assert sum(map(len, parts)) == 60


def test_folds_by_time_train_on_older_rows_and_at_last_on_all():
    times = np.random.default_rng(0).integers(0, 40, 300)
    *folds, last = create_folds(times * 1.0, 4, 0, is_classification=False, times=times)
    assert len(folds) == 4
    for fold in folds:
        assert times[fold.train].max() < times[fold.held_out].min()
        assert times[fold.held_out].max() < times[fold.test].min()
    assert last.test is None
    assert len(last.train) + len(last.held_out) == len(times)
    table = fit(customers(), "spent", feature_cols=["age", "visits", "city"], time_col="name")
    assert table.best_model != "constant"


def test_many_rows_at_one_time_do_not_reduce_the_folds():
    for times in (np.r_[np.zeros(90), 1:11], np.r_[0:5, np.full(90, 5), 6:11]):
        *folds, last = create_folds(times, 3, 0, is_classification=False, times=times)
        assert len(folds) == 3
        assert last.test is None
        for fold in folds:
            assert times[fold.held_out].max() < times[fold.test].min()
    with refused("argument-value", "oldest time"):
        create_folds(np.zeros(4), 3, 0, is_classification=False, times=np.arange(4))


def test_folds_need_two_groups_or_rows_to_train_on():
    groups = np.repeat([0, 1, 2], 3)
    with refused("argument-value", "1 training groups"):
        create_folds(np.zeros(9), 2, 0, is_classification=False, groups=groups)
    with refused("argument-value", "1 training rows"):
        create_folds(np.zeros(3), 2, 0, is_classification=False)


def test_folds_divide_all_rows_and_classes():
    y = np.repeat([0, 1, 2], [90, 45, 5])
    folds = create_folds(y, 5, 0, is_classification=True)
    assert sorted(np.concatenate([fold.test for fold in folds])) == list(range(len(y)))
    for fold in folds:
        both = np.concatenate([fold.train, fold.held_out])
        assert len(both) + len(fold.test) == len(y)
        assert not set(both) & set(fold.test)
        assert list(np.bincount(y[fold.test])) == [18, 9, 1]


@pytest.mark.slow
def test_equal_seeds_give_equal_leaderboards_and_predictions():
    rows = customers(200)
    options = {"models": ["xgboost", "forest", "linear"], "n_trials": 7}
    first, second = (fit(rows, "paid", concurrency=each, seed=3, **options) for each in (1, 2))
    columns = ["model", "auc", "std", "trial", "config"]
    pd.testing.assert_frame_equal(first.leaderboard()[columns], second.leaderboard()[columns])
    pd.testing.assert_frame_equal(first.predict(rows), second.predict(rows))
    other = fit(rows, "paid", ["linear"], 2, seed=4)
    assert other.leaderboard()["auc"].iloc[0] not in first.leaderboard()["auc"].tolist()


def test_a_forest_ends_at_its_deadline_with_the_trees_that_it_has():
    rows = customers(200)
    target, features = TableTarget.of(rows["spent"], None), TableFeatures.of(rows, FEATURES, [])
    y = target.encode(rows["spent"])
    folds = create_folds(y, 2, 0, is_classification=False)
    settings = TrainingSettings(target.task, 0, features.category_counts, 0, 1)
    job = TableJob(features.encode(rows), y, folds, settings, 0.0)
    config = dict(ForestModel.defaults[0])
    late = ForestModel.fit(config, job.training_rows(folds[0], 0.0))
    whole = ForestModel.fit(config, job.training_rows(folds[0], float("inf")))
    assert len(late.state()["boosters"]) == 1 < len(whole.state()["boosters"])
    for model in (late, whole):
        assert np.corrcoef(model.scores(job.rows), y)[0, 1] > 0.7


@pytest.mark.slow
def test_a_search_ends_at_its_time_limit_with_a_model():
    table = fit(customers(), "paid", ["linear", "xgboost", "net"], None, time_limit=60)
    board = table.leaderboard()
    assert table.best_model != "constant"
    assert set(board["status"]) <= {"finished", "time limit", "stopped"}


def test_a_function_is_a_metric_of_labels():
    def right(y_true, y_pred):
        assert set(y_true) | set(y_pred) <= {"high", "low", "mid"}
        return float(np.mean(y_true == y_pred))

    table = fit(customers(), "tier", metric=right, metric_mode="max")
    assert table.leaderboard()["right"].iloc[0] > 0.6
    with refused("argument-missing", "metric_mode"):
        fit(customers(), "tier", metric=right)


def test_the_mode_of_a_named_metric_is_its_own():
    rows = customers(60)
    with refused("argument-value", "'maximize'"):
        fit(rows, "paid", metric="auc", metric_mode="maximize")
    with refused("argument-conflict", "'min'"):
        fit(rows, "paid", metric="auc", metric_mode="min")


def test_integers_of_few_values_are_classes_unless_named_otherwise():
    rows = customers()
    rows["stars"] = rows["visits"].fillna(0).astype(int)
    assert fit(rows, "stars", ["linear"], 2).task == "multiclass"
    assert fit(rows, "stars", ["linear"], 2, task="regression").task == "regression"
    table = fit(rows, "paid", ["linear"], 2, feature_cols=["stars"], categorical_cols="stars")
    unknown = pd.DataFrame({"stars": [1.0, 99.0, None]})
    probabilities = table.predict(unknown, output="probability")["prediction"].tolist()
    assert probabilities[1] == probabilities[2] != probabilities[0]


def test_labels_are_texts_booleans_or_numbers():
    assert TableTarget.of(pd.Series([0.5, 1.5, 0.5], name="y"), None).task == "regression"
    assert TableTarget.of(pd.Series([0.0, 1.0, 0.0], name="y"), None).task == "binary"
    rows = customers(60)
    for labels in (pd.cut(rows["visits"].fillna(0), 2), rows["since"].dt.year.map(pd.Timestamp)):
        labels = labels.fillna(labels.iloc[1])
        with refused("data-type", "'label'"):
            fit(rows.assign(label=labels), "label")


def test_threads_and_models_are_checked():
    rows = customers(90)
    with refused("argument-value", "cpus_per_trial"):
        fit(rows, "paid", cpus_per_trial=0)
    table = AutoEstimator.from_table(
        rows, "paid", models="linear", n_trials=2, folds=2, feature_cols=["age"], backend="local"
    )
    assert sorted(table.leaderboard()["model"]) == ["constant", "linear"]


def test_spark_predicts_times_of_any_zone_as_this_process(orca_spark):
    zone = orca_spark.conf.get("spark.sql.session.timeZone")
    hours = pd.Series(pd.date_range("2024-01-01", periods=480, freq="h").astype("datetime64[us]"))
    rows = pd.DataFrame({"at": hours, "is_night": hours.dt.hour < 8})
    try:
        orca_spark.conf.set("spark.sql.session.timeZone", "America/New_York")
        frame = orca_spark.createDataFrame(rows).coalesce(1)
        table = fit(frame, "is_night", ["xgboost"], 2, backend="local")
        assert table.evaluate(frame, ["accuracy"])["accuracy"] > 0.99
        predicted = [row.prediction for row in table.predict(frame).collect()]
        assert predicted == table.predict(frame.toPandas())["prediction"].tolist()
    finally:
        orca_spark.conf.set("spark.sql.session.timeZone", zone)


def test_frames_files_and_spark_give_equal_models(orca_spark, tmp_path):
    rows = customers(240)
    rows.to_csv(tmp_path / "rows.csv", index=False)
    rows.to_parquet(tmp_path / "rows.parquet")
    frame = orca_spark.createDataFrame(rows.astype({"since": "datetime64[us]"})).coalesce(1)
    expected = fit(rows, "tier")
    paths = [str(tmp_path / "rows.parquet"), frame]
    names = {"feature_cols": FEATURES, "backend": "local"}
    tables = [fit(each, "tier", **names) for each in paths]
    for table in tables:
        assert table.leaderboard()["logloss"].tolist() == pytest.approx(
            expected.leaderboard()["logloss"].tolist()
        )
    from_csv = fit(str(tmp_path / "rows.csv"), "tier", feature_cols=FEATURES)
    assert from_csv.predict(str(tmp_path / "rows.csv")).shape == (240, 10)
    predicted = expected.predict(frame)
    assert predicted.columns == [*frame.columns, "prediction"]
    assert [row.prediction for row in predicted.collect()] == list(
        expected.predict(rows)["prediction"]
    )
    probabilities = expected.predict(frame, output="probability").first().prediction
    assert sum(probabilities) == pytest.approx(1)
    assert expected.evaluate(frame) == pytest.approx(expected.evaluate(rows))


@pytest.mark.slow
def test_trials_on_spark_are_those_of_this_machine(orca_spark):
    rows = customers(240).drop(columns="since")
    names = {"feature_cols": ["age", "visits", "city", "member"]}
    here = fit(rows, "paid", **names)
    there = fit(orca_spark.createDataFrame(rows).coalesce(1), "paid", **names)
    columns = ["model", "auc", "trial"]
    pd.testing.assert_frame_equal(
        there.leaderboard()[columns], here.leaderboard()[columns], check_exact=False
    )


def test_wrong_tables_are_errors_before_the_search():
    rows = customers(60)
    cases = [
        ("column-missing", "'income'", {"label": "income"}),
        ("column-missing", "'income'", {"feature_cols": ["income"]}),
        ("argument-conflict", "'tier'", {"feature_cols": ["age", "tier"]}),
        ("name-unknown", "'forrest'", {"models": ["forrest"]}),
        ("name-unknown", "'auk'", {"metric": "auk"}),
        ("argument-value", "60 rows", {"folds": 80}),
        ("data-null", "'city'", {"label": "city", "feature_cols": ["age"]}),
        ("data-null", "'visits'", {"group_col": "visits", "feature_cols": ["age"]}),
        ("data-value", "3 different values", {"task": "binary"}),
    ]
    for code, text, options in cases:
        with refused(code, text):
            fit(rows, **{"label": "tier", **options})
    rows["vector"] = [[1.0]] * 60
    with refused("data-type", "'vector'"):
        fit(rows, "tier", feature_cols=["age", "vector"])
    rows["age"] = np.inf
    with refused("data-value", "'age'"):
        fit(rows, "tier")
    with refused("data-type", "data must be"):
        fit({"age": [1]}, "age", feature_cols=["age"])


def test_wrong_rows_of_a_prediction_are_errors(tmp_path):
    rows = customers(120)
    table = fit(rows, "paid", ["linear"], 2)
    with refused("column-missing", "'age'"):
        table.predict(rows.drop(columns="age"))
    with refused("data-type", "'age'"):
        table.predict(rows.assign(age="old"))
    with refused("data-type", "'age' needs numbers"):
        table.predict(rows.assign(age=rows["since"]))
    with refused("data-type", "'since' needs dates"):
        table.predict(rows.assign(since=rows["visits"]))
    with refused("column-duplicate", "'city'"):
        table.predict(rows, output_col="city")
    with refused("unsupported", "'value'"):
        table.predict(rows, output="value")
    with refused("data-value", "'maybe'"):
        table.evaluate(rows.assign(paid="maybe"))
    with refused("name-unknown", "'rmse'"):
        table.evaluate(rows, ["rmse"])
    (tmp_path / "other").write_bytes(b"no table")
    with refused("file-format", "other"):
        TableEstimator.load(tmp_path / "other")


@pytest.mark.slow
def test_an_error_of_a_model_is_in_the_leaderboard():
    def fails_for_constants(y_true, y_pred):
        if len(set(y_pred)) == 1:
            raise ValueError("all predictions are equal")
        return float(np.mean(y_true == y_pred))

    table = fit(customers(), "tier", metric=fails_for_constants, metric_mode="max")
    last = table.leaderboard().iloc[-1]
    assert (last["model"], last["status"]) == ("constant", "failed")
    assert "all predictions are equal" in last["error"]

    def fails(y_true, y_pred):
        raise ValueError("never")

    with refused("search-failed", "never"):
        fit(customers(), "tier", metric=fails, metric_mode="max")
