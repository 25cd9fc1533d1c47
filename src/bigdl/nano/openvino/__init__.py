"""Networks in OpenVINO's format, used without the framework that they come from."""

from bigdl.nano.openvino.model import OpenVINOModel
from bigdl.nano.openvino.network import CompiledNetwork

__all__ = ["CompiledNetwork", "OpenVINOModel"]
