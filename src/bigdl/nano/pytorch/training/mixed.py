"""bfloat16 in training steps, without the program seeing any of it.

``torch.autocast`` around a whole step hands bfloat16 tensors to the user's own code, which NumPy
cannot read. Here it is entered by the calls of modules: in a training step the outermost call runs
in bfloat16, and what it returns is float32 again. Loss, metrics and logging stay as they were, and
so does all evaluation.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from bigdl.common.cpu import isa_flags

__all__ = ["Bf16Calls", "bf16_instructions", "computing_children", "gains_from_bf16"]

_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16")
_LARGE_PRODUCT = 1 << 18  # weights of one linear layer from which on casts cost less than they gain


def bf16_instructions() -> str | None:
    """The instruction set by which this processor multiplies bfloat16, if it has one."""
    flags = isa_flags()
    return next((name for name in _INSTRUCTIONS if name in flags), None)


def gains_from_bf16(module: nn.Module) -> bool:
    """Whether a module holds layers for which bfloat16 pays: convolutions or large products.

    The casts of small weights in each step cost more than their products gain.
    """
    if any(parameter.dtype != torch.float32 for parameter in module.parameters()):
        return False
    for part in module.modules():
        if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            return True
        weights = (weight for weight in part.parameters(recurse=False) if weight.dim() == 2)
        if not isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and any(
            weight.numel() >= _LARGE_PRODUCT for weight in weights
        ):
            return True
    return False


class Bf16Calls:
    """Hooks on a module and its direct children.

    Parameters
    ----------
    module : Module
        Its own call is one that counts, and so are its children's, which a training step may use
        directly. Losses and metrics do not count.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self._inside = threading.local()
        self._handles = []
        for part in (module, *computing_children(module)):
            self._handles += [
                part.register_forward_pre_hook(self._enter),
                part.register_forward_hook(self._leave, always_call=True),
            ]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the module, or a saved one, keeps hooks that work."""
        return {"_module": self._module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._module = state["_module"]
        self._inside = threading.local()
        self._handles = []

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        calls = self._calls()
        if not calls and self._counts(module):
            context = torch.autocast("cpu", torch.bfloat16)
            context.__enter__()
            calls.append((module, context))
        elif calls:
            calls.append((module, None))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        calls = self._calls()
        if not calls or calls[-1][0] is not module:
            return None
        _, context = calls.pop()
        if context is None:
            return None
        context.__exit__(None, None, None)
        return tree_map_only(torch.Tensor, _full, output)

    def _calls(self) -> list:
        """Calls that this thread is in; worker threads of data parallelism have their own."""
        if not hasattr(self._inside, "calls"):
            self._inside.calls = []
        return self._inside.calls

    def _counts(self, module: nn.Module) -> bool:
        return (
            self._module.training  # gradients or not: a frozen backbone has none
            and not torch.is_autocast_enabled("cpu")
            and not _is_redirected(module)
        )


def computing_children(module: nn.Module) -> list[nn.Module]:
    """The direct children of a module that are no losses or metrics."""
    return [child for child in module.children() if _computes(child)]


def _computes(module: nn.Module) -> bool:
    from torchmetrics import Metric, MetricCollection

    loss = type(module).__module__ == "torch.nn.modules.loss"
    return not loss and not isinstance(module, (Metric, MetricCollection))


def _is_redirected(module: nn.Module) -> bool:
    """Whether the call is a whole step, which Lightning sends through a wrapper's forward."""
    return "_ForwardRedirection" in getattr(module.forward, "__qualname__", "")


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
