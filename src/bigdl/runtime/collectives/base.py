"""Collectives among workers, above all the sum of their gradients.

A **GradientSync** belongs to one program in one worker.  The Loop calls :meth:`~GradientSync.start`
once, :meth:`~GradientSync.broadcast` for the initial state, :meth:`~GradientSync.reduce` in every
step between ``backward`` and the optimizer's step, and the other collectives at the ends of
epochs; :meth:`~GradientSync.stop` also runs when the program fails, before the failure is reported.
All ranks call the same methods in the same order.
Every collective raises :class:`~bigdl.runtime.engine.PeerLost` when another worker went away.

A library of collectives brings a few of tensors; :class:`CollectiveSync` makes the other methods
from them.  One worker alone needs neither.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

from bigdl.runtime.collectives.flat import DENSE, NONE, GradientGroups, layout, summed, weighted


class GradientSync(ABC):
    """Collectives among the workers of a job; see the module for who calls what."""

    rank: int
    world_size: int

    @abstractmethod
    def start(self) -> None:
        """Join the other workers; returns when all are there."""

    @abstractmethod
    def stop(self) -> None:
        """Leave, at once and without waiting for anybody; safe to call twice."""

    def use_device(self, device, *, is_alone: bool) -> None:  # noqa: B027 - few have to do it
        """Expect tensors of a GPU from now on; a collective, right after :meth:`start`.

        Parameters
        ----------
        device : torch.device
        is_alone : bool
            Whether no other worker uses the GPU of any worker.
        """

    @abstractmethod
    def broadcast(self, data: bytes | None) -> bytes | None:
        """Bytes of rank 0 on every rank."""

    @abstractmethod
    def all_gather(self, values: Sequence[float]) -> list[list[float]]:
        """A few numbers of every rank, in rank order (float64); as many on every rank."""

    @abstractmethod
    def gather(self, data: bytes) -> list[bytes] | None:
        """Bytes of every rank on rank 0, None elsewhere."""

    @abstractmethod
    def all_reduce(self, tensor, operation: Literal["sum", "max"] = "sum"):
        """Combine a tensor of one shape and dtype over the ranks, in place; returns it."""

    @abstractmethod
    def reduce(self, parameters: Sequence, weight: float, may_be_sparse: Sequence = ()) -> None:
        """Replace every gradient by the sum over ranks of ``weight * gradient``.

        Parameters
        ----------
        parameters : sequence of torch.nn.Parameter
            The same ones in the same order on every rank.
        weight : float
            A rank without rows passes 0 and takes part with zeros, whatever its gradients are.
        may_be_sparse : sequence of torch.nn.Parameter
            Those of `parameters` whose gradient can be a sparse tensor on some rank.

        Notes
        -----
        A parameter that has a gradient on no rank of weight above 0 keeps None, as in a single
        process, so an optimizer leaves it alone.
        """

    @abstractmethod
    def sum_arrays(self, arrays: Sequence, weight: float) -> list:
        """The sums over the ranks of ``weight * array``, as arrays in memory of their own.

        Parameters
        ----------
        arrays : sequence of numpy.ndarray
            Of float32 or float64; of the same shapes and types on every rank. They are only read.
        weight : float
            0 for a rank that takes part with zeros, whatever its arrays are.
        """


class CollectiveSync(GradientSync):
    """The methods that a library's collectives make; the latter are called among peers only.

    Parameters
    ----------
    worker : bigdl.runtime.worker.Worker
    """

    def __init__(self, worker):
        self._worker = worker
        self.rank = worker.rank
        self.world_size = worker.world_size
        self._groups: GradientGroups | None = None

    # -- what a library brings ------------------------------------------------------------------

    @abstractmethod
    def _broadcast(self, tensor) -> None:
        """The tensor of rank 0 on every rank, in place."""

    @abstractmethod
    def _all_gather(self, tensor) -> list:
        """A tensor of one shape of every rank, in rank order."""

    @abstractmethod
    def _gather(self, data: bytes, sizes: list[int]) -> list[bytes] | None:
        """Bytes of every rank on rank 0; `sizes` are those of all ranks."""

    @abstractmethod
    def _all_reduce(self, tensor, operation: str) -> None:
        """Combine a tensor, in place."""

    @abstractmethod
    def _start_sum(self, tensor) -> Callable[[], None]:
        """Begin to sum a tensor, in place; returns what waits for the end."""

    @abstractmethod
    def _sum_sparse(self, tensor):
        """The sum of coalesced sparse tensors."""

    # -- what it makes --------------------------------------------------------------------------

    def broadcast(self, data):
        if self.world_size == 1:
            return data
        import torch

        size = torch.tensor([-1 if data is None else len(data)])
        self._broadcast(size)
        length = int(size)
        if length <= 0:
            return None if length < 0 else b""
        buffer = bytes_tensor(data) if self.rank == 0 else torch.empty(length, dtype=torch.uint8)
        self._broadcast(buffer)
        return data if self.rank == 0 else buffer.numpy().tobytes()

    def all_gather(self, values):
        import torch

        tensor = torch.tensor(values, dtype=torch.float64)
        if self.world_size == 1:
            return [tensor.tolist()]
        return [each.tolist() for each in self._all_gather(tensor)]

    def gather(self, data):
        if self.world_size == 1:
            return [data]
        return self._gather(data, [int(size) for (size,) in self.all_gather([len(data)])])

    def all_reduce(self, tensor, operation="sum"):
        if self.world_size > 1:
            self._all_reduce(tensor, operation)
        return tensor

    def reduce(self, parameters, weight, may_be_sparse=()):
        if self.world_size == 1:
            return
        if self._groups is None or not self._groups.are_of(parameters):
            self._groups = GradientGroups(parameters, may_be_sparse, self._start_sum)
        for buckets in self._groups.dense:
            buckets.reduce(weight)
        if self._groups.sparse:
            self._reduce_sparse(self._groups.sparse, weight)

    def sum_arrays(self, arrays, weight):
        if self.world_size == 1:
            return [array * weight for array in arrays]
        return summed(arrays, weight, self._start_sum)

    def _reduce_sparse(self, parameters, weight):
        """The ranks first tell each other what they have, so that they agree on the layout."""
        layouts = [layout(p.grad) if weight else NONE for p in parameters]
        for parameter, of_ranks in zip(
            parameters, zip(*self.all_gather(layouts), strict=True), strict=True
        ):
            common = int(max(of_ranks))
            if common == NONE:
                parameter.grad = None
                continue
            gradient = weighted(parameter, weight, dense=common == DENSE)
            if common == DENSE:
                self._all_reduce(gradient, "sum")
                parameter.grad = gradient
            else:
                parameter.grad = self._sum_sparse(gradient).coalesce()


def bytes_tensor(data):
    """Bytes as a tensor of one dimension that may be written to."""
    import numpy as np
    import torch

    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))


def interface_of(host: str) -> str | None:
    """The network interface of this machine that has the address `host`."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == host for a in addresses):
            return name
    return None
