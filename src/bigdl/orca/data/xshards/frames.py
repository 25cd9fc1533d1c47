"""Shards that are pandas frames -> a Spark DataFrame, and back, as Arrow record batches.

A batch travels as one binary cell (Arrow's stream format), so that Spark moves a few large values.
Nothing goes through the driver but the types of the columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.data.xshards import persistence
from bigdl.orca.data.xshards.shards import DATA_FRAME, class_name

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame

__all__ = [
    "deduplicated",
    "described",
    "frames_of",
    "grouped",
    "merged",
    "ordered",
    "quoted",
    "safe_names",
    "spark_frame",
]


_CELL_ROWS = 1 << 16


def quoted(name: str) -> str:
    """A column's name for Spark, whatever characters are in it."""
    return "`" + name.replace("`", "``") + "`"


def safe_names(number: int) -> list[str]:
    """Names of columns that need no quotes and do not meet."""
    return [f"c{i}" for i in range(number)]


# pandas -> Spark --------------------------------------------------------------------------------


def spark_frame(rdd: RDD, *, safe: bool = False) -> tuple[DataFrame, list]:
    """A Spark DataFrame of the rows of an RDD of pandas frames, and the names of its columns.

    Partitions and the order of rows are kept; the index is left out.  A column has the one type
    that holds the values of every shard; NaN becomes null, and a time without a zone is taken for
    one in the session's zone.

    Parameters
    ----------
    rdd : pyspark.RDD
    safe : bool
        Call the columns ``c0``, ``c1``, ... in the DataFrame.

    Raises
    ------
    UsageError
        If a shard is no frame, shards do not have the same columns, or Spark has no type for one.
    """
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructField, StructType

    spark = SparkCluster.from_active().spark
    found = rdd.mapPartitions(_column_types).collect()
    schema = _unified(found)
    if schema is None:
        return spark.range(0).select(), []
    names = list(schema)
    called = safe_names(len(names)) if safe else [str(name) for name in names]
    types = [_for_spark(type_) for type_ in schema.values()]
    struct = StructType(
        [StructField(n, from_arrow_type(t, True)) for n, t in zip(called, types, strict=True)]
    )
    zone = spark.conf.get("spark.sql.session.timeZone")
    cells = persistence.hold(rdd.mapPartitions(_ToCells(names, called, types, zone)), rdd)
    packed = spark.createDataFrame(cells, "data binary", verifySchema=False)
    return packed.mapInArrow(_unpack_cells, struct), names


def _column_types(shards: Iterable) -> Iterator:
    """Of a partition: what is wrong with its shards, or the Arrow type of each column."""
    known = None
    for shard in shards:
        if class_name(shard) != DATA_FRAME:
            yield f"The shards must be pandas DataFrames, but one is {class_name(shard)}"
            return
        if not shard.columns.is_unique:
            yield f"A column name must be of one column, but the frame has {list(shard.columns)}"
            return
        try:
            types = {name: _array_type(name, column) for name, column in shard.items()}
            known = types if known is None else _merged(known, types)
        except UsageError as error:
            yield str(error)
            return
    if known is not None:
        yield known


def _unified(found: list) -> dict | None:
    known = None
    for types in found:
        if isinstance(types, str):
            raise UsageError(types)
        known = types if known is None else _merged(known, types)
    if known is not None and not known:
        raise UsageError("A frame without columns cannot become a Spark DataFrame")
    return known


def _merged(left: dict, right: dict) -> dict:
    import pyarrow as pa

    if left.keys() != right.keys():
        raise UsageError(
            f"The shards do not have the same columns: {list(left)} in one and {list(right)} in "
            "another"
        )
    merged = {}
    for name, one in left.items():
        two = right[name]
        try:
            merged[name] = (
                one
                if one == two
                else pa.unify_schemas(
                    [pa.schema([("", one)]), pa.schema([("", two)])], promote_options="permissive"
                )
                .field(0)
                .type
            )
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise UsageError(
                f"Column {name!r} is {one} in one shard and {two} in another; make them one"
            ) from error
    return merged


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


def _for_spark(type_):
    """The Arrow type in which Spark takes the values of an Arrow type of pandas."""
    import pyarrow as pa

    kinds = pa.types
    if kinds.is_timestamp(type_):
        return pa.timestamp("us", "UTC")
    return _inner_for_spark(type_) if not kinds.is_null(type_) else pa.string()


def _inner_for_spark(type_):
    import pyarrow as pa

    kinds = pa.types
    simple = {
        pa.uint8(): pa.int16(),
        pa.uint16(): pa.int32(),
        pa.uint32(): pa.int64(),
        pa.uint64(): pa.decimal128(20, 0),
        pa.float16(): pa.float32(),
        pa.null(): pa.string(),
        pa.large_string(): pa.string(),
        pa.string_view(): pa.string(),
        pa.large_binary(): pa.binary(),
        pa.binary_view(): pa.binary(),
        pa.date64(): pa.date32(),
    }
    if type_ in simple:
        return simple[type_]
    if kinds.is_dictionary(type_):
        return _inner_for_spark(type_.value_type)
    if kinds.is_fixed_size_binary(type_):
        return pa.binary()
    if kinds.is_timestamp(type_):
        return pa.timestamp("us", type_.tz and "UTC")
    if kinds.is_duration(type_):
        return pa.duration("us")
    if kinds.is_time(type_):
        return pa.time64("us")
    if kinds.is_map(type_):
        return pa.map_(_inner_for_spark(type_.key_type), _inner_for_spark(type_.item_type))
    if kinds.is_list(type_) or kinds.is_large_list(type_) or kinds.is_fixed_size_list(type_):
        return pa.list_(_inner_for_spark(type_.value_type))
    if kinds.is_struct(type_):
        return pa.struct([(field.name, _inner_for_spark(field.type)) for field in type_])
    return type_


class _ToCells:
    def __init__(self, names, called, types, zone):
        self._names, self._called, self._types, self._zone = names, called, types, zone

    def __call__(self, shards: Iterable) -> Iterator[tuple[bytes]]:
        import pyarrow as pa

        schema = pa.schema(list(zip(self._called, self._types, strict=True)))
        for shard in shards:
            for low in range(0, len(shard), _CELL_ROWS):
                rows = shard.iloc[low : low + _CELL_ROWS]
                columns = [
                    _converted(name, rows[name], type_, self._zone)
                    for name, type_ in zip(self._names, self._types, strict=True)
                ]
                table = pa.table(columns, schema=schema).combine_chunks()
                for batch in table.to_batches():
                    yield (_serialized(batch),)


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


def _serialized(batch) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _unpack_cells(batches: Iterable) -> Iterator:
    import pyarrow as pa

    for batch in batches:
        for cell in batch.column(0):
            with pa.ipc.open_stream(cell.as_buffer()) as reader:
                yield from reader


# Spark -> pandas --------------------------------------------------------------------------------


def frames_of(frame: DataFrame, shard_size: int | None = None, names: Sequence | None = None):
    """An RDD of pandas frames of the rows of a Spark DataFrame.

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
        frame = frame.select(
            *(
                F.when(F.col(c).isNotNull(), vector_to_array(F.col(c))).alias(c)
                if is_vector
                else F.col(c)
                for c, is_vector in zip(safe, vectors, strict=True)
            )
        )
    zone = frame.sparkSession.conf.get("spark.sql.session.timeZone")
    empty = to_arrow_schema(frame.schema, timezone=zone).empty_table()
    packed = frame.mapInArrow(_ToShards(shard_size), "shard long, data binary")
    rdd = packed.rdd
    if rdd.getNumPartitions() == 0:
        rdd = rdd.context.parallelize([], 1)
    return rdd.mapPartitionsWithIndex(_FromCells(names, _serialized(_whole(empty))))


class _ToShards:
    """Cut the batches of a partition at the bounds of shards; a batch is one cell."""

    def __init__(self, size: int | None):
        self._size = size

    def __call__(self, batches: Iterable) -> Iterator:
        import pyarrow as pa

        row = 0
        for batch in batches:
            low = 0
            while low < batch.num_rows:
                shard = 0 if self._size is None else row // self._size
                left = batch.num_rows - low
                taken = left if self._size is None else min(left, (shard + 1) * self._size - row)
                cell = _serialized(batch.slice(low, taken))
                yield pa.RecordBatch.from_arrays(
                    [pa.array([shard], pa.int64()), pa.array([cell], pa.binary())],
                    names=["shard", "data"],
                )
                low, row = low + taken, row + taken


class _FromCells:
    def __init__(self, names, empty: bytes):
        self._names, self._empty = names, empty

    def __call__(self, partition: int, cells: Iterable) -> Iterator:
        import itertools

        is_empty = True
        for _, of_shard in itertools.groupby(cells, key=lambda cell: cell[0]):
            is_empty = False
            yield _pandas([cell[1] for cell in of_shard], self._names)
        if is_empty and partition == 0:
            yield _pandas([self._empty], self._names)


def _whole(table):
    import pyarrow as pa

    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _pandas(cells: list, names: list):
    import pyarrow as pa
    import pyarrow.compute as pc

    table = pa.Table.from_batches(
        [batch for cell in cells for batch in pa.ipc.open_stream(pa.py_buffer(cell))]
    )
    for i, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type) and field.type.tz is not None:
            table = table.set_column(i, field.name, pc.local_timestamp(table.column(i)))
    # A copy: a column that shares Arrow's memory could not be written to.
    frame = table.to_pandas().copy()
    frame.columns = names
    return frame


_PLACE = "place"
_FUNCTIONS = [
    *("max", "min", "count", "sum", "avg", "mean", "sumDistinct", "approx_count_distinct"),
    *("stddev", "stddev_pop", "variance", "var_pop", "skewness", "kurtosis"),
    *("collect_list", "collect_set", "first", "last"),
]
_SPELLED = {"sumDistinct": "sum_distinct"}
_HOW = {"inner": "inner", "left": "left", "right": "right", "outer": "full"}


def _placed(frame, place: str = _PLACE):
    from pyspark.sql import functions as F

    return frame.withColumn(place, F.monotonically_increasing_id())


def ordered(rdd, columns: Sequence | None, ascending: bool | Sequence):
    """All rows in the order of some columns, nulls last, equal ones as they were."""
    from pyspark.sql import functions as F

    frame, names = spark_frame(rdd, safe=True)
    columns = names if columns is None else columns
    falling = [not each for each in _per_column(ascending, len(columns))]
    keys = [
        F.desc_nulls_last(_safe(names, column)) if falls else F.asc_nulls_last(_safe(names, column))
        for column, falls in zip(columns, falling, strict=True)
    ]
    sorted_ = _placed(frame).orderBy(*keys, _PLACE).drop(_PLACE)
    return frames_of(sorted_, names=names)


def _per_column(ascending, number):
    if isinstance(ascending, bool):
        return [ascending] * number
    if len(ascending) != number:
        raise UsageError(
            f"ascending must be True, False or one of them for each of {number} columns, "
            f"got {ascending!r}"
        )
    return list(ascending)


def _safe(names, column) -> str:
    return f"c{names.index(column)}"


def deduplicated(rdd):
    """The first of equal rows, in the order of the rows."""
    from pyspark.sql import functions as F

    frame, names = spark_frame(rdd, safe=True)
    columns = frame.columns
    first = _placed(frame).groupBy(*columns).agg(F.min(_PLACE).alias(_PLACE))
    return frames_of(first.orderBy(_PLACE).select(*columns), names=names)


def described(rdd, columns: Sequence | None):
    """Spark's summary of columns as a pandas frame."""
    frame, names = spark_frame(rdd, safe=True)
    chosen = names if columns is None else list(columns)
    safe = [_safe(names, column) for column in chosen]
    result: Any = frame.describe(*safe).toPandas() if safe else frame.describe().toPandas()
    back = {f"c{i}": name for i, name in enumerate(names)}
    return result.rename(columns=back)


def grouped(rdd, columns: Sequence, agg: Any, join: bool):
    """Aggregates of groups in the order of their keys, or of every row's group beside it."""
    from pyspark.sql import functions as F

    frame, names = spark_frame(rdd, safe=True)
    others = [name for name in names if name not in columns]
    wanted = _aggregates(agg, others, names)
    keys = [_safe(names, column) for column in columns]
    if not wanted:
        outputs, aggregates = ["count"], [F.count(F.lit(1)).alias("a0")]
    else:
        outputs = [
            f"sum(DISTINCT {column})"
            if function == "sumDistinct"
            else f"{'avg' if function == 'mean' else function}({column})"
            for column, function in wanted
        ]
        aggregates = [
            getattr(F, _SPELLED.get(function, function))(_safe(names, column)).alias(f"a{i}")
            for i, (column, function) in enumerate(wanted)
        ]
    groups = frame.groupBy(*keys).agg(*aggregates)
    values = [f"a{i}" for i in range(len(outputs))]
    if not join:
        order = [F.asc_nulls_last(key) for key in keys] or [F.lit(1)]
        return frames_of(groups.orderBy(*order).select(*keys, *values), names=[*columns, *outputs])
    rows = _placed(frame)
    renamed = groups.select(*(F.col(k).alias(f"k{k}") for k in keys), *values)
    same = F.lit(True)
    for key in keys:
        same = same & F.col(key).eqNullSafe(F.col(f"k{key}"))
    joined = rows.join(renamed, same, "left").orderBy(_PLACE)
    return frames_of(joined.select(*frame.columns, *values), names=[*names, *outputs])


def _aggregates(agg, others, names) -> list[tuple[Any, str]]:
    if isinstance(agg, str):
        wanted = [(column, agg) for column in others]
    elif isinstance(agg, list):
        wanted = [(column, function) for column in others for function in agg]
    elif isinstance(agg, dict):
        wanted = [
            (column, function)
            for column, functions in agg.items()
            for function in ([functions] if isinstance(functions, str) else functions)
        ]
    else:
        raise UsageError(
            f"agg must be a name of a function, a list of them, or a dict by column, got {agg!r}"
        )
    for column, function in wanted:
        if column not in names:
            raise UsageError(f"agg names the column {column!r}, which is not in {names}")
        if function not in _FUNCTIONS:
            raise UsageError(f"agg must be of {_FUNCTIONS}, got {function!r}")
    if not wanted and agg != "count":
        raise UsageError("There is no column to aggregate besides those that are grouped by")
    return wanted


def merged(left_rdd, right_rdd, how: str, on: Sequence | None):
    """Rows of two frames joined where keys are equal, a null being equal to a null.

    In the order of the left rows (of the right ones for ``"right"``, of the keys for ``"outer"``),
    then of the others.
    """
    from pyspark.sql import functions as F

    if how not in _HOW:
        raise UsageError(f"how must be one of {list(_HOW)}, got {how!r}")
    left, left_names = spark_frame(left_rdd, safe=True)
    right, right_names = spark_frame(right_rdd, safe=True)
    keys = [name for name in left_names if name in right_names] if on is None else list(on)
    missing = [key for key in keys if key not in left_names or key not in right_names]
    if missing or not keys:
        raise UsageError(
            f"Both frames must have the columns that they are merged on, {keys or 'none in common'}"
            f"; they have {left_names} and {right_names}"
        )
    left = _placed(left.toDF(*(f"l{c}" for c in left.columns)), "l")
    right = _placed(right.toDF(*(f"r{c}" for c in right.columns)), "r")
    same, types = F.lit(True), (dict(left.dtypes), dict(right.dtypes))
    for key in keys:
        one, two = f"l{_safe(left_names, key)}", f"r{_safe(right_names, key)}"
        if _is_text(types[0][one]) != _is_text(types[1][two]):
            raise UsageError(
                f"Column {key!r} is {types[0][one]} in one frame and {types[1][two]} in the other; "
                "give it one type first"
            )
        same = same & F.col(one).eqNullSafe(F.col(two))
    joined = left.join(right, same, _HOW[how])
    columns, names = [], []
    for name in left_names:
        column = F.col(f"l{_safe(left_names, name)}")
        if name in keys:
            column = F.coalesce(column, F.col(f"r{_safe(right_names, name)}"))
        columns.append(column)
        names.append(f"{name}_x" if name in right_names and name not in keys else name)
    for name in right_names:
        if name not in keys:
            columns.append(F.col(f"r{_safe(right_names, name)}"))
            names.append(f"{name}_y" if name in left_names else name)
    safe = [column.alias(f"c{i}") for i, column in enumerate(columns)]
    places = {"right": ["r", "l"]}.get(how, ["l", "r"])
    order = [F.asc_nulls_last(place) for place in places]
    if how == "outer":
        position = {name: i for i, name in enumerate(left_names)}
        order = [F.asc_nulls_last(f"c{position[key]}") for key in keys] + order
    result = joined.select(*safe, "l", "r").orderBy(*order).drop("l", "r")
    return frames_of(result, names=names)


def _is_text(type_: str) -> bool:
    return type_ == "string"
