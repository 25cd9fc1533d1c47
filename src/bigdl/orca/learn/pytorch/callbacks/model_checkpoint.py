"""Stopping a fit early, and checkpoints of its best epochs."""

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
    """End the training after `patience` epochs without a better figure.

    It looks at the figures of all epochs of the fit each time, so a run that goes on from a
    checkpoint ends where an uninterrupted one does.

    Parameters
    ----------
    monitor : str, optional
        A figure of an epoch, e.g. ``"train_loss"``, ``"val_loss"`` or the name of a metric.
        Default: the validation loss, without validation the training loss.
    patience : int
    mode : str
        ``"min"`` or ``"max"``: what is better.
    min_delta : float
        How much better it has to be.

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
    >>> stopping = EarlyStopping("train_loss", patience=2, min_delta=100.0)  # more than is possible
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
        for figures in runner.history:
            value = monitored_metric(figures, self.monitor, "callback EarlyStopping")
            value = value if self.mode == "min" else -value
            if best is None or value < best - self.min_delta:
                best, waited = value, 0
            else:
                waited += 1
        if waited >= self.patience:
            runner.stop = True


_FIELD = re.compile(r"\{(epoch|iter)(:[^{}]*)?\}")


class ModelCheckpoint(Callback):
    """Write the state after epochs or steps, and ``last.ckpt`` at the end of the fit.

    A file holds what ``Estimator.save_checkpoint`` writes, or the weights alone;
    ``Estimator.load_checkpoint`` and ``load`` read it.  The checkpoints of ``model_dir``, which a
    training goes on from after a loss, are another thing.

    Parameters
    ----------
    filepath : str
        Template with ``{epoch}`` or ``{iter}``: ``"dir/net-{epoch}"`` gives
        ``dir/net-epoch=3.ckpt`` after the third epoch, ``{epoch:02d}`` gives ``epoch=03``. A local
        path of rank 0's machine (of a shared file system, on a cluster) or any fsspec URL.
    save_weights_only : bool
    by_epoch : bool
        Count epochs rather than steps.
    interval : int
        Write after every so many; -1 is every epoch, or never by steps.
    num_to_keep : int, optional
        Keep so many files: the newest, or the best with `monitor`. Default: all.
    monitor : str, optional
        Figure of an epoch that says which are the best, e.g. ``"val_loss"``.
    mode : str
        ``"min"`` or ``"max"``: what is better.

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
    >>> figures = estimator.fit((x, x), epochs=2, callbacks=[checkpoint])
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
        if "://" not in self.dirname:  # workers have other working directories
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
                "monitor looks at figures of an epoch; use by_epoch=True",
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
        """The file at the end of a fit."""
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
        for figures in runner.history:
            if figures["epoch"] in before and figures["epoch"] not in kept:
                self._remove(runner, self._file_of(figures))

    def after_run(self, runner: TorchRunner) -> None:
        self._write(runner, self.last_checkpoint)

    def _kept(self, history) -> set[int]:
        """The epochs whose files are there after those of `history`."""
        every = max(self.interval, 1)
        written = [figures for figures in history if figures["epoch"] % every == 0]
        if self.num_to_keep is None or len(written) <= self.num_to_keep:
            return {figures["epoch"] for figures in written}
        if self.monitor is None:
            return {figures["epoch"] for figures in written[-self.num_to_keep :]}
        sign = 1 if self.mode == "min" else -1

        def rank(figures):
            score = sign * monitored_metric(figures, self.monitor, "callback ModelCheckpoint")
            return score != score, score, figures["epoch"]  # nan is the worst

        return {figures["epoch"] for figures in sorted(written, key=rank)[: self.num_to_keep]}

    def _file_of(self, figures) -> str:
        return self.check_path(epoch=figures["epoch"], iter=figures["global_step"])

    def check_path(self, **numbers: int) -> str:
        """The file of an epoch and step."""
        name = _FIELD.sub(
            lambda match: f"{match[1]}={format(numbers[match[1]], (match[2] or ':')[1:])}",
            self.filename,
        )
        return self._path(f"{name}.ckpt")

    def _path(self, name):
        return f"{self.dirname}/{name}"

    def _write(self, runner, path):
        with runner.merged_buffers():  # all ranks
            if runner.rank == 0:
                runner.save_checkpoint(path, self.save_weights_only)

    def _remove(self, runner, path):
        if runner.rank == 0:
            remove_file(path)

    @classmethod
    def get_latest_checkpoint(cls, dirname: str) -> str:
        """``<dirname>/last.ckpt``, or a UsageError if there is none."""
        path = f"{os.fspath(dirname).rstrip('/')}/last.ckpt"
        if not file_exists(path):
            raise UsageError(
                f"Latest checkpoint at {dirname} not found.",
                code="checkpoint-missing",
                path=dirname,
            )
        return path
