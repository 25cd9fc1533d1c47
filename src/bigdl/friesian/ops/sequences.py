"""User histories, padded arrays and negative sampling.

Item ids go from 1 to ``item_size - 1``. To draw among the ids that remain after an exclusion, the
sampler draws an index j and steps over the excluded ids in ascending order. Every draw is exactly
uniform and takes constant time. Draws depend on the seed and on the position of the row (partition
and index in it).

Popularity sampling works in the same way. Every item has an integer number of tickets, and a draw
is the index of a ticket among the remaining ones. Tickets in proportion to a power of the counts,
usually 0.75, are the negatives of word2vec (Mikolov et al., "Distributed Representations of Words
and Phrases and their Compositionality", NIPS 2013).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import UsageError
from bigdl.friesian.ops import column_types, spark, vocabulary
from bigdl.friesian.ops.batches import dictionary_encoded, list_lengths, make_lists, normalized
from bigdl.friesian.ops.column_types import Field, Schema, require_columns, require_type
from bigdl.friesian.ops.operator import (
    Function,
    Operator,
    OutputColumn,
    OutputSchema,
    State,
    Statistic,
    TableOperator,
    register_operator,
)
from bigdl.friesian.ops.spark import F, check_string, col, dtype_of, schema_of
from bigdl.friesian.ops.vocabulary import LookUp
from bigdl.orca.cluster.versions import to_arrow

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from bigdl.friesian.ops.operator import State
    from bigdl.friesian.ops.spark import BroadcastValue

_ROWS = 1 << 16  # rows per output table: histories are much larger than their input
_ALL = 2147483647


# -- histories -------------------------------------------------------------------------------------


@register_operator
@dataclass(frozen=True)
class AddHistSeq(Operator):
    """Operator that implements ``add_hist_seq``; the executor ``arrow`` groups the rows by user."""

    cols: list[str]
    user_col: str
    sort_col: str
    min_len: int
    max_len: int
    num_seqs: int
    method = "add_hist_seq"
    executors = ("catalyst", "arrow")

    def __post_init__(self) -> None:
        check_string(self.user_col, "user_col")
        check_string(self.sort_col, "sort_col")
        check_integer("min_len", self.min_len, 0)
        check_integer("max_len", self.max_len, 1)
        check_integer("num_seqs", self.num_seqs, 1)

    def check(self, before: Schema) -> None:
        require_columns(before, self.columns)

    def after(self, before: Schema, state: State | None) -> Schema:
        columns = self._order(before)
        return {
            name: Field(f"array<{before[of].kind}>", before[of].cardinality) if of else before[name]
            for name, of in columns.items()
        }

    def _order(self, names: Iterable[str]) -> dict[str, str | None]:
        """Return the output columns in order, with the source column of each history, else None."""
        histories = {f"{name}_hist_seq": name for name in self.cols}
        order: dict[str, str | None] = {}
        for name in names:
            if name not in histories:
                order[name] = None
            if name in self.cols:
                order[f"{name}_hist_seq"] = name
        return order

    @property
    def columns(self) -> list[str]:
        """All columns that the operator reads."""
        return [*self.cols, self.user_col, self.sort_col]

    def catalyst(self, df: DataFrame, before: Schema, state: State | None) -> DataFrame:
        from pyspark.sql import Window

        require_columns(df.columns, self.columns)
        position, rank, history, later = (
            spark.unused_name(df, each) for each in ("position", "rank", "history", "later")
        )
        time = col(self.sort_col)
        time = spark.value_or_error(
            time, time.isNotNull(), self._nulls, dtype_of(df, self.sort_col)
        )
        # rows of equal time keep the input order
        window = Window.partitionBy(col(self.user_col)).orderBy(time, col(position))
        past = F.collect_list(F.struct(*(col(name).alias(name) for name in self.cols)))
        window_columns = {
            rank: F.row_number().over(window),
            history: past.over(window.rowsBetween(-self.max_len, -1)),
        }
        is_wanted = col(rank) > self.min_len
        if self.num_seqs < _ALL:
            window_columns[later] = F.lead(F.lit(1), self.num_seqs).over(window)
            is_wanted = is_wanted & col(later).isNull()
        rows = df.withColumn(position, F.monotonically_increasing_id()).withColumns(window_columns)
        rows = rows.filter(is_wanted)
        return rows.select(
            *(
                F.col(history).getField(of).alias(name) if of else col(name)
                for name, of in self._order(df.columns).items()
            )
        )

    def of_users(self, table: pa.Table) -> Iterator[pa.Table]:
        """Yield the output rows by user, then by time; `table` must have all rows of its users."""
        order, position, size = self._positions(table)
        wanted = np.flatnonzero((position >= self.min_len) & (position + self.num_seqs >= size))
        columns = self._order(table.column_names)
        arrays = {name: table[name].combine_chunks() for name in table.column_names}
        for start in range(0, max(len(wanted), 1), _ROWS):  # an empty table if no rows
            rows = wanted[start : start + _ROWS]
            lengths = np.minimum(position[rows], self.max_len)
            ends = np.cumsum(lengths)
            # input row index of every value of the concatenated histories
            source_rows = np.repeat(rows - ends, lengths) + np.arange(ends[-1] if len(ends) else 0)
            taken, items = pa.array(order[rows]), pa.array(order[source_rows])
            made = {
                name: make_lists(lengths, arrays[of].take(items))
                if of
                else arrays[name].take(taken)
                for name, of in columns.items()
            }
            yield pa.table(made)

    def _positions(self, table: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the row order by user and time, each row's rank, and the row count of its user.

        Rows of equal time keep their order.
        """
        user, time = (_ranks(table[name]) for name in (self.user_col, self.sort_col))
        order = np.lexsort((time, user))
        sizes = np.bincount(user)
        starts = np.cumsum(sizes) - sizes
        users = user[order]
        return order, np.arange(len(order)) - starts[users], sizes[users]

    def check_rows(self, table: pa.Table) -> None:
        """Raise a UsageError for rows with a null time; `table` can lack some rows of a user."""
        if table[self.sort_col].null_count:
            raise UsageError(self._nulls, code="data-null", column=self.sort_col)

    @property
    def _nulls(self) -> str:
        return f"The column {self.sort_col} has nulls; drop or fill them first"


def _ranks(column: pa.ChunkedArray) -> np.ndarray:
    """Return integers from 0 in the same order as the values; null also gets an integer."""
    if pa.types.is_integer(column.type) and not column.null_count:
        values = column.combine_chunks().to_numpy(zero_copy_only=False)
        low = int(values.min()) if len(values) else 0
        if len(values) and int(values.max()) - low < 4 * len(values):
            return (values - low).astype(np.int64)
    if column_types.is_fractional(column_types.of_arrow(column.type)):  # 0.0 and -0.0 are equal
        column = pc.add(column, pa.scalar(0.0, column.type))
    parts = dictionary_encoded(normalized(column))
    ranks = pc.rank(parts.values, tiebreaker="first").to_numpy().astype(np.int64) - 1
    return ranks[parts.codes]


# -- arrays of one length --------------------------------------------------------------------------


def _is_plain(items: pa.Array) -> bool:
    return not items.null_count and column_types.is_numeric(column_types.of_arrow(items.type))


def _lists_of_length(items: pa.Array, length: int) -> pa.Array:
    """Reshape a flat array into lists of equal length."""
    return make_lists(np.full(len(items) // length, length), items)


class MaskOfValues(Function):
    """Function that returns a mask of fixed length: 1 for each value of an array, then 0."""

    def __init__(self, length: int):
        self.length = length

    def array(self, values: pa.Array) -> pa.Array:
        is_value = np.arange(self.length) < list_lengths(values)[:, None]
        return _lists_of_length(pa.array(is_value.ravel().astype(np.int32)), self.length)

    def single(self, *input_types: str) -> Callable[..., Any]:
        return lambda value: [int(i < len(value or ())) for i in range(self.length)]

    def column(self, value: Column) -> Column:
        length = F.least(F.coalesce(F.size(value), F.lit(0)), F.lit(self.length))
        length = F.greatest(length, F.lit(0))  # size of null is −1 outside of ANSI mode
        zeros = F.array_repeat(F.lit(0), F.lit(self.length) - length)
        return F.concat(F.array_repeat(F.lit(1), length), zeros)


class Padded(Function):
    """Function that brings arrays to one length: pads at the end, or keeps the last values.

    Parameters
    ----------
    dtype : str
        Type of the array.
    length : int
    token : number, str or bool
        Value to pad with.
    row_len : int
        Width of padding rows of a matrix that has no first row.
    """

    def __init__(self, dtype: str, length: int, token: float | str, row_len: int):
        inner, depth = column_types.innermost(dtype)
        self.dtype, self.inner, self.length, self.row_len = dtype, inner, length, row_len
        self.has_rows = depth > 1
        is_whole = type(token) is float and token.is_integer() and column_types.is_integral(inner)
        self.token = column_types.coerce_value(
            int(token) if is_whole else token, inner, "mask_token"
        )

    def array(self, values: pa.Array) -> pa.Array:
        if self.has_rows:  # the padding depends on the row
            return pa.array(map(self._value, values.to_pylist()), column_types.to_arrow(self.dtype))
        items, lengths = values.flatten(), list_lengths(values)
        if _is_plain(items) and self.token is not None:
            filled = self._plain(items.to_numpy(zero_copy_only=False), lengths)
            return _lists_of_length(pa.array(filled, items.type), self.length)
        token = pa.array([self.token], items.type)
        ends = np.cumsum(lengths)[:, None]
        kept = np.minimum(lengths, self.length)[:, None]
        columns = np.arange(self.length)
        indices = np.where(columns < kept, ends - kept + columns, len(items))
        filled = pa.concat_arrays([items, token]).take(pa.array(indices.ravel()))
        return _lists_of_length(filled, self.length)

    def _plain(self, items: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Pad or truncate all arrays of non-null numbers at once; return the flat values."""
        if len(lengths) and lengths.max() > self.length:
            from_end = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(items))
            items = items[from_end <= self.length]
        padded = np.full((len(lengths), self.length), self.token, items.dtype)
        padded[np.arange(self.length) < lengths[:, None]] = items
        return padded.ravel()

    def single(self, *input_types: str) -> Callable[..., Any]:
        return self._value

    def _value(self, value: list | None) -> list:
        kept = list(value or ())[-self.length :]
        filler = self.token
        if self.has_rows:
            first = value[0] if value else None
            filler = [self.token] * (self.row_len if first is None else len(first))
        return kept + [filler] * (self.length - len(kept))

    def column(self, value: Column) -> Column:
        filler = F.lit(self.token).cast(self.inner)
        if self.has_rows:
            first = F.get(value, F.lit(0))
            width = F.when(first.isNotNull(), F.size(first)).otherwise(F.lit(self.row_len))
            filler = F.array_repeat(filler, width).cast(column_types.element_type(self.dtype))
        value = F.coalesce(value, F.array().cast(self.dtype))
        longest = F.slice(value, -self.length, self.length)
        value = F.when(F.size(value) > self.length, longest).otherwise(value)
        return F.concat(value, F.array_repeat(filler, F.lit(self.length) - F.size(value)))


@register_operator
@dataclass(frozen=True)
class Mask(Operator):
    """Operator that implements ``mask``."""

    columns: list[str]
    seq_len: int
    method = "mask"

    def __post_init__(self) -> None:
        check_integer("seq_len", self.seq_len, 1)

    def cells(self, before: Schema, state: State | None) -> list[OutputColumn]:
        require_type(before, self.columns, column_types.is_array, "arrays")
        made = Field("array<int>", 2, self.seq_len)
        ones = MaskOfValues(self.seq_len)
        return [OutputColumn((name,), f"{name}_mask", made, ones) for name in self.columns]


@register_operator
@dataclass(frozen=True)
class PadSequences(Operator):
    """Operator that implements ``pad``; a separate operator before it handles ``mask_cols``."""

    columns: list[str]
    seq_len: int
    mask_token: float | str | bool
    row_len: int
    method = "pad"

    def __post_init__(self) -> None:
        check_integer("seq_len", self.seq_len, 1)
        check_integer("row_len", self.row_len, 0)
        if not isinstance(self.mask_token, int | float | str):
            raise UsageError(
                f"mask_token should be a number, str or bool, but got {self.mask_token!r}",
                code="argument-type",
                argument="mask_token",
            )

    def cells(self, before: Schema, state: State | None) -> list[OutputColumn]:
        require_type(before, self.columns, column_types.is_array, "arrays")
        return [self._cell(name, before[name]) for name in self.columns]

    def _cell(self, name: str, field: Field) -> OutputColumn:
        _, depth = column_types.innermost(field.kind)
        if depth > 2:
            raise UsageError(
                f"{name} should hold arrays of one or two dimensions, but its type is {field.kind}",
                code="data-shape",
                column=name,
            )
        padded = Padded(field.kind, self.seq_len, self.mask_token, self.row_len)
        cardinality = field.cardinality
        if cardinality is not None:
            cardinality = max(cardinality, int(padded.token) + 1)
        return OutputColumn((name,), name, Field(field.kind, cardinality, self.seq_len), padded)


_TICKETS = 1 << 38  # total tickets; multiplied by the rows of a batch they fit in 64 bits


_ENCODED = "whole numbers", "; encode it first"


def _check_sizes(item_size: object, neg_num: object) -> None:
    if isinstance(item_size, bool) or not isinstance(item_size, int) or item_size < 3:
        raise UsageError(
            "item_size should be the largest item id plus 1, and at least 3 so that there is "
            f"another item to draw, but got {item_size!r}",
            code="argument-value",
            argument="item_size",
        )
    check_integer("neg_num", neg_num, 1)


def _other_than(item: Column, item_size: int, *keys: Column) -> Column:
    """Return a random item other than `item`; any item if `item` is null or not an item id."""
    is_item = item.isNotNull() & (item >= 1) & (item < item_size)
    bits = F.xxhash64(*keys)
    drawn = F.pmod(bits, F.lit(item_size - 2).cast("bigint")) + 1
    other = F.when(drawn >= item, drawn + 1).otherwise(drawn)
    any_item = F.pmod(bits, F.lit(item_size - 1).cast("bigint")) + 1
    return F.when(is_item, other).otherwise(any_item)


@register_operator
@dataclass(frozen=True)
class AddNegativeSamples(TableOperator):
    """Operator that implements ``add_negative_samples``."""

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

    def requests(self, before: Schema) -> dict[str, Statistic]:
        # popularity does not change the output columns, but would count the items
        return {"after": OutputSchema(tuple(before), replace(self, popularity=None))}

    def cardinality(self, name: str, state: State) -> int | None:
        known = {self.item_col: self.item_size, self.label_col: 2}
        return known.get(name) or super().cardinality(name, state)

    def catalyst(self, df: DataFrame, before: Schema, state: State | None) -> DataFrame:
        require_columns(df.columns, self.reads)
        dtype = dtype_of(df, self.item_col)
        require_type(schema_of(df), [self.item_col], column_types.is_integral, *_ENCODED)
        row, samples, history = (
            spark.unused_name(df, each) for each in ("row", "samples", "history")
        )
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
            lambda item: F.struct(item.cast(dtype).alias("item"), F.lit(0).alias("label")),
        )
        rows = rows.withColumn(samples, F.explode(F.concat(wrong, pair)))
        sample = {self.item_col: col(samples)["item"], self.label_col: col(samples)["label"]}
        return spark.replace(rows, sample).drop(row, samples, history)

    def _with_items(self, rows: DataFrame, user: Column, history: str) -> DataFrame:
        """Add to `rows` an array column `history` with all items of the row's user."""
        items = F.collect_set(col(self.item_col)).alias("items")
        known = rows.groupBy(user.alias("user")).agg(items)
        return vocabulary.join(
            rows, [LookUp(known, {"user": user}, {history: ("items", F.lit(None))})]
        )

    def _negatives(self, df: DataFrame, row: Column, histories: Sequence[Column]) -> Column:
        """Return an array column with the negative items drawn for each row."""
        item, size, key = col(self.item_col), self.item_size, F.lit(self.seed)
        draws = F.sequence(F.lit(1), F.lit(self.neg_num))
        if self.popularity is None and not histories:
            return F.transform(draws, lambda k: _other_than(item.cast("bigint"), size, key, row, k))
        tickets = np.ones(size, np.int64)
        tickets[0] = 0
        if self.popularity is not None:
            tickets = _tickets_of(df, self.item_col, size, self.popularity)
        bits = F.transform(draws, lambda k: F.xxhash64(key, row, k))
        drawn = partial(drawn_negatives, spark.broadcast_value(tickets, df.sparkSession))
        draw = spark.arrow_function(drawn, "array<bigint>")
        return draw(bits, _excluded(item, histories, size))


def _check_history(df: DataFrame, name: str) -> None:
    def holds_items(dtype: str) -> bool:
        return column_types.is_array(dtype) and column_types.is_integral(
            column_types.element_type(dtype)
        )

    require_type(schema_of(df), [name], holds_items, "arrays of whole numbers", _ENCODED[1])


def _excluded(item: Column, histories: Sequence[Column], item_size: int) -> Column:
    """Return the distinct item ids that must not be drawn, in ascending order."""
    none = F.array().cast("array<bigint>")
    every = F.concat(
        *(F.coalesce(history.cast("array<bigint>"), none) for history in histories),
        F.array(item.cast("bigint")),
    )
    every = F.filter(every, lambda each: each.isNotNull() & (each >= 1) & (each < item_size))
    return F.sort_array(F.array_distinct(every))


@register_operator
@dataclass(frozen=True)
class AddNegHistSeq(TableOperator):
    """Operator that implements ``add_neg_hist_seq``."""

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

    def catalyst(self, df: DataFrame, before: Schema, state: State | None) -> DataFrame:
        _check_history(df, self.item_history_col)
        row = spark.unused_name(df, "row")
        key = F.lit(self.seed)
        dtype = column_types.element_type(dtype_of(df, self.item_history_col))

        def others(item: Column, position: Column) -> Column:
            return F.transform(
                F.sequence(F.lit(1), F.lit(self.neg_num)),
                lambda k: _other_than(
                    item.cast("bigint"), self.item_size, key, col(row), position, k
                ).cast(dtype),
            )

        rows = df.withColumn(row, F.monotonically_increasing_id())
        history = col(self.item_history_col)
        added = {f"neg_{self.item_history_col}": F.transform(history, others)}
        return spark.replace(rows, added).drop(row)


@spark.action
def _tickets_of(df: DataFrame, item_col: str, item_size: int, popularity: float) -> np.ndarray:
    """Return each item's tickets: an integer weight proportional to count ** `popularity`.

    Returns
    -------
    ndarray of int64, shape (item_size,)
        0 for the id 0 and for items that the table does not contain.
    """
    item = col(item_col).cast("bigint")
    counted = df.filter((item >= 1) & (item < item_size)).groupBy(item.alias("item")).count()
    table = to_arrow(counted)
    counts = np.zeros(item_size, np.int64)
    counts[table["item"].to_numpy()] = table["count"].to_numpy()
    weights = np.where(counts > 0, counts, 1) ** float(popularity) * (counts > 0)
    total = weights.sum()
    return np.ceil(weights * (_TICKETS / max(total, 1.0))).astype(np.int64)


def drawn_negatives(
    shipped: BroadcastValue, bits: pa.ListArray, excluded: pa.ListArray
) -> pa.ListArray:
    """Draw an item for each random integer; rows whose items are all excluded get none.

    Parameters
    ----------
    shipped : broadcast of ndarray of int64
        Tickets of every item.
    bits : pyarrow.ListArray of int64
        Random integers of each row.
    excluded : pyarrow.ListArray of int64
        Items that must not be drawn: ascending, distinct, each with at least one ticket.
    """
    tickets = shipped.value
    ends = np.cumsum(tickets)
    begins, total = ends - tickets, int(ends[-1])
    row, item = _rows_and_values(excluded)
    # index of a ticket among the remaining ones = its index among all tickets minus the excluded
    # tickets before it; adding row * row_stride keeps the rows apart in one sorted array
    excluded_tickets = tickets[item]
    before = np.cumsum(excluded_tickets) - excluded_tickets
    first = np.searchsorted(row, np.arange(len(excluded)))
    padded = np.append(before, excluded_tickets.sum())
    free = begins[item] - (before - padded[first[row]])
    remaining = total - np.bincount(row, excluded_tickets, len(excluded)).astype(np.int64)
    row_stride = total + 1
    draw_row, random = _rows_and_values(bits)
    has_items = remaining[draw_row] > 0
    draw_row, random = draw_row[has_items], random[has_items]
    drawn = (random.view(np.uint64) % remaining[draw_row].astype(np.uint64)).astype(np.int64)
    index = np.searchsorted(row * row_stride + free, draw_row * row_stride + drawn, "right")
    skipped = padded[index] - padded[first[draw_row]]
    items = np.searchsorted(ends, drawn + skipped, "right")
    counts = np.bincount(draw_row, minlength=len(bits))
    return make_lists(counts, pa.array(items))


def _rows_and_values(lists: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """Flatten lists of numbers; return the row index of each value, and the values."""
    return np.repeat(np.arange(len(lists)), list_lengths(lists)), lists.flatten().to_numpy()
