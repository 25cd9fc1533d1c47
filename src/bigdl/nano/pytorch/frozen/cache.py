"""Features on disk: what a frozen segment makes of each sample of a dataset."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.frozen.segment import Segment

__all__ = ["CachedFeatures"]

_COMPARED = 8  # samples
_MANIFEST, _FEATURES, _TARGETS = "manifest.json", "features.npy", "targets.pt"


class CachedFeatures(Dataset):
    """Pairs of features and targets. Made by ``FrozenPrefix.cached``.

    Parameters
    ----------
    segment : Segment
    dataset : Dataset
        Of pairs of an input of the segment and a target.
    directory : path
        Holds ``features.npy``, which is mapped into memory, ``targets.pt`` and
        ``manifest.json``, which says what they were made of.
    batch_size : int
        Rows that are computed together.

    Attributes
    ----------
    reused : bool
        Whether the directory held them already.
    """

    def __init__(
        self,
        segment: Segment,
        dataset: Dataset,
        directory: str | os.PathLike,
        batch_size: int = 32,
    ):
        if len(dataset) == 0:
            raise UsageError("The dataset is empty, so there is nothing to cache")
        _refuse_random(dataset)
        self.directory = Path(directory)
        made_of = _fingerprint(segment, dataset)
        self.reused = self._holds(made_of)
        if not self.reused:
            self._compute(segment, dataset, batch_size)
            _write_whole(self.directory / _MANIFEST, json.dumps(made_of).encode())
        self._open()

    def _holds(self, made_of: dict) -> bool:
        try:
            return json.loads((self.directory / _MANIFEST).read_text()) == made_of
        except (OSError, ValueError):
            return False

    def _compute(self, segment: Segment, dataset: Dataset, batch_size: int) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / _MANIFEST).unlink(missing_ok=True)
        shape = (len(dataset), *segment.output.shape[1:])
        # Aside, then renamed: a dataset that was opened before keeps its own file.
        aside = self.directory / (_FEATURES + ".part")
        features = np.lib.format.open_memmap(aside, "w+", np.float32, shape)
        targets, row = [], 0
        for images, target in DataLoader(dataset, batch_size):
            reason = segment.why_plain(images)
            if reason is not None:
                raise UsageError(f"{segment.name} cannot be cached: {reason}")
            features[row : row + len(images)] = segment.enter(images).float().numpy()
            targets.append(target)
            row += len(images)
        features.flush()
        aside.replace(self.directory / _FEATURES)
        torch.save(targets, self.directory / _TARGETS)

    def _open(self) -> None:
        self.features = np.load(self.directory / _FEATURES, mmap_mode="r")
        batches = torch.load(self.directory / _TARGETS, weights_only=True)
        self.targets = _joined(batches)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        return torch.from_numpy(np.array(self.features[index])), _row(self.targets, index)

    def __getitems__(self, indices: Sequence[int]) -> list:
        features = torch.from_numpy(self.features[list(indices)])
        return [(row, _row(self.targets, i)) for row, i in zip(features, indices, strict=True)]

    def __getstate__(self) -> dict:
        return {"directory": self.directory, "reused": self.reused}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._open()


def _joined(batches: list) -> Any:
    """Batches of targets as one; nested as each of them is."""
    first = batches[0]
    if torch.is_tensor(first):
        return torch.cat(batches)
    if isinstance(first, dict):
        return {key: _joined([batch[key] for batch in batches]) for key in first}
    if isinstance(first, list) and first and not isinstance(first[0], str):
        return [_joined(list(column)) for column in zip(*batches, strict=True)]
    return [value for batch in batches for value in batch]


def _row(targets: Any, index: int) -> Any:
    if isinstance(targets, dict):
        return {key: _row(values, index) for key, values in targets.items()}
    if isinstance(targets, list) and torch.is_tensor(targets[0]):
        return [_row(column, index) for column in targets]
    return targets[index]


def _refuse_random(dataset: Dataset) -> None:
    """A dataset that can say whether it draws is asked; of another some samples are taken twice."""
    asked = dataset
    while isinstance(asked, Subset):
        asked = asked.dataset
    deterministic = getattr(asked, "deterministic", None)
    if deterministic is None:
        deterministic = torch.equal(_some_inputs(dataset), _some_inputs(dataset))
    if not deterministic:
        raise UsageError(
            "Features can be cached only if a sample is the same each time, but the dataset's "
            f"transform draws at random: {getattr(asked, 'transform', None)}"
        )


def _some_inputs(dataset: Dataset) -> torch.Tensor:
    step = -(-len(dataset) // _COMPARED)
    return default_collate([dataset[index][0] for index in range(0, len(dataset), step)])


def _fingerprint(segment: Segment, dataset: Dataset) -> dict:
    """What the features depend on."""
    weights = hashlib.sha256()
    for module in segment.modules:
        for name, tensor in module.state_dict().items():
            weights.update(name.encode())
            weights.update(_bytes_of(tensor))
    return {
        "weights": weights.hexdigest(),
        "modules": list(segment.names),
        "method": segment.method,
        "shape": list(segment.output.shape[1:]),
        "rows": len(dataset),
        "data": _data_fingerprint(dataset),
    }


def _data_fingerprint(dataset: Dataset) -> str:
    """Files with their sizes and times where a dataset lists them, else some of its samples."""
    found = hashlib.sha256()
    while isinstance(dataset, Subset):
        found.update(f"{list(dataset.indices)}\n".encode())
        dataset = dataset.dataset
    found.update(repr(getattr(dataset, "transform", None)).encode())
    samples = getattr(dataset, "samples", None)
    if samples is None:
        found.update(_bytes_of(_some_inputs(dataset)))
        return found.hexdigest()
    for path, target in samples:
        state = os.stat(path)
        found.update(f"{path} {target} {state.st_size} {state.st_mtime_ns}\n".encode())
    return found.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()


def _write_whole(path: Path, content: bytes) -> None:
    """Write aside, then rename: the file is whole or not there."""
    aside = path.with_suffix(".part")
    aside.write_bytes(content)
    aside.replace(path)
