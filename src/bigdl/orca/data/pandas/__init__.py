"""Readers like those of pandas, whose result is XShards of pandas frames.

``OrcaContext.pandas_read_backend`` says who reads the files: ``"spark"``, which cuts large ones, or
``"pandas"``, whose own readers run on the workers, each on whole files.  In a program with
``runtime="ray"`` there is no Spark: pandas reads, and the result is RayXShards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bigdl.orca.settings import OrcaContext

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

    from bigdl.orca.data.xshards import SparkXShards
    from bigdl.orca.data.xshards.ray import RayXShards

__all__ = ["read_csv", "read_json", "read_parquet"]


def read_csv(file_path: str | Sequence[str], **kwargs: Any) -> SparkXShards | RayXShards:
    """Read CSV files.

    Parameters
    ----------
    file_path : str or sequence of str
        A file, a directory, a pattern such as ``"data/*.csv"``, several of them with commas
        between, or a list; local or the URL of a remote storage.
    **kwargs
        With the backend ``"pandas"``, those of :func:`pandas.read_csv`.  With ``"spark"``:
        ``header`` (``"infer"``, 0 or None, which names the columns ``"0"``, ``"1"``, ...),
        ``names`` (a list, or a schema as text of Spark's DDL), ``index_col``, ``usecols`` (names,
        numbers or a function of a name), ``dtype`` (one, or a dict by name or number of columns),
        ``squeeze``, ``sep``, ``quotechar``, ``escapechar``, ``comment``; any other one is an option
        of Spark's reader.

    Returns
    -------
    SparkXShards or RayXShards
        One pandas frame per partition.

    Raises
    ------
    UsageError
        For arguments that cannot be followed, and with the backend ``"pandas"`` if there is no
        file.
    pyspark.errors.AnalysisException
        With the backend ``"spark"``, if there is no file.

    Examples
    --------
    >>> shards = read_csv("data/*.csv", usecols=["user", "item"], dtype={"user": "int32"})
    """
    from bigdl.orca.data.pandas import readers

    if _is_with_pandas():
        return readers.read_with_pandas("csv", file_path, kwargs)
    return readers.read_csv(file_path, **kwargs)


def read_json(file_path: str | Sequence[str], **kwargs: Any) -> SparkXShards | RayXShards:
    """Read JSON files.

    Parameters
    ----------
    file_path : str or sequence of str
        As for :func:`read_csv`.
    **kwargs
        With the backend ``"pandas"``, those of :func:`pandas.read_json`; with ``"spark"``, options
        of Spark's reader, which expects one record per line (``multiLine=True`` for other files).

    Returns
    -------
    SparkXShards or RayXShards
        One pandas frame per partition.
    """
    from bigdl.orca.data.pandas import readers

    if _is_with_pandas():
        return readers.read_with_pandas("json", file_path, kwargs)
    return readers.read_json(file_path, kwargs)


def read_parquet(
    file_path: str | Sequence[str],
    columns: Sequence[str] | None = None,
    schema: StructType | pyarrow.Schema | str | None = None,
    **options: Any,
) -> SparkXShards | RayXShards:
    """Read Parquet files.

    Parameters
    ----------
    file_path : str or sequence of str
        As for :func:`read_csv`.
    columns : sequence of str, optional
        Default: all.
    schema : pyspark.sql.types.StructType, str or pyarrow.Schema, optional
        Schema of the files, when it is known; pyarrow's with the backend ``"pandas"``.
    **options
        Of Spark's reader, or of :func:`pandas.read_parquet`.

    Returns
    -------
    SparkXShards or RayXShards
        One pandas frame per partition.
    """
    columns = None if columns is None else [columns] if isinstance(columns, str) else list(columns)
    from bigdl.orca.data.pandas import readers

    if _is_with_pandas():
        options["columns"] = columns
        if schema is not None:
            options["schema"] = schema
        return readers.read_with_pandas("parquet", file_path, options)
    return readers.read_parquet(file_path, columns, schema, options)


def _is_with_pandas() -> bool:
    from bigdl.orca.cluster.ray import is_alone

    return OrcaContext.pandas_read_backend == "pandas" or is_alone()
