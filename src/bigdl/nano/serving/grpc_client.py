"""GrpcClient: base class of clients for one gRPC service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from bigdl.common.errors import require
from bigdl.nano.serving.protos import Message, MessageClass

if TYPE_CHECKING:
    import grpc

Headers = Sequence[tuple[str, str]]


class GrpcClient:
    """Connection to one gRPC service; any number of threads may use it.

    Parameters
    ----------
    address : str
        ``host:port``.
    service : str
        With its package.
    answer_of : callable
        Returns the class of a method's answer.
    timeout : float
        Seconds for an answer.
    token : str, optional
        Sent with every request.
    tls : bool, default False
    authority : bytes, optional
        Certificates to trust, in PEM, in place of the system's.
    options : sequence of (str, int)
        Further options of the channel.
    """

    def __init__(
        self,
        address: str,
        service: str,
        answer_of: Callable[[str], MessageClass],
        *,
        timeout: float,
        token: str | None = None,
        tls: bool = False,
        authority: bytes | None = None,
        options: Sequence[tuple[str, int]] = (),
    ):
        module = require("grpc", "serving")
        self._rpc_error: type[grpc.RpcError] = module.RpcError
        self._address, self._service, self._answer_of = address, service, answer_of
        self._timeout, self._token = timeout, token
        unbounded = ("grpc.max_receive_message_length", "grpc.max_send_message_length")
        options = [*((name, -1) for name in unbounded), *options]
        self._channel: grpc.Channel = (
            module.secure_channel(address, module.ssl_channel_credentials(authority), options)
            if tls
            else module.insecure_channel(address, options)
        )
        self._methods: dict[str, grpc.UnaryUnaryMultiCallable] = {}

    def call(
        self,
        method: str,
        request: Message,
        headers: Headers = (),
        timeout: float | None = None,
        token: str | None = None,
    ) -> Message:
        """Call a method and return its response.

        Parameters
        ----------
        method : str
        request : message
        headers : sequence of (str, str)
        timeout : float, optional
            Default: that of the client.
        token : str, optional
            Default: that of the client.
        """
        return self._method(method)(request, **self._options(headers, timeout, token))

    def send(self, method: str, request: Message, headers: Headers = ()) -> grpc.Future:
        """Start a call and return the future of its response."""
        return self._method(method).future(request, **self._options(headers, None, None))

    def _method(self, name: str) -> grpc.UnaryUnaryMultiCallable:
        method = self._methods.get(name)
        if method is None:
            method = self._methods[name] = self._channel.unary_unary(
                f"/{self._service}/{name}",
                request_serializer=lambda request: request.SerializeToString(),
                response_deserializer=self._answer_of(name).FromString,
            )
        return method

    def _options(
        self, headers: Headers, timeout: float | None, token: str | None
    ) -> dict[str, Any]:
        token = self._token if token is None else token
        access = () if token is None else (("authorization", f"Bearer {token}"),)
        return {"timeout": timeout or self._timeout, "metadata": (*access, *headers)}

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
