"""Trees of XGBoost and LightGBM as models of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.orca.automl import hp
from bigdl.orca.automl.table.columns import BINARY, REGRESSION, MatrixRows
from bigdl.orca.automl.table.model import PreparedModel, TrainingSettings, softmax
from bigdl.orca.automl.table.preparation import FittedPreparation

if TYPE_CHECKING:
    import xgboost

_PATIENCE = 50  # rounds without an improvement
_MOST_ROUNDS = 2000
_FOREST_PART = 25  # trees between two checks of the deadline
_INTEGERS = ("num_leaves", "min_data_in_leaf")  # of LightGBM


@dataclass
class BoostedTrees(PreparedModel):
    """Boosted trees of XGBoost; categories are split as sets."""

    name = "xgboost"
    packages = ("xgboost",)
    defaults = ({"learning_rate": 0.08, "max_depth": 6},)

    booster: Any
    task: str

    @classmethod
    def space(cls):
        return {
            "learning_rate": hp.loguniform(0.02, 0.3),
            "max_depth": hp.randint(3, 10),
            "min_child_weight": hp.loguniform(0.3, 30),
            "subsample": hp.uniform(0.6, 1.0),
            "colsample_bytree": hp.uniform(0.4, 1.0),
            "reg_lambda": hp.loguniform(0.1, 20),
        }

    @classmethod
    def fit(cls, config, data):
        import xgboost

        class AtDeadline(xgboost.callback.TrainingCallback):
            def after_iteration(self, model, epoch, evals_log):
                return data.is_late

        settings = data.settings
        preparation = FittedPreparation.fit(data.rows, settings.counts)
        train = _tree_matrix(preparation, data.rows, data.y, settings.threads)
        held_out = _tree_matrix(preparation, data.held_out, data.held_out_y, settings.threads)
        stopping = xgboost.callback.EarlyStopping(
            rounds=_PATIENCE, save_best=True, min_delta=_least(settings)
        )
        booster = xgboost.train(
            {**_objective(settings), "nthread": settings.threads, "seed": settings.seed, **config},
            train,
            num_boost_round=_MOST_ROUNDS,
            evals=[(held_out, "held_out")],
            # Early stopping is first: it must see the round after which training is late.
            callbacks=[stopping, AtDeadline()],
            verbose_eval=False,
        )
        return cls(preparation, booster, settings.task)

    def scores(self, rows):
        matrix = _tree_matrix(self.preparation, rows)
        scores = self.booster.predict(matrix).astype(np.float64)
        return np.stack([1 - scores, scores], axis=1) if self.task == BINARY else scores

    def state(self):
        return {**super().state(), "booster": _booster_bytes(self.booster)}

    @classmethod
    def of_state(cls, state):
        return super().of_state({**state, "booster": _read_booster(state["booster"])})


@dataclass
class ForestModel(PreparedModel):
    """Random forest of XGBoost, grown in parts; its margin is the mean of their margins."""

    name = "forest"
    packages = ("xgboost",)
    defaults = (
        {
            "num_parallel_tree": 200,
            "learning_rate": 1.0,
            "max_depth": 12,
            "min_child_weight": 1.0,
            "subsample": 0.63,
            "colsample_bynode": 0.6,
            "reg_lambda": 1e-3,
        },
    )

    boosters: list[Any]
    task: str

    @classmethod
    def space(cls):
        return {
            **cls.defaults[0],
            "max_depth": hp.randint(6, 16),
            "min_child_weight": hp.loguniform(0.3, 10),
            "colsample_bynode": hp.uniform(0.2, 0.9),
        }

    @classmethod
    def fit(cls, config, data):
        import xgboost

        settings = data.settings
        preparation = FittedPreparation.fit(data.rows, settings.counts)
        train = _tree_matrix(preparation, data.rows, data.y, settings.threads)
        parameters = {**_objective(settings), "nthread": settings.threads, **config}
        remaining, boosters = config["num_parallel_tree"], []
        while remaining > 0 and not (boosters and data.is_late):
            trees = min(_FOREST_PART, remaining)
            part = {"num_parallel_tree": trees, "seed": settings.seed + len(boosters)}
            boosters.append(xgboost.train({**parameters, **part}, train, num_boost_round=1))
            remaining -= trees
        return cls(preparation, boosters, settings.task)

    def scores(self, rows):
        matrix = _tree_matrix(self.preparation, rows)
        parts = [each.predict(matrix, output_margin=True) for each in self.boosters]
        margins = np.mean(parts, axis=0, dtype=np.float64)
        if self.task == BINARY:
            margins = np.stack([np.zeros_like(margins), margins], axis=1)
        return margins if self.task == REGRESSION else softmax(margins)

    def state(self):
        return {**super().state(), "boosters": list(map(_booster_bytes, self.boosters))}

    @classmethod
    def of_state(cls, state):
        return super().of_state({**state, "boosters": list(map(_read_booster, state["boosters"]))})


def _booster_bytes(booster: xgboost.Booster) -> np.ndarray:
    return np.frombuffer(bytes(booster.save_raw("ubj")), np.uint8).copy()


def _read_booster(data: np.ndarray) -> xgboost.Booster:
    import xgboost

    booster = xgboost.Booster()
    booster.load_model(bytearray(data.tobytes()))
    return booster


def _least(settings: TrainingSettings) -> float:
    """Return the smallest improvement of the loss that counts."""
    return 0.0 if settings.task == REGRESSION else 1e-5


def _objective(settings: TrainingSettings) -> dict[str, Any]:
    if settings.task == REGRESSION:
        return {"objective": "reg:squarederror"}
    if settings.task == BINARY:
        return {"objective": "binary:logistic", "eval_metric": "logloss"}
    return {"objective": "multi:softprob", "num_class": settings.classes, "eval_metric": "mlogloss"}


def _tree_matrix(
    preparation: FittedPreparation, rows: MatrixRows, y: np.ndarray | None = None, threads: int = 0
) -> xgboost.DMatrix:
    import xgboost

    numbers = rows.numbers.shape[1]
    return xgboost.DMatrix(
        preparation.tree_matrix(rows),
        y,
        feature_types=["q"] * numbers + ["c"] * rows.codes.shape[1],
        enable_categorical=True,
        nthread=threads or None,
    )


@dataclass
class LightGBMModel(PreparedModel):
    """Boosted trees of LightGBM."""

    name = "lightgbm"
    packages = ("lightgbm",)
    extra = "lightgbm"
    defaults = ({"learning_rate": 0.05, "num_leaves": 31},)

    booster: Any
    task: str

    @classmethod
    def space(cls):
        return {
            "learning_rate": hp.loguniform(0.02, 0.2),
            "num_leaves": hp.qloguniform(8, 256, 1),
            "min_data_in_leaf": hp.qloguniform(2, 64, 1),
            "feature_fraction": hp.uniform(0.4, 1.0),
            "bagging_fraction": hp.uniform(0.6, 1.0),
            "lambda_l2": hp.loguniform(1e-2, 20),
        }

    @classmethod
    def fit(cls, config, data):
        import lightgbm

        def stop_at_deadline(state):
            if data.is_late:
                raise lightgbm.callback.EarlyStopException(state.iteration, [])

        settings = data.settings
        preparation = FittedPreparation.fit(data.rows, settings.counts)
        numbers, width = data.rows.numbers.shape[1], len(settings.counts)
        parameters = {
            **_lightgbm_objective(settings),
            "bagging_freq": 1,
            "deterministic": True,
            "force_row_wise": True,
            "num_threads": settings.threads,
            "seed": settings.seed,
            "verbosity": -1,
            **{k: int(v) if k in _INTEGERS else v for k, v in config.items()},
        }
        train = lightgbm.Dataset(
            preparation.tree_matrix(data.rows),
            data.y,
            categorical_feature=list(range(numbers, numbers + width)),
            params=parameters,
        )
        held_out = lightgbm.Dataset(
            preparation.tree_matrix(data.held_out), data.held_out_y, reference=train
        )
        stopping = lightgbm.early_stopping(_PATIENCE, verbose=False, min_delta=_least(settings))
        booster = lightgbm.train(
            parameters,
            train,
            _MOST_ROUNDS,
            valid_sets=[held_out],
            callbacks=[stopping, stop_at_deadline],
        )
        return cls(preparation, booster, settings.task)

    def scores(self, rows):
        scores = self.booster.predict(self.preparation.tree_matrix(rows))
        return np.stack([1 - scores, scores], axis=1) if self.task == BINARY else scores

    def state(self):
        state = super().state()
        state["text"] = state.pop("booster").model_to_string()
        return state

    @classmethod
    def of_state(cls, state):
        import lightgbm

        values = dict(state)
        values["booster"] = lightgbm.Booster(model_str=values.pop("text"))
        return super().of_state(values)


def _lightgbm_objective(settings: TrainingSettings) -> dict[str, Any]:
    if settings.task == REGRESSION:
        return {"objective": "regression"}
    if settings.task == BINARY:
        return {"objective": "binary"}
    return {"objective": "multiclass", "num_class": settings.classes}
