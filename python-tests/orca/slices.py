"""What the tests of the parameter layer compare with: one process that sums in order."""

import numpy as np
import torch
from torch import nn

from bigdl.orca.sync.parameter_layer.rank import Contribution

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
    """One process that sums in the order of the ranks."""
    values = parameters()
    optimizer = make(values)
    rows = rows or [1] * ranks
    for number in range(steps):
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
