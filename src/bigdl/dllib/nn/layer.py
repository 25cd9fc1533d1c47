"""Layers of BigDL 2.x by name: PyTorch modules with BigDL's arguments.

They are for programs that define small models. Files written by BigDL's JVM layers cannot be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from bigdl.common.dropped import refuse_name
from bigdl.common.errors import UsageError, require

if TYPE_CHECKING:
    from torch import nn
else:
    nn = require("torch.nn", "orca")

__all__ = [
    "ELU",
    "BatchNormalization",
    "Dropout",
    "HardTanh",
    "Identity",
    "LeakyReLU",
    "Linear",
    "LogSigmoid",
    "LogSoftMax",
    "Model",
    "ReLU",
    "Reshape",
    "Sequential",
    "Sigmoid",
    "SoftMax",
    "SoftPlus",
    "SoftSign",
    "SpatialAveragePooling",
    "SpatialBatchNormalization",
    "SpatialConvolution",
    "SpatialMaxPooling",
    "Tanh",
    "View",
]


class Sequential(nn.Sequential):
    """``torch.nn.Sequential`` with a method :meth:`add` to append layers.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import Linear, ReLU, Sequential
    >>> model = Sequential().add(Linear(4, 8)).add(ReLU()).add(Linear(8, 2))
    >>> model(torch.zeros(5, 4)).shape
    torch.Size([5, 2])
    """

    def add(self, layer) -> Sequential:
        """Append a layer and return the model."""
        self.append(layer)
        return self


class Model:
    """Placeholder for models with BigDL's JVM layers, which cannot be loaded.

    Examples
    --------
    >>> from bigdl.dllib.nn.layer import Model
    >>> try:
    ...     Model.load("lenet.bigdl")
    ... except ValueError as error:
    ...     print(error)
    'lenet.bigdl' cannot be read: models of BigDL's JVM layers need BigDL 2.x; export it to
    ONNX there, or define the model in PyTorch
    """

    @staticmethod
    def load(path: str, *args, **kwargs):
        """Raise a UsageError that explains how to convert the model."""
        raise UsageError(
            f"{path!r} cannot be read: models of BigDL's JVM layers need BigDL 2.x; export it to "
            "ONNX there, or define the model in PyTorch",
            code="file-format",
            path=str(path),
        )

    loadModel = load_torch = load_keras = load_caffe = load_tensorflow = load


class Reshape(nn.Module):
    """Module that reshapes every row.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import Reshape
    >>> Reshape([1, 28, 28])(torch.zeros(5, 784)).shape
    torch.Size([5, 1, 28, 28])
    """

    def __init__(self, size: Sequence[int], batch_mode: bool | None = None):
        super().__init__()
        self.size = tuple(size)

    def forward(self, rows):
        return rows.reshape(len(rows), *self.size)


def View(sizes: Sequence[int] | int, num_input_dims: int = 0):
    """Return a module that reshapes every row.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import View
    >>> View(784)(torch.zeros(5, 1, 28, 28)).shape
    torch.Size([5, 784])
    """
    return Reshape([sizes] if isinstance(sizes, int) else sizes)


def Linear(input_size: int, output_size: int, with_bias: bool = True):
    """Return ``torch.nn.Linear``.

    Examples
    --------
    >>> from bigdl.dllib.nn.layer import Linear
    >>> Linear(4, 2, with_bias=False)
    Linear(in_features=4, out_features=2, bias=False)
    """
    return nn.Linear(input_size, output_size, bias=with_bias)


def Dropout(init_p: float = 0.5):
    """Return ``torch.nn.Dropout``.

    Examples
    --------
    >>> from bigdl.dllib.nn.layer import Dropout
    >>> Dropout(0.2)
    Dropout(p=0.2, inplace=False)
    """
    return nn.Dropout(init_p)


def ReLU(ip: bool = False):
    """Return ``torch.nn.ReLU``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import ReLU
    >>> ReLU()(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    return nn.ReLU(inplace=ip)


def Tanh():
    """Return ``torch.nn.Tanh``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import Tanh
    >>> Tanh()(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.7616])
    """
    return nn.Tanh()


def Sigmoid():
    """Return ``torch.nn.Sigmoid``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import Sigmoid
    >>> Sigmoid()(torch.tensor([0.0]))
    tensor([0.5000])
    """
    return nn.Sigmoid()


def SoftMax():
    """Return ``torch.nn.Softmax`` over the classes of a row.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import SoftMax
    >>> SoftMax()(torch.zeros(1, 2))
    tensor([[0.5000, 0.5000]])
    """
    return nn.Softmax(dim=1)


def LogSoftMax():
    """Return ``torch.nn.LogSoftmax`` over the classes of a row.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import LogSoftMax
    >>> LogSoftMax()(torch.zeros(1, 2))
    tensor([[-0.6931, -0.6931]])
    """
    return nn.LogSoftmax(dim=1)


def BatchNormalization(n_output: int, eps: float = 1e-5, momentum: float = 0.1):
    """Return ``torch.nn.BatchNorm1d``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import BatchNormalization
    >>> BatchNormalization(1)(torch.tensor([[1.0], [3.0]])).round().tolist()
    [[-1.0], [1.0]]
    """
    return nn.BatchNorm1d(n_output, eps, momentum)


def SpatialBatchNormalization(n_output: int, eps: float = 1e-5, momentum: float = 0.1):
    """Return ``torch.nn.BatchNorm2d``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import SpatialBatchNormalization
    >>> SpatialBatchNormalization(3)(torch.zeros(5, 3, 8, 8)).shape
    torch.Size([5, 3, 8, 8])
    """
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
    """Return ``torch.nn.Conv2d``; width comes before height.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import SpatialConvolution
    >>> SpatialConvolution(1, 6, kernel_w=5, kernel_h=3)(torch.zeros(1, 1, 28, 28)).shape
    torch.Size([1, 6, 26, 24])
    """
    return nn.Conv2d(
        n_input_plane,
        n_output_plane,
        (kernel_h, kernel_w),
        (stride_h, stride_w),
        (pad_h, pad_w),
        groups=n_group,
    )


def SpatialMaxPooling(kw: int, kh: int, dw: int = 1, dh: int = 1, pad_w: int = 0, pad_h: int = 0):
    """Return ``torch.nn.MaxPool2d``; width comes before height.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import SpatialMaxPooling
    >>> SpatialMaxPooling(2, 2, dw=2, dh=2)(torch.zeros(1, 6, 24, 24)).shape
    torch.Size([1, 6, 12, 12])
    """
    return nn.MaxPool2d((kh, kw), (dh, dw), (pad_h, pad_w))


def SpatialAveragePooling(
    kw: int, kh: int, dw: int = 1, dh: int = 1, pad_w: int = 0, pad_h: int = 0
):
    """Return ``torch.nn.AvgPool2d``; width comes before height.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import SpatialAveragePooling
    >>> SpatialAveragePooling(2, 2, dw=2, dh=2)(torch.ones(1, 6, 24, 24)).shape
    torch.Size([1, 6, 12, 12])
    """
    return nn.AvgPool2d((kh, kw), (dh, dw), (pad_h, pad_w))


def Identity():
    """Return ``torch.nn.Identity``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import Identity
    >>> Identity()(torch.tensor([-1.0]))
    tensor([-1.])
    """
    return nn.Identity()


def ELU(alpha: float = 1.0, inplace: bool = False):
    """Return ``torch.nn.ELU``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import ELU
    >>> ELU()(torch.tensor([-1.0, 2.0]))
    tensor([-0.6321,  2.0000])
    """
    return nn.ELU(alpha, inplace)


def LeakyReLU(negval: float = 0.01, inplace: bool = False):
    """Return ``torch.nn.LeakyReLU``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import LeakyReLU
    >>> LeakyReLU(0.5)(torch.tensor([-1.0, 2.0]))
    tensor([-0.5000,  2.0000])
    """
    return nn.LeakyReLU(negval, inplace)


def HardTanh(min_value: float = -1.0, max_value: float = 1.0, inplace: bool = False):
    """Return ``torch.nn.Hardtanh``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import HardTanh
    >>> HardTanh()(torch.tensor([-3.0, 0.5]))
    tensor([-1.0000,  0.5000])
    """
    return nn.Hardtanh(min_value, max_value, inplace)


def LogSigmoid():
    """Return ``torch.nn.LogSigmoid``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import LogSigmoid
    >>> LogSigmoid()(torch.tensor([0.0]))
    tensor([-0.6931])
    """
    return nn.LogSigmoid()


def SoftPlus(beta: float = 1.0):
    """Return ``torch.nn.Softplus``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import SoftPlus
    >>> SoftPlus()(torch.tensor([0.0]))
    tensor([0.6931])
    """
    return nn.Softplus(beta)


def SoftSign():
    """Return ``torch.nn.Softsign``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.layer import SoftSign
    >>> SoftSign()(torch.tensor([1.0]))
    tensor([0.5000])
    """
    return nn.Softsign()


_OF_THE_JVM = """
    Abs ActivityRegularization Add AddConstant BiRecurrent BifurcateSplitTable Bilinear
    BinaryThreshold BinaryTreeLSTM Bottle CAdd CAddTable CAveTable CDivTable CMaxTable CMinTable
    CMul CMulTable CSubTable Clamp Concat ConcatTable Const Container Contiguous
    ConvLSTMPeephole ConvLSTMPeephole3D Cosine CosineDistance CrossProduct DenseToSparse
    DotProduct Echo Euclidean Exp ExpandSize FeedForwardNetwork Fill FlattenTable GRU
    GaussianDropout GaussianNoise GaussianSampler GradientReversal HardShrink HardSigmoid
    Highway Index InferReshape Input JoinTable L1Penalty LSTM LSTMPeephole Layer
    LayerNormalization LocallyConnected1D LocallyConnected2D Log LookupTable LookupTableSparse
    MM MV MapTable MaskedSelect Masking Max Maxout Mean Min MixtureTable Mul MulConstant
    MultiHeadAttention MultiRNNCell Narrow NarrowTable Negative NegativeEntropyPenalty Node
    Normalize NormalizeScale PReLU Pack PairwiseDistance Padding ParallelTable Permute Pooler
    Power PriorBox Proposal RReLU ReLU6 Recurrent RecurrentDecoder Replicate ResizeBilinear
    Reverse RnnCell RoiAlign RoiPooling SReLU Scale Select SelectTable SoftMin SoftShrink
    SparseJoinTable SparseLinear SpatialContrastiveNormalization SpatialConvolutionMap
    SpatialCrossMapLRN SpatialDilatedConvolution SpatialDivisiveNormalization SpatialDropout1D
    SpatialDropout2D SpatialDropout3D SpatialFullConvolution SpatialSeparableConvolution
    SpatialShareConvolution SpatialSubtractiveNormalization SpatialWithinChannelLRN
    SpatialZeroPadding SplitTable Sqrt Square Squeeze Sum TableOperation TanhShrink
    TemporalConvolution TemporalMaxPooling Threshold Tile TimeDistributed Transformer Transpose
    TreeLSTM UnPack Unsqueeze UpSampling1D UpSampling2D UpSampling3D VolumetricAveragePooling
    VolumetricConvolution VolumetricFullConvolution VolumetricMaxPooling
"""


def __getattr__(name: str) -> NoReturn:
    if name in _OF_THE_JVM.split():
        refuse_name(__name__, name, "it was written in Scala; use the layers of torch.nn")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
