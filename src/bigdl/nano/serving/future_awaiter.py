"""FutureAwaiter: await futures of model threads in an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from bigdl.nano.serving.batching import DeadlineError

T = TypeVar("T")


class FutureAwaiter:
    """Adapter through which an event loop awaits futures that model threads complete.

    All results of a batch are delivered by one call into the loop. ``asyncio.wrap_future`` makes
    one call per future, and each of them blocks the model thread while the loop is busy.
    """

    def __init__(self) -> None:
        self._deliveries: deque[Callable[[], None]] = deque()
        self._announced = False

    async def of(self, future: Future[T]) -> T:
        """Return the result of another thread's future; cancel it if this call is cancelled."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[T] = loop.create_future()

        def arrived(done: Future[T]) -> None:
            self._deliveries.append(lambda: _deliver(done, waiting))
            if not self._announced:
                self._announced = True
                with suppress(RuntimeError):  # the loop has been closed
                    loop.call_soon_threadsafe(self._deliver_all)

        future.add_done_callback(arrived)
        try:
            return await waiting
        finally:
            future.cancel()

    async def within(self, future: Future[T], left: float, seconds: float) -> T:
        """Return the result of a future, or raise a DeadlineError after `left` seconds.

        Parameters
        ----------
        future : concurrent.futures.Future
        left, seconds : float
            Remaining seconds, and the request's total timeout for the error message.

        Raises
        ------
        DeadlineError
            After `left` seconds.
        """
        try:
            async with asyncio.timeout(left):
                return await self.of(future)
        except DeadlineError:  # raised by the model; it is a TimeoutError, too
            raise
        except TimeoutError:
            raise late(seconds) from None

    def _deliver_all(self) -> None:
        self._announced = False  # first, so that a result arriving now schedules another delivery
        while self._deliveries:
            self._deliveries.popleft()()


def _deliver(done: Future[T], waiting: asyncio.Future[T]) -> None:
    if waiting.done():
        return
    if done.cancelled():
        waiting.cancel()
    elif (error := done.exception()) is not None:
        waiting.set_exception(error)
    else:
        waiting.set_result(done.result())


def late(seconds: float) -> DeadlineError:
    """Return the error for a request that was not answered within its timeout of `seconds`."""
    return DeadlineError(f"The request was not answered within its time of {seconds:g} s")
