"""Hyperparameter search for XGBoost models."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.checks import check_positive
from bigdl.common.cpu import core_count
from bigdl.common.errors import UsageError, hide_frames, require
from bigdl.common.private_folders import private_root, scratch_folder
from bigdl.orca.automl.auto_estimator import AutoEstimator
from bigdl.orca.automl.model.data import ArrayShard, TrialRows, is_category
from bigdl.orca.automl.pytorch_utils import LR_NAME
from bigdl.orca.automl.trial import Builder, TrialJob, TrialModel, compute_metrics
from bigdl.orca.learn.trees.matrix import (
    ShardMatrix,
    TreeColumns,
    exact_matrix,
    feature_widths,
    is_external,
    quantile_matrix,
)
from bigdl.runtime.shards.values import is_frame

if TYPE_CHECKING:
    import pandas as pd
    import xgboost

    from bigdl.runtime.worker import Worker

    Features = np.ndarray | pd.DataFrame | ShardMatrix

__all__ = ["AutoXGBClassifier", "AutoXGBRegressor", "XGBoostModelBuilder"]

_DEFAULTS = {
    "n_estimators": 1000,
    "max_depth": 5,
    "tree_method": "hist",
    "n_jobs": -1,
    "random_state": 2,
    "learning_rate": 0.1,
    "min_child_weight": 1,
    "gamma": 0,
    "subsample": 0.8,
    "colsample_bytree": 0.8,
    "reg_alpha": 0,
    "reg_lambda": 1,
}
# metrics that XGBoost computes itself; a name may end with @ and a number
_MIN = (
    *("rmse", "rmsle", "mae", "mape", "mphe", "logloss", "error", "merror", "mlogloss"),
    *("poisson-nloglik", "gamma-nloglik", "gamma-deviance", "tweedie-nloglik", "quantile"),
)
_MAX = ("auc", "aucpr", "pre", "ndcg", "map")
_MODES = dict.fromkeys(_MIN, "min") | dict.fromkeys(_MAX, "max")


class XGBoostModelBuilder(Builder):
    """Builder of XGBoost models.

    Parameters
    ----------
    model_type : {"classifier", "regressor"}
    cpus_per_trial : int
        Threads per model, unless ``n_jobs`` is given.
    xgb_configs : dict
        Parameters of all models; a configuration overrides them.

    Attributes
    ----------
    is_classifier : bool
        True if targets are classes.
    parameters : dict
        Parameters of all models.
    """

    nulls_are_missing = True
    takes_categories = True

    def __init__(self, model_type: str, cpus_per_trial: int, xgb_configs: Mapping[str, Any]):
        require("xgboost", "xgboost")
        require("sklearn", "xgboost")
        self.is_classifier = model_type == "classifier"
        self.parameters = {**_DEFAULTS, "n_jobs": cpus_per_trial, **xgb_configs}

    def build(self, config, job, worker):
        device = {"device": "cuda"} if job.gpus else {}
        parameters = {**self.parameters, **device, **_parameters_of(config)}
        if _is_large(job, parameters):
            return _LargeXGBoostModel(self, parameters, config, job, worker)
        return _XGBoostModel(self, parameters, config, job)

    def load(self, config, weights):
        model = self.estimator({**self.parameters, **_parameters_of(config)})
        model.load_model(bytearray(weights))
        if "c" in (model.get_booster().feature_types or ()):
            model.set_params(enable_categorical=True)
        return model

    def default_metric(self, make_config):
        return "logloss" if self.is_classifier else "rmse"

    def knows(self, metric):
        mode = _MODES.get(metric.partition("@")[0])
        return mode is not None, mode

    def estimator(self, parameters: Mapping[str, Any]):
        """Create an estimator of ``xgboost.sklearn``."""
        import xgboost

        estimator_class = xgboost.XGBClassifier if self.is_classifier else xgboost.XGBRegressor
        return estimator_class(**parameters)


def _parameters_of(config) -> dict[str, Any]:
    """Convert a configuration to XGBoost's parameter names."""
    parameters = dict(config)
    if LR_NAME in parameters:
        parameters.setdefault("learning_rate", parameters.pop(LR_NAME))
    return parameters


class _XGBoostModel(TrialModel):
    """XGBoost model that a trial trains.

    The trees are grown in `job.epochs` parts.

    Parameters
    ----------
    builder : XGBoostModelBuilder
    parameters : dict
        Parameters of the model.
    config : dict
        Argument of functions that create the data.
    job : TrialJob
    """

    def __init__(
        self,
        builder: XGBoostModelBuilder,
        parameters: dict[str, Any],
        config: dict[str, Any],
        job: TrialJob,
    ):
        self._builder, self._parameters, self._job = builder, parameters, job
        self._train = self._rows(job.train, config)
        self._validation: tuple[Any, np.ndarray] | None = None
        if job.validation is not None:
            x, y = self._rows(job.validation, config)
            self._validation = _with_categories_of(self._train[0], x), y
        if _categories(self._train[0]):
            parameters.setdefault("enable_categorical", True)
        self._stops_early = parameters.get("early_stopping_rounds") is not None
        if self._stops_early and self._validation is None:
            raise UsageError(
                "early_stopping_rounds needs validation_data for the validation score; pass it "
                "to fit",
                code="argument-missing",
                argument="validation_data",
            )
        trees = check_positive("n_estimators", parameters.pop("n_estimators"))
        self._parts = [len(part) for part in np.array_split(range(int(trees)), job.epochs)]
        self._epoch = 0
        self.model: Any = None

    def _rows(self, data: object, config: dict[str, Any]) -> tuple[Any, np.ndarray]:
        return _matrix(data, config)

    def epoch(self):
        trees = self._parts[self._epoch]
        self._epoch += 1
        metrics = self._job.goal.metrics
        native = [m.name for m in metrics if m.function is None and self._builder.knows(m.name)[0]]
        if trees and not self._has_stopped():  # a part is empty if there are more epochs than trees
            self._grow(trees, native)
        x, y = self._train if self._validation is None else self._validation
        results = {name: self._native(name, x, y) for name in native}
        others = [metric for metric in metrics if metric.name not in native]
        if others:
            values = compute_metrics([y], [self._predicted(x)], others)
            results.update(zip((m.name for m in others), values, strict=True))
        return [results[metric.name] for metric in metrics]

    def _grow(self, trees: int, native: list[str]) -> None:
        """Grow more trees, with early stopping on the validation data."""
        _, y = self._train
        parameters, fit_options = dict(self._parameters), {}
        if self._stops_early:
            fit_options = {"eval_set": [self._validation]}
            if native and "eval_metric" not in parameters:
                classes = len(np.unique(y)) if self._builder.is_classifier else 0
                parameters["eval_metric"] = _name_for(native[0], classes)
        grown = self._builder.estimator({**parameters, "n_estimators": trees})
        before = None if self.model is None else self.model.get_booster()
        self._fit(grown, before, fit_options)
        self.model = grown

    def _fit(
        self,
        estimator: xgboost.XGBModel,
        before: xgboost.Booster | None,
        fit_options: dict[str, Any],
    ) -> None:
        x, y = self._train
        estimator.fit(x, y, xgb_model=before, verbose=False, **fit_options)

    def _has_stopped(self) -> bool:
        if not self._stops_early or self.model is None:
            return False
        booster = self.model.get_booster()
        best = booster.attr("best_iteration")
        rounds_without_improvement = booster.num_boosted_rounds() - 1 - int(best or 0)
        return (
            best is not None
            and rounds_without_improvement >= self._parameters["early_stopping_rounds"]
        )

    def weights(self):
        return bytes(self.model.get_booster().save_raw("ubj"))

    def state(self):
        return self._epoch, b"" if self.model is None else self.weights()

    def restore(self, state):
        self._epoch, weights = state
        if weights:
            self.model = self._builder.estimator(self._parameters)
            self.model.load_model(bytearray(weights))

    def _native(self, name: str, x, y) -> float:
        name = _name_for(name, self.model.n_classes_ if self._builder.is_classifier else 0)
        booster = self.model.get_booster()
        if self._stops_early:
            booster = booster[: booster.best_iteration + 1]
        booster.set_param({"eval_metric": name})
        # earlier eval_metric settings come first
        return float(booster.eval(self._exact(x, y), name="v").rpartition(":")[2])

    def _exact(self, x: Features, y: np.ndarray) -> xgboost.DMatrix:
        """Return a matrix of exact values."""
        import xgboost

        missing = float(self._parameters.get("missing", np.nan))
        return xgboost.DMatrix(x, y, missing=missing, enable_categorical=True)

    def _predicted(self, x: Features) -> np.ndarray:
        return np.asarray(self.model.predict(x))


class _LargeXGBoostModel(_XGBoostModel):
    """XGBoost model of rows in files, whose matrices do not fit in memory.

    XGBoost reads the rows in batches, as in :class:`~bigdl.orca.learn.trees.XGBEstimator`, and
    grows the same trees as in memory.

    Parameters
    ----------
    builder, parameters, config, job
        See the base class.
    worker : Worker
        Worker of the trial, which removes the files at its end.
    """

    def __init__(
        self,
        builder: XGBoostModelBuilder,
        parameters: dict[str, Any],
        config: dict[str, Any],
        job: TrialJob,
        worker: Worker,
    ):
        self._folder = scratch_folder("matrix")
        worker.at_exit(self._close)
        self._matrices: dict[str, xgboost.DMatrix] = {}
        super().__init__(builder, parameters, config, job)

    def _rows(self, data: object, config: dict[str, Any]) -> tuple[ShardMatrix, np.ndarray]:
        assert isinstance(data, TrialRows)
        rows = _shard_matrix(data)
        (targets,) = data.targets.values()
        return rows, targets[:, 0] if targets.shape[1:] == (1,) else targets

    def _binned(self, name: str, rows: ShardMatrix) -> xgboost.DMatrix:
        """Return XGBoost's binned matrix of the rows, which is built once."""
        if name not in self._matrices:
            threads = int(self._parameters.get("n_jobs", 0))
            missing = float(self._parameters.get("missing", np.nan))
            self._matrices[name] = quantile_matrix(
                rows,
                self._subfolder(),
                self._parameters,
                missing,
                threads,
                self._matrices.get("train"),
            )
        return self._matrices[name]

    def _close(self) -> None:
        self._matrices.clear()  # before their files are removed
        self._folder.cleanup()

    def _subfolder(self) -> str:
        return tempfile.mkdtemp(dir=self._folder.name)

    def _fit(
        self,
        estimator: xgboost.XGBModel,
        before: xgboost.Booster | None,
        fit_options: dict[str, Any],
    ) -> None:
        import xgboost

        rows, y = self._train
        parameters = estimator.get_xgb_params()
        classes = len(np.unique(y)) if self._builder.is_classifier else 0
        if classes > 2:
            parameters.update(objective="multi:softprob", num_class=classes)
        train = self._binned("train", rows)
        evals = []
        if fit_options:
            assert self._validation is not None
            evals = [(self._binned("validation", self._validation[0]), "validation_0")]
        booster = xgboost.train(
            parameters,
            train,
            estimator.n_estimators,
            evals=evals,
            early_stopping_rounds=estimator.early_stopping_rounds if evals else None,
            verbose_eval=False,
            xgb_model=before,
        )
        booster.feature_names = booster.feature_types = None  # as for arrays
        estimator.load_model(bytearray(booster.save_raw("ubj")))

    def _exact(self, x: Features, y: np.ndarray) -> xgboost.DMatrix:
        assert isinstance(x, ShardMatrix)
        if "exact" not in self._matrices:
            missing = float(self._parameters.get("missing", np.nan))
            threads = int(self._parameters.get("n_jobs", 0))
            matrix = exact_matrix(x, self._subfolder(), missing, threads)
            matrix.feature_names = matrix.feature_types = None
            self._matrices["exact"] = matrix
        return self._matrices["exact"]

    def _predicted(self, x: Features) -> np.ndarray:
        assert isinstance(x, ShardMatrix)
        batches = list(x.batches())
        buffer = np.empty((max(high - low for low, high in batches), x.width), np.float32)
        parts = [self.model.predict(x.batch(*each, buffer)["data"]) for each in batches]
        return np.concatenate(parts)


def _is_large(job: TrialJob, parameters: Mapping[str, Any]) -> bool:
    """Return True if the binned rows of a search should be in a file."""
    data = [each for each in (job.train, job.validation) if each is not None]
    if not all(isinstance(each, TrialRows) and not each.categories for each in data):
        return False
    if any(len(each.targets) > 1 or callable(parameters.get("objective")) for each in data):
        return False
    if callable(parameters.get("eval_metric")) or job.gpus or parameters["tree_method"] != "hist":
        return False
    if parameters.get("booster", "gbtree") not in ("gbtree", "dart"):
        return False
    trials_here = max(1, core_count() // max(1, int(parameters.get("n_jobs") or 1)))
    return is_external([_shard_matrix(each) for each in data], trials_here)


def _shard_matrix(rows: TrialRows) -> ShardMatrix:
    """Return the rows of a search as a matrix that is read in batches."""
    shard = ArrayShard(rows)
    columns = TreeColumns(tuple(rows.features), tuple(rows.targets))
    return ShardMatrix(shard, columns, {}, feature_widths(shard, columns))


def _name_for(metric: str, classes: int) -> str:
    """Return XGBoost's name of a metric, which depends on the number of classes."""
    return {"logloss": "mlogloss", "error": "merror"}.get(metric, metric) if classes > 2 else metric


def _matrix(data: object, config: dict[str, Any]) -> tuple[np.ndarray | pd.DataFrame, np.ndarray]:
    """Convert data to targets and one feature matrix, or a frame if features have categories.

    Parameters
    ----------
    data : TrialRows, DataLoader or callable
        A function takes the configuration and returns ``(x, y)`` or a DataLoader.
    config : dict
    """
    if callable(data):
        data = data(dict(config))
    if isinstance(data, tuple) and len(data) == 2:
        x, y = data[0] if _categories(data[0]) else np.asarray(data[0]), np.asarray(data[1])
        x = x if is_frame(x) else x.reshape(len(x), -1)
        return x, y[:, 0] if y.shape[1:] == (1,) else y
    if not isinstance(data, TrialRows):
        return _matrix_of_batches(data)
    columns = [each.reshape(len(each), -1) for each in data.features.values()]
    x = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
    if data.categories:
        x = _frame_of(data)
    targets = [each[:, 0] if each.shape[1:] == (1,) else each for each in data.targets.values()]
    return x, targets[0] if len(targets) == 1 else np.stack(targets, axis=1)


def _frame_of(data: TrialRows) -> pd.DataFrame:
    """Convert features to a frame; array-valued features become columns ``name_0``, ``name_1``."""
    import pandas as pd

    columns: list[tuple[str, Any]] = []
    for name, values in data.features.items():
        if name in data.categories:
            categories = pd.Categorical.from_codes(values, data.categories[name])
            columns.append((str(name), categories))
        elif values.ndim == 1:
            columns.append((str(name), values))
        else:
            parts = values.reshape(len(values), -1).T
            columns += [(f"{name}_{index}", part) for index, part in enumerate(parts)]
    frame = pd.DataFrame({index: values for index, (_, values) in enumerate(columns)})
    frame.columns = [name for name, _ in columns]
    return frame


def _categories(x: Any) -> dict[str, Any]:
    """Return the categories of each categorical column of a frame."""
    if not is_frame(x):
        return {}
    columns = (x.iloc[:, index] for index in range(x.shape[1]))
    return {column.name: column.cat.categories for column in columns if is_category(column)}


def _with_categories_of(train: Any, x: Any) -> Any:  # a frame or an array, as `x`
    """Encode the categories of validation data with the codes of the training data."""
    known, categorical = _categories(train), _categories(x)
    if known.keys() != categorical.keys():
        raise UsageError(
            "data and validation_data must have the same categorical columns, but have "
            f"{list(known)} and {list(categorical)}",
            code="data-schema",
            columns=list(categorical),
        )
    if not known:
        return x
    x = x.copy(deep=False)
    for name, categories in known.items():
        unknown = [value for value in x[name].dropna().unique() if value not in categories]
        if unknown:
            raise UsageError(
                f"Column {name!r} of validation_data has categories that data lacks: "
                f"{unknown[:5]}; use the same categories, such as with astype(data"
                f"[{name!r}].dtype), which converts the others to missing values",
                code="data-value",
                column=name,
            )
        x[name] = x[name].cat.set_categories(categories)
    return x


def _matrix_of_batches(loader: object) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate a loader's batches ``(x, y)`` into a feature matrix and targets."""
    if not hasattr(loader, "__iter__"):
        raise UsageError(
            "The data of AutoXGBoost must be arrays, DataFrames, XShards, Parquet files, a "
            "DataLoader of (x, y), or a function of the configuration that returns (x, y) or such "
            f"a loader, got {type(loader).__name__}",
            code="data-type",
            argument="data",
        )
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for batch in loader:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UsageError(
                "The batches of a DataLoader for AutoXGBoost must be (x, y), got "
                f"{type(batch).__name__} of {len(batch)}",
                code="data-structure",
            )
        x, y = (np.asarray(each) for each in batch)
        parts.append((x.reshape(len(x), -1), y))
    if not parts:
        raise UsageError("The DataLoader given to AutoXGBoost has no batches", code="data-empty")
    x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
    return x, y[:, 0] if y.shape[1:] == (1,) else y


@hide_frames
class _AutoXGBoost(AutoEstimator):
    _model_type: str

    def __init__(
        self,
        logs_dir: str | None = None,
        cpus_per_trial: int = 1,
        name: str | None = None,
        remote_dir: str | None = None,
        *,
        backend: str | None = None,
        **xgb_configs: Any,
    ):
        check_positive("cpus_per_trial", cpus_per_trial)
        default_name = f"auto_xgb_{self._model_type}"
        super().__init__(
            XGBoostModelBuilder(self._model_type, cpus_per_trial, xgb_configs),
            logs_dir or os.path.join(private_root(tempfile.gettempdir()), f"{default_name}_logs"),
            {"cpu": cpus_per_trial},
            remote_dir,
            name or default_name,
            backend=backend,
        )


@hide_frames
class AutoXGBClassifier(_AutoXGBoost):
    """Hyperparameter search over ``xgboost.XGBClassifier`` that keeps the best model.

    The methods are those of :class:`~bigdl.orca.automl.auto_estimator.AutoEstimator`. The `metric`
    of ``fit`` may also be an XGBoost metric (default ``"logloss"``), which XGBoost computes. The
    columns of frames become one matrix. With ``epochs=n`` the trees are grown in n parts, and a
    scheduler may stop a trial after each. Nulls and NaN in features are missing values, and pandas
    columns of dtype ``category`` are categories (``enable_categorical``). With
    ``early_stopping_rounds`` the validation data is the ``eval_set``, monitored with
    ``eval_metric`` or else the first XGBoost metric. Data may also be a function of the
    configuration that returns ``(x, y)`` or a DataLoader.
    If binned rows do not fit in a fourth of the available memory, they are in a file, as in
    :class:`~bigdl.orca.learn.trees.XGBEstimator`, and the trees are the same.

    Parameters
    ----------
    logs_dir : str, optional
        As in :class:`~bigdl.orca.automl.auto_estimator.AutoEstimator`; the default folder is named
        ``auto_xgb_classifier_logs`` or ``auto_xgb_regressor_logs``.
    cpus_per_trial : int, default 1
        Threads per trial.
    name : str, optional
        Name of the search's folder.
    remote_dir, backend : optional
        See :class:`~bigdl.orca.automl.auto_estimator.AutoEstimator`.
    **xgb_configs
        Parameters of all models, such as ``n_estimators`` (default 1000) and ``max_depth``
        (default 5); the search space overrides them. ``"lr"`` in a search space sets
        ``learning_rate``.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca.automl import hp
    >>> from bigdl.orca.automl.xgboost import AutoXGBClassifier
    >>> x = np.linspace(-1, 1, 64)[:, None]
    >>> y = (x[:, 0] > 0).astype(int)
    >>> search = AutoXGBClassifier(logs_dir="logs", backend="local", n_estimators=5)
    >>> search.fit(
    ...     (x, y), validation_data=(x, y), metric="accuracy",
    ...     search_space={"learning_rate": hp.grid_search([1e-9, 0.5])},
    ... )
    >>> search.get_best_model().predict(np.array([[-0.7], [0.7]]))
    array([0, 1])
    """

    _model_type = "classifier"


@hide_frames
class AutoXGBRegressor(_AutoXGBoost):
    """Hyperparameter search over ``xgboost.XGBRegressor`` that keeps the best model.

    The default metric is ``"rmse"``; otherwise it is used like :class:`AutoXGBClassifier`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca.automl import hp
    >>> from bigdl.orca.automl.xgboost import AutoXGBRegressor
    >>> x = np.linspace(-1, 1, 64)[:, None]
    >>> search = AutoXGBRegressor(logs_dir="logs", backend="local", n_estimators=5)
    >>> search.fit(
    ...     (x, x[:, 0]), validation_data=(x, x[:, 0]), metric="rmse",
    ...     search_space={"learning_rate": hp.grid_search([0.001, 0.5])},
    ... )
    >>> search.get_best_config()["learning_rate"]
    0.5
    """

    _model_type = "regressor"
