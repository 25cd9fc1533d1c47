"""Evaluation of a shard: loss and metrics, merged exactly over the workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.data import TensorShard
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.orca.learn.pytorch.state import dumps, loads, seed_everything
from bigdl.orca.learn.pytorch.steps import step_for

__all__ = ["EvaluateProgram", "evaluate_shard"]


def evaluate_shard(
    kind,
    data: TensorShard,
    metrics: Sequence[Any],
    sync,
    batch_size: int,
    *,
    num_steps: int | None = None,
    hook: Callable | None = None,
) -> dict:
    """Evaluate all workers' rows; every rank returns the same figures.

    Returns
    -------
    dict
        ``num_samples``, ``val_loss`` (with a loss), what a LightningModule logged, and each
        metric under its name, as float or list.
    """
    import torch

    from bigdl.orca.learn.metrics import Metric, merge_states

    measures = Metric.convert_metrics_dict(list(metrics), backend="pytorch") if metrics else {}
    local = max(1, batch_size // sync.world_size)
    sums: dict[str, float] = {}
    rows = loss_rows = 0
    total = 0.0
    training = kind.model.training
    kind.model.eval()
    with torch.no_grad():
        for index, start in enumerate(range(0, data.rows, local)):
            if num_steps is not None and index >= num_steps:
                break
            stop = min(start + local, data.rows)
            batch = data.batch(start, stop)
            if hook:
                hook("before_val_iter", batch, index)
            output, target, loss = kind.evaluate(batch, index)
            rows += stop - start
            if loss is not None:
                loss_rows += stop - start
                total += float(loss) if kind.sums else float(loss) * (stop - start)
            for name, value in kind.logged().items():
                sums[name] = sums.get(name, 0.0) + value * (stop - start)
            for measure in measures.values():
                if output is None:
                    raise UsageError("metrics= needs a model whose forward returns predictions")
                measure(output, target)
            if hook:
                hook("after_val_iter", batch, index, output, target, loss)
    kind.model.train(training)

    states = sync.gather(dumps({name: m.state() for name, m in measures.items()}))
    figures = sync.gather(json.dumps([rows, loss_rows, total, sums]).encode())
    result = None
    if sync.rank == 0:
        figures = [json.loads(f) for f in figures]
        states = [loads(s) for s in states]
        everything = sum(f[0] for f in figures)
        result = {"num_samples": everything}
        with_loss = sum(f[1] for f in figures)
        if kind.criterion is not None or with_loss:
            result["val_loss"] = sum(f[2] for f in figures) / with_loss if with_loss else None
        for name in dict.fromkeys(n for f in figures for n in f[3]):
            result[name] = sum(f[3].get(name, 0.0) for f in figures) / everything
        for name, measure in measures.items():
            measure.load_state(merge_states([s[name] for s in states], measure.reductions))
            result[name] = _plain(measure.compute())
    return json.loads(sync.broadcast(None if result is None else json.dumps(result).encode()))


def _plain(value):
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value.tolist() if hasattr(value, "tolist") else value


@dataclass
class EvaluateProgram:
    """An evaluation, as shipped to the workers."""

    parts: ModelParts
    metrics: Sequence[Any]
    feature_cols: Sequence[str]
    label_cols: Sequence[str]
    batch_size: int
    num_steps: int | None
    sync: Any  # class of the GradientSync

    def __call__(self, worker):
        seed_everything(0)
        built = self.parts.build(training=False)
        sync = self.sync(worker)
        sync.start()
        blob = sync.broadcast(worker.state() if worker.rank == 0 else None)
        if blob is not None:
            built.model.load_state_dict(loads(blob))
        data = TensorShard(worker.shard, self.feature_cols, self.label_cols)
        return evaluate_shard(
            step_for(built.model, built.criterion),
            data,
            self.metrics,
            sync,
            self.batch_size,
            num_steps=self.num_steps,
        )
