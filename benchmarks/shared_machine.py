"""Training on a machine whose cores are shared with other programs: seconds of an epoch.

    python benchmarks/shared_machine.py [--steps 100] [--repeats 3] [--busy 0 2] [--json out.json]

A small network learns by ``Estimator.fit`` on a ``LocalEngine``: one worker with all cores as
threads, and one worker on each core with one thread. Beside it run ``--busy`` processes that
compute without end, as other programs of the machine do. ``spinning`` are OpenMP's
threads as its library sets them, which was the default here, too; ``passive`` is the default now.
``torch`` is a plain loop in a separate process, which spins.

Sides run alternately. An epoch's time is half of what a fit of three takes more than one of one.
Ratios are to ``passive`` of the same threads and the same neighbours; a run of more than
``--limit`` seconds is ended and counted as that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

INPUTS, WIDTH, BATCH = 64, 256, 256
SPINNING = {"GOMP_SPINCOUNT": "300000"}  # what GNU's OpenMP takes if nobody says another
SIDES = {
    "passive, all cores in one worker": (1, {}),
    "spinning, all cores in one worker": (1, SPINNING),
    "passive, a worker on each core": (None, {}),
    "spinning, a worker on each core": (None, SPINNING),
    "torch, all cores": (0, {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="of an epoch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2], help="other busy processes")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a run")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all times there, too")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(epoch(SIDES[options.side][0], options.steps)))
        return
    seconds: dict[str, dict[str, list[float]]] = {}
    for neighbours in options.busy:
        times = seconds[f"{neighbours} busy processes"] = {side: [] for side in SIDES}
        with busy(neighbours):
            for _ in range(options.repeats):
                for side in SIDES:
                    times[side].append(measured(side, options))
    report(seconds)
    if options.json:
        options.json.write_text(json.dumps(seconds, indent=1))


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Run busy processes during a block."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measured(side: str, options: argparse.Namespace) -> float:
    """Run an implementation in a separate process and return the seconds of an epoch."""
    command = [sys.executable, __file__, "--side", side, "--steps", str(options.steps)]
    environment = {name: value for name, value in os.environ.items() if name not in SPINNING}
    try:
        ended = subprocess.run(
            command,
            env={**environment, **SIDES[side][1]},
            stdout=subprocess.PIPE,
            text=True,
            timeout=options.limit,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return options.limit
    return json.loads(ended.stdout.splitlines()[-1])


def epoch(workers: int | None, steps: int) -> float:
    """Train with an implementation and return the seconds of an epoch."""
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.standard_normal((steps * BATCH, INPUTS), dtype=np.float32)
    y = x[:, :1].copy()
    if workers == 0:
        return plain(x, y)
    import torch

    from bigdl.orca.learn.pytorch import Estimator

    count = workers or len(os.sched_getaffinity(0))
    estimator = Estimator.from_torch(
        model=lambda config: network(),
        optimizer=lambda model, config: torch.optim.Adam(model.parameters()),
        loss=torch.nn.MSELoss(),
        backend="local",
        workers_per_node=count,
    )
    estimator.fit((x, y), epochs=1, batch_size=BATCH)
    begun = time.perf_counter()
    estimator.fit((x, y), epochs=1, batch_size=BATCH)
    first = time.perf_counter() - begun
    begun = time.perf_counter()
    estimator.fit((x, y), epochs=3, batch_size=BATCH)
    return (time.perf_counter() - begun - first) / 2


def network():
    """Return the network of all implementations."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(INPUTS, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))


def plain(x, y) -> float:
    """Train with a plain torch loop."""
    import torch

    model, loss = network(), torch.nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters())
    features, targets = torch.from_numpy(x), torch.from_numpy(y)
    for _ in range(2):
        begun = time.perf_counter()
        for rows in torch.randperm(len(features)).split(BATCH):
            optimizer.zero_grad()
            loss(model(features[rows]), targets[rows]).backward()
            optimizer.step()
        seconds = time.perf_counter() - begun
    return seconds


def report(seconds: dict[str, dict[str, list[float]]]) -> None:
    """Print the tables, in Markdown."""
    for neighbours, times in seconds.items():
        print(
            f"\n| other processes {neighbours} | seconds of an epoch | times as long as passive |"
        )
        print("|---|---|---|")
        for side, values in times.items():
            what = side.partition(", ")[2]
            passive = times.get(f"passive, {what}", times["passive, all cores in one worker"])
            ratios = sorted(a / b for a, b in zip(values, passive, strict=True))
            median, (low, high) = statistics.median(values), (min(values), max(values))
            print(
                f"| {side} | {median:.2f} ({low:.2f}–{high:.2f}) | "
                f"{statistics.median(ratios):.1f} ({ratios[0]:.1f}–{ratios[-1]:.1f}) |"
            )


if __name__ == "__main__":
    main()
