"""Epoch metrics: sums over steps and workers, and the formats in which users get them.

The formats are those of BigDL 2.x.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.runtime.collectives.base import GradientSync
from bigdl.training.state import dumps, loads

if TYPE_CHECKING:
    import numpy as np
    import torch


class EvaluationMetrics(dict[str, Any]):
    """Evaluation metrics by their BigDL 2.x names; the names that ``fit`` uses also work.

    ``validation_<name>`` can also be read as ``val_<name>``; iteration lists it once.

    Examples
    --------
    >>> from bigdl.training.metrics import EvaluationMetrics
    >>> metrics = EvaluationMetrics(validation_loss=0.5)
    >>> metrics["val_loss"], "val_loss" in metrics, list(metrics)
    (0.5, True, ['validation_loss'])
    """

    def __missing__(self, name: str) -> Any:  # a number, or what a metric returns
        key = _other_name(name)
        if key is None or not dict.__contains__(self, key):
            raise KeyError(name)
        return self[key]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or super().__contains__(_other_name(name))

    def get(self, name: Any, default: Any = None) -> Any:  # a number, or what a metric returns
        """Return a metric by either of its names, or the default."""
        try:
            return self[name]
        except KeyError:
            return default


def _other_name(name: object) -> str | None:
    """Convert the ``val_<name>`` of ``fit`` to the ``validation_<name>`` of an evaluation."""
    is_of_fit = isinstance(name, str) and name.startswith("val_")
    return f"validation_{str(name).removeprefix('val_')}" if is_of_fit else None


@dataclass
class EpochSums:
    """One worker's sums of losses, counts and durations, saved in mid-epoch checkpoints.

    A sample counts 1, or its weight. ``loss`` sums the samples' losses times their counts, so the
    mean loss is the sum of ``loss`` over the workers divided by the sum of ``counted``.
    """

    loss: float = 0.0
    rows: float = 0.0
    batches: float = 0.0
    last_loss: float = 0.0
    epoch_s: float = 0.0
    fetch_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    counted: float = 0.0
    last_counted: float = 0.0
    move_s: float = 0.0
    exchange_s: float = 0.0

    def add(
        self, loss: float, counted: float, rows: int, *, step_s: float, **seconds: float
    ) -> None:
        """Add one step; a step without rows has loss 0 and does not count as a batch.

        Parameters
        ----------
        loss, counted, rows
            Loss, sum of sample weights and number of rows of this worker.
        step_s : float
            Seconds of the whole step.
        **seconds
            ``fetch_s``, ``move_s``, ``forward_s``, ``backward_s`` and ``exchange_s`` of the step.
            The exchange includes waiting for other workers.
        """
        self.loss += loss
        self.counted += counted
        self.rows += rows
        self.batches += bool(rows)
        self.last_loss, self.last_counted = loss, counted
        for name, value in {"epoch_s": step_s, **seconds}.items():
            setattr(self, name, getattr(self, name) + value)

    def mean(self) -> float | None:
        """Return the mean loss of this worker's samples so far, or None."""
        return self.loss / self.counted if self.counted else None

    def _losses(self) -> dict[str, float | None]:
        last = self.last_loss / self.last_counted if self.last_counted else None
        return {"train_loss": self.mean(), "last_train_loss": last}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def all_reduce(self, sync: GradientSync) -> dict[str, Any] | None:
        """Return the metrics of all workers, equal on every rank; None if no worker had rows."""
        return self.merged([EpochSums(*values) for values in sync.all_gather(astuple(self))])

    @classmethod
    def total(cls, everyone: Iterable[EpochSums]) -> EpochSums:
        """Add up the EpochSums of several workers."""
        return cls(*map(sum, zip(*map(astuple, everyone), strict=True)))

    @staticmethod
    def merged(everyone: Sequence[EpochSums]) -> dict[str, Any] | None:
        """Combine the sums of all workers into epoch metrics; None if no worker had rows."""
        total = EpochSums.total(everyone)
        if not total.rows:
            return None
        workers, batches = len(everyone), max(1.0, total.batches)
        return {
            "batch_count": total.batches / workers,
            "num_samples": int(total.rows),
            **total._losses(),
            "profile": {
                "mean_train_epoch_s": total.epoch_s / workers,
                "mean_fetch_s": total.fetch_s / batches,
                "mean_fwd_s": total.forward_s / batches,
                "mean_bwd_s": total.backward_s / batches,
                "mean_exchange_s": total.exchange_s / batches,
            },
            "workers": [
                {"batch_count": int(s.batches), "num_samples": int(s.rows), **s._losses()}
                for s in everyone
            ],
        }


class Timers:
    """Durations of named operations in a worker's callbacks, for the profile.

    Examples
    --------
    >>> timers = Timers()
    >>> with timers.record("augment"):
    ...     pass
    >>> list(timers.stats())
    ['mean_augment_s', 'last_augment_s']
    """

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def record(self, name: str) -> Iterator[None]:
        """Context manager that measures the duration of its block and records it under `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds.setdefault(name, []).append(time.perf_counter() - started)

    def stats(self) -> dict[str, float]:
        """Return each name's mean and latest duration in seconds since the last report."""
        return {
            f"{statistic}_{name}_s": value
            for name, seconds in self._seconds.items()
            for statistic, value in (("mean", sum(seconds) / len(seconds)), ("last", seconds[-1]))
        }

    def take(self) -> dict[str, list[float]]:
        """Return each name's total seconds and number of measurements, and reset the timers."""
        taken = {name: [sum(seconds), len(seconds)] for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken

    @staticmethod
    def means(everyone: Iterable[dict[str, list[float]]]) -> dict[str, float]:
        """Merge the results of :meth:`take` on all workers into ``mean_<name>_s``."""
        total: dict[str, list[float]] = {}
        for taken in everyone:
            for name, (seconds, count) in taken.items():
                before = total.get(name, [0.0, 0])
                total[name] = [before[0] + seconds, before[1] + count]
        return {f"mean_{name}_s": seconds / count for name, (seconds, count) in total.items()}


class Records:
    """Time series of numbers that a training run records and saves in its checkpoints.

    Parameters
    ----------
    names : sequence of str
        Names of the recorded numbers.

    Attributes
    ----------
    rows : list of list of float
        Optimizer step, time in seconds since 1970, then the recorded numbers.
    """

    def __init__(self, names: Sequence[str]):
        self.names = names
        self.rows: list[list[float]] = []

    def add(self, step: int, numbers: Iterable[float]) -> None:
        """Append a row with the current time."""
        self.rows.append([float(step), time.time(), *numbers])

    def dump(self) -> bytes:
        """Serialize all rows for a checkpoint file."""
        import torch

        return dumps(torch.tensor(self.rows, dtype=torch.float64).reshape(-1, 2 + len(self.names)))

    def load(self, data: bytes) -> None:
        """Load the rows that :meth:`dump` serialized; ignore rows with other columns."""
        tensor = loads(data)
        self.rows = tensor.tolist() if tensor.shape[1] == 2 + len(self.names) else []


def summaries_of(rows: list[list[float]], tags: Sequence[str]) -> dict[str, list[list[float]]]:
    """Convert rows of :class:`Records` to lists of ``[step, value, time]`` by tag."""
    return {
        tag: [[int(row[0]), row[column], row[1]] for row in rows]
        for column, tag in enumerate(tags, 2)
    }


_PLAIN = (
    "epoch",
    "profile",
    "batch_count",
    "num_samples",
    "val_num_samples",
    "val_loss",
    "dropped_contributions",
    "dropped_rows",
    "discarded_steps",
)
_DROPPED = ("workers", "global_step", "profile")


@dataclass(frozen=True)
class LossRule:
    """Rule for adding up the losses of several workers.

    Attributes
    ----------
    weighted : bool
        True if rows count by their weights instead of 1.
    is_sum : bool
        True if the loss is a sum over the rows, not a mean.
    """

    weighted: bool
    is_sum: bool

    def parts(
        self, loss: float, counted: float, total: float, rows: int, batch_rows: int
    ) -> tuple[float, float]:
        """Return a worker's contributions to the sum of losses and to the divisor of that sum.

        Parameters
        ----------
        loss : float
            Loss of this worker's rows.
        counted, total : float
            Divisor of the loss on this worker, and summed over all workers.
        rows, batch_rows : int
            Rows of the batch on this worker, and on all workers.
        """
        if self.weighted:
            return (loss if self.is_sum else loss * counted), counted
        if not self.is_sum:
            loss = loss * (counted / total if total else 0.0) * batch_rows
        return loss, float(rows)


_NO_HEADLINES = (*_DROPPED, "epoch", "batch_count", "num_samples", "last_train_loss", "steps")


def headline(entry: dict[str, Any]) -> dict[str, float]:
    """Select the losses and metrics from the history entry of an epoch, for any framework."""
    return {
        name: value
        for name, value in entry.get("logs", entry).items()
        if isinstance(value, int | float) and name.removeprefix("val_") not in _NO_HEADLINES
    }


def validation_names(metrics: dict[str, Any]) -> dict[str, Any]:
    """Rename evaluation metrics to the ``val_`` names that ``fit`` uses for an epoch."""
    return {
        name if name.startswith("val_") else f"val_{name.lower()}": value
        for name, value in metrics.items()
    }


def score_of(entry: dict[str, Any]) -> float | None:
    """Return the first validation metric of an epoch, or None."""
    reserved = ("val_loss", "val_num_samples")
    names = [n for n in entry if n.startswith("val_") and n not in reserved]
    return entry[names[0]] if names else None


def monitored_metric(metrics: dict[str, Any], monitor: str | None, who: str) -> float:
    """Return the epoch metric that a callback or scheduler monitors.

    Parameters
    ----------
    metrics : dict
    monitor : str or None
        A name, with or without ``val_``. ``"score"`` is the first validation metric. None is the
        validation loss, or the training loss without validation.
    who : str
        Name of the monitor, for the error message.

    Raises
    ------
    UsageError
        If the epoch has no such number.
    """
    value = None
    if monitor is None:
        value = metrics.get("val_loss", metrics.get("train_loss"))
    elif monitor == "score":
        value = score_of(metrics)
    else:
        for name in (monitor, f"val_{monitor.lower()}", monitor.lower()):
            value = metrics.get(name) if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        names = [k for k, v in metrics.items() if isinstance(v, int | float) and k not in _DROPPED]
        raise UsageError(
            f"The {who} monitors {monitor or 'val_loss'!r}, which is no metric of the epoch; its "
            f"metrics are {names}",
            code="name-unknown",
            metric=monitor,
            allowed=names,
        )
    return float(value)


def epoch_as_returned(
    entry: dict[str, Any], reduce_results: bool, profile: bool
) -> dict[str, Any] | list[dict[str, Any]]:
    """Convert an epoch's history entry to merged metrics, or to a list of each worker's metrics."""
    kept = {k: v for k, v in entry["profile"].items() if k.endswith("_s") or k == "bytes_per_step"}
    times = {"profile": kept} if profile else {}
    if not reduce_results:
        return [
            as_returned({"epoch": entry["epoch"], **metrics, **times})
            for metrics in entry["workers"]
        ]
    return as_returned({k: v for k, v in entry.items() if k not in _DROPPED} | times)


class MetricValue(float):
    """A metric of ``fit`` or ``evaluate``: a JSON-serializable float.

    BigDL 2.x returned a one-element tensor here. The tensor methods that return the number still
    work, and so do torch functions.
    """

    ndim, shape = 0, ()

    def item(self) -> float:
        """Return the value as a Python float."""
        return float(self)

    tolist = item

    def numpy(self) -> np.ndarray:
        """Return the value as a 0-D NumPy array."""
        import numpy as np

        return np.asarray(float(self), "float32")

    def detach(self) -> MetricValue:
        """Return the metric itself."""
        return self

    cpu = clone = detach

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: object,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:  # the result of `function`
        """Call a torch function with tensors in place of metric values."""
        import torch

        def tensor(value: object) -> object:
            return torch.tensor(float(value)) if isinstance(value, MetricValue) else value

        named = {name: tensor(value) for name, value in (keywords or {}).items()}
        return function(*map(tensor, arguments), **named)


class MetricDict(dict[str, Any]):
    """Metrics by name, readable by their names in both ``fit`` and ``evaluate``.

    As in BigDL 2.x, ``evaluate`` returns ``Accuracy`` and the epochs of ``fit`` ``val_accuracy``.
    Each can also be read by the other name; the dict and its JSON hold it once.

    Examples
    --------
    >>> metrics = MetricDict(num_samples=2, Accuracy=0.5)
    >>> metrics["val_accuracy"], "val_accuracy" in metrics, list(metrics)
    (0.5, True, ['num_samples', 'Accuracy'])
    """

    def _other(self, key: object) -> Any:
        """Return the name under which a metric is stored, or `key` if the metric is not stored."""
        wanted = _name_of_metric(key)
        if wanted is not None and not super().__contains__(key):
            for name in self:
                if _name_of_metric(name) == wanted:
                    return name
        return key

    def __missing__(self, key: object) -> Any:  # a number, or what a metric returns
        other = self._other(key)
        if other == key:
            raise KeyError(key)
        return self[other]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._other(key))

    def get(self, key: object, default: object = None) -> Any:  # a number, or what a metric returns
        """Return a metric by either of its names, or the default."""
        return super().get(self._other(key), default)


def _name_of_metric(key: object) -> str | None:
    """Normalize a metric's name; return None for losses and counts."""
    if not isinstance(key, str):
        return None
    name = key.lower().removeprefix("val_").removeprefix("validation_")
    return None if name in ("loss", *_NO_HEADLINES) or "train_loss" in name else name


def as_returned(metrics: dict[str, Any]) -> dict[str, Any]:
    """Convert losses and counts to numbers, metrics to MetricValue objects, and None to nan.

    A metric with several numbers becomes a tensor, or a tuple of tensors.
    """
    return MetricDict(
        (key, _number(value) if key in _PLAIN or "train_loss" in key else _metric(value))
        for key, value in metrics.items()
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _metric(value: Any) -> float | torch.Tensor | tuple[Any, ...]:
    return _tensor(value) if isinstance(value, list | dict) else MetricValue(_number(value))


def _tensor(value: Any) -> torch.Tensor | tuple[Any, ...]:
    import torch

    if isinstance(value, dict):  # a curve: several tensors
        return tuple(_tensor(item) for item in value["items"])
    return torch.tensor(_number(value))
