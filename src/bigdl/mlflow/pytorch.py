"""MLflow logging of PyTorch Estimator fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigdl.mlflow.runs import FitRun
from bigdl.orca.learn.pytorch.callbacks import Callback

if TYPE_CHECKING:
    from bigdl.orca.learn.pytorch.evaluation import TorchRunner

__all__ = ["MLflowCallback"]


class MLflowCallback(Callback):
    """Callback that logs a fit's parameters and epoch metrics to MLflow, from rank 0.

    Parameters are the ``config`` of the Estimator, the classes of model, optimizer and loss, the
    optimizer's scalar settings, and the number of workers and epochs. Metrics are the entries that
    ``fit`` returns.

    Parameters
    ----------
    run_id : str, optional
        Id of an existing run. Default: the active run, as in a block of ``mlflow.start_run()``, or
        a new run that ends with the fit.
    experiment_name, run_name : str, optional
        Names for a new run.
    tracking_uri : str, optional
        Tracking URI, which rank 0 must reach; default: the driver's URI.

    Attributes
    ----------
    run_id : str
        Id of the run.

    Examples
    --------
    >>> import mlflow
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.mlflow.pytorch import MLflowCallback
    >>> from bigdl.orca.learn.optimizers import SGD
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> mlflow.set_tracking_uri("sqlite:///fits.db")
    >>> estimator = Estimator.from_torch(
    ...     model=torch.nn.Linear(1, 1), optimizer=SGD(0.1), loss=torch.nn.MSELoss(),
    ...     backend="local",
    ... )
    >>> x = np.linspace(0, 1, 64, dtype="float32")[:, None]
    >>> callback = MLflowCallback()
    >>> stats = estimator.fit((x, x), epochs=2, callbacks=[callback])
    >>> run = mlflow.get_run(callback.run_id)
    >>> run.data.params["optimizer"], run.data.metrics["train_loss"] == stats[-1]["train_loss"]
    ('SGD', True)
    """

    def __init__(
        self,
        run_id: str | None = None,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
    ):
        self._run = FitRun(run_id, experiment_name, run_name, tracking_uri)
        self.run_id = self._run.run_id

    def before_run(self, runner: TorchRunner) -> None:
        if runner.rank:
            return
        loss = runner.criterion
        parameters = {
            "model": type(runner.model).__name__,
            "optimizer": type(runner.optimizer).__name__,
            "loss": getattr(loss, "__name__", type(loss).__name__),
            "workers": runner.size,
            "epochs": runner.num_epochs - runner.epochs,
        }
        groups = getattr(runner.optimizer, "param_groups", None) or [{}]
        numbers = {
            f"optimizer.{key}": value
            for key, value in groups[0].items()
            if isinstance(value, bool | int | float | tuple)
        }
        self._run.log_params({**parameters, **numbers, **runner.config})

    def after_train_epoch(self, runner: TorchRunner) -> None:
        self._log(runner, runner.epoch_stats)

    def after_val_epoch(self, runner: TorchRunner) -> None:
        self._log(runner, runner.metrics_stats)

    def _log(self, runner: TorchRunner, metrics: dict) -> None:
        epoch = runner.epoch_stats.get("epoch")
        if epoch is not None and not runner.rank:  # otherwise it is an evaluation
            self._run.log_metrics({k: v for k, v in metrics.items() if k != "epoch"}, epoch)

    def after_run(self, runner: TorchRunner) -> None:
        if not runner.rank:
            self._run.finish()
