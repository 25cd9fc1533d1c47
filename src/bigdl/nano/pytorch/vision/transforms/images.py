"""Image types: ndarrays ``(H, W[, C])``, PIL images and tensors ``(…, C, H, W)``.

Arrays and tensors contain bytes in 0…255, 16-bit integers, or floats in 0…1. Operations that only
move pixels accept any dtype.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from numbers import Number
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from typing_extensions import TypeIs

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError

ImageT = TypeVar(
    "ImageT", np.ndarray, Image.Image, torch.Tensor
)  # operations return the type of their input
Size = int | Sequence[int]
Fill = float | Sequence[float] | None


class InterpolationMode(Enum):
    """Interpolation method, with torchvision's names and values.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import InterpolationMode, Resize
    >>> image = np.array([[[0], [100]]], np.uint8)
    >>> Resize((1, 4), InterpolationMode.NEAREST)(image).ravel()
    array([  0,   0, 100, 100], dtype=uint8)
    >>> Resize((1, 4), InterpolationMode.BILINEAR)(image).ravel()
    array([  0,  25,  75, 100], dtype=uint8)
    """

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


Mode = InterpolationMode | str | int
OF_TORCH = {InterpolationMode.BILINEAR: "bilinear", InterpolationMode.BICUBIC: "bicubic"}
OF_PILLOW = {mode: Image.Resampling[mode.name.partition("_")[0]] for mode in InterpolationMode}


def interpolation_mode(mode: object) -> InterpolationMode:
    """Convert a mode, its value, a Pillow constant or torchvision's mode to an InterpolationMode.

    Raises
    ------
    UsageError
        If there is no such mode.
    """
    value = getattr(mode, "value", mode)  # torchvision's modes have the same values
    for each in InterpolationMode:
        if value in (each.value, OF_PILLOW[each]):
            return each
    names = ", ".join(each.name for each in InterpolationMode)
    raise UsageError(
        f"interpolation must be an InterpolationMode ({names}), not {mode!r}",
        code="argument-value",
        argument="interpolation",
    )


def is_pil(image: object) -> TypeIs[Image.Image]:
    """Return True for a PIL image."""
    return isinstance(image, Image.Image)


def is_number(value: object) -> TypeIs[int | float]:
    """Return True for a Python or NumPy number."""
    return isinstance(value, Number)


def dimensions(image: object) -> tuple[int, int, int]:
    """Return the number of channels, height and width of an image.

    Raises
    ------
    UsageError
        If the value is not an image.
    """
    if is_pil(image):
        return len(image.getbands()), image.height, image.width
    if isinstance(image, np.ndarray) and image.ndim in (2, 3):
        return image.shape[2] if image.ndim == 3 else 1, *image.shape[:2]
    if isinstance(image, torch.Tensor) and image.ndim >= 2:
        return image.shape[-3] if image.ndim > 2 else 1, *image.shape[-2:]
    raise not_an_image(image)


def not_an_image(value: object) -> UsageError:
    """Return the exception to raise for a value that is not an image."""
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return UsageError(
        "An image must be a PIL image, an ndarray (height, width[, channels]) or a tensor "
        f"(..., channels, height, width), but it is a {type(value).__name__}{shape}",
        code="data-type",
    )


def highest(image: np.ndarray) -> float:
    """Return the value of white: the dtype's maximum for 8 or 16 bits, 1 for floats."""
    if image.dtype.kind == "f":
        return 1.0
    if image.dtype in (np.uint8, np.uint16, np.int16):
        return int(np.iinfo(image.dtype).max)
    raise UsageError(
        f"An image must hold bytes (uint8), 16-bit integers or floats, but it holds {image.dtype}",
        code="data-dtype",
    )


def like(values: np.ndarray, image: np.ndarray, *, round_values: bool = True) -> np.ndarray:
    """Convert values to an image's dtype and range, with rounding and clipping."""
    if image.dtype.kind == "f":
        return values.astype(image.dtype, copy=False)
    if image.dtype.kind == "b":
        return values >= 0.5
    if values.dtype.kind == "f" and round_values:
        values = np.round(values)
    limits = np.iinfo(image.dtype)
    return np.clip(values, limits.min, limits.max).astype(image.dtype)


def to_supported_dtype(image: np.ndarray, dtypes: Sequence[str]) -> np.ndarray:
    """Convert an image to a dtype that a library supports; exact up to 2**53."""
    dtype: Any = np.float32 if image.dtype.itemsize <= 2 else np.float64
    if image.dtype.name in dtypes:
        dtype = image.dtype
    return np.require(image, dtype, ["C", "W"])  # torch warns about read-only arrays


def to_array(image: object) -> np.ndarray:
    """Convert an image to an ndarray, without a copy if possible."""
    if is_pil(image):
        return np.asarray(image)
    if not isinstance(image, (np.ndarray, torch.Tensor)) or image.ndim not in (2, 3):
        raise not_an_image(image)
    if isinstance(image, np.ndarray):
        return image
    array = image.detach().cpu().numpy()
    return array if image.ndim == 2 else np.ascontiguousarray(array.transpose(1, 2, 0))


def to_pil(array: np.ndarray) -> Image.Image:
    """Convert an ndarray to a PIL image."""
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(array))


def to_pil_of_mode(array: np.ndarray, mode: str) -> Image.Image:
    """Create a PIL image of a mode from an array, without converting values."""
    converted = to_pil(array)
    if converted.mode == mode:
        return converted
    return Image.frombytes(mode, converted.size, converted.tobytes())


def to_pil_like(array: np.ndarray, image: Image.Image) -> Image.Image:
    """Create a PIL image from an array with another image's mode and palette."""
    converted = to_pil_of_mode(array, image.mode)
    if image.mode == "P":
        palette = image.getpalette("RGB")
        if palette is not None:
            converted.putpalette(palette)
    return converted


def on_arrays(
    image: ImageT, function: Callable[..., np.ndarray], *args: object, **kwargs: object
) -> ImageT:
    """Apply a function of ndarrays to an image of any type; return the same type.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
        The image. A tensor may have leading dimensions; its images are processed one by one.
    function : callable
        Function of an array ``(H, W[, C])`` that returns an array.
    *args, **kwargs
        Further arguments of the function.
    """
    if isinstance(image, torch.Tensor) and image.ndim > 3:
        images = image.flatten(0, -4)
        if not len(images):  # for zero images only the shape is computed
            one: torch.Tensor = on_arrays(
                image.new_zeros(image.shape[-3:]), function, *args, **kwargs
            )
            return one.new_empty((*image.shape[:-3], *one.shape))
        done = torch.stack([on_arrays(each, function, *args, **kwargs) for each in images])
        return done.unflatten(0, image.shape[:-3])
    result = function(to_array(image), *args, **kwargs)
    if is_pil(image):
        return to_pil_like(result, image)
    if isinstance(image, np.ndarray):
        return result
    if image.ndim == 3:
        result = (result[:, :, None] if result.ndim == 2 else result).transpose(2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(result)).to(image.device)


def require_bytes(image: np.ndarray, operation: object) -> np.ndarray:
    """Return an array of bytes; raise UsageError for other dtypes."""
    if image.dtype != np.uint8:
        raise UsageError(
            f"{operation} needs an image of bytes (uint8), but it holds {image.dtype}",
            code="data-dtype",
        )
    return image


def with_channels_of(result: np.ndarray, image: np.ndarray) -> np.ndarray:
    """Restore the channel dimension that OpenCV drops from an image with one channel."""
    return result.reshape(*result.shape[:2], *image.shape[2:])


def two_lengths(name: str, size: Size) -> tuple[int, int]:
    """Return a size of one or two positive ints as a pair; `name` is the argument's name."""
    lengths = [size] if is_number(size) else list(size)
    if len(lengths) not in (1, 2):
        raise UsageError(
            f"{name} must be a positive int or two, but it is {size!r}",
            code="argument-value",
            argument=name,
        )
    return check_positive(name, lengths[0]), check_positive(name, lengths[-1])


def fill_values(image: object, fill: Fill) -> tuple[float, ...]:
    """Return one fill value per channel; 0 if there is no fill."""
    channels = dimensions(image)[0]
    values = (0,) if fill is None else (fill,) if is_number(fill) else tuple(fill)
    if len(values) not in (1, channels):
        raise UsageError(
            f"fill must be a number or have one for each of {channels} channel(s), but it is "
            f"{fill!r}",
            code="argument-value",
            argument="fill",
        )
    return values if len(values) == channels else values * channels
