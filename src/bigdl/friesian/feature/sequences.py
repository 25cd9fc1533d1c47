"""Histories of users as padded arrays, for sequence models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import UsageError
from bigdl.friesian.metrics.tables import id_type
from bigdl.friesian.ops.column_types import require_columns
from bigdl.friesian.ops.schema import Feature, FeatureSchema
from bigdl.friesian.ops.spark import F, as_number, col, dtype_of, require_times
from bigdl.orca.cluster.versions import frame_of_arrow, to_arrow

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["SequenceTable", "sequence_schema", "sequences_of"]

ITEMS, TIMES, NEXT, SEEN = "item_seq", "time_seq", "next_seq", "seen"


@dataclass(frozen=True)
class SequenceTable:
    """Histories of users as padded arrays, built by :meth:`FeatureTable.sequences`.

    Attributes
    ----------
    df : pyspark.sql.DataFrame
        Training rows: the user, ``item_seq`` and ``time_seq`` (item ids and times in seconds, the
        oldest first), and ``next_seq``, the item after each position. All arrays have `max_len`
        values and are padded with 0 at the end.
    histories : pyspark.sql.DataFrame
        One row per user: ``item_seq`` and ``time_seq`` with the newest events, to predict the next
        item, and ``seen``, all items of the user.
    items : pyarrow.Array
        The item of each id from 1, in ascending order.
    max_len : int
    user_col, item_col : str
        Columns of the interactions.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> clicks = pd.DataFrame({"user": [7, 7, 7], "item": ["a", "c", "b"], "time": [10, 20, 30]})
    >>> table = FeatureTable.from_pandas(clicks).sequences("user", "item", "time", max_len=3)
    >>> row = table.df.first()
    >>> row.item_seq, row.next_seq, table.items.to_pylist()
    ([1, 3, 0], [3, 2, 0], ['a', 'b', 'c'])
    """

    df: DataFrame
    histories: DataFrame
    items: pa.Array
    max_len: int
    user_col: str = "user"
    item_col: str = "item"

    @property
    def schema(self) -> FeatureSchema:
        """Sizes for the models: the number of ids, and the length of the histories."""
        return sequence_schema(len(self.items), self.max_len)


def sequence_schema(items: int, max_len: int) -> FeatureSchema:
    """Return the schema of sequences over a number of items."""
    ids = Feature("int", items + 1, (max_len,))
    return FeatureSchema({ITEMS: ids, TIMES: Feature("bigint", None, (max_len,)), NEXT: ids})


def sequences_of(
    df: DataFrame,
    user: str,
    item: str,
    time: str,
    *,
    max_len: int,
    order_by: Sequence[str] | None,
    windows: str,
    items: pa.Array | None,
) -> SequenceTable:
    """Build the SequenceTable of a DataFrame; see :meth:`FeatureTable.sequences`."""
    check_positive("max_len", max_len)
    check_choice("windows", windows, ("last", "all"))
    ties = [item] if order_by is None else list(order_by)
    require_columns(df.columns, [user, item, time, *ties])
    require_times(df, time)
    df = df.select(
        col(user).alias("user"),
        col(item).alias("item"),
        as_number(col(time), dtype_of(df, time)).alias("time"),
        *(col(name).alias(f"tie{number}") for number, name in enumerate(ties)),
    )
    vocabulary = _distinct(df, item) if items is None else items
    numbers = pa.array(range(1, len(vocabulary) + 1), pa.int32())
    codes = frame_of_arrow(df.sparkSession, pa.table({"item": vocabulary, "id": numbers}))
    event = F.struct(
        "time", *(f"tie{number}" for number in range(len(ties))), F.col("id").alias("id")
    )
    users = (
        df.join(codes, "item").groupBy("user").agg(F.sort_array(F.collect_list(event)).alias("e"))
    )
    users = users.select(
        "user",
        F.transform("e", lambda each: each["id"]).alias("id"),
        F.transform("e", lambda each: F.floor(each["time"]).cast("bigint")).alias("time"),
        F.size("e").alias("n"),
    )
    newest = F.greatest(F.col("n") - max_len, F.lit(0)) + 1
    histories = users.select(
        F.col("user").alias(user),
        _padded(F.slice("id", newest, F.lit(max_len)), max_len, "int").alias(ITEMS),
        _padded(F.slice("time", newest, F.lit(max_len)), max_len, "bigint").alias(TIMES),
        F.array_distinct("id").alias(SEEN),
    )
    # Window i ends i * max_len events before the newest. The first event of a window is also the
    # last of the older one, so that each event is a target once.
    count = F.ceil((F.col("n") - 1) / max_len).cast("int") if windows == "all" else F.lit(1)
    rows = users.filter("n > 1").select(
        "*", F.explode(F.sequence(F.lit(0), count - 1)).alias("window")
    )
    end = F.col("n") - F.col("window") * max_len
    start = F.greatest(end - max_len, F.lit(1))
    training = rows.select(
        F.col("user").alias(user),
        _padded(F.slice("id", start, end - start), max_len, "int").alias(ITEMS),
        _padded(F.slice("time", start, end - start), max_len, "bigint").alias(TIMES),
        _padded(F.slice("id", start + 1, end - start), max_len, "int").alias(NEXT),
    )
    return SequenceTable(training, histories, vocabulary, max_len, user, item)


def _padded(values: Column, length: int, dtype: str) -> Column:
    zeros = F.array_repeat(F.lit(0).cast(dtype), F.lit(length) - F.size(values))
    return F.concat(values, zeros)


def _distinct(df: DataFrame, name: str) -> pa.Array:
    """Return the distinct items in ascending order; check the columns for nulls."""
    nulls = df.agg(*(F.count_if(F.col(each).isNull()) for each in ("user", "item", "time"))).first()
    for column, count in zip(("user", name, "time"), nulls or (), strict=False):
        if count:
            raise UsageError(
                f"Column {column!r} has {count} nulls; drop those rows",
                code="data-null",
                column=column,
            )
    values = to_arrow(df.select("item").distinct())["item"].combine_chunks()
    if not len(values):
        raise UsageError("There are no rows to build sequences from", code="data-empty")
    id_type(values.type, "the table", name)
    ordered: pa.Array = values.take(pc.sort_indices(values))
    return ordered
