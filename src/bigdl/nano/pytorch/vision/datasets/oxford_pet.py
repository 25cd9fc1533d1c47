"""The pets of Oxford (Parkhi et al. 2012): 37 breeds of cats and dogs, with masks."""

from __future__ import annotations

import os
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.vision.datasets.decoding import read_image
from bigdl.nano.pytorch.vision.datasets.loading import SampleDataset
from bigdl.nano.pytorch.vision.datasets.segmentation import read_mask

__all__ = ["OxfordIIITPet"]

_URL = "https://www.robots.ox.ac.uk/~vgg/data/pets/data/"
_ARCHIVES = ("images.tar.gz", "annotations.tar.gz")
_FOLDER = "oxford-iiit-pet"
_SPLITS = ("trainval", "test")
_TARGETS = ("category", "segmentation")


class OxfordIIITPet(SampleDataset):
    """Photographs of pets with the mask of the pet, or with its breed.

    Parameters
    ----------
    root : path
        The folder in which ``oxford-iiit-pet/images`` and ``oxford-iiit-pet/annotations`` lie.
    transform : callable, optional
        From an image, an ndarray ``(H, W, 3)`` of bytes, to what the model is given.
    target_transform : callable, optional
        From a target to another.
    download : bool
        Whether to fetch the data from their authors' site, 800 MB, if they are not there.
    split : str
        ``"trainval"`` or ``"test"``.
    target_types : str or sequence of str
        ``"segmentation"``, an ndarray ``(H, W)`` of bytes with 1 for the pet, 2 for the
        background and 3 for the edge; ``"category"``, the number of the breed; or both as a
        tuple.
    transforms : callable, optional
        ``transforms(image, target)`` gives both; instead of the two others.

    Attributes
    ----------
    classes : list of str
        Names of the breeds.

    Raises
    ------
    UsageError
        If the data are not there, or cannot be fetched.
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
        for name, given in (("transform", transform), ("target_transform", target_transform)):
            if given is not None and not callable(given):
                raise UsageError(
                    f"{name} must be callable, not {given!r}; pass split and target_types by name"
                )
        if transforms is not None and (transform is not None or target_transform is not None):
            raise UsageError("Pass transforms, or transform and target_transform, but not both")
        self.root = os.fspath(root)
        self.split = _one_of("split", split, _SPLITS)
        types = [target_types] if isinstance(target_types, str) else list(target_types)
        self.target_types = [_one_of("target_types", each, _TARGETS) for each in types]
        self.transform, self.target_transform = transform, target_transform
        self.transforms = transforms
        self.folder = Path(self.root, _FOLDER)
        if download and not self._is_there():
            self._download()
        if not self._is_there():
            raise UsageError(
                f"There are no images and annotations in {str(self.folder)!r}; unpack "
                f"{' and '.join(_URL + name for name in _ARCHIVES)} there, or pass download=True"
            )
        self._read_annotations()

    def _is_there(self) -> bool:
        return all((self.folder / name).is_dir() for name in ("images", "annotations"))

    def _download(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in _ARCHIVES:
            with tempfile.TemporaryFile(dir=self.folder) as archive:
                try:
                    with urllib.request.urlopen(_URL + name, timeout=30) as answer:
                        while chunk := answer.read(1 << 20):
                            archive.write(chunk)
                except OSError as error:
                    raise UsageError(
                        f"{_URL + name} cannot be fetched ({error}); fetch it by other means and "
                        f"unpack it in {str(self.folder)!r}"
                    ) from error
                archive.seek(0)
                with tarfile.open(fileobj=archive) as files:
                    files.extractall(self.folder, filter="data")

    def _read_annotations(self) -> None:
        """Lines of the list are: name, breed from 1 on, species, number within the species."""
        annotations = self.folder / "annotations"
        lines = (annotations / f"{self.split}.txt").read_text().splitlines()
        rows = [line.split() for line in lines if line.strip()]
        self._names = [row[0] for row in rows]
        self._labels = [int(row[1]) - 1 for row in rows]
        breeds = {
            label: name.rpartition("_")[0]
            for name, label in zip(self._names, self._labels, strict=True)
        }
        self.classes = [
            " ".join(word.title() for word in breeds[label].split("_")) for label in sorted(breeds)
        ]
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self._masks = annotations / "trimaps"

    @property
    def callables(self) -> tuple[Callable | None, ...]:
        return self.transform, self.target_transform, self.transforms

    def __len__(self) -> int:
        return len(self._names)

    def sample(self, index: int) -> tuple[Any, Any]:
        image = read_image(self.folder / "images" / f"{self._names[index]}.jpg")
        targets = tuple(self._target(kind, index) for kind in self.target_types)
        target = targets[0] if len(targets) == 1 else targets
        if self.transforms is not None:
            return self.transforms(image, target)
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    def _target(self, kind: str, index: int) -> Any:
        if kind == "category":
            return self._labels[index]
        return read_mask(self._masks / f"{self._names[index]}.png")


def _one_of(name: str, given: str, known: Sequence[str]) -> str:
    if given not in known:
        raise UsageError(f"{name} must be one of {', '.join(known)}, not {given!r}")
    return given
