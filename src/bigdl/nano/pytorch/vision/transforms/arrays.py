"""Operations on the shape of arrays ``(H, W[, C])``: OpenCV and torch's own resize.

Results equal Pillow's, but for rounding where the documentation says so.
"""

from __future__ import annotations

import numpy as np
import torch

from bigdl.common.errors import UsageError, require
from bigdl.nano.pytorch.vision.transforms import pillow
from bigdl.nano.pytorch.vision.transforms.kinds import InterpolationMode, to_pil

cv2 = require("cv2", "nano")

_NEAREST = (InterpolationMode.NEAREST, InterpolationMode.NEAREST_EXACT)
_OF_TORCH = {InterpolationMode.BILINEAR: "bilinear", InterpolationMode.BICUBIC: "bicubic"}
_OF_OPENCV = {
    InterpolationMode.NEAREST: cv2.INTER_NEAREST,
    InterpolationMode.NEAREST_EXACT: cv2.INTER_NEAREST,
    InterpolationMode.BILINEAR: cv2.INTER_LINEAR,
    InterpolationMode.BICUBIC: cv2.INTER_CUBIC,
}
_BORDERS = {
    "constant": cv2.BORDER_CONSTANT,
    "edge": cv2.BORDER_REPLICATE,
    "reflect": cv2.BORDER_REFLECT_101,
    "symmetric": cv2.BORDER_REFLECT,
}
PADDING_MODES = tuple(_BORDERS)


def resize(image, size, mode, antialias):
    """Pillow's filters, which widen with the factor of the reduction.

    torch has kernels for bytes whose weights are Pillow's in fixed point (of Pillow-SIMD), several
    times as fast as Pillow; OpenCV has none that widen.
    """
    if image.shape[:2] == tuple(size):
        return image
    if mode in _NEAREST:
        return image[_nearest(image.shape[0], size[0])[:, None], _nearest(image.shape[1], size[1])]
    if mode not in _OF_TORCH:
        return np.asarray(pillow.resize(to_pil(_bytes(image, mode)), size, mode, antialias))
    tensor = torch.from_numpy(np.ascontiguousarray(image))
    tensor = tensor.view(1, *image.shape[:2], -1).permute(0, 3, 1, 2)
    tensor = torch.nn.functional.interpolate(
        tensor, size, mode=_OF_TORCH[mode], antialias=antialias, align_corners=False
    )
    return tensor[0].permute(1, 2, 0).numpy().reshape(*size, *image.shape[2:])


def _nearest(before: int, after: int) -> np.ndarray:
    """Which row each row is taken from: the one in which its centre lies."""
    return ((np.arange(after) + 0.5) * (before / after)).astype(np.intp)


def _bytes(image, what):
    if image.dtype != np.uint8:
        raise UsageError(f"{what} needs an image of bytes (uint8), but it holds {image.dtype}")
    return image


def crop(image, top, left, height, width):
    rows, columns = image.shape[:2]
    inside = image[max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)]
    if top >= 0 and left >= 0 and top + height <= rows and left + width <= columns:
        return inside
    canvas = np.zeros((height, width, *image.shape[2:]), image.dtype)
    canvas[max(-top, 0) :, max(-left, 0) :][: inside.shape[0], : inside.shape[1]] = inside
    return canvas


def hflip(image):
    return np.ascontiguousarray(image[:, ::-1])


def vflip(image):
    return np.ascontiguousarray(image[::-1])


def pad(image, left, top, right, bottom, fill, mode):
    """Add a border; a negative width cuts."""
    rows, columns = image.shape[:2]
    if min(left, top, right, bottom) < 0:
        image = image[max(-top, 0) : rows + min(bottom, 0), max(-left, 0) : columns + min(right, 0)]
        left, top, right, bottom = (max(width, 0) for width in (left, top, right, bottom))
    padded = cv2.copyMakeBorder(
        image, top, bottom, left, right, _BORDERS[mode], value=_scalar(image, fill)
    )
    return _like(padded, image)


def warp(image, inverse, size, mode, fill):
    """The image seen through a projective map.

    Parameters
    ----------
    image : ndarray
    inverse : ndarray (3, 3)
        From places of the result to places of the image, where the centre of the first pixel
        lies at 0.5.
    size : tuple of int
        Height and width of the result.
    mode : InterpolationMode
    fill : number, sequence or None
        What lies outside of the image.
    """
    if mode not in _OF_OPENCV:
        raise UsageError(
            f"interpolation must be NEAREST, BILINEAR or BICUBIC here, not {mode.name}"
        )
    # OpenCV's first pixel has its centre at 0.
    shift = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    matrix = np.linalg.inv(shift) @ inverse @ shift
    if mode in _NEAREST:
        matrix[:2] += 1e-6 * matrix[2]  # a tie goes to the pixel after it, as in Pillow
    arguments = (matrix, size[::-1])
    sampled = cv2.warpPerspective(
        np.ascontiguousarray(image),
        *arguments,
        flags=_OF_OPENCV[mode] | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REPLICATE,
    )
    # As in Pillow a pixel is of the image or outside of it; the two are not mixed.
    inside = cv2.warpPerspective(
        np.ones(image.shape[:2], np.uint8),
        *arguments,
        flags=cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP,
    )
    sampled = _like(sampled, image)
    sampled[inside == 0] = _scalar(image, fill)[: image.shape[2] if image.ndim == 3 else 1]
    return sampled


def gaussian_blur(image, kernel, sigma):
    """`kernel` and `sigma` are pairs of the width and the height."""
    blurred = cv2.GaussianBlur(
        np.ascontiguousarray(image),
        kernel,
        sigma[0],
        sigmaY=sigma[1],
        borderType=_BORDERS["reflect"],
    )
    return _like(blurred, image)


def displace(image, shifts, mode, fill):
    """Take each pixel from another place.

    Parameters
    ----------
    image : ndarray
    shifts : ndarray (H, W, 2)
        float32; how far to the right and below, in pixels.
    mode : InterpolationMode
    fill : number, sequence or None
    """
    rows, columns = image.shape[:2]
    x = shifts[:, :, 0] + np.arange(columns, dtype=np.float32)
    y = shifts[:, :, 1] + np.arange(rows, dtype=np.float32)[:, None]
    moved = cv2.remap(
        np.ascontiguousarray(image),
        x,
        y,
        _OF_OPENCV[mode],
        borderMode=cv2.BORDER_CONSTANT,
        borderValue=_scalar(image, fill),
    )
    return _like(moved, image)


def _scalar(image, fill) -> tuple:
    """The fill as OpenCV wants it: four numbers."""
    channels = image.shape[2] if image.ndim == 3 else 1
    values = [0 if fill is None else fill] if np.ndim(fill) == 0 else list(fill)
    if len(values) not in (1, channels):
        raise UsageError(
            f"fill must be a number or have one for each of {channels} channel(s), but it is "
            f"{fill!r}"
        )
    values = values * channels if len(values) == 1 else values
    return tuple((values + [0] * 4)[:4])


def _like(result, image):
    """OpenCV drops the last dimension if it is one."""
    return result.reshape(*result.shape[:2], *image.shape[2:])
