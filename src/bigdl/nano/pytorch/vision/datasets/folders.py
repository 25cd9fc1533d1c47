"""Image datasets in folders, with multi-threaded decoding and transforms.

A DataLoader without worker processes requests a whole batch at once (``__getitems__``). Threads on
all cores then decode and transform its samples; decoders and transforms release the GIL. Each
sample has a separate random generator, seeded in sample order, so that threads, workers and single
samples draw the same random numbers.
"""

import abc
import os
import shutil
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, default_collate, get_worker_info

from bigdl.common.checks import check_choice
from bigdl.common.cpu import core_count
from bigdl.common.errors import UsageError
from bigdl.data.image_files import read_image
from bigdl.nano.pytorch.vision.transforms.transforms import (
    is_random,
    is_thread_safe,
    random_seed,
    seeded,
    sufficient_size,
)

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_PETS_URL = "https://www.robots.ox.ac.uk/~vgg/data/pets/data/"
_PETS_ARCHIVES = ("images.tar.gz", "annotations.tar.gz")


class SampleDataset(Dataset, abc.ABC):
    """Base class of datasets that build each sample in ``sample(index)``."""

    transform: Callable | None = None
    target_transform: Callable | None = None
    transforms: Callable | None = None  # applied to image and target together

    @abc.abstractmethod
    def sample(self, index: int) -> Any:  # a tuple, defined by the subclass
        """Return the sample at an index."""

    @property
    def _callables(self) -> tuple[Callable | None, ...]:
        return self.transform, self.target_transform, self.transforms

    def _transform(self, image: object, target: object) -> tuple[Any, Any]:
        if self.transforms is not None:
            return self.transforms(image, target)
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    @property
    def deterministic(self) -> bool:
        """True if repeated access to an index is known to return the same sample."""
        return not any(map(is_random, self._callables))

    @property
    def thread_safe(self) -> bool:
        """True if several threads may build samples at the same time."""
        return all(map(is_thread_safe, self._callables))

    def __getitem__(self, index: int) -> Any:  # a tuple, as :meth:`sample`
        return self._seeded_sample(index, None if self.deterministic else random_seed())

    def __getitems__(self, indices: Sequence[int]) -> list:
        """Return the samples at several indices."""
        fixed = self.deterministic
        seeds = [None if fixed else random_seed() for _ in indices]
        if not self.thread_safe or get_worker_info() is not None or core_count() == 1:
            return [self._seeded_sample(*pair) for pair in zip(indices, seeds, strict=True)]
        return list(_threads(os.getpid()).map(self._seeded_sample, indices, seeds))

    def _seeded_sample(self, index: int, seed: int | None) -> object:
        with seeded(seed):
            return self.sample(index)


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the thread pool of this process; a forked process needs a new one."""
    return ThreadPoolExecutor(core_count(), thread_name_prefix="bigdl-images")


def collate_channels_last(samples: Sequence[tuple[torch.Tensor, Any]]) -> list:
    """Collate pairs of images and targets to a batch with channels-last images.

    For ``DataLoader(collate_fn=...)`` with ``ToTensor(torch.channels_last)``: values are then
    copied once, without reordering, to the memory format in which convolutions are fastest.

    Parameters
    ----------
    samples : sequence of (Tensor, target)
        Images ``(C, H, W)`` of equal size, with targets.

    Returns
    -------
    list
        Images ``(N, C, H, W)`` and targets.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.nano.pytorch.vision import transforms
    >>> from bigdl.nano.pytorch.vision.datasets import collate_channels_last
    >>> to_tensor = transforms.ToTensor(torch.channels_last)
    >>> samples = [(to_tensor(np.zeros((6, 8, 3), np.uint8)), label) for label in (0, 1)]
    >>> images, labels = collate_channels_last(samples)
    >>> images.shape, images.is_contiguous(memory_format=torch.channels_last)
    (torch.Size([2, 3, 6, 8]), True)
    """
    images = torch.stack([image.permute(1, 2, 0) for image, _ in samples])
    return [images.permute(0, 3, 1, 2), default_collate([target for _, target in samples])]


class ImageFolder(SampleDataset):
    """Dataset of images with one folder per class: ``root/cat/1.jpg``, ``root/dog/a/2.png``.

    Parameters
    ----------
    root : path
    transform : callable, optional
        Function of an RGB image, a uint8 ndarray ``(H, W, 3)``, that returns the model's input.
    target_transform : callable, optional
        Function of the class index that returns the target.
    loader : callable, optional
        Function of a path that returns an image; by default fast decoders.
    is_valid_file : callable, optional
        Returns True for paths of images; by default tests the extension.
    allow_empty : bool
        Whether to accept class folders without images.
    reduced : bool
        Whether to decode a JPEG at a smaller size if the transform downscales it to less than half,
        see :ref:`the documentation <vision-decoding>`. Values differ slightly.

    Attributes
    ----------
    classes : list of str
        Names of the folders, sorted.
    class_to_idx : dict of str to int
    samples, imgs : list of (str, int)
        Paths and class indices.
    targets : list of int

    Raises
    ------
    UsageError
        If there are no folders, or a class has no image.

    Examples
    --------
    >>> from pathlib import Path
    >>> from PIL import Image
    >>> from bigdl.nano.pytorch.vision import transforms
    >>> from bigdl.nano.pytorch.vision.datasets import ImageFolder
    >>> for name in ("cat", "dog"):
    ...     Path("pets", name).mkdir(parents=True)
    ...     Image.new("RGB", (8, 6), "red").save(f"pets/{name}/1.png")
    >>> dataset = ImageFolder("pets", transforms.ToTensor())
    >>> dataset.classes
    ['cat', 'dog']
    >>> image, target = dataset[1]
    >>> image.shape, target
    (torch.Size([3, 6, 8]), 1)
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
    def thread_safe(self) -> bool:
        return super().thread_safe and self.loader is None

    @property
    def imgs(self) -> list[tuple[str, int]]:
        return self.samples

    @property
    def targets(self) -> list[int]:
        return [target for _, target in self.samples]

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        """Return the class names and a dict from name to index."""
        if not os.path.isdir(directory):
            raise UsageError(
                f"root must be a folder with one folder per class: {directory!r}",
                code="path-missing",
                path=str(directory),
            )
        classes = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir())
        if not classes:
            raise UsageError(
                f"{directory!r} has no folder; each class needs one",
                code="data-empty",
                path=str(directory),
            )
        return classes, {name: number for number, name in enumerate(classes)}

    def make_dataset(
        self, is_valid_file: Callable[[str], bool], allow_empty: bool
    ) -> list[tuple[str, int]]:
        """Return paths and class indices, sorted by class and path."""
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
                f"{' '.join(IMAGE_EXTENSIONS)}); remove the folder, or pass allow_empty=True",
                code="data-empty",
                path=str(self.root),
            )
        return samples

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, index: int) -> tuple[Any, Any]:
        path, target = self.samples[index]
        return self._transform(self.load(path), target)

    def load(self, path: str) -> np.ndarray:
        """Load the image at a path, without the transform."""
        if self.loader is not None:
            return self.loader(path)
        return read_image(path, sufficient_size(self.transform) if self.reduced else None)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} images of {len(self.classes)} classes in "
            f"{self.root!r}, transform={self.transform})"
        )


def _has_extension(path: str) -> bool:
    return path.lower().endswith(IMAGE_EXTENSIONS)


def _read_mask(path: str | os.PathLike) -> np.ndarray:
    """Read a mask as uint8 ``(H, W)``; for palette images, return indices instead of colors."""
    try:
        with Image.open(path) as mask:
            values = np.array(mask)
    except (OSError, SyntaxError) as error:
        reason = "it is empty" if os.path.getsize(path) == 0 else f"it holds no image ({error})"
        raise UsageError(
            f"The mask {os.fspath(path)!r} cannot be decoded: {reason}",
            code="file-damaged",
            path=str(path),
        ) from error
    if values.ndim != 2:
        raise UsageError(
            f"A mask must have one channel with the number of an object, but {os.fspath(path)!r} "
            f"has shape {values.shape}",
            code="data-shape",
            path=str(path),
        )
    return values


class SegmentationImageFolder(SampleDataset):
    """Dataset of images and instance masks, paired in the order of their file names.

    Mask values are object numbers; 0 is background. This is the format of the Penn-Fudan pedestrian
    dataset. Targets have the format of torchvision's detection models.

    Parameters
    ----------
    root : path
    image_folder, mask_folder : str
        Folders inside `root`.
    transforms : callable, optional
        ``transforms(image, target)`` returns both.

    Raises
    ------
    UsageError
        If a folder is missing, or the numbers of files differ.

    Examples
    --------
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from PIL import Image
    >>> from bigdl.nano.pytorch.vision.datasets import SegmentationImageFolder
    >>> mask = np.zeros((6, 8), np.uint8)
    >>> mask[1:4, 2:7] = 1  # the first object
    >>> for name in ("images", "masks"):
    ...     Path("people", name).mkdir(parents=True)
    >>> Image.new("RGB", (8, 6), "red").save("people/images/1.png")
    >>> Image.fromarray(mask).save("people/masks/1.png")
    >>> image, target = SegmentationImageFolder("people", "images", "masks")[0]
    >>> target["boxes"]
    tensor([[2., 1., 6., 3.]])
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
                f"{mask_folder!r} has {len(self.masks)}",
                code="data-structure",
            )

    def __len__(self) -> int:
        return len(self.images)

    def sample(self, index: int) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return an image, uint8 ``(H, W, 3)``, and its objects as a dict.

        The target contains ``boxes`` (float32 ``(N, 4)``: left, top, right, bottom), ``labels``
        (ones), ``masks`` (uint8 ``(N, H, W)``), ``image_id``, ``area`` (of the boxes) and
        ``iscrowd`` (zeros).
        """
        image = read_image(self.images[index])
        mask = _read_mask(self.masks[index])
        return self._transform(image, _objects_of(mask, index))


def _files(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise UsageError(
            f"There is no folder {str(folder)!r}", code="path-missing", path=str(folder)
        )
    return sorted(str(path) for path in folder.iterdir() if path.suffix.lower() in IMAGE_EXTENSIONS)


def _objects_of(mask: np.ndarray, index: int) -> dict[str, torch.Tensor]:
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


def _box(mask: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = np.nonzero(mask)
    return columns.min(), rows.min(), columns.max(), rows.max()


class OxfordIIITPet(SampleDataset):
    """Dataset of pet photographs with the mask of the pet, its breed, or both.

    Parameters
    ----------
    root : path
        Folder that contains ``oxford-iiit-pet/images`` and ``oxford-iiit-pet/annotations``.
    transform : callable, optional
        Function of an image, a uint8 ndarray ``(H, W, 3)``, that returns the model's input.
    target_transform : callable, optional
        Function of the target that returns the new target.
    download : bool
        Whether to download missing data (800 MB) from the authors' site.
    split : str
        ``"trainval"`` or ``"test"``.
    target_types : str or sequence of str
        ``"segmentation"``, a uint8 ndarray ``(H, W)`` with 1 for the pet, 2 for the background and
        3 for the edge; ``"category"``, the index of the breed; or both as a tuple.
    transforms : callable, optional
        ``transforms(image, target)`` returns both; replaces the two other transforms.

    Attributes
    ----------
    classes : list of str
        Names of the breeds.

    Raises
    ------
    UsageError
        If the data are missing, or cannot be downloaded.

    Examples
    --------
    >>> from pathlib import Path
    >>> from PIL import Image
    >>> from bigdl.nano.pytorch.vision.datasets import OxfordIIITPet
    >>> folder = Path("data", "oxford-iiit-pet")  # as with download=True
    >>> for name in ("images", "annotations/trimaps"):
    ...     (folder / name).mkdir(parents=True)
    >>> _ = (folder / "annotations/trainval.txt").write_text("Abyssinian_1 1 1 1")
    >>> Image.new("RGB", (8, 6), "red").save(folder / "images/Abyssinian_1.jpg")
    >>> Image.new("L", (8, 6), 2).save(folder / "annotations/trimaps/Abyssinian_1.png")
    >>> image, mask = OxfordIIITPet("data")[0]
    >>> image.shape, mask.shape, int(mask.max())  # 2 is background
    ((6, 8, 3), (6, 8), 2)
    >>> breeds = OxfordIIITPet("data", target_types="category")
    >>> breeds.classes, breeds[0][1]
    (['Abyssinian'], 0)
    """

    def __init__(
        self,
        root: str | os.PathLike,
        transform: Callable | None = None,
        target_transform: Callable | None = None,
        download: bool = False,
        *,
        split: str = "trainval",
        target_types: str | Sequence[str] = "segmentation",
        transforms: Callable | None = None,
    ):
        for name, value in (("transform", transform), ("target_transform", target_transform)):
            if value is not None and not callable(value):
                raise UsageError(
                    f"{name} must be callable, not {value!r}; pass split and target_types by name",
                    code="argument-type",
                    argument=name,
                )
        if transforms is not None and (transform is not None or target_transform is not None):
            raise UsageError(
                "Pass transforms, or transform and target_transform, but not both",
                code="argument-conflict",
                argument="transforms",
            )
        self.root = os.fspath(root)
        self.split = check_choice("split", split, ("trainval", "test"))
        types = [target_types] if isinstance(target_types, str) else list(target_types)
        self.target_types = [
            check_choice("target_types", each, ("category", "segmentation")) for each in types
        ]
        self.transform, self.target_transform = transform, target_transform
        self.transforms = transforms
        self.folder = Path(self.root, "oxford-iiit-pet")
        if download and not self._is_downloaded():
            self._download()
        if not self._is_downloaded():
            archives = " and ".join(_PETS_URL + name for name in _PETS_ARCHIVES)
            raise UsageError(
                f"There are no images and annotations in {str(self.folder)!r}; unpack {archives} "
                "there, or pass download=True",
                code="path-missing",
                path=str(self.folder),
            )
        self._read_annotations()

    def _is_downloaded(self) -> bool:
        return all((self.folder / name).is_dir() for name in ("images", "annotations"))

    def _download(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in _PETS_ARCHIVES:
            with tempfile.TemporaryFile(dir=self.folder) as archive:
                try:
                    with urllib.request.urlopen(_PETS_URL + name, timeout=30) as response:
                        shutil.copyfileobj(response, archive)
                except OSError as error:
                    raise UsageError(
                        f"{_PETS_URL + name} cannot be fetched ({error}); fetch it by other means "
                        f"and unpack it in {str(self.folder)!r}",
                        code="cluster-unreachable",
                        address=_PETS_URL + name,
                    ) from error
                archive.seek(0)
                with tarfile.open(fileobj=archive) as files:
                    files.extractall(self.folder, filter="data")

    def _read_annotations(self) -> None:
        """Read the list of samples, with columns for name, breed (from 1), species and number."""
        annotations = self.folder / "annotations"
        lines = (annotations / f"{self.split}.txt").read_text().splitlines()
        rows = [line.split() for line in lines if line.strip()]
        self._names = [name for name, *_ in rows]
        self._labels = [int(breed) - 1 for _, breed, *_ in rows]
        examples = dict(zip(self._labels, self._names, strict=True))
        breeds = (examples[label].rpartition("_")[0] for label in sorted(examples))
        self.classes = [breed.replace("_", " ").title() for breed in breeds]
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self._masks = annotations / "trimaps"

    def __len__(self) -> int:
        return len(self._names)

    def sample(self, index: int) -> tuple[Any, Any]:
        image = read_image(self.folder / "images" / f"{self._names[index]}.jpg")
        targets = tuple(self._target(each, index) for each in self.target_types)
        target = targets[0] if len(targets) == 1 else targets
        return self._transform(image, target)

    def _target(self, target_type: str, index: int) -> object:
        if target_type == "category":
            return self._labels[index]
        return _read_mask(self._masks / f"{self._names[index]}.png")
