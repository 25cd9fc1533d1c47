"""What runs beside a program in its worker: a thread that ends it on demand, and its output."""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import threading
import time

__all__ = ["Log", "Watcher", "captured"]

_POLL = 0.1  # seconds between two looks of the watcher
_BEAT = 0.5  # seconds between two heartbeats
_LINES = 10_000  # newest lines that wait for the next heartbeat
_PART = 1 << 16  # characters of a line without an end


class Watcher(threading.Thread):
    """Ends this process on abort or when the driver is gone; carries the heartbeat and the logs.

    Nothing else interrupts a thread that is blocked in a collective.

    Parameters
    ----------
    line : Line
        A connection of its own.
    place : int
        Number of the task.
    uplink : Uplink
        Where the program leaves its progress.
    log : Log
    """

    def __init__(self, line, place: int, uplink, log: Log):
        super().__init__(name="bigdl-watcher", daemon=True)
        self.rank = place  # until the worker knows better
        self._line, self._place, self._uplink, self._log = line, place, uplink, log
        self._stopping = threading.Event()

    def run(self):
        next_beat = 0.0
        while not self._stopping.wait(_POLL):
            try:
                if self._line.has("abort"):
                    self._exit()
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + _BEAT
                    self.flush()
            except Exception as error:
                # a slow or stopped driver answers late; a dead one closes the connection
                if "timeout" not in str(error).lower():
                    self._exit()

    def flush(self):
        progress = self._uplink.progress
        if progress is not None:
            self._line.set_json(f"progress/{self.rank}", progress)
        while lines := self._log.take():
            self._line.push("logs", {"rank": self.rank, "lines": lines})

    def stop(self):
        self._stopping.set()
        self.join(timeout=10)
        self._log.end_line()
        with contextlib.suppress(Exception):
            self.flush()

    def _exit(self):
        if self._stopping.is_set():
            return
        with contextlib.suppress(Exception):
            self.flush()
        with contextlib.suppress(Exception):
            self._line.set(f"left/{self._place}", "")
        _end_children()
        os._exit(17)


def _end_children():
    """End what the program started, such as the processes of a DataLoader."""
    with contextlib.suppress(Exception):
        import psutil

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()


class Log:
    """Stands in for stdout and stderr.

    Parameters
    ----------
    stream : file
        What it stands in for.
    keep : bool
        Keep whole lines for the driver.
    tee : bool
        Write to `stream` too.
    """

    def __init__(self, stream, *, keep: bool, tee: bool):
        self._stream, self._tee = stream, tee
        self._lines: collections.deque[str] = collections.deque(maxlen=_LINES if keep else 0)
        self._part = ""

    def write(self, text):
        if self._tee:
            self._stream.write(text)
        *whole, part = (self._part + text).split("\n")
        if len(part) > _PART:
            whole, part = [*whole, part], ""
        self._part = part
        # of a line that is written over and over, as a progress bar does, the last state
        self._lines.extend(line.rstrip("\r").rpartition("\r")[2] for line in whole)
        return len(text)

    def take(self):
        out = []
        with contextlib.suppress(IndexError):
            while len(out) < 1000:
                out.append(self._lines.popleft())
        return out

    def flush(self):
        if self._tee:
            self._stream.flush()

    def end_line(self):
        if self._part:
            self.write("\n")

    def __getattr__(self, name):
        return getattr(self._stream, name)


@contextlib.contextmanager
def captured(to_driver: bool, is_local: bool):
    """Take what is written meanwhile, for the driver or, in local mode, to be dropped.

    The log of an executor gets it in any case; that of local mode is the driver's own output.
    """
    out, err = sys.stdout, sys.stderr
    log = Log(err, keep=to_driver, tee=not is_local)
    sys.stdout = sys.stderr = log
    try:
        yield log
    finally:
        sys.stdout, sys.stderr = out, err
