"""Generation with continuous batching: prompts of all callers share the steps of one pipeline."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.cpu import isa_flags
from bigdl.common.errors import LazyModule, UsageError, one_line

if TYPE_CHECKING:
    import openvino as ov
    import openvino_genai as og
else:
    ov = LazyModule("openvino", "llm")
    og = LazyModule("openvino_genai", "llm")

logger = logging.getLogger("bigdl.llm")

_ACTIVE = 64  # requests that share a step
_UNLOADED = "the model was unloaded"


@dataclass(frozen=True)
class TextPart:
    """New text of a stream.

    Attributes
    ----------
    text : str
    tokens : int
        Number of new tokens; their text may come with a later part.
    log_probs : list of (str, float)
        Text and log probability of each new token, if requested.
    finish : {"stop", "length", "error", "invalid"} or None
        Reason of the end, in the last part; ``"invalid"`` if the options are not valid.
    error : str
        Reason of an error, as a phrase.
    """

    text: str = ""
    tokens: int = 0
    log_probs: Sequence[tuple[str, float]] = ()
    finish: str | None = None
    error: str = ""


class StreamedText:
    """Text of a growing list of tokens: only what later tokens cannot change, up to a stop string.

    Parameters
    ----------
    decode : callable
        Function of a list of token ids that returns their text.
    stop : sequence of str
        Strings that end the text; they are not part of it.

    Attributes
    ----------
    stopped : bool
        True after a stop string.

    Examples
    --------
    >>> from bigdl.llm.generator import StreamedText
    >>> text = StreamedText(lambda ids: "".join(map(chr, ids)), ["cd"])
    >>> [text.add([ord(letter)]) for letter in "abcxcd"], text.stopped
    (['a', 'b', '', 'cx', '', ''], True)
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()):
        self._decode, self._stop = decode, [each for each in stop if each]
        self._ids: list[int] = []
        self._known = 0  # ids whose text has been taken
        self._start = 0  # id from which text is decoded, for spaces between tokens
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return self._ids

    def add(self, ids: Sequence[int], last: bool = False) -> str:
        """Add tokens, and return the new text.

        Parameters
        ----------
        ids : sequence of int
        last : bool
            True if no token follows, so that all text is returned.
        """
        self._ids += ids
        if self.stopped:
            return ""
        before = self._decode(self._ids[self._start : self._known])
        text = self._decode(self._ids[self._start :])
        if last or not text.endswith("\ufffd"):  # the beginning of a character
            self._start, self._known = self._known, len(self._ids)
            self._held += text[len(before) :]
        found_at = [at for each in self._stop if (at := self._held.find(each)) >= 0]
        if found_at:
            self.stopped = True
            return self._held[: min(found_at)]
        kept = 0 if last else self._beginning()
        new, self._held = self._held[: len(self._held) - kept], self._held[-kept:] if kept else ""
        return new

    def _beginning(self) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        longest = max((len(each) for each in self._stop), default=0) - 1
        sizes = range(min(longest, len(self._held)), 0, -1)
        fits = (n for n in sizes if any(each.startswith(self._held[-n:]) for each in self._stop))
        return next(fits, 0)


@dataclass(eq=False)
class _PartConsumer:
    """The consumer of a request whose text is delivered in parts."""

    text: StreamedText
    arrived: Callable[[TextPart], None]
    log_probs: bool
    closed: bool = False

    def deliver(self, part: TextPart) -> None:
        """Deliver a part, unless the stream was closed; the last part closes it."""
        if not self.closed:
            self.closed = part.finish is not None
            self.arrived(part)


@dataclass(eq=False)
class _PromptRequest:
    """A prompt that waits or runs."""

    row: int
    tokens: Any
    config: Any
    deliver: Callable[..., None]
    handle: Any = None
    failures: int = 0
    stream: _PartConsumer | None = None
    resumed_at: int = 0
    cancelled: bool = False

    @property
    def has_grammar(self) -> bool:
        """True if a schema or a regular expression constrains the answer."""
        return self.config.structured_output_config is not None

    @property
    def has_started(self) -> bool:
        """True if a part of the answer was delivered."""
        return self.stream is not None and bool(self.stream.text.ids)

    def resumed(self) -> _PromptRequest:
        """Return this request, which continues after the tokens that were delivered."""
        if self.has_started:
            assert self.stream is not None
            ids = self.stream.text.ids
            new = np.array(ids[self.resumed_at :], np.int64)[None]
            self.tokens = ov.Tensor(np.concatenate([self.tokens.data, new], 1))
            self.config.max_new_tokens -= len(ids) - self.resumed_at
            self.resumed_at = len(ids)
        return self

    def fail(self, reason: str, finish: str = "error") -> None:
        """Deliver an error, unless the request was cancelled."""
        if self.cancelled:
            return
        if self.stream is not None:
            self.stream.deliver(TextPart(finish=finish, error=reason))
        else:
            self.deliver([self.row], [None], [reason])


@dataclass
class Completion:
    """Generated text with its cost.

    Attributes
    ----------
    text : str
    is_complete : bool
        False if `max_new_tokens` ended it.
    prompt_tokens, new_tokens : int
    """

    text: str
    is_complete: bool
    prompt_tokens: int
    new_tokens: int


class Generator:
    """A pipeline with continuous batching, and the thread that runs its steps.

    Parameters
    ----------
    folder : Path
        Converted folder.
    facts : dict
    threads : int
    """

    def __init__(self, folder: Path, facts: dict[str, Any], threads: int):
        self._folder, self._facts, self._threads = folder, facts, threads
        self._limit = int(facts["max_length"])
        pipeline = self._load()
        self._pipeline: og.ContinuousBatchingPipeline | None = pipeline
        self._tokenizer = pipeline.get_tokenizer()
        self._changed = threading.Condition()
        self._queue: deque[_PromptRequest] = deque()
        self._active: dict[int, _PromptRequest] = {}
        self._suspects: deque[_PromptRequest] = deque()
        self._tried_alone: set[_PromptRequest] = set()
        self._number = 0
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="bigdl-generator", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of prompts that wait for a free sequence of the pipeline."""
        with self._changed:
            return sum(not each.cancelled for each in self._queue)

    @property
    def cache_usage(self) -> float:
        """Share of the key-value cache that is in use, between 0 and 1."""
        pipeline = self._pipeline  # None while it is loaded again
        return 0.0 if pipeline is None else float(pipeline.get_metrics().cache_usage) / 100

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text without special tokens."""
        return int(self._tokenizer.encode(text, add_special_tokens=False).input_ids.shape[1])

    def close(self) -> None:
        """End the thread; streams in progress get an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def stream(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        arrived: Callable[[TextPart], None],
    ) -> tuple[int, Callable[[], None]]:
        """Start to generate; return the number of the prompt's tokens and a function that cancels.

        Parameters
        ----------
        prompt : str or sequence of dict
            Text that is continued as it is, or the messages of a chat.
        options : mapping
            ``max_new_tokens``, and optionally ``fits`` (generate fewer if the model's limit is
            lower), ``temperature``, ``top_p``, ``top_k``, ``seed``,
            ``frequency_penalty``, ``presence_penalty``, ``stop``, ``log_probs``, ``json_schema``
            and ``regex``.
        arrived : callable
            Receives each :class:`TextPart`, in the thread of the pipeline.

        Raises
        ------
        UsageError
            If the prompt and the new tokens are more than the model's limit.
        """
        try:
            request = self._request(0, prompt, options, _nobody)
        except _RowError as error:
            sentence = str(error)
            raise UsageError(sentence[0].upper() + sentence[1:], code="request-limit") from None
        request.config.stop_strings = set()  # StreamedText stops
        log_probs = bool(options.get("log_probs"))
        request.config.logprobs = int(log_probs)
        text = StreamedText(self._decoded, options.get("stop") or ())
        stream = request.stream = _PartConsumer(text, arrived, log_probs)
        self._enqueue([request])

        def cancel() -> None:
            # The thread of the pipeline cancels the handle: it may be reading from it.
            stream.closed = request.cancelled = True

        return int(request.tokens.shape[1]), cancel

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids)) if ids else ""

    def _load(self) -> og.ContinuousBatchingPipeline:
        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": self._threads,
            "ENABLE_CPU_PINNING": False,
        }
        exact = self._facts["precision"] == "fp32"
        if exact or "amx_bf16" not in isa_flags():
            properties["INFERENCE_PRECISION_HINT"] = "f32"  # bf16 is slower without AMX
        if exact:
            properties |= {"KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
        scheduler = og.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = _ACTIVE
        path = self._folder / self._facts.get("file", "")
        return og.ContinuousBatchingPipeline(str(path), scheduler, "CPU", properties)

    def start(
        self, items: Sequence[str], options: Mapping[str, Any], deliver: Callable[..., None]
    ) -> None:
        """Queue prompts, and deliver those that cannot be generated."""
        errors: dict[int, str] = {}
        requests = []
        for row, text in enumerate(items):
            try:
                requests.append(self._request(row, text, options, deliver))
            except Exception as error:  # of this row only
                errors[row] = str(error) if isinstance(error, _RowError) else one_line(error)
        if errors:
            deliver(list(errors), [None] * len(errors), list(errors.values()))
        self._enqueue(requests)

    def _enqueue(self, requests: Sequence[_PromptRequest]) -> None:
        with self._changed:
            if not self._closed:
                self._queue += requests
                self._changed.notify_all()
                return
        for each in requests:
            each.fail(_UNLOADED)

    def cancel(self, deliver: Callable[..., None]) -> None:
        """Forget the prompts that would be delivered to `deliver`."""
        with self._changed:
            for each in (*self._queue, *self._suspects, *self._active.values()):
                if each.deliver is deliver:
                    each.cancelled = True

    def _request(
        self,
        row: int,
        prompt: str | Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        deliver: Callable[..., None],
    ) -> _PromptRequest:
        chat = options.get("chat", True) and bool(self._tokenizer.chat_template)
        messages = _messages(prompt, options) if isinstance(prompt, str) else list(prompt)
        if chat:
            text = self._tokenizer.apply_chat_template(messages, True)
        elif isinstance(prompt, str):
            text = _plain(prompt, options)
        else:
            text = "\n\n".join(str(each["content"]) for each in messages)
        tokens = self._tokenizer.encode(text, add_special_tokens=not chat).input_ids
        count, new = int(tokens.shape[1]), int(options["max_new_tokens"])
        if options.get("fits"):
            new = max(1, min(new, self._limit - count))
        if count + new > self._limit:
            raise _RowError(
                f"the prompt has {count} tokens and max_new_tokens is {new}, together more than "
                f"the model's {self._limit}"
            )
        config = _config({**options, "max_new_tokens": new}, text)
        return _PromptRequest(row, tokens, config, deliver)

    # -- the thread --------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._active or self._suspects or self._closed):
                    self._changed.wait()
                if self._closed:
                    break
                self._fill()
            if not self._active:  # all were cancelled or not valid
                continue
            try:
                assert self._pipeline is not None
                self._pipeline.step()
            except Exception as error:
                if not self._recover(error):
                    break
                continue
            self._deliver_finished()
        for each in (*self._active.values(), *self._queue, *self._suspects):
            each.fail(_UNLOADED)

    def _fill(self) -> None:
        """Add requests to the pipeline; a suspect runs alone."""
        if self._suspects:
            if not self._active:
                suspect = self._suspects.popleft()
                self._tried_alone = {suspect}
                self._add(suspect)
            return
        while self._queue and len(self._active) < _ACTIVE:
            self._add(self._queue.popleft())

    def _add(self, request: _PromptRequest) -> None:
        if request.cancelled:
            return
        self._number += 1
        try:
            assert self._pipeline is not None
            request.handle = self._pipeline.add_request(
                self._number, request.tokens, request.config
            )
        except Exception as error:
            request.fail(one_line(error), "invalid")
            return
        self._active[self._number] = request

    def _deliver_finished(self) -> None:
        finished: dict[Callable[..., None], list[tuple[int, Any, str | None]]] = {}
        for number, request in list(self._active.items()):
            try:
                if self._is_running(request):
                    continue
                with self._changed:
                    del self._active[number]
                if request.stream is not None:
                    request.fail("the generation ended early")  # unless it was finished
                    continue
                if not request.cancelled:
                    value, reason = self._completion(request)
                    finished.setdefault(request.deliver, []).append((request.row, value, reason))
            except Exception as error:  # of this request only
                with self._changed:
                    self._active.pop(number, None)
                request.fail(one_line(error))
        for deliver, parts in finished.items():
            rows, values, errors = zip(*parts, strict=True)
            deliver(list(rows), list(values), list(errors))

    def _is_running(self, request: _PromptRequest) -> bool:
        """Return True if a request has not ended, after delivery of its new text."""
        if request.cancelled:
            request.handle.cancel()
            return False
        running: bool = request.handle.get_status() == og.GenerationStatus.RUNNING
        if request.stream is not None:
            self._deliver_part(request, request.stream)
        return running

    def _deliver_part(self, request: _PromptRequest, stream: _PartConsumer) -> None:
        """Deliver the new tokens of a stream."""
        ids: list[int] = []
        values: list[float] = []
        finish = None
        while not stream.closed and request.handle.can_read():
            for output in request.handle.read().values():
                ids += output.generated_ids
                values += output.generated_log_probs or ()
                if output.finish_reason == og.GenerationFinishReason.STOP:
                    finish = "stop"
                elif output.finish_reason == og.GenerationFinishReason.LENGTH:
                    finish = "length"
        if stream.closed or not (ids or finish):
            return
        text = stream.text.add(ids, finish is not None)
        if stream.text.stopped:
            finish = "stop"
            request.handle.cancel()
        pairs = []
        if stream.log_probs:
            pairs = [(self._decoded([i]), float(v)) for i, v in zip(ids, values, strict=False)]
        stream.deliver(TextPart(text, len(ids), pairs, finish))

    def _completion(self, request: _PromptRequest) -> tuple[Completion | None, str | None]:
        status = request.handle.get_status()
        if status != og.GenerationStatus.FINISHED:
            return None, f"the generation ended with status {status.name}"
        outputs = request.handle.read_all()
        ids = list(outputs[0].generated_ids)
        text = self._tokenizer.decode(ids)
        complete = outputs[0].finish_reason == og.GenerationFinishReason.STOP
        return Completion(text, complete, int(request.tokens.shape[1]), len(ids)), None

    def _recover(self, error: Exception) -> bool:
        """Load the pipeline again, and run the requests of the failed step one by one.

        Returns False if it cannot be loaded; then all requests have failed.
        """
        logger.warning("A step of the generation failed: %s", one_line(error))
        with self._changed:
            failed, self._active = list(self._active.values()), {}
        for each in failed:
            each.handle = None
        self._pipeline = None  # releases its memory before the next one is loaded
        try:
            self._pipeline = self._load()
        except Exception as reason:
            logger.exception("The model cannot be loaded again")
            with self._changed:
                self._closed = True
            for each in failed:
                each.fail(f"the model cannot be loaded again: {one_line(reason)}")
            return False
        failed = [each for each in failed if not each.cancelled]
        # A grammar is compiled in the first step of its request, which fails if it is not valid.
        grammars = [each for each in failed if each.has_grammar and not each.has_started]
        for request in failed:
            request.failures += 1
            if request in grammars and len(grammars) == 1:
                request.fail(one_line(error), "invalid")
            elif request.failures > 1 and request in self._tried_alone:
                request.fail(one_line(error))
            elif request.has_started and request.has_grammar:
                request.fail("the engine failed, and the state of the grammar is lost")
            else:
                resumed = request.resumed()
                with self._changed:
                    if grammars and request not in grammars:
                        self._queue.appendleft(resumed)
                    else:
                        self._suspects.append(resumed)
        return True


class _RowError(Exception):
    """Reason why a prompt cannot be generated, as a phrase."""


def _nobody(*parts: object) -> None:
    """Discard the delivery of a cancelled request."""


def _messages(text: str, options: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the messages of a chat: system, examples, and the prompt."""
    messages = []
    if options.get("system"):
        messages.append({"role": "system", "content": options["system"]})
    for question, answer in options.get("examples") or ():
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return [*messages, {"role": "user", "content": text}]


def _plain(text: str, options: Mapping[str, Any]) -> str:
    """Return the text of a prompt without a chat template."""
    parts = [options.get("system") or ""]
    parts += [f"{question}\n{answer}" for question, answer in options.get("examples") or ()]
    return "\n\n".join([*filter(None, parts), text])


def _config(options: Mapping[str, Any], text: str) -> og.GenerationConfig:
    config = og.GenerationConfig()
    config.max_new_tokens = int(options["max_new_tokens"])
    config.apply_chat_template = False
    temperature = float(options.get("temperature") or 0.0)
    top_p = 1.0 if options.get("top_p") is None else float(options["top_p"])
    if temperature > 0 and top_p > 0:  # otherwise the most probable token
        config.do_sample, config.temperature = True, temperature
        config.top_p = top_p
        # Of the text, so that a repeated row gets the same answer.
        content = hashlib.blake2b(text.encode(), digest_size=4).digest()
        config.rng_seed = int.from_bytes(content, "little") ^ int(options.get("seed") or 0)
        config.top_k = int(options.get("top_k") or config.top_k)
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
        if options.get(name):
            setattr(config, name, float(options[name]))
    if options.get("stop"):
        config.stop_strings = set(options["stop"])
    grammar = og.StructuredOutputConfig()
    if options.get("json_schema"):
        grammar.json_schema = options["json_schema"]
        config.structured_output_config = grammar
    elif options.get("regex"):
        grammar.regex = options["regex"]
        config.structured_output_config = grammar
    return config
