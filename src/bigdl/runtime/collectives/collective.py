"""What every GradientSync over a library of collectives has in common.

A library brings a few collectives of tensors; from them this module makes the methods of a
:class:`~bigdl.runtime.collectives.base.GradientSync`.  One worker alone needs neither.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.collectives.flat import DENSE, NONE, GradientGroups, layout, summed, weighted

__all__ = ["CollectiveSync", "bytes_tensor", "interface_of"]


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
        self._groups = GradientGroups([], [])

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

        own = torch.tensor(values, dtype=torch.float64)
        if self.world_size == 1:
            return [own.tolist()]
        return [each.tolist() for each in self._all_gather(own)]

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
        if not self._groups.are_of(parameters):
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
        own = [layout(p.grad) if weight else NONE for p in parameters]
        for parameter, kinds in zip(
            parameters, zip(*self.all_gather(own), strict=True), strict=True
        ):
            kind = int(max(kinds))
            if kind == NONE:
                parameter.grad = None
                continue
            gradient = weighted(parameter, weight, dense=kind == DENSE)
            if kind == DENSE:
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
