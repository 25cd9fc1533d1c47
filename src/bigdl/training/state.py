"""State of a training in a process: device and precision, random generators, changing state.

Bytes of it are those of ``torch.save`` and load with ``weights_only=True``.
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
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    import torch

    from bigdl.runtime.collectives.base import GradientSync
    from bigdl.runtime.worker import Worker


def dumps(value: Any) -> bytes:
    """Tensors and plain containers as the bytes of ``torch.save``; all tensors on the CPU."""
    import torch

    buffer = io.BytesIO()
    torch.save(to_cpu(value) if torch.cuda.is_available() else value, buffer)
    return buffer.getvalue()


_LOADING = threading.Lock()


def loads(data: bytes) -> Any:
    """The inverse of :func:`dumps`; runs no code of the data.

    Beside what ``torch.load(weights_only=True)`` takes there may be values of NumPy and of a few
    types of Python's own library.

    Raises
    ------
    UsageError
        If there is an object of another type.
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
                    f"The state of the model, its optimizer or schedule holds {what}, and a state "
                    "is loaded without running code: let it hold tensors, NumPy arrays, numbers, "
                    "strings, and lists and dicts of them",
                    code="model-copy",
                ) from error


@functools.cache
def _plain_types() -> list[Any]:
    """Return what builds NumPy's values, and classes whose objects are values."""
    builders = [np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0], _codecs.encode]
    dtypes = [type(np.dtype(code)) for code in np.typecodes["All"]]
    values = [
        *(set, frozenset, complex, range, slice, bytearray, int, float, str, list, dict, bool),
        *(collections.defaultdict, collections.deque, collections.Counter),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
        *(decimal.Decimal, fractions.Fraction),
    ]
    return [*builders, np.ndarray, np.dtype, *dict.fromkeys(dtypes), *values]


def seed_everything(seed: int, rank: int = 0) -> int:
    """Seed torch, numpy and random; ranks draw different numbers. Returns their seed."""
    import torch

    mixed = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    torch.manual_seed(mixed)
    np.random.seed(mixed)
    random.seed(mixed)
    return mixed


@contextlib.contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Run a block under a seed and leave the random generators of the process as they were."""
    before = capture_rng()
    try:
        seed_everything(seed)
        yield
    finally:
        restore_rng(before)


def mixed_seed(*values: int) -> int:
    """Return a seed of 63 bits that depends on all of the numbers."""
    return int(np.random.SeedSequence(values).generate_state(1, np.uint64)[0] >> np.uint64(1))


def capture_rng() -> dict[str, Any]:
    """The state of the random generators of torch, numpy and random."""
    import torch

    _, keys, position, has_gauss, cached = cast("tuple[Any, ...]", np.random.get_state())
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": [torch.from_numpy(keys.astype("int64")), position, has_gauss, cached],
        "random": random.getstate(),
    }


def restore_rng(state: dict[str, Any]) -> None:
    """The inverse of :func:`capture_rng`."""
    import torch

    torch.set_rng_state(state["torch"])
    if state.get("cuda") is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    keys, *rest = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype("uint32"), *rest))
    random.setstate(state["random"])


class RunningState(ABC):
    """State that layers change besides the weights, merged over the workers at every epoch's end.

    A floating value becomes the mean over the workers, weighted by the rows that each has seen
    since the last merge; an integer one (a counter) becomes the largest.  A value that no worker
    has changed, such as a mask or a positional encoding, is left alone to the last bit.

    Parameters
    ----------
    model : torch.nn.Module or keras.Model
        Of equal values on all ranks.
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
        """Count rows and changes from the values as they are now, equal on all ranks."""
        self.rows = 0
        self._merged = self.own()

    @abstractmethod
    def own(self) -> list[Any]:
        """A copy of this worker's values, as tensors."""

    @abstractmethod
    def put(self, values: list[Any]) -> None:
        """Set this worker's values, e.g. to what :meth:`own` gave."""

    def merge(self) -> None:
        """Make the values of all workers equal; a collective."""
        self.put(self._merge())
        self.restart()

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """Have merged values for the time of the block; a collective.

        What a checkpoint holds does not depend on when it is taken, and to take it does not change
        the run.
        """
        own = self.own()
        self.put(self._merge())
        try:
            yield
        finally:
            self.put(own)

    def _merge(self) -> list[Any]:
        import torch

        values = self.own()
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
            # what a worker without rows has may be anything, a nan included
            part = value * share if share else torch.zeros_like(value)
            values[i] = self._sync.all_reduce(part.contiguous())
        return values


_PRECISIONS: dict[Any, str] = {
    **dict.fromkeys((None, "fp32", "32", 32, "32-true"), "fp32"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16"),
}


def check_precision(precision: str | int | None) -> str:
    """``"fp32"`` or ``"bf16"`` from what ``precision=`` accepts."""
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
    """The device of a task that knows nothing of others: a GPU if its machine has one.

    The GPU is the one that Spark has assigned, else the partitions take the machine's in turn, and
    processes that are no tasks of Spark by their numbers.
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
    """The GPU that Spark gave this task, where it schedules them."""
    context = _spark_task()
    resource = context.resources().get("gpu") if context is not None else None
    if resource is None or not resource.addresses:
        return None
    address = resource.addresses[0]
    # behind CUDA_VISIBLE_DEVICES the numbers are others
    return int(address) if address.isdigit() and int(address) < count else None


def _spark_task() -> Any:
    """The TaskContext of this process, if it runs a task of Spark."""
    pyspark = sys.modules.get("pyspark")
    return None if pyspark is None else pyspark.TaskContext.get()


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


def _moved(value: Any, device: torch.device | str) -> Any:
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
