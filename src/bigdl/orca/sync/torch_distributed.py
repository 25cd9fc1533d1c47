"""Gradients meet by ``torch.distributed``: one flat buffer per dtype, cut in buckets.

For a loss that is a mean of per-sample terms, a rank with n of the batch's N rows contributes
``n / N`` times its gradient, so the sum is the gradient of one process on the whole batch, also in
an uneven step and when a rank has no rows.  (DistributedDataParallel divides by the world size
instead.)
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta

from bigdl.common.errors import UsageError
from bigdl.orca.engine.base import PeerLost
from bigdl.orca.sync.base import GradientSync

__all__ = ["FlatBuckets", "TorchDistributedSync"]

_BUCKET = 4 << 20  # elements of one all-reduce
_NONE, _SPARSE, _DENSE = 0, 1, 2  # what a rank has as gradient of a parameter


class TorchDistributedSync(GradientSync):
    """A process group over the job's channel: gloo, and nccl for workers with a GPU each.

    Parameters
    ----------
    worker : bigdl.orca.engine.worker.Worker
    """

    def __init__(self, worker):
        self._worker = worker
        self.rank = worker.rank
        self.world_size = worker.world_size
        self._started = False
        self._groups = _Groups([], [])
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
        self._groups, self._gpus = _Groups([], []), None
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
        length = int(size)
        if length <= 0:
            return None if length < 0 else b""
        buffer = _bytes_tensor(data) if self.rank == 0 else torch.empty(length, dtype=torch.uint8)
        with _peers():
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
        if self.rank:
            if data:
                with _peers():
                    dist.send(_bytes_tensor(data), 0)
            return None
        out = [data]
        for rank in range(1, self.world_size):
            buffer = torch.empty(sizes[rank], dtype=torch.uint8)
            if sizes[rank]:
                with _peers():
                    dist.recv(buffer, rank)
            out.append(buffer.numpy().tobytes())
        return out

    def all_reduce(self, tensor, operation="sum"):
        if self.world_size > 1:
            import torch.distributed as dist

            how = dist.ReduceOp.MAX if operation == "max" else dist.ReduceOp.SUM
            with _peers():
                dist.all_reduce(tensor, how, group=self._gpus if tensor.is_cuda else None)
        return tensor

    def reduce(self, parameters, weight, may_be_sparse=()):
        if self.world_size == 1:
            return
        if not self._groups.are_of(parameters):
            self._groups = _Groups(parameters, may_be_sparse, self._gpus)
        for buckets in self._groups.dense:
            buckets.reduce(weight)
        if self._groups.sparse:
            self._reduce_sparse(self._groups.sparse, weight)

    def _reduce_sparse(self, parameters, weight):
        """The ranks first tell each other what they have, so that they agree on the layout."""
        import torch.distributed as dist

        own = [_layout(p.grad) if weight else _NONE for p in parameters]
        for parameter, kinds in zip(
            parameters, zip(*self.all_gather(own), strict=True), strict=True
        ):
            kind = int(max(kinds))
            if kind == _NONE:
                parameter.grad = None
                continue
            gradient = _weighted(parameter, weight, dense=kind == _DENSE)
            with _peers():
                dist.all_reduce(gradient)
            parameter.grad = gradient if kind == _DENSE else gradient.coalesce()


class _Groups:
    """The parameters of a model, sorted by how their gradients are reduced; made once."""

    def __init__(self, parameters, may_be_sparse, gpus=None):
        sparse = {id(p) for p in may_be_sparse}
        self._ids = tuple(map(id, parameters))
        self.sparse = [p for p in parameters if id(p) in sparse]
        kinds: dict[tuple, list] = {}
        for parameter in parameters:
            if id(parameter) not in sparse:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self.dense = [
            FlatBuckets(members, gpus if device.type == "cuda" else None)
            for (_, device), members in kinds.items()
        ]

    def are_of(self, parameters) -> bool:
        """Whether it was made of these very parameters; an optimizer may be given more later."""
        return tuple(map(id, parameters)) == self._ids


class FlatBuckets:
    """One flat buffer for the gradients of `parameters`, reduced in buckets that overlap copying.

    The last ``len(parameters)`` elements say on how many ranks each parameter has a gradient.
    """

    def __init__(self, parameters, group=None):
        import torch

        self._group = group
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

    def reduce(self, weight: float) -> None:
        """Do :meth:`GradientSync.reduce` for these parameters."""
        import torch

        flags, works, start, filled = [], [], 0, 0
        with torch.no_grad():
            for parameter, view in zip(self._parameters, self._views, strict=True):
                gradient = parameter.grad if weight else None
                flags.append(0.0 if gradient is None else 1.0)
                if gradient is None:
                    view.zero_()
                else:
                    _check_dense(gradient, parameter)
                    torch.mul(gradient, weight, out=view)
                filled += view.numel()
                if filled - start >= _BUCKET:
                    works.append(_start_sum(self._flat[start:filled], self._group))
                    start = filled
            self._flags.copy_(torch.tensor(flags, dtype=self._flat.dtype))
            works.append(_start_sum(self._flat[start:], self._group))
            with _peers():
                for work in works:
                    work.wait()
            present = (self._flags != 0).tolist()
            for parameter, view, here in zip(self._parameters, self._views, present, strict=True):
                if not here:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = view.clone()
                else:
                    parameter.grad.copy_(view)


def _start_sum(tensor, group):
    import torch.distributed as dist

    with _peers():
        return dist.all_reduce(tensor, async_op=True, group=group)


def _check_dense(gradient, parameter):
    import torch

    if gradient.layout != torch.strided:
        raise UsageError(
            f"A parameter of shape {tuple(parameter.shape)} has a sparse gradient, but no module "
            "such as nn.Embedding(sparse=True) says that it may; use such a module, or dense "
            "gradients"
        )


def _layout(gradient) -> int:
    if gradient is None:
        return _NONE
    return _SPARSE if gradient.is_sparse else _DENSE


def _weighted(parameter, weight, *, dense):
    """`weight` times a parameter's gradient, in a layout that all ranks agreed on."""
    import torch

    gradient = parameter.grad if weight else None
    if gradient is not None:
        scaled = gradient.detach() * weight
        if scaled.is_sparse:
            return scaled.to_dense() if dense else scaled.coalesce()
        return scaled.contiguous()
    if dense:
        return torch.zeros_like(parameter.detach(), memory_format=torch.contiguous_format)
    indices = torch.zeros((1, 0), dtype=torch.int64)
    values = torch.zeros((0, *parameter.shape[1:]), dtype=parameter.dtype)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def _bytes_tensor(data):
    import numpy as np
    import torch

    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))


@contextlib.contextmanager
def _peers():
    """Say what a RuntimeError of a collective means: another worker went away.

    Nothing else belongs in the block: a fault of ours or of the model would be retried.
    """
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
