"""HttpThread: an ASGI application served by uvicorn in a thread of this process.

A connection is closed if its headers are too long or too slow, if a message has trailers or large
chunk extensions, if its client does not read the response, or if it is idle. With HTTP pipelining,
further requests are read only after the responses to the earlier ones.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import MOST_PORT, check_integer
from bigdl.common.errors import UsageError, require
from bigdl.common.platform.network import limit_unacknowledged, share_port
from bigdl.common.timeouts import HEAD_S, IDLE_S, LATE_S, LOST_S, SENDING_S

if TYPE_CHECKING:
    import asyncio

_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_MOST_HEAD_BYTES = 64 << 10
_MOST_HEADERS = 256
_MOST_OVERHEAD_BYTES = 64 << 10  # chunk sizes and extensions between parts of a body
# Bytes parsed in one step. A step creates all requests that they contain, and a request takes a
# hundred times the memory of its bytes.
_PARSED_BYTES = 16 << 10
_PARSED_BODY_BYTES = 64 << 10  # within a body
_LEAST_SENT_BYTES = 16 << 10  # bytes that a client has to read within SENDING_S
# Bytes of a body accepted after the response was sent, so that the client still reads the response.
_MOST_LATE_BYTES = 64 << 20


class HttpThread:
    """Uvicorn server that runs an ASGI application in a separate thread.

    Parameters
    ----------
    app : callable
        ASGI application.
    host : str
    port : int
        0: any free port.
    tls : (path, path), optional
        PEM files of a certificate and its key.
    shares_port : bool, default False
        Bind with ``SO_REUSEPORT``, so that several processes listen on the port and the kernel
        distributes the connections.

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
        app: object,
        host: str,
        port: int,
        tls: tuple[Any, Any] | None = None,
        shares_port: bool = False,
    ):
        uvicorn = require("uvicorn", "serving")
        require("httptools", "serving")
        check_integer("The port of HTTP", port, 0, MOST_PORT)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio sets TCP_NODELAY only on sockets created with an explicit protocol.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares_port:
                share_port(self._socket)
            limit_unacknowledged(self._socket, LOST_S)
            self._socket.bind((host, port))
            self._socket.listen(2048)
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise UsageError(
                f"HTTP cannot listen on {host}:{port}: {error}",
                code="address-unusable",
                address=host,
            ) from None
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=_limited_protocol(),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="error",
            timeout_keep_alive=IDLE_S,
            server_header=False,
            ssl_certfile=None if tls is None else str(tls[0]),
            ssl_keyfile=None if tls is None else str(tls[1]),
        )
        try:
            config.load()
        except Exception as error:
            self._socket.close()
            raise UsageError(
                f"The certificate or its key cannot be used: {error}", code="file-damaged"
            ) from None
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="bigdl-serving-http", daemon=True)

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)

    def stop(self, seconds: float) -> None:
        """Refuse new requests, let running ones finish for up to `seconds`, and stop."""
        self._server.config.timeout_graceful_shutdown = max(int(seconds), 1)
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()


class _LimitExceeded(Exception):
    """Exception that stops the HTTP parser when a request exceeds a limit."""


def _limited_protocol() -> type:
    """Return uvicorn's protocol class extended by size limits and timeouts."""
    from uvicorn.protocols.http.flow_control import FlowControl
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

    class PausableFlow(FlowControl):
        stays_paused = False

        def resume_reading(self) -> None:
            if not self.stays_paused:
                super().resume_reading()

    class LimitedProtocol(HttpToolsProtocol):
        flow: PausableFlow
        answered: Any = None  # the request that is being answered
        pending = b""  # received bytes that are not yet parsed
        in_head = in_body = False
        head_bytes = head_count = 0
        overhead_bytes = 0  # since the begin of a message, or the last part of its body
        late_bytes = 0  # received after the response was sent
        idle_since = 0.0
        unsent_bytes = 0
        has_sent = False
        refusal: tuple[int, str] | None = None
        head_timer: asyncio.TimerHandle | None = None
        late_timer: asyncio.TimerHandle | None = None
        sending_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.flow = PausableFlow(transport)
            self.idle_since = self.loop.time()
            self._wait_for_request()

        def connection_lost(self, exc: Exception | None) -> None:
            for name in ("head_timer", "late_timer", "sending_timer"):
                self._stop_timer(name)
            self.pending = b""
            for cycle in [self.answered, *(cycle for cycle, _ in self.pipeline)]:
                if cycle is not None and not cycle.response_complete:
                    cycle.disconnected = True  # uvicorn notifies only the last one
                    cycle.message_event.set()
            super().connection_lost(exc)

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            self.answered = cycle
            super()._start_asgi_task(cycle, app)

        def _stop_timer(self, name: str) -> None:
            timer = getattr(self, name)
            if timer is not None:
                timer.cancel()
                setattr(self, name, None)

        def _wait_for_request(self) -> None:
            """Start the idle timer of a connection, even before its first request.

            Uvicorn starts it only after a response, and stops it when bytes arrive that do not
            start a request.
            """
            has_answered = self.cycle is None or self.cycle.response_complete
            if self.in_head or self.in_body or not has_answered or self.pipeline:
                return
            if self.timeout_keep_alive_task is None and not self.transport.is_closing():
                left = self.idle_since + self.timeout_keep_alive - self.loop.time()
                self.timeout_keep_alive_task = self.loop.call_later(
                    max(left, 0), self.timeout_keep_alive_handler
                )

        # -- receiving -----------------------------------------------------------------------

        def data_received(self, data: bytes) -> None:
            self.pending += data
            self._parse_pending()

        def _parse_pending(self) -> None:
            """Parse received bytes until a request has to wait for the responses to earlier ones.

            Uvicorn would parse all bytes, and resume reading after each response.
            """
            if self.parser is None or self.transport.is_closing():
                self.pending = b""
                return
            if self.in_head and self.head_timer is None:
                self.head_timer = self.loop.call_later(HEAD_S, self.transport.abort)
            while self.pending and not self.pipeline and not self.transport.is_closing():
                size = _PARSED_BODY_BYTES if self.in_body else _PARSED_BYTES
                part, self.pending = self.pending[:size], self.pending[size:]
                self._parse(part)
            if self.transport.is_closing():
                return
            was_paused, self.flow.stays_paused = self.flow.stays_paused, bool(self.pipeline)
            if self.pipeline:
                self._stop_timer("head_timer")  # reading is paused, so the head may be incomplete
                self.flow.pause_reading()
            elif was_paused:
                self.flow.resume_reading()

        def _parse(self, data: bytes) -> None:
            self.overhead_bytes += len(data)
            super().data_received(data if self.in_body else _without_upgrade(data))
            if self.transport.is_closing():
                return
            self.late_bytes += len(data)
            if self.late_timer is not None and self.late_bytes > _MOST_LATE_BYTES:
                self.transport.abort()
            elif self.in_head and self.overhead_bytes > _MOST_HEAD_BYTES:
                self.refusal = 431, "The headers of the request are too long."
                self.send_400_response("")
            elif self.in_body and self.overhead_bytes > _MOST_OVERHEAD_BYTES:
                self.refusal = 400, "The chunks of the request have too large extensions."
                self.send_400_response("")
            else:
                self._wait_for_request()

        def on_message_begin(self) -> None:
            self.head_bytes = self.head_count = self.overhead_bytes = 0
            self.in_head = True
            self.head_timer = self.loop.call_later(HEAD_S, self.transport.abort)
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._count_head(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            if not self.in_head:
                self._refuse(400, "The request has trailers, which are not supported.")
            self.head_count += 1
            self._count_head(len(name) + len(value) + 4)
            super().on_header(name, value)

        def _count_head(self, size: int) -> None:
            self.head_bytes += size
            if self.head_bytes > _MOST_HEAD_BYTES:
                self._refuse(431, "The headers of the request are too long.")
            if self.head_count > _MOST_HEADERS:
                self._refuse(431, "The request has too many headers.")

        def _refuse(self, status: int, sentence: str) -> None:
            self.refusal = status, sentence
            raise _LimitExceeded(sentence)  # it passes through the parser and stops it

        def on_headers_complete(self) -> None:
            self._stop_timer("head_timer")
            self.in_head, self.in_body, self.overhead_bytes = False, True, 0
            super().on_headers_complete()
            if self.scope["method"] in ("GET", "HEAD") and _has_body(self.headers):
                self.cycle.keep_alive = False  # the handler does not read the body

        def on_body(self, body: bytes) -> None:
            self.overhead_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self.in_body = False
            self._stop_timer("late_timer")
            super().on_message_complete()

        # -- sending -------------------------------------------------------------------------

        def send_400_response(self, msg: str) -> None:
            status, sentence = self.refusal or (400, msg)
            cycle = self.cycle
            if cycle is not None and cycle.response_started:
                is_over = cycle.response_complete and not self.in_body
                if not is_over:
                    self.transport.abort()  # a client would read it as part of the first response
                    return
            head = (
                f"content-type: text/plain; charset=utf-8\r\ncontent-length: {len(sentence)}\r\n"
                f"connection: close\r\n\r\n{sentence}"
            )
            self.transport.write(STATUS_LINE[status] + head.encode())
            self.transport.close()
            self._watch_sending()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.flow.stays_paused and not self.pipeline:
                self.loop.call_soon(self._parse_pending)
            self.idle_since = self.loop.time()
            self._watch_sending()
            if self.in_body and self.cycle.response_complete and not self.transport.is_closing():
                self.late_bytes = 0
                self.late_timer = self.loop.call_later(LATE_S, self.transport.abort)

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._watch_sending()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_sending()

        def resume_writing(self) -> None:
            self.has_sent = True
            super().resume_writing()

        def _watch_sending(self) -> None:
            """Start a timer that closes the connection if its client does not read the response."""
            if self.sending_timer is not None:
                return
            self.unsent_bytes, self.has_sent = self.transport.get_write_buffer_size(), False
            if self.unsent_bytes:
                self.sending_timer = self.loop.call_later(SENDING_S, self._check_sending)

        def _check_sending(self) -> None:
            self.sending_timer = None
            before, has_sent = self.unsent_bytes, self.has_sent
            now = self.transport.get_write_buffer_size()
            if now and not has_sent and before - now < _LEAST_SENT_BYTES:
                self.transport.abort()
            else:
                self._watch_sending()

    return LimitedProtocol


def _without_upgrade(data: bytes) -> bytes:
    """Rename ``Upgrade`` headers in the first request head of `data`.

    Java and curl offer HTTP/2 with this header. A server may answer with HTTP/1.1, but the parser
    would ignore the body and treat the bytes after the head as another protocol.
    """
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[:end]
    if not _UPGRADE.search(head):
        return data
    return _UPGRADE.sub(b"\r\nIgnored:", head) + data[len(head) :]


def _has_body(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
        for name, value in headers
    )
