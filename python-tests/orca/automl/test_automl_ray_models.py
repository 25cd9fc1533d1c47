"""Test AutoEstimator on Ray with Keras and XGBoost models against local searches."""

import numpy as np
import pytest
import ray_models as rays
from small_searches import rows

from bigdl.orca.automl import hp

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")
pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'bigdl[automl]'")

VALIDATION = rows(60, 1)


@pytest.fixture(scope="module", autouse=True)
def on_ray():
    return rays.active_ray()


def both(make, tmp_path, data=None, **options):
    """Run a search on this machine and on Ray, and return their trials."""
    estimators = []
    for backend in ("local", "ray"):
        est = make(logs_dir=str(tmp_path / backend), backend=backend)
        arguments = {"validation_data": VALIDATION, "concurrency": 1, **options}
        est.fit(rows() if data is None else data, **arguments)
        estimators.append(est)
    local, on_ray = (est.trials() for est in estimators)
    assert on_ray["status"].tolist() == local["status"].tolist()
    values = [name for name in local if name not in ("status", "seconds", "failure")]
    assert np.allclose(on_ray[values].astype(float), local[values].astype(float), rtol=1e-4)
    assert estimators[0].get_best_config() == estimators[1].get_best_config()
    return estimators[1]


@pytest.mark.slow
def test_keras_models_are_searched(tmp_path):
    keras = pytest.importorskip("keras", reason="Keras is not installed: pip install 'bigdl[tf]'")
    from bigdl.orca.automl.auto_estimator import AutoEstimator

    def model(config):
        import keras

        layers = keras.layers
        made = keras.Sequential(
            [layers.Input((4,)), layers.Dense(config["units"], "tanh"), layers.Dense(1)]
        )
        made.compile(keras.optimizers.Adam(config["lr"]), loss="mse", metrics=["mae"])
        return made

    def make(**options):
        return AutoEstimator.from_keras(model_creator=model, **options)

    space = {"lr": 0.01, "units": hp.grid_search([4, 8]), "shuffle": False}
    est = both(make, tmp_path, epochs=2, search_space=space)
    best = est.get_best_model()
    assert isinstance(best, keras.Model)
    x, y = VALIDATION
    error = np.abs(best.predict(x, verbose=0)[:, 0] - y).mean()
    assert est.trials()["mae"].min() == pytest.approx(error, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "metric"), [("Regressor", "rmse"), ("Classifier", "logloss")], ids=str
)
def test_models_of_xgboost_are_searched(tmp_path, task, metric):
    xgboost = pytest.importorskip("xgboost", reason="XGBoost is not installed: bigdl[xgboost]")
    from bigdl.orca.automl import xgboost as auto

    def make(**options):
        return getattr(auto, f"AutoXGB{task}")(n_estimators=8, **options)

    def for_task(data):
        x, y = data
        return (x, y) if task == "Regressor" else (x, (y > 0).astype(int))

    space = {"max_depth": hp.grid_search([1, 3]), "lr": 0.3}
    data = {"data": for_task(rows()), "validation_data": for_task(VALIDATION)}
    est = both(make, tmp_path, search_space=space, epochs=2, **data)
    assert metric in est.trials()
    assert isinstance(est.get_best_model(), getattr(xgboost, f"XGB{task}"))
    assert est.get_best_model().get_booster().num_boosted_rounds() == 8
