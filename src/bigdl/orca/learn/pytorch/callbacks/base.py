"""Callbacks: user code at the joints of the training loop.

A callback is shipped to every worker and called there with the *runner*, the worker's
:class:`~bigdl.orca.learn.pytorch.loop.TorchLoop`: ``runner.rank``, ``size``, ``epochs`` (finished),
``num_epochs``, ``global_step``, ``batch``, ``batch_idx``, ``output``, ``target``, ``loss``,
``model``, ``optimizer``, ``scheduler``, ``criterion``, ``config``, ``epoch_stats``; set
``runner.stop = True`` (on any rank) to end the training after the current step.
"""

from __future__ import annotations

__all__ = ["Callback"]


class Callback:
    """Base class: every hook does nothing or what its more general hook does."""

    def before_run(self, runner):
        """Before the first epoch of a fit."""

    def after_run(self, runner):
        """After the last epoch of a fit."""

    def before_epoch(self, runner):
        """Before an epoch of any kind, unless the specific hook is overridden."""

    def after_epoch(self, runner):
        """After an epoch of any kind, unless the specific hook is overridden."""

    def before_iter(self, runner):
        """Before a batch of any kind, unless the specific hook is overridden."""

    def after_iter(self, runner):
        """After a batch of any kind, unless the specific hook is overridden."""

    def before_train_epoch(self, runner):
        self.before_epoch(runner)

    def after_train_epoch(self, runner):
        self.after_epoch(runner)

    def before_val_epoch(self, runner):
        self.before_epoch(runner)

    def after_val_epoch(self, runner):
        self.after_epoch(runner)

    def before_train_iter(self, runner):
        self.before_iter(runner)

    def after_train_iter(self, runner):
        self.after_iter(runner)

    def before_val_iter(self, runner):
        self.before_iter(runner)

    def after_val_iter(self, runner):
        self.after_iter(runner)

    def every_n_epoch(self, runner, n):
        """Whether the epoch that just ended is a multiple of `n`."""
        return n > 0 and (runner.epochs + 1) % n == 0

    def every_n_iter(self, runner, n):
        """Whether the step that just ended is a multiple of `n`."""
        return n > 0 and (runner.global_step + 1) % n == 0
