"""Callbacks for early stopping and for checkpoint files of epochs or steps."""

from __future__ import annotations

import os
import posixpath
import re
from typing import TYPE_CHECKING

from bigdl.common.checks import check_choice, check_integer, check_number
from bigdl.common.errors import UsageError
from bigdl.common.storage import file_exists, remove_file
from bigdl.orca.learn.pytorch.callbacks.base import Callback
from bigdl.training.metrics import monitored_metric

if TYPE_CHECKING:
    from bigdl.orca.learn.pytorch.evaluation import TorchRunner

__all__ = ["EarlyStopping", "ModelCheckpoint"]


class EarlyStopping(Callback):
    """Callback that ends the fit after `patience` epochs without improvement.

    It evaluates the metrics of all epochs of the fit each time, so a run that resumes from a
    checkpoint stops at the same epoch as an uninterrupted run.

    Parameters
    ----------
    monitor : str, optional
        Epoch metric, e.g. ``"train_loss"``, ``"val_loss"`` or a metric name. Default: the
        validation loss, or the training loss without validation.
    patience : int
        Number of epochs without improvement after which the fit ends.
    mode : str
        ``"min"`` if lower is better, ``"max"`` if higher is better.
    min_delta : float
        Minimum change that counts as an improvement.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.orca.learn.optimizers import SGD
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> from bigdl.orca.learn.pytorch.callbacks import EarlyStopping
    >>> estimator = Estimator.from_torch(
    ...     model=torch.nn.Linear(1, 1), optimizer=SGD(0.1), loss=torch.nn.MSELoss(),
    ...     backend="local",
    ... )
    >>> x = np.linspace(0, 1, 64, dtype="float32")[:, None]
    >>> stopping = EarlyStopping("train_loss", patience=2, min_delta=100.0)  # never reached
    >>> len(estimator.fit((x, x), epochs=50, callbacks=[stopping]))
    3
    """

    def __init__(
        self,
        monitor: str | None = None,
        patience: int = 3,
        mode: str = "min",
        min_delta: float = 0.0,
    ):
        self.monitor = monitor
        self.patience = check_integer("patience", patience, 1)
        self.mode = check_choice("mode", mode, ("min", "max"))
        self.min_delta = check_number("min_delta", min_delta, 0)

    def after_train_epoch(self, runner: TorchRunner) -> None:
        best, waited = None, 0
        for metrics in runner.history:
            value = monitored_metric(metrics, self.monitor, "callback EarlyStopping")
            value = value if self.mode == "min" else -value
            if best is None or value < best - self.min_delta:
                best, waited = value, 0
            else:
                waited += 1
        if waited >= self.patience:
            runner.stop = True


_FIELD = re.compile(r"\{(epoch|iter)(:[^{}]*)?\}")


class ModelCheckpoint(Callback):
    """Callback that writes checkpoint files after epochs or steps and at the end of the fit.

    The file at the end of the fit is ``last.ckpt``. A file has the format of
    ``Estimator.save_checkpoint``, or holds only the weights. Load it with
    ``Estimator.load_checkpoint`` or ``load``. These files are independent of the checkpoints in
    ``model_dir``, from which a fit resumes after a failure.

    Parameters
    ----------
    filepath : str
        Template with ``{epoch}`` or ``{iter}``: ``"dir/net-{epoch}"`` becomes
        ``dir/net-epoch=3.ckpt`` after the third epoch, and ``{epoch:02d}`` becomes ``epoch=03``. A
        local path on rank 0's machine (on a shared file system in a cluster) or an fsspec URL.
    save_weights_only : bool
        Whether to write only the weights.
    by_epoch : bool
        Whether to count epochs instead of steps.
    interval : int
        Number of epochs or steps between two files; -1 means every epoch, or no files by steps.
    num_to_keep : int, optional
        Number of files to keep: the newest, or the best ones if `monitor` is set. Default: all.
    monitor : str, optional
        Epoch metric that ranks the files, e.g. ``"val_loss"``.
    mode : str
        ``"min"`` if lower is better, ``"max"`` if higher is better.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.orca.data.file import listdir
    >>> from bigdl.orca.learn.optimizers import SGD
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> from bigdl.orca.learn.pytorch.callbacks import ModelCheckpoint
    >>> estimator = Estimator.from_torch(
    ...     model=torch.nn.Linear(1, 1), optimizer=SGD(0.1), loss=torch.nn.MSELoss(),
    ...     backend="local",
    ... )
    >>> x = np.linspace(0, 1, 64, dtype="float32")[:, None]
    >>> checkpoint = ModelCheckpoint("memo/net-{epoch}", num_to_keep=1)
    >>> history = estimator.fit((x, x), epochs=2, callbacks=[checkpoint])
    >>> listdir("memo")
    ['memo/last.ckpt', 'memo/net-epoch=2.ckpt']
    >>> estimator.load_checkpoint(ModelCheckpoint.get_latest_checkpoint("memo"))
    """

    def __init__(
        self,
        filepath: str = "",
        save_weights_only: bool = False,
        by_epoch: bool = True,
        interval: int = -1,
        *,
        num_to_keep: int | None = None,
        monitor: str | None = None,
        mode: str = "min",
    ):
        self.dirname, self.filename = posixpath.split(os.fspath(filepath))
        if "://" not in self.dirname:  # working directories of workers differ
            self.dirname = os.path.abspath(self.dirname)
        self.filename = self.filename or ("{epoch}" if by_epoch else "{iter}")
        if not _FIELD.search(self.filename):
            self.filename += "-{epoch}" if by_epoch else "-{iter}"
        if interval != -1:
            check_integer("interval", interval, 1)
        if num_to_keep is not None:
            check_integer("num_to_keep", num_to_keep, 1)
        if monitor is not None and not by_epoch:
            raise UsageError(
                "monitor needs the metrics of an epoch; use by_epoch=True",
                code="argument-conflict",
                argument="monitor",
            )
        if monitor is not None and num_to_keep is None:
            num_to_keep = 1
        self.save_weights_only, self.by_epoch, self.interval = save_weights_only, by_epoch, interval
        self.num_to_keep, self.monitor = num_to_keep, monitor
        self.mode = check_choice("mode", mode, ("min", "max"))
        self._written: list[str] = []

    @property
    def last_checkpoint(self) -> str:
        """Path of the file that is written at the end of a fit."""
        return self._path("last.ckpt")

    def before_run(self, runner: TorchRunner) -> None:
        steps = range(self.interval, runner.global_step + 1, self.interval) if self._by_step else ()
        self._written = [self.check_path(iter=step, epoch=runner.epochs + 1) for step in steps]

    @property
    def _by_step(self) -> bool:
        return not self.by_epoch and self.interval > 0

    def after_train_iter(self, runner: TorchRunner) -> None:
        if not self._by_step or not runner.updated or runner.global_step % self.interval:
            return
        path = self.check_path(iter=runner.global_step, epoch=runner.epochs + 1)
        self._write(runner, path)
        self._written = [*(p for p in self._written if p != path), path]
        while self.num_to_keep is not None and len(self._written) > self.num_to_keep:
            self._remove(runner, self._written.pop(0))

    def after_train_epoch(self, runner: TorchRunner) -> None:
        if not self.by_epoch or not runner.epoch_is_whole:
            return
        epoch = runner.epochs + 1
        kept, before = self._kept(runner.history), self._kept(runner.history[:-1])
        if epoch in kept:
            self._write(runner, self._file_of(runner.history[-1]))
        for entry in runner.history:
            if entry["epoch"] in before and entry["epoch"] not in kept:
                self._remove(runner, self._file_of(entry))

    def after_run(self, runner: TorchRunner) -> None:
        self._write(runner, self.last_checkpoint)

    def _kept(self, history) -> set[int]:
        """Return the epochs whose checkpoint files are kept after the epochs in `history`."""
        every = max(self.interval, 1)
        written = [entry for entry in history if entry["epoch"] % every == 0]
        if self.num_to_keep is None or len(written) <= self.num_to_keep:
            return {entry["epoch"] for entry in written}
        if self.monitor is None:
            return {entry["epoch"] for entry in written[-self.num_to_keep :]}
        sign = 1 if self.mode == "min" else -1

        def rank(entry):
            score = sign * monitored_metric(entry, self.monitor, "callback ModelCheckpoint")
            return score != score, score, entry["epoch"]  # nan ranks last

        return {entry["epoch"] for entry in sorted(written, key=rank)[: self.num_to_keep]}

    def _file_of(self, entry) -> str:
        return self.check_path(epoch=entry["epoch"], iter=entry["global_step"])

    def check_path(self, **numbers: int) -> str:
        """Return the checkpoint path for an epoch and step."""
        name = _FIELD.sub(
            lambda match: f"{match[1]}={format(numbers[match[1]], (match[2] or ':')[1:])}",
            self.filename,
        )
        return self._path(f"{name}.ckpt")

    def _path(self, name):
        return f"{self.dirname}/{name}"

    def _write(self, runner, path):
        with runner.merged_buffers():  # a collective of all ranks
            if runner.rank == 0:
                runner.save_checkpoint(path, self.save_weights_only)

    def _remove(self, runner, path):
        if runner.rank == 0:
            remove_file(path)

    @classmethod
    def get_latest_checkpoint(cls, dirname: str) -> str:
        """Return ``<dirname>/last.ckpt``; raise a UsageError if it does not exist."""
        path = f"{os.fspath(dirname).rstrip('/')}/last.ckpt"
        if not file_exists(path):
            raise UsageError(
                f"Latest checkpoint at {dirname} not found.",
                code="checkpoint-missing",
                path=dirname,
            )
        return path
