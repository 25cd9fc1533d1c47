"""Gradients meet by ``torch.distributed``, over the job's channel."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta

from bigdl.common.environment import EnvContext
from bigdl.runtime.collectives.base import CollectiveSync, bytes_tensor, interface_of
from bigdl.runtime.engine import PeerLost


class TorchDistributedSync(CollectiveSync):
    """A process group over the job's channel: gloo, and nccl for workers with a GPU each.

    Parameters
    ----------
    worker : bigdl.runtime.worker.Worker
    """

    def __init__(self, worker):
        super().__init__(worker)
        self._started = False
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
        import torch.distributed as dist

        torch.cuda.set_device(device)
        if self._started and is_alone:
            with _peers():
                self._gpus = dist.new_group(
                    backend="nccl", timeout=timedelta(seconds=self._worker.timeout)
                )

    def start(self) -> None:
        if self.world_size == 1:
            return
        import torch.distributed as dist

        if self._worker.line is None:  # they are in a process group already
            self._started = True
            return
        if dist.is_initialized():  # left by a task that was killed inside a reused process
            dist.destroy_process_group()
        self._worker.line.meet("group", self.world_size)
        with _interface(self._worker.host), _peers():
            dist.init_process_group(
                "gloo",
                store=self._worker.line.group_store(),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=self._worker.timeout),
            )
        # Nobody leaves before all have come: the sockets of one that is through, and stops at
        # once, would close under a peer that still connects.
        self._worker.line.meet("grouped", self.world_size)
        self._started = True
        self._worker.at_exit(self.stop)

    def stop(self) -> None:
        self._groups = self._gpus = None
        if self._started:
            self._started = False
            import torch.distributed as dist

            dist.destroy_process_group()

    def _broadcast(self, tensor):
        import torch.distributed as dist

        with _peers():
            dist.broadcast(tensor, 0)

    def _all_gather(self, tensor):
        import torch
        import torch.distributed as dist

        out = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with _peers():
            dist.all_gather(out, tensor)
        return out

    def _gather(self, data, sizes):
        import torch
        import torch.distributed as dist

        if self.rank:
            if data:
                with _peers():
                    dist.send(bytes_tensor(data), 0)
            return None
        out = [data]
        for rank in range(1, self.world_size):
            buffer = torch.empty(sizes[rank], dtype=torch.uint8)
            if sizes[rank]:
                with _peers():
                    dist.recv(buffer, rank)
            out.append(buffer.numpy().tobytes())
        return out

    def _all_reduce(self, tensor, operation):
        import torch.distributed as dist

        how = dist.ReduceOp.MAX if operation == "max" else dist.ReduceOp.SUM
        with _peers():
            dist.all_reduce(tensor, how, group=self._group_of(tensor))

    def _start_sum(self, tensor):
        import torch.distributed as dist

        with _peers():
            work = dist.all_reduce(tensor, async_op=True, group=self._group_of(tensor))

        def wait():
            with _peers():
                work.wait()

        return wait

    def _sum_sparse(self, tensor):
        import torch.distributed as dist

        with _peers():
            dist.all_reduce(tensor)
        return tensor

    def _group_of(self, tensor):
        return self._gpus if tensor.is_cuda else None


@contextlib.contextmanager
def _peers():
    """Say what a RuntimeError of a collective means: another worker went away.

    Nothing else belongs in the block: a fault of ours or of the model would be retried.
    """
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error).split("\n")[0]) from error


def _interface(host: str) -> EnvContext:
    """Let gloo use the network interface of `host` for the time of the block."""
    name = interface_of(host)
    is_chosen = "GLOO_SOCKET_IFNAME" in os.environ
    return EnvContext({} if is_chosen or not name else {"GLOO_SOCKET_IFNAME": name})
