"""Metrics whose figure does not depend on how the rows were spread over workers.

A :class:`Metric` is what a user writes in ``metrics=[Accuracy(), AUC()]``: a few parameters and a
name, cheap to pickle.  On each worker :meth:`Metric.get_metric` makes a fresh
:class:`TorchMetric` out of it, the state that is fed with batches.  The states of all workers
come together with :func:`merge_states`, and a ``TorchMetric`` that loads the merged state computes
the figure.  Counts are kept in int64 and sums in float64, never a mean of means, so N workers and
one process give the same figure (to float64 rounding), also when a worker saw no row.

Where rows have weights (``weight_col=`` of an Estimator), a row of weight 2 counts as two rows and
one of weight 0 as none, in all metrics of this package. A function of the user and an object of
torchmetrics have no notion of weights and are refused there.

Importing this package does not import torch.
"""

from bigdl.orca.learn.metrics import named
from bigdl.orca.learn.metrics.metric import (
    CustomizedMetric,
    Metric,
    TorchMetric,
    merge_states,
    register_metric,
)
from bigdl.orca.learn.metrics.named import *  # noqa: F403

__all__ = [
    *named.__all__,
    "CustomizedMetric",
    "Metric",
    "TorchMetric",
    "merge_states",
    "register_metric",
]
