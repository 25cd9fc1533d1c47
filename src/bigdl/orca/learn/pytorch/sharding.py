"""Models that are divided among the workers: their creation and their division.

A creator runs on rank 0 only; other ranks call it under the meta device, which allocates nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils._pytree import tree_map_only

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.forward import ForwardPass, is_lightning
from bigdl.orca.learn.pytorch.parts import BuiltParts, ModelParts, is_lazy, sparse_parameters
from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.worker import Worker
from bigdl.training.batches import BatchSource
from bigdl.training.embedding_tables.torch_model import tables_of
from bigdl.training.loss_form import tensors_in
from bigdl.training.sharded_model import (
    MemoryNeed,
    Mode,
    ShardedModel,
    check_equal_structure,
    check_optimizer,
    divide,
    free_memory,
    place_whole,
    release_gathered,
    state_per_weight,
)
from bigdl.training.state import dumps, loads, move, to_device

logger = logging.getLogger("bigdl.orca")


def build_on_rank_0(parts: ModelParts, worker: Worker) -> BuiltParts:
    """Build the model and loss in a worker, without an optimizer.

    Parameters
    ----------
    parts : ModelParts
    worker : Worker

    Returns
    -------
    BuiltParts
        On other ranks than 0, the weights of a creator's model are on the meta device.
    """
    built = parts.build(training=False, on_meta=worker.rank > 0)
    _check_model(built.model)
    return built


def _check_model(model: torch.nn.Module) -> None:
    """Raise an error for a model that cannot be divided."""
    reasons = {
        "a LightningModule": is_lightning(model),
        "lazy layers, whose sizes are unknown": is_lazy(model),
        "a ShardedEmbedding, which divides its rows itself": bool(tables_of(model)),
        "embeddings with sparse=True": bool(sparse_parameters(model)),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UsageError(
                f"shard= does not support {reason}; use another module, or remove shard",
                code="model-unsupported",
                argument="shard",
            )


def divide_model(
    built: BuiltParts, parts: ModelParts, sync: GradientSync, device: torch.device
) -> Mode | None:
    """Divide the model among the workers, as ``shard=`` says; a collective operation.

    The model and the loss are moved to the device.

    Returns
    -------
    {"full", "optimizer"} or None
        None if every worker has the whole model.
    """
    model = built.model
    if sync.world_size == 1:
        move(built, device)
        if parts.shard != "auto":
            built.sharding = ShardedModel(model)
        return None
    check_equal_structure(model, sync.all_gather)
    names = {id(p): name for name, p in model.named_parameters()}
    mesh, mode = sync.device_mesh(device), _mode(parts, model, sync, device)
    if mode is None:
        place_whole(model, device, mesh)
    else:
        divide(model, device, mesh, mode, is_equal=parts.is_instance)
        built.sharding = ShardedModel(model, sync.rank, sync.world_size)
    if isinstance(built.criterion, torch.nn.Module):
        place_whole(built.criterion, device, mesh)  # a creator may draw random numbers
    if isinstance(parts.optimizer, torch.optim.Optimizer):
        _follow(parts.optimizer, names, dict(model.named_parameters()))
    return mode


def _mode(
    parts: ModelParts, model: torch.nn.Module, sync: GradientSync, device: torch.device
) -> Mode | None:
    """Return how to divide a model; for "auto", the fastest way that fits into the memory."""
    if parts.shard != "auto":
        return cast("Mode", parts.shard)
    room = _smallest_room(sync, device)
    choices: tuple[Mode | None, ...] = (None, "optimizer")
    for mode in choices:
        if MemoryNeed.of(model, mode, sync.world_size).total < room:
            return mode
    return "full"


def _smallest_room(sync: GradientSync, device: torch.device) -> int:
    """Return the bytes that a worker can allocate on its device, the minimum over all workers."""
    free = free_memory(device, len(getattr(sync, "neighbours", ())) + 1)
    return int(min(row[0] for row in sync.all_gather([float(free)])))


def _follow(
    optimizer: torch.optim.Optimizer, names: dict[int, str], weights: dict[str, torch.nn.Parameter]
) -> None:
    """Let an optimizer of the model instance update the divided weights."""
    if optimizer.state:
        raise UsageError(
            "shard= does not support an optimizer instance that has made steps; pass a function "
            "optimizer(model, config), and a checkpoint to continue from",
            code="optimizer-unsupported",
            argument="optimizer",
        )
    for group in optimizer.param_groups:
        group["params"] = [weights[names[id(p)]] for p in group["params"]]


def check_fit(
    built: BuiltParts, mode: Mode | None, sync: GradientSync, worker: Worker, device: torch.device
) -> None:
    """Raise an error if the optimizer or the memory of a worker cannot train the divided model.

    Parameters
    ----------
    built : BuiltParts
    mode : {"full", "optimizer"} or None
    sync : GradientSync
    worker : Worker
    device : torch.device
    """
    check_optimizer(built.optimizer)
    if mode is None:
        return
    need = MemoryNeed.of(built.model, mode, sync.world_size, state_per_weight(built.optimizer))
    advice = "use more workers on other machines, or an optimizer with less state"
    if mode == "optimizer":
        advice = f'use shard="full"; otherwise {advice}'
    need.check(_smallest_room(sync, device), worker.host, advice)


# -- workers without rows ------------------------------------------------------------------------


class SpareRows:
    """Two rows for forward passes of a worker that has none, so that it joins the others' gathers.

    Parameters
    ----------
    source : BatchSource
        Rows of this worker.
    sync : GradientSync
    device : torch.device
    """

    def __init__(self, source: BatchSource, sync: GradientSync, device: torch.device):
        row = dumps(source.batch(0, 1)) if source.rows else b""
        everyone = sync.gather(row)
        chosen = None if everyone is None else next((each for each in everyone if each), b"")
        data = cast("bytes", sync.broadcast(chosen))
        self.batch: Any = None
        if data:  # two rows, which batch normalization needs
            two = tree_map_only(torch.Tensor, lambda t: torch.cat([t, t]), loads(data))
            self.batch = to_device(two, device)


@contextlib.contextmanager
def joining(
    forward_pass: ForwardPass, spare: SpareRows | None, sync: GradientSync, steps: int
) -> Iterator[None]:
    """Context manager for `steps` forward passes, which adds those that only other ranks make.

    The number of steps of all ranks is exchanged first, since the passes contain collectives.
    """
    if spare is None:
        yield
        return
    most = int(max(row[0] for row in sync.all_gather([float(steps)])))
    yield
    for index in range(steps, most):
        forward_pass.evaluate(spare.batch, index, need_output=True)
    release_gathered(forward_pass.model)


def zero_loss(output: object, loss: torch.Tensor | None) -> torch.Tensor:
    """Return a loss of 0 that gives every weight of the forward pass a gradient of 0.

    Parameters
    ----------
    output : object
        Output of the model.
    loss : tensor
        Its loss, which may be nan if no label counts.
    """
    if loss is not None and bool(torch.isfinite(loss)):
        return loss * 0.0
    tensors = [t for t in tensors_in(output) if t.requires_grad and t.ndim]
    return sum((t.sum() * 0.0 for t in tensors), start=torch.zeros(()))
