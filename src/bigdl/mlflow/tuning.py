"""Trials of a search as runs of MLflow."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING

from bigdl.common.errors import hide_frames, require
from bigdl.mlflow.runs import LONGEST_PARAM, uri_for_workers

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

__all__ = ["MLflowTrials"]

logger = logging.getLogger("bigdl.tuning")

_STATUS = {"COMPLETE": "FINISHED", "PRUNED": "FINISHED", "FAIL": "FAILED"}
_BATCH_METRICS, _BATCH_PARAMS = 900, 100  # of one request, which has at most 1000 entries


@hide_frames
class MLflowTrials:
    """Callback that logs each ended trial of a study as a run of MLflow.

    A run has the trial's parameters, its values, its reports as the metric ``report``, and the
    tags ``trial``, ``study`` and ``state``. In a block of ``mlflow.start_run()`` the runs are
    children of the active run. Only this process connects to the tracking server. If the server
    fails, the search continues with a warning, and the run ends as ``FAILED``.

    Parameters
    ----------
    experiment_name : str, optional
        Experiment of the runs; by default that of the active run, or of the environment variable
        ``MLFLOW_EXPERIMENT_NAME``, or ``"Default"``.
    tracking_uri : str, optional
        Tracking URI; by default that of this process.

    Examples
    --------
    >>> import mlflow
    >>> from bigdl.mlflow.tuning import MLflowTrials
    >>> from bigdl.tuning import open_study, optimize
    >>> mlflow.set_tracking_uri("sqlite:///trials.db")
    >>> study = open_study(metric_names=["loss"])
    >>> optimize(
    ...     study, lambda trial: trial.suggest_int("units", 2, 2), n_trials=2, backend="local",
    ...     callbacks=[MLflowTrials("search")],
    ... )
    >>> runs = mlflow.search_runs(experiment_names=["search"])
    >>> runs["metrics.loss"].tolist(), runs["params.units"].tolist()
    ([2.0, 2.0], ['2', '2'])
    """

    def __init__(self, experiment_name: str | None = None, tracking_uri: str | None = None):
        mlflow = require("mlflow", "mlflow")
        self.tracking_uri = uri_for_workers(tracking_uri or mlflow.get_tracking_uri())
        self._client = mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        active = mlflow.active_run()  # of this thread; callbacks run in another
        self._parent = None if active is None else active.info.run_id
        if experiment_name is None and active is not None:
            self._experiment_id = active.info.experiment_id
            return
        name = experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        experiment = self._client.get_experiment_by_name(name)
        self._experiment_id = (
            self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        )

    def __call__(self, study: Study, trial: FrozenTrial) -> None:
        """Log an ended trial; an error is a warning, so that the search continues."""
        run_id = None
        try:
            run_id = self._create_run(study, trial)
            self._log(run_id, study, trial)
            ended = trial.datetime_complete
            self._client.set_terminated(
                run_id,
                _STATUS.get(trial.state.name, "FAILED"),
                None if ended is None else int(ended.timestamp() * 1000),
            )
        except Exception as error:
            logger.warning("Trial %s could not be logged to MLflow: %s", trial.number, error)
            if run_id is not None:
                with contextlib.suppress(Exception):  # the server may be unreachable
                    self._client.set_terminated(run_id, "FAILED")

    def _create_run(self, study: Study, trial: FrozenTrial) -> str:
        tags = {"trial": str(trial.number), "study": study.study_name, "state": trial.state.name}
        if self._parent is not None:
            tags["mlflow.parentRunId"] = self._parent
        started = trial.datetime_start
        created = self._client.create_run(
            self._experiment_id,
            start_time=None if started is None else int(started.timestamp() * 1000),
            run_name=f"trial {trial.number}",
            tags=tags,
        )
        return created.info.run_id

    def _log(self, run_id: str, study: Study, trial: FrozenTrial) -> None:
        """Log parameters, reports and values, in one request unless there are very many."""
        from mlflow.entities import Metric, Param

        now = int(time.time() * 1000)
        reports = sorted(trial.intermediate_values.items())
        metrics = [Metric("report", value, now, step) for step, value in reports]
        values = trial.values or []
        count = len(study.directions)
        unnamed = ["value"] if count == 1 else [f"value_{index}" for index in range(count)]
        names = (study.metric_names or unnamed)[: len(values)]
        metrics += [Metric(k, v, now, 0) for k, v in zip(names, values, strict=True)]
        params = [Param(k, str(v)[:LONGEST_PARAM]) for k, v in trial.params.items()]
        while metrics or params:
            self._client.log_batch(run_id, metrics[:_BATCH_METRICS], params[:_BATCH_PARAMS])
            metrics, params = metrics[_BATCH_METRICS:], params[_BATCH_PARAMS:]
