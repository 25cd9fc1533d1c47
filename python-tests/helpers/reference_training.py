"""What one ordinary process computes, written without the code under test.

Only the cut of the rows into batches is taken from the library: it says which rows form a batch.
"""

import copy

import numpy as np
import torch

from bigdl.runtime.shards.batches import BatchPlan, permutation


def rows_of(sizes, *, dtype="float64", classes=3, seed=0):
    """Made-up shards: `x` (n, 4), a number `y`, a class `c` (int32) and an id `i` (int64)."""
    rng = np.random.default_rng(seed)
    shards = []
    for n in sizes:
        x = rng.normal(size=(n, 4))
        shards.append(
            {
                "x": x.astype(dtype),
                "y": (np.sin(x.sum(1)) + x[:, 0]).astype(dtype),
                "c": rng.integers(0, classes, n, dtype=np.int32),
                "i": rng.integers(0, 10, n),
            }
        )
    return shards


def union_batches(shards, batch_size, seed, epoch, *, shuffle=True, drop_last=False):
    """The global batches of an epoch: all columns, over all shards."""
    sizes = [len(shard["x"]) for shard in shards]
    plan = BatchPlan(sizes, batch_size, drop_last)
    orders = [
        permutation(n, seed, epoch, rank) if shuffle else np.arange(n)
        for rank, n in enumerate(sizes)
    ]
    for step in range(plan.steps):
        pieces = []
        for rank, shard in enumerate(shards):
            start, stop, _ = plan.batch(step, rank)
            pieces.append({k: v[orders[rank][start:stop]] for k, v in shard.items()})
        yield {k: torch.from_numpy(np.concatenate([p[k] for p in pieces])) for k in shards[0]}


def train_alone(
    model,
    make_optimizer,
    step_loss,
    shards,
    *,
    epochs,
    batch_size,
    seed,
    shuffle=True,
    drop_last=False,
    make_scheduler=None,
    plateau=False,
):
    """Train a copy of `model` on the union batches with a plain loop.

    Parameters
    ----------
    make_optimizer : callable
        ``f(model)``.
    step_loss : callable
        ``f(model, batch)``, a number for a batch that is a dict of columns.

    Returns
    -------
    model, list of the epochs' mean losses
    """
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    means = []
    for epoch in range(epochs):
        total = rows = 0
        for batch in union_batches(
            shards, batch_size, seed, epoch, shuffle=shuffle, drop_last=drop_last
        ):
            optimizer.zero_grad()
            loss = step_loss(model, batch)
            loss.backward()
            optimizer.step()
            n = len(batch["x"])
            total, rows = total + loss.item() * n, rows + n
        means.append(total / rows)
        if scheduler is not None:
            scheduler.step(*([means[-1]] if plateau else []))
    return model, means


def largest_difference(a: dict, b: dict) -> float:
    """Over all entries of two state dicts."""
    assert a.keys() == b.keys()
    gaps = [np.abs(np.asarray(a[k], float) - np.asarray(b[k], float)) for k in a]
    return float(np.concatenate([gap.ravel() for gap in gaps]).max())  # a nan stays a nan
