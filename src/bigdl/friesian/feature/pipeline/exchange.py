"""Rows with the same key meet: they are written in buckets, and a bucket is read from all files.

The counterpart of a shuffle of Spark for the executor ``arrow``.  Each piece of the data becomes a
file of its own, in which the rows of a bucket are one row group, so that the rows of a bucket keep
the order of the data.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.pipeline.batches import Batch, batch_of, factored
from bigdl.friesian.feature.pipeline.files import Piece, Rows, file_of, opened, table_of, write
from bigdl.friesian.feature.pipeline.step import Field, Fitted, GroupStep

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from bigdl.friesian.feature.pipeline.hosts import Host

__all__ = ["Bucket", "Cut", "met"]

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
        Of a :class:`GroupStep`.
    """

    path: str
    parts: tuple[tuple[int, tuple[int, ...]], ...]
    step: Fitted

    def batches(self, schema: dict[str, Field]) -> Iterator[Batch]:
        import pyarrow as pa

        tables = []
        for place, groups in self.parts:
            with opened(file_of(self.path, place)) as file:
                tables.append(file.read_row_groups(list(groups), use_threads=False))
        for table in self.step.step.of_groups(pa.concat_tables(tables)):
            yield batch_of({name: table[name] for name in table.column_names})


@dataclass(frozen=True)
class Cut:
    """Writes the rows of a piece in buckets, as they are in front of a step.

    Attributes
    ----------
    fitted : list of Fitted
        The steps before it.
    step : GroupStep
    buckets : int
    schema : dict of str to Field
        Of the data.
    path : str
        A folder.
    """

    fitted: list[Fitted]
    step: GroupStep
    buckets: int
    schema: dict[str, Field]
    path: str

    def __call__(self, rows: Rows) -> list[int]:
        """The buckets of the row groups of the file."""
        found: list[int] = []
        write(self.path, rows.place, self._tables(rows, found))
        return found

    def _tables(self, rows: Rows, found: list[int]) -> Iterator[pa.Table]:
        import numpy as np
        import pyarrow as pa

        for rows_of_piece in rows.batches(self.schema):
            batch = rows_of_piece.behind(self.fitted)
            missing = [name for name in self.step.columns if name not in batch]
            if missing:
                raise UsageError(
                    f"{missing} do not exist in this Table, whose columns are {batch.names}; "
                    f"{self.step.method} reads them"
                )
            table = table_of(batch)
            self.step.check_rows(table)
            buckets = _buckets(batch, self.step.key, self.buckets)
            order = np.argsort(buckets, kind="stable")
            counts = np.bincount(buckets, minlength=self.buckets)
            table, start = table.take(pa.array(order)), 0
            for bucket, count in enumerate(counts.tolist()):
                if count or (bucket == 0 and not found):  # a file has a row group, for its schema
                    found.append(bucket)
                    yield table.slice(start, count)
                start += count


def _buckets(batch: Batch, name: str, count: int) -> np.ndarray:
    """The bucket of each row: equal values have equal ones."""
    import numpy as np
    import pandas as pd
    import pyarrow as pa

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


def _buckets_of(path: str, step: Fitted, written: Sequence[list[int]], count: int) -> list[Bucket]:
    """What there is to read, from what every :class:`Cut` returned."""
    parts: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(count)]
    for place, buckets in enumerate(written):
        groups: dict[int, list[int]] = {}
        for group, bucket in enumerate(buckets):
            groups.setdefault(bucket, []).append(group)
        for bucket, mine in groups.items():
            parts[bucket].append((place, tuple(mine)))
    found: list[Bucket] = []
    for mine in parts:
        if mine:
            found.append(Bucket(len(found), path, tuple(mine), step))
    return found


@contextmanager
def met(
    fitted: Sequence[Fitted],
    schema: Mapping[str, Field],
    pieces: Sequence[Piece],
    path: str,
    host: Host,
) -> Iterator[tuple[list[Fitted], list[Rows]]]:
    """The steps behind the last one that looks at groups, and the rows that they get.

    What is written on the way lies in a hidden folder in `path` while this is open.
    """
    from bigdl.orca.data.file import open_file_system

    rest, rows = list(fitted), list(pieces)
    count = max(host.pieces, -(-sum(piece.count for piece in pieces) // _BUCKET))
    fs, folder = open_file_system(path)
    made: list[str] = []
    try:
        while group := next((each for each in rest if isinstance(each.step, GroupStep)), None):
            at = rest.index(group)
            name = f".exchange-{uuid.uuid4().hex}"
            made.append(f"{folder.rstrip('/')}/{name}")
            fs.makedirs(made[-1], exist_ok=True)
            place = f"{path.rstrip('/')}/{name}"
            written = host.run(Cut(rest[:at], group.step, count, dict(schema), place), rows)
            rest, rows = rest[at + 1 :], _buckets_of(place, group, written, count)
        yield rest, rows
    finally:
        for each in made:
            fs.rm(each, recursive=True)
