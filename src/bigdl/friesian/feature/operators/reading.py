"""Files to DataFrames, from any file system that Spark knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.cells import cast
from bigdl.friesian.feature.operators.columns import as_names

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["from_pandas", "read_csv", "read_json", "read_parquet", "read_text"]


def _spark() -> SparkSession:
    from bigdl.orca import OrcaContext

    return OrcaContext.get_spark_session()


def _paths(paths: Any) -> list[str]:
    from bigdl.orca.data.pandas.readers import for_spark

    return for_spark(paths)


def read_parquet(paths: Any) -> DataFrame:
    """Parquet files, folders or patterns."""
    return _spark().read.parquet(*_paths(paths))


def read_json(paths: Any, cols: Any = None) -> DataFrame:
    """Files with an object of JSON in every line; `cols` names those to keep."""
    df = _spark().read.json(_paths(paths))
    return df if cols is None else df.select(*as_names(cols, "cols"))


def read_text(paths: Any, col_name: str) -> DataFrame:
    """Files of lines, as one column of strings."""
    return _spark().read.text(_paths(paths)).withColumnRenamed("value", col_name)


def from_pandas(frame: pd.DataFrame) -> DataFrame:
    """A frame of pandas; its index is not taken over."""
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise UsageError(
            f"pandas_df should be a DataFrame of pandas, but got {type(frame).__name__}"
        )
    return _spark().createDataFrame(frame)


def read_csv(paths: Any, delimiter: str, header: bool, names: Any, dtype: Any) -> DataFrame:
    """CSV files; see :meth:`FeatureTable.read_csv`."""
    reader = _spark().read.option("sep", delimiter).option("header", header)
    df = reader.csv(_paths(paths))  # all strings, after a look at the first line
    if names is not None:
        names = as_names(names, "names")
        if len(names) != len(df.columns):
            raise UsageError(
                f"names should have the same length as the number of columns, {len(df.columns)}, "
                f"but got {names}"
            )
    if not _covers(dtype, names or df.columns):  # a pass over the data finds the other types
        df = reader.csv(_paths(paths), inferSchema=True)
    return _with_types(df if names is None else df.toDF(*names), dtype)


def _covers(dtype: Any, names: list[str]) -> bool:
    return isinstance(dtype, str | list | tuple) or (
        isinstance(dtype, Mapping) and all(name in dtype for name in names)
    )


def _with_types(df: DataFrame, dtype: Any) -> DataFrame:
    if dtype is None:
        return df
    if isinstance(dtype, str):
        return cast(df, None, dtype)
    if isinstance(dtype, list | tuple):
        if len(dtype) != len(df.columns):
            raise UsageError(
                "dtype should have the same length as the number of columns, "
                f"{len(df.columns)}, but got {dtype!r}"
            )
        dtype = dict(zip(df.columns, dtype, strict=True))
    if not isinstance(dtype, Mapping):
        raise UsageError(f"dtype should be str, list of str or dict, but got {dtype!r}")
    for name, kind in dtype.items():
        df = cast(df, name, kind)
    return df
