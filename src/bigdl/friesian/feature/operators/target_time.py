"""Means of a target that only earlier rows help to form.

Time is cut in folds.  The code of a row is made of the rows of all earlier folds, and so is the
mean that stands in for what a category does not tell, so that nothing of its own time or of the
future reaches it: the ordered target statistics of CatBoost (Prokhorenkova et al., "CatBoost:
unbiased boosting with categorical features", NeurIPS 2018) in the order of time, by folds instead
of rows.
"""

from __future__ import annotations

import datetime
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.columns import (
    check_string,
    col,
    is_numeric,
    require_columns,
    type_of,
)
from bigdl.friesian.feature.operators.target import Encoding, TargetStatistics

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["TimeStatistics", "time_folds"]

_RELATIVE_ERROR = 0.001  # of the rank that an edge has


def time_folds(df: DataFrame, time_col: str, folds: Any, fold_col: str) -> DataFrame:
    """`df` with a column of the fold in which the time of each row is, from 0 on.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    time_col : str
        Numbers, dates or timestamps.
    folds : int, or list of times
        How many folds of about as many rows each, or where the second and all later ones begin.
    fold_col : str
        Name of the new column.
    """
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    require_columns(df, [check_string(time_col, "time_col")])
    kind = type_of(df, time_col)
    if not is_numeric(kind) and not isinstance(kind, T.DateType | T.TimestampType):
        raise UsageError(
            f"{time_col} should hold numbers, dates or timestamps, but its type is "
            f"{kind.simpleString()}"
        )
    time = _number(col(time_col), is_numeric(kind))
    if isinstance(folds, int) and not isinstance(folds, bool):
        edges = _edges_of_equal_parts(df.select(time.alias("time")), folds)
    else:
        edges = _given_edges(folds, df, is_numeric(kind))
    begun = F.size(F.filter(F.array(*map(F.lit, edges)), lambda edge: edge <= time))
    message = F.lit(f"The column {time_col} has nulls; drop or fill them first")
    fold = F.when(time.isNotNull(), begun).otherwise(F.raise_error(message).cast("int"))
    return df.withColumn(fold_col, fold if edges else F.lit(0))


def _number(time: Column, is_number: bool) -> Column:
    return time.cast("double") if is_number else time.cast("timestamp").cast("double")


def _edges_of_equal_parts(times: DataFrame, folds: int) -> list[float]:
    if folds < 2:
        raise UsageError(f"folds should be an integer from 2 on or a list of times, got {folds!r}")
    shares = [i / folds for i in range(1, folds)]
    found = times.approxQuantile("time", shares, _RELATIVE_ERROR)
    return sorted(set(found))


def _given_edges(folds: Any, df: DataFrame, are_numbers: bool) -> list[float]:
    from pyspark.sql import functions as F

    is_list = isinstance(folds, list | tuple) and len(folds) > 0
    kinds: Any = int | float if are_numbers else str | datetime.date
    if not is_list or not all(isinstance(e, kinds) and not isinstance(e, bool) for e in folds):
        raise UsageError(
            "folds should be an integer from 2 on or a list of "
            f"{'numbers' if are_numbers else 'dates, timestamps or their texts'}, got {folds!r}"
        )
    # by Spark, in the time zone of the session
    edges = df.sparkSession.range(1).select(*(_number(F.lit(e), are_numbers) for e in folds))
    found = list(edges.first())
    if any(a >= b for a, b in pairwise(found)):
        raise UsageError(f"The times in folds should be ascending, got {folds!r}")
    return found


class TimeStatistics(TargetStatistics):
    """Sums and counts of targets for each category, of every fold of time.

    The parameters are those of :class:`TargetStatistics`; folds have numbers in the order of time.
    """

    def __init__(
        self,
        df: DataFrame,
        encodings: Sequence[Encoding],
        targets: Sequence[str],
        fold_col: str,
        means: Mapping[str, float],
        smooth: float,
    ):
        super().__init__(df, encodings, targets, fold_col, means, smooth)
        self._earlier = {
            target: [means[target]] if target in means else self._means_before(i)
            for i, target in enumerate(self.targets)
        }

    def _means_before(self, i: int) -> list[float | None]:
        """Of every fold the mean of a target in all earlier ones.

        The first fold has its own: a constant, which tells its rows nothing about each other.
        """
        from pyspark.sql import functions as F

        figures = [F.sum(f"sum_{i}"), F.sum(f"count_{i}")]
        found = self._rows_of(self.encodings[0]).groupBy("fold").agg(*figures).collect()
        by_fold = {fold: (total or 0.0, count or 0) for fold, total, count in found}
        each = [by_fold.get(fold, (0.0, 0)) for fold in range(max(by_fold, default=0) + 1)]
        totals, counts = (list(accumulate(values)) for values in zip(*each, strict=True))
        first = bisect_left(counts, 1)  # the first fold that has a target at all
        if first == len(counts):
            return [None]
        return [
            totals[max(fold - 1, first)] / counts[max(fold - 1, first)]
            for fold in range(len(counts))
        ]

    def _prior(self, target: str, fold: Column) -> Column:
        from pyspark.sql import functions as F

        means = self._earlier[target]
        if len(means) == 1:
            return F.lit(means[0]).cast("double")
        return F.get(F.array(*map(F.lit, means)), fold)

    def _code_of_fold(self, i: int, keys: Sequence[str]) -> Column:
        """The code of a category for the rows of one fold, by those of all earlier ones."""
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        earlier = Window.partitionBy(*keys).orderBy("fold")
        earlier = earlier.rowsBetween(Window.unboundedPreceding, -1)
        total, count = F.sum(f"sum_{i}").over(earlier), F.sum(f"count_{i}").over(earlier)
        prior = self._prior(self.targets[i], F.col("fold"))
        return self._code(total, F.coalesce(count, F.lit(0)), prior)
