"""HttpApp: ASGI application for metrics and the Open Inference Protocol over HTTP."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from bigdl.common.errors import LazyModule, UsageError
from bigdl.nano.serving import open_inference as protocol
from bigdl.nano.serving.access import ADMIN, INFER, METRICS, only_authorization
from bigdl.nano.serving.batching import OverloadError
from bigdl.nano.serving.future_awaiter import FutureAwaiter, late
from bigdl.nano.serving.http_messages import (
    Handler,
    HttpAnswer,
    HttpRequest,
    Receive,
    json_answer,
)
from bigdl.nano.serving.openai_api import OpenAIApi, error_content
from bigdl.nano.serving.openapi import openapi, page
from bigdl.nano.serving.service import InferenceService
from bigdl.nano.serving.signature import Signature
from bigdl.nano.serving.statuses import ERROR, status_of

__all__ = ["HttpAnswer", "HttpApp", "HttpRequest"]

orjson = LazyModule("orjson", "serving")
_log = logging.getLogger(__name__)
T = TypeVar("T")
Send = Callable[[dict[str, Any]], Awaitable[None]]

_SMALL = 32 << 10  # bytes; smaller bodies are decoded and encoded in the event loop
_THREADS = 2  # for larger bodies; each body in a thread takes memory
_MOST_WAITING = 256  # bodies that wait for these threads
_RATIO = 100  # largest compression ratio of a body
_ANY_RATIO = 256 << 10  # bytes up to which any compression ratio is accepted
_MOST_COMMAND = 1 << 20  # bytes of a request that changes or lists models
_HEADERS = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": "1"}}  # of error responses
_LONGEST_SENTENCE = 2000  # characters of an error text; it may repeat long names from clients


class _Refused(Exception):
    """Exception for a request that gets an HTTP error status before its handler runs."""

    def __init__(self, status: int, sentence: str, **headers: str):
        super().__init__(sentence)
        self.status, self.headers = status, headers


class HttpApp:
    """ASGI application that serves the models of a service.

    Parameters
    ----------
    service : InferenceService
    routes : dict of (str, str) to callable, optional
        Handlers of further ``(method, path)`` pairs. A handler is an async function of an
        :class:`HttpRequest` that returns an :class:`HttpAnswer`. Braces in a path are arguments of
        the function: ``"/recommend/{user}"``.
    paths : dict, optional
        OpenAPI ``paths`` of the further routes.
    changes : collection of str, default ()
        Paths of further routes that change something; pages of other sites may not request them.
    """

    def __init__(
        self,
        service: InferenceService,
        routes: Mapping[tuple[str, str], Handler] | None = None,
        paths: Mapping[str, Any] | None = None,
        changes: Collection[str] = (),
    ):
        self.service = service
        self._paths, self._changes = dict(paths or {}), frozenset(changes)
        self._results = FutureAwaiter()
        self._bodies = BodyThreads()
        handlers: dict[tuple[str, str], Handler] = {
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
        handlers |= OpenAIApi(service, self._results, self._bodies.run).handlers()
        self._fixed: dict[str, dict[str, Handler]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Handler]]] = []
        for (method, path), handler in {**handlers, **(routes or {})}.items():
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

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # a websocket
            await send({"type": "websocket.close", "code": 1003})
            return
        self.service.loops.add(asyncio.get_running_loop())
        answer = await self._answer(scope, receive)
        headers = [
            (b"content-type", answer.content_type.encode()),
            *((name.encode(), value.encode()) for name, value in answer.headers.items()),
        ]
        start = {"type": "http.response.start", "status": answer.status, "headers": headers}
        if answer.parts is not None:
            try:
                await send(start)
                async for part in answer.parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            finally:
                await answer.parts.aclose()
            await send({"type": "http.response.body", "body": b""})
            return
        headers.append((b"content-length", str(len(answer.body)).encode()))
        await send(start)
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: dict[str, Any], receive: Receive) -> HttpAnswer:
        failure = _openai_failure if scope["path"].startswith("/v1/") else _failure
        try:
            return await self._routed(scope, receive)
        except _Refused as error:
            return failure(error.status, str(error), **error.headers)
        except Exception as error:
            status = status_of(error)
            if status is ERROR:
                _log.exception("A request failed: %s %s", scope["method"], scope["path"])
                return failure(500, "The server failed; its log has the details")
            return failure(status.http, str(error), **_HEADERS.get(status.http, {}))

    async def _routed(self, scope: dict[str, Any], receive: Receive) -> HttpAnswer:
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
            values = [value for name, value in scope["headers"] if name == b"authorization"]
            self.service.check_access(only_authorization(values), _purpose(path))
        makes_changes = _purpose(path) == ADMIN or path in self._changes
        if makes_changes and headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            # Only browsers send this header. Without the check, any web page that a user of this
            # machine opens could change a server on the loopback address.
            raise _Refused(403, "A page of another site may not change the server")
        if methods is None:
            raise _Refused(404, f"There is nothing at {path!r}; see /openapi.json")
        handler = methods.get("GET" if method == "HEAD" else method)
        if handler is None:
            allowed = ", ".join(sorted(methods))
            raise _Refused(405, f"{path} takes {allowed}, not {method}", allow=allowed)
        query = scope.get("query_string", b"").decode("latin-1")
        with self.service.bytes_at_once.reservation() as reserve:
            body = b""
            if method not in ("GET", "HEAD"):
                try:
                    async with asyncio.timeout(self.service.limits.body_timeout):
                        body = await self._body(headers, receive, reserve)
                except TimeoutError:
                    raise _Refused(
                        408, "The body of the request did not arrive in time", connection="close"
                    ) from None
            request = HttpRequest(method, path, headers, body, query, receive)
            return await handler(request, **arguments)

    async def _body(
        self, headers: Mapping[str, str], receive: Receive, reserve: Callable[[int], None]
    ) -> bytes:
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
            reserve(size)
            parts.append(part)
            more = message.get("more_body", False)
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        encoding = headers.get("content-encoding", "identity").lower()
        if encoding == "identity":
            return body
        # Reserve the largest possible size before decompressing.
        allowed = min(most, max(_ANY_RATIO, _RATIO * size))
        reserve(allowed)
        unpack = partial(_unpacked, body, encoding, allowed, most)
        content = await self._bodies.run(unpack, allowed // _ANY_RATIO * _SMALL)
        reserve(len(content))
        return content

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
        begin = time.monotonic()
        with (
            service.trace_request(model, version, "http") as request_trace,
            service.repository.lease(model, version, headers.get("x-request-key")) as deployed,
        ):
            request_trace.deployed, served = deployed, deployed.model
            with request_trace.stage("decode"):
                read = partial(_read, request, served.signature, service.limits.max_rows)
                size = _slow_bytes(request, served.signature)
                infer_request, arrays = await self._bodies.run(read, size)
            seconds = service.seconds_of(infer_request.timeout)
            left = seconds - (time.monotonic() - begin)
            if left <= 0:
                raise late(seconds)
            request_trace.mirror(arrays)
            future = served.submit(arrays, left)
            results = await self._results.within(future, left, seconds)
            with request_trace.stage("encode"):
                write = partial(
                    protocol.write_answer,
                    *(infer_request, served.signature, results, model, deployed.version),
                    service.limits.max_answer_bytes,
                )
                size = sum(each.nbytes for each in results)
                written = await self._bodies.run(write, size, refuses=False)
                if not written.tensors:
                    return HttpAnswer(written.header)
                return HttpAnswer(
                    written.body,
                    content_type="application/octet-stream",
                    headers={protocol.HEADER_LENGTH: str(len(written.header))},
                )

    # -- the repository ------------------------------------------------------------------------

    async def _index(self, request: HttpRequest) -> HttpAnswer:
        only_ready = _command(request).get("ready") is True
        entries = self.service.repository.index()
        return json_answer([e for e in entries if not only_ready or e["state"] == "READY"])

    async def _load(self, request: HttpRequest, model: str) -> HttpAnswer:
        await asyncio.to_thread(self.service.change, "load", model)
        return HttpAnswer()

    async def _unload(self, request: HttpRequest, model: str) -> HttpAnswer:
        await asyncio.to_thread(self.service.change, "unload", model)
        return HttpAnswer()

    async def _traffic(self, request: HttpRequest, model: str) -> HttpAnswer:
        self.service.check_changes()
        content = _command(request)
        shares, shadow = content.get("shares") or {}, content.get("shadow")
        if not isinstance(shares, dict) or not isinstance(shadow, str | None):
            raise UsageError(
                'Traffic must have the form {"shares": {"1": 90, "2": 10}, "shadow": "3"}; both '
                "keys are optional",
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


class BodyThreads:
    """Thread pool that decodes and encodes large bodies without blocking the event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "bigdl-serving-bodies")
        self._waiting = 0

    async def run(self, work: Callable[[], T], size: int, refuses: bool = True) -> T:
        """Run `work` in the event loop if `size`, in bytes, is small, and otherwise in a thread.

        Raises
        ------
        OverloadError
            If `refuses` is True and too many other bodies wait.
        """
        if size <= _SMALL:
            return work()
        if refuses and self._waiting >= _MOST_WAITING:
            raise OverloadError("Too many large requests wait to be read; try again later")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._waiting -= 1


def server_metadata() -> dict[str, Any]:
    """Return the name, version and extensions of the server."""
    from importlib import metadata

    try:
        version = metadata.version("bigdl")
    except metadata.PackageNotFoundError:  # run from a source tree
        version = "unknown"
    extensions = ["binary_tensor_data", "model_repository"]
    return {"name": "bigdl", "version": version, "extensions": extensions}


def _purpose(path: str) -> str:
    """Return the purpose (infer, admin or metrics) that a token must allow for a request path."""
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


def _slow_bytes(request: HttpRequest, signature: Signature) -> int:
    """Return the number of bytes that are slow to decode: all except binary numbers."""
    has_texts = any(each.dtype == object for each in signature.inputs)
    length = None if has_texts else _header_length(request.headers.get(protocol.HEADER_LENGTH))
    return len(request.body) if length is None else length


def _read(
    request: HttpRequest, signature: Signature, most_rows: int
) -> tuple[protocol.InferRequest, list[np.ndarray]]:
    """Decode a request's body; return the request and its arrays in the model's order."""
    length = _header_length(request.headers.get(protocol.HEADER_LENGTH))
    infer_request = protocol.read_request(request.body, length, signature, most_rows)
    arrays = protocol.strict_inputs(signature, infer_request.inputs, most_rows)
    infer_request.select_outputs(signature)  # refuse unknown outputs before anything is computed
    return infer_request, arrays


def _command(request: HttpRequest) -> dict[str, Any]:
    if len(request.body) > _MOST_COMMAND:
        raise _too_large(_MOST_COMMAND)
    return request.json()


_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def _unpacked(body: bytes, encoding: str, allowed: int, most: int) -> bytes:
    """Decompress a body to at most `allowed` bytes."""
    if encoding not in _WINDOWS:
        raise _Refused(415, f"Content-Encoding may be gzip or deflate, not {encoding[:60]!r}")
    unpacking = zlib.decompressobj(_WINDOWS[encoding])
    try:
        content = unpacking.decompress(body, allowed + 1)
    except zlib.error as error:
        raise UsageError(
            f"The body is not in the encoding {encoding}: {error}", code="request-invalid"
        ) from None
    if len(content) > allowed and allowed < most:
        raise _Refused(
            413,
            f"A decompressed body may be at most {_RATIO} times as large, and {most} bytes; send "
            "it uncompressed",
            connection="close",
        )
    if len(content) > allowed:
        raise _too_large(most)
    if not unpacking.eof or unpacking.unused_data:
        raise UsageError(
            f"The body is not in the encoding {encoding}: it ends too early or late",
            code="request-invalid",
        )
    return content


def _failure(status: int, sentence: str, **headers: str) -> HttpAnswer:
    if len(sentence) > _LONGEST_SENTENCE:
        sentence = f"{sentence[:_LONGEST_SENTENCE]}…"
    return HttpAnswer(orjson.dumps({"error": sentence}), status, headers=headers)


def _openai_failure(status: int, sentence: str, **headers: str) -> HttpAnswer:
    if len(sentence) > _LONGEST_SENTENCE:
        sentence = f"{sentence[:_LONGEST_SENTENCE]}…"
    content = {"error": error_content(sentence, status)}
    return HttpAnswer(orjson.dumps(content), status, headers=headers)
