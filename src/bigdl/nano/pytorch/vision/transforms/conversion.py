"""Conversions between kinds of images, and of tensors: operations and transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from PIL import Image

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.vision.transforms.base import (
    RandomTransform,
    Transform,
    random_below,
    random_noise,
    random_uniform,
)
from bigdl.nano.pytorch.vision.transforms.images import (
    dimensions,
    is_pil,
    no_image,
    to_array,
    to_pil,
)

__all__ = [
    "ConvertImageDtype",
    "LinearTransformation",
    "Normalize",
    "PILToTensor",
    "RandomErasing",
    "ToPILImage",
    "ToTensor",
    "convert_image_dtype",
    "erase",
    "normalize",
    "pil_to_tensor",
    "to_pil_image",
    "to_tensor",
]


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
    """
    values = _channels_first(image)
    if values.dtype == torch.bool:
        values = values.to(torch.uint8) * 255
    tensor = _empty(values.shape, memory_format)
    tensor.copy_(values)
    return tensor if values.is_floating_point() else tensor.div_(_white(values))


def _white(values: torch.Tensor) -> float:
    """Return what becomes 1; values that are no bytes are not scaled."""
    return 255 if values.dtype == torch.uint8 else 1


def _empty(shape: Sequence[int], memory_format: torch.memory_format) -> torch.Tensor:
    if memory_format is torch.channels_last and len(shape) == 3:
        channels, height, width = shape
        return torch.empty(height, width, channels).permute(2, 0, 1)
    return torch.empty(shape)


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
    """Return the values of an image ``(C, H, W)`` in their own type."""
    return _channels_first(image).contiguous()


def convert_image_dtype(image: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Convert bytes to floats in 0…1, and back; between floats nothing but the type changes."""
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
    """Return a PIL image of an array or of a tensor ``(C, H, W)``; floats in 0…1 become bytes."""
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
    """Overwrite `h` rows and `w` columns of a tensor, from row `i` and column `j` on, by `v`."""
    if not isinstance(image, torch.Tensor):
        raise UsageError(f"erase needs a tensor, not a {type(image).__name__}; ToTensor first")
    image = image if inplace else image.clone()
    image[..., i : i + h, j : j + w] = v
    return image


class ToTensor(Transform):
    """A float32 tensor ``(C, H, W)``: bytes 0…255 become 0…1, floats stay what they are.

    Parameters
    ----------
    memory_format : torch.memory_format
        ``torch.channels_last`` keeps the order of the values, for
        :func:`~bigdl.nano.pytorch.vision.datasets.collate_channels_last`; such a tensor cannot be
        flattened by ``view``.
    """

    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format):
        super().__init__()
        self.memory_format = memory_format

    def forward(self, image: Any) -> torch.Tensor:
        return to_tensor(image, self.memory_format)


class PILToTensor(Transform):
    """The values of an image ``(C, H, W)`` in their own type."""

    def forward(self, image: Any) -> torch.Tensor:
        return pil_to_tensor(image)


class ConvertImageDtype(Transform):
    """Bytes to floats in 0…1, and back."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return convert_image_dtype(image, self.dtype)


class ToPILImage(Transform):
    """A PIL image of an array or a tensor."""

    def __init__(self, mode: str | None = None):
        super().__init__()
        self.mode = mode

    def forward(self, image: Any) -> Image.Image:
        return to_pil_image(image, self.mode)


class Normalize(Transform):
    """``(tensor - mean) / std`` for each channel.

    Parameters
    ----------
    mean, std : sequence of float
        One for each channel, or one for all.
    inplace : bool
        Whether the tensor is changed.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], inplace: bool = False):
        super().__init__()
        self.mean, self.std, self.inplace = mean, std, inplace

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return normalize(tensor, self.mean, self.std, self.inplace)

    def after(self, previous: Any, tensor: Any) -> torch.Tensor:
        """As `forward`, in the buffer of a ``ToTensor`` that was called just before."""
        inplace = self.inplace or isinstance(previous, ToTensor)
        return normalize(tensor, self.mean, self.std, inplace)


class LinearTransformation(Transform):
    """Whitening: ``(flattened tensor - mean_vector) @ transformation_matrix``.

    Parameters
    ----------
    transformation_matrix : Tensor (D, D)
        D is the number of values of an image.
    mean_vector : Tensor (D,)
    """

    def __init__(self, transformation_matrix: torch.Tensor, mean_vector: torch.Tensor):
        super().__init__()
        rows, columns = transformation_matrix.shape
        if rows != columns or len(mean_vector) != rows:
            raise UsageError(
                "transformation_matrix must be square and mean_vector as long as it, but they are "
                f"{(rows, columns)} and {tuple(mean_vector.shape)}"
            )
        self.transformation_matrix, self.mean_vector = transformation_matrix, mean_vector

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        size = math.prod(tensor.shape[-3:])
        if size != len(self.mean_vector):
            raise UsageError(
                f"The image has {size} values, but transformation_matrix is for "
                f"{len(self.mean_vector)}"
            )
        flat = tensor.reshape(-1, size) - self.mean_vector
        return (flat @ self.transformation_matrix).reshape(tensor.shape)


class RandomErasing(RandomTransform):
    """Overwrite a random rectangle of a tensor (Zhong et al. 2017).

    Parameters
    ----------
    p : float
        Probability that it is done.
    scale : (float, float)
        Range of the rectangle's share of the image.
    ratio : (float, float)
        Range of its height divided by its width.
    value : float, sequence or "random"
        What it is filled with: one number, one for each channel, or standard normal noise.
    inplace : bool
        Whether the tensor is changed.
    """

    def __init__(
        self,
        p: float = 0.5,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: float | Sequence[float] | Literal["random"] = 0,
        inplace: bool = False,
    ):
        super().__init__(p)
        if not 0 <= scale[0] <= scale[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
            raise UsageError(
                "RandomErasing needs scale a range within 0…1 and ratio a range of positive "
                f"numbers, but got scale={scale}, ratio={ratio}"
            )
        if isinstance(value, str) and value != "random":
            raise UsageError(f"value must be a number, a sequence or 'random', not {value!r}")
        self.scale, self.ratio, self.value, self.inplace = scale, ratio, value, inplace

    def changed(self, tensor: torch.Tensor) -> torch.Tensor:
        channels, rows, columns = dimensions(tensor)
        for _ in range(10):  # a rectangle may be too long
            area = rows * columns * random_uniform(*self.scale)
            ratio = math.exp(random_uniform(*map(math.log, self.ratio)))
            height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < height < rows and 0 < width < columns:
                top, left = random_below(rows - height + 1), random_below(columns - width + 1)
                value = self._values(channels, height, width)
                return erase(tensor, top, left, height, width, value, self.inplace)
        return tensor

    def _values(self, channels: int, height: int, width: int) -> torch.Tensor:
        if self.value == "random":
            return random_noise((channels, height, width), normal=True)
        return torch.as_tensor(self.value, dtype=torch.float32).view(-1, 1, 1)
