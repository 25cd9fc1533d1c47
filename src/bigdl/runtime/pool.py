"""Processes that stay: each holds a function, and items flow through them.

Like :mod:`bigdl.runtime.launch` this starts fresh interpreters, pinned to their cores before they
load anything, and none outlives its parent. Unlike there they are kept: a model is loaded once and
called many times.

A :class:`WorkerPool` has one or several stages, each with workers that hold the same function.
:meth:`WorkerPool.run` feeds items to the first stage, passes each result on to the next stage
without opening it, and returns the results of the last in the order of the items. A worker has one
item at a time; the next item is ready when it asks. A stage whose successor is behind waits for it.

When a call fails, the items that are under way are finished, and the pool can be used again. A
worker that is lost is replaced at the next run.
"""

from __future__ import annotations

import selectors
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bigdl.common.errors import UsageError, WorkerError, WorkerLost
from bigdl.runtime._pool_staff import Seat, Staff, Stage, TaskError, Worker, encoded, opened
from bigdl.runtime.messages import Message

__all__ = ["Seat", "Stage", "TaskError", "WorkerPool"]

_AHEAD = 2  # items per worker that may wait before a stage
_END = object()


class WorkerPool:
    """Persistent workers in one or several stages.

    It is a context manager. Without :meth:`close`, the workers end when the pool is no longer
    referenced or the program ends, however it ends.

    Parameters
    ----------
    stages : sequence of Stage
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

    def __init__(self, stages: Sequence[Stage], error: type[TaskError] = TaskError):
        self._lock = threading.Lock()
        self._staff = Staff(stages, error)
        self._dismiss = weakref.finalize(self, self._staff.dismiss)
        try:
            self._staff.fill()
        except BaseException:
            self._dismiss()
            raise

    @property
    def pids(self) -> list[list[int]]:
        """Process ids of the workers of each stage."""
        return [[worker.process.pid for worker in rank] for rank in self._staff.workers]

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
            if not self._dismiss.alive:
                raise UsageError("The workers were closed; make a new object to go on")
            self._staff.fill()
            run = _Run(self._staff)
            try:
                return run.results(iter(items))
            finally:
                run.close()

    def close(self) -> None:
        """End the workers; again does nothing."""
        with self._lock:
            self._dismiss()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class _Run:
    """The way of some items through the stages."""

    def __init__(self, staff: Staff):
        self._staff = staff
        self._waiting: list[deque[tuple[int, Message]]] = [deque() for _ in staff.workers]
        self._idle = [deque(workers) for workers in staff.workers]
        self._busy: dict[Worker, int] = {}
        self._done: dict[int, Any] = {}
        self._failures: list[tuple[int, BaseException]] = []
        self._selector = selectors.DefaultSelector()
        for worker in staff.everyone():
            self._selector.register(worker.line, selectors.EVENT_READ, worker)

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
        return len(self._waiting[stage]) < _AHEAD * len(self._staff.workers[stage])

    def _give(self, worker: Worker, item: int, message: Message) -> None:
        self._busy[worker] = item
        try:
            worker.ask(message)
        except (BrokenPipeError, ConnectionResetError):  # it was lost while it had nothing to do
            del self._busy[worker]
            worker = self._replaced(worker)
            if worker is not None:
                self._busy[worker] = item
                worker.ask(message)

    def _replaced(self, worker: Worker) -> Worker | None:
        self._selector.unregister(worker.line)
        try:
            worker = self._staff.replace(worker)
        except (WorkerError, WorkerLost) as error:
            self._fail(-1, error)
            return None
        self._selector.register(worker.line, selectors.EVENT_READ, worker)
        return worker

    def _hear(self, wait: bool) -> None:
        """Take what workers have answered."""
        for key, _ in self._selector.select(None if wait else 0):
            worker = key.data
            item = self._busy.get(worker)
            if item is None:
                self._idle[worker.stage].remove(worker)
                replacement = self._replaced(worker)
                if replacement is not None:
                    self._idle[worker.stage].append(replacement)
                continue
            try:
                succeeded, message = worker.hear()
            except EOFError:
                del self._busy[worker]
                self._selector.unregister(worker.line)
                self._fail(item, worker.loss(self._staff.names[worker.stage]))
                continue
            # Only now: an interrupt in the middle of an answer must find the worker busy.
            del self._busy[worker]
            self._idle[worker.stage].append(worker)
            self._take(worker, item, succeeded, message)

    def _take(self, worker: Worker, item: int, succeeded: bool, message: Message) -> None:
        if not succeeded:
            self._fail(item, self._staff.task_error(worker, item, opened(message)))
        elif self._failures:
            message.close()
        elif worker.stage + 1 < len(self._waiting):
            self._waiting[worker.stage + 1].append((item, message))
        else:
            try:
                self._done[item] = opened(message)
            except Exception as error:
                self._fail(item, error)

    def _fail(self, item: int, error: BaseException) -> None:
        self._failures.append((item, error))
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        for queue in self._waiting:
            while queue:
                queue.popleft()[1].close()
