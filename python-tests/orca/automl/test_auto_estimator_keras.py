"""Test AutoEstimator with Keras models."""

import numpy as np
import pytest
from refusals import refused
from small_searches import rows

from bigdl.common.errors import UsageError
from bigdl.orca.automl import hp
from bigdl.orca.automl.auto_estimator import AutoEstimator

keras = pytest.importorskip("keras", reason="Keras is not installed: pip install 'bigdl[tf]'")
pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'bigdl[automl]'")

VALIDATION = rows(60, 1)
SPACE = {"lr": hp.loguniform(1e-3, 1e-1), "units": hp.grid_search([4, 8])}


def model(config):
    import keras

    made = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(config.get("units", 4), activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    made.compile(keras.optimizers.Adam(config.get("lr", 0.01)), loss="mse", metrics=["mae"])
    return made


def fit(tmp_path, data=None, creator=model, **options):
    est = AutoEstimator.from_keras(model_creator=creator, logs_dir=str(tmp_path), backend="local")
    fit_options = {
        "epochs": 2,
        "validation_data": VALIDATION,
        "search_space": SPACE,
        "concurrency": 1,
        **options,
    }
    est.fit(rows() if data is None else data, **fit_options)
    return est


def test_the_best_model_has_the_best_figure_and_is_compiled(tmp_path):
    est = fit(tmp_path, metric="mse")
    best = est.get_best_model()
    x, y = VALIDATION
    predicted = best.predict(x, verbose=0)[:, 0]
    assert est.trials()["mse"].min() == pytest.approx(((predicted - y) ** 2).mean(), rel=1e-4)
    assert best.evaluate(x, y, verbose=0, return_dict=True)["mae"] == pytest.approx(
        abs(predicted - y).mean(), rel=1e-4
    )


@pytest.mark.slow
def test_the_metric_is_by_default_the_first_one_that_was_compiled(tmp_path):
    assert "mae" in fit(tmp_path, epochs=1).trials()

    def compiled(**metrics):
        def creator(config):
            made = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
            made.compile("sgd", loss="mse", **metrics)
            return made

        return creator

    space = {"epochs": 1, "search_space": {}}
    assert "loss" in fit(tmp_path, creator=compiled(), **space).trials()
    of_an_object = compiled(metrics=[keras.metrics.MeanSquaredError("mse")])
    assert "mse" in fit(tmp_path, creator=of_an_object, **space).trials()


def test_metrics_that_only_the_model_knows_need_a_mode(tmp_path):
    def cosine(config):
        made = model(config)
        made.compile("sgd", loss="mse", metrics=["cosine_similarity"])
        return made

    options = {"metric": "cosine_similarity", "epochs": 1, "creator": cosine}
    with pytest.raises(UsageError, match="specify the `metric_mode` parameter"):
        fit(tmp_path, **options)
    assert "cosine_similarity" in fit(tmp_path, metric_mode="max", **options).trials()


@pytest.mark.slow
def test_functions_make_datasets(tmp_path):
    tf = pytest.importorskip("tensorflow")

    def dataset(data):
        return lambda config: tf.data.Dataset.from_tensor_slices(data).batch(32)

    space = {"lr": 0.01, "shuffle": False}
    fits = [
        fit(tmp_path, data, validation_data=validation, search_space=space, metric=["mse", "loss"])
        for data, validation in ((rows(), VALIDATION), (dataset(rows()), dataset(VALIDATION)))
    ]
    for metric in ("mse", "loss"):
        first, second = (each.trials()[metric][0] for each in fits)
        assert first == pytest.approx(second, rel=1e-4)


def test_a_model_goes_on_from_its_state_with_its_own_rate():
    from bigdl.orca.automl.model.base_keras_model import KerasModelBuilder
    from bigdl.orca.automl.model.data import TrialRows
    from bigdl.orca.automl.trial import SearchGoal, TrialJob, TrialRun

    x, y = rows()
    builder, data = KerasModelBuilder(model), TrialRows({"x": x}, {"y": y})
    job = TrialJob(builder, data, None, SearchGoal.of("mse"), epochs=2)
    first, second = TrialRun(job, {"lr": 0.01}), TrialRun(job, {"lr": 0.02})
    first.step()
    second.restore(first.state())
    one, other = first.model.model, second.model.model
    for weight, same in zip(one.weights, other.weights, strict=True):
        assert np.array_equal(weight, same)
    assert float(other.optimizer.iterations) == 5
    assert float(other.optimizer.learning_rate) == pytest.approx(0.02)
    assert second.step().is_last


def test_wrong_creators_say_what_is_wrong(tmp_path):
    with refused("argument-type"):
        fit(tmp_path, creator=3)
    with refused("model-type"):
        fit(tmp_path, creator=lambda config: keras.Sequential([keras.layers.Dense(1)]))
