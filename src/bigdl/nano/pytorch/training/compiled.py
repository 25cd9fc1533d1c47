"""Layers that TorchInductor compiles for the time of a fit."""

from __future__ import annotations

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
            part.forward = torch.compile(part.forward)

    def remove(self) -> None:
        """Let the modules run as written."""
        for part, before in zip(self._parts, self._before, strict=True):
            del part.forward
            if before is not None:
                part.forward = before

    def __getstate__(self) -> dict[str, Any]:
        return {"_parts": [], "_before": []}  # a copy of the module is not compiled
