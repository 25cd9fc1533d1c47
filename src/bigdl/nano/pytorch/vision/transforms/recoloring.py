"""Operations on the colours of images of any kind."""

from __future__ import annotations

from typing import Any

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.vision.transforms import colors, pillow
from bigdl.nano.pytorch.vision.transforms.kinds import is_pil, on_arrays

__all__ = [
    "adjust_brightness",
    "adjust_contrast",
    "adjust_hue",
    "adjust_saturation",
    "adjust_sharpness",
    "autocontrast",
    "equalize",
    "invert",
    "posterize",
    "rgb_to_grayscale",
    "solarize",
    "to_grayscale",
]


def _recolor(name: str, image: Any, *args: Any) -> Any:
    if is_pil(image):
        return getattr(pillow, name)(image, *args)
    return on_arrays(image, getattr(colors, name), *args)


def _factor(name: str, value: float) -> float:
    if value < 0:
        raise UsageError(f"{name} must not be negative, but it is {value}")
    return float(value)


def adjust_brightness(image: Any, brightness_factor: float) -> Any:
    """0 is black, 1 leaves the image as it is, 2 is twice as bright."""
    return _recolor("adjust_brightness", image, _factor("brightness_factor", brightness_factor))


def adjust_contrast(image: Any, contrast_factor: float) -> Any:
    """0 is gray, 1 leaves the image as it is."""
    return _recolor("adjust_contrast", image, _factor("contrast_factor", contrast_factor))


def adjust_saturation(image: Any, saturation_factor: float) -> Any:
    """0 is black and white, 1 leaves the image as it is."""
    return _recolor("adjust_saturation", image, _factor("saturation_factor", saturation_factor))


def adjust_hue(image: Any, hue_factor: float) -> Any:
    """Turn the wheel of colours by this part of a turn, in -0.5…0.5."""
    if not -0.5 <= hue_factor <= 0.5:
        raise UsageError(f"hue_factor must be in -0.5…0.5, but it is {hue_factor}")
    return _recolor("adjust_hue", image, hue_factor)


def adjust_sharpness(image: Any, sharpness_factor: float) -> Any:
    """0 is blurred, 1 leaves the image as it is, 2 is sharper."""
    return _recolor("adjust_sharpness", image, _factor("sharpness_factor", sharpness_factor))


def rgb_to_grayscale(image: Any, num_output_channels: int = 1) -> Any:
    """The image's luma, once or three times."""
    if num_output_channels not in (1, 3):
        raise UsageError(f"num_output_channels must be 1 or 3, not {num_output_channels}")
    return _recolor("grayscale", image, num_output_channels)


to_grayscale = rgb_to_grayscale


def invert(image: Any) -> Any:
    """The negative."""
    return _recolor("invert", image)


def posterize(image: Any, bits: int) -> Any:
    """Keep the first 0…8 bits of each byte."""
    if not 0 <= bits <= 8:
        raise UsageError(f"bits must be in 0…8, but it is {bits}")
    return _recolor("posterize", image, bits)


def solarize(image: Any, threshold: float) -> Any:
    """Invert what is at least as bright as the threshold."""
    return _recolor("solarize", image, threshold)


def autocontrast(image: Any) -> Any:
    """Stretch each channel so that its darkest value is black and its brightest white."""
    return _recolor("autocontrast", image)


def equalize(image: Any) -> Any:
    """Make all values about equally frequent in each channel."""
    return _recolor("equalize", image)
