"""PyTorch dataset of records, in a separate module because it needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info


class TorchRecords(IterableDataset):
    """Iterable dataset of records, whose chunks are divided among DataLoader workers.

    Parameters
    ----------
    records : callable
        ``records(worker, num_workers)`` yields the records of a worker; without arguments all.
    """

    def __init__(self, records: Callable[..., Iterator[dict[str, Any]]]):
        self.records = records

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            return self.records()
        return self.records(worker.id, worker.num_workers)
