"""Cost and quality of drift detection: CPU time per request, shifted columns and false alarms.

    python benchmarks/drift.py [--json result.json] [--rounds 12]

* Cost: CPU time of requests of one recommender with features, recall and ranking, with and without
  a monitor (one of ten requests is observed); rounds of both alternate in one process.
* Shift: number of requests until the shifted column is named, and that no other one is.
* False alarms: ten runs of 10,000 requests from the distribution of the training data.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from bigdl.friesian.models import DeepFM
from bigdl.friesian.serving import (
    DriftMonitor,
    EmbeddedStore,
    FeatureProfile,
    IndexRecall,
    ItemIndex,
    ModuleRanker,
    Recommender,
)

USERS, ITEMS, CANDIDATES = 500, 2000, 100


def requests(random, rows, shift=0.0):
    """Return the features of requests: ten columns, of which one may be shifted."""
    columns = {f"number{at}": random.normal(at, 1 + at, rows) for at in range(6)}
    columns["number3"] += shift * 4
    for at in range(3):
        shares = 1 / np.arange(1, 12 + at)
        columns[f"word{at}"] = random.choice(
            [f"w{each}" for each in range(len(shares))], rows, p=shares / shares.sum()
        )
    columns["age"] = random.integers(16, 90, rows)
    return columns


def served(folder):
    """Return a store, a recall and a ranker of a small catalogue, and the item table."""
    random = np.random.default_rng(0)
    items = pd.DataFrame({"item": np.arange(ITEMS), "kind": random.integers(0, 9, ITEMS)})
    items["price"] = random.normal(20, 5, ITEMS).astype("float32")
    vectors = random.standard_normal((ITEMS, 32)).astype("float32")
    users = pd.DataFrame({"user": np.arange(USERS), "age": random.integers(16, 90, USERS)})
    users["prediction"] = list(random.standard_normal((USERS, 32)).astype("float32"))
    store = EmbeddedStore(folder / "store")
    store.replace({"user": users, "item": items})
    torch.manual_seed(0)
    sizes = {"user": USERS, "item": ITEMS, "kind": 9}
    model = DeepFM(sizes, ["price"], dim=8, hidden=(32,)).eval()
    return store, IndexRecall(store, ItemIndex(items["item"], vectors)), model, items


def cost(folder, rounds, per_round=300):
    store, recall, model, items = served(folder)
    profile = FeatureProfile.of(items, columns=["kind", "price"])
    sides = {
        name: Recommender(
            store, recall, ModuleRanker(model), candidates=CANDIDATES, threads=1, drift=monitor
        )
        for name, monitor in (("without", None), ("with", DriftMonitor(profile)))
    }
    times = {name: [] for name in sides}
    users = np.random.default_rng(1).integers(0, USERS, per_round).tolist()
    for number in range(rounds + 2):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            began = time.process_time()
            for user in users:
                sides[name].recommend([user], 10)
            times[name].append((time.process_time() - began) / per_round)
    pairs = zip(times["with"][2:], times["without"][2:], strict=True)
    ratios = sorted(one / two for one, two in pairs)
    row = {f"{name}, CPU ms": 1000 * statistics.median(each[2:]) for name, each in times.items()}
    return {**row, "ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}


def until_alert(profile, shift, seed, most=10_000):
    """Return the number of requests until an alert (None without one) and the named columns."""
    random, monitor = np.random.default_rng(seed), DriftMonitor(profile)
    rows = requests(random, most, shift)
    for number in range(most):
        if monitor.is_due():
            monitor.observe({name: values[number : number + 1] for name, values in rows.items()})
            if alerts := monitor.alerts():
                return number + 1, alerts
    return None, []


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = {"cost": cost(Path(folder), options.rounds)}
    print(json.dumps({key: round(value, 4) for key, value in results["cost"].items()}), flush=True)
    profile = FeatureProfile.of(pd.DataFrame(requests(np.random.default_rng(0), 50_000)))
    for shift in (0.0, 0.5, 1.0):
        runs = [until_alert(profile, shift, seed) for seed in range(1, 11)]
        results[f"shift {shift:g}"] = runs
        named = sorted({name for _, names in runs for name in names})
        counts = [count for count, _ in runs]
        print(f"shift of {shift:g} standard deviations: requests until the alert {counts}, {named}")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
