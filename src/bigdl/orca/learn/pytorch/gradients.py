"""From the gradients of the workers to one step of the optimizer."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

__all__ = ["Clipping", "Update", "may_be_sparse"]


@dataclass(frozen=True)
class Clipping:
    """How gradients are limited: those of the whole batch, so that N workers equal one.

    Attributes
    ----------
    minimum, maximum : float or None
        Every element is brought into this range.
    norm : float or None
        All gradients together are scaled down to this L2 norm, after that.
    """

    minimum: float | None = None
    maximum: float | None = None
    norm: float | None = None

    def __call__(self, parameters) -> None:
        """Limit the gradients of `parameters` in place."""
        import torch

        if self.minimum is not None:
            with torch.no_grad():
                for parameter in parameters:
                    if parameter.grad is not None:
                        _values(parameter).clamp_(self.minimum, self.maximum)
        if self.norm is not None:
            found = [_values(p) for p in parameters if p.grad is not None]
            total = torch.nn.utils.get_total_norm(found)
            with torch.no_grad():
                scale = torch.clamp(self.norm / (total + 1e-6), max=1.0)
                for gradient in found:
                    gradient.mul_(scale)


def _values(parameter):
    """The elements of a gradient; of a sparse one those that it holds."""
    if not parameter.grad.is_sparse:
        return parameter.grad
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad._values()


class Update:
    """One step of the optimizer from one batch, or from several that add up.

    For each batch call :meth:`begin` and :meth:`add`, and :meth:`step` when the update is due.

    Parameters
    ----------
    sync : GradientSync
    optimizer : torch.optim.Optimizer
    sparse : sequence of torch.nn.Parameter
        Those that can have sparse gradients.
    sums : bool
        Whether the loss adds up over samples instead of averaging.
    clipping : Clipping
    accumulate : int
        Batches of an update; k batches of n rows make the update of one batch of k * n rows.
    """

    def __init__(self, sync, optimizer, sparse, *, sums, clipping=Clipping(), accumulate=1):
        self._sync, self._optimizer, self._sparse = sync, optimizer, sparse
        self._sums, self._clipping, self._accumulate = sums, clipping, accumulate
        self._reset()

    def _reset(self):
        self._batches, self._weight, self._total = 0, 0.0, 0.0

    def begin(self) -> None:
        """Before the forward pass of a batch."""
        if not self._batches:
            self._optimizer.zero_grad()

    def add(self, loss, counted: float, total: float) -> None:
        """Compute the gradients of a batch.

        Parameters
        ----------
        loss : tensor or None
            None on a rank without rows.
        counted, total : float
            What the loss was divided by here, and over all ranks.
        """
        self._batches += 1
        self._total += total
        if loss is None:
            return
        if self._sums:
            self._weight = 1.0
            loss.backward()
        elif self._accumulate == 1:
            self._weight = counted / total if total else 0.0
            loss.backward()
        elif counted:  # the loss of a batch of ignored labels is nan
            self._weight = 1.0
            (loss * counted).backward()

    @property
    def is_due(self) -> bool:
        """Whether the update has all its batches."""
        return self._batches >= self._accumulate

    def step(self) -> None:
        """Sum the gradients over the ranks, limit them and update the weights; a collective."""
        parameters = self.parameters
        self._sync.reduce(parameters, self._weight, self._sparse)
        if self._accumulate > 1 and not self._sums and self._total:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self._total)
        self._clipping(parameters)
        self._optimizer.step()
        self._reset()

    @property
    def parameters(self) -> list:
        """All parameters of the optimizer, which may be given more of them later."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @contextlib.contextmanager
    def by_hand(self, weight: float):
        """Within the block user code calls ``backward`` and the optimizer.

        At the end of every backward pass the gradients are those of the whole batch, and a step of
        the optimizer limits them first.

        Parameters
        ----------
        weight : float
            Of this rank's loss in that of the batch. Over the ranks they add up to 1, so gradients
            that an earlier pass has summed already stay what they are.
        """
        import torch

        parameters, queued = self.parameters, False

        def reduce():
            nonlocal queued
            queued = False
            self._sync.reduce(parameters, weight, self._sparse)

        def queue(_):
            nonlocal queued
            if not queued:
                queued = True
                torch.autograd.Variable._execution_engine.queue_callback(reduce)

        hooks = [p.register_post_accumulate_grad_hook(queue) for p in parameters if p.requires_grad]
        hooks.append(
            self._optimizer.register_step_pre_hook(lambda *_: self._clipping(self.parameters))
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._reset()


def may_be_sparse(model) -> list:
    """Parameters that get sparse gradients: a rank without rows cannot see it."""
    return [
        module.weight
        for module in model.modules()
        if getattr(module, "sparse", False) is True and hasattr(module, "weight")
    ]
