"""Transform classes: settings, random draws, and the operation for each image.

A dataset calls a transform once per sample, in any thread or process. A transform has no state
between calls. Random numbers come from torch's default generator, or from a thread-local one
(:func:`seeded`). A loader with several threads seeds a separate generator for each sample, so that
results do not depend on the order of threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, dataclass_transform

import torch

from bigdl.common.checks import check_number
from bigdl.common.errors import UsageError
from bigdl.nano.lazy_names import public_names
from bigdl.nano.pytorch.vision import of_torchvision
from bigdl.nano.pytorch.vision.transforms import functional
from bigdl.nano.pytorch.vision.transforms.images import (
    OF_TORCH,
    Fill,
    ImageT,
    InterpolationMode,
    Mode,
    Size,
    dimensions,
    interpolation_mode,
    is_number,
    two_lengths,
)

F = functional
_thread = threading.local()


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Temporarily use a seeded random generator in this thread; do nothing if `seed` is None."""
    before = _generator()
    if seed is not None:
        _thread.generator = torch.Generator().manual_seed(seed)
    try:
        yield
    finally:
        _thread.generator = before


def _generator() -> torch.Generator | None:
    return getattr(_thread, "generator", None)


def random_seed() -> int:
    """Draw a seed for another generator."""
    return _random_below(2**62)


def _random_below(count: int) -> int:
    return int(torch.randint(count, (), generator=_generator()))


def _random_uniform(low: float, high: float) -> float:
    """Draw a number in ``[low, high)``; return `low` if they are equal."""
    return float(torch.empty(()).uniform_(low, high, generator=_generator()))


def _random_bool(probability: float) -> bool:
    return bool(torch.rand((), generator=_generator()) < probability)


def _random_order(count: int) -> list[int]:
    return torch.randperm(count, generator=_generator()).tolist()


def _random_corner(rows: int, columns: int) -> tuple[int, int]:
    """Draw the top row and left column of a crop, given how many rows and columns it leaves out."""
    return _random_below(rows + 1), _random_below(columns + 1)


def _random_lengths(
    area: int, scale: Sequence[float], ratio: Sequence[float]
) -> Iterator[tuple[int, int]]:
    """Yield ten random side-length pairs for a crop of an image; a side may exceed the image.

    Parameters
    ----------
    area : int
        Number of pixels of the image.
    scale, ratio : (float, float)
        Ranges of the part's fraction of the area, and of its second length divided by its first.
    """
    for _ in range(10):
        share = area * _random_uniform(*scale)
        quotient = math.exp(_random_uniform(*map(math.log, ratio)))
        yield round(math.sqrt(share / quotient)), round(math.sqrt(share * quotient))


@dataclass_transform(eq_default=False)
class Transform(torch.nn.Module):
    """Base class of transforms: a module without parameters that maps images to images.

    In this module, a class's annotated attributes are its settings, in the order of its constructor
    arguments. ``class Name(Transform, operation=function)`` calls the function with the image and
    all settings except `p`.

    Attributes
    ----------
    random : bool
        Whether two calls with the same image may give different results.
    scale_free : bool
        Whether the transform does not depend on the image's scale, so that images may be downscaled
        before it.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision import transforms
    >>> class Red(transforms.Transform):
    ...     def forward(self, image):
    ...         return image[:, :, :1]
    >>> Red()(np.zeros((6, 8, 3), np.uint8)).shape
    (6, 8, 1)
    """

    random: ClassVar[Any] = False
    scale_free: ClassVar[bool] = False
    operation: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls, *, scale_free: bool = False, **settings: object):
        super().__init_subclass__()
        cls.scale_free = scale_free  # not inherited: a subclass may do more
        for name, value in settings.items():  # `random` and `operation`
            setattr(cls, name, staticmethod(value) if callable(value) else value)
        if cls.__module__ == __name__:
            dataclass(eq=False, repr=False)(cls)

    def __new__(cls, *args: object, **kwargs: object):
        # Constructors of dataclasses do not call Module.__init__.
        transform = super().__new__(cls)
        torch.nn.Module.__init__(transform)
        return transform

    def forward(self, image: ImageT) -> ImageT:
        settings = (getattr(self, field.name) for field in fields(self) if field.name != "p")  # type: ignore[arg-type]  # each class of this module is a dataclass
        return self.operation(image, *settings)

    def __repr__(self) -> str:
        """Return the name and all settings; equal strings mean equal transforms."""
        settings = (
            f"{name}={value}"
            for name, value in vars(self).items()
            if not name.startswith("_") and name != "training"
        )
        return f"{type(self).__name__}({', '.join(settings)})"


def is_random(transform: Callable | None) -> bool:
    """Return True if a transform can return different results for the same image.

    Functions that are not :class:`Transform` objects are treated as random.
    """
    if not isinstance(transform, Transform):
        return transform is not None
    return transform.random or any(map(is_random, getattr(transform, "transforms", ())))


def is_thread_safe(transform: Callable | None) -> bool:
    """Return True if a transform is known to be thread-safe, like the transforms of this module."""
    if not isinstance(transform, Transform) or isinstance(transform, Lambda):
        return transform is None
    return all(map(is_thread_safe, getattr(transform, "transforms", ())))


def sufficient_size(transform: object) -> Callable[[int, int], tuple[int, int]] | None:
    """Return a function that predicts the size after a transform's first ``Resize``, or None.

    Parameters
    ----------
    transform : callable or None

    Returns
    -------
    callable or None
        Function from an image's height and width to those after the first ``Resize``. None if
        another size-dependent transform comes first, if the resize has no antialiasing, or if the
        transform is unknown.
    """
    for step in transform.transforms if isinstance(transform, Compose) else [transform]:
        if type(step) is Resize and step.antialias and step.interpolation in OF_TORCH:
            return lambda *lengths: F.resized_to(lengths, step.size, step.max_size)
        if not getattr(step, "scale_free", False):
            return None
    return None


class _Group(Transform):
    """Base class of transforms that contain several transforms."""

    transforms: Sequence[Callable]

    def __post_init__(self) -> None:
        if not isinstance(self.transforms, Sequence | torch.nn.ModuleList):
            raise UsageError(
                f"{type(self).__name__} takes a list of transforms, not a "
                f"{type(self.transforms).__name__}",
                code="argument-type",
                argument="transforms",
            )
        # not a ModuleList: users add functions and modify the list
        self.transforms = list(self.transforms)

    def __repr__(self) -> str:
        lines = "".join(f"\n    {each}" for each in self.transforms)
        chances = f"\n    p={self.p}" if hasattr(self, "p") else ""
        return f"{type(self).__name__}({lines}{chances}\n)"


class Compose(_Group):
    """Transform that applies a sequence of transforms.

    A conversion to a tensor and a following normalisation share one buffer.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import CenterCrop, Compose, Normalize, ToTensor
    >>> transform = Compose([CenterCrop(4), ToTensor(), Normalize([0.5], [0.5])])
    >>> transform(np.full((6, 8, 3), 255, np.uint8)).unique()
    tensor([1.])
    """

    def __call__(self, image: object) -> object:
        previous = None
        for transform in self.transforms:
            follow = getattr(transform, "after", None)
            image = transform(image) if follow is None else follow(previous, image)
            previous = transform
        return image


class Lambda(Transform, random=True):
    """Transform that applies a user's function to images.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import Lambda
    >>> Lambda(lambda image: image[:, :, 0])(np.zeros((6, 8, 3), np.uint8)).shape
    (6, 8)
    """

    lambd: Callable[[Any], Any]

    def __post_init__(self) -> None:
        if not callable(self.lambd):
            raise UsageError(
                f"Lambda takes a function, not a {type(self.lambd).__name__}",
                code="argument-type",
                argument="lambd",
            )

    def forward(self, image: ImageT) -> ImageT:
        return self.lambd(image)


class RandomApply(_Group, random=True):
    """Transform that applies a sequence of transforms with probability `p`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import CenterCrop, RandomApply
    >>> image = np.zeros((6, 8, 3), np.uint8)
    >>> [RandomApply([CenterCrop(4)], p)(image).shape for p in (1, 0)]  # always, never
    [(4, 4, 3), (6, 8, 3)]
    """

    p: float = 0.5

    def forward(self, image: ImageT) -> ImageT:
        if _random_bool(self.p):
            for transform in self.transforms:
                image = transform(image)
        return image


class RandomOrder(_Group, random=True):
    """Transform that applies several transforms in random order.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import CenterCrop, RandomInvert, RandomOrder
    >>> transform = RandomOrder([CenterCrop(1), RandomInvert(p=1)])
    >>> transform(np.zeros((6, 8, 3), np.uint8))
    array([[[255, 255, 255]]], dtype=uint8)
    """

    def forward(self, image: ImageT) -> ImageT:
        for index in _random_order(len(self.transforms)):
            image = self.transforms[index](image)
        return image


class RandomChoice(_Group, random=True):
    """Transform that applies one of several transforms, chosen at random.

    The probabilities are `p`, or equal if `p` is None.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import CenterCrop, RandomChoice
    >>> transform = RandomChoice([CenterCrop(2), CenterCrop(4)], p=[0, 1])
    >>> transform(np.zeros((6, 8, 3), np.uint8)).shape
    (4, 4, 3)
    """

    p: Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p is not None and len(self.p) != len(self.transforms):
            raise UsageError(
                f"p must have one number for each of {len(self.transforms)} transforms",
                code="argument-value",
                argument="p",
            )

    def forward(self, image: ImageT) -> ImageT:
        weights = list(map(float, self.p or [1.0] * len(self.transforms)))
        drawn = torch.multinomial(torch.tensor(weights), 1, generator=_generator())
        return self.transforms[int(drawn)](image)


class Resize(Transform, operation=F.resize):
    """Transform that resizes images; see :func:`~.functional.resize` for the parameters.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import Resize
    >>> image = np.zeros((6, 8, 3), np.uint8)
    >>> Resize(3)(image).shape, Resize((2, 5))(image).shape  # the shorter side; height and width
    ((3, 4, 3), (2, 5, 3))
    """

    size: Size
    interpolation: Mode = InterpolationMode.BILINEAR
    max_size: int | None = None
    antialias: bool | None = True

    def __post_init__(self) -> None:
        two_lengths("size", self.size)
        F.resized_to((1, 1), self.size, self.max_size)
        self.interpolation = interpolation_mode(self.interpolation)


class _SizedTransform(Transform):
    """Base class of transforms whose result has a fixed height and width."""

    size: Size

    def __post_init__(self) -> None:
        self.size = two_lengths("size", self.size)


class CenterCrop(_SizedTransform, operation=F.center_crop):
    """Transform that crops the center of images.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import CenterCrop
    >>> CenterCrop((1, 2))(np.arange(12, dtype=np.uint8).reshape(3, 4, 1)).ravel()
    array([5, 6], dtype=uint8)
    """


class FiveCrop(_SizedTransform, operation=F.five_crop):
    """Transform that returns the four corners and the center of an image: a tuple of five images.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import FiveCrop
    >>> image = np.arange(9, dtype=np.uint8).reshape(3, 3, 1)
    >>> [int(part.item()) for part in FiveCrop(1)(image)]
    [0, 2, 6, 8, 4]
    """


class TenCrop(_SizedTransform, operation=F.ten_crop):
    """Transform that applies :class:`FiveCrop` to an image and its mirror image: ten images.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import TenCrop
    >>> image = np.arange(9, dtype=np.uint8).reshape(3, 3, 1)
    >>> [int(part.item()) for part in TenCrop(1)(image)]
    [0, 2, 6, 8, 4, 2, 0, 8, 6, 4]
    """

    vertical_flip: bool = False


class Pad(Transform, operation=F.pad):
    """Transform that adds a border; see :func:`~.functional.pad` for the parameters.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import Pad
    >>> Pad(1, fill=9)(np.zeros((1, 2, 1), np.uint8))[:, :, 0]
    array([[9, 9, 9, 9],
           [9, 0, 0, 9],
           [9, 9, 9, 9]], dtype=uint8)
    """

    padding: Size
    fill: Fill = 0
    padding_mode: str = "constant"


class RandomCrop(_SizedTransform, random=True):
    """Transform that crops a random part of images.

    Parameters
    ----------
    size : int or (int, int)
        Height and width.
    padding : int or sequence, optional
        Border that is added before cropping.
    pad_if_needed : bool
        Whether to pad images that are smaller than the crop.
    fill, padding_mode
        See :class:`Pad`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import RandomCrop
    >>> RandomCrop(32, padding=4)(np.zeros((32, 32, 3), np.uint8)).shape
    (32, 32, 3)
    """

    padding: Size | None = None
    pad_if_needed: bool = False
    fill: Fill = 0
    padding_mode: str = "constant"

    def forward(self, image: ImageT) -> ImageT:
        if self.padding is not None:
            image = F.pad(image, self.padding, self.fill, self.padding_mode)
        height, width = two_lengths("size", self.size)
        _, rows, columns = dimensions(image)
        if self.pad_if_needed and (rows < height or columns < width):
            border = [max(width - columns, 0), max(height - rows, 0)]
            image = F.pad(image, border, self.fill, self.padding_mode)
        return F.crop(image, *self.get_params(image, (height, width)))

    @staticmethod
    def get_params(img: object, output_size: Sequence[int]) -> tuple[int, int, int, int]:
        """Draw the top, left, height and width of a random crop."""
        height, width = output_size
        _, rows, columns = dimensions(img)
        if rows < height or columns < width:
            raise UsageError(
                f"A crop of {(height, width)} does not fit into an image of {(rows, columns)}; "
                "resize it first, or pass pad_if_needed=True",
                code="data-shape",
            )
        return *_random_corner(rows - height, columns - width), height, width


class RandomResizedCrop(_SizedTransform, random=True):
    """Transform that crops a random part and resizes it to a fixed size (Szegedy et al. 2014).

    Parameters
    ----------
    size : int or (int, int)
        Height and width of the result.
    scale : (float, float)
        Range of the crop's fraction of the image area.
    ratio : (float, float)
        Range of the crop's width divided by its height.
    interpolation, antialias
        See :class:`Resize`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import RandomResizedCrop
    >>> RandomResizedCrop(224, scale=(0.5, 1.0))(np.zeros((300, 400, 3), np.uint8)).shape
    (224, 224, 3)
    """

    scale: Sequence[float] = (0.08, 1.0)
    ratio: Sequence[float] = (3 / 4, 4 / 3)
    interpolation: Mode = InterpolationMode.BILINEAR
    antialias: bool | None = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.interpolation = interpolation_mode(self.interpolation)

    def forward(self, image: ImageT) -> ImageT:
        part = self.get_params(image, self.scale, self.ratio)
        return F.resized_crop(image, *part, self.size, self.interpolation, self.antialias)

    @staticmethod
    def get_params(
        img: object, scale: Sequence[float], ratio: Sequence[float]
    ) -> tuple[int, int, int, int]:
        """Draw the top, left, height and width of a random crop."""
        _, rows, columns = dimensions(img)
        for height, width in _random_lengths(rows * columns, scale, ratio):
            if 0 < height <= rows and 0 < width <= columns:
                return *_random_corner(rows - height, columns - width), height, width
        # fallback: central crop
        clipped = min(max(columns / rows, min(ratio)), max(ratio))
        height, width = min(rows, round(columns / clipped)), min(columns, round(rows * clipped))
        return (rows - height) // 2, (columns - width) // 2, height, width


class _RandomTransform(Transform, random=True):
    """Base class of transforms that are applied with probability `p`."""

    def __post_init__(self) -> None:
        check_number("p", vars(self)["p"], 0, 1)

    def changed(self, image: ImageT) -> ImageT:
        """Return the transformed image, regardless of the probability `p`."""
        return super().forward(image)

    def forward(self, image: ImageT) -> ImageT:
        return self.changed(image) if _random_bool(vars(self)["p"]) else image


class _HalfProbability(_RandomTransform):
    """Base class of transforms that are applied with probability 0.5 by default."""

    p: float = 0.5


class RandomHorizontalFlip(_HalfProbability, operation=F.hflip, scale_free=True):
    """Transform that flips images horizontally with probability `p`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import RandomHorizontalFlip
    >>> RandomHorizontalFlip(p=1)(np.array([[[1], [2], [3]]], np.uint8)).ravel()
    array([3, 2, 1], dtype=uint8)
    """


class RandomVerticalFlip(_HalfProbability, operation=F.vflip, scale_free=True):
    """Transform that flips images vertically with probability `p`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import RandomVerticalFlip
    >>> RandomVerticalFlip(p=1)(np.array([[[1]], [[2]], [[3]]], np.uint8)).ravel()
    array([3, 2, 1], dtype=uint8)
    """


class RandomInvert(_HalfProbability, operation=F.invert, scale_free=True):
    """Transform that inverts images with probability `p`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import RandomInvert
    >>> RandomInvert(p=1)(np.array([[[0, 55, 255]]], np.uint8))
    array([[[255, 200,   0]]], dtype=uint8)
    """


class RandomAutocontrast(_HalfProbability, operation=F.autocontrast):
    """Transform that stretches each channel to the full range with probability `p`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import RandomAutocontrast
    >>> RandomAutocontrast(p=1)(np.array([[[100], [110], [120]]], np.uint8)).ravel()
    array([  0, 127, 255], dtype=uint8)
    """


class RandomEqualize(_HalfProbability, operation=F.equalize):
    """Transform that equalizes the histogram of each channel with probability `p`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import RandomEqualize
    >>> image = np.arange(100, 104, dtype=np.uint8).repeat(256).reshape(32, 32, 1)
    >>> np.unique(RandomEqualize(p=1)(image))
    array([  0,  85, 171, 255], dtype=uint8)
    """


class RandomPosterize(_RandomTransform, operation=F.posterize):
    """Transform that keeps the `bits` most significant bits of each byte with probability `p`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import RandomPosterize
    >>> RandomPosterize(bits=2, p=1)(np.array([[[1, 100, 255]]], np.uint8))
    array([[[  0,  64, 192]]], dtype=uint8)
    """

    bits: int
    p: float = 0.5


class RandomSolarize(_RandomTransform, operation=F.solarize):
    """Transform that inverts all values of at least `threshold` with probability `p`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import RandomSolarize
    >>> RandomSolarize(threshold=128, p=1)(np.array([[[1, 100, 255]]], np.uint8))
    array([[[  1, 100,   0]]], dtype=uint8)
    """

    threshold: float
    p: float = 0.5


class RandomAdjustSharpness(_RandomTransform, operation=F.adjust_sharpness):
    """Transform that changes sharpness by `sharpness_factor` with probability `p`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import RandomAdjustSharpness
    >>> image = np.array([[0, 0, 0], [0, 130, 0], [0, 0, 0]], np.uint8)[:, :, None]
    >>> RandomAdjustSharpness(0, p=1)(image)[1, 1]  # 0 blurs, 2 sharpens
    array([50], dtype=uint8)
    """

    sharpness_factor: float
    p: float = 0.5


class RandomGrayscale(_RandomTransform, scale_free=True):
    """Transform that converts to grayscale with probability `p`; keeps the number of channels.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import RandomGrayscale
    >>> RandomGrayscale(p=1)(np.array([[[255, 0, 0]]], np.uint8))
    array([[[76, 76, 76]]], dtype=uint8)
    """

    p: float = 0.1

    def changed(self, image: ImageT) -> ImageT:
        return F.rgb_to_grayscale(image, dimensions(image)[0])


class Grayscale(Transform, operation=F.rgb_to_grayscale, scale_free=True):
    """Transform that converts images to grayscale (luma).

    Parameters
    ----------
    num_output_channels : int
        1, or 3 for three equal channels.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import Grayscale
    >>> Grayscale()(np.array([[[255, 0, 0], [0, 255, 0]]], np.uint8)).ravel()
    array([ 76, 150], dtype=uint8)
    """

    num_output_channels: int = 1


class ColorJitter(Transform, scale_free=True):
    """Transform that randomly changes brightness, contrast, saturation and hue, in random order.

    Parameters
    ----------
    brightness, contrast, saturation : float or (float, float)
        Range of the factor; a single number means ``1 ± number``, but at least 0.
    hue : float or (float, float)
        Range of the hue shift within -0.5…0.5; a single number means ``± number``.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import ColorJitter
    >>> ColorJitter(brightness=(0.5, 0.5))(np.array([[[100, 200, 50]]], np.uint8))
    array([[[ 50, 100,  25]]], dtype=uint8)
    >>> ColorJitter(brightness=0.2, contrast=0.2).brightness
    (0.8, 1.2)
    """

    brightness: float | Sequence[float] | None = 0
    contrast: float | Sequence[float] | None = 0
    saturation: float | Sequence[float] | None = 0
    hue: float | Sequence[float] | None = 0

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            self._set(name, 1.0, 0.0, math.inf)
        self._set("hue", 0.0, -0.5, 0.5)

    def _set(self, name: str, neutral: float, least: float, most: float) -> None:
        limits = _limits(name, getattr(self, name), neutral, least, most)
        setattr(self, name, None if limits == (neutral, neutral) else limits)

    @property
    def random(self) -> bool:
        return any((self.brightness, self.contrast, self.saturation, self.hue))

    def forward(self, image: ImageT) -> ImageT:
        if not self.random:
            return image
        adjustments: list[Callable[[Any, float], Any]] = [
            F.adjust_brightness,
            F.adjust_contrast,
            F.adjust_saturation,
            F.adjust_hue,
        ]
        order, *factors = self.get_params(self.brightness, self.contrast, self.saturation, self.hue)
        for index in order.tolist():
            if factors[index] is not None:
                image = adjustments[index](image, factors[index])
        return image

    @staticmethod
    def get_params(
        brightness: Any, contrast: Any, saturation: Any, hue: Any
    ) -> tuple[torch.Tensor, float | None, float | None, float | None, float | None]:
        """Draw the order of four changes and their factors (None if a factor has no range)."""
        order = torch.tensor(_random_order(4))
        first, second, third, fourth = (
            _random_uniform(*limits) if limits else None
            for limits in (brightness, contrast, saturation, hue)
        )
        return order, first, second, third, fourth


def _limits(
    name: str,
    value: float | Sequence[float],
    center: float = 0.0,
    least: float = -math.inf,
    most: float = math.inf,
) -> tuple[float, float]:
    """Return a (low, high) range; a single number is the distance of both ends from `center`."""
    if is_number(value):
        check_number(name, value, 0)
        value = (max(center - value, least) if center else -value, center + value)
    if len(value) != 2 or not least <= value[0] <= value[1] <= most:
        raise UsageError(
            f"{name} must be a number or a range of two within {(least, most)}, but it "
            f"is {value!r}",
            code="argument-value",
            argument=name,
        )
    return float(value[0]), float(value[1])


def _as_pair(value: float | Sequence[float]) -> tuple[float, ...]:
    return (value, value) if is_number(value) else tuple(value)


class GaussianBlur(Transform):
    """Transform that blurs images with a Gaussian of random standard deviation.

    Parameters
    ----------
    kernel_size : int or (int, int)
        Odd width and height of the kernel.
    sigma : float or (float, float)
        Range of the standard deviation in pixels.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import GaussianBlur
    >>> image = np.zeros((5, 5, 1), np.uint8)
    >>> image[2, 2] = 200
    >>> blurred = GaussianBlur(kernel_size=3, sigma=1.0)(image)
    >>> bool(0 < blurred[2, 1] < blurred[2, 2] < 200)
    True
    """

    kernel_size: Size
    sigma: Any = (0.1, 2.0)

    def __post_init__(self) -> None:
        low, high = self.sigma = _as_pair(self.sigma)
        if not 0 < low <= high:
            raise UsageError(
                f"sigma must be a range of positive numbers, but it is {self.sigma!r}",
                code="argument-value",
                argument="sigma",
            )

    @property
    def random(self) -> bool:
        return self.sigma[0] != self.sigma[1]

    def forward(self, image: ImageT) -> ImageT:
        return F.gaussian_blur(image, self.kernel_size, self.get_params(*self.sigma))

    @staticmethod
    def get_params(sigma_min: float, sigma_max: float) -> float:
        """Draw a standard deviation between `sigma_min` and `sigma_max`."""
        return _random_uniform(sigma_min, sigma_max)


class RandomRotation(Transform, random=True):
    """Transform that rotates images by a random angle.

    Parameters
    ----------
    degrees : float or (float, float)
        Range of the angle in degrees; a single number means ``± number``.
    interpolation, expand, center, fill
        See :func:`~.functional.rotate`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import RandomRotation
    >>> RandomRotation((90, 90))(np.array([[1, 2], [3, 4]], np.uint8)[:, :, None])[:, :, 0]
    array([[2, 4],
           [1, 3]], dtype=uint8)
    """

    degrees: Any
    interpolation: Mode = InterpolationMode.NEAREST
    expand: bool = False
    center: Sequence[float] | None = None
    fill: Fill = 0

    def __post_init__(self) -> None:
        self.degrees = _limits("degrees", self.degrees)
        self.interpolation = interpolation_mode(self.interpolation)

    def forward(self, image: ImageT) -> ImageT:
        angle = self.get_params(self.degrees)
        return F.rotate(image, angle, self.interpolation, self.expand, self.center, self.fill)

    @staticmethod
    def get_params(degrees: Sequence[float]) -> float:
        """Draw a rotation angle from the range `degrees`."""
        return _random_uniform(*degrees)


class RandomAffine(Transform, random=True):
    """Transform that randomly rotates, translates, scales and shears images.

    Parameters
    ----------
    degrees : float or (float, float)
        Range of the angle in degrees.
    translate : (float, float), optional
        Largest translation as fractions of width and height.
    scale : (float, float), optional
        Range of the scale factor.
    shear : float, (float, float) or 4 floats, optional
        Range of the shear angle along the rows; four numbers add a range along the columns.
    interpolation, fill, center
        See :func:`~.functional.affine`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import RandomAffine
    >>> transform = RandomAffine(degrees=10, translate=(0.1, 0.1), scale=(0.9, 1.1))
    >>> transform(np.zeros((6, 8, 3), np.uint8)).shape
    (6, 8, 3)
    """

    degrees: Any
    translate: Sequence[float] | None = None
    scale: Sequence[float] | None = None
    shear: Any = None
    interpolation: Mode = InterpolationMode.NEAREST
    fill: Fill = 0
    center: Sequence[float] | None = None

    def __post_init__(self) -> None:
        self.degrees = _limits("degrees", self.degrees)
        if self.translate is not None and not all(0 <= share <= 1 for share in self.translate):
            raise UsageError(
                f"translate must be two shares in 0…1, but it is {self.translate!r}",
                code="argument-value",
                argument="translate",
            )
        if self.scale is not None and min(self.scale) <= 0:
            raise UsageError(
                f"scale must be a range of positive factors, but it is {self.scale!r}",
                code="argument-value",
                argument="scale",
            )
        if self.shear is not None and (is_number(self.shear) or len(self.shear) != 4):
            self.shear = _limits("shear", self.shear)
        self.interpolation = interpolation_mode(self.interpolation)

    def forward(self, image: ImageT) -> ImageT:
        _, height, width = dimensions(image)
        drawn = self.get_params(
            self.degrees, self.translate, self.scale, self.shear, (width, height)
        )
        return F.affine(image, *drawn, self.interpolation, self.fill, self.center)

    @staticmethod
    def get_params(
        degrees: Sequence[float],
        translate: Sequence[float] | None,
        scale_ranges: Sequence[float] | None,
        shears: Sequence[float] | None,
        img_size: Sequence[int],
    ) -> tuple[float, tuple[int, int], float, tuple[float, float]]:
        """Draw an angle, translation, scale and shear for an image of given width and height."""
        angle = _random_uniform(*degrees)
        across = down = 0
        if translate is not None:
            limits = [share * length for share, length in zip(translate, img_size, strict=True)]
            across, down = (round(_random_uniform(-limit, limit)) for limit in limits)
        scale = 1.0 if scale_ranges is None else _random_uniform(*scale_ranges)
        angles = shears or ()
        shear = [_random_uniform(*pair) for pair in zip(angles[::2], angles[1::2], strict=True)]
        first, second = (*shear, 0.0, 0.0)[:2]
        return angle, (across, down), scale, (first, second)


class RandomPerspective(_RandomTransform):
    """Transform that randomly distorts the perspective of images with probability `p`.

    Parameters
    ----------
    distortion_scale : float
        Largest movement of the corners as a fraction of half of the image, 0…1.
    p : float
        Probability of the transform.
    interpolation, fill
        See :func:`~.functional.perspective`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import RandomPerspective
    >>> RandomPerspective(distortion_scale=0.5, p=1)(np.zeros((6, 8, 3), np.uint8)).shape
    (6, 8, 3)
    """

    distortion_scale: float = 0.5
    p: float = 0.5
    interpolation: Mode = InterpolationMode.BILINEAR
    fill: Fill = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("distortion_scale", self.distortion_scale, 0, 1)
        self.interpolation = interpolation_mode(self.interpolation)

    def changed(self, image: ImageT) -> ImageT:
        _, height, width = dimensions(image)
        corners = self.get_params(width, height, self.distortion_scale)
        return F.perspective(image, *corners, self.interpolation, self.fill)

    @staticmethod
    def get_params(
        width: int, height: int, distortion_scale: float
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Draw new positions of an image's corners; return the original and the new corners."""
        across = int(distortion_scale * (width // 2))
        down = int(distortion_scale * (height // 2))
        right, bottom = width - 1, height - 1
        start = [[0, 0], [right, 0], [right, bottom], [0, bottom]]
        # all corners move inwards
        end = [
            [
                _random_below(across + 1) + (right - across if x else 0),
                _random_below(down + 1) + (bottom - down if y else 0),
            ]
            for x, y in start
        ]
        return start, end


class ElasticTransform(Transform, random=True):
    """Transform that displaces pixels by a smooth random field (Simard et al. 2003).

    Parameters
    ----------
    alpha : float or (float, float)
        Size of the displacements, horizontal and vertical.
    sigma : float or (float, float)
        Smoothness: standard deviation in pixels of the Gaussian blur of the displacements.
    interpolation, fill
        See :func:`~.functional.elastic_transform`.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import ElasticTransform
    >>> ElasticTransform(alpha=50.0, sigma=5.0)(np.zeros((60, 80, 3), np.uint8)).shape
    (60, 80, 3)
    """

    alpha: Any = 50.0
    sigma: Any = 5.0
    interpolation: Mode = InterpolationMode.BILINEAR
    fill: Fill = 0

    def __post_init__(self) -> None:
        self.alpha, self.sigma = _as_pair(self.alpha), _as_pair(self.sigma)
        self.interpolation = interpolation_mode(self.interpolation)

    def forward(self, image: ImageT) -> ImageT:
        _, height, width = dimensions(image)
        displacement = self.get_params(self.alpha, self.sigma, (height, width))
        return F.elastic_transform(image, displacement, self.interpolation, self.fill)

    @staticmethod
    def get_params(
        alpha: Sequence[float], sigma: Sequence[float], size: Sequence[int]
    ) -> torch.Tensor:
        """Draw a displacement field ``(1, H, W, 2)`` for an image of the given height and width."""
        shifts = []
        for strength, deviation, length in zip(alpha, sigma, reversed(size), strict=True):
            field = torch.rand((1, *size), generator=_generator()) * 2 - 1
            if deviation > 0:
                # odd, with four standard deviations to each side
                width = int(8 * deviation + 1)
                field = F.gaussian_blur(field, width + (width + 1) % 2, deviation)
            shifts.append(field * (strength / length))
        return torch.stack(shifts, -1)


class ToTensor(Transform, operation=F.to_tensor):
    """Transform that converts images to float32 tensors ``(C, H, W)``: bytes 0…255 become 0…1.

    Parameters
    ----------
    memory_format : torch.memory_format
        ``torch.channels_last`` keeps the order of the values in memory, for
        :func:`~bigdl.nano.pytorch.vision.datasets.collate_channels_last`. Such a tensor cannot be
        flattened with ``view``.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import ToTensor
    >>> tensor = ToTensor()(np.full((6, 8, 3), 51, np.uint8))
    >>> tensor.shape, tensor.unique()
    (torch.Size([3, 6, 8]), tensor([0.2000]))
    """

    memory_format: torch.memory_format = torch.contiguous_format


class PILToTensor(Transform, operation=F.pil_to_tensor):
    """Transform that converts images to tensors ``(C, H, W)`` and keeps values and dtype.

    Examples
    --------
    >>> from PIL import Image
    >>> from bigdl.nano.pytorch.vision.transforms import PILToTensor
    >>> PILToTensor()(Image.new("RGB", (8, 6), "red"))[:, 0, 0]
    tensor([255,   0,   0], dtype=torch.uint8)
    """


class ConvertImageDtype(Transform, operation=F.convert_image_dtype):
    """Transform that converts image tensors between integers and floats in 0…1.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.vision.transforms import ConvertImageDtype
    >>> ConvertImageDtype(torch.float32)(torch.tensor([[[0, 51, 255]]], dtype=torch.uint8))
    tensor([[[0.0000, 0.2000, 1.0000]]])
    """

    dtype: torch.dtype


class ToPILImage(Transform, operation=F.to_pil_image):
    """Transform that converts arrays and tensors to PIL images.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.pytorch.vision.transforms import ToPILImage
    >>> image = ToPILImage()(np.zeros((6, 8, 3), np.uint8))
    >>> image.mode, image.size
    ('RGB', (8, 6))
    """

    mode: str | None = None


class Normalize(Transform, operation=F.normalize):
    """Transform that normalizes tensors: ``(tensor - mean) / std`` per channel.

    Parameters
    ----------
    mean, std : sequence of float
        One value per channel, or one for all channels.
    inplace : bool
        Whether to modify the tensor in place.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.vision.transforms import Normalize
    >>> Normalize(mean=[0.5], std=[0.25])(torch.tensor([[[0.0, 0.5, 1.0]]]))
    tensor([[[-2.,  0.,  2.]]])
    """

    mean: Sequence[float]
    std: Sequence[float]
    inplace: bool = False

    def after(self, previous: object, tensor: torch.Tensor) -> torch.Tensor:
        """Normalize a tensor, in place if the previous transform was ``ToTensor``."""
        inplace = self.inplace or isinstance(previous, ToTensor)
        return F.normalize(tensor, self.mean, self.std, inplace)


class LinearTransformation(Transform):
    """Linear map of images: ``(flattened tensor - mean_vector) @ transformation_matrix``.

    Parameters
    ----------
    transformation_matrix : Tensor (D, D)
        Matrix; D is the number of values of an image.
    mean_vector : Tensor (D,)

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.vision.transforms import LinearTransformation
    >>> whiten = LinearTransformation(2 * torch.eye(3), mean_vector=torch.ones(3))
    >>> whiten(torch.tensor([[[1.0, 2.0, 3.0]]]))
    tensor([[[0., 2., 4.]]])
    """

    transformation_matrix: torch.Tensor
    mean_vector: torch.Tensor

    def __post_init__(self) -> None:
        shape, length = tuple(self.transformation_matrix.shape), len(self.mean_vector)
        if shape != (length, length):
            raise UsageError(
                "transformation_matrix must be square and mean_vector as long as it, but they are "
                f"{shape} and {tuple(self.mean_vector.shape)}",
                code="data-shape",
                argument="transformation_matrix",
            )

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # tensors only
        size = math.prod(tensor.shape[-3:])
        if size != len(self.mean_vector):
            raise UsageError(
                f"The image has {size} values, but transformation_matrix is for "
                f"{len(self.mean_vector)}",
                code="data-shape",
            )
        flat = tensor.reshape(-1, size) - self.mean_vector
        return (flat @ self.transformation_matrix).reshape(tensor.shape)


class RandomErasing(_HalfProbability):
    """Transform that erases a random rectangle of a tensor (Zhong et al. 2017).

    Parameters
    ----------
    p : float
        Probability of the transform.
    scale : (float, float)
        Range of the rectangle's fraction of the image area.
    ratio : (float, float)
        Range of the rectangle's height divided by its width.
    value : float, sequence or "random"
        Fill value: a number, one number per channel, or "random" for standard normal noise.
    inplace : bool
        Whether to modify the tensor in place.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.vision.transforms import RandomErasing
    >>> erased = RandomErasing(p=1, scale=(0.25, 0.25), ratio=(1, 1))(torch.ones(3, 8, 8))
    >>> int((erased[0] == 0).sum())  # a square of a quarter of the image
    16
    """

    scale: Sequence[float] = (0.02, 0.33)
    ratio: Sequence[float] = (0.3, 3.3)
    value: float | Sequence[float] | Literal["random"] = 0
    inplace: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        scale, ratio, value = self.scale, self.ratio, self.value
        if not 0 <= scale[0] <= scale[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
            raise UsageError(
                "RandomErasing needs scale a range within 0…1 and ratio a range of positive "
                f"numbers, but got scale={scale}, ratio={ratio}",
                code="argument-value",
                argument="scale",
            )
        if isinstance(value, str) and value != "random":
            raise UsageError(
                f"value must be a number, a sequence or 'random', not {value!r}",
                code="argument-value",
                argument="value",
            )

    def changed(self, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # tensors only
        value = None if self.value == "random" else self.value
        top, left, height, width, values = self.get_params(tensor, self.scale, self.ratio, value)
        return F.erase(tensor, top, left, height, width, values, self.inplace)

    @staticmethod
    def get_params(
        img: torch.Tensor, scale: Sequence[float], ratio: Sequence[float], value: object = None
    ) -> tuple[int, int, int, int, torch.Tensor]:
        """Draw the top, left, height, width and fill values of a rectangle.

        If no rectangle fits, return the whole image with its values. `value` None draws noise.
        """
        channels, rows, columns = dimensions(img)
        for width, height in _random_lengths(rows * columns, scale, ratio):
            if 0 < height < rows and 0 < width < columns:
                if value is None:
                    values = torch.randn((channels, height, width), generator=_generator())
                else:
                    values = torch.as_tensor(value, dtype=torch.float32).view(-1, 1, 1)
                return *_random_corner(rows - height, columns - width), height, width, values
        return 0, 0, rows, columns, img


def __getattr__(name: str) -> Any:  # an attribute of torchvision
    return of_torchvision("transforms", name, __name__)


__all__ = ["InterpolationMode", "functional"]
__all__ += [name for name in public_names(__name__) if name[0].isupper()]
