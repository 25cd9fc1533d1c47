"""Loaders with samplers of their own in several processes: each row once, equally many batches."""

import warnings

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from bigdl.nano.pytorch import TorchNano, Trainer

ROWS = 25


def table():
    return TensorDataset(torch.arange(float(ROWS)).reshape(-1, 1))


class ByLength(Sampler):
    """Rows of like length together, as for texts; shuffled by the epoch."""

    def __init__(self, size):
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = sorted(range(ROWS), key=lambda row: row % 5)
        batches = [order[i : i + self.size] for i in range(0, ROWS, self.size)]
        turn = self.epoch % len(batches)
        return iter(batches[turn:] + batches[:turn])

    def __len__(self):
        return -(-ROWS // self.size)


class Endless(Sampler):
    """Never ends."""

    def __iter__(self):
        while True:
            yield from range(ROWS)

    def __len__(self):
        return 10**9


def loaders():
    rows = table()
    return {
        "buckets": DataLoader(rows, batch_sampler=ByLength(5)),
        "batches": DataLoader(rows, batch_sampler=BatchSampler(RandomSampler(rows), 5, False)),
        "subset": DataLoader(rows, batch_size=4, sampler=SubsetRandomSampler(range(ROWS))),
        "dropped": DataLoader(
            rows, batch_size=4, sampler=SubsetRandomSampler(range(ROWS)), drop_last=True
        ),
        "single": DataLoader(rows, batch_size=None, sampler=SubsetRandomSampler(range(ROWS))),
        "workers": DataLoader(rows, batch_sampler=ByLength(7), num_workers=1),
        "drawn": DataLoader(rows, batch_size=5, sampler=WeightedRandomSampler([1.0] * ROWS, 50)),
    }


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(4.0).reshape(-1, 1))


class Reading(TorchNano):
    """Reads loaders to their ends; returns the rows of all processes, and those of each batch.

    The second result is what is said of a stream.
    """

    def train(self, loaders, endless, stream):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.setup(model, optimizer)
        read = {}
        for name, loader in loaders.items():
            torch.rand(self.global_rank)  # processes draw differently from now on
            loader = self.setup_dataloaders(loader)
            batches = [batch[0].reshape(-1).tolist() for batch in loader]
            assert len(batches) == len(loader)
            read[name] = self._gathered(batches)
        rows = iter(self.setup_dataloaders(endless))
        read["endless"] = self._gathered([next(rows)[0].reshape(-1).tolist() for _ in range(3)])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.setup_dataloaders(stream)
        return read, [str(each.message) for each in caught]

    def _gathered(self, value):
        values = [None] * self.num_processes
        torch.distributed.all_gather_object(values, value)
        return values


@pytest.fixture(scope="module")
def reading():
    endless = DataLoader(table(), batch_size=2, sampler=Endless())
    stream = DataLoader(Stream(), batch_size=2)
    return Reading(num_processes=2).train(loaders(), endless, stream)


def test_a_stream_that_every_process_reads_whole_is_named(reading):
    _, said = reading
    assert any("Each of the 2 processes reads the whole Stream" in each for each in said)


def test_each_row_is_read_once_by_some_process(reading):
    read, _ = reading
    for name, (first, second) in read.items():
        assert len(first) == len(second), name
        rows = sorted(row for batches in (first, second) for batch in batches for row in batch)
        if name == "dropped":
            assert len(set(rows)) == len(rows) == 24
        elif name == "drawn":
            assert len(rows) == 50
        elif name == "endless":
            assert rows == list(range(12))
        elif name == "single":
            assert sorted(set(rows)) == list(range(ROWS))
        else:
            assert rows == list(range(ROWS)), name
    sizes = sorted(len(batch) for batches in read["buckets"] for batch in batches)
    assert sizes == [2, 3, 5, 5, 5, 5]
    for batches in read["buckets"]:
        for batch in batches:
            assert len({row % 5 for row in batch}) <= 2  # neighbours in the order of lengths


class Seen(pl.LightningModule):
    """Counts the rows that it is trained with, in all processes."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = torch.zeros(2, ROWS)

    def training_step(self, batch, index):
        self.seen[self.current_epoch, batch[0].reshape(-1).long()] += 1
        return self.layer(batch[0]).mean()

    def on_train_end(self):
        self.seen = self.all_gather(self.seen).reshape(-1, 2, ROWS).sum(0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.slow
def test_a_trainer_keeps_a_sampler_of_batches():
    module = Seen()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=2, num_processes=2, enable_model_summary=False, **quiet)
    trainer.fit(module, DataLoader(table(), batch_sampler=ByLength(5)))
    assert (module.seen == 1).all()
