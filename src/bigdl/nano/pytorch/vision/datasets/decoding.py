"""From files to arrays ``(H, W, 3)`` of bytes: red, green and blue.

JPEGs are decoded by TurboJPEG where its library is installed, else by OpenCV, which brings one; by
both they have the values that Pillow gives. A JPEG that is made smaller afterwards can be decoded
at a half, a quarter or an eighth of its size, from fewer coefficients of its cosine transform.
"""

import io
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from bigdl.common.errors import UsageError, require

cv2 = require("cv2", "nano")

_COLOR = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
_TJPF_RGB = 0


def read_image(
    path: str | os.PathLike, enough: Callable[[int, int], tuple[int, int]] | None = None
) -> np.ndarray:
    """Decode a file.

    Parameters
    ----------
    path : path
    enough : callable, optional
        As of :func:`decode`.

    Returns
    -------
    ndarray (H, W, 3)
        uint8. The orientation that a camera noted in EXIF is not applied, as by torchvision.

    Raises
    ------
    UsageError
        If the file does not hold an image.
    """
    with open(path, "rb") as file:
        data = file.read()
    try:
        return decode(data, enough)
    except UsageError as error:
        raise error.with_message(f"{os.fspath(path)!r} cannot be decoded: {error}") from error


def decode(data: bytes, enough: Callable[[int, int], tuple[int, int]] | None = None) -> np.ndarray:
    """Decode the content of a file.

    Parameters
    ----------
    data : bytes
    enough : callable, optional
        From height and width of the image to the height and width that suffice: the result may
        be smaller than the image, but not smaller than these.

    Returns
    -------
    ndarray (H, W, 3)
        uint8.

    Raises
    ------
    UsageError
        If this is no image.
    """
    if not data:
        raise UsageError("it is empty", code="file-damaged")
    size = jpeg_size(data)
    if size is None:
        return _by_pillow(data) if data[:4] == b"GIF8" else _by_opencv(data, 1)
    *lengths, components = size
    if components == 4:  # CMYK and its kin, which every library converts in another way
        return _by_pillow(data)
    factor = 1 if enough is None else _reduction(lengths, enough(*lengths))
    turbo = _turbojpeg()
    if turbo is None:
        return _by_opencv(data, factor)
    try:
        return turbo.decode(data, pixel_format=_TJPF_RGB, scaling_factor=(1, factor))
    except OSError:  # a damaged file, of which the others may still make something
        return _by_opencv(data, factor)


def _reduction(lengths: list[int], enough: tuple[int, int]) -> int:
    """The largest factor after which an image is still large enough."""
    for factor in (8, 4, 2):
        if all(-(-now // factor) >= least for now, least in zip(lengths, enough, strict=True)):
            return factor
    return 1


def jpeg_size(data: bytes) -> tuple[int, int, int] | None:
    """Height, width and components of a JPEG; None if this is none."""
    try:
        with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:  # reads its header only
            return image.height, image.width, len(image.getbands())
    except (OSError, SyntaxError, Image.DecompressionBombError):
        return None


@cache
def _turbojpeg() -> Any:
    """PyTurboJPEG, or None where it or its library is missing."""
    try:
        from turbojpeg import TurboJPEG

        return TurboJPEG()
    except (ImportError, OSError, RuntimeError):  # RuntimeError: it finds no library
        return None


def _by_opencv(data: bytes, factor: int) -> np.ndarray:
    reduced = getattr(cv2, f"IMREAD_REDUCED_GRAYSCALE_{factor}", 0)
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), _COLOR | reduced)
    except cv2.error:  # of some damages it raises, of others it returns nothing
        image = None
    return _by_pillow(data) if image is None else image


def _by_pillow(data: bytes) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise UsageError(
            f"it holds no image that Pillow or OpenCV can read ({error})", code="file-format"
        ) from error
