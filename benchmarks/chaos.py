"""Trainings whose processes are killed; the results must equal those of uninterrupted ones.

A network is trained on two executors (``local-cluster``), once undisturbed and then again and again
while a thread of the driver kills a random process with ``kill -9`` at random moments: a Python
worker, or an executor with all that it holds. Every training must end with the very weights of the
undisturbed one, and must leave neither processes nor files of its rows behind.

    python benchmarks/chaos.py [--of shuffle barrier] [--trials 20] [--kills 2] [--seed 0]
        [--json out.json]

``shuffle`` and ``barrier`` train by the parameter layer with its two transports, ``sharded`` and
``growing`` a model with a :class:`ShardedEmbedding` or a :class:`GrowingEmbedding` on workers that
go on from the newest checkpoint.

It prints one line per trial and a table of all; the exit status is 1 if any weight differs or
anything is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil

TRANSPORTS = ("shuffle", "barrier")
TABLES = ("sharded", "growing")
VICTIMS = ("Python worker", "executor")
ROWS, INPUTS, EPOCHS, BATCH = 512, 16, 3, 32
GROUP = 8
SPOOL = "bigdl-spool-"  # folders of rows
_AFTER_S = 30.0  # seconds that processes which were asked to end get for it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--of", nargs="+", choices=(*TRANSPORTS, *TABLES), default=TRANSPORTS)
    parser.add_argument("--trials", type=int, default=20, help="of all together")
    parser.add_argument("--kills", type=int, default=2, help="of a trial, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all trials there, too")
    options = parser.parse_args()
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with tempfile.TemporaryDirectory(prefix="bigdl-chaos-") as folder:
        with cluster(Path(folder)):
            trials = run(options)
        left = leftovers(before) + spools(Path(folder))
    report(trials, left)
    if options.json:
        options.json.write_text(json.dumps({"trials": trials, "left": left}, indent=1))
    return int(bool(left) or any(trial["differing"] for trial in trials))


# -- the cluster ----------------------------------------------------------------------------------


@contextlib.contextmanager
def cluster(folder: Path):
    """Start two single-core executors, separate JVMs that are restarted after a kill."""
    import pyspark

    from bigdl.orca import init_orca_context, stop_orca_context

    home = folder / "spark"  # executors write their logs below SPARK_HOME
    home.mkdir()
    for part in Path(pyspark.__file__).parent.iterdir():
        (home / part.name).symlink_to(part)
    (folder / "local").mkdir()
    os.environ["SPARK_HOME"] = str(home)
    conf = {
        "spark.master": "local-cluster[2,1,1024]",
        "spark.executor.memory": "1g",
        "spark.local.dir": str(folder / "local"),
        "spark.deploy.maxExecutorRetries": "-1",
    }
    init_orca_context("local", cores=2, memory="1g", conf=conf)
    try:
        yield
    finally:
        stop_orca_context()
        del os.environ["SPARK_HOME"]


def leftovers(before: set[int]) -> list[str]:
    """Return the started processes that still run."""
    started = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    _, alive = psutil.wait_procs(started, timeout=_AFTER_S)
    return [" ".join(child.cmdline())[:120] for child in alive]


def spools(folder: Path) -> list[str]:
    """Return the spool files in the executors' directories, which end with the application."""
    return [str(p) for p in (folder / "local").rglob(f"{SPOOL}*/*") if p.is_file()]


# -- trials ---------------------------------------------------------------------------------------


def run(options) -> list[dict]:
    """Run all trials with alternating transports and victims, killed at random times."""
    undisturbed, seconds = {}, {}
    for what in options.of:
        train(what)  # warms up
        started = time.perf_counter()
        undisturbed[what] = train(what)
        seconds[what] = time.perf_counter() - started
        print(f"{what}, undisturbed: {seconds[what]:.1f} s", flush=True)
    transports = [undisturbed[what] for what in TRANSPORTS if what in undisturbed]
    assert same(transports[0], transports[-1]) if transports else True, "the transports differ"
    generator, trials = random.Random(options.seed), []
    while len(trials) < options.trials:
        number = len(trials)
        kinds = len(options.of)
        what, victim = options.of[number % kinds], VICTIMS[number // kinds % 2]
        count = generator.randint(1, options.kills)
        moments = sorted(generator.uniform(0, seconds[what]) for _ in range(count))
        result = trial(what, victim, moments, generator.random(), undisturbed)
        # what else the machine does may have ended since, and nobody is killed after the end
        seconds[what] = min(seconds[what], result["seconds"])
        if result["killed"]:
            trials.append({**result, "undisturbed_s": seconds[what]})
            print(json.dumps(trials[-1]), flush=True)
    return trials


def trial(what, victim, moments, chance, undisturbed) -> dict:
    """Run one training whose processes are killed at some times."""
    killer = Killer(victim, moments, random.Random(chance))
    started = time.perf_counter()
    with killer:
        weights = train(what)
    seconds = time.perf_counter() - started
    expected = undisturbed[what]
    return {
        "what": what,
        "victim": victim,
        "killed": killer.killed,
        "seconds": seconds,
        "differing": sum(not np.array_equal(a, b) for a, b in zip(weights, expected, strict=True)),
    }


class Killer(threading.Thread):
    """Thread that kills random executor processes at some times after its start."""

    def __init__(self, victim: str, moments, generator: random.Random):
        super().__init__(daemon=True)
        self._victim, self._moments, self._generator = victim, moments, generator
        self._over = threading.Event()
        self.killed = 0

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self.join()

    def run(self):
        started = time.monotonic()
        for moment in self._moments:
            if self._over.wait(max(0.0, started + moment - time.monotonic())):
                return
            processes = victims(self._victim)
            if processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._generator.choice(processes).kill()
                    self.killed += 1


def victims(kind: str) -> list[psutil.Process]:
    """Return the child processes of a type, oldest first."""
    processes = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if is_executor(process) if kind == "executor" else is_worker(process):
                processes.append(process)
    return sorted(processes, key=lambda process: process.pid)


def is_executor(process) -> bool:
    return any("CoarseGrainedExecutorBackend" in part for part in process.cmdline())


def is_worker(process) -> bool:
    """Return True if a PySpark daemon has forked the process."""
    parent = process.parent()
    daemons = {"bigdl.orca.cluster.python_daemon", "bigdl.runtime.preloaded"}
    return parent is not None and all(daemons & set(p.cmdline()) for p in (process, parent))


# -- what is trained ------------------------------------------------------------------------------


def train(what: str) -> list[np.ndarray]:
    """Train a model and return its weights."""
    return train_tables(what) if what in TABLES else train_by_layer(what)


def train_by_layer(transport: str) -> list[np.ndarray]:
    import torch

    from bigdl.orca.learn.pytorch import Estimator

    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, INPUTS)).astype(np.float32)
    est = Estimator.from_torch(
        model=network, optimizer=adam, loss=torch.nn.MSELoss(), workers_per_node=1, backend="bigdl"
    )
    est.fit(
        (x, np.tanh(x.sum(axis=1))),
        epochs=EPOCHS,
        batch_size=BATCH,
        seed=1,
        transport=transport,
        group_size=GROUP,
        max_failures=20,
    )
    return [value.numpy() for value in est.get_model().state_dict().values()]


def train_tables(kind: str) -> list[np.ndarray]:
    import torch

    from bigdl.orca.learn.pytorch import Estimator
    from bigdl.orca.learn.trigger import SeveralIteration
    from bigdl.orca.torch import RowwiseAdagrad

    rng = np.random.default_rng(0)
    ids = np.minimum(rng.geometric(0.02, (ROWS, 2)), USERS - 1)
    labels = (ids.sum(1, keepdims=True) % 5).astype(np.float32)
    with tempfile.TemporaryDirectory(prefix="bigdl-chaos-models-") as folder:
        est = Estimator.from_torch(
            model=lambda config: clicks(kind),
            optimizer=lambda model, config: RowwiseAdagrad(model.parameters(), lr=0.1),
            loss=torch.nn.MSELoss(),
            workers_per_node=1,
            backend="spark",
            model_dir=folder,
        )
        trigger = SeveralIteration(GROUP)
        how = {"epochs": EPOCHS, "batch_size": BATCH, "seed": 1, "max_failures": 20}
        est.fit((ids, labels), checkpoint_trigger=trigger, **how)
        model = est.get_model()
        rows = [model.table.to_arrow(field=field) for field in range(2)]
        state = est.get_state_dict()["optimizers"][0]["state"]
    arrays = [np.stack(each[name].to_numpy(False)) for each in rows for name in each.column_names]
    sums = [value["sum"].numpy() for value in state.values()]
    return [*arrays, *sums, *(value.detach().numpy() for value in model.rest.parameters())]


USERS = 400


def clicks(kind: str):
    """Return a model of two categories with sharded embedding tables."""
    import torch

    from bigdl.orca.torch import GrowingEmbedding, ShardedEmbedding

    torch.manual_seed(0)

    class Clicks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = (
                ShardedEmbedding([USERS, USERS], 8)
                if kind == "sharded"
                else GrowingEmbedding(8, fields=2, admit_after=2, expire_after=10)
            )
            self.rest = torch.nn.Linear(16, 1)

        def forward(self, ids):
            return self.rest(self.table(ids).flatten(1))

    return Clicks()


def network(config):
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(INPUTS, 64),
        torch.nn.BatchNorm1d(64),
        torch.nn.Tanh(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(64, 1),
    )


def adam(model, config):
    import torch

    return torch.optim.Adam(model.parameters(), lr=0.01)


def same(one, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def report(trials: list[dict], left: list[str]) -> None:
    print(
        "\n| what | victim | trials | killed | equal to the last bit | seconds, median "
        "(undisturbed) |\n|---|---|---|---|---|---|"
    )
    for what in (*TRANSPORTS, *TABLES):
        for victim in VICTIMS:
            own = [t for t in trials if (t["what"], t["victim"]) == (what, victim)]
            if not own:
                continue
            killed = sum(t["killed"] for t in own)
            equal = sum(not t["differing"] for t in own)
            median = statistics.median(t["seconds"] for t in own)
            print(
                f"| {what} | {victim} | {len(own)} | {killed} | {equal} | {median:.1f} "
                f"({own[0]['undisturbed_s']:.1f}) |"
            )
    print(f"\nProcesses and files left: {len(left)}", *left, sep="\n")


if __name__ == "__main__":
    sys.exit(main())
