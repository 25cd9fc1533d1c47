"""Operations on PIL images, by Pillow: what torchvision does with them."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from bigdl.nano.pytorch.vision.transforms.kinds import InterpolationMode

_RESAMPLING = {
    InterpolationMode.NEAREST: Image.Resampling.NEAREST,
    InterpolationMode.NEAREST_EXACT: Image.Resampling.NEAREST,
    InterpolationMode.BILINEAR: Image.Resampling.BILINEAR,
    InterpolationMode.BICUBIC: Image.Resampling.BICUBIC,
    InterpolationMode.BOX: Image.Resampling.BOX,
    InterpolationMode.HAMMING: Image.Resampling.HAMMING,
    InterpolationMode.LANCZOS: Image.Resampling.LANCZOS,
}


def resize(image, size, mode, antialias):
    return image.resize(size[::-1], _RESAMPLING[mode])


def crop(image, top, left, height, width):
    return image.crop((left, top, left + width, top + height))


def hflip(image):
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def vflip(image):
    return image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)


def warp(image, inverse, size, mode, fill):
    coefficients = (inverse / inverse[2, 2]).ravel()
    affine = np.allclose(coefficients[6:8], 0, atol=1e-12)
    return image.transform(
        size[::-1],
        Image.Transform.AFFINE if affine else Image.Transform.PERSPECTIVE,
        coefficients[: 6 if affine else 8].tolist(),
        _RESAMPLING[mode],
        fillcolor=_color(image, fill),
    )


def _color(image, fill):
    """The fill as Pillow wants it: one number, or as many as the image has bands."""
    bands = len(image.getbands())
    values = [0 if fill is None else fill] if np.ndim(fill) == 0 else list(fill)
    if image.mode not in ("F", "I"):
        values = [int(value) for value in values]
    return values[0] if bands == 1 else tuple(values * bands if len(values) == 1 else values)


def adjust_brightness(image, factor):
    return ImageEnhance.Brightness(image).enhance(factor)


def adjust_contrast(image, factor):
    return ImageEnhance.Contrast(image).enhance(factor)


def adjust_saturation(image, factor):
    return ImageEnhance.Color(image).enhance(factor)


def adjust_sharpness(image, factor):
    return ImageEnhance.Sharpness(image).enhance(factor)


def adjust_hue(image, factor):
    if image.mode in ("1", "L", "I", "F"):
        return image
    hue, saturation, value = image.convert("HSV").split()
    turned = (np.asarray(hue).astype(np.int16) + int(factor * 255)).astype(np.uint8)
    bands = (Image.fromarray(turned), saturation, value)
    return Image.merge("HSV", bands).convert(image.mode)


def grayscale(image, channels):
    gray = image.convert("L")
    return gray if channels == 1 else Image.merge("RGB", (gray, gray, gray))


def invert(image):
    return ImageOps.invert(image)


def posterize(image, bits):
    return ImageOps.posterize(image, bits)


def solarize(image, threshold):
    return ImageOps.solarize(image, threshold)


def autocontrast(image):
    return ImageOps.autocontrast(image)


def equalize(image):
    return ImageOps.equalize(image)
