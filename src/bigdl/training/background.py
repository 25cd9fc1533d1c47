"""Writing while the training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["BackgroundWriter"]


class BackgroundWriter:
    """One thing at a time is written by a thread; the next one waits for it.

    What it raised is raised by the next call of :meth:`start` or :meth:`wait`.
    """

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Wait for what is being written, then write this."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), daemon=True)
        self._thread.start()

    def _run(self, write):
        try:
            write()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Return when everything is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
