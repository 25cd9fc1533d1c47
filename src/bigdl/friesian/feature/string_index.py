"""The vocabulary of a column: its values and their numbers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.base import Table
from bigdl.friesian.feature.operators.columns import check_string
from bigdl.friesian.feature.operators.dictionary import Dictionary
from bigdl.friesian.feature.operators.vocabulary import number_column

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["StringIndex"]


class StringIndex(Table):
    """The different values of a column with their numbers, which begin with 1.

    Operators that keep both columns return a StringIndex, the others a Table.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        Columns `col_name` and ``id``.
    col_name : str
        If this is ``"id"`` itself, the column of the numbers is ``id_number``.
    """

    def __init__(self, df: DataFrame, col_name: str):
        super().__init__(df)
        check_string(col_name, "col_name")
        for name in (number_column(col_name), col_name):
            if name not in df.columns:
                raise UsageError(
                    f"{name} should be a column of the DataFrame, but its columns are {df.columns}"
                )
        self.col_name = col_name
        self._dictionaries: dict[str, Dictionary] = {}

    def _clone(self, df: DataFrame) -> Self | Table:
        if {number_column(self.col_name), self.col_name} <= set(df.columns):
            return type(self)(df, self.col_name)
        return Table(df)

    def rename(self, columns: dict[str, str]) -> StringIndex:
        """Give columns new names; `col_name` follows.

        Parameters
        ----------
        columns : dict of str to str
            From old to new names.
        """
        if not isinstance(columns, dict):
            return Table(self.df).rename(columns)  # which says what it should be
        col_name = columns.get(self.col_name, self.col_name)
        numbers = {number_column(self.col_name): number_column(col_name)}
        return type(self)(Table(self.df).rename({**numbers, **columns}).df, col_name)

    def dictionary_of(self, column: str) -> Dictionary:
        """The numbers by the values of a column, for look-ups; what they collect is kept."""
        found = self._dictionaries.get(column)
        if found is None or found.df is not self.df:
            number = number_column(self.col_name)
            found = self._dictionaries[column] = Dictionary(self.df, column, number)
        return found

    @classmethod
    def read_parquet(cls, paths: str | list[str], col_name: str | None = None) -> StringIndex:
        """Read what :meth:`write_parquet` wrote.

        Parameters
        ----------
        paths : str or list of str
        col_name : str, optional
            Default: the name of the file up to its first dot.

        Returns
        -------
        StringIndex
        """
        from bigdl.friesian.feature.operators.reading import read_parquet

        first = paths[0] if isinstance(paths, list | tuple) and paths else paths
        if col_name is None:
            col_name = os.path.basename(os.fspath(first).rstrip("/")).split(".")[0]
        return cls(read_parquet(paths), col_name)

    @classmethod
    def from_dict(cls, indices: dict[str, int], col_name: str) -> StringIndex:
        """Make a vocabulary.

        Parameters
        ----------
        indices : dict of str to int
        col_name : str

        Returns
        -------
        StringIndex
        """
        import pyarrow as pa

        from bigdl.orca import OrcaContext

        if not isinstance(indices, dict):
            raise UsageError(f"indices should be dict, but get {type(indices).__name__}")
        check_string(col_name, "col_name")
        if not all(isinstance(each, str) for each in indices):
            raise UsageError(f"The keys of indices should be str, but got {list(indices)[:5]!r}")
        try:
            ids = pa.array(indices.values(), pa.int32())
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise UsageError(f"The values of indices should be 32-bit int: {error}") from error
        number = number_column(col_name)
        table = pa.table({col_name: pa.array(indices, pa.string()), number: ids})
        spark = OrcaContext.get_spark_session()
        return cls(spark.createDataFrame(table, f"`{col_name}` string, {number} int"), col_name)

    def to_dict(self) -> dict[str, int]:
        """The number of each value."""
        number = number_column(self.col_name)
        columns = self._columns([self.col_name, number])
        return dict(zip(columns[self.col_name], columns[number], strict=True))

    def write_parquet(self, path: str, mode: str = "overwrite") -> None:
        """Write the folder ``<path>/<col_name>.parquet``.

        Parameters
        ----------
        path : str
        mode : {"append", "overwrite", "error", "ignore"}
        """
        super().write_parquet(f"{os.fspath(path).rstrip('/')}/{self.col_name}.parquet", mode)
