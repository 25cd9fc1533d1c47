"""Weights of modules in files: a state dict, read with ``weights_only=True``."""

from __future__ import annotations

from pathlib import Path

import torch

from bigdl.common.errors import UsageError

__all__ = ["load_weights", "save_weights"]


def save_weights(module: torch.nn.Module, path: Path, compression: str = "fp32") -> None:
    """Write a module's state dict; with ``compression="bf16"`` its fp32 tensors as bfloat16."""
    state = module.state_dict()
    if compression == "bf16":
        state = {key: _halved(value) for key, value in state.items()}
    torch.save(state, path)


def _halved(value):
    fp32 = torch.is_tensor(value) and value.dtype is torch.float32
    return value.bfloat16() if fp32 else value


def load_weights(module: torch.nn.Module, path: Path) -> torch.nn.Module:
    """Read a state dict into a module, in place; returns the module.

    Raises
    ------
    UsageError
        If the weights are not this module's.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        # A LightningModule that wraps a plain module holds the same weights one level deeper.
        inner = getattr(module, "model", None)
        if not isinstance(inner, torch.nn.Module):
            raise UsageError(
                f"The saved weights do not fit {type(module).__name__}: {error}"
            ) from None
        load_weights(inner, path)
    return module
