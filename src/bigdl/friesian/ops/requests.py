"""Questions that operators ask about the data, and how batches answer them.

Each batch gives a partial answer, partial answers are merged, and the last one becomes the answer.
Only the different values of a column are looked at where it is known by them.  The executor
``catalyst`` has an aggregation of Spark for each question instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.friesian.ops.batches import Batch, Factored, Values, crossed, factored, flat

_RANKS = 4096  # values of a batch that stand for all of it: ranks are exact to one in so many


@dataclass(frozen=True)
class Request:
    """A question; executors replace the columns by the names that these have for them.

    Attributes
    ----------
    columns : tuple of str
    """

    columns: tuple[str, ...]

    def of_batch(self, batch: Batch) -> Any:
        """The partial answer of one batch."""
        return self._of_columns([batch[name] for name in self.columns])

    def _of_columns(self, columns: list[Values]) -> Any:
        raise NotImplementedError

    def merged(self, parts: Sequence[Any]) -> Any:
        """One partial answer in the place of several."""
        raise NotImplementedError

    def answer(self, part: Any) -> Any:
        """The answer, from the partial one of all rows."""
        return part


def _summed(parts: Sequence[pa.Table], keys: list[str]) -> pa.Table:
    """The sums of all other columns for each combination of keys."""
    table = pa.concat_tables(parts)
    others = [name for name in table.column_names if name not in keys]
    grouped = table.group_by(keys, use_threads=False)
    return grouped.aggregate([(name, "sum") for name in others]).rename_columns([*keys, *others])


@dataclass(frozen=True)
class Counts(Request):
    """Counts of the values of the columns together, without nulls.

    The answer is a table of Arrow with the columns ``value`` and ``count`` (int64), in no order.

    Attributes
    ----------
    separator : str or None
        Between the several values of a cell.
    at_least : int
        Leave out values that occur less often.
    """

    separator: str | None = None
    at_least: int = 0

    def _of_columns(self, columns: list[Values]) -> pa.Table:
        parts = []
        for column in map(factored, columns):
            values = column.values
            counts = np.bincount(column.codes, minlength=len(values))
            if self.separator is not None:
                values, counts = self._tokens(values, counts)
            table = pa.table({"value": values, "count": pa.array(counts, pa.int64())})
            keep = values.is_valid().to_numpy(zero_copy_only=False) & (counts > 0)
            parts.append(table if keep.all() else table.filter(pa.array(keep)))
        return self.merged(parts) if len(parts) > 1 else parts[0]

    def _tokens(self, values: pa.Array, counts: np.ndarray) -> tuple[pa.Array, np.ndarray]:
        tokens: dict[str, int] = {}
        for value, count in zip(values.to_pylist(), counts.tolist(), strict=True):
            for token in () if value is None else value.split(self.separator):
                tokens[token] = tokens.get(token, 0) + count
        return pa.array(tokens, pa.string()), np.fromiter(tokens.values(), np.int64, len(tokens))

    def merged(self, parts: Sequence[pa.Table]) -> pa.Table:
        return _summed(parts, ["value"])

    def answer(self, part: pa.Table) -> pa.Table:
        return part.filter(pc.greater_equal(part["count"], self.at_least))


@dataclass(frozen=True)
class Extremes(Request):
    """The smallest and the largest value of a column of numbers, without nulls and NaN.

    The answer is a pair of float, or of int for whole numbers, or (None, None).

    Attributes
    ----------
    is_finite : bool
        Leave out infinite values too.
    """

    is_finite: bool = False

    def _of_columns(self, columns: list[Values]) -> tuple:
        (column,) = columns
        if isinstance(column, Factored):
            occurs = np.bincount(column.codes, minlength=len(column.values)) > 0
            column = column.values.filter(pa.array(occurs))
        numbers = column.drop_null().to_numpy(zero_copy_only=False)
        if numbers.dtype.kind == "f":
            numbers = numbers[np.isfinite(numbers) if self.is_finite else ~np.isnan(numbers)]
        return (numbers.min().item(), numbers.max().item()) if len(numbers) else (None, None)

    def merged(self, parts: Sequence[tuple]) -> tuple:
        known = [part for part in parts if part[0] is not None]
        if not known:
            return None, None
        return min(low for low, _ in known), max(high for _, high in known)


@dataclass(frozen=True)
class Quantiles(Request):
    """Values of a column of numbers at shares of the rows, without nulls and NaN.

    The answer is a list of float, exact to a thousandth of the rows; empty if there is no value.

    Attributes
    ----------
    shares : tuple of float
    """

    shares: tuple[float, ...] = (0.5,)

    def _of_columns(self, columns: list[Values]) -> tuple[np.ndarray, np.ndarray]:
        """Values and how many rows each stands for."""
        column = flat(columns[0]).drop_null()
        numbers = column.to_numpy(zero_copy_only=False).astype(np.float64)
        numbers = np.sort(numbers[~np.isnan(numbers)])
        step = -(-len(numbers) // _RANKS) or 1
        starts = np.arange(0, len(numbers), step)
        weights = np.minimum(step, len(numbers) - starts)
        return numbers[starts + weights // 2], weights

    def merged(self, parts: Sequence[tuple]) -> tuple[np.ndarray, np.ndarray]:
        values, weights = (np.concatenate(each) for each in zip(*parts, strict=True))
        order = np.argsort(values, kind="stable")
        return values[order], weights[order]

    def answer(self, part: tuple[np.ndarray, np.ndarray]) -> list[float]:
        values, weights = part
        if not len(values):
            return []
        below = np.cumsum(weights)
        wanted = [max(math.ceil(share * below[-1]), 1) for share in self.shares]
        return values[np.searchsorted(below, wanted)].tolist()


@dataclass(frozen=True)
class TargetSums(Request):
    """Rows, sums and counts of targets for each combination of values; nulls make none.

    The columns are those of the categories, then those of the targets.  The answer is a table of
    Arrow with the columns ``key_<i>``, ``rows``, ``sum_<j>`` and ``count_<j>``, in no order; the
    combination of nulls, if there is one, is in it too.

    Attributes
    ----------
    targets : int
        How many of the columns are targets.
    """

    targets: int = 1

    def _of_columns(self, columns: list[Values]) -> pa.Table:
        split = len(columns) - self.targets
        keys, codes = crossed([factored(each) for each in columns[:split]])
        size = len(keys[0])
        figures = {f"key_{i}": key for i, key in enumerate(keys)}
        figures["rows"] = pa.array(np.bincount(codes, minlength=size), pa.int64())
        for i, column in enumerate(map(flat, columns[split:])):
            target = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            valid = ~np.isnan(target)  # null is NaN here
            sums = np.bincount(codes[valid], weights=target[valid], minlength=size)
            counts = np.bincount(codes[valid], minlength=size)
            figures[f"sum_{i}"] = pa.array(sums)
            figures[f"count_{i}"] = pa.array(counts, pa.int64())
        return pa.table(figures)

    def merged(self, parts: Sequence[pa.Table]) -> pa.Table:
        return _summed(parts, [name for name in parts[0].column_names if name.startswith("key_")])


@dataclass(frozen=True)
class Outcome(Request):
    """The columns behind an operator that only runs on tables of Spark.

    The answer is a dict from their names to their kinds.

    Attributes
    ----------
    step : TableOperator
    """

    step: Any = None
