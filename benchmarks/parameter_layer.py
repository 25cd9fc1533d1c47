"""Seconds per step of synchronous SGD with the parameter layer and with alternatives.

``steps``: two ranks train the same network on the same rows with the same optimizer (SGD with
momentum):

* ``shuffle K``: the parameter layer's stateless tasks, groups of K steps;
* ``barrier K``: its barrier stages, groups of K steps;
* ``driver``: the driver broadcasts the weights, collects the gradients and makes the update;
* ``tree``: the same with ``treeReduce``;
* ``DDP``: torch's DistributedDataParallel in two processes without Spark: what is to be reached;
* ``local``: the same with the GradientSync of ``backend="local"``, ``"spark"`` and ``"ray"``.

A second table shows what a step costs inside a group, which is what longer groups add, and a third
how much goes through the driver.

``groups``: a small network, so that a step is nothing but scheduling, by groups of more and more
steps, compared with the best of all that make a job of every step.

``cnn``: ResNet-18 with 2 and 4 ranks: what is not computing, as a fraction of computing.

``tables``: an embedding of a million rows of 32 under an Estimator, of which a batch reads a
thousand: with ``sparse=True``, so that rows travel alone, and as a weight like any other.

``compression``: what rounded gradients and weights do to a training, no time: the loss and the
accuracy on held-back rows of scikit-learn's digits after some epochs, by every ``compression=``,
and with "int8" without what rounding took being added to the next gradient.

All implementations of a part run in turn, one repeat at a time, so that what else the machine does
meets all of them. The time of a group includes the launch of its job; that of DDP has no launch.
The JVM compiles its code during the first hundreds of steps, which take up to twice as long; so
steps of a small network come before all that is measured, for as long as ``--warm-up`` says.

    python benchmarks/parameter_layer.py [--quick] [--parts steps groups ...] [--json out.json]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import secrets
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

PARTS = ("steps", "groups", "cnn", "tables", "compression")
RANKS, ROWS, INPUTS = 2, 32, 64
STEP_GROUPS = {"shuffle": (1, 10), "barrier": (1, 10, 50)}  # sizes of groups in `steps`
CNN_ROWS, CNN_SIDE, CNN_CLASSES = 8, 64, 10
CNN_GROUPS = ("shuffle", 1), ("shuffle", 10), ("barrier", 4), ("barrier", 50)
TABLE, WIDTH, READ = 1_000_000, 32, 1024  # rows, numbers in each, ids in a batch
TABLE_GROUP = 50  # steps of a group, by barrier: by shuffle all weights travel in every step
FORGETFUL = "int8, forgetting"  # what rounding took
COMPRESSIONS = ("fp32", "fp16", "bf16", "int8", FORGETFUL)
DIGITS, DIGITS_EPOCHS = 1347, 20  # rows to learn from, of 1797
SMALL = 10_000  # parameters of the network of `groups`, and of steps that only warm up
SHM, ROOM = Path("/dev/shm"), 4 << 30  # a file system in memory, and what should be free of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions; 4 minutes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000, 5_000_000])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 5, 10, 20, 50])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], help="of `cnn`")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of a repetition without groups")
    parser.add_argument("--warm-up", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="also write all results to this file"
    )
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.groups = [100_000, 5_000_000], [1, 10, 50]
        options.repeats, options.steps, options.warm_up = 2, 5, 10.0
    report: dict[str, dict] = {}
    if {"steps", "groups"} & set(options.parts):
        with context(RANKS):
            warm_up(RANKS, options)
            if "steps" in options.parts:
                report["steps"] = {size: steps(size, options) for size in options.sizes}
            if "groups" in options.parts:
                report["groups"] = groups(options)
    if "cnn" in options.parts:
        report["cnn"] = {}
        for ranks in options.workers:
            with context(ranks):
                warm_up(ranks, options)
                report["cnn"][ranks] = cnn(ranks, options)
    if "tables" in options.parts:
        with context(RANKS):
            report["tables"] = tables(options)
    if "compression" in options.parts:
        with context(RANKS):
            report["compression"] = compression(options)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    for part, metrics in report.items():
        REPORTS[part](metrics)


@contextlib.contextmanager
def context(cores: int):
    """Start a local Spark with the settings recommended for the parameter layer."""
    from bigdl.orca import init_orca_context, stop_orca_context

    conf = {"spark.shuffle.compress": "false"}
    with contextlib.suppress(OSError):
        free = os.statvfs(SHM)
        if free.f_bavail * free.f_frsize > ROOM:
            conf["spark.local.dir"] = str(SHM)
    init_orca_context("local", cores=cores, memory="3g", conf=conf)
    try:
        yield
    finally:
        stop_orca_context()


def warm_up(ranks: int, options) -> None:
    """Let the JVM compile the code that all implementations use."""
    width = SMALL // (INPUTS + 2)
    make = functools.partial(Dense, width)
    sides: list = [layer(transport, make, 10, ranks) for transport in ("shuffle", "barrier")]
    sides += baselines(width, options.steps).values()
    end = time.monotonic() + options.warm_up
    while time.monotonic() < end:
        for side in sides:
            side()


def steps(size: int, options) -> dict:
    """Return seconds per step of every implementation, and bytes through the driver."""
    width = max(1, (size - 1) // (INPUTS + 2))
    sides = {
        f"{transport} {k}": layer(transport, functools.partial(Dense, width), k)
        for transport, groups in STEP_GROUPS.items()
        for k in groups
    }
    sides |= baselines(width, options.steps)
    plain = {"DDP": train_ddp, "local": train_local}
    plain = {
        name: functools.partial(in_processes, each, width, options.steps)
        for name, each in plain.items()
    }
    seconds = measured({**sides, **plain}, options.repeats)
    return {"seconds": seconds, "driver_bytes": {n: side.traffic() for n, side in sides.items()}}


def groups(options) -> dict[str, list[float]]:
    """Return seconds per step for several group sizes."""
    width = SMALL // (INPUTS + 2)
    sides = {
        f"{transport} {k}": layer(transport, functools.partial(Dense, width), k)
        for k in options.groups
        for transport in ("shuffle", "barrier")
    }
    return measured(sides | baselines(width, options.steps), options.repeats)


def cnn(ranks: int, options) -> dict[str, list[list[float]]]:
    """Return computing seconds and total seconds per step of both transports."""
    sides = {
        f"{transport} {k}": layer(transport, Convolutional, k, ranks, phases=True)
        for transport, k in CNN_GROUPS
    }
    return measured(sides, options.repeats)


def tables(options) -> dict[str, list[dict]]:
    """Return metrics of an epoch: seconds per step, and bytes of gradients."""
    sides = {"barrier, rows": table_fit(True), "barrier, whole": table_fit(False)}
    return measured(sides, options.repeats)


def table_fit(is_sparse: bool) -> Callable[[], dict]:
    """Return a function that trains an epoch with a large embedding table and returns metrics."""
    import torch

    from bigdl.orca.learn.pytorch import Estimator

    def model(config):
        table = torch.nn.Embedding(TABLE, WIDTH, sparse=is_sparse)
        return torch.nn.Sequential(table, torch.nn.Flatten(), torch.nn.Linear(WIDTH, 1))

    estimator = Estimator.from_torch(
        model=model,
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        backend="bigdl",
        workers_per_node=RANKS,
    )
    ids = np.random.default_rng(0).integers(0, TABLE, (READ * TABLE_GROUP, 1))
    rows = ids, (ids % 2).astype("float32")

    def epoch() -> dict:
        (metrics,) = estimator.fit(
            rows, batch_size=READ, transport="barrier", group_size=TABLE_GROUP, profile=True, seed=0
        )
        return {
            name: metrics["profile"][name] for name in ("step_s", "bytes_per_step", "compute_s")
        }

    return epoch


def compression(options) -> dict[str, list[tuple[float, float]]]:
    """Return loss and accuracy on held-out rows, for one seed per repeat."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    rows = pixels[order].astype("float32") / 16, labels[order].astype("int64")
    return {
        name: [digits_fit(name, rows, seed) for seed in range(options.repeats)]
        for name in COMPRESSIONS
    }


def digits_fit(name: str, rows: tuple, seed: int) -> tuple[float, float]:
    import torch

    from bigdl.orca.learn.metrics import Accuracy
    from bigdl.orca.learn.pytorch import Estimator
    from bigdl.orca.parameter_layer import messages

    def model(config):
        messages.CODECS["int8"].feedback = name != FORGETFUL
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        )

    estimator = Estimator.from_torch(
        model=model,
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
        loss=torch.nn.CrossEntropyLoss(),
        metrics=[Accuracy()],
        backend="bigdl",
        workers_per_node=RANKS,
    )
    learned, held = (
        tuple(each[part] for each in rows) for part in (slice(DIGITS), slice(DIGITS, None))
    )
    estimator.fit(
        learned,
        epochs=DIGITS_EPOCHS,
        batch_size=64,
        transport="barrier",
        group_size=100,
        compression=name.partition(",")[0],
        seed=seed,
    )
    metrics = estimator.evaluate(held, batch_size=len(held[1]))
    return float(metrics["val_loss"]), float(metrics["Accuracy"])


def measured(sides: dict, repeats: int) -> dict[str, list]:
    measurements: dict[str, list] = {name: [] for name in sides}
    for repeat in range(repeats + 1):  # the first one warms up
        for name, side in sides.items():
            value = side()
            if repeat:
                measurements[name].append(value)
    return measurements


# -- the networks ---------------------------------------------------------------------------------


class Dense:
    """Network with almost no computation, and the rows of a rank."""

    def __init__(self, width: int, rank: int = 0):
        import torch

        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(INPUTS, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
        )
        generator = torch.Generator().manual_seed(rank)
        self.batch = [torch.randn(ROWS, n, generator=generator) for n in (INPUTS, 1)]
        self.loss = torch.nn.functional.mse_loss


class Convolutional:
    """ResNet-18 (He et al. 2015) and some images."""

    def __init__(self, rank: int = 0):
        import torch

        from bigdl.nano.pytorch.vision.models import resnet18

        torch.manual_seed(0)
        trunk = resnet18()
        shape = (CNN_ROWS, 3, CNN_SIDE, CNN_SIDE)
        features = trunk(torch.zeros(shape)).flatten(1).shape[1]
        self.model = torch.nn.Sequential(
            trunk, torch.nn.Flatten(), torch.nn.Linear(features, CNN_CLASSES)
        )
        generator = torch.Generator().manual_seed(rank)
        labels = torch.randint(0, CNN_CLASSES, (CNN_ROWS,), generator=generator)
        self.batch = [torch.randn(shape, generator=generator), labels]
        self.loss = torch.nn.functional.cross_entropy


def gradient(network, vector: np.ndarray) -> np.ndarray:
    """Return the flat gradient at flat weights."""
    import torch

    model = network.model
    own = vector if vector.flags.writeable else vector.copy()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(own), model.parameters())
    model.zero_grad()
    network.loss(model(network.batch[0]), network.batch[1]).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy()


_kept: dict = {}  # of a Python worker: the network and its rows


def own(width: int, rank: int):
    if (width, rank) not in _kept:
        _kept[width, rank] = Dense(width, rank)
    return _kept[width, rank]


# -- the sides ------------------------------------------------------------------------------------


class Replica:
    """Network in a rank of the parameter layer."""

    def __init__(self, rank, shards, make):
        self._network = make(rank=rank)

    def describe(self):
        return {"rows": ROWS}

    def compute(self, step, weights, buffers):
        from bigdl.orca.parameter_layer.rank import Contribution

        return Contribution(gradient(self._network, weights), float(ROWS), ROWS)


class Side:
    """Running training; calling it makes some steps and returns the seconds per step.

    Parameters
    ----------
    make : callable
        Makes the steps; returns bytes that the driver has sent or been sent past Spark's results.
    steps : int
        How many it makes.
    prepare : callable
        Called before, and not measured.
    """

    def __init__(self, make, steps: int, prepare=lambda: None):
        self._make, self._steps, self._prepare = make, steps, prepare

    def __call__(self) -> float:
        self._prepare()
        started = time.perf_counter()
        self._make()
        return (time.perf_counter() - started) / self._steps

    def traffic(self) -> float:
        """Bytes per step through the driver."""
        from bigdl.orca.cluster.spark import SparkCluster

        sc, group = SparkCluster.from_active().sc, secrets.token_hex(8)
        sc.setJobGroup(group, "steps whose results are counted")
        others = self._make()
        sc.setLocalProperty("spark.jobGroup.id", None)
        tracker, store = sc.statusTracker(), sc._jsc.sc().statusStore()
        jobs = map(tracker.getJobInfo, tracker.getJobIdsForGroup(group))
        stages = [stage for job in jobs for stage in job.stageIds]
        results = sum(store.lastStageAttempt(stage).resultSize() for stage in stages)
        return (others + results) / self._steps


def layer(transport: str, make, group: int, ranks: int = RANKS, *, phases: bool = False):
    """Open a training with the parameter layer; `phases` also returns the computing time."""
    import torch

    from bigdl.orca.data.feeds import as_feed
    from bigdl.orca.data.feeds.group import FeedGroup
    from bigdl.orca.engines.spark import SparkEngine
    from bigdl.orca.parameter_layer.barrier import BarrierTransport
    from bigdl.orca.parameter_layer.plan import LayerPlan, LayerStep
    from bigdl.orca.parameter_layer.rank import RankState
    from bigdl.orca.parameter_layer.shuffle import ShuffleTransport

    parameters = list(make().model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    hyper = ({k: v for k, v in optimizer.param_groups[0].items() if k != "params"},)
    sizes = tuple(p.numel() for p in parameters)
    plan = LayerPlan(sizes, (0,) * len(sizes), torch.optim.SGD, ranks)
    feed = FeedGroup({"data": as_feed((np.zeros(ranks), np.zeros(ranks)))})
    program = functools.partial(Replica, make=make)
    carriers = {"barrier": BarrierTransport, "shuffle": ShuffleTransport}
    carrier = carriers[transport](SparkEngine(), plan, program, feed, threads=1)
    carrier.rows()
    sent = [0]
    if transport == "barrier":
        carrier._job = Counted(carrier._job, sent)
    vector = plan.geometry.flatten([p.detach().numpy() for p in parameters])
    carrier.start(
        [
            RankState(vector[low:high].copy(), [{} for _ in plan.geometry.segments(rank)])
            for rank, (low, high) in enumerate(plan.geometry.bounds)
        ]
    )
    steps = [LayerStep(0, number, hyper) for number in range(group)]

    def run() -> int:
        sent[0] = 0
        records[:] = carrier.run(steps)
        return sent[0]

    records: list = []
    # workers keep the network of one training only, and sides take turns
    side = Side(run, group, lambda: carrier.run(steps[:1]))
    if not phases:
        return side

    def with_phases() -> list[float]:
        seconds = side()
        computing = [source["compute_s"] for each in records[0] for source in each["sources"]]
        return [statistics.mean(computing), seconds]

    return with_phases


class Counted:
    """Job of an engine that counts the bytes to and from its workers."""

    def __init__(self, job, sent: list[int]):
        self._job, self._sent = job, sent

    def attempt(self, options, state=None):
        outputs = self._job.attempt(options, state)
        self._sent[0] += len(state or b"") + sum(map(len, outputs))
        return outputs


def baselines(width: int, steps: int) -> dict:
    return {
        "driver": by_driver(width, steps, tree=False),
        "tree": by_driver(width, steps, tree=True),
    }


def by_driver(width: int, steps: int, *, tree: bool):
    """Open a training with broadcast weights and a reduction of gradients on the driver."""
    import torch

    from bigdl.orca.cluster.spark import SparkCluster

    sc = SparkCluster.from_active().sc
    vector = torch.nn.utils.parameters_to_vector(Dense(width).model.parameters()).detach()
    optimizer = torch.optim.SGD([vector], lr=0.01, momentum=0.9)
    data = sc.parallelize(range(RANKS), RANKS)

    def step() -> int:
        shipped = sc.broadcast(vector.numpy())

        def work(rank, items):
            for _ in items:
                pass
            yield gradient(own(width, rank), shipped.value)

        partial_sums = data.mapPartitionsWithIndex(work)
        total = partial_sums.treeReduce(np.add) if tree else np.add.reduce(partial_sums.collect())
        vector.grad = torch.from_numpy(total / RANKS)
        optimizer.step()
        shipped.destroy()
        return vector.numpy().nbytes  # the tasks' results are known to Spark

    return Side(lambda: sum(step() for _ in range(steps)), steps)


def in_processes(train, width: int, steps: int) -> float:
    """Run a training in two processes without Spark."""
    import tempfile

    from bigdl.runtime.launch import launch

    with tempfile.TemporaryDirectory() as folder:
        rendezvous = os.path.join(folder, "meet")
        return max(launch(train_plain, RANKS, (train, width, steps, rendezvous)))


def train_plain(rank: int, train, width: int, steps: int, rendezvous: str) -> float:
    import torch
    import torch.distributed as dist

    from bigdl.common.memory import tune_allocator

    tune_allocator()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    network = Dense(width, rank)
    optimizer = torch.optim.SGD(network.model.parameters(), lr=0.01, momentum=0.9)
    backward = train(rank, network)
    for number in range(steps + 3):
        if number == 3:
            dist.barrier()
            started = time.perf_counter()
        optimizer.zero_grad()
        backward()
        optimizer.step()
    dist.barrier()
    seconds = (time.perf_counter() - started) / steps
    dist.destroy_process_group()
    return seconds


def train_ddp(rank: int, network: Dense):
    import torch

    model = torch.nn.parallel.DistributedDataParallel(network.model)

    def backward() -> None:
        network.loss(model(network.batch[0]), network.batch[1]).backward()

    return backward


def train_local(rank: int, network: Dense):
    from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
    from bigdl.runtime.worker import Worker

    sync = TorchDistributedSync(Worker(rank, RANKS))
    sync.start()
    parameters, share = list(network.model.parameters()), 1 / RANKS

    def backward() -> None:
        loss = network.loss(network.model(network.batch[0]), network.batch[1])
        with sync.overlap(parameters, share):
            loss.backward()
        sync.all_reduce_gradients(parameters, share)

    return backward


# -- reports --------------------------------------------------------------------------------------


def report_steps(measurements: dict[int, dict]) -> None:
    print(
        "| parameters | Implementation | ms per step, median (range) | driver to it |\n"
        "|---|---|---|---|"
    )
    for size, each in measurements.items():
        sides = each["seconds"]
        baseline = statistics.median(sides["driver"])
        for name, times in sides.items():
            ratio = baseline / statistics.median(times)
            print(f"| {size / 1e6:g} M | {name} | {spread(times)} | {ratio:.2f} |")
    print("\n| parameters | inside a group | ms per step, median | to DDP |\n|---|---|---|---|")
    for size, each in measurements.items():
        sides = each["seconds"]
        baseline = statistics.median(sides["DDP"])
        inside = {name: added(name, *groups[-2:], sides) for name, groups in STEP_GROUPS.items()}
        inside["local"] = statistics.median(sides["local"])
        for name, seconds in inside.items():
            ratio = seconds / baseline
            print(f"| {size / 1e6:g} M | {name} | {seconds * 1e3:.1f} | {ratio:.2f} |")
    print(
        "\n| Implementation | "
        + " | ".join(f"{size / 1e6:g} M parameters" for size in measurements),
        end=" |\n",
    )
    print("|---|" + "---|" * len(measurements))
    for name in next(iter(measurements.values()))["driver_bytes"]:
        sizes = [f"{each['driver_bytes'][name] / 1e3:.1f}" for each in measurements.values()]
        print(f"| kB per step through the driver, {name} | {' | '.join(sizes)} |")
    print()


def added(transport: str, short: int, long: int, sides: dict[str, list[float]]) -> float:
    """Return the seconds of an additional step in a group."""
    one, other = (statistics.median(sides[f"{transport} {k}"]) * k for k in (short, long))
    return (other - one) / (long - short)


def report_groups(sides: dict[str, list[float]]) -> None:
    singles = {name: times for name, times in sides.items() if name.split()[-1] in ("1", name)}
    best = min(singles, key=lambda name: statistics.median(singles[name]))
    baseline = statistics.median(sides[best])
    print(f"| Implementation | ms per step, median (range) | {best} to it |\n|---|---|---|")
    for name, times in sides.items():
        print(f"| {name} | {spread(times)} | {baseline / statistics.median(times):.2f} |")
    print()


def report_cnn(measurements: dict[int, dict[str, list[list[float]]]]) -> None:
    print(
        "| workers | Implementation | computing, ms | overhead, ms | overhead to computing |\n"
        "|---|---|---|---|---|"
    )
    for ranks, sides in measurements.items():
        for name, times in sides.items():
            computing = [own for own, _ in times]
            others = [whole - own for own, whole in times]
            ratio = statistics.median(o / c for o, c in zip(others, computing, strict=True))
            print(f"| {ranks} | {name} | {spread(computing)} | {spread(others)} | {ratio:.2f} |")
    print()


def report_tables(sides: dict[str, list[dict]]) -> None:
    print(
        "| Implementation | ms per step, median (range) | computing, ms | gradient MB per step |\n"
        "|---|---|---|---|"
    )
    for name, epochs in sides.items():
        computing = statistics.median(each["compute_s"] for each in epochs) * 1e3
        sent = statistics.median(each["bytes_per_step"] for each in epochs) / 1e6
        times = spread([each["step_s"] for each in epochs])
        print(f"| {name} | {times} | {computing:.1f} | {sent:.2f} |")
    print()


def report_compression(sides: dict[str, list[tuple[float, float]]]) -> None:
    print(
        "| compression | loss on held-back rows, mean (range) | accuracy, mean (range) |\n"
        "|---|---|---|"
    )
    for name, metrics in sides.items():
        columns = (
            f"{statistics.mean(each):.4f} ({min(each):.4f}–{max(each):.4f})"
            for each in zip(*metrics, strict=True)
        )
        print(f"| {name} | {' | '.join(columns)} |")
    print()


def spread(times: list[float]) -> str:
    median = statistics.median(times)
    return f"{median * 1e3:.1f} ({min(times) * 1e3:.1f}–{max(times) * 1e3:.1f})"


REPORTS = {
    "steps": report_steps,
    "groups": report_groups,
    "cnn": report_cnn,
    "tables": report_tables,
    "compression": report_compression,
}


if __name__ == "__main__":
    main()
