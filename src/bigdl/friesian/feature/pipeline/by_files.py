"""The executor ``arrow``: Parquet files in batches, by Spark or by processes of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bigdl.friesian.feature.pipeline.files import (
    Piece,
    batches_of,
    table_of,
    write,
)
from bigdl.friesian.feature.pipeline.learning import Ask, Program
from bigdl.friesian.feature.pipeline.requests import Request
from bigdl.friesian.feature.pipeline.step import Field, Fitted
from bigdl.friesian.feature.pipeline.tallies import answer, merged, tally

if TYPE_CHECKING:
    from bigdl.friesian.feature.pipeline.hosts import Host

__all__ = ["answers", "transformed"]


def answers(
    program: Program, schema: Mapping[str, Field], pieces: Sequence[Piece], host: Host
) -> dict[tuple[int, str], Any]:
    """Run a program over files."""
    asked = {
        (ask.step, name): request
        for ask in program
        if isinstance(ask, Ask)
        for name, request in ask.requests.items()
    }
    parts = host.run(Learn(program, dict(schema)), pieces)
    return {
        key: answer(request, merged(request, [part[i] for part in parts]))
        for i, (key, request) in enumerate(asked.items())
    }


def transformed(
    fitted: Sequence[Fitted],
    schema: Mapping[str, Field],
    pieces: Sequence[Piece],
    path: str,
    host: Host,
) -> int:
    """Write files behind all steps; returns the number of rows."""
    return sum(host.run(Transform(list(fitted), dict(schema), path), pieces))


@dataclass(frozen=True)
class Learn:
    """The partial answers of a piece, in the order of the requests."""

    program: Program
    schema: dict[str, Field]

    def __call__(self, piece: Piece) -> list[Any]:
        requests: list[Request] = []
        found: list[list[Any]] = []
        for batch in batches_of(piece, self.schema):
            requests, parts = [], []
            for each in self.program:
                if isinstance(each, Fitted):
                    batch = batch.after(each)
                    continue
                requests += each.requests.values()
                parts += [tally(request, batch) for request in each.requests.values()]
            found.append(parts)
        return [
            merged(request, [parts[i] for parts in found]) if len(found) > 1 else found[0][i]
            for i, request in enumerate(requests)
        ]


@dataclass(frozen=True)
class Transform:
    """Writes the file of a piece and returns its number of rows."""

    fitted: list[Fitted]
    schema: dict[str, Field]
    path: str

    def __call__(self, piece: Piece) -> int:
        return write(self.path, piece.place, self._tables(piece))

    def _tables(self, piece: Piece) -> Iterator[Any]:
        for batch in batches_of(piece, self.schema):
            for each in self.fitted:
                batch = batch.after(each)
            yield table_of(batch)
