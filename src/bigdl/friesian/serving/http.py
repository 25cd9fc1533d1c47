"""Recommendations by HTTP and JSON, with health and metrics beside them.

=================================  ===============================================================
request                            answer
=================================  ===============================================================
``POST /recommend``                to ``{"users": [1, 2], "k": 10}`` the items of each user
``GET /recommend/1?k=10&canK=50``  the same for one user, as in BigDL 2.x
``GET /v2/health/live``, ``ready`` status 200, or 503 while the server ends
``GET /metrics``                   metrics in the text format of Prometheus
``GET /openapi.json``              this interface as OpenAPI
=================================  ===============================================================
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self
from urllib.parse import parse_qs, unquote

from bigdl.common.checks import check_number
from bigdl.common.errors import UsageError, one_line
from bigdl.friesian.serving.metrics import ServingMetrics
from bigdl.friesian.serving.openapi import openapi
from bigdl.friesian.serving.recommender import Recommendation, Recommender
from bigdl.friesian.serving.rows import ids_of
from bigdl.friesian.serving.services import Limits, Security
from bigdl.nano.serving.http_thread import HttpThread

logger = logging.getLogger(__name__)

_JSON = "application/json"
_KEYS = {"users", "k", "candidates", "deadline_ms"}
_BODY_SECONDS = 20  # in which the body of a request has to come


class _Status(Exception):
    """An answer that is no success.

    Parameters
    ----------
    status : int
    sentence : str
    """

    def __init__(self, status: int, sentence: str):
        self.status = status
        super().__init__(sentence)


class HttpApp:
    """The interface as an application of ASGI; see the module for what it answers.

    Parameters
    ----------
    recommender : Recommender or None
        None serves health and metrics alone.
    security : Security
    limits : Limits
    metrics : ServingMetrics
    threads : int
        Requests that are worked on at the same time.
    """

    def __init__(
        self,
        recommender: Recommender | None,
        security: Security,
        limits: Limits,
        metrics: ServingMetrics,
        threads: int,
    ):
        self._recommender = recommender
        self._security, self._limits, self._metrics = security, limits, metrics
        self._pool = ThreadPoolExecutor(threads, "http")
        self._working = 0
        self.is_ready = True

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer one request."""
        kind = _JSON
        try:
            status, content = await self._answer(scope, receive)
            if isinstance(content, tuple):
                content, kind = content
            else:
                content = json.dumps(content).encode()
        except _Status as error:
            status, content = error.status, _told(error)
        except UsageError as error:
            status, content = 400, _told(error)
        except Exception as error:
            logger.exception("%s failed", scope.get("path"))
            status, content = 503, json.dumps({"error": one_line(error)}).encode()
        headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(content))]
        if status in (408, 413):  # the rest of the body may still come
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _answer(self, scope: dict[str, Any], receive: Any) -> tuple[int, Any]:
        path, method = scope["path"], scope["method"]
        headers = {name.decode("latin1"): value for name, value in scope["headers"]}
        if path == "/v2/health/live":
            return self._allowed(method, "GET", (200, {"live": True}))
        if path == "/v2/health/ready":
            answer = 200 if self.is_ready else 503, {"ready": self.is_ready}
            return self._allowed(method, "GET", answer)
        if not self._security.allows(headers.get("authorization", b"").decode("latin1")):
            raise _Status(401, "The request lacks the right bearer token")
        if path == "/metrics":
            return self._allowed(method, "GET", (200, self._text()))
        if path == "/openapi.json":
            return self._allowed(method, "GET", (200, openapi()))
        if self._recommender is not None and path == "/recommend":
            self._allowed(method, "POST")
            try:
                async with asyncio.timeout(_BODY_SECONDS):
                    body = await self._body(headers, receive)
            except TimeoutError:
                raise _Status(408, "The body of the request did not come in time") from None
            return await self._post(body)
        if self._recommender is not None and path.startswith("/recommend/"):
            self._allowed(method, "GET")
            return await self._get(unquote(path.removeprefix("/recommend/")), scope)
        raise _Status(404, f"There is nothing at {path}")

    def _allowed(self, method: str, wanted: str, answer: Any = None) -> Any:
        if method != wanted:
            raise _Status(405, f"The method should be {wanted}, got {method}")
        return answer

    async def _body(self, headers: dict[str, bytes], receive: Callable[[], Awaitable]) -> bytes:
        parts, size, most = [], 0, self._limits.max_bytes
        length = headers.get("content-length", b"0")
        if length.isdigit() and int(length) > most:
            raise _Status(413, f"A request may have {most} bytes")
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Status(400, "The request has no end")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise _Status(413, f"A request may have {most} bytes")
            if not message.get("more_body", False):
                return b"".join(parts)

    def _text(self) -> Any:
        if self._metrics.registry is None:
            return self._metrics.summary()
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self._metrics.registry), CONTENT_TYPE_LATEST

    async def _post(self, body: bytes) -> tuple[int, Any]:
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

    async def _get(self, user: str, scope: dict[str, Any]) -> tuple[int, Any]:
        text = scope["query_string"].decode("latin1")
        query = {name: values[-1] for name, values in parse_qs(text, True).items()}
        k = _whole("k", query.get("k", "10"))
        candidates = query.get("canK")
        count = None if candidates is None else _whole("canK", candidates)
        return await self._answered([_whole("the user", user)], k, count, None)

    async def _answered(
        self, users: list, k: Any, candidates: Any, deadline_ms: Any
    ) -> tuple[int, Any]:
        assert self._recommender is not None
        self._limits.check_ids(users)
        self._limits.check_k("k", k)
        if candidates is not None:
            self._limits.check_k("candidates", candidates)
        deadline = None
        if deadline_ms is not None:
            deadline = check_number("deadline_ms", deadline_ms, above=0) / 1000
        if self._working >= self._limits.max_requests:
            raise _Status(429, "Too many requests at the same time")
        work = partial(self._recommender.recommend, ids_of(users), k, candidates, deadline)
        self._working += 1
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._working -= 1
        return 200, {"recommendations": [_shown(each) for each in answers]}


def _told(error: Exception) -> bytes:
    return json.dumps({"error": str(error)}).encode()


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
        limits: Limits | None = None,
        metrics: ServingMetrics | None = None,
        threads: int = 8,
    ):
        security, limits = security or Security(), limits or Limits()
        metrics = metrics or (recommender.metrics if recommender else ServingMetrics())
        self._app = HttpApp(recommender, security, limits, metrics, threads)
        tls = security.certificate and (security.certificate, security.key)
        try:
            self._thread = HttpThread(self._app, security.host, port, tls or None)
        except BaseException:
            self._app.close()
            raise
        self.port: int = self._thread.port
        self._thread.start()

    def stop(self, grace: float = 5.0) -> None:
        """Take no more connections, answer what was asked within some seconds, and end."""
        self._app.is_ready = False
        self._thread.stop(grace)
        self._app.close()

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
