"""The program of a worker of :class:`bigdl.runtime.pool.WorkerPool`.

Before anything is loaded that might start threads, the worker ties itself to its cores and to the
life of its parent. Then it answers each message on its socket: the first, with the function that
makes its function, and after that one for each call.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from bigdl.runtime._launch_main import restore
from bigdl.runtime.messages import Message, decode, encode, receive, send

RESULT = 1
"""Kind of a message with what the function returned."""
FAILURE = 2
"""Kind of a message with (class name, traceback, pickled exception or None)."""

_LOOK_AT_PARENT = 1.0  # seconds


def main(order: dict) -> None:
    """Serve until the parent closes the line."""
    for name in ("line", "lifeline"):
        os.set_inheritable(order[name], False)
    watch = threading.Thread(target=_die_with_parent, args=(order,), daemon=True)
    watch.start()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, order["cores"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr]  # typeshed: TextIO, not TextIOWrapper
            line_buffering=True
        )
    faulthandler.enable()
    restore(order["header"])
    with socket.socket(fileno=order["line"]) as line:
        try:
            _serve(line)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the parent needs no more


def _serve(line: socket.socket) -> None:
    function = None
    while True:
        _, message = receive(line)
        if function is None:
            kind, answer, function = _answer(lambda make: make(), message, keep=True)
        else:
            kind, answer, _ = _answer(function, message)
        send(line, kind, answer)
        answer.close()


def _answer(
    function: Callable[[Any], Any], message: Message, *, keep: bool = False
) -> tuple[int, Message, Any]:
    """Kind and message to send back; what the function returned too, or instead, to `keep`."""
    try:
        try:
            value = decode(message)
        finally:
            message.close()
        result = function(value)
        return (RESULT, encode(None), result) if keep else (RESULT, encode(result), None)
    except BaseException as error:
        text = "".join(traceback.format_exception(type(error), error, _own_frames(error)))
        return FAILURE, encode((type(error).__name__, text, _pickled(error))), None


def _own_frames(error: BaseException) -> TracebackType | None:
    """The frames that are the user's."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _pickled(error: BaseException) -> bytes | None:
    import cloudpickle

    try:
        content = cloudpickle.dumps(error.with_traceback(None))
        pickle.loads(content)  # some exceptions can be written only
    except Exception:
        return None
    return content


def _die_with_parent(order: dict) -> None:
    # Not the kernel's signal, which comes when the thread that started the worker ends; a pool
    # lives longer. Processes that the parent forks hold the lifeline too, hence the second look.
    while os.getppid() == order["parent"]:
        if select.select([order["lifeline"]], [], [], _LOOK_AT_PARENT)[0]:
            break
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
