"""Records as a dataset of PyTorch; needs torch, so it is imported where it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info


class TorchRecords(IterableDataset):
    """The records of files; the workers of a DataLoader share their chunks.

    Parameters
    ----------
    records : callable
        Gives the records of the n-th of several workers, or all of them.
    """

    def __init__(self, records: Callable[..., Iterator[dict[str, Any]]]):
        self.records = records

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            return self.records()
        return self.records(worker.id, worker.num_workers)
