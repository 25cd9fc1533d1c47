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
        make = _writer_class()
    except MissingExtraError as error:
        logger.warning("No leaderboard is written to %s: %s", folder, error)
        return
    for old in folder.glob("trial_*"):
        shutil.rmtree(old, ignore_errors=True)
    names = [metric.name for metric in records.goal.metrics]
    for trial in records.finished():
        run = f"trial_{trial.number:05}"
        with make(log_dir=str(folder / run)) as writer:
            for epoch, value in sorted(trial.intermediate_values.items()):
                writer.add_scalar(names[0], value, epoch)
            writer.add_hparams(
                {key: _shown(value) for key, value in records.texts_of(trial).items()},
                {f"best/{name}": v for name, v in zip(names, records.figures(trial), strict=True)},
                **_HERE[make.__module__.partition(".")[0]],
            )


def _writer_class():
    """What writes event files; that of torch would load TensorFlow where that is installed."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return writer_class()
    return SummaryWriter


_HERE = {"tensorboardX": {"name": "."}, "torch": {"run_name": "."}}  # no folder for each of them


def _shown(value):
    return value if isinstance(value, bool | int | float | str) else str(value)
