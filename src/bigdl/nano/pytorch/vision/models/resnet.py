"""Residual networks (He et al. 2015), with the aggregated and the wide variants.

ResNeXt is by Xie et al. (2016), the wide networks are by Zagoruyko and Komodakis (2016). As in all
published weights the stride of a bottleneck is in its 3×3 convolution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from bigdl.nano.pytorch.vision.models.backbone import (
    NUM_CLASSES,
    BackboneModule,
    batch_normalized,
    initialize,
    published,
)

__all__ = [
    "ResNet",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "wide_resnet50_2",
    "wide_resnet101_2",
]


class _Residual(nn.Module):
    """A branch of convolutions, added to the input or to a 1×1 convolution of it.

    Parameters
    ----------
    convolutions : list of (int, int, int, int, int)
        Channels in, channels out, kernel, stride and groups of each.
    """

    def __init__(self, convolutions: list[tuple[int, int, int, int, int]]):
        super().__init__()
        self.depth = len(convolutions)
        stride = 1
        for number, arguments in enumerate(convolutions, start=1):
            conv, norm = batch_normalized(*arguments, activation=None)
            self.add_module(f"conv{number}", conv)
            self.add_module(f"bn{number}", norm)
            stride *= arguments[3]
        self.relu = nn.ReLU(inplace=True)
        channels_in, channels_out = convolutions[0][0], convolutions[-1][1]
        self.downsample = None
        if stride != 1 or channels_in != channels_out:
            shortcut = batch_normalized(channels_in, channels_out, 1, stride, activation=None)
            self.downsample = nn.Sequential(*shortcut)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        branch = images
        for number in range(1, self.depth + 1):
            branch = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(branch))
            if number < self.depth:
                branch = self.relu(branch)
        shortcut = images if self.downsample is None else self.downsample(images)
        return self.relu(branch + shortcut)


def _basic(channels_in: int, channels: int, stride: int) -> _Residual:
    return _Residual([(channels_in, channels, 3, stride, 1), (channels, channels, 3, 1, 1)])


def _bottleneck(
    channels_in: int, channels: int, stride: int, groups: int = 1, width: int = 64
) -> _Residual:
    inner = channels * width // 64 * groups
    return _Residual(
        [
            (channels_in, inner, 1, 1, 1),
            (inner, inner, 3, stride, groups),
            (inner, 4 * channels, 1, 1, 1),
        ]
    )


class ResNet(BackboneModule):
    """A residual network of four stages.

    Parameters
    ----------
    depths : tuple of int
        Blocks of each stage.
    bottleneck : bool
        Blocks of three convolutions whose output is four times as wide, instead of two.
    groups, width : int
        Groups of a bottleneck's 3×3 convolution, and channels of each group in the first stage.
    include_top : bool
        Give scores of 1,000 classes instead of features.
    """

    if TYPE_CHECKING:  # TorchScript would evaluate them
        layer1: nn.Sequential
        layer2: nn.Sequential
        layer3: nn.Sequential
        layer4: nn.Sequential

    def __init__(
        self,
        depths: tuple[int, ...],
        bottleneck: bool,
        groups: int = 1,
        width: int = 64,
        include_top: bool = False,
    ):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels_in = 64
        for stage, depth in enumerate(depths):
            channels = 64 << stage
            blocks = []
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                if bottleneck:
                    blocks.append(_bottleneck(channels_in, channels, stride, groups, width))
                else:
                    blocks.append(_basic(channels_in, channels, stride))
                channels_in = channels * (4 if bottleneck else 1)
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self._add_top(nn.Linear(channels_in, NUM_CLASSES), channels_in, include_top)
        initialize(self)

    def features_of(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            maps = stage(maps)
        return self.avgpool(maps).flatten(1)


@published("resnet18-f37072fd.pth")
def resnet18(include_top: bool) -> ResNet:
    """ResNet of 18 layers."""
    return ResNet((2, 2, 2, 2), False, include_top=include_top)


@published("resnet34-b627a593.pth")
def resnet34(include_top: bool) -> ResNet:
    """ResNet of 34 layers."""
    return ResNet((3, 4, 6, 3), False, include_top=include_top)


@published("resnet50-0676ba61.pth")
def resnet50(include_top: bool) -> ResNet:
    """ResNet of 50 layers."""
    return ResNet((3, 4, 6, 3), True, include_top=include_top)


@published("resnet101-63fe2227.pth")
def resnet101(include_top: bool) -> ResNet:
    """ResNet of 101 layers."""
    return ResNet((3, 4, 23, 3), True, include_top=include_top)


@published("resnet152-394f9c45.pth")
def resnet152(include_top: bool) -> ResNet:
    """ResNet of 152 layers."""
    return ResNet((3, 8, 36, 3), True, include_top=include_top)


@published("resnext50_32x4d-7cdf4587.pth")
def resnext50_32x4d(include_top: bool) -> ResNet:
    """ResNeXt of 50 layers, 32 groups of 4 channels."""
    return ResNet((3, 4, 6, 3), True, 32, 4, include_top=include_top)


@published("resnext101_32x8d-8ba56ff5.pth")
def resnext101_32x8d(include_top: bool) -> ResNet:
    """ResNeXt of 101 layers, 32 groups of 8 channels."""
    return ResNet((3, 4, 23, 3), True, 32, 8, include_top=include_top)


@published("wide_resnet50_2-95faca4d.pth")
def wide_resnet50_2(include_top: bool) -> ResNet:
    """ResNet of 50 layers, bottlenecks twice as wide."""
    return ResNet((3, 4, 6, 3), True, 1, 128, include_top=include_top)


@published("wide_resnet101_2-32ee1156.pth")
def wide_resnet101_2(include_top: bool) -> ResNet:
    """ResNet of 101 layers, bottlenecks twice as wide."""
    return ResNet((3, 4, 23, 3), True, 1, 128, include_top=include_top)
