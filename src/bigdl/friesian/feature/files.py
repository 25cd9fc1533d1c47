"""Base classes of tables: methods that read files, write files and collect rows."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from bigdl.common.checks import check_choice
from bigdl.common.display import html_table
from bigdl.common.errors import UsageError, hide_frames
from bigdl.friesian.ops import column_types, spark
from bigdl.friesian.ops.cells import Cast
from bigdl.friesian.ops.column_types import require_columns
from bigdl.friesian.ops.spark import as_names, check_string, col, dtype_of, schema_of
from bigdl.orca.cluster.spark import spark_writing
from bigdl.orca.cluster.spark_calls import check_frame
from bigdl.orca.cluster.versions import to_arrow
from bigdl.orca.data.lake_tables import is_lake, open_table
from bigdl.orca.data.pandas.readers import paths_for_spark

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, Row


_MODES = ("append", "overwrite", "error", "errorifexists", "ignore")


@hide_frames
class TableOutput:
    """Base class of tables: holds a Spark DataFrame, and collects and writes its rows.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    """

    def __init__(self, df: DataFrame):
        if not hasattr(df, "sparkSession"):
            raise UsageError(
                f"df should be a DataFrame of Spark, but got {type(df).__name__}",
                code="argument-type",
                argument="df",
            )
        self._df = df

    @property
    def df(self) -> DataFrame:
        """Spark DataFrame of the table, for example to pass to ``fit`` of an Estimator.

        Raises
        ------
        UsageError
            If its Spark context has been stopped.
        """
        check_frame(self._df)
        return self._df

    @df.setter
    def df(self, df: DataFrame) -> None:
        self._df = df

    def __repr__(self) -> str:
        columns = ", ".join(f"{name}: {dtype}" for name, dtype in self._dtypes().items())
        return f"{type(self).__name__}[{columns}]"

    def _repr_html_(self) -> str:
        """Return the column types as HTML; with ``spark.sql.repl.eagerEval.enabled``, also rows."""
        dtypes = self._dtypes()
        # Spark returns None unless that setting is on
        rows = getattr(self._df, "_repr_html_", lambda: None)() if dtypes else None
        return html_table(type(self).__name__, dtypes, rows or "")

    def _dtypes(self) -> dict[str, str]:
        """Return the column types, or an empty dict if the Spark context has been stopped."""
        try:
            return dict(self.df.dtypes)
        except UsageError:
            return {}

    def cache(self) -> Self:
        """Cache the rows on the executors when they are first computed."""
        self.df.cache()
        return self

    def uncache(self) -> Self:
        """Remove the rows of this table from the cache."""
        if self.df.is_cached:
            self.df.unpersist()
        return self

    @spark.action
    def compute(self) -> Self:
        """Compute all rows now; return this table."""
        self.df.write.format("noop").mode("overwrite").save()
        return self

    @spark.action
    def size(self) -> int:
        """Count the rows; each call runs a job."""
        return self.df.count()

    @spark.action
    def show(self, n: int = 20, truncate: bool | int = True) -> None:
        """Print the first rows."""
        self.df.show(n, truncate)

    def to_spark_df(self) -> DataFrame:
        """Return the Spark DataFrame, like the attribute ``df``."""
        return self.df

    @spark.action
    def to_pandas(self) -> pd.DataFrame:
        """Collect all rows as a pandas DataFrame."""
        with warnings.catch_warnings():
            # pyspark repeats the error with Java's stack trace in this warning
            warnings.filterwarnings("ignore", "toPandas attempted")
            return self.df.toPandas()

    @spark.action
    def collect(self) -> list[Row]:
        """Collect all rows as a list of Row objects."""
        return self.df.collect()

    def to_list(self, column: str) -> list:
        """Collect the values of one column as a list.

        Parameters
        ----------
        column : str

        Returns
        -------
        list
        """
        require_columns(self.df.columns, [check_string(column, "column")])
        return self._columns([column])[column]

    def to_dict(self) -> dict[str, list]:
        """Collect all rows as a dict from column names to lists of values."""
        return self._columns(self.df.columns)

    @spark.action
    def _columns(self, names: list[str]) -> dict[str, list]:
        chosen = self.df.select(*map(col, names))
        if all(_is_same_in_arrow(dtype_of(self.df, name)) for name in names):
            table = to_arrow(chosen)
            return {name: table.column(i).to_pylist() for i, name in enumerate(names)}
        rows = chosen.collect()
        return {name: [row[i] for row in rows] for i, name in enumerate(names)}

    @spark.action
    def write_parquet(self, path: str, mode: str = "overwrite") -> None:
        """Write the table as a folder of Parquet files.

        Parameters
        ----------
        path : str
            Path on any file system that Spark supports.
        mode : {"append", "overwrite", "error", "ignore"}
            What to do if the path exists. ``"overwrite"`` removes it first, as Spark does. If the
            write then fails, for example on a full disk, the old data is lost too.
        """
        check_choice("mode", mode, _MODES)
        with spark_writing("The table", path):
            self.df.write.parquet(os.fspath(path), mode=mode)

    @spark.action
    def write_csv(
        self,
        path: str,
        delimiter: str = ",",
        mode: str = "overwrite",
        header: bool = True,
        num_partitions: int | None = None,
    ) -> None:
        """Write the table as a folder of CSV files.

        Parameters
        ----------
        path : str
        delimiter : str, default ","
        mode : {"append", "overwrite", "error", "ignore"}
            What to do if the path exists.
        header : bool, default True
            Write the column names as the first line of each file.
        num_partitions : int, optional
            Number of files. Default: one per partition.
        """
        check_choice("mode", mode, _MODES)
        df = self.df if num_partitions is None else self.df.repartition(num_partitions)
        with spark_writing("The table", path):
            df.write.csv(os.fspath(path), mode=mode, header=header, sep=delimiter)


def _is_same_in_arrow(dtype: str) -> bool:
    """Return True if values of a type become the same Python objects in Arrow as in Spark rows."""
    dtype, _ = column_types.innermost(dtype)
    return column_types.is_number(dtype) or column_types.is_text(dtype) or dtype == "boolean"


@hide_frames
class TableReader(TableOutput):
    """Base class of tables, with methods that read files and pandas DataFrames."""

    @classmethod
    def read_parquet(cls, paths: str | list[str]) -> Self:
        """Read Parquet files, or a Delta Lake or Iceberg table.

        Parameters
        ----------
        paths : str or list of str
            Files, folders or patterns on any file system that Spark supports; or the path of one
            lake table, such as ``clicks@v5``, as the Estimators accept it.
        """
        if is_lake(paths):
            from bigdl.orca.data.lake_tables.frames import spark_frame

            return cls(spark_frame(open_table(paths), spark.active_spark()))
        return cls(spark.active_spark().read.parquet(*paths_for_spark(paths)))

    @classmethod
    def read_json(cls, paths: str | list[str], cols: str | list[str] | None = None) -> Self:
        """Read JSON lines files.

        Parameters
        ----------
        paths : str or list of str
        cols : str or list of str, optional
            Columns to keep. Default: all columns.
        """
        df = spark.active_spark().read.json(paths_for_spark(paths))
        return cls(df if cols is None else df.select(*as_names(cols, "cols")))

    @classmethod
    def read_csv(
        cls,
        paths: str | list[str],
        delimiter: str = ",",
        header: bool = False,
        names: str | list[str] | None = None,
        dtype: str | list[str] | Mapping[str, str] | None = None,
    ) -> Self:
        """Read CSV files.

        Parameters
        ----------
        paths : str or list of str
        delimiter : str, default ","
        header : bool, default False
            Whether the first line of each file has the column names.
        names : str or list of str, optional
            New names for all columns.
        dtype : str, list of str, or dict of str to str, optional
            One type for all columns, a type for each column, or types of some columns, named as in
            :meth:`cast`. Other types are inferred by an extra pass over the data.
        """
        reader = spark.active_spark().read.option("sep", delimiter).option("header", header)
        df = reader.csv(paths_for_spark(paths))  # all strings; Spark reads the first line only
        if names is not None:
            names = as_names(names, "names")
            spark.check_lengths("names", names, "the columns", df.columns)
        some = dtype is None or isinstance(dtype, Mapping)
        if some and not set(names or df.columns) <= set(dtype or ()):
            # infer the other types by a pass over the data
            df = reader.csv(paths_for_spark(paths), inferSchema=True)
        df = df if names is None else df.toDF(*names)
        return cls(df if dtype is None else _with_types(df, dtype))

    @classmethod
    def read_text(cls, paths: str | list[str], col_name: str = "value") -> Self:
        """Read text files, one row per line.

        Parameters
        ----------
        paths : str or list of str
        col_name : str, default "value"
            Name of the only column.
        """
        check_string(col_name, "col_name")
        return cls(
            spark.active_spark()
            .read.text(paths_for_spark(paths))
            .withColumnRenamed("value", col_name)
        )

    @classmethod
    def from_pandas(cls, pandas_df: pd.DataFrame) -> Self:
        """Build a table from a pandas DataFrame, without its index; missing values become null."""
        import pandas as pd

        if not isinstance(pandas_df, pd.DataFrame):
            raise UsageError(
                f"pandas_df should be a DataFrame of pandas, but got {type(pandas_df).__name__}",
                code="argument-type",
                argument="pandas_df",
            )
        return cls(spark.active_spark().createDataFrame(pandas_df))


def _with_types(df: DataFrame, dtype: object) -> DataFrame:
    if isinstance(dtype, str):
        dtype = dict.fromkeys(df.columns, dtype)
    if isinstance(dtype, list | tuple):
        spark.check_lengths("dtype", dtype, "the columns", df.columns)
        dtype = dict(zip(df.columns, dtype, strict=True))
    if not isinstance(dtype, Mapping):
        raise UsageError(
            f"dtype should be str, list of str or dict, but got {dtype!r}",
            code="argument-type",
            argument="dtype",
        )
    for name, each in dtype.items():
        df = Cast([name], each).catalyst(df, schema_of(df), {})
    return df
