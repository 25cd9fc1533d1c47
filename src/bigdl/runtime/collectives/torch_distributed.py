"""Gradients meet by ``torch.distributed``, over the job's channel."""

import contextlib
import functools
import mmap
import os
from collections.abc import Iterator
from datetime import timedelta

from bigdl.common.environment import EnvContext
from bigdl.common.errors import UsageError
from bigdl.runtime.certificate import Certificate
from bigdl.runtime.collectives.base import GradientSync, bytes_tensor, interface_of, peers


class TorchDistributedSync(GradientSync):
    """A process group over the job's channel: gloo, and nccl for workers with a GPU each.

    Parameters
    ----------
    worker : bigdl.runtime.worker.Worker
    """

    def __init__(self, worker):
        super().__init__(worker)
        self._timeout = timedelta(seconds=worker.timeout)
        self._gpus = None  # the process group of nccl

    def use_device(self, device, *, is_alone: bool) -> None:
        """Compute on a GPU from now on; a collective.

        Parameters
        ----------
        device : torch.device
        is_alone : bool
            Whether every worker has a GPU of its own, as nccl wants it; else gloo reduces.
        """
        import torch

        torch.cuda.set_device(device)
        if self._library is not None and is_alone:
            with peers():
                self._gpus = self._library.new_group(backend="nccl", timeout=self._timeout)

    def _join(self):
        import torch.distributed as dist

        if self._worker.line is None:  # they are in a process group already
            self._library = dist
            return
        if dist.is_initialized():  # left by a task that was killed inside a reused process
            dist.destroy_process_group()
        self._worker.line.meet("group", self.world_size)
        with _encryption(self._worker.certificate), _interface(self._worker.host), peers():
            dist.init_process_group(
                "gloo",
                store=self._worker.line.group_store(),
                rank=self.rank,
                world_size=self.world_size,
                timeout=self._timeout,
            )
        # Wait for all: a worker that ends early would close sockets to which its peers are still
        # connecting.
        self._worker.line.meet("grouped", self.world_size)
        self._library = dist
        self._worker.at_exit(self.stop)

    def _leave(self, library):
        self._gpus = None
        library.destroy_process_group()

    def _broadcast(self, tensor):
        self._library.broadcast(tensor, 0)

    def _all_gather(self, tensor):
        import torch

        out = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._library.all_gather(out, tensor)
        return out

    def _gather(self, data, sizes):
        import torch

        if self.rank:
            if data:
                self._library.send(bytes_tensor(data), 0)
            return None
        out = [data]
        for rank in range(1, self.world_size):
            buffer = torch.empty(sizes[rank], dtype=torch.uint8)
            if sizes[rank]:
                self._library.recv(buffer, rank)
            out.append(buffer.numpy().tobytes())
        return out

    def _start_reduce(self, tensor, operation):
        how = getattr(self._library.ReduceOp, operation.upper())
        group = self._gpus if tensor.is_cuda else None
        return self._library.all_reduce(tensor, how, group, async_op=True).wait

    def _sum_sparse(self, tensor):
        self._library.all_reduce(tensor)
        return tensor


CLEAR = (
    "This cluster asks for encryption, but {library} cannot encrypt what workers say to each other "
    "(gradients, weights and figures of the training); {cure}where the network between the workers "
    "is trusted, set BIGDL_CLEAR_COLLECTIVES=1 for the driver, which encrypts only what goes "
    "between it and the workers"
)


@contextlib.contextmanager
def _encryption(certificate: Certificate | None) -> Iterator[None]:
    """Let gloo encrypt in the block; with None it says everything in the clear.

    Raises
    ------
    UsageError
        If the installed torch was built without that.
    """
    if certificate is None:
        yield
        return
    if not _gloo_has_tls():
        cure = "install a torch that was built with USE_GLOO_WITH_OPENSSL; "
        raise UsageError(CLEAR.format(library="gloo of the installed torch", cure=cure))
    with certificate.files() as (key, shown):
        settings = {
            "GLOO_DEVICE_TRANSPORT": "TCP_TLS",
            "GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY": key,
            "GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT": shown,
            "GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE": shown,
        }
        with EnvContext(settings):
            yield


@functools.cache
def _gloo_has_tls() -> bool:
    """Return True if torch was built with it.

    Not by a trial: gloo looks at its variables once in a process, and would stay as it is.
    """
    import torch

    path = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    if not os.path.exists(path):  # Linux only
        return False
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        return library.find(b"GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY") >= 0


def _interface(host: str) -> EnvContext:
    """Let gloo use the network interface of `host` for the time of the block."""
    name = interface_of(host)
    is_chosen = "GLOO_SOCKET_IFNAME" in os.environ
    return EnvContext({} if is_chosen or not name else {"GLOO_SOCKET_IFNAME": name})
