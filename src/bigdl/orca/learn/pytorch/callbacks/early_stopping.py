"""The end of a fit that makes no progress."""

from __future__ import annotations

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.callbacks.base import Callback
from bigdl.training.figures import figure_of

__all__ = ["EarlyStopping", "check_mode"]


class EarlyStopping(Callback):
    """End the training after `patience` epochs without a better figure.

    It looks at the figures of all epochs of the fit each time, so a run that goes on from a
    checkpoint ends where an uninterrupted one does.

    Parameters
    ----------
    monitor : str, optional
        A figure of an epoch, e.g. ``"train_loss"``, ``"val_loss"`` or the name of a metric.
        Default: the validation loss, without validation the training loss.
    patience : int
    mode : str
        ``"min"`` or ``"max"``: what is better.
    min_delta : float
        How much better it has to be.
    """

    def __init__(
        self,
        monitor: str | None = None,
        patience: int = 3,
        mode: str = "min",
        min_delta: float = 0.0,
    ):
        self.monitor = monitor
        self.patience = check_positive("patience", patience)
        self.mode = check_mode(mode)
        if isinstance(min_delta, bool) or not isinstance(min_delta, int | float) or min_delta < 0:
            raise UsageError(f"min_delta should be a number of at least 0, got {min_delta!r}")
        self.min_delta = min_delta

    def after_train_epoch(self, runner):
        best, waited = None, 0
        for figures in runner.history:
            value = figure_of(figures, self.monitor, "callback EarlyStopping")
            value = value if self.mode == "min" else -value
            if best is None or value < best - self.min_delta:
                best, waited = value, 0
            else:
                waited += 1
        if waited >= self.patience:
            runner.stop = True


def check_mode(mode) -> str:
    """``"min"`` or ``"max"``, or a UsageError."""
    if mode not in ("min", "max"):
        raise UsageError(f'mode should be "min" or "max", got {mode!r}')
    return mode
