"""Operations on images of any kind, with torchvision's names.

An operation gives what it was given: an array for an array, a PIL image for a PIL image, a tensor
for a tensor. PIL images are left to Pillow, arrays go through OpenCV and torch; tensors are taken
as arrays where torch has no equal operation, and carry no gradients there.
"""

from bigdl.nano.pytorch.vision.transforms import color, conversion, geometry, warping
from bigdl.nano.pytorch.vision.transforms.color import *  # noqa: F403
from bigdl.nano.pytorch.vision.transforms.conversion import *  # noqa: F403
from bigdl.nano.pytorch.vision.transforms.geometry import *  # noqa: F403
from bigdl.nano.pytorch.vision.transforms.warping import *  # noqa: F403

__all__ = [
    name
    for module in (color, conversion, geometry, warping)
    for name in module.__all__
    if name.islower()
]
