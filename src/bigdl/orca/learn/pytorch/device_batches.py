"""Training batches on the device, prefetched for a GPU."""

from __future__ import annotations

import copy
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from bigdl.training.state import to_device

if TYPE_CHECKING:
    import numpy as np
    import torch

    from bigdl.common.types import Tensors
    from bigdl.runtime.shards.batches import BatchPlan
    from bigdl.runtime.worker import Worker
    from bigdl.training.batches import BatchSource

AHEAD_BYTES = 1 << 20
"""Smallest batch, in bytes, to prefetch; for smaller batches the thread handover costs more."""


class DeviceBatches:
    """A worker's training batches as tensors on a device.

    On a GPU, a thread prefetches the next batch if the source can read ahead: it gathers the rows,
    copies them to pinned memory, and from there to the device on a separate CUDA stream.

    Parameters
    ----------
    data : BatchSource
    device : torch.device
    worker : Worker
        The worker that reads the batches; the thread ends when it exits.

    Attributes
    ----------
    moved_s : float
        Seconds of copies to the device that were not prefetched.
    """

    def __init__(self, data: BatchSource, device: torch.device, worker: Worker):
        self._data, self._device, self._rank = data, device, worker.rank
        self.moved_s = 0.0
        self._threads: ThreadPoolExecutor | None = None
        # (step, start, stop), row order, batch
        self._next: tuple[tuple[int, int, int], Any, Future] | None = None
        if device.type != "cpu" and data.can_read_ahead:
            import torch

            self._stream = torch.cuda.Stream(device)
            self._threads = ThreadPoolExecutor(1, "bigdl-batches")
            worker.at_exit(self._threads.shutdown)

    def get(
        self, step: int, start: int, stop: int, plan: BatchPlan, order: np.ndarray | None
    ) -> Tensors:
        """Return the batch of a step: rows `start` to `stop` of this worker's row order."""
        ahead, self._next = self._next, None
        if ahead is not None and ahead[0] == (step, start, stop) and ahead[1] is order:
            batch = self._receive(ahead[2])
        else:
            loaded = self._data.batch(start, stop, order)
            started = time.perf_counter()
            batch = to_device(loaded, self._device)
            self.moved_s += time.perf_counter() - started
        if self._threads is not None and step + 1 < plan.steps and _size(batch) >= AHEAD_BYTES:
            # copy the plan: reading a batch changes its state
            start, stop, _ = copy.copy(plan).batch(step + 1, self._rank)
            if stop > start:
                pending = self._threads.submit(self._prefetch, start, stop, order)
                self._next = (step + 1, start, stop), order, pending
        return batch

    def _prefetch(
        self, start: int, stop: int, order: np.ndarray | None
    ) -> tuple[Any, torch.cuda.Event]:
        import torch
        from torch.utils._pytree import tree_map_only

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            batch = self._data.batch(start, stop, order)
            pinned = tree_map_only(torch.Tensor, torch.Tensor.pin_memory, batch)
            moved = tree_map_only(
                torch.Tensor, lambda each: each.to(self._device, non_blocking=True), pinned
            )
            return moved, self._stream.record_event()

    def _receive(self, future: Future) -> Tensors:
        import torch
        from torch.utils._pytree import tree_iter

        batch, copied = future.result()
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied)
        for each in tree_iter(batch):
            if isinstance(each, torch.Tensor):
                each.record_stream(stream)  # the memory belongs to the prefetch stream
        return batch


def _size(batch: Tensors) -> int:
    """Return the total bytes of a batch's tensors."""
    import torch
    from torch.utils._pytree import tree_iter

    return sum(each.nbytes for each in tree_iter(batch) if isinstance(each, torch.Tensor))
