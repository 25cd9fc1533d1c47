"""Columns of DataFrames of Spark: names that users give, their types, new columns in their place.

Spark is imported when something here is used: rows are served where there is no Spark.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

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
    from pyspark.sql import Column, DataFrame, Row, SparkSession


# -- what users give -------------------------------------------------------------------------------


def listed(values: Sequence[Any]) -> list[Any]:
    """Return positional arguments, which may be one list, as a list."""
    is_list = len(values) == 1 and isinstance(values[0], list | tuple)
    return list(values[0] if is_list else values)


def check_different(names: Sequence[str], what: str) -> None:
    """Check that no two results have one name: one of them would be lost."""
    twins = twins_in(names)
    if twins:
        raise UsageError(
            f"{what} should differ from each other, but {twins} are there twice",
            code="column-duplicate",
            argument=what,
            columns=list(twins),
        )


def check_lengths(what: str, values: Sequence[Any], others: str, other_values: Any) -> None:
    """Check that two arguments have the same length."""
    if len(values) != len(other_values):
        raise UsageError(
            f"{what} and {others} should have the same length, but got {len(values)} and "
            f"{len(other_values)}",
            code="argument-value",
            argument=what,
        )


def check_new_names(names: Sequence[str], advice: str = "drop or rename the others") -> None:
    """Check that no two columns of a table have one name."""
    twins = twins_in(names)
    if twins:
        raise UsageError(
            f"There would be several columns {sorted(twins)}; {advice}",
            code="column-duplicate",
            columns=list(twins),
        )


def twins_in(names: Sequence[str]) -> list[str]:
    """The names that are there several times."""
    return [name for name, count in Counter(names).items() if count > 1]


def random_seed(seed: int | None) -> int:
    """`seed`, or a new one, so that a plan gives the same values whenever it is computed again."""
    return random.getrandbits(62) if seed is None else check_integer("seed", seed)


def is_column(value: object) -> bool:
    """Return True for a Column of Spark, of either of its two clients."""
    from pyspark.sql import Column

    return isinstance(value, Column)


def names_of(df: DataFrame, columns: Any, has_type: Callable[[str], bool], kind: str) -> list[str]:
    """Names of columns that exist and are of one kind.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    columns : str or list of str
    has_type : callable
        Such as :func:`column_types.is_number`.
    kind : str
        What a message calls it, such as ``"numbers"``.
    """
    names = as_names(columns)
    require_type(schema_of(df), names, has_type, kind)
    return names


def names_of_results(
    out_cols: Any, rows: int, columns: int, of_rows: str, of_columns: str
) -> list[list[str]]:
    """Names that a user gives to results which have two indices.

    Parameters
    ----------
    out_cols : str, list of str, or list of lists of str
        A flat list is one row, or one column.
    rows, columns : int
        How many of each there should be.
    of_rows, of_columns : str
        The arguments that they belong to, for the message.
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
    """The session of the active context."""
    from bigdl.orca import OrcaContext

    return OrcaContext.get_spark_session()


def schema_of(df: DataFrame) -> dict[str, Field]:
    """Return the fields of a DataFrame."""
    return {each.name: Field(each.dataType.simpleString()) for each in df.schema.fields}


def kind_of(df: DataFrame, column: str) -> str:
    """Return the type of a column, as Spark writes it."""
    return df.schema[column].dataType.simpleString()


def numeric_columns(df: DataFrame) -> list[str]:
    """Names of the columns of numbers."""
    return [name for name, field in schema_of(df).items() if column_types.is_number(field.kind)]


def require_times(df: DataFrame, name: str) -> None:
    """Check that a column holds times."""
    check_string(name, "time_col")
    words = "numbers, dates or timestamps"
    require_type(schema_of(df), [name], column_types.is_time, words, "; cast it first")


# -- expressions -----------------------------------------------------------------------------------


def col(name: str) -> Column:
    """The column of exactly this name, whatever characters it has."""
    return F.col(quoted(name))


def all_of(conditions: Iterable[Column]) -> Column:
    """True where all conditions hold."""
    return reduce(lambda a, b: a & b, conditions)


def is_missing(value: Column, kind: str) -> Column:
    """True for null, and for NaN of a kind that knows it."""
    return value.isNull() | F.isnan(value) if column_types.is_fractional(kind) else value.isNull()


def without_nan(value: Column, kind: str) -> Column:
    """The values of a kind, with null in the place of NaN."""
    return F.when(~F.isnan(value), value) if column_types.is_fractional(kind) else value


def or_error(value: Column, is_good: Column, message: str, kind: str) -> Column:
    """`value` of a kind where a condition holds; elsewhere the job fails."""
    return F.when(is_good, value).otherwise(F.raise_error(F.lit(message)).cast(kind))


def arrow_function(function: Callable, kind: str) -> Callable[..., Column]:
    """A function of arrays of Arrow as one of columns."""
    return versions.arrow_udf(silent_when_closed(function), kind)


def as_number(time: Column, kind: str) -> Column:
    """Times as numbers: in seconds unless they are numbers."""
    if column_types.is_number(kind):
        return time.cast("bigint") if column_types.is_integral(kind) else time
    return time.cast("timestamp").cast("double")


# -- DataFrames ------------------------------------------------------------------------------------


_Function = TypeVar("_Function", bound=Callable)


def action(function: _Function) -> _Function:
    """A function or method of a table or DataFrame that raises what a function of the user raises.

    What it raises is that of :func:`~bigdl.orca.cluster.spark_calls.users_errors`.
    """

    @wraps(function)
    def call(data: Any, *args: Any, **kwargs: Any) -> Any:
        # a DataFrame of Spark Connect has an attribute of every name: a column
        frame = data if hasattr(type(data), "sparkSession") else data.df
        session = frame.sparkSession
        with users_errors(getattr(session, "_sc", None)):
            return function(data, *args, **kwargs)

    return cast("_Function", call)


@action
def figures_of(df: DataFrame, figures: Sequence[Column]) -> list[Any]:
    """The values of some aggregates of all rows."""
    named = [each.alias(str(i)) for i, each in enumerate(figures)]
    return list(cast("Row", df.agg(*named).first())) if named else []


def replace(df: DataFrame, columns: Mapping[str, Column]) -> DataFrame:
    """New values for columns, all at once; those that exist keep their place, others come last."""
    kept = [columns[name].alias(name) if name in columns else col(name) for name in df.columns]
    added = [value.alias(name) for name, value in columns.items() if name not in df.columns]
    return df.select(*kept, *added)


def renamed(df: DataFrame, columns: Mapping[str, str]) -> DataFrame:
    """`df` with new names for columns, all at once, so that two can swap theirs."""
    new = {columns[name] for name in df.columns if name in columns}
    names = [columns.get(name, name) for name in df.columns]
    check_new_names([name for name in names if name in new])
    if new.isdisjoint(df.columns):
        return df.withColumnsRenamed(dict(columns))
    return df.toDF(*names)


def join_groups(df: DataFrame, groups: DataFrame, keys: Sequence[str], how: str) -> DataFrame:
    """`df` joined with the rows of another that have equal keys; nulls are equal."""
    known = [*df.columns, *groups.columns]
    hidden = {key: temporary(known, f"key{i}") for i, key in enumerate(keys)}
    same = all_of(col(key).eqNullSafe(col(other)) for key, other in hidden.items())
    return df.join(groups.withColumnsRenamed(hidden), same, how).drop(*hidden.values())


def temporary(df: DataFrame | Iterable[str], purpose: str) -> str:
    """A column name that the table has not, for the time of an operator."""
    taken = {name.lower() for name in cast("Iterable[str]", getattr(df, "columns", df))}
    name, number = f"__bigdl_{purpose}", 0
    while name.lower() in taken:
        number += 1
        name = f"__bigdl_{purpose}_{number}"
    return name


def shared(value: Any, spark: Any) -> Any:
    """A broadcast: Spark sends the value to each worker once, whose process unpacks it once."""
    context = getattr(spark, "_sc", None)
    return ConnectValue.of(spark, value) if context is None else context.broadcast(value)
