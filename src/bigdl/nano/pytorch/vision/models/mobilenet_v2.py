"""MobileNetV2: inverted residuals and linear bottlenecks (Sandler et al. 2018)."""

from __future__ import annotations

import os

import torch
from torch import nn

from bigdl.nano.pytorch.vision.models.backbone import (
    NUM_CLASSES,
    BackboneModule,
    batch_normalized,
    finished,
    initialize,
)

__all__ = ["MobileNetV2", "mobilenet_v2"]

# Table 2 of the paper: expansion, channels, repetitions, stride of the first.
_STAGES = [
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
]
_FEATURES = 1280


class _InvertedResidual(nn.Module):
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
        layers = [nn.Sequential(*batch_normalized(3, 32, 3, 2, activation=nn.ReLU6))]
        channels_in = 32
        for expansion, channels, repetitions, stride in _STAGES:
            for index in range(repetitions):
                first_stride = stride if index == 0 else 1
                layers.append(_InvertedResidual(channels_in, channels, first_stride, expansion))
                channels_in = channels
        last = batch_normalized(channels_in, _FEATURES, 1, activation=nn.ReLU6)
        self.features = nn.Sequential(*layers, nn.Sequential(*last))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        top = nn.Sequential(nn.Dropout(0.2), nn.Linear(_FEATURES, NUM_CLASSES))
        self._add_top(top, _FEATURES, include_top)
        initialize(self, linear_std=0.01)

    def features_of(self, images: torch.Tensor) -> torch.Tensor:
        return self.avgpool(self.features(images)).flatten(1)


def mobilenet_v2(
    pretrained: bool = False,
    include_top: bool = False,
    freeze: bool = False,
    weights: str | os.PathLike | None = None,
) -> MobileNetV2:
    """MobileNetV2 of width 1. Parameters as of :func:`resnet18`."""
    model = MobileNetV2(include_top)
    file = "mobilenet_v2-b0353104.pth"
    return finished(model, "mobilenet_v2", file, pretrained, freeze, weights)
