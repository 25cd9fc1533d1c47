"""Prediction for the rows of a Feed, which holds DataFrame columns or shards of arrays.

The Feeds (:mod:`bigdl.orca.data.feeds`) call the :class:`DistributedPredictor` on their rows.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import (
    LazyModule,
    UsageError,
    UserFramesOnly,
)
from bigdl.orca.cluster.plan import is_connect
from bigdl.orca.cluster.spark_calls import silent_when_closed
from bigdl.orca.cluster.versions import arrow_udf, to_arrow
from bigdl.orca.data.arrow_types import cast_to_spec, is_arrow_convertible
from bigdl.orca.data.feeds.in_memory import input_arrays
from bigdl.orca.data.feeds.spark_dataframe import check_columns
from bigdl.orca.inference.shipping import LoadedModel, ShippedModel
from bigdl.orca.learn.prediction.classes import ShippedClassifier
from bigdl.orca.learn.prediction.outputs import (
    OutputColumns,
    OutputSpec,
    infer_outputs,
    rows_without_null,
    run_model,
    select_outputs,
    with_nulls,
)
from bigdl.orca.learn.prediction.report import ShippedWithTimer
from bigdl.runtime.shards.columns import (
    ColumnSpec,
    convert,
    decode,
    fitted_specs,
    float_dtype,
    nulls_are_missing,
)
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.texts import TEXT, is_text, takes_texts
from bigdl.runtime.shards.values import Column, columns_of, is_frame
from bigdl.training.batches import zero_column

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame

    from bigdl.orca.data.lake_tables.scans import FileTasks


pa = LazyModule("pyarrow", "orca")
logger = logging.getLogger("bigdl.orca")

_FIXED_WIDTH = {
    *("boolean", "byte", "short", "integer", "long", "float", "double", "decimal"),
    *("date", "timestamp", "timestamp_ntz"),
}
_SCALAR_ROWS = 8192  # rows of a record batch of scalar columns

NOT_FITTED = (
    "The model's input types are unknown because it has not been fitted; pass sample=, some rows "
    "of its inputs"
)


@dataclass(frozen=True)
class PredictOptions:
    """Arguments of ``predict`` that are independent of the input type.

    Attributes
    ----------
    config : dict or None
        Creator config; ``dtype`` is the dtype of floating-point inputs.
    feature_cols : sequence of str
    batch_size : int
        Number of rows per model call.
    output_cols : sequence of str or None
    inputs : list or None
        Types and shapes of the model's inputs in training, as in ``BatchSource.types``.
    """

    config: dict | None
    feature_cols: Sequence[str]
    batch_size: int
    output_cols: Sequence[str] | None = None
    inputs: list | None = None


@dataclass(frozen=True)
class DistributedPredictor:
    """A shipped model and its prediction options.

    Attributes
    ----------
    shipped : ShippedModel, ShippedClassifier or ShippedWithTimer
    options : PredictOptions
    """

    shipped: ShippedModel | ShippedClassifier | ShippedWithTimer
    options: PredictOptions

    def predict_frame(
        self, frame: DataFrame, threads: int = 1, rows: list | None = None
    ) -> DataFrame:
        """Return `frame` with a ``prediction`` column, or one column per named output.

        Parameters
        ----------
        frame : pyspark.sql.DataFrame
        threads : int
            Number of torch threads per task.
        rows : list, optional
            Model inputs for two rows, used to infer the outputs. By default these are dummy rows
            or rows of `frame`.
        """
        shipped, options = self.shipped, self.options
        known = options.inputs
        specs, plain, converted = converted_columns(
            frame, options.config, options.feature_cols, known
        )
        kept = plain.columns
        aliases = dict(zip(frame.columns, kept, strict=True))
        # send a column that already has the model's type, e.g. an image, only once; a vector is
        # always converted to an array
        as_is = {
            i: aliases[spec.name]
            for i, spec in enumerate(specs)
            if frame.schema[spec.name].dataType.simpleString() == spec.cast != "vector"
        }
        inputs = [as_is.get(i, f"f{i}") for i in range(len(specs))]
        if known is None or len(known) != len(specs):
            known = [_input_type(spec, frame.schema[spec.name].metadata) for spec in specs]
        if rows is None:
            outputs = _outputs(shipped.load(), specs, plain.select(*converted), known)
        else:
            outputs = infer_outputs(shipped.load(), rows)
        columns = OutputColumns.of(outputs, options.output_cols)
        columns.check(frame.columns)
        model_of_task = shipped.in_task(threads)
        tasks = None if is_connect(frame) else _file_tasks(plain)
        source = "Spark" if tasks is None else "Parquet files"
        logger.debug("The tasks that predict read their rows from %s", source)
        if tasks is not None:
            names = [aliases[spec.name] for spec in specs]
            task = _task(
                model_of_task, specs, kept, names, columns, options.batch_size, cast_to_spec
            )
            result = _map_files(plain, tasks, task, columns.schema(plain.schema), options)
        elif all(is_arrow_convertible(field.dataType) for field in frame.schema.fields):
            prepared = plain.select("*", *(c for i, c in enumerate(converted) if i not in as_is))
            task = _task(model_of_task, specs, kept, inputs, columns, options.batch_size)
            result = prepared.mapInArrow(silent_when_closed(task), columns.schema(plain.schema))
        else:
            arguments = [
                plain[as_is[i]] if i in as_is else each for i, each in enumerate(converted)
            ]
            task = value_task(model_of_task, lambda _: specs, columns, options.batch_size)
            value = arrow_udf(task, columns.ddl, iterates=True)(*arguments)
            answered = plain.select("*", value.alias("value"))
            result = answered.select(*kept, *columns.of_value(answered["value"]))
        return result.toDF(*frame.columns, *columns.names)

    def shard_predictor(self, threads: int) -> Callable[[Iterable], Iterator]:
        """Return a picklable function that adds predictions to the shards of a partition."""
        model_of_task, options = self.shipped.in_task(threads), self.options

        def predict(shards: Iterable) -> Iterator:
            with UserFramesOnly(), model_of_task() as model:
                for shard in shards:
                    outputs = _outputs_of_shard(model, shard, options)
                    yield _with_outputs(shard, outputs, options.output_cols)

        return predict


def converted_columns(
    frame, config: dict | None, feature_cols: Sequence[str], known: list | None = None
):
    """Convert a DataFrame's feature columns to the types of the model's inputs.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
    config : dict or None
    feature_cols : sequence of str
    known : list, optional
        Types of the model's inputs, as in :class:`PredictOptions`.

    Returns
    -------
    specs : list of ColumnSpec
    plain : pyspark.sql.DataFrame
        `frame` with its columns renamed to ``c0``, ``c1``, ...
    converted : list of pyspark.sql.Column
        Converted columns of `plain`, named ``f0``, ``f1``, ...
    """
    types = check_columns(frame, feature_cols)
    floats, texts = float_dtype(config), takes_texts(config)
    features = [(name, types[name]) for name in feature_cols]
    missing = feature_cols if nulls_are_missing(config) else ()
    specs = fitted_specs(features, floats, texts=texts, known=known, missing=missing)
    # mapInArrow resolves columns by name, which fails for dots, backticks and duplicate names
    plain = frame.toDF(*(f"c{i}" for i in range(len(frame.columns))))
    aliases = dict(zip(frame.columns, plain.columns, strict=True))
    converted = [
        convert(replace(spec, name=aliases[spec.name])).alias(f"f{i}")
        for i, spec in enumerate(specs)
    ]
    return specs, plain, converted


# -- inference of the model's outputs -----------------------------------------------------------


def _outputs(model, specs, frame, known) -> list[OutputSpec]:
    """Infer the model's outputs from a dummy batch or from the first row without nulls.

    Use a dummy batch if the input shapes are known, else the first row without nulls.
    """
    batch = _dummy_batch(specs, known)
    if batch is not None:
        try:
            return infer_outputs(model, batch)
        except UsageError:
            raise
        except Exception as error:  # e.g. ids that start at 1: only a real row works
            logger.debug("The model does not take rows of zeros: %s", error)
    row = _first_row(specs, frame)
    if row is not None:
        return infer_outputs(model, decode_columns(specs, row))
    # no rows: try widths until the model accepts one
    for width in (*getattr(model, "widths", ()), 3):
        guessed = [
            leaves or ([[None, s.dtype, [width]]] if (s.kind, s.ndim) == ("plain", 1) else None)
            for s, leaves in zip(specs, known, strict=True)
        ]
        if (batch := _dummy_batch(specs, guessed)) is not None:
            with contextlib.suppress(Exception):
                return infer_outputs(model, batch)
    logger.warning(
        "The input has no rows and the model has not been fitted, so its output type is unknown; "
        "'prediction' becomes a float column"
    )
    return [OutputSpec()]


def _first_row(specs, frame):
    """Return two copies of the first null-free row as an Arrow batch, or None if none exists."""
    from pyspark.sql import functions as F

    whole = frame
    for name in frame.columns:
        whole = whole.where(F.col(name).isNotNull())
    for rows in (1, 1000):  # a row may have nulls inside its arrays
        table = to_arrow(whole.limit(rows)).combine_chunks()
        if not table.num_rows:
            return None
        batch = table.to_batches()[0]
        valid = _rows_without_null(specs, batch.columns)
        first = 0 if valid is None else next(iter(np.flatnonzero(valid)), None)
        if first is not None:
            return batch.take(pa.array([first, first]))
    return None


def _rows_without_null(specs, columns) -> np.ndarray | None:
    """Return a mask of the converted rows without nulls, or None if no row has a null."""
    return rows_without_null(columns, [np.dtype(spec.dtype).kind == "i" for spec in specs])


def _input_type(spec, metadata) -> list | None:
    """Infer ``[[key, dtype, shape]]`` of a column from its spec and Spark ML metadata, or None.

    Spark ML's transformers store the size of a vector in the column's metadata.
    """
    if spec.kind == "plain" and spec.ndim == 0:
        return [[None, spec.dtype, []]]
    size = metadata.get("ml_attr", {}).get("num_attrs")
    return [[None, spec.dtype, [size]]] if spec.cast == "vector" and size else None


def _dummy_batch(specs, known):
    batch = []
    for spec, leaves in zip(specs, known, strict=True):
        if not leaves:
            return None
        is_map = leaves[0][0] is not None
        if is_map != (spec.kind == "map") or any(
            dtype != spec.dtype or len(shape) != spec.ndim for _, dtype, shape in leaves
        ):
            return None
        batch.append(zero_column(leaves, 2))
    return batch


def decode_columns(specs, columns) -> list:
    """Decode a record batch, or a list of Arrow columns, to arrays or dicts of arrays."""
    decoded = []
    for spec, column in zip(specs, getattr(columns, "columns", columns), strict=True):
        leaves = decode(spec, column)
        decoded.append(leaves[0][1] if spec.kind == "plain" else dict(leaves))
    return decoded


# -- the task -----------------------------------------------------------------------------------


def predict_rows(
    model: LoadedModel,
    rows: int,
    batch_size: int,
    take: Callable[[int, int], list],
    known: Sequence[OutputSpec] | None = None,
) -> list[tuple[str | None, np.ndarray]]:
    """Run the model on rows, batch by batch.

    Parameters
    ----------
    model : LoadedModel
    rows, batch_size : int
    take : callable
        ``take(start, count)`` returns the columns of `count` rows. Without `known`, `count` may
        exceed the number of rows by one.
    known : sequence of OutputSpec, optional
        The model's outputs, if they are known.

    Returns
    -------
    list of (key, ndarray)
        The outputs for all rows; an empty list without rows.
    """
    pieces = []
    for low in range(0, rows, batch_size):
        count = min(batch_size, rows - low)
        # a model that squeezes its output would drop the row dimension of a single row: pass two
        requested = count if known is not None else max(count, 2)
        outputs = run_model(model, take(low, requested), requested, known)
        pieces.append([(key, array[:count]) for key, array in outputs])
    count_rows = getattr(model, "count_rows", None)  # of a model that is measured
    if count_rows is not None:
        count_rows(rows)
    return [
        (parts[0][0], np.concatenate([array for _, array in parts]))
        for parts in zip(*pieces, strict=True)
    ]


def drop_null_rows(
    specs: Sequence[ColumnSpec], columns: Sequence[Any]
) -> tuple[list, int, np.ndarray | None]:
    """Drop the rows of Arrow columns that contain a null, unless nulls are missing values.

    Returns
    -------
    columns : list of pyarrow.Array
        The columns without those rows.
    rows : int
        Number of remaining rows.
    valid : ndarray of bool, or None
        Mask of the remaining rows; None if all rows remain.
    """
    must_exist = [
        (spec, column) for spec, column in zip(specs, columns, strict=True) if not spec.missing
    ]
    valid, rows = None, len(columns[0])
    if must_exist:
        valid = _rows_without_null([s for s, _ in must_exist], [c for _, c in must_exist])
    if valid is None:
        return list(columns), rows, None
    return [c.filter(pa.array(valid)) for c in columns], int(valid.sum()), valid


def predict_columns(
    model: LoadedModel,
    specs: Sequence[ColumnSpec],
    columns: Sequence[Any],
    batch_size: int,
    known: Sequence[OutputSpec],
) -> list[np.ndarray]:
    """Run the model on Arrow columns; return one array per output, or ``[]`` for zero rows."""

    def take(start, count):
        return decode_columns(specs, [column.slice(start, count) for column in columns])

    outputs = predict_rows(model, len(columns[0]), batch_size, take, known)
    return [array for _, array in outputs]


def _file_tasks(frame: DataFrame) -> FileTasks | None:
    """Return the tasks that read the frame from Parquet files, or None if Spark must read it."""
    from bigdl.orca.data.lake_tables.scans import file_tasks  # which needs pyarrow

    return file_tasks(frame)


def _map_files(frame, tasks: FileTasks, task, schema, options: PredictOptions) -> DataFrame:
    from bigdl.orca.data.lake_tables.scans import map_files

    rows = options.batch_size
    names = {field.dataType.typeName() for field in frame.schema.fields}
    if names <= _FIXED_WIDTH:
        rows *= max(1, _SCALAR_ROWS // rows)  # other values may be large
    return map_files(frame.sparkSession, tasks, task, schema, rows)


def _task(
    model_of_task,
    specs,
    kept,
    inputs,
    columns: OutputColumns,
    batch_size,
    convert: Callable = lambda _, array: array,
):
    def task(batches):
        with UserFramesOnly(), model_of_task() as model:
            for batch in batches:
                whole, rows, valid = drop_null_rows(specs, batch.select(inputs).columns)
                features = [convert(each, array) for each, array in zip(specs, whole, strict=True)]
                arrays = predict_columns(model, specs, features, batch_size, columns.outputs)
                added = [with_nulls(each, valid) for each in columns.arrow(arrays, rows)]
                made = [*batch.select(kept).columns, *added]
                yield pa.RecordBatch.from_arrays(made, [*kept, *columns.aliases])

    return task


def value_task(
    model_of_task: Callable,
    specs_of: Callable[[Sequence[Any]], Sequence[ColumnSpec]],
    columns: OutputColumns,
    batch_size: int,
    convert: Callable[[ColumnSpec, Any], Any] = lambda _, array: array,
) -> Callable[[Iterable], Iterator]:
    """Return a function for Spark's ``arrow_udf`` that runs the model on its Arrow arguments.

    Parameters
    ----------
    model_of_task : callable
    specs_of : callable
        Returns the column specs for the Arrow arrays of a batch.
    columns : OutputColumns
    batch_size : int
    convert : callable, optional
        ``convert(spec, array)`` casts an array to the type of its spec.
    """

    def predict(batches: Iterable) -> Iterator:
        with UserFramesOnly(), model_of_task() as model:
            for batch in batches:
                arrays = batch if isinstance(batch, tuple) else (batch,)
                specs = specs_of(arrays)
                whole, rows, valid = drop_null_rows(specs, arrays)
                taken = [convert(spec, array) for spec, array in zip(specs, whole, strict=True)]
                made = predict_columns(model, specs, taken, batch_size, columns.outputs)
                yield with_nulls(columns.sql_value(made, rows), valid)

    return predict


# -- one shard ----------------------------------------------------------------------------------


def _outputs_of_shard(model: LoadedModel, shard, options: PredictOptions) -> list:
    columns = columns_as_trained(shard, options.feature_cols, options.config, options.inputs)
    rows = len(columns[0][2])

    def take(start, count):
        return take_rows(columns, np.arange(start, start + count) % rows)

    if rows:
        return predict_rows(model, rows, options.batch_size, take)
    return _outputs_without_rows(model, columns, options.inputs)


def columns_as_trained(
    shard: object, feature_cols: Sequence[str], config: dict | None, known: list | None
) -> list[Column]:
    """Return the columns of in-memory data in the dtypes of the training data.

    Parameters
    ----------
    shard : pandas.DataFrame, dict, tuple, list or ndarray
    feature_cols : sequence of str
    config : dict or None
    known : list or None
        Types of the model's inputs, as in :class:`PredictOptions`.
    """
    floats, texts = float_dtype(config), takes_texts(config)
    missing = feature_cols if nulls_are_missing(config) else ()
    columns = columns_of(
        shard, list(feature_cols), None, None, with_labels=False, texts=texts, missing=missing
    )
    names = list(dict.fromkeys(name for name, _, _ in columns))
    leaves = known if known is not None and len(known) == len(names) else [[]] * len(names)
    wanted = {
        (name, key): dtype
        for name, each in zip(names, leaves, strict=True)
        for key, dtype, _ in each or ()
    }
    return [
        (name, key, in_dtype(values, wanted.get((name, key)), floats, name))
        for name, key, values in columns
    ]


def in_dtype(values: np.ndarray, dtype: str | None, floats: str, name: str) -> np.ndarray:
    """Convert values to the model's input dtype; if `dtype` is None, convert floats to `floats`.

    Raises
    ------
    SourceError
        If the dtype cannot hold a number, or if booleans and numbers are mixed up.
    """
    code = values.dtype.kind
    if dtype is None or code == "c":
        return values.astype(floats, copy=False) if code == "f" else values
    if code == TEXT or is_text(dtype) or values.dtype == dtype:
        return values
    if (code == "b") != (dtype == "bool"):
        raise SourceError(
            f"'{name}' is {values.dtype} here but {dtype} in the training data; use the same "
            "type in both",
            code="data-schema",
            column=name,
        )
    with np.errstate(invalid="ignore"):
        cast = values.astype(dtype)
    if cast.dtype.kind in "iu" and len(lossy := values[cast != values]):
        raise SourceError(
            f"'{name}' holds {lossy.flat[0]}, which {dtype}, its type in the training data, cannot "
            "represent; cast it, or fill missing values",
            code="data-value",
            column=name,
        )
    return cast


def _outputs_without_rows(model: LoadedModel, columns: list[Column], known: list | None) -> list:
    """Return zero-row outputs with inferred shapes, or ``[]`` if the model rejects dummy rows."""
    arrays = [(n, k, np.zeros((2, *v.shape[1:]), v.dtype)) for n, k, v in columns]
    dummies = [take_rows(arrays, slice(None))]
    if known is not None and all(known) and len(known) == len(dummies[0]):
        dummies.insert(0, [zero_column(leaves, 2) for leaves in known])
    for batch in dummies:
        try:
            return [(key, array[:0]) for key, array in run_model(model, batch, 2)]
        except Exception as error:
            logger.debug("The model does not take rows of zeros: %s", error)
    return []


def predict_shard(
    model: LoadedModel, shard: Any, options: PredictOptions
) -> np.ndarray | dict[str, np.ndarray] | pd.DataFrame:
    """Return the predictions for the rows of a shard, without the shard's columns.

    Returns
    -------
    ndarray, dict of ndarray or pandas.DataFrame
        An array if there is one name; else a DataFrame with the input's index, or a dict.
    """
    if not is_frame(shard):
        shard, _ = input_arrays(shard, bool(options.feature_cols))
    named = _named(_outputs_of_shard(model, shard, options), options.output_cols)
    if len(named) == 1:
        (values,) = named.values()
        if not isinstance(values, list):
            return values
    if not is_frame(shard):
        return named
    import pandas as pd

    cells = {name: to_cells(value) for name, value in named.items()}
    return pd.DataFrame(cells, index=shard.index)


def leaf_types(columns: Sequence[Any]) -> list[list]:
    """Return ``[key, dtype, shape]`` of every array, in one list per column."""
    return [
        [
            [key, TEXT if array.dtype.kind == TEXT else array.dtype.name, list(array.shape[1:])]
            for key, array in (each if isinstance(each, dict) else {None: each}).items()
        ]
        for each in columns
    ]


def take_rows(columns: list, index) -> list:
    """Select rows of the columns that ``columns_of`` returned, as a list of model inputs."""
    batch: dict[str, Any] = {}
    for name, key, values in columns:
        part = np.ascontiguousarray(values[index])
        if key is None:
            batch[name] = part
        else:
            batch.setdefault(name, {})[key] = part
    return list(batch.values())


def _with_outputs(shard, outputs, output_cols):
    named = _named(outputs, output_cols)
    if is_frame(shard):
        named = {name: to_cells(value) for name, value in named.items()}
    elif not isinstance(shard, dict):
        shard = {"x": shard}
    elif len(named) == 1:
        named = {name: _like_label(value, shard.get("y")) for name, value in named.items()}
    for name in named:
        if name in shard:
            raise UsageError(
                f"The shards already have '{name}'; rename it, or name the outputs with "
                "output_cols=",
                code="column-duplicate",
                column=name,
            )
    return shard.assign(**named) if is_frame(shard) else {**shard, **named}


def _like_label(output: object, label: object) -> object:
    """Add trailing dimensions of size 1 that the label has and the output lacks.

    NumPy would broadcast ``prediction - y`` of shapes (n,) and (n, 1) to (n, n).
    """
    if isinstance(output, np.ndarray) and isinstance(label, np.ndarray):
        extra = label.ndim - output.ndim
        if extra > 0 and label.shape == output.shape + (1,) * extra:
            return output.reshape(label.shape)
    return output


def _named(outputs, output_cols) -> dict[str, Any]:
    if not outputs:  # the shard has no rows
        return dict.fromkeys(output_cols or ["prediction"], np.empty(0, np.float32))
    names, numbers = select_outputs([key for key, _ in outputs], output_cols)
    arrays = [outputs[number][1] for number in numbers]
    return {names[0]: arrays} if len(names) < len(arrays) else dict(zip(names, arrays, strict=True))


def to_cells(value):
    """Convert an output to the cells of a pandas column: scalars, arrays, or lists of arrays."""
    if isinstance(value, list | tuple):
        return [list(row) for row in zip(*value, strict=True)]
    return value if value.ndim == 1 else list(value)
