"""The import path that programs for BigDL 2.x use for the preprocessing of nnframes."""

from bigdl.orca.learn.nnframes.preprocessing import (
    ArrayToTensor,
    ChainedPreprocessing,
    FeatureLabelPreprocessing,
    MLlibVectorToTensor,
    Preprocessing,
    ScalarToTensor,
    SeqToMultipleTensors,
    SeqToTensor,
)

__all__ = [
    "ArrayToTensor",
    "ChainedPreprocessing",
    "FeatureLabelPreprocessing",
    "MLlibVectorToTensor",
    "Preprocessing",
    "ScalarToTensor",
    "SeqToMultipleTensors",
    "SeqToTensor",
]
