"""Operations on images of any kind, with torchvision's names.

An operation gives what it was given: an array for an array, a PIL image for a PIL image, a tensor
for a tensor. PIL images are left to Pillow, arrays go through OpenCV and torch; tensors are taken
as arrays where torch has no equal operation, and carry no gradients there.

Results equal Pillow's, but for rounding where the documentation says so. Bytes of arrays are
treated as Pillow treats them; what depends on a pixel's value alone is a table of 256 values.
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
    no_image,
    on_arrays,
    require_bytes,
    to_array,
    to_pil,
    two_lengths,
    with_channels_of,
)

cv2 = require("cv2", "nano")

_BORDERS = {
    "constant": cv2.BORDER_CONSTANT,
    "edge": cv2.BORDER_REPLICATE,
    "reflect": cv2.BORDER_REFLECT_101,
    "symmetric": cv2.BORDER_REFLECT,
}
_OF_OPENCV = {
    InterpolationMode.NEAREST: cv2.INTER_NEAREST,
    InterpolationMode.NEAREST_EXACT: cv2.INTER_NEAREST,
    InterpolationMode.BILINEAR: cv2.INTER_LINEAR,
    InterpolationMode.BICUBIC: cv2.INTER_CUBIC,
}
_BYTES = np.arange(256, dtype=np.float32)
# The weights of red, green and blue in the luma of ITU-R BT.601, in 1/65536, as Pillow has them.
_LUMA = (19595, 38470, 7471)

P = ParamSpec("P")


class _Operation(Protocol[P]):
    """A function of images of any kind, whose result is of the same kind."""

    def __call__(self, image: ImageT, *args: P.args, **kwargs: P.kwargs) -> ImageT: ...


def _operation(
    of_pil: Callable[..., Image.Image] | None = None,
    check: Callable[[str, Any], Any] | None = None,
) -> Callable[[Callable[Concatenate[np.ndarray, P], np.ndarray]], _Operation[P]]:
    """Return a decorator: a function of arrays becomes one of images of any kind.

    Parameters
    ----------
    of_pil : callable, optional
        Pillow's operation, which is given the arguments by position.
    check : callable, optional
        Called with the name and the value of the one argument that there is beside the image.
    """

    def decorate(of_array: Callable[Concatenate[np.ndarray, P], np.ndarray]) -> _Operation[P]:
        name = list(inspect.signature(of_array).parameters)[-1]

        @functools.wraps(of_array)
        def operate(image: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
            if check is not None:
                for value in (*args, *kwargs.values()):
                    check(name, value)
            if of_pil is not None and is_pil(image):
                return of_pil(image, *args, *kwargs.values())
            return on_arrays(image, of_array, *args, **kwargs)

        return operate

    return decorate


_not_negative = functools.partial(check_number, least=0)


def get_dimensions(image: Any) -> list[int]:
    """Return channels, height and width.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.get_dimensions(np.zeros((6, 8, 3), np.uint8))
    [3, 6, 8]
    """
    return list(dimensions(image))


def get_image_size(image: Any) -> list[int]:
    """Return width and height.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.get_image_size(np.zeros((6, 8, 3), np.uint8))
    [8, 6]
    """
    _, height, width = dimensions(image)
    return [width, height]


def resize(
    image: ImageT,
    size: Size,
    interpolation: Mode = InterpolationMode.BILINEAR,
    max_size: int | None = None,
    antialias: bool | None = True,
) -> ImageT:
    """Make an image larger or smaller.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
    size : int or (int, int)
        Length of the shorter edge, or height and width.
    interpolation : InterpolationMode
    max_size : int, optional
        Upper limit of the longer edge where `size` is one int.
    antialias : bool
        Whether all pixels count when an image is made smaller; Pillow always does that.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.resize(np.zeros((6, 8, 3), np.uint8), (3, 4)).shape
    (3, 4, 3)
    """
    now = dimensions(image)[1:]
    size = resized_to(now, size, max_size)
    mode = interpolation_mode(interpolation)
    if size == now:
        return image
    if is_pil(image):
        return image.resize(size[::-1], OF_PILLOW[mode])
    return on_arrays(image, _resize, size, mode, antialias is not False)


def _resize(
    image: np.ndarray, size: tuple[int, int], mode: InterpolationMode, antialias: bool
) -> np.ndarray:
    """Resize by Pillow's filters, which widen with the factor of the reduction.

    torch has kernels for bytes whose weights are Pillow's in fixed point (of Pillow-SIMD), several
    times as fast as Pillow; OpenCV has none that widen.
    """
    if mode.value.startswith("nearest"):
        return image[_nearest(image.shape[0], size[0])[:, None], _nearest(image.shape[1], size[1])]
    if mode not in OF_TORCH:
        return np.asarray(to_pil(require_bytes(image, mode)).resize(size[::-1], OF_PILLOW[mode]))
    tensor = torch.from_numpy(np.ascontiguousarray(image))
    tensor = tensor.view(1, *image.shape[:2], -1).permute(0, 3, 1, 2)
    tensor = torch.nn.functional.interpolate(
        tensor, size, mode=OF_TORCH[mode], antialias=antialias, align_corners=False
    )
    return tensor[0].permute(1, 2, 0).numpy().reshape(*size, *image.shape[2:])


def _nearest(before: int, after: int) -> np.ndarray:
    """Return the row that each row is taken from: the one in which its centre lies."""
    return ((np.arange(after) + 0.5) * (before / after)).astype(np.intp)


def resized_to(now: Sequence[int], size: Size, max_size: int | None = None) -> tuple[int, int]:
    """Return height and width after `resize` of an image of this height and width.

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
            raise UsageError("max_size goes with a size of one int, not with height and width")
        return int(size[0]), int(size[1])
    (shorter,) = size
    if max_size is not None and max_size <= shorter:
        raise UsageError(f"max_size must be greater than size, but {max_size} <= {shorter}")
    height, width = now
    longer = int(shorter * max(now) / min(now))
    if max_size is not None and longer > max_size:
        shorter, longer = int(max_size * shorter / longer), max_size
    return (shorter, longer) if height <= width else (longer, shorter)


def crop(image: ImageT, top: int, left: int, height: int, width: int) -> ImageT:
    """Return a part of an image; what lies outside of it is black.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> image = np.arange(12, dtype=np.uint8).reshape(3, 4, 1)
    >>> F.crop(image, top=1, left=0, height=1, width=2).ravel()
    array([4, 5], dtype=uint8)
    """
    if is_pil(image):
        return image.crop((left, top, left + width, top + height))
    _, rows, columns = dimensions(image)
    fits = top >= 0 and left >= 0 and top + height <= rows and left + width <= columns
    if not fits:
        return on_arrays(image, _crop_beyond, top, left, height, width)
    part: Any = np.s_[top : top + height, left : left + width]
    return image[(..., *part)] if isinstance(image, torch.Tensor) else image[part]


def _crop_beyond(image: np.ndarray, top: int, left: int, height: int, width: int) -> np.ndarray:
    inside = image[max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)]
    canvas = np.zeros((height, width, *image.shape[2:]), image.dtype)
    canvas[max(-top, 0) :, max(-left, 0) :][: inside.shape[0], : inside.shape[1]] = inside
    return canvas


def center_crop(image: ImageT, output_size: Size) -> ImageT:
    """Return the middle of an image, with a black border where it is smaller.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.center_crop(np.arange(12, dtype=np.uint8).reshape(3, 4, 1), (1, 2)).ravel()
    array([5, 6], dtype=uint8)
    """
    height, width = two_lengths("output_size", output_size)
    _, rows, columns = dimensions(image)
    if height > rows or width > columns:
        across, down = max(width - columns, 0), max(height - rows, 0)
        border = [across // 2, down // 2, (across + 1) // 2, (down + 1) // 2]
        image = pad(image, border)
        _, rows, columns = dimensions(image)
    return crop(image, round((rows - height) / 2.0), round((columns - width) / 2.0), height, width)


def five_crop(image: ImageT, size: Size) -> tuple[ImageT, ...]:
    """Return the four corners (top left, top right, bottom left, bottom right) and the middle.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> image = np.arange(9, dtype=np.uint8).reshape(3, 3, 1)
    >>> [int(part.item()) for part in F.five_crop(image, 1)]
    [0, 2, 6, 8, 4]
    """
    height, width = two_lengths("size", size)
    _, rows, columns = dimensions(image)
    if height > rows or width > columns:
        raise UsageError(f"size {(height, width)} is larger than the image of {(rows, columns)}")
    corners = [(0, 0), (0, columns - width), (rows - height, 0), (rows - height, columns - width)]
    crops: list[Any] = [crop(image, top, left, height, width) for top, left in corners]
    return *crops, center_crop(image, (height, width))


def ten_crop(image: ImageT, size: Size, vertical_flip: bool = False) -> tuple[ImageT, ...]:
    """Apply :func:`five_crop` to an image and to its mirror image.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> image = np.arange(9, dtype=np.uint8).reshape(3, 3, 1)
    >>> [int(part.item()) for part in F.ten_crop(image, 1)]
    [0, 2, 6, 8, 4, 2, 0, 8, 6, 4]
    """
    mirrored = vflip(image) if vertical_flip else hflip(image)
    return five_crop(image, size) + five_crop(mirrored, size)


def resized_crop(
    image: ImageT,
    top: int,
    left: int,
    height: int,
    width: int,
    size: Size,
    interpolation: Mode = InterpolationMode.BILINEAR,
    antialias: bool | None = True,
) -> ImageT:
    """Apply :func:`crop`, then :func:`resize`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> image = np.zeros((6, 8, 3), np.uint8)
    >>> F.resized_crop(image, top=0, left=0, height=3, width=4, size=(6, 8)).shape
    (6, 8, 3)
    """
    part = crop(image, top, left, height, width)
    return resize(part, size, interpolation, antialias=antialias)


@_operation()
def pad(
    image: np.ndarray, padding: Size, fill: Fill = 0, padding_mode: str = "constant"
) -> np.ndarray:
    """Add a border.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
    padding : int or sequence of 1, 2 or 4 ints
        On all sides; left and right, top and bottom; left, top, right, bottom. A negative one
        cuts.
    fill : number or sequence
        The value of the border, or one for each channel.
    padding_mode : str
        ``"constant"``, ``"edge"``, ``"reflect"`` (without the edge) or ``"symmetric"`` (with it).

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.pad(np.array([[[1], [2]]], np.uint8), [1, 0], fill=9).ravel()
    array([9, 1, 2, 9], dtype=uint8)
    """
    check_choice("padding_mode", padding_mode, _BORDERS)
    sides = [padding] if isinstance(padding, int) else list(padding)
    if len(sides) not in (1, 2, 4):
        raise UsageError(f"padding must be an int or have 1, 2 or 4 of them, but it is {padding!r}")
    left, top, right, bottom = (sides * 4)[:4]
    rows, columns = image.shape[:2]
    if min(sides) < 0:
        image = image[max(-top, 0) : rows + min(bottom, 0), max(-left, 0) : columns + min(right, 0)]
        left, top, right, bottom = (max(width, 0) for width in (left, top, right, bottom))
    border, value = _BORDERS[padding_mode], fill_values(image, fill)[:4]
    padded = cv2.copyMakeBorder(image, top, bottom, left, right, border, value=value)
    return with_channels_of(padded, image)


def hflip(image: ImageT) -> ImageT:
    """Mirror left and right.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.hflip(np.array([[[1], [2], [3]]], np.uint8)).ravel()
    array([3, 2, 1], dtype=uint8)
    """
    return _flip(image, Image.Transpose.FLIP_LEFT_RIGHT, 1)


def vflip(image: ImageT) -> ImageT:
    """Mirror top and bottom.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.vflip(np.array([[[1]], [[2]], [[3]]], np.uint8)).ravel()
    array([3, 2, 1], dtype=uint8)
    """
    return _flip(image, Image.Transpose.FLIP_TOP_BOTTOM, 0)


def _flip(image: Any, of_pil: Image.Transpose, axis: int) -> Any:
    if is_pil(image):
        return image.transpose(of_pil)
    if isinstance(image, torch.Tensor):
        return image.flip(axis - 2)
    return np.ascontiguousarray(np.flip(to_array(image), axis))


def rotate(
    image: ImageT,
    angle: float,
    interpolation: Mode = InterpolationMode.NEAREST,
    expand: bool = False,
    center: Sequence[float] | None = None,
    fill: Fill = None,
) -> ImageT:
    """Turn an image counter-clockwise.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
    angle : float
        Degrees.
    interpolation : InterpolationMode
        Nearest, bilinear or bicubic.
    expand : bool
        Make the result large enough for all of the image.
    center : (float, float), optional
        Column and row that stay where they are; the middle by default.
    fill : number or sequence, optional
        What lies outside of the image.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.rotate(np.array([[1, 2], [3, 4]], np.uint8)[:, :, None], 90)[:, :, 0]
    array([[2, 4],
           [1, 3]], dtype=uint8)
    """
    _, height, width = dimensions(image)
    x, y = (width / 2, height / 2) if center is None else center
    # Rows grow downwards: what turns counter-clockwise on the screen turns clockwise in numbers.
    inverse = _move(x, y) @ _turn(angle) @ _move(-x, -y)
    size = (height, width)
    if expand:
        corners = np.array([[0, width, width, 0], [0, 0, height, height], [1, 1, 1, 1]])
        places = np.round((np.linalg.inv(inverse) @ corners)[:2], 9)
        columns, rows = np.ceil(places.max(1)) - np.floor(places.min(1))
        size = (int(rows), int(columns))
        inverse = inverse @ _move((width - columns) / 2, (height - rows) / 2)
    return _warp(image, inverse, size, interpolation, fill)


def affine(
    image: ImageT,
    angle: float,
    translate: Sequence[float],
    scale: float,
    shear: float | Sequence[float],
    interpolation: Mode = InterpolationMode.NEAREST,
    fill: Fill = None,
    center: Sequence[float] | None = None,
) -> ImageT:
    """Turn, move, scale and shear an image; its size stays.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
    angle : float
        Degrees, clockwise.
    translate : (float, float)
        Pixels to the right and below.
    scale : float
    shear : float or (float, float)
        Degrees along the rows, and along the columns.
    interpolation, fill, center
        As of :func:`rotate`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> image = np.array([[[1], [2], [3]]], np.uint8)
    >>> F.affine(image, angle=0, translate=[1, 0], scale=1, shear=0).ravel()
    array([0, 1, 2], dtype=uint8)
    """
    check_number("scale", scale, above=0)
    _, height, width = dimensions(image)
    x, y = (width / 2, height / 2) if center is None else center
    along, down = (*((shear,) if is_number(shear) else shear), 0.0)[:2]
    shear_down = np.array([[1, 0, 0], [-math.tan(math.radians(down)), 1, 0], [0, 0, 1]])
    shear_along = np.array([[1, -math.tan(math.radians(along)), 0], [0, 1, 0], [0, 0, 1]])
    shape = _turn(angle) @ shear_down @ shear_along @ np.diag([scale, scale, 1])
    forward = _move(x + translate[0], y + translate[1]) @ shape @ _move(-x, -y)
    return _warp(image, np.linalg.inv(forward), (height, width), interpolation, fill)


def perspective(
    image: ImageT,
    startpoints: Sequence[Sequence[int]],
    endpoints: Sequence[Sequence[int]],
    interpolation: Mode = InterpolationMode.BILINEAR,
    fill: Fill = None,
) -> ImageT:
    """Return the image seen from elsewhere: four points, ``(column, row)``, move to four others.

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
    inverse = cv2.getPerspectiveTransform(*corners)
    _, height, width = dimensions(image)
    return _warp(image, inverse, (height, width), interpolation, fill)


def _turn(degrees: float) -> np.ndarray:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])


def _move(x: float, y: float) -> np.ndarray:
    return np.array([[1, 0, x], [0, 1, y], [0, 0, 1]], dtype=float)


def _warp_of_pil(
    image: Image.Image, inverse: np.ndarray, size: tuple[int, int], mode: Mode, fill: Fill
) -> Image.Image:
    coefficients = (inverse / inverse[2, 2]).ravel()
    affine = np.allclose(coefficients[6:8], 0, atol=1e-12)
    values = fill_values(image, fill)
    if image.mode not in ("F", "I"):
        values = tuple(int(value) for value in values)
    return image.transform(
        size[::-1],
        Image.Transform.AFFINE if affine else Image.Transform.PERSPECTIVE,
        coefficients[: 6 if affine else 8].tolist(),
        OF_PILLOW[interpolation_mode(mode)],
        fillcolor=values[0] if len(values) == 1 else values,
    )


@_operation(_warp_of_pil)
def _warp(
    image: np.ndarray, inverse: np.ndarray, size: tuple[int, int], mode: Mode, fill: Fill
) -> np.ndarray:
    """Return the image seen through a projective map.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
    inverse : ndarray (3, 3)
        From places of the result to places of the image, where the centre of the first pixel
        lies at 0.5.
    size : tuple of int
        Height and width of the result.
    mode : InterpolationMode
    fill : number, sequence or None
        What lies outside of the image.
    """
    flag = _flag_of_opencv(mode)
    # OpenCV's first pixel has its centre at 0.
    shift = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    matrix = np.linalg.inv(shift) @ inverse @ shift
    if flag == cv2.INTER_NEAREST:
        matrix[:2] += 1e-6 * matrix[2]  # a tie goes to the pixel after it, as in Pillow
    warp = functools.partial(cv2.warpPerspective, M=matrix, dsize=size[::-1])
    flags = flag | cv2.WARP_INVERSE_MAP
    sampled = warp(np.ascontiguousarray(image), flags=flags, borderMode=cv2.BORDER_REPLICATE)
    # As in Pillow a pixel is of the image or outside of it; the two are not mixed.
    flags = cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP
    inside = warp(np.ones(image.shape[:2], np.uint8), flags=flags)
    sampled = with_channels_of(sampled, image)
    sampled[inside == 0] = fill_values(image, fill)
    return sampled


def _flag_of_opencv(interpolation: Mode) -> int:
    mode = interpolation_mode(interpolation)
    if mode not in _OF_OPENCV:
        raise UsageError(
            f"interpolation must be NEAREST, BILINEAR or BICUBIC here, not {mode.name}"
        )
    return _OF_OPENCV[mode]


@_operation()
def elastic_transform(
    image: np.ndarray,
    displacement: torch.Tensor,
    interpolation: Mode = InterpolationMode.BILINEAR,
    fill: Fill = 0,
) -> np.ndarray:
    """Move each pixel.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
    displacement : Tensor (1, H, W, 2)
        Where each pixel is taken from, relative to its own place, to the right and below, where
        the image is 2 wide and 2 high.
    interpolation : InterpolationMode
        Nearest, bilinear or bicubic.
    fill : number or sequence
        What lies outside of the image.

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
    rows, columns = image.shape[:2]
    shape = (1, rows, columns, 2)
    if tuple(displacement.shape) != shape:
        raise UsageError(f"displacement must be {shape}, but it is {tuple(displacement.shape)}")
    shifts = displacement[0].numpy() * np.array([columns / 2, rows / 2], dtype=np.float32)
    moved = cv2.remap(
        np.ascontiguousarray(image),
        shifts[:, :, 0] + np.arange(columns, dtype=np.float32),
        shifts[:, :, 1] + np.arange(rows, dtype=np.float32)[:, None],
        _flag_of_opencv(interpolation),
        borderMode=cv2.BORDER_CONSTANT,
        borderValue=fill_values(image, fill)[:4],
    )
    return with_channels_of(moved, image)


def _enhanced_by_pillow(name: str) -> Callable[[Image.Image, float], Image.Image]:
    enhancer = getattr(ImageEnhance, name)
    return lambda image, factor: enhancer(image).enhance(factor)


@_operation(_enhanced_by_pillow("Brightness"), _not_negative)
def adjust_brightness(image: np.ndarray, brightness_factor: float) -> np.ndarray:
    """Change the brightness: 0 is black, 1 leaves the image as it is, 2 is twice as bright.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.adjust_brightness(np.array([[[10, 100, 200]]], np.uint8), 1.5)
    array([[[ 15, 150, 255]]], dtype=uint8)
    """
    return _away_from(0.0, image, brightness_factor)


@_operation(_enhanced_by_pillow("Contrast"), _not_negative)
def adjust_contrast(image: np.ndarray, contrast_factor: float) -> np.ndarray:
    """Change the contrast: 0 is gray, 1 leaves the image as it is.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.adjust_contrast(np.array([[[50, 50, 50], [150, 150, 150]]], np.uint8), 2)[0, :, 0]
    array([  0, 200], dtype=uint8)
    """
    mean = _luma(image).mean()
    return _away_from(int(mean + 0.5) if image.dtype == np.uint8 else mean, image, contrast_factor)


@_operation(_enhanced_by_pillow("Color"), _not_negative)
def adjust_saturation(image: np.ndarray, saturation_factor: float) -> np.ndarray:
    """Change the saturation: 0 is black and white, 1 leaves the image as it is.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.adjust_saturation(np.array([[[255, 0, 0]]], np.uint8), 0)
    array([[[76, 76, 76]]], dtype=uint8)
    """
    if not _is_color(image):
        return image
    return _blended(image, np.repeat(_luma(image)[:, :, None], 3, axis=2), saturation_factor)


@_operation(_enhanced_by_pillow("Sharpness"), _not_negative)
def adjust_sharpness(image: np.ndarray, sharpness_factor: float) -> np.ndarray:
    """Change the sharpness: 0 is blurred, 1 leaves the image as it is, 2 is sharper.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> image = np.array([[0, 0, 0], [0, 130, 0], [0, 0, 0]], np.uint8)[:, :, None]
    >>> F.adjust_sharpness(image, 0)[1, 1]
    array([50], dtype=uint8)
    """
    if min(image.shape[:2]) <= 2:
        return image
    kernel = np.ones((3, 3), np.float32)
    kernel[1, 1] = 5
    smooth = cv2.filter2D(np.ascontiguousarray(image), -1, kernel / 13).reshape(image.shape)
    for edge in (np.s_[0], np.s_[-1], np.s_[:, 0], np.s_[:, -1]):
        smooth[edge] = image[edge]
    return _blended(image, smooth, sharpness_factor)


def _hue_of_pil(image: Image.Image, hue_factor: float) -> Image.Image:
    if image.mode in ("1", "L", "I", "F"):
        return image
    hue, saturation, value = image.convert("HSV").split()
    turned = (np.asarray(hue).astype(np.int16) + int(hue_factor * 255)).astype(np.uint8)
    bands = (Image.fromarray(turned), saturation, value)
    return Image.merge("HSV", bands).convert(image.mode)


@_operation(_hue_of_pil, functools.partial(check_number, least=-0.5, most=0.5))
def adjust_hue(image: np.ndarray, hue_factor: float) -> np.ndarray:
    """Turn the wheel of colours by this part of a turn, in -0.5…0.5.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> red = np.array([[[255, 0, 0]]], np.uint8)
    >>> F.adjust_hue(red, 0.5)  # nearly the opposite colour
    array([[[  0, 255, 252]]], dtype=uint8)
    """
    if not _is_color(image):
        return image
    if image.dtype == np.uint8:
        hsv = cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_RGB2HSV_FULL)
        hsv[:, :, 0] += np.uint8(int(hue_factor * 255) % 256)  # bytes wrap around
        return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)
    hsv = cv2.cvtColor(np.ascontiguousarray(image, np.float32), cv2.COLOR_RGB2HSV)
    hsv[:, :, 0] = (hsv[:, :, 0] + np.float32(hue_factor * 360)) % 360
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB).astype(image.dtype)


def _grayscale_of_pil(image: Image.Image, num_output_channels: int = 1) -> Image.Image:
    gray = image.convert("L")
    return gray if num_output_channels == 1 else Image.merge("RGB", (gray, gray, gray))


@_operation(_grayscale_of_pil, functools.partial(check_choice, choices=(1, 3)))
def rgb_to_grayscale(image: np.ndarray, num_output_channels: int = 1) -> np.ndarray:
    """Return the luma of an image, once or three times.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.rgb_to_grayscale(np.array([[[255, 0, 0], [0, 255, 0]]], np.uint8)).ravel()
    array([ 76, 150], dtype=uint8)
    """
    gray = _luma(image)
    if num_output_channels == 3:
        return np.repeat(gray[:, :, None], 3, axis=2)
    return gray.reshape(*gray.shape, *(1,) * (image.ndim - 2))


to_grayscale = rgb_to_grayscale


@_operation(ImageOps.invert)
def invert(image: np.ndarray) -> np.ndarray:
    """Return the negative.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.invert(np.array([[[0, 55, 255]]], np.uint8))
    array([[[255, 200,   0]]], dtype=uint8)
    """
    return np.asarray(highest(image), image.dtype) - image


@_operation(ImageOps.posterize, functools.partial(check_integer, least=0, most=8))
def posterize(image: np.ndarray, bits: int) -> np.ndarray:
    """Keep the first 0…8 bits of each byte.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.posterize(np.array([[[1, 100, 255]]], np.uint8), 2)
    array([[[  0,  64, 192]]], dtype=uint8)
    """
    return require_bytes(image, "posterize") & np.uint8(256 - (1 << (8 - bits)))


@_operation(ImageOps.solarize)
def solarize(image: np.ndarray, threshold: float) -> np.ndarray:
    """Invert what is at least as bright as the threshold.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.solarize(np.array([[[1, 100, 255]]], np.uint8), 128)
    array([[[  1, 100,   0]]], dtype=uint8)
    """
    white = highest(image)
    check_number("threshold", threshold, most=white)
    return np.where(image >= threshold, np.asarray(white, image.dtype) - image, image)


@_operation(ImageOps.autocontrast)
def autocontrast(image: np.ndarray) -> np.ndarray:
    """Stretch each channel so that its darkest value is black and its brightest white.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.autocontrast(np.array([[[100], [110], [120]]], np.uint8)).ravel()
    array([  0, 127, 255], dtype=uint8)
    """
    if image.dtype == np.uint8:
        return np.asarray(ImageOps.autocontrast(to_pil(image))).reshape(image.shape)
    low, high = image.min((0, 1)), image.max((0, 1))
    flat = high == low
    stretched = (image - low) / np.where(flat, 1, high - low)
    return np.where(flat, image, stretched).astype(image.dtype)


@_operation(ImageOps.equalize)
def equalize(image: np.ndarray) -> np.ndarray:
    """Make all values about equally frequent in each channel.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> image = np.arange(100, 104, dtype=np.uint8).repeat(256).reshape(32, 32, 1)
    >>> np.unique(F.equalize(image))
    array([  0,  85, 171, 255], dtype=uint8)
    """
    equal = ImageOps.equalize(to_pil(require_bytes(image, "equalize")))
    return np.asarray(equal).reshape(image.shape)


@_operation()
def gaussian_blur(
    image: np.ndarray, kernel_size: Size, sigma: float | Sequence[float] | None = None
) -> np.ndarray:
    """Blur by a normal distribution; edges are mirrored.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
    kernel_size : int or (int, int)
        Odd; width and height.
    sigma : float or (float, float), optional
        Standard deviations in pixels; by default 0.15 of the kernel's size, plus 0.35.

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
        raise UsageError(f"kernel_size must be odd, but it is {kernel_size!r}")
    if sigma is None:
        sigma = [0.15 * size + 0.35 for size in kernel]
    sigmas = [float(value) for value in (sigma if isinstance(sigma, Sequence) else [sigma])]
    if min(sigmas) <= 0:
        raise UsageError(f"sigma must be positive, but it is {sigma}")
    blurred = cv2.GaussianBlur(
        np.ascontiguousarray(image),
        kernel,
        sigmas[0],
        sigmaY=sigmas[-1],
        borderType=cv2.BORDER_REFLECT_101,
    )
    return with_channels_of(blurred, image)


def _away_from(gray: float, image: np.ndarray, factor: float) -> np.ndarray:
    """Multiply the distance of all values from a gray by a factor."""
    if image.dtype != np.uint8:
        return _blended(image, np.asarray(gray, image.dtype), factor)
    values = np.float32(gray) + np.float32(factor) * (_BYTES - np.float32(gray))
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


def to_tensor(
    image: Any, memory_format: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    """Return a float32 tensor ``(C, H, W)``: bytes 0…255 become 0…1, floats stay what they are.

    Parameters
    ----------
    image : ndarray, PIL image or tensor
    memory_format : torch.memory_format
        ``torch.channels_last`` keeps the order of the array's values, so that a batch of such
        tensors is in the layout that convolutions are fastest in.

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
    values = _channels_first(image)
    if values.dtype == torch.bool:
        values = values.to(torch.uint8) * 255
    if values.ndim == 3:  # layouts with the channels last are for batches
        tensor = torch.empty((1, *values.shape), memory_format=memory_format)[0]
    else:
        tensor = torch.empty(values.shape)
    tensor.copy_(values)
    # Values that are neither bytes nor floats are not scaled.
    return tensor.div_(255) if values.dtype == torch.uint8 else tensor


def _channels_first(image: Any) -> torch.Tensor:
    """Return the values of an image as a tensor ``(C, H, W)``, mostly a view."""
    if isinstance(image, torch.Tensor):
        return image
    array = to_array(image)
    if array.ndim == 2:
        array = array[:, :, None]
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array).permute(2, 0, 1)


def pil_to_tensor(image: Any) -> torch.Tensor:
    """Return the values of an image ``(C, H, W)`` in their own type.

    Examples
    --------
    >>> from PIL import Image
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.pil_to_tensor(Image.new("RGB", (8, 6), "red"))[:, 0, 0]
    tensor([255,   0,   0], dtype=torch.uint8)
    """
    return _channels_first(image).contiguous()


def convert_image_dtype(image: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Convert bytes to floats in 0…1, and back; between floats nothing but the type changes.

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
        return values if image.is_floating_point() else values / torch.iinfo(image.dtype).max
    largest = torch.iinfo(dtype).max
    if image.is_floating_point():
        # Each of the values gets an interval of equal length.
        return (image * (largest + 1 - 1e-3)).to(dtype)
    have = torch.iinfo(image.dtype).max
    if have > largest:
        return torch.div(image, (have + 1) // (largest + 1), rounding_mode="floor").to(dtype)
    return image.to(dtype) * ((largest + 1) // (have + 1))


def to_pil_image(image: Any, mode: str | None = None) -> Image.Image:
    """Return a PIL image of an array or of a tensor ``(C, H, W)``; floats in 0…1 become bytes.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.to_pil_image(torch.ones(3, 6, 8)).getpixel((0, 0))
    (255, 255, 255)
    """
    if is_pil(image):
        return image if mode is None else image.convert(mode)
    if isinstance(image, torch.Tensor) and image.is_floating_point():
        image = image.mul(255).byte()
    array = to_array(image)
    converted = to_pil(array)
    return converted if mode in (None, converted.mode) else converted.convert(mode)


def normalize(
    tensor: torch.Tensor, mean: Sequence[float], std: Sequence[float], inplace: bool = False
) -> torch.Tensor:
    """Return ``(tensor - mean) / std`` for each channel of a float tensor ``(..., C, H, W)``.

    Raises
    ------
    UsageError
        If the tensor does not hold floats, or a standard deviation is 0.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.normalize(torch.tensor([[[0.0, 0.5, 1.0]]]), mean=[0.5], std=[0.25])
    tensor([[[-2.,  0.,  2.]]])
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"normalize needs a tensor, not a {type(tensor).__name__}; ToTensor first")
    if not tensor.is_floating_point():
        raise UsageError(f"normalize needs a tensor of floats, not {tensor.dtype}; ToTensor first")
    if tensor.ndim < 3:
        raise no_image(tensor)
    means = torch.as_tensor(mean, dtype=tensor.dtype).view(-1, 1, 1)
    scales = torch.as_tensor(std, dtype=tensor.dtype).view(-1, 1, 1)
    if (scales == 0).any():
        raise UsageError(f"std must not be 0, but it is {scales.flatten().tolist()}")
    return (tensor if inplace else tensor.clone()).sub_(means).div_(scales)


def erase(
    image: torch.Tensor, i: int, j: int, h: int, w: int, v: Any, inplace: bool = False
) -> torch.Tensor:
    """Overwrite `h` rows and `w` columns of a tensor, from row `i` and column `j` on, by `v`.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.vision.transforms import functional as F
    >>> F.erase(torch.ones(1, 2, 3), i=0, j=1, h=2, w=1, v=torch.zeros(1, 1, 1))
    tensor([[[1., 0., 1.],
             [1., 0., 1.]]])
    """
    if not isinstance(image, torch.Tensor):
        raise UsageError(f"erase needs a tensor, not a {type(image).__name__}; ToTensor first")
    image = image if inplace else image.clone()
    image[..., i : i + h, j : j + w] = v
    return image


__all__ = public_names(__name__)
