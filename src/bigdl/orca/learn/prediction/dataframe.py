"""Prediction as a lazy column of a Spark DataFrame.

It is a plain ``mapInArrow`` without a barrier: all columns and the order of every partition are
kept, and the frame can be filtered, joined and computed again like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds.spark_dataframe import check_columns
from bigdl.orca.learn.prediction.output_columns import Output, OutputColumns
from bigdl.orca.learn.prediction.shipping import Ready, Shipped
from bigdl.runtime.shards.columns import column_spec, convert, decode, float_dtype
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.texts import takes_texts

__all__ = ["converted_columns", "decode_columns", "predict_dataframe", "run_model"]

logger = logging.getLogger("bigdl.orca")


def predict_dataframe(
    frame,
    shipped: Shipped,
    config: dict,
    feature_cols: Sequence[str],
    batch_size: int,
    output_cols: Sequence[str] | None = None,
    known: list | None = None,
    threads: int = 1,
):
    """`frame` with a ``prediction`` column, or one for each output that has a name.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
    shipped : Shipped
    config : dict
        ``dtype`` is that of the floating inputs.
    feature_cols : sequence of str
    batch_size : int
        Rows of one forward pass.
    output_cols : sequence of str, optional
    known : list, optional
        What a fit knows of its feature columns (``TensorShard.inputs``).
    threads : int
        Threads of torch in each task.

    Returns
    -------
    pyspark.sql.DataFrame
    """
    specs, plain, converted = converted_columns(frame, config, feature_cols)
    kept = plain.columns
    place = dict(zip(frame.columns, kept, strict=True))
    # a column that is of the model's type already, e.g. an image, travels once; a vector becomes
    # an array on the way
    as_is = {
        i: place[spec.name]
        for i, spec in enumerate(specs)
        if frame.schema[spec.name].dataType.simpleString() == spec.cast != "vector"
    }
    inputs = [as_is.get(i, f"f{i}") for i in range(len(specs))]
    if known is None or len(known) != len(specs):
        known = [_known(spec, frame.schema[spec.name].metadata) for spec in specs]
    outputs = _outputs(shipped.load(), specs, plain.select(*converted), known)
    columns = OutputColumns.of(outputs, output_cols)
    columns.check(frame.columns)
    ready = plain.select("*", *(c for i, c in enumerate(converted) if i not in as_is))
    task = _task(shipped.in_task(threads), specs, kept, inputs, columns, batch_size)
    result = ready.mapInArrow(task, columns.schema(plain.schema))
    return result.toDF(*frame.columns, *columns.names)


def converted_columns(frame, config: dict, feature_cols: Sequence[str]):
    """The columns of a DataFrame that a model takes, in the types of its inputs.

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
    specs = [column_spec(name, types[name], floats, texts=texts) for name in feature_cols]
    # mapInArrow finds columns by name, which fails for a dot, a backtick or a name given twice
    plain = frame.toDF(*(f"c{i}" for i in range(len(frame.columns))))
    place = dict(zip(frame.columns, plain.columns, strict=True))
    converted = [
        convert(replace(spec, name=place[spec.name])).alias(f"f{i}") for i, spec in enumerate(specs)
    ]
    return specs, plain, converted


# -- what the model returns ---------------------------------------------------------------------


def _outputs(model, specs, ready, known) -> list[Output]:
    """What the model returns: seen on made-up rows where their shape is known, else on the first.

    Two rows are tried, since a model that squeezes its output hides the dimension of a single one.
    """
    batch = _made_up(specs, known)
    if batch is not None:
        try:
            return _seen(model, batch)
        except UsageError:
            raise
        except Exception as error:  # e.g. ids that start at 1: then only a real row will do
            logger.debug("The model does not take rows of zeros: %s", error)
    table = ready.limit(1).toArrow()
    if table.num_rows == 0:
        return [Output(None, ())]
    try:
        batch = decode_columns(specs, table.combine_chunks().to_batches()[0])
    except SourceError as error:
        raise UsageError(str(error)) from None
    return _seen(model, [_twice(column) for column in batch])


def _seen(model, batch):
    return [Output(key, array.shape[1:]) for key, array in run_model(model, batch, 2)]


def _twice(column):
    if isinstance(column, dict):
        return {key: _twice(value) for key, value in column.items()}
    return np.concatenate([column, column])


def _known(spec, metadata) -> list | None:
    """What the schema tells of a column, in the form of ``TensorShard.inputs``.

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
        arrays = {key: np.zeros((2, *shape), dtype) for key, dtype, shape in leaves}
        batch.append(arrays if is_map else arrays[None])
    return batch


def decode_columns(specs, batch) -> list:
    """The columns of an Arrow batch as arrays, or dicts of them."""
    columns = []
    for spec, column in zip(specs, batch.columns, strict=True):
        leaves = decode(spec, column)
        columns.append(leaves[0][1] if spec.kind == "plain" else dict(leaves))
    return columns


def run_model(
    model: Ready, batch: list, rows: int, outputs: Sequence[Output] | None = None
) -> list[tuple[str | None, np.ndarray]]:
    """The outputs for a batch of numpy columns.

    Returns
    -------
    list of (key, ndarray of float32 of shape (rows, ...))
        The key is None unless the model returns a dict.
    """
    returned = model(batch)
    if isinstance(returned, dict):
        items = list(returned.items())
    elif isinstance(returned, list | tuple):
        items = [(None, item) for item in returned]
    else:
        items = [(None, returned)]
    if outputs is not None and len(items) != len(outputs):
        raise UsageError(
            f"The model returned {len(items)} outputs for one batch and {len(outputs)} for another"
        )
    return [
        (key, _array(item, rows, outputs[i].shape if outputs else None, model.squeezes))
        for i, (key, item) in enumerate(items)
    ]


def _array(item, rows, shape, squeezes) -> np.ndarray:
    import torch

    if isinstance(item, np.ndarray):
        array = np.asarray(item, np.float32)
    elif isinstance(item, torch.Tensor):
        array = item.detach().cpu().float().numpy()
    else:
        raise UsageError(
            "predict needs a model whose forward returns a tensor, or a tuple, list or dict of "
            f"them; it returned {type(item).__name__}"
        )
    while squeezes and array.ndim > 1 and array.shape[-1] == 1:
        array = array[..., 0]
    if rows == 1 and shape is not None and array.size == np.prod(shape, dtype=int):
        array = array.reshape(1, *shape)  # squeezed by the model
    if array.ndim == 0 or array.shape[0] != rows:
        raise UsageError(
            f"predict needs one row of output for each row of input; the model returned an output "
            f"of shape {tuple(item.shape)} for {rows} rows"
        )
    if shape is not None and array.ndim != len(shape) + 1:
        raise UsageError(
            f"The model returned an output of shape {tuple(item.shape)} for {rows} rows, but "
            f"{tuple(shape)} per row for others; its number of dimensions must not change"
        )
    return array


# -- the task -----------------------------------------------------------------------------------


def _task(model_of_task, specs, kept, inputs, columns: OutputColumns, batch_size):
    def task(batches):
        import pyarrow as pa

        with model_of_task() as model:
            for batch in batches:
                arrays = _predict(model, specs, batch.select(inputs), columns, batch_size)
                made = [*batch.select(kept).columns, *columns.arrow(arrays)]
                yield pa.RecordBatch.from_arrays(made, [*kept, *columns.places])

    return task


def _predict(model, specs, batch, columns, batch_size):
    """Every output for all rows of an Arrow batch."""
    pieces = []
    for low in range(0, batch.num_rows, batch_size):
        part = batch.slice(low, batch_size)
        try:
            ready = decode_columns(specs, part)
        except SourceError as error:
            raise UsageError(str(error)) from None
        found = run_model(model, ready, part.num_rows, columns.outputs)
        pieces.append([array for _, array in found])
    if not pieces:
        return [np.empty((0, *o.shape), np.float32) for o in columns.outputs]
    return [np.concatenate(arrays) for arrays in zip(*pieces, strict=True)]
