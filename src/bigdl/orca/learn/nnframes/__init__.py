"""Spark ML pipeline stages that train and apply PyTorch models.

``NNEstimator`` is a ``pyspark.ml.Estimator`` whose ``fit(df)`` returns an ``NNModel``, a
``pyspark.ml.Transformer``. ``NNClassifier`` and ``NNClassifierModel`` are their counterparts for
classification. The stages work in a ``Pipeline``, in a ``CrossValidator`` and with Spark's
evaluators. They train with :class:`bigdl.orca.learn.pytorch.Estimator`, exactly for any number of
workers.
"""

from bigdl.orca.learn.nnframes import preprocessing, stages
from bigdl.orca.learn.nnframes.image_reader import NNImageReader
from bigdl.orca.learn.nnframes.preprocessing import *  # noqa: F403
from bigdl.orca.learn.nnframes.stages import *  # noqa: F403

__all__ = [*preprocessing.__all__, *stages.__all__, "NNImageReader"]
