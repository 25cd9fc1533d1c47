"""Goodput of fits whose workers are killed at random: in-place recovery and restart.

    python benchmarks/recovery.py [--seconds 120] [--kills 10] [--workers 2] [--backend local]
        [--ways in_place restart] [--cost]

Each round runs the same fit undisturbed, with in-place recovery and with restarts from the newest
checkpoint (one per epoch).  Goodput is the number of steps that count times the median duration of
an undisturbed step, divided by the wall time from the first kill to the end.  Each stall is the
longest time near a kill without a step that had not been made before.

``--cost`` measures the duration of undisturbed steps instead: short fits of small models, with and
without in-place recovery in turns.
"""

import argparse
import itertools
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

from bigdl.orca.learn.optimizers import Adam
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import Callback
from bigdl.runtime.jobs import active_attempts, running_workers

ROWS, COLUMNS, BATCH = 12_800, 256, 256
NEAR_S = 1.0  # a stall begins at most this long after the kill


class Steps(Callback):
    """Write the time of every step of rank 0 or of the process that has its rank."""

    def __init__(self, path: str):
        self.path = path

    def after_train_iter(self, runner):
        if runner.rank == 0:
            with open(self.path, "a") as file:
                file.write(f"{time.time()} {runner.global_step} {os.getpid()}\n")


class Killer(threading.Thread):
    """Kill a random worker at random times, at most `kills` times within `seconds`."""

    def __init__(self, seed: int, kills: int, seconds: float):
        super().__init__(daemon=True)
        self.random, self.times = random.Random(seed), []
        self.kills, self.mean, self.stopping = kills, seconds / (kills + 1), threading.Event()

    def run(self):
        while not active_attempts() and not self.stopping.wait(0.05):
            pass
        self.stopping.wait(self.mean)
        while len(self.times) < self.kills and not self.stopping.is_set():
            attempts = active_attempts()
            workers = running_workers(attempts[-1]) if attempts else {}
            if workers:
                pid = self.random.choice(sorted(each["pid"] for each in workers.values()))
                os.kill(pid, signal.SIGKILL)
                self.times.append(time.time())
            self.stopping.wait(self.mean * self.random.uniform(0.6, 1.4))


def network(width):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(COLUMNS, width), torch.nn.ReLU()]
    for _ in range(3):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Dropout(0.1), torch.nn.Linear(width, 1))


def fit(options, recovery, killer=None, width=1024):
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    steps = folder / "steps"
    random_numbers = np.random.default_rng(0)
    x = random_numbers.standard_normal((ROWS, COLUMNS), dtype="float32")
    estimator = Estimator.from_torch(
        model=network(width),
        optimizer=Adam(1e-4),
        loss=torch.nn.MSELoss(),
        backend=options.backend,
        workers_per_node=options.workers,
        model_dir=str(folder / "model"),
        log_to_driver=False,
    )
    if killer is not None:
        killer.start()
    estimator.fit(
        (x, x[:, :1]),
        epochs=10_000,
        max_steps=options.steps,
        batch_size=BATCH,
        seed=1,
        callbacks=[Steps(str(steps))],
        recovery=recovery,
        max_failures=1000,
    )
    ended = time.time()
    if killer is not None:
        killer.stopping.set()
    lines = [line.split() for line in steps.read_text().splitlines()]
    moments = [(float(moment), int(step)) for moment, step, _ in lines]
    state = torch.cat([each.flatten() for each in estimator.get_model().state_dict().values()])
    return moments, ended, state


def median_step(moments):
    return statistics.median(b[0] - a[0] for a, b in itertools.pairwise(moments))


def newest_step(moments):
    return max(step for _, step in moments)


def cost(options):
    options.steps = 400
    for width in (64, 256):
        medians = {"in_place": [], "restart": []}
        for number in range(5):
            for name in sorted(medians, reverse=number % 2 == 1):
                moments = fit(options, name, width=width)[0]
                medians[name].append(1000 * median_step(moments[20:]))
        ratios = [a / b for a, b in zip(medians["in_place"], medians["restart"], strict=True)]
        print(
            f"width {width}: medians of a step, in place "
            f"{[round(each, 2) for each in medians['in_place']]} ms, without "
            f"{[round(each, 2) for each in medians['restart']]} ms, ratio "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
            flush=True,
        )


def report(name, moments, ended, state, killer, step_s, undisturbed):
    # a step that a restart repeats counts once, when it is made for the last time
    newest: dict[int, float] = {}
    for moment, step in moments:
        newest[step] = moment
    first = killer.times[0]
    done = sum(moment > first for moment in newest.values())
    best, frontier = 0, []
    for moment, step in moments:
        if step > best:
            best = step
            frontier.append(moment)
    # a step that had been begun may end after the kill, so the stall is the longest gap near it
    stalls = [
        max(b - a for a, b in itertools.pairwise(frontier) if b > kill and a < kill + NEAR_S)
        for kill in killer.times
    ]
    difference = float((state - undisturbed).abs().max())
    print(
        f"{name:10} kills {len(killer.times):2}  goodput {done * step_s / (ended - first):.3f}  "
        f"stalls: median {statistics.median(stalls):.2f} s, longest {max(stalls):.2f} s  "
        f"steps {newest_step(moments)}, made {len(moments)}  "
        f"largest difference {difference:.1e}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--backend", default="local")
    parser.add_argument("--ways", nargs="+", default=["in_place", "restart"])
    parser.add_argument("--cost", action="store_true")
    options = parser.parse_args()
    if options.cost:
        cost(options)
        return
    options.steps = 60
    moments, _, _ = fit(options, "restart")
    options.steps = max(60, int(options.seconds / median_step(moments[10:])))
    for number in range(options.rounds):
        moments, _, undisturbed = fit(options, "in_place")
        step_s = median_step(moments)
        print(f"undisturbed: {options.steps} steps, median {step_s * 1000:.2f} ms", flush=True)
        for name in options.ways:
            killer = Killer(number, options.kills, options.seconds)
            result = fit(options, name, killer)
            report(name, *result, killer, step_s, undisturbed)


if __name__ == "__main__":
    main()
