"""The three kinds of images: arrays ``(H, W[, C])``, PIL images and tensors ``(…, C, H, W)``.

Arrays and tensors hold bytes in 0…255 or floats in 0…1.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch
from PIL import Image

from bigdl.common.errors import UsageError

__all__ = [
    "InterpolationMode",
    "dimensions",
    "highest",
    "interpolation_mode",
    "is_pil",
    "on_arrays",
    "to_array",
    "to_pil",
]


class InterpolationMode(Enum):
    """How values between pixels are found; names and values are torchvision's."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


_OF_PILLOW = {
    Image.Resampling.NEAREST: InterpolationMode.NEAREST,
    Image.Resampling.BILINEAR: InterpolationMode.BILINEAR,
    Image.Resampling.BICUBIC: InterpolationMode.BICUBIC,
    Image.Resampling.BOX: InterpolationMode.BOX,
    Image.Resampling.HAMMING: InterpolationMode.HAMMING,
    Image.Resampling.LANCZOS: InterpolationMode.LANCZOS,
}


def interpolation_mode(given: Any) -> InterpolationMode:
    """The mode that a user means: a mode, its value, Pillow's constant, or torchvision's mode.

    Raises
    ------
    UsageError
        If there is none like it.
    """
    if isinstance(given, int):
        if given in _OF_PILLOW:
            return _OF_PILLOW[given]
    else:
        value = getattr(given, "value", given)  # torchvision's modes have the same values
        if value in [mode.value for mode in InterpolationMode]:
            return InterpolationMode(value)
    names = ", ".join(mode.name for mode in InterpolationMode)
    raise UsageError(f"interpolation must be an InterpolationMode ({names}), not {given!r}")


def is_pil(image: Any) -> bool:
    """Whether this is an image of Pillow."""
    return isinstance(image, Image.Image)


def dimensions(image: Any) -> tuple[int, int, int]:
    """Channels, height and width of an image.

    Raises
    ------
    UsageError
        If this is no image.
    """
    if is_pil(image):
        return len(image.getbands()), image.height, image.width
    if isinstance(image, np.ndarray) and image.ndim in (2, 3):
        return image.shape[2] if image.ndim == 3 else 1, *image.shape[:2]
    if isinstance(image, torch.Tensor) and image.ndim >= 2:
        return image.shape[-3] if image.ndim > 2 else 1, *image.shape[-2:]
    raise no_image(image)


def no_image(given: Any) -> UsageError:
    """The error for what is no image."""
    shape = getattr(given, "shape", None)
    what = type(given).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
    return UsageError(
        "An image must be a PIL image, an ndarray (height, width[, channels]) or a tensor "
        f"(..., channels, height, width), but it is a {what}"
    )


def highest(image: np.ndarray | torch.Tensor) -> float:
    """The value of white: 255 for bytes, 1 for floats."""
    kind = image.dtype
    if kind in (np.uint8, torch.uint8):
        return 255
    floating = kind.is_floating_point if isinstance(kind, torch.dtype) else kind.kind == "f"
    if floating:
        return 1.0
    raise UsageError(f"An image must hold bytes (uint8) or floats, but it holds {kind}")


def to_array(image: Any) -> np.ndarray:
    """An image as an array; without a copy where that is possible."""
    if isinstance(image, torch.Tensor):
        if image.ndim not in (2, 3):
            raise no_image(image)
        array = image.detach().cpu().numpy()
        return array if image.ndim == 2 else np.ascontiguousarray(array.transpose(1, 2, 0))
    if is_pil(image):
        return np.asarray(image)
    if isinstance(image, np.ndarray) and image.ndim in (2, 3):
        return image
    raise no_image(image)


def to_pil(array: np.ndarray) -> Image.Image:
    """A PIL image of an array of bytes."""
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(array))


def on_arrays(image: Any, function: Callable[..., np.ndarray], *args: Any) -> Any:
    """Apply a function of arrays to an image of any kind; the result is of the same kind.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
        A tensor may have leading dimensions; its images are taken one by one.
    function : callable
        From an array ``(H, W[, C])`` to another.
    *args
        Further arguments of the function.
    """
    if isinstance(image, np.ndarray):
        return function(to_array(image), *args)
    if is_pil(image):
        return to_pil(function(np.asarray(image), *args))
    if not isinstance(image, torch.Tensor) or image.ndim < 2:
        raise no_image(image)
    if image.ndim > 3:
        images = image.flatten(0, -4)
        done = torch.stack([on_arrays(each, function, *args) for each in images])
        return done.unflatten(0, image.shape[:-3])
    result = np.asarray(function(to_array(image), *args))
    if image.ndim == 3:
        result = result.reshape(*result.shape[:2], -1).transpose(2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(result)).to(image.device)
