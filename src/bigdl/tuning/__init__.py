"""Hyper-parameter search: search spaces, Optuna studies, and a runner of their trials.

A search is an Optuna study, which is the only record of its trials. :func:`open_study` creates or
resumes a study in memory or in a database. :func:`create_sampler` and :func:`create_pruner` create
a sampler and a pruner by name. :func:`run_trials` runs an objective in one or several processes,
and :func:`trial_table` returns the trials as a table. :mod:`bigdl.tuning.spaces` has the domains of
parameters. This package does not depend on a training framework or Ray: an objective takes an
``optuna.trial.Trial`` and returns a metric. ``bigdl.orca.automl`` and ``bigdl.nano.automl`` use
this package.
"""

from bigdl.common.dropped import explain_imports
from bigdl.tuning.display import SearchDisplay
from bigdl.tuning.distributed import SparkStudy, optimize
from bigdl.tuning.hyperopt import HyperoptSpace, from_hyperopt
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
    "HyperoptSpace",
    "PrunerType",
    "SamplerType",
    "SearchDisplay",
    "SparkStudy",
    "create_pruner",
    "create_sampler",
    "from_hyperopt",
    "open_study",
    "optimize",
    "run_trials",
    "trial_table",
]

explain_imports()
