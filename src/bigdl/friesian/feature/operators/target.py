"""Categories replaced by the mean of a target, which each row helps to form for others only.

One aggregation by grouping sets gives the sums and counts of all categories and folds.  Everything
else is computed from that table: means of all rows, codes for new data, and codes without the rows
of the own fold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.code_tables import COUNT, LookUp, join_codes
from bigdl.friesian.feature.operators.columns import (
    as_names,
    check_different,
    check_string,
    col,
    is_fractional,
    is_integral,
    is_numeric,
    names_of_results,
    require_columns,
    temporary,
    type_of,
)
from bigdl.friesian.feature.operators.vocabulary import DRIVER_VALUES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = [
    "Encoding",
    "TargetStatistics",
    "assign_folds",
    "check_fold_col",
    "check_means",
    "check_smoothing",
    "check_targets",
    "encodings_of",
    "only_categories",
]


@dataclass(frozen=True)
class Encoding:
    """A group of category columns, and the name of the result for each target."""

    categories: tuple[str, ...]
    outputs: Mapping[str, str]  # by target

    @property
    def key_columns(self) -> list[str]:
        """Names of the categories in a table of codes: their own, unless a code has that name."""
        taken = {COUNT, *self.outputs.values()}
        free = [name for name in self.categories if name not in taken]
        return [
            name if name in free else temporary([*taken, *free], f"key{i}")
            for i, name in enumerate(self.categories)
        ]


def encodings_of(cat_cols: Any, targets: Sequence[str], out_cols: Any) -> list[Encoding]:
    """What ``target_encode`` was asked for.

    Parameters
    ----------
    cat_cols : str, list of str, or list whose elements may be lists of str (groups of columns)
    targets : list of str
    out_cols : str, list of str, or list of lists of str, optional
        A name for each group and target.
    """
    if isinstance(cat_cols, str):
        cat_cols = [cat_cols]
    if not isinstance(cat_cols, list | tuple) or not cat_cols:
        raise UsageError(f"cat_cols should be str, list of str or nested list, got {cat_cols!r}")
    groups = [tuple(as_names(each, "each element of cat_cols")) for each in cat_cols]
    if out_cols is None:
        names = [[f"{'_'.join(group)}_te_{target}" for target in targets] for group in groups]
        check_different([name for row in names for name in row], "The names of the codes")
    else:
        names = names_of_results(out_cols, len(groups), len(targets), "cat_cols", "target_cols")
    return [
        Encoding(group, dict(zip(targets, row, strict=True)))
        for group, row in zip(groups, names, strict=True)
    ]


def only_categories(encodings: Sequence[Encoding]) -> list[str]:
    """The columns of categories that no code has taken the place of."""
    made = {name for each in encodings for name in each.outputs.values()}
    return [name for each in encodings for name in each.categories if name not in made]


def check_targets(df: DataFrame, target_cols: Any) -> list[str]:
    """Names of the target columns, which must be numbers."""
    names = as_names(target_cols, "target_cols")
    require_columns(df, names)
    for name in names:
        if not is_numeric(type_of(df, name)):
            raise UsageError(
                f"target_cols should be numeric, but {name} is {type_of(df, name).simpleString()}"
            )
    return names


def check_means(target_mean: Any, targets: Sequence[str]) -> dict[str, float]:
    """The means that the user gives for targets."""
    if target_mean is None:
        return {}
    if not isinstance(target_mean, Mapping):
        raise UsageError(f"target_mean should be a dict of str to number, got {target_mean!r}")
    missing = [target for target in targets if target not in target_mean]
    if missing:
        raise UsageError(f"target_mean has nothing for {missing}, got {dict(target_mean)!r}")
    for target in targets:
        mean = target_mean[target]
        if isinstance(mean, bool) or not isinstance(mean, int | float):
            raise UsageError(f"mean in target_mean should be numeric, but got {mean!r}")
    return {target: float(target_mean[target]) for target in targets}


def check_smoothing(smooth: Any, kfold: Any, fold_seed: Any = None) -> None:
    """Check the numbers that say how much a category trusts its own rows, and the seed of folds."""
    if fold_seed is not None and type(fold_seed) is not int:
        raise UsageError(f"fold_seed should be an integer or None, but got {fold_seed!r}")
    if isinstance(kfold, bool) or not isinstance(kfold, int) or kfold <= 0:
        raise UsageError(f"kfold should be an integer larger than 0, but got {kfold!r}")
    is_number = isinstance(smooth, int | float) and not isinstance(smooth, bool)
    if not is_number or not 0 <= smooth < math.inf:
        raise UsageError(f"smooth should be a number from 0 on, but got {smooth!r}")


def check_fold_col(fold_col: Any, encodings: Sequence[Encoding]) -> str:
    """`fold_col`, which must not be the name of a code."""
    check_string(fold_col, "fold_col")
    if any(fold_col in each.outputs.values() for each in encodings):
        raise UsageError(f"out_cols and fold_col should differ, but both have {fold_col!r}")
    return fold_col


def assign_folds(df: DataFrame, kfold: int, fold_seed: int | None, fold_col: str) -> DataFrame:
    """`df` with a column of folds 0 … kfold − 1, unless it has one."""
    from pyspark.sql import functions as F

    if fold_col in df.columns:
        if not is_integral(type_of(df, fold_col)):
            raise UsageError(
                f"fold_col should be integer type, but {fold_col} is "
                f"{type_of(df, fold_col).simpleString()}"
            )
        return df
    if fold_seed is None:
        fold = F.monotonically_increasing_id() % kfold
    else:
        fold = F.floor(F.rand(fold_seed) * kfold)
    return df.withColumn(fold_col, fold.cast("int"))


class TargetStatistics:
    """Sums and counts of targets for each category, of every fold.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    encodings : list of Encoding
    targets : list of str
    fold_col : str or None
        None if there are no folds.
    means : dict of str to float
        Of targets; those of the data are taken for the others.
    smooth : float
        How many rows with the mean are added to every category.
    """

    def __init__(
        self,
        df: DataFrame,
        encodings: Sequence[Encoding],
        targets: Sequence[str],
        fold_col: str | None,
        means: Mapping[str, float],
        smooth: float,
    ):
        self.encodings, self.targets, self.smooth = list(encodings), list(targets), smooth
        self._fold_col = fold_col
        columns = list(dict.fromkeys(name for e in encodings for name in e.categories))
        self._key_of = {name: f"key_{i}" for i, name in enumerate(columns)}
        self._table = _settled(self._aggregated(df, columns))
        self.means = {**self._means_of_data(), **means}

    def _aggregated(self, df: DataFrame, columns: list[str]) -> DataFrame:
        """One row for each category, fold and group of columns (``source``)."""
        from pyspark.sql import functions as F

        rows = df.select(
            *(col(name).alias(self._key_of[name]) for name in columns),
            (F.lit(0) if self._fold_col is None else col(self._fold_col)).alias("fold"),
            *(_target(df, name).alias(f"target_{i}") for i, name in enumerate(self.targets)),
        )
        figures = [F.count("*").alias("rows")]
        for i in range(len(self.targets)):
            figures += [
                F.sum(f"target_{i}").alias(f"sum_{i}"),
                F.count(f"target_{i}").alias(f"count_{i}"),
            ]
        keys = [self._key_of[name] for name in columns]
        sets = [[*(self._key_of[name] for name in e.categories), "fold"] for e in self.encodings]
        distinct = [list(each) for each in dict.fromkeys(map(tuple, sets))]
        grouped = rows.groupingSets(
            [[F.col(name) for name in each] for each in distinct], *map(F.col, keys), F.col("fold")
        )
        return grouped.agg(F.grouping_id().alias("source"), *figures)

    def _source(self, encoding: Encoding) -> int:
        """The grouping id: a bit for each key, from the first one down, set if it is left out."""
        keys = list(self._key_of)
        bits = [int(name not in encoding.categories) for name in keys] + [0]
        return int("".join(map(str, bits)), 2)

    def _rows_of(self, encoding: Encoding) -> DataFrame:
        from pyspark.sql import functions as F

        return self._table.filter(F.col("source") == self._source(encoding))

    def _means_of_data(self) -> dict[str, float | None]:
        from pyspark.sql import functions as F

        if not self.targets:
            return {}
        figures = []
        for i in range(len(self.targets)):
            total, count = F.sum(f"sum_{i}"), F.sum(f"count_{i}")
            figures.append(F.when(count > 0, total / count).alias(str(i)))
        row = self._rows_of(self.encodings[0]).agg(*figures).first()
        return dict(zip(self.targets, row, strict=True))

    def _mean(self, target: str) -> Column:
        from pyspark.sql import functions as F

        return F.lit(self.means[target]).cast("double")

    def _code(self, total: Column, count: Column, mean: Column) -> Column:
        from pyspark.sql import functions as F

        weight = count + F.lit(float(self.smooth))
        code = (F.coalesce(total, F.lit(0.0)) + mean * F.lit(float(self.smooth))) / weight
        return F.when(weight > 0, code).otherwise(mean)

    def codes(self, encoding: Encoding) -> DataFrame:
        """Codes for new data: the categories, the number of rows, and a code for each target."""
        from pyspark.sql import functions as F

        keys = [self._key_of[name] for name in encoding.categories]
        rows = self._rows_of(encoding).dropna(subset=keys)
        figures = [F.sum("rows").alias(COUNT)]
        for i, target in enumerate(self.targets):
            code = self._code(F.sum(f"sum_{i}"), F.sum(f"count_{i}"), self._mean(target))
            figures.append(code.alias(encoding.outputs[target]))
        grouped = rows.groupBy(*keys).agg(*figures)
        names = encoding.key_columns
        named = [F.col(key).alias(name) for key, name in zip(keys, names, strict=True)]
        return grouped.select(*named, COUNT, *map(col, encoding.outputs.values()))

    def encode(self, df: DataFrame) -> DataFrame:
        """`df` with the codes of its rows, each by the rows of other folds."""
        return join_codes(df, [self._look_up(encoding) for encoding in self.encodings])

    def _look_up(self, encoding: Encoding) -> LookUp:
        from pyspark.sql import functions as F

        keys = [self._key_of[name] for name in encoding.categories]
        codes = [self._code_of_fold(i, keys).alias(f"code_{i}") for i in range(len(self.targets))]
        table = self._rows_of(encoding).dropna(subset=keys).select(*keys, "fold", *codes)
        at = {key: col(name) for key, name in zip(keys, encoding.categories, strict=True)}
        fold = F.lit(0)
        if self._fold_col is not None:
            at["fold"] = fold = col(self._fold_col)
        outputs = {
            encoding.outputs[target]: (f"code_{i}", self._prior(target, fold))
            for i, target in enumerate(self.targets)
        }
        return LookUp(table, at, outputs)

    def _prior(self, target: str, fold: Column) -> Column:
        """The code of a row of this fold, of whose category nothing is known."""
        return self._mean(target)

    def _code_of_fold(self, i: int, keys: Sequence[str]) -> Column:
        """The code of a category for the rows of one fold, by those of all others."""
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        mean = self._mean(self.targets[i])
        total, count = F.col(f"sum_{i}"), F.col(f"count_{i}")
        if self._fold_col is None:
            return self._code(total, count, mean)
        whole = Window.partitionBy(*keys)
        total = F.sum(total).over(whole) - F.coalesce(total, F.lit(0.0))
        count = F.sum(count).over(whole) - count
        # no rounding error in place of nothing
        return F.when(count > 0, self._code(total, count, mean)).otherwise(mean)


def _target(df: DataFrame, name: str) -> Column:
    from pyspark.sql import functions as F

    value = col(name).cast("double")
    return F.when(~F.isnan(value), value) if is_fractional(type_of(df, name)) else value


def _settled(table: DataFrame) -> DataFrame:
    """A table that is computed once: on the driver if it is small, else on the executors."""
    counted = table.persist()
    try:
        if counted.count() > DRIVER_VALUES:
            return counted.localCheckpoint(eager=True)
        return table.sparkSession.createDataFrame(counted.toArrow(), table.schema)
    finally:
        counted.unpersist()
