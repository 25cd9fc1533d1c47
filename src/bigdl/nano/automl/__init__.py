"""AutoML: searching for the hyper-parameters of PyTorch and Keras models."""

from bigdl.nano.automl.config import hpo_config

__all__ = ["hpo_config"]
