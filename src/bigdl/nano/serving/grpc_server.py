"""GrpcServer: gRPC services and the standard health service on one port."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, Self

from bigdl.common.checks import check_integer
from bigdl.common.errors import require
from bigdl.nano.serving.access import ADMIN, INFER, ForbiddenError, Security, read_pem
from bigdl.nano.serving.grpc_port import GrpcCall, GrpcPort, GrpcRefusal
from bigdl.nano.serving.limits import ServingLimits
from bigdl.nano.serving.protos import ProtoPool

if TYPE_CHECKING:
    import grpc

__all__ = ["GrpcServer", "GrpcService"]

_HEALTH = "grpc.health.v1.Health"
_REQUESTS_PER_THREAD = 32
_pool = ProtoPool("bigdl.nano.serving", "health.binpb")


class GrpcService(Protocol):
    """Interface of a service for a :class:`GrpcServer`.

    Attributes
    ----------
    name : str
        Full name of the service, with its package.
    purposes : mapping of str to str
        Purpose of each method that is not for inference; it selects the required token.
    open_methods : sequence of str
        Methods that need no token.
    quick_methods : sequence of str
        Methods about the server itself, which never wait for other requests.
    checks_changes : bool
        True if the service itself refuses changes that clients may not make.
    """

    name: str
    purposes: Mapping[str, str]
    open_methods: Sequence[str]
    quick_methods: Sequence[str]
    checks_changes: bool

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the ``grpc.GenericRpcHandler`` of the service."""


class GrpcServer:
    """gRPC server for several services; as a context manager, it stops on exit.

    Parameters
    ----------
    services : sequence of GrpcService
    port : int, default 0
        0: any free port.
    security : Security, optional
    limits : ServingLimits, optional
    threads : int, default 16
        Number of requests processed concurrently.
    shares_port : bool, default False
        Other processes listen on the port, too (``SO_REUSEPORT``).
    is_ready : callable, optional
        Returns True if the health service should report ``SERVING``.
    handlers : sequence of grpc.GenericRpcHandler
        Handlers of further services that are no :class:`GrpcService`.

    Attributes
    ----------
    port : int
        Port that the server listens on.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.friesian.serving import GrpcServer, RankingService, RemoteRanker
    >>> class Sum:
    ...     def predict(self, inputs):
    ...         return inputs["a"] + inputs["b"]
    >>> with GrpcServer([RankingService(Sum())]) as server:
    ...     with RemoteRanker(f"127.0.0.1:{server.port}") as ranker:
    ...         ranker.predict({"a": np.array([1, 2]), "b": np.array([3, 4])}).tolist()
    [4, 6]
    """

    def __init__(
        self,
        services: Sequence[GrpcService],
        port: int = 0,
        security: Security | None = None,
        limits: ServingLimits | None = None,
        threads: int = 16,
        shares_port: bool = False,
        is_ready: Callable[[], bool] = lambda: True,
        handlers: Sequence[grpc.GenericRpcHandler] = (),
    ):
        self._security = security or Security()
        limits = limits or ServingLimits(16 << 20, max_requests=256)
        check_integer("threads", threads, 1)
        self._names, self._is_ready, self._is_ending = (
            {each.name for each in services},
            is_ready,
            False,
        )
        self._purposes = {
            f"/{each.name}/{method}": (purpose, each.checks_changes)
            for each in services
            for method, purpose in each.purposes.items()
        }
        self._port = GrpcPort(
            self._security.host,
            port,
            [*(each.handler() for each in services), self._health(), *handlers],
            threads=threads,
            most_requests=limits.max_requests or threads * _REQUESTS_PER_THREAD,
            most_bytes=limits.max_request_bytes,
            check_access=self._check_access,
            open_methods=[
                f"/{each.name}/{name}" for each in services for name in each.open_methods
            ],
            quick_methods=[
                f"/{each.name}/{name}" for each in services for name in each.quick_methods
            ],
            pem=read_pem(self._security.files()),
            shares_port=shares_port,
        )
        self.port: int = self._port.port
        self._port.start()

    def _check_access(self, authorization: str | None, path: str) -> None:
        purpose, checks_changes = self._purposes.get(path, (INFER, True))
        self._security.check_access(authorization, purpose)
        if purpose == ADMIN and not checks_changes and not self._security.allows_changes:
            raise ForbiddenError(
                f"The server does not let clients change it by {path.rpartition('/')[2]}; set "
                "changes or an admin token for it"
            )

    def _health(self) -> grpc.GenericRpcHandler:
        """Return the standard health service, which reports ``NOT_SERVING`` during shutdown."""
        grpc = require("grpc", "serving")
        [(request_class, response_class)] = _pool.methods(_HEALTH).values()

        async def check(request: _HealthRequest, call: GrpcCall) -> object:
            if request.service and request.service not in self._names:
                raise GrpcRefusal("NOT_FOUND", f"There is no service {request.service!r}")
            is_serving = self._is_ready() and not self._is_ending
            return response_class(status="SERVING" if is_serving else "NOT_SERVING")

        method = grpc.unary_unary_rpc_method_handler(
            check,
            request_deserializer=request_class.FromString,
            response_serializer=response_class.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(_HEALTH, {"Check": method})

    def stop(self, grace: float = 5.0) -> None:
        """Refuse new requests, let running ones finish for up to `grace` seconds, and stop.

        Parameters
        ----------
        grace : float, default 5.0
            Seconds for running requests.
        """
        self._is_ending = True
        self._port.stop(grace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class _HealthRequest(Protocol):
    service: str
