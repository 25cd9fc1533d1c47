"""Conversion between shards of pandas frames and Spark DataFrames, as Arrow record batches.

A batch is sent as one binary cell (Arrow's stream format), so Spark moves a few large values.  Only
the column types pass through the driver.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import (
    LazyModule,
    UsageError,
    raise_first_usage_error,
    value_or_usage_error,
)
from bigdl.orca.cluster.connect import active_spark
from bigdl.orca.cluster.spark_calls import silent_when_closed
from bigdl.orca.cluster.versions import arrow_schema
from bigdl.orca.data.arrow_types import spark_readable
from bigdl.orca.data.xshards import persistence
from bigdl.orca.data.xshards.connect import frame_of, rows_of
from bigdl.orca.data.xshards.shards import DATA_FRAME, class_name, collected
from bigdl.runtime.shards.columns import quoted as quoted

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyspark import RDD
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F
else:
    F = LazyModule("pyspark.sql.functions", "orca")
    pa = LazyModule("pyarrow", "orca")

_CELL_ROWS = 1 << 16


def safe_names(number: int) -> list[str]:
    """Return unique column names that need no quoting."""
    return [f"c{i}" for i in range(number)]


# pandas -> Spark --------------------------------------------------------------------------------


def spark_frame(rdd: RDD, prefix: str | None = None) -> tuple[DataFrame, dict[Any, str]]:
    """Convert an RDD of pandas frames to a DataFrame; return the DataFrame and its column names.

    Partitions and the order of rows are kept; the index is dropped.  A column gets one type for the
    values of all shards.  NaN becomes null, and a timestamp without time zone is interpreted in the
    session's time zone.

    Parameters
    ----------
    rdd : pyspark.RDD
    prefix : str, optional
        Name the columns by this prefix and their index; by default keep their names.

    Raises
    ------
    UsageError
        If a shard is not a frame, columns differ between shards, or Spark has no matching type.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    spark = active_spark().spark
    shards = collected(rdd.map(functools.partial(value_or_usage_error, column_types)))
    types = unified_types(raise_first_usage_error(shards))
    if types is None:
        return spark.range(0).select(), {}
    columns = {n: str(n) if prefix is None else f"{prefix}{i}" for i, n in enumerate(types)}
    schema = pa.schema([(columns[name], spark_readable(type_)) for name, type_ in types.items()])
    zone = spark.conf.get("spark.sql.session.timeZone")

    def pack(shard: pd.DataFrame) -> Iterator[tuple[bytes]]:
        for low in range(0, len(shard), _CELL_ROWS):
            rows = shard.iloc[low : low + _CELL_ROWS]
            arrays = [
                _convert(name, rows[name], field.type, zone)
                for name, field in zip(columns, schema, strict=True)
            ]
            yield (_serialize(pa.table(arrays, schema=schema)),)

    cells = persistence.hold(rdd.flatMap(pack), rdd)
    packed = frame_of(cells, "data binary")
    return packed.mapInArrow(silent_when_closed(_unpack_cells), from_arrow_schema(schema)), columns


def column_types(shard: pd.DataFrame) -> dict[Any, tuple[pa.DataType, bool]]:
    """Return each column's Arrow type, and True if it has integers that float64 cannot represent.

    The flag is True if the column has integers that float64 cannot represent.
    """
    if class_name(shard) != DATA_FRAME:
        raise UsageError(
            f"The shards must be pandas DataFrames, but one is {class_name(shard)}",
            code="data-type",
        )
    if not shard.columns.is_unique:
        raise UsageError(
            f"Column names must be unique, but the frame has {list(shard.columns)}",
            code="column-duplicate",
            columns=list(shard.columns),
        )
    types = {name: _array_type(name, column) for name, column in shard.items()}
    return {name: (type_, _is_beyond_floats(shard[name], type_)) for name, type_ in types.items()}


_EXACT = 2**53


def _is_beyond_floats(column: pd.Series, type_: pa.DataType) -> bool:
    if not pa.types.is_integer(type_):
        return False
    known = column.dropna()
    return bool(len(known)) and max(int(known.max()), -int(known.min())) > _EXACT


def unified_types(shards: list[dict[Any, tuple]]) -> dict[Any, pa.DataType] | None:
    """Return each column's common Arrow type in all shards, or None if there are no shards."""
    known: dict[Any, pa.DataType] | None = None
    beyond: dict[Any, pa.DataType] = {}
    for shard in shards:
        types = {name: type_ for name, (type_, _) in shard.items()}
        beyond.update({name: type_ for name, (type_, is_beyond) in shard.items() if is_beyond})
        if not types:
            raise UsageError(
                "A frame without columns cannot be converted to a Spark DataFrame",
                code="data-empty",
            )
        if known is None:
            known = types
        if known.keys() != types.keys():
            raise UsageError(
                f"The shards do not have the same columns: {list(known)} in one and {list(types)} "
                "in another",
                code="data-schema",
                columns=list(types),
            )
        for name in [name for name in known if known[name] != types[name]]:
            pair = known[name], types[name]
            try:
                schemas = [pa.schema([("", type_)]) for type_ in pair]
                merged = pa.unify_schemas(schemas, promote_options="permissive")
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise UsageError(
                    f"Column {name!r} is {pair[0]} in one shard and {pair[1]} in another; cast "
                    "them to one type",
                    code="data-schema",
                    column=name,
                ) from error
            known[name] = merged.field(0).type
    for name, type_ in beyond.items():
        if known is not None and pa.types.is_floating(known[name]):
            raise UsageError(
                f"Column {name!r} has integers beyond 2**53 ({type_}) in one shard and floats in "
                "another, and no Spark type represents both exactly; cast it to one type in every "
                "shard, e.g. astype('Int64'), which supports missing values, or str",
                code="data-schema",
                column=name,
            )
    return known


def _array_type(name: object, column: pd.Series):
    if column.dtype == object:
        type_ = _array(name, column).type
    else:
        type_ = pa.Array.from_pandas(column.iloc[:0]).type
    # Categories differ between shards, so compare the types of their values.
    return type_.value_type if pa.types.is_dictionary(type_) else type_


def _array(name: object, column: pd.Series):
    try:
        return pa.array(column, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        if column.dtype != object:
            raise
    try:
        return pa.array([_to_python(value) for value in column], from_pandas=True)
    except pa.ArrowException as error:
        raise UsageError(
            f"Column {name!r} has values without a matching Spark type: {error}",
            code="data-dtype",
            column=name,
        ) from error


def _to_python(value):
    if hasattr(value, "toArray"):  # a Spark vector
        value = value.toArray()
    return value.tolist() if hasattr(value, "tolist") else value


def _convert(name, column, type_, zone):
    import pyarrow.compute as pc

    array = _array(name, column)
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if pa.types.is_timestamp(type_) and pa.types.is_timestamp(array.type):
        array = array.cast(pa.timestamp("us", array.type.tz), safe=False)
        if array.type.tz is None:
            array = pc.assume_timezone(array, zone, ambiguous="earliest", nonexistent="latest")
        return array.cast(type_)
    unsafe = (pa.types.is_temporal, pa.types.is_nested)
    return array.cast(type_, safe=not any(matches(type_) for matches in unsafe))


def _serialize(table: pa.Table | pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    return sink.getvalue().to_pybytes()


def _unpack_cells(batches: Iterable) -> Iterator:
    for batch in batches:
        for cell in batch.column(0):
            with pa.ipc.open_stream(cell.as_buffer()) as reader:
                yield from reader


# Spark -> pandas --------------------------------------------------------------------------------


def without_vectors(frame: DataFrame) -> DataFrame:
    """Convert the vector columns of a Spark DataFrame to arrays."""
    from pyspark.ml.functions import vector_to_array

    vectors = [f.name for f in frame.schema if f.dataType.typeName() == "vectorudt"]
    if not vectors:
        return frame
    columns = {name: F.col(quoted(name)) for name in vectors}
    # vector_to_array fails on a null
    return frame.withColumns(
        {name: F.when(col.isNotNull(), vector_to_array(col)) for name, col in columns.items()}
    )


def frames_of(
    frame: DataFrame, shard_size: int | None = None, names: Sequence | None = None
) -> RDD:
    """Convert a Spark DataFrame to an RDD of pandas frames.

    A partition becomes one shard, or shards of `shard_size` rows with a smaller last one.  An empty
    partition has no shard, but the first partition always has one, with the columns' types.
    Vectors become arrays; timestamps become local times of the session's time zone.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
    shard_size : int, optional
        Rows per shard, by default all rows of the partition.
    names : sequence, optional
        Column names of the shards, by default those of the frame.
    """
    names = list(frame.columns if names is None else names)
    frame = without_vectors(frame.toDF(*safe_names(len(names))))
    zone = str(frame.sparkSession.conf.get("spark.sql.session.timeZone"))
    empty = _serialize(arrow_schema(frame.schema, zone).empty_table())

    def cut(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Split a partition's batches at shard boundaries; yield each part as one binary cell."""
        row, size = 0, shard_size or sys.maxsize
        for batch in batches:
            low = 0
            while low < batch.num_rows:
                shard, start = divmod(row, size)
                part = batch.slice(low, size - start)
                yield pa.RecordBatch.from_pydict({"shard": [shard], "data": [_serialize(part)]})
                low, row = low + part.num_rows, row + part.num_rows

    def join(partition: int, cells: Iterable) -> Iterator[pd.DataFrame]:
        shards = itertools.groupby(cells, key=operator.itemgetter(0))
        shard = None
        for _, shard_cells in shards:
            shard = _pandas([data for _, data in shard_cells], names)
            yield shard
        if shard is None and partition == 0:
            yield _pandas([empty], names)

    rdd = rows_of(frame.mapInArrow(cut, "shard long, data binary"))
    if rdd.context is not None and rdd.getNumPartitions() == 0:
        rdd = rdd.context.parallelize([], 1)
    return rdd.mapPartitionsWithIndex(join)


def _pandas(cells: list, names: list) -> pd.DataFrame:
    import pyarrow.compute as pc

    table = pa.concat_tables(pa.ipc.open_stream(pa.py_buffer(cell)).read_all() for cell in cells)
    for i, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type) and field.type.tz is not None:
            table = table.set_column(i, field.name, pc.local_timestamp(table.column(i)))
    # Copy, because columns that share Arrow's memory are read-only.
    frame = table.to_pandas().copy()
    frame.columns = names
    return frame
