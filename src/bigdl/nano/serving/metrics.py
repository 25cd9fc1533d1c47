"""ServingMetrics: counts and times of a server, in the format of Prometheus.

Stages of a request are ``decode`` (the message becomes arrays), ``queue`` (it waits for the model),
``compute`` (the model's call, which it may share with others) and ``encode``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bigdl.common.errors import require
from bigdl.nano.serving.batching import BatchReport
from bigdl.nano.serving.repository import Deployment, ModelRepository

__all__ = ["ServingMetrics"]

_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ServingMetrics:
    """The metrics of one server.

    Parameters
    ----------
    repository : ModelRepository
        Each model that it loads reports its batches here.
    registry : prometheus_client.CollectorRegistry, optional
        Where other metrics of the process are, too.
    """

    def __init__(self, repository: ModelRepository, registry: Any = None):
        prometheus = require("prometheus_client", "serving")
        self._repository = repository
        self.registry = prometheus.CollectorRegistry() if registry is None else registry
        self._text = prometheus.generate_latest
        self.content_type: str = prometheus.CONTENT_TYPE_LATEST
        # Where several processes are one server, it adds the metrics of the others.
        self.join: Callable[[bytes], bytes] = lambda own: own
        make: dict[str, Any] = {"registry": self.registry}
        model = ["model", "version"]
        self._requests = prometheus.Counter(
            "bigdl_requests", "Requests for inference.", [*model, "protocol", "code"], **make
        )
        self._seconds = prometheus.Histogram(
            "bigdl_request_seconds",
            "Time of a request in the server.",
            ["model", "protocol"],
            buckets=_SECONDS,
            **make,
        )
        self._stages = prometheus.Histogram(
            "bigdl_stage_seconds", "Time of a stage.", [*model, "stage"], buckets=_SECONDS, **make
        )
        self._rows = prometheus.Histogram(
            "bigdl_batch_rows", "Rows of one call of a model.", model, buckets=_ROWS, **make
        )
        self._loads = prometheus.Counter(
            "bigdl_model_loads", "Models loaded or refused.", ["model", "result"], **make
        )
        self._shadows = prometheus.Counter(
            "bigdl_shadow_requests", "Requests to a shadow.", ["model", "result"], **make
        )
        self._in_flight = prometheus.Gauge(
            "bigdl_requests_in_flight", "Requests that are being answered.", **make
        )
        self.registry.register(_Models(repository))
        prometheus.ProcessCollector(registry=self.registry)
        repository.on_load = self._attach
        repository.on_reload = self._count_load
        for deployed in repository.deployments():
            self._attach(deployed)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return self.join(self._text(self.registry))

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as under way."""
        self._in_flight.inc()
        try:
            yield
        finally:
            self._in_flight.dec()

    def answered(self, model: str, version: str, protocol: str, code: str, seconds: float) -> None:
        """Count an answer; a model that does not exist is counted under an empty name."""
        self._requests.labels(model, version, protocol, code).inc()
        self._seconds.labels(model, protocol).observe(seconds)

    def stage(self, deployed: Deployment, stage: str) -> Callable[[float], None]:
        """Return the function that takes the seconds of a stage of a model."""
        return self._stages.labels(deployed.name, deployed.version, stage).observe

    def shadow(self, model: str) -> Callable[[bool], None]:
        """Return the function that counts an answer of a shadow."""
        return lambda well: self._shadows.labels(model, "answered" if well else "failed").inc()

    def _attach(self, deployed: Deployment) -> None:
        queue, compute = self.stage(deployed, "queue"), self.stage(deployed, "compute")
        rows = self._rows.labels(deployed.name, deployed.version).observe

        def observe(report: BatchReport) -> None:
            for waited in report.waits:
                queue(waited)
            compute(report.compute)
            rows(report.rows)

        deployed.model.observe(observe)

    def _count_load(self, name: str, succeeded: bool) -> None:
        self._loads.labels(name, "loaded" if succeeded else "refused").inc()


class _Models:
    """The collector of each model's figures at the time of asking."""

    def __init__(self, repository: ModelRepository):
        self._repository = repository
        self._gauge = require("prometheus_client.core", "serving").GaugeMetricFamily

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        names = ["model", "version"]
        waiting = self._gauge("bigdl_queue_length", "Requests that wait.", labels=names)
        loaded = self._gauge(
            "bigdl_model_loaded_timestamp_seconds", "When a model was loaded.", labels=names
        )
        info = self._gauge(
            "bigdl_model_info", "What runs a model.", labels=[*names, "platform", "method"]
        )
        for each in self._repository.deployments():
            labels = [each.name, each.version]
            waiting.add_metric(labels, each.model.waiting)
            loaded.add_metric(labels, each.loaded)
            info.add_metric([*labels, each.model.platform, each.model.method], 1)
        yield from (waiting, loaded, info)
