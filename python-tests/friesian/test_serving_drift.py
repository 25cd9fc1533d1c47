"""Tests of the drift of requests' features from the training data."""

from urllib.request import urlopen

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from bigdl.common.errors import UsageError
from bigdl.friesian.serving import (
    DriftMonitor,
    EmbeddedStore,
    FeatureProfile,
    HttpServer,
    IndexRecall,
    ItemIndex,
    Recommender,
    ServingMetrics,
)


def rows(count, seed, shift=0.0):
    random = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": random.normal(40, 9, count),
            "visits": random.poisson(3, count),
            "city": random.choice(["a", "b", "c"], count, p=[0.6, 0.3, 0.1]),
            "vip": random.random(count) < 0.2,
        }
    )
    frame["age"] += shift
    frame.loc[random.random(count) < 0.05, "age"] = np.nan
    return frame


def arrays(frame):
    return {name: pa.array(frame[name]) for name in frame.columns}


def test_no_alarm_without_drift_and_one_for_a_shifted_column():
    profile = FeatureProfile.of(rows(20_000, 0))
    for seed in range(10):
        monitor = DriftMonitor(profile)
        monitor.observe(arrays(rows(1000, 100 + seed)))
        assert monitor.alerts() == []
        assert len(monitor.latest()) == 4
        monitor.observe(arrays(rows(1000, 200 + seed, shift=9)))
        assert "age" in monitor.alerts()  # 20 of 50 prices are near the threshold


def test_nulls_unseen_values_and_other_shares_are_drift():
    profile = FeatureProfile.of(rows(20_000, 0))
    for name, change in (
        ("age", lambda each: each.assign(age=np.where(each.index % 2, np.nan, each["age"]))),
        ("city", lambda each: each.assign(city=np.where(each.index % 3, each["city"], "new"))),
        ("vip", lambda each: each.assign(vip=~each["vip"])),
        ("visits", lambda each: each.assign(visits=each["visits"] + 2)),
    ):
        monitor = DriftMonitor(profile)
        monitor.observe(arrays(change(rows(1000, 5))))
        assert monitor.alerts() == [name]


def test_windows_are_the_same_for_any_division_of_the_rows():
    frame = rows(900, 3)
    profile = FeatureProfile.of(rows(5000, 0))
    results = []
    for size in (900, 7):
        monitor = DriftMonitor(profile, window=900)
        for start in range(0, 900, size):
            monitor.observe(arrays(frame[start : start + size]))
        results.append(monitor.latest())
    whole = profile.compare(frame)
    for name, drift in whole.items():
        for each in results:
            values = each[name].psi, each[name].js, each[name].ks, each[name].rows
            assert values == (drift.psi, drift.js, drift.ks, 900)


def test_distances_have_the_known_values():
    profile = FeatureProfile.of(pd.DataFrame({"x": ["a"] * 50 + ["b"] * 50}))
    drift = profile.compare(pd.DataFrame({"x": ["a"] * 80 + ["b"] * 20}))["x"]
    assert drift.psi == pytest.approx(0.3 * np.log(1.6) - 0.3 * np.log(0.4))
    p, q = np.array([0.5, 0.5]), np.array([0.8, 0.2])
    m = (p + q) / 2
    divergence = ((p * np.log(p / m)).sum() + (q * np.log(q / m)).sum()) / 2
    assert drift.js == pytest.approx(np.sqrt(divergence))


def test_a_server_names_the_shifted_column(tmp_path):
    import prometheus_client

    random = np.random.default_rng(1)
    users = pd.DataFrame(
        {
            "user": np.arange(300),
            "age": random.normal(40, 9, 300) + 25,
            "prediction": list(random.standard_normal((300, 4)).astype("f4")),
        }
    )
    items = pd.DataFrame({"item": np.arange(50), "price": (np.arange(50) + 0.5) / 50})
    store = EmbeddedStore(tmp_path / "store")
    store.replace({"user": users, "item": items})
    index = ItemIndex(items["item"], random.standard_normal((50, 4)).astype("f4"))

    class Cheapest:
        def predict(self, inputs):
            return -inputs["price"] - inputs["age"]

    training = pd.DataFrame({"age": random.normal(40, 9, 9000), "price": random.random(9000)})
    metrics = ServingMetrics(prometheus_client.CollectorRegistry())
    monitor = DriftMonitor(FeatureProfile.of(training), window=200, every=2, metrics=metrics)
    recommender = Recommender(
        store,
        IndexRecall(store, index),
        Cheapest(),
        ["price", "age"],
        metrics=metrics,
        drift=monitor,
    )
    with HttpServer(recommender, metrics=metrics) as web:
        for user in range(300):
            assert recommender.recommend([user, 299 - user], 3, 20)[0].source == "ranked"
        with urlopen(f"http://127.0.0.1:{web.port}/metrics") as answer:
            text = answer.read().decode()
        with urlopen(f"http://127.0.0.1:{web.port}/drift") as answer:
            page = answer.read().decode()
    assert "age" in monitor.alerts()  # 20 of 50 prices are near the threshold
    assert 'bigdl_recommender_drift{column="age",measure="alert"} 1.0' in text
    assert "<svg" in page
    assert "training" in page


def test_damaged_profiles_and_missing_columns_are_errors(tmp_path):
    (tmp_path / "profile.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot be read"):
        FeatureProfile.load(tmp_path / "profile.json")
    with pytest.raises(UsageError, match="no profile"):
        FeatureProfile.load(tmp_path / "other.json")
    with pytest.raises(UsageError, match="no column 'y'"):
        FeatureProfile.of(pd.DataFrame({"x": [1]}), ["y"])
    profile = FeatureProfile.of(pd.DataFrame({"x": [1]}))
    with pytest.raises(UsageError, match="stage features"):
        Recommender(None, None, None, stages=[], drift=DriftMonitor(profile))
