"""Gradient all-reduce by ``torch.distributed`` over the job's channel."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from bigdl.common.environment import EnvContext
from bigdl.common.errors import UsageError
from bigdl.common.timeouts import REJOIN_S
from bigdl.runtime.collectives.base import GradientSync, as_peer_lost, bytes_tensor, interface_of
from bigdl.runtime.collectives.buckets import SumBuffer
from bigdl.runtime.collectives.halving import HALVING_MIN_WORLD_SIZE, HalvingDoubling
from bigdl.runtime.collectives.host_memory import (
    BlockBuffer,
    HostBuffer,
    block_of,
    local_peers,
)
from bigdl.runtime.recovery import broken_key

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from bigdl.runtime.group_store import GroupStore
    from bigdl.runtime.worker import Worker


class TorchDistributedSync(GradientSync):
    """Collective operations of ``torch.distributed``: gloo, or nccl for one GPU per worker.

    Parameters
    ----------
    worker : bigdl.runtime.worker.Worker
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._timeout = timedelta(seconds=worker.timeout)
        self._gpus = None  # the nccl process group
        self.neighbours: Mapping[int, int] = {}
        self.array_buffers: dict[Any, SumBuffer] = {}  # by dtype
        self._sums: HalvingDoubling | None = None  # for many workers
        self.sums_in_tree = self.world_size >= HALVING_MIN_WORLD_SIZE
        self.block_size = 1  # ranks of each machine that are summed first
        self._group = 0
        self.can_rejoin = worker.channel is not None and worker.certificate is None

    def sum_in_tree(self) -> None:
        self.sums_in_tree = True

    def use_device(self, device: torch.device, *, is_alone: bool) -> None:
        """Use a GPU for all further collective operations; call on all ranks.

        Parameters
        ----------
        device : torch.device
        is_alone : bool
            Whether every worker has a separate GPU, which nccl requires; otherwise gloo is used.
        """
        import torch

        torch.cuda.set_device(device)
        # nccl cannot encrypt
        if self._library is not None and is_alone and self._worker.certificate is None:
            with as_peer_lost():
                self._gpus = self._library.new_group(backend="nccl", timeout=self._timeout)

    def _join(self) -> None:
        import torch.distributed as dist

        if self._worker.channel is None:  # already in a process group
            self._library = dist
            self._find_neighbours()
            return
        if dist.is_initialized():  # left by a killed task in a reused process
            dist.destroy_process_group()
        number, broken = self._group, broken_key(self._group)
        suffix = f".{number}" if number else ""
        self._worker.channel.barrier(f"group{suffix}", self.world_size, broken=broken)
        store, join = self._rendezvous_store(), timedelta(seconds=REJOIN_S)
        with _gloo_environment(self._worker.host), as_peer_lost():
            dist.init_process_group(
                "gloo",
                store=store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=min(self._timeout, join) if number else self._timeout,
            )
        self._library = dist
        if number:
            _set_timeout(dist.group.WORLD, self._timeout)
        # Wait for all: a worker that ends early would close sockets to which its peers still
        # connect.
        self._worker.channel.barrier(f"grouped{suffix}", self.world_size, broken=broken)
        self._worker.at_exit(self.stop)
        self._find_neighbours()

    def rejoin(self, group: int) -> None:
        self._group = group
        self._join()

    def transfer(self, data: bytes | None, root: int, receivers: Sequence[int]) -> bytes | None:
        import torch

        if self.rank == root and data is not None:
            content = bytes_tensor(data)
            with as_peer_lost():
                for rank in receivers:
                    self._library.send(torch.tensor([len(data)]), rank)
                    self._library.send(content, rank)
        if self.rank not in receivers:
            return None
        size = torch.tensor([0])
        with as_peer_lost():
            self._library.recv(size, root)
            content = torch.empty(int(size), dtype=torch.uint8)
            self._library.recv(content, root)
        return content.numpy().tobytes()

    def begin_all_gather(self, tensor: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        import torch

        out = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with as_peer_lost():
            work = self._library.all_gather(out, tensor, async_op=True)

        def wait() -> list[torch.Tensor]:
            with as_peer_lost():
                work.wait()
            return out

        return wait

    def device_mesh(self, device: torch.device) -> DeviceMesh:
        from torch.distributed.device_mesh import DeviceMesh

        if device.type != "cpu" and self._gpus is None:
            raise UsageError(
                "shard= needs a separate GPU for every worker, without encryption of the cluster; "
                "use one worker per GPU, or CPUs",
                code="unsupported",
                argument="shard",
            )
        group: Any = self._library.group.WORLD if device.type == "cpu" else self._gpus
        return DeviceMesh.from_group(group, device.type)

    def _find_neighbours(self) -> None:
        self.neighbours = local_peers(self)
        if self.world_size >= HALVING_MIN_WORLD_SIZE:
            self.block_size = block_of(self, self.neighbours)

    def _rendezvous_store(self) -> GroupStore:
        """Return the rendezvous store; with tunnels, restrict gloo to the loopback interface."""
        worker = self._worker
        if worker.certificate is None:
            return cast("GroupStore", worker.channel.group_store(group=self._group))
        from bigdl.runtime.collectives.tunnel import LOOPBACK, Tunnels

        tunnels = Tunnels(worker.certificate, worker.host)
        worker.at_exit(tunnels.close)
        inside = EnvContext({"GLOO_SOCKET_IFNAME": str(interface_of(LOOPBACK))})
        inside.__enter__()  # also for groups that the program creates
        worker.at_exit(lambda: inside.__exit__(None, None, None))
        return cast("GroupStore", worker.channel.group_store(tunnels, self.rank))

    def _leave(self, library: Any) -> None:
        self._gpus = None
        self.array_buffers.clear()
        if self._sums is not None:
            self._sums.close()
            self._sums = None
        library.destroy_process_group()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self._library.broadcast(tensor, 0)

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        import torch

        out = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._library.all_gather(out, tensor)
        return out

    def _gather(self, data: bytes, sizes: list[int]) -> list[bytes] | None:
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

    def _start_reduce(self, tensor: torch.Tensor, operation: str) -> Callable[[], object]:
        is_dense = tensor.is_contiguous() and tensor.is_floating_point() and not tensor.is_cuda
        if self.sums_in_tree and operation == "sum" and is_dense:
            return self._halving().start(tensor.view(-1))
        reduce_op = getattr(self._library.ReduceOp, operation.upper())
        group = self._gpus if tensor.is_cuda else None
        return cast(
            "Callable[[], object]",
            self._library.all_reduce(tensor, reduce_op, group, async_op=True).wait,
        )

    def _halving(self) -> HalvingDoubling:
        if self._sums is None:
            group = self._library.group.WORLD
            self._sums = HalvingDoubling(self._library, self.rank, self.world_size, group)
        return self._sums

    def new_buffer(self, size: int, dtype: torch.dtype, device: torch.device) -> SumBuffer:
        shared = self._shared_buffer(size, dtype) if device.type == "cpu" else None
        return shared or super().new_buffer(size, dtype, device)

    def _buffer_of_arrays(self, size: int, dtype: torch.dtype) -> SumBuffer:
        known = self.array_buffers.get(dtype)
        if known is None or known.tensor.numel() < size:
            shared = self._shared_buffer(size, dtype)
            if shared is None:
                return super()._buffer_of_arrays(size, dtype)
            known = self.array_buffers[dtype] = shared
        return known

    def _shared_buffer(self, size: int, dtype: torch.dtype) -> SumBuffer | None:
        """Return a buffer in this machine's shared memory, or None if that has no benefit."""
        import torch

        if dtype not in (torch.float32, torch.float64):
            return None
        if len(self.neighbours) == self.world_size - 1:
            return HostBuffer(self, self.neighbours, size, dtype)
        if self.block_size > 1:
            return BlockBuffer(self, self.neighbours, size, dtype, self.block_size, self._halving())
        return None

    def _sum_sparse(self, tensor: torch.Tensor) -> torch.Tensor:
        self._library.all_reduce(tensor)
        return tensor

    def _all_to_all(
        self, tensor: torch.Tensor, send: list[int], receive: list[int]
    ) -> torch.Tensor:
        out = tensor.new_empty(sum(receive))
        self._library.all_to_all_single(out, tensor, receive, send)
        return out


def _set_timeout(group: torch.distributed.ProcessGroup | None, timeout: timedelta) -> None:
    """Set the timeout of the following collectives of a gloo group."""
    import torch

    assert group is not None, "the process group was not initialized"
    group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)


def _gloo_environment(host: str) -> EnvContext:
    """Return a context manager that makes gloo use `host`'s interface and bulk address reads.

    By default gloo reads addresses one by one, which takes seconds with a hundred workers.
    """
    name = interface_of(host)
    variables = {"GLOO_ENABLE_STORE_V2_API": "1"}
    if name and "GLOO_SOCKET_IFNAME" not in os.environ:
        variables["GLOO_SOCKET_IFNAME"] = name
    return EnvContext(variables)
