"""MLflow logging of Keras fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bigdl.common.errors import require
from bigdl.mlflow.runs import FitRun

if TYPE_CHECKING:
    import keras
else:
    keras = require("keras", "tf")

__all__ = ["MLflowCallback"]


class MLflowCallback(keras.callbacks.Callback):
    """Callback that logs a fit's parameters and epoch metrics to MLflow, from rank 0.

    Parameters are the classes of model and optimizer, the optimizer's scalar settings, and the
    number of epochs. Metrics are the ``logs`` of Keras callbacks.

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
    >>> import keras
    >>> import mlflow
    >>> import numpy as np
    >>> from bigdl.mlflow.keras import MLflowCallback
    >>> from bigdl.orca.learn.tf2 import Estimator
    >>> mlflow.set_tracking_uri("sqlite:///keras.db")
    >>> def creator(config):
    ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    ...     return model
    >>> estimator = Estimator.from_keras(model_creator=creator, backend="local")
    >>> x = np.linspace(0, 1, 64, dtype="float32")[:, None]
    >>> callback = MLflowCallback()
    >>> history = estimator.fit((x, x), epochs=2, callbacks=[callback], verbose=0)
    >>> run = mlflow.get_run(callback.run_id)
    >>> run.data.params["optimizer"], run.data.metrics["loss"] == history["loss"][-1]
    ('SGD', True)
    """

    rank0_only = True  # it has no effect on the training

    def __init__(
        self,
        run_id: str | None = None,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
    ):
        super().__init__()
        self._fit_run = FitRun(run_id, experiment_name, run_name, tracking_uri)
        self.run_id = self._fit_run.run_id

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Log the parameters of the fit."""
        optimizer = self.model.optimizer
        numbers = {
            f"optimizer.{key}": value
            for key, value in optimizer.get_config().items()
            if isinstance(value, bool | int | float | str)
        }
        loss = self.model.loss
        self._fit_run.log_params(
            {
                "model": type(self.model).__name__,
                "optimizer": type(optimizer).__name__,
                "loss": loss if isinstance(loss, str) else getattr(loss, "name", None),
                "epochs": self.params.get("epochs"),
                **numbers,
            }
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the metrics of an epoch."""
        self._fit_run.log_metrics(logs or {}, epoch + 1)

    def on_train_end(self, logs: dict | None = None) -> None:
        """End the MLflow run if it was created for the fit."""
        self._fit_run.finish()
