"""Recommendations by HTTP and JSON, with health and metrics beside them.

=================================  ===============================================================
request                            answer
=================================  ===============================================================
``POST /recommend``                to ``{"users": [1, 2], "k": 10}`` the items of each user
``GET /recommend/1?k=10&canK=50``  the same for one user, as in BigDL 2.x
``GET /v2/health/live``, ``ready`` status 200, or 503 while the server ends
``GET /metrics``                   metrics in the text format of Prometheus
=================================  ===============================================================
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self

from bigdl.common.checks import check_number
from bigdl.common.errors import UsageError, one_line, require
from bigdl.friesian.serving.metrics import ServingMetrics
from bigdl.friesian.serving.recommender import Recommendation, Recommender
from bigdl.friesian.serving.rows import ids_of
from bigdl.friesian.serving.services import Limits, Security

logger = logging.getLogger(__name__)

_KEYS = {"users", "k", "candidates", "deadline_ms"}


class HttpServer:
    """The interface of HTTP, in a thread of its own; a context manager that ends it.

    Parameters
    ----------
    recommender : Recommender or None
        None serves health and metrics alone.
    port : int, default 0
        0 takes a free one.
    security : Security, optional
    limits : Limits, optional
    metrics : ServingMetrics, optional
    threads : int, default 8
        Requests that are worked on at the same time.

    Raises
    ------
    UsageError
        If the port cannot be used.
    """

    def __init__(
        self,
        recommender: Recommender | None,
        port: int = 0,
        security: Security | None = None,
        limits: Limits | None = None,
        metrics: ServingMetrics | None = None,
        threads: int = 8,
    ):
        require("aiohttp", "serving")
        self._recommender = recommender
        self._security, self._limits = security or Security(), limits or Limits()
        self._metrics = metrics or (recommender.metrics if recommender else ServingMetrics())
        self._pool = ThreadPoolExecutor(threads, "http")
        self._working = 0
        self._is_ready = True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()
        try:
            self.port: int = asyncio.run_coroutine_threadsafe(
                self._start(port), self._loop
            ).result()
        except OSError as error:
            self._end_threads()
            raise UsageError(
                f"The server cannot listen on {self._security.host}:{port}: {error.strerror}"
            ) from error

    async def _start(self, port: int) -> int:
        from aiohttp import web

        app = web.Application(
            client_max_size=self._limits.max_bytes, middlewares=[web.middleware(self._guarded)]
        )
        app.router.add_get("/v2/health/live", self._live)
        app.router.add_get("/v2/health/ready", self._ready)
        app.router.add_get("/metrics", self._text)
        if self._recommender is not None:
            app.router.add_post("/recommend", self._post)
            app.router.add_get("/recommend/{user}", self._get)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        context = None
        if self._security.certificate is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self._security.certificate, self._security.key)
        site = web.TCPSite(
            self._runner, self._security.host, port, ssl_context=context, shutdown_timeout=5
        )
        await site.start()
        return self._runner.addresses[0][1]

    # -- requests -------------------------------------------------------------------------------

    async def _guarded(self, request: Any, handler: Any) -> Any:
        from aiohttp import web

        is_open = request.path.startswith("/v2/health/")
        if not is_open and not self._security.allows(request.headers.get("Authorization")):
            return web.json_response(
                {"error": "The request lacks the right bearer token"}, status=401
            )
        try:
            return await handler(request)
        except web.HTTPException as error:  # no such path, or a body that is too long
            return web.json_response({"error": error.reason}, status=error.status)
        except UsageError as error:
            return web.json_response({"error": str(error)}, status=400)
        except ConnectionError:
            raise
        except Exception as error:
            logger.exception("%s failed", request.path)
            return web.json_response({"error": one_line(error)}, status=503)

    async def _live(self, request: Any) -> Any:
        from aiohttp import web

        return web.json_response({"live": True})

    async def _ready(self, request: Any) -> Any:
        from aiohttp import web

        return web.json_response({"ready": self._is_ready}, status=200 if self._is_ready else 503)

    async def _text(self, request: Any) -> Any:
        from aiohttp import web

        if self._metrics.registry is None:
            return web.json_response(self._metrics.summary())
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        content = generate_latest(self._metrics.registry)
        return web.Response(body=content, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _post(self, request: Any) -> Any:
        body = await request.read()
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            raise UsageError("The body of the request is no JSON") from None
        if not isinstance(content, dict) or "users" not in content:
            raise UsageError('The body should be an object such as {"users": [1, 2], "k": 10}')
        if strange := sorted(content.keys() - _KEYS):
            raise UsageError(f"The request has unknown keys {strange}; known are {sorted(_KEYS)}")
        if not isinstance(content["users"], list):
            raise UsageError("users should be a list of whole numbers")
        deadline = content.get("deadline_ms")
        return await self._answered(
            content["users"], content.get("k", 10), content.get("candidates"), deadline
        )

    async def _get(self, request: Any) -> Any:
        user = _whole("the user", request.match_info["user"])
        k = _whole("k", request.query.get("k", "10"))
        candidates = request.query.get("canK")
        count = None if candidates is None else _whole("canK", candidates)
        return await self._answered([user], k, count, None)

    async def _answered(self, users: list, k: Any, candidates: Any, deadline_ms: Any) -> Any:
        from aiohttp import web

        assert self._recommender is not None
        self._limits.check_ids(users)
        self._limits.check_k("k", k)
        if candidates is not None:
            self._limits.check_k("candidates", candidates)
        deadline = None
        if deadline_ms is not None:
            deadline = check_number("deadline_ms", deadline_ms, above=0) / 1000
        if self._working >= self._limits.max_requests:
            return web.json_response({"error": "Too many requests at the same time"}, status=429)
        work = partial(self._recommender.recommend, ids_of(users), k, candidates, deadline)
        self._working += 1
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._working -= 1
        return web.json_response({"recommendations": [_shown(each) for each in answers]})

    # -- end ------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Take no more connections, answer what was asked, and end."""
        if not self._loop.is_running():
            return
        self._is_ready = False
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._end_threads()

    def _end_threads(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} should be a whole number, got {text!r}") from None


def _shown(answer: Recommendation) -> dict[str, Any]:
    """Return an answer as values of JSON."""
    shown = {
        "user": answer.user_id,
        "items": answer.item_ids.tolist(),
        "scores": answer.scores.tolist(),
        "source": answer.source,
    }
    return {**shown, "reason": answer.reason} if answer.reason else shown
