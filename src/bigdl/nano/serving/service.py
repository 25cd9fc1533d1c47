"""InferenceService: what the servers for HTTP and gRPC do with a request, and its limits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from bigdl.common.checks import check_number, check_positive
from bigdl.common.errors import UsageError
from bigdl.nano.serving.access import INFER, AccessError, Tokens
from bigdl.nano.serving.batching import ClosedError, DeadlineError, OverloadError
from bigdl.nano.serving.metrics import ServingMetrics
from bigdl.nano.serving.repository import Deployment, ModelRepository, UnknownModelError

__all__ = ["AccessError", "InferenceService", "ServingLimits"]


@dataclass(frozen=True)
class ServingLimits:
    """The most that one request may ask for.

    Attributes
    ----------
    max_request_bytes : int
    max_rows : int
        Rows of one request.
    timeout : float
        Seconds after which a request is given up that brings no deadline of its own, and at most.
    body_timeout : float
        Seconds within which the body of an HTTP request has to arrive.
    max_answer_bytes : int
        Size of an answer.
    max_bytes_at_once : int
        Size of all requests together that arrive or are computed, those below 64 KiB left out; one
        more is refused. It is at least `max_request_bytes`.

    Examples
    --------
    >>> from bigdl.nano.serving import ServingLimits
    >>> ServingLimits(max_rows=512).max_request_bytes
    67108864
    """

    max_request_bytes: int = 64 << 20
    max_rows: int = 65_536
    timeout: float = 60.0
    body_timeout: float = 30.0
    max_answer_bytes: int = 256 << 20
    max_bytes_at_once: int = 512 << 20

    def __post_init__(self) -> None:
        check_positive("max_request_bytes", self.max_request_bytes)
        check_positive("max_rows", self.max_rows)
        check_number("timeout", self.timeout, above=0)
        check_number("body_timeout", self.body_timeout, above=0)
        check_positive("max_answer_bytes", self.max_answer_bytes)
        check_positive("max_bytes_at_once", self.max_bytes_at_once)


class BytesAtOnce:
    """The bytes that all requests hold which a server has begun to read.

    Parameters
    ----------
    most : int
    """

    def __init__(self, most: int):
        self._most = most
        self._bytes = 0
        self._changing = threading.Lock()

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Return a function by which one request says how many bytes it has by now.

        It raises an :class:`OverloadError` if all together would have too many. What is said ends
        with the block.
        """
        mine = 0

        def hold(size: int) -> None:
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
            yield hold
        finally:
            with self._changing:
                self._bytes -= mine


_FREE_BYTES = 64 << 10  # of a request: small ones are answered whatever large ones hold


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
    registry : prometheus_client.CollectorRegistry, optional
        Where other metrics of the process are, too.
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
        registry: Any = None,
        needs_models: bool = True,
    ):
        self.repository = repository
        self.limits = limits or ServingLimits()
        self.metrics = ServingMetrics(repository, registry)
        limit = max(self.limits.max_bytes_at_once, self.limits.max_request_bytes)
        self.loops: set[asyncio.AbstractEventLoop] = set()  # that answer requests
        self.bytes_at_once = BytesAtOnce(limit)
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
            raise AccessError(
                "The server does not let clients change its models; start it with --changes, or "
                "with an admin token"
            )

    def change(self, name: str, *arguments: Any) -> None:
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
    def answering(self, model: str, version: str | None, protocol: str) -> Iterator[Answering]:
        """Count and trace a request for inference, whatever becomes of it."""
        begin, answering = time.perf_counter(), Answering(self)
        code = "cancelled"
        with self.metrics.request(), self._span(f"{protocol} infer {model}", answering):
            try:
                yield answering
                code = "ok"
            except Exception as error:
                code = code_of(error)
                raise
            finally:
                seconds = time.perf_counter() - begin
                deployed = answering.deployed
                if deployed is None:
                    self.metrics.answered("", "", protocol, code, seconds)
                else:
                    self.metrics.answered(deployed.name, deployed.version, protocol, code, seconds)


class Answering:
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


CODES: dict[type[Exception], str] = {
    UnknownModelError: "not_found",
    AccessError: "denied",
    UsageError: "bad_request",
    OverloadError: "overloaded",
    ClosedError: "unavailable",
    DeadlineError: "deadline",
}


def code_of(error: BaseException) -> str:
    """Return the word for an error in metrics: the first class of :data:`CODES` that it is of."""
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), "error")


def _tracer() -> Callable[[str, Any], Any]:
    """Return a function that makes spans of OpenTelemetry, or none where it is not installed."""
    try:
        from opentelemetry import trace
    except ImportError:
        return lambda name, answering: nullcontext()
    tracer = trace.get_tracer("bigdl.nano.serving")

    @contextmanager
    def span(name: str, answering: Answering) -> Iterator[None]:
        with tracer.start_as_current_span(name) as current:
            try:
                yield
            finally:
                deployed = answering.deployed
                if deployed is not None and current.is_recording():
                    current.set_attribute("bigdl.model.name", deployed.name)
                    current.set_attribute("bigdl.model.version", deployed.version)

    return span
