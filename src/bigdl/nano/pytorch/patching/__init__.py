"""Run a program as it is, on Nano and without a GPU.

:func:`patch_torch` puts Nano's Trainer, transforms and data sets in the places of Lightning's and
torchvision's; :func:`patch_cuda` lets code that asks for CUDA run on the CPU. Both change modules
of other packages in this process until they are undone, and processes of a training do the same.
"""

from bigdl.nano.pytorch.patching.cuda import get_cuda_status, patch_cuda, unpatch_cuda
from bigdl.nano.pytorch.patching.dtype import patch_dtype, unpatch_dtype
from bigdl.nano.pytorch.patching.encryption import patch_encryption, unpatch_encryption
from bigdl.nano.pytorch.patching.names import patch_torch, unpatch_torch

__all__ = [
    "get_cuda_status",
    "patch_cuda",
    "patch_dtype",
    "patch_encryption",
    "patch_torch",
    "unpatch_cuda",
    "unpatch_dtype",
    "unpatch_encryption",
    "unpatch_torch",
]
