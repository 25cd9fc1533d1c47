"""Pools of persistent worker processes that run functions in pipeline stages.

Unlike the workers of :mod:`bigdl.runtime.launch`, they stay alive: a model is loaded once and
called many times.

A :class:`WorkerPool` has one or several stages, each with workers that hold the same function.
:meth:`WorkerPool.run` feeds items to the first stage, passes each result on to the next stage
without decoding it, and returns the results of the last stage in the order of the items. A worker
processes one item at a time; the next item is already encoded. A stage waits for a slower
successor.

When a call fails, items in flight are finished, and the pool can be used again. A lost worker is
replaced at the next run.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bigdl.common.errors import UsageError, WorkerError, WorkerLost
from bigdl.common.timeouts import POOL_GRACE_S
from bigdl.runtime.messages import PickledMessage, encoded
from bigdl.runtime.process import CpuSlot, WorkerProcess

__all__ = ["CpuSlot", "PoolStage", "PoolWorker", "TaskError", "WorkerManager", "WorkerPool"]


@dataclass(frozen=True)
class PoolStage:
    """A pipeline stage: workers that run the same function.

    Attributes
    ----------
    name : str
        Name of the stage in messages.
    make : callable
        Called once in each worker without arguments; returns the function of one item. It is sent
        by ``cloudpickle``. All workers map its arrays and tensors, so they are in memory once
        until a worker writes to them.
    slots : sequence of CpuSlot
        CPU slots; one worker runs on each.
    """

    name: str
    make: Callable[[], Callable[[Any], Any]]
    slots: Sequence[CpuSlot]


class TaskError(WorkerError):
    """Raised when the function of a pipeline stage raises an exception.

    Attributes
    ----------
    stage : str
        Name of the stage.
    item : int or None
        Index of the item; None if the function could not be created.
    rank : int
        Number of the worker in its stage.
    kind, traceback : str
        Class name and worker traceback of the exception.
    original : Exception or None
        The exception, if it could be pickled.
    """

    def __init__(
        self,
        stage: str,
        item: int | None,
        rank: int,
        error_type: str,
        traceback: str,
        original: BaseException | None = None,
    ):
        super().__init__(rank, error_type, traceback, original)
        self.stage = stage
        self.item = item

    @property
    def last_line(self) -> str:
        """The traceback's last line: class and message of the exception."""
        return self.traceback.rstrip().rpartition("\n")[2]

    def __reduce__(self) -> tuple[Any, ...]:
        content = (self.stage, self.item, self.rank, self.kind, self.traceback)
        return type(self), content


class PoolWorker(WorkerProcess):
    """A worker process of one pipeline stage."""

    def __init__(self, stage: int, rank: int, slot: CpuSlot, make: PickledMessage):
        super().__init__(rank, slot, make)
        self.stage = stage


class WorkerManager:
    """Manager that starts and replaces the worker processes of a pool.

    Attributes
    ----------
    workers : list of list of PoolWorker
        Workers of each stage.
    """

    def __init__(self, stages: Sequence[PoolStage], error: type[TaskError]):
        self._error = error
        self._owner = os.getpid()
        self._functions: list[PickledMessage] = []
        self._stages = list(stages)
        self.workers: list[list[PoolWorker]] = [[] for _ in stages]
        try:
            for stage in stages:
                self._functions.append(encoded(stage.make, f"The function of {stage.name}"))
        except BaseException:
            self.end()
            raise

    def all_workers(self) -> Iterator[PoolWorker]:
        """Yield the workers of all stages."""
        return (worker for workers in self.workers for worker in workers)

    def fill(self) -> None:
        """Start missing workers and wait until they are ready."""
        self._start(
            [
                (stage, rank)
                for stage, each in enumerate(self._stages)
                for rank in range(len(each.slots))
                if rank >= len(self.workers[stage]) or self.workers[stage][rank].has_ended()
            ]
        )

    def replace(self, worker: PoolWorker) -> PoolWorker:
        """Start and return a replacement for a dead worker."""
        return self._start([(worker.stage, worker.rank)])[0]

    def task_error(self, worker: PoolWorker, item: int | None, error: WorkerError) -> TaskError:
        """Convert the error of a worker's function to a TaskError."""
        stage = self._stages[worker.stage].name
        task_error = self._error(
            stage, item, worker.rank, error.kind, error.traceback, error.original
        )
        task_error.__cause__ = error.original
        return task_error

    def loss(self, worker: PoolWorker) -> WorkerLost:
        """End a disconnected worker and return its WorkerLost error."""
        worker.end(POOL_GRACE_S)
        name = f"worker {worker.rank} of {self._stages[worker.stage].name}"
        return WorkerLost(f"{name} {worker.exit_message()}; the next call starts a new one")

    def end(self) -> None:
        """End all workers of the pool."""
        if os.getpid() != self._owner:
            return  # only the process that started them ends them
        for worker in self.all_workers():
            worker.hang_up()
        deadline = time.monotonic() + POOL_GRACE_S
        for worker in self.all_workers():
            worker.end(max(0.0, deadline - time.monotonic()))
        for function in self._functions:
            function.close()

    def _start(self, stage_ranks: Sequence[tuple[int, int]]) -> list[PoolWorker]:
        """Start the workers of (stage, rank) pairs concurrently and wait until they are ready."""
        workers: list[PoolWorker] = []
        try:
            for stage, rank in stage_ranks:
                for former in self.workers[stage][rank : rank + 1]:
                    former.end()
                slot, make = self._stages[stage].slots[rank], self._functions[stage]
                worker = PoolWorker(stage, rank, slot, make)
                self.workers[stage][rank : rank + 1] = [worker]
                workers.append(worker)
            for worker in workers:
                try:
                    worker.result()
                except WorkerError as error:
                    raise self.task_error(worker, None, error) from error.original
                except EOFError:
                    raise self.loss(worker) from None
        except BaseException:
            for worker in workers:
                worker.end()
            raise
        return workers


_AHEAD = 2  # maximum waiting items per worker of a stage
_END = object()


class WorkerPool(contextlib.AbstractContextManager["WorkerPool", None]):
    """Pool of persistent worker processes with one or several pipeline stages.

    It is a context manager. Without :meth:`close`, the workers end when the pool is garbage
    collected or when the program ends or is killed.

    Parameters
    ----------
    stages : sequence of PoolStage
        In the order in which items go through them.
    error : type
        :class:`TaskError` or a subclass with another message.

    Raises
    ------
    UsageError
        If the function of a stage cannot be pickled.
    TaskError
        If the function of a stage could not be created in a worker.
    WorkerLost
        If a worker ended during the start.
    """

    def __init__(self, stages: Sequence[PoolStage], error: type[TaskError] = TaskError):
        self._lock = threading.Lock()
        self.manager = WorkerManager(stages, error)
        self._end_workers = weakref.finalize(self, self.manager.end)
        try:
            self.manager.fill()
        except BaseException:
            self._end_workers()
            raise

    @property
    def pids(self) -> list[list[int]]:
        """Process ids of the workers of each stage."""
        return [[worker.process.pid for worker in workers] for workers in self.manager.workers]

    def kill(self) -> None:
        """Kill all workers, from another thread; a running call raises WorkerLost."""
        for worker in self.manager.all_workers():
            worker.kill()

    def run(self, items: Iterable[Any]) -> list[Any]:
        """Run items through all stages and return the results in order.

        Threads that call this at the same time take turns.

        Parameters
        ----------
        items : iterable
            Consumed in this process while workers become free.

        Returns
        -------
        list
            Results of the last stage in the order of `items`.

        Raises
        ------
        TaskError
            If a function raised; the error of the first failed item.
        WorkerLost
            If a worker was killed or ended during a call. The next run starts a new worker.
        UsageError
            If the pool is closed, or an item cannot be pickled.
        """
        with self._lock:
            if not self._end_workers.alive:
                raise UsageError("The workers were closed; create a new object", code="state")
            self.manager.fill()
            run = _PipelineRun(self.manager)
            try:
                return run.results(iter(items))
            finally:
                run.close()

    def close(self) -> None:
        """End the workers of the pool; repeated calls do nothing."""
        with self._lock:
            self._end_workers()

    def __exit__(self, *exception: object) -> None:
        self.close()


class _PipelineRun:
    """One run of items through the stages of a pool."""

    def __init__(self, manager: WorkerManager):
        self.manager = manager
        self._waiting: list[deque[tuple[int, PickledMessage]]] = [deque() for _ in manager.workers]
        self._idle = [deque(workers) for workers in manager.workers]
        self._busy: dict[PoolWorker, int] = {}
        self._done: dict[int, Any] = {}
        self._failures: list[tuple[int, BaseException]] = []
        self._selector = selectors.DefaultSelector()

    def results(self, items: Iterator[Any]) -> list[Any]:
        """Process all items and return their results; raise the first item's error."""
        count, more = 0, True
        while True:
            more = more and not self._failures
            if more and not self._waiting[0]:
                more = self._queue_next(items, count)
                count += more
            self._assign()
            if not self._busy and not any(self._waiting):
                break
            self._receive(wait=bool(self._waiting[0]) or not more)
        if self._failures:
            raise min(self._failures, key=lambda failure: failure[0])[1]
        return [self._done.pop(item) for item in range(count)]

    def close(self) -> None:
        """Cancel busy workers and waiting items if the run was interrupted."""
        self._selector.close()
        for worker in self._busy:
            worker.end()
        self._drop_waiting()

    def _queue_next(self, items: Iterator[Any], number: int) -> bool:
        """Queue the next item for the first stage; return False at the end."""
        try:
            item = next(items, _END)
            if item is _END:
                return False
            self._waiting[0].append((number, encoded(item, f"Input {number}")))
        except Exception as error:  # of the user's iterable
            self._fail(number, error)
            return False
        return True

    def _assign(self) -> None:
        """Assign waiting items to idle workers, later stages first."""
        for stage in reversed(range(len(self._waiting))):
            while self._waiting[stage] and self._idle[stage] and self._has_room(stage + 1):
                item, message = self._waiting[stage].popleft()
                try:
                    self._call(self._idle[stage].popleft(), item, message)
                finally:
                    message.close()

    def _has_room(self, stage: int) -> bool:
        if stage == len(self._waiting):
            return True
        return len(self._waiting[stage]) < _AHEAD * len(self.manager.workers[stage])

    def _call(self, worker: PoolWorker, item: int, message: PickledMessage) -> None:
        self._busy[worker] = item
        try:
            worker.call(message)
        except (BrokenPipeError, ConnectionResetError):  # an idle worker was lost
            del self._busy[worker]
            try:
                worker = self.manager.replace(worker)
            except (WorkerError, WorkerLost) as error:
                self._fail(-1, error)
                return
            self._busy[worker] = item
            worker.call(message)
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def _receive(self, wait: bool) -> None:
        """Receive answers from workers."""
        for key, _ in self._selector.select(None if wait else 0):
            worker = key.data
            self._selector.unregister(worker.connection)
            try:
                answer = worker.answer()
            except EOFError:
                self._fail(self._busy.pop(worker), self.manager.loss(worker))
                continue
            # Only now: an interrupt during the answer must find the worker busy.
            item = self._busy.pop(worker)
            self._idle[worker.stage].append(worker)
            self._handle_answer(worker, item, answer)

    def _handle_answer(self, worker: PoolWorker, item: int, answer: PickledMessage) -> None:
        next_stage = worker.stage + 1
        if self._failures and not answer.failed:
            answer.close()
        elif next_stage < len(self._waiting) and not answer.failed:
            self._waiting[next_stage].append((item, answer))
        else:
            try:
                self._done[item] = worker.opened(answer)
            except WorkerError as error:
                self._fail(item, self.manager.task_error(worker, item, error))
            except Exception as error:
                self._fail(item, error)

    def _fail(self, item: int, error: BaseException) -> None:
        self._failures.append((item, error))
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        for queue in self._waiting:
            while queue:
                queue.popleft()[1].close()
