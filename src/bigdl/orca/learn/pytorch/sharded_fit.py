"""PyTorch fit of a model that is divided among the workers: ``from_torch(..., shard="full")``.

The hooks of the divided model gather weights and sum gradients during the passes, so every rank
makes a forward and a backward pass in each step, also without rows.
"""

from __future__ import annotations

from typing import Any

import torch

from bigdl.common.errors import UsageError
from bigdl.orca.learn.backends import BACKENDS
from bigdl.orca.learn.pytorch.forward import ForwardPass, kept_buffers
from bigdl.orca.learn.pytorch.loop import FitProgram, TorchFit, TorchRows, TorchStep
from bigdl.orca.learn.pytorch.parts import BuiltParts, ModelParts
from bigdl.orca.learn.pytorch.sharding import (
    SpareRows,
    build_on_rank_0,
    check_fit,
    divide_model,
    zero_loss,
)
from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
from bigdl.runtime.worker import Worker
from bigdl.training.fit import FitContext
from bigdl.training.sharded_model import MODES, Mode, is_divided
from bigdl.training.state import move


def check_shard(shard: str | None, backend: str, model_dir: str | None) -> str | None:
    """Check the argument ``shard=`` of ``from_torch`` and return it."""
    if shard is None:
        return None
    if shard not in MODES:
        raise UsageError(
            f'shard should be "optimizer", "full", "auto" or None, got {shard!r}',
            code="argument-value",
            argument="shard",
            allowed=list(MODES),
        )
    chosen = BACKENDS[backend]
    if chosen.has_parameter_layer or chosen.sync() is not TorchDistributedSync:
        advice = "its parameter layer divides the optimizer state always, so remove shard"
        if not chosen.has_parameter_layer:
            advice = "use backend='spark', 'ray' or 'local'"
        raise UsageError(
            f"shard={shard!r} is not supported with backend={backend!r}; {advice}",
            code="argument-conflict",
            argument="shard",
        )
    if model_dir is None:
        raise UsageError(
            f"shard={shard!r} needs model_dir= in Estimator.from_torch, a folder on storage that "
            "the driver and all workers share; workers write their rows of the weights to it",
            code="argument-missing",
            argument="model_dir",
        )
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8):
        raise UsageError(
            f"shard={shard!r} needs PyTorch 2.8 or later, this is {torch.__version__}; update it",
            code="version-unsupported",
            argument="shard",
        )
    return shard


def check_shard_fit(local_steps: int, recovery: str | None, virtual_shards: int) -> None:
    """Raise an error for arguments of ``fit`` that a divided model does not support.

    Parameters
    ----------
    local_steps : int
    recovery : str or None
    virtual_shards : int
        0 without ``exact="bits"``.
    """
    conflicts = {
        f"local_steps={local_steps}": local_steps > 1,
        'recovery="in_place"': recovery == "in_place",
        'exact="bits"': virtual_shards > 0,
    }
    for name, is_set in conflicts.items():
        if is_set:
            raise UsageError(
                f"{name} is not supported with shard= of Estimator.from_torch, since no worker has "
                "the whole model; remove one of them",
                code="argument-conflict",
                argument=name.partition("=")[0],
            )


class ShardedStep(TorchStep):
    """Update of a model that is divided among the workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_divided = is_divided(self.built.model)
        self._spare: SpareRows | None = None
        if self._is_divided:
            self._spare = SpareRows(self.rows.data, self.context.sync, self.runner.device)

    def _forward_without_rows(self) -> None:
        if self._spare is None:
            super()._forward_without_rows()
            return
        runner = self.runner
        with kept_buffers(self.built.model), self._precision():
            runner.batch = self._spare.batch
            self._forward(0)
        runner.batch = None

    def _loss_divisors(self, rows: int, batch_rows: int) -> tuple[float, float]:
        counted, total = super()._loss_divisors(rows, batch_rows)
        if self._is_divided and not counted:
            self.runner.loss = zero_loss(self.runner.output, self.runner.loss)
        return counted, total

    def _backward(self, counted: float, total: float) -> tuple[bool, bool]:
        result = super()._backward(counted, total)
        if self.runner.batch is None:
            self.runner.output = self.runner.target = self.runner.loss = None
        return result


class ShardedFit(TorchFit):
    """A PyTorch fit on one worker, which keeps some rows of each weight."""

    step_class = ShardedStep
    _mode: Mode | None = None

    def _build(self, worker: Worker, parts: ModelParts) -> BuiltParts:
        return build_on_rank_0(parts, worker)

    def _distribute(self, context: FitContext, parts: ModelParts) -> None:
        self._mode = divide_model(self.built, parts, context.sync, self.runner.device)

    def _check(self, context: FitContext, built: BuiltParts) -> None:
        main = self.runner.main
        if main is not None and main.owns_backward:
            raise UsageError(
                "shard= does not support a custom on_iter_backward, since gradients are summed "
                "during the backward pass; do not override on_iter_backward",
                code="argument-conflict",
                argument="shard",
            )

    def _configure(
        self, context: FitContext, parts: ModelParts, forward_pass: ForwardPass, rows: TorchRows
    ) -> None:
        super()._configure(context, parts, forward_pass, rows)
        if not is_divided(self.built.model):
            move(self.built, self.runner.device)  # the state of an optimizer instance
        if self.built.sharding is not None:
            worker: Any = context.worker
            check_fit(self.built, self._mode, context.sync, worker, self.runner.device)


class ShardedFitProgram(FitProgram):
    """Program of a fit whose model is divided among the workers."""

    fit_class = ShardedFit
    returns_blocks = True
