"""The end of a fit after a number of steps."""

from __future__ import annotations

from bigdl.common.checks import check_positive
from bigdl.orca.learn.pytorch.callbacks.base import Callback

__all__ = ["MaxstepsCallback"]


class MaxstepsCallback(Callback):
    """End the training when ``runner.global_step`` is `max_step`.

    ``fit(max_steps=)`` does the same for one fit and lets a run be resumed to another end.
    """

    def __init__(self, max_step: int):
        self.max_step = check_positive("max_step", max_step)

    def after_train_iter(self, runner):
        if runner.global_step >= self.max_step:
            runner.stop = True
