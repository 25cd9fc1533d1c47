"""Metrics and chart of a server run: requests per second, latency, and time by stage.

The servers of Nano and Friesian record the times of requests and their stages in Prometheus
histograms. :class:`ServingRun` samples them periodically; the difference between two samples is a
point of the chart.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from bigdl.common.checks import check_number
from bigdl.common.errors import UsageError, as_usage_error, require
from bigdl.common.timeouts import METRICS_S
from bigdl.training.chart import PanelChart, table_of

_REQUEST = "request"
_PARTS = {"latency_50_ms": 0.5, "latency_95_ms": 0.95, "latency_99_ms": 0.99}


class _StageHistogram:
    """A Prometheus histogram of one stage: count, sum in seconds, and cumulative bucket counts."""

    def __init__(self) -> None:
        self.count = 0.0
        self.sum = 0.0
        self.buckets: dict[float, float] = defaultdict(float)

    def since(self, before: _StageHistogram) -> _StageHistogram:
        """Return the observations since an earlier sample, or all if the server restarted."""
        added = _StageHistogram()
        if before.count > self.count:
            before = _StageHistogram()
        added.count, added.sum = self.count - before.count, self.sum - before.sum
        for bound, count in self.buckets.items():
            added.buckets[bound] = count - before.buckets.get(bound, 0.0)
        return added

    @classmethod
    def joined(cls, stages: Iterable[_StageHistogram]) -> _StageHistogram:
        """Merge the observations of several histograms."""
        whole = cls()
        for each in stages:
            whole.count, whole.sum = whole.count + each.count, whole.sum + each.sum
            for bound, count in each.buckets.items():
                whole.buckets[bound] += count
        return whole

    @property
    def mean_ms(self) -> float:
        return 1e3 * self.sum / self.count if self.count else math.nan

    def quantile_ms(self, part: float) -> float:
        """Return a quantile in milliseconds, interpolated linearly within its bucket."""
        low, below = 0.0, 0.0
        for bound, count in sorted(self.buckets.items()):
            if count >= part * self.count > 0 and count > below:
                if math.isinf(bound):
                    return 1e3 * low
                return 1e3 * (low + (bound - low) * (part * self.count - below) / (count - below))
            low, below = bound, count
        return math.nan


class ServingRun:
    """Context manager that samples a server's metrics, available as rows and as a chart.

    In a notebook it shows its chart.

    Parameters
    ----------
    source : str or callable
        URL of the server's metrics, e.g. ``"http://127.0.0.1:8000/metrics"``, or a function that
        returns their text.
    every : float, default 1.0
        Seconds between two samples.
    token : str, optional
        Bearer token for metrics or for requests, if the server needs one.

    Raises
    ------
    UsageError
        At the start of the block, if the metrics cannot be read or are not those of a BigDL server.

    Examples
    --------
    >>> import prometheus_client
    >>> from bigdl.friesian.serving import ServingMetrics, ServingRun
    >>> metrics = ServingMetrics(prometheus_client.CollectorRegistry())
    >>> with ServingRun(lambda: prometheus_client.generate_latest(metrics.registry)) as run:
    ...     for _ in range(3):
    ...         with metrics.time("request"), metrics.time("recall"):
    ...             pass
    >>> run.rows()[-1]["requests"], "recall_ms" in run.rows()[-1]
    (3, True)
    >>> run.plot("serving.html")
    """

    def __init__(
        self,
        source: str | Callable[[], bytes | str],
        every: float = 1.0,
        *,
        token: str | None = None,
    ):
        self._every = check_number("every", every, above=0)
        self._source = source
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._samples: list[tuple[float, dict[str, _StageHistogram]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bigdl-serving-run", daemon=True)

    def __enter__(self) -> Self:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(
            UsageError
        ):  # the server may have stopped before the end of the block
            self._sample()

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of each sampling interval in which requests were answered.

        Returns
        -------
        list of dict
            ``second`` since the start, ``requests``, ``requests_per_s``, ``latency_50_ms``,
            ``latency_95_ms``, ``latency_99_ms`` and the mean ``<stage>_ms`` of a call of each
            stage. The precision of percentiles depends on the buckets of the server's histograms.
        """
        rows = []
        for (began, before), (ended, after) in zip(self._samples, self._samples[1:], strict=False):
            added = {
                name: stage.since(before.get(name, _StageHistogram()))
                for name, stage in after.items()
            }
            # without a "request" stage, each call of a gRPC method counts as a request
            methods = [added.pop(name) for name in list(added) if name != name.lower()]
            requests = added.pop(_REQUEST) if _REQUEST in added else _StageHistogram.joined(methods)
            if not requests.count:
                continue
            row: dict[str, Any] = {
                "second": round(ended - self._samples[0][0], 3),
                "requests": round(requests.count),
                "requests_per_s": requests.count / (ended - began),
            }
            row |= {name: requests.quantile_ms(part) for name, part in _PARTS.items()}
            row |= {f"{name}_ms": stage.mean_ms for name, stage in added.items()}
            rows.append(row)
        return rows

    def plot(self, path: str | Path) -> None:
        """Write the chart of requests per second, latency, and time by stage.

        Parameters
        ----------
        path : str or Path
            A file name with the suffix ``.html``, ``.svg`` or another one that matplotlib writes,
            such as ``.png``.

        Raises
        ------
        UsageError
            If there was no request, or the file cannot be written.
        """
        self._chart().write(Path(path), "Serving", table_of(self.rows()))

    def _repr_html_(self) -> str | None:
        return self._chart().svg() if self.rows() else None

    def _chart(self) -> PanelChart:
        rows = self.rows()
        if not rows:
            raise UsageError(
                "There is nothing to draw: the server answered no request during the block; send "
                "requests within the block of ServingRun",
                code="data-empty",
            )
        latency = {f"{part:.0%}": [row[name] for row in rows] for name, part in _PARTS.items()}
        names = sorted({name for row in rows for name in row if self._is_stage(name)})
        stages = {
            name.removesuffix("_ms"): [_or_zero(row.get(name)) for row in rows] for name in names
        }
        seconds = [round(row["second"]) for row in rows]
        panels: list[tuple[str, Mapping[str, list[float]], bool]] = [
            ("requests per second", {"": [row["requests_per_s"] for row in rows]}, False),
            ("latency of a request, ms, by percentile", latency, False),
        ]
        if stages:
            panels.append(("ms of a call, by stage", stages, True))
        return PanelChart("second", seconds, panels)

    @staticmethod
    def _is_stage(name: str) -> bool:
        return name.endswith("_ms") and name not in _PARTS

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self._sample()
            except UsageError:  # the server may be restarting: try again at the next sample
                continue

    def _sample(self) -> None:
        where = self._source if isinstance(self._source, str) else "the function"
        with as_usage_error(
            f"The metrics of the server cannot be read from {where}",
            code="cluster-unreachable",
            address=where,
        ):
            text = self._text()
            stages = _stages_in(text)
        if stages is None:
            raise UsageError(
                f"{where} has no metrics of bigdl-serve or bigdl-friesian-serve; give the URL of "
                "the server's /metrics",
                code="argument-value",
                address=where,
            )
        self._samples.append((time.monotonic(), stages))

    def _text(self) -> str:
        if isinstance(self._source, str):
            from urllib.request import Request, urlopen

            request = Request(self._source, headers=self._headers)
            with urlopen(request, timeout=METRICS_S) as answer:
                return str(answer.read().decode())
        text = self._source()
        return text.decode() if isinstance(text, bytes) else text


def _or_zero(value: float | None) -> float:
    return 0.0 if value is None or math.isnan(value) else value


def _stages_in(text: str) -> dict[str, _StageHistogram] | None:
    """Parse the stage histograms in Prometheus text; return None if it has none."""
    parser = require("prometheus_client.parser", "serving")
    stages: dict[str, _StageHistogram] | None = None
    for family in parser.text_string_to_metric_families(text):
        of_request = family.name == "bigdl_request_seconds"
        if not of_request and not family.name.endswith("_stage_seconds"):
            continue
        stages = stages if stages is not None else {}
        for sample in family.samples:
            name = _REQUEST if of_request else sample.labels["stage"]
            suffix = sample.name.removeprefix(family.name)
            if suffix == "_created":
                continue
            stage = stages.setdefault(name, _StageHistogram())
            if suffix == "_bucket":
                stage.buckets[float(sample.labels["le"])] += sample.value
            elif suffix == "_count":
                stage.count += sample.value
            elif suffix == "_sum":
                stage.sum += sample.value
    return stages
