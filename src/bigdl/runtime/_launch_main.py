"""The program that a launched worker runs; ``bigdl.runtime.launch`` starts it.

Order matters here. First the worker is tied to the life of its parent and to its cores; only then
is anything loaded that might start threads. Its file descriptors come from the parent:

* ``payload``: an unlinked file with two pickles, a header and ``(fn, args)``, shared by all workers
* ``outcome``: an unlinked file of its own, for the pickle of what became of ``fn``
* ``status``: a pipe on which one byte says that the outcome is complete; its end says that the
  worker is gone
* ``lifeline``: a pipe to which nothing is ever written; its end says that the parent is gone
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import pickle
import signal
import sys
import threading
import time
import traceback

_PR_SET_PDEATHSIG = 1


def main(order: dict) -> None:
    """Run one worker as the parent ordered."""
    for name in ("payload", "outcome", "status", "lifeline"):
        os.set_inheritable(order[name], False)
    _die_with_parent(order["parent"], order["lifeline"])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, order["cores"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr]  # typeshed: TextIO, not TextIOWrapper
            encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
    faulthandler.enable()
    outcome = _run(order["rank"], order["payload"])
    with os.fdopen(order["outcome"], "wb") as file:
        file.write(outcome)
    os.write(order["status"], b".")


def _run(rank: int, payload: int) -> bytes:
    """Pickle of (True, result) or (False, (time, kind, traceback))."""
    try:
        # Each mapping has its own position; the descriptor's is shared with the other workers.
        with mmap.mmap(payload, 0, access=mmap.ACCESS_READ) as file:
            restore(pickle.load(file))
            fn, args = pickle.load(file)
        result = fn(rank, *args)
        import cloudpickle

        return cloudpickle.dumps((True, result))
    except BaseException as error:
        # CLOCK_MONOTONIC is one clock for all processes: the parent orders failures by it.
        failed = time.monotonic()
        own_frames = error.__traceback__ and error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, own_frames))
        return pickle.dumps((False, (failed, type(error).__name__, text)))


def restore(header: dict) -> None:
    """Undo what the parent changed to let this module be found."""
    sys.argv = header["argv"]
    if header["pythonpath"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = header["pythonpath"]


def _die_with_parent(parent: int, lifeline: int) -> None:
    # The kernel's signal also ends a worker that never lets go of the interpreter lock. It comes
    # when the thread that started the worker ends, which waits in `launch` for that reason. The
    # pipe also works where prctl does not exist.
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_watch, args=(lifeline,), name="bigdl-lifeline", daemon=True).start()


def _watch(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
