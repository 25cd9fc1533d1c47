"""Operations on the colours of arrays ``(H, W[, C])``: bytes in 0…255 or floats in 0…1.

Bytes are treated as Pillow treats them. What depends on a pixel's value alone is a table of 256
values.
"""

from __future__ import annotations

import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.nano.pytorch.vision.transforms import pillow
from bigdl.nano.pytorch.vision.transforms.kinds import highest, to_pil

cv2 = require("cv2", "nano")

_BYTES = np.arange(256, dtype=np.float32)
# The weights of red, green and blue in the luma of ITU-R BT.601, in 1/65536, as Pillow has them.
_LUMA = (19595, 38470, 7471)


def _looked_up(image, values):
    """Replace each byte by its entry in a table of floats, cut off after the point."""
    table = np.clip(values, 0, 255).astype(np.uint8)
    return cv2.LUT(np.ascontiguousarray(image), table).reshape(image.shape)


def _blended(image, other, factor):
    """``other + factor (image - other)``, kept within black and white."""
    if image.dtype == np.uint8:
        image = np.ascontiguousarray(image)
        return cv2.addWeighted(image, factor, other, 1 - factor, 0).reshape(image.shape)
    mixed = other + np.asarray(factor, image.dtype) * (image - other)
    return np.clip(mixed, 0, highest(image)).astype(image.dtype)


def _is_color(image) -> bool:
    if image.ndim == 2 or image.shape[2] == 1:
        return False
    if image.shape[2] != 3:
        raise UsageError(f"Colours need 1 or 3 channels, but the image has {image.shape[2]}")
    return True


def luma(image):
    """Brightness ``(H, W)`` of the pixels, in the type of the image."""
    if not _is_color(image):
        return image.reshape(image.shape[:2])
    if image.dtype == np.uint8:
        return np.asarray(to_pil(image).convert("L"))
    weights = np.array(_LUMA, image.dtype) / 65536
    return image @ weights


def grayscale(image, channels):
    gray = luma(image)
    if channels == 3:
        return np.repeat(gray[:, :, None], 3, axis=2)
    return gray.reshape(*gray.shape, *(1,) * (image.ndim - 2))


def adjust_brightness(image, factor):
    if image.dtype == np.uint8:
        return _looked_up(image, _BYTES * np.float32(factor))
    return _blended(image, np.zeros((), image.dtype), factor)


def adjust_contrast(image, factor):
    mean = luma(image).mean()
    if image.dtype == np.uint8:
        mean = np.float32(int(mean + 0.5))
        return _looked_up(image, mean + np.float32(factor) * (_BYTES - mean))
    return _blended(image, np.asarray(mean, image.dtype), factor)


def adjust_saturation(image, factor):
    if not _is_color(image):
        return image
    return _blended(image, grayscale(image, 3), factor)


def adjust_hue(image, factor):
    if not _is_color(image):
        return image
    if image.dtype == np.uint8:
        hsv = cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_RGB2HSV_FULL)
        hsv[:, :, 0] += np.uint8(int(factor * 255) % 256)  # bytes wrap around
        return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)
    hsv = cv2.cvtColor(np.ascontiguousarray(image, np.float32), cv2.COLOR_RGB2HSV)
    hsv[:, :, 0] = (hsv[:, :, 0] + np.float32(factor * 360)) % 360
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB).astype(image.dtype)


def adjust_sharpness(image, factor):
    if min(image.shape[:2]) <= 2:
        return image
    kernel = np.ones((3, 3), np.float32)
    kernel[1, 1] = 5
    smooth = cv2.filter2D(np.ascontiguousarray(image), -1, kernel / 13).reshape(image.shape)
    for edge in (np.s_[0], np.s_[-1], np.s_[:, 0], np.s_[:, -1]):
        smooth[edge] = image[edge]
    return _blended(image, smooth, factor)


def invert(image):
    return np.asarray(highest(image), image.dtype) - image


def posterize(image, bits):
    return _as_bytes(image, "posterize") & np.uint8(256 - (1 << (8 - bits)))


def solarize(image, threshold):
    if threshold > highest(image):
        raise UsageError(
            f"threshold must be at most {highest(image):g} for an image of {image.dtype}, "
            f"but it is {threshold}"
        )
    return np.where(image >= threshold, invert(image), image)


def autocontrast(image):
    if image.dtype == np.uint8:
        return np.asarray(pillow.autocontrast(to_pil(image))).reshape(image.shape)
    low, high = image.min((0, 1)), image.max((0, 1))
    flat = high == low
    stretched = (image - low) / np.where(flat, 1, high - low)
    return np.where(flat, image, stretched).astype(image.dtype)


def equalize(image):
    equal = pillow.equalize(to_pil(_as_bytes(image, "equalize")))
    return np.asarray(equal).reshape(image.shape)


def _as_bytes(image, what):
    if image.dtype != np.uint8:
        raise UsageError(f"{what} needs an image of bytes (uint8), but it holds {image.dtype}")
    return image
