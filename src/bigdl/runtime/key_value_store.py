"""The key-value store that the processes of a run share, and its server.

A :class:`KeyValueStore` lies in one process, the driver's or that of rank 0, which uses it
directly.  The others go through a :class:`KeyValueServer`: one thread that takes connections on one
address and answers whoever proves that it knows the secret of the run.  Any other connection is
closed, with one line in the log, and changes nothing.  :mod:`~bigdl.runtime.channel` connects.

Both ends know a secret that never goes over the connection.  At its start (:class:`Handshake`) each
end sends a random nonce, and proves by an HMAC over both nonces that it knows the secret; the keys
of the connection are made of the same nonces, so nothing of another connection can be said again in
this one.  A frame (:class:`MessageAuthenticator`) is a short JSON head and a body of bytes, of
limited sizes, under a tag that also covers the number of the frame.  What is forged, repeated,
left out or out of order is a :class:`AuthenticationFailed`.  Nothing is ever unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import resource
import secrets
import socket
import ssl
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

from bigdl.common.errors import UsageError
from bigdl.common.timeouts import HANDSHAKE_S, STORE_REQUEST_S
from bigdl.runtime.certificate import Certificate

logger = logging.getLogger("bigdl.orca")

_STRANGERS = 256  # connections at once that have not proved themselves; the oldest one must go
_BACKLOG = 1024  # connections that wait to be taken
_TOLD = 20  # lines in the log about closed connections; of more only every hundredth
_BUFFER = 1 << 20  # bytes that are read ahead

HEAD_LIMIT = 1 << 20  # bytes of a head
BODY_LIMIT = 256 << 20  # bytes of a body

_MAGIC = b"BigDL\x00\x00\x01"
_NONCE = 32
_PROOF = 32
_SIZES = struct.Struct("!II")
_NUMBER = struct.Struct("!Q")

GREETING_SIZE = len(_MAGIC) + _NONCE  # of the server's first words
ANSWER_SIZE = _NONCE + _PROOF  # of the client's answer
PROOF_SIZE = _PROOF  # of the server's proof
SIZES_SIZE = _SIZES.size
TRY_AGAIN = b"BigDL\x00\x00\xff"  # instead of the server's proof, where it must take others


class AuthenticationFailed(Exception):
    """The other end does not prove that it knows the secret, or breaks the rules of the frames."""


def new_secret() -> bytes:
    """A secret for one run."""
    return secrets.token_bytes(32)


class Handshake:
    """The start of a connection; both ends go through it, and get their seals.

    Parameters
    ----------
    secret : bytes
    """

    def __init__(self, secret: bytes):
        self._secret = secret
        self._own = secrets.token_bytes(_NONCE)
        self._nonces = b""

    # -- of the server ----------------------------------------------------------------------------

    def greeting(self) -> bytes:
        """The first words of the connection."""
        return _MAGIC + self._own

    def check(self, answer: bytes) -> bytes:
        """Check the client's answer to the greeting; returns the server's own proof."""
        self._nonces = self._own + answer[:_NONCE]
        self._verify(b"client", answer[_NONCE:])
        return self._made(b"server")

    # -- of the client ----------------------------------------------------------------------------

    def answer(self, greeting: bytes) -> bytes:
        """Answer to the server's greeting."""
        if greeting[: len(_MAGIC)] != _MAGIC:
            raise AuthenticationFailed("it is no channel, or that of another version")
        self._nonces = greeting[len(_MAGIC) :] + self._own
        return self._own + self._made(b"client")

    def finish(self, proof: bytes) -> None:
        """Check the server's proof."""
        self._verify(b"server", proof)

    # -- of both ----------------------------------------------------------------------------------

    def authenticator(self, sender: bytes) -> MessageAuthenticator:
        """The seal of what ``b"client"`` or ``b"server"`` says from now on."""
        return MessageAuthenticator(self._made(b"key of the " + sender))

    def _made(self, purpose: bytes) -> bytes:
        return hmac.digest(self._secret, purpose + b"\0" + self._nonces, hashlib.sha256)

    def _verify(self, who: bytes, proof: bytes) -> None:
        if not hmac.compare_digest(self._made(who), proof):
            raise AuthenticationFailed("it does not know the secret of the run")


class MessageAuthenticator:
    """The tags of one direction of a connection, in the order of its frames.

    Parameters
    ----------
    key : bytes
    """

    tag_size = 32

    def __init__(self, key: bytes):
        self._mac = hmac.new(key, digestmod=hashlib.sha256)
        self._number = 0

    def close(self, head: Any, body: Any = b"") -> Sequence[Any]:
        """The pieces of a frame in the order in which they are sent.

        Parameters
        ----------
        head : JSON-able
        body : bytes-like
        """
        text = json.dumps(head, separators=(",", ":")).encode()
        if len(text) > HEAD_LIMIT or len(body) > BODY_LIMIT:
            size = f"{len(text)} + {len(body)} bytes"
            raise ValueError(f"a message of {size} is too large for a channel")
        sizes = _SIZES.pack(len(text), len(body))
        return sizes + text, body, self._tag(sizes, text, body)

    def open(self, sizes: bytes, head: bytes, body: bytes, tag: bytes) -> tuple[Any, bytes]:
        """The head and the body of a frame that was received.

        Raises
        ------
        AuthenticationFailed
        """
        if not hmac.compare_digest(self._tag(sizes, head, body), tag):
            raise AuthenticationFailed("a message is forged, repeated, or not in its place")
        return json.loads(head), body

    def _tag(self, *pieces: Any) -> bytes:
        mac = self._mac.copy()
        mac.update(_NUMBER.pack(self._number))
        self._number += 1
        for piece in pieces:
            mac.update(piece)
        return mac.digest()


def read_sizes(sizes: bytes) -> tuple[int, int]:
    """The sizes of a head and a body.

    Raises
    ------
    AuthenticationFailed
        If they are larger than any frame.
    """
    head, body = _SIZES.unpack(sizes)
    if head > HEAD_LIMIT or body > BODY_LIMIT:
        raise AuthenticationFailed(f"a message of {head} + {body} bytes is larger than any")
    return head, body


class KeyWaiter:
    """Somebody who waits until some keys are there."""

    def __init__(self, keys: set[str], wake: Callable[[], object]):
        self.missing, self.wake = keys, wake


class KeyValueStore:
    """Keys and values; for any number of threads.

    Values are bytes, keys are text.  What waits takes the seconds after which it gives up; None is
    for ever.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, set[KeyWaiter]] = {}  # by the key that is missing
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        """Put a value in the store."""
        with self._lock:
            self._values[key] = value
            ready = self._take_ready(key)
        for each in ready:
            each.wake()

    post = set  # nothing is on its way here

    def get(self, key: str, seconds: float | None = None) -> bytes:
        """The value; waits for it.

        Raises
        ------
        TimeoutError
        """
        while True:
            if not self.has([key], seconds):
                raise TimeoutError(f"nobody has set {key!r}")
            value = self.peek(key)
            if value is not None:
                return value

    def peek(self, key: str) -> bytes | None:
        """The value if it is there."""
        with self._lock:
            return self._values.get(key)

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are there.

        Raises
        ------
        KeyError
        """
        with self._lock:
            return [self._values[key] for key in keys]

    def has(self, keys: Sequence[str], seconds: float | None = 0) -> bool:
        """Return True if all `keys` are there, at the latest after some seconds."""
        there = threading.Event()
        waiting = self.when(keys, there.set)
        if waiting is None:
            return True
        try:
            return seconds != 0 and there.wait(seconds)
        finally:
            self.forget(waiting)

    def add(self, key: str, by: int) -> int:
        """Add to a counter and return it; one that is not there begins at 0."""
        with self._lock:
            value = int(self._values.get(key, b"0")) + by
            self._values[key] = str(value).encode()
            ready = self._take_ready(key)
        for each in ready:
            each.wake()
        return value

    def swap(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Replace a value that is as expected, or is expected to be empty and not there.

        Returns
        -------
        bytes
            What is there afterwards; `expected` where nothing is.
        """
        with self._lock:
            there = self._values.get(key)
            if there is None and expected:
                return expected
            if there is not None and there != expected:
                return there
            self._values[key] = value
            ready = self._take_ready(key)
        for each in ready:
            each.wake()
        return value

    def delete(self, key: str) -> bool:
        """Remove a value; False if there is none."""
        with self._lock:
            return self._values.pop(key, None) is not None

    def when(self, keys: Sequence[str], wake: Callable[[], object]) -> KeyWaiter | None:
        """Call `wake` from some thread when all `keys` are there; None if they are."""
        with self._lock:
            waiting = KeyWaiter({key for key in keys if key not in self._values}, wake)
            for key in waiting.missing:
                self._waiting.setdefault(key, set()).add(waiting)
        return waiting if waiting.missing else None

    def forget(self, waiting: KeyWaiter) -> None:
        """Call nobody any more."""
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
    """A socket that listens on one address only.

    Raises
    ------
    UsageError
        If the address is not this machine's or the port is taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(cast("tuple[str, int]", address), family=family, backlog=1024)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # where the address comes once more
        raise UsageError(
            f"The driver cannot listen on {host}:{port} ({reason}); choose another port "
            "with channel_port= or another address with spark.driver.host",
            code="resource-limit",
            address=host + ":" + str(port),
        ) from error


class KeyValueServer:
    """Answers the processes that know the secret of the run, in a thread of its own.

    Parameters
    ----------
    store : KeyValueStore
    secret : bytes
    listener : socket.socket
        See :func:`listen`; the server owns it from here on.
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
        self._strangers: dict[asyncio.StreamWriter, str] = {}  # their addresses, the oldest first
        self._displaced = weakref.WeakSet[asyncio.StreamWriter]()
        self._closed = 0
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="bigdl-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and close all connections."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just ended
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
        """Take one connection from its start to its end."""
        is_proved, wills = False, list[str]()
        try:
            keep_alive(writer.get_extra_info("socket"))
            seals = await self._meet(reader, writer)
            is_proved = True
            await self._answer_all(reader, writer, *seals, wills)
        except asyncio.CancelledError:  # the server ends; asyncio would tell it as an error
            pass
        except asyncio.IncompleteReadError as error:
            if error.partial or not is_proved:
                self._tell(writer, "a message is cut off" if error.partial else "it says nothing")
        except ssl.SSLError as error:
            self._tell(writer, f"it does not speak TLS as this run does ({error.reason})")
        except OSError as error:  # a process that is killed leaves like this
            if not is_proved:
                late = isinstance(error, TimeoutError)
                reason = (
                    f"it did not prove itself within {HANDSHAKE_S:g} s" if late else "it went away"
                )
                self._tell(writer, reason)
        except AuthenticationFailed as error:
            self._tell(writer, str(error))
        except (ValueError, TypeError, LookupError) as error:
            self._tell(writer, f"a message makes no sense ({error})")
        finally:
            if writer not in self._displaced:  # which still has to hear why
                writer.transport.abort()
            for key in wills:
                self._store.set(key, b"")

    async def _meet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[MessageAuthenticator, MessageAuthenticator]:
        """The seals of what the other end says and of what is said to it."""
        while len(self._strangers) >= _most_strangers():
            self._displace()
        self._strangers[writer] = str((writer.get_extra_info("peername") or ("",))[0])
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                if self._tls is not None:
                    await writer.start_tls(self._tls)
                hands = Handshake(self._secret)
                writer.write(hands.greeting())
                writer.write(hands.check(await reader.readexactly(ANSWER_SIZE)))
                return hands.authenticator(b"client"), hands.authenticator(b"server")
        finally:
            self._strangers.pop(writer, None)

    def _displace(self) -> None:
        """Close the oldest stranger of the host that has most of them.

        A worker of this run proves itself at once, so it is hardly ever the oldest; then it is told
        to try again.
        """
        counts = Counter(self._strangers.values())
        host, _ = counts.most_common(1)[0]
        oldest = next(each for each, address in self._strangers.items() if address == host)
        del self._strangers[oldest]
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
        theirs: MessageAuthenticator,
        ours: MessageAuthenticator,
        wills: list[str],
    ) -> None:
        """Answer until the other end hangs up; `wills` are the keys to set then."""
        while True:
            sizes = await reader.readexactly(SIZES_SIZE)
            of_head, of_body = read_sizes(sizes)
            try:
                head = await reader.readexactly(of_head)
                body = await reader.readexactly(of_body)
                tag = await reader.readexactly(theirs.tag_size)
            except asyncio.IncompleteReadError as error:
                raise asyncio.IncompleteReadError(error.partial or sizes, error.expected) from None
            (verb, *arguments), body = theirs.open(sizes, head, body, tag)
            del head, tag
            if verb == "will":
                wills.extend(map(str, arguments))
                answer: tuple[Any, bytes] | None = (None, b"")
            else:
                answer = await self._answer(verb, arguments, body)
            if answer is not None:
                for piece in ours.close(*answer):
                    writer.write(piece)
                await writer.drain()

    async def _answer(
        self, verb: str, arguments: list[Any], body: bytes
    ) -> tuple[Any, bytes] | None:
        """Return the answer to a request: a head and a body, or nothing."""
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
            case "swap", [str(key), int(length)]:
                return None, store.swap(key, body[:length], body[length:])
        raise ValueError(f"no such request: {verb}")

    async def _wait(self, keys: list[str], seconds: float) -> bool:
        """Wait until all keys are there; False after so many seconds."""
        there = asyncio.Event()
        waiting = self._store.when(keys, lambda: self._loop.call_soon_threadsafe(there.set))
        if waiting is None:
            return True
        try:
            if seconds:
                async with asyncio.timeout(min(seconds, STORE_REQUEST_S)):
                    await there.wait()
            return there.is_set()
        except TimeoutError:
            return False
        finally:
            self._store.forget(waiting)

    def _tell(self, writer: asyncio.StreamWriter, why: str) -> None:
        if writer in self._displaced:
            why = "too many others came before it proved itself"
        self._closed += 1
        if self._closed <= _TOLD or self._closed % 100 == 0:
            host, port, *_ = writer.get_extra_info("peername") or ("an unknown address", 0)
            logger.warning(
                "Closed connection %d to the channel that is not of this run, from %s:%d: %s",
                self._closed,
                host,
                port,
                why,
            )


def _most_strangers() -> int:
    """The connections that may be open without a proof: no more than a quarter of all files."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _STRANGERS if most == resource.RLIM_INFINITY else max(8, min(_STRANGERS, most // 4))


def keep_alive(connection: socket.socket) -> None:
    """Send small messages at once, and notice within two minutes that the other machine is gone.

    A process that is only stopped, as in a debugger, may be silent for as long as it likes.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
