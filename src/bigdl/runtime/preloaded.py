"""Python processes that start at once, as forks of one that has imported their packages.

Spark's JVM starts a Python process whose imports take seconds, while the JVM waits.
:class:`Preloaded` imports the packages while the JVM starts.  The JVM then starts
``python -m bigdl.runtime.preloaded`` instead of the module, which hands its standard streams,
arguments and environment over to a fork that runs the module.  If there is no such process, or
something differs on which imports depend, it runs the module itself.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import NamedTuple

from bigdl.common.platform.network import can_send_files, local_client, local_socket
from bigdl.common.platform.processes import (
    can_fork,
    exit_status,
    fork_program,
    inherited_end,
    start_worker,
)
from bigdl.common.timeouts import PRELOADED_EXIT_S, PRELOADED_LOOK_S

ADDRESS = "BIGDL_PRELOADED"
"""Environment variable: path of the socket of the process that forks."""

MODULE = "BIGDL_PRELOADED_MODULE"
"""Environment variable: name of the module to run."""

_PER_PROCESS = ("PYTHON_", "SPARK_", "BIGDL_PRELOAD", "_")
"""Prefixes of variables on which no import depends; they may differ between the processes."""


class Preloaded:
    """Process that imports modules, and forks for processes that start later.

    It ends with :meth:`close`, or with this process.  Its forks end with those for which they run.

    Parameters
    ----------
    python : str
        Path of the interpreter.
    modules : sequence of str
        Names of the modules to import.  A module that fails is left to the fork that needs it.
    environment : mapping of str to str
        Environment variables of the later processes.
    folder : str
        Folder that only this user can enter, for the socket.

    Attributes
    ----------
    address : str
        Path of the socket, for the variable :data:`ADDRESS` of the later processes.
    """

    def __init__(
        self, python: str, modules: Sequence[str], environment: Mapping[str, str], folder: str
    ):
        self.address = os.path.join(folder, "preloaded")
        receiver, self._end = os.pipe()
        command = [python, "-m", __name__, self.address, ",".join(modules)]
        with Connection(receiver, writable=False) as end:
            self._process = start_worker(command, end, environment)

    def close(self) -> None:
        """End the process, which has no more forks."""
        os.close(self._end)
        try:
            self._process.wait(PRELOADED_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def can_preload() -> bool:
    """Return True if a process can be forked and take open files from another one."""
    return can_send_files() and can_fork()


# The process that forks ---------------------------------------------------------------------------


class ForkRequest(NamedTuple):
    """Program of a process that a fork is to run instead.

    Parameters
    ----------
    environment : dict of str to str
    arguments : list of str
    """

    environment: dict[str, str]
    arguments: list[str]


def serve(path: str, names: Sequence[str], owner: Connection) -> None:
    """Import modules, then fork for each process that connects, until the owner disconnects.

    Parameters
    ----------
    path : str
        Path of the socket.
    names : sequence of str
        Names of the modules.
    owner : Connection
        Pipe to the process that started this one.
    """
    forks: dict[Connection, int] = {}
    with local_socket(path) as listener:
        state = _import_state()
        for name in names:
            with suppress(Exception):
                importlib.import_module(name)
        ending: set[Connection] = set()  # forks that were asked to end
        while owner not in (
            ready := wait(
                [owner, listener, *(forks.keys() - ending)], PRELOADED_LOOK_S if forks else None
            )
        ):
            if listener in ready:
                with suppress(OSError, EOFError):
                    connection = Connection(listener.accept()[0].detach())
                    if (request := _agree(connection, state)) is None:
                        connection.close()
                        continue
                    held: list[Connection | socket.socket] = [owner, listener, connection, *forks]
                    forks[connection] = _fork(request, connection, held)
            for connection, pid in list(forks.items()):
                if connection in ready:  # the process for which it runs has ended
                    ending.add(connection)
                    os.kill(pid, signal.SIGTERM)
                if (status := exit_status(pid)) is not None:
                    del forks[connection]
                    ending.discard(connection)
                    with suppress(OSError), connection:
                        connection.send(status)


def _agree(connection: Connection, state: object) -> ForkRequest | None:
    """Return what a process asks for, or None if its imports would differ."""
    connection.send(state)
    request: ForkRequest | None = connection.recv()
    return request


def _fork(
    request: ForkRequest, connection: Connection, held: Sequence[Connection | socket.socket]
) -> int:
    """Run the module in a fork, with the streams of the process that asks for it."""
    streams = [recv_handle(connection) for _ in range(3)]

    def run() -> None:
        for each in held:
            each.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(request.environment)
        sys.argv[1:] = request.arguments
        _run_module()

    pid = fork_program(run)
    for stream in streams:
        os.close(stream)
    return pid


# The process that asks for a fork -----------------------------------------------------------------


def main() -> None:
    """Run the module of the environment, in a fork of the preloaded process if there is one."""
    address = os.environ.pop(ADDRESS, "")
    status = _run_in_fork(address) if address else None
    if status is None:
        _run_module()
    else:
        sys.exit(status)


def _run_module() -> None:
    runpy.run_module(os.environ[MODULE], run_name="__main__", alter_sys=True)


def _import_state() -> tuple[object, ...]:
    """Return that on which imports depend: interpreter, folders and variables."""
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(_PER_PROCESS)
    }
    return sys.version, tuple(sys.flags), sys.path, os.getcwd(), variables


def _await_socket(address: str) -> None:
    """Wait a moment for the socket of a process that has just been started."""
    end = time.monotonic() + PRELOADED_EXIT_S
    while (
        not os.path.exists(address)
        and os.path.exists(os.path.dirname(address))
        and time.monotonic() < end
    ):
        time.sleep(PRELOADED_LOOK_S / 10)


def _run_in_fork(address: str) -> int | None:
    """Return the exit status of a fork that has run this program; None if none could."""
    _await_socket(address)
    with suppress(OSError, EOFError), local_client(address) as connection:
        is_same = connection.recv() == _import_state()
        connection.send(ForkRequest(dict(os.environ), sys.argv[1:]) if is_same else None)
        if not is_same:
            return None
        for stream in range(3):
            send_handle(connection, stream, None)
        with open(os.devnull, "r+b") as nothing:  # the fork alone holds the streams
            for stream in range(3):
                os.dup2(nothing.fileno(), stream)
        try:
            return int(connection.recv())
        except (OSError, EOFError):
            return 1  # the process that forks was killed; its forks end with their streams
    return None


if __name__ == "__main__":
    if len(sys.argv) == 4 and MODULE not in os.environ:
        serve(sys.argv[1], sys.argv[2].split(","), inherited_end(int(sys.argv[3])))
    else:
        main()
