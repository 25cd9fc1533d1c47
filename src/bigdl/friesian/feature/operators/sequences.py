"""Histories of users, and arrays: masks, padding, samples of lists, differences along an order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.columns import (
    as_names,
    check_count,
    col,
    is_array,
    is_integral,
    is_numeric,
    is_textual,
    names_of,
    names_of_results,
    random_seed,
    replace,
    require_columns,
    temporary,
    type_of,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

__all__ = ["add_hist_seq", "difference_lag", "mask", "pad", "sample_listwise"]

_ALL = 2147483647


def add_hist_seq(
    df: DataFrame,
    columns: Any,
    user_col: str,
    sort_col: str,
    min_len: int,
    max_len: int,
    num_seqs: int,
) -> DataFrame:
    """What a user did before each record; see :meth:`FeatureTable.add_hist_seq`."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    names = as_names(columns, "cols")
    require_columns(df, [*names, user_col, sort_col])
    check_count(min_len, "min_len", 0)
    check_count(max_len, "max_len", 1)
    check_count(num_seqs, "num_seqs", 1)
    place, rank, history, later = (
        temporary(df, each) for each in ("place", "rank", "history", "later")
    )
    time = F.when(col(sort_col).isNotNull(), col(sort_col)).otherwise(
        F.raise_error(F.lit(f"The column {sort_col} has nulls; drop or fill them first")).cast(
            type_of(df, sort_col)
        )
    )
    # records of equal time keep the order of the input
    window = Window.partitionBy(col(user_col)).orderBy(time, col(place))
    past = F.collect_list(F.struct(*(col(name).alias(name) for name in names)))
    rows = df.withColumn(place, F.monotonically_increasing_id()).withColumns(
        {
            rank: F.row_number().over(window),
            history: past.over(window.rowsBetween(-max_len, -1)),
        }
        | ({later: F.lead(F.lit(1), num_seqs).over(window)} if num_seqs < _ALL else {})
    )
    rows = rows.filter(col(rank) > min_len)
    if num_seqs < _ALL:
        rows = rows.filter(col(later).isNull())
    shown, added = [], {f"{name}_hist_seq" for name in names}
    for name in df.columns:
        if name not in added:
            shown.append(col(name))
        if name in names:
            shown.append(F.col(history).getField(name).alias(f"{name}_hist_seq"))
    return rows.select(*shown)


def mask(df: DataFrame, columns: Any, seq_len: int) -> DataFrame:
    """Ones for what an array has and zeros for the rest, in new columns ``<column>_mask``."""
    from pyspark.sql import functions as F

    names = names_of(df, columns, is_array, "arrays", "mask_cols")
    check_count(seq_len, "seq_len", 1)

    def ones(name: str) -> Column:
        length = F.least(F.coalesce(F.size(col(name)), F.lit(0)), F.lit(seq_len))
        length = F.greatest(length, F.lit(0))  # size of null is −1 outside of ANSI mode
        zeros = F.array_repeat(F.lit(0), F.lit(seq_len) - length)
        return F.concat(F.array_repeat(F.lit(1), length), zeros)

    return replace(df, {f"{name}_mask": ones(name) for name in names})


def pad(df: DataFrame, columns: Any, seq_len: int, mask_token: Any, row_len: int) -> DataFrame:
    """Arrays of one length; see :meth:`FeatureTable.pad`."""
    from pyspark.sql import functions as F

    names = names_of(df, columns, is_array, "arrays", "cols")
    check_count(seq_len, "seq_len", 1)
    check_count(row_len, "row_len", 0)

    def padded(name: str) -> Column:
        kind = type_of(df, name)
        empty = F.array().cast(kind)
        value = F.coalesce(col(name), empty)
        value = F.when(F.size(value) > seq_len, F.slice(value, -seq_len, seq_len)).otherwise(value)
        missing = F.lit(seq_len) - F.size(value)
        return F.concat(value, F.array_repeat(_filler(name, kind, mask_token, row_len), missing))

    return replace(df, {name: padded(name) for name in names})


def _filler(name: str, kind: DataType, token: Any, row_len: int) -> Column:
    """What an array of this type is filled with: the token, or a row of it as wide as the first."""
    from pyspark.sql import functions as F

    element = kind.elementType
    if not is_array(element):
        _check_token(token, element)
        return F.lit(token).cast(element)
    if is_array(element.elementType):
        raise UsageError(
            f"{name} should hold arrays of one or two dimensions, but its type is "
            f"{kind.simpleString()}"
        )
    _check_token(token, element.elementType)
    first = F.get(col(name), F.lit(0))
    width = F.when(first.isNotNull(), F.size(first)).otherwise(F.lit(row_len))
    return F.array_repeat(F.lit(token).cast(element.elementType), width).cast(element)


def _check_token(token: Any, element: DataType) -> None:
    fits = (
        (isinstance(token, str) and is_textual(element))
        or (type(token) is int and is_numeric(element))
        or (type(token) is float and is_numeric(element) and not is_integral(element))
        or (type(token) is float and is_integral(element) and token.is_integer())
        or (isinstance(token, bool) and element.typeName() == "boolean")
    )
    if not fits:
        java = {str: "String", bool: "Boolean", int: "Integer", float: "Double"}
        given = f"java.lang.{java.get(type(token), type(token).__name__)}"
        raise UsageError(
            f"Failed to convert mask_token type {given} to the element type of column "
            f"java.lang.{element.typeName().capitalize()}"
        )


def difference_lag(
    df: DataFrame,
    columns: Any,
    sort_cols: Any,
    shifts: Any,
    partition_cols: Any,
    out_cols: Any,
) -> DataFrame:
    """Differences to earlier or later rows; see :meth:`FeatureTable.difference_lag`."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    names, order = as_names(columns), as_names(sort_cols, "sort_cols")
    groups = [] if partition_cols is None else as_names(partition_cols, "partition_cols")
    require_columns(df, [*names, *order, *groups])
    for name in names:
        if not is_numeric(type_of(df, name)):
            raise UsageError(
                f"columns should be numeric, but {name} is {type_of(df, name).simpleString()}"
            )
    steps = list(shifts) if isinstance(shifts, list | tuple) else [shifts]
    if not steps or not all(type(step) is int for step in steps):
        raise UsageError(f"shifts should be int or a list of int, but got {shifts!r}")
    outputs = _difference_names(names, order, steps, out_cols)
    place = temporary(df, "place")
    keys = groups or [temporary(df, "group")]
    rows = df.withColumn(place, F.monotonically_increasing_id())
    if not groups:
        rows = rows.withColumn(keys[0], F.lit(0))
    window = Window.partitionBy(*map(col, keys)).orderBy(*map(col, order), place)
    differences = {
        outputs[i][j]: (col(name) - F.lag(col(name), step).over(window)).cast(type_of(df, name))
        for i, name in enumerate(names)
        for j, step in enumerate(steps)
    }
    return replace(rows, differences).drop(place, *(key for key in keys if key not in groups))


def _difference_names(
    names: list[str], order: list[str], steps: list[int], out_cols: Any
) -> list[list[str]]:
    """The name of the difference of each column (first index) by each step."""
    if out_cols is None:
        prefix = "_".join(order) + "_diff_lag"
        return [[f"{prefix}_{name}_{step}" for step in steps] for name in names]
    return names_of_results(out_cols, len(names), len(steps), "columns", "shifts")


def sample_listwise(
    df: DataFrame,
    columns: Any,
    num_sampled_list: int,
    num_sampled_item: int,
    random_seed_: int | None,
    replaced: bool,
) -> DataFrame:
    """Samples of the items of lists; see :meth:`FeatureTable.sample_listwise`."""
    from pyspark.sql import functions as F

    names = as_names(columns)
    for name in names:
        if name not in df.columns:
            raise UsageError(f"{name} does not exist in this FeatureTable.")
        if not is_array(type_of(df, name)):
            raise UsageError(
                f"Each column should be of list type, but {name} is "
                f"{type_of(df, name).simpleString()}"
            )
    check_count(num_sampled_list, "num_sampled_list", 1)
    check_count(num_sampled_item, "num_sampled_item", 1)
    seed = random_seed(random_seed_)
    row, draw, places = (temporary(df, each) for each in ("row", "draw", "places"))
    rows = df.withColumn(row, F.monotonically_increasing_id())
    long_enough = F.size(col(names[0])) >= num_sampled_item
    if len(names) > 1:
        lengths = F.array(*(F.coalesce(F.size(col(name)), F.lit(-1)) for name in names))
        equal = F.array_min(lengths) == F.array_max(lengths)
        message = "Each row of the FeatureTable should have the same array length in all of columns"
        long_enough = F.when(equal, long_enough).otherwise(
            F.raise_error(F.lit(message)).cast("boolean")
        )
    rows = rows.filter(long_enough)
    rows = rows.withColumn(draw, F.explode(F.sequence(F.lit(1), F.lit(num_sampled_list))))
    # sorted by a random number each, the first items are a sample without replacement
    key = F.lit(seed)
    numbers = F.transform(
        F.sequence(F.lit(0), F.size(col(names[0])) - 1),
        lambda place: F.struct(F.xxhash64(key, col(row), col(draw), place), place.alias("at")),
    )
    chosen = F.slice(F.sort_array(numbers), 1, num_sampled_item)["at"]
    rows = rows.withColumn(places, chosen)

    def at_places(name: str) -> Column:
        return F.transform(col(places), lambda place: F.get(col(name), place))

    samples = {name if replaced else f"sampled_{name}": at_places(name) for name in names}
    return replace(rows, samples).drop(row, draw, places)
