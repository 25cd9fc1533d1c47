"""Colours and sharpness of images: operations, and transforms that apply them at random.

Bytes of arrays are treated as Pillow treats them. What depends on a pixel's value alone is a table
of 256 values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from bigdl.common.checks import check_choice, check_integer, check_number
from bigdl.common.errors import UsageError, require
from bigdl.nano.pytorch.vision.transforms.base import (
    RandomTransform,
    Transform,
    random_permutation,
    random_uniform,
)
from bigdl.nano.pytorch.vision.transforms.images import (
    ImageT,
    Size,
    dimensions,
    highest,
    is_number,
    is_pil,
    on_arrays,
    require_bytes,
    to_pil,
    two_lengths,
    with_channels_of,
)

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
    "adjust_brightness",
    "adjust_contrast",
    "adjust_hue",
    "adjust_saturation",
    "adjust_sharpness",
    "autocontrast",
    "equalize",
    "gaussian_blur",
    "invert",
    "posterize",
    "rgb_to_grayscale",
    "solarize",
    "to_grayscale",
]

cv2 = require("cv2", "nano")

_BYTES = np.arange(256, dtype=np.float32)
# The weights of red, green and blue in the luma of ITU-R BT.601, in 1/65536, as Pillow has them.
_LUMA = (19595, 38470, 7471)


def adjust_brightness(image: ImageT, brightness_factor: float) -> ImageT:
    """Change the brightness: 0 is black, 1 leaves the image as it is, 2 is twice as bright."""
    check_number("brightness_factor", brightness_factor, 0)
    return _recolored(image, _enhance(ImageEnhance.Brightness), _brightness, brightness_factor)


def _brightness(image: np.ndarray, factor: float) -> np.ndarray:
    if image.dtype == np.uint8:
        return _looked_up(image, _BYTES * np.float32(factor))
    return _blended(image, np.zeros((), image.dtype), factor)


def adjust_contrast(image: ImageT, contrast_factor: float) -> ImageT:
    """Change the contrast: 0 is gray, 1 leaves the image as it is."""
    check_number("contrast_factor", contrast_factor, 0)
    return _recolored(image, _enhance(ImageEnhance.Contrast), _contrast, contrast_factor)


def _contrast(image: np.ndarray, factor: float) -> np.ndarray:
    mean = _luma(image).mean()
    if image.dtype == np.uint8:
        mean = np.float32(int(mean + 0.5))
        return _looked_up(image, mean + np.float32(factor) * (_BYTES - mean))
    return _blended(image, np.asarray(mean, image.dtype), factor)


def adjust_saturation(image: ImageT, saturation_factor: float) -> ImageT:
    """Change the saturation: 0 is black and white, 1 leaves the image as it is."""
    check_number("saturation_factor", saturation_factor, 0)
    return _recolored(image, _enhance(ImageEnhance.Color), _saturation, saturation_factor)


def _saturation(image: np.ndarray, factor: float) -> np.ndarray:
    return _blended(image, _grayscale(image, 3), factor) if _is_color(image) else image


def adjust_sharpness(image: ImageT, sharpness_factor: float) -> ImageT:
    """Change the sharpness: 0 is blurred, 1 leaves the image as it is, 2 is sharper."""
    check_number("sharpness_factor", sharpness_factor, 0)
    return _recolored(image, _enhance(ImageEnhance.Sharpness), _sharpness, sharpness_factor)


def _sharpness(image: np.ndarray, factor: float) -> np.ndarray:
    if min(image.shape[:2]) <= 2:
        return image
    kernel = np.ones((3, 3), np.float32)
    kernel[1, 1] = 5
    smooth = cv2.filter2D(np.ascontiguousarray(image), -1, kernel / 13).reshape(image.shape)
    for edge in (np.s_[0], np.s_[-1], np.s_[:, 0], np.s_[:, -1]):
        smooth[edge] = image[edge]
    return _blended(image, smooth, factor)


def adjust_hue(image: ImageT, hue_factor: float) -> ImageT:
    """Turn the wheel of colours by this part of a turn, in -0.5…0.5."""
    check_number("hue_factor", hue_factor, -0.5, 0.5)
    return _recolored(image, _hue_of_pil, _hue, hue_factor)


def _hue_of_pil(image: Image.Image, factor: float) -> Image.Image:
    if image.mode in ("1", "L", "I", "F"):
        return image
    hue, saturation, value = image.convert("HSV").split()
    turned = (np.asarray(hue).astype(np.int16) + int(factor * 255)).astype(np.uint8)
    bands = (Image.fromarray(turned), saturation, value)
    return Image.merge("HSV", bands).convert(image.mode)


def _hue(image: np.ndarray, factor: float) -> np.ndarray:
    if not _is_color(image):
        return image
    if image.dtype == np.uint8:
        hsv = cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_RGB2HSV_FULL)
        hsv[:, :, 0] += np.uint8(int(factor * 255) % 256)  # bytes wrap around
        return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)
    hsv = cv2.cvtColor(np.ascontiguousarray(image, np.float32), cv2.COLOR_RGB2HSV)
    hsv[:, :, 0] = (hsv[:, :, 0] + np.float32(factor * 360)) % 360
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB).astype(image.dtype)


def rgb_to_grayscale(image: ImageT, num_output_channels: int = 1) -> ImageT:
    """Return the luma of an image, once or three times."""
    check_choice("num_output_channels", num_output_channels, (1, 3))
    return _recolored(image, _grayscale_of_pil, _grayscale, num_output_channels)


to_grayscale = rgb_to_grayscale


def _grayscale_of_pil(image: Image.Image, channels: int) -> Image.Image:
    gray = image.convert("L")
    return gray if channels == 1 else Image.merge("RGB", (gray, gray, gray))


def _grayscale(image: np.ndarray, channels: int) -> np.ndarray:
    gray = _luma(image)
    if channels == 3:
        return np.repeat(gray[:, :, None], 3, axis=2)
    return gray.reshape(*gray.shape, *(1,) * (image.ndim - 2))


def invert(image: ImageT) -> ImageT:
    """Return the negative."""
    return _recolored(image, ImageOps.invert, _invert)


def _invert(image: np.ndarray) -> np.ndarray:
    return np.asarray(highest(image), image.dtype) - image


def posterize(image: ImageT, bits: int) -> ImageT:
    """Keep the first 0…8 bits of each byte."""
    check_integer("bits", bits, 0, 8)
    return _recolored(image, ImageOps.posterize, _posterize, bits)


def _posterize(image: np.ndarray, bits: int) -> np.ndarray:
    return require_bytes(image, "posterize") & np.uint8(256 - (1 << (8 - bits)))


def solarize(image: ImageT, threshold: float) -> ImageT:
    """Invert what is at least as bright as the threshold."""
    return _recolored(image, ImageOps.solarize, _solarize, threshold)


def _solarize(image: np.ndarray, threshold: float) -> np.ndarray:
    check_number("threshold", threshold, most=highest(image))
    return np.where(image >= threshold, _invert(image), image)


def autocontrast(image: ImageT) -> ImageT:
    """Stretch each channel so that its darkest value is black and its brightest white."""
    return _recolored(image, ImageOps.autocontrast, _autocontrast)


def _autocontrast(image: np.ndarray) -> np.ndarray:
    if image.dtype == np.uint8:
        return np.asarray(ImageOps.autocontrast(to_pil(image))).reshape(image.shape)
    low, high = image.min((0, 1)), image.max((0, 1))
    flat = high == low
    stretched = (image - low) / np.where(flat, 1, high - low)
    return np.where(flat, image, stretched).astype(image.dtype)


def equalize(image: ImageT) -> ImageT:
    """Make all values about equally frequent in each channel."""
    return _recolored(image, ImageOps.equalize, _equalize)


def _equalize(image: np.ndarray) -> np.ndarray:
    equal = ImageOps.equalize(to_pil(require_bytes(image, "equalize")))
    return np.asarray(equal).reshape(image.shape)


def gaussian_blur(
    image: ImageT, kernel_size: Size, sigma: float | Sequence[float] | None = None
) -> ImageT:
    """Blur by a normal distribution; edges are mirrored.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
    kernel_size : int or (int, int)
        Odd; width and height.
    sigma : float or (float, float), optional
        Standard deviations in pixels; by default 0.15 of the kernel's size, plus 0.35.
    """
    kernel = two_lengths(kernel_size)
    if any(size <= 0 or size % 2 == 0 for size in kernel):
        raise UsageError(f"kernel_size must be odd and positive, but it is {kernel_size!r}")
    if sigma is None:
        sigma = [0.15 * size + 0.35 for size in kernel]
    sigmas = [float(value) for value in (sigma if isinstance(sigma, Sequence) else [sigma])]
    if min(sigmas) <= 0:
        raise UsageError(f"sigma must be positive, but it is {sigma}")
    return on_arrays(image, _gaussian_blur, kernel, sigmas[0], sigmas[-1])


def _gaussian_blur(
    image: np.ndarray, kernel: tuple[int, int], across: float, down: float
) -> np.ndarray:
    blurred = cv2.GaussianBlur(
        np.ascontiguousarray(image), kernel, across, sigmaY=down, borderType=cv2.BORDER_REFLECT_101
    )
    return with_channels_of(blurred, image)


def _recolored(
    image: Any, of_pil: Callable[..., Image.Image], of_array: Callable[..., np.ndarray], *args: Any
) -> Any:
    return of_pil(image, *args) if is_pil(image) else on_arrays(image, of_array, *args)


def _enhance(enhancer: Callable[..., Any]) -> Callable[[Image.Image, float], Image.Image]:
    return lambda image, factor: enhancer(image).enhance(factor)


def _looked_up(image: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Replace each byte by its entry in a table of floats, cut off after the point."""
    table = np.clip(values, 0, 255).astype(np.uint8)
    return cv2.LUT(np.ascontiguousarray(image), table).reshape(image.shape)


def _blended(image: np.ndarray, other: Any, factor: float) -> np.ndarray:
    """Return ``other + factor (image - other)``, kept within black and white."""
    if image.dtype == np.uint8:
        image = np.ascontiguousarray(image)
        return cv2.addWeighted(image, factor, other, 1 - factor, 0).reshape(image.shape)
    mixed = other + np.asarray(factor, image.dtype) * (image - other)
    return np.clip(mixed, 0, highest(image)).astype(image.dtype)


def _is_color(image: np.ndarray) -> bool:
    if image.ndim == 2 or image.shape[2] == 1:
        return False
    if image.shape[2] != 3:
        raise UsageError(f"Colours need 1 or 3 channels, but the image has {image.shape[2]}")
    return True


def _luma(image: np.ndarray) -> np.ndarray:
    """Return the brightness ``(H, W)`` of the pixels, in the type of the image."""
    if not _is_color(image):
        return image.reshape(image.shape[:2])
    if image.dtype == np.uint8:
        return np.asarray(to_pil(image).convert("L"))
    weights = np.array(_LUMA, image.dtype) / 65536
    return image @ weights


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

    scale_free = True

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
    def _ranges(self) -> tuple[tuple[float, float] | None, ...]:
        return self.brightness, self.contrast, self.saturation, self.hue

    def forward(self, image: Any) -> Any:
        if not self.random:
            return image
        adjust = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
        for index in random_permutation(4):
            limits = self._ranges[index]
            if limits:
                image = adjust[index](image, random_uniform(*limits))
        return image


def _factors(
    value: float | Sequence[float],
    name: str,
    center: float = 1.0,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> tuple[float, float] | None:
    """Return the range of a factor; None if nothing is to be done."""
    if is_number(value):
        check_number(name, value, 0)
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

    scale_free = True

    def __init__(self, num_output_channels: int = 1):
        super().__init__()
        self.num_output_channels = num_output_channels

    def forward(self, image: Any) -> Any:
        return rgb_to_grayscale(image, self.num_output_channels)


class GaussianBlur(Transform):
    """Blur images by a normal distribution of a random width.

    Parameters
    ----------
    kernel_size : int or (int, int)
        Odd.
    sigma : float or (float, float)
        Range of its standard deviation, in pixels.
    """

    def __init__(self, kernel_size: Size, sigma: float | Sequence[float] = (0.1, 2.0)):
        super().__init__()
        self.kernel_size = kernel_size
        self.sigma: tuple[float, ...] = (sigma, sigma) if is_number(sigma) else tuple(sigma)
        if not 0 < self.sigma[0] <= self.sigma[1]:
            raise UsageError(f"sigma must be a range of positive numbers, but it is {sigma!r}")

    @property
    def random(self) -> bool:
        return self.sigma[0] != self.sigma[1]

    def forward(self, image: Any) -> Any:
        return gaussian_blur(image, self.kernel_size, random_uniform(*self.sigma))


class RandomGrayscale(RandomTransform):
    """The luma with probability `p`; the number of channels stays."""

    scale_free = True

    def __init__(self, p: float = 0.1):
        super().__init__(p)

    def changed(self, image: Any) -> Any:
        return rgb_to_grayscale(image, dimensions(image)[0])


class RandomInvert(RandomTransform):
    """The negative with probability `p`."""

    scale_free = True

    def changed(self, image: Any) -> Any:
        return invert(image)


class RandomPosterize(RandomTransform):
    """Keep the first `bits` bits of each byte with probability `p`."""

    def __init__(self, bits: int, p: float = 0.5):
        super().__init__(p)
        self.bits = bits

    def changed(self, image: Any) -> Any:
        return posterize(image, self.bits)


class RandomSolarize(RandomTransform):
    """Invert what is at least as bright as `threshold` with probability `p`."""

    def __init__(self, threshold: float, p: float = 0.5):
        super().__init__(p)
        self.threshold = threshold

    def changed(self, image: Any) -> Any:
        return solarize(image, self.threshold)


class RandomAdjustSharpness(RandomTransform):
    """Change the sharpness by `sharpness_factor` with probability `p`."""

    def __init__(self, sharpness_factor: float, p: float = 0.5):
        super().__init__(p)
        self.sharpness_factor = sharpness_factor

    def changed(self, image: Any) -> Any:
        return adjust_sharpness(image, self.sharpness_factor)


class RandomAutocontrast(RandomTransform):
    """Stretch each channel from black to white with probability `p`."""

    def changed(self, image: Any) -> Any:
        return autocontrast(image)


class RandomEqualize(RandomTransform):
    """Make all values about equally frequent with probability `p`."""

    def changed(self, image: Any) -> Any:
        return equalize(image)
