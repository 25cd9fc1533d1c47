"""Callbacks of a fit, and the MainCallback that makes its steps; with the hooks of BigDL 2.x."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    import torch

    from bigdl.orca.learn.pytorch.evaluation import TorchRunner


class LegacyHooks:
    """Hooks of callbacks of BigDL 2.0; `epoch` counts the epochs that are finished.

    `logs` are the figures of the epoch that ended last. They are given to a hook that takes them.
    """

    def on_batch_begin(self, batch: Any) -> None:
        """Before a training batch."""

    def on_batch_end(self, batch: Any) -> None:
        """After a training batch."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Before an epoch of training."""

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """After an epoch of training."""

    def on_train_begin(self) -> None:
        """Before the first epoch of a fit."""

    def on_train_end(self, logs: dict | None = None) -> None:
        """After the last epoch of a fit."""

    def set_model(self, model: torch.nn.Module) -> None:
        self.model = model

    def set_param(self, param: dict) -> None:
        self.params = param

    def set_trainer(self, trainer: TorchRunner) -> None:
        self.trainer = trainer


_HOOKS = [name for name in vars(LegacyHooks) if name.startswith("on_")]


def has_legacy_hooks(callback: Callback) -> bool:
    """Return True if a callback overrides one of them."""
    return any(
        getattr(type(callback), name, None) is not getattr(LegacyHooks, name) for name in _HOOKS
    )


def call_legacy_hooks(callback: Callback, hook: str, runner: TorchRunner) -> None:
    """Call the old hooks that belong to a hook of today."""
    if hook == "before_run":
        callback.set_trainer(runner)
        callback.set_model(runner.model)
        callback.set_param(runner.config)
    calls = {
        "before_run": lambda: callback.on_train_begin(),
        "after_run": lambda: _with_logs(callback.on_train_end, logs=runner.epoch_stats),
        "before_train_epoch": lambda: callback.on_epoch_begin(runner.epochs),
        "after_train_epoch": lambda: _with_logs(
            callback.on_epoch_end, runner.epochs + 1, logs=runner.epoch_stats
        ),
        "before_train_iter": lambda: callback.on_batch_begin(runner.batch),
        "after_train_iter": lambda: callback.on_batch_end(runner.batch),
    }
    if hook in calls:
        calls[hook]()


def _with_logs(hook: Callable, *args: Any, logs: dict) -> None:
    """Call a hook, with the figures if it takes one argument more."""
    try:
        inspect.signature(hook).bind(*args, logs)
    except TypeError:
        hook(*args)
    else:
        hook(*args, logs)


class Callback(LegacyHooks):
    """Base class: every hook does nothing or what its more general hook does.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.orca.learn.optimizers import SGD
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> from bigdl.orca.learn.pytorch.callbacks import Callback
    >>> class StopAtLoss(Callback):
    ...     def after_train_epoch(self, runner):
    ...         runner.stop = runner.epoch_stats["train_loss"] < 0.5
    >>> estimator = Estimator.from_torch(
    ...     model=torch.nn.Linear(1, 1), optimizer=SGD(0.1), loss=torch.nn.MSELoss(),
    ...     backend="local",
    ... )
    >>> x = np.linspace(0, 1, 64, dtype="float32")[:, None]
    >>> figures = estimator.fit((x, x), epochs=100, callbacks=[StopAtLoss()], seed=1)
    >>> len(figures) < 100, figures[-1]["train_loss"] < 0.5
    (True, True)
    """

    def before_run(self, runner: TorchRunner) -> None:
        """Before the first epoch of a fit."""

    def after_run(self, runner: TorchRunner) -> None:
        """After the last epoch of a fit."""

    def before_epoch(self, runner: TorchRunner) -> None:
        """Before an epoch of any kind, unless the specific hook is overridden."""

    def after_epoch(self, runner: TorchRunner) -> None:
        """After an epoch of any kind, unless the specific hook is overridden."""

    def before_iter(self, runner: TorchRunner) -> None:
        """Before a batch of any kind, unless the specific hook is overridden."""

    def after_iter(self, runner: TorchRunner) -> None:
        """After a batch of any kind, unless the specific hook is overridden."""

    def before_train_epoch(self, runner: TorchRunner) -> None:
        self.before_epoch(runner)

    def after_train_epoch(self, runner: TorchRunner) -> None:
        self.after_epoch(runner)

    def before_val_epoch(self, runner: TorchRunner) -> None:
        self.before_epoch(runner)

    def after_val_epoch(self, runner: TorchRunner) -> None:
        self.after_epoch(runner)

    def before_pred_epoch(self, runner: TorchRunner) -> None:
        """Not called, since prediction is lazy."""

    after_pred_epoch = before_pred_iter = after_pred_iter = before_pred_epoch

    def before_train_iter(self, runner: TorchRunner) -> None:
        self.before_iter(runner)

    def after_train_iter(self, runner: TorchRunner) -> None:
        self.after_iter(runner)

    def before_val_iter(self, runner: TorchRunner) -> None:
        self.before_iter(runner)

    def after_val_iter(self, runner: TorchRunner) -> None:
        self.after_iter(runner)

    def every_n_epoch(self, runner: TorchRunner, n: int) -> bool:
        """In ``after_*_epoch``: whether the epoch that just ended is a multiple of `n`."""
        return n > 0 and (runner.epochs + 1) % n == 0

    def every_n_iter(self, runner: TorchRunner, n: int) -> bool:
        """In ``after_train_iter``: whether the step that just ended is a multiple of `n`."""
        return n > 0 and runner.global_step % n == 0


def as_callbacks(callbacks: Callback | Sequence[Callback] | None) -> list[Callback]:
    """A list of its own from what ``callbacks=`` accepts."""
    if callbacks is None:
        return []
    everyone: list[Any] = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    for callback in everyone:
        if not isinstance(callback, Callback):
            what = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            raise UsageError(
                "callbacks must be instances of bigdl.orca.learn.pytorch.callbacks.Callback, got "
                f"{'the class ' if isinstance(callback, type) else ''}{what}",
                code="argument-type",
                argument="callbacks",
            )
    mains = [type(c).__name__ for c in everyone if hasattr(c, "on_iter_forward")]
    if len(mains) > 1:
        raise UsageError(
            f"callbacks can hold one MainCallback at most, got {len(mains)}: {', '.join(mains)}",
            code="argument-conflict",
            argument="callbacks",
        )
    return everyone


class MainCallback(Callback):
    """Forward pass, backward pass and learning rate; override what should happen otherwise.

    A fit, an evaluation or a prediction takes at most one.  N workers still make the update of one
    process: what ``loss.backward()`` leaves in the gradients is that of the whole batch.  The loss
    must be a mean over the rows (with the criterion of the Estimator: whatever that is), and
    :meth:`on_iter_backward` must call ``backward`` equally often on every worker.
    The forward methods are not called on a worker that has no rows in a step.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.orca.learn.optimizers import SGD
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> from bigdl.orca.learn.pytorch.callbacks import MainCallback
    >>> class Mixed(MainCallback):
    ...     def on_iter_forward(self, runner):
    ...         x, y = runner.batch
    ...         runner.output, runner.target = runner.model(x), y
    ...         error = runner.output - y
    ...         runner.loss = (error**2).mean() + error.abs().mean()
    >>> estimator = Estimator.from_torch(
    ...     model=torch.nn.Linear(1, 1), optimizer=SGD(0.1), loss=torch.nn.MSELoss(),
    ...     backend="local",
    ... )
    >>> x = np.linspace(0, 1, 64, dtype="float32")[:, None]
    >>> figures = estimator.fit((x, x), epochs=3, callbacks=[Mixed()], seed=1)
    >>> figures[0]["train_loss"] > figures[-1]["train_loss"]
    True
    """

    def on_iter_forward(self, runner: TorchRunner) -> None:
        """From ``runner.batch`` to ``runner.output``, ``runner.target`` and ``runner.loss``."""
        runner.forward()

    def on_train_forward(self, runner: TorchRunner) -> None:
        """The forward pass of training."""
        self.on_iter_forward(runner)

    def on_val_forward(self, runner: TorchRunner) -> None:
        """The forward pass of validation, without gradients."""
        self.on_iter_forward(runner)

    def on_pred_forward(self, runner: TorchRunner) -> Any:
        """From ``runner.batch`` (the features) to ``runner.output``, or to what it returns.

        The output is a tensor or ndarray of as many rows, or a list, tuple or dict of them.
        """
        runner.output = runner.model(*runner.batch)

    def on_iter_backward(self, runner: TorchRunner) -> None:
        """From ``runner.loss`` to new weights."""
        runner.optimizer.zero_grad()
        runner.loss.backward()
        runner.optimizer.step()

    def on_lr_adjust(self, runner: TorchRunner) -> None:
        """At the end of an epoch, or after every update with ``scheduler_step_freq="batch"``."""
        if runner.scheduler is not None:
            runner.scheduler.step()

    @property
    def owns_backward(self) -> bool:
        """True if :meth:`on_iter_backward` is the user's."""
        return type(self).on_iter_backward is not MainCallback.on_iter_backward

    @property
    def owns_lr(self) -> bool:
        """True if :meth:`on_lr_adjust` is the user's."""
        return type(self).on_lr_adjust is not MainCallback.on_lr_adjust


class MaxstepsCallback(Callback):
    """End the training when ``runner.global_step`` is `max_step`.

    ``fit(max_steps=)`` does the same for one fit and lets a run be resumed to another end.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.orca.learn.optimizers import SGD
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> from bigdl.orca.learn.pytorch.callbacks import MaxstepsCallback
    >>> estimator = Estimator.from_torch(
    ...     model=torch.nn.Linear(1, 1), optimizer=SGD(0.1), loss=torch.nn.MSELoss(),
    ...     backend="local",
    ... )
    >>> x = np.linspace(0, 1, 64, dtype="float32")[:, None]
    >>> figures = estimator.fit((x, x), epochs=10, batch_size=16, callbacks=[MaxstepsCallback(6)])
    >>> [epoch["batch_count"] for epoch in figures]  # four steps of the first epoch, two more
    [4.0, 2.0]
    """

    def __init__(self, max_step: int):
        self.max_step = check_positive("max_step", max_step)

    def after_train_iter(self, runner: TorchRunner) -> None:
        if runner.global_step >= self.max_step:
            runner.stop = True


class TqdmCallback(Callback):
    """Show a progress bar on the driver, also where nobody seems to watch; as ``use_tqdm=True``.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.orca.learn.optimizers import SGD
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> from bigdl.orca.learn.pytorch.callbacks import TqdmCallback
    >>> estimator = Estimator.from_torch(
    ...     model=torch.nn.Linear(1, 1), optimizer=SGD(0.1), loss=torch.nn.MSELoss(),
    ...     backend="local",
    ... )
    >>> x = np.linspace(0, 1, 64, dtype="float32")[:, None]
    >>> figures = estimator.fit((x, x), callbacks=[TqdmCallback()])  # the bar is in sys.stderr
    """
