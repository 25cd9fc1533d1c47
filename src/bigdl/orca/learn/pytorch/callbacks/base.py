"""Callback base class, MainCallback, and the legacy hooks of BigDL 2.x."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    import torch

    from bigdl.common.types import Tensors
    from bigdl.orca.learn.pytorch.evaluation import TorchRunner


class LegacyHooks:
    """Callback hooks of BigDL 2.0.

    `epoch` is the number of finished epochs. `logs` holds the metrics of the last epoch; it is
    passed to hooks whose signature accepts it.
    """

    def on_batch_begin(self, batch: Tensors) -> None:
        """Run before a training batch."""

    def on_batch_end(self, batch: Tensors) -> None:
        """Run after a training batch."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Run before a training epoch."""

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Run after a training epoch."""

    def on_train_begin(self) -> None:
        """Run before the first epoch of a fit."""

    def on_train_end(self, logs: dict | None = None) -> None:
        """Run after the last epoch of a fit."""

    def set_model(self, model: torch.nn.Module) -> None:
        self.model = model

    def set_param(self, param: dict) -> None:
        self.params = param

    def set_trainer(self, trainer: TorchRunner) -> None:
        self.trainer = trainer


_HOOKS = [name for name in vars(LegacyHooks) if name.startswith("on_")]


def has_legacy_hooks(callback: Callback) -> bool:
    """Return True if a callback overrides a legacy hook."""
    return any(
        getattr(type(callback), name, None) is not getattr(LegacyHooks, name) for name in _HOOKS
    )


def call_legacy_hooks(callback: Callback, hook: str, runner: TorchRunner) -> None:
    """Call the legacy hooks that correspond to a current hook."""
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


def _with_logs(hook: Callable, *args: object, logs: dict) -> None:
    """Call a hook, and pass `logs` if its signature accepts them."""
    try:
        inspect.signature(hook).bind(*args, logs)
    except TypeError:
        hook(*args)
    else:
        hook(*args, logs)


class Callback(LegacyHooks):
    """Base class of callbacks, whose hooks do nothing or call a more general hook.

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
    >>> history = estimator.fit((x, x), epochs=100, callbacks=[StopAtLoss()], seed=1)
    >>> len(history) < 100, history[-1]["train_loss"] < 0.5
    (True, True)
    """

    def before_run(self, runner: TorchRunner) -> None:
        """Run before the first epoch of a fit."""

    def after_run(self, runner: TorchRunner) -> None:
        """Run after the last epoch of a fit."""

    def before_epoch(self, runner: TorchRunner) -> None:
        """Run before a training or validation epoch, unless the train or val hook is overridden."""

    def after_epoch(self, runner: TorchRunner) -> None:
        """Run after a training or validation epoch, unless the train or val hook is overridden."""

    def before_iter(self, runner: TorchRunner) -> None:
        """Run before a training or validation batch, unless the train or val hook is overridden."""

    def after_iter(self, runner: TorchRunner) -> None:
        """Run after a training or validation batch, unless the train or val hook is overridden."""

    def before_train_epoch(self, runner: TorchRunner) -> None:
        self.before_epoch(runner)

    def after_train_epoch(self, runner: TorchRunner) -> None:
        self.after_epoch(runner)

    def before_val_epoch(self, runner: TorchRunner) -> None:
        self.before_epoch(runner)

    def after_val_epoch(self, runner: TorchRunner) -> None:
        self.after_epoch(runner)

    def before_pred_epoch(self, runner: TorchRunner) -> None:
        """Do nothing; never called, since prediction is lazy."""

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
        """Return True in ``after_*_epoch`` hooks of every n-th epoch."""
        return n > 0 and (runner.epochs + 1) % n == 0

    def every_n_iter(self, runner: TorchRunner, n: int) -> bool:
        """Return True in ``after_train_iter`` of every n-th step."""
        return n > 0 and runner.global_step % n == 0


def as_callbacks(callbacks: Callback | Sequence[Callback] | None) -> list[Callback]:
    """Return the ``callbacks=`` argument as a new list of checked callbacks."""
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
            f"callbacks can contain at most one MainCallback, got {len(mains)}: {', '.join(mains)}",
            code="argument-conflict",
            argument="callbacks",
        )
    return everyone


class MainCallback(Callback):
    """Base class of a callback that replaces the forward pass, backward pass or scheduler step.

    A fit, an evaluation or a prediction takes at most one. N workers still compute the update of a
    single process: after ``loss.backward()`` the gradients are those of the whole batch. The loss
    must be a mean over the rows, unless it is computed with the Estimator's criterion, and
    :meth:`on_iter_backward` must call ``backward`` equally often on every worker. The forward
    methods are not called on a worker without rows in the step.

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
    >>> history = estimator.fit((x, x), epochs=3, callbacks=[Mixed()], seed=1)
    >>> history[0]["train_loss"] > history[-1]["train_loss"]
    True
    """

    def on_iter_forward(self, runner: TorchRunner) -> None:
        """Set ``runner.output``, ``runner.target`` and ``runner.loss`` from ``runner.batch``."""
        runner.forward()

    def on_train_forward(self, runner: TorchRunner) -> None:
        """Run the forward pass of training."""
        self.on_iter_forward(runner)

    def on_val_forward(self, runner: TorchRunner) -> None:
        """Run the forward pass of validation, without gradients."""
        self.on_iter_forward(runner)

    def on_pred_forward(self, runner: TorchRunner) -> Tensors | None:
        """Set ``runner.output`` from ``runner.batch`` (the features), or return the output.

        The output is a tensor or ndarray with one row per input row, or a list, tuple or dict of
        these.
        """
        runner.output = runner.model(*runner.batch)
        return None

    def on_iter_backward(self, runner: TorchRunner) -> None:
        """Compute gradients of ``runner.loss`` and update the weights."""
        runner.optimizer.zero_grad()
        runner.loss.backward()
        runner.optimizer.step()

    def on_lr_adjust(self, runner: TorchRunner) -> None:
        """Step the scheduler, per epoch or, with ``scheduler_step_freq="batch"``, per update."""
        if runner.scheduler is not None:
            runner.scheduler.step()

    @property
    def owns_backward(self) -> bool:
        """True if a subclass overrides :meth:`on_iter_backward`."""
        return type(self).on_iter_backward is not MainCallback.on_iter_backward

    @property
    def owns_lr(self) -> bool:
        """True if a subclass overrides :meth:`on_lr_adjust`."""
        return type(self).on_lr_adjust is not MainCallback.on_lr_adjust


class MaxstepsCallback(Callback):
    """Callback that ends the fit when ``runner.global_step`` reaches `max_step`.

    ``fit(max_steps=)`` does the same for one fit, and a resumed run may change it.

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
    >>> history = estimator.fit((x, x), epochs=10, batch_size=16, callbacks=[MaxstepsCallback(6)])
    >>> [epoch["batch_count"] for epoch in history]  # 4 steps, then 2
    [4.0, 2.0]
    """

    def __init__(self, max_step: int):
        self.max_step = check_positive("max_step", max_step)

    def after_train_iter(self, runner: TorchRunner) -> None:
        if runner.global_step >= self.max_step:
            runner.stop = True


class TqdmCallback(Callback):
    """Callback that shows a progress bar on the driver, even without a terminal.

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
    >>> history = estimator.fit((x, x), callbacks=[TqdmCallback()])  # prints the bar to sys.stderr
    """
