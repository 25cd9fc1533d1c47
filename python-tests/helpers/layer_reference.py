"""What the tests of the parameter layer compare with, one process that sums in order, and train."""

import os
import signal

import numpy as np
import psutil
import torch
from torch import nn

from bigdl.orca.data.feeds import as_feed
from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.engines.spark import SparkEngine
from bigdl.orca.parameter_layer.barrier import BarrierTransport
from bigdl.orca.parameter_layer.optimizers import groups_of
from bigdl.orca.parameter_layer.plan import LayerPlan, LayerStep
from bigdl.orca.parameter_layer.rank import Contribution, RankState
from bigdl.orca.parameter_layer.shuffle import ShuffleTransport

SHAPES = [(5, 3), (7,), (), (40, 11), (1,), (64,)]
SIZES = tuple(int(np.prod(s)) for s in SHAPES)


def parameters():
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def grouped(values):
    """Two groups, the second without decay."""
    return [{"params": values[:3]}, {"params": values[3:], "weight_decay": 0.0}]


def hyper_of(optimizer):
    return tuple(
        {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    )


class Given:
    """A replica whose gradient is a function of the rank and the step."""

    def __init__(self, rank, rows=1):
        self.rank, self.rows = rank, rows

    def compute(self, step, weights, buffers):
        if not self.rows:
            return Contribution()
        return Contribution(self.at(step.number, weights), float(self.rows), self.rows)

    def at(self, number, weights):
        noise = np.random.default_rng([self.rank, number]).standard_normal(len(weights))
        return (0.1 * weights + noise).astype(np.float32)


def whole(make, ranks, steps, rows=None, clip=None):
    """One process that sums in the order of the ranks; `rows` is a list or a function of a step."""
    values = parameters()
    optimizer = make(values)
    rows_of = rows if callable(rows) else (lambda number, same=rows or [1] * ranks: same)
    for number in range(steps):
        rows = rows_of(number)
        vector = np.concatenate([p.detach().numpy().reshape(-1) for p in values])
        total = None
        for rank in range(ranks):
            if rows[rank]:
                part = Given(rank).at(number, vector) * np.float32(rows[rank] / sum(rows))
                total = part if total is None else total + part
        start = 0
        for parameter in values:
            part = total[start : start + parameter.numel()]
            parameter.grad = torch.from_numpy(part.copy()).reshape(parameter.shape)
            start += parameter.numel()
        if clip:
            clip(values)
        optimizer.step()
    return np.concatenate([p.detach().numpy().reshape(-1) for p in values]), optimizer


ROWS = 22


def adam(values):
    return torch.optim.Adam(grouped(values), lr=0.01)


class OnRows(Given):
    """Says what it has seen of its rows."""

    def __init__(self, rank, shards):
        super().__init__(rank)
        found = shards["data"].arrays[0]  # both columns in one matrix
        self.seen = found[:, 0].tolist()

    def describe(self):
        return {"rows": len(self.seen)}

    def compute(self, step, weights, buffers):
        found = super().compute(step, weights, buffers)
        found.record = {"seen": self.seen, "step": step.number}
        return found


class KilledOnce(OnRows):
    """Kills its process, or the executor that it belongs to, at a step, the first time."""

    def __init__(self, rank, shards, folder, step, victim="python"):
        super().__init__(rank, shards)
        self.folder, self.step, self.victim = folder, step, victim

    def compute(self, step, weights, buffers):
        if self.rank == 1 and step.number == self.step:
            try:
                os.mkdir(os.path.join(self.folder, "killed"))
            except FileExistsError:
                pass
            else:
                os.kill(self._process(), signal.SIGKILL)
        return super().compute(step, weights, buffers)

    def _process(self):
        process = psutil.Process()
        while self.victim == "executor" and process.name() != "java":
            process = process.parent()
        return process.pid


def data():
    values = np.arange(ROWS, dtype=np.float32)
    return FeedGroup({"data": as_feed((values, values))})


def opened(transport, plan, program=OnRows, feed=None):
    carrier = {"barrier": BarrierTransport, "shuffle": ShuffleTransport}[transport]
    return carrier(SparkEngine(), plan, program, feed or data())


def states_of(plan):
    vector = plan.geometry.flatten([p.detach().numpy() for p in parameters()])
    return [
        RankState(vector[low:high].copy(), [{} for _ in plan.geometry.segments(n)])
        for n, (low, high) in enumerate(plan.geometry.bounds)
    ]


def plan_of(ranks, make=adam, **options):
    optimizer = make(parameters())
    return LayerPlan(SIZES, groups_of(optimizer), type(optimizer), ranks, **options)


def steps_of(first, last, make=adam):
    hyper = hyper_of(make(parameters()))
    return [LayerStep(0, number, hyper) for number in range(first, last)]


def trained(transport, ranks, group, steps, program=OnRows, feed=None, make=adam, **options):
    plan = plan_of(ranks, make, **options)
    with opened(transport, plan, program, feed) as layer:
        assert sum(known["rows"] for known in layer.rows()) == ROWS
        layer.start(states_of(plan))
        records = []
        for first in range(0, steps, group):
            records += layer.run(steps_of(first, min(first + group, steps), make))[0]
        states = layer.states()
    return np.concatenate([s.weights for s in states]), states, records, plan
