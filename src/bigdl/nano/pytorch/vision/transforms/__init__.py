"""Transforms of images with torchvision's names, for arrays, PIL images and tensors.

Arrays, which the datasets of :mod:`bigdl.nano.pytorch.vision.datasets` give, are the fast kind.
Names that are not here are torchvision's own, where one is installed.
"""

from typing import Any

from bigdl.nano.pytorch.vision import of_torchvision
from bigdl.nano.pytorch.vision.transforms import (
    base,
    color,
    conversion,
    functional,
    geometry,
    warping,
)
from bigdl.nano.pytorch.vision.transforms.base import *  # noqa: F403
from bigdl.nano.pytorch.vision.transforms.color import *  # noqa: F403
from bigdl.nano.pytorch.vision.transforms.conversion import *  # noqa: F403
from bigdl.nano.pytorch.vision.transforms.geometry import *  # noqa: F403
from bigdl.nano.pytorch.vision.transforms.images import InterpolationMode as InterpolationMode
from bigdl.nano.pytorch.vision.transforms.warping import *  # noqa: F403

__all__ = ["InterpolationMode", "functional"]
__all__ += [
    name
    for module in (base, color, conversion, geometry, warping)
    for name in module.__all__
    if not name.islower()  # those are in `functional`
]


def __getattr__(name: str) -> Any:
    return of_torchvision("transforms", name, __name__)
