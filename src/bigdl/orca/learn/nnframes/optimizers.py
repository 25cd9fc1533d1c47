"""The optimizer of a stage, from whatever ``setOptimMethod`` was given."""

from __future__ import annotations

from typing import Any

from bigdl.common.errors import UsageError

__all__ = ["IterationDecay", "OptimizerOf", "optimizer_of"]


class OptimizerOf:
    """A creator: an optimizer class of torch with a learning rate."""

    def __init__(self, cls, lr: float):
        self.cls, self.lr = cls, lr

    def __call__(self, model, config):
        return self.cls(model.parameters(), lr=self.lr)


class IterationDecay:
    """A scheduler's creator: after n steps the rate is ``lr / (1 + n * decay)``."""

    def __init__(self, decay: float):
        self.decay = decay

    def __call__(self, optimizer, config):
        from torch.optim.lr_scheduler import LambdaLR

        return LambdaLR(optimizer, self._factor)

    def _factor(self, step: int) -> float:
        return 1.0 / (1.0 + step * self.decay)


def optimizer_of(method: Any, lr: float) -> Any:
    """What ``Estimator.from_torch`` takes as ``optimizer=``.

    Parameters
    ----------
    method : None, str, type, torch.optim.Optimizer or callable
        None is SGD.  A class of torch, or its name, gets the learning rate `lr`; an optimizer
        instance (of a model instance), an optimizer of Orca and a creator ``f(model, config)``
        bring their own.
    lr : float
    """
    import torch

    if method is None:
        return OptimizerOf(torch.optim.SGD, lr)
    if isinstance(method, str):
        known = {
            name.lower(): cls
            for name, cls in vars(torch.optim).items()
            if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
        }
        known.pop("optimizer", None)
        if method.lower() not in known:
            raise UsageError(
                f"torch.optim has no optimizer {method!r}; it has "
                f"{', '.join(sorted(cls.__name__ for cls in known.values()))}"
            )
        method = known[method.lower()]
    if isinstance(method, type) and issubclass(method, torch.optim.Optimizer):
        return OptimizerOf(method, lr)
    if isinstance(method, torch.optim.Optimizer) or (
        callable(method) and not isinstance(method, type)
    ):
        return method
    raise UsageError(
        "setOptimMethod takes an optimizer of torch (a class, its name, or an instance made from "
        "the same model), one of bigdl.orca.learn.optimizers, or a function of (model, config), "
        f"got {method!r}"
    )
