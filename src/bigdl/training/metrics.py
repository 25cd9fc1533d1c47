"""Figures of epochs: how they add up in the workers, and the forms in which they are returned.

The forms are those of BigDL 2.x.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.runtime.collectives.base import GradientSync
from bigdl.training.state import dumps, loads


class EvaluationMetrics(dict[str, Any]):
    """Figures of an evaluation by the names of BigDL 2.x, also found by those of a fit.

    A figure ``validation_<name>`` is also found as ``val_<name>``; it is listed once.

    Examples
    --------
    >>> from bigdl.training.metrics import EvaluationMetrics
    >>> figures = EvaluationMetrics(validation_loss=0.5)
    >>> figures["val_loss"], "val_loss" in figures, list(figures)
    (0.5, True, ['validation_loss'])
    """

    def __missing__(self, name: str) -> Any:
        key = _other_name(name)
        if key is None or not dict.__contains__(self, key):
            raise KeyError(name)
        return self[key]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or super().__contains__(_other_name(name))

    def get(self, name: Any, default: Any = None) -> Any:
        """Return a figure by either name, or the default."""
        try:
            return self[name]
        except KeyError:
            return default


def _other_name(name: object) -> str | None:
    """Return the name that an evaluation lists for a figure of a fit."""
    is_of_fit = isinstance(name, str) and name.startswith("val_")
    return f"validation_{str(name).removeprefix('val_')}" if is_of_fit else None


@dataclass
class EpochSums:
    """Sums over the steps of an epoch in one worker; part of a checkpoint inside an epoch.

    A sample counts 1, or its weight. ``loss`` is the sum of the samples' losses times their counts,
    so the mean loss is the sum of ``loss`` over the workers divided by that of ``counted``.
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

    def add(
        self, loss: float, counted: float, rows: int, *, step_s: float, **seconds: float
    ) -> None:
        """Add one step; without rows its loss is 0 and its times do not count as a batch.

        Parameters
        ----------
        loss, counted, rows
            Of this worker.
        step_s : float
            Seconds of the whole step.
        **seconds
            ``fetch_s``, ``forward_s`` and ``backward_s`` of it.
        """
        self.loss += loss
        self.counted += counted
        self.rows += rows
        self.batches += bool(rows)
        self.last_loss, self.last_counted = loss, counted
        for name, value in {"epoch_s": step_s, **seconds}.items():
            setattr(self, name, getattr(self, name) + value)

    def mean(self) -> float | None:
        """Mean loss of this worker's samples so far."""
        return self.loss / self.counted if self.counted else None

    def _losses(self) -> dict[str, float | None]:
        last = self.last_loss / self.last_counted if self.last_counted else None
        return {"train_loss": self.mean(), "last_train_loss": last}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def all_reduce(self, sync: GradientSync) -> dict[str, Any] | None:
        """Figures of all workers, the same on every rank; None if nobody did anything."""
        return self.merged([EpochSums(*values) for values in sync.all_gather(astuple(self))])

    @classmethod
    def total(cls, everyone: Iterable[EpochSums]) -> EpochSums:
        """Sums of workers with these sums."""
        return cls(*map(sum, zip(*map(astuple, everyone), strict=True)))

    @staticmethod
    def merged(everyone: Sequence[EpochSums]) -> dict[str, Any] | None:
        """Figures of workers with these sums; None if none of them did anything."""
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
            },
            "workers": [
                {"batch_count": int(s.batches), "num_samples": int(s.rows), **s._losses()}
                for s in everyone
            ],
        }


class Timers:
    """Seconds that callbacks of a worker spend on what they name; of a profile.

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
        """Add the time of a block to those of a name."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds.setdefault(name, []).append(time.perf_counter() - started)

    def stats(self) -> dict[str, float]:
        """Mean and last seconds by name, of this worker and of what is not reported yet."""
        return {
            f"{kind}_{name}_s": value
            for name, those in self._seconds.items()
            for kind, value in (("mean", sum(those) / len(those)), ("last", those[-1]))
        }

    def take(self) -> dict[str, list[float]]:
        """Return sum and count of each name, and begin anew."""
        taken = {name: [sum(those), len(those)] for name, those in self._seconds.items()}
        self._seconds.clear()
        return taken

    @staticmethod
    def means(everyone: Iterable[dict[str, list[float]]]) -> dict[str, float]:
        """``mean_<name>_s`` of what workers gave from :meth:`take`."""
        total: dict[str, list[float]] = {}
        for taken in everyone:
            for name, (seconds, count) in taken.items():
                before = total.get(name, [0.0, 0])
                total[name] = [before[0] + seconds, before[1] + count]
        return {f"mean_{name}_s": seconds / count for name, (seconds, count) in total.items()}


class Records:
    """Numbers that a run records again and again; kept in its checkpoints.

    Parameters
    ----------
    names : sequence of str
        Of the numbers of a row.

    Attributes
    ----------
    rows : list of list of float
        Optimizer step, time in seconds since 1970, and the numbers.
    """

    def __init__(self, names: Sequence[str]):
        self.names = names
        self.rows: list[list[float]] = []

    def add(self, step: int, numbers: Iterable[float]) -> None:
        """Add a row, as of now."""
        self.rows.append([float(step), time.time(), *numbers])

    def dump(self) -> bytes:
        """Return all rows as a file."""
        import torch

        return dumps(torch.tensor(self.rows, dtype=torch.float64).reshape(-1, 2 + len(self.names)))

    def load(self, data: bytes) -> None:
        """The inverse of :meth:`dump`; rows of other numbers, of another release, are left out."""
        tensor = loads(data)
        self.rows = tensor.tolist() if tensor.shape[1] == 2 + len(self.names) else []


def summaries_of(rows: list[list[float]], tags: Sequence[str]) -> dict[str, list[list[float]]]:
    """Return ``[step, number, time]`` of every row of :class:`Records`, by tags of the numbers."""
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
    """Rule by which the losses of workers add up.

    Attributes
    ----------
    weighted : bool
        True if rows count their weights instead of 1.
    is_sum : bool
        True if the loss adds up over the rows.
    """

    weighted: bool
    is_sum: bool

    def parts(
        self, loss: float, counted: float, total: float, rows: int, batch_rows: int
    ) -> tuple[float, float]:
        """Return what a worker adds to the sum of losses, and to what that is divided by.

        Parameters
        ----------
        loss : float
            Of this worker's rows.
        counted, total : float
            What the loss was divided by on this worker, and over all of them.
        rows, batch_rows : int
            Rows of this worker, and of all of them.
        """
        if self.weighted:
            return (loss if self.is_sum else loss * counted), counted
        if not self.is_sum:
            loss = loss * (counted / total if total else 0.0) * batch_rows
        return loss, float(rows)


_NO_HEADLINES = (*_DROPPED, "epoch", "batch_count", "num_samples", "last_train_loss", "steps")


def headline(entry: dict[str, Any]) -> dict[str, float]:
    """The losses and metrics of an epoch of any framework."""
    return {
        name: value
        for name, value in entry.get("logs", entry).items()
        if isinstance(value, int | float) and name.removeprefix("val_") not in _NO_HEADLINES
    }


def validation_names(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures of an evaluation under the names that they have in an epoch of ``fit``."""
    return {
        name if name.startswith("val_") else f"val_{name.lower()}": value
        for name, value in figures.items()
    }


def score_of(entry: dict[str, Any]) -> float | None:
    """The first metric of an epoch, if it has one."""
    reserved = ("val_loss", "val_num_samples")
    names = [n for n in entry if n.startswith("val_") and n not in reserved]
    return entry[names[0]] if names else None


def monitored_metric(figures: dict[str, Any], monitor: str | None, who: str) -> float:
    """The figure of an epoch that somebody monitors.

    Parameters
    ----------
    figures : dict
    monitor : str or None
        A name, with or without ``val_``; ``"score"`` is the first metric, None the validation loss
        or without validation the training loss.
    who : str
        For the message.

    Raises
    ------
    UsageError
        If the epoch has no such number.
    """
    value = None
    if monitor is None:
        value = figures.get("val_loss", figures.get("train_loss"))
    elif monitor == "score":
        value = score_of(figures)
    else:
        for name in (monitor, f"val_{monitor.lower()}", monitor.lower()):
            value = figures.get(name) if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        names = [k for k, v in figures.items() if isinstance(v, int | float) and k not in _DROPPED]
        raise UsageError(
            f"The {who} monitors {monitor or 'val_loss'!r}, which the epoch has no figure of; it "
            f"has {names}",
            code="name-unknown",
            metric=monitor,
            allowed=names,
        )
    return float(value)


def epoch_as_returned(
    entry: dict[str, Any], reduce_results: bool, profile: bool
) -> dict[str, Any] | list[dict[str, Any]]:
    """An epoch of the history: the figures of all workers, or a list of every worker's own."""
    kept = {k: v for k, v in entry["profile"].items() if k.endswith("_s") or k == "bytes_per_step"}
    times = {"profile": kept} if profile else {}
    if not reduce_results:
        return [
            as_returned({"epoch": entry["epoch"], **figures, **times})
            for figures in entry["workers"]
        ]
    return as_returned({k: v for k, v in entry.items() if k not in _DROPPED} | times)


class MetricValue(float):
    """A figure of a fit or an evaluation: a float that JSON takes.

    Programs for BigDL 2.x have a tensor of one number here: its methods that give the number work,
    and so do functions of torch.
    """

    ndim, shape = 0, ()

    def item(self) -> float:
        """Return the number."""
        return float(self)

    tolist = item

    def numpy(self) -> Any:
        """Return the number as an array without dimensions."""
        import numpy as np

        return np.asarray(float(self), "float32")

    def detach(self) -> MetricValue:
        """Return the figure."""
        return self

    cpu = clone = detach

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with tensors in place of figures."""
        import torch

        def tensor(value: Any) -> Any:
            return torch.tensor(float(value)) if isinstance(value, MetricValue) else value

        named = {name: tensor(value) for name, value in (keywords or {}).items()}
        return function(*map(tensor, arguments), **named)


class MetricDict(dict[str, Any]):
    """Figures by name, where a metric answers to its name in ``fit`` and to that in ``evaluate``.

    ``evaluate`` gives ``Accuracy`` and the epochs of ``fit`` have ``val_accuracy``, as in BigDL
    2.x. Each is found under the other name, too, while the dict and its JSON hold it once.

    Examples
    --------
    >>> figures = MetricDict(num_samples=2, Accuracy=0.5)
    >>> figures["val_accuracy"], "val_accuracy" in figures, list(figures)
    (0.5, True, ['num_samples', 'Accuracy'])
    """

    def _other(self, key: Any) -> Any:
        """Return the name that a metric has here; the key itself where there is none."""
        wanted = _name_of_metric(key)
        if wanted is not None and not super().__contains__(key):
            for name in self:
                if _name_of_metric(name) == wanted:
                    return name
        return key

    def __missing__(self, key: Any) -> Any:
        other = self._other(key)
        if other == key:
            raise KeyError(key)
        return self[other]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._other(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a figure under either of its names."""
        return super().get(self._other(key), default)


def _name_of_metric(key: Any) -> str | None:
    """Return what the names of a metric have in common; None of losses and counts."""
    if not isinstance(key, str):
        return None
    name = key.lower().removeprefix("val_").removeprefix("validation_")
    return None if name in ("loss", *_NO_HEADLINES) or "train_loss" in name else name


def as_returned(figures: dict[str, Any]) -> dict[str, Any]:
    """Losses and counts as Python numbers, metrics as numbers; a missing one is nan.

    A metric of several numbers is a tensor, or a tuple of tensors.
    """
    return MetricDict(
        (key, _number(value) if key in _PLAIN or "train_loss" in key else _metric(value))
        for key, value in figures.items()
    )


def _number(value: Any) -> Any:
    return float("nan") if value is None else value


def _metric(value: Any) -> Any:
    return _tensor(value) if isinstance(value, list | dict) else MetricValue(_number(value))


def _tensor(value: Any) -> Any:
    import torch

    if isinstance(value, dict):  # a curve: several tensors
        return tuple(_tensor(item) for item in value["items"])
    return torch.tensor(_number(value))
