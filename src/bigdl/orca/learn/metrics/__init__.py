"""Metrics whose value does not depend on how rows are distributed over workers.

Users pass a :class:`Metric` in ``metrics=[Accuracy(), AUC()]``: a name and a few parameters, cheap
to pickle. On each worker, :meth:`Metric.get_metric` creates a :class:`TorchMetric`, a state that is
updated with batches. :func:`merge_states` merges the states of all workers, and a ``TorchMetric``
that loads the merged state computes the value. Counts are int64 and sums are float64, and means are
never averaged. Therefore N workers and one process return the same value (up to float64 rounding),
even if some workers have no rows.

With row weights (``weight_col=`` of an Estimator), a row of weight 2 counts as two rows and a row
of weight 0 is ignored, in all metrics of this package. User functions and torchmetrics objects do
not support weights; passing them together with weights raises an error.

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
