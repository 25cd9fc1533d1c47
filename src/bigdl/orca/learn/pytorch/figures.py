"""The forms in which ``fit`` and ``evaluate`` return their figures: those of BigDL 2.x."""

from __future__ import annotations

__all__ = ["as_returned", "epoch_as_returned"]

_PLAIN = ("epoch", "profile", "batch_count", "num_samples", "val_num_samples", "val_loss")


def epoch_as_returned(entry: dict, reduce_results: bool, profile: bool) -> dict | list[dict]:
    """An epoch of the history: the figures of all workers, or a list of every worker's own."""
    times = {"profile": entry["profile"]} if profile else {}
    if not reduce_results:
        return [as_returned({"epoch": entry["epoch"], **own, **times}) for own in entry["workers"]]
    dropped = ("workers", "global_step", "profile")
    return as_returned({k: v for k, v in entry.items() if k not in dropped} | times)


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
