"""Forced exit of a server process after its grace period, and safe printing to a closed pipe."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress

from bigdl.common.platform.processes import exit_at_alarm
from bigdl.common.timeouts import LAST_S


def print_line(sentence: str) -> None:
    """Print a line to standard output; ignore a closed pipe."""
    try:
        print(sentence, flush=True)
    except OSError:  # the parent was killed; redirect, so that later prints do not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_within(seconds: float, name: str) -> None:
    """Exit the process after `seconds` if it has not ended by itself.

    The interpreter waits at exit for the threads of an executor, so a long computation would delay
    the end. A forced exit has the status 1.

    Parameters
    ----------
    seconds : float
        Grace period.
    name : str
        Program name for the message on standard error.
    """

    def end() -> None:
        time.sleep(seconds)
        with suppress(OSError):
            print(
                f"{name}: forced to exit after {seconds:g} s with unfinished requests",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)

    threading.Thread(target=end, name="end", daemon=True).start()
    exit_at_alarm(seconds + LAST_S)
