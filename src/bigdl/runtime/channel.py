"""The Channel: the line between the driver and the workers while a job runs.

It is one ``torch.distributed.TCPStore`` in the driver's Python process, bound to the driver's own
address (loopback in local mode).  It outlives every worker, so it carries the rendezvous, the
heartbeat, progress, logs, errors, results and the order to stop.  All keys stand under an
unguessable prefix per job.  It carries bytes and JSON: nothing that comes from a worker is ever
unpickled.  TCPStore has no authentication: who can reach the port can disturb the job, so on a
shared network the port belongs behind the cluster's own network policy.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

from bigdl.common.errors import UsageError
from bigdl.runtime.engine import PeerLost

CHUNK = 8 << 20  # bytes of one value
CONNECT_S = 5.0  # seconds within which a worker must be able to open a connection
_REPLY_S = 3600.0  # a driver that is stopped in a debugger answers late


class Unreachable(Exception):
    """A worker cannot open a connection to the channel."""


@dataclass(frozen=True)
class Address:
    """Host and port of a channel, and the prefix of its job's keys."""

    host: str
    port: int
    prefix: str

    def connect(self, attempt: int) -> Line:
        """Open a line to the channel, for one attempt.

        Raises
        ------
        Unreachable
            If no connection can be opened within `CONNECT_S` seconds.
        """
        from torch.distributed import TCPStore

        try:  # the store itself would try again and again, and write to stderr each time
            socket.create_connection((self.host, self.port), CONNECT_S).close()
        except OSError as error:
            raise Unreachable(f"{self.host}:{self.port} ({error})") from error
        store = TCPStore(self.host, self.port, None, False, timeout=timedelta(seconds=60))
        store.set_timeout(timedelta(seconds=_REPLY_S))
        return Line(store, self.prefix, attempt)


def own_address(host: str, port: int) -> str:
    """The address of this machine on the route to another one; nothing is sent."""
    family, _, _, _, other = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(other)
        return probe.getsockname()[0]


def listen(host: str, port: int = 0):
    """Host a TCPStore on one address only.

    Returns
    -------
    store, port

    Raises
    ------
    UsageError
        If the address is not this machine's or the port is taken.
    """
    from torch.distributed import TCPStore

    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        server = socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # where the address comes once more
        raise UsageError(
            f"The driver cannot listen on {host}:{port} ({reason}); choose another port "
            "with channel_port= or another address with spark.driver.host"
        ) from error
    port = server.getsockname()[1]
    store = TCPStore(
        cast("str", address[0]),
        port,
        None,
        True,
        timeout=timedelta(seconds=_REPLY_S),
        wait_for_workers=False,
        master_listen_fd=server.detach(),  # the store owns it from here on
    )
    return store, port


class Channel:
    """The driver's end.

    Parameters
    ----------
    host : str or None
        Address of the driver that the workers can reach; nothing else is listened on. Without one
        it is for a worker in this process, and nothing is listened on at all.
    port : int
        0 for any free port.

    Attributes
    ----------
    address : Address
    lines : list of Line
        Of all attempts.
    """

    def __init__(self, host: str | None, port: int = 0):
        if host is None:
            from torch.distributed import HashStore

            host, port = "127.0.0.1", 9
            store = HashStore()
        else:
            store, port = listen(host, port)
        self._store: Any = store
        self.lines: list[Line] = []
        self.address = Address(host, port, secrets.token_hex(16))

    def line(self, attempt: int) -> Line:
        """The keys of one attempt."""
        self.lines.append(Line(self._store, self.address.prefix, attempt))
        return self.lines[-1]

    def close(self) -> None:
        """Stop listening; also where the traceback of an exception still holds a line."""
        for line in self.lines:
            line.store = None
        self._store = None  # the server's thread ends with the last reference


class Line:
    """Keys of one attempt of one job, from either end."""

    def __init__(self, store, prefix: str, attempt: int):
        self.store = store
        self._prefix = f"{prefix}:{attempt}:"

    def group_store(self):
        """The store of the process group of this attempt."""
        from torch.distributed import PrefixStore

        return PrefixStore(f"{self._prefix}group", self.store)

    def set(self, key: str, value: bytes | str) -> None:
        self.store.set(self._prefix + key, value)

    def set_json(self, key: str, value) -> None:
        self.set(key, json.dumps(value))

    def has(self, *keys: str) -> bool:
        """Return True if all `keys` are there."""
        return self.store.check([self._prefix + key for key in keys])

    def get(self, key: str) -> bytes:
        """The value; waits for it."""
        return self.store.get(self._prefix + key)

    def get_json(self, key: str):
        return json.loads(self.get(key))

    def count(self, key: str, by: int = 0) -> int:
        """Add to a counter and return it."""
        return self.store.add(self._prefix + key, by)

    def delete(self, key: str) -> None:
        with contextlib.suppress(RuntimeError):
            self.store.delete_key(self._prefix + key)

    def meet(self, key: str, world_size: int, longest: float = 0.05) -> None:
        """Wait until all workers are here, looking at least every `longest` seconds.

        Unlike a collective this ends by itself when one of them fails: with PeerLost.
        """
        self.count(f"meet/{key}", 1)
        pause = 0.001
        while self.count(f"meet/{key}") < world_size:
            if self.has("abort") or self.count("failed"):
                raise PeerLost("another worker failed before all had met")
            time.sleep(pause)
            pause = min(pause * 1.5, longest)

    def all_gather(self, key: str, rank: int, value, world_size: int) -> list:
        """What every worker says, in the order of their numbers; of JSON-able values."""
        self.set_json(f"{key}/{rank}", value)
        self.meet(key, world_size)
        return [self.get_json(f"{key}/{each}") for each in range(world_size)]

    def put_bytes(self, key: str, data: bytes) -> None:
        """A value of any size, in chunks; complete once ``has(key)``."""
        view = memoryview(data)
        chunks = -(-len(view) // CHUNK)
        for i in range(chunks):
            self.set(f"{key}/{i}", bytes(view[i * CHUNK : (i + 1) * CHUNK]))
        self.set(key, str(chunks))

    def take_bytes(self, key: str, *, delete: bool = True) -> bytes:
        """The value of :meth:`put_bytes`; waits for it, and frees it in the store."""
        parts = [self.get(f"{key}/{i}") for i in range(int(self.get(key)))]
        if delete:
            self.delete_bytes(key)
        return b"".join(parts)

    def delete_bytes(self, key: str) -> None:
        """Free the value of :meth:`put_bytes`, if it is there."""
        if self.has(key):
            for i in range(int(self.get(key))):
                self.delete(f"{key}/{i}")
            self.delete(key)

    def push(self, queue: str, doc, data: bytes | None = None) -> None:
        """Append to a queue that the driver reads as an :class:`Inbox`."""
        index = self.count(f"{queue}#", 1) - 1
        if data is not None:
            self.put_bytes(f"{queue}@{index}/data", data)
        self.set_json(f"{queue}@{index}", doc)


class Inbox:
    """The driver's end of a queue.

    Parameters
    ----------
    line : Line
    queue : str
    data : bool
        Whether the entries have bytes.
    """

    def __init__(self, line: Line, queue: str, *, data: bool = False):
        self._line, self._queue, self._data = line, queue, data
        self._next = 0

    def take(self, *, final: bool = False) -> Iterator[tuple[dict, bytes | None]]:
        """Yield the entries that have come, as far as they are complete, in order.

        With `final` nobody writes any more: what a worker left half written is passed over.
        """
        line = self._line
        for index in range(self._next, line.count(f"{self._queue}#")):
            key = f"{self._queue}@{index}"
            if line.has(key):
                doc = line.get_json(key)
                line.delete(key)
                self._next = index + 1
                yield doc, line.take_bytes(f"{key}/data") if self._data else None
            elif not final:
                return
