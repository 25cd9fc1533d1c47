"""The MLflow run to which a fit is logged.

The driver selects the run. Rank 0 logs to it with a separate client, so the MLflow state of the
worker's process stays unchanged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError, require
from bigdl.orca.data.file import is_local_path, open_file_system

if TYPE_CHECKING:
    from mlflow import MlflowClient

LONGEST_PARAM = 500  # maximum characters of a parameter


class FitRun:
    """Picklable handle of the MLflow run to which a fit is logged.

    Parameters
    ----------
    run_id : str, optional
        Id of an existing run. Default: the active run, or a new one.
    experiment_name : str, optional
        Experiment of a new run.
    run_name : str, optional
        Name of a new run.
    tracking_uri : str, optional
        Tracking URI, which the workers must reach; default: that of this process.

    Attributes
    ----------
    run_id, tracking_uri : str
        Id and tracking URI of the run.
    """

    def __init__(
        self,
        run_id: str | None = None,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
    ):
        mlflow = require("mlflow", "mlflow")
        self.tracking_uri = uri_for_workers(tracking_uri or mlflow.get_tracking_uri())
        active = mlflow.active_run()
        self._is_new = run_id is None and active is None
        if not self._is_new and (experiment_name or run_name):
            raise UsageError(
                "experiment_name and run_name apply to a new run, but a run is already active; "
                "omit them, or leave the block of mlflow.start_run",
                code="argument-conflict",
            )
        if self._is_new:
            run_id = self._new(mlflow, experiment_name, run_name)
        self.run_id = run_id or active.info.run_id

    def _new(self, mlflow: object, experiment_name: str | None, run_name: str | None) -> str:
        client = self._client()
        name = experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        experiment = client.get_experiment_by_name(name)
        number = client.create_experiment(name) if experiment is None else experiment.experiment_id
        return client.create_run(number, run_name=run_name).info.run_id

    def _client(self) -> MlflowClient:
        return require("mlflow", "mlflow").MlflowClient(tracking_uri=self.tracking_uri)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log the parameters that the run does not contain yet."""
        from mlflow.entities import Param

        client = self._client()
        known = client.get_run(self.run_id).data.params
        new = [
            Param(key, str(value)[:LONGEST_PARAM])
            for key, value in params.items()
            if key not in known and value is not None
        ]
        for low in range(0, len(new), 100):  # the limit of one request
            client.log_batch(self.run_id, params=new[low : low + 100])

    def log_metrics(self, metrics: Mapping[str, Any], epoch: int) -> None:
        """Log the numeric metrics of an epoch."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        numbers = {
            key: float(value)
            for key, value in metrics.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        entries = [Metric(key, value, now, epoch) for key, value in numbers.items()]
        self._client().log_batch(self.run_id, metrics=entries)

    def finish(self) -> None:
        """End the run if it was created for the fit."""
        if self._is_new:
            self._client().set_terminated(self.run_id)


def uri_for_workers(uri: str) -> str:
    """Return an MLflow URI with absolute paths, since a worker's current directory may differ."""
    scheme, colon, path = uri.partition(":///")
    if scheme == "sqlite" and colon:
        return f"sqlite:///{os.path.abspath(path)}"
    if "://" not in uri and is_local_path(uri):
        return f"file://{open_file_system(uri)[1]}"
    return uri
