"""Decoding of image files to RGB ndarrays ``(H, W, 3)`` of dtype uint8.

JPEGs are decoded by TurboJPEG if its library is installed, else by OpenCV. Both give the values of
Pillow. A JPEG that is downscaled afterwards can be decoded at a half, a quarter or an eighth of its
size, from fewer coefficients of its cosine transform.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, UnidentifiedImageError

from bigdl.common.errors import UsageError, require

if TYPE_CHECKING:
    from turbojpeg import TurboJPEG

cv2 = require("cv2", "nano")

_COLOR = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
_TJPF_RGB = 0


def read_image(
    path: str | os.PathLike, enough: Callable[[int, int], tuple[int, int]] | None = None
) -> np.ndarray:
    """Decode an image file.

    Parameters
    ----------
    path : path
    enough : callable, optional
        See :func:`decode`.

    Returns
    -------
    ndarray (H, W, 3)
        uint8. The EXIF orientation is not applied, as in torchvision.

    Raises
    ------
    UsageError
        If the file is not an image.
    """
    with open(path, "rb") as file:
        data = file.read()
    try:
        return decode(data, enough)
    except UsageError as error:
        raise error.with_message(f"{os.fspath(path)!r} cannot be decoded: {error}") from error


def decode(data: bytes, enough: Callable[[int, int], tuple[int, int]] | None = None) -> np.ndarray:
    """Decode the content of an image file.

    Parameters
    ----------
    data : bytes
    enough : callable, optional
        Function from height and width of the image to the required minimum height and width. The
        result may be smaller than the image, but not smaller than the minimum.

    Returns
    -------
    ndarray (H, W, 3)
        uint8.

    Raises
    ------
    UsageError
        If the data are not an image.
    """
    if not data:
        raise UsageError("it is empty", code="file-damaged")
    size = jpeg_size(data)
    if size is None:
        return _decode_with_pillow(data) if data[:4] == b"GIF8" else _decode_with_opencv(data, 1)
    *lengths, components = size
    if components == 4:  # CMYK or similar, which libraries convert differently
        return _decode_with_pillow(data)
    factor = 1 if enough is None else _reduction(lengths, enough(*lengths))
    turbo = _turbojpeg()
    if turbo is None:
        return _decode_with_opencv(data, factor)
    try:
        return turbo.decode(data, pixel_format=_TJPF_RGB, scaling_factor=(1, factor))
    except OSError:  # a damaged file, which other decoders may partly read
        return _decode_with_opencv(data, factor)


def _reduction(lengths: list[int], enough: tuple[int, int]) -> int:
    """Return the largest reduction factor (8, 4, 2 or 1) after which an image is large enough."""
    for factor in (8, 4, 2):
        if all(-(-now // factor) >= least for now, least in zip(lengths, enough, strict=True)):
            return factor
    return 1


def jpeg_size(data: bytes) -> tuple[int, int, int] | None:
    """Return height, width and number of components of a JPEG, or None for other data."""
    try:
        with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:  # reads the header only
            return image.height, image.width, len(image.getbands())
    except (OSError, SyntaxError, Image.DecompressionBombError):
        return None


@cache
def _turbojpeg() -> TurboJPEG | None:
    """Return a PyTurboJPEG decoder, or None if it or its library is missing."""
    try:
        from turbojpeg import TurboJPEG

        return TurboJPEG()
    except (ImportError, OSError, RuntimeError):  # RuntimeError: library not found
        return None


def _decode_with_opencv(data: bytes, factor: int) -> np.ndarray:
    reduced = getattr(cv2, f"IMREAD_REDUCED_GRAYSCALE_{factor}", 0)
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), _COLOR | reduced)
    except cv2.error:  # for some damaged files it raises, for others it returns None
        image = None
    return _decode_with_pillow(data) if image is None else image


def _decode_with_pillow(data: bytes) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise UsageError(
            f"it holds no image that Pillow or OpenCV can read ({error})", code="file-format"
        ) from error
