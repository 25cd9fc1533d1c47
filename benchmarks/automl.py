"""AutoEstimator with and without early stopping.

    python benchmarks/automl.py [--problem digits] [--trials 20] [--epochs 27] [--seeds 0 1 2]
        [--backend local] [--scheduler AsyncHyperBand] [--grace 3] [--factor 2] [--finalists 2]
        [--every 5] [--json results.json]

The problem is scikit-learn's digits, or ``mixed``: 2500 points of five classes that overlap.
Both sides try the same configurations of a small network, drawn by the same seed; the first trains
each for all its epochs, the second stops those that fall behind.  ``best`` is the accuracy for the
held-out rows, one of every 5, in per cent, of the best model that ``get_best_model`` gives;
``epochs`` are those of all trials, also of those that are trained again as finalists.  What is not
given is what ``AutoEstimator`` does by default.  Results do not depend on the speed of the machine,
with one trial at a time not on its load either; ``seconds`` do.
"""

import argparse
import json
import tempfile
import time

import torch
from sklearn.datasets import load_digits, make_classification
from torch import nn

from bigdl.orca.automl import hp
from bigdl.orca.automl.auto_estimator import AutoEstimator

SPACE = {
    "lr": hp.loguniform(1e-4, 1e-1),
    "units": hp.choice([16, 32, 64, 128]),
    "dropout": hp.uniform(0, 0.5),
    "batch_size": hp.choice([32, 64, 128]),
}
NEAR = 0.5  # points that a search with early stopping may lose


def rows(problem="digits", every=5):
    """Return training and held-out rows; every fifth row is held out."""
    if problem == "digits":
        x, y = load_digits(return_X_y=True)
        x = x / 16
    else:
        x, y = make_classification(2500, 30, n_informative=12, n_classes=5, random_state=0)
    x, held_out = x.astype("float32"), torch.arange(len(y)).numpy() % every == 0
    return (x[~held_out], y[~held_out]), (x[held_out], y[held_out])


def search(
    trials,
    epochs,
    seed,
    backend="local",
    scheduler=None,
    params=None,
    *,
    problem="digits",
    every=5,
):
    """Run a search; return accuracy in percent, epochs of all trials, seconds, configurations."""
    train, held_out = rows(problem, every)
    features, classes = train[0].shape[1], int(train[1].max()) + 1

    def model_creator(config):
        return nn.Sequential(
            nn.Linear(features, config["units"]),
            nn.ReLU(),
            nn.Dropout(config["dropout"]),
            nn.Linear(config["units"], classes),
        )

    with tempfile.TemporaryDirectory() as logs:
        est = AutoEstimator.from_torch(
            model_creator=model_creator,
            optimizer="Adam",
            loss="CrossEntropyLoss",
            logs_dir=logs,
            backend=backend,
        )
        started = time.perf_counter()
        est.fit(
            train,
            epochs=epochs,
            validation_data=held_out,
            metric="accuracy",
            n_sampling=trials,
            search_space=SPACE,
            scheduler=scheduler,
            scheduler_params=params,
            concurrency=1,
            seed=seed,
        )
        seconds = time.perf_counter() - started
        with torch.no_grad():
            scores = est.get_best_model()(torch.from_numpy(held_out[0]))
        table = est.trials()
    best = 100 * float((scores.argmax(1).numpy() == held_out[1]).mean())
    # finalists, which come after the trials, have the configurations of some of them
    configs = table[[name for name in table if name.startswith("config/")]][:trials]
    return {
        "best": best,
        "epochs": int(table["epochs"].sum()),
        "seconds": seconds,
        "configs": configs.to_dict("list"),
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--problem", default="digits", choices=["digits", "mixed"])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=27)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--backend", default="local", choices=["local", "ray"])
    parser.add_argument("--scheduler", default="AsyncHyperBand")
    parser.add_argument("--grace", type=int, help="epochs that every trial gets")
    parser.add_argument(
        "--factor", type=int, help="reduction factor: one in this number of trials continues"
    )
    parser.add_argument("--finalists", type=int, help="stopped trials that go on in the end")
    parser.add_argument(
        "--every", type=int, default=5, help="one in this number of rows is held out"
    )
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args(arguments)

    if options.backend == "ray":
        from bigdl.orca import init_orca_context

        init_orca_context(runtime="ray")
    params = {
        "grace_period": options.grace,
        "reduction_factor": options.factor,
        "finalists": options.finalists,
    }
    params = {name: value for name, value in params.items() if value is not None}
    rows = []
    print(f"{'seed':>4}  {'full best':>9}  {'stopped best':>12}  {'difference':>10}  ", end="")
    print(f"{'full epochs':>11}  {'stopped epochs':>14}  {'part':>5}  {'seconds':>13}")
    for seed in options.seeds:
        given = options.trials, options.epochs, seed, options.backend
        task = {"problem": options.problem, "every": options.every}
        full = search(*given, **task)
        early = search(*given, options.scheduler, params, **task)
        if full["configs"] != early["configs"]:
            raise SystemExit("The two sides tried different configurations")
        part = early["epochs"] / full["epochs"]
        rows.append({"seed": seed, "full": full, "early": early, "part": part})
        print(
            f"{seed:>4}  {full['best']:>9.2f}  {early['best']:>12.2f}  "
            f"{early['best'] - full['best']:>+10.2f}  {full['epochs']:>11}  {early['epochs']:>14}  "
            f"{part:>5.0%}  {full['seconds']:>5.1f} {early['seconds']:>7.1f}",
            flush=True,
        )
    near = sum(row["early"]["best"] >= row["full"]["best"] - NEAR for row in rows)
    parts = [row["part"] for row in rows]
    print(
        f"within {NEAR} points in {near} of {len(rows)} searches, with "
        f"{sum(parts) / len(parts):.0%} of the epochs ({max(parts):.0%} at most)"
    )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"options": vars(options), "rows": rows}, file, indent=1)
    return rows


if __name__ == "__main__":
    main()
