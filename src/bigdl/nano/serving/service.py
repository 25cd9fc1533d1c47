"""InferenceService: what the servers for HTTP and gRPC do with a request, and its limits."""

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
    """The bytes that all requests reserve which a server has begun to read.

    Parameters
    ----------
    most : int
    """

    def __init__(self, most: int):
        self._most = most
        self._bytes = 0
        self._changing = threading.Lock()

    @contextmanager
    def reservation(self) -> Iterator[Callable[[int], None]]:
        """Return a function by which one request says how many bytes it has by now.

        It raises an :class:`OverloadError` if all together would have too many. What is said ends
        with the block.
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
                        "The requests that are read and answered now are too large together; try "
                        "again later"
                    )
                self._bytes += more
                mine += more

        try:
            yield reserve
        finally:
            with self._changing:
                self._bytes -= mine


_FREE_BYTES = 64 << 10  # of a request: small ones are answered whatever large ones reserve


class InferenceService:
    """The models of a repository, their limits, metrics and traces, for any kind of server.

    Parameters
    ----------
    repository : ModelRepository
    limits : ServingLimits, optional
    tokens : Tokens, optional
        Requests need one, but for those that ask whether the server lives and is ready.
    changes : bool
        True if clients may load, unload and share models.
    metrics : ServingMetrics, optional
        Those of the process that has other services, too.
    needs_models : bool
        False if the server is ready without a model, as it does other work.
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
        self.loops: set[asyncio.AbstractEventLoop] = set()  # that answer requests
        self.bytes_at_once = InFlightBytes(limit)
        self._needs_models = needs_models
        self.draining = False
        self._tokens = tokens or Tokens()
        self._changes = changes
        self._span = _tracer()
        # Where several processes are one server, it tells the others.
        self.changed: Callable[..., object] = lambda name, *arguments: None

    @property
    def ready(self) -> bool:
        """True if the server is not about to end, and there is a model if it needs one."""
        return not self.draining and (not self._needs_models or bool(self.repository.names()))

    def check_access(self, authorization: str | None, purpose: str = INFER) -> None:
        """Refuse a request without the token for its purpose.

        Parameters
        ----------
        authorization : str or None
            The header ``Authorization``.
        purpose : {"infer", "admin", "metrics"}

        Raises
        ------
        AccessError
        """
        self._tokens.check(authorization, purpose)

    def check_changes(self) -> None:
        """Refuse a request that changes the repository where that is not allowed.

        Raises
        ------
        AccessError
        """
        if not self._changes:
            raise ForbiddenError(
                "The server does not let clients change its models; start it with --changes, or "
                "with an admin token"
            )

    def change(self, name: str, *arguments: object) -> None:
        """Change the repository for a client.

        Parameters
        ----------
        name : {"load", "unload", "set_traffic"}
            The method of the repository.
        *arguments
            Of the method, of types that JSON has.

        Raises
        ------
        AccessError
            If clients may not change it.
        UsageError
            If it cannot be changed so.
        """
        self.check_changes()
        getattr(self.repository, name)(*arguments)
        self.changed(name, *arguments)

    def seconds_of(self, asked: float | None) -> float:
        """Return the seconds that a request has, within the limit."""
        return self.limits.timeout if asked is None else min(asked, self.limits.timeout)

    @contextmanager
    def trace_request(
        self, model: str, version: str | None, protocol: str
    ) -> Iterator[RequestTrace]:
        """Count and trace a request for inference, whatever becomes of it."""
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
    """One request on its way: which version answers it, and how long its stages take."""

    def __init__(self, service: InferenceService):
        self._service = service
        self.deployed: Deployment | None = None
        self.decode_seconds = 0.0

    def mirror(self, arrays: list) -> None:
        """Send the request to the shadow of its model, if there is one."""
        assert self.deployed is not None
        name = self.deployed.name
        self._service.repository.mirror(self.deployed, arrays, self._service.metrics.shadow(name))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage of the request."""
        begin = time.perf_counter()
        yield
        assert self.deployed is not None
        self._service.metrics.stage(self.deployed, name)(time.perf_counter() - begin)


def _tracer() -> Callable[[str, Any], Any]:
    """Return a function that makes spans of OpenTelemetry, or none where it is not installed."""
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
