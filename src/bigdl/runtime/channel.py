"""The channel between the driver and the workers of a running job.

It is a :class:`~bigdl.runtime.key_value_store.KeyValueStore` in the driver's Python process, whose
server listens on the driver's address (loopback in local mode).  It outlives every worker, so it
carries the rendezvous, heartbeats, progress, logs, errors, results and stop requests.  It carries
bytes and JSON: data from workers is never unpickled.  Every connection and every message is
authenticated by the job's secret, which is sent with the tasks and never over the channel; see
:mod:`~bigdl.runtime.key_value_store`.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from bigdl.common.timeouts import CONNECTION_TURN_S, GREETING_S, HANDSHAKE_S, WORKER_CONNECT_S
from bigdl.runtime.certificate import Certificate
from bigdl.runtime.engine import PeerLost
from bigdl.runtime.key_value_store import (
    GREETING_SIZE,
    LITTLE,
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
    from bigdl.runtime.collectives.tunnel import Tunnels
    from bigdl.runtime.group_store import GroupStore

CHUNK = 8 << 20  # maximum bytes of one value


class Unreachable(Exception):
    """Raised when a worker cannot open a connection to the channel."""


class _Displaced(Exception):
    """Raised when the server closed a connection to admit others; the client then retries."""


class ConnectionLost(RuntimeError):
    """Raised when a connection breaks because the other process or the network failed."""


@dataclass(frozen=True)
class Address:
    """Host and port of a channel, the job's secret, and the certificate if TLS is used.

    An address gives all rights of a worker, so it is sent with the tasks only.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    certificate: Certificate | None = field(default=None, repr=False)

    def connect(self, attempt: int) -> AttemptChannel:
        """Connect to the channel for one attempt of the job.

        Raises
        ------
        Unreachable
            If no connection can be opened within `WORKER_CONNECT_S` seconds.
        """
        return AttemptChannel(Connection(self), attempt)


def outgoing_address(host: str, port: int) -> str:
    """Return, without sending a packet, this machine's IP address on the route to another host."""
    family, _, _, _, other = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(other)
        return str(probe.getsockname()[0])


class Connection:
    """Client of a key-value store in another process; it has the methods of ``KeyValueStore``.

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
        """Close the connection to the store."""
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    __del__ = close

    def hang_up(self) -> None:
        """Shut the connection down even if another thread waits for an answer."""
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def set(self, key: str, value: bytes) -> None:
        """Set a value and wait until the server has stored it."""
        self._request(["set", key], value)

    def post(self, key: str, value: bytes) -> None:
        """Set a value without waiting; later requests see it."""
        self._request(["post", key], value, is_answered=False)

    def get(self, key: str, seconds: float | None = None) -> bytes:
        """Return a value; wait until it is set."""
        for wait in _waits(seconds):
            is_set, value = self._request(["get", key, wait])
            if is_set:
                return value
        raise TimeoutError(f"the key {key!r} was not set in time")

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of `keys`, which must all exist."""
        sizes, data = self._request(["get_all", list(keys)])
        ends = list(accumulate(sizes, initial=0))
        return [data[start:end] for start, end in pairwise(ends)]

    def has(self, keys: Sequence[str], seconds: float | None = 0) -> bool:
        """Wait until all `keys` exist and return True; return False on timeout."""
        return any(self._request(["has", list(keys), wait])[0] for wait in _waits(seconds))

    def add(self, key: str, by: int) -> int:
        """Add `by` to a counter and return its new value."""
        return int(self._request(["add", key, by])[0])

    def swap(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Replace a value if it equals `expected`; return the resulting value."""
        return self._request(["swap", key, len(expected)], expected + value)[1]

    def delete(self, key: str) -> bool:
        """Delete a value; return False if it did not exist."""
        return bool(self._request(["delete", key])[0])

    def call(self, name: str, body: bytes) -> bytes:
        """Call a function that the driver registered, and return its result."""
        return self._request(["call", name], body)[1]

    def post_call(self, name: str, body: bytes) -> None:
        """Call a function that the driver registered without waiting; later calls run after it."""
        self._request(["post_call", name], body, is_answered=False)

    def set_on_disconnect(self, key: str) -> None:
        """Register a key that the server sets when this connection ends for any reason."""
        self._request(["will", key])

    def _open(self) -> None:
        """Connect to the server; retry if the server closes the connection to admit others."""
        end = time.monotonic() + HANDSHAKE_S
        while True:
            try:
                return self._connect()
            except _Displaced as error:
                if time.monotonic() > end:
                    raise Unreachable(
                        f"{self.address.host}:{self.address.port} (it closed every connection "
                        f"for {HANDSHAKE_S:g} s; other programs may open too many connections)"
                    ) from error
                time.sleep(random.uniform(0.02, 0.2))

    def _connect(self) -> None:
        endpoint = f"{self.address.host}:{self.address.port}"
        is_greeted = False
        try:
            connection = socket.create_connection(
                (self.address.host, self.address.port), WORKER_CONNECT_S
            )
        except OSError as error:
            raise Unreachable(f"{endpoint} ({error})") from error
        try:
            keep_alive(connection)
            connection.settimeout(GREETING_S)
            if self.address.certificate is not None:
                tls = self.address.certificate.context(server=False)
                connection = tls.wrap_socket(connection)
            handshake = Handshake(self.address.secret)
            greeting = _receive(connection, GREETING_SIZE)
            is_greeted = True
            connection.sendall(handshake.answer(greeting))
            proof = _receive(connection, len(TRY_AGAIN))
            if proof == TRY_AGAIN:
                raise _Displaced
            handshake.finish(proof + _receive(connection, PROOF_SIZE - len(TRY_AGAIN)))
            connection.settimeout(None)  # a driver in a debugger answers late
        except (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, _Displaced) as error:
            connection.close()
            raise _Displaced from error
        except (OSError, AuthenticationFailed) as error:
            connection.close()
            if not is_greeted and isinstance(error, ConnectionError):
                raise _Displaced from error
            raise Unreachable(f"{endpoint} ({error})") from error
        self._socket = connection
        self._sender, self._receiver = (
            handshake.authenticator(b"client"),
            handshake.authenticator(b"server"),
        )

    def _request(
        self, head: list[Any], body: bytes | str = b"", *, is_answered: bool = True
    ) -> tuple[Any, bytes]:
        with self._lock:
            if self._lost is not None:
                raise ConnectionLost(self._lost)
            try:
                if self._socket is None:  # an exception interrupted a message
                    self._open()
                connection: Any = self._socket
                pieces = self._sender.sign(head, body)
                for piece in [b"".join(pieces)] if len(body) < LITTLE else pieces:
                    connection.sendall(piece)
                if not is_answered:
                    return None, b""
                sizes = _receive(connection, SIZES_SIZE)
                answer = [_receive(connection, size) for size in read_sizes(sizes)]
                tag = _receive(connection, self._receiver.tag_size)
                return self._receiver.verify(sizes, answer[0], answer[1], tag)
            except (OSError, AuthenticationFailed, Unreachable) as error:
                self.close()
                self._lost = f"The connection to the channel is lost: {error}"
                raise ConnectionLost(self._lost) from error
            except BaseException:
                self.close()
                raise


def _receive(connection: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes from a socket."""
    buffer = bytearray(size)
    view, done = memoryview(buffer), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            raise ConnectionError("it was closed")
        done += count
    return bytes(buffer)


def _waits(seconds: float | None) -> Iterator[float]:
    """Yield short timeouts that add up to `seconds`, or endlessly if `seconds` is None."""
    end = float("inf") if seconds is None else time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        yield max(0.0, min(left, CONNECTION_TURN_S))
        if left <= CONNECTION_TURN_S:
            return


class Channel:
    """The driver's end of the channel, with the key-value store and its server.

    Parameters
    ----------
    host : str or None
        Address of the driver that the workers can reach; the server listens on it only. None is for
        a worker in this process: no server runs.
    port : int
        Port of the server; 0 for any free port.
    secret : bytes, optional
        Authenticates the workers of the job; default: a new secret.
    certificate : Certificate, optional
        Encrypts the connections; by default the traffic is not encrypted.

    Attributes
    ----------
    address : Address
    attempts : list of AttemptChannel
        Views of all attempts.
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
        """Create and return the :class:`AttemptChannel` of one attempt."""
        self.attempts.append(AttemptChannel(self._store, attempt))
        return self.attempts[-1]

    def close(self) -> None:
        """Stop the server; release the store even if a traceback refers to an attempt's channel."""
        for each in self.attempts:
            each.store = None
        self._store = None
        server, self._server = self._server, None
        if server is not None:
            server.close()


class AttemptChannel:
    """View of a channel for one attempt, which prefixes all keys with the attempt's number.

    The driver uses it over the store, workers over a connection to the store.

    Parameters
    ----------
    store : KeyValueStore or Connection
    attempt : int
    """

    def __init__(self, store: Any, attempt: int):
        self.store = store
        self._prefix = f"{attempt}:"
        self._group_stores: list[Any] = []

    def group_store(
        self, tunnels: Tunnels | None = None, rank: int = 0, group: int = 0
    ) -> GroupStore:
        """Return the store of this attempt's process group, for ``torch.distributed``.

        Parameters
        ----------
        tunnels : bigdl.runtime.collectives.tunnel.Tunnels, optional
            Encrypted tunnels between the workers.
        rank : int
            Rank of this worker; needed with tunnels.
        group : int
            Number of the group, see :mod:`bigdl.runtime.recovery`.
        """
        from bigdl.runtime.collectives.tunnel import TunnelStore
        from bigdl.runtime.group_store import GroupStore

        prefix = f"{self._prefix}group/{f'{group}/' if group else ''}"
        if tunnels is None:
            broken = f"{self._prefix}broken/{group}" if group else None
            store = GroupStore(self.store, prefix, broken)
        else:
            store = TunnelStore(self.store, prefix, tunnels, rank)
        self._group_stores.append(store)  # torch keeps a reference to the C++ object only
        return store

    def part(self, name: str) -> AttemptChannel:
        """Return a view with separate keys, which some workers of this attempt share."""
        view = AttemptChannel(self.store, 0)
        view._prefix = f"{self._prefix}{name}/"
        return view

    def set(self, key: str, value: bytes | str) -> None:
        """Set the value of a key of this attempt."""
        self.store.set(self._prefix + key, value.encode() if isinstance(value, str) else value)

    def set_json(self, key: str, value: object) -> None:
        """Set the value of a key of this attempt as JSON."""
        self.set(key, json.dumps(value))

    def has(self, *keys: str, seconds: float = 0) -> bool:
        """Wait until all `keys` exist and return True; return False after `seconds`."""
        return bool(self.store.has([self._prefix + key for key in keys], seconds))

    def get(self, key: str) -> bytes:
        """Return the value of a key of this attempt; wait until it is set."""
        return bytes(self.store.get(self._prefix + key))

    def get_json(self, key: str) -> Any:  # a JSON value
        """Return the JSON value of a key of this attempt; wait until it is set."""
        return json.loads(self.get(key))

    def count(self, key: str, by: int = 0) -> int:
        """Add `by` to a counter of this attempt and return its new value."""
        return int(self.store.add(self._prefix + key, by))

    def set_on_disconnect(self, key: str) -> None:
        """Register a key that is set when this worker's connection ends."""
        self.store.set_on_disconnect(self._prefix + key)

    def call(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """Call a function of the driver with a JSON request; return its JSON result."""
        return dict(json.loads(self.call_bytes(name, json.dumps(request).encode())))

    def post_call(self, name: str, request: dict[str, Any]) -> None:
        """Call a function of the driver without waiting for its result."""
        self.store.post_call(self._prefix + name, json.dumps(request).encode())

    def call_bytes(self, name: str, request: bytes) -> bytes:
        """Call a function of the driver that takes and returns bytes."""
        return bytes(self.store.call(self._prefix + name, request))

    def answer_calls(
        self, name: str, function: Callable[[dict[str, Any]], dict[str, Any]], executor: Executor
    ) -> None:
        """Let workers call a function of this process, which must not raise.

        Parameters
        ----------
        name : str
        function : callable
            Takes and returns JSON-serializable values.
        executor : concurrent.futures.Executor
            Threads in which it runs.
        """

        def answer(body: bytes) -> bytes:
            return json.dumps(function(json.loads(body))).encode()

        self.answer_bytes(name, answer, executor)

    def answer_bytes(
        self, name: str, function: Callable[[bytes], bytes], executor: Executor
    ) -> None:
        """Let workers call a function of this process that takes and returns bytes."""
        self.store.register_function(self._prefix + name, function, executor)

    def when(self, key: str, wake: Callable[[], object]) -> None:
        """Call `wake` once when a key exists, in an arbitrary thread; it must not block."""
        if self.store.register_waiter([self._prefix + key], wake) is None:
            wake()

    def delete(self, key: str) -> None:
        """Delete a key of this attempt."""
        self.store.delete(self._prefix + key)

    def clear(self) -> None:
        """Delete all keys of this view, whose store must be in this process."""
        self.store.delete_prefix(self._prefix)

    def barrier(
        self, key: str, world_size: int, longest: float | None = None, broken: str = ""
    ) -> None:
        """Wait until all workers arrive; check for failures every `longest` seconds.

        The default is 0.1 s, or 0.01 s times the number of workers if that is more, since one
        thread answers all of them. Raises PeerLost if a worker fails, or if the key `broken` is
        set; a collective would hang.
        """
        if self.count(f"meet/{key}", 1) >= world_size:
            self.set(f"met/{key}", "")
            return
        longest = max(0.1, world_size / 100) if longest is None else longest
        while not self.has(f"met/{key}", seconds=longest):
            is_broken = broken and self.has(broken)
            if is_broken or self.has("abort") or self.count("failed"):
                raise PeerLost("another worker failed before all reached the barrier")

    def all_gather(self, key: str, rank: int, value: object, world_size: int) -> list[Any]:
        """Return the JSON-serializable values of all workers in rank order."""
        self.set_json(f"{key}/{rank}", value)
        self.barrier(key, world_size)
        keys = [f"{self._prefix}{key}/{each}" for each in range(world_size)]
        return [json.loads(value) for value in self.store.get_all(keys)]

    def put_bytes(self, key: str, data: bytes) -> None:
        """Set a value of any size in chunks; it is complete when ``has(key)`` returns True."""
        view = memoryview(data)
        chunks = -(-len(view) // CHUNK)
        for i in range(chunks):
            chunk = bytes(view[i * CHUNK : (i + 1) * CHUNK])
            self.store.post(f"{self._prefix}{key}/{i}", chunk)
        self.set(key, str(chunks))

    def take_bytes(self, key: str, *, delete: bool = True) -> bytes:
        """Wait for a value that :meth:`put_bytes` sets, return it, and delete it by default."""
        parts = [self.get(f"{key}/{i}") for i in range(int(self.get(key)))]
        if delete:
            self.delete_bytes(key)
        return b"".join(parts)

    def delete_bytes(self, key: str) -> None:
        """Delete a value that :meth:`put_bytes` set, if it exists."""
        if self.has(key):
            for i in range(int(self.get(key))):
                self.delete(f"{key}/{i}")
            self.delete(key)

    def push(self, queue: str, doc: object, data: bytes | None = None) -> None:
        """Append JSON values and optional bytes to a queue that a :class:`QueueReader` reads."""
        index = self.count(f"{queue}#", 1) - 1
        if data is not None:
            self.put_bytes(f"{queue}@{index}/data", data)
        self.set_json(f"{queue}@{index}", doc)


class QueueReader:
    """The driver's reader of a queue of the channel.

    Parameters
    ----------
    channel : AttemptChannel
    queue : str
    data : bool
        Whether the entries have binary data.
    """

    def __init__(self, channel: AttemptChannel, queue: str, *, data: bool = False):
        self._channel, self._queue, self._data = channel, queue, data
        self._next = 0

    def take(self, *, final: bool = False) -> Iterator[tuple[dict[str, Any], bytes | None]]:
        """Remove and yield the (JSON values, bytes) entries that have arrived completely, in order.

        With `final`, all writers have ended, and incomplete entries are skipped.
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
