"""The three kinds of images: arrays ``(H, W[, C])``, PIL images and tensors ``(…, C, H, W)``.

Arrays and tensors hold bytes in 0…255, 16-bit integers, or floats in 0…1. Operations that only
move pixels take any type.
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
)  # of an operation whose result is of the kind of the image
Size = int | Sequence[int]
Fill = float | Sequence[float] | None


class InterpolationMode(Enum):
    """Method by which values between pixels are found; names and values are torchvision's.

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
    """Return the mode for a mode, its value, Pillow's constant, or torchvision's mode.

    Raises
    ------
    UsageError
        If there is none like it.
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
    """Return True for an image of Pillow."""
    return isinstance(image, Image.Image)


def is_number(value: object) -> TypeIs[int | float]:
    """Return True for a number of Python or NumPy."""
    return isinstance(value, Number)


def dimensions(image: object) -> tuple[int, int, int]:
    """Return channels, height and width of an image.

    Raises
    ------
    UsageError
        If this is no image.
    """
    if is_pil(image):
        return len(image.getbands()), image.height, image.width
    if isinstance(image, np.ndarray) and image.ndim in (2, 3):
        return image.shape[2] if image.ndim == 3 else 1, *image.shape[:2]
    if isinstance(image, torch.Tensor) and image.ndim >= 2:
        return image.shape[-3] if image.ndim > 2 else 1, *image.shape[-2:]
    raise no_image(image)


def no_image(value: object) -> UsageError:
    """Return the error for what is no image."""
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return UsageError(
        "An image must be a PIL image, an ndarray (height, width[, channels]) or a tensor "
        f"(..., channels, height, width), but it is a {type(value).__name__}{shape}",
        code="data-type",
    )


def highest(image: np.ndarray) -> float:
    """Return the value of white: the largest of 8 or 16 bits, and 1 for floats."""
    if image.dtype.kind == "f":
        return 1.0
    if image.dtype in (np.uint8, np.uint16, np.int16):
        return int(np.iinfo(image.dtype).max)
    raise UsageError(
        f"An image must hold bytes (uint8), 16-bit integers or floats, but it holds {image.dtype}",
        code="data-dtype",
    )


def like(values: np.ndarray, image: np.ndarray, *, round_values: bool = True) -> np.ndarray:
    """Return values in the dtype of an image, within its range; integers are rounded or cut."""
    if image.dtype.kind == "f":
        return values.astype(image.dtype, copy=False)
    if image.dtype.kind == "b":
        return values >= 0.5
    if values.dtype.kind == "f" and round_values:
        values = np.round(values)
    limits = np.iinfo(image.dtype)
    return np.clip(values, limits.min, limits.max).astype(image.dtype)


def widen_texts(image: np.ndarray, dtypes: Sequence[str]) -> np.ndarray:
    """Return an image in a dtype that a library has kernels for; exact up to 2**53."""
    dtype: Any = np.float32 if image.dtype.itemsize <= 2 else np.float64
    if image.dtype.name in dtypes:
        dtype = image.dtype
    return np.require(image, dtype, ["C", "W"])  # torch warns of arrays that cannot be written to


def to_array(image: object) -> np.ndarray:
    """Return an image as an array; without a copy where that is possible."""
    if is_pil(image):
        return np.asarray(image)
    if not isinstance(image, (np.ndarray, torch.Tensor)) or image.ndim not in (2, 3):
        raise no_image(image)
    if isinstance(image, np.ndarray):
        return image
    array = image.detach().cpu().numpy()
    return array if image.ndim == 2 else np.ascontiguousarray(array.transpose(1, 2, 0))


def to_pil(array: np.ndarray) -> Image.Image:
    """Return a PIL image of an array of bytes."""
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(array))


def to_pil_of_mode(array: np.ndarray, mode: str) -> Image.Image:
    """Return a PIL image whose channels are those of a mode; nothing is converted."""
    converted = to_pil(array)
    if converted.mode == mode:
        return converted
    return Image.frombytes(mode, converted.size, converted.tobytes())


def to_pil_like(array: np.ndarray, image: Image.Image) -> Image.Image:
    """Return a PIL image of the mode and with the palette of another one."""
    converted = to_pil_of_mode(array, image.mode)
    if image.mode == "P":
        palette = image.getpalette("RGB")
        if palette is not None:
            converted.putpalette(palette)
    return converted


def on_arrays(
    image: ImageT, function: Callable[..., np.ndarray], *args: object, **kwargs: object
) -> ImageT:
    """Apply a function of arrays to an image of any kind; the result is of the same kind.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
        A tensor may have leading dimensions; its images are taken one by one.
    function : callable
        From an array ``(H, W[, C])`` to another.
    *args, **kwargs
        Further arguments of the function.
    """
    if isinstance(image, torch.Tensor) and image.ndim > 3:
        images = image.flatten(0, -4)
        if not len(images):  # of no images only the shape matters
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
    """Return an array of bytes, or refuse another one."""
    if image.dtype != np.uint8:
        raise UsageError(
            f"{operation} needs an image of bytes (uint8), but it holds {image.dtype}",
            code="data-dtype",
        )
    return image


def with_channels_of(result: np.ndarray, image: np.ndarray) -> np.ndarray:
    """Return a result of OpenCV, which drops the last dimension if it is one, with it again."""
    return result.reshape(*result.shape[:2], *image.shape[2:])


def two_lengths(name: str, size: Size) -> tuple[int, int]:
    """Return a size of one or two positive ints as two; `name` is that of the argument."""
    lengths = [size] if is_number(size) else list(size)
    if len(lengths) not in (1, 2):
        raise UsageError(
            f"{name} must be a positive int or two, but it is {size!r}",
            code="argument-value",
            argument=name,
        )
    return check_positive(name, lengths[0]), check_positive(name, lengths[-1])


def fill_values(image: object, fill: Fill) -> tuple[float, ...]:
    """Return a number for each channel of an image; 0 if there is no fill."""
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
