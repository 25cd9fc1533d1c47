"""Models of MXNet 1.9 on a cluster (API of BigDL 2.x).

MXNet is retired. Its last release needs a numpy older than 1.24, so it runs in processes of an
environment of its own, which is made when it is used first.
"""

from bigdl.orca.learn.mxnet.estimator import Estimator, MXNetEstimator, create_config

__all__ = ["Estimator", "MXNetEstimator", "create_config"]
