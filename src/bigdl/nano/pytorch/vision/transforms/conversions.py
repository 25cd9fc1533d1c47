"""Operations between kinds of images, and on tensors of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.vision.transforms.kinds import is_pil, no_image, to_array, to_pil

__all__ = [
    "convert_image_dtype",
    "normalize",
    "pil_to_tensor",
    "to_pil_image",
    "to_tensor",
]


def to_tensor(image: Any, memory_format: torch.memory_format = torch.contiguous_format):
    """A float32 tensor ``(C, H, W)``: bytes 0…255 become 0…1, floats stay what they are.

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
    """What becomes 1; values that are no bytes are not scaled."""
    return 255 if values.dtype == torch.uint8 else 1


def _empty(shape, memory_format) -> torch.Tensor:
    if memory_format is torch.channels_last and len(shape) == 3:
        channels, height, width = shape
        return torch.empty(height, width, channels).permute(2, 0, 1)
    return torch.empty(shape)


def _channels_first(image: Any) -> torch.Tensor:
    """The values of an image as a tensor ``(C, H, W)``, mostly a view."""
    if isinstance(image, torch.Tensor):
        return image
    array = to_array(image)
    if array.ndim == 2:
        array = array[:, :, None]
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array).permute(2, 0, 1)


def pil_to_tensor(image: Any) -> torch.Tensor:
    """The values of an image ``(C, H, W)`` in their own type."""
    return _channels_first(image).contiguous()


def convert_image_dtype(image: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Bytes to floats in 0…1, and back; between floats nothing but the type changes."""
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


def to_pil_image(image: Any, mode: str | None = None):
    """A PIL image of an array or of a tensor ``(C, H, W)``; floats in 0…1 become bytes."""
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
    """``(tensor - mean) / std`` for each channel of a float tensor ``(..., C, H, W)``.

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
    mean = torch.as_tensor(mean, dtype=tensor.dtype).view(-1, 1, 1)
    std = torch.as_tensor(std, dtype=tensor.dtype).view(-1, 1, 1)
    if (std == 0).any():
        raise UsageError(f"std must not be 0, but it is {std.flatten().tolist()}")
    return (tensor if inplace else tensor.clone()).sub_(mean).div_(std)
