"""The transforms, under the name of the module of torchvision and of BigDL 2.x that had them."""

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
