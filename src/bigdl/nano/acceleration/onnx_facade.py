"""What users can ask of a model behind which a network of ONNX Runtime stands.

It knows no framework, as :class:`~bigdl.nano.openvino.facade.OpenVINOFacade` does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.onnx_network import OnnxNetwork
from bigdl.nano.acceleration.options import BuildOptions

__all__ = ["OnnxRuntimeFacade", "check_outputs", "threads_of"]


class OnnxRuntimeFacade:
    """A mix-in for models with a network of ONNX Runtime.

    Attributes
    ----------
    nano_network : OnnxNetwork
    """

    nano_network: OnnxNetwork

    @property
    def ortsess(self) -> Any:
        """The ``onnxruntime.InferenceSession``."""
        return self.nano_network.session

    @property
    def session_options(self) -> Any:
        """The ``onnxruntime.SessionOptions`` that the session was made with."""
        return self.nano_network.options

    def nano_infer(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """A flat list of ndarrays in, a flat list of ndarrays out, which are the caller's."""
        return self.nano_network.run(arrays)


def threads_of(network: OnnxNetwork, options: BuildOptions) -> int | None:
    """Threads that a user has asked for, by their number or in options of a session."""
    if options.threads is None and options.onnx.session_options is not None:
        return network.options.intra_op_num_threads or None
    return options.threads


def check_outputs(network: OnnxNetwork, expected: int, model: Any) -> None:
    """Refuse a network that has not as many outputs as the model it was exported from.

    Raises
    ------
    UsageError
    """
    if network.output_count != expected:
        raise UsageError(
            f"The network of {type(model).__name__} in ONNX has {network.output_count} outputs, "
            f"but the model has {expected}"
        )
