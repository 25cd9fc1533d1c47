"""Searches for good parameters, by Optuna: what Nano's and Orca's AutoML share.

A search is an Optuna study. :func:`open_study` makes one or goes on with one, in memory or in a
database; :func:`create_sampler` and :func:`create_pruner` make by name what decides about trials;
:func:`run_trials` runs an objective, in this process or in several; :func:`trial_table` shows what
came of it. Neither a training framework nor Ray is known here: an objective takes an
``optuna.trial.Trial`` and returns a figure.
"""

from bigdl.tuning.pruners import PrunerType, create_pruner
from bigdl.tuning.running import run_trials
from bigdl.tuning.samplers import SamplerType, create_sampler
from bigdl.tuning.study import open_study
from bigdl.tuning.table import trial_table

__all__ = [
    "PrunerType",
    "SamplerType",
    "create_pruner",
    "create_sampler",
    "open_study",
    "run_trials",
    "trial_table",
]
