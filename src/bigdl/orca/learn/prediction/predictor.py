"""A model that predicts the rows of a Feed: columns of a DataFrame, or shards of arrays.

The Feeds (:mod:`bigdl.orca.data.feeds`) bring the :class:`DistributedPredictor` to their rows.
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
from bigdl.orca.cluster.spark_calls import silent_when_closed
from bigdl.orca.cluster.versions import arrow_udf, to_arrow
from bigdl.orca.data.arrow_types import is_carried
from bigdl.orca.data.feeds.in_memory import input_arrays
from bigdl.orca.data.feeds.spark_dataframe import check_columns
from bigdl.orca.inference.shipping import LoadedModel, ShippedModel
from bigdl.orca.learn.prediction.outputs import (
    OutputColumns,
    OutputSpec,
    answered_rows,
    chosen_outputs,
    outputs_of_rows,
    run_model,
    with_nulls,
)
from bigdl.runtime.shards.columns import (
    ColumnSpec,
    convert,
    decode,
    fitted_specs,
    float_dtype,
)
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.texts import TEXT, is_text, takes_texts
from bigdl.runtime.shards.values import Column, columns_of, is_frame
from bigdl.training.batches import zero_column

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


pa = LazyModule("pyarrow", "orca")
logger = logging.getLogger("bigdl.orca")

NOT_FITTED = (
    "It is not known what the model takes, since it has not been fitted; pass sample=, some rows "
    "of its inputs"
)


@dataclass(frozen=True)
class PredictOptions:
    """Arguments of ``predict``, whatever the input is.

    Attributes
    ----------
    config : dict or None
        ``dtype`` is that of the floating inputs.
    feature_cols : sequence of str
    batch_size : int
        Rows of one call of the model.
    output_cols : sequence of str or None
    inputs : list or None
        Types and shapes of the model's inputs from the training, as in ``BatchSource.types``.
    """

    config: dict | None
    feature_cols: Sequence[str]
    batch_size: int
    output_cols: Sequence[str] | None = None
    inputs: list | None = None


@dataclass(frozen=True)
class DistributedPredictor:
    """A shipped model, and how it predicts.

    Attributes
    ----------
    shipped : ShippedModel
    options : PredictOptions
    """

    shipped: ShippedModel
    options: PredictOptions

    def predict_frame(
        self, frame: DataFrame, threads: int = 1, rows: list | None = None
    ) -> DataFrame:
        """Return `frame` with a column ``prediction``, or one for each output that has a name.

        Parameters
        ----------
        frame : pyspark.sql.DataFrame
        threads : int
            Threads of torch in each task.
        rows : list, optional
            The model's inputs for two rows, as it takes them, to see what it returns; by default
            they are made up, or are those of `frame`.
        """
        shipped, options = self.shipped, self.options
        known = options.inputs
        specs, plain, converted = converted_columns(
            frame, options.config, options.feature_cols, known
        )
        kept = plain.columns
        place = dict(zip(frame.columns, kept, strict=True))
        # a column that is of the model's type already, e.g. an image, travels once; a vector
        # becomes an array on the way
        as_is = {
            i: place[spec.name]
            for i, spec in enumerate(specs)
            if frame.schema[spec.name].dataType.simpleString() == spec.cast != "vector"
        }
        inputs = [as_is.get(i, f"f{i}") for i in range(len(specs))]
        if known is None or len(known) != len(specs):
            known = [_known(spec, frame.schema[spec.name].metadata) for spec in specs]
        if rows is None:
            outputs = _outputs(shipped.load(), specs, plain.select(*converted), known)
        else:
            outputs = outputs_of_rows(shipped.load(), rows)
        columns = OutputColumns.of(outputs, options.output_cols)
        columns.check(frame.columns)
        model_of_task = shipped.in_task(threads)
        if all(is_carried(field.dataType) for field in frame.schema.fields):
            ready = plain.select("*", *(c for i, c in enumerate(converted) if i not in as_is))
            task = _task(model_of_task, specs, kept, inputs, columns, options.batch_size)
            result = ready.mapInArrow(silent_when_closed(task), columns.schema(plain.schema))
        else:
            given = [plain[as_is[i]] if i in as_is else each for i, each in enumerate(converted)]
            task = value_task(model_of_task, lambda _: specs, columns, options.batch_size)
            value = arrow_udf(task, columns.ddl, iterates=True)(*given)
            ready = plain.select("*", value.alias("value"))
            result = ready.select(*kept, *columns.of_value(ready["value"]))
        return result.toDF(*frame.columns, *columns.names)

    def shard_predictor(self, threads: int) -> Callable[[Iterable], Iterator]:
        """Return a function that yields the shards of a partition with predictions; picklable."""
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
    """The columns of a DataFrame that a model takes, in the types of its inputs.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
    config : dict or None
    feature_cols : sequence of str
    known : list, optional
        Types of the model's inputs, as of :class:`PredictOptions`.

    Returns
    -------
    specs : list of ColumnSpec
    plain : pyspark.sql.DataFrame
        `frame` with its columns called ``c0``, ``c1``, …
    converted : list of pyspark.sql.Column
        Of `plain`, called ``f0``, ``f1``, …
    """
    types = check_columns(frame, feature_cols)
    floats, texts = float_dtype(config), takes_texts(config)
    given = [(name, types[name]) for name in feature_cols]
    specs = fitted_specs(given, floats, texts=texts, known=known)
    # mapInArrow finds columns by name, which fails for a dot, a backtick or a name given twice
    plain = frame.toDF(*(f"c{i}" for i in range(len(frame.columns))))
    place = dict(zip(frame.columns, plain.columns, strict=True))
    converted = [
        convert(replace(spec, name=place[spec.name])).alias(f"f{i}") for i, spec in enumerate(specs)
    ]
    return specs, plain, converted


# -- what the model returns ---------------------------------------------------------------------


def _outputs(model, specs, ready, known) -> list[OutputSpec]:
    """Return what the model returns for a row of a frame's converted columns.

    It is seen on made-up rows where their shape is known, else on the first row without a null.
    """
    batch = _made_up(specs, known)
    if batch is not None:
        try:
            return outputs_of_rows(model, batch)
        except UsageError:
            raise
        except Exception as error:  # e.g. ids that start at 1: then only a real row will do
            logger.debug("The model does not take rows of zeros: %s", error)
    row = _first_row(specs, ready)
    if row is not None:
        return outputs_of_rows(model, decode_columns(specs, row))
    for width in (*getattr(model, "widths", ()), 3):  # without rows: what the model accepts
        guessed = [
            leaves or ([[None, s.dtype, [width]]] if (s.kind, s.ndim) == ("plain", 1) else None)
            for s, leaves in zip(specs, known, strict=True)
        ]
        if (batch := _made_up(specs, guessed)) is not None:
            with contextlib.suppress(Exception):
                return outputs_of_rows(model, batch)
    logger.warning(
        "There are no rows, and what the model takes is not known since it has not been fitted, so "
        "neither is the type of what it returns; 'prediction' becomes a column of floats"
    )
    return [OutputSpec()]


def _first_row(specs, ready):
    """The first row that can be answered, twice, as an Arrow batch; None if there is none."""
    from pyspark.sql import functions as F

    whole = ready
    for name in ready.columns:
        whole = whole.where(F.col(name).isNotNull())
    for rows in (1, 1000):  # a row may have nulls within its arrays
        table = to_arrow(whole.limit(rows)).combine_chunks()
        if not table.num_rows:
            return None
        batch = table.to_batches()[0]
        answered = _answered(specs, batch.columns)
        first = 0 if answered is None else next(iter(np.flatnonzero(answered)), None)
        if first is not None:
            return batch.take(pa.array([first, first]))
    return None


def _answered(specs, columns) -> np.ndarray | None:
    """Which rows of converted columns the model can answer; None for all."""
    return answered_rows(columns, [np.dtype(spec.dtype).kind == "i" for spec in specs])


def _known(spec, metadata) -> list | None:
    """Return the type of a column by its schema, in the form of ``BatchSource.types``.

    The size of a vector is in the metadata that Spark ML's transformers leave.
    """
    if spec.kind == "plain" and spec.ndim == 0:
        return [[None, spec.dtype, []]]
    size = metadata.get("ml_attr", {}).get("num_attrs")
    return [[None, spec.dtype, [size]]] if spec.cast == "vector" and size else None


def _made_up(specs, known):
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
    """Arrow columns, or those of a batch, as arrays, or dicts of them."""
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
    """Predict rows batch by batch.

    Parameters
    ----------
    model : LoadedModel
    rows, batch_size : int
    take : callable
        ``take(start, count)`` gives the columns of so many rows. Without `known` it may be asked
        for one more than there are.
    known : sequence of OutputSpec, optional
        What the model returns, where that is known.

    Returns
    -------
    list of (key, ndarray)
        The outputs for all rows; none without rows.
    """
    pieces = []
    for low in range(0, rows, batch_size):
        count = min(batch_size, rows - low)
        # a model that squeezes its output hides the dimension of a single row: it gets two
        asked = count if known is not None else max(count, 2)
        outputs = run_model(model, take(low, asked), asked, known)
        pieces.append([(key, array[:count]) for key, array in outputs])
    return [
        (parts[0][0], np.concatenate([array for _, array in parts]))
        for parts in zip(*pieces, strict=True)
    ]


def whole_rows(
    specs: Sequence[ColumnSpec], columns: Sequence[Any]
) -> tuple[list, int, np.ndarray | None]:
    """Leave out the rows of Arrow columns that hold a null: they cost nothing but themselves.

    Returns
    -------
    columns : list of pyarrow.Array
        Without those rows.
    rows : int
        That are left.
    answered : ndarray of bool, or None
        Which these are; None if all.
    """
    answered, rows = _answered(specs, columns), len(columns[0])
    if answered is None:
        return list(columns), rows, None
    return [c.filter(pa.array(answered)) for c in columns], int(answered.sum()), answered


def predict_columns(
    model: LoadedModel,
    specs: Sequence[ColumnSpec],
    columns: Sequence[Any],
    batch_size: int,
    known: Sequence[OutputSpec],
) -> list[np.ndarray]:
    """Return every output for the rows of Arrow columns; none without rows."""

    def take(start, count):
        return decode_columns(specs, [column.slice(start, count) for column in columns])

    outputs = predict_rows(model, len(columns[0]), batch_size, take, known)
    return [array for _, array in outputs]


def _task(model_of_task, specs, kept, inputs, columns: OutputColumns, batch_size):
    def task(batches):
        with UserFramesOnly(), model_of_task() as model:
            for batch in batches:
                features, rows, answered = whole_rows(specs, batch.select(inputs).columns)
                arrays = predict_columns(model, specs, features, batch_size, columns.outputs)
                added = [with_nulls(each, answered) for each in columns.arrow(arrays, rows)]
                made = [*batch.select(kept).columns, *added]
                yield pa.RecordBatch.from_arrays(made, [*kept, *columns.places])

    return task


def value_task(
    model_of_task: Callable,
    specs_of: Callable[[Sequence[Any]], Sequence[ColumnSpec]],
    columns: OutputColumns,
    batch_size: int,
    convert: Callable[[ColumnSpec, Any], Any] = lambda _, array: array,
) -> Callable[[Iterable], Iterator]:
    """Return what predicts arguments of a function of Spark, for ``arrow_udf``.

    Parameters
    ----------
    model_of_task : callable
    specs_of : callable
        Gives the conversions of the Arrow arrays of a batch.
    columns : OutputColumns
    batch_size : int
    convert : callable, optional
        Brings an array into the type of its conversion.
    """

    def predict(batches: Iterable) -> Iterator:
        with UserFramesOnly(), model_of_task() as model:
            for batch in batches:
                arrays = batch if isinstance(batch, tuple) else (batch,)
                specs = specs_of(arrays)
                whole, rows, answered = whole_rows(specs, arrays)
                taken = [convert(spec, array) for spec, array in zip(specs, whole, strict=True)]
                made = predict_columns(model, specs, taken, batch_size, columns.outputs)
                yield with_nulls(columns.sql_value(made, rows), answered)

    return predict


# -- one shard ----------------------------------------------------------------------------------


def _outputs_of_shard(model: LoadedModel, shard, options: PredictOptions) -> list:
    columns = fitted_columns(shard, options.feature_cols, options.config, options.inputs)
    rows = len(columns[0][2])

    def take(start, count):
        return rows_of_columns(columns, np.arange(start, start + count) % rows)

    if rows:
        return predict_rows(model, rows, options.batch_size, take)
    return _outputs_without_rows(model, columns, options.inputs)


def fitted_columns(
    shard: Any, feature_cols: Sequence[str], config: dict | None, known: list | None
) -> list[Column]:
    """The columns of data in memory in the dtypes that the model takes.

    Parameters
    ----------
    shard : pandas.DataFrame, dict, tuple, list or ndarray
    feature_cols : sequence of str
    config : dict or None
    known : list or None
        Types of the model's inputs, as of :class:`PredictOptions`.
    """
    floats, texts = float_dtype(config), takes_texts(config)
    columns = columns_of(shard, list(feature_cols), None, None, with_labels=False, texts=texts)
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
    """Values in the dtype that the model takes; floating ones in `floats` if that is not known.

    Raises
    ------
    SourceError
        For a number that the dtype cannot hold, and for booleans in place of numbers.
    """
    kind = values.dtype.kind
    if dtype is None or kind == "c":
        return values.astype(floats, copy=False) if kind == "f" else values
    if kind == TEXT or is_text(dtype) or values.dtype == dtype:
        return values
    if (kind == "b") != (dtype == "bool"):
        raise SourceError(
            f"'{name}' is {values.dtype} here but {dtype} in the training data; give both the same "
            "type",
            code="data-schema",
            column=name,
        )
    with np.errstate(invalid="ignore"):
        cast = values.astype(dtype)
    if cast.dtype.kind in "iu" and len(lossy := values[cast != values]):
        raise SourceError(
            f"'{name}' holds {lossy.flat[0]}, which is no {dtype}, its type in the training data; "
            "cast it, or fill what is missing",
            code="data-value",
            column=name,
        )
    return cast


def _outputs_without_rows(model: LoadedModel, columns: list[Column], known: list | None) -> list:
    """The outputs for no rows, as two made-up rows show them; none if the model takes no zeros."""
    arrays = [(n, k, np.zeros((2, *v.shape[1:]), v.dtype)) for n, k, v in columns]
    made_up = [rows_of_columns(arrays, slice(None))]
    if known is not None and all(known) and len(known) == len(made_up[0]):
        made_up.insert(0, [zero_column(leaves, 2) for leaves in known])
    for batch in made_up:
        try:
            return [(key, array[:0]) for key, array in run_model(model, batch, 2)]
        except Exception as error:
            logger.debug("The model does not take rows of zeros: %s", error)
    return []


def predict_shard(model: LoadedModel, shard: Any, options: PredictOptions) -> Any:
    """Return the predictions alone, of arrays or a pandas frame.

    Returns
    -------
    ndarray, dict of ndarray or pandas.DataFrame
        An array for one name; else, as the input, a frame with its index or a dict.
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

    cells = {name: cells_of(value) for name, value in named.items()}
    return pd.DataFrame(cells, index=shard.index)


def types_of(columns: Sequence[Any]) -> list[list]:
    """``[key, dtype, shape]`` of the arrays of each column of a batch, an array or a dict of them,
    in the form of ``BatchSource.types``."""
    return [
        [
            [key, TEXT if array.dtype.kind == TEXT else array.dtype.name, list(array.shape[1:])]
            for key, array in (each if isinstance(each, dict) else {None: each}).items()
        ]
        for each in columns
    ]


def rows_of_columns(columns: list, index) -> list:
    """Rows of the columns that ``columns_of`` found, as a model takes them."""
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
        named = {name: cells_of(value) for name, value in named.items()}
    elif not isinstance(shard, dict):
        shard = {"x": shard}
    for name in named:
        if name in shard:
            raise UsageError(
                f"The shards have '{name}' already; rename it, or name the outputs with "
                "output_cols=",
                code="column-duplicate",
                column=name,
            )
    return shard.assign(**named) if is_frame(shard) else {**shard, **named}


def _named(outputs, output_cols) -> dict[str, Any]:
    if not outputs:  # of a shard without rows
        return dict.fromkeys(output_cols or ["prediction"], np.empty(0, np.float32))
    names, numbers = chosen_outputs([key for key, _ in outputs], output_cols)
    arrays = [outputs[number][1] for number in numbers]
    return {names[0]: arrays} if len(names) < len(arrays) else dict(zip(names, arrays, strict=True))


def cells_of(value):
    """An output as the cells of a column: numbers, arrays, or lists of them."""
    if isinstance(value, list | tuple):
        return [list(row) for row in zip(*value, strict=True)]
    return value if value.ndim == 1 else list(value)
