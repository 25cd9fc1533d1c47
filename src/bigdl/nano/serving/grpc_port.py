"""GrpcPort: services of gRPC on one port, with token, TLS, limits and a drained end."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bigdl.common.checks import MOST_PORT, check_integer
from bigdl.common.errors import UsageError, require
from bigdl.nano.serving.access import AccessError

__all__ = ["GrpcPort"]

_DRAIN_SECONDS = 0.2
_HEALTH = "/grpc.health.v1.Health/"
_MOST_HEADER_BYTES = 1 << 16


class GrpcPort:
    """A server of gRPC for some services; it answers from :meth:`start` to :meth:`stop`.

    Parameters
    ----------
    host : str
    port : int
        0 means any that is free.
    handlers : sequence of grpc.GenericRpcHandler
        Of the services.
    threads : int
        Requests that are answered at the same time.
    most_requests : int
        Requests that are answered or wait; one more is refused by ``RESOURCE_EXHAUSTED``.
    most_bytes : int
        Size of a request.
    check_access : callable
        Gets the header ``authorization`` or None; raises an :class:`AccessError`.
    open_methods : sequence of str
        Paths of methods that need no token and are answered while the server ends; those of the
        usual health service are.
    pem : (bytes, bytes), optional
        Key and certificate, for TLS.
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
        host: str,
        port: int,
        handlers: Sequence[Any],
        *,
        threads: int,
        most_requests: int,
        most_bytes: int,
        check_access: Callable[[str | None], None],
        open_methods: Sequence[str] = (),
        pem: tuple[bytes, bytes] | None = None,
        shares_port: bool = False,
    ):
        grpc = require("grpc", "serving")
        check_integer("The port of gRPC", port, 0, MOST_PORT)
        self._gate = _gate(grpc, check_access, frozenset(open_methods))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="bigdl-serving-grpc")
        self._server = grpc.server(
            self._pool,
            handlers=list(handlers),
            interceptors=[self._gate],
            maximum_concurrent_rpcs=most_requests,
            options=[
                ("grpc.max_receive_message_length", most_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", _MOST_HEADER_BYTES),
                ("grpc.so_reuseport", int(shares_port)),
            ],
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if pem is None:
                self.port: int = self._server.add_insecure_port(address)
            else:
                credentials = grpc.ssl_server_credentials([pem])
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise UsageError(
                f"gRPC cannot listen on {address}: {_first_reason(host, port, error)}",
                code="address-unusable",
                address=address,
            ) from error
        if not self.port:
            raise UsageError(
                f"gRPC cannot listen on {address}; is the port in use?",
                code="address-unusable",
                address=address,
            )

    def start(self) -> None:
        """Answer requests from now on."""
        self._server.start()

    def stop(self, seconds: float) -> None:
        """Take no more requests, give those under way so many seconds, and end."""
        self._gate.is_ending = True
        # gRPC cancels what has come and no thread has taken: it gets its refusal first.
        time.sleep(min(_DRAIN_SECONDS, seconds))
        self._server.stop(seconds).wait()
        self._pool.shutdown(wait=False)


def _gate(grpc: Any, check_access: Callable[[str | None], None], is_open: frozenset[str]) -> Any:
    """Return what refuses requests without the token, and all once the server ends."""

    def refusing(status: Any, sentence: str) -> Any:
        def refuse(content: bytes, context: Any) -> None:
            context.abort(status, sentence)

        return grpc.unary_unary_rpc_method_handler(refuse)

    ending = refusing(grpc.StatusCode.UNAVAILABLE, "The server is ending")

    class Gate(grpc.ServerInterceptor):
        is_ending = False

        def intercept_service(self, continuation: Any, details: Any) -> Any:
            if details.method.startswith(_HEALTH) or details.method in is_open:
                return continuation(details)
            if self.is_ending:
                return ending
            try:
                check_access(dict(details.invocation_metadata).get("authorization"))
            except AccessError as error:
                return refusing(grpc.StatusCode.UNAUTHENTICATED, str(error))
            return continuation(details)

    return Gate()


def _first_reason(host: str, port: int, error: Exception) -> str:
    """Return why an address cannot be used; gRPC itself does not say."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, port))
    except (OSError, OverflowError) as reason:
        return getattr(reason, "strerror", None) or str(reason)
    return str(error)
