"""The OpenAI protocol over HTTP: chats, completions, embeddings and reranking of text models."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from bigdl.common.errors import LazyModule, UsageError, type_name
from bigdl.nano.serving.batching import OverloadError
from bigdl.nano.serving.future_awaiter import FutureAwaiter, late
from bigdl.nano.serving.http_messages import Handler, HttpAnswer, HttpRequest, json_answer
from bigdl.nano.serving.service import InferenceService, RequestTrace
from bigdl.nano.serving.statuses import ERROR, CallerGoneError, status_of

if TYPE_CHECKING:
    from bigdl.nano.serving.repository import Deployment
    from bigdl.nano.serving.text_models import GeneratedPart, ServedText, TextGenerator

orjson = LazyModule("orjson", "serving")
_log = logging.getLogger("bigdl.nano.serving")
T = TypeVar("T")
D = TypeVar("D")
Run = Callable[..., Awaitable[Any]]

_COMPLETION_TOKENS = 16  # default of a completion, as in the protocol
_MOST_CHOICES = 16
_MOST_STOPS = 16
_MOST_SCHEMA = 64 << 10  # bytes; a grammar is compiled from it
_DEEPEST_SCHEMA = 64
_MOST_REPEATED = 4096
_MOST_PATTERN = 1024
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_TEXT_BYTES = 4  # per character, for the estimate of a large body

# Fields that would change the answer if they were ignored, and the value that changes nothing.
_UNSUPPORTED: dict[str, Any] = {
    "tools": [],
    "functions": [],
    "logit_bias": {},
    "top_logprobs": 0,
    "audio": None,
    "echo": False,
    "suffix": None,
    "best_of": 1,
    "prediction": None,
    "web_search_options": None,
}


class OpenAIApi:
    """Handlers of the OpenAI protocol for the text models of a service.

    Parameters
    ----------
    service : InferenceService
    results : FutureAwaiter
    run_body : callable
        Async function of a function and a size in bytes, which runs large work in a thread.
    """

    def __init__(self, service: InferenceService, results: FutureAwaiter, run_body: Run):
        self._service, self._results, self._run = service, results, run_body

    def handlers(self) -> dict[tuple[str, str], Handler]:
        """Return the handlers by method and path."""
        return {
            ("GET", "/v1/models"): self._models,
            ("GET", "/v1/models/{model}"): self._model,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._complete,
            ("POST", "/v1/embeddings"): self._embed,
            ("POST", "/v1/rerank"): self._rerank,
        }

    # -- models --------------------------------------------------------------------------------

    async def _models(self, request: HttpRequest) -> HttpAnswer:
        repository = self._service.repository
        newest = [repository.find(name) for name in repository.names()]
        texts = [_described(each) for each in newest if each.model.text is not None]
        return json_answer({"object": "list", "data": texts})

    async def _model(self, request: HttpRequest, model: str) -> HttpAnswer:
        deployed = self._service.repository.find(model)
        _text_of(deployed, "embed", "classify", "generate")
        return json_answer(_described(deployed))

    # -- generation ----------------------------------------------------------------------------

    async def _chat(self, request: HttpRequest) -> HttpAnswer:
        content = await self._run(request.json, len(request.body))
        options = self._options(content, self._service.limits.max_new_tokens)
        options["log_probs"] = _field(content, "logprobs", bool, False)
        return await self._generated(request, content, _messages(content), options, _ChatForm())

    async def _complete(self, request: HttpRequest) -> HttpAnswer:
        content = await self._run(request.json, len(request.body))
        options = self._options(content, _COMPLETION_TOKENS)
        log_probs = _field(content, "logprobs", int, None, 0)
        if log_probs is not None and log_probs > 1:
            raise _invalid("logprobs of the most probable tokens are not supported; pass 0 or 1")
        options["log_probs"] = log_probs is not None
        prompt = content.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise _invalid(f"prompt must be one string, got {type_name(prompt)}")
        options["chat"] = False
        return await self._generated(request, content, prompt, options, _CompletionForm())

    def _options(self, content: Mapping[str, Any], default_tokens: int) -> dict[str, Any]:
        """Return the options of the generator."""
        for name, neutral in _UNSUPPORTED.items():
            value = content.get(name)
            if value is not None and value != neutral:
                raise _invalid(f"{name} is not supported; leave it out")
        most = self._service.limits.max_new_tokens
        tokens = _field(content, "max_completion_tokens", int, None, 1, most)
        if tokens is None:
            tokens = _field(content, "max_tokens", int, None, 1, most)
        stop = content.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(each, str) for each in stop):
            raise _invalid("stop must be a string or a list of strings")
        if len(stop) > _MOST_STOPS:
            raise _invalid(f"stop may have {_MOST_STOPS} strings, got {len(stop)}")
        seed = _field(content, "seed", int, None)
        return {
            "max_new_tokens": min(default_tokens, most) if tokens is None else tokens,
            "fits": tokens is None,
            "temperature": _field(content, "temperature", float, 1.0, 0, 2),
            "top_p": _field(content, "top_p", float, 1.0, 0, 1),
            "top_k": _field(content, "top_k", int, None, 1),
            "frequency_penalty": _field(content, "frequency_penalty", float, 0.0, -2, 2),
            "presence_penalty": _field(content, "presence_penalty", float, 0.0, -2, 2),
            "seed": secrets.randbits(31) if seed is None else seed % (1 << 31),
            "stop": stop,
            "json_schema": _schema(content.get("response_format")),
        }

    async def _generated(
        self,
        request: HttpRequest,
        content: Mapping[str, Any],
        prompt: str | list[dict[str, Any]],
        options: dict[str, Any],
        form: _ChatForm,
    ) -> HttpAnswer:
        name = _field(content, "model", str)
        count = _field(content, "n", int, 1, 1, _MOST_CHOICES)
        streams = _field(content, "stream", bool, False)
        stream_options = content.get("stream_options") or {}
        if not isinstance(stream_options, dict):
            raise _invalid("stream_options must be an object")
        generation = _ChoiceStreams(self._service, form, name, bool(options["log_probs"]))
        try:
            generation.enter(request)
            generator = _generator_of(generation.deployed)
            queue = generation.deployed.model.batching.max_queue
            if generator.waiting + count > queue:
                raise OverloadError(
                    f"{generator.waiting} requests wait for the model already, and its queue holds "
                    f"{queue}; try again later"
                )
            start = partial(generation.start, generator, prompt, options, count)
            await self._run(start, len(request.body))
            if not streams:
                answer = await until_gone(request, generation.collected())
                generation.close(None)
                return await self._run(partial(json_answer, answer), 0)
            await until_gone(request, generation.wait())
        except BaseException as error:
            generation.close(error)
            raise
        usage = stream_options.get("include_usage") is True
        return HttpAnswer(
            content_type="text/event-stream",
            headers={"cache-control": "no-cache"},
            # without the body, whose memory is released when this handler returns
            parts=_EventStream(generation, dataclasses.replace(request, body=b""), usage),
        )

    # -- embeddings and ranks --------------------------------------------------------------------

    async def _embed(self, request: HttpRequest) -> HttpAnswer:
        content = await self._run(request.json, len(request.body))
        texts = content.get("input")
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
            raise _invalid(
                "input must be a string or a list of strings; token ids are not supported "
                "(LangChain sends strings with check_embedding_ctx_length=False)"
            )
        encoding = _field(content, "encoding_format", str, "float")
        if encoding not in ("float", "base64"):
            raise _invalid(f"encoding_format must be 'float' or 'base64', got {encoding[:60]!r}")
        name = _field(content, "model", str)
        with self._traced(request, name) as (trace, deployed):
            text = _text_of(deployed, "embed")
            vectors, tokens = await self._vectors(trace, deployed, text, texts)
            dimensions = _field(content, "dimensions", int, None)
            if dimensions not in (None, vectors.shape[1]):
                raise _invalid(f"dimensions must be {vectors.shape[1]}, got {dimensions}")
            write = partial(_embeddings, vectors, encoding, deployed.name, tokens)
            return await self._run(write, vectors.nbytes, refuses=False)

    async def _rerank(self, request: HttpRequest) -> HttpAnswer:
        content = await self._run(request.json, len(request.body))
        query = _field(content, "query", str)
        documents = content.get("documents")
        if not isinstance(documents, list) or not documents:
            raise _invalid("documents must be a non-empty list of strings")
        texts: list[Any] = [
            each.get("text") if isinstance(each, dict) else each for each in documents
        ]
        if not all(isinstance(each, str) for each in texts):
            raise _invalid("documents must be strings, or objects with a text")
        most = _field(content, "top_n", int, len(texts), 1)
        returns = _field(content, "return_documents", bool, False)
        name = _field(content, "model", str)
        with self._traced(request, name) as (trace, deployed):
            text = _text_of(deployed, "embed", "classify")
            if text.scores_pairs:
                queries = [query] * len(texts)
                logits, tokens = await self._vectors(trace, deployed, text, queries, texts)
                scores = 1 / (1 + np.exp(-logits[:, 0].astype(np.float64)))
            elif text.task == "embed":
                vectors, tokens = await self._vectors(trace, deployed, text, [query, *texts])
                vectors = vectors.astype(np.float64)
                vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
                scores = vectors[1:] @ vectors[0]
            else:
                raise _invalid(f"Model {name!r} has {len(text.labels)} labels; it cannot rank")
        order = np.argsort(-scores, kind="stable")[:most].tolist()
        results = [
            {"index": row, "relevance_score": float(scores[row])}
            | ({"document": {"text": texts[row]}} if returns else {})
            for row in order
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return json_answer({"id": _id("rerank"), "model": name, "results": results, "usage": usage})

    def _traced(self, request: HttpRequest, name: str) -> _Traced:
        return _Traced(self._service, request, name)

    async def _vectors(
        self, trace: RequestTrace, deployed: Deployment, text: ServedText, *columns: list[str]
    ) -> tuple[np.ndarray, int]:
        """Return the encoder's outputs for texts, and the number of their tokens."""
        limits = self._service.limits
        count = len(columns[0])
        if not 1 <= count <= limits.max_rows:
            raise _invalid(f"A request must have 1 to {limits.max_rows} texts, got {count}")
        size = _TEXT_BYTES * sum(len(each) for column in columns for each in column)
        with trace.stage("decode"):
            arrays, tokens = await self._run(partial(_encoded, text, columns), size)
        future = deployed.model.submit(arrays, limits.timeout)
        (result,) = await self._results.within(future, limits.timeout, limits.timeout)
        self._service.metrics.tokens(deployed, tokens, 0)
        return result, tokens


class _Traced:
    """Context manager of a request: its trace and the leased version of its model."""

    def __init__(self, service: InferenceService, request: HttpRequest, name: str):
        self._service, self._request, self._name = service, request, name
        self._stack = ExitStack()

    def __enter__(self) -> tuple[RequestTrace, Deployment]:
        service, headers = self._service, self._request.headers
        version = headers.get("x-model-version")
        with ExitStack() as stack:
            trace = stack.enter_context(service.trace_request(self._name, version, "openai"))
            context = service.repository.lease(self._name, version, headers.get("x-request-key"))
            trace.deployed = stack.enter_context(context)
            self._stack = stack.pop_all()
        return trace, trace.deployed

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(error_type, error, trace)


class _ChoiceStreams:
    """The choices that are generated for one request."""

    def __init__(self, service: InferenceService, form: _ChatForm, name: str, log_probs: bool):
        self._service, self._form, self._name = service, form, name
        self._log_probs = log_probs
        self._loop = asyncio.get_running_loop()
        self._parts: asyncio.Queue[tuple[int, GeneratedPart]] = asyncio.Queue()
        self._pending: list[tuple[int, GeneratedPart]] = []
        self._cancels: list[Callable[[], None]] = []
        self._begin = time.monotonic()
        self._seconds = service.limits.timeout
        self._traced: _Traced | None = None
        self._running = 0
        self._first = True
        self.prompt_tokens = self.new_tokens = 0
        self.id, self.created = _id(form.prefix), int(time.time())
        self.deployed: Deployment

    def enter(self, request: HttpRequest) -> None:
        """Lease the model."""
        traced = _Traced(self._service, request, self._name)
        _, self.deployed = traced.__enter__()
        self._traced = traced

    def start(
        self,
        generator: TextGenerator,
        prompt: str | list[dict[str, Any]],
        options: dict[str, Any],
        count: int,
    ) -> None:
        """Start all choices."""
        for index in range(count):
            arrived = partial(self._arrived, index)
            seeded = {**options, "seed": options["seed"] + index}
            self.prompt_tokens, cancel = generator.stream(prompt, seeded, arrived)
            self._cancels.append(cancel)
            self._running += 1

    def _arrived(self, index: int, part: GeneratedPart) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._parts.put_nowait, (index, part))

    def close(self, error: BaseException | None) -> None:
        """Cancel running choices and release the model."""
        for cancel in self._cancels:
            cancel()
        self._cancels = []
        if self._traced is not None:
            traced, self._traced = self._traced, None
            self._service.metrics.tokens(self.deployed, self.prompt_tokens, self.new_tokens)
            seconds = time.monotonic() - self._begin
            self._service.metrics.generated(self.deployed, self.new_tokens, seconds)
            with suppress(BaseException):  # it is raised by the caller
                traced.__exit__(None if error is None else type(error), error, None)

    async def wait(self) -> None:
        """Wait for the first part, whose error is an HTTP status."""
        self._pending.append(await self._next())

    async def _next(self) -> tuple[int, GeneratedPart]:
        left = self._seconds - (time.monotonic() - self._begin)
        try:
            async with asyncio.timeout(left):
                index, part = await self._parts.get()
        except TimeoutError:
            raise late(self._seconds) from None
        if part.finish == "invalid":
            raise _invalid(f"The prompt cannot be generated: {part.error}")
        if part.finish == "error":
            raise RuntimeError(f"The generation failed: {part.error}")
        if self._first:
            self._first = False
            self._service.metrics.first_token(self.deployed, time.monotonic() - self._begin)
        self.new_tokens += part.tokens
        self._running -= part.finish is not None
        return index, part

    async def parts(self) -> AsyncIterator[tuple[int, GeneratedPart]]:
        """Yield choices' indices and parts until all are finished."""
        while self._pending or self._running:
            yield self._pending.pop() if self._pending else await self._next()

    async def collected(self) -> dict[str, Any]:
        """Return the response of a request that does not stream."""
        texts: dict[int, list[str]] = {}
        log_probs: dict[int, list[tuple[str, float]]] = {}
        finishes: dict[int, str] = {}
        async for index, part in self.parts():
            texts.setdefault(index, []).append(part.text)
            log_probs.setdefault(index, []).extend(part.log_probs)
            if part.finish is not None:
                finishes[index] = part.finish
        choices = []
        for index in sorted(texts):
            choice = self._form.choice(index, "".join(texts[index]), finishes[index])
            if self._log_probs:
                choice["logprobs"] = self._form.log_probs(log_probs[index])
            choices.append(choice)
        return {**self.head(self._form.name), "choices": choices, "usage": self.usage()}

    def chunk(self, index: int, part: GeneratedPart) -> dict[str, Any]:
        """Return the chunk of one part."""
        choice = self._form.delta(index, part.text, part.finish)
        if self._log_probs:
            choice["logprobs"] = self._form.log_probs(part.log_probs)
        return {**self.head(self._form.chunk_name), "choices": [choice]}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the chunk before the first text of a choice, if the form has one."""
        choice = self._form.opening(index)
        return choice and {**self.head(self._form.chunk_name), "choices": [choice]}

    def last(self) -> dict[str, Any]:
        """Return the chunk with the usage."""
        return {**self.head(self._form.chunk_name), "choices": [], "usage": self.usage()}

    def head(self, name: str) -> dict[str, Any]:
        """Return the fields of every response and chunk."""
        return {"id": self.id, "object": name, "created": self.created, "model": self._name}

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
        }


class _EventStream:
    """Server-sent events of a generation; it is cancelled when the client leaves."""

    def __init__(self, generation: _ChoiceStreams, request: HttpRequest, usage: bool):
        self._generation, self._request = generation, request
        self._events = self._iterate(usage)
        self._gone: asyncio.Future[None] | None = None
        self._error: BaseException | None = CallerGoneError()

    def __aiter__(self) -> _EventStream:
        return self

    async def __anext__(self) -> bytes:
        if self._gone is None:
            self._gone = asyncio.ensure_future(self._request.wait_until_gone())
        event = asyncio.ensure_future(anext(self._events))
        waiting: set[asyncio.Future[Any]] = {event, self._gone}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if event.done():
                return event.result()
        finally:
            event.cancel()
        raise StopAsyncIteration

    async def _iterate(self, usage: bool) -> AsyncIterator[bytes]:
        generation, opened = self._generation, set()
        try:
            async for index, part in generation.parts():
                opening = None if index in opened else generation.opening(index)
                if opening is not None:
                    yield _event(opening)
                opened.add(index)
                if part.text or part.log_probs or part.finish:
                    yield _event(generation.chunk(index, part))
            if usage:
                yield _event(generation.last())
            self._error = None
            yield b"data: [DONE]\n\n"
        except Exception as error:
            self._error = error
            status, sentence = status_of(error), str(error)
            if status is ERROR:
                _log.error("A stream failed", exc_info=error)
                sentence = "The server failed; its log has the details"
            yield _event({"error": error_content(sentence, status.http)})

    async def aclose(self) -> None:
        """Cancel the generation, unless it is finished, and release the model."""
        self._generation.close(self._error)
        if self._gone is not None:
            self._gone.cancel()
        with suppress(RuntimeError):  # a cancelled step has not ended yet
            await self._events.aclose()  # type: ignore[attr-defined]


async def until_gone(request: HttpRequest, work: Awaitable[T]) -> T:
    """Return the result of `work`; cancel it if the client leaves.

    Raises
    ------
    CallerGoneError
        If the client leaves.
    """
    gone = asyncio.ensure_future(request.wait_until_gone())
    task = asyncio.ensure_future(work)
    try:
        waiting: set[asyncio.Future[Any]] = {gone, task}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise CallerGoneError
    finally:
        gone.cancel()
        task.cancel()


# -- forms of responses ----------------------------------------------------------------------------


class _ChatForm:
    """Choices of a chat."""

    prefix, name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, finish: str) -> dict[str, Any]:
        """Return a complete choice."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "finish_reason": finish, "logprobs": None}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the choice of the first chunk."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}

    def delta(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        """Return the choice of a chunk with new text."""
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}

    def log_probs(self, values: Sequence[tuple[str, float]]) -> dict[str, Any]:
        """Return the log probabilities of tokens."""
        return {
            "content": [
                {
                    "token": token,
                    "logprob": value,
                    "bytes": list(token.encode()),
                    "top_logprobs": [],
                }
                for token, value in values
            ],
            "refusal": None,
        }


class _CompletionForm(_ChatForm):
    """Choices of a completion."""

    prefix, name, chunk_name = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "finish_reason": finish, "logprobs": None}

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def delta(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        return self.choice(index, text, finish)

    def log_probs(self, values: Sequence[tuple[str, float]]) -> dict[str, Any]:
        return {
            "tokens": [token for token, _ in values],
            "token_logprobs": [value for _, value in values],
            "top_logprobs": None,
            "text_offset": None,
        }


def error_content(sentence: str, status: int) -> dict[str, Any]:
    """Return the error object of the protocol."""
    names = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    name = names.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"message": sentence, "type": name, "param": None, "code": None}


def _event(content: object) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


def _id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def _described(deployed: Deployment) -> dict[str, Any]:
    created = int(deployed.loaded)
    return {"id": deployed.name, "object": "model", "created": created, "owned_by": "bigdl"}


def _embeddings(vectors: np.ndarray, encoding: str, name: str, tokens: int) -> HttpAnswer:
    rows: Sequence[Any] = list(vectors)
    if encoding == "base64":
        rows = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    data = [
        {"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    content = {"object": "list", "data": data, "model": name, "usage": usage}
    return HttpAnswer(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY))


# -- fields of requests ----------------------------------------------------------------------------


def _invalid(sentence: str) -> UsageError:
    return UsageError(sentence, code="request-invalid")


_MISSING: Any = object()
_TYPES: dict[type, tuple[str, tuple[type, ...]]] = {
    str: ("a string", (str,)),
    bool: ("true or false", (bool,)),
    int: ("an integer", (int,)),
    float: ("a number", (int, float)),
}


@overload
def _field(content: Mapping[str, Any], name: str, type_: type[T]) -> T: ...
@overload
def _field(
    content: Mapping[str, Any],
    name: str,
    type_: type[T],
    default: D,
    least: float | None = None,
    most: float | None = None,
) -> T | D: ...
def _field(
    content: Mapping[str, Any],
    name: str,
    type_: type,
    default: object = _MISSING,
    least: float | None = None,
    most: float | None = None,
) -> object:
    """Return a field of a request; null counts as missing."""
    value = content.get(name)
    if value is None:
        if default is _MISSING:
            raise _invalid(f"{name} is missing")
        return default
    text, types = _TYPES[type_]
    if not isinstance(value, types) or (isinstance(value, bool) and type_ is not bool):
        raise _invalid(f"{name} must be {text}, got {type_name(value)}")
    size: Any = value
    if (least is not None and size < least) or (most is not None and size > most):
        limits = f"at least {least}" if most is None else f"between {least} and {most}"
        raise _invalid(f"{name} must be {limits}, got {value}")
    return value


def _messages(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat with their texts."""
    messages = content.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages must be a non-empty list of objects")
    return [_message(each) for each in messages]


def _message(message: object) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _invalid("A message must be an object with a role and a content")
    text = message.get("content")
    if isinstance(text, list):
        parts: list[Any] = [
            each.get("text") if isinstance(each, dict) and each.get("type") == "text" else None
            for each in text
        ]
        if not all(isinstance(each, str) for each in parts):
            raise _invalid("A message may have parts of type text only")
        text = "".join(parts)
    if not isinstance(text, str):
        raise _invalid(f"The content of a message must be a string, got {type_name(text)}")
    if message.get("tool_calls"):
        raise _invalid("tool_calls are not supported")
    role = "system" if message["role"] == "developer" else message["role"]
    if role not in ("system", "user", "assistant"):
        raise _invalid(f"A role must be system, user or assistant, got {role[:60]!r}")
    return {"role": role, "content": text}


def _schema(form: object) -> str | None:
    """Return the JSON schema of a response format, or None for text."""
    if form is None:
        return None
    name = form.get("type") if isinstance(form, dict) else None
    if name == "text":
        return None
    if name == "json_object":
        return '{"type": "object"}'
    described = form.get("json_schema") if isinstance(form, dict) else None
    schema = described.get("schema") if isinstance(described, dict) else None
    if name != "json_schema" or not isinstance(schema, dict):
        raise _invalid(
            "response_format must have the type text, json_object or json_schema, the last with "
            "json_schema.schema"
        )
    text = orjson.dumps(schema).decode()
    if len(text) > _MOST_SCHEMA:
        raise _invalid(f"A schema may have {_MOST_SCHEMA} characters, got {len(text)}")
    _check_schema(schema)
    return text


def _check_schema(schema: object, depth: int = 0, repeated: int = 1) -> None:
    """Raise a UsageError for a schema that the engine cannot compile, or not in a short time.

    Parameters
    ----------
    schema : object
    depth : int
        Number of enclosing schemas and lists.
    repeated : int
        Number of repetitions that the enclosing schemas allow.
    """
    if depth > _DEEPEST_SCHEMA:
        raise _invalid(f"A schema may be nested {_DEEPEST_SCHEMA} levels deep")
    if isinstance(schema, list):
        for each in schema:
            _check_schema(each, depth + 1, repeated)
    if not isinstance(schema, dict):
        return
    names = schema.get("type", [])
    for name in names if isinstance(names, list) else [names]:
        if isinstance(name, str) and name not in _SCHEMA_TYPES:
            raise _invalid(f"The schema has the unknown type {name[:60]!r}")
    for key in ("minLength", "maxLength"):
        _check_repeated(key, schema, repeated)
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        _check_pattern(pattern, repeated)
    items = max(_check_repeated(key, schema, repeated) for key in ("minItems", "maxItems"))
    members = max(
        _check_repeated(key, schema, repeated) for key in ("minProperties", "maxProperties")
    )
    for key, value in schema.items():
        inside = repeated
        if key in ("items", "prefixItems", "contains"):
            inside = items
        elif key in ("additionalProperties", "patternProperties", "propertyNames"):
            inside = members
        if key in _SCHEMA_MAPS and isinstance(value, dict):
            for name, each in value.items():
                if key == "patternProperties":
                    _check_pattern(name, repeated)
                _check_schema(each, depth + 1, inside)
        elif key not in ("enum", "const", "default", "examples"):
            _check_schema(value, depth + 1, inside)


def _check_repeated(key: str, schema: Mapping[str, Any], repeated: int) -> int:
    """Return the repetitions within a keyword's limit; raise a UsageError if there are too many."""
    size = schema.get(key)
    if not isinstance(size, int | float) or size <= 1:
        return repeated
    if size * repeated > _MOST_REPEATED:
        raise _invalid(
            f"{key} of a schema may be {_MOST_REPEATED} at most, times those of the enclosing "
            f"schemas, got {size}"
        )
    return int(size) * repeated


def _check_pattern(pattern: str, repeated: int) -> None:
    """Raise a UsageError for a regular expression that is not valid, long, or repeats often."""
    for each in re.findall(r"(?<=[{,])\d{1,9}(?=[,}])", pattern):
        repeated *= int(each) or 1
    if len(pattern) > _MOST_PATTERN or repeated > _MOST_REPEATED:
        raise _invalid("The pattern of a schema is too long, or repeats too often")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise _invalid(f"The pattern of a schema is not valid: {error}") from None


def _text_of(deployed: Deployment, *tasks: str) -> ServedText:
    """Return the text model of a deployment for one of the tasks."""
    text = deployed.model.text
    if text is None:
        raise UsageError(f"Model {deployed.name!r} is not a text model", code="request-invalid")
    if text.task not in tasks:
        raise _invalid(
            f"Model {deployed.name!r} has the task {text.task!r}, but this request needs "
            f"{' or '.join(map(repr, tasks))}"
        )
    return text


def _generator_of(deployed: Deployment) -> TextGenerator:
    generator = _text_of(deployed, "generate").generator
    assert generator is not None
    return generator


def _encoded(text: ServedText, columns: Sequence[list[str]]) -> tuple[list[np.ndarray], int]:
    """Return arrays of UTF-8 texts, and the number of their tokens."""
    tokens = text.count_tokens(columns)
    arrays = []
    for column in columns:
        array = np.empty(len(column), object)
        array[:] = [each.encode() for each in column]
        arrays.append(array)
    return arrays, tokens
