"""Images with their channels last in memory, which oneDNN's convolutions want."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

__all__ = [
    "LayoutGuard",
    "batch_channels_last",
    "gains_from_channels_last",
    "to_channels_last",
    "to_contiguous",
]


def gains_from_channels_last(module: nn.Module) -> bool:
    """Whether there are convolutions over images, and none that the layout does not exist for."""
    parts = list(module.modules())
    return any(isinstance(part, nn.Conv2d) for part in parts) and not any(
        isinstance(part, (nn.Conv3d, nn.ConvTranspose3d)) for part in parts
    )


def to_channels_last(module: nn.Module) -> None:
    """Give the 4-D weights of a module this layout, in place."""
    module.to(memory_format=torch.channels_last)


def to_contiguous(value: Any) -> Any:
    """A module's weights, in place, or the tensors of a nested value in the usual layout."""
    if isinstance(value, nn.Module):
        return value.to(memory_format=torch.contiguous_format)
    return tree_map_only(torch.Tensor, _contiguous, value)


def batch_channels_last(batch: Any) -> Any:
    """A nested value with its 4-D tensors in this layout."""
    return tree_map_only(torch.Tensor, _last, batch)


class LayoutGuard:
    """What the first step changes in a module, to be able to make it again.

    ``view`` needs a stride that a tensor with its channels last may not have, so a program that
    flattens activations by it fails in its first step. It is then rewound: statistics of
    normalization and the state of random numbers are put back.

    Parameters
    ----------
    module : Module
    """

    def __init__(self, module: nn.Module):
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self._random = torch.get_rng_state()

    @staticmethod
    def caused(error: RuntimeError) -> bool:
        """Whether an error is of the layout."""
        text = str(error)
        return "view size is not compatible" in text or "channels_last" in text

    def rewind(self) -> None:
        """Undo what the step that failed has done."""
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        torch.set_rng_state(self._random)


def _last(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 4 or tensor.layout != torch.strided:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous() if tensor.layout == torch.strided else tensor
