"""Layers of BigDL 2.x by name: modules of PyTorch that take BigDL's arguments.

They are for programs that define a small model themselves.  Files that BigDL's JVM layers wrote
cannot be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bigdl.common.errors import UsageError, require

if TYPE_CHECKING:
    from torch import nn
else:
    nn = require("torch.nn", "orca")

__all__ = [
    "BatchNormalization",
    "Dropout",
    "Linear",
    "LogSoftMax",
    "Model",
    "ReLU",
    "Reshape",
    "Sequential",
    "Sigmoid",
    "SoftMax",
    "SpatialBatchNormalization",
    "SpatialConvolution",
    "SpatialMaxPooling",
    "Tanh",
    "View",
]


class Sequential(nn.Sequential):
    """``torch.nn.Sequential`` that is built by :meth:`add`."""

    def add(self, layer) -> Sequential:
        """Append a layer; returns the model."""
        self.append(layer)
        return self


class Model:
    """Models of BigDL's JVM layers, which cannot be read."""

    @staticmethod
    def load(path: str, *args, **kwargs):
        """Raises, and says what to do."""
        raise UsageError(
            f"{path!r} cannot be read: models of BigDL's JVM layers need BigDL 2.x; export it to "
            "ONNX there, or define the model in PyTorch"
        )

    loadModel = load_torch = load_keras = load_caffe = load_tensorflow = load


class Reshape(nn.Module):
    """Every row in another shape."""

    def __init__(self, size: Sequence[int], batch_mode: bool | None = None):
        super().__init__()
        self.size = tuple(size)

    def forward(self, rows):
        return rows.reshape(len(rows), *self.size)


def View(sizes: Sequence[int] | int, num_input_dims: int = 0):
    """Every row in another shape."""
    return Reshape([sizes] if isinstance(sizes, int) else sizes)


def Linear(input_size: int, output_size: int, with_bias: bool = True):
    """``torch.nn.Linear``."""
    return nn.Linear(input_size, output_size, bias=with_bias)


def Dropout(init_p: float = 0.5):
    """``torch.nn.Dropout``."""
    return nn.Dropout(init_p)


def ReLU(ip: bool = False):
    """``torch.nn.ReLU``."""
    return nn.ReLU(inplace=ip)


def Tanh():
    """``torch.nn.Tanh``."""
    return nn.Tanh()


def Sigmoid():
    """``torch.nn.Sigmoid``."""
    return nn.Sigmoid()


def SoftMax():
    """``torch.nn.Softmax`` over the classes of a row."""
    return nn.Softmax(dim=1)


def LogSoftMax():
    """``torch.nn.LogSoftmax`` over the classes of a row."""
    return nn.LogSoftmax(dim=1)


def BatchNormalization(n_output: int, eps: float = 1e-5, momentum: float = 0.1):
    """``torch.nn.BatchNorm1d``."""
    return nn.BatchNorm1d(n_output, eps, momentum)


def SpatialBatchNormalization(n_output: int, eps: float = 1e-5, momentum: float = 0.1):
    """``torch.nn.BatchNorm2d``."""
    return nn.BatchNorm2d(n_output, eps, momentum)


def SpatialConvolution(
    n_input_plane: int,
    n_output_plane: int,
    kernel_w: int,
    kernel_h: int,
    stride_w: int = 1,
    stride_h: int = 1,
    pad_w: int = 0,
    pad_h: int = 0,
    n_group: int = 1,
):
    """``torch.nn.Conv2d``; width comes before height."""
    return nn.Conv2d(
        n_input_plane,
        n_output_plane,
        (kernel_h, kernel_w),
        (stride_h, stride_w),
        (pad_h, pad_w),
        groups=n_group,
    )


def SpatialMaxPooling(kw: int, kh: int, dw: int = 1, dh: int = 1, pad_w: int = 0, pad_h: int = 0):
    """``torch.nn.MaxPool2d``; width comes before height."""
    return nn.MaxPool2d((kh, kw), (dh, dw), (pad_h, pad_w))
