"""Trials whose process is gone, and what becomes of them.

A trial that runs in a database has a note of the process that runs its search. When the search is
resumed, a trial that still runs according to the database, but whose process there is no more, is
marked as failed and proposed again with the same parameters. So is, in a search by several
processes, a trial that a killed process leaves behind. A trial is proposed again once: what kills
its process twice is the trial's own doing.

Of a process on another machine nothing is known, and its trials are left alone.
"""

from __future__ import annotations

import platform
from contextlib import suppress
from typing import Any

from bigdl.common.errors import require
from bigdl.tuning._by_name import optuna

__all__ = ["RETRY_OF", "mark", "propose_again", "recover"]

RETRY_OF = "retry_of"
"""User attribute: the number of the lost trial that this one repeats."""

_PROCESS = "process"
_CLOCK_STEP = 2.0  # seconds by which a clock that is set moves the start of a process


def mark(trial: Any) -> None:
    """Note in a trial that this process runs its search."""
    process = require("psutil", "automl").Process()
    trial.set_user_attr(_PROCESS, [platform.node(), process.pid, process.create_time()])


def recover(study: Any) -> list[int]:
    """Give up the trials of processes that are gone, and propose them again.

    Returns
    -------
    list of int
        Numbers of the lost trials.
    """
    running = study.get_trials(deepcopy=False, states=(optuna().trial.TrialState.RUNNING,))
    lost = [trial for trial in running if _is_gone(trial.user_attrs.get(_PROCESS))]
    failed = optuna().trial.TrialState.FAIL
    for trial in lost:
        with suppress(optuna().exceptions.UpdateFinishedTrialError):  # by another that recovers
            # Not `study.tell`, after which the grid's sampler may end a search that has not begun.
            study._storage.set_trial_state_values(trial._trial_id, state=failed)
            propose_again(study, trial)
    return [trial.number for trial in lost]


def propose_again(study: Any, trial: Any) -> bool:
    """Queue the parameters of a lost trial, unless it is a repetition itself.

    Parameters
    ----------
    study : optuna.Study
    trial : optuna.trial.FrozenTrial

    Returns
    -------
    bool
        Whether there is a new trial.
    """
    if RETRY_OF in trial.user_attrs:
        return False
    again = optuna().create_trial(
        state=optuna().trial.TrialState.WAITING,
        params=trial.params,
        distributions=trial.distributions,
        system_attrs=trial.system_attrs,  # the grid's sampler has its place there
        user_attrs={RETRY_OF: trial.number},
    )
    study.add_trial(again)
    return True


def _is_gone(process: Any) -> bool:
    if process is None:
        return False
    node, pid, started = process
    if node != platform.node():
        return False
    psutil = require("psutil", "automl")
    try:
        found = psutil.Process(pid)
        alive = found.status() != psutil.STATUS_ZOMBIE
        return not alive or abs(found.create_time() - started) > _CLOCK_STEP
    except psutil.NoSuchProcess:
        return True
