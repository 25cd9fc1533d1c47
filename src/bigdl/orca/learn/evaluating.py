"""The driver's side of an evaluation."""

from __future__ import annotations

import logging

from bigdl.common.errors import WorkerLost
from bigdl.orca.learn.failure import FailurePolicy

__all__ = ["run_evaluation"]

logger = logging.getLogger("bigdl.orca")


def run_evaluation(job, weights: bytes, metric_names, policy: FailurePolicy) -> dict:
    """Run an EvaluateProgram until it has ended or the policy gives up.

    Parameters
    ----------
    job : Job
        Of the engine; closed at the end.
    weights : bytes
        State dict of the model.
    metric_names : iterable of str
        For a table without rows, whose figures are None.
    """
    from bigdl.orca.engine.spark import NoRows

    with job:
        while True:
            try:
                return job.attempt(state=weights)[0]
            except NoRows:
                nothing = {"num_samples": 0, "val_loss": None, **dict.fromkeys(metric_names)}
                return {"figures": nothing, "workers": [nothing], "profile": {}}
            except WorkerLost as error:
                reason = policy.forgive(error)
                logger.warning("%s; evaluating again (%s)", error, reason)
