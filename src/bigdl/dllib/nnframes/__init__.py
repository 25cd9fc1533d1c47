"""The import path that programs for BigDL 2.x use."""

from bigdl.dllib.nnframes.nn_classifier import NNClassifier as NNClassifier
from bigdl.orca.learn.nnframes import *  # noqa: F403
from bigdl.orca.learn.nnframes import __all__ as __all__
