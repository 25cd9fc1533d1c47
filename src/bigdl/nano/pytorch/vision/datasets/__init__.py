"""Datasets of images that are decoded by fast libraries.

Names that are not here are torchvision's own, where one is installed.
"""

from bigdl.nano.pytorch.vision._torchvision import of_torchvision
from bigdl.nano.pytorch.vision.datasets.folder import ImageFolder
from bigdl.nano.pytorch.vision.datasets.loading import collate_channels_last
from bigdl.nano.pytorch.vision.datasets.oxford_pet import OxfordIIITPet
from bigdl.nano.pytorch.vision.datasets.segmentation import SegmentationImageFolder

__all__ = ["ImageFolder", "OxfordIIITPet", "SegmentationImageFolder", "collate_channels_last"]


def __getattr__(name: str):
    return of_torchvision("datasets", name, __name__)
