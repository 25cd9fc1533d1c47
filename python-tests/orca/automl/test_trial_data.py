"""Test the data of a trial, without a search."""

import contextlib
from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, IterableDataset

from bigdl.orca.automl.model.data import part_of
from bigdl.training.batches import Pass


class Tens(IterableDataset):
    """Dataset that yields five rows in sequence."""

    def __iter__(self):
        return ((torch.full((2,), float(i)), torch.tensor(10.0 * i)) for i in range(5))


def test_an_iterable_loader_becomes_the_rows_of_a_trial():
    with contextlib.ExitStack() as closing:
        worker = SimpleNamespace(rank=1, world_size=2, at_exit=closing.callback)
        part = part_of(DataLoader(Tens(), batch_size=2), worker)
        order = part.order(Pass(False, 0, 1))
        assert order.tolist() == [1, 3]  # the other worker has the remaining rows
        x, y = part.batch(0, 2, order)
        assert x.tolist() == [[1, 1], [3, 3]]
        assert y.tolist() == [10, 30]
