"""The training loop of PyTorch: one step, one epoch, one fit.

It knows neither which engine runs it nor what the input was: a worker gives it shards, a sync
gives it collectives.  :class:`FitProgram` and :class:`EvaluateProgram` are what an engine ships.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds.batches import BatchPlan, permutation
from bigdl.orca.learn.checkpoint import CheckpointDirectory, Snapshot
from bigdl.orca.learn.pytorch.data import TensorShard
from bigdl.orca.learn.pytorch.evaluation import evaluate_shard
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.orca.learn.pytorch.state import (
    capture_rng,
    dumps,
    loads,
    restore_rng,
    seed_everything,
)
from bigdl.orca.learn.pytorch.steps import step_for
from bigdl.orca.learn.trigger import EveryEpoch, Trigger, TriggerState

__all__ = ["FitProgram", "FitSettings", "TorchLoop"]


@dataclass
class FitSettings:
    """What ``fit`` was asked for.

    Attributes
    ----------
    epochs : int
        The epoch counter at which to stop; it goes on from fit to fit.
    run_url : str or None
        Folder for checkpoints; None sends them to the driver.
    """

    epochs: int
    batch_size: int
    seed: int
    feature_cols: Sequence[str]
    label_cols: Sequence[str]
    shuffle: bool = True
    drop_last: bool = False
    max_steps: int | None = None
    trigger: Trigger = field(default_factory=EveryEpoch)
    run_url: str | None = None
    keep: int = 2
    metrics: Sequence[Any] = ()
    callbacks: Sequence[Any] = ()
    profile: bool = False


@dataclass
class FitProgram:
    """A fit, as shipped to the workers."""

    parts: ModelParts
    settings: FitSettings
    sync: Any  # class of the GradientSync

    def __call__(self, worker):
        return TorchLoop(worker, self.sync(worker), self.parts, self.settings).fit()


class TorchLoop:
    """One worker's part of a fit; the *runner* that callbacks see.

    Attributes
    ----------
    rank, size : int
    epochs : int
        Finished epochs, counted over all fits of the Estimator.
    num_epochs : int
        The epoch counter at which this fit ends.
    global_step : int
        Optimizer steps done.
    batch, batch_idx, output, target, loss
        Of the current iteration; None on a worker that has no rows in this step.
    stop : bool
        Set it on any rank to end the training after the current step.
    """

    def __init__(self, worker, sync, parts: ModelParts, settings: FitSettings):
        self.worker, self.sync, self.settings = worker, sync, settings
        self.rank, self.size = worker.rank, worker.world_size
        self.config = parts.config
        self.callbacks = list(settings.callbacks)
        self.num_epochs = settings.epochs
        self.epochs = self.global_step = 0
        self.batch = self.batch_idx = self.output = self.target = self.loss = None
        self.epoch_stats: dict = {}
        self.stop = False
        self._step = 0  # finished steps of the current epoch
        self._history: list[dict] = []
        self._sums = _EpochSums()
        self._rows_since_sync = 0

        # creators run under one seed, so that all ranks start from the same weights
        seed_everything(settings.seed)
        built = parts.build(training=True)
        self.model, self.optimizer = built.model, built.optimizer
        self.criterion, self.scheduler = built.criterion, built.scheduler
        self._kind = step_for(self.model, self.criterion)
        self._parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        _mark_sparse(self.model)
        seed_everything(settings.seed, self.rank + 1)

        self.sync.start()
        self._directory = self._open_directory()
        self._prepare_data()
        self._restore()

    # -- the fit -------------------------------------------------------------------------------

    def fit(self) -> dict:
        """Train to the end; rank 0 returns the history and where the final state is."""
        self._call("before_run")
        while self.epochs < self.num_epochs and not self._is_over():
            self._epoch()
        self._call("after_run")
        return self._finish()

    def _epoch(self):
        self.model.train()
        self._call("before_train_epoch")
        order = self._order()
        while self._step < self._plan.steps and not self._is_over():
            self._iteration(order)
            if self._step < self._plan.steps and not self._is_over():
                self._maybe_checkpoint(epoch_finished=False)
        self._end_epoch()

    def _iteration(self, order):
        started = time.perf_counter()
        start, stop, batch_rows = self._plan.batch(self._step, self.rank)
        rows = stop - start
        self.batch_idx = self._step
        self.batch = self.output = self.target = self.loss = None
        if rows:
            self.batch = self._data.batch(start, stop, order)
        self._call("before_train_iter")
        self.optimizer.zero_grad()
        fetched = time.perf_counter()
        forwarded = fetched
        if rows:
            self.output, self.target, self.loss = self._kind.forward(self.batch, self._step)
            forwarded = time.perf_counter()
            self.loss.backward()
        weight = 0.0 if not rows else 1.0 if self._kind.sums else rows / batch_rows
        computed = time.perf_counter()
        self.sync.reduce(self._parameters, weight)
        self.optimizer.step()
        self._rows_since_sync += rows
        self._sums.add(
            0.0 if self.loss is None else self.loss.item(),
            rows,
            batch_rows,
            self._kind.sums,
            (fetched - started, forwarded - fetched, computed - forwarded),
        )
        self._step += 1
        self.global_step += 1
        self._call("after_train_iter")
        self.worker.progress(
            epoch=self.epochs,
            epochs=self.num_epochs,
            step=self._step,
            steps=self._plan.steps,
            loss=self._sums.mean(),
        )
        if self.callbacks and self.size > 1:
            votes = self.sync.all_gather([float(self.stop)])
            self.stop = any(v[0] for v in votes)

    def _end_epoch(self):
        self._merge_buffers()
        entry = self._sums.reduce(self.sync)
        if entry is None:  # nothing was left to do in this epoch
            return
        entry = {"epoch": self.epochs + 1, **entry}
        if not self.settings.profile:
            entry.pop("profile")
        if self._validation is not None:
            self._call("before_val_epoch")
            result = evaluate_shard(
                self._kind,
                self._validation,
                self.settings.metrics,
                self.sync,
                self.settings.batch_size,
                hook=self._hook,
            )
            entry.update(_named("val_", result))
        self._history.append(entry)
        self.epoch_stats = entry
        self._call("after_train_epoch" if self._validation is None else "after_val_epoch")
        if self._validation is not None:
            self._call("after_train_epoch")
        self._step_scheduler(entry)
        self.epochs += 1
        self._step = 0
        self._sums = _EpochSums()
        self._maybe_checkpoint(epoch_finished=True)

    def _step_scheduler(self, entry):
        if self.scheduler is None:
            return
        if type(self.scheduler).__name__ == "ReduceLROnPlateau":
            self.scheduler.step(entry.get("val_loss", entry["train_loss"]))
        else:
            self.scheduler.step()

    def _is_over(self):
        limit = self.settings.max_steps
        return self.stop or (limit is not None and self.global_step >= limit)

    # -- data ----------------------------------------------------------------------------------

    def _prepare_data(self):
        settings = self.settings
        shards = self.worker.shards
        train, validation = shards["data"], shards.get("validation")
        own = [train.rows, train.fingerprint, validation.rows if validation else 0]
        everyone = self.sync.all_gather(own)
        rows = [int(r[0]) for r in everyone]
        if not sum(rows):
            raise UsageError("The training data has no rows")
        if validation is not None and not sum(r[2] for r in everyone):
            raise UsageError("The validation data has no rows")
        self._fingerprint = [int(r[1]) for r in everyone]
        self._plan = BatchPlan(rows, settings.batch_size, settings.drop_last)
        if not self._plan.steps:
            raise UsageError(
                f"drop_last leaves no batch: the data has {sum(rows)} rows and batch_size is "
                f"{settings.batch_size}"
            )
        self._rows = rows
        self._data = TensorShard(train, settings.feature_cols, settings.label_cols)
        self._validation = (
            TensorShard(validation, settings.feature_cols, settings.label_cols)
            if validation is not None
            else None
        )

    def _order(self):
        if not self.settings.shuffle:
            return None
        return permutation(self._data.rows, self.settings.seed, self.epochs, self.rank)

    # -- state ---------------------------------------------------------------------------------

    def _open_directory(self):
        if self.settings.run_url is None:
            return None
        directory = CheckpointDirectory(self.settings.run_url, self.settings.keep)
        if self.rank == 0 and not directory.is_shared():
            raise UsageError(
                f"The worker on {self.worker.host} does not see model_dir "
                f"{self.settings.run_url!r}; pass a folder that the driver and all workers share"
            )
        return directory

    def _restore(self):
        """Start from the driver's state, the same bytes on every rank."""
        blob = None
        if self.rank == 0:
            blob = dumps(self._initial_state())
        state = loads(self.sync.broadcast(blob))
        self.model.load_state_dict(state["model"])
        if state.get("optimizer"):
            self.optimizer.load_state_dict(state["optimizer"])
        if state.get("scheduler") and self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        manifest = state["manifest"]
        self.epochs, self._step = manifest["epoch"], manifest["step"]
        self.global_step = manifest["global_step"]
        self._history = manifest["history"]
        sums = manifest.get("sums")
        if sums:
            self._check_position(manifest)
            self._sums = _EpochSums(**sums[self.rank])
            self._rows_since_sync = manifest["rows_since_sync"][self.rank]
        rng = state.get("rng")
        if rng and len(rng) == self.size:
            restore_rng(rng[self.rank])

    def _initial_state(self):
        snapshot = None
        name = self.worker.options.get("checkpoint")
        if name is not None:
            snapshot = self._directory.read(name)
        else:
            blob = self.worker.state()
            if blob is not None:
                snapshot = Snapshot.unpack(self.worker.options["snapshot"], blob)
        if snapshot is None:
            manifest = {"epoch": 0, "step": 0, "global_step": 0, "history": []}
            return {"manifest": manifest, "model": self.model.state_dict()}
        state = {"manifest": snapshot.manifest}
        for file, data in snapshot.files.items():
            state[file.removesuffix(".pt")] = loads(data)
        return state

    def _check_position(self, manifest):
        """In the middle of an epoch the batches must be those of the run that was interrupted."""
        own = self._position()
        for key in ("batch_size", "seed", "rows"):
            if manifest[key] != own[key]:
                raise UsageError(
                    f"The checkpoint was taken in the middle of an epoch with {key}="
                    f"{manifest[key]}, now it is {own[key]}; go on with the same data, seed, "
                    "batch_size and number of workers, or from a checkpoint of an epoch's end"
                )
        if manifest["fingerprint"] != own["fingerprint"] and self.rank == 0:
            print(
                "The rows or their order differ from those of the interrupted run, so the result "
                "will not equal that of an uninterrupted one",
                flush=True,
            )

    def _position(self):
        return {
            "epoch": self.epochs,
            "step": self._step,
            "global_step": self.global_step,
            "history": self._history,
            "seed": self.settings.seed,
            "batch_size": self.settings.batch_size,
            "rows": self._rows,
            "fingerprint": self._fingerprint,
            "inputs": self._data.inputs,
        }

    def _maybe_checkpoint(self, *, epoch_finished):
        last = self._history[-1] if epoch_finished else {}
        state = TriggerState(
            epoch=self.epochs,
            step=self.global_step,
            epoch_finished=epoch_finished,
            loss=last.get("train_loss"),
            score=_score(last),
        )
        if not self.settings.trigger(state):
            return
        at_end = self.epochs >= self.num_epochs or self._is_over()
        if at_end and self._directory is None:
            return  # the result of the fit is the same state
        snapshot = self._snapshot()
        if snapshot is None:
            return
        if self._directory is not None:
            self._written = self._directory.write(snapshot)
        else:
            doc, blob = snapshot.pack()
            self.worker.send("checkpoint", doc, blob)

    def _snapshot(self) -> Snapshot | None:
        """The whole state, on rank 0; a collective."""
        self._merge_buffers()
        rng = self.sync.gather(dumps(capture_rng()))
        sums = self.sync.all_gather([*self._sums.values(), float(self._rows_since_sync)])
        if self.rank != 0:
            return None
        manifest = self._position()
        if self._step:
            manifest["sums"] = [_EpochSums.from_values(v[:-1]) for v in sums]
            manifest["rows_since_sync"] = [v[-1] for v in sums]
        files = {
            "model.pt": dumps(self.model.state_dict()),
            "optimizer.pt": dumps(self.optimizer.state_dict()),
            "rng.pt": dumps([loads(r) for r in rng]),
        }
        if self.scheduler is not None:
            files["scheduler.pt"] = dumps(self.scheduler.state_dict())
        return Snapshot(manifest, files)

    def _merge_buffers(self):
        """Average the floating buffers (BatchNorm statistics) over the rows that made them."""
        import torch

        if self.size == 1:
            return
        buffers = list(self.model.buffers())
        if not buffers:
            return
        rows = [r[0] for r in self.sync.all_gather([float(self._rows_since_sync)])]
        self._rows_since_sync = 0
        if not sum(rows):
            return
        share = rows[self.rank] / sum(rows)
        for buffer in buffers:
            if buffer.is_floating_point():
                merged = torch.where(torch.tensor(share > 0), buffer * share, 0.0)
                buffer.copy_(self.sync.all_reduce(merged.to(buffer.dtype)))
            else:  # counters: as many as the rank that has seen most
                flat = buffer.reshape(-1).double().tolist()
                everyone = self.sync.all_gather(flat)
                largest = torch.tensor(everyone, dtype=torch.float64).amax(0)
                buffer.copy_(largest.reshape(buffer.shape).to(buffer.dtype))

    def _finish(self):
        """Leave the final state where the driver finds it."""
        if self._directory is not None:
            name = getattr(self, "_written", None)
            snapshot = self._snapshot() if not self._is_written(name) else None
            if self.rank == 0 and snapshot is not None:
                name = self._directory.write(snapshot)
            return {"history": self._history, "checkpoint": name}
        snapshot = self._snapshot()
        if self.rank == 0:
            doc, blob = snapshot.pack()
            self.worker.send("final", doc, blob)
        return {"history": self._history, "checkpoint": None}

    def _is_written(self, name):
        """Whether all ranks agree that the end of the fit is already a checkpoint."""
        here = f"checkpoint-{self.epochs:06d}-{self._step:08d}"
        return any(v[0] for v in self.sync.all_gather([float(name == here)]))

    # -- callbacks -----------------------------------------------------------------------------

    def _call(self, hook):
        for callback in self.callbacks:
            getattr(callback, hook)(self)

    def _hook(self, hook, batch=None, index=None, output=None, target=None, loss=None):
        self.batch, self.batch_idx = batch, index
        self.output, self.target, self.loss = output, target, loss
        self._call(hook)


@dataclass
class _EpochSums:
    """What an epoch adds up to in one worker."""

    loss: float = 0.0
    rows: float = 0.0
    batches: float = 0.0
    last_loss: float = 0.0
    last_rows: float = 0.0
    last_share: float = 0.0
    fetch_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0

    def add(self, loss, rows, batch_rows, sums, seconds):
        total = loss if sums else loss * rows
        self.loss += total
        self.rows += rows
        self.batches += bool(rows)
        self.last_loss, self.last_rows = total, rows
        self.fetch_s += seconds[0]
        self.forward_s += seconds[1]
        self.backward_s += seconds[2]

    def mean(self):
        return self.loss / self.rows if self.rows else None

    def values(self):
        return [float(getattr(self, name)) for name in self.__dataclass_fields__]

    @classmethod
    def from_values(cls, values):
        return dict(zip(cls.__dataclass_fields__, values, strict=True))

    def reduce(self, sync) -> dict | None:
        """The figures of all workers as one entry of the history; None if nobody did anything."""
        everyone = [_EpochSums(*v) for v in sync.all_gather(self.values())]
        rows = sum(s.rows for s in everyone)
        if not rows:
            return None
        last = sum(s.last_rows for s in everyone)
        batches = max(1.0, sum(s.batches for s in everyone))
        return {
            "batch_count": sum(s.batches for s in everyone) / len(everyone),
            "num_samples": int(rows),
            "train_loss": sum(s.loss for s in everyone) / rows,
            "last_train_loss": sum(s.last_loss for s in everyone) / max(last, 1.0),
            "workers": [
                {
                    "batch_count": int(s.batches),
                    "num_samples": int(s.rows),
                    "train_loss": s.loss / s.rows if s.rows else None,
                    "last_train_loss": s.last_loss / s.last_rows if s.last_rows else None,
                }
                for s in everyone
            ],
            "profile": {
                "mean_fetch_s": sum(s.fetch_s for s in everyone) / batches,
                "mean_fwd_s": sum(s.forward_s for s in everyone) / batches,
                "mean_bwd_s": sum(s.backward_s for s in everyone) / batches,
            },
        }


def _named(prefix, result):
    return {
        key if key.startswith(prefix) else prefix + key.lower(): value
        for key, value in result.items()
    }


def _score(entry):
    reserved = ("val_loss", "val_num_samples")
    return next((v for k, v in entry.items() if k.startswith("val_") and k not in reserved), None)


def _mark_sparse(model):
    """Remember which parameters get sparse gradients: a rank without rows cannot see it."""
    for module in model.modules():
        if getattr(module, "sparse", False) is True and hasattr(module, "weight"):
            module.weight._bigdl_sparse = True
