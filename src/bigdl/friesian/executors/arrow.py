"""The executor ``arrow``: Parquet files in batches, by Spark or by processes of this machine.

Where an operator looks at groups, rows with the same key meet, as by a shuffle of Spark: they are
written in buckets, and a bucket is read from all files.  Each piece of the data becomes a file of
its own, in which the rows of a bucket are one row group, so that they keep the order of the data.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from bigdl.common.errors import UsageError
from bigdl.friesian.executors.files import Piece, Rows, file_of, opened, table_of, write
from bigdl.friesian.ops.batches import Batch, batch_of, factored
from bigdl.friesian.ops.kinds import Field, require_columns
from bigdl.friesian.ops.operator import Ask, Fitted, Program
from bigdl.friesian.ops.requests import Request
from bigdl.friesian.ops.sequences import AddHistSeq

if TYPE_CHECKING:
    from bigdl.friesian.executors.hosts import Host


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
        if isinstance(each, Fitted) and isinstance(each.step, AddHistSeq):
            raise UsageError(
                f"A step behind {each.step.method} has to learn from the data, which the executor "
                "arrow cannot do; use fit and transform, or move the step in front of it"
            )
    parts = host.run(Learn(program, dict(schema)), pieces)
    return {
        key: request.answer(request.merged([part[i] for part in parts]))
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
    with exchanged(fitted, schema, pieces, path, host) as (rest, rows):
        return sum(host.run(Transform(rest, dict(schema), path), rows))


@dataclass(frozen=True)
class Learn:
    """The partial answers of a piece, in the order of the requests."""

    program: Program
    schema: dict[str, Field]

    def __call__(self, rows: Rows) -> list[Any]:
        requests: list[Request] = []
        batches: list[list[Any]] = []
        for batch in rows.batches(self.schema):
            requests, parts = [], []
            for each in self.program:
                if isinstance(each, Fitted):
                    batch = batch.after(each)
                    continue
                requests += each.requests.values()
                parts += [request.of_batch(batch) for request in each.requests.values()]
            batches.append(parts)
        return [
            request.merged([parts[i] for parts in batches]) if len(batches) > 1 else batches[0][i]
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


# -- rows with the same key meet -------------------------------------------------------------------

_BUCKET = 500_000  # rows


@dataclass(frozen=True)
class Bucket(Rows):
    """Some keys with all their rows, behind the step that asked for them.

    Attributes
    ----------
    path : str
        The folder that :class:`Cut` wrote to.
    parts : tuple of (int, tuple of int)
        Places of its files, and the row groups of the bucket in each.
    step : Fitted
        Of a :class:`AddHistSeq`.
    """

    path: str
    parts: tuple[tuple[int, tuple[int, ...]], ...]
    step: Fitted

    def batches(self, schema: dict[str, Field]) -> Iterator[Batch]:
        tables = []
        for place, groups in self.parts:
            with opened(file_of(self.path, place)) as file:
                tables.append(file.read_row_groups(list(groups), use_threads=False))
        for table in cast("AddHistSeq", self.step.step).of_users(pa.concat_tables(tables)):
            yield batch_of({name: table[name] for name in table.column_names})


@dataclass(frozen=True)
class Cut:
    """Writes the rows of a piece in buckets, as they are in front of a step.

    Attributes
    ----------
    fitted : list of Fitted
        The steps before it.
    step : AddHistSeq
    buckets : int
    schema : dict of str to Field
        Of the data.
    path : str
        A folder.
    """

    fitted: list[Fitted]
    step: AddHistSeq
    buckets: int
    schema: dict[str, Field]
    path: str

    def __call__(self, rows: Rows) -> list[int]:
        """The buckets of the row groups of the file."""
        of_groups: list[int] = []
        write(self.path, rows.place, self._tables(rows, of_groups))
        return of_groups

    def _tables(self, rows: Rows, of_groups: list[int]) -> Iterator[pa.Table]:
        for rows_of_piece in rows.batches(self.schema):
            batch = rows_of_piece.behind(self.fitted)
            advice = f"; {self.step.method} reads them"
            require_columns(batch.names, self.step.columns, advice=advice)
            table = table_of(batch)
            self.step.check_rows(table)
            buckets = _buckets(batch, self.step.user_col, self.buckets)
            order = np.argsort(buckets, kind="stable")
            counts = np.bincount(buckets, minlength=self.buckets)
            table, start = table.take(pa.array(order)), 0
            for bucket, count in enumerate(counts.tolist()):
                if count or (
                    bucket == 0 and not of_groups
                ):  # a file has a row group, for its schema
                    of_groups.append(bucket)
                    yield table.slice(start, count)
                start += count


def _buckets(batch: Batch, name: str, count: int) -> np.ndarray:
    """The bucket of each row: equal values have equal ones."""
    import pandas as pd

    column = factored(batch[name])
    kind = column.values.type
    if pa.types.is_floating(kind) or pa.types.is_integer(kind):
        values = column.values.cast(pa.float64(), safe=False).fill_null(np.nan)
        values = values.to_numpy(zero_copy_only=False) + 0.0  # both zeros are equal
        values[np.isnan(values)] = np.nan
    else:
        values = np.array([str(each) for each in column.values.to_pylist()], object)
    hashed = pd.util.hash_array(values) % np.uint64(count)
    return hashed.astype(np.int64)[column.codes]


def _buckets_of(path: str, step: Fitted, written: Sequence[list[int]], count: int) -> list[Rows]:
    """Return the buckets, from the results of every :class:`Cut`."""
    parts: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(count)]
    for place, buckets in enumerate(written):
        groups: dict[int, list[int]] = {}
        for group, bucket in enumerate(buckets):
            groups.setdefault(bucket, []).append(group)
        for bucket, mine in groups.items():
            parts[bucket].append((place, tuple(mine)))
    filled = [tuple(groups) for groups in parts if groups]
    return [Bucket(place, path, groups, step) for place, groups in enumerate(filled)]


@contextmanager
def exchanged(
    fitted: Sequence[Fitted],
    schema: Mapping[str, Field],
    pieces: Sequence[Piece],
    path: str,
    host: Host,
) -> Iterator[tuple[list[Fitted], list[Rows]]]:
    """Yield the steps behind the last one that looks at groups, and the rows that they get.

    What is written on the way lies in a hidden folder in `path` while this is open.
    """
    from bigdl.orca.data.file import open_file_system

    rest = list(fitted)
    rows: list[Rows] = list(pieces)
    count = max(host.pieces, -(-sum(piece.count for piece in pieces) // _BUCKET))
    fs, folder = open_file_system(path)
    made: list[str] = []
    try:
        while group := next((each for each in rest if isinstance(each.step, AddHistSeq)), None):
            at = rest.index(group)
            name = f".exchange-{uuid.uuid4().hex}"
            made.append(f"{folder.rstrip('/')}/{name}")
            fs.makedirs(made[-1], exist_ok=True)
            place = f"{path.rstrip('/')}/{name}"
            step = cast("AddHistSeq", group.step)
            written = host.run(Cut(rest[:at], step, count, dict(schema), place), rows)
            rest, rows = rest[at + 1 :], _buckets_of(place, group, written, count)
        yield rest, rows
    finally:
        for each in made:
            fs.rm(each, recursive=True)
