"""Spark ML pipeline stages that train and apply PyTorch models.

``NNEstimator`` is a ``pyspark.ml.Estimator`` whose ``fit(df)`` returns an ``NNModel``, a
``pyspark.ml.Transformer``. ``NNClassifier`` and ``NNClassifierModel`` are their counterparts for
classification. The stages work in a ``Pipeline``, in a ``CrossValidator`` and with Spark's
evaluators. They train with :class:`bigdl.orca.learn.pytorch.Estimator`, exactly for any number of
workers.
"""

from bigdl.orca.learn.nnframes.image_reader import NNImageReader
from bigdl.orca.learn.nnframes.preprocessing import (
    ArrayToTensor,
    ChainedPreprocessing,
    FeatureLabelPreprocessing,
    MLlibVectorToTensor,
    Preprocessing,
    ScalarToTensor,
    SeqToMultipleTensors,
    SeqToTensor,
    TensorToSample,
)
from bigdl.orca.learn.nnframes.stages import (
    NNClassifier,
    NNClassifierModel,
    NNEstimator,
    NNModel,
    TrainSummary,
    ValidationSummary,
    trusted_loading,
)

__all__ = [
    "ArrayToTensor",
    "ChainedPreprocessing",
    "FeatureLabelPreprocessing",
    "MLlibVectorToTensor",
    "NNClassifier",
    "NNClassifierModel",
    "NNEstimator",
    "NNImageReader",
    "NNModel",
    "Preprocessing",
    "ScalarToTensor",
    "SeqToMultipleTensors",
    "SeqToTensor",
    "TensorToSample",
    "TrainSummary",
    "ValidationSummary",
    "trusted_loading",
]
