"""The table: a DataFrame of Spark behind methods that return new tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.cell_methods import CellMethods
from bigdl.friesian.feature.operators import rows
from bigdl.friesian.feature.operators.columns import as_names, col, is_column
from bigdl.friesian.feature.output_methods import OutputMethods

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

__all__ = ["Table"]


class Table(CellMethods, OutputMethods):
    """A table on Spark.

    Every method that changes something returns a new table of the same class; only
    :meth:`broadcast` changes the table itself.  The columns of a table are also its attributes.

    Parameters
    ----------
    df : pyspark.sql.DataFrame

    Attributes
    ----------
    df : pyspark.sql.DataFrame
        What the ``fit`` of an Estimator takes.
    """

    def __init__(self, df: DataFrame):
        if not hasattr(df, "sparkSession"):
            raise UsageError(f"df should be a DataFrame of Spark, but got {type(df).__name__}")
        self.df = df

    def _clone(self, df: DataFrame) -> Self:
        return type(self)(df)

    # -- columns -------------------------------------------------------------------------------

    @property
    def schema(self) -> StructType:
        """The schema of the DataFrame."""
        return self.df.schema

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return self.df.columns

    @property
    def dtypes(self) -> list[tuple[str, str]]:
        """Names and types of the columns."""
        return self.df.dtypes

    def __getattr__(self, name: str) -> Column:
        # Before `df` is set (while copying or unpickling) there is no column to look for.
        if not name.startswith("__") and "df" in self.__dict__ and name in self.df.columns:
            return self.df[f"`{name}`"]
        raise AttributeError(f"{type(self).__name__} has no attribute or column {name!r}")

    def col(self, name: str) -> Column:
        """The column of this name, not bound to this table."""
        return col(name)

    def select(self, *cols: str | Column | list) -> Self:
        """Some of the columns, or expressions.

        Parameters
        ----------
        *cols : str, Column, or a list of them
        """
        wanted = list(cols[0]) if len(cols) == 1 and isinstance(cols[0], list | tuple) else cols
        if not wanted:
            raise UsageError("cols should be str or a list of str, but got None.")
        return self._clone(self.df.select(*(self._known(each, "cols") for each in wanted)))

    def _known(self, column: Any, what: str) -> Any:
        """A column that a user names: any name that the table has, an expression, or ``*``."""
        if is_column(column) or column == "*":
            return column
        if not isinstance(column, str):
            raise UsageError(f"{what} should be str or a list of str, but got {column!r}.")
        if column in self.df.columns:
            return col(column)
        return column  # a field of a struct, or for Spark to say that there is none

    def drop(self, *cols: str) -> Self:
        """All but some columns; names that do not exist are skipped."""
        names = as_names(list(cols[0] if len(cols) == 1 and isinstance(cols[0], list) else cols))
        return self._clone(self.df.drop(*names))

    # -- rows ----------------------------------------------------------------------------------

    def limit(self, num: int) -> Self:
        """At most so many rows."""
        return self._clone(self.df.limit(num))

    def filter(self, condition: str | Column) -> Self:
        """The rows for which a condition holds, an expression of SQL or a Column."""
        if not isinstance(condition, str) and not is_column(condition):
            raise UsageError(f"condition should be str or Column, but got {condition!r}")
        return self._clone(self.df.filter(condition))

    def distinct(self) -> Self:
        """Every different row once."""
        return self._clone(self.df.distinct())

    def drop_duplicates(
        self,
        subset: str | list[str] | None = None,
        sort_cols: str | list[str] | None = None,
        keep: str = "min",
    ) -> Self:
        """One row of each group of rows that are equal in some columns.

        Parameters
        ----------
        subset : str or list of str, optional
            Default: all columns.
        sort_cols : str or list of str, optional
            The row that comes first by these columns is kept; of equal ones the one that comes
            first in the table.  Without it any row is kept.
        keep : {"min", "max"}
            Ascending or descending order.
        """
        return self._clone(rows.drop_duplicates(self.df, subset, sort_cols, keep))

    def concat(
        self, tables: Table | list[Table], mode: str = "inner", distinct: bool = False
    ) -> Self:
        """The rows of several tables, by the names of the columns.

        Parameters
        ----------
        tables : Table or list of Table
            Their rows come before those of this table.
        mode : {"inner", "outer"}
            The columns that all tables have, or those of any table, with nulls where one has none.
        distinct : bool, default False
            Every different row once.
        """
        others = tables if isinstance(tables, list | tuple) else [tables]
        if not all(isinstance(each, Table) for each in others):
            raise UsageError(f"tables should be a Table or a list of Tables, but got {tables!r}")
        frames = [*(each.df for each in others), self.df]
        return self._clone(rows.concat(frames, mode, distinct))

    def subtract(self, other: Table) -> Self:
        """The different rows that another table has not."""
        return self._clone(self.df.subtract(_table(other).df))

    def intersect(self, other: Table) -> Self:
        """The different rows that another table has too."""
        return self._clone(self.df.intersect(_table(other).df))

    def sample(self, fraction: float, replace: bool = False, seed: int | None = None) -> Self:
        """Random rows, about `fraction` of them."""
        return self._clone(self.df.sample(replace, float(fraction), seed))

    def random_split(self, weights: list[float], seed: int | None = None) -> list[Self]:
        """Split the rows by chance.

        Parameters
        ----------
        weights : list of float
            Shares of the parts, which are normalised; the sizes agree approximately.
        seed : int, optional
            The same seed gives the same parts of the same table.

        Returns
        -------
        list of Table
        """
        if not isinstance(weights, list | tuple) or not weights:
            raise UsageError(f"weights should be a list of numbers, but got {weights!r}")
        parts = self.df.randomSplit([float(weight) for weight in weights], seed)
        return [self._clone(part) for part in parts]

    split = random_split

    # -- order and partitions ------------------------------------------------------------------

    def sort(self, *cols: str | Column | list, ascending: bool | Sequence[bool] = True) -> Self:
        """Order the rows.

        Parameters
        ----------
        *cols : str, Column, or a list of them
        ascending : bool or list of bool, default True
            A list has one for each column.
        """
        wanted = list(cols[0]) if len(cols) == 1 and isinstance(cols[0], list | tuple) else cols
        if not wanted:
            raise UsageError("cols should be str or a list of str, but got None.")
        names = [self._known(each, "cols") for each in wanted]
        flags = ascending if isinstance(ascending, bool) else [bool(each) for each in ascending]
        if not isinstance(flags, bool) and len(flags) != len(names):
            raise UsageError(
                f"ascending should have one value for each of {len(names)} columns, got {flags}"
            )
        return self._clone(self.df.sort(*names, ascending=flags))

    order_by = sort

    def ordinal_shuffle_partition(self, seed: int | None = None) -> Self:
        """The rows of every partition in random order; none moves to another partition.

        Parameters
        ----------
        seed : int, optional
            The same seed gives the same order.
        """
        return self._clone(rows.shuffle_partitions(self.df, seed))

    def repartition(self, num_partitions: int) -> Self:
        """Distribute the rows anew over partitions."""
        return self._clone(self.df.repartition(num_partitions))

    def coalesce(self, num_partitions: int) -> Self:
        """Unite partitions until there are at most so many."""
        return self._clone(self.df.coalesce(num_partitions))

    def get_partition_row_number(self) -> Table:
        """A table of ``partitionId`` and ``count``, of the partitions that have rows."""
        from pyspark.sql import functions as F

        partition = F.spark_partition_id().alias("partitionId")
        return Table(self.df.select(partition).groupBy("partitionId").count())

    # -- where the rows are --------------------------------------------------------------------

    def broadcast(self) -> None:
        """Mark this table as small enough to be sent to all executors when it is joined."""
        from pyspark.sql import functions as F

        self.df = F.broadcast(self.df)

    def cache(self) -> Self:
        """Keep the rows in the memory of the executors once they are computed."""
        self.df.cache()
        return self

    def uncache(self) -> Self:
        """Free the memory that :meth:`cache` took."""
        if self.df.is_cached:
            self.df.unpersist()
        return self


def _table(other: Any) -> Table:
    if not isinstance(other, Table):
        raise UsageError(f"other should be a Table, but got {type(other).__name__}")
    return other
