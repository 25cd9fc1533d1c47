"""Shards that are pandas frames -> a Spark DataFrame, and back, as Arrow record batches.

A batch travels as one binary cell (Arrow's stream format), so that Spark moves a few large values.
Nothing goes through the driver but the types of the columns.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.data.feeds.arrow_types import for_spark
from bigdl.orca.data.xshards import persistence
from bigdl.orca.data.xshards.shards import DATA_FRAME, class_name

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyspark import RDD
    from pyspark.sql import Column, DataFrame

_CELL_ROWS = 1 << 16


def quoted(name: str) -> str:
    """A column's name for Spark, whatever characters are in it."""
    return "`" + name.replace("`", "``") + "`"


def safe_names(number: int) -> list[str]:
    """Names of columns that need no quotes and do not meet."""
    return [f"c{i}" for i in range(number)]


# pandas -> Spark --------------------------------------------------------------------------------


def spark_frame(rdd: RDD, prefix: str | None = None) -> tuple[DataFrame, dict[Any, str]]:
    """Return a Spark DataFrame of the rows of an RDD of pandas frames, and its columns by name.

    Partitions and the order of rows are kept; the index is left out.  A column has the one type
    that holds the values of every shard; NaN becomes null, and a time without a zone is taken for
    one in the session's zone.

    Parameters
    ----------
    rdd : pyspark.RDD
    prefix : str, optional
        Call the columns by this and their number in the DataFrame; default: their own names.

    Raises
    ------
    UsageError
        If a shard is no frame, shards do not have the same columns, or Spark has no type for one.
    """
    import pyarrow as pa
    from pyspark.sql.pandas.types import from_arrow_schema

    spark = SparkCluster.from_active().spark
    types = _unified(rdd.map(_column_types).collect())
    if types is None:
        return spark.range(0).select(), {}
    columns = {n: str(n) if prefix is None else f"{prefix}{i}" for i, n in enumerate(types)}
    schema = pa.schema([(columns[name], for_spark(type_)) for name, type_ in types.items()])
    zone = spark.conf.get("spark.sql.session.timeZone")

    def pack(shard: pd.DataFrame) -> Iterator[tuple[bytes]]:
        import pyarrow as pa

        for low in range(0, len(shard), _CELL_ROWS):
            rows = shard.iloc[low : low + _CELL_ROWS]
            arrays = [
                _converted(name, rows[name], field.type, zone)
                for name, field in zip(columns, schema, strict=True)
            ]
            yield (_serialized(pa.table(arrays, schema=schema)),)

    cells = persistence.hold(rdd.flatMap(pack), rdd)
    packed = spark.createDataFrame(cells, "data binary", verifySchema=False)
    return packed.mapInArrow(_unpack_cells, from_arrow_schema(schema)), columns


def _column_types(shard: Any) -> dict[Any, pa.DataType] | str:
    """Return the Arrow type of each column of a shard, or what is wrong with it."""
    if class_name(shard) != DATA_FRAME:
        return f"The shards must be pandas DataFrames, but one is {class_name(shard)}"
    if not shard.columns.is_unique:
        return f"A column name must be of one column, but the frame has {list(shard.columns)}"
    try:
        return {name: _array_type(name, column) for name, column in shard.items()}
    except UsageError as error:
        return str(error)


def _unified(shards: list[dict[Any, pa.DataType] | str]) -> dict[Any, pa.DataType] | None:
    """Return the type of each column that holds the values of all shards, None without shards."""
    import pyarrow as pa

    known: dict[Any, pa.DataType] | None = None
    for types in shards:
        if isinstance(types, str):
            raise UsageError(types)
        if not types:
            raise UsageError("A frame without columns cannot become a Spark DataFrame")
        if known is None:
            known = types
        if known.keys() != types.keys():
            raise UsageError(
                f"The shards do not have the same columns: {list(known)} in one and {list(types)} "
                "in another"
            )
        for name in [name for name in known if known[name] != types[name]]:
            pair = known[name], types[name]
            try:
                schemas = [pa.schema([("", type_)]) for type_ in pair]
                merged = pa.unify_schemas(schemas, promote_options="permissive")
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise UsageError(
                    f"Column {name!r} is {pair[0]} in one shard and {pair[1]} in another; make "
                    "them one"
                ) from error
            known[name] = merged.field(0).type
    return known


def _array_type(name: Any, column: Any):
    import pyarrow as pa

    if column.dtype == object:
        type_ = _array(name, column).type
    else:
        type_ = pa.Array.from_pandas(column.iloc[:0]).type
    # Only the values of a categorical can be compared between shards.
    return type_.value_type if pa.types.is_dictionary(type_) else type_


def _array(name: Any, column: Any):
    import pyarrow as pa

    try:
        return pa.array(column, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        if column.dtype != object:
            raise
    try:
        return pa.array([_plain(value) for value in column], from_pandas=True)
    except pa.ArrowException as error:
        raise UsageError(
            f"Column {name!r} holds values that Spark has no type for: {error}"
        ) from error


def _plain(value):
    if hasattr(value, "toArray"):  # a vector of Spark
        value = value.toArray()
    return value.tolist() if hasattr(value, "tolist") else value


def _converted(name, column, type_, zone):
    import pyarrow as pa
    import pyarrow.compute as pc

    array = _array(name, column)
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if pa.types.is_timestamp(type_) and pa.types.is_timestamp(array.type):
        array = array.cast(pa.timestamp("us", array.type.tz), safe=False)
        if array.type.tz is None:
            array = pc.assume_timezone(array, zone, ambiguous="earliest", nonexistent="latest")
        return array.cast(type_)
    times = (pa.types.is_temporal, pa.types.is_nested)
    return array.cast(type_, safe=not any(is_kind(type_) for is_kind in times))


def _serialized(table: pa.Table | pa.RecordBatch) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    return sink.getvalue().to_pybytes()


def _unpack_cells(batches: Iterable) -> Iterator:
    import pyarrow as pa

    for batch in batches:
        for cell in batch.column(0):
            with pa.ipc.open_stream(cell.as_buffer()) as reader:
                yield from reader


# Spark -> pandas --------------------------------------------------------------------------------


def frames_of(
    frame: DataFrame, shard_size: int | None = None, names: Sequence | None = None
) -> RDD:
    """Return an RDD of pandas frames of the rows of a Spark DataFrame.

    A partition becomes one shard, or shards of `shard_size` rows and a last, smaller one.  One
    without rows has no shard, but the first partition always has one, of the columns' types.
    Vectors become arrays; a time is that of the session's zone, without a zone.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
    shard_size : int, optional
    names : sequence, optional
        Names of the columns of the shards, if they are to differ from the frame's.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import UserDefinedType

    names = list(frame.columns if names is None else names)
    safe = safe_names(len(names))
    vectors = [isinstance(field.dataType, UserDefinedType) for field in frame.schema.fields]
    frame = frame.toDF(*safe)
    if any(vectors):
        from pyspark.ml.functions import vector_to_array

        # vector_to_array fails on a null
        frame = frame.withColumns(
            {
                c: F.when(F.col(c).isNotNull(), vector_to_array(F.col(c)))
                for c, is_vector in zip(safe, vectors, strict=True)
                if is_vector
            }
        )
    zone = frame.sparkSession.conf.get("spark.sql.session.timeZone")
    empty = _serialized(to_arrow_schema(frame.schema, timezone=zone).empty_table())

    def cut(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Cut the batches of a partition at the bounds of shards; a part is one cell."""
        import pyarrow as pa

        row, size = 0, shard_size or sys.maxsize
        for batch in batches:
            low = 0
            while low < batch.num_rows:
                shard, start = divmod(row, size)
                part = batch.slice(low, size - start)
                yield pa.RecordBatch.from_pydict({"shard": [shard], "data": [_serialized(part)]})
                low, row = low + part.num_rows, row + part.num_rows

    def join(partition: int, cells: Iterable) -> Iterator[pd.DataFrame]:
        shards = itertools.groupby(cells, key=operator.itemgetter(0))
        shard = None
        for _, of_shard in shards:
            shard = _pandas([data for _, data in of_shard], names)
            yield shard
        if shard is None and partition == 0:
            yield _pandas([empty], names)

    rdd = frame.mapInArrow(cut, "shard long, data binary").rdd
    if rdd.getNumPartitions() == 0:
        rdd = rdd.context.parallelize([], 1)
    return rdd.mapPartitionsWithIndex(join)


def _pandas(cells: list, names: list) -> pd.DataFrame:
    import pyarrow as pa
    import pyarrow.compute as pc

    table = pa.concat_tables(pa.ipc.open_stream(pa.py_buffer(cell)).read_all() for cell in cells)
    for i, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type) and field.type.tz is not None:
            table = table.set_column(i, field.name, pc.local_timestamp(table.column(i)))
    # A copy: a column that shares Arrow's memory could not be written to.
    frame = table.to_pandas().copy()
    frame.columns = names
    return frame


# Operations of Spark -----------------------------------------------------------------------------

_PLACE = "place"
_FUNCTIONS = [
    *("max", "min", "count", "sum", "avg", "mean", "sumDistinct", "approx_count_distinct"),
    *("stddev", "stddev_pop", "variance", "var_pop", "skewness", "kurtosis"),
    *("collect_list", "collect_set", "first", "last"),
]
_SPELLED = {"sumDistinct": "sum_distinct"}
_LABELS = {"sumDistinct": "sum(DISTINCT {})", "mean": "avg({})"}
_HOW = {"inner": "inner", "left": "left", "right": "right", "outer": "full"}


def _placed(frame: DataFrame, place: str = _PLACE) -> DataFrame:
    from pyspark.sql import functions as F

    return frame.withColumn(place, F.monotonically_increasing_id())


def _equal(pairs: Iterable[tuple[str, str]]) -> Column:
    """Return the condition that columns are equal in pairs, a null being equal to a null."""
    from pyspark.sql import functions as F

    conditions = (F.col(left).eqNullSafe(F.col(right)) for left, right in pairs)
    return functools.reduce(operator.and_, conditions, F.lit(True))


def ordered(rdd: RDD, names: Sequence | None, ascending: bool | Sequence[bool]) -> RDD:
    """Return all rows in the order of some columns, nulls last, equal ones as they were."""
    from pyspark.sql import functions as F

    frame, columns = spark_frame(rdd, "c")
    names = list(columns) if names is None else names
    rising = [ascending] * len(names) if isinstance(ascending, bool) else list(ascending)
    if len(rising) != len(names):
        raise UsageError(
            f"ascending must be True, False or one of them for each of {len(names)} columns, "
            f"got {ascending!r}"
        )
    keys = [
        (F.asc_nulls_last if rises else F.desc_nulls_last)(columns[name])
        for name, rises in zip(names, rising, strict=True)
    ]
    in_order = _placed(frame).orderBy(*keys, _PLACE).drop(_PLACE)
    return frames_of(in_order, names=list(columns))


def deduplicated(rdd: RDD) -> RDD:
    """Return the first of equal rows, in the order of the rows."""
    from pyspark.sql import functions as F

    frame, columns = spark_frame(rdd, "c")
    first = _placed(frame).groupBy(*frame.columns).agg(F.min(_PLACE).alias(_PLACE))
    return frames_of(first.orderBy(_PLACE).select(*frame.columns), names=list(columns))


def described(rdd: RDD, names: Sequence | None) -> pd.DataFrame:
    """Return Spark's summary of columns as a pandas frame."""
    frame, columns = spark_frame(rdd, "c")
    chosen = [columns[name] for name in (columns if names is None else names)]
    summary: Any = frame.describe(*chosen).toPandas()
    return summary.rename(columns={column: name for name, column in columns.items()})


def grouped(rdd: RDD, by: Sequence, agg: Any, join: bool) -> RDD:
    """Return aggregates of groups in the order of their keys, or of every row's group beside it."""
    from pyspark.sql import functions as F

    frame, columns = spark_frame(rdd, "c")
    wanted = _aggregates(agg, by, list(columns))
    keys = [columns[name] for name in by]
    if not wanted:
        outputs, aggregates = ["count"], [F.count(F.lit(1))]
    else:
        outputs = [_LABELS.get(f, f"{f}({{}})").format(name) for name, f in wanted]
        aggregates = [getattr(F, _SPELLED.get(f, f))(columns[name]) for name, f in wanted]
    values = [f"a{i}" for i in range(len(outputs))]
    groups = frame.groupBy(*keys).agg(
        *(each.alias(value) for each, value in zip(aggregates, values, strict=True))
    )
    if not join:
        order = [F.asc_nulls_last(key) for key in keys] or [F.lit(1)]
        return frames_of(groups.orderBy(*order).select(*keys, *values), names=[*by, *outputs])
    renamed = groups.withColumnsRenamed({key: f"k{key}" for key in keys})
    same = _equal((key, f"k{key}") for key in keys)
    joined = _placed(frame).join(renamed, same, "left").orderBy(_PLACE)
    return frames_of(joined.select(*frame.columns, *values), names=[*columns, *outputs])


def _aggregates(agg: Any, by: Sequence, names: list) -> list[tuple[Any, str]]:
    """Return the pairs of a column and a function that `agg` means."""
    if not isinstance(agg, str | list | dict):
        raise UsageError(
            f"agg must be a name of a function, a list of them, or a dict by column, got {agg!r}"
        )
    others = [name for name in names if name not in by]
    by_column = agg if isinstance(agg, dict) else dict.fromkeys(others, agg)
    wanted = [
        (column, function)
        for column, functions in by_column.items()
        for function in ([functions] if isinstance(functions, str) else functions)
    ]
    for column, function in wanted:
        if column not in names:
            raise UsageError(f"agg names the column {column!r}, which is not in {names}")
        if function not in _FUNCTIONS:
            raise UsageError(f"agg must be of {_FUNCTIONS}, got {function!r}")
    if not wanted and agg != "count":
        raise UsageError("There is no column to aggregate besides those that are grouped by")
    return wanted


def merged(left_rdd: RDD, right_rdd: RDD, how: str, on: Sequence | None) -> RDD:
    """Return the rows of two frames joined where keys are equal, a null being equal to a null.

    In the order of the left rows (of the right ones for ``"right"``, of the keys for ``"outer"``),
    then of the others.
    """
    from pyspark.sql import functions as F

    if how not in _HOW:
        raise UsageError(f"how must be one of {list(_HOW)}, got {how!r}")
    left, lefts = spark_frame(left_rdd, "l")
    right, rights = spark_frame(right_rdd, "r")
    keys = [name for name in lefts if name in rights] if on is None else list(on)
    if not keys or any(key not in lefts or key not in rights for key in keys):
        raise UsageError(
            f"Both frames must have the columns that they are merged on, {keys or 'none in common'}"
            f"; they have {list(lefts)} and {list(rights)}"
        )
    types = dict(left.dtypes + right.dtypes)
    for key in keys:
        pair = types[lefts[key]], types[rights[key]]
        if (pair[0] == "string") != (pair[1] == "string"):
            raise UsageError(
                f"Column {key!r} is {pair[0]} in one frame and {pair[1]} in the other; "
                "give it one type first"
            )
    same = _equal((lefts[key], rights[key]) for key in keys)
    joined = _placed(left, "l").join(_placed(right, "r"), same, _HOW[how])
    outputs = [
        (name, F.coalesce(column, rights[name]))
        if name in keys
        else (f"{name}_x" if name in rights else name, F.col(column))
        for name, column in lefts.items()
    ]
    outputs += [
        (f"{name}_y" if name in lefts else name, F.col(column))
        for name, column in rights.items()
        if name not in keys
    ]
    order = [F.asc_nulls_last(place) for place in ("rl" if how == "right" else "lr")]
    if how == "outer":
        position = list(lefts)
        order = [F.asc_nulls_last(f"c{position.index(key)}") for key in keys] + order
    safe = [column.alias(f"c{i}") for i, (_, column) in enumerate(outputs)]
    result = joined.select(*safe, "l", "r").orderBy(*order).drop("l", "r")
    return frames_of(result, names=[name for name, _ in outputs])
