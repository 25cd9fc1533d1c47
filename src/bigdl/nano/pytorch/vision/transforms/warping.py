"""Rotations, affine and projective maps and displacements of images: operations and transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from bigdl.common.checks import check_number
from bigdl.common.errors import UsageError, require
from bigdl.nano.pytorch.vision.transforms.base import (
    RandomTransform,
    Transform,
    random_below,
    random_noise,
    random_uniform,
)
from bigdl.nano.pytorch.vision.transforms.color import gaussian_blur
from bigdl.nano.pytorch.vision.transforms.images import (
    OF_PILLOW,
    Fill,
    ImageT,
    InterpolationMode,
    dimensions,
    fill_of_opencv,
    fill_values,
    interpolation_mode,
    is_number,
    is_pil,
    on_arrays,
    with_channels_of,
)

__all__ = [
    "ElasticTransform",
    "RandomAffine",
    "RandomPerspective",
    "RandomRotation",
    "affine",
    "elastic_transform",
    "perspective",
    "rotate",
]

cv2 = require("cv2", "nano")

_OF_OPENCV = {
    InterpolationMode.NEAREST: cv2.INTER_NEAREST,
    InterpolationMode.NEAREST_EXACT: cv2.INTER_NEAREST,
    InterpolationMode.BILINEAR: cv2.INTER_LINEAR,
    InterpolationMode.BICUBIC: cv2.INTER_CUBIC,
}


def rotate(
    image: ImageT,
    angle: float,
    interpolation: InterpolationMode | str | int = InterpolationMode.NEAREST,
    expand: bool = False,
    center: Sequence[float] | None = None,
    fill: Fill = None,
) -> ImageT:
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


def affine(
    image: ImageT,
    angle: float,
    translate: Sequence[float],
    scale: float,
    shear: float | Sequence[float],
    interpolation: InterpolationMode | str | int = InterpolationMode.NEAREST,
    fill: Fill = None,
    center: Sequence[float] | None = None,
) -> ImageT:
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
    check_number("scale", scale, above=0)
    _, height, width = dimensions(image)
    x, y = (width / 2, height / 2) if center is None else center
    along, down = (*((shear,) if is_number(shear) else shear), 0.0)[:2]
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
    image: ImageT,
    startpoints: Sequence[Sequence[int]],
    endpoints: Sequence[Sequence[int]],
    interpolation: InterpolationMode | str | int = InterpolationMode.BILINEAR,
    fill: Fill = None,
) -> ImageT:
    """Return the image seen from elsewhere: four points, ``(column, row)``, move to four others."""
    rows, values = [], []
    for (u, v), (x, y) in zip(startpoints, endpoints, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        values += [u, v]
    solved = np.linalg.solve(np.array(rows, dtype=float), np.array(values, dtype=float))
    inverse = np.append(solved, 1).reshape(3, 3)
    _, height, width = dimensions(image)
    return _warp(image, inverse, (height, width), interpolation, fill)


def _move(x: float, y: float) -> np.ndarray:
    return np.array([[1, 0, x], [0, 1, y], [0, 0, 1]], dtype=float)


def _warp(image: Any, inverse: np.ndarray, size: tuple[int, int], mode: Any, fill: Fill) -> Any:
    """Return the image seen through a projective map.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
    inverse : ndarray (3, 3)
        From places of the result to places of the image, where the centre of the first pixel
        lies at 0.5.
    size : tuple of int
        Height and width of the result.
    mode : InterpolationMode
    fill : number, sequence or None
        What lies outside of the image.
    """
    mode = interpolation_mode(mode)
    if is_pil(image):
        return _warp_pil(image, inverse, size, mode, fill)
    return on_arrays(image, _warp_array, inverse, size, mode, fill)


def _warp_pil(
    image: Image.Image,
    inverse: np.ndarray,
    size: tuple[int, int],
    mode: InterpolationMode,
    fill: Fill,
) -> Image.Image:
    coefficients = (inverse / inverse[2, 2]).ravel()
    affine = np.allclose(coefficients[6:8], 0, atol=1e-12)
    # The fill as Pillow wants it: one number, or as many as the image has bands.
    bands = len(image.getbands())
    values = fill_values(fill)
    if image.mode not in ("F", "I"):
        values = [int(value) for value in values]
    return image.transform(
        size[::-1],
        Image.Transform.AFFINE if affine else Image.Transform.PERSPECTIVE,
        coefficients[: 6 if affine else 8].tolist(),
        OF_PILLOW[mode],
        fillcolor=values[0] if bands == 1 else tuple(values * (bands // len(values))),
    )


def _warp_array(
    image: np.ndarray,
    inverse: np.ndarray,
    size: tuple[int, int],
    mode: InterpolationMode,
    fill: Fill,
) -> np.ndarray:
    flag = _flag_of_opencv(mode)
    # OpenCV's first pixel has its centre at 0.
    shift = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    matrix = np.linalg.inv(shift) @ inverse @ shift
    if flag == cv2.INTER_NEAREST:
        matrix[:2] += 1e-6 * matrix[2]  # a tie goes to the pixel after it, as in Pillow
    arguments = (matrix, size[::-1])
    sampled = cv2.warpPerspective(
        np.ascontiguousarray(image),
        *arguments,
        flags=flag | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REPLICATE,
    )
    # As in Pillow a pixel is of the image or outside of it; the two are not mixed.
    inside = cv2.warpPerspective(
        np.ones(image.shape[:2], np.uint8),
        *arguments,
        flags=cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP,
    )
    sampled = with_channels_of(sampled, image)
    sampled[inside == 0] = fill_of_opencv(image, fill)[: image.shape[2] if image.ndim == 3 else 1]
    return sampled


def _flag_of_opencv(mode: InterpolationMode) -> int:
    if mode not in _OF_OPENCV:
        raise UsageError(
            f"interpolation must be NEAREST, BILINEAR or BICUBIC here, not {mode.name}"
        )
    return _OF_OPENCV[mode]


def elastic_transform(
    image: ImageT,
    displacement: torch.Tensor,
    interpolation: InterpolationMode | str | int = InterpolationMode.BILINEAR,
    fill: Fill = 0,
) -> ImageT:
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
    flag = _flag_of_opencv(interpolation_mode(interpolation))
    return on_arrays(image, _displace, shifts.astype(np.float32), flag, fill)


def _displace(image: np.ndarray, shifts: np.ndarray, flag: int, fill: Fill) -> np.ndarray:
    """Take each pixel from another place, by `shifts` to the right and below, in pixels."""
    rows, columns = image.shape[:2]
    x = shifts[:, :, 0] + np.arange(columns, dtype=np.float32)
    y = shifts[:, :, 1] + np.arange(rows, dtype=np.float32)[:, None]
    moved = cv2.remap(
        np.ascontiguousarray(image),
        x,
        y,
        flag,
        borderMode=cv2.BORDER_CONSTANT,
        borderValue=fill_of_opencv(image, fill),
    )
    return with_channels_of(moved, image)


def _range(value: float | Sequence[float], name: str) -> tuple[float, float]:
    """Return a range of angles; one number stands for minus that to that."""
    if is_number(value):
        check_number(name, value, 0)
        return -float(value), float(value)
    if len(value) != 2:
        raise UsageError(f"{name} must be a number or a range of two, but it is {value!r}")
    return float(value[0]), float(value[1])


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
        interpolation: InterpolationMode | str | int = InterpolationMode.NEAREST,
        expand: bool = False,
        center: Sequence[float] | None = None,
        fill: Fill = 0,
    ):
        super().__init__()
        self.degrees = _range(degrees, "degrees")
        self.interpolation = interpolation_mode(interpolation)
        self.expand, self.center, self.fill = expand, center, fill

    def forward(self, image: Any) -> Any:
        angle = random_uniform(*self.degrees)
        return rotate(image, angle, self.interpolation, self.expand, self.center, self.fill)


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
        interpolation: InterpolationMode | str | int = InterpolationMode.NEAREST,
        fill: Fill = 0,
        center: Sequence[float] | None = None,
    ):
        super().__init__()
        self.degrees = _range(degrees, "degrees")
        if translate is not None and not all(0 <= share <= 1 for share in translate):
            raise UsageError(f"translate must be two shares in 0…1, but it is {translate!r}")
        if scale is not None and min(scale) <= 0:
            raise UsageError(f"scale must be a range of positive factors, but it is {scale!r}")
        if shear is not None and not is_number(shear) and len(shear) == 4:
            shear = tuple(map(float, shear))
        elif shear is not None:
            shear = _range(shear, "shear")
        self.translate, self.scale, self.shear = translate, scale, shear
        self.interpolation = interpolation_mode(interpolation)
        self.fill, self.center = fill, center

    def forward(self, image: Any) -> Any:
        _, height, width = dimensions(image)
        angle = random_uniform(*self.degrees)
        moved: tuple[float, ...] = (0, 0)
        if self.translate is not None:
            limits = (self.translate[0] * width, self.translate[1] * height)
            moved = tuple(round(random_uniform(-limit, limit)) for limit in limits)
        scale = 1.0 if self.scale is None else random_uniform(*self.scale)
        shear = [0.0, 0.0]
        if self.shear is not None:
            for axis in range(len(self.shear) // 2):
                shear[axis] = random_uniform(*self.shear[2 * axis : 2 * axis + 2])
        return affine(image, angle, moved, scale, shear, self.interpolation, self.fill, self.center)


class RandomPerspective(RandomTransform):
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

    def __init__(
        self,
        distortion_scale: float = 0.5,
        p: float = 0.5,
        interpolation: InterpolationMode | str | int = InterpolationMode.BILINEAR,
        fill: Fill = 0,
    ):
        super().__init__(p)
        self.distortion_scale = check_number("distortion_scale", distortion_scale, 0, 1)
        self.fill = fill
        self.interpolation = interpolation_mode(interpolation)

    def changed(self, image: Any) -> Any:
        _, height, width = dimensions(image)
        across = int(self.distortion_scale * (width // 2))
        down = int(self.distortion_scale * (height // 2))
        right, bottom = width - 1, height - 1
        start = [[0, 0], [right, 0], [right, bottom], [0, bottom]]
        # Inwards from the left and from the right.
        end = [
            [abs(x - random_below(across + 1)), abs(y - random_below(down + 1))] for x, y in start
        ]
        return perspective(image, start, end, self.interpolation, self.fill)


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
        interpolation: InterpolationMode | str | int = InterpolationMode.BILINEAR,
        fill: Fill = 0,
    ):
        super().__init__()
        self.alpha = [alpha, alpha] if is_number(alpha) else list(alpha)
        self.sigma = [sigma, sigma] if is_number(sigma) else list(sigma)
        self.interpolation, self.fill = interpolation_mode(interpolation), fill

    def displacement(self, height: int, width: int) -> torch.Tensor:
        """Displacements ``(1, height, width, 2)`` of one draw."""
        shifts = []
        for alpha, sigma, length in zip(self.alpha, self.sigma, (height, width), strict=True):
            field = random_noise((1, height, width)) * 2 - 1
            if sigma > 0:
                field = gaussian_blur(field, 8 * int(sigma) + 1, sigma)
            shifts.append(field * (alpha / length))
        return torch.stack(shifts, dim=-1)

    def forward(self, image: Any) -> Any:
        _, height, width = dimensions(image)
        shifts = self.displacement(height, width)
        return elastic_transform(image, shifts, self.interpolation, self.fill)
