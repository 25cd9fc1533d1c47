"""MobileNetV2 (Sandler et al. 2018) and MobileNetV3 (Howard et al. 2019).

Both are made of inverted residuals with linear bottlenecks; V3 adds squeeze and excitation, and
hard activations.
"""

from __future__ import annotations

from functools import partial

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
    "MobileNetV2",
    "MobileNetV3",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "mobilenet_v3_small",
]

# Table 2 of the paper on V2: expansion, channels, repetitions, stride of the first.
_V2_STAGES = [
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
]
_V2_FEATURES = 1280


class _InvertedResidualV2(nn.Module):
    """Widen, filter each channel by itself, narrow; added to the input where shapes allow it."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, expansion: int):
        super().__init__()
        inner = channels_in * expansion
        layers = []
        if expansion != 1:
            widen = batch_normalized(channels_in, inner, 1, activation=nn.ReLU6)
            layers.append(nn.Sequential(*widen))
        depthwise = batch_normalized(inner, inner, 3, stride, inner, nn.ReLU6)
        layers.append(nn.Sequential(*depthwise))
        self.conv = nn.Sequential(
            *layers, *batch_normalized(inner, channels_out, 1, activation=None)
        )
        self.is_residual = stride == 1 and channels_in == channels_out

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        branch = self.conv(images)
        return images + branch if self.is_residual else branch


class MobileNetV2(BackboneModule):
    """MobileNetV2 of width 1.

    Parameters
    ----------
    include_top : bool
        Give scores of 1,000 classes instead of features.
    """

    top_name = "classifier"

    def __init__(self, include_top: bool = False):
        super().__init__()
        layers: list[nn.Module] = [
            nn.Sequential(*batch_normalized(3, 32, 3, 2, activation=nn.ReLU6))
        ]
        channels_in = 32
        for expansion, channels, repetitions, stride in _V2_STAGES:
            for index in range(repetitions):
                first_stride = stride if index == 0 else 1
                layers.append(_InvertedResidualV2(channels_in, channels, first_stride, expansion))
                channels_in = channels
        last = batch_normalized(channels_in, _V2_FEATURES, 1, activation=nn.ReLU6)
        self.features = nn.Sequential(*layers, nn.Sequential(*last))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        top = nn.Sequential(nn.Dropout(0.2), nn.Linear(_V2_FEATURES, NUM_CLASSES))
        self._add_top(top, _V2_FEATURES, include_top)
        initialize(self, linear_std=0.01)

    def features_of(self, images: torch.Tensor) -> torch.Tensor:
        return self.avgpool(self.features(images)).flatten(1)


@published("mobilenet_v2-b0353104.pth")
def mobilenet_v2(include_top: bool) -> MobileNetV2:
    """MobileNetV2 of width 1."""
    return MobileNetV2(include_top)


# Tables 1 and 2 of the paper on V3: kernel, inner channels, channels, squeeze and excitation,
# hard swish instead of ReLU, stride.
_LARGE = [
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
]
_SMALL = [
    (3, 16, 16, True, False, 2),
    (3, 72, 24, False, False, 2),
    (3, 88, 24, False, False, 1),
    (5, 96, 40, True, True, 2),
    (5, 240, 40, True, True, 1),
    (5, 240, 40, True, True, 1),
    (5, 120, 48, True, True, 1),
    (5, 144, 48, True, True, 1),
    (5, 288, 96, True, True, 2),
    (5, 576, 96, True, True, 1),
    (5, 576, 96, True, True, 1),
]

_normalized = partial(batch_normalized, norm=partial(nn.BatchNorm2d, eps=0.001, momentum=0.01))


class _SqueezeExcitation(nn.Module):
    """Scale each channel by a gate that two 1×1 convolutions make of all channels' means."""

    def __init__(self, channels: int):
        super().__init__()
        # A multiple of 8 near a quarter, but not more than a tenth below it.
        squeezed = max(8, (channels // 4 + 4) // 8 * 8)
        if squeezed < 0.9 * (channels // 4):
            squeezed += 8
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.activation = nn.ReLU(inplace=True)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)
        self.scale_activation = nn.Hardsigmoid(inplace=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        gates = self.fc2(self.activation(self.fc1(self.avgpool(images))))
        return images * self.scale_activation(gates)


class _InvertedResidualV3(nn.Module):
    """Widen, filter each channel by itself, weigh channels, narrow."""

    def __init__(
        self,
        channels_in: int,
        kernel: int,
        inner: int,
        channels_out: int,
        excite: bool,
        hard_swish: bool,
        stride: int,
    ):
        super().__init__()
        activation = nn.Hardswish if hard_swish else nn.ReLU
        layers: list[nn.Module] = []
        if inner != channels_in:
            layers.append(nn.Sequential(*_normalized(channels_in, inner, 1, activation=activation)))
        depthwise = _normalized(inner, inner, kernel, stride, inner, activation)
        layers.append(nn.Sequential(*depthwise))
        if excite:
            layers.append(_SqueezeExcitation(inner))
        layers.append(nn.Sequential(*_normalized(inner, channels_out, 1, activation=None)))
        self.block = nn.Sequential(*layers)
        self.is_residual = stride == 1 and channels_in == channels_out

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        branch = self.block(images)
        return images + branch if self.is_residual else branch


class MobileNetV3(BackboneModule):
    """MobileNetV3 of width 1.

    Parameters
    ----------
    blocks : list of tuple
        Kernel, inner channels, channels, squeeze and excitation, hard swish, stride.
    hidden : int
        Width of the hidden layer of the top.
    include_top : bool
        Give scores of 1,000 classes instead of features.
    """

    top_name = "classifier"

    def __init__(self, blocks: list[tuple], hidden: int, include_top: bool = False):
        super().__init__()
        channels_in = 16
        layers: list[nn.Module] = [
            nn.Sequential(*_normalized(3, channels_in, 3, 2, activation=nn.Hardswish))
        ]
        for block in blocks:
            layers.append(_InvertedResidualV3(channels_in, *block))
            channels_in = block[2]
        features = 6 * channels_in
        last = _normalized(channels_in, features, 1, activation=nn.Hardswish)
        self.features = nn.Sequential(*layers, nn.Sequential(*last))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        top = nn.Sequential(
            nn.Linear(features, hidden),
            nn.Hardswish(inplace=True),
            nn.Dropout(0.2),
            nn.Linear(hidden, NUM_CLASSES),
        )
        self._add_top(top, features, include_top)
        initialize(self, linear_std=0.01)

    def features_of(self, images: torch.Tensor) -> torch.Tensor:
        return self.avgpool(self.features(images)).flatten(1)


@published("mobilenet_v3_large-8738ca79.pth")
def mobilenet_v3_large(include_top: bool) -> MobileNetV3:
    """MobileNetV3-Large of width 1."""
    return MobileNetV3(_LARGE, 1280, include_top)


@published("mobilenet_v3_small-047dcff4.pth")
def mobilenet_v3_small(include_top: bool) -> MobileNetV3:
    """MobileNetV3-Small of width 1."""
    return MobileNetV3(_SMALL, 1024, include_top)
