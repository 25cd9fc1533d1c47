"""Transforms between kinds of images, and of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.vision.transforms import draws
from bigdl.nano.pytorch.vision.transforms import functional as F
from bigdl.nano.pytorch.vision.transforms.base import Transform
from bigdl.nano.pytorch.vision.transforms.kinds import dimensions

__all__ = [
    "ConvertImageDtype",
    "LinearTransformation",
    "Normalize",
    "PILToTensor",
    "RandomErasing",
    "ToPILImage",
    "ToTensor",
]


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
        return F.to_tensor(image, self.memory_format)


class PILToTensor(Transform):
    """The values of an image ``(C, H, W)`` in their own type."""

    def forward(self, image: Any) -> torch.Tensor:
        return F.pil_to_tensor(image)


class ConvertImageDtype(Transform):
    """Bytes to floats in 0…1, and back."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return F.convert_image_dtype(image, self.dtype)


class ToPILImage(Transform):
    """A PIL image of an array or a tensor."""

    def __init__(self, mode: str | None = None):
        super().__init__()
        self.mode = mode

    def forward(self, image: Any):
        return F.to_pil_image(image, self.mode)


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
        return F.normalize(tensor, self.mean, self.std, self.inplace)

    def after(self, previous: Any, tensor: Any) -> torch.Tensor:
        """As `forward`, in the buffer of a ``ToTensor`` that was called just before."""
        inplace = self.inplace or isinstance(previous, ToTensor)
        return F.normalize(tensor, self.mean, self.std, inplace)


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


class RandomErasing(Transform):
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

    random = True

    def __init__(
        self,
        p: float = 0.5,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: Any = 0,
        inplace: bool = False,
    ):
        super().__init__()
        if not 0 <= p <= 1 or not 0 <= scale[0] <= scale[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
            raise UsageError(
                "RandomErasing needs p in 0…1, scale a range within 0…1 and ratio a range of "
                f"positive numbers, but got p={p}, scale={scale}, ratio={ratio}"
            )
        if isinstance(value, str) and value != "random":
            raise UsageError(f"value must be a number, a sequence or 'random', not {value!r}")
        self.p, self.scale, self.ratio, self.value, self.inplace = p, scale, ratio, value, inplace

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        if not draws.chance(self.p):
            return tensor
        channels, rows, columns = dimensions(tensor)
        for _ in range(10):  # a rectangle may be too long
            area = rows * columns * draws.uniform(*self.scale)
            ratio = math.exp(draws.uniform(*map(math.log, self.ratio)))
            height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < height < rows and 0 < width < columns:
                top, left = draws.below(rows - height + 1), draws.below(columns - width + 1)
                value = self._values(channels, height, width)
                return F.erase(tensor, top, left, height, width, value, self.inplace)
        return tensor

    def _values(self, channels: int, height: int, width: int) -> torch.Tensor:
        if self.value == "random":
            return draws.noise((channels, height, width), normal=True)
        return torch.as_tensor(self.value, dtype=torch.float32).view(-1, 1, 1)
