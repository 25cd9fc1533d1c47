"""Callback that writes TensorBoard event files."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import MissingExtraError, UsageError
from bigdl.orca.learn.pytorch.callbacks.base import Callback

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from bigdl.orca.learn.pytorch.evaluation import TorchRunner

__all__ = ["TensorBoardCallback", "open_writer", "writer_class"]

_WITHOUT_TENSORFLOW = "tensorboard.compat.notf"


class TensorBoardCallback(Callback):
    """Callback that writes epoch metrics, and optionally step losses, to TensorBoard files.

    Parameters
    ----------
    log_dir : str, optional
        Folder on the machine of rank 0, which writes the files, or fsspec URL to upload them to
        after the fit; default ``runs/<time and host>``.
    freq : str or int
        ``"epoch"``, ``"batch"``, or the number of steps between two points.
    **options
        Further arguments of ``torch.utils.tensorboard.SummaryWriter``.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.orca.data.file import listdir
    >>> from bigdl.orca.learn.optimizers import SGD
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> from bigdl.orca.learn.pytorch.callbacks import TensorBoardCallback
    >>> estimator = Estimator.from_torch(
    ...     model=torch.nn.Linear(1, 1), optimizer=SGD(0.1), loss=torch.nn.MSELoss(),
    ...     backend="local",
    ... )
    >>> x = np.linspace(0, 1, 64, dtype="float32")[:, None]
    >>> history = estimator.fit((x, x), callbacks=[TensorBoardCallback("logs")])
    >>> len(listdir("logs"))  # view with: tensorboard --logdir logs
    1
    """

    def __init__(self, log_dir: str | None = None, freq: str | int = "epoch", **options):
        number = isinstance(freq, int) and not isinstance(freq, bool) and freq > 0
        if freq not in ("epoch", "batch") and not number:
            raise UsageError(
                f'freq should be "epoch", "batch" or a positive number of steps, got {freq!r}',
                code="argument-value",
                argument="freq",
            )
        self.log_dir = None if log_dir is None else str(log_dir)
        self.freq, self.options = freq, options
        self._writer: Any = None

    @property
    def _steps(self) -> int:
        return self.freq if isinstance(self.freq, int) else {"epoch": 0, "batch": 1}[self.freq]

    def before_run(self, runner: TorchRunner) -> None:
        if runner.rank:
            return
        self._opened = contextlib.ExitStack()
        self._writer = open_writer(self._opened, self.log_dir, **self.options)

    def after_train_iter(self, runner: TorchRunner) -> None:
        if self._writer is None or not self._steps or runner.global_step % self._steps:
            return
        if runner.loss is not None:
            self._writer.add_scalar("train_loss_step", runner.loss.item(), runner.global_step)
        rate = runner.optimizer.param_groups[0]["lr"]
        self._writer.add_scalar("learning_rate", float(rate), runner.global_step)

    def after_train_epoch(self, runner: TorchRunner) -> None:
        if self._writer is None:
            return
        for name, value in runner.epoch_stats.items():
            if isinstance(value, int | float) and name not in ("epoch", "global_step"):
                self._writer.add_scalar(name, value, runner.epochs + 1)

    def after_run(self, runner: TorchRunner) -> None:
        if self._writer is not None:
            self._opened.close()
            self._writer = None


def writer_class() -> type:
    """Return ``torch.utils.tensorboard.SummaryWriter``, or raise a MissingExtraError.

    Importing TensorFlow takes seconds and prints many lines. Unless the program has imported it, a
    placeholder module ``tensorboard.compat.notf`` keeps tensorboard from importing TensorFlow.
    """
    if "tensorflow" not in sys.modules:
        sys.modules.setdefault(_WITHOUT_TENSORFLOW, ModuleType(_WITHOUT_TENSORFLOW))
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError(
            "tensorboard is not installed; run: pip install tensorboard"
        ) from error
    return SummaryWriter


def open_writer(
    opened: contextlib.ExitStack, url: str | None, **options: Any
) -> SummaryWriter:  # options: its own
    """Open a SummaryWriter for a folder or fsspec URL; files are uploaded when it is closed."""
    from bigdl.common.storage import RemoteFolder

    make, path = writer_class(), url
    if url is not None and "://" in url:
        folder = RemoteFolder(url)
        opened.callback(folder.upload)
        path = folder.path
    return opened.enter_context(make(log_dir=path, **options))
