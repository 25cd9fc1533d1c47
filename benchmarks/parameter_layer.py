"""Seconds of one step of synchronous SGD by the parameter layer, beside other ways to make it.

Two ranks train the same network on the same rows with the same optimizer (SGD with momentum):

* ``shuffle K``: the parameter layer's stateless tasks, groups of K steps;
* ``barrier K``: its barrier stages, groups of K steps;
* ``driver``: the driver broadcasts the weights, collects the gradients and makes the update;
* ``tree``: the same with ``treeReduce``;
* ``DDP``: torch's DistributedDataParallel in two processes without Spark: what is to be reached.

All sides are asked in turn for one repetition, so that what else the machine does meets all of
them. The time of a group includes the launch of its job; that of DDP has no launch.

    python benchmarks/parameter_layer.py [--sizes 100000 1000000] [--repeats 3] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np

RANKS, ROWS, INPUTS = 2, 32, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 5, 20])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of a repetition without groups")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there, too")
    options = parser.parse_args()
    from bigdl.orca import init_orca_context, stop_orca_context

    init_orca_context("local", cores=2, memory="2g")
    try:
        found = {size: measure(size, options) for size in options.sizes}
    finally:
        stop_orca_context()
    report(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def measure(size: int, options) -> dict[str, list[float]]:
    """Seconds per step of every side, in all repetitions."""
    width = max(1, (size - 1) // (INPUTS + 2))
    sides = {f"shuffle {k}": layer("shuffle", width, k) for k in options.groups}
    sides |= {f"barrier {k}": layer("barrier", width, k) for k in options.groups if k > 1}
    sides["driver"] = by_driver(width, options.steps, tree=False)
    sides["tree"] = by_driver(width, options.steps, tree=True)
    sides["DDP"] = lambda: by_ddp(width, options.steps)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(options.repeats + 1):  # the first one warms up
        for name, side in sides.items():
            found = side()
            if repeat:
                seconds[name].append(found)
    return seconds


# -- the network ----------------------------------------------------------------------------------


def network(width: int):
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(INPUTS, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
    )


def rows(rank: int):
    import torch

    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ROWS, INPUTS, generator=generator), torch.randn(ROWS, 1, generator=generator)


def gradient(model, batch, vector: np.ndarray) -> np.ndarray:
    """The flat gradient at flat weights."""
    import torch

    torch.nn.utils.vector_to_parameters(torch.from_numpy(np.array(vector)), model.parameters())
    model.zero_grad()
    torch.nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy()


_kept: dict = {}  # of a Python worker: the network and its rows


def own(width: int, rank: int):
    if (width, rank) not in _kept:
        _kept[width, rank] = network(width), rows(rank)
    return _kept[width, rank]


# -- the sides ------------------------------------------------------------------------------------


class Replica:
    """The network in a rank of the parameter layer."""

    def __init__(self, rank, shards, width):
        self._model, self._batch = network(width), rows(rank)

    def describe(self):
        return {"rows": ROWS}

    def compute(self, step, weights, buffers):
        from bigdl.orca.sync.parameter_layer.rank import Contribution

        return Contribution(gradient(self._model, self._batch, weights), float(ROWS), ROWS)


def layer(transport: str, width: int, group: int):
    """A training by the parameter layer that is under way; calling it runs one group."""
    import functools

    import torch

    from bigdl.orca.cluster.spark import SparkCluster
    from bigdl.orca.data.feeds import as_feed
    from bigdl.orca.data.feeds.group import FeedGroup
    from bigdl.orca.engine.spark import SparkEngine
    from bigdl.orca.sync.parameter_layer.barrier import BarrierTransport
    from bigdl.orca.sync.parameter_layer.rank import LayerPlan, Step
    from bigdl.orca.sync.parameter_layer.shuffle import ShuffleTransport
    from bigdl.orca.sync.parameter_layer.state import RankState

    parameters = list(network(width).parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    hyper = ({k: v for k, v in optimizer.param_groups[0].items() if k != "params"},)
    sizes = tuple(p.numel() for p in parameters)
    plan = LayerPlan(sizes, (0,) * len(sizes), torch.optim.SGD, RANKS)
    feed = FeedGroup({"data": as_feed((np.zeros(RANKS), np.zeros(RANKS)))})
    program = functools.partial(Replica, width=width)
    if transport == "barrier":
        carrier = BarrierTransport(SparkEngine(), plan, program, feed)
    else:
        carrier = ShuffleTransport(SparkCluster.from_active(), plan, program, feed)
    carrier.rows()
    vector = plan.geometry.flatten([p.detach().numpy() for p in parameters])
    carrier.start(
        [
            RankState(vector[low:high].copy(), [{} for _ in plan.geometry.segments(rank)])
            for rank, (low, high) in enumerate(plan.geometry.bounds)
        ]
    )
    steps = [Step(0, number, hyper) for number in range(group)]

    def run() -> float:
        started = time.perf_counter()
        carrier.run(steps)
        return (time.perf_counter() - started) / group

    return run


def by_driver(width: int, steps: int, *, tree: bool):
    """Weights by broadcast, gradients to the driver, which makes the update."""
    import torch

    from bigdl.orca.cluster.spark import SparkCluster

    sc = SparkCluster.from_active().sc
    vector = torch.nn.utils.parameters_to_vector(network(width).parameters()).detach()
    optimizer = torch.optim.SGD([vector], lr=0.01, momentum=0.9)
    data = sc.parallelize(range(RANKS), RANKS)

    def step():
        shipped = sc.broadcast(vector.numpy())

        def work(rank, items):
            for _ in items:
                pass
            yield gradient(*own(width, rank), shipped.value)

        found = data.mapPartitionsWithIndex(work)
        total = found.treeReduce(np.add) if tree else np.add.reduce(found.collect())
        vector.grad = torch.from_numpy(total / RANKS)
        optimizer.step()
        shipped.destroy()

    def run() -> float:
        started = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - started) / steps

    return run


def by_ddp(width: int, steps: int) -> float:
    """Two processes without Spark."""
    import tempfile

    from bigdl.common.launch import launch

    with tempfile.TemporaryDirectory() as folder:
        return max(launch(train_ddp, RANKS, (width, steps, os.path.join(folder, "meet"))))


def train_ddp(rank: int, width: int, steps: int, place: str) -> float:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=RANKS)
    model = torch.nn.parallel.DistributedDataParallel(network(width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, targets = rows(rank)
    for number in range(steps + 3):
        if number == 3:
            dist.barrier()
            started = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    dist.barrier()
    seconds = (time.perf_counter() - started) / steps
    dist.destroy_process_group()
    return seconds


def report(found: dict[int, dict[str, list[float]]]) -> None:
    print("| parameters | side | ms per step, median (range) | driver to side |\n|---|---|---|---|")
    for size, sides in found.items():
        baseline = statistics.median(sides["driver"])
        for name, times in sides.items():
            median = statistics.median(times)
            spread = f"{median * 1e3:.1f} ({min(times) * 1e3:.1f}–{max(times) * 1e3:.1f})"
            print(f"| {size / 1e6:g} M | {name} | {spread} | {baseline / median:.2f} |")


if __name__ == "__main__":
    main()
