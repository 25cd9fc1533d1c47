"""Datasets of images that are decoded by fast libraries.

Names that are not here are torchvision's own, where one is installed.
"""

from typing import Any

from bigdl.nano.pytorch.vision import of_torchvision
from bigdl.nano.pytorch.vision.datasets.folders import (
    ImageFolder,
    OxfordIIITPet,
    SegmentationImageFolder,
    collate_channels_last,
)

__all__ = ["ImageFolder", "OxfordIIITPet", "SegmentationImageFolder", "collate_channels_last"]


def __getattr__(name: str) -> Any:
    return of_torchvision("datasets", name, __name__)
