"""Trees of LightGBM: those of plain LightGBM, on spooled rows, by one or several workers."""

import os
import time

import numpy as np
import pandas as pd
import pytest
from refusals import refused

from bigdl.orca.learn.trees import LGBMEstimator, XGBEstimator

lightgbm = pytest.importorskip(
    "lightgbm", reason="LightGBM is not installed: pip install 'bigdl[lightgbm]'"
)

BINARY = {"objective": "binary", "metric": ["binary_logloss", "auc"], "num_leaves": 15}
PLAIN = {"force_col_wise": True, "deterministic": True, "verbosity": -1, "num_threads": 1}


def made(rows=3000, seed=0):
    """Rows with missing values and a noisy label."""
    random = np.random.default_rng(seed)
    x = random.random((rows, 5), dtype="float32")
    margin = x[:, 0] + x[:, 1] * x[:, 2] + random.normal(0, 0.1, rows)
    y = (margin > 0.8).astype("float32")
    x[random.random(x.shape) < 0.05] = np.nan
    return x, y


def local(workers=1, **options):
    options = {**BINARY, "num_rounds": 12, "backend": "local", **options}
    return LGBMEstimator(workers_per_node=workers, **options)


def plain(x, y, rounds=12, params=BINARY, init_model=None, **options):
    data = lightgbm.Dataset(x, y, free_raw_data=False, **options)
    return lightgbm.train({**PLAIN, **params}, data, rounds, init_model=init_model)


def test_one_worker_grows_the_trees_of_lightgbm(tmp_path):
    x, y = made()
    estimator = local()
    history = estimator.fit((x, y), validation_data=made(500, 1))
    expected = plain(x, y)
    np.testing.assert_array_equal(estimator.predict(x), expected.predict(x))
    assert [entry["round"] for entry in history] == list(range(1, 13))
    assert set(history[0]) == {
        "round",
        *("train_binary_logloss", "train_auc"),
        *("validation_binary_logloss", "validation_auc"),
    }
    measured = estimator.evaluate((x, y), metrics=["auc"])
    assert measured == pytest.approx({"auc": history[-1]["train_auc"]})
    measured = estimator.evaluate((x, y))  # the metrics of the fit
    last = {name: history[-1][f"train_{name}"] for name in ("binary_logloss", "auc")}
    assert measured == pytest.approx(last)
    path = estimator.save(str(tmp_path / "trees.txt"))
    np.testing.assert_array_equal(lightgbm.Booster(model_file=path).predict(x), expected.predict(x))
    loaded = local()
    loaded.load(path)
    assert loaded.fit((x, y), num_rounds=3)[-1]["round"] == 15
    longer = plain(x, y, 3, init_model=expected)
    np.testing.assert_allclose(loaded.predict(x), longer.predict(x), rtol=1e-9)
    with refused("file-format", "lightgbm", "other Estimator"):
        XGBEstimator(backend="local").load(path)


def test_two_workers_are_as_good_as_one():
    (x, y), (held, target) = made(6000), made(3000, 1)
    scores, trees = {}, {}
    for workers in (1, 2):
        estimator = local(workers)
        history = estimator.fit((x, y), validation_data=(held, target))
        scores[workers] = estimator.evaluate((held, target))
        trees[workers] = estimator.get_model()
        last = {name: history[-1][f"validation_{name}"] for name in scores[workers]}
        assert scores[workers] == pytest.approx(last, rel=1e-6)
    assert abs(scores[1]["auc"] - scores[2]["auc"]) < 3e-3
    expected = trees[2].predict(held)
    loss = -np.mean(np.where(target > 0, np.log(expected), np.log1p(-expected)))
    assert scores[2]["binary_logloss"] == pytest.approx(loss, rel=1e-6)  # exact over all rows
    assert "machines:" not in trees[2].model_to_string()


def test_a_checkpoint_of_a_killed_driver_continues(tmp_path):
    x, y = made(1500)
    options = {"bagging_fraction": 0.5, "bagging_freq": 1, "seed": 3}

    def fitted(rounds, folder, resume=None, **more):
        estimator = local(num_rounds=rounds, model_dir=str(folder), **options, **more)
        return estimator.fit((x, y), checkpoint_rounds=4, resume=resume), estimator

    history, undisturbed = fitted(12, tmp_path / "whole")
    fitted(8, tmp_path / "part")
    resumed, estimator = fitted(12, tmp_path / "part", "auto")
    assert resumed == history
    np.testing.assert_array_equal(estimator.predict(x), undisturbed.predict(x))
    assert fitted(12, tmp_path / "part", "auto")[0] == history  # that fit is complete
    with refused("argument-conflict", "other parameters"):
        fitted(12, tmp_path / "part", "auto", max_bin=63)


@pytest.mark.fault
@pytest.mark.slow
def test_fit_resumes_from_its_checkpoint_after_a_lost_worker(tmp_path):
    x, y = made()
    marker, folder = str(tmp_path / "killed"), str(tmp_path)

    def metric(scores, rows):  # runs once per round
        rounds = os.path.join(folder, f"round-{os.getpid()}")
        with open(rounds, "a") as file:
            file.write(".")
        if os.path.getsize(rounds) == 8 and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), 9)
        return "accuracy", float(((scores > 0.5) == rows.get_label()).mean()), True

    options = {"metric": metric, "seed": 3}
    disturbed, undisturbed = local(2, **options), local(2, **options)
    history = disturbed.fit((x, y), checkpoint_rounds=3)
    assert os.path.exists(marker)
    assert undisturbed.fit((x, y), checkpoint_rounds=3) == history
    np.testing.assert_allclose(disturbed.predict(x), undisturbed.predict(x), atol=1e-6)


def test_early_stopping_keeps_the_best_round():
    x, y = made(600)
    options = {"num_rounds": 80, "learning_rate": 0.9, "metric": "binary_logloss"}
    estimator = local(**options)
    history = estimator.fit((x, y), validation_data=made(400, 1), early_stopping_rounds=4)
    scores = [entry["validation_binary_logloss"] for entry in history]
    best = int(np.argmin(scores)) + 1
    assert len(history) == best + 4
    assert estimator.get_model().current_iteration() == best

    def accuracy(scores, rows):
        return "accuracy", float(((scores > 0.5) == rows.get_label()).mean()), True

    estimator = local(**{**options, "metric": accuracy})
    history = estimator.fit((x, y), validation_data=made(400, 1), early_stopping_rounds=4)
    best = int(np.argmax([entry["validation_accuracy"] for entry in history])) + 1
    assert estimator.get_model().current_iteration() == best


def test_weights_margins_categories_and_custom_objective_equal_lightgbm():
    x, y = made()
    random = np.random.default_rng(1)
    frame = pd.DataFrame(x, columns=list("abcde"))
    frame["text"] = random.choice(["red", "green", "blue"], len(x))
    frame["w"], frame["m"], frame["y"] = random.random((3, len(x)))
    frame["y"] = np.where(frame.text == "red", 1 - y, y)
    features = [*"abcde", "text"]

    def squares(scores, rows):
        return scores - rows.get_label(), np.ones_like(scores)

    estimator = LGBMEstimator(objective=squares, backend="local", num_rounds=8)
    estimator.fit(
        frame, features, "y", weight_col="w", base_margin_col="m", categorical_cols="text"
    )
    codes = pd.Categorical(frame.text).codes  # sorted, as ours
    block = np.column_stack([x, codes]).astype("float32")
    data = lightgbm.Dataset(
        block,
        frame.y.astype("float32"),
        weight=frame.w.astype("float32"),
        init_score=frame.m.astype("float32").astype("float64"),
        categorical_feature=[5],
    )
    expected = lightgbm.train({**PLAIN, "objective": squares}, data, 8).predict(block)
    margins = estimator.predict(frame, base_margin_col="m", output="margin").prediction
    np.testing.assert_allclose(margins, expected + frame.m, atol=1e-6)
    with refused("unsupported", "base margin"):
        estimator.predict(frame, base_margin_col="m")
    shap = np.stack(estimator.shap_values(frame[:50]).shap)
    np.testing.assert_allclose(shap.sum(1), expected[:50], atol=1e-6)
    assert set(estimator.feature_importances().feature) <= set(features)
    assert estimator.predict(frame[:9], output="leaf").prediction[0].shape == (8,)


def test_two_workers_rank_whole_groups():
    random = np.random.default_rng(0)
    frame = pd.DataFrame(random.random((2000, 3)), columns=list("abc")).astype("float32")
    frame["g"] = random.integers(0, 150, 2000)
    frame["y"] = (frame.a * 3).round()
    scores = []
    for workers in (1, 2):
        estimator = local(
            workers, objective="lambdarank", metric="ndcg", eval_at=5, min_data_in_leaf=5
        )
        history = estimator.fit(frame, list("abc"), "y", group_col="g")
        measured = estimator.evaluate(frame, list("abc"), "y", group_col="g")
        assert measured == pytest.approx({"ndcg@5": history[-1]["train_ndcg@5"]})
        scores.append(measured["ndcg@5"])
        if workers == 1:
            rows = frame.sort_values("g", kind="stable")
            params = {"objective": "lambdarank", "num_leaves": 15, "min_data_in_leaf": 5}
            sizes = rows.g.value_counts(sort=False).to_numpy()
            trees = plain(rows[list("abc")].to_numpy(), rows.y, 12, params, group=sizes)
            expected = trees.predict(rows[list("abc")].to_numpy())
            np.testing.assert_allclose(estimator.predict(rows).prediction, expected, atol=1e-9)
    assert scores[1] == pytest.approx(scores[0], abs=0.01)


def test_spark_predicts_classes_of_a_multiclass_model(orca_spark):
    x, _ = made(1000)
    frame = pd.DataFrame(x, columns=list("abcde")).astype("float64")
    frame["y"] = np.digitize(frame.a.fillna(0) + frame.b.fillna(0), [0.5, 1.2]).astype(float)
    rows = orca_spark.createDataFrame(frame)
    params = {"objective": "multiclass", "num_class": 3, "num_leaves": 7}
    estimator = LGBMEstimator(params, num_rounds=4)
    estimator.fit(rows, list("abcde"), "y")
    predicted = estimator.predict(rows).toPandas()
    expected = plain(x, frame.y, 4, params).predict(x)
    np.testing.assert_allclose(np.stack(predicted.prediction), expected, atol=1e-9)
    rows.createOrReplaceTempView("lgbm_rows")
    estimator.register("forest", output="class")
    sql = orca_spark.sql("select forest(a, b, c, d, e) p from lgbm_rows").toPandas()
    np.testing.assert_array_equal(sql.p, expected.argmax(1))
    margins = np.stack(estimator.predict(frame[:20], output="margin").prediction)
    contributions = np.stack(estimator.shap_values(frame[:20]).shap)
    np.testing.assert_allclose(contributions.sum(2), margins, atol=1e-6)


def test_wrong_inputs_of_lightgbm_are_one_sentence():
    x, y = made(50)
    frame = pd.DataFrame({"a": x[:, 0], "b[0]": x[:, 1], "y": y, "z": y})
    with refused("argument-value", "binaryy"):
        local(objective="binaryy")
    with refused("argument-value", "no metric", "aucc"):
        local(metric=["auc", "aucc"])
    with refused("argument-unknown", "max_deptth"):
        local(max_deptth=3)
    with refused("argument-unknown", "n_estimators", "num_rounds"):
        local(n_estimators=3)
    with refused("argument-unknown", "mlist"):
        local(mlist="machines.txt")
    with refused("argument-unknown", "machines"):
        local(machines="127.0.0.1:9")
    with refused("unsupported", "feature"):
        local(tree_learner="feature")
    with refused("argument-value", "b[0]"):
        local().fit(frame, ["a", "b[0]"], "y")
    with refused("unsupported", "one label"):
        local().fit(frame, "a", ["y", "z"])
    with refused("data-value", "labels", "from 5 to 6"):
        local().fit((x, y + 5))
    with refused("data-size", "rows on each of the 2 workers"):
        local(2).fit((x[:1], y[:1]))


@pytest.mark.parametrize(
    "params",
    [
        *({"objective": name} for name in ("poisson", "gamma", "tweedie", "xendcg", "mape")),
        {"objective": "regression", "metric": ["gamma_deviance", "ndcg"]},
        {"application": "multiclass", "num_classes": 3, "random_state": 4},
    ],
    ids=lambda params: "-".join(map(str, params.values())),
)
def test_objectives_metrics_and_aliases_of_lightgbm_are_accepted(params):
    LGBMEstimator(backend="local", **params)


def test_parameters_that_would_be_ignored_are_refused():
    for name in ("categorical_features", "first_metric_only", "early_stopping_min_delta"):
        with refused("argument-unknown", name):
            LGBMEstimator(backend="local", **{name: 1})
    with refused("argument-conflict", "random_state", "seed"):
        LGBMEstimator(backend="local", seed=1, random_state=2)


def test_algorithms_whose_trees_cannot_be_cut_or_continued_are_refused():
    x, y = made(100)
    stopping = {"validation_data": (x, y), "early_stopping_rounds": 2}
    for estimator in (local(boosting="dart"), XGBEstimator(booster="dart", backend="local")):
        with refused("argument-conflict", "dart", "num_rounds"):
            estimator.fit((x, y), **stopping)
    with refused("argument-conflict", "forest"):
        local(boosting="rf", bagging_freq=1, bagging_fraction=0.5).fit((x, y), checkpoint_rounds=2)


def test_a_metric_that_is_nan_is_not_the_best_round():
    x, y = made(300)
    values = iter([0.5, 0.4, float("nan"), 0.6, 0.7, 0.8] * 2)

    def metric(scores, rows):
        return "loss", next(values), False

    estimator = local(objective="regression", metric=metric)
    estimator.fit((x, y), validation_data=(x, y), early_stopping_rounds=3)
    assert estimator.get_model().current_iteration() in (1, 2)


@pytest.mark.parametrize(
    ("objective", "metric"),
    [
        ("poisson", "poisson"),
        ("gamma", "gamma_deviance"),
        ("tweedie", "gamma"),
        ("regression", "mape"),
        ("binary", ["ndcg", "map", "auc"]),
        ("xendcg", "ndcg"),
        ("cross_entropy", "kullback_leibler"),
        (lambda scores, rows: (scores - rows.get_label(), np.ones_like(scores)), "gamma"),
    ],
)
def test_all_objectives_and_metrics_of_lightgbm_are_accepted(objective, metric):
    LGBMEstimator(objective=objective, metric=metric, backend="local")


def test_a_fit_of_counts_is_that_of_lightgbm():
    x, _ = made(300)
    y = np.nan_to_num(x[:, 0] * 4).round() + 1
    estimator = LGBMEstimator(objective="gamma", metric="gamma", num_rounds=3, backend="local")
    history = estimator.fit((x, y))
    expected = plain(x, y, 3, {"objective": "gamma"}).predict(x)
    np.testing.assert_allclose(estimator.predict(x), expected, rtol=1e-9)
    measured = estimator.evaluate((x, y), metrics=["gamma", "gamma_deviance"])
    assert measured["gamma"] == pytest.approx(history[-1]["train_gamma"])
    assert measured["gamma_deviance"] > 0


def test_aliases_of_parameters_have_the_effect_of_the_main_names():
    x, y = made(400)
    y = y + (np.nan_to_num(x[:, 3]) > 0.5)

    def predicted(**options):
        estimator = LGBMEstimator(num_rounds=4, backend="local", num_leaves=7, **options)
        estimator.fit((x, y > 0 if "application" in options else y), checkpoint_rounds=1)
        return estimator, estimator.predict(x)

    bagged = {"bagging_fraction": 0.3, "bagging_freq": 1}
    for alias, main in (("random_state", "seed"), ("bagging_fraction_seed", "bagging_seed")):
        by_alias = [predicted(**bagged, **{alias: value})[1] for value in (3, 4)]
        np.testing.assert_array_equal(by_alias[0], predicted(**bagged, **{main: 3})[1])
        assert not np.array_equal(*by_alias)
    np.testing.assert_array_equal(predicted(**bagged, seed=None)[1], predicted(**bagged)[1])
    estimator, scores = predicted(application="multiclass", num_classes=3)
    np.testing.assert_array_equal(estimator.predict(x, output="class"), scores.argmax(1))
    estimator, scores = predicted(application="binary")
    np.testing.assert_array_equal(estimator.predict(x, output="class"), scores > 0.5)
    for name in ("categorical_features", "label", "weight", "group", "query", "has_header"):
        with refused("argument-unknown", name):
            local(**{name: "a"})
    for name in ("early_stopping_min_delta", "first_metric_only"):
        with refused("argument-unknown", name):
            local(**{name: 1})
    with refused("argument-conflict", "num_leaves", "max_leaves"):
        local(max_leaves=3)


def test_a_labels_check_knows_the_alias_of_num_class():
    x, y = made(50)
    with refused("data-value", "num_class - 1 = 2", "from 2 to 3"):
        local(objective="multiclass", metric="multi_logloss", num_classes=3).fit((x, y + 2))


def test_early_stopping_ignores_rounds_without_a_number():
    x, y = made(300)
    values = iter([np.nan, 0.5, 0.7, 0.6, np.nan, np.nan])

    def metric(scores, rows):
        known = len(rows.get_label()) == 100
        return "quality", next(values) if known else 0.0, True

    estimator = local(metric=metric)
    rows = {"validation_data": made(100, 1), "early_stopping_rounds": 3}
    history = estimator.fit((x, y), **rows)
    assert len(history) == 6
    assert estimator.get_model().current_iteration() == 3
    with refused("argument-missing", "needs a metric", "metric="):
        local(metric="none").fit((x, y), **rows)
    with refused("argument-conflict", "boosting='dart'", "early_stopping_rounds"):
        local(boosting_type="dart").fit((x, y), **rows)


def test_a_continued_fit_that_cannot_split_has_no_rounds(tmp_path):
    x, y = made(300)
    estimator = local(num_rounds=2)
    estimator.fit((x, y))
    path = estimator.save(str(tmp_path / "trees.txt"))
    coarse = local(min_data_in_leaf=200)
    coarse.load(path)
    assert coarse.fit((x, y), num_rounds=3) == []
    assert coarse.get_model().current_iteration() == 2


def test_random_forests_do_not_continue():
    x, y = made(300)
    forest = local(boosting="rf", bagging_fraction=0.5, bagging_freq=1, num_rounds=2)
    with refused("argument-conflict", "random forest"):
        forest.fit((x, y), checkpoint_rounds=1)
    assert len(forest.fit((x, y))) == 2
    with refused("argument-conflict", "random forest"):
        forest.fit((x, y))


def test_importances_have_the_names_of_the_columns():
    x, y = made(300)
    frame = pd.DataFrame({"a b": x[:, 0], "c": x[:, 1], "y": y})
    estimator = local(num_rounds=2)
    estimator.fit(frame, ["a b", "c"], "y")
    assert set(estimator.feature_importances().feature) == {"a b", "c"}


def test_loaded_trees_have_the_missing_value_of_the_fit(tmp_path):
    x, y = made(400)
    rows = np.where(np.isnan(x), np.float32(-9), x)
    estimator = local(missing=-9)
    estimator.fit((rows, y))
    other = local()
    other.fit((x, y))
    paths = [each.save(str(tmp_path / f"{i}.txt")) for i, each in enumerate((estimator, other))]
    loaded = local()
    loaded.load(paths[0])
    np.testing.assert_array_equal(loaded.predict(rows), other.predict(x))
    loaded.load(paths[1])
    np.testing.assert_array_equal(loaded.predict(rows), other.predict(rows))


@pytest.mark.slow
def test_two_workers_weight_the_groups_of_a_ranking(tmp_path):
    random = np.random.default_rng(0)
    frame = pd.DataFrame(random.random((900, 2)), columns=list("ab")).astype("float32")
    frame["g"] = random.integers(0, 60, 900)
    frame["w"] = np.where(frame.g < 20, 9.0, 0.1)
    frame["m"] = random.random(900)  # no equal scores, whose order depends on that of the rows
    frame["y"] = random.integers(0, 4, 900).astype(float)
    options = {"objective": "lambdarank", "metric": "ndcg", "eval_at": 3, "num_rounds": 2}
    estimator, alone = local(2, **options), local(**options)
    estimator.fit(frame, list("ab"), "y", group_col="g", weight_col="w")
    alone.load(estimator.save(str(tmp_path / "ranking.txt")))
    columns = {"group_col": "g", "weight_col": "w", "base_margin_col": "m"}
    measured, expected = (
        each.evaluate(frame, list("ab"), "y", **columns) for each in (estimator, alone)
    )
    assert measured == pytest.approx(expected, rel=1e-6)


@pytest.mark.fault
@pytest.mark.slow
def test_a_worker_lost_after_the_end_grows_no_more_trees(tmp_path):
    x, y = made(3001)
    checkpoint, marker = tmp_path / "checkpoint.txt", str(tmp_path / "killed")

    def die(booster):
        while not checkpoint.exists():
            time.sleep(0.05)
        open(marker, "w").close()
        os.kill(os.getpid(), 9)

    def metric(scores, rows):
        if len(rows.get_label()) == 1500 and not os.path.exists(marker):
            lightgbm.Booster.free_network = die  # the second worker, after its last round
        return "worse", -float(np.abs(scores - 0.5).mean()), True  # in each round

    estimator = local(2, metric=metric, num_rounds=9, model_dir=str(tmp_path))
    history = estimator.fit((x, y), validation_data=(x[:99], y[:99]), early_stopping_rounds=2)
    assert os.path.exists(marker)
    assert [entry["round"] for entry in history] == [1, 2, 3]
    assert estimator.get_model().current_iteration() == 1
