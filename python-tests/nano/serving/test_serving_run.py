"""The figures and the chart of a run of a server."""

import threading
import time

import prometheus_client
import pytest
from refusals import refused

from bigdl.friesian.serving import ServingMetrics
from bigdl.nano.serving.serving_run import ServingRun


@pytest.fixture
def metrics():
    return ServingMetrics(prometheus_client.CollectorRegistry())


def text_of(metrics):
    return lambda: prometheus_client.generate_latest(metrics.registry)


def answer(metrics, requests, seconds=0.0):
    for _ in range(requests):
        with metrics.time("request"), metrics.time("ranking"):
            time.sleep(seconds)


def test_rows_count_what_came_within_the_block_only(metrics):
    answer(metrics, 5)
    with ServingRun(text_of(metrics), every=60) as run:
        answer(metrics, 4, 0.004)
    (row,) = run.rows()
    assert row["requests"] == 4
    assert row["ranking_ms"] >= 4
    assert 3 <= row["latency_50_ms"] <= row["latency_95_ms"] <= row["latency_99_ms"]
    assert row["requests_per_s"] <= 250


def test_calls_of_a_service_alone_are_its_requests(metrics):
    with ServingRun(text_of(metrics), every=60) as run:
        for method in ("getUserFeatures", "getItemFeatures"):
            with metrics.time(method):
                pass
    (row,) = run.rows()
    assert row["requests"] == 2


def test_the_chart_shows_the_rate_the_latency_and_the_stages(metrics, tmp_path):
    with ServingRun(text_of(metrics), every=60) as run:
        answer(metrics, 3)
    run.plot(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    for part in ("requests per second", "99%", "ranking", "latency_95_ms"):
        assert part in page
    assert "<svg" in run._repr_html_()


def test_metrics_are_read_over_http_again_and_again(metrics):
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", metrics.registry)
    try:
        answer(metrics, 1)
        with ServingRun(f"http://127.0.0.1:{server.server_port}/metrics", every=0.05) as run:
            end = time.monotonic() + 30
            while len(run.rows()) < 2 and time.monotonic() < end:
                answer(metrics, 1)
                time.sleep(0.02)
        assert len(run.rows()) >= 2
        assert all(each.name != "bigdl-serving-run" for each in threading.enumerate())
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_what_cannot_be_watched_or_drawn_is_said(metrics, tmp_path):
    with (
        refused("cluster-unreachable", "//127", "0", "9/metrics"),
        ServingRun("http://127.0.0.1:9/metrics"),
    ):
        pass
    with refused("argument-value"), ServingRun(lambda: ""):
        pass
    with ServingRun(text_of(metrics)) as run:
        pass
    with refused("data-empty"):
        run.plot(tmp_path / "run.svg")
