"""Prediction of every kind of input, in its own form.

A Spark DataFrame gets a lazy plan that keeps all columns and the order of rows.

XShards are predicted lazily, in their partitions and order. A dict gets the key ``prediction``, a
pandas frame the column; of a tuple or an array the result is ``{"x": ..., "prediction": ...}``.
Arrays and pandas frames of the driver are cut in shards, and their predictions come back to it.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import LazyModule, UsageError, outcome_of, without_errors
from bigdl.orca.cluster.spark_calls import silent_when_closed
from bigdl.orca.cluster.versions import to_arrow
from bigdl.orca.data.feeds import ON_RAY, kind_of
from bigdl.orca.data.feeds.spark_dataframe import check_columns
from bigdl.orca.data.tables import is_lake, open_table
from bigdl.orca.data.xshards.shards import arrays_of, even_cut, join_shards, map_arrays
from bigdl.orca.inference.shipping import Ready, ShippedModel
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.shards.columns import column_spec, convert, decode, float_dtype
from bigdl.runtime.shards.texts import takes_texts
from bigdl.runtime.shards.values import columns_of, is_frame
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


def chosen_outputs(
    keys: Sequence[str | None], output_cols: Sequence[str] | None
) -> tuple[list[str], list[int]]:
    """Return names for the outputs of a model, and the numbers of the outputs that have them.

    Several outputs without keys or names of the user's have one name together, ``prediction``.
    """
    named, everything = [str(key) for key in keys if key is not None], list(range(len(keys)))
    if output_cols is None:
        return named or ["prediction"], everything
    names = list(output_cols)
    if named and set(names) <= set(named):
        return names, [named.index(name) for name in names]
    if len(names) != len(keys):
        returned = f"{len(keys)} outputs" + (f" ({', '.join(named)})" if named else "")
        raise UsageError(
            f"The model returns {returned} but output_cols names {len(names)}: {names}"
        )
    return names, everything


def spark_type(ndim: int) -> Any:
    """Return the type of a column whose cells have so many dimensions."""
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import types as T

    if ndim == 1:
        return VectorUDT()
    nested: T.DataType = T.FloatType()
    for _ in range(ndim):
        nested = T.ArrayType(nested)
    return nested


@dataclass(frozen=True)
class OutputColumns:
    """The columns that prediction adds.

    Attributes
    ----------
    shapes : sequence of tuple of int
        Of a row of every output, in the order of the model.
    names : list of str
        One for each output, or a single one for all of them together.
    order : sequence of int
        Which outputs become columns.
    """

    shapes: Sequence[tuple[int, ...]]
    names: list[str]
    order: Sequence[int]

    def check(self, columns: Sequence[str]) -> None:
        """Refuse names that the DataFrame has already; Spark does not tell their case apart."""
        taken = {name.lower() for name in columns}
        for name in self.names:
            if name.lower() in taken:
                raise UsageError(
                    f"The DataFrame has a column '{name}' already; rename it, or name the outputs "
                    "with output_cols="
                )
            taken.add(name.lower())

    @property
    def _is_joined(self) -> bool:
        return len(self.names) < len(self.order)

    @property
    def places(self) -> list[str]:
        """Names of the columns in :meth:`schema`, free of what Spark reads as syntax."""
        return [f"p{i}" for i in range(len(self.names))]

    def schema(self, schema):
        """A frame's schema with these columns added, under the names of :attr:`places`."""
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql import types as T

        kinds = [spark_type(len(self.shapes[i])) for i in self.order]
        kinds = [T.ArrayType(VectorUDT())] if self._is_joined else kinds
        added = [T.StructField(n, k) for n, k in zip(self.places, kinds, strict=True)]
        return T.StructType([*schema.fields, *added])

    def arrow(self, arrays: Sequence[np.ndarray]) -> list:
        """The columns in the Arrow types that Spark reads for :meth:`schema`.

        Parameters
        ----------
        arrays : sequence of ndarray
            Every output, of shape ``(rows, ...)``.
        """
        chosen = [arrays[i] for i in self.order]
        return [_joined(chosen)] if self._is_joined else [_column(a) for a in chosen]


def _column(array):
    return _vectors(array) if array.ndim == 2 else list_column(array)


def list_column(array: np.ndarray) -> Any:
    """Rows of an array as numbers, or as nested lists of them."""
    out = pa.array(np.ascontiguousarray(array).reshape(-1), pa.float32())
    for axis in range(array.ndim - 1, 0, -1):
        out = _lists(out, int(np.prod(array.shape[:axis])), array.shape[axis])
    return out


def _lists(values, count, width):
    """`count` lists of `width` values each."""
    offsets = np.arange(count + 1, dtype=np.int64) * width
    if offsets[-1] >= 2**31:
        raise UsageError(
            "The predictions of one batch of Spark have more than 2**31 numbers; set "
            "spark.sql.execution.arrow.maxRecordsPerBatch to fewer rows"
        )
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)


def _vectors(array):
    """Rows of a 2-D array as Spark's dense vectors."""
    rows, width = array.shape
    values = _lists(pa.array(array.astype(np.float64).reshape(-1)), rows, width)
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


def _joined(arrays):
    """Several outputs as one column: an array of vectors per row."""
    rows = len(arrays[0])
    flat = [a.reshape(rows, -1) if rows else a.reshape(0, 1) for a in arrays]
    pieces = [_vectors(a) for a in flat]
    order = np.arange(rows * len(flat)).reshape(len(flat), rows).T.reshape(-1)
    mixed = pa.concat_arrays(pieces).take(pa.array(order))
    return _lists(mixed, rows, len(flat))


def predict_dataframe(
    frame: DataFrame,
    shipped: ShippedModel,
    options: PredictOptions,
    threads: int = 1,
    rows: list | None = None,
) -> DataFrame:
    """Return `frame` with a column ``prediction``, or one for each output that has a name.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
    shipped : ShippedModel
    options : PredictOptions
    threads : int
        Threads of torch in each task.
    rows : list, optional
        The model's inputs for two rows, as it takes them, to see what it returns; by default they
        are made up, or are those of `frame`.
    """
    specs, plain, converted = converted_columns(frame, options.config, options.feature_cols)
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
    known = options.inputs
    if known is None or len(known) != len(specs):
        known = [_known(spec, frame.schema[spec.name].metadata) for spec in specs]
    if rows is None:
        outputs = _outputs(shipped.load(), specs, plain.select(*converted), known)
    else:
        outputs = outputs_of_rows(shipped.load(), rows)
    names = chosen_outputs([key for key, _ in outputs], options.output_cols)
    columns = OutputColumns([shape for _, shape in outputs], *names)
    columns.check(frame.columns)
    ready = plain.select("*", *(c for i, c in enumerate(converted) if i not in as_is))
    task = _task(shipped.in_task(threads), specs, kept, inputs, columns, options.batch_size)
    result = ready.mapInArrow(silent_when_closed(task), columns.schema(plain.schema))
    return result.toDF(*frame.columns, *columns.names)


def converted_columns(frame, config: dict | None, feature_cols: Sequence[str]):
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


def _outputs(model, specs, ready, known) -> list[tuple[str | None, tuple[int, ...]]]:
    """Key and shape of what the model returns for a row.

    They are seen on made-up rows where their shape is known, else on the first.

    Two rows are tried, since a model that squeezes its output hides the dimension of a single one.
    """
    batch = _made_up(specs, known)
    if batch is not None:
        try:
            return outputs_of_rows(model, batch)
        except UsageError:
            raise
        except Exception as error:  # e.g. ids that start at 1: then only a real row will do
            logger.debug("The model does not take rows of zeros: %s", error)
    table = to_arrow(ready.limit(1))
    if table.num_rows == 0:
        return [(None, ())]
    twice = table.take([0, 0]).combine_chunks().to_batches()[0]
    return outputs_of_rows(model, decode_columns(specs, twice))


def outputs_of_rows(model: Ready, batch: list) -> list[tuple[str | None, tuple[int, ...]]]:
    """Key and shape for a row of every output, seen on two rows."""
    return [(key, array.shape[1:]) for key, array in run_model(model, batch, 2)]


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


def decode_columns(specs, batch) -> list:
    """The columns of an Arrow batch as arrays, or dicts of them."""
    columns = []
    for spec, column in zip(specs, batch.columns, strict=True):
        leaves = decode(spec, column)
        columns.append(leaves[0][1] if spec.kind == "plain" else dict(leaves))
    return columns


def run_model(
    model: Ready, batch: list, rows: int, shapes: Sequence[tuple[int, ...]] | None = None
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
    if shapes is not None and len(items) != len(shapes):
        raise UsageError(
            f"The model returned {len(items)} outputs for one batch and {len(shapes)} for another"
        )
    return [
        (key, _array(item, rows, shapes[i] if shapes else None, model.squeezes))
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


def predict_rows(
    model: Ready,
    rows: int,
    batch_size: int,
    take: Callable[[int, int], list],
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> list[tuple[str | None, np.ndarray]]:
    """Predict rows batch by batch.

    Parameters
    ----------
    model : Ready
    rows, batch_size : int
    take : callable
        ``take(start, count)`` gives the columns of so many rows. Without `shapes` it may be asked
        for one more than there are.
    shapes : sequence of tuple of int, optional
        Of a row of every output, where they are known.

    Returns
    -------
    list of (key, ndarray)
        The outputs for all rows; none without rows.
    """
    pieces = []
    for low in range(0, rows, batch_size):
        count = min(batch_size, rows - low)
        # a model that squeezes its output hides the dimension of a single row: it gets two
        asked = count if shapes is not None else max(count, 2)
        outputs = run_model(model, take(low, asked), asked, shapes)
        pieces.append([(key, array[:count]) for key, array in outputs])
    return [
        (parts[0][0], np.concatenate([array for _, array in parts]))
        for parts in zip(*pieces, strict=True)
    ]


def _task(model_of_task, specs, kept, inputs, columns: OutputColumns, batch_size):
    def task(batches):
        with model_of_task() as model:
            for batch in batches:
                features = batch.select(inputs)

                def take(start, count, features=features):
                    return decode_columns(specs, features.slice(start, count))

                outputs = predict_rows(model, batch.num_rows, batch_size, take, columns.shapes)
                arrays = [array for _, array in outputs]
                arrays = arrays or [np.empty((0, *s), np.float32) for s in columns.shapes]
                made = [*batch.select(kept).columns, *columns.arrow(arrays)]
                yield pa.RecordBatch.from_arrays(made, [*kept, *columns.places])

    return task


# -- other inputs ---------------------------------------------------------------------------------


def predict_any(
    data: Any,
    shipped: ShippedModel,
    options: PredictOptions,
    cluster: Cluster,
) -> Any:
    """Return predictions for an input that is :func:`opened`, in the form of its kind.

    Raises
    ------
    UsageError
        For an input of another kind.
    """
    kind, threads = kind_of(data), cluster.threads_per_task
    if kind == "Spark DataFrame":
        return predict_dataframe(data, shipped, options, threads)
    if kind in ON_RAY:
        return predict_ray(data, kind, shipped, options)
    is_tensors = type(data).__module__.startswith("torch")
    if kind not in ("SparkXShards", "array") or is_tensors:
        raise UsageError(
            "Only XShards or Spark DataFrame are supported for predict, besides numpy arrays, "
            "pandas DataFrames and paths of Parquet files, Delta or Iceberg tables, got "
            f"{type(data).__name__}"
        )
    predict = predictor(shipped, options, threads)
    if kind == "SparkXShards":
        from bigdl.orca.data.xshards import SparkXShards, persistence

        rdd = data.rdd.mapPartitions(predict, preservesPartitioning=True)
        persistence.hold(rdd, data.rdd)
        return SparkXShards.lazy(rdd)
    if is_frame(data):
        return _predict_frame(data, predict, cluster)
    return _predict_arrays(data, predict, cluster, bool(options.feature_cols))


def opened(data: Any, cluster) -> Any:
    """`data`, with a DataFrame (or Ray Dataset) of the table instead of the path of Parquet files,
    Delta or Iceberg: a pandas frame where there is no cluster."""
    if kind_of(data) != "path":
        return data
    if is_lake(data) or cluster.moves_rows_by == "files":
        from bigdl.orca.data.tables import frames

        table = open_table(data)
        if cluster.moves_rows_by == "ray":
            return frames.ray_dataset(table, cluster.slots())
        if cluster.moves_rows_by == "files":
            return frames.pandas_frame(table)
        return frames.spark_frame(table, cluster.spark)
    paths = [os.fspath(p) for p in (data if isinstance(data, list | tuple) else [data])]
    if cluster.moves_rows_by == "ray":
        from bigdl.orca.data.ray_exchange import parquet_dataset

        return parquet_dataset(paths)
    return cluster.spark.read.parquet(*paths)


def _predict_frame(frame, predict, cluster):
    import pandas as pd

    shards = [frame.iloc[low:high] for low, high in _cut(len(frame), cluster)]
    return pd.concat(_run(shards, predict, cluster))


def checked_arrays(data, named: bool) -> tuple[dict, int]:
    """The model's inputs among arrays in the driver's memory, and how many rows they have."""
    if not named and not isinstance(data, dict):
        data = {"x": data}
    data = {key: value for key, value in data.items() if named or key == "x"}
    arrays = list(arrays_of(data))
    for array in arrays:
        if not isinstance(array, np.ndarray) or not array.ndim:
            raise UsageError(
                f"predict takes numpy arrays with rows, got {type(array).__name__} among them"
            )
    sizes = [len(array) for array in arrays]
    if len(set(sizes)) != 1:
        raise UsageError(f"The arrays must be of equal numbers of rows, they have {sizes}")
    return data, sizes[0]


def _predict_arrays(data, predict, cluster, named):
    data, rows = checked_arrays(data, named)
    shards = [map_arrays(data, operator.itemgetter(slice(*ends))) for ends in _cut(rows, cluster)]
    predicted = [
        {key: value for key, value in shard.items() if key not in data}
        for shard in _run(shards, predict, cluster)
    ]
    joined = join_shards(predicted)
    return joined["prediction"] if list(joined) == ["prediction"] else joined


def _cut(rows, cluster):
    return even_cut(rows, max(1, min(rows, cluster.slots())))


def _run(shards, predict, cluster):
    """The predicted shards; what was wrong with one is raised here."""

    outcomes = cluster.map_shards(lambda part: [outcome_of(list, predict(part))], shards)
    return [shard for predicted in without_errors(outcomes) for shard in predicted]


# -- one shard ----------------------------------------------------------------------------------


def predictor(
    shipped: ShippedModel, options: PredictOptions, threads: int
) -> Callable[[Iterable], Iterator]:
    """Return what predicts the shards of a partition, for ``RDD.mapPartitions``."""
    model_of_task = shipped.in_task(threads)

    def predict(shards):
        with model_of_task() as model:
            for shard in shards:
                outputs = _outputs_of_shard(model, shard, options)
                yield _with_outputs(shard, outputs, options.output_cols)

    return predict


def _outputs_of_shard(model: Ready, shard, options: PredictOptions) -> list:
    names, floats = list(options.feature_cols), float_dtype(options.config)
    texts = takes_texts(options.config)
    columns = columns_of(shard, names, None, floats, with_labels=False, texts=texts)
    rows = len(columns[0][2])

    def take(start, count):
        return rows_of_columns(columns, np.arange(start, start + count) % rows)

    return predict_rows(model, rows, options.batch_size, take)


def predict_shard(model: Ready, shard: Any, options: PredictOptions) -> Any:
    """Return the predictions alone, of arrays or a pandas frame.

    Returns
    -------
    ndarray, dict of ndarray or pandas.DataFrame
        An array for one name; else, as the input, a frame with its index or a dict.
    """
    if not is_frame(shard):
        shard, _ = checked_arrays(shard, bool(options.feature_cols))
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
                "output_cols="
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


def predict_ray(data: Any, kind: str, shipped: ShippedModel, options: PredictOptions) -> Any:
    """Return predictions in the form of the input, of the same rows in the same order.

    Those of RayXShards are computed in the background, a ray.data.Dataset is lazy.
    """
    predict = predictor(shipped, options, threads=1)
    if kind == "RayXShards":
        return data.map_partitions(lambda partition: list(predict(partition)))
    if not options.feature_cols:
        raise UsageError(
            "feature_cols is required for a Ray Dataset; pass the names of the columns that the "
            "model takes"
        )

    def predict_block(block):
        (predicted,) = predict([block])
        return predicted

    return data.map_batches(predict_block, batch_format="pandas", batch_size=None)
