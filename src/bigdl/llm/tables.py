"""Functions of text columns, applied to every type of table: rows, their order and columns stay."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np

from bigdl.common.errors import LazyModule, UsageError, type_name
from bigdl.llm.engine import ModelReference
from bigdl.llm.sent_files import sent_files
from bigdl.runtime.cluster import Broadcaster

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
else:
    pa = LazyModule("pyarrow", "llm")
    pd = LazyModule("pandas", "llm")

T = TypeVar("T")
Columns = Mapping[str, Sequence[Any]]
Pending = Callable[[], Mapping[str, Any]]

_TEXT_TYPES = ("string", "varchar", "char")


class ColumnFunction(Protocol):
    """A picklable function that adds columns to rows.

    Attributes
    ----------
    inputs : list of str
        Columns that it reads.
    outputs : dict of str to str
        Names and Spark types of the columns that it adds.
    window : int
        Rows that one call should get.
    model : ModelReference
    """

    inputs: list[str]
    outputs: dict[str, str]
    window: int
    model: ModelReference

    def start(self, columns: Columns) -> Pending:
        """Start the computation of rows; return a function that waits for the added columns.

        Strings may be given as bytes in UTF-8, which may be invalid.
        """


def apply(data: T, function: ColumnFunction) -> T:
    """Add the columns of a function to a table, and return a table of the same type.

    Parameters
    ----------
    data : pandas.DataFrame, pyarrow.Table, pyarrow.RecordBatch, pyspark.sql.DataFrame, XShards \
or ray.data.Dataset
    function : ColumnFunction

    Raises
    ------
    UsageError
        If the type is not supported, a column is missing, or an output column exists.
    """
    source: Any = data
    if isinstance(source, FunctionCapture):
        source.function = function
        return data
    modules = {each.__module__.partition(".")[0] for each in type(source).__mro__}
    if "pandas" in modules and hasattr(source, "columns"):
        return cast("T", _apply_to_pandas(source, function))
    if "pyarrow" in modules and hasattr(source, "append_column"):
        return _apply_to_arrow(source, function)
    if "pyspark" in modules and hasattr(source, "sparkSession"):
        return cast("T", _apply_to_spark(source, function))
    if hasattr(source, "transform_shard"):
        in_ray = type(source).__module__.endswith(".ray")
        function = _shared_on_ray(function) if in_ray else _shared_on_spark(function)
        return source.transform_shard(_ShardFunction(function))
    if "ray" in modules and hasattr(source, "map_batches"):
        _check_names(source.columns(), function)
        return source.map_batches(
            _ShardFunction(_shared_on_ray(function)),
            batch_format="pyarrow",
            batch_size=function.window,
        )
    raise UsageError(
        "A table is a Spark DataFrame, a pandas DataFrame, an Arrow table, XShards or a Ray "
        f"Dataset, got {type_name(data)}",
        code="data-type",
        argument="data",
    )


def _shared_on_spark(function: ColumnFunction) -> ColumnFunction:
    """Return the function with a model in one engine for all tasks of an executor."""
    from bigdl.orca.cluster.connect import active_spark

    cluster = active_spark()
    return _shared(function, cluster.cores_per_node, cluster.broadcaster, cluster.every_task_sees)


def _shared_on_ray(function: ColumnFunction) -> ColumnFunction:
    """Return the function with a model in one engine for all tasks of a node."""
    import ray

    from bigdl.orca.cluster.ray import RayCluster

    nodes = [node for node in ray.nodes() if node["Alive"]]
    counts = (node["Resources"].get("CPU", 0) for node in nodes)
    threads = int(min((count for count in counts if count >= 1), default=1))
    is_one = len({node["NodeManagerHostname"] for node in nodes}) == 1
    return _shared(function, threads, RayCluster.from_active().broadcaster, lambda check: is_one)


def _shared(
    function: ColumnFunction,
    threads: int,
    broadcaster: Broadcaster,
    every_task_sees: Callable[[Callable[[], bool]], bool],
) -> ColumnFunction:
    """Return the function with a shared engine, and its model's files if tasks do not see them."""
    function = copy.copy(function)
    model = function.model
    files = sent_files(Path(model.path), str(model.facts["digest"]), broadcaster, every_task_sees)
    function.model = dataclasses.replace(model, threads=threads, files=files)
    return function


class _ShardFunction:
    """Picklable function that applies a row function to an in-memory table."""

    def __init__(self, function: ColumnFunction):
        self._function = function

    def __call__(self, shard: T) -> T:
        return apply(shard, self._function)


def _check_names(names: Sequence[str], function: ColumnFunction) -> None:
    for name in function.inputs:
        if name not in names:
            raise UsageError(
                f"The table has no column '{name}'; it has {', '.join(map(str, names))}",
                code="column-missing",
                column=name,
            )
    for name in function.outputs:
        if name.lower() in [str(each).lower() for each in names]:
            raise UsageError(
                f"The table already has a column '{name}'; choose another output=",
                code="column-duplicate",
                column=name,
            )


def _windows(function: ColumnFunction, count: int, columns: Callable[[int, int], Columns]) -> dict:
    """Return the added columns of `count` rows, computed in windows, of which two overlap."""
    parts: list[Mapping[str, Any]] = []
    pending: Pending | None = None
    for low in range(0, count, function.window):
        following = function.start(columns(low, min(count, low + function.window)))
        if pending is not None:
            parts.append(pending())
        pending = following
    if pending is not None:
        parts.append(pending())
    return {name: [v for part in parts for v in part[name]] for name in function.outputs}


def _apply_to_pandas(frame: pd.DataFrame, function: ColumnFunction) -> pd.DataFrame:
    _check_names(list(frame.columns), function)
    values = {name: frame[name] for name in function.inputs}

    def columns(low: int, high: int) -> Columns:
        parts = {name: column.iloc[low:high] for name, column in values.items()}
        return {name: _objects(part) for name, part in parts.items()}

    added = _windows(function, len(frame), columns)
    result = frame.copy(deep=False)
    for name, cells in added.items():
        numbers = function.outputs[name] == "double"
        result[name] = pd.Series(cells, frame.index, "float64" if numbers else object)
    return result


def _objects(column: pd.Series) -> list:
    return [
        None if is_null else value for value, is_null in zip(column, column.isna(), strict=True)
    ]


def _apply_to_arrow(table: pa.Table, function: ColumnFunction) -> pa.Table:
    _check_names(table.schema.names, function)

    def columns(low: int, high: int) -> Columns:
        rows = table.slice(low, high - low)
        return {name: arrow_values(rows.column(name)) for name in function.inputs}

    added = _windows(function, table.num_rows, columns)
    for name, cells in added.items():
        table = table.append_column(name, pa.array(cells, _arrow_type(function.outputs[name])))
    return table


def _arrow_type(name: str) -> pa.DataType:
    return {
        "string": pa.string(),
        "double": pa.float64(),
        "array<float>": pa.list_(pa.float32()),
    }[name]


def arrow_values(column: pa.Array | pa.ChunkedArray) -> list:
    """Return the values of an Arrow column; those of strings that are not UTF-8 as bytes."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        wide = pa.types.is_large_string(column.type)
        return column.cast(pa.large_binary() if wide else pa.binary()).to_pylist()


def _apply_to_spark(frame: DataFrame, function: ColumnFunction) -> DataFrame:
    from bigdl.orca.inference import map_batches

    names = list(frame.columns)
    _check_names(names, function)
    function = _shared_on_spark(function)
    kept, columns = list(names), {}
    types = {field.name: field.dataType.typeName() for field in frame.schema.fields}
    for index, name in enumerate(function.inputs):
        columns[name] = name
        if types[name] in _TEXT_TYPES:  # as bytes, of which some may not be UTF-8
            columns[name] = f"bigdl text {index}"
            frame = frame.withColumn(
                columns[name], frame["`" + name.replace("`", "``") + "`"].cast("binary")
            )
    return map_batches(
        frame,
        _BatchFunction(function, columns),
        ", ".join(f"`{name}` {type_}" for name, type_ in function.outputs.items()),
        columns=list(dict.fromkeys(columns.values())),
        keep=kept,
        batch_size=function.window,
    )


# -- SQL functions ---------------------------------------------------------------------------------


class FunctionCapture:
    """A placeholder of a table that keeps the function which is applied to it.

    Attributes
    ----------
    function : ColumnFunction or None
    """

    function: ColumnFunction | None = None


def sql_function(function: ColumnFunction) -> Callable[..., Column]:
    """Return a user-defined function of Spark, whose value is a struct of the added columns.

    The names of the struct's fields are those of the added columns after the last underscore.
    """
    from bigdl.orca.cluster.versions import arrow_udf

    function = _shared_on_spark(function)
    fields = {name.rpartition("_")[2]: name for name in function.outputs}

    def call(arguments: pa.Array | tuple[pa.Array, ...]) -> Pending:
        arrays = arguments if isinstance(arguments, tuple) else (arguments,)
        values = [arrow_values(each) for each in arrays]
        return function.start(dict(zip(function.inputs, values, strict=True)))

    def struct(pending: Pending) -> pa.Array:
        added = pending()
        arrays = [
            pa.array(list(added[name]), _arrow_type(function.outputs[name]))
            for name in fields.values()
        ]
        return pa.StructArray.from_arrays(arrays, list(fields))

    def task(batches: Iterator[Any]) -> Iterator[pa.Array]:
        return (struct(call(each)) for each in batches)

    types = ", ".join(f"{field}: {function.outputs[name]}" for field, name in fields.items())
    return arrow_udf(task, f"struct<{types}>", iterates=True)


class _BatchFunction:
    """Row function as a function of :func:`bigdl.orca.inference.map_batches`."""

    def __init__(self, function: ColumnFunction, columns: dict[str, str]):
        self._function, self._columns = function, columns

    def __call__(self, batch: dict[str, np.ndarray], models: object) -> Pending:
        return self._function.start(
            {name: batch[column].tolist() for name, column in self._columns.items()}
        )
