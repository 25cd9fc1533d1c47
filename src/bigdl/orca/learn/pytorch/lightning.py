"""LightningModules without Lightning: their steps, optimizer and scheduler.

Lightning is never imported here: a module is known by the name of its base class, and what it
calls on a Trainer (``self.log``) is answered by the worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.batch_columns import BatchColumns

__all__ = ["LightningStep", "configured", "is_lightning"]

_PACKAGES = ("pytorch_lightning", "lightning", "lightning_fabric")


def is_lightning(model) -> bool:
    """Whether a model is a LightningModule."""
    return _base(model) is not None


def _base(model):
    return next(
        (
            c
            for c in type(model).__mro__
            if c.__name__ == "LightningModule" and c.__module__.split(".")[0] in _PACKAGES
        ),
        None,
    )


class LightningStep:
    """``training_step`` and ``validation_step`` of a LightningModule.

    They get the batch as a tuple: the feature columns, then the target; a dict as it is.
    """

    criterion = None
    sums = False  # training_step returns the mean over its batch, as Lightning expects

    def __init__(self, model, columns: BatchColumns | None = None):
        if not getattr(model, "automatic_optimization", True):
            raise UsageError(
                "A LightningModule with automatic_optimization=False is not supported; return the "
                "loss from training_step"
            )
        self.model = model
        self.columns = columns or BatchColumns()
        self._values: dict[str, float] = {}
        model.log = self._log
        model.log_dict = self._log_dict

    def forward(self, batch, index: int):
        """Output (None), target and loss of a training batch."""
        found = self.model.training_step(_as_given(batch), index)
        loss = found.get("loss") if isinstance(found, dict) else found
        if loss is None:
            raise UsageError(
                "training_step returned no loss; return a tensor or a dict with the key 'loss'"
            )
        self._values.clear()  # only what validation logs is reported
        return None, self._target(batch), loss

    def evaluate(self, batch, index: int, *, need_output: bool):
        """Output (only if needed), target and loss (None without ``validation_step``)."""
        loss = None
        if self._has("validation_step"):
            found = self.model.validation_step(_as_given(batch), index)
            loss = found.get("loss") if isinstance(found, dict) else found
        if not (need_output and self._has("forward")):
            return None, self._target(batch), loss
        inputs, named, target = self.columns.split(batch)
        return self.model(*inputs, **named), target, loss

    def weights(self, batch):
        """None: every row counts once."""
        return None

    def _target(self, batch):
        """The target, which only the module knows in a dict without ``label_cols``."""
        if isinstance(batch, Mapping) and not self.columns.labels:
            return None
        return self.columns.split(batch)[-1]

    def denominator(self, output, target, rows: int) -> float:
        return rows

    def logged(self) -> dict[str, float]:
        """What the module logged since the last call."""
        values, self._values = self._values, {}
        return values

    def _has(self, name) -> bool:
        return getattr(type(self.model), name) is not getattr(_base(self.model), name, None)

    def _log(self, name, value, *_, **__):
        with contextlib.suppress(TypeError, ValueError):  # e.g. a metric object: not one number
            self._values[name] = float(value)

    def _log_dict(self, dictionary, *_, **__):
        for name, value in dictionary.items():
            self._log(name, value)


def _as_given(batch):
    return batch if isinstance(batch, Mapping) else tuple(batch)


def configured(module):
    """What ``configure_optimizers`` of a LightningModule returned, in any of its forms.

    Returns
    -------
    optimizer : torch.optim.Optimizer
    scheduler : object or None
    monitor : str or None
        Name of the figure that the scheduler looks at.
    frequency : int
        The scheduler is stepped every so many epochs or steps.
    interval : str
        ``"epoch"`` or ``"step"``.
    """
    found = module.configure_optimizers()
    schedulers: list = []
    if isinstance(found, dict):
        schedulers = [found["lr_scheduler"]] if found.get("lr_scheduler") is not None else []
        if schedulers and not isinstance(schedulers[0], dict) and found.get("monitor"):
            schedulers = [{"scheduler": schedulers[0], "monitor": found["monitor"]}]
        found = found.get("optimizer")
    elif isinstance(found, list | tuple) and len(found) == 2 and isinstance(found[0], list | tuple):
        found, schedulers = found
        schedulers = list(schedulers) if isinstance(schedulers, list | tuple) else [schedulers]
    if isinstance(found, list | tuple):
        if len(found) == 1 and isinstance(found[0], dict):
            return configured(_Returning(found[0]))
        if len(found) != 1:
            raise UsageError("A LightningModule with several optimizers is not supported")
        found = found[0]
    if len(schedulers) > 1:
        raise UsageError("A LightningModule with several schedulers is not supported")
    if found is None:
        raise UsageError("configure_optimizers of the LightningModule returned no optimizer")
    if not schedulers:
        return found, None, None, 1, "epoch"
    given = schedulers[0] if isinstance(schedulers[0], dict) else {"scheduler": schedulers[0]}
    interval = given.get("interval", "epoch")
    if interval not in ("epoch", "step"):
        raise UsageError(
            "A scheduler of a LightningModule must have the interval 'epoch' or 'step', got "
            f"{interval!r}"
        )
    monitor, frequency = given.get("monitor"), int(given.get("frequency", 1))
    return found, given["scheduler"], monitor, frequency, interval


class _Returning:
    """Stands in for a module whose ``configure_optimizers`` is known already."""

    def __init__(self, found):
        self._found = found

    def configure_optimizers(self):
        return self._found
