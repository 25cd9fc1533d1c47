"""Micro-batching: one call of the model processes the rows of several callers.

A :class:`MicroBatcher` queues the calls of a model. A thread of the batcher takes the queued
requests, concatenates their rows, calls the model once and splits the results. By default a batch
has the requests that arrived during the previous batch. With a delay, the first request of a batch
waits at most that long for others.

If the batcher is idle, a call runs in the caller's thread, because the switch to another thread
would cost more than a small model.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

import numpy as np

from bigdl.common.checks import check_number, check_positive
from bigdl.common.errors import BigDLError

__all__ = [
    "BatchingOptions",
    "ClosedError",
    "DeadlineError",
    "MicroBatcher",
    "OverloadError",
    "UnavailableError",
]

Run = Callable[[list[np.ndarray]], list[np.ndarray]]


class OverloadError(BigDLError, RuntimeError):
    """Exception raised when the queue of a model is full; try again later.

    Examples
    --------
    >>> from bigdl.nano.serving import OverloadError
    >>> issubclass(OverloadError, RuntimeError)
    True
    """

    code = "server-busy"


class DeadlineError(BigDLError, TimeoutError):
    """Exception raised when a request exceeds its timeout.

    Examples
    --------
    >>> from bigdl.nano.serving import DeadlineError
    >>> issubclass(DeadlineError, TimeoutError)
    True
    """

    code = "timeout"


class UnavailableError(BigDLError, RuntimeError):
    """Exception raised when a component of the server has stopped or is shutting down."""


class ClosedError(UnavailableError):
    """Exception raised for a request to a model that is being unloaded.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.serving import ClosedError, ServedModel
    >>> model = ServedModel(torch.nn.ReLU(), sample=torch.ones(1, 2), method="original")
    >>> model.close()
    >>> try:
    ...     model.predict(torch.ones(1, 2).numpy())
    ... except ClosedError as error:
    ...     print(error)
    The model is being unloaded and takes no more requests
    """

    code = "state"


@dataclass(frozen=True)
class BatchingOptions:
    """Options for batching the requests of one model.

    Attributes
    ----------
    max_batch_size : int
        Largest number of rows of one call of the model. A single larger request is still computed.
        1 computes every request alone.
    max_delay_ms : float
        Time in milliseconds that the first request of a batch waits for others. 0: a batch has the
        requests that arrived while the model was busy. A delay increases throughput at the cost of
        latency.
    max_queue : int
        Largest number of waiting requests. Further ones raise an :class:`OverloadError`.
    instances : int
        Concurrent calls of the model. Leave 1 if one call uses all cores.

    Examples
    --------
    >>> from bigdl.nano.serving import BatchingOptions
    >>> BatchingOptions(max_batch_size=64, max_delay_ms=2).max_queue
    1024
    """

    max_batch_size: int = 64
    max_delay_ms: float = 0.0
    max_queue: int = 1024
    instances: int = 1

    def __post_init__(self) -> None:
        check_positive("max_batch_size", self.max_batch_size)
        check_number("max_delay_ms", self.max_delay_ms, 0, 60_000)
        check_positive("max_queue", self.max_queue)
        check_positive("instances", self.instances)


@dataclass(eq=False)
class _Request:
    """Rows of one caller in the queue, with the future of their results."""

    arrays: list[np.ndarray]
    rows: int
    batch_key: tuple  # requests with equal keys fit into one batch
    timeout: float | None  # seconds
    future: Future = field(default_factory=Future)
    arrived: float = field(default_factory=time.perf_counter)

    def is_late(self, now: float) -> bool:
        """Return True if the request exceeded its timeout, and set the error of its future."""
        if self.timeout is None or self.arrived + self.timeout >= now:
            return False
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(_late(self.timeout))
        return True


@dataclass(frozen=True)
class BatchReport:
    """Number of rows and durations of one call of the model, for metrics.

    Attributes
    ----------
    rows : int
    waits : list of float
        Seconds that each request of the batch waited.
    compute : float
        Seconds of the model's call.
    """

    rows: int
    waits: list[float]
    compute: float


class MicroBatcher:
    """Queue in front of one model that batches the calls of any number of threads.

    Parameters
    ----------
    run : callable
        Model function that takes and returns a flat list of arrays. With several instances it is
        called from several threads at once.
    options : BatchingOptions
    joins : bool
        False if requests must not be batched, because rows depend on each other.
    observe : callable, optional
        Called with a :class:`BatchReport` after each call of the model.
    """

    def __init__(
        self,
        run: Run,
        options: BatchingOptions,
        *,
        joins: bool = True,
        observe: Callable[[BatchReport], None] | None = None,
    ):
        self.options = options
        self._run = run
        self._most = options.max_batch_size if joins else 1
        self._delay = options.max_delay_ms / 1e3 if self._most > 1 else 0.0
        self._observe = observe
        self._changed = threading.Condition()
        self._queue: deque[_Request] = deque()
        self._running = 0
        self._closed = False
        self._threads: list[threading.Thread] = []

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue)

    def call(self, arrays: list[np.ndarray], timeout: float | None = None) -> list[np.ndarray]:
        """Return the model's results for the rows of one caller.

        Parameters
        ----------
        arrays : list of ndarray
        timeout : float, optional
            Seconds after which the call fails.

        Raises
        ------
        OverloadError
            If the queue is full.
        DeadlineError
            If the timeout is exceeded.
        ClosedError
            After :meth:`close`.
        """
        with self._changed:
            idle = not self._queue and self._running < self.options.instances
            # A running computation cannot be interrupted, so a call with a timeout is queued.
            alone = idle and timeout is None and not self._delay and not self._closed
            self._running += alone
        if alone:
            try:
                return self._timed(arrays, _rows(arrays), [time.perf_counter()])
            finally:
                self._release()
        future = self.submit(arrays, timeout)
        try:
            return future.result(timeout)
        except (FutureTimeoutError, CancelledError) as error:
            if isinstance(error, DeadlineError):
                raise
            future.cancel()
            raise _late(timeout) from None

    def submit(self, arrays: list[np.ndarray], timeout: float | None = None) -> Future:
        """Queue the rows of one caller and return a future of their results.

        Returns
        -------
        Future
            Future of the results. Cancel it to withdraw the request.

        Raises
        ------
        OverloadError
            If the queue is full.
        ClosedError
            After :meth:`close`.
        """
        key = tuple((each.shape[1:], each.dtype) for each in arrays) if self._most > 1 else ()
        request = _Request(arrays, _rows(arrays), key, timeout)
        with self._changed:
            if self._closed:
                raise ClosedError("The model is being unloaded and takes no more requests")
            if len(self._queue) >= self.options.max_queue:
                self._drop_ended()
            if len(self._queue) >= self.options.max_queue:
                raise OverloadError(
                    f"{len(self._queue)} requests wait for the model already, which is the most "
                    "that its queue holds; try again later"
                )
            self._start()
            self._queue.append(request)
            self._changed.notify()
        return request.future

    def close(self) -> None:
        """Answer the queued requests and stop the threads; later calls are refused."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while self._running or self._queue:
                self._changed.wait()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        # Break the reference cycle with the model, so that its threads end without a collection.
        self._run, self._observe = _no_model, None

    def _drop_ended(self) -> None:
        """Remove cancelled and late requests from the queue."""
        now = time.perf_counter()
        waiting = [
            each for each in self._queue if not (each.is_late(now) or each.future.cancelled())
        ]
        self._queue.clear()
        self._queue.extend(waiting)

    def _start(self) -> None:
        if not self._threads:
            for number in range(self.options.instances):
                thread = threading.Thread(
                    target=self._work, name=f"bigdl-serving-{number}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _work(self) -> None:
        while batch := self._next_batch():
            try:
                self._answer(batch)
            finally:
                self._release()

    def _release(self) -> None:
        with self._changed:
            self._running -= 1
            if self._queue or self._closed:
                self._changed.notify_all()

    def _next_batch(self) -> list[_Request]:
        """Wait for the next batch and a free model instance; return an empty list after closing."""
        with self._changed:
            while True:
                if not self._queue:
                    if self._closed:
                        self._changed.notify_all()  # close() may wait for cancelled requests
                        return []
                    self._changed.wait()
                elif self._running >= self.options.instances:
                    self._changed.wait()
                elif (seconds := self._seconds_to_wait()) > 0:
                    self._changed.wait(seconds)
                elif batch := self._take_batch():
                    self._running += 1
                    return batch

    def _seconds_to_wait(self) -> float:
        """Return the seconds to wait for more requests before the next batch starts."""
        if not self._delay or self._closed:
            return 0.0
        rows = sum(request.rows for request in self._queue)
        if rows >= self._most:
            return 0.0
        return self._queue[0].arrived + self._delay - time.perf_counter()

    def _take_batch(self) -> list[_Request]:
        """Remove the oldest request from the queue, and later ones that fit into the same batch."""
        batch: list[_Request] = []
        rows, now, passed = 0, time.perf_counter(), []
        while self._queue and rows < self._most:
            request = self._queue.popleft()
            full = rows + request.rows > self._most
            if batch and (full or request.batch_key != batch[0].batch_key):
                passed.append(request)
                continue
            if request.is_late(now) or not request.future.set_running_or_notify_cancel():
                continue
            batch.append(request)
            rows += request.rows
        self._queue.extendleft(reversed(passed))
        return batch

    def _answer(self, batch: Sequence[_Request]) -> None:
        try:
            results = self._computed(batch)
        except Exception as error:
            if len(batch) == 1:
                batch[0].future.set_exception(error)
                return
            for request in batch:  # one caller's rows may have caused the error: compute each alone
                self._answer([request])
            return
        if len(batch) == 1:
            batch[0].future.set_result(results)
            return
        begin = 0
        for request in batch:
            rows = slice(begin, begin + request.rows)
            request.future.set_result([each[rows] for each in results])
            begin = rows.stop

    def _computed(self, batch: Sequence[_Request]) -> list[np.ndarray]:
        arrays = batch[0].arrays
        if len(batch) > 1:
            columns = zip(*(request.arrays for request in batch), strict=True)
            arrays = [np.concatenate(column) for column in columns]
        arrived = [request.arrived for request in batch]
        return self._timed(arrays, sum(request.rows for request in batch), arrived)

    def _timed(
        self, arrays: list[np.ndarray], rows: int, arrived: Sequence[float]
    ) -> list[np.ndarray]:
        begin = time.perf_counter()
        results = self._run(arrays)
        if self._observe is not None:
            compute = time.perf_counter() - begin
            self._observe(BatchReport(rows, [begin - each for each in arrived], compute))
        return results


def _no_model(arrays: list[np.ndarray]) -> list[np.ndarray]:
    raise ClosedError("The model is being unloaded and takes no more requests")


def _rows(arrays: Sequence[np.ndarray]) -> int:
    return len(arrays[0]) if arrays and arrays[0].ndim else 1


def _late(timeout: float | None) -> DeadlineError:
    seconds = "" if timeout is None else f" of {timeout:g} s"
    return DeadlineError(f"The request was not answered within its time{seconds}")
