"""What XShards can do whose shards are pandas frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.orca.data.xshards import exchange, frames, persistence, relational
from bigdl.orca.data.xshards.kinds import DATA_FRAME, SERIES

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from pyspark.sql import DataFrame

    from bigdl.orca.data.xshards.spark import SparkXShards

__all__ = ["FrameShards"]


class FrameShards:
    """The part of :class:`SparkXShards` that is about columns and rows of pandas frames.

    Methods that go through Spark give columns the types that they have there, and a new index.
    """

    def get_schema(self) -> dict | None:
        """``{"columns": [...], "dtypes": {...}}`` of the first shard, None if it is no frame."""
        if "schema" not in self.type and self._get_class_name() == DATA_FRAME:
            self._summary()
        return self.type.get("schema")

    def _require_frames(self, message: str | None = None) -> None:
        name = self._get_class_name()
        if name not in (DATA_FRAME, None):
            message = message or "This is only for XShards of Pandas DataFrame"
            raise UsageError(f"{message}, but the shards are {name}")

    def _require_columns(self, names: Sequence, message: str | None = None) -> list:
        schema = self.get_schema()
        missing = [name for name in names if schema and name not in schema["columns"]]
        if missing:
            message = message or "There is no such column in the DataFrame"
            raise UsageError(f"{message}: {missing}, not in {schema['columns']}")
        return list(names)

    def _columns(self, names: Any, message: str | None = None) -> list:
        """`names` as a list of columns that the frames have."""
        self._require_frames()
        return self._require_columns([names] if isinstance(names, str) else names, message)

    def _derive_frames(self, rdd, *others) -> SparkXShards:
        return self._derive(rdd, *others, class_name=DATA_FRAME)

    # Rows ----------------------------------------------------------------------------------------

    def partition_by(self, cols: str, num_partitions: int | None = None) -> SparkXShards:
        """Bring all rows with one value of a column to one partition.

        Only for shards that are pandas frames.  Rows keep their order within a partition; a
        partition without rows has no shard, and any other has one.

        Parameters
        ----------
        cols : str
            Name of the column.
        num_partitions : int, optional
            Default: as many as there are.

        Raises
        ------
        UsageError
            If the shards are no frames, or have no such column.
        """
        self._require_frames("Currently only support partition by for XShards of Pandas DataFrame")
        if not isinstance(cols, str):
            raise UsageError(f"Only support partition by a column name, got {cols!r}")
        self._require_columns([cols], "The partition column is not in the DataFrame")
        if num_partitions is None:
            num_partitions = self.num_partitions()
        number = exchange.check_partitions(num_partitions)
        rdd = exchange.partition_by(self.rdd, cols, number)
        return self._derive(rdd, class_name=DATA_FRAME)

    def sort_values(
        self, col_names: str | Sequence[str] | None = None, ascending: bool | Sequence[bool] = True
    ) -> SparkXShards:
        """All rows in the order of some columns; nulls come last, equal rows stay as they were.

        Parameters
        ----------
        col_names : str or sequence of str, optional
            Default: all columns.
        ascending : bool or sequence of bool, default True
        """
        self._require_frames()
        columns = None if col_names is None else self._columns(col_names)
        return self._derive_frames(relational.ordered(self.rdd, columns, ascending))

    def deduplicates(self) -> SparkXShards:
        """The rows without those that equal an earlier one."""
        self._require_frames()
        return self._derive_frames(relational.deduplicated(self.rdd))

    def merge(
        self, right: SparkXShards, how: str = "inner", on: str | Sequence[str] | None = None
    ) -> SparkXShards:
        """Join rows whose keys are equal, as :func:`pandas.merge` does.

        A null equals a null; other columns of both frames get the suffixes ``_x`` and ``_y``.  The
        result is in the order of the left rows; for ``"right"`` of the right ones, and for
        ``"outer"`` of the keys.

        Parameters
        ----------
        right : SparkXShards
        how : {"inner", "left", "right", "outer"}, default "inner"
        on : str or sequence of str, optional
            Columns of both frames.  Default: all that they have in common.
        """
        self._require_frames()
        if not isinstance(right, FrameShards):
            raise UsageError(f"right should be a SparkXShards, got {type(right).__name__}")
        right._require_frames()
        keys = None if on is None else self._columns(on)
        rdd = relational.merged(self.rdd, right.rdd, how, keys)
        return self._derive_frames(rdd, right.rdd)

    def group_by(
        self,
        columns: str | Sequence[str] = (),
        agg: str | list[str] | dict[str, str | list[str]] = "count",
        join: bool = False,
    ) -> SparkXShards:
        """Aggregates of the rows that are equal in some columns.

        Parameters
        ----------
        columns : str or sequence of str, default ()
            What to group by; without any, all rows are one group.
        agg : str, list of str or dict, default "count"
            Functions of Spark, for every other column or by column.  Their results are called as
            Spark does, e.g. ``"sum(x)"``.  Where there is no other column, ``"count"`` is the
            number of rows.
        join : bool, default False
            Give every row the results of its group, in the order of the rows.  Otherwise there is
            one row per group, in the order of their keys, null last.
        """
        keys = self._columns(columns)
        return self._derive_frames(relational.grouped(self.rdd, keys, agg, join))

    def sample(
        self,
        frac: float,
        replace: bool = False,
        weights: Any = None,
        random_state: Any = None,
    ) -> SparkXShards:
        """A sample of each shard, see :meth:`pandas.DataFrame.sample`."""
        self._require_frames()
        sample = _Method(
            "sample", frac=frac, replace=replace, weights=weights, random_state=random_state
        )
        return self._derive_frames(self.rdd.map(sample))

    def head(self, n: int = 5) -> pd.DataFrame:
        """The first `n` rows, as a pandas frame."""
        import pandas as pd

        self._require_frames()
        first, rows, partition, step = [], 0, 0, 1
        heads = self.rdd.map(_Method("head", n))
        while partition < self.num_partitions() and (rows < n or not first):
            stop = min(partition + step, self.num_partitions())
            part = self.rdd.context.runJob(heads, list, list(range(partition, stop)))
            first += part
            rows += sum(map(len, part))
            partition, step = stop, step * 4
        kept = [frame for frame in first if len(frame)] or first[:1]
        return pd.concat(kept).head(n) if kept else pd.DataFrame()

    # Columns -------------------------------------------------------------------------------------

    def select(self, cols: str | Sequence[str]) -> SparkXShards:
        """Frames of some columns only, also of a single one."""
        return self._derive_frames(self.rdd.map(_Method("__getitem__", self._columns(cols))))

    def drop_missing_value(self) -> SparkXShards:
        """Frames without the columns that have a null in any shard."""
        sums = self.get_null_sum()
        missing = sums.loc[sums["total"] > 0, "col"].tolist()
        return self._derive_frames(self.rdd.map(_Method("drop", columns=missing)))

    def get_null_sum(self) -> pd.DataFrame:
        """Number of nulls (``total``) of each column (``col``), as a pandas frame."""
        import pandas as pd

        self._require_frames()
        counts = self.rdd.map(_count_nulls).collect()
        columns = list(counts[0].index) if counts else []
        total = sum(each.reindex(columns).to_numpy() for each in counts)
        return pd.DataFrame({"col": columns, "total": total if counts else []})

    def max_values(self, col_name: str) -> Any:
        """The largest value of a column; NaN if it has none."""
        import pandas as pd

        self._columns(col_name)
        found = [each for each in self.rdd.map(_Largest(col_name)).collect() if not pd.isna(each)]
        return max(found) if found else float("nan")

    def unique(self) -> np.ndarray:
        """The different values of shards that are pandas Series, in order of first appearance."""
        import numpy as np
        import pandas as pd

        name = self._get_class_name()
        if name not in (SERIES, None):
            raise UsageError(
                "Currently only support unique() for XShards of Pandas Series, but the shards are "
                f"{name}; select a column first, as in shards['column'].unique()"
            )
        found = self.rdd.map(_drop_repeated).collect()
        found = [series for series in found if len(series)] or found[:1]
        return np.asarray(pd.concat(found).unique()) if found else np.array([])

    def describe(self, cols: str | Sequence[str] | None = None) -> pd.DataFrame:
        """Spark's summary of columns (count, mean, stddev, min and max), as a pandas frame.

        Parameters
        ----------
        cols : str or sequence of str, optional
            Default: all columns that are numbers or strings.
        """
        self._require_frames()
        return relational.described(self.rdd, None if cols is None else self._columns(cols))

    def assembleFeatureLabelCols(
        self, featureCols: str | Sequence[str], labelCols: str | Sequence[str]
    ) -> SparkXShards:
        """Shards ``{"x": array, "y": array}`` of shape (rows, columns)."""
        features, labels = self._columns(featureCols), self._columns(labelCols)
        return self._derive(self.rdd.map(_Assemble(features, labels)), class_name="dict")

    # Out of them ---------------------------------------------------------------------------------

    def to_spark_df(self) -> DataFrame:
        """A Spark DataFrame of the rows, with the same partitions and order, without the index.

        It is computed when it is used.  NaN becomes null, and a time without a zone is one in the
        session's zone.

        Raises
        ------
        UsageError
            If the shards are no frames, have different columns, or values that Spark has no type
            for.
        """
        self._require_frames()
        frame, _ = frames.spark_frame(self.rdd)
        persistence.hand_over(self.rdd)
        return frame

    def concat_to_pdf(self, axis: int = 0) -> pd.DataFrame:
        """All shards as one pandas frame in this process."""
        import pandas as pd

        self._require_frames()
        found = self.collect()
        if axis == 0:
            found = [frame for frame in found if len(frame)] or found[:1]
        return pd.concat(found, axis=axis) if found else pd.DataFrame()

    def sample_to_pdf(
        self,
        frac: float,
        replace: bool = False,
        weights: Any = None,
        random_state: Any = None,
        axis: int = 0,
    ) -> pd.DataFrame:
        """A sample of each shard as one pandas frame in this process."""
        sample = self.to_lazy().sample(frac, replace, weights, random_state)
        return sample.concat_to_pdf(axis)


class _Method:
    """Call a method of every frame."""

    def __init__(self, method, *args, **options):
        self._method, self._args, self._options = method, args, options

    def __call__(self, frame):
        return getattr(frame, self._method)(*self._args, **self._options)


class _Largest:
    def __init__(self, column):
        self._column = column

    def __call__(self, frame):
        present = frame[self._column].dropna()
        return present.max() if len(present) else float("nan")


class _Assemble:
    def __init__(self, features, labels):
        self._features, self._labels = features, labels

    def __call__(self, frame):
        import numpy as np

        return {
            key: np.stack([frame[column].to_numpy() for column in columns], axis=1)
            for key, columns in (("x", self._features), ("y", self._labels))
        }


def _count_nulls(frame):
    return frame.isna().sum()


def _drop_repeated(series):
    return series.drop_duplicates()
