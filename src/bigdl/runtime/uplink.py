"""What leaves a worker for the driver, and what the driver gave it: the ways there are."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

from bigdl.common.errors import UsageError

__all__ = ["RESULT_LIMIT", "ChannelUplink", "Uplink"]

RESULT_LIMIT = 2 << 30  # bytes of one value that may go through the driver


class Uplink(ABC):
    """One worker's way to the driver, for one attempt."""

    #: the figures that the program reported last
    progress: dict[str, Any] | None = None

    @abstractmethod
    def options(self) -> dict:
        """What the driver said of this attempt."""

    @abstractmethod
    def state(self) -> bytes | None:
        """The bytes that the driver gave for rank 0."""

    @abstractmethod
    def send(self, doc: dict, data: bytes) -> None:
        """A message of the program."""

    @abstractmethod
    def give(self, rank: int, kind: str, data: bytes) -> None:
        """The result of the program."""

    @abstractmethod
    def failing(self) -> int:
        """Say that this worker fails, before anything is cleaned up; returns its place.

        Cleaning up breaks the peers' collectives, which may then fail in user code: the first place
        is the cause.
        """

    @abstractmethod
    def report(self, doc: dict) -> None:
        """The exception that a program raised."""


class ChannelUplink(Uplink):
    """By the channel, while the program runs."""

    def __init__(self, line):
        self._line = line

    def options(self):
        return self._line.get_json("options")

    def state(self):
        has = self._line.has("state")
        return self._line.take_bytes("state", delete=False) if has else None

    def send(self, doc, data):
        check_size("message", data)
        self._line.push("messages", doc, data)

    def give(self, rank, kind, data):
        self._line.put_bytes(f"result/{rank}", data)
        self._line.set(f"result/{rank}/kind", kind)

    def failing(self):
        return self._line.count("failed", 1)

    def report(self, doc):
        self._line.push("errors", doc)


def encode(result) -> tuple[str, bytes]:
    """Kind and bytes of what a program returned."""
    if isinstance(result, bytes | bytearray | memoryview):
        kind, data = "bytes", bytes(result)
    else:
        try:
            kind, data = "json", json.dumps(result).encode()
        except (TypeError, ValueError) as error:
            raise UsageError(
                "A program run by an engine must return bytes or JSON-able values, got "
                f"{type(result).__name__} ({error})"
            ) from None
    check_size("result", data)
    return kind, data


def decode(kind: str, data: bytes):
    """The inverse of :func:`encode`."""
    return data if kind == "bytes" else json.loads(data)


def check_size(what: str, data: bytes) -> None:
    if len(data) > RESULT_LIMIT:
        raise UsageError(
            f"The {what} of {len(data) >> 20} MB is too large to come back through the driver "
            f"(limit {RESULT_LIMIT >> 20} MB); pass model_dir= so that it is written there"
        )
