"""Image operations with torchvision's names, for ndarrays, PIL images and tensors.

Operations return the type of their input. PIL images are processed by Pillow, arrays by OpenCV and
torch. Tensors are converted to arrays if torch has no equivalent operation; gradients are then
lost.

Results equal Pillow's except for documented rounding. Byte arrays are processed as in Pillow;
operations on single pixel values use a table of 256 values.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps

from bigdl.common.checks import check_choice, check_integer, check_number
from bigdl.common.errors import UsageError, require
from bigdl.nano.lazy_names import public_names
from bigdl.nano.pytorch.vision.transforms.images import (
    OF_PILLOW,
    OF_TORCH,
    Fill,
    ImageT,
    InterpolationMode,
    Mode,
    Size,
    dimensions,
    fill_values,
    highest,
    interpolation_mode,
    is_number,
    is_pil,
    like,
    not_an_image,
    on_arrays,
    require_bytes,
    to_array,
    to_pil,
    to_pil_of_mode,
    to_supported_dtype,
    two_lengths,
    with_channels_of,
)

cv2 = require("cv2", "nano")

_BORDERS = {
    "edge": cv2.BORDER_REPLICATE,
    "reflect": cv2.BORDER_REFLECT_101,
    "symmetric": cv2.BORDER_REFLECT,
}
_NEAREST = (InterpolationMode.NEAREST, InterpolationMode.NEAREST_EXACT)
_OF_OPENCV = {
    InterpolationMode.BILINEAR: cv2.INTER_LINEAR,
    InterpolationMode.BICUBIC: cv2.INTER_CUBIC,
}
# Dtypes for which OpenCV has kernels.
_TYPES_OF_OPENCV = ("uint8", "uint16", "int16", "float32", "float64")
_BYTES = np.arange(256, dtype=np.float32)
# Pillow's weights of red, green and blue in the luma (ITU-R BT.601), in units of 1/65536.
_LUMA = (19595, 38470, 7471)

P = ParamSpec("P")


class _Operation(Protocol[P]):
    """Image operation that accepts all image types and returns the type of its input."""

    def __call__(self, img: ImageT, *args: P.args, **kwargs: P.kwargs) -> ImageT: ...


def _operation(
    of_pil: Callable[..., Image.Image] | None = None,
    check: Callable[[str, Any], Any] | None = None,
    mixes: bool = False,
) -> Callable[[Callable[Concatenate[np.ndarray, P], np.ndarray]], _Operation[P]]:
    """Return a decorator that turns a function of ndarrays into an operation on all image types.

    Parameters
    ----------
    of_pil : callable, optional
        Pillow's operation; called with positional arguments.
    check : callable, optional
        Check of the only argument besides the image; called with its name and value.
    mixes : bool
        Whether the operation mixes pixel values, which is impossible for palette images.
    """

    def decorate(of_array: Callable[Concatenate[np.ndarray, P], np.ndarray]) -> _Operation[P]:
        name = list(inspect.signature(of_array).parameters)[-1]

        @functools.wraps(of_array)
        def operate(img: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
            if check is not None:
                for value in (*args, *kwargs.values()):
                    check(name, value)
            if mixes and is_pil(img) and img.mode == "P":
                raise UsageError(
                    f"{of_array.__name__} cannot mix the colours of a palette; "
                    'call image.convert("RGB") first',
                    code="data-type",
                    method=of_array.__name__,
                )
            if of_pil is not None and is_pil(img):
                return of_pil(img, *args, *kwargs.values())
            return on_arrays(img, of_array, *args, **kwargs)

        return operate

    return decorate


_not_negative = functools.partial(check_number, least=0)


def get_dimensions(img: object) -> list[int]:
    """Return the number of channels, height and width of an image.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.get_dimensions(np.zeros((6, 8, 3), np.uint8))
    [3, 6, 8]
    """
    return list(dimensions(img))


def get_image_num_channels(img: object) -> int:
    """Return the number of channels of an image.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.get_image_num_channels(np.zeros((6, 8, 3), np.uint8))
    3
    """
    return dimensions(img)[0]


def get_image_size(img: object) -> list[int]:
    """Return the width and height of an image.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.get_image_size(np.zeros((6, 8, 3), np.uint8))
    [8, 6]
    """
    _, height, width = dimensions(img)
    return [width, height]


def resize(
    img: ImageT,
    size: Size,
    interpolation: Mode = InterpolationMode.BILINEAR,
    max_size: int | None = None,
    antialias: bool | None = True,
) -> ImageT:
    """Resize an image.

    Parameters
    ----------
    img : ndarray, PIL image or tensor
    size : int or (int, int)
        Length of the shorter side, or height and width.
    interpolation : InterpolationMode
    max_size : int, optional
        Upper limit of the longer side if `size` is one int.
    antialias : bool
        Whether to use antialiasing when downscaling; Pillow always does. None is True for arrays
        and False for tensors.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.resize(np.zeros((6, 8, 3), np.uint8), (3, 4)).shape
    (3, 4, 3)
    """
    now = dimensions(img)[1:]
    size = resized_to(now, size, max_size)
    mode = interpolation_mode(interpolation)
    if size == now:
        return img
    if is_pil(img):
        return img.resize(size[::-1], OF_PILLOW[mode])
    if isinstance(img, torch.Tensor) and mode in _NEAREST:
        rows, columns = (
            _nearest_of_tensors(*lengths, mode)
            for lengths in zip(img.shape[-2:], size, strict=True)
        )
        return img[..., rows[:, None], columns]
    widen = bool(antialias) if isinstance(img, torch.Tensor) else antialias is not False
    return on_arrays(img, _resize, size, mode, widen)


def _resize(
    img: np.ndarray, size: tuple[int, int], mode: InterpolationMode, antialias: bool
) -> np.ndarray:
    """Resize an array with Pillow's filters, whose width grows with the reduction factor.

    torch has byte kernels with Pillow's fixed-point weights (from Pillow-SIMD), which are several
    times as fast as Pillow. OpenCV has no such kernels.
    """
    if mode in _NEAREST:
        rows, columns = (_nearest(*lengths) for lengths in zip(img.shape, size, strict=False))
        return img[rows[:, None], columns]
    if mode not in OF_TORCH:
        return _resize_by_pillow(img, size, mode)
    # torch has kernels for bytes and floats; other dtypes are computed as floats and rounded.
    values = to_supported_dtype(img, ("uint8", "float32", "float64"))
    tensor = torch.from_numpy(values)
    tensor = tensor.view(1, *img.shape[:2], -1).permute(0, 3, 1, 2)
    tensor = torch.nn.functional.interpolate(
        tensor, size, mode=OF_TORCH[mode], antialias=antialias, align_corners=False
    )
    return like(tensor[0].permute(1, 2, 0).numpy().reshape(*size, *img.shape[2:]), img)


def _resize_by_pillow(
    img: np.ndarray, size: tuple[int, int], mode: InterpolationMode
) -> np.ndarray:
    """Resize with a filter that only Pillow has; convert dtypes other than uint8 to float."""
    if img.dtype == np.uint8:
        planes = img.reshape(*img.shape[:2], -1)
    else:
        planes = img.astype(np.float32).reshape(*img.shape[:2], -1)
    # Pillow can process three bands of bytes; it would treat two or four as colours and alpha.
    step = 3 if img.dtype == np.uint8 and planes.shape[2] == 3 else 1
    resized = [
        np.asarray(to_pil(planes[:, :, start : start + step]).resize(size[::-1], OF_PILLOW[mode]))
        for start in range(0, planes.shape[2], step)
    ]
    joined = resized[0] if step == 3 else np.stack(resized, axis=-1)
    return like(joined.reshape(*size, *img.shape[2:]), img)


def _nearest(before: int, after: int) -> np.ndarray:
    """Return each output row's source row in Pillow's nearest-neighbour resize."""
    rows = Image.fromarray(np.arange(before, dtype=np.int32)[None])
    return np.asarray(rows.resize((after, 1), Image.Resampling.NEAREST))[0]


def _nearest_of_tensors(before: int, after: int, mode: InterpolationMode) -> torch.Tensor:
    """Return each output row's source row in torch's nearest-neighbour resize."""
    rows = torch.arange(before, dtype=torch.float64)[None, None]
    return torch.nn.functional.interpolate(rows, after, mode=mode.value)[0, 0].long()


def resized_to(now: Sequence[int], size: Size, max_size: int | None = None) -> tuple[int, int]:
    """Return the height and width to which `resize` scales an image of height and width `now`.

    Examples
    --------
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.resized_to((480, 640), 240)  # the shorter side
    (240, 320)
    """
    if isinstance(size, int):
        size = (size,)
    if len(size) == 2:
        if max_size is not None:
            raise UsageError(
                "max_size can be combined with a size of one int, not with height and width",
                code="argument-conflict",
                argument="max_size",
            )
        return int(size[0]), int(size[1])
    (shorter,) = size
    if max_size is not None and max_size <= shorter:
        raise UsageError(
            f"max_size must be greater than size, but {max_size} <= {shorter}",
            code="argument-value",
            argument="max_size",
        )
    height, width = now
    longer = int(shorter * max(now) / min(now))
    if max_size is not None and longer > max_size:
        shorter, longer = int(max_size * shorter / longer), max_size
    return (shorter, longer) if height <= width else (longer, shorter)


def crop(img: ImageT, top: int, left: int, height: int, width: int) -> ImageT:
    """Crop a rectangle from an image; pixels outside the image are black.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> image = np.arange(12, dtype=np.uint8).reshape(3, 4, 1)
    >>> F.crop(image, top=1, left=0, height=1, width=2).ravel()
    array([4, 5], dtype=uint8)
    """
    if is_pil(img):
        return img.crop((left, top, left + width, top + height))
    _, rows, columns = dimensions(img)
    fits = top >= 0 and left >= 0 and top + height <= rows and left + width <= columns
    if not fits:
        return on_arrays(img, _crop_beyond, top, left, height, width)
    part: Any = np.s_[top : top + height, left : left + width]
    return img[(..., *part)] if isinstance(img, torch.Tensor) else img[part]


def _crop_beyond(img: np.ndarray, top: int, left: int, height: int, width: int) -> np.ndarray:
    inside = img[max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)]
    canvas = np.zeros((height, width, *img.shape[2:]), img.dtype)
    canvas[max(-top, 0) :, max(-left, 0) :][: inside.shape[0], : inside.shape[1]] = inside
    return canvas


def center_crop(img: ImageT, output_size: Size) -> ImageT:
    """Crop the center of an image, with a black border if the image is smaller.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.center_crop(np.arange(12, dtype=np.uint8).reshape(3, 4, 1), (1, 2)).ravel()
    array([5, 6], dtype=uint8)
    """
    height, width = two_lengths("output_size", output_size)
    _, rows, columns = dimensions(img)
    if height > rows or width > columns:
        across, down = max(width - columns, 0), max(height - rows, 0)
        border = [across // 2, down // 2, (across + 1) // 2, (down + 1) // 2]
        img = pad(img, border)
        _, rows, columns = dimensions(img)
    return crop(img, round((rows - height) / 2.0), round((columns - width) / 2.0), height, width)


def five_crop(img: ImageT, size: Size) -> tuple[ImageT, ...]:
    """Crop the four corners (top left, top right, bottom left, bottom right) and the center.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> image = np.arange(9, dtype=np.uint8).reshape(3, 3, 1)
    >>> [int(part.item()) for part in F.five_crop(image, 1)]
    [0, 2, 6, 8, 4]
    """
    height, width = two_lengths("size", size)
    _, rows, columns = dimensions(img)
    if height > rows or width > columns:
        raise UsageError(
            f"size {(height, width)} is larger than the image of {(rows, columns)}",
            code="data-shape",
            argument="size",
        )
    corners = [(0, 0), (0, columns - width), (rows - height, 0), (rows - height, columns - width)]
    crops: list[Any] = [crop(img, top, left, height, width) for top, left in corners]
    return *crops, center_crop(img, (height, width))


def ten_crop(img: ImageT, size: Size, vertical_flip: bool = False) -> tuple[ImageT, ...]:
    """Apply :func:`five_crop` to an image and its mirror image.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> image = np.arange(9, dtype=np.uint8).reshape(3, 3, 1)
    >>> [int(part.item()) for part in F.ten_crop(image, 1)]
    [0, 2, 6, 8, 4, 2, 0, 8, 6, 4]
    """
    mirrored = vflip(img) if vertical_flip else hflip(img)
    return five_crop(img, size) + five_crop(mirrored, size)


def resized_crop(
    img: ImageT,
    top: int,
    left: int,
    height: int,
    width: int,
    size: Size,
    interpolation: Mode = InterpolationMode.BILINEAR,
    antialias: bool | None = True,
) -> ImageT:
    """Crop an image with :func:`crop`, then resize it with :func:`resize`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> image = np.zeros((6, 8, 3), np.uint8)
    >>> F.resized_crop(image, top=0, left=0, height=3, width=4, size=(6, 8)).shape
    (6, 8, 3)
    """
    part = crop(img, top, left, height, width)
    return resize(part, size, interpolation, antialias=antialias)


@_operation()
def pad(
    img: np.ndarray, padding: Size, fill: Fill = 0, padding_mode: str = "constant"
) -> np.ndarray:
    """Add a border to an image.

    Parameters
    ----------
    img : ndarray, PIL image or tensor
    padding : int or sequence of 1, 2 or 4 ints
        All sides; left/right and top/bottom; or left, top, right and bottom. Negative values crop.
    fill : number or sequence
        Value of the border, or one value per channel.
    padding_mode : str
        ``"constant"``, ``"edge"``, ``"reflect"`` (edge not repeated) or ``"symmetric"`` (edge
        repeated).

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.pad(np.array([[[1], [2]]], np.uint8), [1, 0], fill=9).ravel()
    array([9, 1, 2, 9], dtype=uint8)
    """
    check_choice("padding_mode", padding_mode, ("constant", *_BORDERS))
    sides = [padding] if isinstance(padding, int) else list(padding)
    if len(sides) not in (1, 2, 4):
        raise UsageError(
            f"padding must be an int or have 1, 2 or 4 of them, but it is {padding!r}",
            code="argument-value",
            argument="padding",
        )
    left, top, right, bottom = (sides * 4)[:4]
    rows, columns = img.shape[:2]
    if min(sides) < 0:
        img = img[max(-top, 0) : rows + min(bottom, 0), max(-left, 0) : columns + min(right, 0)]
        left, top, right, bottom = (max(width, 0) for width in (left, top, right, bottom))
    size = (img.shape[0] + top + bottom, img.shape[1] + left + right)
    if padding_mode == "constant":
        padded = np.empty((*size, *img.shape[2:]), img.dtype)
        padded[...] = fill_values(img, fill)[0 if img.ndim == 2 else slice(None)]
        padded[top : top + img.shape[0], left : left + img.shape[1]] = img
        return padded
    if img.size and img.dtype.name in _TYPES_OF_OPENCV:
        border = _BORDERS[padding_mode]
        padded = cv2.copyMakeBorder(img, top, bottom, left, right, border)
        return with_channels_of(padded, img)
    widths = [(top, bottom), (left, right), (0, 0)]
    mode: Any = padding_mode
    return np.pad(img, widths[: img.ndim], mode)


def hflip(img: ImageT) -> ImageT:
    """Mirror an image horizontally.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.hflip(np.array([[[1], [2], [3]]], np.uint8)).ravel()
    array([3, 2, 1], dtype=uint8)
    """
    return _flip(img, Image.Transpose.FLIP_LEFT_RIGHT, 1)


def vflip(img: ImageT) -> ImageT:
    """Mirror an image vertically.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.vflip(np.array([[[1]], [[2]], [[3]]], np.uint8)).ravel()
    array([3, 2, 1], dtype=uint8)
    """
    return _flip(img, Image.Transpose.FLIP_TOP_BOTTOM, 0)


def _flip(img: ImageT, of_pil: Image.Transpose, axis: int) -> ImageT:
    if is_pil(img):
        return img.transpose(of_pil)
    if isinstance(img, torch.Tensor):
        return img.flip(axis - 2)
    return np.ascontiguousarray(np.flip(to_array(img), axis))


def rotate(
    img: ImageT,
    angle: float,
    interpolation: Mode = InterpolationMode.NEAREST,
    expand: bool = False,
    center: Sequence[float] | None = None,
    fill: Fill = None,
) -> ImageT:
    """Rotate an image counter-clockwise.

    Parameters
    ----------
    img : ndarray, PIL image or tensor
    angle : float
        Degrees.
    interpolation : InterpolationMode
        Nearest, bilinear or bicubic.
    expand : bool
        Whether to enlarge the result to contain the whole rotated image.
    center : (float, float), optional
        Column and row of the center of rotation; the center of the image by default.
    fill : number or sequence, optional
        Value of pixels outside of the image.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.rotate(np.array([[1, 2], [3, 4]], np.uint8)[:, :, None], 90)[:, :, 0]
    array([[2, 4],
           [1, 3]], dtype=uint8)
    """
    _, height, width = dimensions(img)
    mode = interpolation_mode(interpolation)
    if is_pil(img):
        color = _fill_of_pil(img, fill)
        middle = None if center is None else (center[0], center[1])
        return img.rotate(angle, OF_PILLOW[mode], expand, middle, fillcolor=color)
    quarters, beyond = divmod(angle % 360, 90)
    whole = width == height or expand or quarters % 2 == 0
    if center is None and not beyond and whole:  # pixels only move
        return _rotate_quarters(img, int(quarters))
    x, y = (width / 2, height / 2) if center is None else center
    # Rows grow downwards, so counter-clockwise on the screen is clockwise in coordinates.
    inverse = _move(x, y) @ _turn(angle) @ _move(-x, -y)
    size = (height, width)
    if expand:
        # size of the frame rotated backwards, as in Pillow
        corners = np.array([[0, width, width, 0], [0, 0, height, height], [1, 1, 1, 1]])
        points = (inverse @ corners)[:2]
        columns, rows = np.ceil(points.max(1)) - np.floor(points.min(1))
        size = (int(rows), int(columns))
        inverse = inverse @ _move((width - columns) / 2, (height - rows) / 2)
    return _warp(img, inverse, size, mode, fill)


def _rotate_quarters(img: ImageT, quarters: int) -> ImageT:
    """Rotate an image counter-clockwise by a multiple of 90 degrees."""
    return on_arrays(img, lambda array: np.ascontiguousarray(np.rot90(array, quarters)))


def affine(
    img: ImageT,
    angle: float,
    translate: Sequence[float],
    scale: float,
    shear: float | Sequence[float],
    interpolation: Mode = InterpolationMode.NEAREST,
    fill: Fill = None,
    center: Sequence[float] | None = None,
) -> ImageT:
    """Rotate, translate, scale and shear an image; keep its size.

    Parameters
    ----------
    img : ndarray, PIL image or tensor
    angle : float
        Degrees, clockwise.
    translate : (float, float)
        Pixels to the right and downwards.
    scale : float
    shear : float or (float, float)
        Degrees along the rows and along the columns.
    interpolation, fill, center
        See :func:`rotate`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> image = np.array([[[1], [2], [3]]], np.uint8)
    >>> F.affine(image, angle=0, translate=[1, 0], scale=1, shear=0).ravel()
    array([0, 1, 2], dtype=uint8)
    """
    check_number("scale", scale, above=0)
    _, height, width = dimensions(img)
    x, y = (width / 2, height / 2) if center is None else center
    along, down = (*((shear,) if is_number(shear) else shear), 0.0)[:2]
    shear_down = np.array([[1, 0, 0], [-math.tan(math.radians(down)), 1, 0], [0, 0, 1]])
    shear_along = np.array([[1, -math.tan(math.radians(along)), 0], [0, 1, 0], [0, 0, 1]])
    shape = _turn(angle) @ shear_down @ shear_along @ np.diag([scale, scale, 1])
    # The determinant is scale², so the inverse is exact and needs no solver.
    (a, b), (c, d) = shape[:2, :2] / scale**2
    backward = np.array([[d, -b, 0], [-c, a, 0], [0, 0, 1]])
    inverse = _move(x, y) @ backward @ _move(-x - translate[0], -y - translate[1])
    return _warp(img, inverse, (height, width), interpolation, fill)


def perspective(
    img: ImageT,
    startpoints: Sequence[Sequence[int]],
    endpoints: Sequence[Sequence[int]],
    interpolation: Mode = InterpolationMode.BILINEAR,
    fill: Fill = None,
) -> ImageT:
    """Transform an image so that four ``(column, row)`` points move to four other points.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> image = np.arange(1, 10, dtype=np.uint8).reshape(3, 3, 1)
    >>> corners = [[0, 0], [2, 0], [2, 2], [0, 2]]
    >>> bool((F.perspective(image, corners, corners) == image).all())  # nothing moves
    True
    """
    corners = [np.asarray(points, np.float32) for points in (endpoints, startpoints)]
    # float32, as torchvision's coefficients, so that ties between pixels are resolved alike
    inverse = cv2.getPerspectiveTransform(*corners).astype(np.float32).astype(np.float64)
    _, height, width = dimensions(img)
    return _warp(img, inverse, (height, width), interpolation, fill)


def _turn(degrees: float) -> np.ndarray:
    # rounded, so that right angles are exact, as in Pillow
    cos, sin = (round(of(math.radians(degrees)), 15) for of in (math.cos, math.sin))
    return np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])


def _move(x: float, y: float) -> np.ndarray:
    return np.array([[1, 0, x], [0, 1, y], [0, 0, 1]], dtype=float)


def _fill_of_pil(img: Image.Image, fill: Fill) -> float | tuple[float, ...]:
    """Convert a fill to Pillow's format: a number, or a tuple with one per band."""
    values = fill_values(img, fill)
    if img.mode != "F":
        values = tuple(int(value) for value in values)
    return values[0] if len(values) == 1 else values


def _warp_of_pil(
    img: Image.Image, inverse: np.ndarray, size: tuple[int, int], mode: Mode, fill: Fill
) -> Image.Image:
    coefficients = (inverse / inverse[2, 2]).ravel()
    affine = np.allclose(coefficients[6:8], 0, atol=1e-12)
    return img.transform(
        size[::-1],
        Image.Transform.AFFINE if affine else Image.Transform.PERSPECTIVE,
        coefficients[: 6 if affine else 8].tolist(),
        OF_PILLOW[interpolation_mode(mode)],
        fillcolor=_fill_of_pil(img, fill),
    )


@_operation(_warp_of_pil)
def _warp(
    img: np.ndarray, inverse: np.ndarray, size: tuple[int, int], mode: Mode, fill: Fill
) -> np.ndarray:
    """Apply a projective transformation to an image.

    Parameters
    ----------
    img : ndarray, PIL image or tensor
    inverse : ndarray (3, 3)
        Maps positions in the result to positions in the image; the center of the first pixel is
        at 0.5.
    size : tuple of int
        Height and width of the result.
    mode : InterpolationMode
    fill : number, sequence or None
        Value of pixels outside of the image.
    """
    if interpolation_mode(mode) in _NEAREST:
        return _gather_pixels(img, _source_indices(img, inverse, size), fill)
    _opencv_flag(mode)
    # here the center of the first pixel is at 0
    shift = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    matrix = np.linalg.inv(shift) @ inverse @ shift
    if _opencv_supports(img):
        sampled = cv2.warpPerspective(
            np.ascontiguousarray(img),
            matrix,
            size[::-1],
            flags=_opencv_flag(mode) | cv2.WARP_INVERSE_MAP,
            borderMode=cv2.BORDER_REPLICATE,
        )
        sampled = with_channels_of(sampled, img)
    else:
        down, across = np.mgrid[: size[0], : size[1]].astype(np.float64)
        x, y, z = np.tensordot(matrix, np.stack([across, down, np.ones(size)]), axes=1)
        sampled = like(_sample_at(_floats(img), x / z, y / z, mode, "border"), img)
    # as in Pillow, pixels inside and outside of the image are not mixed
    sampled[_source_indices(img, inverse, size) < 0] = fill_values(img, fill)
    return sampled


def _opencv_supports(img: np.ndarray) -> bool:
    """Return True for byte images with up to four channels.

    OpenCV 5 samples other dtypes differently; bicubic floats differ by tens of levels.
    """
    return img.dtype == np.uint8 and dimensions(img)[0] <= 4


def _floats(img: np.ndarray) -> np.ndarray:
    return to_supported_dtype(img, ("float32", "float64"))


def _sample_at(
    values: np.ndarray, across: np.ndarray, down: np.ndarray, mode: Mode, beyond: str
) -> np.ndarray:
    """Interpolate float values at fractional positions with grid_sample's padding mode `beyond`.

    The padding mode is ``"border"`` or ``"zeros"``.
    """
    rows, columns = values.shape[:2]
    grid = np.stack([(2 * across + 1) / columns - 1, (2 * down + 1) / rows - 1], axis=-1)
    planes = torch.from_numpy(values.reshape(1, rows, columns, -1)).permute(0, 3, 1, 2)
    samples = torch.nn.functional.grid_sample(
        planes,
        torch.from_numpy(grid)[None].to(planes.dtype),
        OF_TORCH[interpolation_mode(mode)],
        beyond,
        align_corners=False,
    )
    return samples[0].permute(1, 2, 0).numpy().reshape(*across.shape, *values.shape[2:])


def _source_indices(img: np.ndarray, inverse: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return the source pixel index of each result pixel, or -1 for pixels outside the source."""
    rows, columns = img.shape[:2]
    numbers = Image.fromarray(np.arange(rows * columns, dtype=np.int32).reshape(rows, columns))
    return np.asarray(_warp_of_pil(numbers, inverse, size, InterpolationMode.NEAREST, -1))


def _gather_pixels(img: np.ndarray, numbers: np.ndarray, fill: Fill) -> np.ndarray:
    """Return the pixels at the indices `numbers`, and the fill value where an index is -1."""
    taken = img.reshape(-1, *img.shape[2:])[numbers]
    taken[numbers < 0] = fill_values(img, fill)
    return taken


def _opencv_flag(interpolation: Mode) -> int:
    mode = interpolation_mode(interpolation)
    if mode not in _OF_OPENCV:
        raise UsageError(
            f"interpolation must be NEAREST, BILINEAR or BICUBIC here, not {mode.name}",
            code="argument-value",
            argument="interpolation",
        )
    return _OF_OPENCV[mode]


@_operation(mixes=True)
def elastic_transform(
    img: np.ndarray,
    displacement: torch.Tensor,
    interpolation: Mode = InterpolationMode.BILINEAR,
    fill: Fill = None,
) -> np.ndarray:
    """Displace each pixel of an image.

    Parameters
    ----------
    img : ndarray, PIL image or tensor
    displacement : Tensor (1, H, W, 2)
        Source of each pixel relative to its position, horizontal and vertical, in units in which
        the image is 2 wide and 2 high.
    interpolation : InterpolationMode
        Nearest, bilinear or bicubic.
    fill : number or sequence
        Value of pixels outside of the image.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> image = np.arange(9, dtype=np.uint8).reshape(3, 3, 1)
    >>> nowhere = torch.zeros(1, 3, 3, 2)
    >>> bool((F.elastic_transform(image, nowhere) == image).all())
    True
    """
    rows, columns = img.shape[:2]
    shape = (1, rows, columns, 2)
    if tuple(displacement.shape) != shape:
        raise UsageError(
            f"displacement must be {shape}, but it is {tuple(displacement.shape)}",
            code="data-shape",
            argument="displacement",
        )
    shifts = displacement[0].numpy() * np.array([columns / 2, rows / 2], dtype=np.float32)
    across = shifts[:, :, 0] + np.arange(columns, dtype=np.float32)
    down = shifts[:, :, 1] + np.arange(rows, dtype=np.float32)[:, None]
    if interpolation_mode(interpolation) in _NEAREST:
        x, y = np.rint(across).astype(np.intp), np.rint(down).astype(np.intp)
        inside = (x >= 0) & (x < columns) & (y >= 0) & (y < rows)
        return _gather_pixels(img, np.where(inside, y * columns + x, -1), fill)
    _opencv_flag(interpolation)
    values = _floats(img)
    moved = _sample_at(values, across, down, interpolation, "zeros")
    if fill is not None:
        # as in torchvision: the border between image and outside is blended twice
        ones = np.ones((rows, columns), values.dtype)
        share = _sample_at(ones, across, down, interpolation, "zeros")
        share = share if img.ndim == 2 else share[:, :, None]
        color = np.asarray(fill_values(img, fill), values.dtype)
        moved = moved * share + (1 - share) * color
    return like(moved, img)


def _on_color_channels(
    of_array: Callable[Concatenate[np.ndarray, P], np.ndarray],
) -> Callable[Concatenate[np.ndarray, P], np.ndarray]:
    """Wrap a function so that it does not change alpha, the last of two or four channels."""

    @functools.wraps(of_array)
    def operate(img: np.ndarray, *args: P.args, **kwargs: P.kwargs) -> np.ndarray:
        if img.ndim == 2 or img.shape[2] not in (2, 4):
            return of_array(img, *args, **kwargs)
        changed = img.copy()
        changed[:, :, :-1] = of_array(img[:, :, :-1], *args, **kwargs)
        return changed

    return operate


def _enhanced_by_pillow(name: str) -> Callable[[Image.Image, float], Image.Image]:
    enhancer = getattr(ImageEnhance, name)
    return lambda img, factor: enhancer(img).enhance(factor)


@_operation(_enhanced_by_pillow("Brightness"), _not_negative)
@_on_color_channels
def adjust_brightness(img: np.ndarray, brightness_factor: float) -> np.ndarray:
    """Change the brightness: 0 is black, 1 is unchanged, 2 is twice as bright.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.adjust_brightness(np.array([[[10, 100, 200]]], np.uint8), 1.5)
    array([[[ 15, 150, 255]]], dtype=uint8)
    """
    return _scale_from_gray(0.0, img, brightness_factor)


@_operation(_enhanced_by_pillow("Contrast"), _not_negative)
@_on_color_channels
def adjust_contrast(img: np.ndarray, contrast_factor: float) -> np.ndarray:
    """Change the contrast: 0 is gray, 1 is unchanged.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.adjust_contrast(np.array([[[50, 50, 50], [150, 150, 150]]], np.uint8), 2)[0, :, 0]
    array([  0, 200], dtype=uint8)
    """
    mean = _luma(img).mean()
    return _scale_from_gray(
        int(mean + 0.5) if img.dtype == np.uint8 else mean, img, contrast_factor
    )


@_operation(_enhanced_by_pillow("Color"), _not_negative)
@_on_color_channels
def adjust_saturation(img: np.ndarray, saturation_factor: float) -> np.ndarray:
    """Change the saturation: 0 is grayscale, 1 is unchanged.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.adjust_saturation(np.array([[[255, 0, 0]]], np.uint8), 0)
    array([[[76, 76, 76]]], dtype=uint8)
    """
    if not _is_color(img):
        return img
    return _blend(img, np.repeat(_luma(img)[:, :, None], 3, axis=2), saturation_factor)


@_operation(_enhanced_by_pillow("Sharpness"), _not_negative)
@_on_color_channels
def adjust_sharpness(img: np.ndarray, sharpness_factor: float) -> np.ndarray:
    """Change the sharpness: 0 is blurred, 1 is unchanged, 2 is sharper.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> image = np.array([[0, 0, 0], [0, 130, 0], [0, 0, 0]], np.uint8)[:, :, None]
    >>> F.adjust_sharpness(image, 0)[1, 1]
    array([50], dtype=uint8)
    """
    if min(img.shape[:2]) <= 2:
        return img
    kernel = np.ones((3, 3), np.float32)
    kernel[1, 1] = 5
    values = to_supported_dtype(img, _TYPES_OF_OPENCV)
    smooth = like(cv2.filter2D(values, -1, kernel / 13).reshape(img.shape), img)
    for edge in (np.s_[0], np.s_[-1], np.s_[:, 0], np.s_[:, -1]):
        smooth[edge] = img[edge]
    return _blend(img, smooth, sharpness_factor)


def _hue_of_pil(img: Image.Image, hue_factor: float) -> Image.Image:
    if img.mode in ("1", "L", "I", "F"):
        return img
    hue, saturation, value = img.convert("HSV").split()
    turned = (np.asarray(hue).astype(np.int16) + int(hue_factor * 255)).astype(np.uint8)
    bands = (Image.fromarray(turned), saturation, value)
    return Image.merge("HSV", bands).convert(img.mode)


@_operation(_hue_of_pil, functools.partial(check_number, least=-0.5, most=0.5))
@_on_color_channels
def adjust_hue(img: np.ndarray, hue_factor: float) -> np.ndarray:
    """Shift the hue by a fraction (-0.5 to 0.5) of the color wheel.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> red = np.array([[[255, 0, 0]]], np.uint8)
    >>> F.adjust_hue(red, 0.5)  # nearly the opposite colour
    array([[[  0, 255, 252]]], dtype=uint8)
    """
    if not _is_color(img):
        return img
    if img.dtype == np.uint8:
        hsv = cv2.cvtColor(np.ascontiguousarray(img), cv2.COLOR_RGB2HSV_FULL)
        hsv[:, :, 0] += np.uint8(int(hue_factor * 255) % 256)  # uint8 wraps around
        return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)
    white = np.float32(highest(img))
    hsv = cv2.cvtColor(np.ascontiguousarray(img, np.float32) / white, cv2.COLOR_RGB2HSV)
    hsv[:, :, 0] = (hsv[:, :, 0] + np.float32(hue_factor * 360)) % 360
    return like(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB) * white, img)


def _gamma_of_pil(img: Image.Image, gamma: float, gain: float = 1) -> Image.Image:
    colors = adjust_gamma(np.asarray(img.convert("RGB")), gamma, gain)
    return Image.fromarray(colors).convert(img.mode)


@_operation(_gamma_of_pil)
@_on_color_channels
def adjust_gamma(img: np.ndarray, gamma: float, gain: float = 1) -> np.ndarray:
    """Apply gamma correction to values in 0…1; an exponent above 1 darkens shadows.

    Parameters
    ----------
    img : ndarray, PIL image or tensor
    gamma : float
        Exponent, at least 0.
    gain : float
        Factor by which the result is multiplied.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.adjust_gamma(np.array([[[0, 64, 255]]], np.uint8), gamma=2)
    array([[[  0,  16, 255]]], dtype=uint8)
    """
    check_number("gamma", gamma, least=0)
    white = highest(img)
    if img.dtype.kind == "f":
        return np.clip(gain * img**gamma, 0, 1).astype(img.dtype)
    # each integer gets an interval of equal length
    known = _BYTES.astype(np.float64) if img.dtype == np.uint8 else img.astype(np.float64)
    powers = gain * (np.maximum(known, 0) / white) ** gamma
    values = np.clip((white + 1 - 1e-3) * powers, 0, white).astype(img.dtype)
    return values[img] if img.dtype == np.uint8 else values


def _grayscale_of_pil(img: Image.Image, num_output_channels: int = 1) -> Image.Image:
    gray = img.convert("L")
    return gray if num_output_channels == 1 else Image.merge("RGB", (gray, gray, gray))


@_operation(_grayscale_of_pil, functools.partial(check_choice, choices=(1, 3)))
def rgb_to_grayscale(img: np.ndarray, num_output_channels: int = 1) -> np.ndarray:
    """Convert an image to luma, with one or three equal channels.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.rgb_to_grayscale(np.array([[[255, 0, 0], [0, 255, 0]]], np.uint8)).ravel()
    array([ 76, 150], dtype=uint8)
    """
    if img.ndim == 3 and img.shape[2] in (2, 4):  # without alpha
        img = img[:, :, :-1]
    gray = _luma(img)
    if num_output_channels == 3:
        return np.repeat(gray[:, :, None], 3, axis=2)
    return gray.reshape(*gray.shape, *(1,) * (img.ndim - 2))


to_grayscale = rgb_to_grayscale


@_operation(ImageOps.invert)
def invert(img: np.ndarray) -> np.ndarray:
    """Invert an image.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.invert(np.array([[[0, 55, 255]]], np.uint8))
    array([[[255, 200,   0]]], dtype=uint8)
    """
    return np.asarray(highest(img), img.dtype) - img


@_operation(ImageOps.posterize, functools.partial(check_integer, least=0, most=8))
def posterize(img: np.ndarray, bits: int) -> np.ndarray:
    """Keep the `bits` (0 to 8) most significant bits of each byte.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.posterize(np.array([[[1, 100, 255]]], np.uint8), 2)
    array([[[  0,  64, 192]]], dtype=uint8)
    """
    return require_bytes(img, "posterize") & np.uint8(256 - (1 << (8 - bits)))


@_operation(ImageOps.solarize)
def solarize(img: np.ndarray, threshold: float) -> np.ndarray:
    """Invert values of at least `threshold`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.solarize(np.array([[[1, 100, 255]]], np.uint8), 128)
    array([[[  1, 100,   0]]], dtype=uint8)
    """
    white = highest(img)
    check_number("threshold", threshold, most=white)
    return np.where(img >= threshold, np.asarray(white, img.dtype) - img, img)


@_operation(ImageOps.autocontrast)
def autocontrast(img: np.ndarray) -> np.ndarray:
    """Stretch each channel so that its darkest value becomes black and its brightest white.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.autocontrast(np.array([[[100], [110], [120]]], np.uint8)).ravel()
    array([  0, 127, 255], dtype=uint8)
    """
    if img.dtype == np.uint8:
        return np.asarray(ImageOps.autocontrast(to_pil(img))).reshape(img.shape)
    white = highest(img)
    values = to_supported_dtype(img, ("float32", "float64"))
    low, high = values.min((0, 1)), values.max((0, 1))
    flat = high == low
    stretched = (values - low) * (white / np.where(flat, 1, high - low))
    return like(np.where(flat, values, stretched), img, round_values=False)


@_operation(ImageOps.equalize)
def equalize(img: np.ndarray) -> np.ndarray:
    """Equalize the histogram of each channel.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> image = np.arange(100, 104, dtype=np.uint8).repeat(256).reshape(32, 32, 1)
    >>> np.unique(F.equalize(image))
    array([  0,  85, 171, 255], dtype=uint8)
    """
    equal = ImageOps.equalize(to_pil(require_bytes(img, "equalize")))
    return np.asarray(equal).reshape(img.shape)


@_operation(mixes=True)
def gaussian_blur(
    img: np.ndarray, kernel_size: Size, sigma: float | Sequence[float] | None = None
) -> np.ndarray:
    """Blur an image with a Gaussian kernel; edges are mirrored.

    Parameters
    ----------
    img : ndarray, PIL image or tensor
    kernel_size : int or (int, int)
        Odd width and height of the kernel.
    sigma : float or (float, float), optional
        Standard deviations in pixels; by default 0.15 times the kernel size, plus 0.35.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> image = np.zeros((5, 5, 1), np.uint8)
    >>> image[2, 2] = 160
    >>> F.gaussian_blur(image, kernel_size=3, sigma=1.0)[1:4, 1:4, 0]
    array([[12, 20, 12],
           [20, 33, 20],
           [12, 20, 12]], dtype=uint8)
    """
    kernel = two_lengths("kernel_size", kernel_size)
    if any(size % 2 == 0 for size in kernel):
        raise UsageError(
            f"kernel_size must be odd, but it is {kernel_size!r}",
            code="argument-value",
            argument="kernel_size",
        )
    if sigma is None:
        sigma = [0.15 * size + 0.35 for size in kernel]
    sigmas = [float(value) for value in (sigma if isinstance(sigma, Sequence) else [sigma])]
    if min(sigmas) <= 0:
        raise UsageError(
            f"sigma must be positive, but it is {sigma}", code="argument-value", argument="sigma"
        )
    blurred = cv2.GaussianBlur(
        to_supported_dtype(img, _TYPES_OF_OPENCV),
        kernel,
        sigmas[0],
        sigmaY=sigmas[-1],
        borderType=cv2.BORDER_REFLECT_101,
    )
    return like(with_channels_of(blurred, img), img)


def _scale_from_gray(gray: float, img: np.ndarray, factor: float) -> np.ndarray:
    """Scale the difference between each value of an image and a gray value by a factor."""
    if img.dtype != np.uint8:
        return _blend(img, np.asarray(gray), factor)
    values = np.float32(gray) + np.float32(factor) * (_BYTES - np.float32(gray))
    table = np.clip(values, 0, 255).astype(np.uint8)
    return cv2.LUT(np.ascontiguousarray(img), table).reshape(img.shape)


def _blend(img: np.ndarray, other: object, factor: float) -> np.ndarray:
    """Return ``other + factor (image - other)``, clipped to the valid range of pixel values."""
    if img.dtype == np.uint8:
        img = np.ascontiguousarray(img)
        return cv2.addWeighted(img, factor, other, 1 - factor, 0).reshape(img.shape)
    white = highest(img)
    values = to_supported_dtype(img, ("float32", "float64"))
    mixed = other + np.asarray(factor, values.dtype) * (values - other)
    return np.clip(mixed, 0, white).astype(img.dtype)


def _is_color(img: np.ndarray) -> bool:
    if img.ndim == 2 or img.shape[2] == 1:
        return False
    if img.shape[2] != 3:
        raise UsageError(
            f"Colours need 1 or 3 channels, but the image has {img.shape[2]}", code="data-shape"
        )
    return True


def _luma(img: np.ndarray) -> np.ndarray:
    """Return the luma ``(H, W)`` of the pixels, in the image's dtype."""
    if not _is_color(img):
        return img.reshape(img.shape[:2])
    if img.dtype == np.uint8:
        return np.asarray(to_pil(img).convert("L"))
    highest(img)
    weights = np.array(_LUMA, np.float64) / 65536
    return like(img @ weights.astype(img.dtype if img.dtype.kind == "f" else None), img)


def to_tensor(
    pic: object, memory_format: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    """Convert an image to a tensor ``(C, H, W)``: bytes 0…255 become floats in 0…1.

    Parameters
    ----------
    pic : ndarray, PIL image or tensor
    memory_format : torch.memory_format
        ``torch.channels_last`` keeps the order of the array's values in memory, so that batches
        have the memory format in which convolutions are fastest.

    Returns
    -------
    torch.Tensor

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.to_tensor(np.array([[[0], [51], [255]]], np.uint8))
    tensor([[[0.0000, 0.2000, 1.0000]]])
    """
    values = _channels_first(pic)
    if is_pil(pic):
        if values.dtype == torch.bool:  # black and white
            values = values.to(torch.uint8) * 255
        if values.dtype == torch.uint16:  # torch supports few operations on it
            values = values.to(torch.int32)
    # only bytes are scaled; other values keep their dtype
    is_bytes = values.dtype == torch.uint8
    dtype = torch.get_default_dtype() if is_bytes else values.dtype
    if values.ndim == 3:  # channels_last requires a batch dimension
        tensor = torch.empty((1, *values.shape), dtype=dtype, memory_format=memory_format)[0]
    else:
        tensor = torch.empty(values.shape, dtype=dtype)
    tensor.copy_(values)
    return tensor.div_(255) if is_bytes else tensor


def _channels_first(img: object) -> torch.Tensor:
    """Return an image's values as a tensor ``(C, H, W)``, a view if possible."""
    if isinstance(img, torch.Tensor):
        return img
    array = to_array(img)
    if array.ndim == 2:
        array = array[:, :, None]
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array).permute(2, 0, 1)


def pil_to_tensor(pic: object) -> torch.Tensor:
    """Convert an image to a tensor ``(C, H, W)`` without changing values or dtype.

    Examples
    --------
    >>> from PIL import Image
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.pil_to_tensor(Image.new("RGB", (8, 6), "red"))[:, 0, 0]
    tensor([255,   0,   0], dtype=torch.uint8)
    """
    return _channels_first(pic).contiguous()


def convert_image_dtype(image: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Convert an image tensor to another dtype; floats are in 0…1, integers use their full range.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.convert_image_dtype(torch.tensor([[[0.0, 0.5, 1.0]]]), torch.uint8)
    tensor([[[  0, 127, 255]]], dtype=torch.uint8)
    """
    if image.dtype == dtype:
        return image
    if dtype.is_floating_point:
        values = image.to(dtype)
        return values if image.is_floating_point() else values / _largest(image.dtype)
    largest = _largest(dtype)
    if image.is_floating_point():
        if dtype == torch.int64:
            raise UsageError(
                f"Values of {image.dtype} in 0…1 cannot become int64, which has more values than "
                "they can distinguish; convert to int32",
                code="data-dtype",
            )
        if dtype in (torch.int32, torch.uint32):
            image = image.to(torch.float64)
        # each integer gets an interval of equal length
        return (image * (largest + 1 - 1e-3)).to(dtype)
    have = _largest(image.dtype)
    if have > largest:
        return torch.div(image, (have + 1) // (largest + 1), rounding_mode="floor").to(dtype)
    return image.to(dtype) * ((largest + 1) // (have + 1))


def _largest(dtype: torch.dtype) -> int:
    """Return the largest value of an integer dtype, or 1 for bool."""
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


# Pillow's modes by number of byte channels; the first is the default.
_MODES_OF_CHANNELS = {2: ("LA",), 3: ("RGB", "YCbCr", "HSV"), 4: ("RGBA", "CMYK", "RGBX")}


def to_pil_image(pic: object, mode: str | None = None) -> Image.Image:
    """Convert an array or a tensor ``(C, H, W)`` to a PIL image; floats in 0…1 become bytes.

    Parameters
    ----------
    pic : ndarray, PIL image or tensor
    mode : str, optional
        Mode of the channels: ``"HSV"`` or ``"YCbCr"`` for three, ``"CMYK"`` for four, ``"F"`` for
        one channel of unchanged floats. For other modes the image is converted.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.to_pil_image(torch.ones(3, 6, 8)).getpixel((0, 0))
    (255, 255, 255)
    """
    if is_pil(pic):
        return pic if mode is None else pic.convert(mode)
    if isinstance(pic, torch.Tensor) and pic.is_floating_point() and mode != "F":
        pic = pic.mul(255).byte()
    array = to_array(pic)
    if mode == "F" and array.dtype.kind == "f":
        return to_pil(array.astype(np.float32))
    if mode in _MODES_OF_CHANNELS.get(dimensions(array)[0], ()) and array.dtype == np.uint8:
        return to_pil_of_mode(array, mode)
    if dimensions(array)[0] > 1 and array.dtype != np.uint8:
        raise UsageError(
            f"A PIL image of {dimensions(array)[0]} channels holds bytes, not {array.dtype}; "
            "convert the image to uint8",
            code="data-dtype",
        )
    converted = to_pil(array)
    return converted if mode in (None, converted.mode) else converted.convert(mode)


def normalize(
    tensor: torch.Tensor, mean: Sequence[float], std: Sequence[float], inplace: bool = False
) -> torch.Tensor:
    """Normalize each channel of a float tensor ``(..., C, H, W)``: ``(tensor - mean) / std``.

    Raises
    ------
    UsageError
        If the tensor's dtype is not floating point, or a standard deviation is 0.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.normalize(torch.tensor([[[0.0, 0.5, 1.0]]]), mean=[0.5], std=[0.25])
    tensor([[[-2.,  0.,  2.]]])
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(
            f"normalize needs a tensor, not a {type(tensor).__name__}; apply ToTensor first",
            code="data-type",
        )
    if not tensor.is_floating_point():
        raise UsageError(
            f"normalize needs a tensor of floats, not {tensor.dtype}; apply ToTensor first",
            code="data-dtype",
        )
    if tensor.ndim < 3:
        raise not_an_image(tensor)
    means = torch.as_tensor(mean, dtype=tensor.dtype).view(-1, 1, 1)
    scales = torch.as_tensor(std, dtype=tensor.dtype).view(-1, 1, 1)
    if (scales == 0).any():
        raise UsageError(
            f"std must not be 0, but it is {scales.flatten().tolist()}",
            code="argument-value",
            argument="std",
        )
    return (tensor if inplace else tensor.clone()).sub_(means).div_(scales)


def erase(
    img: torch.Tensor,
    i: int,
    j: int,
    h: int,
    w: int,
    v: torch.Tensor | float,
    inplace: bool = False,
) -> torch.Tensor:
    """Overwrite `h` rows and `w` columns of a tensor with `v`, starting at row `i`, column `j`.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.erase(torch.ones(1, 2, 3), i=0, j=1, h=2, w=1, v=torch.zeros(1, 1, 1))
    tensor([[[1., 0., 1.],
             [1., 0., 1.]]])
    """
    if not isinstance(img, torch.Tensor):
        raise UsageError(
            f"erase needs a tensor, not a {type(img).__name__}; apply ToTensor first",
            code="data-type",
        )
    img = img if inplace else img.clone()
    img[..., i : i + h, j : j + w] = v
    return img


__all__ = public_names(__name__)
