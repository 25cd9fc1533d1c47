"""Modules of PyTorch with loss and optimizer, of which something is searched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.nano.automl.hpo.auto import AutoObject
from bigdl.nano.automl.hpo.lazy import Choice, Lazy, Naming, holds_spaces, take

__all__ = ["lazily_compiled", "refuse_lazy"]


def lazily_compiled(
    model: Any, loss: Any, optimizer: Any, scheduler: Any, metrics: Any
) -> AutoObject:
    """What ``Trainer.compile`` returns where something is lazy.

    Raises
    ------
    UsageError
        If an optimizer or scheduler is bound to a model that is not made yet.
    """
    for name, part in (("optimizer", optimizer), ("scheduler", scheduler)):
        if part is not None and not isinstance(part, Lazy) and not callable(part):
            raise UsageError(
                f"The model is made anew in each trial, so its {name} must be, too: give a "
                "bigdl.nano.automl.hpo.space.AutoObject, such as "
                "AutoObject(torch.optim.Adam, lr=0.01), not a " + type(part).__name__
            )
    return AutoObject(
        _compiled,
        model=model,
        loss=loss,
        optimizer=_Unbound(optimizer) if isinstance(optimizer, AutoObject) else optimizer,
        scheduler=_Unbound(scheduler) if isinstance(scheduler, AutoObject) else scheduler,
        metrics=metrics,
        is_made=isinstance(model, Lazy),
    )


def refuse_lazy(args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Refuse to train what has to be chosen first.

    Raises
    ------
    UsageError
    """
    if holds_spaces(list(args)) or holds_spaces(dict(kwargs)):
        raise UsageError(
            "The model, or the data, has search spaces; call search first, and fit what it returns"
        )


class _Unbound(Lazy):
    """A lazy object that takes its first argument after it was chosen."""

    def __init__(self, inner: AutoObject):
        self._inner = inner

    def visit(self, naming: Naming, name: str) -> None:
        self._inner.visit(naming, name)

    def take(self, choice: Choice) -> Callable[[Any], Any]:
        args, kwargs = take(list(self._inner.args), choice), take(self._inner.kwargs, choice)
        return lambda first: self._inner.target(first, *args, **kwargs)


def _compiled(
    model: Any, loss: Any, optimizer: Any, scheduler: Any, metrics: Any, is_made: bool
) -> Any:
    from bigdl.nano.pytorch.trainer import Trainer

    if not is_made:
        model = copy.deepcopy(model)
    if optimizer is not None:
        optimizer = optimizer(model.parameters())
    if scheduler is not None:
        scheduler = scheduler(optimizer)
    return Trainer.compile(model, loss, optimizer, scheduler, copy.deepcopy(metrics))
