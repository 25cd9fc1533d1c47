"""Pruners: who stops a trial that does not look promising."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from bigdl.tuning._by_name import member, optuna, quietly_made

__all__ = ["PrunerType", "create_pruner"]


class PrunerType(StrEnum):
    """Names of pruners."""

    HyperBand = "HyperBand"
    Median = "Median"
    Nop = "Nop"
    Patient = "Patient"
    Percentile = "Percentile"
    SuccessiveHalving = "SuccessiveHalving"
    Threshold = "Threshold"


_CLASSES = {
    PrunerType.HyperBand: "HyperbandPruner",
    PrunerType.Median: "MedianPruner",
    PrunerType.Nop: "NopPruner",
    PrunerType.Patient: "PatientPruner",
    PrunerType.Percentile: "PercentilePruner",
    PrunerType.SuccessiveHalving: "SuccessiveHalvingPruner",
    PrunerType.Threshold: "ThresholdPruner",
}


def create_pruner(pruner: Any = None, **arguments: Any) -> Any:
    """A pruner of Optuna.

    Parameters
    ----------
    pruner : PrunerType or str or optuna.pruners.BasePruner, optional
        Its name; by default trials are not pruned. A pruner is returned as it is.
    **arguments
        Of Optuna's class, for example ``n_startup_trials``. ``Patient`` wraps no other pruner
        unless it is given ``wrapped_pruner``.

    Returns
    -------
    optuna.pruners.BasePruner

    Raises
    ------
    UsageError
        If there is no such pruner, or it does not take the arguments.
    """
    pruners = optuna().pruners
    if isinstance(pruner, pruners.BasePruner):
        return pruner
    kind = PrunerType.Nop if pruner is None else member(PrunerType, pruner, "pruner")
    if kind is PrunerType.Patient:
        arguments.setdefault("wrapped_pruner", None)
    return quietly_made(getattr(pruners, _CLASSES[kind]), arguments, f"pruner {kind.value!r}")
