"""Training of MXNet 1.9 models on a cluster, with the BigDL 2.x API.

MXNet is retired. Its last release needs NumPy < 1.24, so it runs in processes of an isolated
environment that is created on first use.
"""

from bigdl.orca.learn.mxnet.estimator import Estimator, MXNetEstimator, create_config

__all__ = ["Estimator", "MXNetEstimator", "create_config"]
