"""Scalers of numeric columns, fitted on all shards.

Results equal those of Spark ML's scalers with the same names.  Missing values (nulls, NaN) are
ignored when fitting and stay NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from bigdl.common.errors import UsageError, raise_first_usage_error, value_or_usage_error
from bigdl.orca.data.transformer.encoding import as_columns, require_columns
from bigdl.orca.data.xshards.shards import collected

if TYPE_CHECKING:
    import pandas as pd

    from bigdl.orca.data.shard import SparkXShards


class Moments(NamedTuple):
    """Count, mean, sum of squared deviations, minimum and maximum of each feature."""

    known: np.ndarray
    mean: np.ndarray
    squares: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, matrix: np.ndarray) -> Moments:
        is_known = ~np.isnan(matrix)
        count = is_known.sum(0)
        mean = np.where(is_known, matrix, 0.0).sum(0) / np.maximum(count, 1)
        squares = (np.where(is_known, matrix - mean, 0.0) ** 2).sum(0)
        low = np.where(is_known, matrix, np.inf).min(0, initial=np.inf)
        high = np.where(is_known, matrix, -np.inf).max(0, initial=-np.inf)
        return cls(count, mean, squares, low, high)

    @classmethod
    def merged(cls, parts: list[Moments]) -> Moments:
        """Merge the moments of several subsets of the rows in a numerically stable way."""
        counts, means, squares, lows, highs = (np.stack(each) for each in zip(*parts, strict=True))
        count = counts.sum(0)
        mean = means[0] + ((means - means[0]) * counts).sum(0) / np.maximum(count, 1)
        squares = squares + counts * (means - mean) ** 2
        return cls(count, mean, squares.sum(0), lows.min(0), highs.max(0))


class _AffineTransform(NamedTuple):
    """Linear function of each feature that maps `center` exactly to `base`."""

    center: np.ndarray
    width: np.ndarray
    slope: np.ndarray
    base: np.ndarray


class _Scaler(ABC):
    """Base class of scalers that apply a linear function computed from :class:`Moments`."""

    def __init__(self, inputCol: str | list[str] | None, outputCol: str | None):
        self.setInputOutputCol(inputCol, outputCol)

    def setInputOutputCol(self, inputCol: str | list[str] | None, outputCol: str | None) -> _Scaler:
        """Set input and output columns, discard the fitted parameters, and return this object."""
        self.inputCol, self.outputCol = inputCol, outputCol
        self._function: _AffineTransform | None = None
        return self

    @abstractmethod
    def _learn(self, moments: Moments) -> _AffineTransform:
        """Return the linear function for the given moments."""

    def fit_transform(self, shard: SparkXShards) -> SparkXShards:
        """Fit the scaler to all shards and add a column of scaled values.

        Parameters
        ----------
        shard : SparkXShards of pandas.DataFrame

        Returns
        -------
        SparkXShards
            Shards like `shard`, with one float64 array per row in the output column: the scaled
            values of the input columns, in order.
        """
        columns = self._columns(shard)

        def moments_of(frame: pd.DataFrame) -> Moments:
            return Moments.of(_matrix(frame, columns))

        with_rows = shard.rdd.filter(lambda frame: len(frame) > 0)
        parts = raise_first_usage_error(
            collected(with_rows.map(partial(value_or_usage_error, moments_of)))
        )
        if len({len(part.known) for part in parts}) > 1:
            raise UsageError(
                f"The columns {columns} contain arrays of different lengths",
                code="data-shape",
                columns=columns,
            )
        moments = Moments.merged(parts) if parts else None
        if moments is None or (moments.known == 0).any():
            raise UsageError(
                f"One of the columns {columns} has no numbers to fit on",
                code="data-empty",
                columns=columns,
            )
        self._function = self._learn(moments)
        return self.transform(shard)

    def transform(self, shard: SparkXShards) -> SparkXShards:
        """Add a column of values scaled with the fitted parameters."""
        if self._function is None:
            raise UsageError("Please call fit_transform first", code="not-fitted")
        columns, output = self._columns(shard), cast("str", self.outputCol)
        center, width, slope, base = self._function

        def scale(frame: pd.DataFrame) -> pd.DataFrame:
            import pandas as pd

            rows: list = []
            if len(frame):
                matrix = _matrix(frame, columns)
                if matrix.shape[1] != len(center):
                    raise UsageError(
                        f"The columns {columns} have {matrix.shape[1]} features, but the scaler "
                        f"was fitted with {len(center)}",
                        code="data-shape",
                        columns=columns,
                    )
                rows = list((matrix - center) / width * slope + base)
            return frame.assign(**{output: pd.Series(rows, index=frame.index, dtype=object)})

        return shard.transform_shard(scale)

    def _columns(self, shard: SparkXShards) -> list[str]:
        columns = as_columns(self.inputCol, "inputCol")
        if not isinstance(self.outputCol, str):
            raise UsageError(
                f"outputCol must be the name of a column, got {self.outputCol!r}",
                code="argument-type",
                argument="outputCol",
            )
        require_columns(shard, columns)
        return columns


class MinMaxScaler(_Scaler):
    """Scaler that maps each feature linearly to the range from `min` to `max`.

    A constant feature becomes the middle of the range.

    Parameters
    ----------
    min, max : float, default 0 and 1
        Bounds of the output range.
    inputCol : str or list of str, optional
        Columns of numbers or of arrays of numbers.
    outputCol : str, optional
        Column of the scaled values, one array per row.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data import SparkXShards
    >>> from bigdl.orca.data.transformer import MinMaxScaler
    >>> sc = init_orca_context("local", cores=2)
    >>> shards = SparkXShards(sc.parallelize([pd.DataFrame({"age": [20.0, 30.0, 40.0]})], 1))
    >>> scaler = MinMaxScaler(inputCol="age", outputCol="scaled")
    >>> [float(row[0]) for row in scaler.fit_transform(shards).first()["scaled"]]
    [0.0, 0.5, 1.0]
    """

    def __init__(
        self,
        min: float = 0.0,
        max: float = 1.0,
        inputCol: str | list[str] | None = None,
        outputCol: str | None = None,
    ):
        if not min < max:
            raise UsageError(
                f"min must be less than max, got {min!r} and {max!r}",
                code="argument-value",
                argument="min",
            )
        super().__init__(inputCol, outputCol)
        self.min, self.max = min, max

    def _learn(self, moments: Moments) -> _AffineTransform:
        width = moments.high - moments.low
        varies = width > 0
        return _AffineTransform(
            moments.low,
            np.where(varies, width, 1.0),
            np.where(varies, self.max - self.min, 0.0),
            np.where(varies, self.min, (self.max + self.min) / 2),
        )


class StandardScaler(_Scaler):
    """Scaler that divides each feature by its standard deviation, optionally after centering.

    It uses the sample standard deviation (n − 1).  A constant feature becomes 0.

    Parameters
    ----------
    withMean : bool, default False
        Subtract the mean of each feature.
    withStd : bool, default True
        Divide by the standard deviation of each feature.
    inputCol : str or list of str, optional
        Columns of numbers or of arrays of numbers.
    outputCol : str, optional
        Column of the scaled values, one array per row.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data import SparkXShards
    >>> from bigdl.orca.data.transformer import StandardScaler
    >>> sc = init_orca_context("local", cores=2)
    >>> shards = SparkXShards(sc.parallelize([pd.DataFrame({"age": [20.0, 30.0, 40.0]})], 1))
    >>> scaler = StandardScaler(withMean=True, inputCol="age", outputCol="scaled")
    >>> [float(row[0]) for row in scaler.fit_transform(shards).first()["scaled"]]
    [-1.0, 0.0, 1.0]
    """

    def __init__(
        self,
        withMean: bool = False,
        withStd: bool = True,
        inputCol: str | list[str] | None = None,
        outputCol: str | None = None,
    ):
        super().__init__(inputCol, outputCol)
        self.withMean, self.withStd = withMean, withStd

    def _learn(self, moments: Moments) -> _AffineTransform:
        zeros = np.zeros(len(moments.known))
        spread = np.sqrt(moments.squares / np.maximum(moments.known - 1, 1))
        if not self.withStd:
            spread = zeros + 1.0
        return _AffineTransform(
            moments.mean if self.withMean else zeros,
            np.where(spread > 0, spread, 1.0),
            np.where(spread > 0, 1.0, 0.0),
            zeros,
        )


def _matrix(frame: pd.DataFrame, columns: list[str]) -> np.ndarray:
    """Return the features of a non-empty shard as float64 of shape (rows, features)."""
    return np.concatenate([_features(frame[column]) for column in columns], axis=1)


def _features(series: pd.Series) -> np.ndarray:
    import pandas as pd

    if isinstance(series.dtype, pd.CategoricalDtype):
        series = series.astype(series.cat.categories.dtype)
    cells = series.dropna()
    if len(cells) and not pd.api.types.is_numeric_dtype(series):
        wrong = cells  # rejects timestamps, although they could be cast to numbers
        if series.dtype == object:
            wrong = cells[cells.map(lambda cell: isinstance(cell, str | bytes))]
        if len(wrong):
            raise UsageError(
                f"Column {series.name!r} contains {wrong.iloc[0]!r}, which is not a number; encode "
                "or cast it first",
                code="data-dtype",
                column=series.name,
            )
    try:
        if len(cells) and hasattr(cells.iloc[0], "__len__"):
            rows = [np.asarray(getattr(c, "toArray", lambda c=c: c)(), dtype=float) for c in cells]
            matrix = np.full((len(series), *rows[0].shape), np.nan)
            matrix[series.notna().to_numpy()] = rows
            return matrix.reshape(len(series), -1)
        return series.to_numpy(dtype="float64", na_value=np.nan).reshape(-1, 1)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"Column {series.name!r} cannot be scaled: {error}; it must contain numbers, or "
            "arrays of numbers of equal length",
            code="data-dtype",
            column=series.name,
        ) from error
