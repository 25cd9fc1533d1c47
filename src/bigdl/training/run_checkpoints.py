"""Checkpoints of a running fit, as the loops of all frameworks write them."""

from __future__ import annotations

from typing import Any

from bigdl.common.errors import UsageError
from bigdl.training.checkpoint import CheckpointDirectory
from bigdl.training.run_settings import RunSettings
from bigdl.training.trigger import Trigger, TriggerState

__all__ = ["fires", "open_run"]


def open_run(settings: RunSettings, worker: Any, rank: int) -> CheckpointDirectory | None:
    """The folder of this run, or None without a ``model_dir``.

    Raises
    ------
    UsageError
        On rank 0, if the worker does not see the folder of the driver.
    """
    if settings.run_url is None:
        return None
    directory = CheckpointDirectory(settings.run_url, settings.keep)
    if rank == 0 and not directory.is_shared():
        raise UsageError(
            f"The worker on {worker.host} does not see model_dir {settings.run_url!r}; pass a "
            "folder that the driver and all workers share"
        )
    return directory


def fires(trigger: Trigger | None, state: TriggerState, sync: Any) -> bool:
    """Whether a trigger fires, the same on every rank; maybe a collective."""
    if trigger is None:
        return False
    answer = bool(trigger(state))
    if not trigger.is_reproducible:  # the ranks' answers may differ: that of rank 0 counts
        answer = bool(sync.all_gather([float(answer)])[0][0])
    return answer
