"""How large an image has to be for what a transform makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bigdl.nano.pytorch.vision.transforms import functional as F
from bigdl.nano.pytorch.vision.transforms.base import Compose
from bigdl.nano.pytorch.vision.transforms.color import (
    ColorJitter,
    Grayscale,
    RandomGrayscale,
    RandomInvert,
)
from bigdl.nano.pytorch.vision.transforms.geometry import (
    RandomHorizontalFlip,
    RandomVerticalFlip,
    Resize,
)
from bigdl.nano.pytorch.vision.transforms.kinds import InterpolationMode

__all__ = ["size_that_suffices"]

# What treats a small image as it treats a large one.
_SCALE_FREE = (
    ColorJitter,
    Grayscale,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomInvert,
    RandomVerticalFlip,
)
_SMOOTH = (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC)


def size_that_suffices(transform: Any) -> Callable[[int, int], tuple[int, int]] | None:
    """The size to which an image is made smaller before all that depends on its size.

    Parameters
    ----------
    transform : callable or None

    Returns
    -------
    callable or None
        From height and width of an image to those that its first ``Resize`` gives it; None if
        another transform comes before, if pixels between the result's would not count, or if
        nothing is known of the transform.
    """
    steps = transform.transforms if isinstance(transform, Compose) else [transform]
    for step in steps:
        if type(step) is Resize and step.antialias and step.interpolation in _SMOOTH:
            return lambda *lengths: F.resized_to(lengths, step.size, step.max_size)
        if type(step) not in _SCALE_FREE:
            return None
    return None
