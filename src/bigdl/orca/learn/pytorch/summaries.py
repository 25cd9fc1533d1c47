"""Per-step training summaries and per-epoch validation summaries, with TensorBoard files."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from bigdl.common.errors import MissingExtraError, UsageError
from bigdl.orca.learn.arguments import warn_once
from bigdl.orca.learn.pytorch.callbacks.tensorboard import open_writer, writer_class
from bigdl.training.metrics import Records

if TYPE_CHECKING:
    from bigdl.orca.learn.pytorch.evaluation import TorchRunner

TRAIN_TAGS = ("Loss", "LearningRate", "Throughput")

# current metric names by BigDL 2.x name
_OLD_NAMES = {"top1accuracy": "accuracy", "aucscore": "auc"}


class StepSummary(Records):
    """Loss, learning rate and throughput of every update of a run, computed by all ranks."""

    def __init__(self):
        super().__init__(TRAIN_TAGS)
        self._begin()

    def _begin(self):
        self._loss = self._counted = self._samples = self._seconds = 0.0

    def add_batch(
        self, runner: TorchRunner, parts: tuple[float, float], batch_rows: int, seconds: float
    ) -> None:
        """Add a batch; all-gather the sums if the batch completed an update."""
        self._loss += parts[0]
        self._counted += parts[1]
        self._samples += batch_rows
        self._seconds += seconds
        if not runner.updated:
            return
        everyone = runner.sync.all_gather([self._loss, self._counted])
        losses, counted = (sum(numbers) for numbers in zip(*everyone, strict=True))
        throughput = self._samples / self._seconds if self._seconds else 0.0
        rate = float(runner.optimizer.param_groups[0]["lr"])
        mean = losses / counted if counted else float("nan")
        self.add(runner.global_step, [mean, rate, throughput])
        self._begin()


def validation_summary(history: list[dict], tag: str | None) -> list | dict[str, list]:
    """Return ``[step, value, time]`` rows of one validation metric, or a dict of all metrics.

    Parameters
    ----------
    history : list of dict
        Metrics of the epochs.
    tag : str or None
        Name of a metric, or ``"Loss"``.
    """
    summaries: dict[str, list] = {}
    for entry in history:
        for name, value in entry.items():
            is_metric = name.startswith("val_") and isinstance(value, int | float)
            if is_metric and name != "val_num_samples":
                row = [entry["global_step"], value, entry["profile"]["ended_at"]]
                summaries.setdefault(name, []).append(row)
    if tag is None:
        return {name.removeprefix("val_"): rows for name, rows in summaries.items()}
    name = tag.lower().removeprefix("val_") if isinstance(tag, str) else tag
    key = f"val_{_OLD_NAMES.get(name, name)}"
    if key not in summaries:
        names = ", ".join(name.removeprefix("val_") for name in summaries) or "none"
        raise UsageError(
            f"No validation has the metric {tag!r}; available metrics: {names}",
            code="name-unknown",
            metric=tag,
        )
    return summaries[key]


class EventFiles:
    """Writer of summaries to TensorBoard event files, if TensorBoard is installed.

    Parameters
    ----------
    url : str
        Folder; a local path or any fsspec URL.
    """

    def __init__(self, url: str):
        self.url = url
        self._written = {"train": 0, "validation": 0}  # last written step
        try:
            writer_class()
        except MissingExtraError as error:
            warn_once(
                f"No event files are written to {url}; summaries are only kept in memory: {error}"
            )

    def write(self, train: dict, validation: dict) -> None:
        """Write the summary rows that have not been written yet."""
        with contextlib.suppress(MissingExtraError):
            for folder_name, summaries in (("train", train), ("validation", validation)):
                after = self._written[folder_name]
                new = [(t, *r) for t, rows in summaries.items() for r in rows if r[0] > after]
                if not new:
                    continue
                with contextlib.ExitStack() as opened:
                    writer = open_writer(opened, f"{self.url}/{folder_name}")
                    for tag, step, value, moment in new:
                        writer.add_scalar(tag, value, step, walltime=moment)
                self._written[folder_name] = max(row[1] for row in new)
