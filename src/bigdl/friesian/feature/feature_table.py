"""The table of features: readers, scaling, joins, groups, functions of users."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.base import Table
from bigdl.friesian.feature.encoding_methods import EncodingMethods
from bigdl.friesian.feature.operators import (
    functions,
    reading,
    rows,
    scaling,
    sizes,
    statistics,
)
from bigdl.friesian.feature.operators.as_of import join_as_of
from bigdl.friesian.feature.operators.columns import as_names, check_string, require_columns
from bigdl.friesian.feature.sequence_methods import SequenceMethods
from bigdl.friesian.feature.target_methods import TargetMethods

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql.types import DataType

    from bigdl.friesian.feature.schema import FeatureSchema

__all__ = ["FeatureTable"]


class FeatureTable(EncodingMethods, TargetMethods, SequenceMethods, Table):
    """A table of features on Spark.

    Examples
    --------
    >>> from bigdl.friesian.feature import FeatureTable
    >>> tbl = FeatureTable.read_parquet("ratings.parquet")  # doctest: +SKIP
    >>> tbl, index = tbl.fillna("", "genre").category_encode("genre")  # doctest: +SKIP
    >>> tbl = tbl.add_negative_samples(item_size=3953, neg_num=4, seed=1)  # doctest: +SKIP
    >>> tbl.write_parquet("train.parquet")  # doctest: +SKIP
    """

    # -- readers -------------------------------------------------------------------------------

    @classmethod
    def read_parquet(cls, paths: str | list[str]) -> FeatureTable:
        """Read Parquet files.

        Parameters
        ----------
        paths : str or list of str
            Files, folders or patterns, of any file system that Spark knows.
        """
        return cls(reading.read_parquet(paths))

    @classmethod
    def read_json(cls, paths: str | list[str], cols: str | list[str] | None = None) -> FeatureTable:
        """Read files with an object of JSON in every line.

        Parameters
        ----------
        paths : str or list of str
        cols : str or list of str, optional
            Default: all columns.
        """
        return cls(reading.read_json(paths, cols))

    @classmethod
    def read_csv(
        cls,
        paths: str | list[str],
        delimiter: str = ",",
        header: bool = False,
        names: str | list[str] | None = None,
        dtype: str | list[str] | Mapping[str, str] | None = None,
    ) -> FeatureTable:
        """Read CSV files.

        Parameters
        ----------
        paths : str or list of str
        delimiter : str, default ","
        header : bool, default False
            Whether the first line of a file has the names of the columns.
        names : str or list of str, optional
            Names for all columns.
        dtype : str, list of str, or dict of str to str, optional
            The type of all columns, of each of them, or of some; as in :meth:`cast`.  Other types
            are inferred, by another pass over the data.
        """
        return cls(reading.read_csv(paths, delimiter, header, names, dtype))

    @classmethod
    def read_text(cls, paths: str | list[str], col_name: str = "value") -> FeatureTable:
        """Read files of lines.

        Parameters
        ----------
        paths : str or list of str
        col_name : str, default "value"
            The name of the one column.
        """
        return cls(reading.read_text(paths, check_string(col_name, "col_name")))

    @staticmethod
    def from_pandas(pandas_df: pd.DataFrame) -> FeatureTable:
        """Make a table of a frame of pandas, without its index; missing values become null."""
        return FeatureTable(reading.from_pandas(pandas_df))

    # -- scaling -------------------------------------------------------------------------------

    def min_max_scale(
        self, columns: str | list[str], min: float = 0.0, max: float = 1.0
    ) -> tuple[Self, dict[str, tuple]]:
        """Scale numbers to a range.

        Parameters
        ----------
        columns : str or list of str
            Columns of numbers, which become float, of arrays, which become array<double> and are
            scaled by position, or of vectors.
        min, max : float, default 0.0 and 1.0
            The range.  A column whose values are all equal gets its middle.

        Returns
        -------
        table : FeatureTable
            Nulls and NaN stay.
        extremes : dict of str to (min, max)
            The extremes before, without the range, for :meth:`transform_min_max_scale`; lists for
            arrays.
        """
        extremes = scaling.fit_min_max(self.df, columns)
        return self._clone(scaling.apply_min_max(self.df, extremes, min, max)), extremes

    def transform_min_max_scale(
        self,
        columns: str | list[str],
        min_max_dict: Mapping[str, tuple],
        min: float = 0.0,
        max: float = 1.0,
        clip: bool = False,
    ) -> Self:
        """Scale numbers by the extremes of other data.

        Parameters
        ----------
        columns : str or list of str
        min_max_dict : dict of str to (min, max)
            What :meth:`min_max_scale` returned.
        min, max : float, default 0.0 and 1.0
            The range: give that of :meth:`min_max_scale` again, since `min_max_dict` has it not.
        clip : bool, default False
            Bring numbers outside of the extremes to the ends of the range.
        """
        names = as_names(columns)
        missing = [name for name in names if name not in min_max_dict]
        if missing:
            raise UsageError(f"min_max_dict has nothing for {missing}, got {dict(min_max_dict)!r}")
        extremes = {name: min_max_dict[name] for name in names}
        return self._clone(scaling.apply_min_max(self.df, extremes, min, max, clip))

    # -- joins and groups ----------------------------------------------------------------------

    def join(
        self,
        table: Table,
        on: str | list[str] | None = None,
        how: str = "inner",
        lsuffix: str | None = None,
        rsuffix: str | None = None,
    ) -> Self:
        """Join with another table.

        Parameters
        ----------
        table : Table
        on : str or list of str, optional
            Columns of both tables; needed unless `how` is ``"cross"``.
        how : str, default "inner"
            Any type of join that Spark knows.
        lsuffix, rsuffix : str, optional
            For the names that both tables have beside `on`.
        """
        if not isinstance(table, Table):
            raise UsageError(f"table should be a Table, but got {type(table).__name__}")
        return self._clone(rows.join(self.df, table.df, on, how, lsuffix, rsuffix))

    def join_as_of(
        self, table: Table, on: str | list[str], time_col: str = "time", ttl: float | None = None
    ) -> Self:
        """Add to each row what another table knew at its time, and nothing of the future.

        Parameters
        ----------
        table : Table
            Has the columns `on` and `time_col` too; of equal ones any row is taken.
        on : str or list of str
            Whose facts they are.  A null has none.
        time_col : str, default "time"
            Numbers, dates or timestamps; times as text have to be cast.
        ttl : float, optional
            How old facts may be: in the unit of the numbers, or in seconds.

        Returns
        -------
        FeatureTable
            With the other columns of `table`: of its latest row that is not later than the row, or
            null.
        """
        if not isinstance(table, Table):
            raise UsageError(f"table should be a Table, but got {type(table).__name__}")
        return self._clone(join_as_of(self.df, table.df, on, time_col, ttl))

    def group_by(
        self,
        columns: str | Sequence[str] = (),
        agg: str | list[str] | Mapping[str, Any] = "count",
        join: bool = False,
    ) -> Self:
        """Aggregate groups of rows.

        Parameters
        ----------
        columns : str or list of str
            What makes a group; by default the whole table is one.
        agg : str, list of str, or dict of str to one of them, default "count"
            Of max, min, count, sum, avg, mean, sumDistinct, stddev, stddev_pop, variance, var_pop,
            skewness, kurtosis, collect_list, collect_set, approx_count_distinct, first, last: for
            all other columns, or for those in the dict.
        join : bool, default False
            Add the figures to the rows of the table; the groups of nulls have theirs too.

        Returns
        -------
        FeatureTable
            The figures have Spark's names, such as ``sum(price)``, also those of texts that hold
            numbers.
        """
        return self._clone(statistics.group_by(self.df, columns, agg, join))

    # -- sizes ---------------------------------------------------------------------------------

    def feature_schema(self, columns: str | list[str] | None = None) -> FeatureSchema:
        """What a model has to know of the columns, by one job.

        Parameters
        ----------
        columns : str or list of str, optional
            Default: all columns.

        Returns
        -------
        FeatureSchema
            Types, largest values and lengths of arrays, from which
            :mod:`bigdl.friesian.models` size their layers.  Nulls do not count.
        """
        names = self.columns if columns is None else as_names(columns)
        require_columns(self.df, names)
        return sizes.feature_schema(self.df, names)

    # -- functions -----------------------------------------------------------------------------

    def apply(
        self,
        in_col: str | list[str],
        out_col: str,
        func: Callable,
        dtype: str | DataType = "string",
        vectorized: bool = False,
    ) -> Self:
        """Add a column of what a function of Python returns.

        Parameters
        ----------
        in_col : str or list of str
        out_col : str
            One that exists is replaced in its place.
        func : callable
            Takes a value, or for a list of columns the list of their values, which keep their own
            types.
        dtype : str or DataType of Spark, default "string"
            The type of the result, such as ``"int"`` or ``"array<float>"``.
        vectorized : bool, default False
            `func` takes a Series of pandas, or a list of them, and returns one: many times faster.
        """
        return self._clone(functions.apply(self.df, in_col, out_col, func, dtype, vectorized))

    def string_embed(
        self,
        columns: str | list[str],
        bert_model: str | Callable = "distilbert-base-uncased",
        reduce_dim: int | None = None,
        replace: bool = True,
    ) -> Self:
        """Turn texts into arrays of numbers.

        Parameters
        ----------
        columns : str or list of str
        bert_model : str or callable, default "distilbert-base-uncased"
            A model of sentence-transformers, which every Python worker loads once, or a function
            from a list of texts to a matrix with a row for each.
        reduce_dim : int, optional
            Keep only so many principal components.
        replace : bool, default True
            Put the arrays in the place of the texts, otherwise into ``<column>_embed``.

        Returns
        -------
        FeatureTable
            With columns of array<double>; null for a null.
        """
        df = functions.string_embed(self.df, columns, bert_model, reduce_dim, replace)
        return self._clone(df)
