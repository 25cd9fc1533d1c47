"""PyTorch fit with bit-identical results on any number of workers: ``fit(..., exact="bits")``.

Each worker has a block of the virtual shards of :mod:`bigdl.training.virtual_shards`. In a step it
computes the gradient of each shard's rows as a micro-batch, with one thread and with the shard's
seed and buffers. Gradients, losses and buffers are summed along one tree over all shards.
Therefore the number of workers only determines which worker computes a shard.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.forward import ForwardPass, counts_unevenly
from bigdl.orca.learn.pytorch.loop import (
    FitProgram,
    FitSettings,
    OptimizerStep,
    TorchFit,
    TorchRows,
    TorchStep,
)
from bigdl.orca.learn.pytorch.parts import BuiltParts, sparse_parameters
from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.shards.shard import LoaderShard
from bigdl.training.batches import Pass, VirtualSource, all_gather_json, plan_batches
from bigdl.training.fit import FitContext, exchange
from bigdl.training.in_place import (
    SUMS,
    StepGuard,
    flat_values,
    joined,
    shaped_values,
    sums_vector,
)
from bigdl.training.loss_form import ProbeResult, agreed
from bigdl.training.metrics import EpochSums, LossRule
from bigdl.training.state import RunningState, mixed_seed, seed_everything
from bigdl.training.virtual_shards import TreeSum

if TYPE_CHECKING:
    pass

THREADS = 1
"""Threads per micro-batch: bits of kernels such as matrix products depend on the number."""


class VirtualRows(TorchRows):
    """Rows of one worker in virtual shards, divided into the micro-batches of an epoch.

    Attributes
    ----------
    shards : list of TensorShard
        This worker's virtual shards.
    first : int
        Index of the first of them among the shards of all workers.
    orders : list of ndarray or None
        Row order of each shard in the epoch, once it is open.
    """

    def __init__(self, context: FitContext, config: dict, criterion: Any):  # criterion: the loss
        worker, sync, settings = context.worker, context.sync, context.settings
        count = settings.virtual_shards
        sources: dict[str, VirtualSource] = {}
        for name, shard in worker.shards.items():
            if isinstance(shard, LoaderShard):
                raise UsageError(
                    'exact="bits" supports arrays, DataFrames, XShards and files, but not a '
                    "DataLoader or Dataset; pass one of these, or remove exact",
                    code="data-type",
                    argument="exact",
                )
            source = settings.open_batches(shard, worker, config)
            of_ranks = [
                settings.open_batches(each[name], worker, config) for each in worker.shards_of_ranks
            ]
            sources[name] = VirtualSource(source.virtual_shards(count, sync, of_ranks))
        self.data, self.validation = sources["data"], sources.get("validation")
        self.shards = self.data.shards
        self.first = worker.rank * len(self.shards)
        workers, self.types = exchange(
            sync,
            {
                "shards": [each.facts(0) for each in self.shards],
                "types": self.data.types,
                "validation": 1 if self.validation is None else self.validation.rows,
                "uneven": counts_unevenly(criterion)
                and (criterion.weight is not None or self.data.has_label(criterion.ignore_index)),
            },
        )
        facts = [each for known in workers for each in known["shards"]]
        self.plan, context.state.layout = plan_batches(settings, facts)
        context.state.epoch_steps = self.plan.steps
        self.is_uneven = settings.weighted or any(each["uneven"] for each in workers)
        if self.validation is not None:
            self.validation.take_types(self.types, self.data)
        self._settings, self._state = settings, context.state
        self.orders: list[Any] = []

    def open_epoch(self) -> None:
        """Shuffle each virtual shard for the epoch."""
        settings, epoch = self._settings, self._state.position.epoch
        self.orders = [
            shard.order(Pass(settings.shuffle, settings.seed, epoch, self.first + number))
            for number, shard in enumerate(self.shards)
        ]

    def left(self) -> None:
        """Return None: resuming needs no row ids, since shards do not depend on the workers."""
        return None


class ShardBuffers(RunningState):
    """Buffers of a model, such as running means, with a copy per virtual shard of a worker.

    Parameters
    ----------
    model : torch.nn.Module
    sync : GradientSync
    shards : int
        Number of virtual shards of this worker.
    """

    def __init__(self, model: torch.nn.Module, sync: GradientSync, shards: int):
        self._shards = shards
        super().__init__(model, sync)

    def reset(self) -> None:
        self.put([value.clone() for value in self._merged])
        self.restart()

    def restart(self) -> None:
        """Set every shard's buffers to the model's buffers, which are equal on all ranks."""
        self._merged = self._of_model()
        self.rows = 0
        self.rows_of = [0] * self._shards
        self.values = [[each.clone() for each in self._merged] for _ in range(self._shards)]

    def _of_model(self) -> list[torch.Tensor]:
        return [buffer.clone() for buffer in self._model.buffers()]

    def local_values(self) -> list[torch.Tensor]:
        return []  # a checkpoint has them per virtual shard, see VirtualStep.rank_state

    def put(self, values: list[torch.Tensor]) -> None:
        for buffer, value in zip(self._model.buffers(), values, strict=True):
            buffer.copy_(value)

    @contextlib.contextmanager
    def of_shard(self, number: int) -> Iterator[None]:
        """Temporarily load a shard's buffers into the model; store their new values on exit."""
        if not self._merged:
            yield
            return
        self.put(self.values[number])
        yield
        self.values[number] = self._of_model()

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        self.put(self._merge())
        yield  # the next micro-batch sets its shard's buffers

    def _merge(self) -> list[torch.Tensor]:
        """Merge buffers over all shards: the row-weighted mean, or the maximum of integers."""
        sync, merged = self._sync, list(self._merged)
        if not merged:
            return merged
        changed = [
            float(any(not torch.equal(values[i], start) for values in self.values))
            for i, start in enumerate(merged)
        ]
        workers = sync.all_gather([float(sum(self.rows_of)), *changed])
        rows = sum(row[0] for row in workers)
        for i, start in enumerate(merged):
            if not rows or not any(row[1 + i] for row in workers):
                continue
            values = [each[i] for each in self.values]
            if not (start.is_floating_point() or start.is_complex()):
                wide = torch.uint8 if start.dtype == torch.bool else torch.int64
                largest = torch.stack([each.to(wide) for each in values]).amax(0)
                merged[i] = sync.all_reduce(largest, "max").to(start.dtype)
                continue
            total = TreeSum()
            for value, seen in zip(values, self.rows_of, strict=True):
                # ignore values of shards without rows, which may be nan
                total.add([value * (seen / rows) if seen else torch.zeros_like(value)])
            merged[i] = sync.all_reduce(total.take()[0].contiguous())
        return merged


class TreeStep(OptimizerStep):
    """Optimizer step from the gradients of all virtual shards, summed in a fixed tree order."""

    def __init__(
        self,
        sync: GradientSync,
        built: BuiltParts,
        forward_pass: ForwardPass,
        settings: FitSettings,
    ):
        super().__init__(sync, built, forward_pass, settings)
        self._tree = TreeSum()
        self._has_gradient: list[bool] = []

    def add(self, loss: torch.Tensor | None, counted: float) -> None:
        """Compute the gradient of one shard's micro-batch and add it to the tree.

        Parameters
        ----------
        loss : tensor or None
            None for a shard without rows.
        counted : float
            Divisor of the loss.
        """
        if loss is not None and counted:
            (loss if self._loss_weights.is_sum else loss * counted).backward()
        gradients = []
        parameters = self.parameters
        present = [parameter.grad is not None for parameter in parameters]
        self._has_gradient = [
            before or now
            for before, now in zip(self._has_gradient or present, present, strict=True)
        ]
        for parameter in parameters:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and gradient.layout != torch.strided:
                raise UsageError(
                    'exact="bits" needs dense gradients, but a parameter of shape '
                    f"{tuple(parameter.shape)} has a sparse one; use sparse=False",
                    code="model-unsupported",
                    argument="exact",
                )
            gradients.append(torch.zeros_like(parameter) if gradient is None else gradient)
        self._tree.add(gradients)

    def discard(self) -> None:
        """Discard the gradients of an unfinished update."""
        self.reset()
        self._tree, self._has_gradient = TreeSum(), []
        for parameter in self.parameters:
            parameter.grad = None

    def update(self, total: float) -> None:
        """All-reduce the gradients and update the weights; a collective call.

        Parameters
        ----------
        total : float
            Sum of the divisors of the losses of all shards.
        """
        parameters = self.parameters
        has_gradient, self._has_gradient = self._has_gradient, []
        for parameter, gradient, is_present in zip(
            parameters, self._tree.take(), has_gradient, strict=True
        ):
            parameter.grad = gradient if is_present else None
        self._sync.all_reduce_gradients(parameters, 1.0)
        if total and not self._loss_weights.is_sum:
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_div_(gradients, total)
        self._update(parameters, ())


@dataclass(eq=False)
class VirtualStep(TorchStep):
    """Update of a PyTorch model from the micro-batches of all virtual shards."""

    rows: VirtualRows
    running: ShardBuffers = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        context, built = self.context, self.built
        self._tree = TreeStep(context.sync, built, self.forward_pass, context.settings)
        self.running = ShardBuffers(built.model, context.sync, len(self.rows.shards))
        self.runner.bind(built, self.running)
        self._sums = [EpochSums() for _ in self.rows.shards]

    # -- an epoch ------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        super().begin_epoch()
        if not self.context.state.position.batch:
            self._sums = [EpochSums() for _ in self.rows.shards]

    def _epoch_metrics(self) -> dict | None:
        """Return the epoch's metrics, with losses summed in the order of the shards."""
        sync = self.context.sync
        metrics = super()._epoch_metrics()
        everyone = all_gather_json(sync, [each.to_json() for each in self._sums])
        exact = EpochSums.merged([EpochSums(**each) for known in everyone for each in known])
        if metrics is None or exact is None:
            return None
        return {**metrics, **{k: exact[k] for k in ("train_loss", "last_train_loss")}}

    # -- the state -----------------------------------------------------------------------------

    def rank_state(self) -> dict[str, Any]:
        running = self.running
        shards = zip(running.values, running.rows_of, self._sums, strict=True)
        return {
            **super().rank_state(),
            "shards": [
                {"buffers": values, "rows": rows, "sums": sums.to_json()}
                for values, rows, sums in shards
            ],
        }

    def put_all_ranks(self, states: Sequence[dict[str, Any]]) -> bool:
        shards = [each for state in states for each in state.get("shards", ())]
        first, count = self.rows.first, len(self.rows.shards)
        if len(shards) != self.context.settings.virtual_shards:
            raise UsageError(
                "The checkpoint was written in the middle of an epoch "
                + (f"with virtual_shards={len(shards)}" if shards else 'without exact="bits"')
                + f', but this fit has exact="bits" and virtual_shards='
                f"{self.context.settings.virtual_shards}; use the same arguments, or a checkpoint "
                "from the end of an epoch",
                code="checkpoint-mismatch",
                argument="virtual_shards",
            )
        local = shards[first : first + count]
        self.running.values = [each["buffers"] for each in local]
        self.running.rows_of = [each["rows"] for each in local]
        self.running.rows = sum(self.running.rows_of)
        self._sums = [EpochSums(**each["sums"]) for each in local]
        self.context.state.sums = EpochSums.total(self._sums)
        return True

    def use_guard(self, guard: StepGuard) -> None:
        self.guard = self._tree.guard = guard

    def local_vector(self) -> torch.Tensor:
        return self._vector_of(self._sums)

    def _vector_of(self, sums: Sequence[EpochSums]) -> torch.Tensor:
        shards = zip(sums, self.running.rows_of, self.running.values, strict=True)
        return torch.cat(
            [joined(sums_vector(each, rows), flat_values(values)) for each, rows, values in shards]
        )

    def put_local(self, vector: torch.Tensor) -> None:
        running = self.running
        like = list(self.built.model.buffers())
        for number, part in enumerate(vector.chunk(len(self.rows.shards))):
            sums, (rows,), values = part.tensor_split([SUMS, SUMS + 1])
            self._sums[number] = EpochSums(*sums.tolist())
            running.rows_of[number] = int(rows)
            running.values[number] = shaped_values(values, like)
        running.rows = sum(running.rows_of)
        self.context.state.sums = EpochSums.total(self._sums)
        self._tree.discard()

    def reset_local(self) -> None:
        self._sums = [EpochSums() for _ in self.rows.shards]
        self.context.state.sums = EpochSums()
        self.running.reset()
        self._tree.discard()

    # -- a batch -------------------------------------------------------------------------------

    def _run_batch(self) -> bool:
        runner, state, settings = self.runner, self.context.state, self.context.settings
        position, plan = state.position, self.rows.plan
        started, sync = time.perf_counter(), self.context.sync
        collective_s = sync.collective_s
        runner.batch_idx = position.batch
        runner.batch = runner.output = runner.target = runner.loss = None
        runner.call("before_train_iter")
        self._tree.begin()
        is_due = not self.forward_pass.loss_weights.is_known and (
            self.forward_pass.loss_weights.is_due()
        )
        losses, counts, sizes, results = [], [], [], []
        fetch_s = forward_s = backward_s = 0.0
        seed = mixed_seed(settings.seed, position.epoch, position.batch)
        for number, shard in enumerate(self.rows.shards):
            before = time.perf_counter()
            start, stop, batch_rows = plan.batch(position.batch, self.rows.first + number)
            rows, result = stop - start, ProbeResult()
            runner.batch = runner.output = runner.target = runner.loss = None
            if rows:
                runner.batch = shard.batch(start, stop, self.rows.orders[number])
            fetched = time.perf_counter()
            counted = 0.0
            if rows:
                seed_everything(seed, self.rows.first + number, cpu_only=True)
                with self.running.of_shard(number), self._precision():
                    self._forward(rows)
                batch = runner.batch, runner.output, runner.target, rows, runner.loss
                if is_due:
                    result = self.forward_pass.probe_loss(*batch)
                counted = float(self.forward_pass.denominator(*batch[1:]))
            forwarded = time.perf_counter()
            losses.append(runner.loss.item() if counted else 0.0)
            self._tree.add(runner.loss, counted)
            self.running.rows_of[number] += rows
            counts.append(counted)
            sizes.append(rows)
            results.append(result)
            fetch_s += fetched - before
            forward_s += forwarded - fetched
            backward_s += time.perf_counter() - forwarded
        if is_due:
            self._settle_reduction(results)
        total = float(batch_rows)
        if self.rows.is_uneven or self.forward_pass.loss_weights.is_uneven:
            everyone = self.context.sync.all_gather(counts)
            total = sum(count for of_rank in everyone for count in of_rank)
        before, before_s = time.perf_counter(), sync.collective_s
        rule = LossRule(settings.weighted, self.forward_pass.loss_weights.is_sum)
        parts = [
            rule.parts(loss, counted, total, rows, batch_rows)
            for loss, counted, rows in zip(losses, counts, sizes, strict=True)
        ]
        sums = [replace(each) for each in self._sums]
        for each, part, rows in zip(sums, parts, sizes, strict=True):
            each.add(*part, rows, step_s=0.0)
        if self.guard is not None:
            buffers = [value for values in self.running.values for value in values]
            self.guard.offer(self._vector_of(sums), buffers)
        self._tree.update(total)
        backward_s += time.perf_counter() - before - (sync.collective_s - before_s)
        position.batch += 1
        position.global_step += 1
        runner.updated = True
        self.running.rows += sum(sizes)
        if any(map(math.isnan, losses)):
            self.context.warn(self._nan_message(), "nan")
        self._sums = sums
        self.built.step_scheduler(runner)
        whole = sum(part[0] for part in parts), sum(part[1] for part in parts)
        state.sums.add(
            *whole,
            sum(sizes),
            fetch_s=fetch_s,
            forward_s=forward_s,
            backward_s=backward_s,
            exchange_s=sync.collective_s - collective_s,
            step_s=time.perf_counter() - started,
        )
        state.exchanges.add(sync.collective_s - collective_s)
        if self.guard is not None:
            self.guard.commit()
        if self.summary is not None:
            self.summary.add_batch(runner, whole, batch_rows, time.perf_counter() - started)
        runner.call("after_train_iter")
        self.context.worker.progress(
            **state.progress(runner.num_epochs, plan.steps, state.sums.mean())
        )
        return True

    def _settle_reduction(self, results: Sequence[ProbeResult]) -> None:
        """Set the loss reduction that was detected on all shards; a collective call."""
        weights = self.forward_pass.loss_weights
        codes = self.context.sync.all_gather([each.code for each in results])
        reason = next((each.reason for each in results if each.reason), "")
        weights.settle(agreed([code for of_rank in codes for code in of_rank]), reason)
        if reason or self.runner.rank == 0:
            self._warn_about_loss()


class VirtualFit(TorchFit):
    """A PyTorch fit with virtual shards on one worker."""

    rows_class = VirtualRows
    step_class = VirtualStep

    def _check(self, context: FitContext, built: BuiltParts) -> None:
        """Raise an error for a model, device or callback that ``exact="bits"`` does not support."""
        reason = ""
        if self.runner.device.type != "cpu":
            reason = 'a GPU (set CUDA_VISIBLE_DEVICES="" to train on CPUs)'
        elif built.tables is not None:
            reason = "a ShardedEmbedding"
        elif sparse_parameters(built.model):
            reason = "layers with sparse gradients (use sparse=False)"
        elif self.runner.main is not None:
            reason = "a MainCallback"
        if reason:
            raise UsageError(
                f'exact="bits" is not supported with {reason}; remove exact',
                code="argument-conflict",
                argument="exact",
            )
        context.sync.sum_in_tree()
        torch.set_num_threads(THREADS)


@dataclass
class VirtualFitProgram(FitProgram):
    """A fit with virtual shards, as shipped to the workers."""

    fit_class = VirtualFit
