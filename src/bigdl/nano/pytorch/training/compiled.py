"""Layers that TorchInductor compiles for the time of a fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bigdl.nano.pytorch.training.mixed import computing_children

__all__ = ["Compiled"]


class Compiled:
    """Compiles the forward passes of a module's direct children, or its own if it has none.

    Hooks stay outside of what is compiled, and so does the code of a training step.

    Parameters
    ----------
    module : Module
    """

    def __init__(self, module: nn.Module):
        self._parts = computing_children(module) or [module]
        self._before: list[Any] = []
        for part in self._parts:
            self._before.append(vars(part).get("forward"))
            part.forward = _CompiledForward(part.forward)

    def remove(self) -> None:
        """Let the modules run as written."""
        for part, before in zip(self._parts, self._before, strict=True):
            del part.forward
            if before is not None:
                part.forward = before


class _CompiledForward:
    """A forward pass; a copy of its module, or a saved one, has its own as written."""

    def __init__(self, forward: Callable[..., Any]):
        self._forward, self._compiled = forward, torch.compile(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self):
        return _as_written, (self._forward,)


def _as_written(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
