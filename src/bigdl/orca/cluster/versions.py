"""Differences between the versions of Spark that Orca runs on: 3.5, 4.0, 4.1 and newer.

Each function does one thing on all of them, by the way of the newest Spark where it is there.
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
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType
else:
    pa = LazyModule("pyarrow", "orca")

OLDEST = (3, 5)


def require_pyspark() -> None:
    """Check that PySpark is installed, and not too old.

    Raises
    ------
    MissingExtraError, UsageError
    """
    check_version(require("pyspark", "orca").__version__)


def check_version(version: str) -> None:
    """Check that a version of PySpark is not too old.

    Raises
    ------
    UsageError
    """
    if release(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UsageError(
            f"Orca needs Spark {oldest} or newer, but the PySpark that is installed is {version}; "
            "use a newer release of your platform, or run: pip install 'bigdl[orca]'",
            code="version-unsupported",
            package="pyspark",
            version=str(version),
        )


def release(version: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def spark_release() -> tuple[int, int]:
    """The first two numbers of the version of the PySpark that is installed."""
    import pyspark

    return release(pyspark.__version__)


def another_python(workers: str) -> str:
    """Return what to do about workers of Spark that run another Python than the program.

    Parameters
    ----------
    workers : str
        Their version, or a text of PySpark that tells it.
    """
    told = re.search(r"\b3\.\d+", workers)
    theirs = f"Python {told[0]}" if told else "another Python"
    own = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    return (
        f"Spark's workers run {theirs}, but this program runs {own}; before the session of Spark "
        "is made, set the environment variable PYSPARK_PYTHON (or spark.pyspark.python) to a "
        f"{own} that the workers have, on this machine {sys.executable}"
    )


# -- threads and jobs ------------------------------------------------------------------------------


def spark_thread(target: Callable[[], Any], session: Any = None) -> threading.Thread:
    """A daemon thread that has the local properties, or the tags of a session, of this one."""
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


def python_rdd_command(sc: Any, parts: tuple) -> tuple:
    """Return a function over an RDD for the JVM: command, broadcasts, variables, files."""
    from pyspark import RDD

    return cast("Any", sys.modules[RDD.__module__])._prepare_for_python_RDD(sc, parts)


def data_type(text: str) -> DataType:
    """The type that a text describes, as Spark writes types and schemas."""
    from pyspark.sql.types import DataType

    if hasattr(DataType, "fromDDL"):
        return DataType.fromDDL(text)
    from pyspark.sql.utils import is_remote

    if is_remote():
        return connect_session().client._analyze(method="ddl_parse", ddl_string=text).parsed
    from pyspark.sql.types import _parse_datatype_string

    return _parse_datatype_string(text)


def observed(observation: Any) -> dict[str, Any]:
    """Return the values of an Observation; lists and rows as lists."""
    return {name: _plain_value(value) for name, value in observation.get.items()}


def _plain_value(value: Any) -> Any:
    if hasattr(value, "_target_id") and hasattr(value, "apply"):  # of the JVM, in Spark 3.5
        return [_plain_value(value.apply(i)) for i in range(value.length())]
    return value


def condition_of(error: Any) -> str:
    """The name that Spark gives to an error."""
    name = error.getCondition() if hasattr(error, "getCondition") else error.getErrorClass()
    return str(name)


# -- Arrow -----------------------------------------------------------------------------------------


def arrow_schema(schema: StructType, timezone: str = "UTC") -> pa.Schema:
    """The schema of Arrow that has the types of one of Spark; times are of a zone."""
    return pa.schema([(f.name, arrow_type(f.dataType, timezone)) for f in schema.fields])


def arrow_type(kind: DataType, timezone: str = "UTC") -> pa.DataType:
    """The type of Arrow for a type of Spark; times are of a zone."""
    from pyspark.sql.pandas.types import to_arrow_type

    if "timezone" in inspect.signature(to_arrow_type).parameters:
        return to_arrow_type(kind, timezone=timezone)
    return _in_zone(to_arrow_type(kind), timezone)


def _in_zone(kind: pa.DataType, zone: str) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, zone)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_zone(kind.value_type, zone)))
    if pa.types.is_map(kind):
        return pa.map_(_in_zone(kind.key_type, zone), _in_zone(kind.item_type, zone))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_in_zone(field.type, zone)) for field in kind])
    return kind


def to_arrow(frame: DataFrame) -> pa.Table:
    """All rows of a DataFrame as a table of Arrow."""
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
    """A DataFrame of rows whose types are not looked at, where Spark can leave that out."""
    named = "verifySchema" in inspect.signature(session.createDataFrame).parameters
    options: dict[str, Any] = {"verifySchema": False} if named else {}
    return cast("Any", session).createDataFrame(rows, schema, **options)


def frame_of_arrow(
    session: SparkSession, table: pa.Table, schema: str | StructType | None = None
) -> DataFrame:
    """A DataFrame of the rows of a table of Arrow.

    Parameters
    ----------
    session : pyspark.sql.SparkSession
    table : pyarrow.Table
    schema : str or StructType, optional
        Default: that of the table.
    """
    # Spark reads no further than to a batch without rows
    parts = [batch for batch in table.to_batches() if batch.num_rows]
    table = pa.Table.from_batches(parts) if parts else table
    if spark_release() >= (4, 0):
        return session.createDataFrame(table, schema) if schema else session.createDataFrame(table)
    from pyspark.sql import DataFrame
    from pyspark.sql.pandas.types import from_arrow_schema

    wanted: Any = data_type(schema) if isinstance(schema, str) else schema
    wanted = wanted or from_arrow_schema(table.schema)
    table = table.rename_columns([field.name for field in wanted.fields])
    # the server refuses columns that may be null for ones that may not
    pairs = zip(arrow_schema(wanted), wanted, strict=True)
    table = table.cast(pa.schema([field.with_nullable(f.nullable) for field, f in pairs]))
    if is_connect(session):
        from pyspark.sql.connect import plan as plans
        from pyspark.sql.connect.dataframe import DataFrame as ConnectFrame

        # the server reads the first batch of a stream
        whole = table.combine_chunks()
        remote = cast("Any", session)
        kinds = cast("Any", plans)
        plan = kinds.LocalRelation(whole, schema=wanted.json())
        (limit,) = remote.client.get_configs("spark.sql.session.localRelationCacheThreshold")
        if limit is not None and whole.nbytes >= int(limit):  # a message has 128 MB at most
            plan = kinds.CachedLocalRelation(remote._cache_local_relation(plan))
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
    made = sql.toDataFrame(cells, wanted.json(), classic._jsparkSession)
    return DataFrame(made, session)


class _ArrowStream:
    """Writes record batches as Spark 3.5 reads them."""

    def dump_stream(self, batches: Iterable[pa.RecordBatch], stream: Any) -> None:
        writer = None
        for batch in batches:
            writer = writer or pa.ipc.new_stream(stream, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()


# -- DataFrames ------------------------------------------------------------------------------------


def by_partition(frame: DataFrame, number: int, column: str) -> DataFrame:
    """Move each row to the partition that a column of int names, modulo `number`."""
    if hasattr(type(frame), "repartitionById"):
        return frame.repartitionById(number, column)
    from pyspark.sql import functions as F

    # Spark puts a row where the hash of its key says: a key is looked for for each partition.
    keys = F.array(*map(F.lit, _keys_of_partitions(number)))
    place = F.pmod(F.col(column), F.lit(number))
    return frame.repartition(number, F.element_at(keys, place + 1))


def _keys_of_partitions(number: int) -> list[int]:
    """For each partition of `number` an int that Spark's hash puts there."""
    keys: dict[int, int] = {}
    key = 0
    while len(keys) < number:
        keys.setdefault(_spark_hash(key) % number, key)
        key += 1
    return [keys[partition] for partition in range(number)]


def _spark_hash(value: int) -> int:
    """Spark's hash of an int from 0 on: 32 bits of Murmur3 with the seed 42."""
    mask = 0xFFFFFFFF
    mixed = value * 0xCC9E2D51 & mask
    mixed = (mixed << 15 | mixed >> 17) & mask
    mixture = 42 ^ mixed * 0x1B873593 & mask
    mixture = (mixture << 13 | mixture >> 19) & mask
    mixture = (mixture * 5 + 0xE6546B64 & mask) ^ 4  # bytes that were hashed
    mixture = (mixture ^ mixture >> 16) * 0x85EBCA6B & mask
    mixture = (mixture ^ mixture >> 13) * 0xC2B2AE35 & mask
    mixture ^= mixture >> 16
    return mixture - (1 << 32) if mixture >> 31 else mixture


def computed(frame: DataFrame) -> DataFrame:
    """A DataFrame whose rows are computed now, and lie on the executors.

    Over Spark Connect 3.5 they are cached, and computed again if an executor is lost.
    """
    if hasattr(type(frame), "localCheckpoint"):
        return frame.localCheckpoint(eager=True)
    rows = frame.select("*").persist()  # another plan than `frame`, whose own cache may end
    rows.count()
    return rows


def settings_for_every_task(session: SparkSession) -> dict[str, str]:
    """Settings of SQL under which a stage has all its tasks, also where its input has no rows.

    Spark 3.5 plans a function of Arrow again when it has seen that there are none, without a task.
    """
    if spark_release() >= (4, 0):
        return {}
    name = "spark.sql.adaptive.optimizer.excludedRules"
    rule = "org.apache.spark.sql.execution.adaptive.AQEPropagateEmptyRelation"
    return {name: ",".join(filter(None, (session.conf.get(name, ""), rule)))}


def by_sets(
    frame: DataFrame, keys: Sequence[str], sets: Sequence[Sequence[str]], figures: Sequence[Column]
) -> DataFrame:
    """Group rows by each of several sets of columns, in one pass.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
    keys : sequence of str
        All columns of the sets; null in the groups of a set without them.
    sets : sequence of sequence of str
    figures : sequence of pyspark.sql.Column
        What is computed of each group, of other columns.

    Returns
    -------
    pyspark.sql.DataFrame
        The keys, ``source`` (Spark's grouping id: a bit for each key, from the first one down, set
        if it is left out) and the figures.
    """
    from pyspark.sql import functions as F

    if hasattr(type(frame), "groupingSets"):
        columns = [[F.col(name) for name in each] for each in sets]
        grouped = frame.groupingSets(columns, *map(F.col, keys))
        return grouped.agg(F.grouping_id().alias("source"), *figures)
    bits = {key: 1 << place for place, key in enumerate(reversed(keys))}
    left_out = [sum(bits[key] for key in keys if key not in each) for each in sets]
    sources = F.explode(F.array(*(F.lit(each).cast("bigint") for each in left_out)))
    copies = frame.withColumn("source", sources)
    for key, bit in bits.items():
        is_there = F.col("source").bitwiseAND(F.lit(bit)) == 0
        copies = copies.withColumn(key, F.when(is_there, F.col(key)))
    return copies.groupBy(*keys, "source").agg(*figures)


def shuffle(value: Column, seed: int) -> Column:
    """The elements of arrays in an order drawn by a seed, another one over Spark Connect 3.5."""
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


def try_cast(value: Column, kind: str | DataType) -> Column:
    """A column in another type; null where that cannot be."""
    if hasattr(type(value), "try_cast"):
        return value.try_cast(kind)
    from pyspark.sql import functions as F
    from pyspark.sql.types import DataType

    wanted = kind.simpleString() if isinstance(kind, DataType) else kind
    # only the text of SQL has it
    each = F.expr(f"each -> try_cast(each as {wanted})")
    return F.call_function("transform", F.array(value), each)[0]


# -- functions of Arrow ----------------------------------------------------------------------------


def arrow_udf(function: Callable, kind: str, *, iterates: bool = False) -> Any:
    """A function of arrays of Arrow as one of columns; before Spark 4.1 the rows go by pandas.

    Parameters
    ----------
    function : callable
    kind : str
        Its type, as Spark writes it.
    iterates : bool
        True if it takes an iterator of arrays, or of tuples of them, and yields arrays.
    """
    from pyspark.sql import functions as F

    if hasattr(F, "arrow_udf"):
        from pyspark.sql.functions import ArrowUDFType

        if iterates:
            return F.arrow_udf(function, kind, ArrowUDFType.SCALAR_ITER)
        return F.arrow_udf(function, kind)  # type: ignore[call-overload]  # pyspark's stubs lack a default
    from pyspark.sql.functions import PandasUDFType

    with warnings.catch_warnings():  # type hints would say the same
        warnings.simplefilter("ignore", UserWarning)
        if iterates:
            return F.pandas_udf(_iterates_pandas(function), kind, PandasUDFType.SCALAR_ITER)
        made = F.pandas_udf(_by_pandas(function), kind, PandasUDFType.SCALAR)

    def apply(*columns: Column) -> Column:
        return made(*[each for c in columns for each in (c, F.typeof(c), c.isNull())])

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
_EXACT = 2**53  # pandas turns integers beside nulls into floats


def _by_pandas(function: Callable) -> Callable:
    def work(*series: Any) -> Any:
        arrays = [
            _of_type(_of_series(values, are_null), kinds[0] if len(kinds) else "")
            for values, kinds, are_null in zip(*(series[i::3] for i in range(3)), strict=True)
        ]
        return _to_pandas(function(*arrays))

    return work


def _of_type(array: Any, kind: str) -> Any:
    """An array that comes from pandas, in the type that Spark calls `kind`."""
    wanted = _known_type(kind)
    if wanted is None or array.type == wanted:
        return array
    numbers = array
    while pa.types.is_list(numbers.type):
        numbers = numbers.flatten()
    if pa.types.is_floating(numbers.type) and pa.types.is_integer(_innermost(wanted)):
        import pyarrow.compute as pc

        largest = pc.max(pc.abs(numbers)).as_py()
        if largest is not None and largest >= _EXACT:
            raise UsageError(
                f"Whole numbers from 2**53 on beside nulls, here of type {kind}, need Spark 4.1 or "
                "newer; fill the nulls first",
                code="data-null",
            )
    return array.cast(wanted)


def _innermost(kind: pa.DataType) -> pa.DataType:
    return _innermost(kind.value_type) if pa.types.is_list(kind) else kind


def _known_type(kind: str) -> pa.DataType | None:
    """The type of Arrow for what Spark calls `kind`, None for one that is not needed exactly."""
    if match := re.fullmatch(r"decimal\((\d+),(\d+)\)", kind):
        return pa.decimal128(int(match[1]), int(match[2]))
    if kind.startswith("array<"):
        inner = _known_type(kind[len("array<") : -1])
        return None if inner is None else pa.list_(inner)
    return pa.type_for_alias(_TYPES[kind]) if kind in _TYPES else None


def _iterates_pandas(task: Callable[[Iterable], Iterator]) -> Callable[[Iterable], Iterator]:
    def predict(batches: Iterable) -> Iterator:
        def arrays() -> Iterator[tuple]:
            for batch in batches:
                yield tuple(_of_series(s) for s in (batch if isinstance(batch, tuple) else [batch]))

        for values in task(arrays()):
            yield _to_pandas(values)

    return predict


def _of_series(series: Any, are_null: Any = None) -> Any:
    """Values of pandas as an array; NaN is null unless `are_null` says which values are."""
    if hasattr(series, "columns"):  # a struct, such as Spark ML's vectors
        types = {"type": pa.int8(), "size": pa.int32(), "indices": pa.list_(pa.int32())}
        names = [str(name) for name in series.columns]
        fields = [pa.Array.from_pandas(series[name], type=types.get(name)) for name in names]
        return pa.StructArray.from_arrays(fields, names=names)
    if are_null is not None and series.dtype.kind == "f":
        return pa.array(series.to_numpy(), mask=are_null.to_numpy(), from_pandas=False)
    return pa.Array.from_pandas(series)


def _to_pandas(values: Any) -> Any:
    import pandas as pd

    if pa.types.is_struct(values.type):
        fields = zip(values.type, values.flatten(), strict=True)
        return pd.DataFrame({field.name: _to_pandas(each) for field, each in fields})
    if pa.types.is_floating(values.type):  # in which pandas itself has NaN for null
        return values.to_pandas(types_mapper=pd.ArrowDtype)
    inner = values
    while pa.types.is_list(inner.type):
        inner = inner.flatten()
    if inner is not values and inner.null_count:
        return pd.Series(values.to_pylist(), dtype=object)
    return values.to_pandas(integer_object_nulls=True)
