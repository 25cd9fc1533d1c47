"""Callbacks: user code at the joints of the training loop.

A callback is shipped to every worker and called there with the worker's
:class:`~bigdl.orca.learn.pytorch.runner.Runner`; what it keeps in itself stays in that worker, and
the driver's object does not change.  The hooks of a fit come in this order::

    before_run
        before_train_epoch
            before_train_iter  after_train_iter     for every step
        before_val_epoch                            with validation_data
            before_val_iter  after_val_iter         for every batch
        after_val_epoch
        after_train_epoch                           runner.epoch_stats is complete
    after_run

``evaluate`` calls the hooks of validation only, and ``predict`` none but ``on_pred_forward`` of a
MainCallback.  In a training step a worker can have no rows: then ``runner.batch`` is None.
"""

from __future__ import annotations

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.callbacks.old_hooks import OldHooks

__all__ = ["Callback", "as_callbacks"]


class Callback(OldHooks):
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

    def before_pred_epoch(self, runner):
        """Not called, since prediction is lazy."""

    after_pred_epoch = before_pred_iter = after_pred_iter = before_pred_epoch

    def before_train_iter(self, runner):
        self.before_iter(runner)

    def after_train_iter(self, runner):
        self.after_iter(runner)

    def before_val_iter(self, runner):
        self.before_iter(runner)

    def after_val_iter(self, runner):
        self.after_iter(runner)

    def every_n_epoch(self, runner, n):
        """In ``after_*_epoch``: whether the epoch that just ended is a multiple of `n`."""
        return n > 0 and (runner.epochs + 1) % n == 0

    def every_n_iter(self, runner, n):
        """In ``after_train_iter``: whether the step that just ended is a multiple of `n`."""
        return n > 0 and runner.global_step % n == 0


def as_callbacks(callbacks) -> list[Callback]:
    """A list of its own from what ``callbacks=`` accepts."""
    if callbacks is None:
        return []
    found = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    for callback in found:
        if not isinstance(callback, Callback):
            what = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            raise UsageError(
                "callbacks must be instances of bigdl.orca.learn.pytorch.callbacks.Callback, got "
                f"{'the class ' if isinstance(callback, type) else ''}{what}"
            )
    mains = [type(c).__name__ for c in found if hasattr(c, "on_iter_forward")]
    if len(mains) > 1:
        raise UsageError(
            f"callbacks can hold one MainCallback at most, got {len(mains)}: {', '.join(mains)}"
        )
    return found
