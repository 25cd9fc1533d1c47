"""Conversions between Spark DataFrames and XShards, under their BigDL 2.x names."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from bigdl.common.checks import check_choice
from bigdl.common.errors import UsageError, type_name
from bigdl.orca.cluster.connect import refuse
from bigdl.orca.cluster.plan import is_connect
from bigdl.orca.data.feeds.spark_dataframe import check_columns
from bigdl.orca.data.xshards.connect import rows_of
from bigdl.orca.data.xshards.frames import quoted
from bigdl.orca.learn.prediction.outputs import as_array, spark_type
from bigdl.orca.learn.prediction.predictor import to_cells

__all__ = [
    "array2dict",
    "arrays2dict",
    "convert_predict_rdd_to_dataframe",
    "convert_predict_xshards_to_dataframe",
    "dataframe_to_xshards",
    "maybe_dataframe_to_xshards",
    "update_predict_xshards",
]


def maybe_dataframe_to_xshards(
    data,
    validation_data,
    feature_cols,
    label_cols,
    mode: str = "fit",
    num_workers: int | None = None,
    accept_str_col: bool = False,
    shard_size: int | None = None,
) -> tuple[Any, Any]:
    """Convert Spark DataFrames to XShards; return other inputs unchanged.

    Examples
    --------
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.learn.utils import maybe_dataframe_to_xshards
    >>> sc = init_orca_context("local", cores=2)
    >>> frame = OrcaContext.get_spark_session().createDataFrame([(1.0, 0), (2.0, 1)], ["x", "y"])
    >>> shards, _ = maybe_dataframe_to_xshards(frame.coalesce(1), None, ["x"], ["y"])
    >>> shards.collect()
    [{'x': array([1., 2.]...), 'y': array([0, 1])}]
    >>> maybe_dataframe_to_xshards({"x": 1}, None, None, None)  # not a DataFrame
    ({'x': 1}, None)
    """
    from pyspark.sql import DataFrame

    if validation_data is not None and type(data) is not type(validation_data):
        raise UsageError(
            "validation_data should have the same type with train data, got "
            f"{type_name(validation_data)} and {type_name(data)}",
            code="data-type",
            argument="validation_data",
        )
    if not isinstance(data, DataFrame):
        return data, validation_data
    columns = feature_cols, label_cols
    return dataframe_to_xshards(
        data, validation_data, *columns, mode, num_workers, accept_str_col, shard_size
    )


def dataframe_to_xshards(
    data,
    validation_data,
    feature_cols: Sequence[str],
    label_cols: Sequence[str] | None,
    mode: str = "fit",
    num_workers: int | None = None,
    accept_str_col: bool = False,
    shard_size: int | None = None,
) -> tuple[Any, Any]:
    """Convert Spark DataFrames to XShards of ``{"x": ..., "y": ...}``.

    Parameters
    ----------
    data : pyspark.sql.DataFrame
    validation_data : pyspark.sql.DataFrame, optional
    feature_cols, label_cols : sequence of str
        One column becomes an array; several become a tuple of arrays.
    mode : str
        ``"fit"`` and ``"evaluate"`` require `label_cols`; ``"predict"`` omits the labels.
    num_workers : int, optional
        Minimum number of partitions.
    accept_str_col : bool
        Whether string columns are allowed.
    shard_size : int, optional
        Number of rows per shard; default ``OrcaContext._shard_size``, or the whole partition if it
        is None.

    Returns
    -------
    data, validation_data : SparkXShards
        `validation_data` stays None if it was None.

    Examples
    --------
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.learn.utils import dataframe_to_xshards
    >>> sc = init_orca_context("local", cores=2)
    >>> frame = OrcaContext.get_spark_session().createDataFrame([(1.0, 0), (2.0, 1)], ["x", "y"])
    >>> shards, _ = dataframe_to_xshards(frame.coalesce(1), None, ["x", "y"], None, mode="predict")
    >>> shards.collect()
    [{'x': (array([1., 2.]...), array([0, 1]))}]
    """
    from bigdl.orca.context import OrcaContext
    from bigdl.orca.data.shard import SparkXShards

    check_choice("mode", mode, ("fit", "evaluate", "predict"))
    if mode != "predict" and not label_cols:
        raise UsageError(
            "label_cols is required to fit or evaluate on a Spark DataFrame",
            code="argument-missing",
            argument="label_cols",
        )
    features, labels = list(feature_cols or ()), list(label_cols or ())
    columns = features if mode == "predict" else [*features, *labels]

    def shards(frame):
        types = check_columns(frame, columns)
        for name in columns:
            if not accept_str_col and types[name].typeName() == "string":
                raise UsageError(
                    f"Column '{name}' holds strings; encode it as numbers first",
                    code="data-dtype",
                    column=name,
                )
        chosen = frame.select(*[frame[quoted(name)] for name in columns])
        rows = rows_of(chosen)
        if num_workers is not None and rows.getNumPartitions() < num_workers:
            rows = rows_of(chosen.repartition(num_workers))
        size = OrcaContext._shard_size if shard_size is None else shard_size
        type_names = {name: types[name].typeName() for name in types}
        targets = columns[len(features) :]
        rdd = rows.mapPartitions(
            lambda rows: arrays2dict(rows, features, targets, size, type_names)
        )
        return SparkXShards.lazy(rdd)

    return shards(data), None if validation_data is None else shards(validation_data)


_DTYPES = {
    "byte": "int32",
    "short": "int32",
    "integer": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float32",
    "decimal": "float32",
    "boolean": "bool",
    "timestamp": "datetime64[ns]",
}


def arrays2dict(
    rows: Iterable[Any],
    feature_cols: Sequence[str],
    label_cols: Sequence[str] | None,
    shard_size: int | None = None,
    types: dict[str, str] | None = None,
) -> Iterator[dict]:
    """Convert rows to dicts of arrays.

    Parameters
    ----------
    rows : iterable of Row or dict
    feature_cols, label_cols : sequence of str
    shard_size : int, optional
        Number of rows per dict; default all.
    types : dict of str to str, optional
        Spark type names of the columns; by default NumPy infers the dtypes.

    Yields
    ------
    dict
        ``x`` and, with labels, ``y``: an array for one column, a tuple for several.

    Examples
    --------
    >>> from bigdl.orca.learn.utils import arrays2dict
    >>> rows = [{"age": 31, "click": 0}, {"age": 45, "click": 1}, {"age": 28, "click": 0}]
    >>> [shard["x"].tolist() for shard in arrays2dict(rows, ["age"], ["click"], shard_size=2)]
    [[31, 45], [28]]
    """
    rows = iter(rows)
    while taken := list(islice(rows, shard_size)):
        shard = {"x": _columns(taken, feature_cols, types or {})}
        if label_cols:
            shard["y"] = _columns(taken, label_cols, types or {})
        yield shard


array2dict = arrays2dict


def _columns(rows, names, types):
    arrays = tuple(_column(name, [row[name] for row in rows], types.get(name)) for name in names)
    return arrays[0] if len(arrays) == 1 else arrays


def _column(name, cells, type_name):
    if any(cell is None for cell in cells):
        raise UsageError(
            f"Column '{name}' holds nulls; fill or drop them first", code="data-null", column=name
        )
    if hasattr(cells[0], "toArray"):  # Spark vectors
        return np.stack([each.toArray() for each in cells]).astype(np.float32)
    array = np.asarray(cells, dtype=_DTYPES.get(type_name or ""))
    return array.astype(np.float32) if array.dtype == np.float64 else array


def convert_predict_rdd_to_dataframe(df, prediction_rdd):
    """Return `df` with a column ``prediction`` from an RDD with one element per row, in row order.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    prediction_rdd : pyspark.RDD
        Numbers, or arrays of one dtype and number of dimensions. Python numbers become double or
        bigint, 1-D float arrays become dense vectors, other arrays become nested arrays, and a list
        of arrays becomes an array of vectors.

    Returns
    -------
    pyspark.sql.DataFrame

    Examples
    --------
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.learn.utils import convert_predict_rdd_to_dataframe
    >>> sc = init_orca_context("local", cores=2)
    >>> frame = OrcaContext.get_spark_session().range(0, 2, 1, 1)
    >>> predictions = sc.parallelize([0.25, 0.75], 1)
    >>> convert_predict_rdd_to_dataframe(frame, predictions).collect()
    [Row(id=0, prediction=0.25), Row(id=1, prediction=0.75)]
    """
    from pyspark.sql import types as T

    if is_connect(df):
        refuse("Joining a DataFrame with predictions row by row", "call predict with the DataFrame")
    first = prediction_rdd.first()
    is_several = isinstance(first, list | tuple)
    cell = as_array(np.asarray([0.0] if is_several else first))
    cell_type = spark_type(cell.ndim, cell.dtype.name)
    cell_type = T.ArrayType(cell_type) if is_several else cell_type
    field = T.StructField("prediction", cell_type)
    rows = df.rdd.zip(prediction_rdd).map(lambda pair: (*pair[0], _cell(pair[1])))
    schema = T.StructType([*df.schema.fields, field])
    return df.sparkSession.createDataFrame(rows, schema, verifySchema=False)


def convert_predict_xshards_to_dataframe(df, pred_shards, multi_output: bool = False):
    """Return `df` with a column ``prediction`` from XShards of predictions, in row order.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    pred_shards : SparkXShards
        Dicts with ``prediction``: an array of rows, or a list of them for several outputs.
    multi_output : bool
        Accepted for compatibility and ignored: the shards show whether there are several outputs.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.data import SparkXShards
    >>> from bigdl.orca.learn.utils import convert_predict_xshards_to_dataframe
    >>> sc = init_orca_context("local", cores=2)
    >>> frame = OrcaContext.get_spark_session().range(0, 2, 1, 1)
    >>> shards = SparkXShards(sc.parallelize([{"prediction": np.array([0.25, 0.75])}], 1))
    >>> convert_predict_xshards_to_dataframe(frame, shards).collect()
    [Row(id=0, prediction=0.25), Row(id=1, prediction=0.75)]
    """
    cells = pred_shards.rdd.flatMap(lambda shard: to_cells(shard["prediction"]))
    return convert_predict_rdd_to_dataframe(df, cells)


def _cell(value):
    from pyspark.ml.linalg import Vectors

    if isinstance(value, list | tuple):
        return [Vectors.dense(np.ravel(each)) for each in value]
    array = as_array(np.asarray(value))
    is_vector = array.ndim == 1 and array.dtype.kind == "f"
    return Vectors.dense(array) if is_vector else array.tolist()


def update_predict_xshards(xshard, pred_xshards):
    """Return shards that combine `xshard` with the ``prediction`` values in `pred_xshards`.

    Parameters
    ----------
    xshard, pred_xshards : SparkXShards
        XShards of dicts with equal partitions.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data import XShards
    >>> from bigdl.orca.learn.utils import update_predict_xshards
    >>> sc = init_orca_context("local", cores=2)
    >>> rows = XShards.partition({"x": np.array([1, 2])}, num_shards=1)
    >>> predictions = XShards.partition({"prediction": np.array([10, 20])}, num_shards=1)
    >>> update_predict_xshards(rows, predictions).first()
    {'x': array([1, 2]), 'prediction': array([10, 20])}
    """
    return xshard.zip(pred_xshards).transform_shard(
        lambda pair: {**pair[0], "prediction": pair[1]["prediction"]}
    )
