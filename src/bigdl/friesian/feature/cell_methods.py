"""Methods of tables that change cells or columns and keep the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators import cells
from bigdl.friesian.feature.operators.columns import (
    as_names,
    check_string,
    common_text,
    is_column,
    is_integral,
    renamed,
    replace,
    require_columns,
    type_of,
)

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType

    from bigdl.friesian.feature.base import Table

__all__ = ["CellMethods"]


class CellMethods:
    """Nulls, bounds, types and names of columns."""

    def fillna(self, value: float | str | bool, columns: str | list[str] | None) -> Self:
        """Replace nulls; NaN is left.

        Parameters
        ----------
        value : int, float, str or bool
            Cast to the type of each column.
        columns : str, list of str or None
            None means every column that can hold the value: those of numbers, of strings or of
            booleans. With an int of 32 bits it means the columns of type int only, as in
            BigDL 2.x.

        Returns
        -------
        Table

        Raises
        ------
        UsageError
            If a column does not exist, or its type cannot hold the value.
        """
        return self._clone(cells.fillna(self.df, value, columns))

    def dropna(
        self, columns: str | list[str] | None, how: str = "any", thresh: int | None = None
    ) -> Self:
        """Leave out rows with nulls (or NaN).

        Parameters
        ----------
        columns : str, list of str or None
            Where to look; None for all columns.
        how : {"any", "all"}
            Whether one null is enough, or all have to be null.
        thresh : int, optional
            Keep the rows with at least so many other values, whatever `how` says.
        """
        names = self.df.columns if columns is None else as_names(columns)
        require_columns(self.df, names)
        cells.check_dropna(how, thresh)
        quoted = [f"`{name.replace('`', '``')}`" for name in names]
        return self._clone(self.df.dropna(how=how, thresh=thresh, subset=quoted))

    def clip(
        self,
        columns: str | list[str] | None = None,
        min: float | None = None,
        max: float | None = None,
    ) -> Self:
        """Bring numbers into bounds, which are cast to the type of the column first.

        Parameters
        ----------
        columns : str or list of str
        min, max : number, optional
            At least one of them.  Nulls and NaN stay.
        """
        return self._clone(cells.clip(self.df, columns, min, max))

    def log(self, columns: str | list[str] | None = None, clipping: bool = True) -> Self:
        """Take natural logarithms; the columns become double.

        Parameters
        ----------
        columns : str or list of str
        clipping : bool, default True
            Compute ``log(x + 1)``, and 0 for negative x.  Without it ``log(x)``, which is null
            unless x is positive.
        """
        return self._clone(cells.log(self.df, columns, clipping))

    def median(self, columns: str | list[str] | None = None) -> Table:
        """Medians, whose rank is exact to a thousandth of the rows.

        Parameters
        ----------
        columns : str or list of str, optional
            Default: all columns of numbers.

        Returns
        -------
        Table
            Columns ``column`` (string) and ``median`` (double), null for a column of nulls.
        """
        from bigdl.friesian.feature.base import Table

        rows = list(cells.medians(self.df, columns).items())
        return Table(self.df.sparkSession.createDataFrame(rows, "column string, median double"))

    def fill_median(self, columns: str | list[str] | None = None) -> Self:
        """Replace nulls by the :meth:`median` of their column, cut to a whole number for integers.

        Raises
        ------
        UsageError
            If a column has nothing but nulls.
        """
        medians = cells.medians(self.df, columns)
        empty = [name for name, value in medians.items() if value is None]
        if empty:
            raise UsageError(
                f"The columns {empty} have no median since all their values are null; fill them "
                "with a constant"
            )
        values = {
            name: int(value) if is_integral(type_of(self.df, name)) else value
            for name, value in medians.items()
        }
        return self._clone(cells.fill_values(self.df, values))

    def cast(self, columns: str | list[str] | None, dtype: str | DataType) -> Self:
        """Change types; a value that cannot be converted becomes null.

        Parameters
        ----------
        columns : str, list of str or None
            None for all columns.
        dtype : str or DataType of Spark
            One of string, str, boolean, bool, int, integer, long, short, float, double.
        """
        return self._clone(cells.cast(self.df, columns, dtype))

    def add(self, columns: str | list[str], value: float = 1) -> Self:
        """Add a constant to columns of numbers; a whole number plus 1.5 becomes double."""
        return self._clone(cells.add(self.df, columns, value))

    def rename(self, columns: dict[str, str]) -> Self:
        """Give columns new names.

        Parameters
        ----------
        columns : dict of str to str
            From old to new names, all at once; old ones that do not exist are skipped.
        """
        if not isinstance(columns, dict) or not all(isinstance(e, str) for e in columns.values()):
            raise UsageError(
                "columns should be a dictionary of {'old_name1': 'new_name1', 'old_name2': "
                f"'new_name2'}}, but got {columns!r}"
            )
        return self._clone(renamed(self.df, columns))

    def merge_cols(self, columns: list[str], target: str) -> Self:
        """Put columns into one column of arrays, and leave them out.

        Parameters
        ----------
        columns : list of str
            If one of them holds strings, all elements become strings.
        target : str
            Name of the new column.
        """
        from pyspark.sql import functions as F

        if not isinstance(columns, list):
            raise UsageError(f"columns must be a list of column names, but got {columns!r}")
        names = as_names(columns)
        require_columns(self.df, names)
        check_string(target, "target")
        merged = replace(self.df, {target: F.array(*common_text(self.df, names))})
        return self._clone(merged.drop(*(name for name in names if name != target)))

    def append_column(self, name: str, column: Column) -> Self:
        """Add a column.

        Parameters
        ----------
        name : str
            One that exists is replaced in its place.
        column : pyspark.sql.Column
            For instance ``pyspark.sql.functions.lit(0)``.
        """
        check_string(name, "name")
        if not is_column(column):
            raise UsageError(f"column should be a pyspark.sql.Column, but got {column!r}")
        return self._clone(self.df.withColumn(name, column))
