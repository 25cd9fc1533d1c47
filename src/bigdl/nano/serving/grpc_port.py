"""GrpcPort: gRPC services on one port, with tokens, TLS, limits and graceful shutdown.

All ports of a process share one ``grpc.aio`` event loop in a dedicated thread.  A call takes a
worker thread only after its message has arrived.  So clients that open streams and send nothing
block no thread, and a call without a valid token is refused before its message is read.
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
_BUSY = "Too many concurrent requests; try again later"
_MOST_HEADER_BYTES = 1 << 16
_MOST_SENTENCE_BYTES = 2000  # an error text is sent in a header; clients accept 8 KiB of headers
_MOST_SILENT = 4  # times most_requests: calls whose message has not arrived
_MOST_UNSEEN = 4  # times most_requests: calls that grpc has not yet handed over
_FURTHER_STREAMS = 64  # per connection, beyond most_requests: answered by an error text
MILLISECONDS = {
    # Closes idle connections, connections whose client does not answer pings, and old ones.
    "max_connection_idle": 600_000,
    "keepalive_time": 60_000,
    "keepalive_timeout": 20_000,
    "max_connection_age": 900_000,
    "max_connection_age_grace": 120_000,
}


class GrpcRefusal(Exception):
    """Exception that ends a call with a gRPC status.

    Parameters
    ----------
    status : str
        Name of a gRPC status code.
    sentence : str
        Error text for the client.
    """

    def __init__(self, status: str, sentence: str):
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class _Method:
    """A unary gRPC method and its execution settings."""

    path: str
    function: Callable[[Any, Any], Any]
    read: Callable[[bytes], Any] | None
    write: Callable[[Any], bytes] | None
    group: str
    is_async: bool


class GrpcCall:
    """One unary call: a ``grpc.ServicerContext`` that also works in methods run by threads.

    Parameters
    ----------
    context : grpc.aio.ServicerContext
    pool : Executor
        Threads for :meth:`run`.
    results : FutureAwaiter
        Awaits the futures of `pool`.
    """

    def __init__(self, context: ServicerContext, pool: ThreadPoolExecutor, results: FutureAwaiter):
        self._context, self._pool, self._results = context, pool, results
        self._loop = asyncio.get_running_loop()
        self._left = context.time_remaining()
        self.has_gone = False  # True after the client cancelled; grpc.aio does not report it
        self._begin = time.monotonic()

    def __getattr__(self, name: str) -> Any:  # an attribute of the context
        return getattr(self._context, name)  # peer, set_trailing_metadata, set_code, ...

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Run a function in a thread of the port and return its result."""
        return await self._results.of(self._pool.submit(function, *arguments))

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline, or None if the call has no deadline."""
        if self._left is None:
            return None
        return max(self._left - (time.monotonic() - self._begin), 0.0)

    def abort(self, status: grpc.StatusCode, sentence: str) -> None:
        """Abort the call with a status code."""
        raise GrpcRefusal(status.name, sentence)

    def abort_with_status(self, status: grpc.Status) -> None:
        """Abort the call with a ``grpc.Status``."""
        raise GrpcRefusal(status.code.name, status.details)

    def is_active(self) -> bool:
        """Return True while the client waits for the response."""
        return not (self.has_gone or self._context.done())

    def cancel(self) -> None:
        """Abort the call with ``CANCELLED``."""
        raise GrpcRefusal("CANCELLED", "The server has cancelled the call")

    def add_callback(self, function: Callable[[], Any]) -> bool:
        """Call a function when the call ends; return False if it has ended already."""
        if self._context.done():
            return False
        self._loop.call_soon_threadsafe(self._context.add_done_callback, lambda context: function())
        return True

    def send_initial_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Send the initial metadata of the response."""
        sending = self._context.send_initial_metadata(metadata)
        asyncio.run_coroutine_threadsafe(sending, self._loop).result()


class GrpcPort:
    """A gRPC server that answers calls between :meth:`start` and :meth:`stop`.

    A unary method is a function of the request and a :class:`GrpcCall`. Coroutine functions run in
    the event loop, other functions in a thread. Streaming methods have the signatures of
    ``grpc.aio``.

    Parameters
    ----------
    host : str
    port : int
        0: any free port.
    handlers : sequence of grpc.GenericRpcHandler
        Handlers of the services.
    threads : int
        Threads for methods that are no coroutine functions.
    most_requests : int
        Largest number of running and waiting requests; further ones are refused with
        ``RESOURCE_EXHAUSTED``.
    most_bytes : int
        Largest size of a request message.
    check_access : callable
        Called with the header ``authorization`` (or None) and the path of the method; raises an
        :class:`AccessError` to refuse the call.
    open_methods : sequence of str
        Paths of methods that need no token and are answered during shutdown, in addition to those
        of the standard health service.
    quick_methods : sequence of str
        Paths of methods about the server itself. Like health checks they run in separate threads
        and never wait for other requests.
    pem : (bytes, bytes), optional
        Key and certificate, for TLS.
    shares_port : bool, default False
        Bind with ``SO_REUSEPORT``, so that several processes listen on the port and the kernel
        distributes the connections.
    message_seconds : float
        Seconds within which the message of a request has to arrive.

    Attributes
    ----------
    port : int
        Port that the server listens on.

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
        # Counted per group, so that many requests of one group never block another group.
        self._requests = dict.fromkeys((_OPEN, _QUICK, _WORK), 0)
        self._silent = dict.fromkeys((_OPEN, _QUICK, _WORK), 0)  # calls without their message
        self._is_ending = self._has_ended = False
        self._pool = ThreadPoolExecutor(threads, "bigdl-serving-grpc")
        self._quick_pool = ThreadPoolExecutor(_QUICK_THREADS, "bigdl-serving-grpc-quick")
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        options = [
            ("grpc.max_receive_message_length", most_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", _MOST_HEADER_BYTES),
            ("grpc.absolute_max_metadata_size", _MOST_HEADER_BYTES),
            # Clients queue further streams. Without the headroom, grpc counts streams that have
            # just ended and refuses a client that stays within the limit.
            ("grpc.max_concurrent_streams", most_requests + _FURTHER_STREAMS),
            ("grpc.http.overload_protection", 0),
            # Calls that grpc has not yet handed over; it cancels further ones without a message.
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
        """Create the server and return its port."""
        grpc = self._grpc
        self._server = grpc.aio.server(
            self._pool, handlers=[_Services(self._handler)], options=options
        )
        if pem is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, grpc.ssl_server_credentials([pem]))

    def start(self) -> None:
        """Start answering requests."""
        self._loop.run(self._server.start())

    def stop(self, seconds: float) -> None:
        """Refuse new requests, let running ones finish for up to `seconds`, and shut down."""
        if self._has_ended:
            return
        self._is_ending = self._has_ended = True
        # gRPC cancels calls that have arrived and are not yet handled; let them be refused first.
        time.sleep(min(GRPC_DRAIN_S, seconds))
        with suppress(FutureTimeoutError):
            self._loop.run(self._server.stop(seconds), seconds + GRPC_END_S)
        del self._server
        self._loop.close()
        for pool in (self._pool, self._quick_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    # -- in the event loop ---------------------------------------------------------------------

    def _handler(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return the handler for a call whose headers have arrived but whose message has not."""
        path = details.method
        group = self._group(path)
        if group != _OPEN:
            if self._is_ending:
                return self._refusing("UNAVAILABLE", "The server is ending")
            try:
                headers = details.invocation_metadata or ()
                values = [value for name, value in headers if name == "authorization"]
                self._check_access(only_authorization(values), path)
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
        """Wrap a unary method in a streaming handler, which reads the request message itself."""
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
            await self._abort(context, "UNKNOWN", "The server failed; its log has the details")
        raise AssertionError("abort raises")

    async def _message(self, method: _Method, context: ServicerContext) -> bytes:
        """Wait for the message of a call and return its bytes."""
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
            work.content = None  # free the message while the call waits for its thread
            self._count_until_done(method, future)
            raise

    def _count_until_done(self, method: _Method, future: Future) -> None:
        """Count a cancelled call as running until its thread has finished."""
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
    """Generic RPC handler that finds methods by calling a lookup function."""

    service: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None]


class _Work:
    """Callable that decodes, executes and encodes one unary call in a thread."""

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
    except Exception:  # protobuf raises various errors for bytes that are no message
        raise not_a_message(method.path) from None


def not_a_message(path: str) -> GrpcRefusal:
    """Return the error for bytes that cannot be parsed as the request message of a method."""
    return GrpcRefusal("INVALID_ARGUMENT", f"The request is no message of {path}")


def shortened(sentence: str) -> str:
    """Return an error text cut to the size of a gRPC header."""
    content = sentence.encode("utf-8", "replace")
    if len(content) <= _MOST_SENTENCE_BYTES:
        return content.decode()
    return content[:_MOST_SENTENCE_BYTES].decode("utf-8", "ignore") + "…"


class _SharedLoop:
    """Reference to the event loop that all ports of this process share.

    With two grpc.aio event loops in one process, every message would wake both.
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
        """Run a coroutine in the shared loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._mine).result(seconds)

    def close(self) -> None:
        """Release the reference; releasing the last reference stops the loop."""
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
    """Return a new event loop: uvloop's if installed, else asyncio's."""
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
    """Return the reason why an address cannot be bound, which gRPC does not report."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, port))
    except (OSError, OverflowError) as reason:
        return getattr(reason, "strerror", None) or str(reason)
    return str(error)
