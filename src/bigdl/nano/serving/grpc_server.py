"""GrpcServer: services of gRPC on a port, with the usual health service beside them."""

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
_WAITING_FOR_EACH_THREAD = 32
_pool = ProtoPool("bigdl.nano.serving", "health.binpb")


class GrpcService(Protocol):
    """A service that a :class:`GrpcServer` answers.

    Attributes
    ----------
    name : str
        With its package.
    purposes : mapping of str to str
        What methods are for that are not for inference.
    open_methods : sequence of str
        Those that need no token.
    quick_methods : sequence of str
        Those that say something of the server, and wait for no other request.
    checks_changes : bool
        True if it refuses changes itself where clients may make none.
    """

    name: str
    purposes: Mapping[str, str]
    open_methods: Sequence[str]
    quick_methods: Sequence[str]
    checks_changes: bool

    def handler(self) -> grpc.GenericRpcHandler:
        """Return what a server of gRPC takes."""


class GrpcServer:
    """Services on a port; a context manager that ends them.

    Parameters
    ----------
    services : sequence of GrpcService
    port : int, default 0
        0 takes a free one.
    security : Security, optional
    limits : ServingLimits, optional
    threads : int, default 16
        Requests that are worked on at the same time.
    shares_port : bool, default False
        Other processes listen on the port, too.
    is_ready : callable, optional
        Whether the health service says so.
    handlers : sequence of grpc.GenericRpcHandler
        Of services that are no :class:`GrpcService`.

    Attributes
    ----------
    port : int

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
            most_requests=limits.max_requests or threads * _WAITING_FOR_EACH_THREAD,
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
        """Return the usual health service: all services are ready, or the server ends."""
        grpc = require("grpc", "serving")
        [(asked, answer)] = _pool.methods(_HEALTH).values()

        async def check(request: _HealthRequest, call: GrpcCall) -> object:
            if request.service and request.service not in self._names:
                raise GrpcRefusal("NOT_FOUND", f"There is no service {request.service!r}")
            is_serving = self._is_ready() and not self._is_ending
            return answer(status="SERVING" if is_serving else "NOT_SERVING")

        method = grpc.unary_unary_rpc_method_handler(
            check,
            request_deserializer=asked.FromString,
            response_serializer=answer.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(_HEALTH, {"Check": method})

    def stop(self, grace: float = 5.0) -> None:
        """Take no more requests, let those that run end within some seconds, and end.

        Parameters
        ----------
        grace : float, default 5.0
            Seconds.
        """
        self._is_ending = True
        self._port.stop(grace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class _HealthRequest(Protocol):
    service: str
