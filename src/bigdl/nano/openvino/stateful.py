"""Stateful OpenVINO networks, which keep values between calls, such as a decoder's KV cache."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import LazyModule, as_usage_error
from bigdl.nano.openvino.network import CompiledNetwork, reason

if TYPE_CHECKING:
    import openvino as ov

openvino = LazyModule("openvino", "nano")

ROWS = "rows"
"""Input of a stateful network: the index of the state row that each input row continues."""
# Dimensions of a cached tensor: rows, heads, tokens, size of a head.
_TOKENS = 2


def stateful(network: ov.Model, pairs: Sequence[tuple[int, int]]) -> ov.Model:
    """Return a copy of a network that turns each input-output pair into a state variable.

    Each variable is a tensor of shape (rows, heads, tokens, head size), initially empty. A further
    input, :data:`ROWS`, has the state row that each row of the next call continues.

    Parameters
    ----------
    network : openvino.Model
        Network whose first input has the batch as its first dimension.
    pairs : sequence of tuple of int
        Position of each variable's input, and of the output with its next value.

    Raises
    ------
    UsageError
        If the network has no such inputs and outputs.
    """
    from openvino import opset13
    from openvino._offline_transformations import apply_make_stateful_transformation

    clone = network.clone()
    parameters, results = clone.get_parameters(), clone.get_results()
    for index, (before, after) in enumerate(pairs):
        # The names of the variables are composed of these.
        parameters[before].set_friendly_name(f"before.{index}")
        results[after].set_friendly_name(f"after.{index}")
    rows = opset13.parameter([-1], np.int32, name=ROWS)
    rows.output(0).get_tensor().set_names({ROWS})
    axis = opset13.constant(0, np.int64)
    for before, _ in pairs:
        value = parameters[before].output(0)
        readers = value.get_target_inputs()
        selected = opset13.gather(value, rows, axis)
        for reader in readers:
            reader.replace_source_output(selected.output(0))
    clone.add_parameters([rows])
    with as_usage_error("The network cannot keep its cache", text=reason, code="model-unsupported"):
        listed = [(parameters[before], results[after]) for before, after in pairs]
        apply_make_stateful_transformation(clone, listed)
        count = opset13.gather(
            opset13.shape_of(clone.inputs[0]), opset13.constant([0], np.int64), axis
        )
        for op in clone.get_ops():
            if op.get_type_name() == "ReadValue":
                sizes = op.get_output_partial_shape(0)
                inner = [1, sizes[1].get_length(), 0, sizes[3].get_length()]
                shape = opset13.concat([count, opset13.constant(inner[1:], np.int64)], 0)
                zero = opset13.constant(0, op.get_output_element_type(0))
                op.set_arguments([opset13.broadcast(zero, shape).output(0)])
        clone.validate_nodes_and_infer_types()
    return clone


def is_stateful(network: ov.Model) -> bool:
    """Return True if a network has variables that persist between calls."""
    return any(op.get_type_name() == "ReadValue" for op in network.get_ops())


class NetworkState:
    """State of a stateful network between calls, held by a dedicated infer request.

    The request returns to the network when this object is deleted. One thread at a time may use it.

    Parameters
    ----------
    network : CompiledNetwork
        Compiled network from :func:`stateful`.

    Attributes
    ----------
    tokens : int
        Length of the state in tokens.
    """

    def __init__(self, network: CompiledNetwork):
        self._network = network
        self._request, give_back = network.lend_request()
        weakref.finalize(self, give_back)
        self.clear()

    def clear(self) -> None:
        """Reset the state to zero tokens."""
        self._request.reset_state()
        self._rows: np.ndarray | None = None
        self.tokens = 0

    def infer(self, inputs: Sequence[np.ndarray], new: int) -> list[np.ndarray]:
        """Run the network on its state and new tokens, and return its outputs.

        Parameters
        ----------
        inputs : sequence of ndarray
            Inputs without :data:`ROWS`.
        new : int
            Number of tokens added to the state.
        """
        rows = np.arange(len(inputs[0]), dtype=np.int32) if self._rows is None else self._rows
        results = self._network.infer_by(self._request, [*inputs, rows])
        self._rows = None
        self.tokens += new
        return results

    def select(self, rows: np.ndarray) -> None:
        """Select the state row that each row of the next call continues."""
        if not self.tokens:
            return
        before = self._rows
        self._rows = np.asarray(rows if before is None else before[rows], dtype=np.int32)

    def repeat(self, times: int) -> None:
        """Repeat each state row `times` times for the rows of the next call."""
        count = self.read()[0].shape[0] if self.tokens else 0
        self.select(np.arange(count, dtype=np.int32).repeat(times))

    def crop(self, tokens: int) -> None:
        """Truncate the state to its first `tokens` tokens."""
        self.write([each[:, :, :tokens] for each in self.read()])

    def read(self) -> list[np.ndarray]:
        """Return copies of the state variables, in the order of `pairs` in :func:`stateful`."""
        values = [np.array(each.state.data) for each in self._variables()]
        return values if self._rows is None else [each[self._rows] for each in values]

    def write(self, values: Sequence[np.ndarray]) -> None:
        """Set the state variables, in the order of `pairs` in :func:`stateful`."""
        for variable, value in zip(self._variables(), values, strict=True):
            variable.state = openvino.Tensor(np.ascontiguousarray(value, np.float32))
        self._rows = None
        self.tokens = values[0].shape[_TOKENS]

    def _variables(self) -> list[Any]:
        """Return the state variables, sorted by the index of the pair in each variable's name."""

        def index(variable: ov.InferRequest) -> int:
            return int(variable.name.partition("before.")[2].partition("after.")[0])

        return sorted(self._request.query_state(), key=index)
