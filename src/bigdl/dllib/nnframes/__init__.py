"""BigDL 2.x's import path of :mod:`bigdl.orca.learn.nnframes`."""

from bigdl.dllib.nnframes.nn_classifier import NNClassifier as NNClassifier
from bigdl.orca.learn.nnframes import *  # noqa: F403
from bigdl.orca.learn.nnframes import __all__ as __all__
