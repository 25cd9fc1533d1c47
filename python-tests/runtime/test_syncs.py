"""The collectives of a GradientSync as the loop uses them, among plain processes."""

import gc
import os

import numpy as np
import pytest
import torch
from engine_cases import syncs
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_workers import Crew

from bigdl.runtime.collectives import buckets, host_memory
from bigdl.runtime.collectives.horovod import slots_of
from bigdl.runtime.engine import PeerLost


@pytest.fixture(scope="module")
def crew():
    with Crew(3) as crew:
        yield crew


@pytest.fixture(scope="module", params=syncs())
def sync_class(request):
    return request.param


@pytest.fixture
def together(crew, sync_class):
    def together(use, size=3):
        """``use(sync)`` on every rank."""

        def program(worker):
            sync = sync_class(worker)
            sync.start()
            return use(sync)

        results, _ = crew.run(program, [{}] * size)
        return results

    return together


@pytest.mark.slow_cases("torch-None")
@pytest.mark.parametrize("data", [None, b"", b"abc", bytes(range(256)) * 1000])
def test_broadcast_gives_every_rank_the_bytes_of_rank_0(together, data):
    assert together(lambda s: s.broadcast(data if s.rank == 0 else None)) == [data] * 3


def test_gather_gives_rank_0_the_bytes_of_all(together):
    found = together(lambda s: s.gather(b"x" * (5 - 2 * s.rank) if s.rank < 2 else b""))
    assert found == [[b"xxxxx", b"xxx", b""], None, None]


def test_all_gather_is_exact_in_float64(together):
    found = together(lambda s: s.all_gather([s.rank + 1e-15, 2.0**53]))
    assert found == [[[r + 1e-15, 2.0**53] for r in range(3)]] * 3


@pytest.mark.parametrize(("operation", "expected"), [("sum", [3, 12]), ("max", [2, 5])])
def test_all_reduce_adds_up_or_takes_the_largest(together, operation, expected):
    def use(sync):
        return sync.all_reduce(torch.tensor([sync.rank, sync.rank + 3]), operation).tolist()

    assert together(use) == [expected] * 3


@given(counts=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=3, max_size=3))
@settings(max_examples=15, deadline=None)
def test_all_to_all_gives_every_rank_its_pieces(crew, sync_class, counts):
    def program(worker):
        sync = sync_class(worker)
        sync.start()
        send = counts[sync.rank]
        pieces = [torch.full((n,), 10.0 * sync.rank + other) for other, n in enumerate(send)]
        return sync.all_to_all(torch.cat(pieces), send, [row[sync.rank] for row in counts]).tolist()

    found, _ = crew.run(program, [{}] * 3)
    for rank, pieces in enumerate(found):
        assert pieces == [10.0 * r + rank for r in range(3) for _ in range(counts[r][rank])]


def parameters_with(gradients, dtype=torch.float64):
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.full((2,), gradient, dtype=dtype)
    return parameters


def gradients_of(parameters):
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def test_gradients_are_weighted_and_missing_ones_count_as_zero(together):
    def use(sync):
        gradients = [[1.0, None, None, 4.0], [10.0, 20.0, None, None], [5.0, 5.0, 5.0, 5.0]]
        parameters = parameters_with(gradients[sync.rank])
        sync.all_reduce_gradients(parameters, [0.25, 0.75, 0.0][sync.rank])
        return gradients_of(parameters)

    # the last rank has no rows: whatever is left in its gradients does not count
    assert together(use) == [[[7.75, 7.75], [15.0, 15.0], None, [1.0, 1.0]]] * 3


def test_a_gradient_that_is_not_a_number_does_not_spread_from_a_rank_without_rows(together):
    def use(sync):
        parameters = parameters_with([float("nan") if sync.rank == 1 else 2.0])
        sync.all_reduce_gradients(parameters, [0.5, 0.0, 0.5][sync.rank])
        return gradients_of(parameters)

    assert together(use) == [[[2.0, 2.0]]] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_gradients_of_every_kind_of_number(together, dtype):
    def use(sync):
        parameters = parameters_with([1.0, None], dtype) + parameters_with([2.0])
        sync.all_reduce_gradients(parameters, [0.5, 0.25, 0.25][sync.rank])
        return gradients_of(parameters)

    assert together(use) == [[[1.0, 1.0], None, [2.0, 2.0]]] * 3


def test_gradients_that_are_views_or_not_contiguous(together):
    def use(sync):
        parameter = torch.nn.Parameter(torch.zeros(3, 4))
        parameter.grad = torch.arange(12.0).reshape(4, 3).t() * (sync.rank + 1)
        scalar = torch.nn.Parameter(torch.tensor(0.0))
        scalar.grad = torch.tensor(1.0)
        sync.all_reduce_gradients([parameter, scalar], 0.5)
        return parameter.grad.tolist(), scalar.grad.item()

    expected = (np.arange(12.0).reshape(4, 3).T * 3).tolist(), 1.5
    assert together(use) == [expected] * 3


def test_buckets_make_no_difference(together):
    def use(sync):
        torch.manual_seed(sync.rank)
        parameters = [torch.nn.Parameter(torch.randn(n)) for n in (5, 1, 30, 7, 64)]
        found = []
        for bucket in (1 << 22, 8):
            buckets.BUCKET_ELEMENTS = bucket
            for parameter in parameters:
                parameter.grad = parameter.detach().clone()
            sync.all_reduce_gradients(parameters, 1 / 3)
            found.append([p.grad.clone() for p in parameters])
        return all(torch.allclose(a, b) for a, b in zip(*found, strict=True))

    assert together(use) == [True] * 3


class Net(torch.nn.Module):
    """Layers of which some are left out, come twice, or are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(5))

    def forward(self, x, kind, rank):
        again = self.layers[2]
        for index, layer in enumerate(self.layers):
            if kind == "one leaves layers out" and rank == 1 and index in (0, 3):
                continue
            if kind == "checkpoints" and (index < 4 or rank == 1):
                # rank 1 computes all layers in checkpoints that share a layer
                x = torch.utils.checkpoint.checkpoint(
                    lambda y, layer=layer: again(layer(y)), x, use_reentrant=True
                )
            elif kind == "a layer twice":
                x = again(layer(x))
            else:
                x = layer(x)
        return x.square().mean()


@pytest.mark.slow_cases("torch-0-checkpoints")
@pytest.mark.parametrize(
    "kind",
    ["plain", "one has no rows", "one leaves layers out", "a layer twice", "checkpoints", "hooks"],
)
@pytest.mark.parametrize("smallest", [0, 1 << 16])
def test_gradients_that_are_sent_during_the_backward_pass_are_those_sent_after_it(
    together, kind, smallest
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
        weight = [0.25, 0.0 if kind == "one has no rows" else 0.5, 0.25][sync.rank]
        if kind == "hooks" and sync.rank == 0:

            def double(parameter):
                parameter.grad.mul_(2)

            parameters[1].register_post_accumulate_grad_hook(double)
        for overlap in (False, True, True):
            generator = torch.Generator().manual_seed(sync.rank)
            x = torch.randn(3, 4, generator=generator).requires_grad_()
            net.zero_grad()
            if weight and overlap:
                loss = net(x, kind, sync.rank)
                before = len(begun)
                with sync.overlap(parameters, weight):
                    loss.backward()
                early = len(begun) - before
            elif weight:
                net(x, kind, sync.rank).backward()
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
    if kind == "checkpoints":  # the first pass of the block found out
        assert early == [0] * 3
    elif kind == "hooks":
        assert early[0] == 0
        assert early[1] > 1
    else:
        assert early[0] > 1


def test_ranks_get_the_same_bits(together):
    def use(sync):
        torch.manual_seed(sync.rank)
        parameter = torch.nn.Parameter(torch.zeros(10_001))
        parameter.grad = torch.randn(10_001)
        sync.all_reduce_gradients([parameter], [0.1, 0.2, 0.7][sync.rank])
        return parameter.grad.numpy().tobytes()

    first, *others = together(use)
    assert all(other == first for other in others)


@pytest.mark.slow_cases("torch-float64")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_shared_memory_gives_the_bits_of_the_library(together, dtype):
    def use(sync):
        generator = torch.Generator().manual_seed(sync.rank)
        sizes = (1, 30_001, 300_007, 1 << 20, (1 << 20) + 1, 2_500_003)
        given = [torch.randn(n, generator=generator, dtype=getattr(torch, dtype)) for n in sizes]
        if not hasattr(sync, "neighbours"):
            return True  # there is the library only
        found, neighbours = [], sync.neighbours
        assert len(neighbours) == sync.world_size - 1
        for sync.neighbours in (neighbours, {}):
            sync.groups = None
            parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in given]
            for parameter, gradient in zip(parameters, given, strict=True):
                parameter.grad = gradient.clone()
            sync.all_reduce_gradients(parameters, 0.3)
            arrays = sync.sum_arrays([each.numpy() for each in given], 0.3)
            arrays += [p.grad.numpy() for p in parameters]
            found.append(b"".join(array.tobytes() for array in arrays))
        return found[0] == found[1]

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
        found = []
        for piece in (1 << 20, 8):
            buckets.PIECE_ELEMENTS = piece
            found.append(sync.sum_arrays(arrays, [0.5, 0.25, 0.25][sync.rank]))
        first, second = found
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


def test_arrays_of_a_rank_without_rows_do_not_count(together):
    def use(sync):
        value = float("nan") if sync.rank == 1 else 2.0
        (found,) = sync.sum_arrays([np.full(3, value, "float32")], [0.5, 0.0, 0.5][sync.rank])
        return found.tolist()

    assert together(use) == [[2.0] * 3] * 3


def test_ranks_agree_where_some_have_sparse_gradients(together):
    def use(sync):
        out = []
        for kinds in ("s.s", "sd.", "...", ".s."):
            parameter = torch.nn.Parameter(torch.zeros(4, 2))
            dense = torch.zeros(4, 2)
            dense[sync.rank] = 1.0
            kind = kinds[sync.rank]
            parameter.grad = {"s": dense.to_sparse(1), "d": dense, ".": None}[kind]
            sync.all_reduce_gradients([parameter], 0.5, [parameter])
            gradient = parameter.grad
            out.append(None if gradient is None else gradient.to_dense()[:, 0].tolist())
        return out

    expected = [[0.5, 0, 0.5, 0], [0.5, 0.5, 0, 0], None, [0, 0.5, 0, 0]]
    assert together(use) == [expected] * 3


def test_another_list_of_parameters_is_noticed(together):
    def use(sync):
        first, second = parameters_with([1.0, 2.0])
        sync.all_reduce_gradients([first], 1 / 3)
        second.grad.fill_(3.0)
        sync.all_reduce_gradients([first, second], 1 / 3)
        return gradients_of([first, second])

    assert together(use) == [[[1.0, 1.0], [3.0, 3.0]]] * 3


def test_a_peer_that_leaves_is_noticed(together):
    def use(sync):
        if sync.rank == 1:
            raise LookupError("rank 1 gives up")
        sync.all_gather([1.0])

    with pytest.raises(LookupError, match="rank 1 gives up"):
        together(use)

    def leave(sync):
        if sync.rank:
            sync.stop()
            return "left"
        try:
            sync.all_reduce(torch.ones(1))
        except PeerLost as lost:
            return type(lost).__name__
        return "nothing was noticed"

    assert together(leave, size=2) == ["PeerLost", "left"]


def test_a_peer_that_fails_before_it_joins_is_noticed(crew, sync_class):
    def program(worker):
        sync = sync_class(worker)
        if worker.rank == 0:
            raise LookupError("rank 0 never came")
        sync.start()

    with pytest.raises(LookupError, match="rank 0 never came"):
        crew.run(program, [{}] * 3)


def test_the_processes_are_left_as_they_were(together):
    def use(sync):
        sync.stop()
        sync.stop()
        import torch.distributed as dist

        names = [name for name in os.environ if name.startswith(("GLOO_", "HOROVOD_"))]
        return dist.is_initialized(), names

    assert together(use) == [(False, [])] * 3


def test_processes_meet_again_in_other_numbers(together):
    for size in (3, 2, 3):
        found = together(lambda s: s.all_reduce(torch.ones(5)).tolist(), size=size)
        assert found == [[float(size)] * 5] * size


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


def test_one_worker_needs_no_group(together):
    def use(sync):
        import torch.distributed as dist

        parameters = parameters_with([1.0, None])
        sync.all_reduce_gradients(parameters, 1.0)
        return (
            dist.is_initialized(),
            gradients_of(parameters),
            sync.broadcast(b"x"),
            sync.gather(b"y"),
            sync.all_gather([3]),
            sync.all_reduce(torch.ones(1)).item(),
        )

    assert together(use, size=1) == [(False, [[1.0, 1.0], None], b"x", [b"y"], [[3.0]], 1.0)]
