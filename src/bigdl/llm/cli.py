"""``llm-cli``, which continues a prompt, and ``llm-chat``, a conversation in the terminal."""

from __future__ import annotations

import argparse
import queue
import sys
from collections.abc import Callable, Sequence

from bigdl.common.cpu import core_count
from bigdl.common.errors import UsageError
from bigdl.llm.convert_model import FAMILIES
from bigdl.llm.generator import Generator, TextPart
from bigdl.llm.model import TextModel

_TOKENS = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``llm-cli``."""
    parser = _parser("llm-cli", "Continue a prompt with a language model.")
    parser.add_argument("-p", "--prompt", default="", help="text to continue")
    options = parser.parse_args(arguments)
    return _run(options, "llm-cli", lambda generator: _print(generator, options.prompt, options))


def chat(arguments: Sequence[str] | None = None) -> int:
    """Run ``llm-chat``: each line of the input is a message; an empty one ends."""
    options = _parser("llm-chat", "Talk to a language model.").parse_args(arguments)

    def talk(generator: Generator) -> int:
        messages: list[dict[str, str]] = []
        while line := _line("Human: "):
            messages.append({"role": "user", "content": line})
            print("BigDL-LLM: ", end="")
            answer: list[str] = []
            status = _print(generator, messages, options, answer)
            if status:
                return status
            messages.append({"role": "assistant", "content": "".join(answer)})
        return 0

    return _run(options, "llm-chat", talk)


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("-m", "--model", required=True, help="folder of a model, or a GGUF file")
    parser.add_argument("-t", "--threads", type=int, help="number of threads")
    parser.add_argument("-n", "--n-predict", "--n_predict", type=int, default=_TOKENS)
    parser.add_argument("-x", "--model-family", choices=FAMILIES, help="accepted; has no effect")
    return parser


def _line(label: str) -> str:
    try:
        return input(label).strip()
    except EOFError:
        return ""


def _run(options: argparse.Namespace, name: str, talk: Callable[[Generator], int]) -> int:
    try:
        model = TextModel(options.model, task="generate")
        generator = Generator(model.path, model.facts, options.threads or core_count())
        try:
            return talk(generator)
        finally:
            generator.close()
    except UsageError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1


def _print(
    generator: Generator,
    prompt: str | list[dict[str, str]],
    options: argparse.Namespace,
    answer: list[str] | None = None,
) -> int:
    """Print the text of an answer as it arrives, and return the exit status."""
    parts: queue.SimpleQueue[TextPart] = queue.SimpleQueue()
    chosen = {
        "max_new_tokens": options.n_predict,
        "fits": True,
        "chat": not isinstance(prompt, str),
    }
    generator.stream(prompt, chosen, parts.put)
    while True:
        part = parts.get()
        print(part.text, end="", flush=True)
        if answer is not None:
            answer.append(part.text)
        if part.finish is not None:
            print()
            if part.error:
                print(f"The generation failed: {part.error}", file=sys.stderr)
            return int(bool(part.error))
