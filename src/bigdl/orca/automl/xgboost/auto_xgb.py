"""AutoXGBClassifier and AutoXGBRegressor."""

from __future__ import annotations

from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.automl.auto_estimator import AutoEstimator
from bigdl.orca.automl.model.base_xgboost_model import XGBoostModelBuilder

__all__ = ["AutoXGBClassifier", "AutoXGBRegressor"]


class _AutoXGBoost(AutoEstimator):
    _kind: str

    def __init__(
        self,
        logs_dir: str,
        cpus_per_trial: int = 1,
        name: str | None = None,
        remote_dir: str | None = None,
        *,
        backend: str | None = None,
        **xgb_configs: Any,
    ):
        whole = isinstance(cpus_per_trial, int) and not isinstance(cpus_per_trial, bool)
        if not whole or cpus_per_trial < 1:
            raise UsageError(f"cpus_per_trial must be a positive integer, got {cpus_per_trial!r}")
        super().__init__(
            XGBoostModelBuilder(self._kind, cpus_per_trial, xgb_configs),
            logs_dir,
            {"cpu": cpus_per_trial},
            remote_dir,
            name or f"auto_xgb_{self._kind}",
            backend=backend,
        )


class AutoXGBClassifier(_AutoXGBoost):
    """Tries configurations of ``xgboost.XGBClassifier`` and keeps the best one.

    `fit` and what follows are those of :class:`~bigdl.orca.automl.auto_estimator.AutoEstimator`.
    Its `metric` may also be one of XGBoost's own names (default ``"logloss"``), which are computed
    by XGBoost. The columns of frames become one matrix. With ``epochs=n`` the trees are grown in n
    parts, after each of which a scheduler may stop a trial.

    Parameters
    ----------
    logs_dir : str
    cpus_per_trial : int, default 1
        Threads of a trial.
    name : str, optional
    remote_dir, backend : optional
        See :class:`~bigdl.orca.automl.auto_estimator.AutoEstimator`.
    **xgb_configs
        Parameters of all models, such as ``n_estimators`` (default 1000) and ``max_depth``
        (default 5), unless the search space has them, too. ``"lr"`` of a search space is
        ``learning_rate``.
    """

    _kind = "classifier"

    def __init__(self, logs_dir: str = "/tmp/auto_xgb_classifier_logs", *args: Any, **kwargs: Any):
        super().__init__(logs_dir, *args, **kwargs)


class AutoXGBRegressor(_AutoXGBoost):
    """Tries configurations of ``xgboost.XGBRegressor`` and keeps the best one.

    The default metric is ``"rmse"``; everything else is as for :class:`AutoXGBClassifier`.
    """

    _kind = "regressor"

    def __init__(self, logs_dir: str = "/tmp/auto_xgb_regressor_logs", *args: Any, **kwargs: Any):
        super().__init__(logs_dir, *args, **kwargs)
