"""Nano's classes under the names of Lightning and torchvision."""

from __future__ import annotations

import importlib
from typing import Any

from bigdl.nano.pytorch.patching.cuda import get_cuda_status, patch_cuda, unpatch_cuda
from bigdl.nano.pytorch.patching.replaced import Replaced

__all__ = ["get_torch_status", "patch_torch", "unpatch_torch"]

_replaced = Replaced()


def get_torch_status() -> bool:
    """Whether :func:`patch_torch` is in force."""
    return _replaced.active


def patch_torch(cuda_to_cpu: bool = True) -> None:
    """Let ``from pytorch_lightning import Trainer`` give Nano's, and likewise for torchvision.

    Call it before the program's own imports; names that were imported before stay as they are.
    ``torchvision.transforms`` and ``torchvision.datasets`` are replaced if torchvision works.

    Parameters
    ----------
    cuda_to_cpu : bool
        Also call :func:`patch_cuda`.
    """
    if not _replaced.active:
        import pytorch_lightning as pl
        import pytorch_lightning.trainer

        from bigdl.nano.pytorch.trainer import Trainer

        for owner in (pl, pytorch_lightning.trainer):
            _replaced.set(owner, "Trainer", Trainer)
        for name in ("transforms", "datasets"):
            torchvision, ours = _vision(name)
            if torchvision is not None:
                _replaced.set(torchvision, name, ours)
    if cuda_to_cpu and not get_cuda_status():
        patch_cuda()


def unpatch_torch() -> None:
    """Put everything back that :func:`patch_torch` has replaced; again does nothing."""
    _replaced.undo()
    unpatch_cuda()


def _vision(name: str) -> tuple[Any, Any]:
    try:
        importlib.import_module(f"torchvision.{name}")
        torchvision = importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError):  # there is none, or one for another torch
        return None, None
    return torchvision, importlib.import_module(f"bigdl.nano.pytorch.vision.{name}")
