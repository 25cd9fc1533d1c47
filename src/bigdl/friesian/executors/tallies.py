"""Answers to requests from batches: partial ones of each batch, which are merged.

Only the different values of a column are looked at where it is known by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.friesian.ops.batches import Factored, crossed, factored, flat
from bigdl.friesian.ops.operator import (
    Counts,
    Extremes,
    Quantiles,
    Request,
    TargetSums,
)

if TYPE_CHECKING:
    from bigdl.friesian.ops.batches import Batch

_RANKS = 4096  # values of a batch that stand for all of it: ranks are exact to one in so many


def tally(request: Request, batch: Batch) -> Any:
    """The partial answer of one batch."""
    columns = [batch[name] for name in request.columns]
    return _TALLIES[type(request)][0](request, columns)


def merged(request: Request, parts: Sequence[Any]) -> Any:
    """One partial answer in the place of several."""
    return _TALLIES[type(request)][1](parts)


def answer(request: Request, part: Any) -> Any:
    """The answer that all rows together give."""
    return _TALLIES[type(request)][2](request, part)


# -- counts ----------------------------------------------------------------------------------------


def _count(request: Counts, columns: list[Any]) -> pa.Table:

    parts = []
    for column in map(factored, columns):
        values = column.values
        counts = np.bincount(column.codes, minlength=len(values))
        if request.separator is not None:
            values, counts = _tokens(values, counts, request.separator)
        table = pa.table({"value": values, "count": pa.array(counts, pa.int64())})
        keep = values.is_valid().to_numpy(zero_copy_only=False) & (counts > 0)
        parts.append(table if keep.all() else table.filter(pa.array(keep)))
    return _merged_counts(parts) if len(parts) > 1 else parts[0]


def _tokens(values: pa.Array, counts: np.ndarray, separator: str) -> tuple[pa.Array, np.ndarray]:

    tokens: dict[str, int] = {}
    for value, count in zip(values.to_pylist(), counts.tolist(), strict=True):
        for token in () if value is None else value.split(separator):
            tokens[token] = tokens.get(token, 0) + count
    return pa.array(tokens, pa.string()), np.fromiter(tokens.values(), np.int64, len(tokens))


def _merged_counts(parts: Sequence[pa.Table]) -> pa.Table:

    grouped = pa.concat_tables(parts).group_by("value", use_threads=False)
    return grouped.aggregate([("count", "sum")]).rename_columns(["value", "count"])


def _enough(request: Counts, counts: pa.Table) -> pa.Table:

    return counts.filter(pc.greater_equal(counts["count"], request.at_least))


# -- extremes --------------------------------------------------------------------------------------


def _numbers(column: Any) -> np.ndarray:
    """The numbers that occur, without nulls and NaN."""

    if isinstance(column, Factored):
        occurs = np.bincount(column.codes, minlength=len(column.values)) > 0
        column = column.values.filter(pa.array(occurs))
    numbers = column.drop_null().to_numpy(zero_copy_only=False)
    return numbers[~np.isnan(numbers)] if numbers.dtype.kind == "f" else numbers


def _extremes(request: Extremes, columns: list[Any]) -> tuple:

    numbers = _numbers(columns[0])
    if request.is_finite and numbers.dtype.kind == "f":
        numbers = numbers[np.isfinite(numbers)]
    return (numbers.min().item(), numbers.max().item()) if len(numbers) else (None, None)


def _merged_extremes(parts: Sequence[tuple]) -> tuple:
    known = [part for part in parts if part[0] is not None]
    if not known:
        return None, None
    return min(low for low, _ in known), max(high for _, high in known)


# -- quantiles -------------------------------------------------------------------------------------


def _ranks(request: Quantiles, columns: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Values and how many rows each stands for."""

    column = flat(columns[0]).drop_null()
    numbers = column.to_numpy(zero_copy_only=False).astype(np.float64)
    numbers = np.sort(numbers[~np.isnan(numbers)])
    step = -(-len(numbers) // _RANKS) or 1
    starts = np.arange(0, len(numbers), step)
    weights = np.minimum(step, len(numbers) - starts)
    return numbers[starts + weights // 2], weights


def _merged_ranks(parts: Sequence[tuple]) -> tuple[np.ndarray, np.ndarray]:

    values, weights = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.argsort(values, kind="stable")
    return values[order], weights[order]


def _quantiles(request: Quantiles, part: tuple[np.ndarray, np.ndarray]) -> list[float]:

    values, weights = part
    if not len(values):
        return []
    below = np.cumsum(weights)
    wanted = [max(math.ceil(share * below[-1]), 1) for share in request.shares]
    return values[np.searchsorted(below, wanted)].tolist()


# -- targets ---------------------------------------------------------------------------------------


def _sums(request: TargetSums, columns: list[Any]) -> pa.Table:

    split = len(columns) - request.targets
    keys, codes = crossed([factored(each) for each in columns[:split]])
    size = len(keys[0])
    figures = {f"key_{i}": key for i, key in enumerate(keys)}
    figures["rows"] = pa.array(np.bincount(codes, minlength=size), pa.int64())
    for i, column in enumerate(map(flat, columns[split:])):
        target = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        valid = ~np.isnan(target)  # null is NaN here
        sums = np.bincount(codes[valid], weights=target[valid], minlength=size)
        counts = np.bincount(codes[valid], minlength=size)
        figures[f"sum_{i}"], figures[f"count_{i}"] = pa.array(sums), pa.array(counts, pa.int64())
    return pa.table(figures)


def _merged_sums(parts: Sequence[pa.Table]) -> pa.Table:

    table = pa.concat_tables(parts)
    keys = [name for name in table.column_names if name.startswith("key_")]
    others = [name for name in table.column_names if name not in keys]
    grouped = table.group_by(keys, use_threads=False)
    return grouped.aggregate([(name, "sum") for name in others]).rename_columns([*keys, *others])


def _same(request: Request, part: Any) -> Any:
    return part


_TALLIES: dict[type[Request], tuple[Callable, Callable, Callable]] = {
    Counts: (_count, _merged_counts, _enough),
    Extremes: (_extremes, _merged_extremes, _same),
    Quantiles: (_ranks, _merged_ranks, _quantiles),
    TargetSums: (_sums, _merged_sums, _same),
}
