"""Estimator of gradient boosted trees."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bigdl.common.checks import check_choice, check_integer, check_positive
from bigdl.common.display import call_text
from bigdl.common.errors import UsageError, hide_frames, require
from bigdl.common.storage import read_bytes, write_bytes
from bigdl.orca.data.feeds import as_feed, input_type_of, names_of
from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.inference.shipping import ModelBytes, ShippedModel, ship_model
from bigdl.orca.learn.backends import BACKENDS, resolve_backend
from bigdl.orca.learn.estimator import PredictingEstimator, PredictionRequest
from bigdl.orca.learn.prediction.classes import Scores, unknown_scores
from bigdl.orca.learn.prediction.predictor import PredictOptions
from bigdl.orca.learn.prediction.sample import Sample
from bigdl.orca.learn.prediction.typed import typed_predict
from bigdl.orca.learn.trees.matrix import TreeColumns
from bigdl.orca.learn.trees.model import TreeCheckpoint, TreeModel, read_booster, read_facts
from bigdl.orca.learn.trees.program import (
    CHECKPOINT,
    TRACKER,
    Metric,
    Objective,
    TreeEvaluation,
    TreeFit,
    message_of,
)
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.engine import Engine, OpenJob
from bigdl.runtime.failure import FailurePolicy
from bigdl.runtime.local import LocalMachine
from bigdl.runtime.shards.feed import Feed
from bigdl.runtime.shards.texts import with_texts
from bigdl.runtime.shards.values import is_frame

if TYPE_CHECKING:
    import pandas as pd
    import xgboost
    from pyspark.sql import Column

    from bigdl.common.types import ColumnNames

logger = logging.getLogger("bigdl.orca")

_BATCH_ROWS = 8192
_SETTINGS = {
    "nthread": "the backend sets the threads of its workers",
    "n_jobs": "the backend sets the threads of its workers",
    "n_estimators": "pass num_rounds",
    "num_boost_round": "pass num_rounds",
    "enable_categorical": "pass categorical_cols to fit",
    "early_stopping_rounds": "pass it to fit",
    "missing": "pass missing= to XGBEstimator",
}
_CLASSES = {"binary:logistic": False, "multi:softprob": True}
"""Objectives with probabilities: whether the classes are exclusive."""


@dataclass
class TreeRequest(PredictionRequest):
    """Arguments of a prediction with trees.

    Attributes
    ----------
    result : {"value", "margin", "leaf", "contributions"}
    has_margin : bool
        Whether the last feature is the base margin.
    """

    result: str = "value"
    has_margin: bool = False


@hide_frames
class XGBEstimator(PredictingEstimator):
    """Estimator that trains boosted trees with XGBoost on data of any size.

    Each worker writes its rows to disk once. XGBoost reads them in batches and keeps binned
    values, in memory or in a memory-mapped file. Labels, weights and gradients stay in memory,
    about 30 bytes per row. The workers sum their histograms, so all of them grow the same trees.
    With one worker, the trees are those of ``xgboost.train`` on the same rows.

    Parameters
    ----------
    params : dict, optional
        Parameters of XGBoost, such as ``{"objective": "binary:logistic", "max_depth": 6}``. The
        values of ``objective`` and ``eval_metric`` may be functions of (predictions, matrix), as
        in ``xgboost.train``. ``tree_method`` must be ``"hist"``, its default.
    num_rounds : int, default 100
        Number of boosting rounds of each fit.
    backend : str, default "spark"
        ``"spark"``, ``"ray"`` or ``"local"``.
    workers_per_node : int, default 1
        Number of workers on each node of the cluster.
    missing : float, default NaN
        Value of missing features, in addition to nulls.
    model_dir : str, optional
        Path or fsspec URL of a folder for the checkpoints of :meth:`fit`, so that another program
        can resume a fit whose driver ended.
    log_to_driver : bool, default True
        Whether to show the output of the workers.
    **more_params
        More parameters of XGBoost, by keyword.

    Raises
    ------
    UsageError
        If a parameter is unknown or has a wrong value, or if XGBoost is missing.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca.learn.trees import XGBEstimator
    >>> x = np.linspace(-1, 1, 200, dtype="float32")[:, None]
    >>> y = (x[:, 0] > 0.25).astype("float32")
    >>> estimator = XGBEstimator(objective="binary:logistic", num_rounds=5, backend="local")
    >>> history = estimator.fit((x, y))
    >>> estimator.predict(x[[0, -1]], output="class")
    array([0, 1])
    """

    framework = "xgboost"

    def __init__(
        self,
        params: Mapping[str, Any] | None = None,
        *,
        num_rounds: int = 100,
        backend: str = "spark",
        workers_per_node: int = 1,
        missing: float = math.nan,
        model_dir: str | os.PathLike | None = None,
        log_to_driver: bool = True,
        **more_params: object,
    ):
        super().__init__()
        require("xgboost", "xgboost")
        if params is not None and not isinstance(params, Mapping):
            raise UsageError(
                f"params should be a dict of XGBoost's parameters, got {type(params).__name__}",
                code="argument-type",
                argument="params",
            )
        self._params: dict[str, Any] = {**(params or {}), **more_params}
        self._objective, self._metric = self._functions()
        _check_parameters(self._params)
        self._num_rounds = check_positive("num_rounds", num_rounds)
        self._backend_name = resolve_backend(backend, {})
        if self._backend_name not in ("spark", "ray", "local"):
            raise UsageError(
                f"backend should be 'spark', 'ray' or 'local' for trees, got {backend!r}",
                code="name-unknown",
                argument="backend",
                allowed=["spark", "ray", "local"],
            )
        self._backend = BACKENDS[self._backend_name]
        self._workers_per_node = check_integer("workers_per_node", workers_per_node, 1)
        self._missing, self._log_to_driver = float(missing), log_to_driver
        self._model_dir = None if model_dir is None else os.fspath(model_dir)
        self._model: bytes | None = None
        self._columns = TreeColumns(None, ())
        self._history: list[dict[str, float]] = []

    def _functions(self) -> tuple[Objective | None, Metric | None]:
        """Remove a custom objective and a custom metric from the parameters and return them."""
        functions: dict[str, Any] = {}
        for name in ("objective", "eval_metric"):
            if callable(self._params.get(name)):
                functions[name] = self._params.pop(name)
        return functions.get("objective"), functions.get("eval_metric")

    def __repr__(self) -> str:
        return call_text(
            "XGBEstimator",
            {
                "objective": self._params.get("objective"),
                "backend": self._backend_name,
                "workers_per_node": self._workers_per_node,
                "rounds": None if self._model is None else self.get_model().num_boosted_rounds(),
            },
        )

    @property
    def num_workers(self) -> int:
        """Number of workers: cluster nodes times workers per node."""
        return self._engine().num_workers

    def _engine(self) -> Engine:
        return self._backend.engine(
            workers_per_node=self._workers_per_node, log_to_driver=self._log_to_driver
        )

    def _cluster(self, feed: Feed) -> Cluster:
        backend = BACKENDS["spark"] if feed.is_in_spark else self._backend
        return backend.cluster(self._workers_per_node)

    # -- training --------------------------------------------------------------------------------

    def fit(
        self,
        data: object,
        feature_cols: ColumnNames | None = None,
        label_cols: ColumnNames | None = None,
        validation_data: object = None,
        *,
        weight_col: str | None = None,
        base_margin_col: str | None = None,
        group_col: str | None = None,
        categorical_cols: ColumnNames | None = None,
        num_rounds: int | None = None,
        early_stopping_rounds: int | None = None,
        maximize: bool | None = None,
        checkpoint_rounds: int | None = None,
        max_failures: int | FailurePolicy | None = None,
        external_memory: bool | None = None,
        resume: str | None = None,
    ) -> list[dict[str, float]]:
        """Grow trees; a further call adds trees to the model.

        Parameters
        ----------
        data : Spark DataFrame, XShards, path, pandas DataFrame or arrays
            Training rows. A path is of Parquet files, or of a Delta or Iceberg table; arrays are
            ``(x, y)``. Nulls and NaN of numeric features are missing values.
        feature_cols, label_cols : str or list of str, optional
            Feature and label columns; required unless `data` are arrays.
        validation_data : optional
            Rows of the same type as `data`, on which each round is evaluated.
        weight_col : str, optional
            Column with the weights of rows; with `group_col` the first weight of each group
            counts.
        base_margin_col : str, optional
            Column with the margin from which boosting starts.
        group_col : str, optional
            Column with integer ids of the groups of a ranking.
        categorical_cols : str or list of str, optional
            Features that are categories: texts, or integers from 0. The texts of all training
            rows are the categories; in other rows, an unknown text is a missing value.
        num_rounds : int, optional
            Number of boosting rounds; default that of the Estimator.
        early_stopping_rounds : int, optional
            Stop after this number of rounds without an improvement of the last metric on
            `validation_data`, and keep the trees until the best round.
        maximize : bool, optional
            Whether a larger metric is better; by default true for ``auc``, ``aucpr``, ``pre``,
            ``ndcg`` and ``map``.
        checkpoint_rounds : int, optional
            Number of rounds between checkpoints in the driver, and in ``model_dir`` if there is
            one, from which the fit resumes if a worker is lost; default none, so that it restarts.
            A checkpoint also seeds the random numbers of ``subsample`` again, so a resumed fit
            grows the same trees.
        max_failures : int or FailurePolicy, optional
            Number of lost attempts that are repeated; default 3.
        external_memory : bool, optional
            Whether binned values are in a file instead of in memory; by default each worker
            decides by its available memory.
        resume : {"auto"}, optional
            Continue the fit whose checkpoint is in ``model_dir``, with the same parameters and
            data; start a new one if there is none. A larger `num_rounds` than that of a complete
            fit without early stopping adds the missing rounds. If the checkpoint is of an earlier
            fit of this Estimator, a new one adds trees to it. By default a new fit replaces the
            checkpoint.

        Returns
        -------
        list of dict
            For each round its number, and metrics such as ``train_rmse`` and ``validation_rmse``.

        Raises
        ------
        UsageError
            If an argument, a column or a value cannot be used.
        WorkerLost
            If workers are lost too often.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca.learn.trees import XGBEstimator
        >>> x = np.linspace(-1, 1, 200, dtype="float32")[:, None]
        >>> y = (x[:, 0] > 0.25).astype("float32")
        >>> estimator = XGBEstimator(objective="binary:logistic", num_rounds=3, backend="local")
        >>> history = estimator.fit((x, y))
        >>> [sorted(entry) for entry in history][-1]
        ['round', 'train_logloss']
        """
        columns = self._columns_of(
            data, feature_cols, label_cols, weight_col, base_margin_col, group_col, categorical_cols
        )
        if early_stopping_rounds is not None:
            check_positive("early_stopping_rounds", early_stopping_rounds)
            if validation_data is None:
                raise UsageError(
                    "early_stopping_rounds needs validation_data; pass rows to evaluate on",
                    code="argument-missing",
                    argument="validation_data",
                )
        if checkpoint_rounds is not None:
            check_positive("checkpoint_rounds", checkpoint_rounds)
        rounds = (
            self._num_rounds if num_rounds is None else check_positive("num_rounds", num_rounds)
        )
        first = 0 if self._model is None else read_booster(self._model).num_boosted_rounds()
        stop_at = first + rounds
        stopping = None if early_stopping_rounds is None else [early_stopping_rounds, maximize]
        checkpoint = self._checkpoint(resume, columns, first, stop_at, stopping)
        if checkpoint is not None and checkpoint.is_complete and _is_finished(checkpoint, stop_at):
            self._model, self._columns, self._shipped = checkpoint.model, columns, None
            self._history = checkpoint.history
            return [dict(entry) for entry in self._history]
        program = TreeFit(
            dict(self._params),
            stop_at,
            columns,
            self._missing,
            external_memory,
            self._objective,
            self._metric,
            early_stopping_rounds,
            maximize,
            checkpoint_rounds,
        )
        inputs = {"data": data, "validation": validation_data}
        feeds = FeedGroup(
            {k: self._feed(v, columns, k) for k, v in inputs.items() if v is not None}
        )
        newest: dict[str, Any] = {"history": [], "model": self._model}
        if checkpoint is not None:
            newest = {"history": checkpoint.history, "model": checkpoint.model}

        def on_event(event: str, value: object) -> None:
            if isinstance(value, tuple) and value[0]["topic"] == CHECKPOINT:
                newest.update(history=value[0]["history"], model=value[1])
                if self._model_dir is not None:
                    is_complete = bool(value[0]["is_complete"])
                    each = TreeCheckpoint(
                        newest["model"],
                        newest["history"],
                        first,
                        is_complete,
                        settings,
                        stop_at,
                        stopping,
                    )
                    each.write(self._model_dir)

        settings = self._settings(columns)
        engine = self._engine()
        policy = self._backend.failure_policy(max_failures)
        with engine.open(program, feeds) as job:
            policy.run(
                lambda: self._attempt(
                    engine,
                    job,
                    {"history": newest["history"], "first": first},
                    newest["model"],
                    on_event,
                ),
                "growing trees from the newest checkpoint",
            )
        self._model, self._columns, self._shipped = newest["model"], columns, None
        self._history = newest["history"]
        return [dict(entry) for entry in self._history]

    def _settings(self, columns: TreeColumns) -> str:
        """Describe the parameters and columns, which a resumed fit must not change."""
        return repr((sorted(self._params.items()), self._missing, columns))

    def _checkpoint(
        self,
        resume: str | None,
        columns: TreeColumns,
        first: int,
        stop_at: int,
        stopping: list[int | bool | None] | None,
    ) -> TreeCheckpoint | None:
        """Return the checkpoint to resume from, or None for a new fit."""
        if resume is None:
            return None
        check_choice("resume", resume, ("auto",))
        if self._model_dir is None:
            raise UsageError(
                'resume="auto" needs model_dir= in XGBEstimator; pass a folder for checkpoints',
                code="argument-missing",
                argument="model_dir",
            )
        checkpoint = TreeCheckpoint.read(self._model_dir)
        if checkpoint is None:
            return None
        if checkpoint.is_complete and self._model is not None and checkpoint.first != first:
            return None  # this fit adds trees to the model of the earlier fit
        reason = ""
        if checkpoint.settings != self._settings(columns):
            reason = f"with other parameters or columns: {checkpoint.settings}"
        elif checkpoint.first != first:
            reason = f"that began with {checkpoint.first} rounds, but this model has {first}"
        elif checkpoint.stop_at is not None:
            reason = _other_end(checkpoint, stop_at, stopping)
        if reason:
            raise UsageError(
                f"The checkpoint in {self._model_dir!r} is of a fit {reason}; repeat that fit, "
                "pass another model_dir, or fit without resume",
                code="argument-conflict",
                argument="resume",
            )
        return checkpoint

    def _attempt(
        self,
        engine: Engine,
        job: OpenJob,
        options: dict[str, Any],
        model: bytes | None,
        on_event: Callable[[str, Any], None] | None = None,
    ) -> list[Any]:
        """Run an attempt of a job with a new tracker."""
        workers = job.spec.world_size
        with _tracker(engine.cluster.driver_host, workers) as arguments:
            options = {**options, TRACKER: arguments, "has_model": model is not None}
            return job.attempt(options, model, on_event)

    def _columns_of(
        self,
        data: object,
        feature_cols: ColumnNames | None,
        label_cols: ColumnNames | None,
        weight_col: str | None,
        base_margin_col: str | None,
        group_col: str | None,
        categorical_cols: ColumnNames | None,
    ) -> TreeColumns:
        """Check the column names of a fit or an evaluation and return them by role."""
        extra = {
            "weight_col": weight_col,
            "base_margin_col": base_margin_col,
            "group_col": group_col,
        }
        passed = {name: value for name, value in extra.items() if value is not None}
        for name, value in passed.items():
            if not isinstance(value, str):
                raise UsageError(
                    f"{name} should be the name of one column, got {value!r}",
                    code="argument-type",
                    argument=name,
                )
        features, labels = names_of(feature_cols), names_of(label_cols)
        categorical = names_of(categorical_cols)
        if not features:
            if passed or labels or categorical:
                names = [*passed, *["label_cols"] * bool(labels)]
                names += ["categorical_cols"] * bool(categorical)
                raise UsageError(
                    f"{', '.join(names)} needs feature_cols; pass the names of the feature columns",
                    code="argument-missing",
                    argument="feature_cols",
                )
            return TreeColumns(None, ())
        if not labels:
            raise UsageError(
                "label_cols is required with feature_cols; pass the name of the label column",
                code="argument-missing",
                argument="label_cols",
            )
        roles = [*features, *labels, *passed.values()]
        twice = sorted({name for name in roles if roles.count(name) > 1}, key=str)
        if twice:
            raise UsageError(
                f"Column {twice[0]!r} has more than one role; use each column once, as a feature, "
                "label, weight, margin or group",
                code="argument-conflict",
                column=twice[0],
            )
        for name in categorical:
            if name not in features:
                raise UsageError(
                    f"categorical_cols has {name!r}, which is not one of feature_cols; add it",
                    code="argument-value",
                    argument="categorical_cols",
                )
        for name in features:
            if isinstance(name, str) and set(name) & set("[]<"):
                raise UsageError(
                    f"XGBoost does not allow '[', ']' or '<' in feature names, got {name!r}; "
                    "rename the column",
                    code="argument-value",
                    column=name,
                )
        return TreeColumns(
            tuple(features),
            tuple(labels),
            weight_col,
            base_margin_col,
            group_col,
            tuple(categorical),
        )

    def _feed(self, data: object, columns: TreeColumns, key: str = "data") -> Feed:
        """Return the Feed of training, validation or evaluation rows."""
        config: dict[str, Any] = {"nulls_are_missing": True}
        if columns.categorical:
            config = with_texts(config)
        extra = [each for each in (columns.weight, columns.margin, columns.group) if each]
        labels = [*columns.labels, *extra] or None
        name = "validation_data" if key == "validation" else None
        return as_feed(data, columns.features, labels, config, name=name)

    # -- evaluation and prediction ---------------------------------------------------------------

    def evaluate(
        self,
        data: object,
        feature_cols: ColumnNames | None = None,
        label_cols: ColumnNames | None = None,
        *,
        metrics: str | Sequence[str] | None = None,
        weight_col: str | None = None,
        base_margin_col: str | None = None,
        group_col: str | None = None,
        max_failures: int | FailurePolicy | None = None,
    ) -> dict[str, float]:
        """Return metrics of the trees on rows.

        Parameters
        ----------
        data, feature_cols, label_cols, weight_col, base_margin_col, group_col, max_failures
            See :meth:`fit`; the default of `feature_cols` and `label_cols` is that of the fit.
        metrics : str or list of str, optional
            Metrics of XGBoost, such as ``"auc"``; default those of the fit.

        Returns
        -------
        dict
            Metrics by name.

        Raises
        ------
        UsageError
            If the Estimator was not fitted, or an argument or value cannot be used.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca.learn.trees import XGBEstimator
        >>> x = np.linspace(-1, 1, 200, dtype="float32")[:, None]
        >>> y = (x[:, 0] > 0.25).astype("float32")
        >>> estimator = XGBEstimator(objective="binary:logistic", num_rounds=3, backend="local")
        >>> history = estimator.fit((x, y))
        >>> estimator.evaluate((x, y), metrics="auc")
        {'auc': 1.0}
        """
        model = self._require_model()
        if feature_cols is None and self._takes_names(data):
            feature_cols = self._columns.features
            label_cols = self._columns.labels if label_cols is None else label_cols
        categorical = [each for each in self._columns.categorical if feature_cols is not None]
        columns = self._columns_of(
            data, feature_cols, label_cols, weight_col, base_margin_col, group_col, categorical
        )
        names = names_of(metrics)
        metric = None if names else self._metric
        if not names and metric is None:
            names = names_of(self._params.get("eval_metric"))
        _check_parameters({**self._params, "eval_metric": names} if names else self._params)
        program = TreeEvaluation(
            columns,
            self._missing,
            names or None,
            metric,
            self._objective is not None,
        )
        engine = self._engine()
        policy = self._backend.failure_policy(max_failures)
        with engine.open(program, FeedGroup({"data": self._feed(data, columns)})) as job:
            run = functools.partial(self._attempt, engine, job, {}, model)
            results: list[Any] = policy.run(run, "evaluating again")
        return dict(results[0])

    @typed_predict
    def predict(
        self,
        data,
        feature_cols: ColumnNames | None = None,
        batch_size: int = _BATCH_ROWS,
        output_cols: ColumnNames | None = None,
        *,
        base_margin_col: str | None = None,
        output: str = "raw",
    ):
        """Return `data` with predictions, in the same type and row order.

        Parameters
        ----------
        data : Spark DataFrame, XShards, path, pandas DataFrame or ndarray
            Rows; all their columns are kept.
        feature_cols : str or list of str, optional
            Feature columns; default those of the fit.
        batch_size : int, default 8192
            Number of rows per call of XGBoost.
        output_cols : str or list of str, optional
            Name of the column with predictions; default ``prediction``.
        base_margin_col : str, optional
            Column with the base margin of each row.
        output : {"raw", "class", "probability", "margin", "leaf"}
            ``"raw"`` is the prediction of the objective, ``"margin"`` the sum of the leaves, and
            ``"leaf"`` the index of the leaf in each tree.

        Returns
        -------
        DataFrame, XShards or ndarray
            A Spark DataFrame is lazy. For arrays, the result has only the predictions.

        Raises
        ------
        UsageError
            If the Estimator was not fitted, or an argument or value cannot be used.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca.learn.trees import XGBEstimator
        >>> x = np.linspace(-1, 1, 200, dtype="float32")[:, None]
        >>> y = (x[:, 0] > 0.25).astype("float32")
        >>> estimator = XGBEstimator(objective="binary:logistic", num_rounds=3, backend="local")
        >>> history = estimator.fit((x, y))
        >>> estimator.predict(x[[0, -1]], output="class")
        array([0, 1])
        """
        result = output if output in ("margin", "leaf") else "value"
        request = self._request(
            data,
            feature_cols,
            batch_size,
            output_cols,
            base_margin_col,
            result,
            output="raw" if result != "value" else output,
        )
        return self._predict(data, request)

    @typed_predict
    def shap_values(
        self,
        data,
        feature_cols: ColumnNames | None = None,
        batch_size: int = _BATCH_ROWS,
    ):
        """Return `data` with the SHAP values of each row in the column ``shap``.

        The values are the contributions of the features to the margin, in the order of the
        features, followed by the bias; their sum is the margin.

        Parameters
        ----------
        data, feature_cols, batch_size
            See :meth:`predict`.

        Returns
        -------
        DataFrame, XShards or ndarray
            As :meth:`predict`; for arrays of shape ``(rows, features + 1)``, and ``(rows, classes,
            features + 1)`` for several classes.

        Raises
        ------
        UsageError
            If the Estimator was not fitted, or an argument or value cannot be used.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca.learn.trees import XGBEstimator
        >>> x = np.linspace(-1, 1, 200, dtype="float32")[:, None]
        >>> y = (x[:, 0] > 0.25).astype("float32")
        >>> estimator = XGBEstimator(objective="binary:logistic", num_rounds=3, backend="local")
        >>> history = estimator.fit((x, y))
        >>> estimator.shap_values(x[:5]).shape
        (5, 2)
        """
        names = "shap" if self._takes_names(data) else None
        request = self._request(data, feature_cols, batch_size, names, None, "contributions")
        return self._predict(data, request)

    def _request(
        self,
        data: object,
        feature_cols: ColumnNames | None,
        batch_size: int,
        output_cols: ColumnNames | None,
        base_margin_col: str | None,
        result: str,
        *,
        output: str = "raw",
    ) -> TreeRequest:
        self._require_model()
        if feature_cols is None and self._takes_names(data):
            feature_cols = self._columns.features
        features = names_of(feature_cols)
        if base_margin_col is not None:
            if not features:
                raise UsageError(
                    "base_margin_col needs feature_cols; pass the names of the feature columns",
                    code="argument-missing",
                    argument="feature_cols",
                )
            features = [*features, base_margin_col]
        has_margin = base_margin_col is not None
        return TreeRequest(
            batch_size, features, output_cols, output=output, result=result, has_margin=has_margin
        )

    def _takes_names(self, data: object) -> bool:
        """Return True if the columns of an input have names."""
        return (
            input_type_of(data) != "array"
            or is_frame(data)
            or (isinstance(data, dict) and self._columns.features is not None and "x" not in data)
        )

    def as_udf(
        self,
        feature_cols: ColumnNames | None = None,
        batch_size: int = _BATCH_ROWS,
        *,
        output: str = "raw",
        sample: object = None,
    ) -> Callable[..., Column]:
        """Return the model as a Spark user-defined function, for DataFrames and SQL.

        The function takes the features in order, keeps the current model, and works in classic
        Spark and Spark Connect.

        Parameters
        ----------
        feature_cols : str or list of str, optional
            Names of the arguments; default the features of the fit.
        batch_size : int, default 8192
            Number of rows per call of XGBoost.
        output : {"raw", "class", "probability"}
            See :meth:`predict`.
        sample : optional
            Sample rows in any form that :meth:`predict` takes; required if a feature is an array.

        Returns
        -------
        function
            User-defined function.

        Raises
        ------
        UsageError
            If the Estimator was not fitted.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca import OrcaContext, init_orca_context
        >>> from bigdl.orca.learn.trees import XGBEstimator
        >>> sc = init_orca_context("local", cores=2)
        >>> spark = OrcaContext.get_spark_session()
        >>> rows = spark.createDataFrame([(float(i), float(i > 9)) for i in range(20)], ["a", "y"])
        >>> estimator = XGBEstimator(objective="binary:logistic", num_rounds=3, min_child_weight=0)
        >>> history = estimator.fit(rows, "a", "y")
        >>> trees = estimator.as_udf(output="class")
        >>> rows.select(trees("a").alias("y")).first()
        Row(y=0)
        """
        names = self._columns.features if feature_cols is None else feature_cols
        request = self._request(None, names, batch_size, None, None, "value", output=output)
        request.sample = sample
        return self._function(request)

    def _sample(self, request: PredictionRequest, cluster: Cluster) -> Sample | None:
        if request.sample is not None:
            return super()._sample(request, cluster)
        names = list(request.feature_cols)
        count = read_booster(self._require_model()).num_features()
        if len(names) != count:
            raise UsageError(
                f"The trees have {count} features, but feature_cols names {len(names)} columns; "
                "pass sample=, rows of the features",
                code="argument-missing",
                argument="sample",
            )
        texts = self._facts().get("categories", {})
        return Sample.of([np.zeros(2, "S8" if name in texts else np.float32) for name in names])

    def _prediction_config(self) -> dict:
        config: dict[str, Any] = {"nulls_are_missing": True}
        return with_texts(config) if self._facts().get("categories") else config

    def _scores(self, output: str) -> Scores:
        objective = self._params.get("objective")
        if self._objective is not None or objective not in _CLASSES:
            raise unknown_scores(output, str(objective))
        return Scores("probabilities", _CLASSES[objective])

    def _ship(
        self, request: PredictionRequest, rows: Sample | None, cluster: Cluster
    ) -> ShippedModel:
        data = self._require_model()
        assert isinstance(request, TreeRequest)
        names = list(request.feature_cols)
        texts = self._facts().get("categories", {})
        categories = {names.index(name): each for name, each in texts.items() if name in names}
        settings = {"params": dict(self._params), "num_rounds": self._num_rounds}
        model = TreeModel(
            data, self._missing, request.result, categories, request.has_margin, settings
        )
        origin = (data, request.result, str(sorted(categories)), str(request.has_margin))
        self._shipped = ship_model(lambda: model, self._shipped, cluster.broadcaster, *origin)
        return self._shipped

    def packed_model(
        self,
        sample: object = None,
        feature_cols: ColumnNames | None = None,
        batch_size: int = _BATCH_ROWS,
        output_cols: ColumnNames | None = None,
        accelerate: str | os.PathLike | None = None,
    ) -> tuple[bytes, PredictOptions]:
        """Return the pickled trees and their prediction options, for :mod:`bigdl.mlflow`.

        See :meth:`as_udf` for the arguments; `sample` is not needed.
        """
        if accelerate is not None:
            raise UsageError(
                f"accelerate={accelerate!r} is not supported for trees; XGBoost predicts them",
                code="unsupported",
                argument="accelerate",
            )
        if self._objective is not None or self._metric is not None:
            logger.warning(
                "The saved model does not contain the functions of objective and eval_metric; to "
                "fit it further, create an XGBEstimator with them and load the trees"
            )
        names = self._columns.features if feature_cols is None else feature_cols
        request = self._request(None, names, batch_size, output_cols, None, "value")
        predictor = self._predictor(request, None, LocalMachine())
        shipped = cast("ShippedModel", predictor.shipped)
        return shipped.broadcast.value, predictor.options

    @classmethod
    def of_packed_model(cls, data: bytes, backend: str) -> XGBEstimator:
        """Create an Estimator from the bytes that :meth:`packed_model` returned."""
        trees: TreeModel = ModelBytes(data).snapshot()
        booster = read_booster(trees.data)
        settings = dict(trees.settings)
        objective = json.loads(booster.save_config())["learner"]["objective"]["name"]
        params = {"objective": objective, **settings.pop("params", {})}
        estimator = cls(params, backend=backend, missing=trees.missing, **settings)
        estimator._use_trees(trees.data, read_facts(booster))
        return estimator

    # -- model -----------------------------------------------------------------------------------

    def _require_model(self) -> bytes:
        if self._model is None:
            raise UsageError("There are no trees before the first fit", code="not-fitted")
        return self._model

    def _facts(self) -> dict[str, Any]:
        return read_facts(read_booster(self._require_model()))

    def get_model(self) -> xgboost.Booster:
        """Return a copy of the trees as ``xgboost.Booster``.

        Returns
        -------
        xgboost.Booster

        Raises
        ------
        UsageError
            If the Estimator was not fitted.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca.learn.trees import XGBEstimator
        >>> x = np.linspace(-1, 1, 200, dtype="float32")[:, None]
        >>> y = (x[:, 0] > 0.25).astype("float32")
        >>> estimator = XGBEstimator(objective="binary:logistic", num_rounds=3, backend="local")
        >>> history = estimator.fit((x, y))
        >>> estimator.get_model().num_boosted_rounds()
        3
        """
        return read_booster(self._require_model())

    def feature_importances(self) -> pd.DataFrame:
        """Return the importances of the features that the trees use.

        Returns
        -------
        pandas.DataFrame
            One row per feature, with the columns ``feature``, ``gain``, ``cover``, ``weight``,
            ``total_gain`` and ``total_cover`` of XGBoost, sorted by gain.

        Raises
        ------
        UsageError
            If the Estimator was not fitted.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca.learn.trees import XGBEstimator
        >>> x = np.linspace(-1, 1, 200, dtype="float32")[:, None]
        >>> y = (x[:, 0] > 0.25).astype("float32")
        >>> estimator = XGBEstimator(objective="binary:logistic", num_rounds=3, backend="local")
        >>> history = estimator.fit((x, y))
        >>> estimator.feature_importances()["feature"].tolist()
        ['f0']
        """
        import pandas as pd

        booster = self.get_model()
        types = ("gain", "cover", "weight", "total_gain", "total_cover")
        scores = {each: booster.get_score(importance_type=each) for each in types}
        table = pd.DataFrame(scores).rename_axis("feature").reset_index()
        return table.sort_values("gain", ascending=False, ignore_index=True)

    def save(self, model_path: str | os.PathLike) -> str:
        """Write the trees in XGBoost's format, which ``xgboost.Booster`` can read.

        Parameters
        ----------
        model_path : str
            Path or fsspec URL. With the suffix ``.json`` the format is JSON, else UBJSON.

        Returns
        -------
        str
            The path.

        Raises
        ------
        UsageError
            If the Estimator was not fitted.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca.learn.trees import XGBEstimator
        >>> x = np.linspace(-1, 1, 200, dtype="float32")[:, None]
        >>> y = (x[:, 0] > 0.25).astype("float32")
        >>> estimator = XGBEstimator(objective="binary:logistic", num_rounds=3, backend="local")
        >>> history = estimator.fit((x, y))
        >>> path = estimator.save("trees.ubj")
        >>> copy = XGBEstimator(objective="binary:logistic", backend="local")
        >>> copy.load(path)
        >>> copy.get_model().num_boosted_rounds()
        3
        """
        path = os.fspath(model_path)
        data = self._require_model()
        if path.endswith(".json"):
            data = bytes(read_booster(data).save_raw("json"))
        write_bytes(path, data)
        return path

    def load(self, model_path: str | os.PathLike) -> None:
        """Load trees that :meth:`save` or XGBoost wrote; a further fit adds trees.

        Parameters
        ----------
        model_path : str
            Path or fsspec URL.

        Raises
        ------
        UsageError
            If the file is missing, or is not a model of XGBoost.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca.learn.trees import XGBEstimator
        >>> x = np.linspace(-1, 1, 200, dtype="float32")[:, None]
        >>> y = (x[:, 0] > 0.25).astype("float32")
        >>> estimator = XGBEstimator(objective="binary:logistic", num_rounds=3, backend="local")
        >>> history = estimator.fit((x, y))
        >>> path = estimator.save("trees.json")
        >>> estimator.load(path)
        >>> history = estimator.fit((x, y), num_rounds=2)
        >>> history[-1]["round"]
        5
        """
        from xgboost.core import XGBoostError

        path = os.fspath(model_path)
        data = read_bytes(path)
        try:
            facts = read_facts(read_booster(data))
        except (XGBoostError, ValueError) as error:
            raise UsageError(
                f"{path!r} is not a model of XGBoost: {message_of(str(error))}",
                code="file-format",
                path=path,
            ) from error
        self._use_trees(data, facts)

    def _use_trees(self, data: bytes, facts: dict[str, Any]) -> None:
        """Replace the trees and the columns of the last fit."""
        self._model, self._shipped, self._history = data, None, []
        features = facts.get("features")
        self._columns = TreeColumns(
            None if features is None else tuple(features),
            tuple(facts.get("labels", ())),
            categorical=tuple(facts.get("categorical", ())),
        )

    def shutdown(self) -> None:
        """Release the broadcast model and stop idle workers of the backend."""
        super().shutdown()
        self._backend.end_workers()


@contextlib.contextmanager
def _tracker(host: str, workers: int) -> Iterator[dict[str, Any] | None]:
    """Context manager that runs the tracker of XGBoost's collective; None for one worker."""
    if workers == 1:
        yield None
        return
    from xgboost.core import XGBoostError
    from xgboost.tracker import RabitTracker

    tracker = RabitTracker(n_workers=workers, host_ip=host, sortby="task")
    tracker.start()
    try:
        yield tracker.worker_args()
    finally:
        with contextlib.suppress(XGBoostError):  # it was waiting for a connection
            tracker.free()


def _check_parameters(params: dict[str, Any]) -> None:
    """Raise a UsageError for parameters that XGBoost or external memory does not support."""
    import xgboost
    from xgboost.core import XGBoostError

    for name, advice in _SETTINGS.items():
        if name in params:
            raise UsageError(
                f"{name}={params[name]!r} is not a parameter of XGBEstimator: {advice}",
                code="argument-unknown",
                argument=name,
            )
    for name, allowed in {"tree_method": ("hist", "auto"), "booster": ("gbtree", "dart")}.items():
        if params.get(name, allowed[0]) not in allowed:
            raise UsageError(
                f"{name}={params[name]!r} needs all values in memory; use {name}={allowed[0]!r}",
                code="unsupported",
                argument=name,
            )
    of_features = ("monotone_constraints", "interaction_constraints")
    checked = {name: value for name, value in params.items() if name not in of_features}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows = xgboost.DMatrix(np.zeros((1, 1), np.float32), label=[0.0])
            booster = xgboost.Booster({**checked, "verbosity": 1}, [rows])
            booster.save_config()
    except (XGBoostError, TypeError, ValueError) as error:
        raise UsageError(
            f"XGBoost refuses the parameters: {message_of(str(error))}",
            code="argument-value",
            argument="params",
        ) from error
    messages = " ".join(str(each.message) for each in caught)
    _, is_unused, names = messages.partition("Parameters: {")
    if is_unused:
        unknown = names.partition("}")[0].strip()
        raise UsageError(
            f"XGBoost has no parameter {unknown}; check the spelling",
            code="argument-unknown",
            argument="params",
        )


def _is_finished(checkpoint: TreeCheckpoint, stop_at: int) -> bool:
    """Return whether a complete fit would have ended with the same trees at `stop_at`."""
    if checkpoint.stop_at is None or checkpoint.stop_at == stop_at:
        return True
    return checkpoint.stopping is not None  # it stopped early, before both limits


def _other_end(
    checkpoint: TreeCheckpoint, stop_at: int, stopping: list[int | bool | None] | None
) -> str:
    """Return the reason why a fit that should end otherwise cannot use a checkpoint, or ""."""
    if checkpoint.stopping != stopping:
        return "with other early_stopping_rounds or maximize"
    grown = checkpoint.first + len(checkpoint.history)
    if stopping is not None and checkpoint.is_complete:
        # Its trees end at the best round, so that it cannot continue.
        if stop_at != checkpoint.stop_at and (grown == checkpoint.stop_at or grown > stop_at):
            return f"with early stopping that ended at {checkpoint.stop_at} rounds"
    elif grown > stop_at:
        return f"that has grown {grown} rounds, more than {stop_at}"
    return ""
