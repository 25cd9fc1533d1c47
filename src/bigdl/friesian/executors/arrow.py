"""The executor ``arrow``: Parquet files in batches, by Spark or by processes of this machine.

Where an operator looks at groups, rows with the same key meet, as by a shuffle of Spark: they are
written in buckets, and a bucket is read from all files.  Each piece of the data becomes a file of
its own, in which the rows of a bucket are one row group, so that they keep the order of the data.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from bigdl.common.errors import UsageError
from bigdl.friesian.executors.files import Piece, file_of, opened, table_of, write
from bigdl.friesian.ops.batches import Batch, batch_of, factored
from bigdl.friesian.ops.kinds import require_columns
from bigdl.friesian.ops.operator import Ask, Fitted, Program
from bigdl.friesian.ops.requests import Request
from bigdl.friesian.ops.sequences import AddHistSeq
from bigdl.orca.data.file import open_file_system

if TYPE_CHECKING:
    from bigdl.friesian.executors.hosts import Host


def answers(program: Program, pieces: Sequence[Piece], host: Host) -> dict[tuple[int, str], Any]:
    """Run a program over files."""
    for each in program:
        if isinstance(each, Fitted) and isinstance(each.step, AddHistSeq):
            raise UsageError(
                f"A step behind {each.step.method} has to learn from the data, which the executor "
                "arrow cannot do; use fit and transform, or move the step in front of it"
            )
    asked = _asked(program)
    parts = zip(*host.run(partial(_learned, program), pieces), strict=True)
    return {
        key: request.answer(request.merged(of_pieces))
        for (key, request), of_pieces in zip(asked.items(), parts, strict=True)
    }


def transformed(fitted: Sequence[Fitted], pieces: Sequence[Piece], path: str, host: Host) -> int:
    """Write files behind all steps; returns the number of rows."""
    with exchanged(fitted, pieces, path, host) as (rest, rows):
        return sum(host.run(partial(_written, rest, path), rows))


def _asked(program: Program) -> dict[tuple[int, str], Request]:
    return {
        (ask.step, name): request
        for ask in program
        if isinstance(ask, Ask)
        for name, request in ask.requests.items()
    }


def _learned(program: Program, rows: Rows) -> list[Any]:
    """Return the partial answers of some rows, in the order of the requests."""
    batches = []
    for batch in rows.batches():
        parts = []
        for each in program:
            if isinstance(each, Fitted):
                batch = batch.after(each)
            else:
                parts += [request.of_batch(batch) for request in each.requests.values()]
        batches.append(parts)
    of_requests = zip(_asked(program).values(), zip(*batches, strict=True), strict=True)
    return [request.merged(parts) if len(parts) > 1 else parts[0] for request, parts in of_requests]


def _written(fitted: Sequence[Fitted], path: str, rows: Rows) -> int:
    """Write the file of some rows and return their number."""
    return write(path, rows.place, (table_of(each.behind(fitted)) for each in rows.batches()))


# -- rows with the same key meet -------------------------------------------------------------------

_BUCKET = 500_000  # rows


@dataclass(frozen=True)
class Bucket:
    """Some keys with all their rows, behind the step that asked for them.

    Attributes
    ----------
    place : int
        Among all buckets.
    path : str
        The folder that :func:`_cut` wrote to.
    parts : dict of int to list of int
        By the places of its files the row groups of the bucket in each.
    step : AddHistSeq
    """

    place: int
    path: str
    parts: dict[int, list[int]]
    step: AddHistSeq

    def batches(self) -> Iterator[Batch]:
        tables = []
        for place, groups in self.parts.items():
            with opened(file_of(self.path, place)) as file:
                tables.append(file.read_row_groups(groups, use_threads=False))
        for table in self.step.of_users(pa.concat_tables(tables)):
            yield batch_of({name: table[name] for name in table.column_names})


Rows = Piece | Bucket


def _cut(
    fitted: Sequence[Fitted], step: AddHistSeq, count: int, path: str, rows: Rows
) -> list[int]:
    """Write some rows in buckets, as they are in front of a step.

    Returns
    -------
    list of int
        The buckets of the row groups of the file.
    """
    of_groups: list[int] = []

    def tables() -> Iterator[pa.Table]:
        for each in rows.batches():
            batch = each.behind(fitted)
            require_columns(batch.names, step.columns, advice=f"; {step.method} reads them")
            table = table_of(batch)
            step.check_rows(table)
            buckets = _buckets(batch, step.user_col, count)
            sizes = np.bincount(buckets, minlength=count).tolist()
            table, start = table.take(pa.array(np.argsort(buckets, kind="stable"))), 0
            for bucket, size in enumerate(sizes):
                is_first = bucket == 0 and not of_groups
                if size or is_first:  # a file has a row group, for its schema
                    of_groups.append(bucket)
                    yield table.slice(start, size)
                start += size

    write(path, rows.place, tables())
    return of_groups


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


def _buckets_of(path: str, step: AddHistSeq, written: Sequence[list[int]]) -> list[Bucket]:
    """Return the buckets, from the results of every :func:`_cut`."""
    parts: dict[int, dict[int, list[int]]] = {}
    for place, buckets in enumerate(written):
        for group, bucket in enumerate(buckets):
            parts.setdefault(bucket, {}).setdefault(place, []).append(group)
    filled = (parts[bucket] for bucket in sorted(parts))
    return [Bucket(place, path, each, step) for place, each in enumerate(filled)]


@contextmanager
def exchanged(
    fitted: Sequence[Fitted], pieces: Sequence[Piece], path: str, host: Host
) -> Iterator[tuple[list[Fitted], Sequence[Rows]]]:
    """Yield the steps behind the last one that looks at groups, and the rows that they get.

    What is written on the way lies in a hidden folder in `path` while this is open.
    """
    rest = list(fitted)
    rows: Sequence[Rows] = pieces
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
            written = host.run(partial(_cut, rest[:at], step, count, place), rows)
            rest, rows = rest[at + 1 :], _buckets_of(place, step, written)
        yield rest, rows
    finally:
        for each in made:
            fs.rm(each, recursive=True)
