"""Collectives among workers, above all the sum of their gradients.

A **GradientSync** belongs to one program in one worker.  The Loop calls :meth:`~GradientSync.start`
once, :meth:`~GradientSync.broadcast` for the initial state,
:meth:`~GradientSync.all_reduce_gradients` in every step between ``backward`` and the optimizer's
step, and the other collectives at the ends of epochs.  A ``backward`` within
:meth:`~GradientSync.overlap` hides most of what is sent.  :meth:`~GradientSync.stop` also
runs when the program fails, before the failure is reported.
All ranks call the same methods in the same order.
Every collective raises :class:`~bigdl.runtime.engine.PeerLost` when another worker went away.

A subclass brings a few collectives of tensors from a library, and the rest is built from them.  A
single worker uses none.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from bigdl.common.errors import UsageError
from bigdl.runtime.collectives.buckets import (
    DENSE,
    NONE,
    GradientGroups,
    SumBuffer,
    layout,
    summed,
    weighted,
)
from bigdl.runtime.engine import PeerLost

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from bigdl.runtime.worker import Worker


class GradientSync(ABC):
    """Sums gradients over the workers of a job, and is their other collectives.

    See the module for who calls what.

    Parameters
    ----------
    worker : bigdl.runtime.worker.Worker
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.rank: int = worker.rank
        self.world_size: int = worker.world_size
        self.sums_in_tree = False
        self._library: Any = None  # once the others are joined
        self.groups: GradientGroups | None = None

    # -- what a library brings, among peers only --------------------------------------------------

    @abstractmethod
    def _join(self) -> None:
        """Join the other workers and set the library."""

    @abstractmethod
    def _leave(self, library: Any) -> None:
        """Leave the other workers."""

    @abstractmethod
    def _broadcast(self, tensor: torch.Tensor) -> None:
        """The tensor of rank 0 on every rank, in place."""

    @abstractmethod
    def _all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """A tensor of one shape of every rank, in rank order."""

    @abstractmethod
    def _gather(self, data: bytes, sizes: list[int]) -> list[bytes] | None:
        """Bytes of every rank on rank 0; `sizes` are those of all ranks."""

    @abstractmethod
    def _start_reduce(self, tensor: torch.Tensor, operation: str) -> Callable[[], object]:
        """Begin to combine a tensor, in place; returns what waits for the end."""

    @abstractmethod
    def _sum_sparse(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of coalesced sparse tensors."""

    @abstractmethod
    def _all_to_all(
        self, tensor: torch.Tensor, send: list[int], receive: list[int]
    ) -> torch.Tensor:
        """Exchange consecutive pieces of a flat tensor; see :meth:`all_to_all`."""

    # -- what is made of it -----------------------------------------------------------------------

    def start(self) -> None:
        """Join the other workers; returns when all are there."""
        if self.world_size > 1:
            self._join()

    def stop(self) -> None:
        """Leave, at once and without waiting for anybody; safe to call twice."""
        self.groups = None
        library, self._library = self._library, None
        if library is not None:
            self._leave(library)

    def sum_in_tree(self) -> None:
        """Sum over ranks along a binary tree, for any number of them; before the first sum.

        Raises
        ------
        UsageError
            If the library decides the order of its sums.
        """
        raise UsageError(
            f'{type(self).__name__} does not sum along a fixed tree, which exact="bits" needs; '
            "use a backend whose gradients go through torch.distributed",
            code="unsupported",
            argument="exact",
        )

    def use_device(self, device: torch.device, *, is_alone: bool) -> None:  # noqa: B027 - few have to do it
        """Expect tensors of a GPU from now on; a collective, right after :meth:`start`.

        Parameters
        ----------
        device : torch.device
        is_alone : bool
            Whether no other worker uses the GPU of any worker.
        """

    def broadcast(self, data: bytes | None) -> bytes | None:
        """Bytes of rank 0 on every rank."""
        if self.world_size == 1:
            return data
        import torch

        size = torch.tensor([-1 if data is None else len(data)])
        with as_peer_lost():
            self._broadcast(size)
        length = int(size)
        if length <= 0:
            return None if length < 0 else b""
        buffer = bytes_tensor(data) if self.rank == 0 else torch.empty(length, dtype=torch.uint8)
        with as_peer_lost():
            self._broadcast(buffer)
        return data if self.rank == 0 else buffer.numpy().tobytes()

    def all_gather(self, values: Sequence[float]) -> list[list[float]]:
        """A few numbers of every rank, in rank order (float64); as many on every rank."""
        import torch

        tensor = torch.tensor(values, dtype=torch.float64)
        if self.world_size == 1:
            return [tensor.tolist()]
        with as_peer_lost():
            return [each.tolist() for each in self._all_gather(tensor)]

    def gather(self, data: bytes) -> list[bytes] | None:
        """Bytes of every rank on rank 0, None elsewhere."""
        if self.world_size == 1:
            return [data]
        sizes = [int(size) for (size,) in self.all_gather([len(data)])]
        with as_peer_lost():
            return self._gather(data, sizes)

    def all_to_all(
        self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> torch.Tensor:
        """Send every rank its piece of a tensor, and get one from each.

        Parameters
        ----------
        tensor : torch.Tensor
            Of one dimension, on the CPU; of one dtype on all ranks.
        send, receive : sequence of int
            Elements of the piece for each rank and of each rank; together they lie in rank order.

        Returns
        -------
        torch.Tensor
        """
        if self.world_size == 1:
            return tensor
        with as_peer_lost():
            return self._all_to_all(tensor, list(send), list(receive))

    def all_reduce(
        self, tensor: torch.Tensor, operation: Literal["sum", "max"] = "sum"
    ) -> torch.Tensor:
        """Combine a tensor of one shape and dtype over the ranks, in place; returns it."""
        if self.world_size > 1:
            self._begin(tensor, operation)()
        return tensor

    def all_reduce_gradients(
        self,
        parameters: Sequence[Any],
        weight: float,
        may_be_sparse: Sequence[torch.nn.Parameter] = (),
    ) -> None:
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
        if self.world_size == 1:
            return
        groups = self._groups_of(parameters, may_be_sparse)
        for buckets in groups.dense:
            buckets.all_reduce(weight)
        if groups.sparse:
            self._reduce_sparse(groups.sparse, weight)

    def overlap(
        self,
        parameters: Sequence[Any],
        weight: float,
        may_be_sparse: Sequence[torch.nn.Parameter] = (),
    ) -> contextlib.AbstractContextManager[None]:
        """Send gradients while the backward pass of a block computes the others.

        :meth:`all_reduce_gradients` has to follow with the same arguments, on all ranks; a rank may
        do without the block, as one does that has no rows.
        """
        if self.world_size == 1:
            return contextlib.nullcontext()
        groups = self._groups_of(parameters, may_be_sparse)
        # the first group only: its buckets are the first that all ranks send
        return groups.dense[0].overlap(weight) if groups.dense else contextlib.nullcontext()

    def _groups_of(
        self, parameters: Sequence[torch.nn.Parameter], may_be_sparse: Sequence[torch.nn.Parameter]
    ) -> GradientGroups:
        if self.groups is None or not self.groups.are_of(parameters):
            self.groups = GradientGroups(parameters, may_be_sparse, self.new_buffer)
        return self.groups

    def sum_arrays(
        self, arrays: Sequence[npt.NDArray[Any]], weight: float
    ) -> list[npt.NDArray[Any]]:
        """The sums over the ranks of ``weight * array``, as arrays in memory of their own.

        Parameters
        ----------
        arrays : sequence of numpy.ndarray
            Of float32 or float64; of the same shapes and types on every rank. They are only read.
        weight : float
            0 for a rank that takes part with zeros, whatever its arrays are.
        """
        if self.world_size == 1:
            return [array * weight for array in arrays]
        return summed(arrays, weight, self._buffer_of_arrays)

    def new_buffer(self, size: int, dtype: torch.dtype, device: torch.device) -> SumBuffer:
        """Memory for gradients of parameters; all ranks make theirs in the same order."""
        import torch

        return SumBuffer(torch.zeros(size, dtype=dtype, device=device), self._begin)

    def _buffer_of_arrays(self, size: int, dtype: torch.dtype) -> SumBuffer:
        """The same for arrays, whose sums go to the caller."""
        import torch

        return SumBuffer(torch.empty(size, dtype=dtype), self._begin)

    def _begin(self, tensor: torch.Tensor, operation: str = "sum") -> Callable[[], None]:
        """Begin to combine a tensor, in place; returns what waits for the end."""
        with as_peer_lost():
            work = self._start_reduce(tensor, operation)

        def wait() -> None:
            with as_peer_lost():
                work()

        return wait

    def _reduce_sparse(self, parameters: Sequence[torch.nn.Parameter], weight: float) -> None:
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
                parameter.grad = self.all_reduce(gradient)
            else:
                with as_peer_lost():
                    parameter.grad = self._sum_sparse(gradient).coalesce()


@contextlib.contextmanager
def as_peer_lost() -> Iterator[None]:
    """Say what a RuntimeError of a library's collective means: another worker went away.

    Nothing else belongs in the block: a fault of ours or of the model would be retried.
    """
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error).split("\n")[0]) from error


def bytes_tensor(data: bytes | None) -> torch.Tensor:
    """Bytes as a tensor of one dimension that may be written to."""
    import numpy as np
    import torch

    return torch.from_numpy(np.frombuffer(bytearray(data or b""), dtype=np.uint8))


def interface_of(host: str) -> str | None:
    """The network interface of this machine that has the address `host`."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == host for a in addresses):
            return str(name)
    return None
