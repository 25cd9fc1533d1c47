"""Operations on images of any kind, with torchvision's names.

An operation gives what it was given: an array for an array, a PIL image for a PIL image, a tensor
for a tensor. PIL images are left to Pillow, arrays go through OpenCV and torch; tensors are taken
as arrays where torch has no equal operation, and carry no gradients there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.vision.transforms import arrays, pillow
from bigdl.nano.pytorch.vision.transforms.conversions import (
    convert_image_dtype,
    normalize,
    pil_to_tensor,
    to_pil_image,
    to_tensor,
)
from bigdl.nano.pytorch.vision.transforms.kinds import (
    InterpolationMode,
    dimensions,
    interpolation_mode,
    is_pil,
    on_arrays,
)
from bigdl.nano.pytorch.vision.transforms.recoloring import (
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    adjust_sharpness,
    autocontrast,
    equalize,
    invert,
    posterize,
    rgb_to_grayscale,
    solarize,
    to_grayscale,
)

__all__ = [
    "adjust_brightness",
    "adjust_contrast",
    "adjust_hue",
    "adjust_saturation",
    "adjust_sharpness",
    "affine",
    "autocontrast",
    "center_crop",
    "convert_image_dtype",
    "crop",
    "elastic_transform",
    "equalize",
    "erase",
    "five_crop",
    "gaussian_blur",
    "get_dimensions",
    "get_image_size",
    "hflip",
    "invert",
    "normalize",
    "pad",
    "perspective",
    "pil_to_tensor",
    "posterize",
    "resize",
    "resized_crop",
    "rgb_to_grayscale",
    "rotate",
    "solarize",
    "ten_crop",
    "to_grayscale",
    "to_pil_image",
    "to_tensor",
    "vflip",
]


def get_dimensions(image: Any) -> list[int]:
    """Channels, height and width."""
    return list(dimensions(image))


def get_image_size(image: Any) -> list[int]:
    """Width and height."""
    _, height, width = dimensions(image)
    return [width, height]


def resize(
    image: Any,
    size: int | Sequence[int],
    interpolation: Any = InterpolationMode.BILINEAR,
    max_size: int | None = None,
    antialias: bool | None = True,
) -> Any:
    """Make an image larger or smaller.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
    size : int or (int, int)
        Length of the shorter edge, or height and width.
    interpolation : InterpolationMode
    max_size : int, optional
        Upper limit of the longer edge where `size` is one int.
    antialias : bool
        Whether all pixels count when an image is made smaller; Pillow always does that.
    """
    height, width = resized_to(dimensions(image)[1:], size, max_size)
    mode = interpolation_mode(interpolation)
    if (height, width) == tuple(dimensions(image)[1:]):
        return image
    antialias = antialias is not False
    if is_pil(image):
        return pillow.resize(image, (height, width), mode, antialias)
    return on_arrays(image, arrays.resize, (height, width), mode, antialias)


def resized_to(
    now: Sequence[int], size: int | Sequence[int], max_size: int | None = None
) -> tuple[int, int]:
    """Height and width after `resize` of an image of this height and width."""
    if isinstance(size, int):
        size = (size,)
    if len(size) == 2:
        if max_size is not None:
            raise UsageError("max_size goes with a size of one int, not with height and width")
        return int(size[0]), int(size[1])
    (shorter,) = size
    if max_size is not None and max_size <= shorter:
        raise UsageError(f"max_size must be greater than size, but {max_size} <= {shorter}")
    height, width = now
    longer = int(shorter * max(now) / min(now))
    if max_size is not None and longer > max_size:
        shorter, longer = int(max_size * shorter / longer), max_size
    return (shorter, longer) if height <= width else (longer, shorter)


def crop(image: Any, top: int, left: int, height: int, width: int) -> Any:
    """A part of an image; what lies outside of it is black."""
    if is_pil(image):
        return pillow.crop(image, top, left, height, width)
    _, rows, columns = dimensions(image)
    fits = top >= 0 and left >= 0 and top + height <= rows and left + width <= columns
    if fits and isinstance(image, torch.Tensor):
        return image[..., top : top + height, left : left + width]
    return on_arrays(image, arrays.crop, top, left, height, width)


def center_crop(image: Any, output_size: int | Sequence[int]) -> Any:
    """The middle of an image, with a black border where it is smaller."""
    height, width = _pair(output_size)
    _, rows, columns = dimensions(image)
    if height > rows or width > columns:
        across, down = max(width - columns, 0), max(height - rows, 0)
        border = [across // 2, down // 2, (across + 1) // 2, (down + 1) // 2]
        image = pad(image, border)
        _, rows, columns = dimensions(image)
    return crop(image, round((rows - height) / 2.0), round((columns - width) / 2.0), height, width)


def five_crop(image: Any, size: int | Sequence[int]) -> tuple:
    """The four corners (top left, top right, bottom left, bottom right) and the middle."""
    height, width = _pair(size)
    _, rows, columns = dimensions(image)
    if height > rows or width > columns:
        raise UsageError(f"size {(height, width)} is larger than the image of {(rows, columns)}")
    corners = [(0, 0), (0, columns - width), (rows - height, 0), (rows - height, columns - width)]
    crops = [crop(image, top, left, height, width) for top, left in corners]
    return (*crops, center_crop(image, (height, width)))


def ten_crop(image: Any, size: int | Sequence[int], vertical_flip: bool = False) -> tuple:
    """:func:`five_crop` of an image and of its mirror image."""
    mirrored = vflip(image) if vertical_flip else hflip(image)
    return five_crop(image, size) + five_crop(mirrored, size)


def resized_crop(
    image: Any,
    top: int,
    left: int,
    height: int,
    width: int,
    size: int | Sequence[int],
    interpolation: Any = InterpolationMode.BILINEAR,
    antialias: bool | None = True,
) -> Any:
    """:func:`crop`, then :func:`resize`."""
    part = crop(image, top, left, height, width)
    return resize(part, size, interpolation, antialias=antialias)


def pad(
    image: Any, padding: int | Sequence[int], fill: Any = 0, padding_mode: str = "constant"
) -> Any:
    """Add a border.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
    padding : int or sequence of 1, 2 or 4 ints
        On all sides; left and right, top and bottom; left, top, right, bottom. A negative one
        cuts.
    fill : number or sequence
        The value of the border, or one for each channel.
    padding_mode : str
        ``"constant"``, ``"edge"``, ``"reflect"`` (without the edge) or ``"symmetric"`` (with it).
    """
    if padding_mode not in arrays.PADDING_MODES:
        raise UsageError(
            f"padding_mode must be one of {', '.join(arrays.PADDING_MODES)}, not {padding_mode!r}"
        )
    sides = [padding] if isinstance(padding, int) else list(padding)
    if len(sides) not in (1, 2, 4):
        raise UsageError(f"padding must be an int or have 1, 2 or 4 of them, but it is {padding!r}")
    sides = (sides * 4)[:4]
    return on_arrays(image, arrays.pad, *sides, fill, padding_mode)


def hflip(image: Any) -> Any:
    """Left and right changed."""
    if isinstance(image, torch.Tensor):
        return image.flip(-1)
    return pillow.hflip(image) if is_pil(image) else on_arrays(image, arrays.hflip)


def vflip(image: Any) -> Any:
    """Top and bottom changed."""
    if isinstance(image, torch.Tensor):
        return image.flip(-2)
    return pillow.vflip(image) if is_pil(image) else on_arrays(image, arrays.vflip)


def _warp(image: Any, inverse: np.ndarray, size: tuple[int, int], mode: Any, fill: Any) -> Any:
    mode = interpolation_mode(mode)
    if is_pil(image):
        return pillow.warp(image, inverse, size, mode, fill)
    return on_arrays(image, arrays.warp, inverse, size, mode, fill)


def rotate(
    image: Any,
    angle: float,
    interpolation: Any = InterpolationMode.NEAREST,
    expand: bool = False,
    center: Sequence[float] | None = None,
    fill: Any = None,
) -> Any:
    """Turn an image counter-clockwise.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
    angle : float
        Degrees.
    interpolation : InterpolationMode
        Nearest, bilinear or bicubic.
    expand : bool
        Make the result large enough for all of the image.
    center : (float, float), optional
        Column and row that stay where they are; the middle by default.
    fill : number or sequence, optional
        What lies outside of the image.
    """
    _, height, width = dimensions(image)
    x, y = (width / 2, height / 2) if center is None else center
    turn = math.radians(angle)
    cos, sin = math.cos(turn), math.sin(turn)
    # Rows grow downwards: what turns counter-clockwise on the screen turns clockwise in numbers.
    inverse = _move(x, y) @ np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]]) @ _move(-x, -y)
    size = (height, width)
    if expand:
        corners = np.array([[0, width, width, 0], [0, 0, height, height], [1, 1, 1, 1]])
        places = np.round((np.linalg.inv(inverse) @ corners)[:2], 9)
        columns, rows = np.ceil(places.max(1)) - np.floor(places.min(1))
        size = (int(rows), int(columns))
        inverse = inverse @ _move((width - columns) / 2, (height - rows) / 2)
    return _warp(image, inverse, size, interpolation, fill)


def _move(x: float, y: float) -> np.ndarray:
    return np.array([[1, 0, x], [0, 1, y], [0, 0, 1]], dtype=float)


def affine(
    image: Any,
    angle: float,
    translate: Sequence[float],
    scale: float,
    shear: float | Sequence[float],
    interpolation: Any = InterpolationMode.NEAREST,
    fill: Any = None,
    center: Sequence[float] | None = None,
) -> Any:
    """Turn, move, scale and shear an image; its size stays.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
    angle : float
        Degrees, clockwise.
    translate : (float, float)
        Pixels to the right and below.
    scale : float
    shear : float or (float, float)
        Degrees along the rows, and along the columns.
    interpolation, fill, center
        As of :func:`rotate`.
    """
    if scale <= 0:
        raise UsageError(f"scale must be positive, but it is {scale}")
    _, height, width = dimensions(image)
    x, y = (width / 2, height / 2) if center is None else center
    along, down = (shear, 0.0) if isinstance(shear, Number) else (*shear, 0.0)[:2]
    turn, along, down = (math.radians(value) for value in (angle, along, down))
    rotation = np.array(
        [[math.cos(turn), -math.sin(turn), 0], [math.sin(turn), math.cos(turn), 0], [0, 0, 1]]
    )
    shear_down = np.array([[1, 0, 0], [-math.tan(down), 1, 0], [0, 0, 1]])
    shear_along = np.array([[1, -math.tan(along), 0], [0, 1, 0], [0, 0, 1]])
    shape = rotation @ shear_down @ shear_along @ np.diag([scale, scale, 1])
    forward = _move(x + translate[0], y + translate[1]) @ shape @ _move(-x, -y)
    return _warp(image, np.linalg.inv(forward), (height, width), interpolation, fill)


def perspective(
    image: Any,
    startpoints: Sequence[Sequence[int]],
    endpoints: Sequence[Sequence[int]],
    interpolation: Any = InterpolationMode.BILINEAR,
    fill: Any = None,
) -> Any:
    """The image seen from elsewhere: four points, ``(column, row)``, move to four others."""
    rows, values = [], []
    for (u, v), (x, y) in zip(startpoints, endpoints, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        values += [u, v]
    solved = np.linalg.solve(np.array(rows, dtype=float), np.array(values, dtype=float))
    inverse = np.append(solved, 1).reshape(3, 3)
    return _warp(image, inverse, tuple(dimensions(image)[1:]), interpolation, fill)


def gaussian_blur(
    image: Any, kernel_size: int | Sequence[int], sigma: float | Sequence[float] | None = None
) -> Any:
    """Blur by a normal distribution; edges are mirrored.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
    kernel_size : int or (int, int)
        Odd; width and height.
    sigma : float or (float, float), optional
        Standard deviations in pixels; by default 0.15 of the kernel's size, plus 0.35.
    """
    kernel = _pair(kernel_size)
    if any(size <= 0 or size % 2 == 0 for size in kernel):
        raise UsageError(f"kernel_size must be odd and positive, but it is {kernel_size!r}")
    if sigma is None:
        sigma = [0.15 * size + 0.35 for size in kernel]
    sigma = [float(value) for value in (sigma if isinstance(sigma, Sequence) else [sigma])]
    sigma = sigma * 2 if len(sigma) == 1 else sigma
    if min(sigma) <= 0:
        raise UsageError(f"sigma must be positive, but it is {sigma}")
    return on_arrays(image, arrays.gaussian_blur, kernel, sigma)


def elastic_transform(
    image: Any,
    displacement: torch.Tensor,
    interpolation: Any = InterpolationMode.BILINEAR,
    fill: Any = 0,
) -> Any:
    """Move each pixel.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
    displacement : Tensor (1, H, W, 2)
        Where each pixel is taken from, relative to its own place, to the right and below, where
        the image is 2 wide and 2 high.
    interpolation : InterpolationMode
        Nearest, bilinear or bicubic.
    fill : number or sequence
        What lies outside of the image.
    """
    _, height, width = dimensions(image)
    shape = (1, height, width, 2)
    if tuple(displacement.shape) != shape:
        raise UsageError(f"displacement must be {shape}, but it is {tuple(displacement.shape)}")
    shifts = displacement[0].numpy() * np.array([width / 2, height / 2], dtype=np.float32)
    mode = interpolation_mode(interpolation)
    return on_arrays(image, arrays.displace, shifts.astype(np.float32), mode, fill)


def erase(
    image: torch.Tensor, i: int, j: int, h: int, w: int, v: Any, inplace: bool = False
) -> torch.Tensor:
    """Overwrite `h` rows and `w` columns of a tensor, from row `i` and column `j` on, by `v`."""
    if not isinstance(image, torch.Tensor):
        raise UsageError(f"erase needs a tensor, not a {type(image).__name__}; ToTensor first")
    image = image if inplace else image.clone()
    image[..., i : i + h, j : j + w] = v
    return image


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(size, Number):
        return int(size), int(size)
    first, *rest = size
    return int(first), int(rest[0] if rest else first)
