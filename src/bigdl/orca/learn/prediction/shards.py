"""Prediction for XShards, and for arrays, pandas frames and Parquet files by way of them.

XShards are predicted lazily, in their partitions and order. A dict gets the key ``prediction``, a
pandas frame the column; of a tuple or an array the result is ``{"x": ..., "prediction": ...}``.
Arrays and pandas frames of the driver are cut in shards, and their predictions come back to it.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.cluster.ray import RayCluster
from bigdl.orca.data.feeds import ON_RAY, kind_of
from bigdl.orca.learn.prediction.dataframe import (
    PredictOptions,
    chosen_outputs,
    predict_dataframe,
    predict_rows,
)
from bigdl.runtime.local import LocalMachine
from bigdl.runtime.shards.columns import float_dtype
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.texts import takes_texts
from bigdl.runtime.shards.values import columns_of, is_frame

if TYPE_CHECKING:
    from bigdl.orca.cluster.spark import SparkCluster
    from bigdl.orca.learn.prediction.shipping import Shipped


def predict_any(
    data: Any,
    shipped: Shipped,
    options: PredictOptions,
    cluster: SparkCluster | RayCluster | LocalMachine,
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
            f"pandas DataFrames and paths of Parquet files, got {type(data).__name__}"
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
    """`data`, with the DataFrame (or Ray Dataset) of the files instead of paths of Parquet: a
    pandas frame where there is no cluster."""
    if kind_of(data) != "path":
        return data
    paths = [os.fspath(p) for p in (data if isinstance(data, list | tuple) else [data])]
    if isinstance(cluster, RayCluster):
        from bigdl.orca.data.ray_exchange import parquet_dataset

        return parquet_dataset(paths)
    if isinstance(cluster, LocalMachine):
        from bigdl.orca.data.feeds.parquet import read_pandas

        return read_pandas(paths)
    return cluster.spark.read.parquet(*paths)


def _predict_frame(frame, predict, cluster):
    import pandas as pd

    shards = [frame.iloc[low:high] for low, high in _cut(len(frame), cluster)]
    return pd.concat(_run(shards, predict, cluster))


def checked_arrays(data, named: bool) -> tuple[dict, int]:
    """The model's inputs among arrays in the driver's memory, and how many rows they have."""
    from bigdl.orca.data.xshards.shards import arrays_of

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
    from bigdl.orca.data.xshards.shards import map_arrays

    data, rows = checked_arrays(data, named)
    shards = [map_arrays(data, operator.itemgetter(slice(*ends))) for ends in _cut(rows, cluster)]
    predicted = [
        {key: value for key, value in shard.items() if key not in data}
        for shard in _run(shards, predict, cluster)
    ]
    joined = {key: _joined([shard[key] for shard in predicted]) for key in predicted[0]}
    return joined["prediction"] if list(joined) == ["prediction"] else joined


def _cut(rows, cluster):
    from bigdl.orca.data.xshards.shards import even_cut

    return even_cut(rows, max(1, min(rows, cluster.slots())))


def _run(shards, predict, cluster):
    """The predicted shards; what was wrong with one is raised here."""

    def attempt(partition):
        try:
            return [(None, shard) for shard in predict(partition)]
        except UsageError as error:
            return [(str(error), None)]

    results = cluster.map_shards(attempt, shards)
    for message, _ in results:
        if message is not None:
            raise UsageError(message)
    return [shard for _, shard in results]


def _joined(pieces):
    if isinstance(pieces[0], list):
        return [np.concatenate(each) for each in zip(*pieces, strict=True)]
    return np.concatenate(pieces)


# -- one shard ----------------------------------------------------------------------------------


def predictor(
    shipped: Shipped, options: PredictOptions, threads: int
) -> Callable[[Iterable], Iterator]:
    """Return what predicts the shards of a partition, for ``RDD.mapPartitions``."""
    model_of_task, names = shipped.in_task(threads), list(options.feature_cols)
    dtypes = {"floats": float_dtype(options.config), "texts": takes_texts(options.config)}

    def predict(shards):
        with model_of_task() as model:
            for shard in shards:
                try:
                    columns = columns_of(shard, names, None, with_labels=False, **dtypes)
                except SourceError as error:
                    raise UsageError(str(error)) from None
                rows = len(columns[0][2])

                def take(start, count, columns=columns, rows=rows):
                    return rows_of_columns(columns, np.arange(start, start + count) % rows)

                outputs = predict_rows(model, rows, options.batch_size, take)
                yield _with_outputs(shard, outputs, options.output_cols)

    return predict


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
        named = {name: _cells(value) for name, value in named.items()}
        taken = list(shard.columns)
    else:
        shard = shard if isinstance(shard, dict) else {"x": shard}
        taken = list(shard)
    for name in named:
        if name in taken:
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


def _cells(value):
    """An output as the cells of a column: numbers, arrays, or lists of them."""
    if isinstance(value, list):
        return [list(row) for row in zip(*value, strict=True)]
    return value if value.ndim == 1 else list(value)


def predict_ray(data: Any, kind: str, shipped: Shipped, options: PredictOptions) -> Any:
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
