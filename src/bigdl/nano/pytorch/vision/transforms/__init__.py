"""Transforms of images with torchvision's names, for arrays, PIL images and tensors.

Arrays, which the datasets of :mod:`bigdl.nano.pytorch.vision.datasets` give, are the fast kind.
Names that are not here are torchvision's own, where one is installed.
"""

from bigdl.nano.pytorch.vision._torchvision import of_torchvision
from bigdl.nano.pytorch.vision.transforms import base, color, conversion, functional, geometry
from bigdl.nano.pytorch.vision.transforms.base import *  # noqa: F403
from bigdl.nano.pytorch.vision.transforms.color import *  # noqa: F403
from bigdl.nano.pytorch.vision.transforms.conversion import *  # noqa: F403
from bigdl.nano.pytorch.vision.transforms.geometry import *  # noqa: F403
from bigdl.nano.pytorch.vision.transforms.kinds import InterpolationMode

__all__ = [
    *base.__all__,
    *color.__all__,
    *conversion.__all__,
    *geometry.__all__,
    "InterpolationMode",
    "functional",
]


def __getattr__(name: str):
    return of_torchvision("transforms", name, __name__)
