"""The end of a server's process within its grace, whatever still runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress

from bigdl.common.timeouts import LAST_S


def print_line(sentence: str) -> None:
    """Print a line to standard output, which nobody may read any more."""
    try:
        print(sentence, flush=True)
    except OSError:  # the parent was killed; nothing else must fail on it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_within(seconds: float, name: str) -> None:
    """Have this process end after some seconds, if it has not ended by itself.

    Threads that compute, in Python or in a library, would otherwise keep it for as long as they
    take, since the interpreter waits for those of an executor. Status 1 then says so.

    Parameters
    ----------
    seconds : float
    name : str
        Of the program, for the sentence that tells it.
    """

    def end() -> None:
        time.sleep(seconds)
        with suppress(OSError):
            print(
                f"{name}: ended after {seconds:g} s with requests that had not ended",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)

    threading.Thread(target=end, name="end", daemon=True).start()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # of the system: needs no lock of Python
        signal.setitimer(signal.ITIMER_REAL, seconds + LAST_S)
