"""Random items that a user did not choose, drawn without rejection.

Item numbers go from 1 to ``item_size - 1``.  The j-th of the numbers that are left when some are
excluded is found by stepping over the excluded ones in ascending order, so that every draw is
exactly uniform and takes a fixed time.  Draws depend on the seed and on the place of the row
(partition and position in it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.columns import (
    check_string,
    col,
    is_array,
    is_integral,
    names_of,
    random_seed,
    replace,
    require_columns,
    temporary,
    type_of,
)
from bigdl.friesian.feature.operators.popularity import (
    check_popularity,
    popular_draws,
    tickets_of,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

__all__ = ["add_neg_hist_seq", "add_negative_samples", "check_sizes"]


def check_sizes(item_size: Any, neg_num: Any) -> None:
    """Check how many items there are and how many are drawn."""
    if isinstance(item_size, bool) or not isinstance(item_size, int) or item_size < 3:
        raise UsageError(
            "item_size should be the largest item number plus 1, and at least 3 for there to be "
            f"another item, but got {item_size!r}"
        )
    if isinstance(neg_num, bool) or not isinstance(neg_num, int) or neg_num < 1:
        raise UsageError(f"neg_num should be an integer from 1 on, got {neg_num!r}")


def _check_items(name: str, kind: DataType) -> None:
    if not is_integral(kind):
        raise UsageError(
            f"{name} should hold whole numbers, but its type is {kind.simpleString()}; encode it "
            "first"
        )


def _uniform(count: Column | int, *keys: Any) -> Column:
    """A whole number from 0 to `count` − 1, by 64 random bits."""
    from pyspark.sql import functions as F

    return F.pmod(F.xxhash64(*keys), F.lit(count).cast("bigint"))


def _other_than(item: Column, item_size: int, *keys: Any) -> Column:
    """A random item other than this one; any item if this one is null or none of the numbers."""
    from pyspark.sql import functions as F

    is_item = item.isNotNull() & (item >= 1) & (item < item_size)
    drawn = _uniform(item_size - 2, *keys) + 1
    other = F.when(drawn >= item, drawn + 1).otherwise(drawn)
    return F.when(is_item, other).otherwise(_uniform(item_size - 1, *keys) + 1)


def add_negative_samples(
    df: DataFrame,
    item_size: int,
    item_col: str,
    label_col: str,
    neg_num: int,
    seed: int | None,
    exclude_history_col: str | None,
    user_col: str | None = None,
    popularity: float | None = None,
) -> DataFrame:
    """Rows with random items; see :meth:`FeatureTable.add_negative_samples`."""
    from pyspark.sql import functions as F

    check_sizes(item_size, neg_num)
    check_string(label_col, "label_col")
    require_columns(df, [item_col])
    kind = type_of(df, item_col)
    _check_items(item_col, kind)
    row, samples, history = (temporary(df, each) for each in ("row", "samples", "history"))
    rows = df.withColumn(row, F.monotonically_increasing_id())
    histories = []
    if exclude_history_col is not None:
        _check_history(df, exclude_history_col)
        histories.append(col(exclude_history_col))
    if user_col is not None:
        rows = _with_items_of_user(rows, check_string(user_col, "user_col"), item_col, history)
        histories.append(col(history))
    excluded = _excluded(col(item_col), histories, item_size)
    key = F.lit(random_seed(seed))
    draws = F.sequence(F.lit(1), F.lit(neg_num))
    if popularity is not None:
        check_popularity(popularity)
        tickets = tickets_of(df, item_col, item_size, popularity)
        bits = F.transform(draws, lambda k: F.xxhash64(key, col(row), k))
        negatives = popular_draws(tickets, df, bits, excluded)
    elif not histories:
        negatives = F.transform(
            draws, lambda k: _other_than(col(item_col).cast("bigint"), item_size, key, col(row), k)
        )
    else:
        negatives = F.transform(
            draws, lambda k: _other_than_all(excluded, item_size, key, col(row), k)
        )
        negatives = F.filter(negatives, lambda item: item.isNotNull())
    pair = F.array(F.struct(col(item_col).alias("item"), F.lit(1).alias("label")))
    wrong = F.transform(
        negatives, lambda item: F.struct(item.cast(kind).alias("item"), F.lit(0).alias("label"))
    )
    rows = rows.withColumn(samples, F.explode(F.concat(wrong, pair)))
    sample = {item_col: col(samples)["item"], label_col: col(samples)["label"]}
    return replace(rows, sample).drop(row, samples, history)


def _with_items_of_user(rows: DataFrame, user_col: str, item_col: str, history: str) -> DataFrame:
    """`rows` with a column of all items that the table has of the user of each."""
    from pyspark.sql import functions as F

    require_columns(rows, [user_col])
    user = temporary(rows, "user")
    known = rows.groupBy(col(user_col).alias(user)).agg(F.collect_set(col(item_col)).alias(history))
    return rows.join(known, col(user_col) == col(user), "left").drop(user)


def _check_history(df: DataFrame, name: str) -> None:
    names_of(df, name, is_array, "arrays", "exclude_history_col")
    _check_items(name, type_of(df, name).elementType)


def _excluded(item: Column, histories: Sequence[Column], item_size: int) -> Column:
    """Ascending and different numbers of items that must not be drawn."""
    from pyspark.sql import functions as F

    none = F.array().cast("array<bigint>")
    every = F.concat(
        *(F.coalesce(history.cast("array<bigint>"), none) for history in histories),
        F.array(item.cast("bigint")),
    )
    every = F.filter(every, lambda each: each.isNotNull() & (each >= 1) & (each < item_size))
    return F.sort_array(F.array_distinct(every))


def _other_than_all(excluded: Column, item_size: int, *keys: Any) -> Column:
    from pyspark.sql import functions as F

    left = F.lit(item_size - 1) - F.size(excluded)
    drawn = _uniform(F.greatest(left, F.lit(1)), *keys) + 1
    stepped = F.aggregate(
        excluded, drawn, lambda found, item: F.when(item <= found, found + 1).otherwise(found)
    )
    return F.when(left > 0, stepped)


def add_neg_hist_seq(
    df: DataFrame, item_size: int, item_history_col: str, neg_num: int, seed: int | None
) -> DataFrame:
    """Random items for each item of a history; see :meth:`FeatureTable.add_neg_hist_seq`."""
    from pyspark.sql import functions as F

    check_sizes(item_size, neg_num)
    _check_history(df, item_history_col)
    row = temporary(df, "row")
    key = F.lit(random_seed(seed))
    kind = type_of(df, item_history_col)

    def others(item: Column, place: Column) -> Column:
        return F.transform(
            F.sequence(F.lit(1), F.lit(neg_num)),
            lambda k: _other_than(item.cast("bigint"), item_size, key, col(row), place, k).cast(
                kind.elementType
            ),
        )

    rows = df.withColumn(row, F.monotonically_increasing_id())
    added = {f"neg_{item_history_col}": F.transform(col(item_history_col), others)}
    return replace(rows, added).drop(row)
