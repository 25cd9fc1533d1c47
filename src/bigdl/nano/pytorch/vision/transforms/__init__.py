"""Transforms of images with torchvision's names, for arrays, PIL images and tensors.

Arrays, which the datasets of :mod:`bigdl.nano.pytorch.vision.datasets` give, are the fast kind.
Names that are not here are torchvision's own, where one is installed.
"""

from bigdl.nano.pytorch.vision._torchvision import of_torchvision
from bigdl.nano.pytorch.vision.transforms import transforms
from bigdl.nano.pytorch.vision.transforms.transforms import *  # noqa: F403

__all__ = [*transforms.__all__]


def __getattr__(name: str):
    return of_torchvision("transforms", name, __name__)
