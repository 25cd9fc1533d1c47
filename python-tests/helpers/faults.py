"""A small training and ways to disturb it, for the tests of failures."""

import os
import random
import signal
import time
from pathlib import Path

import psutil

from bigdl.orca.cluster.connect import active_spark
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import Callback

ROWS, BATCH, EPOCHS = 480, 40, 3
STEPS = EPOCHS * ROWS // BATCH
SOURCES = 4  # partitions of the input


def frame(spark, log: Path | None = None):
    """Rows of an array `x` and a number `y`; with `log`, every computed partition leaves a line."""

    def note(batches):
        if log is not None:
            from pyspark import TaskContext

            with open(log / f"part-{TaskContext.get().partitionId()}", "a") as file:
                file.write(f"{os.getpid()}\n")
        yield from batches

    rows = spark.range(0, ROWS, 1, SOURCES).selectExpr(
        "array(sin(id), cos(id), double(id % 7)) as x", "double(sin(id) + id % 3) as y"
    )
    return rows.mapInArrow(note, rows.schema)


def times_computed(log: Path) -> list[int]:
    """How often each partition of the input was computed."""
    return [len((log / f"part-{p}").read_text().splitlines()) for p in range(SOURCES)]


def model(config):
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 1)
    ).double()


def optimizer(model, config):
    import torch

    return torch.optim.Adam(model.parameters(), lr=0.01)


def estimator(**options):
    """Two workers, wherever they are."""
    import torch

    options = {"model": model, "optimizer": optimizer, "loss": torch.nn.MSELoss(), **options}
    options.setdefault("workers_per_node", 2 // active_spark().nodes)
    return Estimator.from_torch(config={"dtype": "float64"}, **options)


def fit(est, data, *callbacks, **options):
    """Train and return the weights."""
    options = {"epochs": EPOCHS, "batch_size": BATCH, "seed": 7, **options}
    est.fit(data, feature_cols="x", label_cols="y", callbacks=list(callbacks), **options)
    return weights(est)


def weights(est) -> list[list[float]]:
    return [p.flatten().tolist() for p in est.get_model().state_dict().values()]


def random_place(seed: int) -> tuple[int, int]:
    """A rank and a step."""
    draw = random.Random(seed)
    return draw.randrange(2), draw.randrange(1, STEPS)


class Once(Callback):
    """Does something in one worker after one step, and not again after a retry.

    Parameters
    ----------
    marker : Path
        Written before it happens; holds the pid and the time.
    rank, step : int
    times : int
        How often in all.
    """

    def __init__(self, marker: Path, rank: int, step: int, times: int = 1):
        self.marker, self.rank, self.step, self.times = marker, rank, step, times

    def after_train_iter(self, runner):
        if runner.rank != self.rank or runner.global_step != self.step:
            return
        done = self.marker.read_text().splitlines() if self.marker.exists() else []
        if len(done) < self.times:
            with open(self.marker, "a") as file:
                file.write(f"{os.getpid()} {time.time()}\n")
            self.act(runner)

    def act(self, runner):
        raise NotImplementedError


class Kill(Once):
    """The worker's Python process ends at once."""

    def act(self, runner):
        os.kill(os.getpid(), signal.SIGKILL)


class KillExecutor(Once):
    """The JVM of the worker's executor ends at once: worker -> daemon -> JVM."""

    def act(self, runner):
        psutil.Process().parent().parent().kill()
        time.sleep(60)


class Decommission(Once):
    """The worker's executor is told that it is about to go, and steps take their time from then."""

    def act(self, runner):
        psutil.Process().parent().parent().send_signal(signal.SIGPWR)

    def after_train_iter(self, runner):
        super().after_train_iter(runner)
        if runner.rank == self.rank and self.marker.exists():
            with open(f"{self.marker}-steps", "a") as file:
                file.write(f"{runner.global_step} {os.getpid()}\n")
            if int(self.marker.read_text().split()[0]) == os.getpid():
                time.sleep(0.5)

    def last_step(self) -> int:
        """The last step of the process that was told."""
        pid = self.marker.read_text().split()[0]
        steps = Path(f"{self.marker}-steps").read_text().splitlines()
        return max(int(line.split()[0]) for line in steps if line.split()[1] == pid)


class Attempts(Callback):
    """Leaves a line at the beginning of each attempt of rank 0: where it started."""

    def __init__(self, file: Path):
        self.file = file

    def before_run(self, runner):
        if runner.rank == 0:
            with open(self.file, "a") as file:
                file.write(f"{runner.global_step} {time.time()}\n")

    def starts(self) -> list[int]:
        return [int(line.split()[0]) for line in self.file.read_text().splitlines()]

    def times(self) -> list[float]:
        return [float(line.split()[1]) for line in self.file.read_text().splitlines()]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def spools(directory: Path) -> list[Path]:
    """Spool directories somewhere below `directory`."""
    return [p for p in Path(directory).rglob("bigdl-spool-*") if p.is_dir()]


def listening() -> set:
    """Addresses on which this process listens."""
    connections = psutil.Process().net_connections("tcp")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}
