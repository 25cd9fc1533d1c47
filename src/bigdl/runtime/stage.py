"""The driver's side of a running stage: calls that Ctrl-C can end, and the view of the workers."""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from bigdl.runtime.channel import Inbox, Line

__all__ = ["SparkCall", "Watch", "interruptible", "settle", "vanished"]

logger = logging.getLogger("bigdl.orca")

_LOOK_S = 0.05  # seconds between two looks of the driver
_GRACE_S = 1.0  # seconds that workers get to end by themselves after the first error
_CANCEL_S = 10.0  # seconds that a cancelled job gets to end


class SparkCall:
    """A call that runs Spark jobs, in a thread of its own.

    The calling thread only waits: Ctrl-C never hits it in the middle of a conversation with the
    JVM. The jobs carry a tag, so that they can be cancelled and no others.
    """

    def __init__(self, sc, call: Callable[[], Any]):
        self._sc, self._call = sc, call
        self._tag = f"bigdl-{secrets.token_hex(6)}"
        self.done = threading.Event()
        self.cancelled = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None

    def wait(
        self, poll: Callable[[], None] = lambda: None, stop: Callable[[], None] = lambda: None
    ):
        """Start, call `poll` until the end, and return what the call returned or raise its error.

        `stop` is called before the jobs are cancelled, on Ctrl-C above all.
        """
        from pyspark import InheritableThread

        with interruptible():
            try:
                InheritableThread(target=self._run, daemon=True).start()
                while not self.done.wait(_LOOK_S):
                    poll()
            except BaseException:
                self.cancelled.set()
                stop()
                self._end()
                raise
        if self.error is not None:
            raise self.error
        return self.value

    def _run(self):
        try:
            self._sc.addJobTag(self._tag)
            self.value = self._call()
        except BaseException as error:  # raised in the calling thread
            self.error = error
        finally:
            with contextlib.suppress(Exception):
                self._sc.removeJobTag(self._tag)
            self.done.set()

    def cancel(self) -> None:
        """Cancel the jobs that run now."""
        with contextlib.suppress(Exception):
            self._sc.cancelJobsWithTag(self._tag)

    def _end(self):
        end = time.monotonic() + _CANCEL_S
        while not self.done.is_set() and time.monotonic() < end:
            self.cancel()  # again and again: a call may be between two of its jobs
            self.done.wait(0.2)
        if not self.done.is_set():
            logger.warning("Spark did not end a job within %g s after its cancellation", _CANCEL_S)


@contextlib.contextmanager
def interruptible():
    """Let Ctrl-C raise KeyboardInterrupt here, and nothing else.

    PySpark's own handler cancels every job of the application, from inside whatever call the main
    thread is in. A handler that somebody else installed stays.
    """
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
    if getattr(handler, "__module__", None) != "pyspark.core.context":
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


class Watch:
    """What the driver sees of the workers of one attempt.

    Attributes
    ----------
    errors : list of dict
        What the workers reported.
    """

    def __init__(self, line: Line, call: SparkCall, on_event: Callable[[str, Any], None] | None):
        self._line, self._call = line, call
        self._on_event = on_event or (lambda kind, value: None)
        self.errors: list[dict] = []
        self._logs, self._errors = Inbox(line, "logs"), Inbox(line, "errors")
        self._messages = Inbox(line, "messages", data=True)
        self._failed_at: float | None = None
        self._shown = None

    def poll(self, *, final: bool = False) -> None:
        """Pass on what has come; stop the others once a worker has failed."""
        for doc, _ in self._logs.take(final=final):
            for text in doc["lines"]:
                print(f"[worker {doc['rank']}] {text}", flush=True)
        for message in self._messages.take(final=final):
            self._on_event("message", message)
        if self._line.has("progress/0"):
            progress = self._line.get_json("progress/0")
            if progress != self._shown:
                self._shown = progress
                self._on_event("progress", progress)
        self.errors += [doc for doc, _ in self._errors.take(final=final)]
        if not final:
            self._stop_others()

    def _stop_others(self):
        """End those that wait for a peer which will not come, or compute without end."""
        if self._failed_at is None and self._line.count("failed"):
            self._failed_at = time.monotonic()
        if self._failed_at is None:
            return
        waited = time.monotonic() - self._failed_at
        if waited > _GRACE_S:
            self._line.set("abort", "another worker failed")
        if waited > 2 * _GRACE_S:  # one that cannot look for the order: native code keeps the GIL
            self._call.cancel()
            self._failed_at = float("inf")

    @property
    def first_error(self) -> dict | None:
        """The cause: what the worker reported that failed before all others."""
        return min(self.errors, key=lambda doc: doc["place"], default=None)


def settle(line: Line, world_size: int, patience: float = 3.0) -> None:
    """Wait for the survivors of a failed stage to leave, all but those that died."""
    end = time.monotonic() + patience
    while (left := vanished(line, world_size)) and time.monotonic() < end:
        if len(left) == 1:
            end = min(end, time.monotonic() + 0.3)
        time.sleep(_LOOK_S)


def vanished(line: Line, world_size: int) -> list[dict]:
    """Rank, pid and host of the workers that came and did not leave."""
    return [
        line.get_json(f"who/{place}")
        for place in range(world_size)
        if line.has(f"who/{place}") and not line.has(f"left/{place}")
    ]
