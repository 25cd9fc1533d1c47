"""The driver's side of an evaluation."""

from __future__ import annotations

import logging

from bigdl.common.errors import WorkerLost
from bigdl.training.failure import FailurePolicy

__all__ = ["evaluated"]

logger = logging.getLogger("bigdl.orca")


def evaluated(job, weights: bytes | None, policy: FailurePolicy) -> dict:
    """Run a program that evaluates until it has ended or the policy gives up.

    Parameters
    ----------
    job : Job
        Of the engine.
    weights : bytes or None
        Of the model; None for one that is built by the workers.
    policy : FailurePolicy

    Returns
    -------
    dict
        The result of rank 0.

    Raises
    ------
    NoRows
        If there is nothing to evaluate.
    """
    while True:
        try:
            return job.attempt(state=weights)[0]
        except WorkerLost as error:
            logger.warning("%s; evaluating again (%s)", error, policy.forgive(error))
