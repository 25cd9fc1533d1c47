"""Triggers of a training: when to write a checkpoint, and when to stop."""

from bigdl.training.position import (
    EveryEpoch,
    MaxEpoch,
    MaxIteration,
    MaxScore,
    MinLoss,
    SeveralIteration,
    Trigger,
    TriggerAnd,
    TriggerOr,
    TriggerState,
)

__all__ = [
    "EveryEpoch",
    "MaxEpoch",
    "MaxIteration",
    "MaxScore",
    "MinLoss",
    "SeveralIteration",
    "Trigger",
    "TriggerAnd",
    "TriggerOr",
    "TriggerState",
]
