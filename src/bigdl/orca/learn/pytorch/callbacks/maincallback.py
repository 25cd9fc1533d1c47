"""The callback that is the training step itself."""

from __future__ import annotations

from bigdl.orca.learn.pytorch.callbacks.base import Callback

__all__ = ["MainCallback"]


class MainCallback(Callback):
    """What happens with a batch; override what should happen otherwise.

    A fit, an evaluation or a prediction takes at most one.  N workers still make the update of one
    process: what ``loss.backward()`` leaves in the gradients is that of the whole batch.  The loss
    must be a mean over the rows (with the criterion of the Estimator: whatever that is), and
    :meth:`on_iter_backward` must call ``backward`` equally often on every worker.
    The forward methods are not called on a worker that has no rows in a step.
    """

    def on_iter_forward(self, runner) -> None:
        """From ``runner.batch`` to ``runner.output``, ``runner.target`` and ``runner.loss``."""
        runner.forward()

    def on_train_forward(self, runner) -> None:
        """The forward pass of training."""
        self.on_iter_forward(runner)

    def on_val_forward(self, runner) -> None:
        """The forward pass of validation, without gradients."""
        self.on_iter_forward(runner)

    def on_pred_forward(self, runner) -> None:
        """From ``runner.batch`` (the features) to ``runner.output``.

        The output is a tensor or ndarray of as many rows, or a list, tuple or dict of them.
        """
        runner.output = runner.model(*runner.batch)

    def on_iter_backward(self, runner) -> None:
        """From ``runner.loss`` to new weights."""
        runner.optimizer.zero_grad()
        runner.loss.backward()
        runner.optimizer.step()

    def on_lr_adjust(self, runner) -> None:
        """At the end of an epoch, or after every update with ``scheduler_step_freq="batch"``."""
        if runner.scheduler is not None:
            runner.scheduler.step()

    @property
    def owns_backward(self) -> bool:
        """Whether :meth:`on_iter_backward` is the user's."""
        return type(self).on_iter_backward is not MainCallback.on_iter_backward

    @property
    def owns_lr(self) -> bool:
        """Whether :meth:`on_lr_adjust` is the user's."""
        return type(self).on_lr_adjust is not MainCallback.on_lr_adjust
