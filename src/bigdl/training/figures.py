"""The forms in which ``fit`` and ``evaluate`` return their figures: those of BigDL 2.x."""

from __future__ import annotations

from bigdl.common.errors import UsageError

__all__ = ["as_returned", "epoch_as_returned", "figure_of", "score_of", "validation_names"]

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


def validation_names(figures: dict) -> dict:
    """Figures of an evaluation under the names that they have in an epoch of ``fit``."""
    return {
        name if name.startswith("val_") else f"val_{name.lower()}": value
        for name, value in figures.items()
    }


def score_of(entry: dict):
    """The first metric of an epoch, if it has one."""
    reserved = ("val_loss", "val_num_samples")
    names = [n for n in entry if n.startswith("val_") and n not in reserved]
    return entry[names[0]] if names else None


def figure_of(figures: dict, monitor: str | None, who: str) -> float:
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
    found = None
    if monitor is None:
        found = figures.get("val_loss", figures.get("train_loss"))
    elif monitor == "score":
        found = score_of(figures)
    else:
        for name in (monitor, f"val_{monitor.lower()}", monitor.lower()):
            found = figures.get(name) if found is None else found
    if isinstance(found, bool) or not isinstance(found, int | float):
        known = [k for k, v in figures.items() if isinstance(v, int | float) and k not in _DROPPED]
        raise UsageError(
            f"The {who} monitors {monitor or 'val_loss'!r}, which the epoch has no figure of; it "
            f"has {known}"
        )
    return float(found)


def epoch_as_returned(entry: dict, reduce_results: bool, profile: bool) -> dict | list[dict]:
    """An epoch of the history: the figures of all workers, or a list of every worker's own."""
    kept = {k: v for k, v in entry["profile"].items() if k.endswith("_s") or k == "bytes_per_step"}
    times = {"profile": kept} if profile else {}
    if not reduce_results:
        return [as_returned({"epoch": entry["epoch"], **own, **times}) for own in entry["workers"]]
    return as_returned({k: v for k, v in entry.items() if k not in _DROPPED} | times)


def as_returned(figures: dict) -> dict:
    """Losses and counts as Python numbers, metrics as tensors; a missing one is nan."""
    return {
        key: _number(value) if key in _PLAIN or "train_loss" in key else _tensor(value)
        for key, value in figures.items()
    }


def _number(value):
    return float("nan") if value is None else value


def _tensor(value):
    import torch

    if isinstance(value, dict):  # a curve: several tensors
        return tuple(_tensor(item) for item in value["items"])
    return torch.tensor(_number(value))
