"""``map_batches``: run a function with models on batches of a Spark DataFrame's rows.

A pipeline of several models with one ``predict`` call each would copy the pixels between Python and
the JVM for every step. ``map_batches`` runs the whole pipeline in one task instead: each Python
worker of Spark builds the models once, and decodes the images of the next batch while the function
computes the current one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import LazyModule, UsageError, hide_frames
from bigdl.data.images import decode_column
from bigdl.orca.cluster.connect import active_spark
from bigdl.orca.cluster.versions import arrow_schema, data_type
from bigdl.orca.data.arrow_types import is_arrow_convertible
from bigdl.orca.data.feeds.spark_dataframe import check_columns
from bigdl.orca.inference.inference_model import InferenceModel
from bigdl.orca.inference.shipping import ShippedModel

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType
else:
    pa = LazyModule("pyarrow", "orca")

BatchResult = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
BatchFunction = Callable[[dict[str, Any], dict[str, InferenceModel]], BatchResult]


@hide_frames
def map_batches(
    data: DataFrame,
    function: BatchFunction,
    returns: str,
    *,
    models: Mapping[str, InferenceModel] | None = None,
    images: Mapping[str, tuple[int, int]] | None = None,
    columns: str | Sequence[str] | None = None,
    keep: str | Sequence[str] | None = None,
    batch_size: int = 64,
    reduced: bool = True,
    damaged: str = "raise",
) -> DataFrame:
    """Call a function on batches of rows, with models that each worker builds once.

    The result is lazy and keeps the order of the rows. It is an ordinary Spark stage: Spark reruns
    the task of a lost worker. A streaming DataFrame gives a streaming DataFrame. If `data` only
    selects columns of Parquet files, the tasks read the files with pyarrow and bypass the JVM
    (disable this with ``BIGDL_NO_PLAN_INSPECTION=1``).

    Parameters
    ----------
    data : pyspark.sql.DataFrame
    function : callable
        ``function(batch, models)``. `batch` is a dict of columns; each is an ndarray whose first
        axis is the rows. Arrays of equal length become further dimensions, timestamps become
        datetime64 in UTC, and strings, bytes and other values become an object array. `models` is
        the dict of loaded models. The function returns a dict of the columns in `returns`, each an
        ndarray or sequence with one entry per row. It may also return a function without arguments
        that returns this dict, which is called after the next batch was passed to `function`, so
        that the work on two batches overlaps.
    returns : str
        Names and types of the result columns, as a Spark DDL schema: ``"box array<int>, score
        float"``.
    models : dict of str to InferenceModel, optional
        Models that the function calls, by name. A model that ``load_module(..., accelerate=...)``
        converted runs in its converted runtime.
    images : dict of str to (int, int), optional
        Binary columns of encoded images (JPEG, PNG, ...), with the height and width to resize them
        to. The batch holds them as a uint8 RGB array of shape ``(rows, height, width, 3)``.
    columns : str or list of str, optional
        Further columns that the function reads.
    keep : str or list of str, optional
        Columns of `data` in the result; default all except the images.
    batch_size : int
        Maximum number of rows per batch.
    reduced : bool
        Decode a JPEG at 1/2, 1/4 or 1/8 scale if the result is still large enough. This is several
        times faster and changes pixels by a few grey levels.
    damaged : {"raise", "null"}
        What to do with bytes that are not an image: raise an error, or skip the row and set its
        result columns to null.

    Returns
    -------
    pyspark.sql.DataFrame
        A DataFrame with the columns in `keep` and `returns`.

    Raises
    ------
    UsageError
        If a column is missing or has the wrong type, if `function` is not callable, or if it
        returns the wrong columns or number of rows.

    Examples
    --------
    >>> import io
    >>> import torch
    >>> from PIL import Image
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.inference import InferenceModel, map_batches
    >>> sc = init_orca_context("local", cores=2)
    >>> def picture(grey):
    ...     file = io.BytesIO()
    ...     Image.new("RGB", (640, 480), (grey, grey, grey)).save(file, "JPEG")
    ...     return bytearray(file.getvalue())
    >>> spark = OrcaContext.get_spark_session()
    >>> pictures = spark.createDataFrame([(1, picture(9)), (2, picture(200))], ["id", "picture"])
    >>> brightness = InferenceModel().load_module(torch.nn.AvgPool2d(60, 80))
    >>> def look(batch, models):
    ...     grey = models["brightness"].predict(batch["picture"][..., 0].astype("float32"))
    ...     return {"bright": grey.reshape(-1) > 100}
    >>> seen = map_batches(
    ...     pictures, look, "bright boolean", models={"brightness": brightness},
    ...     images={"picture": (60, 80)},
    ... )
    >>> [tuple(row) for row in seen.collect()]
    [(1, False), (2, True)]
    """
    from bigdl.orca.data.lake_tables.scans import map_in_arrow  # which needs pyarrow

    if not callable(function):
        raise UsageError(
            f"function must be callable, got {type(function).__name__}",
            code="argument-type",
            argument="function",
        )
    check_positive("batch_size", batch_size)
    check_choice("damaged", damaged, ("raise", "null"))
    sizes = {name: _size(name, value) for name, value in (images or {}).items()}
    inputs = [*sizes, *_names(columns)]
    if not inputs:
        raise UsageError(
            "The function would get no columns; pass column names in images= or columns=",
            code="argument-missing",
            argument="columns",
        )
    kept = [n for n in data.columns if n not in sizes] if keep is None else _names(keep)
    types = check_columns(data, [*inputs, *kept])
    for name in sizes:
        if types[name].typeName() != "binary":
            raise UsageError(
                f"Image column '{name}' must be binary (the content of an image file), got "
                f"{types[name].simpleString()}",
                code="data-dtype",
                column=name,
            )
    for name in dict.fromkeys([*kept, *inputs]):
        if not is_arrow_convertible(types[name]):
            raise UsageError(
                f"Column '{name}' has type {types[name].simpleString()}, which Arrow cannot "
                "convert for Python; exclude it with keep=, or cast it",
                code="data-dtype",
                column=name,
            )
    added = _schema(returns)
    for name in added.names:
        if name.lower() in [each.lower() for each in kept]:
            raise UsageError(
                f"The result would have two columns '{name}'; exclude one with keep=",
                code="column-duplicate",
                column=name,
            )
    cluster = active_spark()
    threads = cluster.threads_per_task
    origins = _origins(models or {})
    program = _Program(function, origins, reduced, damaged == "null", threads)
    shipped = ShippedModel(program, cluster.broadcaster, ())
    # mapInArrow resolves columns by name, which fails for dots, backticks and duplicate names
    used = list(dict.fromkeys([*kept, *inputs]))
    plain = data.select(*(data[_quoted(name)].alias(f"c{i}") for i, name in enumerate(used)))
    rows = _BatchSlicer(
        {name: used.index(name) for name in inputs},
        sizes,
        [used.index(n) for n in kept],
        batch_size,
    )
    task = _task(shipped.in_task(threads), rows, added.names, arrow_schema(added), threads)
    schema = type(added)([*(plain.schema[f"c{i}"] for i in rows.kept), *_positional_fields(added)])
    return map_in_arrow(plain, task, schema, batch_size).toDF(*kept, *added.names)


# -- arguments -------------------------------------------------------------------------------------


def _names(columns: str | Sequence[str] | None) -> list[str]:
    return [columns] if isinstance(columns, str) else list(columns or ())


def _size(name: str, size: object) -> tuple[int, int]:
    if not isinstance(size, list | tuple) or len(size) != 2:
        raise UsageError(
            f"images= needs (height, width) for column '{name}', got {size!r}",
            code="argument-value",
            argument="images",
            column=name,
        )
    height, width = (check_positive(f"images[{name!r}]", side) for side in size)
    return height, width


def _schema(returns: str) -> StructType:
    if not isinstance(returns, str) or not returns.strip():
        raise UsageError(
            "returns must name the new columns and their types, such as 'score float', got "
            f"{returns!r}",
            code="argument-value",
            argument="returns",
        )
    try:
        return cast("StructType", data_type(returns))
    except Exception as error:  # the class differs between classic Spark and Spark Connect
        raise UsageError(
            f"returns={returns!r} is not a valid Spark schema: {error}",
            code="argument-value",
            argument="returns",
        ) from error


def _origins(models: Mapping[str, InferenceModel]) -> dict[str, tuple]:
    for name, model in models.items():
        if not isinstance(model, InferenceModel):
            raise UsageError(
                f"models[{name!r}] must be an InferenceModel, got {type(model).__name__}; use "
                "InferenceModel().load_module(model)",
                code="model-type",
                argument="models",
            )
    return {name: model.origin for name, model in models.items()}


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _positional_fields(schema: StructType) -> list:
    """Return the schema's fields under positional names, which need no quoting in Spark."""
    field_type = type(schema.fields[0])
    return [field_type(f"p{i}", each.dataType) for i, each in enumerate(schema.fields)]


# -- the task --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Program:
    """User function and the arguments that rebuild its models, as shipped to tasks.

    Attributes
    ----------
    function : callable
    origins : dict of str to tuple
        Arguments of :meth:`InferenceModel.of_origin`, by model name.
    reduced, skips : bool
        Whether to decode JPEGs at reduced scale, and whether to skip damaged images.
    threads : int
        Number of threads per model in a task.
    """

    function: BatchFunction
    origins: dict[str, tuple]
    reduced: bool
    skips: bool
    threads: int

    def load_on(self, device: object) -> _LoadedProgram:
        models = {
            name: InferenceModel.of_origin(origin, self.threads)
            for name, origin in self.origins.items()
        }
        return _LoadedProgram(self, models)


@dataclass(frozen=True)
class _LoadedProgram:
    """User function and its loaded models in a Spark Python worker."""

    program: _Program
    models: dict[str, InferenceModel]
    squeezes: bool = False

    def __call__(self, batch: list) -> BatchResult:
        return self.program.function(batch[0], self.models)


@dataclass(frozen=True)
class _BatchSlicer:
    """Slices Arrow record batches and converts their columns to arrays for the function.

    Attributes
    ----------
    inputs : dict of str to int
        Index of each column that the function reads.
    sizes : dict of str to (int, int)
        Height and width of each image column.
    kept : list of int
        Indices of the columns to keep in the result.
    batch_size : int
        Maximum number of rows per batch.
    """

    inputs: dict[str, int]
    sizes: dict[str, tuple[int, int]]
    kept: list[int]
    batch_size: int

    def pieces(self, batches: Iterable) -> Iterator[Any]:
        """Yield slices of the record batches with at most ``batch_size`` rows each."""
        for batch in batches:
            for low in range(0, batch.num_rows, self.batch_size):
                yield batch.slice(low, self.batch_size)

    def start(
        self, batch: pa.RecordBatch, program: _Program, threads: ThreadPoolExecutor
    ) -> _PendingBatch:
        """Convert a slice's columns to arrays and start decoding its images."""
        waiting = {
            name: decode_column(
                batch.column(self.inputs[name]), size, program.reduced, threads, program.skips
            )
            for name, size in self.sizes.items()
        }
        columns = {
            name: values_of(name, batch.column(index))
            for name, index in self.inputs.items()
            if name not in self.sizes
        }
        return _PendingBatch(batch, columns, waiting)


@dataclass
class _PendingBatch:
    """A batch whose images are still being decoded.

    Attributes
    ----------
    batch : pyarrow.RecordBatch
    columns : dict of str to ndarray
    waiting : dict of str to callable
        Per image column, a function that returns the pixels and a mask of the valid rows.
    """

    batch: Any
    columns: dict[str, np.ndarray]
    waiting: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = field(default_factory=dict)

    def columns_and_rows(self) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Wait for the images; return the columns and kept row indices (None if all are kept)."""
        decoded = {name: wait() for name, wait in self.waiting.items()}
        good = np.ones(self.batch.num_rows, bool)
        for _, is_image in decoded.values():
            good &= is_image
        columns = {name: pixels for name, (pixels, _) in decoded.items()}
        if good.all():
            return {**self.columns, **columns}, None
        rows = np.flatnonzero(good)
        return {n: v[rows] for n, v in {**self.columns, **columns}.items()}, rows


def _task(
    worker_of_task: Callable, rows: _BatchSlicer, names: list[str], schema: pa.Schema, threads: int
):
    def task(batches):
        with worker_of_task() as worker, ThreadPoolExecutor(threads) as decoders:
            pieces = rows.pieces(batches)
            pending = (rows.start(piece, worker.program, decoders) for piece in pieces)
            started = (_start_call(worker, each) for each in _lookahead(pending))
            for each, rows_of_it, result in _deferred(started):
                made = _finish_call(result, each, rows_of_it, names, schema)
                kept = [each.batch.column(i) for i in rows.kept]
                aliases = [f"c{i}" for i in rows.kept] + [f"p{i}" for i in range(len(names))]
                yield pa.RecordBatch.from_arrays([*kept, *made], aliases)

    return task


_StartedCall = tuple[_PendingBatch, np.ndarray | None, BatchResult | None]
"""A batch, the indices of the rows that the function got, and its result."""


def _start_call(worker: _LoadedProgram, pending: _PendingBatch) -> _StartedCall:
    """Call the function on a batch; its result is None if it would get no rows."""
    columns, rows = pending.columns_and_rows()
    count = pending.batch.num_rows if rows is None else len(rows)
    return pending, rows, worker([columns]) if count else None


def _deferred(calls: Iterator[_StartedCall]) -> Iterator[_StartedCall]:
    """Yield calls in order; a call with a deferred result after the next call has started."""
    waiting: list[_StartedCall] = []
    for call in calls:
        yield from waiting
        waiting = [call] if callable(call[2]) else []
        if not waiting:
            yield call
    yield from waiting


def _lookahead(values: Iterator) -> Iterator:
    """Yield the values, but fetch each next value before yielding the current one."""
    for value in itertools.islice(values, 1):
        for following in values:
            yield value
            value = following
        yield value


def _finish_call(
    result: BatchResult | None,
    pending: _PendingBatch,
    rows: np.ndarray | None,
    names: list[str],
    schema: pa.Schema,
) -> list:
    """Return the result columns of a call as Arrow arrays."""
    count = pending.batch.num_rows if rows is None else len(rows)
    if not count:
        return [pa.nulls(pending.batch.num_rows, each.type) for each in schema]
    made = result() if callable(result) else result
    if not isinstance(made, Mapping) or set(made) != set(names):
        has = sorted(made) if isinstance(made, Mapping) else type(made).__name__
        raise UsageError(
            f"The function must return a dict of {names}, got {has}", code="function-result"
        )
    arrays = []
    for each in schema:
        values = made[each.name]
        if len(values) != count:
            raise UsageError(
                f"The function must return one value per row: column '{each.name}' has "
                f"{len(values)} values for {count} rows",
                code="data-shape",
                column=each.name,
            )
        arrays.append(_array(each.name, values, each.type))
    if rows is None:
        return arrays
    indices = np.full(pending.batch.num_rows, -1)
    indices[rows] = np.arange(count)
    return [each.take(pa.array(indices, mask=indices < 0)) for each in arrays]


# -- columns ---------------------------------------------------------------------------------------


def values_of(name: str, array: pa.Array) -> np.ndarray:
    """Convert an Arrow column to an ndarray whose first axis is the rows.

    Arrays of equal length become further dimensions and timestamps become datetime64 in UTC.
    Other non-numeric columns become object arrays.
    """
    shape, inner = [len(array)], array
    while pa.types.is_list(inner.type) and not inner.null_count:
        lengths = np.diff(inner.offsets.to_numpy())
        if len(lengths) and (lengths != lengths[0]).any():
            break
        shape.append(int(lengths[0]) if len(lengths) else 0)
        inner = inner.flatten()
    is_number = pa.types.is_integer(inner.type) or pa.types.is_floating(inner.type)
    if (is_number or pa.types.is_boolean(inner.type)) and not inner.null_count:
        return np.ascontiguousarray(inner.to_numpy(zero_copy_only=False)).reshape(shape)
    if pa.types.is_timestamp(array.type) and not array.null_count:
        return array.cast(pa.timestamp("us")).to_numpy(zero_copy_only=False)
    objects = np.empty(len(array), object)
    objects[:] = array.to_pylist()
    return objects


def _array(name: str, values: Any, dtype: pa.DataType) -> pa.Array:
    """Convert a result column of the function to an Arrow array of type `dtype`."""
    try:
        if isinstance(values, np.ndarray) and values.dtype != object:
            if pa.types.is_binary(dtype) and values.ndim == 2 and values.dtype == np.uint8:
                return pa.array([row.tobytes() for row in np.ascontiguousarray(values)], dtype)
            return _nested(np.ascontiguousarray(values), dtype)
        return pa.array(list(values), dtype)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UsageError(
            f"Column '{name}' cannot be converted to {dtype} as returns= requires: {error}",
            code="data-dtype",
            column=name,
        ) from error


def _nested(values: np.ndarray, dtype: pa.DataType) -> pa.Array:
    """Convert an ndarray to an Arrow column with a list level per dimension after the first."""
    inner = dtype
    for _ in values.shape[1:]:
        if not pa.types.is_list(inner):
            raise TypeError(f"an array of {values.ndim} dimensions")
        inner = inner.value_type
    array = pa.array(values.reshape(-1)).cast(inner)
    for axis in range(values.ndim - 1, 0, -1):
        count, width = int(np.prod(values.shape[:axis])), values.shape[axis]
        offsets = pa.array((np.arange(count + 1) * width).astype(np.int32))
        array = pa.ListArray.from_arrays(offsets, array)
    return array
