"""Methods of tables that look at rows or take them out of Spark."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators import statistics
from bigdl.friesian.feature.operators.columns import col, require_columns, type_of

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, Row

    from bigdl.friesian.feature.base import Table

__all__ = ["OutputMethods"]

_MODES = ("append", "overwrite", "error", "errorifexists", "ignore")


class OutputMethods:
    """Figures, files, and Python objects."""

    def compute(self) -> Self:
        """Compute every row now; returns this table."""
        self.df.write.format("noop").mode("overwrite").save()
        return self

    def size(self) -> int:
        """Number of rows, which is counted anew every time."""
        return self.df.count()

    def show(self, n: int = 20, truncate: bool | int = True) -> None:
        """Print the first rows."""
        self.df.show(n, truncate)

    def to_spark_df(self) -> DataFrame:
        """The DataFrame of Spark, which is also the attribute ``df``."""
        return self.df

    def to_pandas(self) -> pd.DataFrame:
        """All rows as a frame of pandas."""
        return self.df.toPandas()

    def collect(self) -> list[Row]:
        """All rows."""
        return self.df.collect()

    def to_list(self, column: str) -> list:
        """All values of one column.

        Parameters
        ----------
        column : str

        Returns
        -------
        list
        """
        if not isinstance(column, str):
            raise UsageError(f"Column should be of str type, but got {type(column).__name__}")
        require_columns(self.df, [column])
        return self._columns([column])[column]

    def to_dict(self) -> dict[str, list]:
        """All values of all columns, by the name of the column."""
        return self._columns(self.df.columns)

    def _columns(self, names: list[str]) -> dict[str, list]:
        chosen = self.df.select(*map(col, names))
        if all(_is_same_in_arrow(type_of(self.df, name)) for name in names):
            table = chosen.toArrow()
            return {name: table.column(i).to_pylist() for i, name in enumerate(names)}
        rows = chosen.collect()
        return {name: [row[i] for row in rows] for i, name in enumerate(names)}

    def get_stats(self, columns: str | list[str] | None, aggr: Any) -> dict[str, Any]:
        """Figures of columns, all by one job.

        Parameters
        ----------
        columns : str, list of str or None
            None for all columns of numbers.
        aggr : str, list of str, or dict of str to one of them
            Of min, max, avg, sum and count.  A dict has those of each column; it may have those of
            other columns of the table, which are not used.

        Returns
        -------
        dict of str to value or list
            By column; a list, in the order of `aggr`, if there are several figures.
        """
        return statistics.get_stats(self.df, columns, aggr)

    def min(self, columns: str | list[str] | None = None) -> Table:
        """Smallest values: a table of ``column`` (string) and ``min`` (double)."""
        return self._extremes(columns, "min")

    def max(self, columns: str | list[str] | None = None) -> Table:
        """Largest values: a table of ``column`` (string) and ``max`` (double)."""
        return self._extremes(columns, "max")

    def _extremes(self, columns: str | list[str] | None, stat: str) -> Table:
        from bigdl.friesian.feature.base import Table

        return Table(statistics.extremes(self.df, columns, stat))

    def write_parquet(self, path: str, mode: str = "overwrite") -> None:
        """Write a folder of Parquet files.

        Parameters
        ----------
        path : str
            Of any file system that Spark knows.
        mode : {"append", "overwrite", "error", "ignore"}
            What to do if it exists.
        """
        _check_mode(mode)
        self.df.write.parquet(os.fspath(path), mode=mode)

    def write_csv(
        self,
        path: str,
        delimiter: str = ",",
        mode: str = "overwrite",
        header: bool = True,
        num_partitions: int | None = None,
    ) -> None:
        """Write a folder of CSV files.

        Parameters
        ----------
        path : str
        delimiter : str, default ","
        mode : {"append", "overwrite", "error", "ignore"}
        header : bool, default True
        num_partitions : int, optional
            Number of files; default: one for each partition.
        """
        _check_mode(mode)
        df = self.df if num_partitions is None else self.df.repartition(num_partitions)
        df.write.csv(os.fspath(path), mode=mode, header=header, sep=delimiter)


def _check_mode(mode: str) -> None:
    if mode not in _MODES:
        raise UsageError(f"mode should be one of append, overwrite, error, ignore; got {mode!r}")


def _is_same_in_arrow(kind) -> bool:
    """Whether Arrow gives the same Python objects as the rows of Spark, only faster."""
    from pyspark.sql import types as T

    if isinstance(kind, T.ArrayType):
        return _is_same_in_arrow(kind.elementType)
    return isinstance(kind, T.IntegralType | T.FractionalType | T.StringType | T.BooleanType)
