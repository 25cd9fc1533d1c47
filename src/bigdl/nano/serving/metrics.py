"""ServingMetrics: counts and durations of a server in the Prometheus format.

A request for a model has the stages ``decode`` (from message to arrays), ``queue`` (waiting for the
model), ``compute`` (the model's call, possibly shared with other requests) and ``encode``. A
recommendation has the stages of its pipeline; ``getMetrics`` reports their latest times.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from bigdl.common.errors import require
from bigdl.nano.serving.batching import BatchReport
from bigdl.nano.serving.repository import Deployment, ModelRepository

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import GaugeMetricFamily

__all__ = ["ServingMetrics"]

_LATEST = 4096  # number of latest times of a stage that percentiles are computed from
_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
_STAGE_SECONDS = (
    *(0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0),
)
_FRESHNESS_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0),
    *(3600.0, 86400.0),
)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class _Family(NamedTuple):
    """Declaration of a Prometheus metric, with one child per combination of label values."""

    metric_type: str
    name: str
    text: str
    labels: Sequence[str] = ()
    buckets: Sequence[float] = ()


_STAGE = ("stage",)
_RECOMMENDER = [
    _Family("Histogram", "stage_seconds", "Time of a stage", _STAGE, _STAGE_SECONDS),
    _Family("Counter", "stage_errors", "Calls of a stage that failed", _STAGE),
    _Family(
        "Counter", "answers", "Users that were answered, by the source of their items", ["source"]
    ),
    _Family("Gauge", "size", "Rows of a table, items of the index, version of the store", ["of"]),
    _Family(
        "Histogram",
        "freshness_seconds",
        "Delay from an event to answers that use it in a history, or by weights trained on it",
        ["of"],
        _FRESHNESS_SECONDS,
    ),
    _Family(
        "Gauge",
        "drift",
        "Distance of a feature of requests from the training data; alert is 1 above a threshold",
        ["column", "measure"],
    ),
    _Family("Counter", "lost_shards", "Calls for which no replica of a shard answered", ["shard"]),
    _Family(
        "Counter",
        "partial_answers",
        "Users that were answered without the items of a lost shard",
    ),
]
_MODEL = ("model", "version")
_RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_MODELS = [
    _Family("Counter", "bigdl_requests", "Requests for inference.", [*_MODEL, "protocol", "code"]),
    _Family(
        "Histogram",
        "bigdl_request_seconds",
        "Time of a request in the server.",
        ["model", "protocol"],
        _SECONDS,
    ),
    _Family("Histogram", "bigdl_stage_seconds", "Time of a stage.", [*_MODEL, "stage"], _SECONDS),
    _Family("Histogram", "bigdl_batch_rows", "Rows of one call of a model.", _MODEL, _ROWS),
    _Family("Counter", "bigdl_model_loads", "Models loaded or refused.", ["model", "result"]),
    _Family("Counter", "bigdl_shadow_requests", "Requests to a shadow.", ["model", "result"]),
    _Family("Gauge", "bigdl_requests_in_flight", "Requests that are being answered."),
    _Family("Counter", "bigdl_tokens", "Tokens of text models.", [*_MODEL, "direction"]),
    _Family(
        "Histogram",
        "bigdl_first_token_seconds",
        "Time to the first token of a generation.",
        _MODEL,
        _SECONDS,
    ),
    _Family(
        "Histogram",
        "bigdl_tokens_per_second",
        "Generated tokens per second of a request.",
        _MODEL,
        _RATES,
    ),
]


class _Child(Protocol):
    def inc(self, amount: float = 1) -> None: ...
    def dec(self, amount: float = 1) -> None: ...
    def set(self, value: float) -> None: ...
    def observe(self, amount: float) -> None: ...
    def set_function(self, f: Callable[[], float]) -> None: ...


class _Ignored:
    """Metric that ignores all values, used without Prometheus."""

    def inc(self, amount: float = 1) -> None: ...
    def dec(self, amount: float = 1) -> None: ...
    def set(self, value: float) -> None: ...
    def observe(self, amount: float) -> None: ...
    def set_function(self, f: Callable[[], float]) -> None: ...


_IGNORED = _Ignored()


class _StageTimes:
    """Most recent durations of one stage."""

    def __init__(self) -> None:
        self.latest: deque[float] = deque(maxlen=_LATEST)
        self.count = 0
        self.begin = time.monotonic()


class _Timed(AbstractContextManager[None]):
    """Context manager that times one call of a stage."""

    __slots__ = ("_begin", "_metrics", "_span", "_stage")

    def __init__(self, metrics: ServingMetrics, stage: str):
        self._metrics, self._stage = metrics, stage
        self._span: AbstractContextManager[Span] | None = None

    def __enter__(self) -> None:
        if self._metrics.tracer is not None:
            self._span = self._metrics.tracer.start_as_current_span(self._stage)
            self._span.__enter__()
        self._begin = time.perf_counter()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        seconds = time.perf_counter() - self._begin
        if self._span is not None:
            self._span.__exit__(error_type, error, trace)
        if error_type is not None:
            self._metrics.failed(self._stage)
        self._metrics.took(self._stage, seconds)


def _tracer() -> Tracer | None:
    """Return an OpenTelemetry tracer if the program has set up tracing, else None."""
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError:
        return None
    has_traces = isinstance(trace.get_tracer_provider(), TracerProvider)
    return trace.get_tracer("bigdl.friesian.serving") if has_traces else None


class ServingMetrics:
    """Durations, errors and counts of a server's models, or of a recommender and its services.

    If the OpenTelemetry SDK is set up before, stages are also traced as spans.

    Parameters
    ----------
    registry : prometheus_client.CollectorRegistry, optional
        Registry for the Prometheus metrics; None disables them.
    recommends : bool, default True
        False leaves out the metrics of a recommender.

    Examples
    --------
    >>> from bigdl.friesian.serving import ServingMetrics
    >>> metrics = ServingMetrics()
    >>> with metrics.time("recall"):
    ...     pass
    >>> metrics.summary()[0]["name"], metrics.summary()[0]["count"]
    ('recall', 1)
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, recommends: bool = True):
        self.registry = registry
        self.tracer = _tracer()
        # With several worker processes, it adds the metrics of the others.
        self.join: Callable[[bytes], bytes] = lambda text: text
        self._stages: dict[str, _StageTimes] = {}
        self._lock = threading.Lock()
        self._children: dict[tuple[str, ...], _Child] = {}
        self._families: dict[str, Callable[..., _Child]] = {}
        if recommends:
            self._declare(
                each._replace(name=f"bigdl_recommender_{each.name}") for each in _RECOMMENDER
            )

    def _declare(self, families: Iterable[_Family]) -> None:
        if self.registry is None:
            return
        prometheus = require("prometheus_client", "serving")
        for metric_type, name, text, labels, buckets in families:
            more = {"buckets": buckets} if buckets else {}
            make = getattr(prometheus, metric_type)
            family = make(name, text, labels, registry=self.registry, **more)
            if labels:
                self._families[name] = family.labels
            else:
                self._children[name,] = family

    def _child(self, name: str, *labels: str) -> _Child:
        """Return the metric with these label values, or a no-op metric without Prometheus."""
        key = (name, *labels)
        child = self._children.get(key)
        if child is None:
            if name not in self._families:
                return _IGNORED
            child = self._children[key] = self._families[name](*labels)
        return child

    # -- models ----------------------------------------------------------------------------------

    def observe_models(self, repository: ModelRepository) -> None:
        """Collect metrics of the models of a repository: requests, batches, loads and queues."""
        assert self.registry is not None
        self._declare(_MODELS)
        self.registry.register(_Models(repository))
        require("prometheus_client", "serving").ProcessCollector(registry=self.registry)
        repository.on_load = self._attach
        repository.on_reload = lambda name, succeeded: self._child(
            "bigdl_model_loads", name, "loaded" if succeeded else "refused"
        ).inc()
        for deployed in repository.deployments():
            self._attach(deployed)

    @property
    def content_type(self) -> str:
        """HTTP content type of the result of :meth:`text`."""
        return require("prometheus_client", "serving").CONTENT_TYPE_LATEST

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return self.join(require("prometheus_client", "serving").generate_latest(self.registry))

    @contextmanager
    def request(self) -> Iterator[None]:
        """Context manager that counts a request for a model as in flight."""
        in_flight = self._child("bigdl_requests_in_flight")
        in_flight.inc()
        try:
            yield
        finally:
            in_flight.dec()

    def requested(self, model: str, version: str, protocol: str, code: str, seconds: float) -> None:
        """Record the result and duration of a request; an unknown model has an empty name."""
        self._child("bigdl_requests", model, version, protocol, code).inc()
        self._child("bigdl_request_seconds", model, protocol).observe(seconds)

    def stage(self, deployed: Deployment, stage: str) -> Callable[[float], None]:
        """Return a function that records a duration, in seconds, of one stage of a model."""
        return self._child("bigdl_stage_seconds", deployed.name, deployed.version, stage).observe

    def tokens(self, deployed: Deployment, read: int, generated: int) -> None:
        """Count the tokens of texts and of generated answers."""
        name, version = deployed.name, deployed.version
        self._child("bigdl_tokens", name, version, "in").inc(read)
        self._child("bigdl_tokens", name, version, "out").inc(generated)

    def first_token(self, deployed: Deployment, seconds: float) -> None:
        """Record the time to the first token of a generation."""
        self._child("bigdl_first_token_seconds", deployed.name, deployed.version).observe(seconds)

    def generated(self, deployed: Deployment, tokens: int, seconds: float) -> None:
        """Record the rate of a finished generation."""
        if tokens:
            rate = tokens / max(seconds, 1e-9)
            self._child("bigdl_tokens_per_second", deployed.name, deployed.version).observe(rate)

    def shadow(self, model: str) -> Callable[[bool], None]:
        """Return a function that counts a shadow request as answered or failed."""
        return lambda succeeded: self._child(
            "bigdl_shadow_requests", model, "answered" if succeeded else "failed"
        ).inc()

    def _attach(self, deployed: Deployment) -> None:
        queue, compute = self.stage(deployed, "queue"), self.stage(deployed, "compute")
        rows = self._child("bigdl_batch_rows", deployed.name, deployed.version).observe

        def observe(report: BatchReport) -> None:
            for waited in report.waits:
                queue(waited)
            compute(report.compute)
            rows(report.rows)

        deployed.model.observe(observe)

    # -- stages of a recommendation --------------------------------------------------------------

    def time(self, stage: str) -> AbstractContextManager[None]:
        """Return a context manager that times one call of a stage."""
        return _Timed(self, stage)

    def failed(self, stage: str) -> None:
        """Count an error of a stage."""
        self._child("bigdl_recommender_stage_errors", stage).inc()

    def took(self, stage: str, seconds: float) -> None:
        """Record the duration, in seconds, of one call of a stage."""
        with self._lock:
            known = self._stages.get(stage)
            if known is None:
                known = self._stages[stage] = _StageTimes()
            known.latest.append(seconds)
            known.count += 1
        self._child("bigdl_recommender_stage_seconds", stage).observe(seconds)

    def answered(self, source: str, users: int = 1) -> None:
        """Count users that received an answer, by the source of the items in it."""
        self._child("bigdl_recommender_answers", source).inc(users)

    def freshness(self, of: str, seconds: float) -> None:
        """Record the delay from an event until answers use it; `of` is history or weights."""
        self._child("bigdl_recommender_freshness_seconds", of).observe(seconds)

    def drift(self, column: str, measure: str, value: float) -> None:
        """Set the distance of a feature of requests from the training data."""
        self._child("bigdl_recommender_drift", column, measure).set(value)

    def lost(self, shard: str) -> None:
        """Count a call to a shard that no replica of the shard answered."""
        self._child("bigdl_recommender_lost_shards", shard).inc()

    def partial(self, users: int) -> None:
        """Count users that were answered without the items of a lost shard."""
        self._child("bigdl_recommender_partial_answers").inc(users)

    def watch(self, of: str, function: Callable[[], float]) -> None:
        """Register a gauge whose value `function` returns each time Prometheus collects it."""
        self._child("bigdl_recommender_size", of).set_function(function)

    def summary(self) -> list[dict[str, float | str]]:
        """Return the latency in milliseconds and the calls per second of each stage.

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
        stages = []
        for name, (count, times, age) in known.items():
            median, p75, p95, p99 = np.percentile(times, [50, 75, 95, 99]).round(4).tolist()
            stages.append(
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
        return stages

    def to_json(self) -> str:
        """Return :meth:`summary` as JSON, the response of ``getMetrics``."""
        return json.dumps(self.summary())

    def reset(self) -> None:
        """Clear the recorded durations; Prometheus counters continue."""
        with self._lock:
            self._stages.clear()


class _Models:
    """Prometheus collector of the queue length, load time and runtime of each model."""

    def __init__(self, repository: ModelRepository):
        self._repository = repository
        self._gauge = require("prometheus_client.core", "serving").GaugeMetricFamily

    def describe(self) -> list[GaugeMetricFamily]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        names = ["model", "version"]
        waiting = self._gauge("bigdl_queue_length", "Requests that wait.", labels=names)
        loaded = self._gauge(
            "bigdl_model_loaded_timestamp_seconds", "When a model was loaded.", labels=names
        )
        info = self._gauge(
            "bigdl_model_info",
            "Runtime and method of a model.",
            labels=[*names, "platform", "method"],
        )
        usage = self._gauge(
            "bigdl_key_value_cache_usage_ratio", "Used share of the cache.", labels=names
        )
        for each in self._repository.deployments():
            labels = [each.name, each.version]
            waiting.add_metric(labels, each.model.waiting)
            loaded.add_metric(labels, each.loaded)
            info.add_metric([*labels, each.model.platform, each.model.method], 1)
            text = each.model.text
            if text is not None and text.generator is not None:
                usage.add_metric(labels, text.generator.cache_usage)
        yield from (waiting, loaded, info, usage)
