"""Cached features: outputs of a frozen segment for each sample of a dataset, stored on disk.

Training can use them instead of images.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, default_collate, default_convert

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.search.results import fingerprint
from bigdl.nano.pytorch.frozen.segment import FrozenSegment

if TYPE_CHECKING:
    from collections.abc import Sized


_COMPARED = 8  # samples that are read twice
_MANIFEST, _FEATURES, _TARGETS = "manifest.json", "features.npy", "targets.pt"


class CachedFeatures(Dataset):
    """Dataset of pairs of features and targets, created by ``FrozenPrefix.cached``.

    Parameters
    ----------
    segment : FrozenSegment
    dataset : Dataset
        Dataset of pairs of an input of the segment and a target.
    directory : path
        Directory with ``features.npy``, which is memory-mapped, ``targets.pt`` and
        ``manifest.json``, which identifies weights and data.
    batch_size : int
        Batch size for computing features.

    Attributes
    ----------
    reused : bool
        True if the directory already had the features.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.frozen import accelerate_frozen_prefix
    >>> backbone = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 6))
    >>> model = torch.nn.Sequential(backbone.requires_grad_(False), torch.nn.Linear(6, 2))
    >>> rows = torch.utils.data.TensorDataset(torch.ones(5, 4), torch.arange(5))
    >>> with accelerate_frozen_prefix(model, torch.ones(1, 4), precision="fp32") as prefix:
    ...     features = prefix.cached(rows, "features")
    ...     again = prefix.cached(rows, "features")
    >>> len(features), features[3][0].shape, features[3][1]
    (5, torch.Size([6]), tensor(3))
    >>> features.reused, again.reused
    (False, True)
    """

    def __init__(
        self,
        segment: FrozenSegment,
        dataset: Dataset,
        directory: str | os.PathLike,
        batch_size: int = 32,
    ):
        if _length(dataset) == 0:
            raise UsageError(
                "The dataset is empty, so there is nothing to cache", code="data-empty"
            )
        _check_deterministic(dataset)
        self.directory = Path(directory)
        fingerprint = _fingerprint_of(segment, dataset)
        self.reused = self._holds(fingerprint)
        if not self.reused:
            self._compute(segment, dataset, batch_size)
            (self.directory / _MANIFEST).write_text(json.dumps(fingerprint))
        self._open()

    def _holds(self, fingerprint: dict) -> bool:
        try:
            return json.loads((self.directory / _MANIFEST).read_text()) == fingerprint
        except (OSError, ValueError):
            return False

    def _compute(self, segment: FrozenSegment, dataset: Dataset, batch_size: int) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / _MANIFEST).unlink(missing_ok=True)
        shape = (_length(dataset), *segment.output.shape[1:])
        # Written to another file, then renamed: an open dataset keeps its mapped file.
        aside = self.directory / (_FEATURES + ".part")
        features = np.lib.format.open_memmap(aside, "w+", np.float32, shape)
        targets: Any = []
        for images, of_images in DataLoader(dataset, batch_size, collate_fn=_collate):
            results = segment.compute(images)
            if results is None:
                raise UsageError(
                    f"{segment.name} cannot be cached: {segment.reason}", code="model-unsupported"
                )
            features[len(targets) : len(targets) + len(images)] = results.float().numpy()
            targets += of_images
        features.flush()
        aside.replace(self.directory / _FEATURES)
        if isinstance(targets[0], (int, float, torch.Tensor)):
            targets = default_collate(targets)  # one tensor loads faster
        torch.save(targets, self.directory / _TARGETS)

    def _open(self) -> None:
        self.features = np.load(self.directory / _FEATURES, mmap_mode="r")
        self.targets = torch.load(self.directory / _TARGETS, weights_only=True)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        return torch.from_numpy(np.array(self.features[index])), self.targets[index]

    def __getitems__(self, indices: Sequence[int]) -> list:
        features = torch.from_numpy(self.features[list(indices)])
        return [(row, self.targets[i]) for row, i in zip(features, indices, strict=True)]

    def __getstate__(self) -> dict:
        return {"directory": self.directory, "reused": self.reused}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._open()


def _collate(samples: list) -> tuple[torch.Tensor, list]:
    """Collate samples to a batch of images and a list of targets; convert ndarrays to tensors."""
    images, targets = zip(*samples, strict=True)
    return default_collate(list(images)), default_convert(list(targets))


def _check_deterministic(dataset: Dataset) -> None:
    """Raise UsageError if samples are random; if unknown, read a few samples twice and compare."""
    source = dataset
    while isinstance(source, Subset):
        source = source.dataset
    same = getattr(source, "deterministic", None)
    if not (torch.equal(_some_inputs(dataset), _some_inputs(dataset)) if same is None else same):
        raise UsageError(
            "Features can be cached only if a sample is the same each time, but the dataset's "
            f"transform draws random numbers: {getattr(source, 'transform', None)}",
            code="unsupported",
        )


def _some_inputs(dataset: Dataset) -> torch.Tensor:
    step = -(-_length(dataset) // _COMPARED)
    return default_collate([dataset[index][0] for index in range(0, _length(dataset), step)])


def _fingerprint_of(segment: FrozenSegment, dataset: Dataset) -> dict:
    """Return the properties that determine cached features, such as weights, code and data."""
    weights = hashlib.sha256()
    for module in segment.modules:
        for name, tensor in module.state_dict().items():
            weights.update(name.encode())
            weights.update(_bytes_of(tensor))
    return {
        "format": 3,  # file format
        "weights": weights.hexdigest(),
        "code": code_of(segment.modules),
        "modules": list(segment.names),
        "method": segment.method,
        "shape": list(segment.output.shape[1:]),
        "rows": _length(dataset),
        "data": _data_fingerprint(dataset),
    }


def code_of(modules: Iterable[torch.nn.Module]) -> str | None:
    """Return a hash of the settings and the user-defined code of modules.

    Networks with equal weights can differ, for example in an activation.
    """
    classes = {type(each) for module in modules for each in module.modules()}
    named = sorted(classes, key=lambda each: f"{each.__module__}.{each.__qualname__}")
    return fingerprint([repr(module) for module in modules], named)


def _data_fingerprint(dataset: Dataset) -> str:
    """Return a hash of a dataset's files or, if it has none, of its arrays and a few samples."""
    digest = hashlib.sha256()
    while isinstance(dataset, Subset):
        digest.update(f"{list(dataset.indices)}\n".encode())
        dataset = dataset.dataset
    digest.update(repr(getattr(dataset, "transform", None)).encode())
    samples = getattr(dataset, "samples", None)
    if samples is None:
        digest.update(_bytes_of(_some_inputs(dataset)))
        digest.update(str(_arrays_fingerprint(dataset)).encode())
        return digest.hexdigest()
    for path, target in samples:
        state = os.stat(path)
        digest.update(f"{path} {target} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _arrays_fingerprint(dataset: Dataset) -> str | None:
    """Return a hash of all arrays and tensors among a dataset's attributes."""
    arrays = [
        (name, each)
        for name, value in sorted(vars(dataset).items())
        for each in (value if isinstance(value, tuple | list) else [value])
        if isinstance(each, np.ndarray | torch.Tensor)
    ]
    return fingerprint(arrays)


def _length(dataset: Dataset) -> int:
    return len(cast("Sized", dataset))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data
