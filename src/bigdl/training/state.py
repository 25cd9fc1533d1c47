"""State of a training process: device, precision, random generators and running layer state.

Serialized state is written by ``torch.save`` and loads with ``weights_only=True``.
"""

from __future__ import annotations

import _codecs
import collections
import contextlib
import datetime
import decimal
import fractions
import functools
import io
import os
import pickle
import random
import re
import socket
import sys
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    import torch
    from pyspark import TaskContext

    from bigdl.runtime.collectives.base import GradientSync
    from bigdl.runtime.worker import Worker

T = TypeVar("T")


def dumps(value: object) -> bytes:
    """Serialize tensors and plain containers with ``torch.save``, with all tensors on the CPU."""
    import torch

    buffer = io.BytesIO()
    torch.save(to_cpu(value) if torch.cuda.is_available() else value, buffer)
    return buffer.getvalue()


_LOADING = threading.Lock()


def loads(data: bytes) -> Any:  # tensors, numbers and containers
    """Deserialize bytes of :func:`dumps` without running code from the data.

    In addition to what ``torch.load(weights_only=True)`` accepts, the data may contain NumPy values
    and a few types of Python's standard library.

    Raises
    ------
    UsageError
        If the data contains an object of another type.
    """
    import torch

    load = functools.partial(torch.load, map_location="cpu", weights_only=True)
    try:
        return load(io.BytesIO(data))
    except pickle.UnpicklingError:
        pass
    with _LOADING:
        known = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([g for g in _plain_types() if g not in known]):
            try:
                return load(io.BytesIO(data))
            except pickle.UnpicklingError as error:
                name = re.search(r"GLOBAL (\S+)", str(error))
                what = name.group(1) if name else "an object that torch.load refuses"
                raise UsageError(
                    f"The state of the model, its optimizer or schedule holds {what}, which cannot "
                    "be loaded without running code: let it hold only tensors, NumPy arrays, "
                    "numbers, strings, and lists and dicts of them",
                    code="model-copy",
                ) from error


@functools.cache
def _plain_types() -> list[Any]:
    """Return NumPy's constructors and the value types that may be loaded safely."""
    builders = [np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0], _codecs.encode]
    dtypes = [type(np.dtype(code)) for code in np.typecodes["All"]]
    values = [
        *(
            set,
            frozenset,
            complex,
            range,
            slice,
            bytes,
            bytearray,
            int,
            float,
            str,
            list,
            dict,
            bool,
        ),
        *(collections.defaultdict, collections.deque, collections.Counter),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
        *(decimal.Decimal, fractions.Fraction),
    ]
    return [*builders, np.ndarray, np.dtype, *dict.fromkeys(dtypes), *values]


def seed_everything(seed: int, rank: int = 0, *, cpu_only: bool = False) -> int:
    """Seed torch, NumPy and random, differently on each rank; return the derived seed.

    With `cpu_only` the generators of accelerators keep their states. This takes 10 us, while
    ``torch.manual_seed`` formats the call stack, 0.5 ms, until CUDA is initialized.
    """
    import torch

    mixed = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    if cpu_only:
        torch.default_generator.manual_seed(mixed)
    else:
        torch.manual_seed(mixed)
    np.random.seed(mixed)
    random.seed(mixed)
    return mixed


@contextlib.contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Context manager that seeds the random generators and restores their states on exit."""
    before = capture_rng()
    try:
        seed_everything(seed)
        yield
    finally:
        restore_rng(before)


def mixed_seed(*values: int) -> int:
    """Derive a 63-bit seed from several numbers."""
    return int(np.random.SeedSequence(values).generate_state(1, np.uint64)[0] >> np.uint64(1))


def capture_rng() -> dict[str, Any]:
    """Return the state of the random generators of torch, NumPy and random."""
    import torch

    _, keys, position, has_gauss, cached = cast("tuple[Any, ...]", np.random.get_state())
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": [torch.from_numpy(keys.astype("int64")), position, has_gauss, cached],
        "random": random.getstate(),
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Restore the state that :func:`capture_rng` returned."""
    import torch

    torch.set_rng_state(state["torch"])
    if state.get("cuda") is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    keys, *rest = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype("uint32"), *rest))
    random.setstate(state["random"])


class RunningState(ABC):
    """Layer state that is updated without gradients, and merged over the workers every epoch.

    A floating-point value becomes the mean over the workers, weighted by the rows that each has
    seen since the last merge. An integer (a counter) becomes the maximum. A value that no worker
    changed, such as a mask or a positional encoding, stays bitwise the same.

    Parameters
    ----------
    model : torch.nn.Module or keras.Model
        Model with equal values on all ranks.
    sync : GradientSync

    Attributes
    ----------
    rows : int
        Rows that this worker has seen since the last merge; the loop adds to it.
    """

    def __init__(self, model: Any, sync: GradientSync):
        self._model, self._sync = model, sync
        self.restart()

    def restart(self) -> None:
        """Reset the row count and the reference values; all ranks must have equal values."""
        self.rows = 0
        self._merged = self.local_values()

    def reset(self) -> None:
        """Return to the values after the last merge."""
        self.put([value.clone() for value in self._merged])
        self.restart()

    @abstractmethod
    def local_values(self) -> list[Any]:
        """Return copies of this worker's values as tensors."""

    @abstractmethod
    def put(self, values: list[Any]) -> None:
        """Set this worker's values, as returned by :meth:`local_values`."""

    def merge(self) -> None:
        """Make the values of all workers equal; a collective operation."""
        self.put(self._merge())
        self.restart()

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """Context manager that sets merged values, then restores local ones (collective operation).

        So a checkpoint has merged values, and taking it does not change the run.
        """
        local = self.local_values()
        self.put(self._merge())
        try:
            yield
        finally:
            self.put(local)

    def _merge(self) -> list[Any]:
        import torch

        values = self.local_values()
        if self._sync.world_size == 1 or not values:
            return values
        changed = [float(not torch.equal(a, b)) for a, b in zip(values, self._merged, strict=True)]
        workers = self._sync.all_gather([float(self.rows), *changed])
        rows = sum(row[0] for row in workers)
        for i, value in enumerate(values):
            if not any(row[1 + i] for row in workers):
                continue
            if not (value.is_floating_point() or value.is_complex()):
                wide = torch.uint8 if value.dtype == torch.bool else torch.int64
                values[i] = self._sync.all_reduce(value.to(wide), "max").to(value.dtype)
                continue
            share = self.rows / rows if rows else 1.0 / len(workers)
            # the values of a worker without rows may be invalid, such as nan
            part = value * share if share else torch.zeros_like(value)
            values[i] = self._sync.all_reduce(part.contiguous())
        return values


_PRECISIONS: dict[Any, str] = {
    **dict.fromkeys((None, "fp32", "32", 32, "32-true"), "fp32"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16"),
}


def check_precision(precision: str | int | None) -> str:
    """Convert an accepted value of ``precision=`` to ``"fp32"`` or ``"bf16"``."""
    try:
        return _PRECISIONS[precision]
    except (KeyError, TypeError):
        raise UsageError(
            f'precision should be "fp32" or "bf16", got {precision!r}',
            code="argument-value",
            argument="precision",
            allowed=["fp32", "bf16"],
        ) from None


def precision_of(
    name: str, device: torch.device
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a factory of context managers for forward passes in a precision."""
    if name == "fp32":
        return contextlib.nullcontext
    import torch

    return functools.partial(torch.autocast, device.type, dtype=torch.bfloat16)


def device_of(worker: Worker, sync: GradientSync) -> torch.device:
    """Return a worker's device: a GPU if every worker has one, else the CPU (collective operation).

    The workers of a machine share its GPUs evenly, unless Spark has assigned them. With the option
    ``use_gpu=False`` of the attempt, all use the CPU.
    """
    import torch

    may_use = worker.options.get("use_gpu", True)
    count = torch.cuda.device_count() if may_use and torch.cuda.is_available() else 0
    machine = float(zlib.crc32(socket.gethostname().encode()))
    assigned = _assigned_gpu(count) if count else None
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
    """Return the device of an independent task: a GPU if its machine has one, else the CPU.

    The GPU is the one that Spark has assigned. Otherwise the partition id selects it, or outside
    Spark the process id.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return torch.device("cpu")
    index = _assigned_gpu(count)
    if index is None:
        context = _spark_task()
        index = (os.getpid() if context is None else context.partitionId()) % count
    return torch.device("cuda", index)


def _assigned_gpu(count: int) -> int | None:
    """Return the index of the GPU that Spark assigned to this task, or None."""
    context = _spark_task()
    resource = context.resources().get("gpu") if context is not None else None
    if resource is None or not resource.addresses:
        return None
    address = resource.addresses[0]
    # with CUDA_VISIBLE_DEVICES the process sees other indices
    return int(address) if address.isdigit() and int(address) < count else None


def _spark_task() -> TaskContext | None:
    """Return the TaskContext if this process runs a Spark task, else None."""
    pyspark = sys.modules.get("pyspark")
    return None if pyspark is None else pyspark.TaskContext.get()


def move(built: Any, device: torch.device) -> None:  # built: parts of the framework
    """Move a model, its criterion and its optimizer state from the CPU to a device."""
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


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer in the order of their numbers in its state dict."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def to_device(value: T, device: torch.device) -> T:
    """Move the tensors in nested lists, tuples and dicts to a device."""
    return value if device.type == "cpu" else _moved(value, device)


def to_cpu(value: T) -> T:
    """Move the tensors in nested lists, tuples and dicts to the CPU."""
    return _moved(value, "cpu")


def _moved(value: T, device: torch.device | str) -> T:
    import torch

    result: Any = value
    if isinstance(result, torch.Tensor):
        result = result.to(device)
    elif isinstance(result, tuple) and hasattr(result, "_fields"):
        result = type(result)(*(_moved(v, device) for v in result))
    elif type(result) in (list, tuple):
        result = type(result)(_moved(v, device) for v in result)
    elif type(result) is dict:
        result = {key: _moved(v, device) for key, v in result.items()}
    return cast("T", result)
