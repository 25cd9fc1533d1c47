"""Processes that stay: each holds a function, and items flow through them.

Unlike those of :mod:`bigdl.runtime.launch` its workers are kept: a model is loaded once and called
many times.

A :class:`WorkerPool` has one or several stages, each with workers that hold the same function.
:meth:`WorkerPool.run` feeds items to the first stage, passes each result on to the next stage
without opening it, and returns the results of the last in the order of the items. A worker has one
item at a time; the next item is ready when it asks. A stage whose successor is behind waits for it.

When a call fails, the items that are under way are finished, and the pool can be used again. A
worker that is lost is replaced at the next run.
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
    """Workers that hold the same function.

    Attributes
    ----------
    name : str
        For messages.
    make : callable
        Called once in each worker without arguments; returns the function of one item. It travels
        by ``cloudpickle``; the arrays and tensors in it are mapped by all workers, so that they
        are in memory once until somebody writes to them.
    slots : sequence of CpuSlot
        One worker runs on each.
    """

    name: str
    make: Callable[[], Callable[[Any], Any]]
    slots: Sequence[CpuSlot]


class TaskError(WorkerError):
    """The function of a stage raised an exception.

    Attributes
    ----------
    stage : str
        Name of the stage.
    item : int or None
        Position of the item; None if the function could not be made.
    rank : int
        Number of the worker in its stage.
    kind, traceback : str
        Class name and the worker's own traceback of the exception.
    original : Exception or None
        The exception, if it could be pickled.
    """

    def __init__(
        self,
        stage: str,
        item: int | None,
        rank: int,
        kind: str,
        traceback: str,
        original: BaseException | None = None,
    ):
        super().__init__(rank, kind, traceback, original)
        self.stage = stage
        self.item = item

    @property
    def last_line(self) -> str:
        """The last line of the traceback: class and message of the exception."""
        return self.traceback.rstrip().rpartition("\n")[2]

    def __reduce__(self) -> tuple[Any, ...]:
        content = (self.stage, self.item, self.rank, self.kind, self.traceback)
        return type(self), content


class PoolWorker(WorkerProcess):
    """A worker of a stage, by the stage's number."""

    def __init__(self, stage: int, rank: int, slot: CpuSlot, make: PickledMessage):
        super().__init__(rank, slot, make)
        self.stage = stage


class WorkerManager:
    """All workers of a pool, and what it takes to replace them.

    Attributes
    ----------
    workers : list of list of PoolWorker
        Of each stage.
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
        """Start the workers that are missing, and wait until they are ready."""
        self._start(
            [
                (stage, rank)
                for stage, each in enumerate(self._stages)
                for rank in range(len(each.slots))
                if rank >= len(self.workers[stage]) or self.workers[stage][rank].has_ended()
            ]
        )

    def replace(self, worker: PoolWorker) -> PoolWorker:
        """Return another worker in the place of one that is gone."""
        return self._start([(worker.stage, worker.rank)])[0]

    def task_error(self, worker: PoolWorker, item: int | None, error: WorkerError) -> TaskError:
        """Return the exception for what the function of a worker raised."""
        stage = self._stages[worker.stage].name
        made = self._error(stage, item, worker.rank, error.kind, error.traceback, error.original)
        made.__cause__ = error.original
        return made

    def loss(self, worker: PoolWorker) -> WorkerLost:
        """Return the error of a worker that has hung up; it is ended for sure."""
        worker.end(POOL_GRACE_S)
        name = f"worker {worker.rank} of {self._stages[worker.stage].name}"
        return WorkerLost(f"{name} {worker.exit_message()}; the next call starts a new one")

    def end(self) -> None:
        """End all workers."""
        if os.getpid() != self._owner:
            return  # a forked child has no say here
        for worker in self.all_workers():
            worker.hang_up()
        deadline = time.monotonic() + POOL_GRACE_S
        for worker in self.all_workers():
            worker.end(max(0.0, deadline - time.monotonic()))
        for function in self._functions:
            function.close()

    def _start(self, stage_ranks: Sequence[tuple[int, int]]) -> list[PoolWorker]:
        """Start workers by (stage, rank), all at the same time, and wait until they are ready."""
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


_AHEAD = 2  # items per worker that may wait before a stage
_END = object()


class WorkerPool(contextlib.AbstractContextManager["WorkerPool", None]):
    """Persistent workers in one or several stages.

    It is a context manager. Without :meth:`close`, the workers end when the pool is no longer
    referenced or the program ends, however it ends.

    Parameters
    ----------
    stages : sequence of PoolStage
        In the order in which items go through them.
    error : type
        :class:`TaskError` or a subclass, which gives the message the words of its users.

    Raises
    ------
    UsageError
        If the function of a stage cannot be pickled.
    TaskError
        If it could not be made in a worker.
    WorkerLost
        If a worker ended meanwhile.
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
        """Kill all workers, from another thread; a run then ends with a WorkerLost."""
        for worker in self.manager.all_workers():
            worker.kill()

    def run(self, items: Iterable[Any]) -> list[Any]:
        """Send items through all stages.

        Threads that call this at the same time take turns.

        Parameters
        ----------
        items : iterable
            Consumed in this process, as workers become free.

        Returns
        -------
        list
            Results of the last stage in the order of `items`.

        Raises
        ------
        TaskError
            If a function raised; the first of the items that failed.
        WorkerLost
            If a worker was killed or ended while it had an item. The next run has a new one.
        UsageError
            If the pool is closed, or an item cannot be pickled.
        """
        with self._lock:
            if not self._end_workers.alive:
                raise UsageError(
                    "The workers were closed; make a new object to go on", code="state"
                )
            self.manager.fill()
            run = _PipelineRun(self.manager)
            try:
                return run.results(iter(items))
            finally:
                run.close()

    def close(self) -> None:
        """End the workers; again does nothing."""
        with self._lock:
            self._end_workers()

    def __exit__(self, *exception: object) -> None:
        self.close()


class _PipelineRun:
    """The way of some items through the stages."""

    def __init__(self, manager: WorkerManager):
        self.manager = manager
        self._waiting: list[deque[tuple[int, PickledMessage]]] = [deque() for _ in manager.workers]
        self._idle = [deque(workers) for workers in manager.workers]
        self._busy: dict[PoolWorker, int] = {}
        self._done: dict[int, Any] = {}
        self._failures: list[tuple[int, BaseException]] = []
        self._selector = selectors.DefaultSelector()

    def results(self, items: Iterator[Any]) -> list[Any]:
        """Go through all items; raise what went wrong first."""
        count, more = 0, True
        while True:
            more = more and not self._failures
            if more and not self._waiting[0]:
                more = self._draw(items, count)
                count += more
            self._assign()
            if not self._busy and not any(self._waiting):
                break
            self._hear(wait=bool(self._waiting[0]) or not more)
        if self._failures:
            raise min(self._failures, key=lambda failure: failure[0])[1]
        return [self._done.pop(item) for item in range(count)]

    def close(self) -> None:
        """Give up what is under way, if the run was interrupted."""
        self._selector.close()
        for worker in self._busy:
            worker.end()
        self._drop_waiting()

    def _draw(self, items: Iterator[Any], number: int) -> bool:
        """Prepare the next item; False when there is none."""
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
        """Give waiting items to idle workers, those that have come farthest first."""
        for stage in reversed(range(len(self._waiting))):
            while self._waiting[stage] and self._idle[stage] and self._has_room(stage + 1):
                item, message = self._waiting[stage].popleft()
                try:
                    self._give(self._idle[stage].popleft(), item, message)
                finally:
                    message.close()

    def _has_room(self, stage: int) -> bool:
        if stage == len(self._waiting):
            return True
        return len(self._waiting[stage]) < _AHEAD * len(self.manager.workers[stage])

    def _give(self, worker: PoolWorker, item: int, message: PickledMessage) -> None:
        self._busy[worker] = item
        try:
            worker.call(message)
        except (BrokenPipeError, ConnectionResetError):  # it was lost while it had nothing to do
            del self._busy[worker]
            try:
                worker = self.manager.replace(worker)
            except (WorkerError, WorkerLost) as error:
                self._fail(-1, error)
                return
            self._busy[worker] = item
            worker.call(message)
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def _hear(self, wait: bool) -> None:
        """Take what workers have answered."""
        for key, _ in self._selector.select(None if wait else 0):
            worker = key.data
            self._selector.unregister(worker.connection)
            try:
                answer = worker.answer()
            except EOFError:
                self._fail(self._busy.pop(worker), self.manager.loss(worker))
                continue
            # Only now: an interrupt in the middle of an answer must find the worker busy.
            item = self._busy.pop(worker)
            self._idle[worker.stage].append(worker)
            self._take(worker, item, answer)

    def _take(self, worker: PoolWorker, item: int, answer: PickledMessage) -> None:
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
