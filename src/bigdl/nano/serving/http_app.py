"""HttpApp: the Open Inference Protocol over HTTP, and metrics, as an ASGI application."""

from __future__ import annotations

import asyncio
import gzip
import io
import logging
import re
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bigdl.common.errors import LazyModule, UsageError
from bigdl.nano.serving import open_inference as protocol
from bigdl.nano.serving.access import ADMIN, INFER, METRICS, ForbiddenError, only_authorization
from bigdl.nano.serving.batching import ClosedError, DeadlineError, OverloadError
from bigdl.nano.serving.openapi import openapi, page
from bigdl.nano.serving.repository import UnknownModelError
from bigdl.nano.serving.service import AccessError, InferenceService

__all__ = ["HttpAnswer", "HttpApp", "HttpRequest"]

orjson = LazyModule("orjson", "serving")
_log = logging.getLogger(__name__)
_JSON = "application/json"


@dataclass(frozen=True)
class HttpRequest:
    """A request whose body has arrived.

    Attributes
    ----------
    method, path : str
    headers : dict of str to str
        By their names in lower case.
    body : bytes
    query : str
        What follows the question mark.

    Examples
    --------
    >>> from bigdl.nano.serving import HttpRequest
    >>> HttpRequest("POST", "/recommend", {}, b'{"user": 7}').json()
    {'user': 7}
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    query: str = ""

    def json(self) -> dict[str, Any]:
        """Return the body as an object of JSON; an empty body is an empty object."""
        return protocol.parse_json(self.body) if self.body.strip() else {}


@dataclass(frozen=True)
class HttpAnswer:
    """An answer over HTTP.

    Attributes
    ----------
    body : bytes
    status : int
    content_type : str
    headers : dict of str to str
        Further ones.

    Examples
    --------
    A route beside those of the protocol:

    >>> from bigdl.nano.serving import HttpAnswer, ModelRepository, ModelServer
    >>> async def hello(request, name):
    ...     return HttpAnswer(f"hello {name}".encode(), content_type="text/plain")
    >>> routes = {("GET", "/hello/{name}"): hello}
    >>> with ModelServer(ModelRepository(), http_port=0, grpc_port=None, routes=routes) as server:
    ...     from urllib.request import urlopen
    ...     urlopen(f"http://127.0.0.1:{server.http_port}/hello/you").read()
    b'hello you'
    """

    body: bytes = b""
    status: int = 200
    content_type: str = _JSON
    headers: dict[str, str] = field(default_factory=dict)


def json_answer(content: Any, status: int = 200) -> HttpAnswer:
    """Return an answer in JSON."""
    return HttpAnswer(orjson.dumps(content), status)


Handler = Callable[..., Awaitable[HttpAnswer]]
_STATUS: list[tuple[type[Exception], int]] = [
    (UnknownModelError, 404),
    (AccessError, 403),
    (UsageError, 400),
    (OverloadError, 503),
    (ClosedError, 503),
    (DeadlineError, 504),
]


class _Refused(Exception):
    """A request that is answered before anything else is looked at."""

    def __init__(self, status: int, sentence: str, **headers: str):
        super().__init__(sentence)
        self.status, self.headers = status, headers


class HttpApp:
    """An ASGI application for the models of a service.

    Parameters
    ----------
    service : InferenceService
    routes : dict of (str, str) to callable, optional
        Further ``(method, path)``, each with an async function of an :class:`HttpRequest` that
        returns an :class:`HttpAnswer`. Braces in a path name arguments of the function:
        ``"/recommend/{user}"``.
    paths : dict, optional
        What OpenAPI says of the further routes.
    """

    def __init__(
        self,
        service: InferenceService,
        routes: Mapping[tuple[str, str], Handler] | None = None,
        paths: Mapping[str, Any] | None = None,
    ):
        self.service = service
        self._paths = dict(paths or {})
        self._results = _Results()
        own: dict[tuple[str, str], Handler] = {
            ("GET", "/v2/health/live"): self._live,
            ("GET", "/v2/health/ready"): self._ready,
            ("GET", "/v2"): self._server,
            ("GET", "/v2/models/{model}"): self._model,
            ("GET", "/v2/models/{model}/versions/{version}"): self._model,
            ("GET", "/v2/models/{model}/ready"): self._model_ready,
            ("GET", "/v2/models/{model}/versions/{version}/ready"): self._model_ready,
            ("POST", "/v2/models/{model}/infer"): self._infer,
            ("POST", "/v2/models/{model}/versions/{version}/infer"): self._infer,
            ("POST", "/v2/repository/index"): self._index,
            ("POST", "/v2/repository/models/{model}/load"): self._load,
            ("POST", "/v2/repository/models/{model}/unload"): self._unload,
            ("POST", "/v2/repository/models/{model}/traffic"): self._traffic,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/openapi.json"): self._openapi,
            ("GET", "/docs"): self._docs,
        }
        self._fixed: dict[str, dict[str, Handler]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Handler]]] = []
        for (method, path), handler in {**own, **(routes or {})}.items():
            self._route(path)[method] = handler

    def _route(self, path: str) -> dict[str, Handler]:
        if "{" not in path:
            return self._fixed.setdefault(path, {})
        pattern = re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]+)", re.escape(path)))
        for known, methods in self._patterns:
            if known == pattern:
                return methods
        self._patterns.append((pattern, {}))
        return self._patterns[-1][1]

    # -- ASGI ----------------------------------------------------------------------------------

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":  # a websocket
            await send({"type": "websocket.close", "code": 1003})
            return
        answer = await self._answer(scope, receive)
        headers = [
            (b"content-type", answer.content_type.encode()),
            (b"content-length", str(len(answer.body)).encode()),
            *((name.encode(), value.encode()) for name, value in answer.headers.items()),
        ]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: dict[str, Any], receive: Any) -> HttpAnswer:
        try:
            return await self._routed(scope, receive)
        except _Refused as error:
            return _failure(error.status, str(error), **error.headers)
        except (UsageError, OverloadError, ClosedError, DeadlineError) as error:
            status = next(number for kind, number in _STATUS if isinstance(error, kind))
            headers = {"retry-after": "1"} if status == 503 else {}
            return _failure(status, str(error), **headers)
        except Exception:
            _log.exception("A request failed: %s %s", scope["method"], scope["path"])
            return _failure(500, "The server has failed; its log says why")

    async def _routed(self, scope: dict[str, Any], receive: Any) -> HttpAnswer:
        path, method = scope["path"], scope["method"]
        methods = self._fixed.get(path)
        arguments: dict[str, str] = {}
        if methods is None:
            for pattern, candidates in self._patterns:
                match = pattern.fullmatch(path)
                if match:
                    methods, arguments = candidates, match.groupdict()
                    break
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        if not path.startswith("/v2/health/"):
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            try:
                self.service.check_access(only_authorization(given), _purpose(path))
            except ForbiddenError:
                raise  # 403
            except AccessError as error:
                raise _Refused(401, str(error), **{"www-authenticate": "Bearer"}) from None
        if methods is None:
            raise _Refused(404, f"There is nothing at {path!r}; see /openapi.json")
        handler = methods.get("GET" if method == "HEAD" else method)
        if handler is None:
            allowed = ", ".join(sorted(methods))
            raise _Refused(405, f"{path} takes {allowed}, not {method}", allow=allowed)
        body = b""
        if method not in ("GET", "HEAD"):
            try:
                async with asyncio.timeout(self.service.limits.body_timeout):
                    body = await self._body(headers, receive)
            except TimeoutError:
                raise _Refused(
                    408, "The body of the request did not arrive in time", connection="close"
                ) from None
        query = scope.get("query_string", b"").decode("latin-1")
        return await handler(HttpRequest(method, path, headers, body, query), **arguments)

    async def _body(self, headers: Mapping[str, str], receive: Any) -> bytes:
        most = self.service.limits.max_request_bytes
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise _too_large(most)
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Refused(400, "The client has gone")
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise _too_large(most)
            parts.append(part)
            more = message.get("more_body", False)
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        encoding = headers.get("content-encoding", "identity").lower()
        return body if encoding == "identity" else _unpacked(body, encoding, most)

    # -- the protocol --------------------------------------------------------------------------

    async def _live(self, request: HttpRequest) -> HttpAnswer:
        return HttpAnswer()

    async def _ready(self, request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(status=200 if self.service.ready else 503)

    async def _server(self, request: HttpRequest) -> HttpAnswer:
        return json_answer(server_metadata())

    async def _model(
        self, request: HttpRequest, model: str, version: str | None = None
    ) -> HttpAnswer:
        repository = self.service.repository
        served = repository.find(model, version).model
        versions = [version] if version else repository.versions(model)
        return json_answer(
            protocol.model_metadata(model, versions, served.platform, served.signature)
        )

    async def _model_ready(
        self, request: HttpRequest, model: str, version: str | None = None
    ) -> HttpAnswer:
        self.service.repository.find(model, version)
        return HttpAnswer()

    async def _infer(
        self, request: HttpRequest, model: str, version: str | None = None
    ) -> HttpAnswer:
        service, headers = self.service, request.headers
        version = version or headers.get("x-model-version")
        with (
            service.answering(model, version, "http") as answering,
            service.repository.lease(model, version, headers.get("x-request-key")) as deployed,
        ):
            answering.deployed, served = deployed, deployed.model
            with answering.stage("decode"):
                length = _header_length(headers.get(protocol.HEADER_LENGTH))
                asked = protocol.read_request(request.body, length)
                most = service.limits.max_rows
                arrays = protocol.strict_inputs(served.signature, asked.inputs, most)
                asked.wanted(served.signature)  # before anything is computed
            seconds = service.seconds_of(asked.timeout)
            answering.mirror(arrays)
            future = served.submit(arrays, seconds)
            try:
                async with asyncio.timeout(seconds):
                    results = await self._results.of(future)
            except DeadlineError:
                raise
            except TimeoutError:
                raise DeadlineError(
                    f"The request was not answered within its time of {seconds:g} s"
                ) from None
            with answering.stage("encode"):
                written = protocol.write_answer(
                    asked, served.signature, results, model, deployed.version
                )
                if not written.tensors:
                    return HttpAnswer(written.header)
                return HttpAnswer(
                    written.body,
                    content_type="application/octet-stream",
                    headers={protocol.HEADER_LENGTH: str(len(written.header))},
                )

    # -- the repository ------------------------------------------------------------------------

    async def _index(self, request: HttpRequest) -> HttpAnswer:
        wanted = request.json().get("ready") is True
        entries = self.service.repository.index()
        return json_answer([e for e in entries if not wanted or e["state"] == "READY"])

    async def _load(self, request: HttpRequest, model: str) -> HttpAnswer:
        await asyncio.to_thread(self.service.change, "load", model)
        return HttpAnswer()

    async def _unload(self, request: HttpRequest, model: str) -> HttpAnswer:
        await asyncio.to_thread(self.service.change, "unload", model)
        return HttpAnswer()

    async def _traffic(self, request: HttpRequest, model: str) -> HttpAnswer:
        self.service.check_changes()
        content = request.json()
        shares, shadow = content.get("shares") or {}, content.get("shadow")
        if not isinstance(shares, dict) or not isinstance(shadow, str | None):
            raise UsageError(
                'Traffic is given as {"shares": {"1": 90, "2": 10}, "shadow": "3"}, where both '
                "may be left out",
                code="request-invalid",
            )
        await asyncio.to_thread(self.service.change, "set_traffic", model, shares, shadow)
        return HttpAnswer()

    # -- about the server ----------------------------------------------------------------------

    async def _metrics(self, request: HttpRequest) -> HttpAnswer:
        metrics = self.service.metrics
        return HttpAnswer(metrics.text(), content_type=metrics.content_type)

    async def _openapi(self, request: HttpRequest) -> HttpAnswer:
        described = openapi(tuple(self.service.repository.names()))
        return json_answer({**described, "paths": {**described["paths"], **self._paths}})

    async def _docs(self, request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(page(self._paths).encode(), content_type="text/html; charset=utf-8")


class _Results:
    """Brings what threads of models have computed to the event loop.

    All answers of a batch come by one call into the loop. ``asyncio.wrap_future`` makes a call for
    each, for which the thread waits as long as the loop is busy.
    """

    def __init__(self) -> None:
        self._arrived: deque[tuple[asyncio.Future, Future]] = deque()
        self._announced = False

    async def of(self, future: Future) -> Any:
        """Return the result of a future of another thread; it is cancelled with this call."""
        loop = asyncio.get_running_loop()
        waiting = loop.create_future()

        def arrived(done: Future) -> None:
            self._arrived.append((waiting, done))
            if not self._announced:
                self._announced = True
                with suppress(RuntimeError):  # the loop has been closed
                    loop.call_soon_threadsafe(self._deliver)

        future.add_done_callback(arrived)
        try:
            return await waiting
        finally:
            future.cancel()

    def _deliver(self) -> None:
        self._announced = False  # first: what comes from now on is announced again
        while self._arrived:
            waiting, done = self._arrived.popleft()
            if waiting.done():
                continue
            if done.cancelled():
                waiting.cancel()
            elif (error := done.exception()) is not None:
                waiting.set_exception(error)
            else:
                waiting.set_result(done.result())


def server_metadata() -> dict[str, Any]:
    """Return name, version and extensions of the server."""
    from importlib import metadata

    try:
        version = metadata.version("bigdl")
    except metadata.PackageNotFoundError:  # run from its sources
        version = "unknown"
    extensions = ["binary_tensor_data", "model_repository"]
    return {"name": "bigdl", "version": version, "extensions": extensions}


def _purpose(path: str) -> str:
    """Return what a request to a path is for."""
    if path.startswith("/v2/repository/models/"):
        return ADMIN
    return METRICS if path == "/metrics" else INFER


def _header_length(value: str | None) -> int | None:
    if value is None:
        return None
    if not value.isdecimal() or len(value) > 15:
        raise UsageError(
            f"The header Inference-Header-Content-Length is a number of bytes, got {value[:60]!r}",
            code="request-invalid",
        )
    return int(value)


def _too_large(most: int) -> _Refused:
    return _Refused(413, f"A request may have {most} bytes at most", connection="close")


def _unpacked(body: bytes, encoding: str, most: int) -> bytes:
    """The content of a compressed body, which must not be larger than any other."""
    try:
        if encoding == "gzip":
            with gzip.GzipFile(fileobj=io.BytesIO(body)) as file:
                content = file.read(most + 1)
        elif encoding == "deflate":
            content = zlib.decompressobj().decompress(body, most + 1)
        else:
            raise _Refused(415, f"Content-Encoding may be gzip or deflate, not {encoding[:60]!r}")
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(
            f"The body is not in the encoding {encoding}: {error}", code="request-invalid"
        ) from None
    if len(content) > most:
        raise _too_large(most)
    return content


def _failure(status: int, sentence: str, **headers: str) -> HttpAnswer:
    return HttpAnswer(orjson.dumps({"error": sentence}), status, headers=headers)
