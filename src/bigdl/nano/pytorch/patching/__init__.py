"""Run a program as it is, on Nano and without a GPU.

:func:`patch_torch` puts Nano's Trainer, transforms and data sets in the places of Lightning's and
torchvision's; :func:`patch_cuda` lets code that asks for CUDA run on the CPU; :func:`patch_dtype`
puts one floating-point type in the place of another; :func:`patch_encryption` gives ``torch.save``
and ``torch.load`` a key. They change other packages in this process until they are undone. The
processes of a Trainer, a TorchNano or a ``@nano`` are patched as the process is that starts them,
before they import anything of the program's; their default type is the same, too.
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
