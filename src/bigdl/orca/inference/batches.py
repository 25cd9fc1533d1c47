"""A program over batches of a DataFrame's rows: decode images, call models, return columns.

Where a table goes through several models with steps of one's own between them, each model as a
``predict`` of its own would send pixels from Python to the JVM and back for every step. Here one
function has all of them, in one task: each Python worker of Spark builds the models once, and while
a batch is computed the images of the next one are decoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import LazyModule, UsageError
from bigdl.orca.cluster.connect import active_spark
from bigdl.orca.cluster.versions import arrow_schema, data_type
from bigdl.orca.data.arrow_types import is_carried
from bigdl.orca.data.feeds.spark_dataframe import check_columns
from bigdl.orca.inference.images import decode_images
from bigdl.orca.inference.inference_model import InferenceModel
from bigdl.orca.inference.shipping import ShippedModel

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pa = LazyModule("pyarrow", "orca")

BatchFunction = Callable[[dict[str, Any], dict[str, InferenceModel]], Mapping[str, Any]]


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

    The result is lazy and keeps the order of the rows. It is an ordinary stage of Spark: a task
    whose worker is lost runs again. A streaming DataFrame gives a streaming DataFrame. Where `data`
    is nothing but columns of Parquet files, their tasks read the files by pyarrow, which spares the
    way through the JVM (not with ``BIGDL_NO_PLAN_INSPECTION=1``).

    Parameters
    ----------
    data : pyspark.sql.DataFrame
    function : callable
        ``function(batch, models)``: `batch` is a dict of the columns, each an ndarray with a row
        per row (arrays of equal lengths as more dimensions; times as datetime64 in UTC; texts,
        bytes and anything else as an ndarray of objects), `models` those of the worker. It returns
        a dict of the columns that `returns` names, each an ndarray or a sequence with an entry per
        row.
    returns : str
        Names and types of the columns that the function makes, as Spark writes a schema:
        ``"box array<int>, score float"``.
    models : dict of str to InferenceModel, optional
        A model that ``load_module(..., accelerate=...)`` converted runs in its runtime.
    images : dict of str to (int, int), optional
        Columns of bytes that hold images (JPEG, PNG, ...), and the height and width that they are
        given. In the batch they are an ndarray ``(rows, height, width, 3)`` of uint8: red, green
        and blue.
    columns : str or list of str, optional
        What else the function takes.
    keep : str or list of str, optional
        Columns of `data` that the result keeps; default all but the images.
    batch_size : int
        Most rows of a batch.
    reduced : bool
        Decode a JPEG at a half, a quarter or an eighth of its size where that is still large
        enough, which takes a fraction of the time and changes pixels by a few grey levels.
    damaged : {"raise", "null"}
        What to do about bytes that are no image: end with an error, or leave the row out of the
        batch, so that the new columns are null.

    Returns
    -------
    pyspark.sql.DataFrame
        The columns of `keep` and those of `returns`.

    Raises
    ------
    UsageError
        If a column is missing or has another type, or the function is not one, or returns other
        columns or numbers of rows.

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
    given = [*sizes, *_names(columns)]
    if not given:
        raise UsageError(
            "The function would get no column; name some in images= or columns=",
            code="argument-missing",
            argument="columns",
        )
    kept = [n for n in data.columns if n not in sizes] if keep is None else _names(keep)
    types = check_columns(data, [*given, *kept])
    for name in sizes:
        if types[name].typeName() != "binary":
            raise UsageError(
                f"Column '{name}' of images must be binary, the content of a file; it is "
                f"{types[name].simpleString()}",
                code="data-dtype",
                column=name,
            )
    for name in dict.fromkeys([*kept, *given]):
        if not is_carried(types[name]):
            raise UsageError(
                f"Column '{name}' is {types[name].simpleString()}, which Arrow cannot carry to "
                "Python; leave it out with keep=, or cast it",
                code="data-dtype",
                column=name,
            )
    added = _schema(returns)
    for name in added.names:
        if name.lower() in [each.lower() for each in kept]:
            raise UsageError(
                f"The result would have two columns '{name}'; leave one out of keep=",
                code="column-duplicate",
                column=name,
            )
    cluster = active_spark()
    threads = cluster.threads_per_task
    origins = _origins(models or {})
    program = _Program(function, origins, reduced, damaged == "null", threads)
    shipped = ShippedModel(program, cluster.broadcaster, ())
    # mapInArrow finds columns by name, which fails for a dot, a backtick or a name given twice
    used = list(dict.fromkeys([*kept, *given]))
    plain = data.select(*(data[_quoted(name)].alias(f"c{i}") for i, name in enumerate(used)))
    rows = _BatchSlicer(
        {name: used.index(name) for name in given}, sizes, [used.index(n) for n in kept], batch_size
    )
    task = _task(shipped.in_task(threads), rows, added.names, arrow_schema(added), threads)
    schema = type(added)([*(plain.schema[f"c{i}"] for i in rows.kept), *_places(added)])
    return map_in_arrow(plain, task, schema, batch_size).toDF(*kept, *added.names)


# -- arguments -------------------------------------------------------------------------------------


def _names(columns: str | Sequence[str] | None) -> list[str]:
    return [columns] if isinstance(columns, str) else list(columns or ())


def _size(name: str, size: Any) -> tuple[int, int]:
    if not isinstance(size, list | tuple) or len(size) != 2:
        raise UsageError(
            f"images= needs (height, width) for column '{name}', got {size!r}",
            code="argument-value",
            argument="images",
            column=name,
        )
    height, width = (check_positive(f"images[{name!r}]", side) for side in size)
    return height, width


def _schema(returns: str) -> Any:
    if not isinstance(returns, str) or not returns.strip():
        raise UsageError(
            "returns must name the new columns and their types, such as 'score float', got "
            f"{returns!r}",
            code="argument-value",
            argument="returns",
        )
    try:
        return data_type(returns)
    except Exception as error:  # each Spark has a class of its own for it
        raise UsageError(
            f"returns={returns!r} is no schema of Spark: {error}",
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


def _places(schema: Any) -> list:
    """The new columns under names that are free of what Spark reads as syntax."""
    kind = type(schema.fields[0])
    return [kind(f"p{i}", each.dataType) for i, each in enumerate(schema.fields)]


# -- the task --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Program:
    """The function and what its models are made of, as they are shipped.

    Attributes
    ----------
    function : callable
    origins : dict of str to tuple
        Of :class:`InferenceModel`.
    reduced, skips : bool
        Whether JPEGs are decoded at a fraction of their size, and damaged images are left out.
    threads : int
        Of a model in a task.
    """

    function: BatchFunction
    origins: dict[str, tuple]
    reduced: bool
    skips: bool
    threads: int

    def load_on(self, device: Any) -> _LoadedProgram:
        models = {
            name: InferenceModel.of_origin(origin, self.threads)
            for name, origin in self.origins.items()
        }
        return _LoadedProgram(self, models)


@dataclass(frozen=True)
class _LoadedProgram:
    """The program in a Python worker of Spark, with its models."""

    program: _Program
    models: dict[str, InferenceModel]
    squeezes: bool = False

    def __call__(self, batch: list) -> Any:
        return self.program.function(batch[0], self.models)


@dataclass(frozen=True)
class _BatchSlicer:
    """The way from rows of Arrow to batches.

    Attributes
    ----------
    given : dict of str to int
        Places of the function's columns.
    sizes : dict of str to (int, int)
        Of images.
    kept : list of int
        Places of the columns that stay.
    batch_size : int
    """

    given: dict[str, int]
    sizes: dict[str, tuple[int, int]]
    kept: list[int]
    batch_size: int

    def pieces(self, batches: Iterable) -> Iterator[Any]:
        """Record batches of at most so many rows."""
        for batch in batches:
            for low in range(0, batch.num_rows, self.batch_size):
                yield batch.slice(low, self.batch_size)

    def taken(self, batch: Any, program: _Program, threads: ThreadPoolExecutor) -> _PendingBatch:
        """The columns of a record batch as the function gets them; images are being decoded."""
        waiting = {
            name: decode_images(
                batch.column(self.given[name]), size, program.reduced, threads, program.skips
            )
            for name, size in self.sizes.items()
        }
        columns = {
            name: values_of(name, batch.column(place))
            for name, place in self.given.items()
            if name not in self.sizes
        }
        return _PendingBatch(batch, columns, waiting)


@dataclass
class _PendingBatch:
    """A batch whose images are being decoded.

    Attributes
    ----------
    batch : pyarrow.RecordBatch
    columns : dict of str to ndarray
    waiting : dict of str to callable
        Each gives the images of a column, and which of its rows hold one.
    """

    batch: Any
    columns: dict[str, np.ndarray]
    waiting: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = field(default_factory=dict)

    def columns_and_rows(self) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """The columns, and the numbers of the rows that they have unless these are all."""
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
    worker_of_task: Callable, rows: _BatchSlicer, names: list[str], schema: Any, threads: int
):
    def task(batches):
        with worker_of_task() as worker, ThreadPoolExecutor(threads) as decoders:
            pieces = rows.pieces(batches)
            taken = (rows.taken(piece, worker.program, decoders) for piece in pieces)
            for each in _one_ahead(taken):
                made = _called(worker, each, names, schema)
                kept = [each.batch.column(i) for i in rows.kept]
                places = [f"c{i}" for i in rows.kept] + [f"p{i}" for i in range(len(names))]
                yield pa.RecordBatch.from_arrays([*kept, *made], places)

    return task


def _one_ahead(values: Iterator) -> Iterator:
    """The values, each given out when the one after it has been begun."""
    for value in itertools.islice(values, 1):
        for following in values:
            yield value
            value = following
        yield value


def _called(worker: _LoadedProgram, taken: _PendingBatch, names: list[str], schema: Any) -> list:
    """The columns that the function makes of a batch, in their types of Arrow."""
    columns, rows = taken.columns_and_rows()
    count = taken.batch.num_rows if rows is None else len(rows)
    if not count:
        return [pa.nulls(taken.batch.num_rows, each.type) for each in schema]
    made = worker([columns])
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
                f"The function must return a value for each row: column '{each.name}' has "
                f"{len(values)} for {count} rows",
                code="data-shape",
                column=each.name,
            )
        arrays.append(_array(each.name, values, each.type))
    if rows is None:
        return arrays
    places = np.full(taken.batch.num_rows, -1)
    places[rows] = np.arange(count)
    return [each.take(pa.array(places, mask=places < 0)) for each in arrays]


# -- columns ---------------------------------------------------------------------------------------


def values_of(name: str, array: Any) -> np.ndarray:
    """A column of Arrow as an ndarray with a row per row.

    Arrays of equal lengths become more dimensions, times datetime64 in UTC; what is no number is
    an object.
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


def _array(name: str, values: Any, kind: Any) -> Any:
    """Values of the function in a type of Arrow."""
    try:
        if isinstance(values, np.ndarray) and values.dtype != object:
            if pa.types.is_binary(kind) and values.ndim == 2 and values.dtype == np.uint8:
                return pa.array([row.tobytes() for row in np.ascontiguousarray(values)], kind)
            return _nested(np.ascontiguousarray(values), kind)
        return pa.array(list(values), kind)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UsageError(
            f"Column '{name}' cannot be {kind}, as returns= says: the function returned {error}",
            code="data-dtype",
            column=name,
        ) from error


def _nested(values: np.ndarray, kind: Any) -> Any:
    """An ndarray as a column: one list per dimension beyond the rows."""
    inner = kind
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
