"""Networks in OpenVINO's format, used without the framework that they come from."""

from bigdl.nano.openvino.compiled import CompiledNetwork
from bigdl.nano.openvino.model import OpenVINOModel

__all__ = ["CompiledNetwork", "OpenVINOModel"]
