"""Random items that a user did not choose, drawn without rejection.

Item numbers go from 1 to ``item_size - 1``.  The j-th of the numbers that are left when some are
excluded is found by stepping over the excluded ones in ascending order, so that every draw is
exactly uniform and takes a fixed time.  Draws depend on the seed and on the place of the row
(partition and position in it).

Items that follow the popularity of items are drawn in the same way: every item has a whole number
of tickets, and a draw is the number of a ticket among those that are left.  Tickets in proportion
to a power of the counts, usually 0.75, are the negatives of word2vec (Mikolov et al., "Distributed
Representations of Words and Phrases and their Compositionality", NIPS 2013).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import UsageError
from bigdl.friesian.ops import kinds, lookup, spark
from bigdl.friesian.ops.kinds import Schema, require_columns, require_kind
from bigdl.friesian.ops.lookup import LookUp
from bigdl.friesian.ops.operator import State, TableOperator
from bigdl.friesian.ops.requests import Outcome, Request
from bigdl.friesian.ops.spark import (
    F,
    arrow_function,
    check_string,
    col,
    kind_of,
    schema_of,
    shared,
    temporary,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_TICKETS = 1 << 38  # of all items; times the rows of a batch they fit in 64 bits


_ENCODED = "whole numbers", "; encode it first"


def _check_sizes(item_size: Any, neg_num: Any) -> None:
    if isinstance(item_size, bool) or not isinstance(item_size, int) or item_size < 3:
        raise UsageError(
            "item_size should be the largest item number plus 1, and at least 3 for there to be "
            f"another item, but got {item_size!r}"
        )
    check_integer("neg_num", neg_num, 1)


def _other_than(item: Column, item_size: int, *keys: Any) -> Column:
    """A random item other than this one; any item if this one is null or none of the numbers."""

    is_item = item.isNotNull() & (item >= 1) & (item < item_size)
    bits = F.xxhash64(*keys)
    drawn = F.pmod(bits, F.lit(item_size - 2).cast("bigint")) + 1
    other = F.when(drawn >= item, drawn + 1).otherwise(drawn)
    any_item = F.pmod(bits, F.lit(item_size - 1).cast("bigint")) + 1
    return F.when(is_item, other).otherwise(any_item)


@dataclass(frozen=True)
class AddNegativeSamples(TableOperator):
    """``add_negative_samples``."""

    item_size: int
    item_col: str
    label_col: str
    neg_num: int
    seed: int
    exclude_history_col: str | None
    user_col: str | None
    popularity: float | None = None
    method = "add_negative_samples"

    def __post_init__(self) -> None:
        _check_sizes(self.item_size, self.neg_num)
        check_string(self.item_col, "item_col")
        check_string(self.label_col, "label_col")
        for what in ("exclude_history_col", "user_col"):
            if getattr(self, what) is not None:
                check_string(getattr(self, what), what)
        if self.popularity is not None:
            check_number("popularity", self.popularity, 0)

    @property
    def reads(self) -> list[str]:
        named = (self.item_col, self.exclude_history_col, self.user_col)
        return [name for name in named if name is not None]

    def requests(self, before: Schema) -> dict[str, Request]:
        # the columns behind it are the same without popularity, for which items would be counted
        return {"after": Outcome(tuple(before), replace(self, popularity=None))}

    def cardinality(self, name: str, state: State) -> int | None:
        known = {self.item_col: self.item_size, self.label_col: 2}
        return known.get(name) or super().cardinality(name, state)

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        require_columns(df.columns, self.reads)
        kind = kind_of(df, self.item_col)
        require_kind(schema_of(df), [self.item_col], kinds.is_integral, *_ENCODED)
        row, samples, history = (temporary(df, each) for each in ("row", "samples", "history"))
        rows = df.withColumn(row, F.monotonically_increasing_id())
        histories = []
        if self.exclude_history_col is not None:
            _check_history(df, self.exclude_history_col)
            histories.append(col(self.exclude_history_col))
        if self.user_col is not None:
            rows = self._with_items(rows, col(self.user_col), history)
            histories.append(col(history))
        pair = F.array(F.struct(col(self.item_col).alias("item"), F.lit(1).alias("label")))
        wrong = F.transform(
            self._negatives(df, col(row), histories),
            lambda item: F.struct(item.cast(kind).alias("item"), F.lit(0).alias("label")),
        )
        rows = rows.withColumn(samples, F.explode(F.concat(wrong, pair)))
        sample = {self.item_col: col(samples)["item"], self.label_col: col(samples)["label"]}
        return spark.replace(rows, sample).drop(row, samples, history)

    def _with_items(self, rows: DataFrame, user: Column, history: str) -> DataFrame:
        """Return `rows` with a column of all items that the table has of the user of each."""
        items = F.collect_set(col(self.item_col)).alias("items")
        known = rows.groupBy(user.alias("user")).agg(items)
        return lookup.join(rows, [LookUp(known, {"user": user}, {history: ("items", F.lit(None))})])

    def _negatives(self, df: DataFrame, row: Column, histories: Sequence[Column]) -> Column:
        """Return arrays of the items that are drawn."""

        item, size, key = col(self.item_col), self.item_size, F.lit(self.seed)
        draws = F.sequence(F.lit(1), F.lit(self.neg_num))
        if self.popularity is None and not histories:
            return F.transform(draws, lambda k: _other_than(item.cast("bigint"), size, key, row, k))
        tickets = np.ones(size, np.int64)
        tickets[0] = 0
        if self.popularity is not None:
            tickets = _tickets_of(df, self.item_col, size, self.popularity)
        bits = F.transform(draws, lambda k: F.xxhash64(key, row, k))
        draw = arrow_function(_Tickets(tickets, df.sparkSession).draw, "array<bigint>")
        return draw(bits, _excluded(item, histories, size))


def _check_history(df: DataFrame, name: str) -> None:
    def holds_items(kind: str) -> bool:
        return kinds.is_array(kind) and kinds.is_integral(kinds.element_of(kind))

    require_kind(schema_of(df), [name], holds_items, "arrays of whole numbers", _ENCODED[1])


def _excluded(item: Column, histories: Sequence[Column], item_size: int) -> Column:
    """Ascending and different numbers of items that must not be drawn."""

    none = F.array().cast("array<bigint>")
    every = F.concat(
        *(F.coalesce(history.cast("array<bigint>"), none) for history in histories),
        F.array(item.cast("bigint")),
    )
    every = F.filter(every, lambda each: each.isNotNull() & (each >= 1) & (each < item_size))
    return F.sort_array(F.array_distinct(every))


@dataclass(frozen=True)
class AddNegHistSeq(TableOperator):
    """``add_neg_hist_seq``."""

    item_size: int
    item_history_col: str
    neg_num: int
    seed: int
    method = "add_neg_hist_seq"

    def __post_init__(self) -> None:
        _check_sizes(self.item_size, self.neg_num)
        check_string(self.item_history_col, "item_history_col")

    @property
    def reads(self) -> list[str]:
        return [self.item_history_col]

    def cardinality(self, name: str, state: State) -> int | None:
        if name == f"neg_{self.item_history_col}":
            return self.item_size
        return super().cardinality(name, state)

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        _check_history(df, self.item_history_col)
        row = temporary(df, "row")
        key = F.lit(self.seed)
        kind = kinds.element_of(kind_of(df, self.item_history_col))

        def others(item: Column, place: Column) -> Column:
            return F.transform(
                F.sequence(F.lit(1), F.lit(self.neg_num)),
                lambda k: _other_than(
                    item.cast("bigint"), self.item_size, key, col(row), place, k
                ).cast(kind),
            )

        rows = df.withColumn(row, F.monotonically_increasing_id())
        history = col(self.item_history_col)
        added = {f"neg_{self.item_history_col}": F.transform(history, others)}
        return spark.replace(rows, added).drop(row)


def _tickets_of(df: DataFrame, item_col: str, item_size: int, popularity: float) -> np.ndarray:
    """Return the tickets of every item, in proportion to its count to the power `popularity`.

    Returns
    -------
    ndarray of int64, shape (item_size,)
        0 for the number 0 and for items that do not occur in the table.
    """

    item = col(item_col).cast("bigint")
    counted = df.filter((item >= 1) & (item < item_size)).groupBy(item.alias("item")).count()
    table = counted.toArrow()
    counts = np.zeros(item_size, np.int64)
    counts[table["item"].to_numpy()] = table["count"].to_numpy()
    weights = np.where(counts > 0, counts, 1) ** float(popularity) * (counts > 0)
    total = weights.sum()
    return np.ceil(weights * (_TICKETS / max(total, 1.0))).astype(np.int64)


class _Tickets:
    """The tickets of every item, in a worker."""

    def __init__(self, tickets: np.ndarray, spark: Any):
        self._shared = shared(tickets, spark)

    def draw(self, bits: pa.ListArray, excluded: pa.ListArray) -> pa.ListArray:
        """Draw an item for each of some random bits; none where no item is left.

        Parameters
        ----------
        bits : pyarrow.ListArray of int64
        excluded : pyarrow.ListArray of int64
            Items that must not be drawn: ascending, different, and all of them have tickets.
        """
        tickets = self._shared.value
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
        items = np.searchsorted(ends, drawn + skipped, "right")
        counts = np.bincount(owner, minlength=len(bits))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(items))


def _rows_and_values(lists: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """The number of the row of every value, and the values."""

    lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
    return np.repeat(np.arange(len(lists)), lengths), lists.flatten().to_numpy()
