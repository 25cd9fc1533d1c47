"""Records as a dataset of PyTorch; needs torch, so it is imported where it is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

if TYPE_CHECKING:
    from bigdl.orca.data.image.parquet_dataset import RecordReader


class TorchRecords(IterableDataset):
    """The records of a :class:`RecordReader`; the workers of a DataLoader share its chunks."""

    def __init__(self, reader: RecordReader):
        self.reader = reader

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            return self.reader.records()
        return self.reader.records(worker.id, worker.num_workers)
