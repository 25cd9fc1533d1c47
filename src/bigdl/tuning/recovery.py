"""Recovery of trials whose process is gone.

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
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import require

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

__all__ = ["RETRY_OF", "propose_again", "record_process", "recover"]

RETRY_OF = "retry_of"
"""User attribute: the number of the lost trial that this one repeats."""

_PROCESS = "process"
_CLOCK_STEP_S = 2.0  # by which a clock that is set moves the start of a process


def record_process(trial: Trial) -> None:
    """Note in a trial that this process runs its search."""
    process = require("psutil", "automl").Process()
    trial.set_user_attr(_PROCESS, [platform.node(), process.pid, process.create_time()])


def recover(study: Study) -> list[int]:
    """Mark the trials of processes that are gone as failed, and propose them again.

    Returns
    -------
    list of int
        Numbers of the lost trials.
    """
    optuna = require("optuna", "automl")
    states = optuna.trial.TrialState
    running = study.get_trials(deepcopy=False, states=(states.RUNNING,))
    lost = [trial for trial in running if _is_gone(trial.user_attrs.get(_PROCESS))]
    for trial in lost:
        with suppress(optuna.exceptions.UpdateFinishedTrialError):  # by another that recovers
            # Not `study.tell`, after which the grid's sampler may end a search that has not begun.
            study._storage.set_trial_state_values(trial._trial_id, state=states.FAIL)
            propose_again(study, trial)
    return [trial.number for trial in lost]


def propose_again(study: Study, trial: FrozenTrial) -> bool:
    """Queue the parameters of a lost trial, unless it is a repetition itself.

    Returns
    -------
    bool
        True if there is a new trial.
    """
    if RETRY_OF in trial.user_attrs:
        return False
    optuna = require("optuna", "automl")
    repetition = optuna.create_trial(
        state=optuna.trial.TrialState.WAITING,
        params=trial.params,
        distributions=trial.distributions,
        system_attrs=trial.system_attrs,  # the grid's sampler has its place there
        user_attrs={RETRY_OF: trial.number},
    )
    study.add_trial(repetition)
    return True


def _is_gone(process: Any) -> bool:
    if process is None or process[0] != platform.node():
        return False
    _, pid, started = process
    psutil = require("psutil", "automl")
    try:
        current = psutil.Process(pid)
        is_alive = current.status() != psutil.STATUS_ZOMBIE
        return not is_alive or abs(current.create_time() - started) > _CLOCK_STEP_S
    except psutil.NoSuchProcess:
        return True
