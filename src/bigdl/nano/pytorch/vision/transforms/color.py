"""Transforms of the colours of images."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from numbers import Number
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.vision.transforms import draws
from bigdl.nano.pytorch.vision.transforms import functional as F
from bigdl.nano.pytorch.vision.transforms.base import Transform
from bigdl.nano.pytorch.vision.transforms.kinds import dimensions

__all__ = [
    "ColorJitter",
    "GaussianBlur",
    "Grayscale",
    "RandomAdjustSharpness",
    "RandomAutocontrast",
    "RandomEqualize",
    "RandomGrayscale",
    "RandomInvert",
    "RandomPosterize",
    "RandomSolarize",
]


class ColorJitter(Transform):
    """Change brightness, contrast, saturation and hue at random, in random order.

    Parameters
    ----------
    brightness, contrast, saturation : float or (float, float)
        Range of the factor; one number stands for ``1 ± number``, never below 0.
    hue : float or (float, float)
        Range of the turn of the wheel of colours, within -0.5…0.5; one number stands for minus
        that to that.
    """

    def __init__(
        self,
        brightness: float | Sequence[float] = 0,
        contrast: float | Sequence[float] = 0,
        saturation: float | Sequence[float] = 0,
        hue: float | Sequence[float] = 0,
    ):
        super().__init__()
        self.brightness = _factors(brightness, "brightness")
        self.contrast = _factors(contrast, "contrast")
        self.saturation = _factors(saturation, "saturation")
        self.hue = _factors(hue, "hue", 0.0, (-0.5, 0.5))

    @property
    def random(self) -> bool:
        return any(self._ranges)

    @property
    def _ranges(self):
        return self.brightness, self.contrast, self.saturation, self.hue

    def forward(self, image: Any) -> Any:
        if not self.random:
            return image
        adjust = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
        for index in draws.permutation(4):
            if self._ranges[index]:
                image = adjust[index](image, draws.uniform(*self._ranges[index]))
        return image


def _factors(
    value: float | Sequence[float],
    name: str,
    center: float = 1.0,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> tuple[float, float] | None:
    """The range of a factor; None if nothing is to be done."""
    if isinstance(value, Number):
        if value < 0:
            raise UsageError(f"{name} as one number must not be negative, but it is {value}")
        low, high = center - value, center + value
        low = max(low, 0.0) if center else low
    else:
        low, high = value
    if not limits[0] <= low <= high <= limits[1]:
        raise UsageError(f"{name} must be a range within {limits}, but it is {value!r}")
    return None if low == high == center else (float(low), float(high))


class Grayscale(Transform):
    """The luma of images.

    Parameters
    ----------
    num_output_channels : int
        1, or 3 for three equal channels.
    """

    def __init__(self, num_output_channels: int = 1):
        super().__init__()
        self.num_output_channels = num_output_channels

    def forward(self, image: Any) -> Any:
        return F.rgb_to_grayscale(image, self.num_output_channels)


class GaussianBlur(Transform):
    """Blur images by a normal distribution of a random width.

    Parameters
    ----------
    kernel_size : int or (int, int)
        Odd.
    sigma : float or (float, float)
        Range of its standard deviation, in pixels.
    """

    def __init__(self, kernel_size: int | Sequence[int], sigma: Any = (0.1, 2.0)):
        super().__init__()
        self.kernel_size = kernel_size
        self.sigma = (sigma, sigma) if isinstance(sigma, Number) else tuple(sigma)
        if not 0 < self.sigma[0] <= self.sigma[1]:
            raise UsageError(f"sigma must be a range of positive numbers, but it is {sigma!r}")

    @property
    def random(self) -> bool:
        return self.sigma[0] != self.sigma[1]

    def forward(self, image: Any) -> Any:
        return F.gaussian_blur(image, self.kernel_size, draws.uniform(*self.sigma))


class _Sometimes(Transform, abc.ABC):
    """Done with probability `p`."""

    random = True

    def __init__(self, p: float):
        super().__init__()
        if not 0 <= p <= 1:
            raise UsageError(f"p must be in 0…1, but it is {p}")
        self.p = p

    @abc.abstractmethod
    def changed(self, image: Any) -> Any:
        """The image after it."""

    def forward(self, image: Any) -> Any:
        return self.changed(image) if draws.chance(self.p) else image


class RandomGrayscale(_Sometimes):
    """The luma with probability `p`; the number of channels stays."""

    def __init__(self, p: float = 0.1):
        super().__init__(p)

    def changed(self, image: Any) -> Any:
        return F.rgb_to_grayscale(image, dimensions(image)[0])


class RandomInvert(_Sometimes):
    """The negative with probability `p`."""

    def __init__(self, p: float = 0.5):
        super().__init__(p)

    def changed(self, image: Any) -> Any:
        return F.invert(image)


class RandomPosterize(_Sometimes):
    """Keep the first `bits` bits of each byte with probability `p`."""

    def __init__(self, bits: int, p: float = 0.5):
        super().__init__(p)
        self.bits = bits

    def changed(self, image: Any) -> Any:
        return F.posterize(image, self.bits)


class RandomSolarize(_Sometimes):
    """Invert what is at least as bright as `threshold` with probability `p`."""

    def __init__(self, threshold: float, p: float = 0.5):
        super().__init__(p)
        self.threshold = threshold

    def changed(self, image: Any) -> Any:
        return F.solarize(image, self.threshold)


class RandomAdjustSharpness(_Sometimes):
    """Change the sharpness by `sharpness_factor` with probability `p`."""

    def __init__(self, sharpness_factor: float, p: float = 0.5):
        super().__init__(p)
        self.sharpness_factor = sharpness_factor

    def changed(self, image: Any) -> Any:
        return F.adjust_sharpness(image, self.sharpness_factor)


class RandomAutocontrast(_Sometimes):
    """Stretch each channel from black to white with probability `p`."""

    def __init__(self, p: float = 0.5):
        super().__init__(p)

    def changed(self, image: Any) -> Any:
        return F.autocontrast(image)


class RandomEqualize(_Sometimes):
    """Make all values about equally frequent with probability `p`."""

    def __init__(self, p: float = 0.5):
        super().__init__(p)

    def changed(self, image: Any) -> Any:
        return F.equalize(image)
