"""Base class of the Estimators of gradient boosted trees."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np

from bigdl.common.checks import check_choice, check_integer, check_positive
from bigdl.common.display import call_text
from bigdl.common.errors import UsageError, hide_frames, require
from bigdl.common.storage import read_bytes, write_bytes
from bigdl.nano.acceleration.trees import missing_of, read_trees
from bigdl.orca.data.feeds import as_feed, input_type_of, names_of
from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.inference.shipping import ModelBytes, ShippedModel, ship_model
from bigdl.orca.learn.backends import BACKENDS, resolve_backend
from bigdl.orca.learn.estimator import PredictingEstimator, PredictionRequest
from bigdl.orca.learn.prediction.classes import Scores, unknown_scores
from bigdl.orca.learn.prediction.predictor import PredictOptions
from bigdl.orca.learn.prediction.sample import Sample
from bigdl.orca.learn.prediction.typed import typed_predict
from bigdl.orca.learn.trees.matrix import TreeColumns, matrix_names
from bigdl.orca.learn.trees.model import TreeCheckpoint, TreeModel
from bigdl.orca.learn.trees.program import CHECKPOINT, Metric, Objective, TreeFit
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.engine import Engine, OpenJob
from bigdl.runtime.failure import FailurePolicy
from bigdl.runtime.local import LocalMachine
from bigdl.runtime.shards.feed import Feed
from bigdl.runtime.shards.texts import with_texts
from bigdl.runtime.shards.values import is_frame

if TYPE_CHECKING:
    from pyspark.sql import Column

    from bigdl.common.types import ColumnNames
    from bigdl.runtime.worker import Worker

logger = logging.getLogger("bigdl.orca")

_BATCH_ROWS = 8192


@dataclass
class TreeRequest(PredictionRequest):
    """Arguments of a prediction with trees.

    Attributes
    ----------
    result : {"value", "margin", "leaf", "contributions"}
    has_margin : bool
        Whether the last feature is the base margin.
    is_fastest : bool
        Whether the tasks measure which runtime is faster.
    """

    result: str = "value"
    has_margin: bool = False
    is_fastest: bool = False


@dataclass(frozen=True)
class FitPlan:
    """Settings of a fit that are independent of the library.

    Attributes
    ----------
    stop_at : int
        Number of boosting rounds of the final model.
    columns : TreeColumns
    early_stopping_rounds, checkpoint_rounds : int or None
    maximize : bool or None
    external_memory : bool or None
        Whether binned values are in a file, if the library supports that.
    """

    stop_at: int
    columns: TreeColumns
    early_stopping_rounds: int | None
    maximize: bool | None
    checkpoint_rounds: int | None
    external_memory: bool | None = None


@hide_frames
class TreeEstimator(PredictingEstimator):
    """Base class of the Estimators of boosted trees.

    A subclass names its library, checks the parameters, and creates the programs of the workers.

    Parameters
    ----------
    params : dict, optional
        Parameters of the library.
    num_rounds : int
    backend : str
    workers_per_node : int
    missing : float
    model_dir : str, optional
    log_to_driver : bool
    **more_params
        More parameters of the library.

    Attributes
    ----------
    library : str
        Name of the library, for messages.
    metric_name : str
        Parameter with the metrics, whose value may be a function.
    booster_name : str
        Parameter with the algorithm, such as ``"dart"``.
    class_objectives : mapping of str to bool
        Objectives with probabilities, and whether the classes are exclusive.
    """

    library: ClassVar[str]
    metric_name: ClassVar[str]
    booster_name: ClassVar[str]
    class_objectives: ClassVar[Mapping[str, bool]]

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
        require(self.framework, self.framework)
        if params is not None and not isinstance(params, Mapping):
            raise UsageError(
                f"params should be a dict of {self.library}'s parameters, got "
                f"{type(params).__name__}",
                code="argument-type",
                argument="params",
            )
        self._params = self._with_main_names({**(params or {}), **more_params})
        self._objective, self._metric = self._functions()
        self._check_parameters(self._params)
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
        self._missing = self._missing_argument = float(missing)
        self._log_to_driver = log_to_driver
        self._model_dir = None if model_dir is None else os.fspath(model_dir)
        self._model: bytes | None = None
        self._columns = TreeColumns(None, ())
        self._history: list[dict[str, float]] = []

    def _functions(self) -> tuple[Objective | None, Metric | None]:
        """Remove a custom objective and a custom metric from the parameters and return them."""
        functions: dict[str, Any] = {}
        for name in ("objective", self.metric_name):
            if callable(self._params.get(name)):
                functions[name] = self._params.pop(name)
        return functions.get("objective"), functions.get(self.metric_name)

    def _with_main_names(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters with one name for each."""
        return dict(params)

    @abstractmethod
    def _check_parameters(self, params: dict[str, Any]) -> None:
        """Raise a UsageError for parameters that the library does not support."""

    @abstractmethod
    def _fit_program(self, plan: FitPlan) -> TreeFit:
        """Return the program of the workers that grows trees."""

    @abstractmethod
    def _evaluation_program(
        self, columns: TreeColumns, metrics: list[str] | None, metric: Metric | None
    ) -> Callable[[Worker], dict[str, float]]:
        """Return the program of the workers that evaluates trees."""

    @abstractmethod
    def _rounds_of(self, data: bytes) -> int:
        """Return the number of boosting rounds of trees."""

    @classmethod
    @abstractmethod
    def _objective_of(cls, data: bytes) -> tuple[str | None, int]:
        """Return the objective of trees, or None if it is unknown, and the number of classes."""

    def _file_content(self, path: str) -> bytes:
        """Return the content of a file with the trees, whose suffix may select the format."""
        return self._require_model()

    def _check_column(self, name: str) -> None:
        """Raise a UsageError for a feature name that the library does not allow."""

    def _attempt_options(
        self, host: str, workers: int
    ) -> contextlib.AbstractContextManager[dict[str, Any]]:
        """Return a context manager that yields the options of an attempt."""
        return contextlib.nullcontext({})

    def __repr__(self) -> str:
        return call_text(
            type(self).__name__,
            {
                "objective": self._params.get("objective"),
                "backend": self._backend_name,
                "workers_per_node": self._workers_per_node,
                "rounds": None if self._model is None else self._rounds_of(self._model),
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

    def _fit(
        self,
        data: object,
        validation_data: object,
        columns: TreeColumns,
        *,
        num_rounds: int | None,
        early_stopping_rounds: int | None,
        maximize: bool | None,
        checkpoint_rounds: int | None,
        max_failures: int | FailurePolicy | None,
        resume: str | None,
        external_memory: bool | None = None,
    ) -> list[dict[str, float]]:
        """Grow trees; see ``XGBEstimator.fit`` for the arguments."""
        if early_stopping_rounds is not None:
            check_positive("early_stopping_rounds", early_stopping_rounds)
            if validation_data is None:
                raise UsageError(
                    "early_stopping_rounds needs validation_data; pass rows to evaluate on",
                    code="argument-missing",
                    argument="validation_data",
                )
            if self._params.get(self.booster_name) == "dart":
                raise UsageError(
                    f"{self.booster_name}='dart' does not support early_stopping_rounds, since "
                    "later rounds change the weights of earlier trees; pass num_rounds",
                    code="argument-conflict",
                    argument="early_stopping_rounds",
                )
        if checkpoint_rounds is not None:
            check_positive("checkpoint_rounds", checkpoint_rounds)
        rounds = (
            self._num_rounds if num_rounds is None else check_positive("num_rounds", num_rounds)
        )
        first = 0 if self._model is None else self._rounds_of(self._model)
        stop_at = first + rounds
        stopping = None if early_stopping_rounds is None else [early_stopping_rounds, maximize]
        checkpoint = self._checkpoint(resume, columns, first, stop_at, stopping)
        if checkpoint is not None and checkpoint.is_complete and _is_finished(checkpoint, stop_at):
            self._model, self._columns, self._shipped = checkpoint.model, columns, None
            self._history = checkpoint.history
            return [dict(entry) for entry in self._history]
        plan = FitPlan(
            stop_at,
            columns,
            early_stopping_rounds,
            maximize,
            checkpoint_rounds,
            external_memory,
        )
        program = self._fit_program(plan)
        inputs = {"data": data, "validation": validation_data}
        feeds = FeedGroup(
            {k: self._feed(v, columns, k) for k, v in inputs.items() if v is not None}
        )
        newest: dict[str, Any] = {"history": [], "model": self._model, "is_complete": False}
        if checkpoint is not None:
            newest.update(history=checkpoint.history, model=checkpoint.model)

        def on_event(event: str, value: object) -> None:
            if isinstance(value, tuple) and value[0]["topic"] == CHECKPOINT:
                is_complete = bool(value[0]["is_complete"])
                newest.update(history=value[0]["history"], model=value[1], is_complete=is_complete)
                if self._model_dir is not None:
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

        def grow() -> list[Any]:
            if newest["is_complete"]:  # a worker was lost after the last message
                return []
            options = {"history": newest["history"], "first": first}
            return self._attempt(engine, job, options, newest["model"], on_event)

        settings = self._settings(columns)
        engine = self._engine()
        policy = self._backend.failure_policy(max_failures)
        with engine.open(program, feeds) as job:
            policy.run(grow, "growing trees from the newest checkpoint")
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
                'resume="auto" needs model_dir= in the Estimator; pass a folder for checkpoints',
                code="argument-missing",
                argument="model_dir",
            )
        checkpoint = TreeCheckpoint.read(self._model_dir, self.framework)
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
        with self._attempt_options(engine.cluster.driver_host, workers) as more:
            options = {**options, **more, "has_model": model is not None}
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
            if isinstance(name, str):
                self._check_column(name)
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
            Metrics of the library, such as ``"auc"``; default those of the fit.

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
            names = names_of(self._params.get(self.metric_name))
        named = {self.metric_name: names} if names else {}
        self._check_parameters({**self._params, **named})
        program = self._evaluation_program(columns, names or None, metric)
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
        accelerate: str | None = None,
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
            Number of rows per call of the library.
        output_cols : str or list of str, optional
            Name of the column with predictions; default ``prediction``.
        accelerate : {"auto"}, optional
            Each task measures XGBoost and ONNX Runtime, and uses the faster one if their results
            are equal but for rounding. Trees of LightGBM, with categories, or of ``dart`` are
            always predicted by their library.
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
            accelerate=accelerate,
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
        accelerate: str | os.PathLike | None = None,
    ) -> TreeRequest:
        self._require_model()
        if accelerate is not None:
            check_choice("accelerate", str(accelerate), ("auto",))
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
            batch_size,
            features,
            output_cols,
            output=output,
            result=result,
            has_margin=has_margin,
            is_fastest=accelerate is not None,
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
        accelerate: str | None = None,
    ) -> Callable[..., Column]:
        """Return the model as a Spark user-defined function, for DataFrames and SQL.

        The function takes the features in order, keeps the current model, and works in classic
        Spark and Spark Connect.

        Parameters
        ----------
        feature_cols : str or list of str, optional
            Names of the arguments; default the features of the fit.
        batch_size : int, default 8192
            Number of rows per call of the library.
        output : {"raw", "class", "probability"}
            See :meth:`predict`.
        sample : optional
            Sample rows in any form that :meth:`predict` takes; required if a feature is an array.
        accelerate : {"auto"}, optional
            See :meth:`predict`.

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
        request = self._request(
            None, names, batch_size, None, None, "value", output=output, accelerate=accelerate
        )
        request.sample = sample
        return self._function(request)

    def _sample(self, request: PredictionRequest, cluster: Cluster) -> Sample | None:
        if request.sample is not None:
            return super()._sample(request, cluster)
        names = list(request.feature_cols)
        count = read_trees(self._require_model()).width
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
        objective = str(self._params.get("objective"))
        if self._objective is not None or objective not in self.class_objectives:
            raise unknown_scores(output, objective)
        return Scores("probabilities", self.class_objectives[objective])

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
            data,
            self._missing,
            request.result,
            categories,
            request.has_margin,
            settings,
            request.batch_size if request.is_fastest else 0,
        )
        facts = f"{sorted(categories)}, {request.has_margin}, {model.trial_rows}"
        origin = (data, request.result, facts)
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
        if self._objective is not None or self._metric is not None:
            logger.warning(
                f"The saved model does not contain the functions of objective and "
                f"{self.metric_name}; to fit it further, create an Estimator with them and load "
                "the trees"
            )
        names = self._columns.features if feature_cols is None else feature_cols
        request = self._request(
            None, names, batch_size, output_cols, None, "value", accelerate=accelerate
        )
        predictor = self._predictor(request, None, LocalMachine())
        shipped = cast("ShippedModel", predictor.shipped)
        return shipped.broadcast.value, predictor.options

    @classmethod
    def of_packed_model(cls, data: bytes, backend: str) -> Self:
        """Create an Estimator from the bytes that :meth:`packed_model` returned."""
        trees: TreeModel = ModelBytes(data).snapshot()
        settings = dict(trees.settings)
        objective, classes = cls._objective_of(trees.data)
        params = settings.pop("params", {})
        if objective is not None:
            params = {"objective": objective, **params}
            if objective.startswith("multi"):
                params.setdefault("num_class", classes)
        estimator = cls(params, backend=backend, missing=trees.missing, **settings)
        estimator._use_trees(trees.data, read_trees(trees.data).read_facts())
        return estimator

    # -- model -----------------------------------------------------------------------------------

    def _require_model(self) -> bytes:
        if self._model is None:
            raise UsageError("There are no trees before the first fit", code="not-fitted")
        return self._model

    def _facts(self) -> dict[str, Any]:
        return read_trees(self._require_model()).read_facts()

    def _feature_names(self) -> list[str]:
        """Return the names of the matrix columns; empty if the fit had no names."""
        facts = self._facts()
        pairs = zip(facts.get("features") or (), facts.get("widths") or (), strict=False)
        return [each for name, width in pairs for each in matrix_names(name, width)]

    def save(self, model_path: str | os.PathLike) -> str:
        """Write the trees in the format of their library, which its ``Booster`` can read.

        Parameters
        ----------
        model_path : str
            Path or fsspec URL. The format of XGBoost is JSON with the suffix ``.json``, else
            UBJSON; that of LightGBM is text.

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
        write_bytes(path, self._file_content(path))
        return path

    def load(self, model_path: str | os.PathLike) -> None:
        """Load trees that :meth:`save` or the library wrote; a further fit adds trees.

        Parameters
        ----------
        model_path : str
            Path or fsspec URL.

        Raises
        ------
        UsageError
            If the file is missing, or is not a model of the library.

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
        path = os.fspath(model_path)
        data = read_bytes(path)
        try:
            trees = read_trees(data)
            facts = trees.read_facts()
        except ValueError as error:
            raise UsageError(
                f"{path!r} is not a model of {self.library}: {first_sentence(str(error))}",
                code="file-format",
                path=path,
            ) from error
        if trees.library != self.framework:
            raise UsageError(
                f"{path!r} is a model of {trees.library}, but {type(self).__name__} takes those of "
                f"{self.library}; load it with the other Estimator",
                code="file-format",
                path=path,
            )
        self._use_trees(data, facts)

    def _use_trees(self, data: bytes, facts: dict[str, Any]) -> None:
        """Replace the trees and the columns of the last fit."""
        self._model, self._shipped, self._history = data, None, []
        is_set = not math.isnan(self._missing_argument)
        self._missing = self._missing_argument if is_set else missing_of(facts)
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


def first_sentence(text: str) -> str:
    """Return the message of an error of a library without its stack trace."""
    return text.partition("Stack trace")[0].strip().replace("\n", " ")


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
