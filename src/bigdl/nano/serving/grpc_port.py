"""GrpcPort: services of gRPC on one port, with tokens, TLS, limits and a drained end.

All ports of a process share one event loop of ``grpc.aio``, in a thread of its own.  No thread
waits for a message: a request takes one when its message is there.  So clients that open streams
and send nothing keep nobody waiting, and a request without the token is refused before its message
comes.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from bigdl.common.checks import MOST_PORT, check_integer
from bigdl.common.errors import UsageError, require
from bigdl.common.timeouts import GRPC_DRAIN_S, GRPC_END_S, MESSAGE_S
from bigdl.nano.serving.access import AccessError, only_authorization
from bigdl.nano.serving.future_awaiter import FutureAwaiter
from bigdl.nano.serving.statuses import status_of

if TYPE_CHECKING:
    import grpc
    from grpc.aio import ServicerContext

__all__ = ["GrpcCall", "GrpcPort", "GrpcRefusal"]

T = TypeVar("T")
_log = logging.getLogger(__name__)

_OPEN, _QUICK, _WORK = "open", "quick", "work"  # groups of methods
_HEALTH = "/grpc.health.v1.Health/"
_QUICK_THREADS = 4
_BUSY = "Too many requests at the same time; try again later"
_MOST_HEADER_BYTES = 1 << 16
_MOST_SENTENCE_BYTES = 2000  # it travels in a header, of which clients take 8 KiB
_MOST_SILENT = 4  # times most_requests: calls whose message has not come
_MOST_UNSEEN = 4  # times most_requests
_FURTHER_STREAMS = 64  # of a connection, beyond the limit of requests: they get a sentence
MILLISECONDS = {
    # A connection on which nothing is asked; one whose client does not answer pings; any.
    "max_connection_idle": 600_000,
    "keepalive_time": 60_000,
    "keepalive_timeout": 20_000,
    "max_connection_age": 900_000,
    "max_connection_age_grace": 120_000,
}


class GrpcRefusal(Exception):
    """A request that is answered by a status.

    Parameters
    ----------
    status : str
        Name of a status of gRPC.
    sentence : str
    """

    def __init__(self, status: str, sentence: str):
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class _Method:
    """A method of one request and one answer, and where it runs."""

    path: str
    function: Callable[[Any, Any], Any]
    read: Callable[[bytes], Any] | None
    write: Callable[[Any], bytes] | None
    group: str
    is_async: bool


class GrpcCall:
    """A request as its method sees it: the context of grpc, for a method in a thread.

    Parameters
    ----------
    context : grpc.aio.ServicerContext
    pool : Executor
        For :meth:`run`.
    results : FutureAwaiter
    """

    def __init__(self, context: ServicerContext, pool: ThreadPoolExecutor, results: FutureAwaiter):
        self._context, self._pool, self._results = context, pool, results
        self._loop = asyncio.get_running_loop()
        self._left = context.time_remaining()
        self.has_gone = False  # the client; the context of grpc.aio does not say it
        self._begin = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)  # peer, set_trailing_metadata, set_code, ...

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Return what a function gives that is called in a thread of the port."""
        return await self._results.of(self._pool.submit(function, *arguments))

    def time_remaining(self) -> float | None:
        """Return the seconds that are left, or None where the client waits for ever."""
        if self._left is None:
            return None
        return max(self._left - (time.monotonic() - self._begin), 0.0)

    def abort(self, status: grpc.StatusCode, sentence: str) -> None:
        """Answer by a status; raises."""
        raise GrpcRefusal(status.name, sentence)

    def abort_with_status(self, status: grpc.Status) -> None:
        """Answer by a status; raises."""
        raise GrpcRefusal(status.code.name, status.details)

    def is_active(self) -> bool:
        """Return True while the client waits."""
        return not (self.has_gone or self._context.done())

    def cancel(self) -> None:
        """End the call."""
        raise GrpcRefusal("CANCELLED", "The server has cancelled the call")

    def add_callback(self, function: Callable[[], Any]) -> bool:
        """Have a function called at the end of the call; return False if that is over."""
        if self._context.done():
            return False
        self._loop.call_soon_threadsafe(self._context.add_done_callback, lambda context: function())
        return True

    def send_initial_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Send leading metadata."""
        sending = self._context.send_initial_metadata(metadata)
        asyncio.run_coroutine_threadsafe(sending, self._loop).result()


class GrpcPort:
    """A server of gRPC for some services; it answers from :meth:`start` to :meth:`stop`.

    A unary method is a function of the request and a :class:`GrpcCall`. Coroutine functions run in
    the event loop, other functions in a thread. Streaming methods have the signatures of
    ``grpc.aio``.

    Parameters
    ----------
    host : str
    port : int
        0 means any that is free.
    handlers : sequence of grpc.GenericRpcHandler
        Of the services.
    threads : int
        Requests that are answered at the same time, but for methods that are async.
    most_requests : int
        Requests that are answered or wait; one more is refused by ``RESOURCE_EXHAUSTED``.
    most_bytes : int
        Size of a request.
    check_access : callable
        Gets the header ``authorization`` or None, and the path of the method; raises an
        :class:`AccessError`.
    open_methods : sequence of str
        Paths of methods that need no token and are answered while the server ends; those of the
        usual health service are.
    quick_methods : sequence of str
        Paths of methods that say something of the server: they have threads of their own, like
        those of health, and wait for no other request.
    pem : (bytes, bytes), optional
        Key and certificate, for TLS.
    shares_port : bool, default False
        Other processes listen on the port, too; the system gives each connection to one of them.
    message_seconds : float
        Within which the message of a request has to be there.

    Attributes
    ----------
    port : int

    Raises
    ------
    UsageError
        If the port or the certificate cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        handlers: Sequence[grpc.GenericRpcHandler],
        *,
        threads: int,
        most_requests: int,
        most_bytes: int,
        check_access: Callable[[str | None, str], None],
        open_methods: Sequence[str] = (),
        quick_methods: Sequence[str] = (),
        pem: tuple[bytes, bytes] | None = None,
        shares_port: bool = False,
        message_seconds: float = MESSAGE_S,
    ):
        module = require("grpc", "serving")
        require("grpc.aio", "serving")
        check_integer("The port of gRPC", port, 0, MOST_PORT)
        self._grpc, self._results = module, FutureAwaiter()
        self._handlers = list(handlers)
        self._most_requests, self._message_seconds = most_requests, message_seconds
        self._check_access = check_access
        self._open, self._quick = frozenset(open_methods), frozenset(quick_methods)
        self._methods: dict[str, grpc.RpcMethodHandler] = {}
        # Counted apart, so that none of a group is refused for many of another.
        self._requests = dict.fromkeys((_OPEN, _QUICK, _WORK), 0)
        self._silent = dict.fromkeys((_OPEN, _QUICK, _WORK), 0)  # whose message has not come
        self._is_ending = self._has_ended = False
        self._pool = ThreadPoolExecutor(threads, "bigdl-serving-grpc")
        self._quick_pool = ThreadPoolExecutor(_QUICK_THREADS, "bigdl-serving-grpc-quick")
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        options = [
            ("grpc.max_receive_message_length", most_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", _MOST_HEADER_BYTES),
            ("grpc.absolute_max_metadata_size", _MOST_HEADER_BYTES),
            # A client waits with what is more. Otherwise grpc counts streams that have just ended,
            # and refuses those of a client that keeps to the limit.
            ("grpc.max_concurrent_streams", most_requests + _FURTHER_STREAMS),
            ("grpc.http.overload_protection", 0),
            # Those that have come and were not looked at yet; grpc cancels more without a word.
            ("grpc.server.max_pending_requests", _MOST_UNSEEN * most_requests),
            ("grpc.server.max_pending_requests_hard_limit", _MOST_UNSEEN * most_requests),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.so_reuseport", int(shares_port)),
            *((f"grpc.{name}_ms", value) for name, value in MILLISECONDS.items()),
        ]
        self._loop = _SharedLoop()
        try:
            self.port: int = self._loop.run(self._opened(address, options, pem))
            if not self.port:
                raise RuntimeError("is the port in use?")
        except BaseException as error:
            self._loop.close()
            if not isinstance(error, RuntimeError):
                raise
            raise UsageError(
                f"gRPC cannot listen on {address}: {_first_reason(host, port, error)}",
                code="address-unusable",
                address=address,
            ) from error

    async def _opened(
        self, address: str, options: list[tuple[str, int]], pem: tuple[bytes, bytes] | None
    ) -> int:
        """Make the server; returns its port."""
        grpc = self._grpc
        self._server = grpc.aio.server(
            self._pool, handlers=[_Services(self._handler)], options=options
        )
        if pem is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, grpc.ssl_server_credentials([pem]))

    def start(self) -> None:
        """Answer requests from now on."""
        self._loop.run(self._server.start())

    def stop(self, seconds: float) -> None:
        """Take no more requests, give those under way so many seconds, and end."""
        if self._has_ended:
            return
        self._is_ending = self._has_ended = True
        # gRPC cancels what has come and nobody has taken: it gets its refusal first.
        time.sleep(min(GRPC_DRAIN_S, seconds))
        with suppress(FutureTimeoutError):
            self._loop.run(self._server.stop(seconds), seconds + GRPC_END_S)
        del self._server
        self._loop.close()
        for pool in (self._pool, self._quick_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    # -- in the event loop ---------------------------------------------------------------------

    def _handler(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return what answers a request, of which the headers alone are there."""
        path = details.method
        group = self._group(path)
        if group != _OPEN:
            if self._is_ending:
                return self._refusing("UNAVAILABLE", "The server is ending")
            try:
                headers = details.invocation_metadata or ()
                given = [value for name, value in headers if name == "authorization"]
                self._check_access(only_authorization(given), path)
            except AccessError as error:
                return self._refusing(status_of(error).grpc, str(error))
        is_busy = self._requests[group] >= self._most_requests
        if is_busy or self._silent[group] >= _MOST_SILENT * self._most_requests:
            return self._refusing("RESOURCE_EXHAUSTED", _BUSY)
        known = self._methods.get(path)
        if known is None:
            known = next(filter(None, (each.service(details) for each in self._handlers)), None)
            if known is None:
                return None
            if known.unary_unary is not None:
                known = self._as_stream(path, known, group)
            self._methods[path] = known
        return known

    def _group(self, path: str) -> str:
        if path.startswith(_HEALTH) or path in self._open:
            return _OPEN
        return _QUICK if path in self._quick else _WORK

    def _as_stream(
        self, path: str, handler: grpc.RpcMethodHandler, group: str
    ) -> grpc.RpcMethodHandler:
        """Return a handler that waits for the message of a request itself."""
        method = _Method(
            path,
            handler.unary_unary,
            handler.request_deserializer,
            handler.response_serializer,
            group,
            inspect.iscoroutinefunction(handler.unary_unary),
        )

        async def answer(requests: object, context: ServicerContext) -> bytes:
            return await self._answer(method, context)

        return self._grpc.stream_unary_rpc_method_handler(answer)

    def _refusing(self, status: str, sentence: str) -> grpc.RpcMethodHandler:
        async def refuse(requests: object, context: ServicerContext) -> None:
            await self._abort(context, status, sentence)

        return self._grpc.stream_unary_rpc_method_handler(refuse)

    async def _abort(self, context: ServicerContext, status: str, sentence: str) -> None:
        await context.abort(getattr(self._grpc.StatusCode, status), shortened(sentence))

    async def _answer(self, method: _Method, context: ServicerContext) -> bytes:
        try:
            content = await self._message(method, context)
            if self._requests[method.group] >= self._most_requests:
                raise GrpcRefusal("RESOURCE_EXHAUSTED", _BUSY)
            self._requests[method.group] += 1
            try:
                return await self._called(method, content, context)
            finally:
                self._requests[method.group] -= 1
        except GrpcRefusal as error:
            await self._abort(context, error.status, str(error))
        except Exception:
            _log.exception("A call of %s failed", method.path)
            await self._abort(context, "UNKNOWN", "The server has failed; its log says why")
        raise AssertionError("abort raises")

    async def _message(self, method: _Method, context: ServicerContext) -> bytes:
        """Return the message of a request when it has come."""
        self._silent[method.group] += 1
        try:
            async with asyncio.timeout(self._message_seconds):
                content = await context.read()
        except TimeoutError:
            raise GrpcRefusal(
                "DEADLINE_EXCEEDED",
                f"The message of the request did not arrive within {self._message_seconds:g} s",
            ) from None
        finally:
            self._silent[method.group] -= 1
        if content is self._grpc.aio.EOF:
            raise GrpcRefusal("INVALID_ARGUMENT", "The request has no message")
        return content

    async def _called(self, method: _Method, content: bytes, context: ServicerContext) -> bytes:
        pool = self._pool if method.group == _WORK else self._quick_pool
        call = GrpcCall(context, pool, self._results)
        if method.is_async:
            answer = await method.function(_read(method, content), call)
            return answer if method.write is None else method.write(answer)
        work = _Work(method, content, call)
        future = pool.submit(work)
        try:
            return await self._results.of(future)
        except asyncio.CancelledError:
            call.has_gone = True
            work.content = None  # it waits for its thread, but not with its message
            self._count_until_done(method, future)
            raise

    def _count_until_done(self, method: _Method, future: Future) -> None:
        """Count a request whose client has gone as long as a thread works on it."""
        if future.done():
            return
        loop = asyncio.get_running_loop()

        def end() -> None:
            self._requests[method.group] -= 1

        def done(_: Future) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(end)

        self._requests[method.group] += 1
        future.add_done_callback(done)


@dataclass(frozen=True)
class _Services:
    """The services of a port, of which grpc asks for the handler of a request."""

    service: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None]


class _Work:
    """A call of a method in a thread, from the bytes of its message to those of its answer."""

    def __init__(self, method: _Method, content: bytes, call: GrpcCall):
        self._method, self._call = method, call
        self.content: bytes | None = content

    def __call__(self) -> bytes:
        content, self.content = self.content, None
        if content is None:
            return b""
        answer = self._method.function(_read(self._method, content), self._call)
        return answer if self._method.write is None else self._method.write(answer)


def _read(method: _Method, content: bytes) -> object:
    if method.read is None:
        return content
    try:
        return method.read(content)
    except Exception:  # whatever protobuf says of bytes that are no message
        raise not_a_message(method.path) from None


def not_a_message(path: str) -> GrpcRefusal:
    """Return the refusal of bytes that are no message of a method."""
    return GrpcRefusal("INVALID_ARGUMENT", f"The request is no message of {path}")


def shortened(sentence: str) -> str:
    """Return a sentence that fits into a header; clients choose names that errors repeat."""
    content = sentence.encode("utf-8", "replace")
    if len(content) <= _MOST_SENTENCE_BYTES:
        return content.decode()
    return content[:_MOST_SENTENCE_BYTES].decode("utf-8", "ignore") + "…"


class _SharedLoop:
    """A share in the event loop of all ports of this process, whose thread ends with the last.

    Two event loops with grpc.aio would wake each other at every message.
    """

    _lock = threading.Lock()
    _shares = 0
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None

    def __init__(self) -> None:
        shared = _SharedLoop
        with shared._lock:
            if shared._loop is None:
                shared._loop = _new_loop()
                shared._thread = threading.Thread(
                    target=_run_loop, args=(shared._loop,), name="bigdl-serving-grpc", daemon=True
                )
                shared._thread.start()
            shared._shares += 1
            self._mine: asyncio.AbstractEventLoop = shared._loop
        self._is_open = True

    def run(self, work: Coroutine[object, object, T], seconds: float | None = None) -> T:
        """Return what a coroutine gives that runs in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._mine).result(seconds)

    def close(self) -> None:
        """Give the share back."""
        shared = _SharedLoop
        with shared._lock:
            if not self._is_open:
                return
            self._is_open = False
            shared._shares -= 1
            if shared._shares:
                return
            loop, thread = shared._loop, shared._thread
            shared._loop = shared._thread = None
        assert loop is not None
        assert thread is not None
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop of uvloop, whose messages between threads cost less, if it is there."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=1))
    finally:
        loop.close()


def _first_reason(host: str, port: int, error: Exception) -> str:
    """Return why an address cannot be used; gRPC itself does not say."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, port))
    except (OSError, OverflowError) as reason:
        return getattr(reason, "strerror", None) or str(reason)
    return str(error)
