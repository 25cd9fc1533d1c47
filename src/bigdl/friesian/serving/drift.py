"""Drift of the features of requests from those of the training data.

A :class:`FeatureProfile` counts the values of each column of the training data in bins. The edges
of the bins come from the training data, so that counts of several tables, windows and processes are
added exactly and compared bin by bin. A :class:`DriftMonitor` counts the features of requests in
the same bins and compares each full window with the profile.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.common.checks import check_choice, check_integer, check_number
from bigdl.common.drawing import Chart
from bigdl.common.errors import UsageError
from bigdl.common.pages import PALETTE, Page
from bigdl.friesian.serving.rows import Column, table_of

if TYPE_CHECKING:
    from bigdl.friesian.serving.rows import TableSource
    from bigdl.nano.serving.metrics import ServingMetrics

__all__ = ["ColumnDrift", "DriftMonitor", "FeatureProfile"]

logger = logging.getLogger(__name__)

_FORMAT = "bigdl.friesian.FeatureProfile"
_FEW_VALUES = 20  # columns with up to this number of distinct values are counted by value
_LEAST_SHARE = 1e-4  # replaces empty bins in the PSI
_NOISE = 3.0  # thresholds of the PSI are raised by this multiple of its mean without drift
MEASURES = ("psi", "js", "ks")
THRESHOLDS = {"psi": 0.2, "js": 0.25, "ks": 0.2}


@dataclass(frozen=True)
class ColumnBins:
    """Counts of the values of a column in bins.

    The last bin counts nulls and NaN. Numbers have the other bins between `edges`. Columns with few
    distinct values, or of strings, have a bin per value of `values` and a bin for other values.
    """

    edges: tuple[float, ...] | None
    values: tuple[Any, ...] | None
    counts: np.ndarray

    @classmethod
    def of(cls, column: pa.Array, bins: int) -> ColumnBins:
        valid = column.drop_null()
        is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
        if is_number:
            numbers = np.asarray(valid.cast(pa.float64(), safe=False))
            numbers = numbers[np.isfinite(numbers)]
            if len(np.unique(numbers)) > _FEW_VALUES:
                edges = np.unique(np.quantile(numbers, np.linspace(0, 1, bins + 1)[1:-1]))
                empty = cls(tuple(edges.tolist()), None, np.zeros(0, np.int64))
                return replace(empty, counts=empty.count(column))
        counted = pc.value_counts(valid)
        values = counted.field("values").to_pylist()
        numbers = np.asarray(counted.field("counts"))
        order = sorted(range(len(values)), key=lambda at: (-numbers[at], str(values[at])))
        common = tuple(values[at] for at in order[:_FEW_VALUES] if values[at] == values[at])
        empty = cls(None, common, np.zeros(0, np.int64))
        return replace(empty, counts=empty.count(column))

    def count(self, column: pa.Array) -> np.ndarray:
        """Return the counts of the values of another column in the same bins."""
        valid = column.drop_null()
        if self.edges is not None:
            numbers = np.asarray(valid.cast(pa.float64(), safe=False))
            numbers = numbers[~np.isnan(numbers)]
            at = np.searchsorted(self.edges, numbers, side="right")
            size = len(self.edges) + 1
        else:
            known = pa.array(list(self.values or ()))
            if not len(known):
                known = pa.array([], valid.type)
            elif known.type != valid.type:
                valid = valid.cast(known.type, safe=False)
            if pa.types.is_floating(valid.type):
                valid = valid.filter(pc.invert(pc.is_nan(valid)))
            codes = pc.index_in(valid, value_set=known)
            at, size = np.asarray(pc.fill_null(codes, len(known))), len(known) + 1
        counts = np.bincount(at, minlength=size).astype(np.int64)
        return np.append(counts, len(column) - counts.sum())

    @property
    def labels(self) -> list[str]:
        """Names of the bins."""
        if self.edges is None:
            return [*map(str, self.values or ()), "other", "null"]
        bounds = [f"{each:.4g}" for each in self.edges]
        middle = [f"{low} to {high}" for low, high in pairwise(bounds)]
        return [f"below {bounds[0]}", *middle, f"from {bounds[-1]}", "null"]


@dataclass(frozen=True)
class ColumnDrift:
    """Distances of a window of requests from the training data, for one column.

    Attributes
    ----------
    psi : float
        Population stability index.
    js : float
        Jensen-Shannon distance: the square root of the divergence, in natural logarithms.
    ks : float
        Largest difference of the cumulative shares of the bins; 0 for columns without an order.
    rows : int
        Rows of the window.
    is_alert : bool
        True if a distance exceeds its threshold.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.serving import FeatureProfile
    >>> profile = FeatureProfile.of(pd.DataFrame({"city": ["a", "b", "a", "b"]}))
    >>> drift = profile.compare(pd.DataFrame({"city": ["a", "a", "a", "a"]}))["city"]
    >>> round(drift.js, 3), drift.ks
    (0.465, 0.0)
    """

    psi: float
    js: float
    ks: float
    rows: int
    is_alert: bool = False


def distances(reference: np.ndarray, counts: np.ndarray, is_ordered: bool) -> ColumnDrift:
    """Return the distances between two vectors of counts.

    Parameters
    ----------
    reference, counts : ndarray of int64
        Counts of the same bins; the last bin contains nulls.
    is_ordered : bool
        Whether the bins are ordered.
    """
    rows = int(counts.sum())
    if not rows or not reference.sum():
        return ColumnDrift(0.0, 0.0, 0.0, rows)
    p, q = reference / reference.sum(), counts / rows
    least_p, least_q = np.maximum(p, _LEAST_SHARE), np.maximum(q, _LEAST_SHARE)
    psi = float(((least_q - least_p) * np.log(least_q / least_p)).sum())
    mean = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = np.nansum(p * np.log(p / mean)) + np.nansum(q * np.log(q / mean))
    ks = float(np.abs(np.cumsum(p) - np.cumsum(q)).max()) if is_ordered else 0.0
    return ColumnDrift(psi, float(np.sqrt(max(parts / 2, 0.0))), ks, rows)


class FeatureProfile:
    """Counts of the values of the training data's columns, in bins.

    Parameters
    ----------
    columns : dict of str to ColumnBins

    Examples
    --------
    >>> import numpy as np
    >>> import pandas as pd
    >>> from bigdl.friesian.serving import FeatureProfile
    >>> random = np.random.default_rng(0)
    >>> rows = pd.DataFrame({"age": random.normal(40, 9, 5000)})
    >>> rows["city"] = random.choice(["a", "b"], 5000)
    >>> FeatureProfile.of(rows).save("profile.json")
    >>> profile = FeatureProfile.load("profile.json")
    >>> drift = profile.compare(rows.assign(age=rows["age"] + 20))
    >>> drift["age"].psi > 1, drift["city"].psi
    (True, 0.0)
    """

    def __init__(self, columns: Mapping[str, ColumnBins]):
        self.columns = dict(columns)

    @classmethod
    def of(cls, source: TableSource, columns: Sequence[str] | None = None, bins: int = 20) -> Self:
        """Return the profile of a table, such as the training data or a sample of it.

        Parameters
        ----------
        source : FeatureTable, DataFrame, pyarrow.Table or str
            A str is the path of Parquet files. The rows are collected.
        columns : sequence of str, optional
            Default: all columns of numbers, strings and booleans.
        bins : int, default 20
            Number of bins of a number, with equal counts in the training data.
        """
        check_integer("bins", bins, 2)
        table = table_of(source, "the training data")
        if not table.num_rows:
            raise UsageError("The training data has no rows", code="data-empty")
        named = columns if columns is not None else table.column_names
        profile = {}
        for name in named:
            if name not in table.column_names:
                raise UsageError(
                    f"The training data has no column {name!r}, only {table.column_names}",
                    code="column-missing",
                    column=name,
                )
            column = _plain(table[name])
            if column is not None:
                profile[name] = ColumnBins.of(column, bins)
            elif columns is not None:
                raise UsageError(
                    f"The column {name!r} is of type {table[name].type}; a profile has columns of "
                    "numbers, strings and booleans",
                    code="data-dtype",
                    column=name,
                )
        return cls(profile)

    def compare(self, source: TableSource) -> dict[str, ColumnDrift]:
        """Return the distances of a table from the profile, by column.

        Parameters
        ----------
        source : FeatureTable, DataFrame, pyarrow.Table or str
            Columns that it lacks are left out.
        """
        table = table_of(source, "the table")
        result = {}
        for name, each in self.columns.items():
            if name in table.column_names and (column := _plain(table[name])) is not None:
                result[name] = distances(each.counts, each.count(column), each.edges is not None)
        return result

    def save(self, path: str | os.PathLike) -> None:
        """Write the profile to a JSON file.

        Parameters
        ----------
        path : str or path-like
        """
        content = {
            "format": _FORMAT,
            "columns": {
                name: {"edges": each.edges, "values": each.values, "counts": each.counts.tolist()}
                for name, each in self.columns.items()
            },
        }
        Path(path).write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read a profile that :meth:`save` wrote.

        Raises
        ------
        UsageError
            If the file is missing or damaged.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']!r}")
            columns = {
                name: ColumnBins(
                    None if each["edges"] is None else tuple(each["edges"]),
                    None if each["values"] is None else tuple(each["values"]),
                    np.array(each["counts"], np.int64),
                )
                for name, each in content["columns"].items()
            }
        except FileNotFoundError:
            raise UsageError(
                f"There is no profile at {path}; write one with FeatureProfile.of(table).save",
                code="path-missing",
                path=str(path),
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"The profile {path} cannot be read: {error}", code="file-damaged", path=str(path)
            ) from error
        return cls(columns)


def _plain(column: Column | pa.ChunkedArray) -> pa.Array | None:
    """Return a column as an Arrow array; None for vectors and other types without bins."""
    if isinstance(column, np.ndarray):
        if column.ndim > 1:
            return None
        column = pa.array(column)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    types = pa.types
    is_plain = types.is_integer(column.type) or types.is_floating(column.type)
    is_plain |= types.is_string(column.type) or types.is_large_string(column.type)
    is_plain |= types.is_boolean(column.type)
    if types.is_large_string(column.type):
        column = column.cast(pa.string())
    return column if is_plain else None


@dataclass
class _RequestWindow:
    """Counts of the requests of a window."""

    counts: dict[str, np.ndarray] = field(default_factory=dict)
    rows: int = 0


class DriftMonitor:
    """Monitor that compares the features of requests with the training data.

    Parameters
    ----------
    profile : FeatureProfile
    window : int, default 1000
        Rows of a comparison; smaller windows have more noise.
    every : int, default 10
        Observe one of this number of requests.
    thresholds : dict of str to float, optional
        Of ``"psi"`` (default 0.2), ``"js"`` (0.25) and ``"ks"`` (0.2). The threshold of the PSI is
        raised by the noise of the window.
    metrics : ServingMetrics, optional

    Examples
    --------
    >>> import numpy as np
    >>> import pandas as pd
    >>> from bigdl.friesian.serving import DriftMonitor, FeatureProfile
    >>> random = np.random.default_rng(0)
    >>> profile = FeatureProfile.of(pd.DataFrame({"age": random.normal(40, 9, 5000)}))
    >>> monitor = DriftMonitor(profile, window=500)
    >>> monitor.observe({"age": random.normal(55, 9, 500)})
    >>> monitor.alerts()
    ['age']
    """

    def __init__(
        self,
        profile: FeatureProfile,
        window: int = 1000,
        every: int = 10,
        thresholds: Mapping[str, float] | None = None,
        metrics: ServingMetrics | None = None,
    ):
        self.profile = profile
        self._size = check_integer("window", window, 1)
        self.every = check_integer("every", every, 1)
        self._thresholds = dict(THRESHOLDS)
        for name, value in (thresholds or {}).items():
            check_choice("thresholds", name, MEASURES)
            self._thresholds[name] = check_number(name, value, above=0)
        self._metrics = metrics
        self._lock = threading.Lock()
        self._window = _RequestWindow()
        self._shown: tuple[dict[str, ColumnDrift], dict[str, np.ndarray]] = {}, {}
        self._calls = 0

    def is_due(self) -> bool:
        """Count a request, and return True if it should be observed."""
        with self._lock:
            self._calls += 1
            return self._calls % self.every == 0

    def observe(self, columns: Mapping[str, Column]) -> None:
        """Count the rows of requests; compare the window with the profile when it is full.

        Parameters
        ----------
        columns : dict of str to array
            Columns of one length; those that the profile lacks are ignored.
        """
        counts, rows = {}, 0
        for name, each in self.profile.columns.items():
            if name in columns and (column := _plain(columns[name])) is not None:
                counts[name] = each.count(column)
                rows = max(rows, len(column))
        with self._lock:
            now = self._window
            now.rows += rows
            for name, added in counts.items():
                known = now.counts.get(name)
                now.counts[name] = added if known is None else known + added
            if now.rows < self._size:
                return
            self._window = _RequestWindow()
        self._compare(now)

    def _compare(self, window: _RequestWindow) -> None:
        result = {}
        for name, counts in window.counts.items():
            each = self.profile.columns[name]
            drift = distances(each.counts, counts, each.edges is not None)
            total = max(int(each.counts.sum()), 1)
            noise = (len(counts) - 1) * (1 / max(drift.rows, 1) + 1 / total)
            limits = self._thresholds
            is_alert = (
                drift.psi > limits["psi"] + _NOISE * noise
                or drift.js > limits["js"] + np.sqrt(_NOISE * noise / 8)
                or drift.ks > limits["ks"]
            )
            result[name] = replace(drift, is_alert=bool(is_alert))
        before = set(self.alerts())
        self._shown = result, window.counts
        if self._metrics is not None:
            for name, drift in result.items():
                for measure in MEASURES:
                    self._metrics.drift(name, measure, getattr(drift, measure))
                self._metrics.drift(name, "alert", float(drift.is_alert))
        if new := [name for name in self.alerts() if name not in before]:
            logger.warning(
                "The features %s of requests differ from the training data; see /drift", new
            )

    def latest(self) -> dict[str, ColumnDrift]:
        """Return the distances of the last full window by column; empty before it."""
        return dict(self._shown[0])

    def alerts(self) -> list[str]:
        """Return the columns whose distances exceed the thresholds, in the last full window."""
        return [name for name, drift in self._shown[0].items() if drift.is_alert]

    def page(self) -> str:
        """Return an HTML page with the distances and the shares of all bins."""
        result, counts = self._shown
        page = Page("Drift of features")
        if not result:
            page.add_text(f"No full window of {self._size} rows yet.")
            return page.html(refresh_s=30)
        limits = ", ".join(f"{name} {value:g}" for name, value in self._thresholds.items())
        page.add_text(f"Last {self._size} observed rows. Thresholds: {limits}.")
        order = sorted(result, key=lambda name: (-result[name].is_alert, -result[name].psi, name))
        page.add_table(
            ["column", "PSI", "JS", "KS", "rows", "alert"],
            [
                [
                    *(name, result[name].psi, result[name].js, result[name].ks),
                    *(result[name].rows, "yes" if result[name].is_alert else ""),
                ]
                for name in order
            ],
        )
        for name in order:
            page.add_heading(name)
            page.add_html(_drawn(self.profile.columns[name], counts[name]))
        return page.html(refresh_s=30)


def _drawn(column: ColumnBins, counts: np.ndarray) -> str:
    """Draw the shares of the bins in the training data and in requests, as SVG."""
    shares = column.counts / max(column.counts.sum(), 1), counts / max(counts.sum(), 1)
    top = max(float(each.max()) for each in shares) or 1.0
    width, height = 640, 120
    chart = Chart(width, height + 24)
    step = width / len(counts)
    for which, (share, colour) in enumerate(zip(shares, (PALETTE[0], PALETTE[4]), strict=True)):
        of = ("training", "requests")[which]
        for at, value in enumerate(share.tolist()):
            tall = height * value / top
            left = step * at + (0.1 + 0.4 * which) * step
            title = f"{column.labels[at]}: {100 * value:.1f} % of {of}"
            chart.box(left, height - tall, 0.38 * step, tall, colour, title)
        chart.box(140 * which, height + 10, 10, 10, colour)
        chart.text(of, 140 * which + 16, height + 19)
    return chart.svg()
