"""Compatibility functions for Spark 3.5, 4.0, 4.1 and newer.

Each function works on all versions and uses the newest Spark's API if available.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from bigdl.common.errors import LazyModule, UsageError, require
from bigdl.orca.cluster.plan import connect_session, is_connect

if TYPE_CHECKING:
    from typing import BinaryIO

    import pandas as pd
    import pyarrow as pa
    from pyspark import SparkContext
    from pyspark.errors import PySparkException
    from pyspark.sql import Column, DataFrame, Observation, SparkSession
    from pyspark.sql.types import DataType, StructType
else:
    pa = LazyModule("pyarrow", "orca")

OLDEST = (3, 5)


def require_pyspark() -> None:
    """Check that PySpark is installed and not too old.

    Raises
    ------
    MissingExtraError, UsageError
        If PySpark is missing, or too old.
    """
    check_version(require("pyspark", "orca").__version__)


def check_version(version: str) -> None:
    """Check that a version of PySpark is not too old.

    Raises
    ------
    UsageError
        If the version is too old.
    """
    if release(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UsageError(
            f"Orca needs Spark {oldest} or newer, but the installed PySpark is {version}; "
            "use a newer release of your platform, or run: pip install 'bigdl[orca]'",
            code="version-unsupported",
            package="pyspark",
            version=str(version),
        )


def release(version: str) -> tuple[int, int]:
    """Return the major and minor number of a version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def spark_release() -> tuple[int, int]:
    """Return the major and minor number of the installed PySpark's version."""
    import pyspark

    return release(pyspark.__version__)


def python_mismatch(workers: str) -> str:
    """Return advice for Spark workers whose Python version differs from the program's.

    Parameters
    ----------
    workers : str
        Version of the workers, or a PySpark message that contains it.
    """
    match = re.search(r"\b3\.\d+", workers)
    worker_python = f"Python {match[0]}" if match else "another Python"
    driver_python = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    return (
        f"Spark's workers run {worker_python}, but this program runs {driver_python}; before the "
        "Spark session is created, set the environment variable PYSPARK_PYTHON (or "
        f"spark.pyspark.python) to a {driver_python} that the workers have, on this machine "
        f"{sys.executable}"
    )


# -- threads and jobs ------------------------------------------------------------------------------


def spark_thread(
    target: Callable[[], Any], session: SparkSession | None = None
) -> threading.Thread:
    """Return a daemon thread that inherits this thread's local properties or session tags."""
    from pyspark import InheritableThread

    if "session" in inspect.signature(InheritableThread.__init__).parameters:
        return InheritableThread(target, daemon=True, session=session)
    if session is None or not is_connect(session):
        return InheritableThread(target, daemon=True)
    tags = session.getTags()

    def run():
        for tag in tags:
            session.addTag(tag)
        target()

    return threading.Thread(target=run, daemon=True)


def python_rdd_command(sc: SparkContext, parts: tuple) -> tuple:
    """Return a Python function's pickled command, broadcasts, environment and files for the JVM."""
    from pyspark import RDD

    return cast("Any", sys.modules[RDD.__module__])._prepare_for_python_RDD(sc, parts)


def data_type(text: str) -> DataType:
    """Parse a Spark type or schema from DDL text, such as ``"id int, name string"``."""
    from pyspark.sql.types import DataType

    if hasattr(DataType, "fromDDL"):
        return DataType.fromDDL(text)
    from pyspark.sql.utils import is_remote

    if is_remote():
        client: Any = cast("SparkSession", connect_session()).client
        return client._analyze(method="ddl_parse", ddl_string=text).parsed
    from pyspark.sql.types import _parse_datatype_string

    return _parse_datatype_string(text)


def observed(observation: Observation) -> dict[str, Any]:
    """Return the values of an Observation, with arrays and rows as lists."""
    return {name: _plain_value(value) for name, value in observation.get.items()}


def _plain_value(value: Any) -> object:
    if hasattr(value, "_target_id") and hasattr(value, "apply"):  # a JVM object, in Spark 3.5
        return [_plain_value(value.apply(i)) for i in range(value.length())]
    return value


def condition_of(error: PySparkException) -> str:
    """Return the name of the Spark error condition of an error."""
    name = error.getCondition() if hasattr(error, "getCondition") else error.getErrorClass()
    return str(name)


# -- Arrow -----------------------------------------------------------------------------------------


def arrow_schema(schema: StructType, timezone: str = "UTC") -> pa.Schema:
    """Convert a Spark schema to an Arrow schema, with timestamps in the given time zone."""
    return pa.schema([(f.name, arrow_type(f.dataType, timezone)) for f in schema.fields])


def arrow_type(type_: DataType, timezone: str = "UTC") -> pa.DataType:
    """Convert a Spark type to an Arrow type, with timestamps in the given time zone."""
    from pyspark.sql.pandas.types import to_arrow_type

    if "timezone" in inspect.signature(to_arrow_type).parameters:
        return to_arrow_type(type_, timezone=timezone)
    return _in_zone(to_arrow_type(type_), timezone)


def _in_zone(type_: pa.DataType, zone: str) -> pa.DataType:
    if pa.types.is_timestamp(type_) and type_.tz is not None:
        return pa.timestamp(type_.unit, zone)
    if pa.types.is_list(type_):
        return pa.list_(type_.value_field.with_type(_in_zone(type_.value_type, zone)))
    if pa.types.is_map(type_):
        return pa.map_(_in_zone(type_.key_type, zone), _in_zone(type_.item_type, zone))
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_in_zone(field.type, zone)) for field in type_])
    return type_


def to_arrow(frame: DataFrame) -> pa.Table:
    """Collect all rows of a DataFrame as an Arrow table."""
    if hasattr(type(frame), "toArrow"):
        return frame.toArrow()
    schema = arrow_schema(frame.schema)
    if is_connect(frame):
        remote = cast("Any", frame)
        client = remote._session.client
        table, _ = client.to_table(remote._plan.to_proto(client))
        return table.rename_columns(schema.names).cast(schema)
    classic = cast("Any", frame)
    batches = classic._collect_as_arrow()
    if not batches:
        return schema.empty_table()
    return pa.Table.from_batches(batches).cast(schema)


def frame_of_rows(session: SparkSession, rows: Iterable, schema: str | StructType) -> DataFrame:
    """Create a DataFrame from rows, without verification of types if possible."""
    named = "verifySchema" in inspect.signature(session.createDataFrame).parameters
    options: dict[str, Any] = {"verifySchema": False} if named else {}
    return cast("Any", session).createDataFrame(rows, schema, **options)


def frame_of_arrow(
    session: SparkSession, table: pa.Table, schema: str | StructType | None = None
) -> DataFrame:
    """Create a DataFrame from the rows of an Arrow table.

    Parameters
    ----------
    session : pyspark.sql.SparkSession
    table : pyarrow.Table
    schema : str or StructType, optional
        Schema, by default that of the table.
    """
    # Spark stops reading at an empty batch
    parts = [batch for batch in table.to_batches() if batch.num_rows]
    table = pa.Table.from_batches(parts) if parts else table
    if spark_release() >= (4, 0):
        return session.createDataFrame(table, schema) if schema else session.createDataFrame(table)
    from pyspark.sql import DataFrame
    from pyspark.sql.pandas.types import from_arrow_schema

    target: Any = data_type(schema) if isinstance(schema, str) else schema
    target = target or from_arrow_schema(table.schema)
    table = table.rename_columns([field.name for field in target.fields])
    # the server rejects nullable columns for non-nullable ones
    pairs = zip(arrow_schema(target), target, strict=True)
    table = table.cast(pa.schema([field.with_nullable(f.nullable) for field, f in pairs]))
    if is_connect(session):
        from pyspark.sql.connect import plan as plans
        from pyspark.sql.connect.dataframe import DataFrame as ConnectFrame

        # the server reads only the first batch of a stream
        whole = table.combine_chunks()
        remote = cast("Any", session)
        relations = cast("Any", plans)
        plan = relations.LocalRelation(whole, schema=target.json())
        (limit,) = remote.client.get_configs("spark.sql.session.localRelationCacheThreshold")
        if limit is not None and whole.nbytes >= int(limit):  # messages are limited to 128 MB
            plan = relations.CachedLocalRelation(remote._cache_local_relation(plan))
        return cast("Any", ConnectFrame).withPlan(plan, session)
    classic = cast("Any", session)
    sql = classic._jvm.PythonSQLUtils
    size = max(1, -(-table.num_rows // classic.sparkContext.defaultParallelism))
    cells = classic._sc._serialize_to_jvm(
        table.to_batches(max_chunksize=size),
        _ArrowStream(),
        sql.readArrowStreamFromFile,
        classic._jvm.ArrowIteratorServer,
    )
    java_frame = sql.toDataFrame(cells, target.json(), classic._jsparkSession)
    return DataFrame(java_frame, session)


class _ArrowStream:
    """Serializer of record batches to the Arrow stream that Spark 3.5 reads."""

    def dump_stream(self, batches: Iterable[pa.RecordBatch], stream: BinaryIO) -> None:
        writer = None
        for batch in batches:
            writer = writer or pa.ipc.new_stream(stream, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()


# -- DataFrames ------------------------------------------------------------------------------------


def by_partition(frame: DataFrame, number: int, column: str) -> DataFrame:
    """Move each row to the partition given by an int column, modulo `number`."""
    if hasattr(type(frame), "repartitionById"):
        return frame.repartitionById(number, column)
    from pyspark.sql import functions as F

    # Spark partitions by the hash of a key, so search a key for each partition.
    keys = F.array(*map(F.lit, _keys_of_partitions(number)))
    partition = F.pmod(F.col(column), F.lit(number))
    return frame.repartition(number, F.element_at(keys, partition + 1))


def _keys_of_partitions(number: int) -> list[int]:
    """Return, for each partition, an int that Spark's hash partitioner maps to the partition."""
    keys: dict[int, int] = {}
    key = 0
    while len(keys) < number:
        keys.setdefault(_spark_hash(key) % number, key)
        key += 1
    return [keys[partition] for partition in range(number)]


def _spark_hash(value: int) -> int:
    """Compute Spark's hash of a non-negative int: 32-bit Murmur3 with seed 42."""
    mask = 0xFFFFFFFF
    mixed = value * 0xCC9E2D51 & mask
    mixed = (mixed << 15 | mixed >> 17) & mask
    mixture = 42 ^ mixed * 0x1B873593 & mask
    mixture = (mixture << 13 | mixture >> 19) & mask
    mixture = (mixture * 5 + 0xE6546B64 & mask) ^ 4  # number of hashed bytes
    mixture = (mixture ^ mixture >> 16) * 0x85EBCA6B & mask
    mixture = (mixture ^ mixture >> 13) * 0xC2B2AE35 & mask
    mixture ^= mixture >> 16
    return mixture - (1 << 32) if mixture >> 31 else mixture


def computed(frame: DataFrame) -> DataFrame:
    """Compute a DataFrame now and keep its rows on the executors.

    Over Spark Connect 3.5 the rows are cached, and recomputed if an executor is lost.
    """
    if hasattr(type(frame), "localCheckpoint"):
        return frame.localCheckpoint(eager=True)
    rows = frame.select(
        "*"
    ).persist()  # a separate plan, because the cache of `frame` may be released
    rows.count()
    return rows


def all_tasks_settings(session: SparkSession) -> dict[str, str]:
    """Return SQL settings under which a stage runs all tasks, even without input rows.

    Spark 3.5 removes the tasks of Arrow functions when it detects an empty input.
    """
    if spark_release() >= (4, 0):
        return {}
    name = "spark.sql.adaptive.optimizer.excludedRules"
    rule = "org.apache.spark.sql.execution.adaptive.AQEPropagateEmptyRelation"
    return {name: ",".join(filter(None, (session.conf.get(name, ""), rule)))}


def by_sets(
    frame: DataFrame,
    keys: Sequence[str],
    sets: Sequence[Sequence[str]],
    aggregates: Sequence[Column],
) -> DataFrame:
    """Group rows by each of several sets of columns, in one pass.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
    keys : sequence of str
        All columns of the sets; null in groups of a set that lacks them.
    sets : sequence of sequence of str
        Grouping sets.
    aggregates : sequence of pyspark.sql.Column
        Aggregates of other columns.

    Returns
    -------
    pyspark.sql.DataFrame
        Keys, ``source`` (Spark's grouping id: a bit per key, highest bit first, set if the key is
        not in the set) and aggregates.
    """
    from pyspark.sql import functions as F

    if hasattr(type(frame), "groupingSets"):
        columns = [[F.col(name) for name in each] for each in sets]
        grouped = frame.groupingSets(columns, *map(F.col, keys))
        return grouped.agg(F.grouping_id().alias("source"), *aggregates)
    bits = {key: 1 << index for index, key in enumerate(reversed(keys))}
    left_out = [sum(bits[key] for key in keys if key not in each) for each in sets]
    sources = F.explode(F.array(*(F.lit(each).cast("bigint") for each in left_out)))
    copies = frame.withColumn("source", sources)
    for key, bit in bits.items():
        is_included = F.col("source").bitwiseAND(F.lit(bit)) == 0
        copies = copies.withColumn(key, F.when(is_included, F.col(key)))
    return copies.groupBy(*keys, "source").agg(*aggregates)


def shuffle(value: Column, seed: int) -> Column:
    """Shuffle each array of a column with a seed; Spark Connect 3.5 uses a different order."""
    from pyspark.sql import functions as F

    if "seed" in inspect.signature(F.shuffle).parameters:
        return F.shuffle(value, seed)
    if spark_release() < (4, 0) and not is_connect(value):
        from pyspark import SparkContext
        from pyspark.sql import Column

        jvm = cast("Any", SparkContext._active_spark_context)._jvm
        shuffled = cast("Any", F.shuffle(value))._jc.expr().withNewSeed(seed)
        return cast("Any", Column)(jvm.org.apache.spark.sql.Column(shuffled))
    drawn = F.transform(value, lambda each: F.struct(F.rand(seed), each.alias("value")))
    return F.transform(F.array_sort(drawn), lambda each: each["value"])


def try_cast(value: Column, type_: str | DataType) -> Column:
    """Cast a column to another type, with null for values that cannot be cast."""
    if hasattr(type(value), "try_cast"):
        return value.try_cast(type_)
    from pyspark.sql import functions as F
    from pyspark.sql.types import DataType

    type_name = type_.simpleString() if isinstance(type_, DataType) else type_
    # only available in SQL text
    each = F.expr(f"each -> try_cast(each as {type_name})")
    return F.call_function("transform", F.array(value), each)[0]


# -- Arrow functions -------------------------------------------------------------------------------


def arrow_udf(
    function: Callable, return_type: str, *, iterates: bool = False
) -> Callable[..., Column]:
    """Create a column function from a function of Arrow arrays; before Spark 4.1 through pandas.

    Parameters
    ----------
    function : callable
    return_type : str
        Type of the result, in Spark's text form.
    iterates : bool
        True if the function takes an iterator of arrays, or of tuples of arrays, and yields arrays.
    """
    from pyspark.sql import functions as F

    if hasattr(F, "arrow_udf"):
        from pyspark.sql.functions import ArrowUDFType

        if iterates:
            return F.arrow_udf(function, return_type, ArrowUDFType.SCALAR_ITER)
        return F.arrow_udf(function, return_type)  # type: ignore[call-overload]  # pyspark's stubs lack a default
    from pyspark.sql.functions import PandasUDFType

    with warnings.catch_warnings():  # about missing type hints
        warnings.simplefilter("ignore", UserWarning)
        if iterates:
            return F.pandas_udf(_iterates_pandas(function), return_type, PandasUDFType.SCALAR_ITER)
        udf = F.pandas_udf(_through_pandas(function), return_type, PandasUDFType.SCALAR)

    def apply(*columns: Column) -> Column:
        return udf(*[each for c in columns for each in (c, F.typeof(c), c.isNull())])

    return apply


_TYPES = {
    "boolean": "bool",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "string": "string",
    "binary": "binary",
    "date": "date32",
}
_EXACT = 2**53  # pandas converts integers with nulls to floats


def _through_pandas(function: Callable) -> Callable:
    def work(*series: pd.Series) -> pd.Series | pd.DataFrame:
        arrays = [
            _cast_from_pandas(_array_from_series(values, are_null), types[0] if len(types) else "")
            for values, types, are_null in zip(*(series[i::3] for i in range(3)), strict=True)
        ]
        return _to_pandas(function(*arrays))

    return work


def _cast_from_pandas(array: pa.Array, type_name: str) -> pa.Array:
    """Cast an array from pandas to the type with this Spark name."""
    target = _known_type(type_name)
    if target is None or array.type == target:
        return array
    numbers = array
    while pa.types.is_list(numbers.type):
        numbers = numbers.flatten()
    if pa.types.is_floating(numbers.type) and pa.types.is_integer(_innermost(target)):
        import pyarrow.compute as pc

        largest = pc.max(pc.abs(numbers)).as_py()
        if largest is not None and largest >= _EXACT:
            raise UsageError(
                f"Integers from 2**53 in columns with nulls, here of type {type_name}, need Spark "
                "4.1 or newer; fill the nulls first",
                code="data-null",
            )
    return array.cast(target)


def _innermost(type_: pa.DataType) -> pa.DataType:
    return _innermost(type_.value_type) if pa.types.is_list(type_) else type_


def _known_type(type_name: str) -> pa.DataType | None:
    """Return the Arrow type of a Spark type name, or None if no exact type is needed."""
    if match := re.fullmatch(r"decimal\((\d+),(\d+)\)", type_name):
        return pa.decimal128(int(match[1]), int(match[2]))
    if type_name.startswith("array<"):
        inner = _known_type(type_name[len("array<") : -1])
        return None if inner is None else pa.list_(inner)
    return pa.type_for_alias(_TYPES[type_name]) if type_name in _TYPES else None


def _iterates_pandas(task: Callable[[Iterable], Iterator]) -> Callable[[Iterable], Iterator]:
    def predict(batches: Iterable) -> Iterator:
        def arrays() -> Iterator[tuple]:
            for batch in batches:
                yield tuple(
                    _array_from_series(s) for s in (batch if isinstance(batch, tuple) else [batch])
                )

        for values in task(arrays()):
            yield _to_pandas(values)

    return predict


def _array_from_series(
    series: pd.Series | pd.DataFrame, are_null: pd.Series | None = None
) -> pa.Array:
    """Convert a pandas Series to an Arrow array; NaN is null unless `are_null` is given."""
    if hasattr(series, "columns"):  # a struct, such as Spark ML's vectors
        types = {"type": pa.int8(), "size": pa.int32(), "indices": pa.list_(pa.int32())}
        names = [str(name) for name in series.columns]
        fields = [pa.Array.from_pandas(series[name], type=types.get(name)) for name in names]
        return pa.StructArray.from_arrays(fields, names=names)
    if are_null is not None and series.dtype.kind == "f":
        return pa.array(series.to_numpy(), mask=are_null.to_numpy(), from_pandas=False)
    return pa.Array.from_pandas(series)


def _to_pandas(values: pa.Array) -> pd.Series | pd.DataFrame:
    import pandas as pd

    if pa.types.is_struct(values.type):
        fields = zip(values.type, values.flatten(), strict=True)
        return pd.DataFrame({field.name: _to_pandas(each) for field, each in fields})
    if pa.types.is_floating(values.type):  # otherwise pandas represents null as NaN
        return values.to_pandas(types_mapper=pd.ArrowDtype)
    inner = values
    while pa.types.is_list(inner.type):
        inner = inner.flatten()
    if inner is not values and inner.null_count:
        return pd.Series(values.to_pylist(), dtype=object)
    return values.to_pandas(integer_object_nulls=True)
