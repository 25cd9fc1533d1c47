"""What one batch means: forward pass and loss, for a plain module and for a LightningModule.

The convention of a batch is that its last element is the target and everything before are the
model's inputs: ``*features, target = batch``.
"""

from __future__ import annotations

import contextlib

from bigdl.orca.learn.pytorch.parts import is_lightning

__all__ = ["LightningStep", "PlainStep", "step_for"]


def step_for(model, criterion):
    """The kind of step that belongs to a model."""
    if is_lightning(model) and criterion is None:
        return LightningStep(model)
    return PlainStep(model, criterion)


class PlainStep:
    """``criterion(model(*features), target)``."""

    def __init__(self, model, criterion):
        self.model = model
        self.criterion = criterion
        #: whether the loss adds up over samples instead of averaging
        self.sums = getattr(criterion, "reduction", "mean") == "sum"

    def forward(self, batch, index: int):
        """Output, target and loss of a training batch."""
        *features, target = batch
        output = self.model(*features)
        return output, target, self._loss(output, target)

    def evaluate(self, batch, index: int):
        """Output, target and loss (None without a criterion) of a validation batch."""
        *features, target = batch
        output = self.model(*features)
        loss = None if self.criterion is None else self._loss(output, target)
        return output, target, loss

    def logged(self) -> dict[str, float]:
        """What the module logged since the last call."""
        return {}

    def _loss(self, output, target):
        outputs = output if isinstance(output, list | tuple) else (output,)
        targets = target if isinstance(target, list | tuple) else (target,)
        if len(outputs) == len(targets) == 1:
            targets = (_same_shape(outputs[0], targets[0]),)
        return self.criterion(*outputs, *targets)


class LightningStep(PlainStep):
    """``training_step`` and ``validation_step`` of a LightningModule, without a Trainer."""

    def __init__(self, model):
        super().__init__(model, None)
        self._values: dict[str, float] = {}
        model.log = self._log
        model.log_dict = self._log_dict

    def forward(self, batch, index):
        found = self.model.training_step(tuple(batch), index)
        loss = found["loss"] if isinstance(found, dict) else found
        return None, batch[-1], loss

    def evaluate(self, batch, index):
        *features, target = batch
        loss = None
        if _overridden(self.model, "validation_step"):
            found = self.model.validation_step(tuple(batch), index)
            loss = found.get("loss") if isinstance(found, dict) else found
        with contextlib.suppress(NotImplementedError):
            return self.model(*features), target, loss
        return None, target, loss

    def logged(self):
        values, self._values = self._values, {}
        return values

    def _log(self, name, value, *_, **__):
        self._values[name] = float(value)

    def _log_dict(self, dictionary, *_, **__):
        for name, value in dictionary.items():
            self._log(name, value)


def _overridden(module, name) -> bool:
    base = next(c for c in type(module).__mro__ if c.__name__ == "LightningModule")
    return getattr(type(module), name) is not getattr(base, name, None)


def _same_shape(output, target):
    """Give a target of shape (n,) the shape of a one-column output (n, 1).

    A loss over elements would otherwise broadcast the two to (n, n) and be wrong without a word.
    """
    if (
        hasattr(output, "ndim")
        and hasattr(target, "ndim")
        and target.is_floating_point()
        and output.ndim == target.ndim + 1
        and output.shape[-1] == 1
    ):
        return target.unsqueeze(-1)
    return target
