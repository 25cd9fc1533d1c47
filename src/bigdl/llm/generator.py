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

from bigdl.common.cpu import isa_flags
from bigdl.common.errors import LazyModule, one_line

if TYPE_CHECKING:
    import openvino_genai as og
else:
    og = LazyModule("openvino_genai", "llm")

logger = logging.getLogger("bigdl.llm")

_ACTIVE = 64  # requests that share a step


@dataclass(eq=False)
class _PromptRequest:
    """A prompt that waits or runs."""

    row: int
    tokens: Any
    config: Any
    deliver: Callable[..., None]
    handle: Any = None
    failures: int = 0


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
        self._pipeline = self._load()
        self._tokenizer = self._pipeline.get_tokenizer()
        self._changed = threading.Condition()
        self._queue: deque[_PromptRequest] = deque()
        self._active: dict[int, _PromptRequest] = {}
        self._suspects: deque[_PromptRequest] = deque()
        self._number = 0
        threading.Thread(target=self._loop, name="bigdl-generator", daemon=True).start()

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
        with self._changed:
            self._queue += requests
            self._changed.notify_all()

    def cancel(self, deliver: Callable[..., None]) -> None:
        """Forget the prompts that would be delivered to `deliver`."""
        with self._changed:
            for requests in (self._queue, self._suspects):
                for each in [each for each in requests if each.deliver is deliver]:
                    requests.remove(each)
            for each in self._active.values():
                if each.deliver is deliver and each.handle is not None:
                    each.handle.cancel()
                    each.deliver = _nobody

    def _request(
        self, row: int, text: str, options: Mapping[str, Any], deliver: Callable[..., None]
    ) -> _PromptRequest:
        chat = options.get("chat", True) and bool(self._tokenizer.chat_template)
        if chat:
            text = self._tokenizer.apply_chat_template(_messages(text, options), True)
        else:
            text = _plain(text, options)
        tokens = self._tokenizer.encode(text, add_special_tokens=not chat).input_ids
        count, new = int(tokens.shape[1]), int(options["max_new_tokens"])
        if count + new > self._limit:
            raise _RowError(
                f"the prompt has {count} tokens and max_new_tokens is {new}, together more than "
                f"the model's {self._limit}"
            )
        return _PromptRequest(row, tokens, _config(options, text), deliver)

    # -- the thread --------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._active or self._suspects):
                    self._changed.wait()
                self._fill()
            try:
                self._pipeline.step()
            except Exception as error:
                self._recover(error)
                continue
            self._deliver_finished()

    def _fill(self) -> None:
        """Add requests to the pipeline; a suspect runs alone."""
        if self._suspects:
            if not self._active:
                self._add(self._suspects.popleft())
            return
        while self._queue and len(self._active) < _ACTIVE:
            self._add(self._queue.popleft())

    def _add(self, request: _PromptRequest) -> None:
        self._number += 1
        try:
            request.handle = self._pipeline.add_request(
                self._number, request.tokens, request.config
            )
        except Exception as error:
            request.deliver([request.row], [None], [one_line(error)])
            return
        self._active[self._number] = request

    def _deliver_finished(self) -> None:
        finished: dict[Callable[..., None], list[tuple[int, Any, str | None]]] = {}
        for number, request in list(self._active.items()):
            if request.handle.get_status() == og.GenerationStatus.RUNNING:
                continue
            with self._changed:
                del self._active[number]
            value, error = self._completion(request)
            finished.setdefault(request.deliver, []).append((request.row, value, error))
        for deliver, parts in finished.items():
            rows, values, errors = zip(*parts, strict=True)
            deliver(list(rows), list(values), list(errors))

    def _completion(self, request: _PromptRequest) -> tuple[Completion | None, str | None]:
        status = request.handle.get_status()
        if status != og.GenerationStatus.FINISHED:
            return None, f"the generation ended with status {status.name}"
        outputs = request.handle.read_all()
        ids = list(outputs[0].generated_ids)
        text = self._tokenizer.decode(ids)
        complete = outputs[0].finish_reason == og.GenerationFinishReason.STOP
        return Completion(text, complete, int(request.tokens.shape[1]), len(ids)), None

    def _recover(self, error: Exception) -> None:
        """Load the pipeline again, and run the requests of the failed step one by one."""
        logger.warning("A step of the generation failed: %s", one_line(error))
        with self._changed:
            failed, self._active = list(self._active.values()), {}
            self._pipeline = self._load()
        for request in failed:
            request.failures += 1
            if request.failures > 1:
                request.deliver([request.row], [None], [one_line(error)])
            else:
                self._suspects.append(request)


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
    if temperature > 0:
        config.do_sample, config.temperature = True, temperature
        config.top_p = float(options.get("top_p") or 1.0)
        # Of the text, so that a repeated row gets the same answer.
        content = hashlib.blake2b(text.encode(), digest_size=4).digest()
        config.rng_seed = int.from_bytes(content, "little") ^ int(options.get("seed") or 0)
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
