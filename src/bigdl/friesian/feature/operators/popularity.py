"""Random items that follow the popularity of items, drawn without rejection.

Every item has a whole number of tickets.  A draw is the number of a ticket among those that are
left when the tickets of some items are excluded; the excluded ones are stepped over as in
:mod:`~bigdl.friesian.feature.operators.negatives`.  Tickets in proportion to a power of the counts,
usually 0.75, are the negatives of word2vec (Mikolov et al., "Distributed Representations of Words
and Phrases and their Compositionality", NIPS 2013).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.columns import col

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

__all__ = ["check_popularity", "popular_draws", "tickets_of"]

_TICKETS = 1 << 38  # of all items; times the rows of a batch they fit in 64 bits


def check_popularity(popularity: Any) -> None:
    """Check the power of the counts."""
    is_number = isinstance(popularity, int | float) and not isinstance(popularity, bool)
    if not is_number or not 0 <= popularity < math.inf:
        raise UsageError(f"popularity should be a number from 0 on, or None, got {popularity!r}")


def tickets_of(df: DataFrame, item_col: str, item_size: int, popularity: float) -> np.ndarray:
    """How many tickets every item has: in proportion to its count to the power `popularity`.

    Returns
    -------
    ndarray of int64, shape (item_size,)
        0 for the number 0 and for items that do not occur in the table.
    """
    import numpy as np

    item = col(item_col).cast("bigint")
    counted = df.filter((item >= 1) & (item < item_size)).groupBy(item.alias("item")).count()
    table = counted.toArrow()
    counts = np.zeros(item_size, np.int64)
    counts[table["item"].to_numpy()] = table["count"].to_numpy()
    weights = np.where(counts > 0, counts, 1) ** float(popularity) * (counts > 0)
    total = weights.sum()
    return np.ceil(weights * (_TICKETS / max(total, 1.0))).astype(np.int64)


def popular_draws(tickets: np.ndarray, df: DataFrame, draws: Column, excluded: Column) -> Column:
    """Items for random numbers.

    Parameters
    ----------
    tickets : ndarray of int64
        Of every item.
    df : pyspark.sql.DataFrame
    draws : Column of array<bigint>
        Random bits, one number for each item to be drawn.
    excluded : Column of array<bigint>
        Items that must not be drawn: ascending, different, and all of them numbers of `tickets`.

    Returns
    -------
    Column of array<bigint>
        Empty where no item is left.
    """
    from pyspark.sql.functions import arrow_udf

    table = _Tickets(tickets, df.sparkSession)

    def draw(bits, left_out):
        return table.draw(bits, left_out)

    return arrow_udf(draw, "array<bigint>")(draws, excluded)


class _Tickets:
    """The tickets in a worker: sent there once."""

    def __init__(self, tickets: np.ndarray, spark: Any):
        # Spark Connect has no broadcasts: there the array travels with the function.
        context = getattr(spark, "_sc", None)
        self._given: Callable | Any = tickets if context is None else context.broadcast(tickets)

    def draw(self, bits: pa.ListArray, excluded: pa.ListArray) -> pa.ListArray:
        import numpy as np
        import pyarrow as pa

        tickets = getattr(self._given, "value", self._given)
        ends = np.cumsum(tickets)
        begins, total = ends - tickets, int(ends[-1])
        row, item = _rows_and_values(excluded)
        # the number of a ticket among those that are left is that among all of them minus those
        # before it that are excluded; in one array the rows stay apart by a distance
        gone = tickets[item]
        before = np.cumsum(gone) - gone
        first = np.searchsorted(row, np.arange(len(excluded)))
        padded = np.append(before, gone.sum())
        free = begins[item] - (before - padded[first[row]])
        left = total - np.bincount(row, gone, len(excluded)).astype(np.int64)
        apart = total + 1
        owner, random = _rows_and_values(bits)
        there = left[owner] > 0
        owner, random = owner[there], random[there]
        drawn = (random.view(np.uint64) % left[owner].astype(np.uint64)).astype(np.int64)
        place = np.searchsorted(row * apart + free, owner * apart + drawn, "right")
        skipped = padded[place] - padded[first[owner]]
        found = np.searchsorted(ends, drawn + skipped, "right")
        counts = np.bincount(owner, minlength=len(bits))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(found))


def _rows_and_values(lists: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """The number of the row of every value, and the values."""
    import numpy as np

    lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
    return np.repeat(np.arange(len(lists)), lengths), lists.flatten().to_numpy()
