"""The Channel: the line between the driver and the workers while a job runs.

It is a :class:`~bigdl.runtime.key_value_store.KeyValueStore` in the driver's Python process, whose
server is bound to the driver's own address (loopback in local mode).  It outlives every worker, so
it carries the rendezvous, the heartbeat, progress, logs, errors, results and the order to stop.  It
carries bytes and JSON: nothing that comes from a worker is ever unpickled.  Every connection and
every message is proved by the secret of the run, which travels with the tasks and never over the
channel; see :mod:`~bigdl.runtime.key_value_store`.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from bigdl.common.timeouts import CONNECTION_TURN_S, GREETING_S, HANDSHAKE_S, WORKER_CONNECT_S
from bigdl.runtime.certificate import Certificate
from bigdl.runtime.engine import PeerLost
from bigdl.runtime.key_value_store import (
    GREETING_SIZE,
    PROOF_SIZE,
    SIZES_SIZE,
    TRY_AGAIN,
    AuthenticationFailed,
    Handshake,
    KeyValueServer,
    KeyValueStore,
    keep_alive,
    listen,
    new_secret,
    read_sizes,
)

if TYPE_CHECKING:
    from bigdl.runtime.group_store import GroupStore

CHUNK = 8 << 20  # bytes of one value


class Unreachable(Exception):
    """A worker cannot open a connection to the channel."""


class _Displaced(Exception):
    """The other end has closed a connection to take others, before it could be proved."""


class ConnectionLost(RuntimeError):
    """The process at the other end of a line, or the way to it, is gone."""


@dataclass(frozen=True)
class Address:
    """Host and port of a channel, the secret of its run, and the certificate if it is encrypted.

    Whoever has an address can do everything that a worker can: it travels with the tasks only.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    certificate: Certificate | None = field(default=None, repr=False)

    def connect(self, attempt: int) -> AttemptChannel:
        """Open a line to the channel, for one attempt.

        Raises
        ------
        Unreachable
            If no connection can be opened within `WORKER_CONNECT_S` seconds.
        """
        return AttemptChannel(Connection(self), attempt)


def outgoing_address(host: str, port: int) -> str:
    """The address of this machine on the route to another one; nothing is sent."""
    family, _, _, _, other = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(other)
        return str(probe.getsockname()[0])


class Connection:
    """A key-value store in another process, with the methods of a ``KeyValueStore``.

    Parameters
    ----------
    address : Address

    Raises
    ------
    Unreachable
        If no connection can be opened, or the other end does not know the secret.
    """

    _socket: socket.socket | None = None

    def __init__(self, address: Address):
        self.address = address
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._open()

    def close(self) -> None:
        """Hang up."""
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    __del__ = close

    def hang_up(self) -> None:
        """Hang up although another thread waits for an answer, which is told that it is gone."""
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def set(self, key: str, value: bytes) -> None:
        """Put a value in the store; returns when it is there."""
        self._ask(["set", key], value)

    def post(self, key: str, value: bytes) -> None:
        """Put a value in the store; it is there before what is asked next."""
        self._ask(["post", key], value, is_answered=False)

    def get(self, key: str, seconds: float | None = None) -> bytes:
        """The value; waits for it."""
        for wait in _waits(seconds):
            found, value = self._ask(["get", key, wait])
            if found:
                return value
        raise TimeoutError(f"nobody has set {key!r}")

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are there."""
        sizes, data = self._ask(["get_all", list(keys)])
        ends = list(accumulate(sizes, initial=0))
        return [data[start:end] for start, end in pairwise(ends)]

    def has(self, keys: Sequence[str], seconds: float | None = 0) -> bool:
        """Return True if all `keys` are there, at the latest after some seconds."""
        return any(self._ask(["has", list(keys), wait])[0] for wait in _waits(seconds))

    def add(self, key: str, by: int) -> int:
        """Add to a counter and return it."""
        return int(self._ask(["add", key, by])[0])

    def swap(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Replace a value that is as expected; returns what is there afterwards."""
        return self._ask(["swap", key, len(expected)], expected + value)[1]

    def delete(self, key: str) -> bool:
        """Remove a value; False if there is none."""
        return bool(self._ask(["delete", key])[0])

    def set_on_disconnect(self, key: str) -> None:
        """Have a key set as soon as this connection ends, however this process does."""
        self._ask(["will", key])

    def _open(self) -> None:
        """Connect; again where the other end has too many connections to wait for this one."""
        end = time.monotonic() + HANDSHAKE_S
        while True:
            try:
                return self._connect()
            except _Displaced as error:
                if time.monotonic() > end:
                    raise Unreachable(
                        f"{self.address.host}:{self.address.port} (it closed every connection "
                        f"for {HANDSHAKE_S:g} s; others that are not of this run may open too many)"
                    ) from error
                time.sleep(random.uniform(0.02, 0.2))

    def _connect(self) -> None:
        where = f"{self.address.host}:{self.address.port}"
        is_greeted = False
        try:
            connection = socket.create_connection(
                (self.address.host, self.address.port), WORKER_CONNECT_S
            )
        except OSError as error:
            raise Unreachable(f"{where} ({error})") from error
        try:
            keep_alive(connection)
            connection.settimeout(GREETING_S)
            if self.address.certificate is not None:
                tls = self.address.certificate.context(server=False)
                connection = tls.wrap_socket(connection)
            hands = Handshake(self.address.secret)
            greeting = _received(connection, GREETING_SIZE)
            is_greeted = True
            connection.sendall(hands.answer(greeting))
            proof = _received(connection, len(TRY_AGAIN))
            if proof == TRY_AGAIN:
                raise _Displaced
            hands.finish(proof + _received(connection, PROOF_SIZE - len(TRY_AGAIN)))
            connection.settimeout(None)  # a driver that is stopped in a debugger answers late
        except (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, _Displaced) as error:
            connection.close()
            raise _Displaced from error
        except (OSError, AuthenticationFailed) as error:
            connection.close()
            if not is_greeted and isinstance(error, ConnectionError):
                raise _Displaced from error
            raise Unreachable(f"{where} ({error})") from error
        self._socket = connection
        self._ours, self._theirs = hands.authenticator(b"client"), hands.authenticator(b"server")

    def _ask(
        self, head: list[Any], body: bytes | str = b"", *, is_answered: bool = True
    ) -> tuple[Any, bytes]:
        with self._lock:
            if self._lost is not None:
                raise ConnectionLost(self._lost)
            try:
                if self._socket is None:  # an exception of this process broke off a message
                    self._open()
                connection: Any = self._socket
                pieces = self._ours.close(head, body)
                for piece in [b"".join(pieces)] if len(body) < _LITTLE else pieces:
                    connection.sendall(piece)
                if not is_answered:
                    return None, b""
                sizes = _received(connection, SIZES_SIZE)
                answer = [_received(connection, size) for size in read_sizes(sizes)]
                tag = _received(connection, self._theirs.tag_size)
                return self._theirs.open(sizes, answer[0], answer[1], tag)
            except (OSError, AuthenticationFailed, Unreachable) as error:
                self.close()
                self._lost = f"The connection to the channel is gone: {error}"
                raise ConnectionLost(self._lost) from error
            except BaseException:
                self.close()
                raise


_LITTLE = 1 << 16  # bytes that are copied rather than sent by themselves


def _received(connection: socket.socket, size: int) -> bytes:
    """So many bytes of a connection."""
    buffer = bytearray(size)
    view, done = memoryview(buffer), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            raise ConnectionError("it was closed")
        done += count
    return bytes(buffer)


def _waits(seconds: float | None) -> Iterator[float]:
    """Yield the shares of a time to wait; at least one, and without end for None."""
    end = float("inf") if seconds is None else time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        yield max(0.0, min(left, CONNECTION_TURN_S))
        if left <= CONNECTION_TURN_S:
            return


class Channel:
    """The driver's end of the channel: what workers ask, and say, arrives here.

    Parameters
    ----------
    host : str or None
        Address of the driver that the workers can reach; nothing else is listened on. Without one
        it is for a worker in this process, and nothing is listened on at all.
    port : int
        0 for any free port.
    secret : bytes, optional
        What proves who belongs to the run; default a new one.
    certificate : Certificate, optional
        Encrypts what is said; by default it can be read on the network.

    Attributes
    ----------
    address : Address
    attempts : list of AttemptChannel
        Of all attempts.
    """

    def __init__(
        self,
        host: str | None,
        port: int = 0,
        secret: bytes | None = None,
        certificate: Certificate | None = None,
    ):
        secret = secret or new_secret()
        self._store: Any = KeyValueStore()
        self._server: KeyValueServer | None = None
        if host is None:
            host, port = "127.0.0.1", 9
        else:
            listener = listen(host, port)
            port = listener.getsockname()[1]
            self._server = KeyValueServer(self._store, secret, listener, certificate)
        self.attempts: list[AttemptChannel] = []
        self.address = Address(host, port, secret, certificate)

    def attempt(self, attempt: int) -> AttemptChannel:
        """The keys of one attempt."""
        self.attempts.append(AttemptChannel(self._store, attempt))
        return self.attempts[-1]

    def close(self) -> None:
        """Stop listening; also where the traceback of an exception still holds a line."""
        for each in self.attempts:
            each.store = None
        self._store = None
        server, self._server = self._server, None
        if server is not None:
            server.close()


class AttemptChannel:
    """The view of a channel that one attempt of a job has: keys with the attempt's prefix.

    Driver and workers use the same class, over the store or over a connection to it.

    Parameters
    ----------
    store : KeyValueStore or Connection
    attempt : int
    """

    def __init__(self, store: Any, attempt: int):
        self.store = store
        self._prefix = f"{attempt}:"
        self._group_stores: list[Any] = []

    def group_store(self, tunnels: Any = None, rank: int = 0) -> GroupStore:
        """The store of the process group of this attempt, for ``torch.distributed``.

        Parameters
        ----------
        tunnels : bigdl.runtime.collectives.tunnel.Tunnels, optional
            Through which the workers reach each other.
        rank : int
            Of this worker, with tunnels.
        """
        from bigdl.runtime.collectives.tunnel import TunnelStore
        from bigdl.runtime.group_store import GroupStore

        prefix = f"{self._prefix}group/"
        if tunnels is None:
            store = GroupStore(self.store, prefix)
        else:
            store = TunnelStore(self.store, prefix, tunnels, rank)
        self._group_stores.append(store)  # torch itself keeps only what C++ sees of it
        return store

    def set(self, key: str, value: bytes | str) -> None:
        self.store.set(self._prefix + key, value.encode() if isinstance(value, str) else value)

    def set_json(self, key: str, value: object) -> None:
        self.set(key, json.dumps(value))

    def has(self, *keys: str, seconds: float = 0) -> bool:
        """Return True as soon as all `keys` are there, False if they are not after some seconds."""
        return bool(self.store.has([self._prefix + key for key in keys], seconds))

    def get(self, key: str) -> bytes:
        """The value; waits for it."""
        return bytes(self.store.get(self._prefix + key))

    def get_json(self, key: str) -> Any:
        return json.loads(self.get(key))

    def count(self, key: str, by: int = 0) -> int:
        """Add to a counter and return it."""
        return int(self.store.add(self._prefix + key, by))

    def set_on_disconnect(self, key: str) -> None:
        """Have a key set as soon as the connection of this line ends; for lines of workers."""
        self.store.set_on_disconnect(self._prefix + key)

    def delete(self, key: str) -> None:
        self.store.delete(self._prefix + key)

    def barrier(self, key: str, world_size: int, longest: float | None = None) -> None:
        """Wait until all workers are here, looking for failures every `longest` seconds.

        The default is 0.1, and a hundredth for each of more workers than ten: one thread answers.
        Unlike a collective this ends by itself when one of them fails: with PeerLost.
        """
        if self.count(f"meet/{key}", 1) >= world_size:
            self.set(f"met/{key}", "")
            return
        longest = max(0.1, world_size / 100) if longest is None else longest
        while not self.has(f"met/{key}", seconds=longest):
            if self.has("abort") or self.count("failed"):
                raise PeerLost("another worker failed before all had met")

    def all_gather(self, key: str, rank: int, value: object, world_size: int) -> list[Any]:
        """Return the JSON-able values of all workers in the order of their ranks."""
        self.set_json(f"{key}/{rank}", value)
        self.barrier(key, world_size)
        keys = [f"{self._prefix}{key}/{each}" for each in range(world_size)]
        return [json.loads(value) for value in self.store.get_all(keys)]

    def put_bytes(self, key: str, data: bytes) -> None:
        """A value of any size, in chunks; complete once ``has(key)``."""
        view = memoryview(data)
        chunks = -(-len(view) // CHUNK)
        for i in range(chunks):
            chunk = bytes(view[i * CHUNK : (i + 1) * CHUNK])
            self.store.post(f"{self._prefix}{key}/{i}", chunk)
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

    def push(self, queue: str, doc: object, data: bytes | None = None) -> None:
        """Append to a queue that the driver reads as an :class:`QueueReader`."""
        index = self.count(f"{queue}#", 1) - 1
        if data is not None:
            self.put_bytes(f"{queue}@{index}/data", data)
        self.set_json(f"{queue}@{index}", doc)


class QueueReader:
    """The driver's end of a queue.

    Parameters
    ----------
    channel : AttemptChannel
    queue : str
    data : bool
        Whether the entries have bytes.
    """

    def __init__(self, channel: AttemptChannel, queue: str, *, data: bool = False):
        self._channel, self._queue, self._data = channel, queue, data
        self._next = 0

    def take(self, *, final: bool = False) -> Iterator[tuple[dict[str, Any], bytes | None]]:
        """Yield the entries that have come, as far as they are complete, in order.

        With `final` nobody writes any more: what a worker left half written is passed over.
        """
        channel = self._channel
        for index in range(self._next, channel.count(f"{self._queue}#")):
            key = f"{self._queue}@{index}"
            if channel.has(key):
                doc = channel.get_json(key)
                channel.delete(key)
                self._next = index + 1
                yield doc, channel.take_bytes(f"{key}/data") if self._data else None
            elif not final:
                return
