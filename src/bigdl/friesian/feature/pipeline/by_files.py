"""The executor ``arrow``: Parquet files in batches, by Spark or by processes of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.pipeline.exchange import met
from bigdl.friesian.feature.pipeline.files import Piece, Rows, table_of, write
from bigdl.friesian.feature.pipeline.learning import Ask, Program
from bigdl.friesian.feature.pipeline.requests import Request
from bigdl.friesian.feature.pipeline.step import Field, Fitted, GroupStep
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
    for each in program:
        if isinstance(each, Fitted) and isinstance(each.step, GroupStep):
            raise UsageError(
                f"A step behind {each.step.method} has to learn from the data, which the executor "
                "arrow cannot do; use fit and transform, or move the step in front of it"
            )
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
    with met(fitted, schema, pieces, path, host) as (rest, rows):
        return sum(host.run(Transform(rest, dict(schema), path), rows))


@dataclass(frozen=True)
class Learn:
    """The partial answers of a piece, in the order of the requests."""

    program: Program
    schema: dict[str, Field]

    def __call__(self, rows: Rows) -> list[Any]:
        requests: list[Request] = []
        found: list[list[Any]] = []
        for batch in rows.batches(self.schema):
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
    """Writes the file of some rows and returns their number."""

    fitted: list[Fitted]
    schema: dict[str, Field]
    path: str

    def __call__(self, rows: Rows) -> int:
        return write(self.path, rows.place, self._tables(rows))

    def _tables(self, rows: Rows) -> Iterator[Any]:
        for batch in rows.batches(self.schema):
            yield table_of(batch.behind(self.fitted))
