"""Sizes and borders of images: resize, crop, pad and flip, as operations and as transforms.

Results equal Pillow's, but for rounding where the documentation says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from bigdl.common.checks import check_choice
from bigdl.common.errors import UsageError, require
from bigdl.nano.pytorch.vision.transforms.base import (
    Compose,
    RandomTransform,
    Transform,
    random_below,
    random_uniform,
)
from bigdl.nano.pytorch.vision.transforms.images import (
    OF_PILLOW,
    Fill,
    ImageT,
    InterpolationMode,
    Size,
    dimensions,
    fill_of_opencv,
    interpolation_mode,
    is_pil,
    on_arrays,
    require_bytes,
    to_pil,
    two_lengths,
    with_channels_of,
)

__all__ = [
    "CenterCrop",
    "FiveCrop",
    "Pad",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomVerticalFlip",
    "Resize",
    "TenCrop",
    "center_crop",
    "crop",
    "five_crop",
    "get_dimensions",
    "get_image_size",
    "hflip",
    "pad",
    "resize",
    "resized_crop",
    "ten_crop",
    "vflip",
]

cv2 = require("cv2", "nano")

_OF_TORCH = {InterpolationMode.BILINEAR: "bilinear", InterpolationMode.BICUBIC: "bicubic"}
_BORDERS = {
    "constant": cv2.BORDER_CONSTANT,
    "edge": cv2.BORDER_REPLICATE,
    "reflect": cv2.BORDER_REFLECT_101,
    "symmetric": cv2.BORDER_REFLECT,
}


def get_dimensions(image: Any) -> list[int]:
    """Return channels, height and width."""
    return list(dimensions(image))


def get_image_size(image: Any) -> list[int]:
    """Return width and height."""
    _, height, width = dimensions(image)
    return [width, height]


def resize(
    image: ImageT,
    size: Size,
    interpolation: InterpolationMode | str | int = InterpolationMode.BILINEAR,
    max_size: int | None = None,
    antialias: bool | None = True,
) -> ImageT:
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
    now = dimensions(image)[1:]
    size = resized_to(now, size, max_size)
    mode = interpolation_mode(interpolation)
    if size == now:
        return image
    if is_pil(image):
        return image.resize(size[::-1], OF_PILLOW[mode])
    return on_arrays(image, _resize, size, mode, antialias is not False)


def _resize(
    image: np.ndarray, size: tuple[int, int], mode: InterpolationMode, antialias: bool
) -> np.ndarray:
    """Resize by Pillow's filters, which widen with the factor of the reduction.

    torch has kernels for bytes whose weights are Pillow's in fixed point (of Pillow-SIMD), several
    times as fast as Pillow; OpenCV has none that widen.
    """
    if mode.value.startswith("nearest"):
        return image[_nearest(image.shape[0], size[0])[:, None], _nearest(image.shape[1], size[1])]
    if mode not in _OF_TORCH:
        return np.asarray(to_pil(require_bytes(image, mode)).resize(size[::-1], OF_PILLOW[mode]))
    tensor = torch.from_numpy(np.ascontiguousarray(image))
    tensor = tensor.view(1, *image.shape[:2], -1).permute(0, 3, 1, 2)
    tensor = torch.nn.functional.interpolate(
        tensor, size, mode=_OF_TORCH[mode], antialias=antialias, align_corners=False
    )
    return tensor[0].permute(1, 2, 0).numpy().reshape(*size, *image.shape[2:])


def _nearest(before: int, after: int) -> np.ndarray:
    """Return the row that each row is taken from: the one in which its centre lies."""
    return ((np.arange(after) + 0.5) * (before / after)).astype(np.intp)


def resized_to(now: Sequence[int], size: Size, max_size: int | None = None) -> tuple[int, int]:
    """Return height and width after `resize` of an image of this height and width."""
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


def crop(image: ImageT, top: int, left: int, height: int, width: int) -> ImageT:
    """Return a part of an image; what lies outside of it is black."""
    if is_pil(image):
        return image.crop((left, top, left + width, top + height))
    _, rows, columns = dimensions(image)
    fits = top >= 0 and left >= 0 and top + height <= rows and left + width <= columns
    if fits and isinstance(image, torch.Tensor):
        return image[..., top : top + height, left : left + width]
    return on_arrays(image, _crop, top, left, height, width)


def _crop(image: np.ndarray, top: int, left: int, height: int, width: int) -> np.ndarray:
    rows, columns = image.shape[:2]
    inside = image[max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)]
    if top >= 0 and left >= 0 and top + height <= rows and left + width <= columns:
        return inside
    canvas = np.zeros((height, width, *image.shape[2:]), image.dtype)
    canvas[max(-top, 0) :, max(-left, 0) :][: inside.shape[0], : inside.shape[1]] = inside
    return canvas


def center_crop(image: ImageT, output_size: Size) -> ImageT:
    """Return the middle of an image, with a black border where it is smaller."""
    height, width = two_lengths(output_size)
    _, rows, columns = dimensions(image)
    if height > rows or width > columns:
        across, down = max(width - columns, 0), max(height - rows, 0)
        border = [across // 2, down // 2, (across + 1) // 2, (down + 1) // 2]
        image = pad(image, border)
        _, rows, columns = dimensions(image)
    return crop(image, round((rows - height) / 2.0), round((columns - width) / 2.0), height, width)


def five_crop(image: ImageT, size: Size) -> tuple[ImageT, ...]:
    """Return the four corners (top left, top right, bottom left, bottom right) and the middle."""
    height, width = two_lengths(size)
    _, rows, columns = dimensions(image)
    if height > rows or width > columns:
        raise UsageError(f"size {(height, width)} is larger than the image of {(rows, columns)}")
    corners = [(0, 0), (0, columns - width), (rows - height, 0), (rows - height, columns - width)]
    crops = [crop(image, top, left, height, width) for top, left in corners]
    crops.append(center_crop(image, (height, width)))
    return tuple(crops)


def ten_crop(image: ImageT, size: Size, vertical_flip: bool = False) -> tuple[ImageT, ...]:
    """Apply :func:`five_crop` to an image and to its mirror image."""
    mirrored = vflip(image) if vertical_flip else hflip(image)
    return five_crop(image, size) + five_crop(mirrored, size)


def resized_crop(
    image: ImageT,
    top: int,
    left: int,
    height: int,
    width: int,
    size: Size,
    interpolation: InterpolationMode | str | int = InterpolationMode.BILINEAR,
    antialias: bool | None = True,
) -> ImageT:
    """Apply :func:`crop`, then :func:`resize`."""
    part = crop(image, top, left, height, width)
    return resize(part, size, interpolation, antialias=antialias)


def pad(image: ImageT, padding: Size, fill: Fill = 0, padding_mode: str = "constant") -> ImageT:
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
    check_choice("padding_mode", padding_mode, _BORDERS)
    sides = [padding] if isinstance(padding, int) else list(padding)
    if len(sides) not in (1, 2, 4):
        raise UsageError(f"padding must be an int or have 1, 2 or 4 of them, but it is {padding!r}")
    sides = (sides * 4)[:4]
    return on_arrays(image, _pad, *sides, fill, padding_mode)


def _pad(
    image: np.ndarray, left: int, top: int, right: int, bottom: int, fill: Fill, mode: str
) -> np.ndarray:
    """Add a border; a negative width cuts."""
    rows, columns = image.shape[:2]
    if min(left, top, right, bottom) < 0:
        image = image[max(-top, 0) : rows + min(bottom, 0), max(-left, 0) : columns + min(right, 0)]
        left, top, right, bottom = (max(width, 0) for width in (left, top, right, bottom))
    padded = cv2.copyMakeBorder(
        image, top, bottom, left, right, _BORDERS[mode], value=fill_of_opencv(image, fill)
    )
    return with_channels_of(padded, image)


def hflip(image: ImageT) -> ImageT:
    """Mirror left and right."""
    if is_pil(image):
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if isinstance(image, torch.Tensor):
        return image.flip(-1)
    return on_arrays(image, lambda array: np.ascontiguousarray(array[:, ::-1]))


def vflip(image: ImageT) -> ImageT:
    """Mirror top and bottom."""
    if is_pil(image):
        return image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    if isinstance(image, torch.Tensor):
        return image.flip(-2)
    return on_arrays(image, lambda array: np.ascontiguousarray(array[::-1]))


def _lengths(size: Size) -> tuple[int, int]:
    """Return height and width of a size that is checked."""
    values = [size] if isinstance(size, int) else list(size)
    if len(values) not in (1, 2) or not all(isinstance(v, int) and v > 0 for v in values):
        raise UsageError(f"size must be a positive int or two, but it is {size!r}")
    return values[0], values[-1]


class Resize(Transform):
    """Make images larger or smaller. Parameters as of :func:`~.functional.resize`."""

    def __init__(
        self,
        size: Size,
        interpolation: InterpolationMode | str | int = InterpolationMode.BILINEAR,
        max_size: int | None = None,
        antialias: bool | None = True,
    ):
        super().__init__()
        _lengths(size)
        resized_to((1, 1), size, max_size)
        self.size, self.max_size, self.antialias = size, max_size, antialias
        self.interpolation = interpolation_mode(interpolation)

    def forward(self, image: Any) -> Any:
        return resize(image, self.size, self.interpolation, self.max_size, self.antialias)


class CenterCrop(Transform):
    """The middle of images."""

    def __init__(self, size: Size):
        super().__init__()
        self.size = _lengths(size)

    def forward(self, image: Any) -> Any:
        return center_crop(image, self.size)


class FiveCrop(Transform):
    """Four corners and the middle: a tuple of five images."""

    def __init__(self, size: Size):
        super().__init__()
        self.size = _lengths(size)

    def forward(self, image: Any) -> tuple:
        return five_crop(image, self.size)


class TenCrop(Transform):
    """:class:`FiveCrop` of an image and of its mirror image."""

    def __init__(self, size: Size, vertical_flip: bool = False):
        super().__init__()
        self.size, self.vertical_flip = _lengths(size), vertical_flip

    def forward(self, image: Any) -> tuple:
        return ten_crop(image, self.size, self.vertical_flip)


class Pad(Transform):
    """Add a border. Parameters as of :func:`~.functional.pad`."""

    def __init__(self, padding: Size, fill: Fill = 0, padding_mode: str = "constant"):
        super().__init__()
        self.padding, self.fill, self.padding_mode = padding, fill, padding_mode

    def forward(self, image: Any) -> Any:
        return pad(image, self.padding, self.fill, self.padding_mode)


class RandomCrop(Transform):
    """A random part of images.

    Parameters
    ----------
    size : int or (int, int)
        Height and width.
    padding : int or sequence, optional
        A border that is added before.
    pad_if_needed : bool
        Add a border to an image that is smaller.
    fill, padding_mode
        As of :class:`Pad`.
    """

    random = True

    def __init__(
        self,
        size: Size,
        padding: Size | None = None,
        pad_if_needed: bool = False,
        fill: Fill = 0,
        padding_mode: str = "constant",
    ):
        super().__init__()
        self.size = _lengths(size)
        self.padding, self.pad_if_needed = padding, pad_if_needed
        self.fill, self.padding_mode = fill, padding_mode

    def forward(self, image: Any) -> Any:
        if self.padding is not None:
            image = pad(image, self.padding, self.fill, self.padding_mode)
        height, width = self.size
        _, rows, columns = dimensions(image)
        if self.pad_if_needed and (rows < height or columns < width):
            across, down = max(width - columns, 0), max(height - rows, 0)
            image = pad(image, [across, down], self.fill, self.padding_mode)
            _, rows, columns = dimensions(image)
        if rows < height or columns < width:
            raise UsageError(
                f"A crop of {(height, width)} does not fit into an image of {(rows, columns)}; "
                "Resize before, or pass pad_if_needed=True"
            )
        top, left = random_below(rows - height + 1), random_below(columns - width + 1)
        return crop(image, top, left, height, width)


class RandomResizedCrop(Transform):
    """A random part of images, resized (Szegedy et al. 2014).

    Parameters
    ----------
    size : int or (int, int)
        Height and width of the result.
    scale : (float, float)
        Range of the part's share of the image.
    ratio : (float, float)
        Range of its width divided by its height.
    interpolation, antialias
        As of :class:`Resize`.
    """

    random = True

    def __init__(
        self,
        size: Size,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: InterpolationMode | str | int = InterpolationMode.BILINEAR,
        antialias: bool | None = True,
    ):
        super().__init__()
        self.size, self.scale, self.ratio, self.antialias = _lengths(size), scale, ratio, antialias
        self.interpolation = interpolation_mode(interpolation)

    def part(self, rows: int, columns: int) -> tuple[int, int, int, int]:
        """Top, left, height and width of the part; the middle if no draw fits in ten."""
        for _ in range(10):
            area = rows * columns * random_uniform(*self.scale)
            ratio = math.exp(random_uniform(*map(math.log, self.ratio)))
            height, width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < height <= rows and 0 < width <= columns:
                top, left = random_below(rows - height + 1), random_below(columns - width + 1)
                return top, left, height, width
        ratio = min(max(columns / rows, min(self.ratio)), max(self.ratio))
        height, width = min(rows, round(columns / ratio)), min(columns, round(rows * ratio))
        return (rows - height) // 2, (columns - width) // 2, height, width

    def forward(self, image: Any) -> Any:
        part = self.part(*dimensions(image)[1:])
        return resized_crop(image, *part, self.size, self.interpolation, self.antialias)


class RandomHorizontalFlip(RandomTransform):
    """Mirror left and right with probability `p`."""

    scale_free = True

    def changed(self, image: Any) -> Any:
        return hflip(image)


class RandomVerticalFlip(RandomTransform):
    """Mirror top and bottom with probability `p`."""

    scale_free = True

    def changed(self, image: Any) -> Any:
        return vflip(image)


def size_that_suffices(transform: Any) -> Callable[[int, int], tuple[int, int]] | None:
    """Return the size to which an image is made smaller before all that depends on its size.

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
    for step in transform.transforms if isinstance(transform, Compose) else [transform]:
        if type(step) is Resize and step.antialias and step.interpolation in _OF_TORCH:
            return lambda *lengths: resized_to(lengths, step.size, step.max_size)
        if not vars(type(step)).get("scale_free"):  # not inherited: a subclass may do more
            return None
    return None
