"""Device of a worker, and precision of its forward passes."""

from __future__ import annotations

import contextlib
import functools
import socket
import sys
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    import torch

    from bigdl.runtime.collectives.base import GradientSync
    from bigdl.runtime.worker import Worker

__all__ = [
    "check_precision",
    "device_of",
    "device_of_task",
    "move",
    "precision_of",
    "to_cpu",
    "to_device",
]

_PRECISIONS = {
    None: "fp32",
    "fp32": "fp32",
    "32": "fp32",
    32: "fp32",
    "32-true": "fp32",
    "bf16": "bf16",
    "bf16-mixed": "bf16",
}


def check_precision(precision: str | int | None) -> str:
    """``"fp32"`` or ``"bf16"`` from what ``precision=`` accepts."""
    try:
        return _PRECISIONS[precision]
    except (KeyError, TypeError):
        raise UsageError(f'precision should be "fp32" or "bf16", got {precision!r}') from None


def precision_of(
    name: str, device: torch.device
) -> Callable[[], contextlib.AbstractContextManager]:
    """Return a function that makes the context of a forward pass."""
    if name == "fp32":
        return contextlib.nullcontext
    import torch

    return functools.partial(torch.autocast, device.type, dtype=torch.bfloat16)


def device_of(worker: Worker, sync: GradientSync) -> torch.device:
    """The device of a worker: a GPU if every worker has one, else the CPU; a collective.

    The workers of a machine share its GPUs evenly, unless Spark has assigned them, or the option
    ``use_gpu`` of the attempt is False.
    """
    import torch

    may_use = worker.options.get("use_gpu", True)
    count = torch.cuda.device_count() if may_use and torch.cuda.is_available() else 0
    machine = float(zlib.crc32(socket.gethostname().encode()))
    assigned = _assigned_gpu(count)
    this_worker = [machine, float(count), -1.0 if assigned is None else float(assigned)]
    workers = sync.all_gather(this_worker)
    if not all(row[1] for row in workers):
        return torch.device("cpu")
    before: dict[float, int] = {}
    chosen = []
    for name, gpus, assigned_index in workers:
        index = before.get(name, 0)
        before[name] = index + 1
        chosen.append((name, int(assigned_index) if assigned_index >= 0 else index % int(gpus)))
    device = torch.device("cuda", chosen[worker.rank][1])
    sync.use_device(device, is_alone=len(set(chosen)) == len(chosen))
    return device


def device_of_task() -> torch.device:
    """The device of a Spark task that knows nothing of others: a GPU if its machine has one.

    The GPU is the one that Spark has assigned, else the partitions take the machine's in turn.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return torch.device("cpu")
    index = _assigned_gpu(count)
    if index is None:
        from pyspark import TaskContext

        context = TaskContext.get()
        index = (0 if context is None else context.partitionId()) % count
    return torch.device("cuda", index)


def _assigned_gpu(count: int) -> int | None:
    """The GPU that Spark gave this task, where it schedules them."""
    pyspark = sys.modules.get("pyspark")
    context = pyspark.TaskContext.get() if pyspark is not None else None
    resource = context.resources().get("gpu") if context is not None else None
    if resource is None or not resource.addresses:
        return None
    address = resource.addresses[0]
    # behind CUDA_VISIBLE_DEVICES the numbers are others
    return int(address) if address.isdigit() and int(address) < count else None


def move(built: Any, device: torch.device) -> None:
    """Bring the parts of a training to a device; the CPU is where they are made."""
    if device.type == "cpu":
        return
    import torch

    built.model.to(device)
    if isinstance(built.criterion, torch.nn.Module):
        built.criterion.to(device)
    for parameter, state in built.optimizer.state.items() if built.optimizer is not None else ():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:  # step counters may stay
                state[key] = value.to(parameter.device)


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors in lists, tuples and dicts on a device; everything else as it is."""
    return value if device.type == "cpu" else _moved(value, device)


def to_cpu(value: Any) -> Any:
    """Tensors in lists, tuples and dicts on the CPU; what is there already is not copied."""
    return _moved(value, "cpu")


def _moved(value, device):
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(v, device) for v in value))
    if type(value) in (list, tuple):
        return type(value)(_moved(v, device) for v in value)
    if type(value) is dict:
        return {key: _moved(v, device) for key, v in value.items()}
    return value
