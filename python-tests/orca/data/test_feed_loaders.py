"""Test DataLoaders divided among workers."""

import itertools
import sys

import cloudpickle
import numpy as np
import pytest
import torch
from refusals import refused
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from bigdl.orca.data.feeds import as_feed
from bigdl.runtime.shards.shard import SpoolWriter
from bigdl.runtime.task import reopen
from bigdl.training.batches import BatchSettings, LoaderBatches, Pass, as_loader

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROWS = 23


class Samples(Dataset):
    """Dataset whose sample i is (i + noise, i)."""

    def __init__(self, rows=ROWS, noise=0.0):
        self.rows, self.noise = rows, noise

    def __len__(self):
        return self.rows

    def __getitem__(self, i):
        return i + self.noise * torch.rand(2), i


class Stream(IterableDataset):
    def __iter__(self):
        return ((torch.tensor([i, -i]), i) for i in range(7))


def part(loader, rank=0, size=1):
    return LoaderBatches(as_loader(loader, {}, 4), rank, size)


def epoch_of(batches, size=4, epoch=0, start=0, announce=True):
    """Return the batches of an epoch, starting at position `start`."""
    ranges = [(a, min(a + size, batches.rows)) for a in range(start, batches.rows, size)]
    order = batches.order(Pass(True, 5, epoch, ranges=lambda: iter(ranges if announce else ())))
    return [batches.batch(*r, order) for r in ranges]


def ids(batches):
    return [i for _, y in batches for i in y.tolist()]


@pytest.mark.parametrize("size", [1, 2, 3, 30])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_once_without_padding(size, shuffle):
    loaders = [part(DataLoader(Samples(), 4, shuffle=shuffle), rank, size) for rank in range(size)]
    batches = [ids(epoch_of(loader)) for loader in loaders]
    assert [len(f) for f in batches] == [len(range(r, ROWS, size)) for r in range(size)]
    assert sorted(itertools.chain(*batches)) == list(range(ROWS))
    if not shuffle:
        assert batches == [list(range(r, ROWS, size)) for r in range(size)]
    elif size < 4:
        assert ids(epoch_of(loaders[0], epoch=1)) != batches[0]


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: WeightedRandomSampler(torch.arange(ROWS).float(), 40),
        lambda: WeightedRandomSampler(torch.ones(ROWS), 9, generator=torch.Generator()),
        lambda: SubsetRandomSampler(range(0, ROWS, 2)),
    ],
)
def test_the_draw_of_a_sampler_is_shared_by_all_workers(sampler):
    alone = ids(epoch_of(part(DataLoader(Samples(), 4, sampler=sampler()))))
    assert len(alone) == len(sampler())
    shared = [
        ids(epoch_of(part(DataLoader(Samples(), 4, sampler=sampler()), r, 3))) for r in range(3)
    ]
    assert [alone[r::3] for r in range(3)] == shared
    assert ids(epoch_of(part(DataLoader(Samples(), 4, sampler=sampler())), epoch=1)) != alone


def test_a_distributed_sampler_gives_way_with_its_padding():
    samplers = [DistributedSampler(Samples(), 2, rank, shuffle=False) for rank in range(2)]
    batches = [
        ids(epoch_of(part(DataLoader(Samples(), 4, sampler=s), r, 2)))
        for r, s in enumerate(samplers)
    ]
    assert sorted(itertools.chain(*batches)) == list(range(ROWS))


def equal(one, two):
    return len(one) == len(two) and all(
        torch.equal(a, b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_random_augmentation_is_new_in_every_epoch_and_the_same_after_a_resume():
    loader = DataLoader(Samples(noise=1.0), 4, shuffle=True)
    first = epoch_of(part(loader))
    assert not torch.equal(first[0][0] - first[0][1][:, None], first[1][0] - first[1][1][:, None])
    state = torch.get_rng_state()
    assert equal(epoch_of(part(loader), start=8), first[2:])
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(epoch_of(part(loader), epoch=1)[0][0], first[0][0])


@pytest.mark.slow
def test_processes_load_the_same_batches():
    here = part(DataLoader(Samples(noise=1.0), 4, shuffle=True))
    there = part(DataLoader(Samples(noise=1.0), 4, shuffle=True, num_workers=1))
    try:
        for epoch in range(2):
            assert equal(epoch_of(here, epoch=epoch), epoch_of(there, epoch=epoch))
        order = there.order(Pass(True, 5, 0, ranges=lambda: iter([(0, 4), (4, 8)])))
        there.in_order(4)  # an evaluation between the epochs
        assert equal([there.batch(0, 4, order)], epoch_of(here)[:1])
        assert equal([there.batch(8, 9, order)], [here.batch(8, 9, here.order(Pass(True, 5, 0)))])
    finally:
        there.close()


def test_tensors_are_taken_as_they_are():
    data = TensorDataset(torch.arange(46).reshape(23, 2), torch.arange(23))
    assert ids(epoch_of(part(DataLoader(data, 4), 1, 2))) == list(range(1, 23, 2))


def test_a_function_gets_config_and_the_batch_size_of_its_worker():
    def creator(config, batch_size):
        assert config == {"a": 1}
        return Samples(batch_size)

    assert len(as_loader(creator, {"a": 1}, 6).dataset) == 6
    options = {"collate_fn": list, "drop_last": True, "shuffle": False}
    loader = as_loader(Samples(), options, 6)
    assert loader.collate_fn is list
    assert loader.drop_last


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda c, b: 3, ("function-result", "DataLoader")),
        (DataLoader(Samples(), batch_size=None), ("unsupported",)),
        (
            DataLoader(
                Samples(), batch_sampler=type("Own", (BatchSampler,), {})(range(3), 2, False)
            ),
            ("unsupported",),
        ),
    ],
)
def test_loaders_that_cannot_be_shared_out_are_refused(made, message):
    with refused(*message):
        as_loader(made, {}, 4)


def test_what_cannot_be_pickled_is_refused():
    data = Samples()
    data.lock = (i for i in range(3))
    with refused("model-copy"):
        as_feed(data)


class Alone:
    """Stub of a Worker with only what batches need."""

    rank, world_size = 0, 1

    def at_exit(self, cleanup):
        pass


def shipped(data, directory):
    """Return the only worker's shard."""

    def open_spool(name, specs):
        return SpoolWriter(str(directory), 0, name, specs)

    open_spool.rank, open_spool.world_size = 0, 1
    return as_feed(data).prepare(None, 1).reader(iter(()), open_spool)["data"]


def test_a_loader_survives_until_the_next_attempt(tmp_path):
    shard = shipped(DataLoader(Samples()), tmp_path)
    again = reopen({"data": shard.spool.to_json()})["data"]
    assert BatchSettings(4, None, None).open_batches(again, Alone(), {}).rows == ROWS


@pytest.mark.parametrize("data", [Stream(), DataLoader(Stream(), 3), DataLoader(Stream(), 2)])
def test_a_stream_is_spooled(data, tmp_path):
    shard = shipped(data, tmp_path)
    batches = BatchSettings(4, None, None).open_batches(shard, Alone(), {})
    x, y = batches.batch(0, 7)
    assert y.tolist() == list(range(7))
    assert np.array_equal(x, [[i, -i] for i in range(7)])


def test_a_stream_of_unequal_shapes_is_refused(tmp_path):
    class Ragged(IterableDataset):
        def __iter__(self):
            return ((torch.ones(1 + i // 2), i) for i in range(4))

    shard = shipped(DataLoader(Ragged(), 2), tmp_path)
    with refused("data-schema"):
        BatchSettings(2, None, None).open_batches(shard, Alone(), {})
