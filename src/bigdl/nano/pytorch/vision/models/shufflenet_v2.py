"""ShuffleNetV2 (Ma et al. 2018)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from bigdl.nano.pytorch.vision.models.backbone import (
    NUM_CLASSES,
    BackboneModule,
    batch_normalized,
    published,
)

__all__ = [
    "ShuffleNetV2",
    "shufflenet_v2_x0_5",
    "shufflenet_v2_x1_0",
    "shufflenet_v2_x1_5",
    "shufflenet_v2_x2_0",
]

_DEPTHS = (4, 8, 4)


class _Unit(nn.Module):
    """Half of the channels pass through three convolutions, then the halves are interleaved.

    With a stride both halves are made of all channels of the input.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        half = channels_out // 2
        self.splits = stride == 1
        shortcut = []
        if not self.splits:
            shortcut = [
                *batch_normalized(channels_in, channels_in, 3, stride, channels_in, None),
                *batch_normalized(channels_in, half, 1),
            ]
        self.branch1 = nn.Sequential(*shortcut)
        self.branch2 = nn.Sequential(
            *batch_normalized(half if self.splits else channels_in, half, 1),
            *batch_normalized(half, half, 3, stride, half, None),
            *batch_normalized(half, half, 1),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        left, right = images.chunk(2, dim=1) if self.splits else (images, images)
        joined = torch.stack((self.branch1(left), self.branch2(right)), dim=2)
        return joined.flatten(1, 2)  # channel 0 of both halves, channel 1 of both, …


class ShuffleNetV2(BackboneModule):
    """ShuffleNetV2.

    Parameters
    ----------
    channels : tuple of int
        Of the three stages and of the last convolution.
    include_top : bool
        Give scores of 1,000 classes instead of features.
    """

    if TYPE_CHECKING:  # TorchScript would evaluate them
        stage2: nn.Sequential
        stage3: nn.Sequential
        stage4: nn.Sequential

    def __init__(self, channels: tuple[int, ...], include_top: bool = False):
        super().__init__()
        self.conv1 = nn.Sequential(*batch_normalized(3, 24, 3, 2))
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels_in = 24
        for number, (width, depth) in enumerate(zip(channels, _DEPTHS, strict=False), start=2):
            units = [_Unit(channels_in, width, 2)]
            units += [_Unit(width, width, 1) for _ in range(depth - 1)]
            self.add_module(f"stage{number}", nn.Sequential(*units))
            channels_in = width
        self.conv5 = nn.Sequential(*batch_normalized(channels_in, channels[-1], 1))
        self._add_top(nn.Linear(channels[-1], NUM_CLASSES), channels[-1], include_top)

    def features_of(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.maxpool(self.conv1(images))
        maps = self.conv5(self.stage4(self.stage3(self.stage2(maps))))
        return maps.mean((2, 3))


@published("shufflenetv2_x0.5-f707e7126e.pth")
def shufflenet_v2_x0_5(include_top: bool) -> ShuffleNetV2:
    """ShuffleNetV2 of width 0.5."""
    return ShuffleNetV2((48, 96, 192, 1024), include_top)


@published("shufflenetv2_x1-5666bf0f80.pth")
def shufflenet_v2_x1_0(include_top: bool) -> ShuffleNetV2:
    """ShuffleNetV2 of width 1."""
    return ShuffleNetV2((116, 232, 464, 1024), include_top)


@published("shufflenetv2_x1_5-3c479a10.pth")
def shufflenet_v2_x1_5(include_top: bool) -> ShuffleNetV2:
    """ShuffleNetV2 of width 1.5."""
    return ShuffleNetV2((176, 352, 704, 1024), include_top)


@published("shufflenetv2_x2_0-8be3c8ee.pth")
def shufflenet_v2_x2_0(include_top: bool) -> ShuffleNetV2:
    """ShuffleNetV2 of width 2."""
    return ShuffleNetV2((244, 488, 976, 2048), include_top)
