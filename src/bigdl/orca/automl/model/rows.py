"""The data of a search as trials see it: arrays, or a function that makes a loader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Creator", "RayRows", "Rows", "SavedRows", "opened"]


@dataclass
class Rows:
    """Arrays of as many rows; all trials of a machine share their memory.

    Attributes
    ----------
    features, targets : list of ndarray
    names : list of str
        Of the features.
    """

    features: list[np.ndarray]
    targets: list[np.ndarray]
    names: Sequence[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.features[0])


@dataclass
class Creator:
    """A function ``f(config)`` of the user that makes what the framework reads."""

    function: Callable[[dict], Any]

    def make(self, config):
        """What the function makes of a configuration."""
        return self.function(config)


@dataclass
class SavedRows:
    """Rows as files of this machine, which every process maps.

    Attributes
    ----------
    features, targets : list of Path
    names : list of str
    """

    features: list[Path]
    targets: list[Path]
    names: Sequence[str]

    @classmethod
    def save(cls, rows: Rows, folder: Path) -> SavedRows:
        """Write rows into a new folder."""
        folder.mkdir()

        def written(role, arrays):
            paths = [folder / f"{role}{i}.npy" for i in range(len(arrays))]
            for path, array in zip(paths, arrays, strict=True):
                np.save(path, array, allow_pickle=False)
            return paths

        return cls(written("x", rows.features), written("y", rows.targets), rows.names)

    def open(self) -> Rows:
        """The rows, mapped."""
        x, y = ([np.load(path, mmap_mode="r") for path in p] for p in (self.features, self.targets))
        return Rows(x, y, self.names)


@dataclass
class RayRows:
    """Rows in Ray's object store.

    Attributes
    ----------
    reference : ray.ObjectRef
        Of :class:`Rows`.
    """

    reference: Any

    def open(self) -> Rows:
        """The rows, in the memory that all processes of a node share."""
        import ray

        return ray.get(self.reference)


def opened(data: Any) -> Any:
    """Data as a trial uses it."""
    return data.open() if hasattr(data, "open") else data
