"""Times and failures of the stages of serving.

Figures go to histograms of Prometheus and, as the latest times of each stage, to the services'
``getMetrics``.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import require

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_LATEST = 4096  # times of a stage that percentiles are made of
_BUCKETS = (
    *(0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0),
)


class _Stage:
    """The latest times of one stage."""

    def __init__(self) -> None:
        self.latest: deque[float] = deque(maxlen=_LATEST)
        self.count = 0
        self.begin = time.monotonic()


class _Timed(AbstractContextManager[None]):
    """One call of a stage."""

    __slots__ = ("_begin", "_metrics", "_span", "_stage")

    def __init__(self, metrics: ServingMetrics, stage: str):
        self._metrics, self._stage = metrics, stage
        self._span: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        if self._metrics.tracer is not None:
            self._span = self._metrics.tracer.start_as_current_span(self._stage)
            self._span.__enter__()
        self._begin = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        seconds = time.perf_counter() - self._begin
        if self._span is not None:
            self._span.__exit__(kind, error, trace)
        if kind is not None:
            self._metrics.failed(self._stage)
        self._metrics.took(self._stage, seconds)


def _tracer() -> Any:
    """Return a tracer of OpenTelemetry if the program has set up its traces."""
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError:
        return None
    has_traces = isinstance(trace.get_tracer_provider(), TracerProvider)
    return trace.get_tracer("bigdl.friesian.serving") if has_traces else None


class ServingMetrics:
    """Times, errors and fallbacks of a recommender and its services.

    Stages are spans of OpenTelemetry, too, where its SDK has been set up before.

    Parameters
    ----------
    registry : prometheus_client.CollectorRegistry, optional
        Where the metrics for Prometheus are; None leaves Prometheus out.

    Examples
    --------
    >>> from bigdl.friesian.serving import ServingMetrics
    >>> metrics = ServingMetrics()
    >>> with metrics.time("recall"):
    ...     pass
    >>> metrics.summary()[0]["name"], metrics.summary()[0]["count"]
    ('recall', 1)
    """

    def __init__(self, registry: CollectorRegistry | None = None):
        self.registry = registry
        self.tracer = _tracer()
        self._stages: dict[str, _Stage] = {}
        self._lock = threading.Lock()
        self._histogram: Any = None
        if registry is not None:
            prometheus = require("prometheus_client", "serving")
            name = "bigdl_recommender"
            self._histogram = prometheus.Histogram(
                f"{name}_stage_seconds",
                "Time of a stage",
                ["stage"],
                registry=registry,
                buckets=_BUCKETS,
            )
            self._errors = prometheus.Counter(
                f"{name}_stage_errors", "Calls of a stage that failed", ["stage"], registry=registry
            )
            self._answers = prometheus.Counter(
                f"{name}_answers",
                "Users that were answered, by the source of their items",
                ["source"],
                registry=registry,
            )
            self._gauges = prometheus.Gauge(
                f"{name}_size",
                "Rows of a table, items of the index, version of the store",
                ["of"],
                registry=registry,
            )
            self._lost = prometheus.Counter(
                f"{name}_lost_shards",
                "Calls for which no replica of a shard answered",
                ["shard"],
                registry=registry,
            )
            self._partial = prometheus.Counter(
                f"{name}_partial_answers",
                "Users that were answered without the items of a lost shard",
                registry=registry,
            )
            self._children: dict[str, Any] = {}

    def time(self, stage: str) -> AbstractContextManager[None]:
        """Measure what runs inside as a call of a stage."""
        return _Timed(self, stage)

    def failed(self, stage: str) -> None:
        """Count an error of a stage."""
        if self._histogram is not None:
            self._errors.labels(stage).inc()

    def took(self, stage: str, seconds: float) -> None:
        """Take the seconds of a call of a stage."""
        with self._lock:
            known = self._stages.get(stage)
            if known is None:
                known = self._stages[stage] = _Stage()
            known.latest.append(seconds)
            known.count += 1
        if self._histogram is not None:
            child = self._children.get(stage)
            if child is None:
                child = self._children[stage] = self._histogram.labels(stage)
            child.observe(seconds)

    def answered(self, source: str, users: int = 1) -> None:
        """Count users by where their items came from."""
        if self._histogram is not None:
            self._answers.labels(source).inc(users)

    def lost(self, shard: str) -> None:
        """Count a call for which no replica of a shard answered."""
        if self._histogram is not None:
            self._lost.labels(shard).inc()

    def partial(self, users: int) -> None:
        """Count users that were answered without the items of a lost shard."""
        if self._histogram is not None:
            self._partial.inc(users)

    def watch(self, of: str, function: Any) -> None:
        """Show the number that a function returns whenever Prometheus asks."""
        if self._histogram is not None:
            self._gauges.labels(of).set_function(function)

    def summary(self) -> list[dict[str, Any]]:
        """Return for each stage its figures, in milliseconds and calls per second.

        Returns
        -------
        list of dict
            ``name``, ``count``, ``meanRate``, ``mean``, ``median``, ``p75``, ``p95``, ``p99``.
        """
        with self._lock:
            known = {
                name: (each.count, np.array(each.latest) * 1000, time.monotonic() - each.begin)
                for name, each in self._stages.items()
            }
        figures = []
        for name, (count, times, age) in known.items():
            median, p75, p95, p99 = np.percentile(times, [50, 75, 95, 99]).round(4).tolist()
            figures.append(
                {
                    "name": name,
                    "count": count,
                    "meanRate": round(count / max(age, 1e-9), 4),
                    "mean": round(float(times.mean()), 4),
                    "median": median,
                    "p75": p75,
                    "p95": p95,
                    "p99": p99,
                }
            )
        return figures

    def to_json(self) -> str:
        """Return :meth:`summary` as JSON, which is what ``getMetrics`` answers."""
        return json.dumps(self.summary())

    def reset(self) -> None:
        """Forget the times so far; counters of Prometheus go on, as they have to."""
        with self._lock:
            self._stages.clear()
