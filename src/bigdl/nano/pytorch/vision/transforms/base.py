"""The base of all transforms, their random numbers, and transforms that are made of others.

The life of a transform: a dataset calls it once for each sample, in any thread or process. It
keeps nothing from one call to the next. Its random numbers come from torch's default generator, or
from one that a thread has set (:func:`seeded`): a loader that transforms many samples on many
threads gives each sample a generator of its own, so that the result depends on the seed alone and
not on which thread was first.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from bigdl.common.checks import check_number
from bigdl.common.errors import UsageError

__all__ = ["Compose", "Lambda", "RandomApply", "RandomChoice", "RandomOrder", "Transform"]

_thread = threading.local()


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Let this thread draw from a generator of its own; nothing changes if `seed` is None."""
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
    return int(torch.randint(2**62, (), generator=_generator()))


def random_uniform(low: float, high: float) -> float:
    """Draw a number in ``[low, high)``; `low` if they are equal."""
    return float(torch.empty(()).uniform_(low, high, generator=_generator()))


def random_below(count: int) -> int:
    """Draw an int in ``[0, count)``."""
    return int(torch.randint(count, (), generator=_generator()))


def random_bool(probability: float) -> bool:
    """Draw True with this probability."""
    return bool(torch.rand((), generator=_generator()) < probability)


def random_permutation(count: int) -> list[int]:
    """Draw an order of the ints below `count`."""
    return torch.randperm(count, generator=_generator()).tolist()


def random_noise(shape: tuple[int, ...], normal: bool = False) -> torch.Tensor:
    """Draw floats of the standard normal distribution, or uniform ones in ``[0, 1)``."""
    return (torch.randn if normal else torch.rand)(shape, generator=_generator())


class Transform(torch.nn.Module):
    """A map from an image to another; a module without parameters.

    Attributes
    ----------
    random : bool
        Whether two calls with the same image may differ.
    scale_free : bool
        Whether a small image is treated as a large one, so that images may be made smaller before.
    """

    scale_free = False
    if TYPE_CHECKING:

        @property
        def random(self) -> bool: ...
    else:
        random = False

    @property
    def parts(self) -> Sequence[Callable]:
        """The transforms that this one calls."""
        return ()

    def __repr__(self) -> str:
        """The name and all settings: equal texts mean equal transforms."""
        settings = (
            f"{name}={value}"
            for name, value in vars(self).items()
            if not name.startswith("_") and name != "training"
        )
        return f"{type(self).__name__}({', '.join(settings)})"


def is_random(transform: Callable | None) -> bool:
    """Return True if a transform may give two results for one image, as far as can be known.

    Of a function that is not a transform of ours it cannot be known: it counts as random.
    """
    if transform is None:
        return False
    if not isinstance(transform, Transform):
        return True
    return transform.random or any(map(is_random, transform.parts))


def is_thread_safe(transform: Callable | None) -> bool:
    """Return True if a transform gives the same result in any thread: only ours are known to."""
    if transform is None:
        return True
    return (
        isinstance(transform, Transform)
        and not isinstance(transform, Lambda)
        and all(map(is_thread_safe, transform.parts))
    )


class _Group(Transform):
    """Several transforms."""

    def __init__(self, transforms: Sequence[Callable]):
        super().__init__()
        if not isinstance(transforms, Sequence | torch.nn.ModuleList):
            raise UsageError(
                f"{type(self).__name__} takes a list of transforms, not a "
                f"{type(transforms).__name__}"
            )
        # Not a ModuleList: users put functions in, and change the list.
        self.transforms = list(transforms)

    @property
    def parts(self):
        return self.transforms

    def __repr__(self) -> str:
        lines = "".join(f"\n    {each}" for each in self.transforms)
        chances = f"\n    p={self.p}" if hasattr(self, "p") else ""
        return f"{type(self).__name__}({lines}{chances}\n)"


class Compose(_Group):
    """One transform after the other.

    A conversion to a tensor and the normalisation that follows it share one buffer.
    """

    def __call__(self, image: Any) -> Any:
        previous = None
        for transform in self.transforms:
            follow = getattr(transform, "after", None)
            image = transform(image) if follow is None else follow(previous, image)
            previous = transform
        return image


class Lambda(Transform):
    """A function of the user's."""

    random = True

    def __init__(self, lambd: Callable[[Any], Any]):
        super().__init__()
        if not callable(lambd):
            raise UsageError(f"Lambda takes a function, not a {type(lambd).__name__}")
        self.lambd = lambd

    def forward(self, image: Any) -> Any:
        return self.lambd(image)


class RandomApply(_Group):
    """All of the transforms with probability `p`, else none of them."""

    random = True

    def __init__(self, transforms: Sequence[Callable], p: float = 0.5):
        super().__init__(transforms)
        self.p = p

    def forward(self, image: Any) -> Any:
        if random_bool(self.p):
            for transform in self.transforms:
                image = transform(image)
        return image


class RandomOrder(_Group):
    """All of the transforms in a random order."""

    random = True

    def forward(self, image: Any) -> Any:
        for index in random_permutation(len(self.transforms)):
            image = self.transforms[index](image)
        return image


class RandomChoice(_Group):
    """One of the transforms, with the probabilities `p` if they are given."""

    random = True

    def __init__(self, transforms: Sequence[Callable], p: Sequence[float] | None = None):
        super().__init__(transforms)
        if p is not None and len(p) != len(self.transforms):
            raise UsageError(
                f"p must have one number for each of {len(self.transforms)} transforms"
            )
        self.p = p

    def forward(self, image: Any) -> Any:
        weights = [1.0] * len(self.transforms) if self.p is None else self.p
        edges = list(itertools.accumulate(weights))
        drawn = bisect.bisect_right(edges, random_uniform(0, edges[-1]))
        return self.transforms[drawn](image)


class RandomTransform(Transform):
    """A transform that is applied with probability `p`."""

    random = True

    def __init__(self, p: float = 0.5):
        super().__init__()
        self.p = check_number("p", p, 0, 1)

    def changed(self, image: Any) -> Any:
        """Return the image after the transform."""
        raise NotImplementedError

    def forward(self, image: Any) -> Any:
        return self.changed(image) if random_bool(self.p) else image
