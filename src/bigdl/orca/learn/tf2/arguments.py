"""Arguments of the Estimator's verbs, checked, and what ``fit`` returns."""

from __future__ import annotations

import numbers
from typing import Any

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.orca.learn.layer_fit.figures import PHASES

__all__ = ["check_batch_size", "check_class_weight", "check_frequency", "history"]

_OF_LAYER = (*PHASES, "step_s", "sync_s", "bytes_per_step")


def history(figures: list[dict], params: dict, profile: bool) -> dict:
    """The figures of the epochs as Keras's History has them, and what it was asked for."""
    found: dict[str, Any] = {**params, "steps": figures[-1]["steps"] if figures else None}
    for entry in figures:
        for name, value in entry["logs"].items():
            found.setdefault(name, []).append(value)
    if profile:
        kept = ("mean_train_epoch_s", "mean_fetch_s", "mean_fwd_s", "peak_memory_bytes")
        names = ("epoch_s", "mean_fetch_s", "mean_step_s", "peak_memory_bytes")
        found["profile"] = [
            {name: entry["profile"][key] for name, key in zip(names, kept, strict=True)}
            | {name: entry["profile"][name] for name in _OF_LAYER if name in entry["profile"]}
            for entry in figures
        ]
    return found


def check_batch_size(given, feed) -> int | None:
    """Rows of a batch; a function may do without."""
    if given is None and feed.kind == "DataLoader":
        return None
    return check_positive("batch_size", given)


def check_class_weight(given) -> dict | None:
    """The weight of each class, if it is such a table."""
    if given is None:
        return None
    if not isinstance(given, dict) or not all(isinstance(v, int | float) for v in given.values()):
        raise UsageError(f"class_weight should be a dict of class to weight, got {given!r}")
    return given


def check_frequency(given) -> int | list[int]:
    """After which epochs to validate."""
    if isinstance(given, list | tuple | set | range) and given and all(map(_is_epoch, given)):
        return sorted(map(int, given))
    if _is_epoch(given):
        return int(given)
    raise UsageError(
        "validation_freq should be a positive integer, or a list of the numbers of epochs (from "
        f"1), got {given!r}"
    )


def _is_epoch(given) -> bool:
    is_number = isinstance(given, numbers.Integral) and not isinstance(given, bool)
    return is_number and given >= 1
