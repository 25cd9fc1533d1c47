"""HTTP and JSON interface of a recommender, with health checks and metrics.

=================================  ===============================================================
request                            answer
=================================  ===============================================================
``POST /recommend``                items of each user in a body ``{"users": [1, 2], "k": 10}``
``GET /recommend/1?k=10&canK=50``  the same for one user, as in BigDL 2.x
``POST /events``                   appends events to the histories of users
``GET /drift``                     page of the drift of features
``GET /v2/health/live``, ``ready`` status 200, or 503 while the server shuts down
``/v2/models/...``                 the Open Inference Protocol, for the models of a service
``GET /metrics``                   metrics in Prometheus text format
``GET /openapi.json``, ``/docs``   OpenAPI description of the interface
=================================  ===============================================================
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Self
from urllib.parse import parse_qs, unquote

from bigdl.common.checks import check_number
from bigdl.common.errors import UsageError
from bigdl.friesian.serving.events import Event
from bigdl.friesian.serving.filters import ItemFilter
from bigdl.friesian.serving.openapi import PATHS
from bigdl.friesian.serving.recommender import Recommender
from bigdl.friesian.serving.rows import ids_of
from bigdl.friesian.serving.services import Limits
from bigdl.friesian.serving.stages import Recommendation
from bigdl.nano.serving.access import Security
from bigdl.nano.serving.batching import ClosedError, OverloadError
from bigdl.nano.serving.http_app import HttpApp
from bigdl.nano.serving.http_messages import HttpAnswer, HttpRequest, json_answer
from bigdl.nano.serving.http_thread import HttpThread
from bigdl.nano.serving.limits import ServingLimits
from bigdl.nano.serving.metrics import ServingMetrics
from bigdl.nano.serving.open_inference import parse_json
from bigdl.nano.serving.repository import ModelRepository
from bigdl.nano.serving.service import InferenceService
from bigdl.nano.serving.statuses import CallerGoneError

_BYTES_OF_ID, _OTHER_BYTES = 64, 64 << 10  # maximum bytes per id and for the rest of a body
_KEYS = {"users", "k", "candidates", "deadline_ms", "filter"}
_BYTES_OF_EVENT = 512  # maximum mean number of bytes per event of a body


class _Routes:
    """Handlers of the recommender's HTTP routes, except the routes of its models."""

    def __init__(self, recommender: Recommender, limits: ServingLimits, threads: int):
        self._recommender, self._limits = recommender, limits
        self._pool = ThreadPoolExecutor(threads, "http")
        self._working = 0
        self._has_ended = False

    def close(self) -> None:
        """Stop the threads; abort requests in progress."""
        self._has_ended = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def post(self, request: HttpRequest) -> HttpAnswer:
        """Answer ``POST /recommend``."""
        content = self._content(request, _BYTES_OF_ID)
        if "users" not in content:
            raise UsageError(
                'The body should be an object such as {"users": [1, 2], "k": 10}',
                code="request-invalid",
                argument="users",
            )
        if strange := sorted(content.keys() - _KEYS):
            raise UsageError(
                f"The request has unknown keys {strange}; known are {sorted(_KEYS)}",
                code="request-invalid",
                argument=strange[0],
                allowed=list(_KEYS),
            )
        if not isinstance(content["users"], list):
            raise UsageError(
                "users should be a list of whole numbers", code="request-invalid", argument="users"
            )
        deadline = content.get("deadline_ms")
        chosen = None if content.get("filter") is None else ItemFilter.of(content["filter"])
        return await self._answered(
            *(request, content["users"], content.get("k", 10), content.get("candidates")),
            deadline,
            chosen,
        )

    async def post_events(self, request: HttpRequest) -> HttpAnswer:
        """Answer ``POST /events``."""
        content = self._content(request, _BYTES_OF_EVENT)
        if content.keys() != {"events"} or not isinstance(content["events"], list):
            raise UsageError(
                'The body should be an object such as {"events": [{"user": 1, "item": 7}]}',
                code="request-invalid",
                argument="events",
            )
        self._limits.check_ids(content["events"])
        events = [Event.of(each) for each in content["events"]]
        append = self._recommender.append
        return await self._run(request, lambda _: json_answer(asdict(append(events))).body)

    async def get_drift(self, request: HttpRequest) -> HttpAnswer:
        """Answer ``GET /drift``."""
        assert self._recommender.drift is not None
        page = self._recommender.drift.page().encode()
        return HttpAnswer(page, content_type="text/html; charset=utf-8")

    def _content(self, request: HttpRequest, bytes_of_id: int) -> dict[str, Any]:
        """Parse a body whose size is limited by the allowed number of ids."""
        most = bytes_of_id * self._limits.max_ids + _OTHER_BYTES
        if len(request.body) > most:
            raise UsageError(
                f"The body may have at most {most} bytes, got {len(request.body)}",
                code="request-limit",
                limit=most,
            )
        return parse_json(request.body)

    async def get(self, request: HttpRequest, user: str) -> HttpAnswer:
        """Answer ``GET /recommend/<user>``."""
        query = {name: values[-1] for name, values in parse_qs(request.query, True).items()}
        k = _integer("k", query.get("k", "10"))
        candidates = query.get("canK")
        count = None if candidates is None else _integer("canK", candidates)
        return await self._answered(request, [_integer("the user", unquote(user))], k, count, None)

    async def _answered(
        self,
        request: HttpRequest,
        users: list,
        k: int,
        candidates: int | None,
        deadline_ms: float | None,
        item_filter: ItemFilter | None = None,
    ) -> HttpAnswer:
        self._limits.check_ids(users)
        self._limits.check_k("k", k)
        if candidates is not None:
            self._limits.check_k("candidates", candidates)
        most = max(k, self._recommender.default_candidates) if candidates is None else candidates
        self._limits.check_pairs(len(users), most)
        deadline = None
        if deadline_ms is not None:
            deadline = check_number("deadline_ms", deadline_ms, above=0) / 1000
        ids = ids_of(users)

        def content(is_gone: Callable[[], bool]) -> bytes:
            answers = self._recommender.recommend(
                ids, k, candidates, deadline, is_gone, item_filter
            )
            return json_answer(
                {"recommendations": [recommendation_json(each) for each in answers]}
            ).body

        return await self._run(request, content)

    async def _run(
        self, request: HttpRequest, content: Callable[[Callable[[], bool]], bytes]
    ) -> HttpAnswer:
        """Compute an answer in a thread; `content` gets a function that is True to stop it."""
        if self._working >= (self._limits.max_requests or math.inf):
            raise OverloadError("Too many concurrent requests; try again later")
        gone = threading.Event()
        work = self._pool.submit(content, lambda: gone.is_set() or self._has_ended)
        self._working += 1
        watching = asyncio.ensure_future(request.wait_until_gone())
        # Count it until the work ends, not until the client disconnects, because it holds a thread.
        loop = asyncio.get_running_loop()
        work.add_done_callback(lambda _: _in_loop(loop, self._end_one))
        try:
            computing = asyncio.wrap_future(work)
            await asyncio.wait((computing, watching), return_when=asyncio.FIRST_COMPLETED)
            if not computing.done():
                computing.add_done_callback(lambda each: each.cancelled() or each.exception())
                raise ClosedError("The client has disconnected")
            if computing.cancelled():
                raise CallerGoneError
            return HttpAnswer(computing.result())
        except CallerGoneError:
            raise ClosedError("The server is shutting down") from None
        finally:
            gone.set()
            work.cancel()
            watching.cancel()

    def _end_one(self) -> None:
        self._working -= 1


def _in_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function)


class HttpServer:
    """HTTP server of a recommender in a thread; as a context manager, it stops on exit.

    Parameters
    ----------
    recommender : Recommender or None
        None omits ``/recommend``.
    port : int, default 0
        0 selects a free port.
    security : Security, optional
    limits : Limits, optional
    metrics : ServingMetrics, optional
    threads : int, default 8
        Number of recommendations to compute concurrently.
    service : InferenceService, optional
        Models to serve by the Open Inference Protocol.
    shares_port : bool, default False
        Whether other processes listen on the same port.

    Attributes
    ----------
    port : int

    Raises
    ------
    UsageError
        If the port or the certificate cannot be used.

    Examples
    --------
    >>> import json
    >>> from urllib.request import urlopen
    >>> from bigdl.friesian.serving import HttpServer
    >>> with HttpServer(None) as server:
    ...     with urlopen(f"http://127.0.0.1:{server.port}/v2/health/ready") as answer:
    ...         json.load(answer)
    {'ready': True}
    """

    def __init__(
        self,
        recommender: Recommender | None,
        port: int = 0,
        security: Security | None = None,
        limits: ServingLimits | None = None,
        metrics: ServingMetrics | None = None,
        threads: int = 8,
        service: InferenceService | None = None,
        shares_port: bool = False,
    ):
        security, limits = security or Security(), limits or Limits()
        metrics = metrics or (recommender.metrics if recommender else ServingMetrics())
        self._service = service or InferenceService(
            ModelRepository(),
            limits,
            tokens=security.tokens,
            changes=False,
            metrics=metrics,
            needs_models=False,
        )
        routes: dict[tuple[str, str], Callable[..., Any]] = {
            ("GET", "/v2/health/live"): self._live,
            ("GET", "/v2/health/ready"): self._ready,
        }
        self._routes = None
        if recommender is not None:
            self._routes = _Routes(recommender, limits, threads)
            routes["POST", "/recommend"] = self._routes.post
            routes["GET", "/recommend/{user}"] = self._routes.get
            routes["POST", "/events"] = self._routes.post_events
            if recommender.drift is not None:
                routes["GET", "/drift"] = self._routes.get_drift
        paths = {} if recommender is None else PATHS
        app = HttpApp(self._service, routes, paths, changes=("/events",))
        try:
            self._thread = HttpThread(app, security.host, port, security.files(), shares_port)
        except BaseException:
            self._end()
            raise
        self.port: int = self._thread.port
        self._thread.start()

    async def _live(self, request: HttpRequest) -> HttpAnswer:
        return json_answer({"live": True})

    async def _ready(self, request: HttpRequest) -> HttpAnswer:
        is_ready = self._service.ready
        return json_answer({"ready": is_ready}, 200 if is_ready else 503)

    def _end(self) -> None:
        if self._routes is not None:
            self._routes.close()

    def stop(self, grace: float = 5.0) -> None:
        """Refuse new connections, finish running requests within `grace` seconds, and stop."""
        self._service.draining = True
        self._thread.stop(grace)
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"{name} should be a whole number, got {text!r}", code="request-invalid", argument=name
        ) from None


def recommendation_json(answer: Recommendation) -> dict[str, Any]:
    """Return a recommendation as JSON-compatible values."""
    values = {
        "user": answer.user_id,
        "items": answer.item_ids.tolist(),
        "scores": answer.scores.tolist(),
        "source": answer.source,
    }
    if answer.partial:
        values["partial"] = True
    return {**values, "reason": answer.reason} if answer.reason else values
