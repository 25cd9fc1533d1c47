"""The trials of a search in TensorBoard: a run for each, with its values and its figures."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from bigdl.common.errors import MissingExtraError
from bigdl.orca.automl.search.records import Records
from bigdl.orca.learn.pytorch.callbacks.tensorboard import writer_class

__all__ = ["write_leaderboard"]

logger = logging.getLogger("bigdl.orca")


def write_leaderboard(records: Records, folder: Path) -> None:
    """Write event files of all finished trials, in place of those of an earlier search.

    Parameters
    ----------
    records : Records
    folder : Path
        Gets a folder for each trial.

    Notes
    -----
    The page HPARAMS of TensorBoard shows them as a table.  Without TensorBoard nothing is written,
    and a message says so.
    """
    try:
        make, hparams = _tensorboard()
    except MissingExtraError as error:
        logger.warning("No leaderboard is written to %s: %s", folder, error)
        return
    for old in folder.glob("trial_*"):
        shutil.rmtree(old, ignore_errors=True)
    names = [metric.name for metric in records.goal.metrics]
    for trial in records.finished():
        best = {f"best/{n}": v for n, v in zip(names, records.figures(trial), strict=True)}
        values = {key: _shown(value) for key, value in records.texts_of(trial).items()}
        with make(log_dir=str(folder / f"trial_{trial.number:05}")) as writer:
            for epoch, value in sorted(trial.intermediate_values.items()):
                writer.add_scalar(names[0], value, epoch)
            for tag, value in best.items():
                writer.add_scalar(tag, value)
            for summary in hparams(values, best):
                writer.file_writer.add_summary(summary)


def _tensorboard():
    """What writes event files; that of torch would load TensorFlow where that is installed."""
    try:
        from tensorboardX import SummaryWriter
        from tensorboardX.summary import hparams
    except ImportError:
        make = writer_class()
        from torch.utils.tensorboard.summary import hparams

        return make, hparams
    return SummaryWriter, hparams


def _shown(value):
    return value if isinstance(value, bool | int | float | str) else str(value)
