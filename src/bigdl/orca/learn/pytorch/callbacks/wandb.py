"""Callback that logs to Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bigdl.common.errors import MissingExtraError
from bigdl.orca.learn.pytorch.callbacks.base import Callback

if TYPE_CHECKING:
    from bigdl.orca.learn.pytorch.evaluation import TorchRunner

__all__ = ["WandbLoggerCallback"]


class WandbLoggerCallback(Callback):
    """Callback that logs the metrics of every epoch to Weights & Biases, from rank 0.

    Parameters
    ----------
    project : str
        Name of the project.
    log_config : bool
        Whether to log the ``config`` of the Estimator.
    watch_model : bool
        Whether to log gradients and weights, too.
    **options
        Further arguments of ``wandb.init``.

    Examples
    --------
    >>> from bigdl.orca.learn.pytorch.callbacks import WandbLoggerCallback
    >>> callback = WandbLoggerCallback("ratings", log_config=True, mode="offline")
    >>> callback.project, callback.options  # for fit(callbacks=[callback])
    ('ratings', {'mode': 'offline'})
    """

    def __init__(
        self, project: str, log_config: bool = False, watch_model: bool = False, **options
    ):
        self.project, self.options = project, options
        self.log_config, self.watch_model = log_config, watch_model
        self._run: Any = None

    def before_run(self, runner: TorchRunner) -> None:
        if runner.rank:
            return
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise MissingExtraError("wandb is not installed; run: pip install wandb") from error
        options = dict(self.options)
        if self.log_config:
            options["config"] = {**runner.config, **options.get("config", {})}
        self._run = wandb.init(project=self.project, **options)
        if self.watch_model:
            self._run.watch(runner.model)

    def after_train_epoch(self, runner: TorchRunner) -> None:
        if self._run is not None:
            metrics = runner.epoch_stats.items()
            self._run.log({k: v for k, v in metrics if isinstance(v, int | float)})

    def after_run(self, runner: TorchRunner) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
