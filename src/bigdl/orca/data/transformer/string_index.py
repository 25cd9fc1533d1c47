"""The vocabulary of a column: a number for each of its values."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["StringIndex"]


class StringIndex:
    """A number from 1 on for each value of a column; 0 stands for every other value.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        With the columns ``id`` and `col_name`.
    col_name : str
        The column of the values.

    Attributes
    ----------
    df : pyspark.sql.DataFrame
        With the columns `col_name` and ``id``; made when it is asked for.
    col_name : str
    """

    def __init__(self, df: DataFrame, col_name: str):
        _check_name(col_name)
        missing = {"id", col_name} - set(df.columns)
        if missing:
            raise UsageError(
                f"{sorted(missing)[0]} should be a column of the DataFrame, which has {df.columns}"
            )
        self._df: DataFrame | None = df
        self._ids: dict[Hashable, int] | None = None
        self.col_name = col_name

    @classmethod
    def from_dict(cls, indices: Mapping[Hashable, int], col_name: str) -> StringIndex:
        """The index with these numbers.

        Parameters
        ----------
        indices : dict of str to int
        col_name : str
        """
        if not isinstance(indices, Mapping):
            raise UsageError(f"indices should be dict, but get {type(indices).__name__}")
        _check_name(col_name)
        for value, number in indices.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise UsageError(
                    f"indices should have whole numbers from 0 on, but get {number!r} for {value!r}"
                )
        index = cls.__new__(cls)
        index._df, index._ids, index.col_name = None, dict(indices), col_name
        return index

    @property
    def df(self) -> DataFrame:
        if self._df is None:
            from pyspark.sql import functions as F
            from pyspark.sql import types as T

            from bigdl.orca.settings import OrcaContext

            spark = OrcaContext.get_spark_session()
            rows = list(self.to_dict().items())
            if rows and not all(isinstance(value, str) for value, _ in rows):
                made = spark.createDataFrame(rows, [self.col_name, "id"])
                self._df = made.withColumn("id", F.col("id").cast("int"))
            else:
                fields = [T.StructField(self.col_name, T.StringType())]
                fields += [T.StructField("id", T.IntegerType())]
                self._df = spark.createDataFrame(rows, T.StructType(fields))
        return self._df

    def to_dict(self) -> dict[Any, int]:
        """The number of each value."""
        if self._ids is None:
            rows = self._df.select(self.col_name, "id").collect()
            self._ids = {value: number for value, number in rows if value is not None}
        return dict(self._ids)

    def broadcast(self) -> None:
        """Let Spark send :attr:`df` whole to every executor when it is joined."""
        from pyspark.sql import functions as F

        self._df = F.broadcast(self.df)

    def __len__(self) -> int:
        return len(self.to_dict())

    def __repr__(self) -> str:
        return f"StringIndex({self.col_name!r}, {len(self)} values)"


def _check_name(col_name: Any) -> None:
    if not isinstance(col_name, str):
        given = None if col_name is None else type(col_name).__name__
        raise UsageError(f"col_name should be str, but get {given}")
