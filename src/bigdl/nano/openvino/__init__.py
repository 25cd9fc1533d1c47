"""OpenVINO networks, used without the framework in which they were created."""

from bigdl.nano.openvino.model import OpenVINOModel
from bigdl.nano.openvino.network import CompiledNetwork
from bigdl.nano.openvino.split import SplitError, SplitNetwork

__all__ = ["CompiledNetwork", "OpenVINOModel", "SplitError", "SplitNetwork"]
