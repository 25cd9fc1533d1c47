"""Helpers for Spark DataFrames: column names, types, expressions and joins.

Spark is imported on first use, because rows are also served on machines without Spark.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import reduce, wraps
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from bigdl.common.checks import check_integer
from bigdl.common.errors import UsageError
from bigdl.friesian.ops import column_types
from bigdl.friesian.ops.column_types import Field, require_type
from bigdl.orca.cluster import versions
from bigdl.orca.cluster.connect import ConnectValue
from bigdl.orca.cluster.spark_calls import silent_when_closed, users_errors
from bigdl.orca.data.transformer.encoding import as_names as as_names
from bigdl.orca.data.transformer.encoding import check_string as check_string
from bigdl.orca.data.xshards.frames import F as F
from bigdl.orca.data.xshards.frames import quoted as quoted

if TYPE_CHECKING:
    from pyspark import Broadcast
    from pyspark.sql import Column, DataFrame, Row, SparkSession

    from bigdl.common.types import ColumnNames


# -- arguments of users ----------------------------------------------------------------------------


def as_list(values: Sequence[Any]) -> list[Any]:
    """Return positional arguments as a list; unpack a single argument that is a list or tuple."""
    is_list = len(values) == 1 and isinstance(values[0], list | tuple)
    return list(values[0] if is_list else values)


def check_different(names: Sequence[str], what: str) -> None:
    """Raise a UsageError if a name occurs twice."""
    duplicates = duplicates_in(names)
    if duplicates:
        raise UsageError(
            f"{what} should differ from each other, but {duplicates} occur twice",
            code="column-duplicate",
            argument=what,
            columns=list(duplicates),
        )


def check_lengths(what: str, values: Sequence[Any], others: str, other_values: Sized) -> None:
    """Raise a UsageError unless two arguments have the same length."""
    if len(values) != len(other_values):
        raise UsageError(
            f"{what} and {others} should have the same length, but got {len(values)} and "
            f"{len(other_values)}",
            code="argument-value",
            argument=what,
        )


def check_new_names(names: Sequence[str], advice: str = "drop or rename the others") -> None:
    """Raise a UsageError if a result would have two columns with the same name."""
    duplicates = duplicates_in(names)
    if duplicates:
        raise UsageError(
            f"The result would have several columns {sorted(duplicates)}; {advice}",
            code="column-duplicate",
            columns=list(duplicates),
        )


def duplicates_in(names: Sequence[str]) -> list[str]:
    """Return the names that occur more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


def random_seed(seed: int | None) -> int:
    """Return `seed`, or draw a new seed if it is None.

    A fixed seed makes a lazy plan give the same values each time that Spark computes it.
    """
    return random.getrandbits(62) if seed is None else check_integer("seed", seed)


def is_column(value: object) -> bool:
    """Return True for a Column of classic Spark or of Spark Connect."""
    from pyspark.sql import Column

    return isinstance(value, Column)


def names_of(
    df: DataFrame, columns: ColumnNames, has_type: Callable[[str], bool], what: str
) -> list[str]:
    """Return column names as a list; raise unless the columns exist and have an accepted type.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    columns : str or list of str
    has_type : callable
        Such as :func:`column_types.is_number`.
    what : str
        Description of the type for the message, such as ``"numbers"``.
    """
    names = as_names(columns)
    require_type(schema_of(df), names, has_type, what)
    return names


def names_of_results(
    out_cols: Any, rows: int, columns: int, of_rows: str, of_columns: str
) -> list[list[str]]:
    """Arrange the user's output column names in a grid of `rows` by `columns`.

    Parameters
    ----------
    out_cols : str, list of str, or list of lists of str
        A flat list is one row, or one column.
    rows, columns : int
        Expected number of rows and columns.
    of_rows, of_columns : str
        Arguments that the rows and columns belong to, for the message.
    """
    grid = [out_cols] if isinstance(out_cols, str) else out_cols
    if isinstance(grid, list | tuple) and all(isinstance(each, str) for each in grid):
        grid = [grid] if rows == 1 else [[each] for each in grid]
    is_grid = isinstance(grid, list | tuple) and all(isinstance(row, list | tuple) for row in grid)
    sizes = [len(row) for row in grid] if is_grid else []
    names = [name for row in grid for name in row] if is_grid else []
    if sizes != [columns] * rows or not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"out_cols should have {rows} lists, one for each of {of_rows}, of {columns} names, "
            f"one for each of {of_columns}, but got {out_cols!r}",
            code="argument-value",
            argument="out_cols",
        )
    check_different(names, "out_cols")
    return [list(row) for row in grid]


# -- types -----------------------------------------------------------------------------------------


def active_spark() -> SparkSession:
    """Return the Spark session of the active context."""
    from bigdl.orca import OrcaContext

    return OrcaContext.get_spark_session()


def schema_of(df: DataFrame) -> dict[str, Field]:
    """Return the fields of a DataFrame by column name."""
    return {each.name: Field(each.dataType.simpleString()) for each in df.schema.fields}


def dtype_of(df: DataFrame, column: str) -> str:
    """Return the Spark type name of a column."""
    return df.schema[column].dataType.simpleString()


def numeric_columns(df: DataFrame) -> list[str]:
    """Return the names of the numeric columns."""
    return [name for name, field in schema_of(df).items() if column_types.is_number(field.kind)]


def require_times(df: DataFrame, name: str) -> None:
    """Raise a UsageError unless a column holds numbers, dates or timestamps."""
    check_string(name, "time_col")
    words = "numbers, dates or timestamps"
    require_type(schema_of(df), [name], column_types.is_time, words, "; cast it first")


# -- expressions -----------------------------------------------------------------------------------


def col(name: str) -> Column:
    """Return a column expression for a name that may contain dots or other special characters."""
    return F.col(quoted(name))


def all_of(conditions: Iterable[Column]) -> Column:
    """Combine conditions with AND."""
    return reduce(lambda a, b: a & b, conditions)


def is_missing(value: Column, dtype: str) -> Column:
    """Return a condition that is true for null and, if the type has it, for NaN."""
    return value.isNull() | F.isnan(value) if column_types.is_fractional(dtype) else value.isNull()


def without_nan(value: Column, dtype: str) -> Column:
    """Replace NaN by null if the type has NaN."""
    return F.when(~F.isnan(value), value) if column_types.is_fractional(dtype) else value


def value_or_error(value: Column, is_good: Column, message: str, dtype: str) -> Column:
    """Return `value` where the condition holds; elsewhere fail the job with `message`."""
    return F.when(is_good, value).otherwise(F.raise_error(F.lit(message)).cast(dtype))


def arrow_function(function: Callable, dtype: str) -> Callable[..., Column]:
    """Wrap a function of Arrow arrays as a function of Spark columns (an Arrow UDF)."""
    return versions.arrow_udf(silent_when_closed(function), dtype)


def as_number(time: Column, dtype: str) -> Column:
    """Convert a time column to numbers; dates and timestamps become seconds."""
    if column_types.is_number(dtype):
        return time.cast("bigint") if column_types.is_integral(dtype) else time
    return time.cast("timestamp").cast("double")


# -- DataFrames ------------------------------------------------------------------------------------


_Function = TypeVar("_Function", bound=Callable)
BroadcastValue: TypeAlias = "Broadcast[Any] | ConnectValue"
"""A broadcast value, of classic Spark or of Spark Connect."""


def action(function: _Function) -> _Function:
    """Wrap a method of a table or DataFrame to raise the original errors of user functions.

    See :func:`~bigdl.orca.cluster.spark_calls.users_errors`.
    """

    @wraps(function)
    def call(data: Any, *args: Any, **kwargs: Any) -> Any:
        # a Spark Connect DataFrame returns a column for any attribute name
        frame = data if hasattr(type(data), "sparkSession") else data.df
        session = frame.sparkSession
        with users_errors(getattr(session, "_sc", None)):
            return function(data, *args, **kwargs)

    return cast("_Function", call)


@action
def aggregate_values(df: DataFrame, aggregates: Sequence[Column]) -> list[Any]:
    """Compute aggregates over all rows of a DataFrame, and return their values."""
    named = [each.alias(str(i)) for i, each in enumerate(aggregates)]
    return list(cast("Row", df.agg(*named).first())) if named else []


def replace(df: DataFrame, columns: Mapping[str, Column]) -> DataFrame:
    """Replace and add columns at once; replaced columns keep their position, new ones come last."""
    kept = [columns[name].alias(name) if name in columns else col(name) for name in df.columns]
    added = [value.alias(name) for name, value in columns.items() if name not in df.columns]
    return df.select(*kept, *added)


def rename_columns(df: DataFrame, columns: Mapping[str, str]) -> DataFrame:
    """Rename columns of `df` at once, so that two columns can swap names."""
    new = {columns[name] for name in df.columns if name in columns}
    names = [columns.get(name, name) for name in df.columns]
    check_new_names([name for name in names if name in new])
    if new.isdisjoint(df.columns):
        return df.withColumnsRenamed(dict(columns))
    return df.toDF(*names)


def join_groups(df: DataFrame, groups: DataFrame, keys: Sequence[str], how: str) -> DataFrame:
    """Join `df` with rows of `groups` that have equal keys; null equals null."""
    known = [*df.columns, *groups.columns]
    hidden = {key: unused_name(known, f"key{i}") for i, key in enumerate(keys)}
    same = all_of(col(key).eqNullSafe(col(other)) for key, other in hidden.items())
    return df.join(groups.withColumnsRenamed(hidden), same, how).drop(*hidden.values())


def unused_name(df: DataFrame | Iterable[str], purpose: str) -> str:
    """Return a temporary column name that the table does not have."""
    taken = {name.lower() for name in cast("Iterable[str]", getattr(df, "columns", df))}
    name, number = f"__bigdl_{purpose}", 0
    while name.lower() in taken:
        number += 1
        name = f"__bigdl_{purpose}_{number}"
    return name


def broadcast_value(value: object, spark: SparkSession) -> BroadcastValue:
    """Broadcast a value; Spark sends it to each worker process once."""
    context = getattr(spark, "_sc", None)
    return ConnectValue.of(spark, value) if context is None else context.broadcast(value)
