"""Contract tests of GradientSync subclasses, which all-reduce gradients among workers."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
import torch

from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.engine import PeerLost
from bigdl.runtime.local import LocalEngine
from bigdl.runtime.worker import Worker

__all__ = ["GradientSyncContract"]

T = TypeVar("T")


def gradients_of(parameters: list[torch.nn.Parameter]) -> list[list[float] | None]:
    """Return the gradients of parameters as lists, with None for missing gradients."""
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def parameters_with(
    gradients: list[float | None], dtype: torch.dtype = torch.float64
) -> list[torch.nn.Parameter]:
    """Return parameters of two elements with the given gradients."""
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.full((2,), gradient, dtype=dtype)
    return parameters


class GradientSyncContract:
    """Contract tests of a GradientSync; pytest runs the subclasses named ``Test...``.

    Attributes
    ----------
    sync : type
        Subclass of :class:`~bigdl.runtime.collectives.base.GradientSync`.

    Examples
    --------
    >>> from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
    >>> from bigdl.testing.syncs import GradientSyncContract
    >>> class TestTorchDistributed(GradientSyncContract):
    ...     sync = TorchDistributedSync
    >>> TestTorchDistributed().test_all_gather_is_exact_in_float64()  # pytest runs all
    """

    sync: type[GradientSync]

    def run(self, program: Callable[[Worker], bytes], size: int) -> list[bytes]:
        """Run a program on `size` workers, by default in local processes."""
        return LocalEngine(workers_per_node=size).run(program, num_workers=size)

    def together(self, use: Callable[[GradientSync], T], size: int = 3) -> list[T]:
        """Call ``use(sync)`` on every rank of a new group of `size` workers; return the results."""
        sync_class = self.sync

        def program(worker: Worker) -> bytes:
            sync = sync_class(worker)
            sync.start()
            return pickle.dumps(use(sync))

        return [pickle.loads(each) for each in self.run(program, size)]

    @pytest.mark.parametrize("data", [None, b"", b"abc", bytes(range(256)) * 1000])
    def test_broadcast_gives_every_rank_the_bytes_of_rank_0(self, data: bytes | None) -> None:
        """Check that broadcast distinguishes None from empty bytes."""
        assert self.together(lambda s: s.broadcast(data if s.rank == 0 else None)) == [data] * 3

    def test_gather_gives_rank_0_the_bytes_of_all(self) -> None:
        """Check that gather returns bytes of different lengths in rank order."""
        gathered = self.together(lambda s: s.gather(b"x" * (5 - 2 * s.rank) if s.rank < 2 else b""))
        assert gathered == [[b"xxxxx", b"xxx", b""], None, None]

    def test_all_gather_is_exact_in_float64(self) -> None:
        """Check that all_gather keeps the precision of doubles."""
        gathered = self.together(lambda s: s.all_gather([s.rank + 1e-15, 2.0**53]))
        assert gathered == [[[r + 1e-15, 2.0**53] for r in range(3)]] * 3

    def test_all_reduce_adds_up_or_takes_the_largest(self) -> None:
        """Check the sum and the maximum of integer tensors."""

        def use(sync: GradientSync) -> list[list[int]]:
            tensors = [torch.tensor([sync.rank, sync.rank + 3]) for _ in range(2)]
            sync.all_reduce(tensors[0], "sum")
            sync.all_reduce(tensors[1], "max")
            return [tensor.tolist() for tensor in tensors]

        assert self.together(use) == [[[3, 12], [2, 5]]] * 3

    def test_all_to_all_gives_every_rank_its_pieces(self) -> None:
        """Check that pieces of different lengths arrive in rank order."""
        counts = [[0, 2, 1], [3, 0, 0], [1, 4, 2]]

        def use(sync: GradientSync) -> list[float]:
            send = counts[sync.rank]
            pieces = [torch.full((n,), 10.0 * sync.rank + other) for other, n in enumerate(send)]
            receive = [row[sync.rank] for row in counts]
            values: list[float] = sync.all_to_all(torch.cat(pieces), send, receive).tolist()
            return values

        for rank, pieces in enumerate(self.together(use)):
            assert pieces == [10.0 * r + rank for r in range(3) for _ in range(counts[r][rank])]

    def test_gradients_are_weighted_and_missing_ones_count_as_zero(self) -> None:
        """Check that gradients are weighted and that ranks of weight 0 are ignored."""

        def use(sync: GradientSync) -> list[list[float] | None]:
            gradients: list[list[float | None]]
            gradients = [[1.0, None, None, 4.0], [10.0, 20.0, None, None], [5.0, 5.0, 5.0, 5.0]]
            parameters = parameters_with(gradients[sync.rank])
            sync.all_reduce_gradients(parameters, [0.25, 0.75, 0.0][sync.rank])
            return gradients_of(parameters)

        assert self.together(use) == [[[7.75, 7.75], [15.0, 15.0], None, [1.0, 1.0]]] * 3

    def test_nan_does_not_spread_from_a_rank_without_rows(self) -> None:
        """Check that NaN values of a rank with weight 0 are ignored."""

        def use(sync: GradientSync) -> list[object]:
            value = float("nan") if sync.rank == 1 else 2.0
            weight = [0.5, 0.0, 0.5][sync.rank]
            parameters = parameters_with([value])
            sync.all_reduce_gradients(parameters, weight)
            (total,) = sync.sum_arrays([np.full(3, value, "float32")], weight)
            return [gradients_of(parameters), total.tolist()]

        assert self.together(use) == [[[[2.0, 2.0]], [2.0] * 3]] * 3

    @pytest.mark.parametrize(
        "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64]
    )
    def test_gradients_of_every_dtype(self, dtype: torch.dtype) -> None:
        """Check that gradients of two dtypes are summed in their dtypes."""

        def use(sync: GradientSync) -> list[list[float] | None]:
            parameters = parameters_with([1.0, None], dtype) + parameters_with([2.0])
            sync.all_reduce_gradients(parameters, [0.5, 0.25, 0.25][sync.rank])
            return gradients_of(parameters)

        assert self.together(use) == [[[1.0, 1.0], None, [2.0, 2.0]]] * 3

    def test_gradients_that_are_views_or_not_contiguous(self) -> None:
        """Check that the memory layout of a gradient makes no difference."""

        def use(sync: GradientSync) -> tuple[list[list[float]], float]:
            parameter = torch.nn.Parameter(torch.zeros(3, 4))
            parameter.grad = torch.arange(12.0).reshape(4, 3).t() * (sync.rank + 1)
            scalar = torch.nn.Parameter(torch.tensor(0.0))
            scalar.grad = torch.tensor(1.0)
            sync.all_reduce_gradients([parameter, scalar], 0.5)
            return parameter.grad.tolist(), scalar.grad.item()

        expected = (np.arange(12.0).reshape(4, 3).T * 3).tolist(), 1.5
        assert self.together(use) == [expected] * 3

    def test_ranks_get_the_same_bits(self) -> None:
        """Check that sums are bitwise equal on all ranks, so that weights stay equal."""

        def use(sync: GradientSync) -> bytes:
            torch.manual_seed(sync.rank)
            parameter = torch.nn.Parameter(torch.zeros(10_001))
            parameter.grad = torch.randn(10_001)
            sync.all_reduce_gradients([parameter], [0.1, 0.2, 0.7][sync.rank])
            return parameter.grad.numpy().tobytes()

        first, *others = self.together(use)
        assert all(other == first for other in others)

    def test_ranks_agree_where_some_have_sparse_gradients(self) -> None:
        """Check the sum of sparse, dense and missing gradients of one parameter."""

        def use(sync: GradientSync) -> list[list[float] | None]:
            sums: list[list[float] | None] = []
            for layouts in ("s.s", "sd.", "...", ".s."):
                parameter = torch.nn.Parameter(torch.zeros(4, 2))
                dense = torch.zeros(4, 2)
                dense[sync.rank] = 1.0
                layout = layouts[sync.rank]
                parameter.grad = {"s": dense.to_sparse(1), "d": dense, ".": None}[layout]
                sync.all_reduce_gradients([parameter], 0.5, [parameter])
                gradient = parameter.grad
                sums.append(None if gradient is None else gradient.to_dense()[:, 0].tolist())
            return sums

        expected = [[0.5, 0, 0.5, 0], [0.5, 0.5, 0, 0], None, [0, 0.5, 0, 0]]
        assert self.together(use) == [expected] * 3

    def test_another_list_of_parameters_is_noticed(self) -> None:
        """Check that buffers are rebuilt for another list of parameters."""

        def use(sync: GradientSync) -> list[list[float] | None]:
            first, second = parameters_with([1.0, 2.0])
            sync.all_reduce_gradients([first], 1 / 3)
            second.grad = torch.full_like(second, 3.0)
            sync.all_reduce_gradients([first, second], 1 / 3)
            return gradients_of([first, second])

        assert self.together(use) == [[[1.0, 1.0], [3.0, 3.0]]] * 3

    def test_a_peer_that_leaves_is_noticed(self) -> None:
        """Check that a collective operation raises PeerLost if a rank has left the group."""

        def use(sync: GradientSync) -> str:
            if sync.rank:
                sync.stop()
                return "left"
            try:
                sync.all_reduce(torch.ones(1))
            except PeerLost as lost:
                return type(lost).__name__
            return "nothing was noticed"

        assert self.together(use, size=2) == ["PeerLost", "left"]

    def test_the_processes_are_left_as_they_were(self) -> None:
        """Check that calling ``stop`` twice leaves no process group and no environment variable."""

        def use(sync: GradientSync) -> tuple[bool, list[str]]:
            sync.stop()
            sync.stop()
            import torch.distributed as dist

            names = [name for name in os.environ if name.startswith(("GLOO_", "HOROVOD_"))]
            return dist.is_initialized(), names

        assert self.together(use) == [(False, [])] * 3

    def test_processes_meet_again_in_other_numbers(self) -> None:
        """Check that reused workers can form groups of other sizes."""
        for size in (3, 2, 3):
            sums = self.together(lambda s: s.all_reduce(torch.ones(5)).tolist(), size=size)
            assert sums == [[float(size)] * 5] * size

    def test_one_worker_needs_no_group(self) -> None:
        """Check that all collective operations of a single worker work without a process group."""

        def use(sync: GradientSync) -> list[object]:
            import torch.distributed as dist

            parameters = parameters_with([1.0, None])
            sync.all_reduce_gradients(parameters, 1.0)
            data = sync.broadcast(b"x"), sync.gather(b"y"), sync.all_gather([3])
            total = sync.all_reduce(torch.ones(1)).item()
            return [dist.is_initialized(), gradients_of(parameters), *data, total]

        expected = [False, [[1.0, 1.0], None], b"x", [b"y"], [[3.0]], 1.0]
        assert self.together(use, size=1) == [expected]
