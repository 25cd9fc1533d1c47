"""Loss, learning rate and throughput of every step, and the figures of every validation."""

from __future__ import annotations

import contextlib
import tempfile
import time

from bigdl.common.errors import MissingExtraError, UsageError
from bigdl.orca.learn.old_keywords import warn_once
from bigdl.orca.learn.pytorch.callbacks.tensorboard import upload, writer_class

__all__ = ["EventFiles", "StepSummary", "train_summaries", "validation_summary"]

_TRAIN_TAGS = ("Loss", "LearningRate", "Throughput")

# names of BigDL 2.x for what we call otherwise
_OLD_NAMES = {"top1accuracy": "accuracy", "aucscore": "auc"}


class StepSummary:
    """Records of the updates of a run; made by all ranks, kept in checkpoints.

    Attributes
    ----------
    rows : list of list of float
        Step, loss, learning rate, samples per second and time of every update.
    """

    def __init__(self):
        self.rows: list[list[float]] = []
        self._loss = self._counted = self._samples = self._seconds = 0.0

    def add(self, loop, parts, batch_rows: int, seconds: float, updated: bool) -> None:
        """Add a batch; a collective if it ended in an update."""
        self._loss += parts[0]
        self._counted += parts[1]
        self._samples += batch_rows
        self._seconds += seconds
        if not updated:
            return
        everyone = loop.sync.all_gather([self._loss, self._counted])
        counted = sum(row[1] for row in everyone)
        loss = sum(row[0] for row in everyone) / counted if counted else float("nan")
        throughput = self._samples / self._seconds if self._seconds else 0.0
        rate = float(loop.optimizer.param_groups[0]["lr"])
        self.rows.append([float(loop.global_step), loss, rate, throughput, time.time()])
        self._loss = self._counted = self._samples = self._seconds = 0.0

    def take(self):
        """All rows as a tensor."""
        import torch

        return torch.tensor(self.rows, dtype=torch.float64).reshape(-1, 5)

    def put(self, tensor) -> None:
        """The inverse of :meth:`take`."""
        self.rows = tensor.tolist()


def train_summaries(rows: list[list[float]]) -> dict[str, list[list[float]]]:
    """Return ``[step, value, time]`` of every update, by tag."""
    return {
        tag: [[int(row[0]), row[column], row[4]] for row in rows]
        for column, tag in enumerate(_TRAIN_TAGS, 1)
    }


def validation_summary(history: list[dict], tag: str | None):
    """``[step, value, time]`` of every validation, or a dict of all of them.

    Parameters
    ----------
    history : list of dict
        Figures of the epochs.
    tag : str or None
        Name of a metric, or ``"Loss"``.
    """
    found: dict[str, list] = {}
    for entry in history:
        for name, value in entry.items():
            if name.startswith("val_") and name != "val_num_samples" and _is_number(value):
                row = [entry["global_step"], value, entry["profile"]["ended_at"]]
                found.setdefault(name, []).append(row)
    if tag is None:
        return {name.removeprefix("val_"): rows for name, rows in found.items()}
    name = tag.lower().removeprefix("val_") if isinstance(tag, str) else tag
    key = f"val_{_OLD_NAMES.get(name, name)}"
    if key not in found:
        known = ", ".join(name.removeprefix("val_") for name in found) or "none"
        raise UsageError(f"No validation has the figure {tag!r}; there are: {known}")
    return found[key]


class EventFiles:
    """Summaries as files for TensorBoard, if it is installed.

    Parameters
    ----------
    url : str
        Folder; a local path or any fsspec URL.
    """

    def __init__(self, url: str):
        self.url = url
        self._written = {"train": 0, "validation": 0}  # steps
        try:
            writer_class()
        except MissingExtraError as error:
            warn_once(f"No event files are written to {url}, only summaries are kept: {error}")

    def write(self, train: dict, validation: dict) -> None:
        """Write what is newer than what was written."""
        with contextlib.suppress(MissingExtraError):
            make = writer_class()
            for kind, summaries in (("train", train), ("validation", validation)):
                self._write(make, kind, summaries)

    def _write(self, make, kind, summaries):
        after = self._written[kind]
        new = [(t, *r) for t, rows in summaries.items() for r in rows if r[0] > after]
        if not new:
            return
        with contextlib.ExitStack() as stack:
            folder = f"{self.url}/{kind}"
            if "://" in self.url:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
            with make(log_dir=folder) as writer:
                for tag, step, value, moment in new:
                    writer.add_scalar(tag, value, step, walltime=moment)
            if "://" in self.url:
                upload(folder, f"{self.url}/{kind}")
        self._written[kind] = max(row[1] for row in new)


def _is_number(value) -> bool:
    return isinstance(value, int | float)
