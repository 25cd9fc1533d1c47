"""FutureAwaiter: results of other threads' futures, awaited in an event loop."""

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
    """Awaits futures that the threads of models complete.

    All results of a batch arrive by one call into the loop. ``asyncio.wrap_future`` makes a call
    for each, for which the thread waits as long as the loop is busy.
    """

    def __init__(self) -> None:
        self._deliveries: deque[Callable[[], None]] = deque()
        self._announced = False

    async def of(self, future: Future[T]) -> T:
        """Return the result of a future of another thread; it is cancelled with this call."""
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
        """Return the result of a future as :meth:`of` does, or refuse a request that is late.

        Parameters
        ----------
        future : concurrent.futures.Future
        left, seconds : float
            Seconds that are left of the request's time, and the whole of it.

        Raises
        ------
        DeadlineError
        """
        try:
            async with asyncio.timeout(left):
                return await self.of(future)
        except DeadlineError:  # of the model, which is a TimeoutError, too
            raise
        except TimeoutError:
            raise late(seconds) from None

    def _deliver_all(self) -> None:
        self._announced = False  # first: what comes from now on is announced again
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
    """Return the error of a request that was not answered in time."""
    return DeadlineError(f"The request was not answered within its time of {seconds:g} s")
