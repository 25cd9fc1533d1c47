"""HttpThread: an application of ASGI behind uvicorn, in a thread of this process.

Connections whose headers are too long or too slow are ended, and so are those that say nothing.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

from bigdl.common.checks import MOST_PORT, check_integer
from bigdl.common.errors import UsageError, require

_MOST_HEAD_BYTES = 64 << 10
_HEAD_SECONDS = 20
_IDLE_SECONDS = 75


class HttpThread:
    """Uvicorn in a thread of its own.

    Parameters
    ----------
    app : callable
        An application of ASGI.
    host : str
    port : int
        0 takes a free one.
    tls : (path, path), optional
        Files of a certificate and of its key, in PEM.
    shares_port : bool, default False
        Other processes listen on the port, too; the system gives each connection to one of them.

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
        app: Any,
        host: str,
        port: int,
        tls: tuple[Any, Any] | None = None,
        shares_port: bool = False,
    ):
        uvicorn = require("uvicorn", "serving")
        require("httptools", "serving")
        check_integer("The port of HTTP", port, 0, MOST_PORT)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # With the protocol named: asyncio sends small packets at once only then.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares_port:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
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
            timeout_keep_alive=_IDLE_SECONDS,
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
        """Answer requests from now on; returns when that is so."""
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)

    def stop(self, seconds: float) -> None:
        """Take no more requests, and give those under way so many seconds."""
        self._server.config.timeout_graceful_shutdown = max(int(seconds), 1)
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()


def _limited_protocol() -> type:
    """Return uvicorn's protocol, which ends connections whose headers are too long or too slow."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class LimitedProtocol(HttpToolsProtocol):
        head_bytes = 0
        head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # Uvicorn sets this one after each answer, but not before the first request.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

        def on_message_begin(self) -> None:
            self.head_bytes = 0
            self.head_timer = self.loop.call_later(_HEAD_SECONDS, self.transport.abort)
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._stop_timer()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _stop_timer(self) -> None:
            if self.head_timer is not None:
                self.head_timer.cancel()
                self.head_timer = None

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.head_timer is not None and not self.transport.is_closing():
                self.head_bytes += len(data)
                if self.head_bytes > _MOST_HEAD_BYTES:
                    self.send_400_response("The headers of the request are too long.")

    return LimitedProtocol
