"""Worker processes that are forked from a process that has imported what they need.

A new interpreter that imports torch needs seconds; a fork of a :class:`ForkServer` needs
milliseconds, and shares the server's memory until it writes to it.  The server itself runs no
program, so it has no threads whose locks a fork would inherit.  Its workers end with it.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

from bigdl.common.memory import freeze_modules
from bigdl.common.platform.processes import (
    ForkedProcess,
    forget_children,
    fork_bound,
)
from bigdl.runtime import _worker_main
from bigdl.runtime.messages import encode, encoded
from bigdl.runtime.process import CpuSlot, WorkerProcess


class ForkServer(WorkerProcess):
    """Process that imports modules and then forks workers, where forks can be adopted.

    Parameters
    ----------
    slot : CpuSlot
        Cores of the server, and threads of its workers.
    modules : sequence of str
        Modules to import. A failure is ignored, since a worker imports them again.
    """

    def __init__(self, slot: CpuSlot, modules: Sequence[str]):
        names = list(modules)
        self._turn = threading.Lock()

        def make() -> Callable[[Sequence[int]], int]:
            return make_server(names)

        with contextlib.closing(encoded(make, "The server of workers")) as message:
            super().__init__(0, slot, message)

    def fork(self, cores: Sequence[int]) -> tuple[Connection, ForkedProcess]:
        """Fork a worker and return the connection to it and its process.

        It waits until the server has imported its modules. Threads take turns.

        Parameters
        ----------
        cores : sequence of int
            Logical cores to which it is pinned.

        Raises
        ------
        EOFError
            If the server has ended.
        """
        ours, theirs = multiprocessing.Pipe()
        try:
            with theirs, self._turn:
                while self.pending:
                    self.result()
                self.start_call(encode(tuple(cores)))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    send_handle(self.connection, theirs.fileno(), self.process.pid)
                return ours, ForkedProcess(self.result())
        except BaseException:
            ours.close()
            raise


def make_server(modules: Sequence[str]) -> Callable[[Sequence[int]], int]:
    """Import modules, in the server; return the function that forks a worker."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    freeze_modules()
    forget_children()
    return _fork_worker


def _fork_worker(cores: Sequence[int]) -> int:
    """Fork a worker that answers calls on the pipe whose end arrives next; return its id."""
    server, connection = os.getpid(), _worker_main.own_connection()
    end = recv_handle(connection)
    pid = fork_bound()
    if pid:
        os.close(end)
        return pid
    try:
        os.set_inheritable(end, False)
        connection.close()
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed()
        _worker_main.serve_fork(Connection(end), server, cores)
    finally:
        os._exit(0)
