"""Estimator of a table: the best of several models, chosen by cross-validation."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bigdl.common.checks import check_choice, check_integer, check_number, check_positive
from bigdl.common.cpu import usable_cores
from bigdl.common.errors import UsageError, check_installed, hide_frames, require
from bigdl.common.storage import read_bytes, write_bytes
from bigdl.orca.automl.table.columns import (
    REGRESSION,
    TASKS,
    MatrixRows,
    TableFeatures,
    TableTarget,
    check_columns,
    is_spark_frame,
    read_frame,
)
from bigdl.orca.automl.table.folds import create_folds
from bigdl.orca.automl.table.metrics import TableMetric, metrics_of
from bigdl.orca.automl.table.model import FoldModel, TrainingSettings
from bigdl.orca.automl.table.search import MODELS, TableJob, TableSearch, available_models
from bigdl.orca.cluster.versions import arrow_udf
from bigdl.orca.data.feeds import names_of
from bigdl.runtime.shards.columns import quoted
from bigdl.training.progress import say
from bigdl.training.state import dumps, loads

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from bigdl.common.types import ColumnNames

__all__ = ["TableEstimator"]

logger = logging.getLogger("bigdl.orca")

_FORMAT = 1  # of the files of save
_OUTPUTS = ("class", "probability", "value")


@hide_frames
class TableEstimator:
    """The best model of a table; :meth:`AutoEstimator.from_table` creates it.

    A prediction is the mean of the models that were trained on the folds of the best trial.

    Attributes
    ----------
    task : str
        ``"binary"``, ``"multiclass"`` or ``"regression"``.
    classes : list
        Labels of the classes, in the order of probabilities; empty for a regression.
    best_model : str
        Name of the best model, such as ``"xgboost"``.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from bigdl.orca.automl.auto_estimator import AutoEstimator
    >>> rows = load_iris(as_frame=True).frame
    >>> table = AutoEstimator.from_table(
    ...     rows, label="target", models=["linear", "xgboost"], n_trials=3, folds=3
    ... )
    >>> sorted(table.leaderboard()["model"])
    ['constant', 'linear', 'xgboost']
    >>> table.predict(rows[:2])["prediction"].tolist()
    [0, 0]
    """

    def __init__(
        self,
        features: TableFeatures,
        target: TableTarget,
        metric: str,
        best_model: str,
        models: list[FoldModel],
        leaderboard: pd.DataFrame,
    ):
        self._features, self._target, self._metric = features, target, metric
        self._models, self._leaderboard = models, leaderboard
        self.best_model = best_model

    def __repr__(self) -> str:
        score = self._leaderboard[self._metric].iloc[0]
        return (
            f"TableEstimator(label={self._target.name!r}, task={self.task!r}, "
            f"best_model={self.best_model!r}, {self._metric}={score:.5g})"
        )

    @property
    def task(self) -> str:
        """Task of the table: ``"binary"``, ``"multiclass"`` or ``"regression"``."""
        return self._target.task

    @property
    def classes(self) -> list[Any]:
        """Labels of the classes, in the order of probabilities."""
        return list(self._target.classes)

    @property
    def feature_cols(self) -> list[str]:
        """Names of the feature columns."""
        return self._features.names

    def leaderboard(self) -> pd.DataFrame:
        """Return the trials, best first.

        Returns
        -------
        pandas.DataFrame
            ``model``, the metric's mean over the folds and its ``std``, ``seconds``, ``status``
            (``"finished"``, ``"time limit"`` if training ended early, ``"stopped"`` or
            ``"failed"``), ``trial``, ``config`` and ``error``.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from bigdl.orca.automl.auto_estimator import AutoEstimator
        >>> table = AutoEstimator.from_table(
        ...     load_iris(as_frame=True).frame, label="target", models=["linear"], n_trials=2
        ... )
        >>> table.leaderboard()[["model", "status"]].values.tolist()
        [['linear', 'finished'], ['constant', 'finished']]
        """
        return self._leaderboard.copy()

    def predict(
        self, data: object, *, output: str | None = None, output_col: str = "prediction"
    ) -> pd.DataFrame | DataFrame:
        """Add a column of predictions to a table.

        Parameters
        ----------
        data : pandas.DataFrame, pyspark.sql.DataFrame or str
            Rows with the feature columns, or their path. A category that the models do not know
            is a missing value.
        output : {"class", "probability", "value"}, optional
            Labels, probabilities in the order of :attr:`classes`, or the value of a regression.
        output_col : str, default "prediction"
            Name of the new column.

        Returns
        -------
        pandas.DataFrame or pyspark.sql.DataFrame
            All rows and columns of `data` and the new column; lazy for a Spark DataFrame.

        Raises
        ------
        UsageError
            If a column is missing, has values of another type, or exists already.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from bigdl.orca.automl.auto_estimator import AutoEstimator
        >>> rows = load_iris(as_frame=True).frame
        >>> table = AutoEstimator.from_table(rows, label="target", models=["linear"], n_trials=2)
        >>> probabilities = table.predict(rows[:1], output="probability")["prediction"][0]
        >>> len(probabilities), round(sum(probabilities), 3)
        (3, 1.0)
        """
        output = self._output(output)
        frame = None if is_spark_frame(data) else read_frame(data)
        table = cast("DataFrame", data) if frame is None else frame
        if output_col in table.columns:
            raise UsageError(
                f"data already has a column {output_col!r}; pass another output_col",
                code="column-duplicate",
                column=output_col,
            )
        if frame is None:
            return self._predict_in_spark(cast("DataFrame", data), output, output_col)
        result = frame.copy(deep=False)
        result[output_col] = self._column(frame, output)
        return result

    def _output(self, output: str | None) -> str:
        usual = "value" if self.task == REGRESSION else "class"
        check_choice("output", output or usual, _OUTPUTS)
        if output is not None and (output == "value") != (usual == "value"):
            raise UsageError(
                f"output={output!r} is not supported for a {self.task} target",
                code="unsupported",
                argument="output",
            )
        return output or usual

    def _scores(self, frame: pd.DataFrame) -> np.ndarray:
        rows: MatrixRows = self._features.encode(frame)
        if not len(rows):
            return np.zeros((0, len(self.classes)) if self.classes else 0)
        scores = np.stack([model.scores(rows) for model in self._models])
        mean: np.ndarray = scores.mean(axis=0)
        return mean

    def _column(self, frame: pd.DataFrame, output: str) -> np.ndarray | list[list[float]]:
        scores = self._scores(frame)
        return scores.tolist() if output == "probability" else self._target.decode(scores)

    def _predict_in_spark(self, data: DataFrame, output: str, output_col: str) -> DataFrame:
        from pyspark.sql import functions

        check_columns(data.columns, self.feature_cols)
        by_type = {str: "string", int: "bigint", bool: "boolean"}
        types = {by_type.get(type(label), "double") for label in self.classes}
        element = types.pop() if len(types) == 1 else "string"
        returns = {"class": element, "probability": "array<double>", "value": "double"}[output]
        function = arrow_udf(_SparkPredictions(self._content(), output), returns, iterates=True)
        columns = [functions.col(quoted(each)) for each in self.feature_cols]
        return data.withColumn(output_col, function(*columns))

    def evaluate(self, data: object, metrics: Sequence[str] | None = None) -> dict[str, float]:
        """Compute metrics on rows with labels, which should not be those of the search.

        Parameters
        ----------
        data : pandas.DataFrame, pyspark.sql.DataFrame or str
            Rows with the features and the label. Rows of Spark are read into this process.
        metrics : list of str, optional
            ``"accuracy"``, ``"balanced_accuracy"``, ``"f1_macro"``, ``"logloss"``, and for two
            classes ``"auc"`` and ``"f1"``; for a regression the names of
            :class:`~bigdl.orca.automl.metrics.Evaluator`. By default the metrics of
            classification, or ``"rmse"``, ``"mae"`` and ``"r2"``.

        Returns
        -------
        dict of str to float

        Raises
        ------
        UsageError
            If a metric is unknown, a column is missing, or a label is null or unknown.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from bigdl.orca.automl.auto_estimator import AutoEstimator
        >>> rows = load_iris(as_frame=True).frame.sample(frac=1, random_state=0)
        >>> table = AutoEstimator.from_table(
        ...     rows[:100], label="target", models=["linear"], n_trials=2
        ... )
        >>> table.evaluate(rows[100:], ["accuracy"])["accuracy"] > 0.9
        True
        """
        known = metrics_of(self.task)
        defaults = ["rmse", "mae", "r2"] if self.task == REGRESSION else list(known)
        names = defaults if metrics is None else [metrics] if isinstance(metrics, str) else metrics
        chosen = [TableMetric.of(name, None, self._target) for name in names]
        frame = read_frame(data, [*self.feature_cols, self._target.name])
        if not len(frame):
            raise UsageError("data has no rows to evaluate", code="data-empty", argument="data")
        y, scores = self._target.encode(frame[self._target.name]), self._scores(frame)
        return {metric.name: float(metric.compute(y, scores)) for metric in chosen}

    def _content(self) -> bytes:
        return dumps(
            {
                "format": _FORMAT,
                "features": [self._features.types, self._features.categories],
                "target": [self._target.name, self._target.task, self._target.classes],
                "metric": self._metric,
                "model": self.best_model,
                "states": [model.state() for model in self._models],
                "leaderboard": self._leaderboard.to_json(orient="table", index=False),
            }
        )

    def save(self, path: str | os.PathLike) -> str:
        """Write the estimator to one file, which contains no code.

        Parameters
        ----------
        path : str
            Path or fsspec URL.

        Returns
        -------
        str
            The path.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from bigdl.orca.automl.auto_estimator import AutoEstimator
        >>> from bigdl.orca.automl.table.estimator import TableEstimator
        >>> rows = load_iris(as_frame=True).frame
        >>> table = AutoEstimator.from_table(rows, label="target", models=["linear"], n_trials=2)
        >>> TableEstimator.load(table.save("iris.table")).best_model
        'linear'
        """
        write_bytes(os.fspath(path), self._content())
        return os.fspath(path)

    @staticmethod
    def load(path: str | os.PathLike) -> TableEstimator:
        """Read an estimator that :meth:`save` wrote.

        Parameters
        ----------
        path : str
            Path or fsspec URL.

        Raises
        ------
        UsageError
            If the file is missing or is not such a file.
        """
        return _of_content(read_bytes(os.fspath(path)), os.fspath(path))


def _of_content(data: bytes, path: str = "") -> TableEstimator:
    import json

    import pandas as pd

    try:
        content = loads(data)
        is_known = content["format"] == _FORMAT
    except Exception as error:
        raise UsageError(
            f"{path!r} is not a file of TableEstimator.save", code="file-format", path=path
        ) from error
    if not is_known:
        raise UsageError(
            f"{path!r} has format {content['format']}, which this version cannot read",
            code="file-format",
            path=path,
        )
    model_class = MODELS[content["model"]]
    check_installed(model_class.extra, *model_class.packages)
    leaderboard = pd.DataFrame(json.loads(content["leaderboard"])["data"])
    return TableEstimator(
        TableFeatures(*content["features"]),
        TableTarget(*content["target"]),
        content["metric"],
        content["model"],
        [model_class.of_state(state) for state in content["states"]],
        leaderboard,
    )


class _SparkPredictions:
    """Function of Spark that predicts batches of rows, and creates the models once per task."""

    def __init__(self, content: bytes, output: str):
        self._content, self._output = content, output

    def __call__(self, batches: Iterator[Any]) -> Iterator[pa.Array]:
        import pandas as pd
        import pyarrow as pa

        estimator = _of_content(self._content)
        for batch in batches:
            arrays = batch if isinstance(batch, tuple) else (batch,)
            columns = zip(estimator.feature_cols, arrays, strict=True)
            frame = pd.DataFrame({name: _local_times(array.to_pandas()) for name, array in columns})
            yield pa.array(list(estimator._column(frame, self._output)))


def _local_times(column: pd.Series) -> pd.Series:
    """Return times without their zone, that of the session, as Spark's toPandas returns them."""
    return column if getattr(column.dtype, "tz", None) is None else column.dt.tz_localize(None)


def fit_table(
    data: object,
    label: str,
    *,
    time_limit: float | None,
    n_trials: int | None,
    task: str | None,
    metric: str | Callable | None,
    metric_mode: str | None,
    models: Sequence[str] | None,
    feature_cols: ColumnNames | None,
    categorical_cols: ColumnNames | None,
    group_col: str | None,
    time_col: str | None,
    folds: int,
    backend: str | None,
    concurrency: int | None,
    cpus_per_trial: int | None,
    seed: int,
) -> TableEstimator:
    """Search for the best model of a table; see ``AutoEstimator.from_table``."""
    started = time.time()
    require("optuna", "automl")
    require("sklearn", "xgboost")
    check_integer("folds", folds, 2)
    check_integer("seed", seed, 0)
    if time_limit is not None:
        check_number("time_limit", time_limit, above=0)
    if n_trials is not None:
        check_positive("n_trials", n_trials)
    if cpus_per_trial is not None:
        check_positive("cpus_per_trial", cpus_per_trial)
    if task is not None:
        check_choice("task", task, TASKS)
    if group_col is not None and time_col is not None:
        raise UsageError(
            "group_col and time_col are not supported together; pass one of them",
            code="argument-conflict",
            argument="time_col",
        )
    backend = backend or ("spark" if is_spark_frame(data) else "local")
    check_choice("backend", backend, ("spark", "ray", "local"))
    chosen = available_models([models] if isinstance(models, str) else models)
    names, categorical = names_of(feature_cols), names_of(categorical_cols)
    others = [each for each in (group_col, time_col) if each is not None]
    wanted = list(dict.fromkeys([*names, *others, label]))
    frame = read_frame(data, wanted if names else None).reset_index(drop=True)
    _check_names(frame, label, others, names, categorical)
    names = names or [each for each in frame.columns if each not in (label, *others)]
    target = TableTarget.of(frame[label], task)
    chosen_metric = TableMetric.of(metric, metric_mode, target)
    features = TableFeatures.of(frame, names, categorical)
    y = target.encode(frame[label])
    table_folds = create_folds(
        y,
        folds,
        seed,
        is_classification=target.is_classification,
        groups=None if group_col is None else _division(frame[group_col], group_col),
        times=None if time_col is None else _division(frame[time_col], time_col),
    )
    threads = cpus_per_trial or (len(usable_cores()) if backend == "local" else 1)
    reserve = 0 if time_limit is None else min(1.0, 0.05 * time_limit)
    deadline = float("inf") if time_limit is None else started + time_limit - reserve
    settings = TrainingSettings(
        target.task, len(target.classes), features.category_counts, seed, threads
    )
    job = TableJob(features.encode(frame), y, table_folds, settings, deadline)
    search = TableSearch(job, chosen_metric, chosen, n_trials)
    search.run(backend, concurrency, say)
    best_model, best = search.best()
    if best_model == "constant":
        logger.warning(
            "The best model is the constant: no other model was better, or none was trained within "
            "the time limit; see leaderboard()"
        )
    return TableEstimator(
        features, target, chosen_metric.name, best_model, best, search.leaderboard()
    )


def _check_names(
    frame: pd.DataFrame, label: str, others: list[str], names: list, categorical: list
) -> None:
    """Raise a UsageError for columns that are missing, duplicated or used twice."""
    columns = list(frame.columns)
    duplicated = [each for each in columns if columns.count(each) > 1]
    if duplicated:
        raise UsageError(
            f"data has two columns {duplicated[0]!r}; rename one",
            code="column-duplicate",
            column=duplicated[0],
        )
    check_columns(columns, [label], "label")
    check_columns(columns, categorical, "categorical_cols")
    check_columns(columns, others, None)
    for each in (label, *others):
        if each in names or each in categorical or (each in others and each == label):
            raise UsageError(
                f"Column {each!r} is the label, group or time, so it cannot be a feature too",
                code="argument-conflict",
                column=each,
            )
    if len(columns) <= 1 + len(others):
        raise UsageError(
            f"data has no feature columns besides {label!r}", code="data-structure", argument="data"
        )


def _division(column: pd.Series, name: str) -> np.ndarray:
    """Return the order of the values of a group or time column as integers."""
    import pandas as pd

    if column.isna().any():
        raise UsageError(
            f"Column {name!r} has nulls, so these rows have no group or time; drop or fill them",
            code="data-null",
            column=name,
        )
    return np.asarray(pd.factorize(column, sort=True)[0])
