"""Images in one folder for each class."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.vision.datasets.decoding import read_image
from bigdl.nano.pytorch.vision.datasets.loading import SampleDataset
from bigdl.nano.pytorch.vision.transforms.sizes import size_that_suffices

__all__ = ["IMAGE_EXTENSIONS", "ImageFolder"]

IMAGE_EXTENSIONS = (
    ".jpg",
    ".jpeg",
    ".png",
    ".ppm",
    ".bmp",
    ".pgm",
    ".tif",
    ".tiff",
    ".webp",
)


class ImageFolder(SampleDataset):
    """Images of which each class has a folder: ``root/cat/1.jpg``, ``root/dog/a/2.png``.

    Parameters
    ----------
    root : path
    transform : callable, optional
        From an image, an ndarray ``(H, W, 3)`` of bytes in the order red, green, blue, to what
        the model is given.
    target_transform : callable, optional
        From the number of the class to the target.
    loader : callable, optional
        From a path to an image; by default JPEGs and PNGs are decoded by fast libraries.
    is_valid_file : callable, optional
        Which paths are images; by default the extension says so.
    allow_empty : bool
        Whether a folder without images is a class.
    reduced : bool
        Whether a JPEG that the transform makes less than half as large is decoded at a smaller
        size, see :ref:`the documentation <vision-decoding>`. Values differ a little.

    Attributes
    ----------
    classes : list of str
        Names of the folders, sorted.
    class_to_idx : dict of str to int
    samples, imgs : list of (str, int)
        Paths and numbers of the classes.
    targets : list of int

    Raises
    ------
    UsageError
        If there is no folder, or a class has no image.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        transform: Callable | None = None,
        target_transform: Callable | None = None,
        loader: Callable[[str], Any] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
        *,
        reduced: bool = True,
    ):
        self.root = os.fspath(root)
        self.transform, self.target_transform = transform, target_transform
        self.loader, self.reduced = loader, reduced
        self.classes, self.class_to_idx = self.find_classes(self.root)
        self.samples = self.make_dataset(is_valid_file or _has_extension, allow_empty)

    @property
    def callables(self) -> tuple[Callable | None, ...]:
        return self.transform, self.target_transform

    @property
    def thread_safe(self) -> bool:
        return super().thread_safe and self.loader is None

    @property
    def imgs(self) -> list[tuple[str, int]]:
        return self.samples

    @property
    def targets(self) -> list[int]:
        return [target for _, target in self.samples]

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        """Names and numbers of the classes."""
        if not os.path.isdir(directory):
            raise UsageError(f"root must be a folder with one folder per class: {directory!r}")
        classes = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir())
        if not classes:
            raise UsageError(f"{directory!r} has no folder; each class needs one")
        return classes, {name: number for number, name in enumerate(classes)}

    def make_dataset(
        self, is_valid_file: Callable[[str], bool], allow_empty: bool
    ) -> list[tuple[str, int]]:
        """Paths and numbers of the classes, in the order of class and path."""
        samples, empty = [], []
        for name, number in self.class_to_idx.items():
            paths = map(str, Path(self.root, name).rglob("*"))
            valid = sorted(path for path in paths if os.path.isfile(path) and is_valid_file(path))
            samples += [(path, number) for path in valid]
            if not valid:
                empty.append(name)
        if empty and not allow_empty:
            raise UsageError(
                f"{self.root!r} has no image of {', '.join(empty)} (one of "
                f"{' '.join(IMAGE_EXTENSIONS)}); remove the folder, or pass allow_empty=True"
            )
        return samples

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, index: int) -> tuple[Any, Any]:
        path, target = self.samples[index]
        image = self.load(path)
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    def load(self, path: str) -> Any:
        """The image of a path, before the transform."""
        if self.loader is not None:
            return self.loader(path)
        return read_image(path, size_that_suffices(self.transform) if self.reduced else None)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} images of {len(self.classes)} classes in "
            f"{self.root!r}, transform={self.transform})"
        )


def _has_extension(path: str) -> bool:
    return path.lower().endswith(IMAGE_EXTENSIONS)
