"""InferenceService: request handling and limits shared by the HTTP and gRPC servers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from bigdl.common.errors import require
from bigdl.nano.serving.access import INFER, ForbiddenError, Tokens
from bigdl.nano.serving.batching import OverloadError
from bigdl.nano.serving.limits import ServingLimits
from bigdl.nano.serving.metrics import ServingMetrics
from bigdl.nano.serving.repository import Deployment, ModelRepository
from bigdl.nano.serving.statuses import status_of

__all__ = ["InferenceService"]


class InFlightBytes:
    """Counter and limit of the bytes that all requests in flight hold in memory.

    Parameters
    ----------
    most : int
        Limit in bytes.
    """

    def __init__(self, most: int):
        self._most = most
        self._bytes = 0
        self._changing = threading.Lock()

    @contextmanager
    def reservation(self) -> Iterator[Callable[[int], None]]:
        """Context manager that yields a function to reserve memory, in bytes, for one request.

        The function raises an :class:`OverloadError` if all requests together would exceed the
        limit. The bytes are released when the block ends.
        """
        mine = 0

        def reserve(size: int) -> None:
            nonlocal mine
            more = max(size - _FREE_BYTES, 0) - mine
            if not more:
                return
            with self._changing:
                if more > 0 and self._bytes + more > self._most:
                    raise OverloadError(
                        "The requests in progress are too large together; try again later"
                    )
                self._bytes += more
                mine += more

        try:
            yield reserve
        finally:
            with self._changing:
                self._bytes -= mine


_FREE_BYTES = 64 << 10  # not counted, so that large requests never block small ones


class InferenceService:
    """Models of a repository with limits, metrics and traces, independent of the protocol.

    Parameters
    ----------
    repository : ModelRepository
    limits : ServingLimits, optional
    tokens : Tokens, optional
        Accepted tokens. Requests for liveness and readiness need none.
    changes : bool
        True if clients may load and unload models and set the traffic of their versions.
    metrics : ServingMetrics, optional
        Metrics of a process that has other services in addition. Default: new ones.
    needs_models : bool
        False if the server is ready without a model.
    """

    def __init__(
        self,
        repository: ModelRepository,
        limits: ServingLimits | None = None,
        *,
        tokens: Tokens | None = None,
        changes: bool = True,
        metrics: ServingMetrics | None = None,
        needs_models: bool = True,
    ):
        self.repository = repository
        self.limits = limits or ServingLimits()
        if metrics is None or metrics.registry is None:
            registry = require("prometheus_client", "serving").CollectorRegistry()
            metrics = ServingMetrics(registry, recommends=False)
        self.metrics = metrics
        metrics.observe_models(repository)
        limit = max(self.limits.max_bytes_at_once, self.limits.max_request_bytes)
        self.loops: set[asyncio.AbstractEventLoop] = set()  # event loops that answer requests
        self.bytes_at_once = InFlightBytes(limit)
        self._needs_models = needs_models
        self.draining = False
        self._tokens = tokens or Tokens()
        self._changes = changes
        self._span = _tracer()
        # With several worker processes, it forwards a change to the others.
        self.changed: Callable[..., object] = lambda name, *arguments: None

    @property
    def ready(self) -> bool:
        """True if the server is not shutting down and has a model, or needs none."""
        return not self.draining and (not self._needs_models or bool(self.repository.names()))

    def check_access(self, authorization: str | None, purpose: str = INFER) -> None:
        """Raise an AccessError unless the token of a request allows the purpose.

        Parameters
        ----------
        authorization : str or None
            Value of the header ``Authorization``.
        purpose : {"infer", "admin", "metrics"}

        Raises
        ------
        AccessError
            If the token is missing or wrong.
        """
        self._tokens.check(authorization, purpose)

    def check_changes(self) -> None:
        """Raise an AccessError unless clients may change the repository.

        Raises
        ------
        AccessError
            If clients may not change it.
        """
        if not self._changes:
            raise ForbiddenError(
                "The server does not let clients change its models; start it with --changes, or "
                "with an admin token"
            )

    def change(self, name: str, *arguments: object) -> None:
        """Call a method of the model repository by its name, for a client's request.

        Parameters
        ----------
        name : {"load", "unload", "set_traffic"}
            Method of the repository.
        *arguments
            Arguments of the method, of JSON types.

        Raises
        ------
        AccessError
            If clients may not change it.
        UsageError
            If the change is not possible.
        """
        self.check_changes()
        getattr(self.repository, name)(*arguments)
        self.changed(name, *arguments)

    def seconds_of(self, timeout: float | None) -> float:
        """Return the timeout of a request in seconds, capped by the server's limit."""
        return self.limits.timeout if timeout is None else min(timeout, self.limits.timeout)

    @contextmanager
    def trace_request(
        self, model: str, version: str | None, protocol: str
    ) -> Iterator[RequestTrace]:
        """Context manager that records metrics and an OpenTelemetry span of one request."""
        begin, request_trace = time.perf_counter(), RequestTrace(self)
        code = "cancelled"
        with self.metrics.request(), self._span(f"{protocol} infer {model}", request_trace):
            try:
                yield request_trace
                code = "ok"
            except Exception as error:
                code = status_of(error).word
                raise
            finally:
                seconds = time.perf_counter() - begin
                deployed = request_trace.deployed
                if deployed is None:
                    self.metrics.requested("", "", protocol, code, seconds)
                else:
                    self.metrics.requested(deployed.name, deployed.version, protocol, code, seconds)


class RequestTrace:
    """Record of one request: the version that answers it, and the durations of its stages."""

    def __init__(self, service: InferenceService):
        self._service = service
        self.deployed: Deployment | None = None
        self.decode_seconds = 0.0

    def mirror(self, arrays: list) -> None:
        """Send the request to the shadow version of its model, if there is one."""
        assert self.deployed is not None
        name = self.deployed.name
        self._service.repository.mirror(self.deployed, arrays, self._service.metrics.shadow(name))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Context manager that records its duration as a stage of the request."""
        begin = time.perf_counter()
        yield
        assert self.deployed is not None
        self._service.metrics.stage(self.deployed, name)(time.perf_counter() - begin)


def _tracer() -> Callable[[str, Any], Any]:
    """Return a function that starts spans; it has no effect if OpenTelemetry is not installed."""
    try:
        from opentelemetry import trace
    except ImportError:
        return lambda name, request_trace: nullcontext()
    tracer = trace.get_tracer("bigdl.nano.serving")

    @contextmanager
    def span(name: str, request_trace: RequestTrace) -> Iterator[None]:
        with tracer.start_as_current_span(name) as current:
            try:
                yield
            finally:
                deployed = request_trace.deployed
                if deployed is not None and current.is_recording():
                    current.set_attribute("bigdl.model.name", deployed.name)
                    current.set_attribute("bigdl.model.version", deployed.version)

    return span
