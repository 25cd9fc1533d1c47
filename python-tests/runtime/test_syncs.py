"""The collectives of a GradientSync among local processes."""

import gc
import os

import numpy as np
import pytest
import torch
from engine_cases import syncs
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_workers import shared_crew

from bigdl.runtime.collectives import buckets, host_memory
from bigdl.runtime.collectives.horovod import slots_of
from bigdl.testing.syncs import GradientSyncContract


@pytest.fixture(scope="module")
def crew():
    return shared_crew(3)


@pytest.fixture(scope="module", params=syncs())
def sync_class(request):
    return request.param


@pytest.fixture
def together(crew, sync_class):
    def together(use, size=3):
        """Return ``use(sync)`` of every rank."""

        def program(worker):
            sync = sync_class(worker)
            sync.start()
            return use(sync)

        results, _ = crew.run(program, [{}] * size)
        return results

    return together


class TestSyncs(GradientSyncContract):
    @pytest.fixture(autouse=True)
    def _crew(self, crew, sync_class):
        self.crew, self.sync = crew, sync_class

    def run(self, program, size):
        return self.crew.run(program, [{}] * size)[0]


@given(counts=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=3, max_size=3))
@settings(max_examples=15, deadline=None)
def test_all_to_all_gives_every_rank_its_pieces(crew, sync_class, counts):
    def program(worker):
        sync = sync_class(worker)
        sync.start()
        send = counts[sync.rank]
        pieces = [torch.full((n,), 10.0 * sync.rank + other) for other, n in enumerate(send)]
        return sync.all_to_all(torch.cat(pieces), send, [row[sync.rank] for row in counts]).tolist()

    actual, _ = crew.run(program, [{}] * 3)
    for rank, pieces in enumerate(actual):
        assert pieces == [10.0 * r + rank for r in range(3) for _ in range(counts[r][rank])]


def test_buckets_make_no_difference(together):
    def use(sync):
        torch.manual_seed(sync.rank)
        parameters = [torch.nn.Parameter(torch.randn(n)) for n in (5, 1, 30, 7, 64)]
        actual = []
        for bucket in (1 << 22, 8):
            buckets.BUCKET_ELEMENTS = bucket
            for parameter in parameters:
                parameter.grad = parameter.detach().clone()
            sync.all_reduce_gradients(parameters, 1 / 3)
            actual.append([p.grad.clone() for p in parameters])
        return all(torch.allclose(a, b) for a, b in zip(*actual, strict=True))

    assert together(use) == [True] * 3


class Net(torch.nn.Module):
    """Network with layers that are skipped, used twice, or recomputed in the backward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(5))

    def forward(self, x, case, rank):
        again = self.layers[2]
        for index, layer in enumerate(self.layers):
            if case == "one leaves layers out" and rank == 1 and index in (0, 3):
                continue
            if case == "checkpoints" and (index < 4 or rank == 1):
                # rank 1 computes all layers in checkpoints that share a layer
                x = torch.utils.checkpoint.checkpoint(
                    lambda y, layer=layer: again(layer(y)), x, use_reentrant=True
                )
            elif case == "a layer twice":
                x = again(layer(x))
            else:
                x = layer(x)
        return x.square().mean()


@pytest.mark.slow_cases("torch-0-checkpoints")
@pytest.mark.parametrize(
    "case",
    ["plain", "one has no rows", "one leaves layers out", "a layer twice", "checkpoints", "hooks"],
)
@pytest.mark.parametrize("smallest", [0, 1 << 16])
def test_gradients_that_are_sent_during_the_backward_pass_are_those_sent_after_it(
    together, case, smallest
):
    def use(sync):
        buckets.BUCKET_ELEMENTS = 8
        host_memory.SMALL_BYTES = smallest
        net, results, begun = Net(), [], []
        parameters = list(net.parameters())
        make_buffer = sync.new_buffer

        def counting(*arguments):
            buffer = make_buffer(*arguments)
            start = buffer.start
            buffer.start = lambda *bounds: (begun.append(bounds), start(*bounds))[1]
            return buffer

        sync.new_buffer = counting
        weight = [0.25, 0.0 if case == "one has no rows" else 0.5, 0.25][sync.rank]
        if case == "hooks" and sync.rank == 0:

            def double(parameter):
                parameter.grad.mul_(2)

            parameters[1].register_post_accumulate_grad_hook(double)
        for overlap in (False, True, True):
            generator = torch.Generator().manual_seed(sync.rank)
            x = torch.randn(3, 4, generator=generator).requires_grad_()
            net.zero_grad()
            if weight and overlap:
                loss = net(x, case, sync.rank)
                before = len(begun)
                with sync.overlap(parameters, weight):
                    loss.backward()
                early = len(begun) - before
            elif weight:
                net(x, case, sync.rank).backward()
            sync.all_reduce_gradients(parameters, weight)
            results.append([None if p.grad is None else p.grad.clone() for p in parameters])
        first, *others = results
        is_equal = all(
            a is b is None or torch.equal(a, b)
            for each in others
            for a, b in zip(first, each, strict=True)
        )
        return is_equal, early if weight else 0

    results = together(use)
    assert [is_equal for is_equal, _ in results] == [True] * 3
    early = [number for _, number in results]
    if case == "checkpoints":  # the first pass of the block found out
        assert early == [0] * 3
    elif case == "hooks":
        assert early[0] == 0
        assert early[1] > 1
    else:
        assert early[0] > 1


@pytest.mark.slow_cases("torch-float64")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_shared_memory_gives_the_bits_of_the_library(together, dtype):
    def use(sync):
        generator = torch.Generator().manual_seed(sync.rank)
        sizes = (1, 30_001, 300_007, 1 << 20, (1 << 20) + 1, 2_500_003)
        inputs = [torch.randn(n, generator=generator, dtype=getattr(torch, dtype)) for n in sizes]
        if not hasattr(sync, "neighbours"):
            return True  # there is the library only
        actual, neighbours = [], sync.neighbours
        assert len(neighbours) == sync.world_size - 1
        for sync.neighbours in (neighbours, {}):
            sync.groups = None
            parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in inputs]
            for parameter, gradient in zip(parameters, inputs, strict=True):
                parameter.grad = gradient.clone()
            sync.all_reduce_gradients(parameters, 0.3)
            arrays = sync.sum_arrays([each.numpy() for each in inputs], 0.3)
            arrays += [p.grad.numpy() for p in parameters]
            actual.append(b"".join(array.tobytes() for array in arrays))
        return actual[0] == actual[1]

    assert together(use) == [True] * 3


def test_no_shared_memory_is_left(together):
    def use(sync):
        gc.collect()  # what other tests have left
        parameter = torch.nn.Parameter(torch.zeros(100_000))
        parameter.grad = torch.ones(100_000)
        sync.all_reduce_gradients([parameter], 1.0)
        sync.sum_arrays([np.ones(100_000, "float32")], 1.0)
        sync.stop()
        files = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        opened = [os.readlink(path) for path in files if os.path.islink(path)]
        return "memfd:bigdl" in "".join([*opened, open("/proc/self/maps").read()])

    assert together(use) == [False] * 3


def test_arrays_are_summed_into_memory_of_their_own(together):
    def use(sync):
        arrays = [
            *(
                np.float32(sync.rank + 1),
                np.arange(12.0).reshape(4, 3).T,
                np.empty((0, 2), "float32"),
            ),
            *(np.ones(5, "float32"), np.full(70, float(sync.rank))),
        ]
        arrays = [np.asarray(array) for array in arrays]
        for array in arrays:
            array.flags.writeable = False
        actual = []
        for piece in (1 << 20, 8):
            buckets.PIECE_ELEMENTS = piece
            actual.append(sync.sum_arrays(arrays, [0.5, 0.25, 0.25][sync.rank]))
        first, second = actual
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
        assert not any(np.shares_memory(a, b) for a, b in zip(first, arrays, strict=True))
        return [(each.dtype.name, each.tolist()) for each in first]

    expected = [
        *(
            ("float32", 1.75),
            ("float64", np.arange(12.0).reshape(4, 3).T.tolist()),
            ("float32", []),
        ),
        *(("float32", [1.0] * 5), ("float64", [0.75] * 70)),
    ]
    assert together(use) == [expected] * 3


def test_the_cause_is_reported_and_not_the_lost_peers(together):
    def use(sync):
        if sync.rank == 1:
            raise LookupError("rank 1 gives up")
        sync.all_gather([1.0])

    with pytest.raises(LookupError, match="rank 1 gives up"):
        together(use)


def test_a_peer_that_fails_before_it_joins_is_noticed(crew, sync_class):
    def program(worker):
        sync = sync_class(worker)
        if worker.rank == 0:
            raise LookupError("rank 0 never came")
        sync.start()

    with pytest.raises(LookupError, match="rank 0 never came"):
        crew.run(program, [{}] * 3)


# -- Horovod's view of a job --------------------------------------------------------------------


@pytest.mark.slow
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_every_worker_has_a_slot_of_its_own(hosts):
    slots = slots_of(hosts)
    assert [slot.rank for slot in slots] == list(range(len(hosts)))
    assert {slot.size for slot in slots} == {len(hosts)}
    for slot, host in zip(slots, hosts, strict=True):
        here = [other for other in slots if other.hostname == host]
        assert slot.local_size == len(here)
        assert sorted(other.local_rank for other in here) == list(range(len(here)))
        across = [other for other in slots if other.local_rank == slot.local_rank]
        assert slot.cross_size == len(across)
        assert sorted(other.cross_rank for other in across) == list(range(len(across)))
        assert len({other.hostname for other in across}) == len(across)
