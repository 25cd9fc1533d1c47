"""Transforms of the shape of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Number
from typing import Any

import torch

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.vision.transforms import draws
from bigdl.nano.pytorch.vision.transforms import functional as F
from bigdl.nano.pytorch.vision.transforms.base import Transform
from bigdl.nano.pytorch.vision.transforms.kinds import (
    InterpolationMode,
    dimensions,
    interpolation_mode,
)

__all__ = [
    "CenterCrop",
    "ElasticTransform",
    "FiveCrop",
    "Pad",
    "RandomAffine",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomPerspective",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomVerticalFlip",
    "Resize",
    "TenCrop",
]


def _lengths(size: int | Sequence[int], name: str = "size") -> tuple[int, int]:
    """Height and width of a size."""
    values = [size] if isinstance(size, int) else list(size)
    if len(values) not in (1, 2) or not all(isinstance(v, int) and v > 0 for v in values):
        raise UsageError(f"{name} must be a positive int or two, but it is {size!r}")
    return values[0], values[-1]


def _range(value: float | Sequence[float], name: str) -> tuple[float, float]:
    """A range of angles; one number stands for minus that to that."""
    if isinstance(value, Number):
        if value < 0:
            raise UsageError(f"{name} as one number must not be negative, but it is {value}")
        return -float(value), float(value)
    if len(value) != 2:
        raise UsageError(f"{name} must be a number or a range of two, but it is {value!r}")
    return float(value[0]), float(value[1])


class Resize(Transform):
    """Make images larger or smaller. Parameters as of :func:`~.functional.resize`."""

    def __init__(
        self,
        size: int | Sequence[int],
        interpolation: Any = InterpolationMode.BILINEAR,
        max_size: int | None = None,
        antialias: bool | None = True,
    ):
        super().__init__()
        _lengths(size)
        F.resized_to((1, 1), size, max_size)
        self.size, self.max_size, self.antialias = size, max_size, antialias
        self.interpolation = interpolation_mode(interpolation)

    def forward(self, image: Any) -> Any:
        return F.resize(image, self.size, self.interpolation, self.max_size, self.antialias)


class CenterCrop(Transform):
    """The middle of images."""

    def __init__(self, size: int | Sequence[int]):
        super().__init__()
        self.size = _lengths(size)

    def forward(self, image: Any) -> Any:
        return F.center_crop(image, self.size)


class FiveCrop(Transform):
    """Four corners and the middle: a tuple of five images."""

    def __init__(self, size: int | Sequence[int]):
        super().__init__()
        self.size = _lengths(size)

    def forward(self, image: Any) -> tuple:
        return F.five_crop(image, self.size)


class TenCrop(Transform):
    """:class:`FiveCrop` of an image and of its mirror image."""

    def __init__(self, size: int | Sequence[int], vertical_flip: bool = False):
        super().__init__()
        self.size, self.vertical_flip = _lengths(size), vertical_flip

    def forward(self, image: Any) -> tuple:
        return F.ten_crop(image, self.size, self.vertical_flip)


class Pad(Transform):
    """Add a border. Parameters as of :func:`~.functional.pad`."""

    def __init__(self, padding: int | Sequence[int], fill: Any = 0, padding_mode: str = "constant"):
        super().__init__()
        self.padding, self.fill, self.padding_mode = padding, fill, padding_mode

    def forward(self, image: Any) -> Any:
        return F.pad(image, self.padding, self.fill, self.padding_mode)


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
        size: int | Sequence[int],
        padding: int | Sequence[int] | None = None,
        pad_if_needed: bool = False,
        fill: Any = 0,
        padding_mode: str = "constant",
    ):
        super().__init__()
        self.size = _lengths(size)
        self.padding, self.pad_if_needed = padding, pad_if_needed
        self.fill, self.padding_mode = fill, padding_mode

    def forward(self, image: Any) -> Any:
        if self.padding is not None:
            image = F.pad(image, self.padding, self.fill, self.padding_mode)
        height, width = self.size
        _, rows, columns = dimensions(image)
        if self.pad_if_needed and (rows < height or columns < width):
            across, down = max(width - columns, 0), max(height - rows, 0)
            image = F.pad(image, [across, down], self.fill, self.padding_mode)
            _, rows, columns = dimensions(image)
        if rows < height or columns < width:
            raise UsageError(
                f"A crop of {(height, width)} does not fit into an image of {(rows, columns)}; "
                "Resize before, or pass pad_if_needed=True"
            )
        top, left = draws.below(rows - height + 1), draws.below(columns - width + 1)
        return F.crop(image, top, left, height, width)


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
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: Any = InterpolationMode.BILINEAR,
        antialias: bool | None = True,
    ):
        super().__init__()
        self.size, self.scale, self.ratio, self.antialias = _lengths(size), scale, ratio, antialias
        self.interpolation = interpolation_mode(interpolation)

    def part(self, rows: int, columns: int) -> tuple[int, int, int, int]:
        """Top, left, height and width of the part; the middle if no draw fits in ten."""
        for _ in range(10):
            area = rows * columns * draws.uniform(*self.scale)
            ratio = math.exp(draws.uniform(*map(math.log, self.ratio)))
            height, width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < height <= rows and 0 < width <= columns:
                return (
                    draws.below(rows - height + 1),
                    draws.below(columns - width + 1),
                    height,
                    width,
                )
        ratio = min(max(columns / rows, min(self.ratio)), max(self.ratio))
        height, width = min(rows, round(columns / ratio)), min(columns, round(rows * ratio))
        return (rows - height) // 2, (columns - width) // 2, height, width

    def forward(self, image: Any) -> Any:
        part = self.part(*dimensions(image)[1:])
        return F.resized_crop(image, *part, self.size, self.interpolation, self.antialias)


class _Flip(Transform):
    random = True

    def __init__(self, p: float = 0.5):
        super().__init__()
        self.p = p


class RandomHorizontalFlip(_Flip):
    """Change left and right with probability `p`."""

    def forward(self, image: Any) -> Any:
        return F.hflip(image) if draws.chance(self.p) else image


class RandomVerticalFlip(_Flip):
    """Change top and bottom with probability `p`."""

    def forward(self, image: Any) -> Any:
        return F.vflip(image) if draws.chance(self.p) else image


class RandomRotation(Transform):
    """Turn images by a random angle.

    Parameters
    ----------
    degrees : float or (float, float)
        Range of the angle; one number stands for minus that to that.
    interpolation, expand, center, fill
        As of :func:`~.functional.rotate`.
    """

    random = True

    def __init__(
        self,
        degrees: float | Sequence[float],
        interpolation: Any = InterpolationMode.NEAREST,
        expand: bool = False,
        center: Sequence[float] | None = None,
        fill: Any = 0,
    ):
        super().__init__()
        self.degrees = _range(degrees, "degrees")
        self.interpolation = interpolation_mode(interpolation)
        self.expand, self.center, self.fill = expand, center, fill

    def forward(self, image: Any) -> Any:
        angle = draws.uniform(*self.degrees)
        return F.rotate(image, angle, self.interpolation, self.expand, self.center, self.fill)


class RandomAffine(Transform):
    """Turn, move, scale and shear images at random.

    Parameters
    ----------
    degrees : float or (float, float)
        Range of the angle.
    translate : (float, float), optional
        Largest share of the width and of the height by which they are moved.
    scale : (float, float), optional
        Range of the factor.
    shear : float, (float, float) or 4 floats, optional
        Range of the angle along the rows; along the columns, too, with four.
    interpolation, fill, center
        As of :func:`~.functional.affine`.
    """

    random = True

    def __init__(
        self,
        degrees: float | Sequence[float],
        translate: Sequence[float] | None = None,
        scale: Sequence[float] | None = None,
        shear: float | Sequence[float] | None = None,
        interpolation: Any = InterpolationMode.NEAREST,
        fill: Any = 0,
        center: Sequence[float] | None = None,
    ):
        super().__init__()
        self.degrees = _range(degrees, "degrees")
        if translate is not None and not all(0 <= share <= 1 for share in translate):
            raise UsageError(f"translate must be two shares in 0…1, but it is {translate!r}")
        if scale is not None and min(scale) <= 0:
            raise UsageError(f"scale must be a range of positive factors, but it is {scale!r}")
        if shear is not None and not isinstance(shear, Number) and len(shear) == 4:
            shear = tuple(map(float, shear))
        elif shear is not None:
            shear = _range(shear, "shear")
        self.translate, self.scale, self.shear = translate, scale, shear
        self.interpolation = interpolation_mode(interpolation)
        self.fill, self.center = fill, center

    def forward(self, image: Any) -> Any:
        _, height, width = dimensions(image)
        angle = draws.uniform(*self.degrees)
        moved = (0, 0)
        if self.translate is not None:
            limits = (self.translate[0] * width, self.translate[1] * height)
            moved = tuple(round(draws.uniform(-limit, limit)) for limit in limits)
        scale = 1.0 if self.scale is None else draws.uniform(*self.scale)
        shear = [0.0, 0.0]
        if self.shear is not None:
            for axis in range(len(self.shear) // 2):
                shear[axis] = draws.uniform(*self.shear[2 * axis : 2 * axis + 2])
        return F.affine(
            image, angle, moved, scale, shear, self.interpolation, self.fill, self.center
        )


class RandomPerspective(Transform):
    """See images from a random place.

    Parameters
    ----------
    distortion_scale : float
        How far the corners move at most, as a share of half of the image, in 0…1.
    p : float
        Probability that it is done.
    interpolation, fill
        As of :func:`~.functional.perspective`.
    """

    random = True

    def __init__(
        self,
        distortion_scale: float = 0.5,
        p: float = 0.5,
        interpolation: Any = InterpolationMode.BILINEAR,
        fill: Any = 0,
    ):
        super().__init__()
        if not 0 <= distortion_scale <= 1:
            raise UsageError(f"distortion_scale must be in 0…1, but it is {distortion_scale}")
        self.distortion_scale, self.p, self.fill = distortion_scale, p, fill
        self.interpolation = interpolation_mode(interpolation)

    def forward(self, image: Any) -> Any:
        if not draws.chance(self.p):
            return image
        _, height, width = dimensions(image)
        across = int(self.distortion_scale * (width // 2))
        down = int(self.distortion_scale * (height // 2))
        start = [[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]]
        end = [
            [
                abs(x - draws.below(across + 1)),  # inwards from the left and from the right
                abs(y - draws.below(down + 1)),
            ]
            for x, y in start
        ]
        return F.perspective(image, start, end, self.interpolation, self.fill)


class ElasticTransform(Transform):
    """Move pixels by smooth random displacements (Simard et al. 2003).

    Parameters
    ----------
    alpha : float or (float, float)
        Size of the displacements, to the right and below.
    sigma : float or (float, float)
        How smooth they are: pixels of the normal distribution that they are blurred by.
    interpolation, fill
        As of :func:`~.functional.elastic_transform`.
    """

    random = True

    def __init__(
        self,
        alpha: float | Sequence[float] = 50.0,
        sigma: float | Sequence[float] = 5.0,
        interpolation: Any = InterpolationMode.BILINEAR,
        fill: Any = 0,
    ):
        super().__init__()
        self.alpha = [alpha, alpha] if isinstance(alpha, Number) else list(alpha)
        self.sigma = [sigma, sigma] if isinstance(sigma, Number) else list(sigma)
        self.interpolation, self.fill = interpolation_mode(interpolation), fill

    def displacement(self, height: int, width: int) -> torch.Tensor:
        """Displacements ``(1, height, width, 2)`` of one draw."""
        shifts = []
        for alpha, sigma, length in zip(self.alpha, self.sigma, (height, width), strict=True):
            field = draws.noise((1, height, width)) * 2 - 1
            if sigma > 0:
                field = F.gaussian_blur(field, 8 * int(sigma) + 1, sigma)
            shifts.append(field * (alpha / length))
        return torch.stack(shifts, dim=-1)

    def forward(self, image: Any) -> Any:
        _, height, width = dimensions(image)
        shifts = self.displacement(height, width)
        return F.elastic_transform(image, shifts, self.interpolation, self.fill)
