"""Transforms of images with torchvision's names, for arrays, PIL images and tensors.

Arrays, which the datasets of :mod:`bigdl.nano.pytorch.vision.datasets` give, are the fast kind.
Names that are not here are torchvision's own, where one is installed.
"""

from typing import Any

from bigdl.nano.pytorch.vision import of_torchvision
from bigdl.nano.pytorch.vision.transforms import functional as functional
from bigdl.nano.pytorch.vision.transforms import transforms as transforms
from bigdl.nano.pytorch.vision.transforms.transforms import *  # noqa: F403
from bigdl.nano.pytorch.vision.transforms.transforms import __all__ as __all__


def __getattr__(name: str) -> Any:
    return of_torchvision("transforms", name, __name__)
