"""What ``fit`` was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bigdl.orca.learn.position import Goal
from bigdl.orca.learn.pytorch.gradients import Clipping
from bigdl.orca.learn.trigger import EveryEpoch, Trigger

__all__ = ["FitSettings"]


@dataclass
class FitSettings:
    """The arguments of ``fit`` as the workers get them.

    Attributes
    ----------
    goal : Goal
        Where to stop; epochs and steps are counted on from fit to fit.
    label_cols : sequence of str
        With `weight_col` its column is the last one.
    per_worker : bool
        Whether the validation figures of each worker are wanted too.
    trigger : Trigger or None
        When to take a checkpoint before the end.
    run_url : str or None
        Folder for checkpoints; None sends them to the driver.
    keep : int
        How many checkpoints stay in that folder.
    accumulate : int
        Batches of one update.
    precision : str
        ``"fp32"`` or ``"bf16"``.
    weighted : bool
        Whether the last label column holds the weights of the rows.
    summary : bool
        Whether loss, learning rate and throughput of every step are recorded.
    """

    goal: Goal
    batch_size: int
    seed: int
    feature_cols: Sequence[str]
    label_cols: Sequence[str]
    shuffle: bool = True
    drop_last: bool = False
    trigger: Trigger | None = field(default_factory=EveryEpoch)
    run_url: str | None = None
    metrics: Sequence[Any] = ()
    callbacks: Sequence[Any] = ()
    per_worker: bool = False
    keep: int = 2
    clipping: Clipping = field(default_factory=Clipping)
    accumulate: int = 1
    precision: str = "fp32"
    weighted: bool = False
    summary: bool = False
