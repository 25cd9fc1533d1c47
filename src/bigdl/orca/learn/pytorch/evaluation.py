"""Evaluation of a shard: loss and metrics, merged exactly over the workers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.forward import BatchColumns, forward_for
from bigdl.orca.learn.pytorch.parts import ModelParts, load_into
from bigdl.orca.learn.pytorch.runner import Runner, WorkerBatches
from bigdl.training.batches import TensorShard
from bigdl.training.device import device_of, move, precision_of, to_cpu, to_device
from bigdl.training.loading import open_batches
from bigdl.training.state import dumps, loads, seed_everything

if TYPE_CHECKING:
    from bigdl.orca.learn.pytorch.forward import ForwardPass
    from bigdl.runtime.collectives.base import GradientSync
    from bigdl.runtime.worker import Worker
    from bigdl.training.loading import LoaderBatches

__all__ = ["EvaluateProgram", "EvaluationSettings", "evaluate_shard"]


@dataclass(frozen=True)
class EvaluationSettings:
    """Arguments of ``evaluate``, as the workers get them.

    Attributes
    ----------
    batch_size : int
        Rows of a batch over all workers together.
    num_steps : int, optional
        Batches of each worker at most.
    per_worker : bool
        True if the figures of each worker are wanted too.
    precision : str
        ``"fp32"`` or ``"bf16"``.
    weighted : bool
        True if the last label column holds the weights of the rows.
    """

    batch_size: int
    metrics: Sequence[Any] = ()
    num_steps: int | None = None
    per_worker: bool = False
    precision: str = "fp32"
    weighted: bool = False


@dataclass
class _Tally:
    """Sums of one worker."""

    rows: int = 0
    loss: float = 0.0
    weight: float = 0.0  # what the losses were divided by
    logged: dict[str, float] = field(default_factory=dict)
    batches: int = 0
    forward_s: float = 0.0
    total_s: float = 0.0


def evaluate_shard(
    runner: Runner,
    forward_pass: ForwardPass,
    data: TensorShard | LoaderBatches,
    sync: GradientSync,
    settings: EvaluationSettings,
) -> dict:
    """Evaluate the rows of all workers; every rank returns the same.

    Returns
    -------
    dict
        ``figures``: ``num_samples``, ``val_loss`` (with a loss), what a LightningModule logged, and
        each metric under its name. ``profile``: seconds. ``workers``: the figures of each worker's
        own rows, when asked for.
    """
    import torch

    from bigdl.orca.learn.metrics import Metric

    measures = Metric.convert_metrics_dict(list(settings.metrics), backend="pytorch")
    started = time.perf_counter()
    training = forward_pass.model.training
    forward_pass.model.eval()
    with torch.no_grad():
        tally = _tally(runner, forward_pass, data, settings, sync.world_size, measures)
    forward_pass.model.train(training)
    tally.total_s = time.perf_counter() - started

    states = sync.gather(dumps({name: m.state() for name, m in measures.items()}))
    tallies = sync.gather(json.dumps(asdict(tally)).encode())
    evaluation: dict[str, Any] | None = None
    if sync.rank == 0:
        with_loss = forward_pass.criterion is not None
        gathered = zip(cast("list[bytes]", tallies), cast("list[bytes]", states), strict=True)
        workers = [(_Tally(**json.loads(t)), state) for t, state in gathered]
        evaluation = {
            "figures": _figures(workers, measures, with_loss),
            "profile": _profile([t for t, _ in workers]),
        }
        if settings.per_worker:
            evaluation["workers"] = [_figures([w], measures, with_loss) for w in workers]
    found = sync.broadcast(None if evaluation is None else json.dumps(evaluation).encode())
    return json.loads(cast("bytes", found))


def _tally(runner, forward_pass, data, settings, world_size, measures) -> _Tally:
    tally = _Tally()
    local = max(1, settings.batch_size // world_size)
    runner.num_steps = -(-data.rows // local)
    if settings.num_steps is not None:
        runner.num_steps = min(runner.num_steps, settings.num_steps)
    precision = precision_of(settings.precision, runner.device)
    order = data.in_order(local)
    for index, start in enumerate(range(0, data.rows, local)):
        if settings.num_steps is not None and index >= settings.num_steps:
            break
        stop = min(start + local, data.rows)
        runner.batch_idx = index
        runner.batch = to_device(data.batch(start, stop, order), runner.device)
        runner.output = runner.target = runner.loss = None
        runner.call("before_val_iter")
        weights = forward_pass.weights(runner.batch) if measures else None
        started = time.perf_counter()
        with precision():
            _forward(runner, forward_pass, index, bool(measures))
        tally.forward_s += time.perf_counter() - started
        output, target, loss = runner.output, runner.target, runner.loss
        tally.batches += 1
        tally.rows += stop - start
        if loss is not None:
            weight = forward_pass.denominator(output, target, stop - start)
            if weight:  # a batch of ignored labels has a loss of nan
                tally.loss += float(loss) if forward_pass.sums else float(loss) * weight
                tally.weight += weight
        for name, value in forward_pass.logged().items():
            tally.logged[name] = tally.logged.get(name, 0.0) + value * (stop - start)
        if measures and output is None:
            raise UsageError("metrics= needs a model whose forward returns predictions")
        for measure in measures.values():
            weighted = () if weights is None else (to_cpu(weights),)
            measure(to_cpu(output), to_cpu(target), *weighted)
        runner.call("after_val_iter")
    return tally


def _forward(runner, forward_pass, index, need_output):
    runner.forward_by(lambda: forward_pass.evaluate(runner.batch, index, need_output=need_output))
    if runner.main is None:
        runner.forward()
    else:
        runner.main.on_val_forward(runner)


def _figures(workers, measures: Mapping[str, Any], with_loss: bool) -> dict:
    """The figures of some workers together; `measures` are only used to compute."""
    from bigdl.orca.learn.metrics import merge_states

    tallies = [tally for tally, _ in workers]
    states = [loads(state) for _, state in workers]
    rows, weight = sum(t.rows for t in tallies), sum(t.weight for t in tallies)
    out: dict[str, Any] = {"num_samples": rows}
    if with_loss or weight:
        out["val_loss"] = sum(t.loss for t in tallies) / weight if weight else None
    for name in dict.fromkeys(name for t in tallies for name in t.logged):
        out[name] = sum(t.logged.get(name, 0.0) for t in tallies) / rows
    for name, measure in measures.items():
        measure.load_state(merge_states([s[name] for s in states], measure.reductions))
        out[name] = _plain(measure.compute())
    return out


def _plain(value):
    """A figure as JSON; a tuple of tensors (a curve) differs from one tensor."""
    if isinstance(value, list | tuple):
        return {"items": [_plain(v) for v in value]}
    return value.tolist() if hasattr(value, "tolist") else value


def _profile(tallies) -> dict:
    return {
        "mean_validation_s": sum(t.total_s for t in tallies) / len(tallies),
        "mean_eval_fwd_s": sum(t.forward_s for t in tallies)
        / max(1, sum(t.batches for t in tallies)),
    }


@dataclass
class EvaluateProgram:
    """An evaluation, as shipped to the workers."""

    parts: ModelParts
    settings: EvaluationSettings
    feature_cols: Sequence[str]
    label_cols: Sequence[str]
    callbacks: Sequence[Any]
    sync: Any  # class of the GradientSync

    def __call__(self, worker: Worker) -> dict:
        seed_everything(0)
        built = self.parts.build(training=False)
        sync = self.sync(worker)
        sync.start()
        load_into(built.model, sync.broadcast(worker.state() if worker.rank == 0 else None))
        runner = Runner(worker, self.parts.config, self.callbacks)
        runner.device = device_of(worker, sync)
        move(built, runner.device)
        runner.model, runner.criterion = built.model, built.criterion
        data = open_batches(
            worker.shard,
            self.feature_cols,
            self.label_cols,
            worker,
            self.parts.config,
            self.settings.batch_size,
        )
        runner.val_loader = WorkerBatches(data, self.settings.batch_size // runner.size)
        forward_pass = forward_for(
            built.model,
            built.criterion,
            weighted=self.settings.weighted,
            columns=BatchColumns(self.feature_cols, self.label_cols),
        )
        runner.call("before_val_epoch")
        evaluation = evaluate_shard(runner, forward_pass, data, sync, self.settings)
        runner.epoch_stats = runner.metrics_stats = evaluation["figures"]
        runner.call("after_val_epoch")
        return evaluation
