"""Images and masks of the objects in them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.vision.datasets.decoding import read_image
from bigdl.nano.pytorch.vision.datasets.folder import IMAGE_EXTENSIONS
from bigdl.nano.pytorch.vision.datasets.loading import SampleDataset

__all__ = ["SegmentationImageFolder", "read_mask"]


def read_mask(path: str | os.PathLike) -> np.ndarray:
    """The values of a mask, uint8 ``(H, W)``; of a palette the indices, not the colours."""
    with Image.open(path) as mask:
        values = np.array(mask)
    if values.ndim != 2:
        raise UsageError(
            f"A mask must have one channel with the number of an object, but {os.fspath(path)!r} "
            f"has shape {values.shape}"
        )
    return values


class SegmentationImageFolder(SampleDataset):
    """A folder of images and one of masks, paired in the order of their names.

    The value of a mask's pixel is the number of the object that it belongs to, 0 is background.
    This is the form of the Penn-Fudan pedestrians, and targets have the form of torchvision's
    detection models.

    Parameters
    ----------
    root : path
    image_folder, mask_folder : str
        Within `root`.
    transforms : callable, optional
        ``transforms(image, target)`` gives both.

    Raises
    ------
    UsageError
        If a folder is missing, or they do not hold equally many files.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        image_folder: str,
        mask_folder: str,
        transforms: Callable | None = None,
    ):
        self.root, self.transforms = os.fspath(root), transforms
        self.image_folder, self.mask_folder = image_folder, mask_folder
        self.images = _files(Path(self.root, image_folder))
        self.masks = _files(Path(self.root, mask_folder))
        if len(self.images) != len(self.masks):
            raise UsageError(
                f"Each image needs a mask, but {image_folder!r} has {len(self.images)} files and "
                f"{mask_folder!r} has {len(self.masks)}"
            )

    @property
    def callables(self) -> tuple[Callable | None, ...]:
        return (self.transforms,)

    def __len__(self) -> int:
        return len(self.images)

    def sample(self, index: int) -> tuple[Any, dict[str, torch.Tensor]]:
        """An image, uint8 ``(H, W, 3)``, and what is known of its objects.

        The target holds ``boxes`` (float32 ``(N, 4)``: left, top, right, bottom), ``labels``
        (ones), ``masks`` (uint8 ``(N, H, W)``), ``image_id``, ``area`` (of the boxes) and
        ``iscrowd`` (zeros).
        """
        image = read_image(self.images[index])
        mask = read_mask(self.masks[index])
        target = _target(mask, index)
        return (image, target) if self.transforms is None else self.transforms(image, target)


def _files(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise UsageError(f"There is no folder {str(folder)!r}")
    return sorted(str(path) for path in folder.iterdir() if path.suffix.lower() in IMAGE_EXTENSIONS)


def _target(mask: np.ndarray, index: int) -> dict[str, torch.Tensor]:
    objects = np.unique(mask)
    masks = mask == objects[objects != 0][:, None, None]
    boxes = torch.from_numpy(np.array([_box(each) for each in masks], np.float32).reshape(-1, 4))
    count = len(masks)
    return {
        "boxes": boxes,
        "labels": torch.ones(count, dtype=torch.int64),
        "masks": torch.from_numpy(masks.astype(np.uint8)),
        "image_id": torch.tensor([index]),
        "area": (boxes[:, 3] - boxes[:, 1]) * (boxes[:, 2] - boxes[:, 0]),
        "iscrowd": torch.zeros(count, dtype=torch.int64),
    }


def _box(mask: np.ndarray) -> tuple:
    rows, columns = np.nonzero(mask)
    return columns.min(), rows.min(), columns.max(), rows.max()
