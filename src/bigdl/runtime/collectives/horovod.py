"""Gradient all-reduce by Horovod with gloo, on the workers of any engine.

Horovod's processes find each other with a key-value server.  Rank 0 runs it on its job address
while the others join.  The training traffic uses Horovod's protocol.  Tensor fusion is off, since
it would make the order of sums, and so their last bits, depend on timing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from bigdl.common.environment import EnvContext
from bigdl.common.errors import MissingExtraError, UsageError
from bigdl.runtime.collectives.base import GradientSync, bytes_tensor, interface_of
from bigdl.runtime.engine import PeerLost

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from bigdl.runtime.worker import Worker

_CURE = (
    "run scripts/install-horovod.sh of BigDL's sources, which builds it for the installed torch, "
    'or use backend="spark" or "ray", whose updates are the same'
)


def require_horovod() -> ModuleType:
    """Return the module ``horovod.torch``; raise an error with instructions if it is unusable.

    Raises
    ------
    MissingExtraError
        If Horovod is not installed.
    UsageError
        If it was built without PyTorch, or for another PyTorch version.
    """
    try:
        import horovod.torch as hvd
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "horovod":
            raise
        raise MissingExtraError(f"horovod is not installed; {_CURE}") from None
    except ImportError as error:
        raise UsageError(
            f"The installed Horovod cannot be loaded ({error}); {_CURE}",
            code="version-unsupported",
            package="horovod",
        ) from None
    if not hasattr(hvd, "init"):  # Horovod prints the reason
        raise UsageError(
            f"The installed Horovod has no part for the installed torch; {_CURE}",
            code="version-unsupported",
            package="horovod",
        )
    return cast("ModuleType", hvd)


class HorovodSync(GradientSync):
    """Collective operations of Horovod; GPU tensors are copied through host memory.

    Parameters
    ----------
    worker : bigdl.runtime.worker.Worker
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._in_flight = 0  # number of sums in flight

    def _join(self) -> None:
        if self._worker.certificate is not None:
            raise UsageError(
                "This cluster asks for encryption, but Horovod cannot encrypt the traffic between "
                "workers (gradients, weights and metrics of the training); use "
                'backend="spark", or, where the network between the workers is trusted, set '
                "BIGDL_CLEAR_COLLECTIVES=1 for the driver",
                code="unsupported",
            )
        hvd = require_horovod()
        if hvd.is_initialized():  # left by a task that was killed inside a reused process
            hvd.shutdown()
        channel = self._worker.channel
        slots = slots_of(
            channel.all_gather("horovod", self.rank, self._worker.host, self.world_size)
        )
        with contextlib.ExitStack() as stack:
            if self.rank == 0:
                port = stack.enter_context(_rendezvous(self._worker.host, slots))
                channel.set_json("horovod/address", [self._worker.host, port])
            channel.barrier("horovod address", self.world_size)
            address = channel.get_json("horovod/address")
            stack.enter_context(self._environment(slots[self.rank], address))
            try:
                hvd.init()
            except ValueError as error:
                raise PeerLost(f"Horovod's workers did not find each other: {error}") from error
            self._library = hvd
            self._worker.at_exit(self.stop)
            channel.barrier("horovod joined", self.world_size)  # the server must run until then

    def _environment(self, slot: Slot, address: tuple[str, int]) -> EnvContext:
        host, port = address
        interface = interface_of(self._worker.host)
        values = {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(int(self._worker.timeout)),
            **({"HOROVOD_GLOO_IFACE": interface} if interface else {}),
            "HOROVOD_FUSION_THRESHOLD": "0",
            "HOROVOD_LOG_LEVEL": "fatal",  # our messages name the lost worker
            **slot.variables(),
        }
        return EnvContext(values)

    def _leave(self, library: Any) -> None:
        library.shutdown()

    # -- collectives ----------------------------------------------------------------------------

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self._library.broadcast_(tensor, 0, name="bigdl.broadcast")

    def _all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        if not tensor.numel():
            return [tensor] * self.world_size
        gathered: Sequence[torch.Tensor] = self._library.allgather(
            tensor[None], name="bigdl.all_gather"
        )
        return gathered

    def _gather(self, data: bytes, sizes: list[int]) -> list[bytes] | None:
        if not sum(sizes):
            return [b""] * self.world_size if self.rank == 0 else None
        everything = self._library.allgather(bytes_tensor(data), name="bigdl.gather")
        if self.rank:
            return None
        return [part.numpy().tobytes() for part in everything.split(sizes)]

    def _start_reduce(self, tensor: torch.Tensor, operation: str) -> Callable[[], object]:
        """Start an in-place all-reduce; Horovod matches tensors by name across ranks."""
        hvd, carrier = self._library, _to_supported_dtype(tensor)
        name = f"bigdl.{carrier.dtype}.{self._in_flight}"
        self._in_flight += 1
        reduce_op = hvd.Max if operation == "max" else hvd.Sum
        handle = hvd.allreduce_async_(carrier, name=name, op=reduce_op)

        def wait() -> None:
            hvd.synchronize(handle)
            self._in_flight -= 1
            _copy_back(tensor, carrier)

        return wait

    def _sum_sparse(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum sparse tensors by gathering them from all ranks, since Horovod has no sparse sum."""
        import torch

        gather = self._library.allgather
        indices = gather(tensor.indices().t().contiguous(), name="bigdl.indices")
        values = gather(tensor.values().contiguous(), name="bigdl.values")
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)

    def _all_to_all(
        self, tensor: torch.Tensor, send: list[int], receive: list[int]
    ) -> torch.Tensor:
        """Exchange pieces padded by one element, since Horovod refuses empty pieces."""
        import torch

        pieces = [torch.cat([piece, piece.new_zeros(1)]) for piece in torch.split(tensor, send)]
        splits = torch.tensor([count + 1 for count in send], dtype=torch.int32)
        out, _ = self._library.alltoall(torch.cat(pieces), splits, name="bigdl.all_to_all")
        ends = [piece[:-1] for piece in out.split([count + 1 for count in receive])]
        return torch.cat(ends)


def _to_supported_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous CPU tensor of a dtype that Horovod sums; `tensor` itself if possible."""
    import torch

    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integers = (torch.uint8, torch.int8, torch.int32, torch.int64)
    known = (*integers, torch.float16, torch.float32, torch.float64)
    if real.dtype not in known:
        real = real.to(torch.float32 if real.dtype.is_floating_point else torch.int64)
    return real.detach().cpu().contiguous()


def _copy_back(tensor: torch.Tensor, carrier: torch.Tensor) -> None:
    """Copy the tensor that Horovod reduced back to the original tensor."""
    import torch

    target = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if target.data_ptr() != carrier.data_ptr():
        target.copy_(carrier)


# -- slots -------------------------------------------------------------------------------


class Slot(NamedTuple):
    """A worker's Horovod slot: its global, local and cross ranks, and the sizes of these groups.

    Attributes
    ----------
    hostname : str
    rank, size : int
        Rank among all workers, and their number.
    local_rank, local_size : int
        Rank among the workers of its machine, and their number.
    cross_rank, cross_size : int
        Rank among the workers with this local rank on all machines, and their number.
    """

    hostname: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def variables(self) -> dict[str, str]:
        """Return the environment variables that describe the slot to Horovod."""
        return {f"HOROVOD_{name.upper()}": str(value) for name, value in self._asdict().items()}


def slots_of(hosts: Sequence[str]) -> list[Slot]:
    """Return one Horovod slot per worker; the worker of rank r runs on ``hosts[r]``."""
    local_ranks = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    return [
        Slot(
            host,
            rank,
            len(hosts),
            local_rank,
            hosts.count(host),
            local_ranks[:rank].count(local_rank),
            local_ranks.count(local_rank),
        )
        for rank, (host, local_rank) in enumerate(zip(hosts, local_ranks, strict=True))
    ]


@contextlib.contextmanager
def _rendezvous(host: str, slots: Sequence[Slot]) -> Iterator[int]:
    """Context manager that runs Horovod's key-value server on this machine and yields its port."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class Server(RendezvousHTTPServer):
        daemon_threads = True
        server_bind = TCPServer.server_bind  # skips the reverse DNS lookup

    server = Server((host, 0), RendezvousHandler, False)
    server.init(slots)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
