"""Models of a table: AutoEstimator.from_table and simple baselines, on scikit-learn's data sets.

Both sides get the same training rows and are scored on the same held-out rows, for several
divisions. The baseline is HistGradientBoosting of scikit-learn with its default settings.

    python benchmarks/tables.py --trials 12 --seeds 3
"""

import argparse
import json
import time

import numpy as np
import pandas as pd
from sklearn import datasets
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import log_loss, root_mean_squared_error
from sklearn.model_selection import train_test_split

from bigdl.orca.automl.auto_estimator import AutoEstimator

TABLES = ("breast_cancer", "wine", "digits", "diabetes")


def baseline(train, test, is_regression):
    """Return the error of scikit-learn's gradient boosting."""
    x, y = train.drop(columns="target"), train["target"]
    of = HistGradientBoostingRegressor if is_regression else HistGradientBoostingClassifier
    model = of(random_state=0).fit(x, y)
    held_out = test.drop(columns="target")
    if is_regression:
        return root_mean_squared_error(test["target"], model.predict(held_out))
    probabilities = model.predict_proba(held_out)
    return log_loss(test["target"], probabilities, labels=model.classes_)


def run(name, seed, limits):
    """Return the errors and seconds of both sides for one division of a table."""
    rows = getattr(datasets, f"load_{name}")(as_frame=True).frame
    is_regression = name == "diabetes"
    stratify = None if is_regression else rows["target"]
    train, test = train_test_split(rows, test_size=0.3, random_state=seed, stratify=stratify)
    started = time.perf_counter()
    simple = baseline(train, test, is_regression)
    between = time.perf_counter()
    metric = "rmse" if is_regression else "logloss"
    table = AutoEstimator.from_table(train, label="target", metric=metric, seed=seed, **limits)
    ended = time.perf_counter()
    return {
        "table": name,
        "seed": seed,
        "best": table.best_model,
        "trials": len(table.leaderboard()),
        "score": table.leaderboard()[metric].iloc[0],
        "ours": table.evaluate(test, [metric])[metric],
        "baseline": simple,
        "seconds": ended - between,
        "baseline_seconds": between - started,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--time-limit", type=float)
    parser.add_argument("--trials", type=int, help="instead of a time limit; default 12")
    parser.add_argument("--cpus", type=int, help="threads of a trial")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tables", nargs="*", default=TABLES, choices=TABLES)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    trials = arguments.trials or (None if arguments.time_limit else 12)
    limits = {"time_limit": arguments.time_limit, "n_trials": trials}
    limits["cpus_per_trial"] = arguments.cpus
    results = [
        run(name, seed, limits) for name in arguments.tables for seed in range(arguments.seeds)
    ]
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file)
    print("| Table | Best models | Cross-validation | Held out | Baseline | Ratio | Seconds |")
    print("|---|---|---|---|---|---|---|")
    for name, each in pd.DataFrame(results).groupby("table", sort=False):
        ratios = each["ours"] / each["baseline"]
        means = [f"{np.mean(each[column]):.4f}" for column in ("score", "ours", "baseline")]
        spread = f"{ratios.median():.2f} ({ratios.min():.2f} to {ratios.max():.2f})"
        best = ", ".join(each["best"])
        print(f"| {name} | {best} | {' | '.join(means)} | {spread} | {each['seconds'].max():.1f} |")


if __name__ == "__main__":
    main()
