"""Collective operations among the workers of a job, mainly the all-reduce of gradients.

A **GradientSync** belongs to one program in one worker.  The training loop calls
:meth:`~GradientSync.start` once, :meth:`~GradientSync.broadcast` for the initial state,
:meth:`~GradientSync.all_reduce_gradients` in every step between ``backward`` and the optimizer's
step, and the other collectives at the end of each epoch.  A ``backward`` within
:meth:`~GradientSync.overlap` hides most of the communication.  :meth:`~GradientSync.stop` also runs
when the program fails, before the failure is reported.  All ranks call the same methods in the same
order.  Every collective raises :class:`~bigdl.runtime.engine.PeerLost` if another worker is lost.

A subclass implements a few tensor collectives with a library; this class derives the others.  A
single worker needs no library.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, cast

from bigdl.common.errors import UsageError
from bigdl.runtime.collectives.buckets import (
    DENSE,
    NONE,
    GradientGroups,
    SumBuffer,
    gradient_layout,
    scaled_gradient,
    sum_with_buffers,
)
from bigdl.runtime.engine import PeerLost

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from bigdl.runtime.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")


def _timed(
    method: Callable[Concatenate[GradientSync, P], T],
) -> Callable[Concatenate[GradientSync, P], T]:
    """Decorate a collective so that its duration, including waiting, is added to `collective_s`."""

    @functools.wraps(method)
    def wrapper(self: GradientSync, *args: P.args, **keywords: P.kwargs) -> T:
        if self._is_in_collective or self.world_size == 1:
            return method(self, *args, **keywords)
        if self._replayed is not None:
            return cast("T", self._replayed.next_result(method.__name__))
        self._is_in_collective = True
        started = time.perf_counter()
        try:
            result = method(self, *args, **keywords)
            if self._record is not None:
                self._record.add(method.__name__, result)
            return result
        finally:
            self.collective_s += time.perf_counter() - started
            self._is_in_collective = False

    return cast("Callable[Concatenate[GradientSync, P], T]", wrapper)


class CollectiveRecord:
    """Results of collectives in the order of their calls, which are equal on all ranks.

    A replacement of a lost worker replays those of the start, so that it makes the same decisions
    as the other workers without calling them.
    """

    def __init__(self, results: list[Any] | None = None):
        self._results: list[Any] | None = [] if results is None else results
        self._next = 0

    def add(self, name: str, result: object) -> None:
        """Add the result of a collective, if another rank can replay it."""
        if name not in ("all_gather", "broadcast", "gather"):
            self._results = None
        if self._results is None:
            return
        if isinstance(result, bytes):
            self._results.append([name, base64.b64encode(result).decode()])
        else:  # only rank 0 has the result of a gather
            self._results.append([name, None if name == "gather" else result])

    def next_result(self, name: str) -> object:
        """Return the recorded result of the next collective."""
        results = cast("list[Any]", self._results)
        if self._next == len(results) or results[self._next][0] != name:
            raise PeerLost(f"the start of the other workers had no collective {name!r} here")
        self._next += 1
        result = results[self._next - 1][1]
        return base64.b64decode(result) if isinstance(result, str) else result

    def dump(self) -> bytes | None:
        """Serialize the record; return None if a collective cannot be replayed."""
        return None if self._results is None else json.dumps(self._results).encode()

    @classmethod
    def load(cls, data: bytes) -> CollectiveRecord:
        """Deserialize a record."""
        return cls(json.loads(data))


class GradientSync(ABC):
    """Base class for collective operations among workers, mainly the all-reduce of gradients.

    See the module for the order of calls.

    Parameters
    ----------
    worker : bigdl.runtime.worker.Worker

    Attributes
    ----------
    collective_s : float
        Seconds that this worker has spent in collectives, including waiting for other workers. The
        collectives during a backward pass count only where it waits for them.
    """

    collective_s = 0.0
    can_rejoin = False  # whether the workers can form further groups, see `rejoin`
    _is_in_collective = False
    _record: CollectiveRecord | None = None  # results of the collectives, while they are recorded
    _replayed: CollectiveRecord | None = None

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.rank: int = worker.rank
        self.world_size: int = worker.world_size
        self.sums_in_tree = False
        self._library: Any = None  # set by start()
        self.groups: GradientGroups | None = None
        self._carry: torch.Tensor | None = None  # values for the next sum of gradients
        self._carried: Sequence[torch.Tensor] | None = None  # of all ranks, from the latest sum

    # -- implemented by a subclass, for several workers -----------------------------------------

    @abstractmethod
    def _join(self) -> None:
        """Join the group of workers and set `_library`."""

    @abstractmethod
    def _leave(self, library: object) -> None:
        """Leave the group of workers and release the library."""

    @abstractmethod
    def _broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast the tensor of rank 0 to every rank, in place."""

    @abstractmethod
    def _all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Gather tensors of equal shape from every rank, in rank order."""

    @abstractmethod
    def _gather(self, data: bytes, sizes: list[int]) -> list[bytes] | None:
        """Gather the bytes of every rank on rank 0; `sizes` are the lengths on all ranks."""

    @abstractmethod
    def _start_reduce(self, tensor: torch.Tensor, operation: str) -> Callable[[], object]:
        """Start an in-place all-reduce; return a function that waits for it."""

    @abstractmethod
    def _sum_sparse(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of coalesced sparse tensors over the ranks."""

    @abstractmethod
    def _all_to_all(
        self, tensor: torch.Tensor, send: list[int], receive: list[int]
    ) -> torch.Tensor:
        """Exchange consecutive pieces of a flat tensor; see :meth:`all_to_all`."""

    # -- derived collectives -----------------------------------------------------------------------

    def start(self) -> None:
        """Join the other workers; return when all have joined."""
        if self.world_size > 1:
            self._join()

    def start_recording(self) -> None:
        """Record the results of the following collectives, see :meth:`end_recording`."""
        self._record = CollectiveRecord()

    def end_recording(self) -> bytes | None:
        """Return the results since :meth:`start_recording`; None if they cannot be replayed."""
        record, self._record = self._record, None
        return None if record is None else record.dump()

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Context manager for collectives that a replacement does without."""
        record, self._record = self._record, None
        try:
            yield
        finally:
            self._record = record

    def replay(self, record: bytes | None) -> None:
        """Take the results of the following collectives from a record; None ends this."""
        self._replayed = None if record is None else CollectiveRecord.load(record)

    def rejoin(self, group: int) -> None:
        """Join the other workers in a further group, after :meth:`stop` or instead of `start`.

        Parameters
        ----------
        group : int
            Number of the group, see :mod:`bigdl.runtime.recovery`.
        """
        raise NotImplementedError

    def transfer(self, data: bytes | None, root: int, receivers: Sequence[int]) -> bytes | None:
        """Send bytes from one rank to some others and return them there; None on other ranks."""
        raise NotImplementedError

    def begin_all_gather(self, tensor: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
        """Start to gather tensors of equal shape; return a function that waits for them."""
        with as_peer_lost():
            gathered = self._all_gather(tensor)
        return lambda: gathered

    def carry(self, values: torch.Tensor | None) -> None:
        """Exchange values together with the next sum of gradients, without another collective.

        Parameters
        ----------
        values : torch.Tensor or None
            Vector of float64, of equal length on all ranks; None cancels the exchange. Call this
            before :meth:`overlap`.
        """
        self._carry, self._carried = values, None

    def carried(self) -> Sequence[torch.Tensor]:
        """Return the values of all ranks that the latest sum of gradients has carried."""
        carried, self._carried = self._carried, None
        if carried is None:
            raise PeerLost("the sum of the gradients has not carried the state of the ranks")
        return carried

    def stop(self) -> None:
        """Leave the group at once without waiting for peers; safe to call twice."""
        self.groups = None
        library, self._library = self._library, None
        if library is not None:
            self._leave(library)

    def sum_in_tree(self) -> None:
        """Use a fixed summation tree for any number of ranks; call before the first sum.

        Raises
        ------
        UsageError
            If the library determines the order of its sums.
        """
        raise UsageError(
            f'{type(self).__name__} does not sum along a fixed tree, which exact="bits" needs; '
            "use a backend whose gradients go through torch.distributed",
            code="unsupported",
            argument="exact",
        )

    def use_device(self, device: torch.device, *, is_alone: bool) -> None:  # noqa: B027 - optional
        """Prepare collective operations on GPU tensors; call on all ranks after :meth:`start`.

        Parameters
        ----------
        device : torch.device
        is_alone : bool
            Whether every worker has a separate GPU.
        """

    def device_mesh(self, device: torch.device) -> DeviceMesh:
        """Return a mesh of all ranks for models that are divided among them; a collective call.

        Raises
        ------
        UsageError
            If the library cannot gather weights and scatter sums of gradients on the device.
        """
        raise UsageError(
            f"{type(self).__name__} cannot divide a model among the workers; use a backend whose "
            "gradients go through torch.distributed, or remove shard",
            code="unsupported",
            argument="shard",
        )

    @_timed
    def broadcast(self, data: bytes | None) -> bytes | None:
        """Return the bytes of rank 0 on every rank."""
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

    @_timed
    def all_gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return a list of numbers (float64) from every rank, in rank order."""
        import torch

        tensor = torch.tensor(values, dtype=torch.float64)
        if self.world_size == 1:
            return [tensor.tolist()]
        with as_peer_lost():
            return [each.tolist() for each in self._all_gather(tensor)]

    @_timed
    def gather(self, data: bytes) -> list[bytes] | None:
        """Return the bytes of every rank on rank 0, None on other ranks."""
        if self.world_size == 1:
            return [data]
        sizes = [int(size) for (size,) in self.all_gather([len(data)])]
        with as_peer_lost():
            return self._gather(data, sizes)

    @_timed
    def all_to_all(
        self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> torch.Tensor:
        """Send a piece of a tensor to every rank and return the pieces received from all ranks.

        Parameters
        ----------
        tensor : torch.Tensor
            One-dimensional CPU tensor; of equal dtype on all ranks.
        send, receive : sequence of int
            Number of elements to send to each rank, and to receive from each rank. The pieces are
            concatenated in rank order.

        Returns
        -------
        torch.Tensor
        """
        if self.world_size == 1:
            return tensor
        with as_peer_lost():
            return self._all_to_all(tensor, list(send), list(receive))

    @_timed
    def all_reduce(
        self, tensor: torch.Tensor, operation: Literal["sum", "max"] = "sum"
    ) -> torch.Tensor:
        """All-reduce a tensor of equal shape and dtype in place and return it."""
        if self.world_size > 1:
            self._begin(tensor, operation)()
        return tensor

    @_timed
    def all_reduce_gradients(
        self,
        parameters: Sequence[Any],
        weight: float,
        may_be_sparse: Sequence[torch.nn.Parameter] = (),
    ) -> None:
        """Replace every gradient with the sum over ranks of ``weight * gradient``.

        Parameters
        ----------
        parameters : sequence of torch.nn.Parameter
            The same ones in the same order on every rank.
        weight : float
            Weight of this rank. A rank without rows passes 0 and contributes zeros; its gradients
            are ignored.
        may_be_sparse : sequence of torch.nn.Parameter
            The `parameters` whose gradient can be a sparse tensor on some rank.

        Notes
        -----
        A parameter without a gradient on all ranks of positive weight keeps None, as in a single
        process, so an optimizer skips it.
        """
        if self.world_size == 1:
            return
        groups, carry = self._groups_of(parameters, may_be_sparse), self._carry
        carried = None if carry is None or groups.dense else list(self._all_gather(carry))
        for buckets in groups.dense:
            buckets.all_reduce(weight)
        if groups.sparse:
            self._reduce_sparse(groups.sparse, weight)
        if carry is not None:
            self._carried = groups.dense[0].carried() if carried is None else carried
            self._carry = None

    def overlap(
        self,
        parameters: Sequence[Any],
        weight: float,
        may_be_sparse: Sequence[torch.nn.Parameter] = (),
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that all-reduces gradients during a backward pass inside it.

        :meth:`all_reduce_gradients` must follow with the same arguments on all ranks. A rank may
        skip the block, for example if it has no rows.
        """
        if self.world_size == 1:
            return contextlib.nullcontext()
        groups = self._groups_of(parameters, may_be_sparse)
        # the first group only: all ranks send its buckets first
        return groups.dense[0].overlap(weight) if groups.dense else contextlib.nullcontext()

    def _groups_of(
        self, parameters: Sequence[torch.nn.Parameter], may_be_sparse: Sequence[torch.nn.Parameter]
    ) -> GradientGroups:
        carry = self._carry
        carried = None if carry is None else carry.numel() * self.world_size
        if self.groups is None or not self.groups.matches(parameters, carried):
            self.groups = GradientGroups(parameters, may_be_sparse, self.new_buffer, carried or 0)
        if carry is not None and self.groups.dense:
            self.groups.dense[0].carry(self.rank, carry)
        return self.groups

    @_timed
    def sum_arrays(
        self, arrays: Sequence[npt.NDArray[Any]], weight: float
    ) -> list[npt.NDArray[Any]]:
        """Return the sums over the ranks of ``weight * array`` as new arrays.

        Parameters
        ----------
        arrays : sequence of numpy.ndarray
            Arrays of float32 or float64, of equal shapes and dtypes on every rank. They stay
            unchanged.
        weight : float
            Weight of this rank; 0 contributes zeros and ignores the arrays.
        """
        if self.world_size == 1:
            return [array * weight for array in arrays]
        return sum_with_buffers(arrays, weight, self._buffer_of_arrays)

    def new_buffer(self, size: int, dtype: torch.dtype, device: torch.device) -> SumBuffer:
        """Allocate a buffer for gradients; all ranks allocate theirs in the same order."""
        import torch

        return SumBuffer(torch.zeros(size, dtype=dtype, device=device), self._begin)

    def _buffer_of_arrays(self, size: int, dtype: torch.dtype) -> SumBuffer:
        """Allocate a buffer for summing arrays; the caller keeps the summed arrays."""
        import torch

        return SumBuffer(torch.empty(size, dtype=dtype), self._begin)

    def _begin(self, tensor: torch.Tensor, operation: str = "sum") -> Callable[[], None]:
        """Start an in-place all-reduce; return a function that waits for it or raises PeerLost."""
        with as_peer_lost():
            work = self._start_reduce(tensor, operation)

        def wait() -> None:
            with as_peer_lost():
                work()

        return wait

    def _reduce_sparse(self, parameters: Sequence[torch.nn.Parameter], weight: float) -> None:
        """All-reduce gradients; the ranks first agree which gradients are sparse."""
        layouts = [gradient_layout(p.grad) if weight else NONE for p in parameters]
        for parameter, of_ranks in zip(
            parameters, zip(*self.all_gather(layouts), strict=True), strict=True
        ):
            common = int(max(of_ranks))
            if common == NONE:
                parameter.grad = None
                continue
            gradient = scaled_gradient(parameter, weight, dense=common == DENSE)
            if common == DENSE:
                parameter.grad = self.all_reduce(gradient)
            else:
                with as_peer_lost():
                    parameter.grad = self._sum_sparse(gradient).coalesce()


@contextlib.contextmanager
def as_peer_lost() -> Iterator[None]:
    """Context manager that converts a RuntimeError from a collective operation to PeerLost.

    Put nothing else in the block: errors of BigDL or of the model would be retried.
    """
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error).split("\n")[0]) from error


def bytes_tensor(data: bytes | None) -> torch.Tensor:
    """Copy bytes to a writable one-dimensional tensor."""
    import numpy as np
    import torch

    return torch.from_numpy(np.frombuffer(bytearray(data or b""), dtype=np.uint8))


def interface_of(host: str) -> str | None:
    """Return the name of the local network interface with the address `host`."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == host for a in addresses):
            return str(name)
    return None
