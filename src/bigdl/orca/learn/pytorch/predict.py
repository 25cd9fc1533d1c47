"""Prediction as a lazy column of a Spark DataFrame.

It is a plain ``mapInArrow`` without a barrier: all columns and the order of every partition are
kept, and the frame can be filtered, joined and computed again like any other.  The plan owns an
immutable snapshot of the model (a broadcast that nobody destroys), and each Python worker keeps
the few models that it used last.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds.base import SourceError
from bigdl.orca.data.feeds.columns import column_spec, convert, decode, float_dtype
from bigdl.orca.data.feeds.spark_dataframe import check_columns

__all__ = ["predict_dataframe"]

logger = logging.getLogger("bigdl.orca")

_CACHE_BYTES = 2 << 30
_models: OrderedDict[str, tuple] = OrderedDict()  # of this Python worker: digest -> model, bytes


@dataclass(frozen=True)
class _Output:
    """Name and shape (without rows) of one output column."""

    name: str
    shape: tuple[int, ...]


def predict_dataframe(
    frame,
    cluster,
    parts,
    state: bytes | None,
    feature_cols: Sequence[str],
    batch_size: int,
    output_cols: Sequence[str] | None = None,
    inputs: list | None = None,
    threads: int = 1,
):
    """`frame` with a ``prediction`` column, or one per name of `output_cols`.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
    cluster : SparkCluster
    parts : ModelParts
    state : bytes or None
        State dict of the model.
    feature_cols : sequence of str
    batch_size : int
        Rows of one forward pass.
    output_cols : sequence of str, optional
    inputs : list, optional
        What a fit knows of its feature columns (``TensorShard.inputs``).
    threads : int
        Threads of torch in each task.

    Returns
    -------
    pyspark.sql.DataFrame
        A scalar output per row gives a float column, a vector one a ``DenseVector`` column, more
        dimensions nested ``array<float>``; several outputs an array of vectors, or one column each
        with `output_cols`.
    """
    import cloudpickle
    from pyspark.sql import functions as F

    types = check_columns(frame, feature_cols)
    if output_cols is not None and isinstance(output_cols, str):
        output_cols = [output_cols]
    for name in output_cols or ["prediction"]:
        if name in frame.columns:
            raise UsageError(
                f"The DataFrame has a column '{name}' already; rename it, or name the outputs "
                "with output_cols="
            )
    floats = float_dtype(parts.config)
    specs = [column_spec(name, types[name], floats) for name in feature_cols]
    names = [f"__bigdl_{i}" for i in range(len(specs))]
    ready = frame.select("*", *[convert(s).alias(n) for s, n in zip(specs, names, strict=True)])
    model = _load(parts, state)
    outputs = _outputs(model, specs, ready.select(*names), output_cols, inputs)
    data = cloudpickle.dumps((parts, state))
    snapshot = hashlib.sha256(data).hexdigest(), cluster.sc.broadcast(data)
    schema = _schema(frame.schema, outputs, bool(output_cols))
    arrow = _arrow_types(frame, outputs, bool(output_cols))
    task = _task(snapshot, specs, names, outputs, arrow, batch_size, threads, tuple(sys.path))
    result = ready.mapInArrow(task, schema)
    return result.select(*[F.col("`" + n.replace("`", "``") + "`") for n in schema.names])


def _load(parts, state):
    from bigdl.orca.learn.pytorch.state import loads

    model = parts.build_model()
    if state is not None:
        model.load_state_dict(loads(state))
    return model.eval()


# -- what the model returns ---------------------------------------------------------------------


def _outputs(model, specs, ready, output_cols, known) -> list[_Output]:
    """Shapes of the outputs: from a made-up row where its shape is known, else from the first."""
    batch = _made_up(specs, known)
    if batch is not None:
        try:
            return _shapes(_forward(model, batch), output_cols)
        except UsageError:
            raise
        except Exception as error:  # e.g. ids that start at 1: then only a real row will do
            logger.debug("The model does not take a row of zeros: %s", error)
    table = ready.limit(1).toArrow()
    if table.num_rows == 0:
        names = list(output_cols or ["prediction"])
        return [_Output(name, ()) for name in names]
    batch = _decode_batch(specs, table.combine_chunks().to_batches()[0])
    return _shapes(_forward(model, batch), output_cols)


def _made_up(specs, known):
    if known is None or len(known) != len(specs):
        known = [[[None, s.dtype, []]] if s.ndim == 0 else None for s in specs]
    batch = []
    for spec, leaves in zip(specs, known, strict=True):
        is_map = leaves is not None and leaves[0][0] is not None
        if leaves is None or is_map != (spec.kind == "map"):
            return None
        arrays = {key: np.zeros((1, *shape), dtype) for key, dtype, shape in leaves}
        batch.append(arrays if is_map else arrays[None])
    return batch


def _shapes(arrays, output_cols):
    if output_cols is None:
        names = ["prediction"] * len(arrays)
    elif len(output_cols) != len(arrays):
        raise UsageError(
            f"The model returns {len(arrays)} outputs but output_cols names {len(output_cols)}: "
            f"{list(output_cols)}"
        )
    else:
        names = list(output_cols)
    return [_Output(n, a.shape[1:]) for n, a in zip(names, arrays, strict=True)]


def _decode_batch(specs, batch):
    columns = []
    for spec, column in zip(specs, batch.columns, strict=True):
        leaves = decode(spec, column)
        columns.append(leaves[0][1] if spec.kind == "plain" else dict(leaves))
    return columns


def _forward(model, batch) -> list[np.ndarray]:
    """The outputs of a batch of numpy columns, with trailing dimensions of size 1 dropped."""
    import torch

    def tensor(column):
        if isinstance(column, dict):
            return {key: tensor(value) for key, value in column.items()}
        return torch.tensor(column)

    with torch.no_grad():
        output = model(*[tensor(column) for column in batch])
    if isinstance(output, dict):
        output = list(output.values())
    if not isinstance(output, list | tuple):
        output = [output]
    arrays = []
    for item in output:
        if not isinstance(item, torch.Tensor):
            raise UsageError(
                "predict needs a model whose forward returns tensors, it returned "
                f"{type(item).__name__}"
            )
        array = item.detach().cpu().float().numpy()
        while array.ndim > 1 and array.shape[-1] == 1:
            array = array[..., 0]
        arrays.append(array)
    return arrays


# -- Spark's types ------------------------------------------------------------------------------


def _schema(schema, outputs, named):
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import types as T

    def of(shape):
        if len(shape) == 0:
            return T.FloatType()
        if len(shape) == 1:
            return VectorUDT()
        nested: T.DataType = T.FloatType()
        for _ in shape:
            nested = T.ArrayType(nested)
        return nested

    fields = list(schema.fields)
    if named or len(outputs) == 1:
        fields += [T.StructField(o.name, of(o.shape)) for o in outputs]
    else:
        fields.append(T.StructField("prediction", T.ArrayType(VectorUDT())))
    return T.StructType(fields)


def _arrow_types(frame, outputs, named):
    """The Arrow type of each result column, as Spark will read it."""
    import pyarrow as pa

    vector = pa.struct(
        [
            pa.field("type", pa.int8(), nullable=False),
            pa.field("size", pa.int32()),
            pa.field("indices", pa.list_(pa.int32())),
            pa.field("values", pa.list_(pa.float64())),
        ]
    )

    def of(shape):
        if len(shape) == 1:
            return vector
        nested = pa.float32()
        for _ in shape:
            nested = pa.list_(nested)
        return nested

    if named or len(outputs) == 1:
        return [of(o.shape) for o in outputs]
    return [pa.list_(vector)]


def _vectors(array):
    """Rows of a 2-D array as Spark's dense vectors."""
    import pyarrow as pa

    rows, width = array.shape
    values = pa.ListArray.from_arrays(
        pa.array(np.arange(0, (rows + 1) * width, width or 1, dtype=np.int32)[: rows + 1]),
        pa.array(array.astype(np.float64).reshape(-1)),
    )
    return pa.StructArray.from_arrays(
        [
            pa.array(np.ones(rows, np.int8)),
            pa.nulls(rows, pa.int32()),
            pa.nulls(rows, pa.list_(pa.int32())),
            values,
        ],
        fields=[
            pa.field("type", pa.int8(), nullable=False),
            pa.field("size", pa.int32()),
            pa.field("indices", pa.list_(pa.int32())),
            pa.field("values", values.type),
        ],
    )


def _column(array):
    import pyarrow as pa

    if array.ndim == 1:
        return pa.array(array)
    if array.ndim == 2:
        return _vectors(array)
    out = pa.array(np.ascontiguousarray(array).reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        width = array.shape[axis]
        count = int(np.prod(array.shape[:axis]))
        offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)[: count + 1]
        out = pa.ListArray.from_arrays(pa.array(offsets), out)
    return out


def _combined(arrays):
    """Several outputs as one column: an array of vectors per row."""
    import pyarrow as pa

    rows = len(arrays[0])
    flat = [a.reshape(rows, -1) for a in arrays]
    pieces = [_vectors(a) for a in flat]
    order = np.arange(rows * len(flat)).reshape(len(flat), rows).T.reshape(-1)
    mixed = pa.concat_arrays(pieces).take(pa.array(order))
    offsets = np.arange(0, rows * len(flat) + 1, len(flat), dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), mixed)


# -- the task -----------------------------------------------------------------------------------


def _task(snapshot, specs, inputs, outputs, arrow, batch_size, threads, paths):
    def task(batches):
        import os

        import pyarrow as pa

        for path in reversed(paths):
            if path not in sys.path and os.path.exists(path):
                sys.path.insert(0, path)
        from bigdl.common.cpu import thread_scope

        with thread_scope(threads):
            model = _cached(snapshot)
            for batch in batches:
                kept = [i for i, name in enumerate(batch.schema.names) if name not in inputs]
                ready = batch.select(inputs)
                try:
                    parts = [
                        _forward(model, _decode_batch(specs, ready.slice(low, batch_size)))
                        for low in range(0, batch.num_rows, batch_size)
                    ]
                except SourceError as error:
                    raise UsageError(str(error)) from None
                columns = [batch.column(i) for i in kept]
                names = [batch.schema.names[i] for i in kept]
                if parts:
                    arrays = [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]
                else:
                    arrays = [np.empty((0, *o.shape), np.float32) for o in outputs]
                if len(arrow) == len(outputs):
                    made = [_column(a) for a in arrays]
                else:
                    made = [_combined(arrays)]
                for i, (column, kind) in enumerate(zip(made, arrow, strict=True)):
                    columns.append(column if column.type == kind else column.cast(kind))
                    names.append(outputs[i].name if len(arrow) == len(outputs) else "prediction")
                yield pa.RecordBatch.from_arrays(columns, names)

    return task


def _cached(snapshot):
    """The model of a snapshot, from this Python worker's cache of those used last."""
    import cloudpickle

    digest, broadcast = snapshot
    if digest in _models:
        _models.move_to_end(digest)
        return _models[digest][0]
    data = broadcast.value
    model = _load(*cloudpickle.loads(data))
    _models[digest] = (model, len(data))
    while len(_models) > 1 and sum(size for _, size in _models.values()) > _CACHE_BYTES:
        _models.popitem(last=False)
    return model
