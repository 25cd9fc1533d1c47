"""Searches for good parameters: spaces, studies of Optuna, and the runner of their trials.

A search is an Optuna study, which is the only record of its trials. :func:`open_study` makes one or
goes on with one, in memory or in a database; :func:`create_sampler` and :func:`create_pruner` make
by name what decides about trials; :func:`run_trials` runs an objective, in this process or in
several; :func:`trial_table` shows the outcome. :mod:`bigdl.tuning.spaces` has what a parameter may
be. Neither a training framework nor Ray is known here: an objective takes an
``optuna.trial.Trial`` and returns a figure. ``bigdl.orca.automl`` and ``bigdl.nano.automl`` are
built on this.
"""

from bigdl.common.dropped import explain_imports
from bigdl.tuning.runner import run_trials
from bigdl.tuning.study import (
    PrunerType,
    SamplerType,
    create_pruner,
    create_sampler,
    open_study,
    trial_table,
)

__all__ = [
    "PrunerType",
    "SamplerType",
    "create_pruner",
    "create_sampler",
    "open_study",
    "run_trials",
    "trial_table",
]

explain_imports()
