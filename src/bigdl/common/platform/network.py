"""Ports that processes share, local sockets, and names of hosts and interfaces."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
import tempfile
from multiprocessing.connection import Client, Connection, Listener

LONGEST_SOCKET_PATH = 107 if sys.platform == "linux" else 103
"""Maximum bytes of a local socket's path."""

_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 6}


def host_name() -> str:
    """Return the name of this machine in its network."""
    return platform.node() or socket.gethostname()


def can_share_ports() -> bool:
    """Return True if the kernel distributes the connections of a port among several processes.

    macOS has ``SO_REUSEPORT``, too, but one of the processes gets all connections.
    """
    return sys.platform == "linux" and hasattr(socket, "SO_REUSEPORT")


def share_port(listener: socket.socket) -> None:
    """Let other processes bind to the port of a socket, too; call before ``bind``."""
    if sys.platform != "win32":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def set_keepalive(connection: socket.socket) -> None:
    """Enable keepalive to detect a dead peer within two minutes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def limit_unacknowledged(connection: socket.socket, seconds: float) -> None:
    """Close a connection whose peer acknowledges no data for a time, where the kernel can."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(seconds * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def loopback_interface() -> str | None:
    """Return the name of the loopback interface, ``lo`` or ``lo0``; None if it has another name."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def network_id() -> int:
    """Return the number of this process's network namespace; 0 where there are none."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return 0


# Local sockets ------------------------------------------------------------------------------------


def short_folder() -> str:
    """Return a folder for temporary files with a short path, for local sockets."""
    return "/tmp" if sys.platform != "win32" else tempfile.gettempdir()


def local_listener(path: str, backlog: int) -> Listener:
    """Listen for connections of processes of this machine; replace the socket of a dead process.

    Parameters
    ----------
    path : str
        Path of a Unix socket; on Windows it names a pipe.
    backlog : int
        Connections that wait to be accepted.
    """
    if sys.platform == "win32":
        return Listener(_pipe_name(path), "AF_PIPE", backlog=backlog)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return Listener(path, "AF_UNIX", backlog=backlog)


def local_socket(path: str) -> socket.socket:
    """Listen at a path for connections of processes of this machine, where they can send files."""
    if sys.platform == "win32":
        raise OSError("Windows cannot send files over a socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    return listener


def local_client(path: str) -> Connection:
    """Connect to a :func:`local_listener`."""
    if sys.platform == "win32":
        return Client(_pipe_name(path), "AF_PIPE")  # type: ignore[return-value]  # same methods
    return Client(path, "AF_UNIX")


def _pipe_name(path: str) -> str:
    return "\\\\.\\pipe\\" + path.replace("\\", "-").replace(":", "")


def disconnect(connection: Connection) -> None:
    """Close a pipe so that the other end notices, even if another process has a copy of this end.

    A forked process may hold the socket, too: ``close`` alone would not disconnect.
    """
    if sys.platform != "win32":
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(connection.fileno())) as end,
        ):
            end.shutdown(socket.SHUT_RDWR)
    connection.close()


def can_send_files() -> bool:
    """Return True if open files can be sent over a local connection."""
    return hasattr(socket, "SCM_RIGHTS") and hasattr(socket, "AF_UNIX")
