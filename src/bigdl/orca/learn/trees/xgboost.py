"""Estimator of the trees of XGBoost."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bigdl.common.errors import UsageError, hide_frames
from bigdl.nano.acceleration.trees import read_booster
from bigdl.orca.learn.trees.estimator import FitPlan, TreeEstimator
from bigdl.orca.learn.trees.matrix import TreeColumns
from bigdl.orca.learn.trees.program import Metric
from bigdl.orca.learn.trees.xgboost_program import TRACKER, XGBEvaluation, XGBFit, message_of
from bigdl.runtime.failure import FailurePolicy

if TYPE_CHECKING:
    import pandas as pd
    import xgboost

    from bigdl.common.types import ColumnNames

_SETTINGS = {
    "nthread": "the backend sets the threads of its workers",
    "n_jobs": "the backend sets the threads of its workers",
    "n_estimators": "pass num_rounds",
    "num_boost_round": "pass num_rounds",
    "enable_categorical": "pass categorical_cols to fit",
    "early_stopping_rounds": "pass it to fit",
    "missing": "pass missing= to XGBEstimator",
}


@hide_frames
class XGBEstimator(TreeEstimator):
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
    library = "XGBoost"
    metric_name = "eval_metric"
    booster_name = "booster"
    class_objectives: ClassVar[Mapping[str, bool]] = {
        "binary:logistic": False,
        "multi:softprob": True,
    }

    def _check_parameters(self, params: dict[str, Any]) -> None:
        _check_parameters(params)

    def _check_column(self, name: str) -> None:
        if set(name) & set("[]<"):
            raise UsageError(
                f"XGBoost does not allow '[', ']' or '<' in feature names, got {name!r}; "
                "rename the column",
                code="argument-value",
                column=name,
            )

    def _rounds_of(self, data: bytes) -> int:
        return int(read_booster(data).num_boosted_rounds())

    @classmethod
    def _objective_of(cls, data: bytes) -> tuple[str | None, int]:
        learner = json.loads(read_booster(data).save_config())["learner"]
        classes = int(learner["learner_model_param"]["num_class"])
        return str(learner["objective"]["name"]), classes

    def _file_content(self, path: str) -> bytes:
        data = self._require_model()
        return bytes(read_booster(data).save_raw("json")) if path.endswith(".json") else data

    @contextlib.contextmanager
    def _attempt_options(self, host: str, workers: int) -> Iterator[dict[str, Any]]:
        with _tracker(host, workers) as arguments:
            yield {TRACKER: arguments}

    def _fit_program(self, plan: FitPlan) -> XGBFit:
        return XGBFit(
            dict(self._params),
            plan.stop_at,
            plan.columns,
            self._missing,
            objective=self._objective,
            metric=self._metric,
            early_stopping_rounds=plan.early_stopping_rounds,
            maximize=plan.maximize,
            checkpoint_rounds=plan.checkpoint_rounds,
            external_memory=plan.external_memory,
        )

    def _evaluation_program(
        self, columns: TreeColumns, metrics: list[str] | None, metric: Metric | None
    ) -> XGBEvaluation:
        has_objective = self._objective is not None
        return XGBEvaluation(columns, self._missing, metrics, metric, has_objective)

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
        return self._fit(
            data,
            validation_data,
            columns,
            num_rounds=num_rounds,
            early_stopping_rounds=early_stopping_rounds,
            maximize=maximize,
            checkpoint_rounds=checkpoint_rounds,
            max_failures=max_failures,
            resume=resume,
            external_memory=external_memory,
        )

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
