"""Networks in OpenVINO's format on distributed data."""

from bigdl.orca.learn.openvino.estimator import Estimator, OpenvinoEstimator

__all__ = ["Estimator", "OpenvinoEstimator"]
