"""Where the channels of images lie in memory."""

from __future__ import annotations

import torch

from bigdl.nano.pytorch.inference.structure import flatten

__all__ = ["LAYOUTS", "apply_layouts", "layouts_of", "module_to_channels_last"]

LAYOUTS = {"channels_last": torch.channels_last, "channels_last_3d": torch.channels_last_3d}
_BY_RANK = {4: "channels_last", 5: "channels_last_3d"}


def layouts_of(tensors) -> list[str]:
    """For each input ``"channels_last"`` (4-D), ``"channels_last_3d"`` (5-D) or ``"original"``."""
    return [_BY_RANK.get(tensor.ndim, "original") for tensor in tensors]


def apply_layouts(value):
    """A nested value whose 4-D and 5-D tensors have their channels last."""
    if isinstance(value, torch.Tensor):
        return _to_layout(value)
    leaves, structure = flatten(value)
    return structure.rebuild([_to_layout(x) if torch.is_tensor(x) else x for x in leaves])


def module_to_channels_last(module: torch.nn.Module) -> torch.nn.Module:
    """Lay out a module's 4-D and 5-D weights with their channels last, in place."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.ndim in _BY_RANK:
            tensor.data = _to_layout(tensor.data)
    return module


def _to_layout(tensor: torch.Tensor) -> torch.Tensor:
    layout = LAYOUTS.get(_BY_RANK.get(tensor.ndim, ""))
    return tensor if layout is None else tensor.contiguous(memory_format=layout)
