"""Training on Ray: BigDL's Estimator and Ray Train's TorchTrainer.

    python benchmarks/ray_vs_train.py [--rows N] [--repeats N] [--shuffle] [--json FILE] [--quick]

Both train the same network on the same Parquet files with the same workers, batches and epochs, on
one Ray that runs already (without its dashboard), turn and turn about.

==========  ======================================================================================
``bigdl``   ``Estimator.from_torch(backend="ray").fit(path)``: the workers read the files
``train``   ``TorchTrainer`` with ``ray.data.read_parquet`` and ``iter_torch_batches``, DDP by
            ``prepare_model``, and the weights reported as a checkpoint, as its documentation has it
==========  ======================================================================================

End to end is from the call to the trained weights in the hands of the caller.  The first run of a
side is *cold* (its processes start, import torch and open the files for the first time), the others
are *warm*.  Steady state is steps per second of the epochs after the first.  Every worker computes
on one thread.  With ``--shuffle`` both shuffle: ``bigdl`` by a permutation of the worker's rows,
``train`` in a buffer of ten batches.  A ratio above 1 says that ``bigdl`` is the faster one; it is
the median over the repeats of the ratio within a repeat, with its range.
"""

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

FEATURES = [f"x{i}" for i in range(8)]
FILES = 4
GOALS = {"warm": 1.3, "steady": 1.0}


class Network(torch.nn.Module):
    """Perceptron for numeric columns."""

    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(len(FEATURES), width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, 1),
        )

    def forward(self, *columns):
        return self.layers(torch.stack(columns, 1))[:, 0]


def model_creator(config):
    torch.manual_seed(0)
    return Network(config["width"])


def optimizer_creator(model, config):
    return torch.optim.Adam(model.parameters(), lr=config["lr"])


def write_files(folder, rows, seed=0):
    """Write rows of a smooth function of eight numbers."""
    rng = np.random.default_rng(seed)
    for number, part in enumerate(np.array_split(np.arange(rows), FILES)):
        x = rng.normal(size=(len(part), len(FEATURES))).astype(np.float32)
        columns = dict(zip(FEATURES, x.T, strict=True))
        table = pa.table({**columns, "y": np.sin(x[:, :4].sum(1)) + x[:, 4] * x[:, 5]})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=50_000)


# -- the sides: seconds end to end, steps per second of the later epochs, rows, loss ------------


def bigdl_side(path, options):
    from bigdl.orca.learn.pytorch import Estimator

    started = time.perf_counter()
    est = Estimator.from_torch(
        model=model_creator,
        optimizer=optimizer_creator,
        loss=torch.nn.MSELoss(),
        config={"width": options.width, "lr": options.lr, "shuffle": options.shuffle},
        backend="ray",
        workers_per_node=options.workers,
    )
    stats = est.fit(
        path,
        epochs=options.epochs,
        batch_size=options.batch_size,
        feature_cols=FEATURES,
        label_cols=["y"],
        seed=0,
        profile=True,
    )
    weights = est.get_model().state_dict()
    seconds = time.perf_counter() - started
    later = [epoch["profile"]["mean_train_epoch_s"] for epoch in stats[1:]]
    return finished(seconds, later, stats[-1]["num_samples"], weights, options)


def train_loop(config):
    """Run the training loop of a Ray Train worker."""
    import ray.train
    import ray.train.torch

    torch.set_num_threads(1)
    model = ray.train.torch.prepare_model(model_creator(config))
    optimizer = optimizer_creator(model, config)
    criterion = torch.nn.MSELoss()
    shard = ray.train.get_dataset_shard("train")
    seconds = []
    for _ in range(config["epochs"]):
        began, rows = time.perf_counter(), 0
        for batch in shard.iter_torch_batches(**config["batches"]):
            optimizer.zero_grad()
            loss = criterion(model(*(batch[name] for name in FEATURES)), batch["y"])
            loss.backward()
            optimizer.step()
            loss.item()
            rows += len(batch["y"])
        seconds.append(time.perf_counter() - began)
    checkpoint = None
    with tempfile.TemporaryDirectory() as folder:
        if ray.train.get_context().get_world_rank() == 0:
            torch.save(model.module.state_dict(), os.path.join(folder, "weights.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"seconds": seconds, "rows": rows}, checkpoint=checkpoint)


def train_side(path, options):
    import ray.data
    import ray.train
    from ray.train.torch import TorchTrainer

    local = options.batch_size // options.workers
    batches = {"batch_size": local, "dtypes": torch.float32}
    if options.shuffle:
        batches["local_shuffle_buffer_size"] = 10 * local
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={
                "width": options.width,
                "lr": options.lr,
                "epochs": options.epochs,
                "batches": batches,
            },
            # half of a CPU each: the tasks of Ray Data need some, too
            scaling_config=ray.train.ScalingConfig(
                num_workers=options.workers, resources_per_worker={"CPU": 0.5}
            ),
            run_config=ray.train.RunConfig(storage_path=folder),
            datasets={"train": ray.data.read_parquet(path)},
        )
        result = trainer.fit()
        with result.checkpoint.as_directory() as saved:
            weights = torch.load(os.path.join(saved, "weights.pt"), weights_only=True)
        seconds = time.perf_counter() - started
    rows = result.metrics["rows"] * options.workers
    return finished(seconds, result.metrics["seconds"][1:], rows, weights, options)


def finished(seconds, later, rows, weights, options):
    steps = rows / options.batch_size
    return {
        "seconds": seconds,
        "steps_per_s": steps / statistics.median(later),
        "rows": rows,
        "loss": loss_of(weights, options),
    }


def loss_of(weights, options):
    """Return the loss on new rows."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), 20_000, seed=1)
        table = pq.read_table(folder).to_pandas()
    model = Network(options.width)
    model.load_state_dict(weights)
    with torch.no_grad():
        columns = [torch.from_numpy(table[name].to_numpy(copy=True)) for name in FEATURES]
        wanted = torch.from_numpy(table["y"].to_numpy(np.float32))
        return float(torch.nn.functional.mse_loss(model(*columns), wanted))


# -- the report ---------------------------------------------------------------------------------


def check(results, rows):
    """Check that both have processed all rows and reached a similar loss."""
    for side, runs in results.items():
        for run in runs:
            # a dataset of Ray's is shared out by blocks, so its workers may differ by some rows
            assert abs(run["rows"] - rows) <= 0.2 * rows, (side, run["rows"], rows)
    losses = {side: statistics.median(r["loss"] for r in runs) for side, runs in results.items()}
    assert max(losses.values()) <= 2 * min(losses.values()), losses
    return losses


def ratios(results, name, first, *, inverse):
    """Return the pairwise ratios of `name` in the runs from `first` on."""
    pairs = zip(results["bigdl"][first:], results["train"][first:], strict=True)
    pairs_of_values = [(ours[name], theirs[name]) for ours, theirs in pairs]
    return [theirs / ours if inverse else ours / theirs for ours, theirs in pairs_of_values]


def report(results, losses):
    rows = [
        ("cold", "s end to end", [r["seconds"] for r in results["bigdl"][:1]], "seconds"),
        ("warm", "s end to end", [r["seconds"] for r in results["bigdl"][1:]], "seconds"),
        ("steady", "steps/s", [r["steps_per_s"] for r in results["bigdl"][1:]], "steps_per_s"),
    ]
    print("\n| what | bigdl | train | ratio (range) | goal |\n|---|---|---|---|---|")
    summary = {"losses": losses}
    for what, unit, ours, name in rows:
        cut = slice(0, 1) if what == "cold" else slice(1, None)
        theirs = [r[name] for r in results["train"][cut]]
        part = {side: runs[cut] for side, runs in results.items()}
        values = ratios(part, name, 0, inverse=name == "seconds")
        middle = statistics.median(values)
        goal = GOALS.get(what)
        verdict = "" if goal is None else f"{goal:g}: {'met' if middle >= goal else 'missed'}"
        print(
            f"| {what}, {unit} | {statistics.median(ours):.2f} | {statistics.median(theirs):.2f} "
            f"| {middle:.2f} ({min(values):.2f}–{max(values):.2f}) | {verdict} |"
        )
        summary[what] = {"ratio": middle, "range": [min(values), max(values)], "goal": goal}
    print("\nloss of fresh rows:", {side: round(loss, 4) for side, loss in losses.items()})
    return summary


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4096, help="of all workers together")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--repeats", type=int, default=6, help="the first of which is cold")
    parser.add_argument("--json", help="file for all results")
    parser.add_argument("--quick", action="store_true", help="few rows, three repeats")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.repeats = min(options.rows, 400_000), min(options.repeats, 3)
    if options.repeats < 2:
        parser.error("--repeats should be at least 2: the first one is cold")

    from bigdl.orca import init_orca_context, stop_orca_context

    logging.getLogger("ray").setLevel(logging.WARNING)
    init_orca_context(runtime="ray", cores=options.workers, log_to_driver=False)
    import ray

    ray.data.DataContext.get_current().enable_progress_bars = False
    results = {"bigdl": [], "train": []}
    sides = {"bigdl": bigdl_side, "train": train_side}
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), options.rows)
        for repeat in range(options.repeats):
            order = list(sides) if repeat % 2 else list(reversed(sides))
            for side in order:
                results[side].append(sides[side](folder, options))
                result = results[side][-1]
                print(
                    f"{repeat} {side:6} {result['seconds']:7.2f} s  "
                    f"{result['steps_per_s']:8.1f} steps/s",
                    flush=True,
                )
    stop_orca_context()
    losses = check(results, options.rows)
    print(
        f"\n{options.rows} rows, {options.epochs} epochs, batches of {options.batch_size}, "
        f"{options.workers} workers of one thread; {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__}, "
        f"ray {ray.__version__}"
    )
    summary = report(results, losses)
    if options.json:
        Path(options.json).write_text(json.dumps({"summary": summary, "runs": results}, indent=1))


if __name__ == "__main__":
    main()
