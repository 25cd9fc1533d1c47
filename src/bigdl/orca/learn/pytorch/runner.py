"""The worker's part of a fit or an evaluation, as callbacks see it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.callbacks.base import MainCallback, call_old_hooks, has_old_hooks
from bigdl.training.checkpoint import write_bytes
from bigdl.training.position import Position
from bigdl.training.state import dumps

if TYPE_CHECKING:
    from bigdl.runtime.worker import Worker
    from bigdl.training.batches import TensorShard
    from bigdl.training.loading import LoaderBatches

__all__ = ["Runner", "WorkerBatches"]


class Runner:
    """A worker's part of a fit or of an evaluation.

    Attributes
    ----------
    rank, size : int
        This worker, and how many there are.
    config : dict
        The ``config`` of the Estimator.
    model, optimizer, scheduler, criterion
        Of this worker; the optimizer and scheduler are None in an evaluation. ``models`` and
        ``optimizers`` are lists of them.
    device : torch.device
        Where this worker computes.
    epochs : int
        Finished epochs, counted over all fits of the Estimator.
    num_epochs : int
        The count at which this fit ends.
    global_step : int
        Optimizer steps done, counted over all fits of the Estimator.
    num_steps : int or None
        Batches that an evaluation looks at.
    updated : bool
        True if the last batch of training ended in an update of the weights.
    batch, batch_idx, output, target, loss
        Of the current iteration; all but `batch_idx` are None on a worker that has no rows in this
        step, and `output` is None for the training step of a LightningModule.
    epoch_stats : dict
        Figures of the epoch that ended last, of all workers together.
    metrics_stats : dict
        Figures of the validation that ended last.
    epoch_is_whole : bool
        True if the epoch that ended last has seen all rows.
    train_loader, val_loader : WorkerBatches or None
        This worker's own batches.
    stop : bool
        Set it on any rank to end the training after the current step.
    """

    def __init__(self, worker: Worker, config: dict, callbacks: Sequence[Any]):
        self.rank, self.size = worker.rank, worker.world_size
        self.config = config
        self.callbacks = list(callbacks)
        self.main = next((c for c in self.callbacks if isinstance(c, MainCallback)), None)
        self._old = [c for c in self.callbacks if has_old_hooks(c)]
        self.position = Position()
        self.first_epoch = self.num_epochs = 0
        self.num_steps: int | None = None
        self.updated = False
        self.epoch_is_whole = True
        self.model: Any = None
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.criterion: Any = None
        self.device: Any = None
        self.batch: Any = None
        self.batch_idx: int | None = None
        self.output: Any = None
        self.target: Any = None
        self.loss: Any = None
        self.epoch_stats: dict = {}
        self.metrics_stats: dict = {}
        self.train_loader: WorkerBatches | None = None
        self.val_loader: WorkerBatches | None = None
        self.stop = False
        self._values: dict[str, Any] = {}
        self._forward_by: Callable[[], tuple] | None = None

    @property
    def epochs(self) -> int:
        return self.position.epoch

    @property
    def global_step(self) -> int:
        return self.position.global_step

    @property
    def history(self) -> list[dict]:
        """Figures of the epochs of this fit so far, in ``after_train_epoch`` the last included."""
        entries = [e for e in self.position.history if e["epoch"] > self.first_epoch]
        newest = self.epoch_stats
        is_new = "epoch" in newest and (not entries or newest["epoch"] > entries[-1]["epoch"])
        return [*entries, newest] if is_new and newest["epoch"] > self.first_epoch else entries

    @property
    def models(self) -> list:
        return [self.model]

    @property
    def optimizers(self) -> list:
        return [] if self.optimizer is None else [self.optimizer]

    @property
    def schedulers(self) -> list:
        return [] if self.scheduler is None else [self.scheduler]

    def call(self, hook: str) -> None:
        """Call one hook of every callback, in their order."""
        for callback in self.callbacks:
            if callback in self._old:
                call_old_hooks(callback, hook, self)
            getattr(callback, hook)(self)

    call_hook = call

    def forward_by(self, forward: Callable[[], tuple]) -> None:
        """Let :meth:`forward` do this; it returns output, target and loss."""
        self._forward_by = forward

    def forward(self) -> None:
        """Set `output`, `target` and `loss` of the batch as they are without a MainCallback."""
        if self._forward_by is None:
            raise UsageError("There is no batch now; forward belongs into on_iter_forward")
        self.output, self.target, self.loss = self._forward_by()

    # -- values for other callbacks ------------------------------------------------------------

    def put(self, key: str, value: Any) -> None:
        """Keep something for other callbacks of this worker; the key must be new."""
        if key in self._values:
            raise UsageError(f"The runner has {key!r} already; use update to replace it")
        self._values[key] = value

    def get(self, key: str) -> Any:
        """Return what was put under a key."""
        return self._values[self._known(key)]

    def update(self, key: str, value: Any) -> None:
        """Replace what was put under a key."""
        self._values[self._known(key)] = value

    def remove(self, key: str) -> None:
        """Forget what was put under a key."""
        del self._values[self._known(key)]

    def _known(self, key):
        if key not in self._values:
            raise UsageError(f"The runner has no {key!r}; it has {sorted(self._values)}")
        return key

    # -- the state -----------------------------------------------------------------------------

    def merged_buffers(self) -> contextlib.AbstractContextManager:
        """Statistics of all workers in the model for the time of a block; a collective."""
        return contextlib.nullcontext()

    def state_dict(self) -> dict:
        """``epoch`` and the states of ``models``, ``optimizers`` and ``schedulers``, as lists."""
        state = {"epoch": self.position.counted, "models": [m.state_dict() for m in self.models]}
        for key in ("optimizers", "schedulers"):
            if getattr(self, key):
                state[key] = [part.state_dict() for part in getattr(self, key)]
        return state

    def save_checkpoint(self, path: str, save_weights_only: bool = False) -> None:
        """Write the state of this worker to a file; call it on one rank."""
        state = self.model.state_dict() if save_weights_only else self.state_dict()
        write_bytes(path, dumps(state))


class WorkerBatches:
    """The batches of one worker, in the order of its rows.

    Parameters
    ----------
    data : TensorShard
    batch_size : int
        Of this worker.
    """

    def __init__(self, data: TensorShard | LoaderBatches, batch_size: int):
        self._data, self.batch_size = data, max(1, batch_size)

    def __len__(self) -> int:
        return -(-self._data.rows // self.batch_size)

    def __iter__(self) -> Iterator:
        order = self._data.in_order(self.batch_size)
        for start in range(0, self._data.rows, self.batch_size):
            stop = min(start + self.batch_size, self._data.rows)
            yield self._data.batch(start, stop, order)
