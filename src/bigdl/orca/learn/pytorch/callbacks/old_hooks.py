"""The hooks of callbacks written for BigDL 2.0."""

from __future__ import annotations

__all__ = ["OldHooks", "call_old_hooks", "has_old_hooks"]


class OldHooks:
    """What a callback of BigDL 2.0 overrides; `epoch` counts the epochs that are finished."""

    def on_batch_begin(self, batch):
        """Before a training batch."""

    def on_batch_end(self, batch):
        """After a training batch."""

    def on_epoch_begin(self, epoch):
        """Before an epoch of training."""

    def on_epoch_end(self, epoch):
        """After an epoch of training."""

    def on_train_begin(self):
        """Before the first epoch of a fit."""

    def on_train_end(self):
        """After the last epoch of a fit."""

    def set_model(self, model):
        self.model = model

    def set_param(self, param):
        self.params = param

    def set_trainer(self, trainer):
        self.trainer = trainer


_HOOKS = [name for name in vars(OldHooks) if name.startswith("on_")]


def has_old_hooks(callback) -> bool:
    """Whether a callback overrides one of them."""
    return any(
        getattr(type(callback), name, None) is not getattr(OldHooks, name) for name in _HOOKS
    )


def call_old_hooks(callback, hook: str, runner) -> None:
    """What belongs to a hook of today."""
    if hook == "before_run":
        callback.set_trainer(runner)
        callback.set_model(runner.model)
        callback.set_param(runner.config)
        callback.on_train_begin()
    elif hook == "after_run":
        callback.on_train_end()
    elif hook == "before_train_epoch":
        callback.on_epoch_begin(runner.epochs)
    elif hook == "after_train_epoch":
        callback.on_epoch_end(runner.epochs + 1)
    elif hook == "before_train_iter":
        callback.on_batch_begin(runner.batch)
    elif hook == "after_train_iter":
        callback.on_batch_end(runner.batch)
