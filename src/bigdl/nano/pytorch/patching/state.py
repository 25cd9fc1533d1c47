"""What is patched in this process, and how it comes to be so in another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bigdl.nano.pytorch.patching.cuda import get_cuda_status, patch_cuda
from bigdl.nano.pytorch.patching.dtype import get_dtype_status, patch_dtype
from bigdl.nano.pytorch.patching.encryption import get_encryption_status, patch_encryption
from bigdl.nano.pytorch.patching.names import get_torch_status, patch_torch

__all__ = ["Patches"]


@dataclass(frozen=True)
class Patches:
    """The patches of a process.

    Where an object of this class is unpickled, they are in force from then on, so that what is
    unpickled after it finds them: modules of the user's are imported for that, too. What is in
    force there already stays.

    Attributes
    ----------
    encryption, cuda, names : bool
        Whether :func:`patch_encryption`, :func:`patch_cuda` and :func:`patch_torch` are in force.
    types : dict
        Arguments of the :func:`patch_dtype` in force; empty if none is.
    default_dtype : torch.dtype
        Type of tensors of floating-point numbers that are made without one.
    """

    encryption: bool
    cuda: bool
    types: dict[str, torch.dtype]
    names: bool
    default_dtype: torch.dtype

    @classmethod
    def of_this_process(cls) -> Patches:
        """What is patched here."""
        return cls(
            get_encryption_status(),
            get_cuda_status(),
            get_dtype_status(),
            get_torch_status(),
            torch.get_default_dtype(),
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.encryption:
            patch_encryption()
        if self.cuda:
            patch_cuda()
        if self.types and not get_dtype_status():
            patch_dtype(**self.types)
        if self.names:
            patch_torch(cuda_to_cpu=False)
        torch.set_default_dtype(self.default_dtype)
