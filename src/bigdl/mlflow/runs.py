"""The run of MLflow that a fit is logged to.

The driver chooses the run; rank 0 of the workers logs to it by a client of its own, so that nothing
of the worker's own MLflow is changed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from bigdl.common.errors import UsageError, require
from bigdl.orca.data.file import is_local_path, open_file_system

_LONGEST = 500  # characters of a parameter


class FitRun:
    """A run that a fit is logged to; it can be pickled.

    Parameters
    ----------
    run_id : str, optional
        A run that exists. Default: the one that is active, else a new one.
    experiment_name : str, optional
        Of a new run.
    run_name : str, optional
        Of a new run.
    tracking_uri : str, optional
        Default: that of this process. The workers must reach it.

    Attributes
    ----------
    run_id, tracking_uri : str
    """

    def __init__(
        self,
        run_id: str | None = None,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
    ):
        mlflow = require("mlflow", "mlflow")
        self.tracking_uri = _for_workers(tracking_uri or mlflow.get_tracking_uri())
        active = mlflow.active_run()
        self._is_own = run_id is None and active is None
        if not self._is_own and (experiment_name or run_name):
            raise UsageError(
                "experiment_name and run_name are those of a new run, but there is a run already; "
                "leave them out, or leave the block of mlflow.start_run",
                code="argument-conflict",
            )
        if self._is_own:
            run_id = self._new(mlflow, experiment_name, run_name)
        self.run_id = run_id or active.info.run_id

    def _new(self, mlflow: Any, experiment_name: str | None, run_name: str | None) -> str:
        client = self._client()
        name = experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        experiment = client.get_experiment_by_name(name)
        number = client.create_experiment(name) if experiment is None else experiment.experiment_id
        return client.create_run(number, run_name=run_name).info.run_id

    def _client(self) -> Any:
        return require("mlflow", "mlflow").MlflowClient(tracking_uri=self.tracking_uri)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log parameters; those that the run has already stay as they are."""
        from mlflow.entities import Param

        client = self._client()
        known = client.get_run(self.run_id).data.params
        new = [
            Param(key, str(value)[:_LONGEST])
            for key, value in params.items()
            if key not in known and value is not None
        ]
        for low in range(0, len(new), 100):  # of one request, at most
            client.log_batch(self.run_id, params=new[low : low + 100])

    def log_figures(self, figures: Mapping[str, Any], epoch: int) -> None:
        """Log what is a number among the figures of an epoch."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        numbers = {
            key: float(value)
            for key, value in figures.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        metrics = [Metric(key, value, now, epoch) for key, value in numbers.items()]
        self._client().log_batch(self.run_id, metrics=metrics)

    def finish(self) -> None:
        """Say that the run has ended, if it was made for the fit."""
        if self._is_own:
            self._client().set_terminated(self.run_id)


def _for_workers(uri: str) -> str:
    """A URI of MLflow in which local paths are whole: workers may have another directory."""
    scheme, colon, path = uri.partition(":///")
    if scheme == "sqlite" and colon:
        return f"sqlite:///{os.path.abspath(path)}"
    if "://" not in uri and is_local_path(uri):
        return f"file://{open_file_system(uri)[1]}"
    return uri
