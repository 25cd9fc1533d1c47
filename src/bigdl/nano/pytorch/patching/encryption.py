"""Keys for ``torch.save`` and ``torch.load`` themselves."""

from __future__ import annotations

import torch

from bigdl.nano.pytorch.encryption.files import load, save
from bigdl.nano.pytorch.patching.replaced import Replaced

__all__ = ["get_encryption_status", "patch_encryption", "unpatch_encryption"]

_replaced = Replaced()


def get_encryption_status() -> bool:
    """Whether :func:`patch_encryption` is in force."""
    return _replaced.active


def patch_encryption() -> None:
    """Let ``torch.save`` take ``encryption_key`` and ``torch.load`` ``decryption_key``.

    The originals are ``torch.old_save`` and ``torch.old_load`` meanwhile.
    """
    if _replaced.active:
        return
    for name, ours in (("save", save), ("load", load)):
        _replaced.set(torch, f"old_{name}", getattr(torch, name))
        _replaced.set(torch, name, ours)


def unpatch_encryption() -> None:
    """Put everything back; again does nothing."""
    _replaced.undo()
