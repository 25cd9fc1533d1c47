"""Authenticated key-value store that the processes of a job share, and its server.

A :class:`KeyValueStore` is in one process, the driver or rank 0, which uses it directly.  Other
processes use a :class:`KeyValueServer`: one thread that listens on one address and answers clients
that know the job's secret.  Any other connection is closed with a log message and changes nothing.
:mod:`~bigdl.runtime.channel` has the client.

Both ends know a secret that is never sent over the connection.  In the handshake
(:class:`Handshake`) each end sends a random nonce, and proves its knowledge of the secret by an
HMAC over both nonces.  The connection's message keys are derived from the same nonces, so messages
of other connections cannot be replayed.  A frame is a short JSON head and a body of bytes, both of
limited size.  Its tag (:class:`MessageAuthenticator`) covers the frame number, too.  Forged,
repeated, missing or reordered frames raise :class:`AuthenticationFailed`.  Nothing is ever
unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import socket
import ssl
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, cast

from bigdl.common.errors import UsageError
from bigdl.common.platform.network import set_keepalive
from bigdl.common.platform.processes import open_file_limits
from bigdl.common.timeouts import HANDSHAKE_S, STORE_REQUEST_S
from bigdl.runtime.certificate import Certificate

logger = logging.getLogger("bigdl.orca")

_MOST_UNAUTHENTICATED = (
    256  # maximum concurrent connections in their handshake; the oldest is closed
)
_BACKLOG = 1024  # connections waiting to be accepted
_LOGGED = 20  # closed connections that are logged; later only every hundredth
_BUFFER = 1 << 20  # bytes of read-ahead

HEAD_LIMIT = 1 << 20  # maximum bytes of a head
BODY_LIMIT = 256 << 20  # maximum bytes of a body

_MAGIC = b"BigDL\x00\x00\x01"
_NONCE = 32
_PROOF = 32
_SIZES = struct.Struct("!II")
_NUMBER = struct.Struct("!Q")

GREETING_SIZE = len(_MAGIC) + _NONCE  # bytes of the server's greeting
ANSWER_SIZE = _NONCE + _PROOF  # bytes of the client's answer
PROOF_SIZE = _PROOF  # bytes of the server's proof
SIZES_SIZE = _SIZES.size
LITTLE = 1 << 16  # smaller bodies are joined with their head to one packet
TRY_AGAIN = b"BigDL\x00\x00\xff"  # sent instead of the proof when the server is overloaded


class AuthenticationFailed(Exception):
    """Raised when the other end does not know the job's secret or violates the frame protocol."""


def new_secret() -> bytes:
    """Return a random secret for one job."""
    return secrets.token_bytes(32)


class Handshake:
    """Handshake that authenticates both ends of a connection and derives its message keys.

    Parameters
    ----------
    secret : bytes
    """

    def __init__(self, secret: bytes):
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE)
        self._nonces = b""

    # -- server ------------------------------------------------------------------------------------

    def greeting(self) -> bytes:
        """Return the server's greeting."""
        return _MAGIC + self._nonce

    def check(self, answer: bytes) -> bytes:
        """Verify the client's answer to the greeting and return the server's proof."""
        self._nonces = self._nonce + answer[:_NONCE]
        self._verify(b"client", answer[_NONCE:])
        return self._digest(b"server")

    # -- client ------------------------------------------------------------------------------------

    def answer(self, greeting: bytes) -> bytes:
        """Return the client's answer to the server's greeting."""
        if greeting[: len(_MAGIC)] != _MAGIC:
            raise AuthenticationFailed("it is no channel, or a channel of another version")
        self._nonces = greeting[len(_MAGIC) :] + self._nonce
        return self._nonce + self._digest(b"client")

    def finish(self, proof: bytes) -> None:
        """Verify the server's authentication proof."""
        self._verify(b"server", proof)

    # -- both ends ---------------------------------------------------------------------------------

    def authenticator(self, sender: bytes) -> MessageAuthenticator:
        """Return the authenticator for messages from ``b"client"`` or ``b"server"``."""
        return MessageAuthenticator(self._digest(b"key of the " + sender))

    def _digest(self, purpose: bytes) -> bytes:
        return hmac.digest(self._secret, purpose + b"\0" + self._nonces, hashlib.sha256)

    def _verify(self, sender: bytes, proof: bytes) -> None:
        if not hmac.compare_digest(self._digest(sender), proof):
            raise AuthenticationFailed("it does not know the secret of the job")


class MessageAuthenticator:
    """Authenticator that signs or verifies the frames of one direction of a connection.

    Parameters
    ----------
    key : bytes
    """

    tag_size = 32

    def __init__(self, key: bytes):
        self._mac = hmac.new(key, digestmod=hashlib.sha256)
        self._number = 0

    def sign(self, head: object, body: Any = b"") -> Sequence[Any]:
        """Return the parts of a signed frame in sending order.

        Parameters
        ----------
        head : JSON-serializable
        body : bytes-like
        """
        text = json.dumps(head, separators=(",", ":")).encode()
        if len(text) > HEAD_LIMIT or len(body) > BODY_LIMIT:
            size = f"{len(text)} + {len(body)} bytes"
            raise ValueError(f"a message of {size} is too large for a channel")
        sizes = _SIZES.pack(len(text), len(body))
        return sizes + text, body, self._tag(sizes, text, body)

    def verify(self, sizes: bytes, head: bytes, body: bytes, tag: bytes) -> tuple[Any, bytes]:
        """Verify a received frame and return its head and body.

        Raises
        ------
        AuthenticationFailed
        """
        if not hmac.compare_digest(self._tag(sizes, head, body), tag):
            raise AuthenticationFailed("a message is forged, repeated or out of order")
        return json.loads(head), body

    def _tag(self, *pieces: Any) -> bytes:
        mac = self._mac.copy()
        mac.update(_NUMBER.pack(self._number))
        self._number += 1
        for piece in pieces:
            mac.update(piece)
        return mac.digest()


def read_sizes(sizes: bytes) -> tuple[int, int]:
    """Return the sizes of a frame's head and body.

    Raises
    ------
    AuthenticationFailed
        If they exceed the limits of a frame.
    """
    head, body = _SIZES.unpack(sizes)
    if head > HEAD_LIMIT or body > BODY_LIMIT:
        raise AuthenticationFailed(f"a message of {head} + {body} bytes exceeds the limit")
    return head, body


class KeyWaiter:
    """A registered callback that runs when all its keys exist."""

    def __init__(self, keys: set[str], wake: Callable[[], object]):
        self.missing, self.wake = keys, wake


class KeyValueStore:
    """Thread-safe key-value store in memory.

    Values are bytes, keys are text.  Timeouts are in seconds; None waits without a limit.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, set[KeyWaiter]] = {}  # by missing key
        self._lock = threading.Lock()
        self._functions: dict[str, tuple[Callable[[bytes], bytes], Executor]] = {}

    def set(self, key: str, value: bytes) -> None:
        """Set a value and wake its waiters."""
        with self._lock:
            self._values[key] = value
            ready = self._take_ready(key)
        for each in ready:
            each.wake()

    post = set  # a local write is immediate

    def get(self, key: str, seconds: float | None = None) -> bytes:
        """Return a value; wait until it is set.

        Raises
        ------
        TimeoutError
        """
        while True:
            if not self.has([key], seconds):
                raise TimeoutError(f"the key {key!r} was not set in time")
            value = self.peek(key)
            if value is not None:
                return value

    def peek(self, key: str) -> bytes | None:
        """Return a value, or None if it is not set."""
        with self._lock:
            return self._values.get(key)

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of `keys`, which must all exist.

        Raises
        ------
        KeyError
        """
        with self._lock:
            return [self._values[key] for key in keys]

    def has(self, keys: Sequence[str], seconds: float | None = 0) -> bool:
        """Wait until all `keys` exist and return True; return False on timeout."""
        ready = threading.Event()
        waiting = self.register_waiter(keys, ready.set)
        if waiting is None:
            return True
        try:
            return seconds != 0 and ready.wait(seconds)
        finally:
            self.unregister_waiter(waiting)

    def add(self, key: str, by: int) -> int:
        """Add `by` to a counter, which starts at 0, and return its new value."""
        with self._lock:
            value = int(self._values.get(key, b"0")) + by
            self._values[key] = str(value).encode()
            ready = self._take_ready(key)
        for each in ready:
            each.wake()
        return value

    def swap(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Replace a value if it equals `expected`; set a missing value if `expected` is empty.

        Returns
        -------
        bytes
            The value afterwards; `expected` if the key has no value.
        """
        with self._lock:
            current = self._values.get(key)
            if current is None and expected:
                return expected
            if current is not None and current != expected:
                return current
            self._values[key] = value
            ready = self._take_ready(key)
        for each in ready:
            each.wake()
        return value

    def delete(self, key: str) -> bool:
        """Delete a value; return False if it did not exist."""
        with self._lock:
            return self._values.pop(key, None) is not None

    def delete_prefix(self, prefix: str) -> None:
        """Delete the values of all keys that begin with `prefix`."""
        with self._lock:
            for key in [each for each in self._values if each.startswith(prefix)]:
                del self._values[key]

    def register_function(
        self, name: str, function: Callable[[bytes], bytes], executor: Executor
    ) -> None:
        """Register a function that clients call; it runs in `executor` and must not raise."""
        with self._lock:
            self._functions[name] = function, executor

    def call(self, name: str, body: bytes) -> bytes:
        """Call a registered function and return its result."""
        return self.submit(name, body).result()

    post_call = call  # as a local write

    def submit(self, name: str, body: bytes) -> Future[bytes]:
        """Submit a call of a registered function to its executor.

        Raises
        ------
        LookupError
            If no function has this name.
        """
        with self._lock:
            function, executor = self._functions[name]
        return executor.submit(function, body)

    def register_waiter(self, keys: Sequence[str], wake: Callable[[], object]) -> KeyWaiter | None:
        """Register `wake` to run when all `keys` exist; return None if they already do."""
        with self._lock:
            waiting = KeyWaiter({key for key in keys if key not in self._values}, wake)
            for key in waiting.missing:
                self._waiting.setdefault(key, set()).add(waiting)
        return waiting if waiting.missing else None

    def unregister_waiter(self, waiting: KeyWaiter) -> None:
        """Remove a registered waiter."""
        with self._lock:
            for key in waiting.missing:
                others = self._waiting.get(key, set())
                others.discard(waiting)
                if not others:
                    self._waiting.pop(key, None)

    def _take_ready(self, key: str) -> list[KeyWaiter]:
        candidates = self._waiting.pop(key, ())
        for waiting in candidates:
            waiting.missing.discard(key)
        return [waiting for waiting in candidates if not waiting.missing]


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on one address only.

    Raises
    ------
    UsageError
        If the address does not belong to this machine, or the port is taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(cast("tuple[str, int]", address), family=family, backlog=1024)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # drops the repeated address
        raise UsageError(
            f"The driver cannot listen on {host}:{port} ({reason}); choose another port "
            "with channel_port= or another address with spark.driver.host",
            code="resource-limit",
            address=host + ":" + str(port),
        ) from error


class KeyValueServer:
    """Server thread that answers only processes that know the job's secret.

    Parameters
    ----------
    store : KeyValueStore
    secret : bytes
    listener : socket.socket
        See :func:`listen`; the server closes it.
    certificate : Certificate, optional
        Encrypts the connections.
    """

    def __init__(
        self,
        store: KeyValueStore,
        secret: bytes,
        listener: socket.socket,
        certificate: Certificate | None = None,
    ):
        self._store, self._secret, self._listener = store, secret, listener
        self._tls = certificate.context(server=True) if certificate else None
        self._unauthenticated: dict[
            asyncio.StreamWriter, str
        ] = {}  # with their addresses, oldest first
        self._displaced = weakref.WeakSet[asyncio.StreamWriter]()
        self._closed = 0
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="bigdl-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and close all connections."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._listen())

    async def _listen(self) -> None:
        server = await asyncio.start_server(
            self._serve, sock=self._listener, limit=_BUFFER, backlog=_BACKLOG
        )
        try:
            await self._stop.wait()
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection from its handshake to its end."""
        is_authenticated, wills = False, list[str]()
        try:
            keep_alive(writer.get_extra_info("socket"))
            seals = await self._authenticate(reader, writer)
            is_authenticated = True
            await self._answer_all(reader, writer, *seals, wills)
        except asyncio.CancelledError:  # the server ends; asyncio would log an error
            pass
        except asyncio.IncompleteReadError as error:
            if error.partial or not is_authenticated:
                self._log_closed(
                    writer, "a message is truncated" if error.partial else "it sent no message"
                )
        except ssl.SSLError as error:
            self._log_closed(writer, f"the TLS handshake failed ({error.reason})")
        except OSError as error:  # a killed process ends its connection like this
            if not is_authenticated:
                late = isinstance(error, TimeoutError)
                reason = (
                    f"it did not authenticate within {HANDSHAKE_S:g} s"
                    if late
                    else "it disconnected"
                )
                self._log_closed(writer, reason)
        except AuthenticationFailed as error:
            self._log_closed(writer, str(error))
        except (ValueError, TypeError, LookupError) as error:
            self._log_closed(writer, f"a message is invalid ({error})")
        finally:
            if writer not in self._displaced:  # it still has to receive the reason
                writer.transport.abort()
            for key in wills:
                self._store.set(key, b"")

    async def _authenticate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[MessageAuthenticator, MessageAuthenticator]:
        """Run the handshake and return the authenticators of both directions."""
        while len(self._unauthenticated) >= _max_unauthenticated():
            self._displace()
        self._unauthenticated[writer] = str((writer.get_extra_info("peername") or ("",))[0])
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                if self._tls is not None:
                    await writer.start_tls(self._tls)
                handshake = Handshake(self._secret)
                writer.write(handshake.greeting())
                writer.write(handshake.check(await reader.readexactly(ANSWER_SIZE)))
                return handshake.authenticator(b"client"), handshake.authenticator(b"server")
        finally:
            self._unauthenticated.pop(writer, None)

    def _displace(self) -> None:
        """Close the oldest unauthenticated connection from the host that has the most.

        A worker of this job authenticates at once, so it is rarely the oldest. A displaced worker
        retries.
        """
        counts = Counter(self._unauthenticated.values())
        host, _ = counts.most_common(1)[0]
        oldest = next(each for each, address in self._unauthenticated.items() if address == host)
        del self._unauthenticated[oldest]
        self._displaced.add(oldest)
        if self._tls is None:
            oldest.write(TRY_AGAIN)
            oldest.close()
        else:
            oldest.transport.abort()

    async def _answer_all(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        receiver: MessageAuthenticator,
        sender: MessageAuthenticator,
        wills: list[str],
    ) -> None:
        """Answer a client's requests until it disconnects; add its disconnect keys to `wills`.

        A will is a key that the server sets when the connection ends.
        """
        while True:
            sizes = await reader.readexactly(SIZES_SIZE)
            head_size, body_size = read_sizes(sizes)
            try:
                head = await reader.readexactly(head_size)
                body = await reader.readexactly(body_size)
                tag = await reader.readexactly(receiver.tag_size)
            except asyncio.IncompleteReadError as error:
                raise asyncio.IncompleteReadError(error.partial or sizes, error.expected) from None
            (verb, *arguments), body = receiver.verify(sizes, head, body, tag)
            del head, tag
            if verb == "will":
                wills.extend(map(str, arguments))
                answer: tuple[Any, bytes] | None = (None, b"")
            else:
                answer = await self._answer(verb, arguments, body)
            if answer is not None:
                pieces = sender.sign(*answer)
                for piece in [b"".join(pieces)] if len(answer[1]) < LITTLE else pieces:
                    writer.write(piece)
                await writer.drain()

    async def _answer(
        self, verb: str, arguments: list[Any], body: bytes
    ) -> tuple[Any, bytes] | None:
        """Execute a request and return the head and body of the answer, or None."""
        store = self._store
        match verb, arguments:
            case "post", [str(key)]:
                store.set(key, body)
                return None
            case "set", [str(key)]:
                store.set(key, body)
                return None, b""
            case "get", [str(key), seconds]:
                await self._wait([key], seconds)
                value = store.peek(key)
                return value is not None, value or b""
            case "get_all", [list(keys)]:
                values = store.get_all(keys)
                return [len(value) for value in values], b"".join(values)
            case "has", [list(keys), seconds]:
                return await self._wait(keys, seconds), b""
            case "add", [str(key), int(by)]:
                return store.add(key, by), b""
            case "delete", [str(key)]:
                return store.delete(key), b""
            case "post_call", [str(name)]:
                store.submit(name, body)
                return None
            case "call", [str(name)]:
                return None, await asyncio.wrap_future(store.submit(name, body))
            case "swap", [str(key), int(length)]:
                return None, store.swap(key, body[:length], body[length:])
        raise ValueError(f"unknown request: {verb}")

    async def _wait(self, keys: list[str], seconds: float) -> bool:
        """Wait until all keys exist and return True; return False after `seconds`."""
        ready = asyncio.Event()
        waiting = self._store.register_waiter(
            keys, lambda: self._loop.call_soon_threadsafe(ready.set)
        )
        if waiting is None:
            return True
        try:
            if seconds:
                async with asyncio.timeout(min(seconds, STORE_REQUEST_S)):
                    await ready.wait()
            return ready.is_set()
        except TimeoutError:
            return False
        finally:
            self._store.unregister_waiter(waiting)

    def _log_closed(self, writer: asyncio.StreamWriter, reason: str) -> None:
        if writer in self._displaced:
            reason = "too many other connections arrived before it authenticated"
        self._closed += 1
        if self._closed <= _LOGGED or self._closed % 100 == 0:
            host, port, *_ = writer.get_extra_info("peername") or ("an unknown address", 0)
            logger.warning(
                "Closed connection %d to the channel, which does not belong to this job, "
                "from %s:%d: %s",
                self._closed,
                host,
                port,
                reason,
            )


def _max_unauthenticated() -> int:
    """Return the limit of concurrent handshakes, at most a quarter of the open-file limit."""
    most, _ = open_file_limits()
    if most is None:
        return _MOST_UNAUTHENTICATED
    return max(8, min(_MOST_UNAUTHENTICATED, most // 4))


def keep_alive(connection: socket.socket) -> None:
    """Disable Nagle's algorithm; enable keepalive to detect a dead peer within two minutes.

    A process that is stopped, as in a debugger, may stay silent for any time.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    set_keepalive(connection)
