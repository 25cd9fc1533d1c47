"""Main program of a :class:`bigdl.runtime.process.WorkerProcess`.

The order matters. First the worker is bound to its parent and its cores; only then does it import
packages that may start threads. After that it answers each message on its pipe. The first message
is a factory of the worker's function; each further message is the argument of a call.
"""

import atexit
import contextlib
import faulthandler
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from bigdl.common.platform.cores import pin_process
from bigdl.common.platform.processes import (
    inherited_end,
    kill_own_group,
    signal_at_parent_end,
    wait_for_parent,
)
from bigdl.runtime.failure import Failure
from bigdl.runtime.messages import encode, opened, receive, send

_connections: list[Connection] = []


def own_connection() -> Connection:
    """Return the pipe on which this process receives its calls."""
    return _connections[-1]


def main(parent: int, end: int) -> None:
    """Answer calls on a pipe until the parent closes it."""
    connection = inherited_end(end)
    _connections.append(connection)
    threading.Thread(target=_die_with, args=(parent,), name="bigdl-parent", daemon=True).start()
    faulthandler.enable()
    with connection:
        try:
            _set_up(*opened(receive(connection)))
            _serve(connection)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the parent has closed the pipe


def _set_up(
    cores: tuple[int, ...], argv: list[str], capture_output: bool, dies_with_parent: bool
) -> None:
    """Tie this process to its parent, pin it to cores, and configure its streams and arguments."""
    if dies_with_parent:
        signal_at_parent_end()
    pin_process(cores)
    encoding = {"encoding": "utf-8", "errors": "backslashreplace"} if capture_output else {}
    for stream in (sys.stdout, sys.stderr):
        # typeshed declares TextIO instead of TextIOWrapper
        stream.reconfigure(line_buffering=True, write_through=False, **encoding)  # type: ignore[union-attr]
    sys.argv = argv


def serve_fork(connection: Connection, parent: int, cores: Sequence[int]) -> None:
    """Answer calls on a pipe in a process that `parent` has forked, until the pipe is closed."""
    threading.Thread(target=_die_with, args=(parent,), name="bigdl-parent", daemon=True).start()
    pin_process(cores)
    with connection, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(connection)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _serve(connection: Connection) -> None:
    function: Callable[[Any], Any] | None = None

    def call(item: Any) -> object:
        nonlocal function
        if function is not None:
            return function(item)
        function = item()
        return None

    while True:
        message = receive(connection)
        try:
            answer = encode(call(opened(message)))
        except BaseException as error:
            answer = encode(Failure.of(error))
            answer.failed = True
        send(connection, answer)
        answer.close()


def _die_with(parent: int) -> None:
    """Wait until the parent has ended, then kill this process and its children."""
    wait_for_parent(parent)
    kill_own_group()
