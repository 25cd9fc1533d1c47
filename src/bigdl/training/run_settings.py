"""What ``fit`` of every framework was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from bigdl.training.position import Goal
from bigdl.training.trigger import EveryEpoch, Trigger

__all__ = ["RunSettings"]


@dataclass
class RunSettings:
    """Arguments of ``fit`` that do not depend on the framework, as the workers get them.

    Attributes
    ----------
    goal : Goal
        Where to stop; epochs and steps are counted on from fit to fit.
    batch_size : int
        Rows of a batch over all workers together.
    seed : int
    shuffle, drop_last : bool
    trigger : Trigger or None
        When to take a checkpoint before the end.
    end : Trigger or None
        When to stop before the goal. It sees losses and scores at the end of epochs only, since
        those of a batch differ between the workers.
    run_url : str or None
        Folder for checkpoints; None sends them to the driver.
    keep : int
        How many checkpoints stay in that folder.
    """

    goal: Goal
    batch_size: int
    seed: int
    shuffle: bool = field(default=True, kw_only=True)
    drop_last: bool = field(default=False, kw_only=True)
    trigger: Trigger | None = field(default_factory=EveryEpoch, kw_only=True)
    end: Trigger | None = field(default=None, kw_only=True)
    run_url: str | None = field(default=None, kw_only=True)
    keep: int = field(default=2, kw_only=True)
