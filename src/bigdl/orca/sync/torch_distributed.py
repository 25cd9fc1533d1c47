"""Gradients meet by ``torch.distributed``: one flat buffer per kind of parameter, cut in buckets.

For a loss that is a mean of per-sample terms, a rank with n of the batch's N rows contributes
``n / N`` times its gradient, so the sum is the gradient of one process on the whole batch, also in
an uneven step and when a rank has no rows.  (DistributedDataParallel divides by the world size
instead.)
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta

from bigdl.orca.engine.base import PeerLost
from bigdl.orca.sync.base import GradientSync

__all__ = ["FlatBuckets", "TorchDistributedSync"]

_BUCKET = 4 << 20  # elements of one all-reduce


class TorchDistributedSync(GradientSync):
    """A process group over the job's channel: gloo on CPU.

    Parameters
    ----------
    worker : bigdl.orca.engine.worker.Worker
    """

    def __init__(self, worker):
        self._worker = worker
        self.rank = worker.rank
        self.world_size = worker.world_size
        self._started = False
        self._buckets: dict[tuple, FlatBuckets] = {}

    def start(self) -> None:
        if self.world_size == 1:
            return
        import torch.distributed as dist

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
        self._started = True
        self._worker.at_exit(self.stop)

    def stop(self) -> None:
        self._buckets.clear()
        if self._started:
            self._started = False
            import torch.distributed as dist

            dist.destroy_process_group()

    def broadcast(self, data):
        if self.world_size == 1:
            return data
        import torch
        import torch.distributed as dist

        size = torch.tensor([-1 if data is None else len(data)])
        with _peers():
            dist.broadcast(size, 0)
            if size.item() < 0:
                return None
            buffer = (
                _bytes_tensor(data)
                if self.rank == 0
                else torch.empty(size.item(), dtype=torch.uint8)
            )
            if size.item():
                dist.broadcast(buffer, 0)
        return data if self.rank == 0 else buffer.numpy().tobytes()

    def all_gather(self, values):
        import torch
        import torch.distributed as dist

        own = torch.tensor(values, dtype=torch.float64)
        if self.world_size == 1:
            return [own.tolist()]
        out = [torch.empty_like(own) for _ in range(self.world_size)]
        with _peers():
            dist.all_gather(out, own)
        return [t.tolist() for t in out]

    def gather(self, data):
        if self.world_size == 1:
            return [data]
        import torch
        import torch.distributed as dist

        sizes = [int(row[0]) for row in self.all_gather([len(data)])]
        with _peers():
            if self.rank:
                if data:
                    dist.send(_bytes_tensor(data), 0)
                return None
            out = [data]
            for rank in range(1, self.world_size):
                buffer = torch.empty(sizes[rank], dtype=torch.uint8)
                if sizes[rank]:
                    dist.recv(buffer, rank)
                out.append(buffer.numpy().tobytes())
        return out

    def all_reduce(self, tensor):
        if self.world_size > 1:
            import torch.distributed as dist

            with _peers():
                dist.all_reduce(tensor)
        return tensor

    def reduce(self, parameters, weight):
        if self.world_size == 1:
            return
        groups: dict[tuple, list] = {}
        for parameter in parameters:
            sparse = getattr(parameter, "_bigdl_sparse", False)
            groups.setdefault((parameter.dtype, parameter.device, sparse), []).append(parameter)
        for key, members in groups.items():
            if key[2]:
                self._reduce_sparse(members, weight)
                continue
            buckets = self._buckets.get(key)
            if buckets is None or not buckets.holds(members):
                buckets = self._buckets[key] = FlatBuckets(members)
            with _peers():
                buckets.reduce(weight)

    def _reduce_sparse(self, members, weight):
        import torch
        import torch.distributed as dist

        for parameter in members:
            if parameter.grad is None:
                size = parameter.shape
                indices = torch.zeros((1, 0), dtype=torch.int64)
                values = torch.zeros((0, *size[1:]), dtype=parameter.dtype)
                gradient = torch.sparse_coo_tensor(indices, values, size).coalesce()
            else:
                gradient = (parameter.grad * weight).coalesce()
            with _peers():
                dist.all_reduce(gradient)
            parameter.grad = gradient.coalesce()


class FlatBuckets:
    """One flat buffer for the gradients of `parameters`, reduced in buckets that overlap copying.

    The last ``len(parameters)`` elements say which parameters have a gradient on some rank.
    """

    def __init__(self, parameters):
        import torch

        self._parameters = list(parameters)
        sizes = [p.numel() for p in self._parameters]
        first = self._parameters[0]
        total = sum(sizes)
        self._flat = torch.zeros(total + len(sizes), dtype=first.dtype, device=first.device)
        self._flags = self._flat[total:]
        self._views, start = [], 0
        for parameter, size in zip(self._parameters, sizes, strict=True):
            self._views.append(self._flat[start : start + size].view(parameter.shape))
            start += size

    def holds(self, parameters) -> bool:
        """Whether these are the parameters that the buffer was made for."""
        return len(parameters) == len(self._parameters) and all(
            a is b for a, b in zip(parameters, self._parameters, strict=True)
        )

    def reduce(self, weight: float) -> None:
        import torch
        import torch.distributed as dist

        flags, works, start, filled = [], [], 0, 0
        with torch.no_grad():
            for parameter, view in zip(self._parameters, self._views, strict=True):
                gradient = parameter.grad
                flags.append(0.0 if gradient is None or weight == 0 else 1.0)
                if flags[-1]:
                    torch.mul(gradient, weight, out=view)
                else:
                    view.zero_()
                filled += view.numel()
                if filled - start >= _BUCKET:
                    works.append(dist.all_reduce(self._flat[start:filled], async_op=True))
                    start = filled
            self._flags.copy_(torch.tensor(flags, dtype=self._flat.dtype))
            works.append(dist.all_reduce(self._flat[start:], async_op=True))
            for work in works:
                work.wait()
            present = (self._flags > 0).tolist()
            for parameter, view, here in zip(self._parameters, self._views, present, strict=True):
                if not here:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = view.clone()
                else:
                    parameter.grad.copy_(view)


def _bytes_tensor(data):
    import numpy as np
    import torch

    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))


@contextlib.contextmanager
def _peers():
    """Say what a RuntimeError of a collective means: another worker went away."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error).split("\n")[0]) from error


@contextlib.contextmanager
def _interface(host: str):
    """Let gloo use the network interface of `host` for the time of the block."""
    import psutil

    name = next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if any(a.address.partition("%")[0] == host for a in addresses)
        ),
        None,
    )
    previous = os.environ.get("GLOO_SOCKET_IFNAME")
    if name and previous is None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        if previous is None:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
