"""All-reduce by recursive halving and doubling."""

import queue
import threading
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain_workers import Crew

from bigdl.runtime.collectives import halving, host_memory, torch_distributed
from bigdl.runtime.collectives.halving import HalvingDoubling, cut, factors, tree_sum
from bigdl.runtime.collectives.host_memory import block_of
from bigdl.runtime.engine import PeerLost


class Network:
    """Fake of torch.distributed between threads that counts messages and numbers."""

    def __init__(self):
        self._slots = {}
        self._lock = threading.Lock()
        self.sent = defaultdict(list)

    def _slot(self, *key):
        with self._lock:  # sender and receiver may ask for it at once
            return self._slots.setdefault(key, queue.Queue())

    def of(self, rank):
        def isend(tensor, other, _, tag):
            self.sent[rank].append(len(tensor))
            self._slot(rank, other, tag).put(tensor.clone())
            return SimpleNamespace(wait=lambda: None)

        def irecv(tensor, other, _, tag):
            return SimpleNamespace(
                wait=lambda: tensor.copy_(self._slot(other, rank, tag).get(timeout=30))
            )

        return SimpleNamespace(isend=isend, irecv=irecv)


def summed(world, size, sums=1):
    """Return the network, the inputs of all ranks, and their results."""
    network = Network()
    inputs = [
        [
            torch.randn(size, generator=torch.Generator().manual_seed(100 * n + rank))
            for n in range(sums)
        ]
        for rank in range(world)
    ]
    got = [[each.clone() for each in tensors] for tensors in inputs]

    def work(rank):
        reduce = HalvingDoubling(network.of(rank), rank, world)
        for wait in [reduce.start(tensor) for tensor in got[rank]]:
            wait()
        reduce.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return network, inputs, got


@pytest.mark.parametrize("world", [2, 3, 4, 6, 8, 12, 13])
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_every_rank_gets_the_sum_in_one_order(world, size):
    _, inputs, got = summed(world, size, sums=3)
    for n in range(3):
        expected = tree_sum([tensors[n].numpy() for tensors in inputs])
        exact = np.sum([tensors[n].double().numpy() for tensors in inputs], axis=0)
        np.testing.assert_allclose(expected, exact, atol=1e-5)
        for tensors in got:
            assert np.array_equal(tensors[n].numpy(), expected)


def test_as_much_is_sent_as_in_a_ring_in_fewer_rounds():
    network, _, _ = summed(8, 8000)
    for sizes in network.sent.values():
        assert sizes == [4000, 2000, 1000, 1000, 2000, 4000]  # a ring has 14 times 1000


def test_ranks_that_lie_side_by_side_exchange_the_most():
    reduce = HalvingDoubling(None, 5, 12)
    assert reduce.ranks_by_stride == {1: [4, 5], 2: [5, 7], 4: [1, 5, 9]}
    reduce.close()


@pytest.mark.parametrize(
    ("number", "expected"), [(1, []), (2, [2]), (12, [2, 2, 3]), (97, [97]), (1024, [2] * 10)]
)
def test_factors(number, expected):
    assert factors(number) == expected


def test_ranges_cover_all():
    assert cut(3, 10, 3) == [(3, 5), (5, 7), (7, 10)]
    assert cut(0, 1, 3) == [(0, 0), (0, 0), (0, 1)]


# -- among processes -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def six():
    with Crew(6) as crew:
        yield crew


@pytest.mark.slow
def test_gradients_by_network_and_by_shared_memory_have_the_same_bits(six):
    def program(worker):
        torch_distributed.HALVING_MIN_WORLD_SIZE = host_memory.HALVING_MIN_WORLD_SIZE = 6
        sync = torch_distributed.TorchDistributedSync(worker)
        sync.start()
        inputs = [torch.randn(n, generator=torch.Generator().manual_seed(sync.rank)) for n in SIZES]
        neighbours, actual = sync.neighbours, []
        of_two = {rank: neighbours[rank] for rank in neighbours if rank // 2 == sync.rank // 2}
        for sync.neighbours, sync.block_size in ((neighbours, 6), ({}, 1), (of_two, 2)):
            sync.groups = None
            sync.array_buffers.clear()
            parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in inputs]
            for parameter, gradient in zip(parameters, inputs, strict=True):
                parameter.grad = gradient.clone()
            for _ in range(2):
                sync.all_reduce_gradients(parameters, 0.5)
            sums = sync.sum_arrays([each.numpy() for each in inputs], 0.5)
            bits = [array.tobytes() for array in (*(p.grad.numpy() for p in parameters), *sums)]
            actual.append((type(sync.groups.dense[0].buffer).__name__, bits))
        sync.stop()
        torch_distributed.HALVING_MIN_WORLD_SIZE = host_memory.HALVING_MIN_WORLD_SIZE = (
            halving.HALVING_MIN_WORLD_SIZE
        )
        return actual

    SIZES = (1, 30_001, (1 << 20) + 1, 2_000_003)
    actual, _ = six.run(program, [{}] * 6)
    by = [name for name, _ in actual[0]]
    assert by == ["HostBuffer", "SumBuffer", "BlockBuffer"]
    assert all(bits == actual[0][0][1] for of_rank in actual for _, bits in of_rank)


@pytest.mark.slow
def test_blocks_are_ranks_side_by_side_whose_sums_are_in_the_tree(six):
    def program(worker):
        sync = torch_distributed.TorchDistributedSync(worker)
        sync.start()
        actual = []
        for hosts in ("aabbcc", "aaabbb", "abcabc", "aabcdd", "aaaabb"):
            near = {r: 0 for r in sync.neighbours if hosts[r] == hosts[sync.rank]}
            actual.append(block_of(sync, near))
        actual.append(block_of(sync, sync.neighbours))
        sync.stop()
        return actual

    actual, _ = six.run(program, [{}] * 6)
    assert actual == [[2, 1, 1, 1, 1, 6]] * 6


@pytest.mark.slow
def test_a_rank_that_ends_before_its_block_is_noticed(six):
    def program(worker):
        worker.timeout = 20.0
        torch_distributed.HALVING_MIN_WORLD_SIZE = host_memory.HALVING_MIN_WORLD_SIZE = 6
        sync = torch_distributed.TorchDistributedSync(worker)
        sync.start()
        near = {r: p for r, p in sync.neighbours.items() if r // 2 == sync.rank // 2}
        sync.neighbours, sync.block_size = near, 2
        array = np.ones(100_000, np.float32)
        try:
            for step in range(3):
                if step == 2 and sync.rank == 4:
                    return "left"
                sync.sum_arrays([array], 1.0)
                assert isinstance(sync.array_buffers[torch.float32], host_memory.BlockBuffer)
        except PeerLost:
            return "noticed"
        finally:
            sync.stop()
            torch_distributed.HALVING_MIN_WORLD_SIZE = host_memory.HALVING_MIN_WORLD_SIZE = (
                halving.HALVING_MIN_WORLD_SIZE
            )

    actual, _ = six.run(program, [{}] * 6)
    assert actual[4] == "left"
    assert actual.count("noticed") == 5


@pytest.mark.slow
def test_a_rank_that_leaves_is_noticed(six):
    def program(worker):
        worker.timeout = 20.0
        sync = torch_distributed.TorchDistributedSync(worker)
        sync.start()
        if sync.rank == 4:
            sync.stop()
            return "left"
        torch_distributed.HALVING_MIN_WORLD_SIZE = 6
        try:
            sync.all_reduce(torch.ones(1000))
        except PeerLost:
            return "noticed"
        finally:
            torch_distributed.HALVING_MIN_WORLD_SIZE = halving.HALVING_MIN_WORLD_SIZE
            sync.stop()

    actual, _ = six.run(program, [{}] * 6)
    assert actual[4] == "left"
    assert actual.count("noticed") == 5
