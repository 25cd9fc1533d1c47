"""Networks of OpenVINO that keep values from call to call, such as a decoder's keys and values."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from bigdl.common.errors import LazyModule, as_usage_error
from bigdl.nano.openvino.network import CompiledNetwork, reason

openvino = LazyModule("openvino", "nano")

ROWS = "rows"
"""Input of a stateful network: the row of the state that each row of the inputs continues."""
# Dimensions of a cached tensor: rows, heads, tokens, size of a head.
_TOKENS = 2


def stateful(network: Any, pairs: Sequence[tuple[int, int]]) -> Any:
    """Return a copy of a network in which inputs and outputs have become variables.

    Each variable is a tensor of rows, heads, tokens and size of a head, empty at first. Another
    input, :data:`ROWS`, says which row of it each row of the next call continues.

    Parameters
    ----------
    network : openvino.Model
        Its first input has the rows of a call in its first dimension.
    pairs : sequence of tuple of int
        Position of the input of each variable, and of the output with its next value.

    Raises
    ------
    UsageError
        If the network has no such inputs and outputs.
    """
    from openvino import opset13
    from openvino._offline_transformations import apply_make_stateful_transformation

    twin = network.clone()
    parameters, results = twin.get_parameters(), twin.get_results()
    for place, (before, after) in enumerate(pairs):
        # what the variables are called after
        parameters[before].set_friendly_name(f"before.{place}")
        results[after].set_friendly_name(f"after.{place}")
    rows = opset13.parameter([-1], np.int32, name=ROWS)
    rows.output(0).get_tensor().set_names({ROWS})
    axis = opset13.constant(0, np.int64)
    for before, _ in pairs:
        value = parameters[before].output(0)
        readers = value.get_target_inputs()
        selected = opset13.gather(value, rows, axis)
        for reader in readers:
            reader.replace_source_output(selected.output(0))
    twin.add_parameters([rows])
    with as_usage_error("The network cannot keep its cache", text=reason, code="model-unsupported"):
        listed = [(parameters[before], results[after]) for before, after in pairs]
        apply_make_stateful_transformation(twin, listed)
        count = opset13.gather(
            opset13.shape_of(twin.inputs[0]), opset13.constant([0], np.int64), axis
        )
        for op in twin.get_ops():
            if op.get_type_name() == "ReadValue":
                sizes = op.get_output_partial_shape(0)
                inner = [1, sizes[1].get_length(), 0, sizes[3].get_length()]
                shape = opset13.concat([count, opset13.constant(inner[1:], np.int64)], 0)
                zero = opset13.constant(0, op.get_output_element_type(0))
                op.set_arguments([opset13.broadcast(zero, shape).output(0)])
        twin.validate_nodes_and_infer_types()
    return twin


def is_stateful(network: Any) -> bool:
    """Return True if a network keeps values from call to call."""
    return any(op.get_type_name() == "ReadValue" for op in network.get_ops())


class NetworkState:
    """The state of a stateful network between calls, in an infer request of its own.

    The request goes back to the network when this object goes. One thread at a time may use it.

    Parameters
    ----------
    network : CompiledNetwork
        Compiled from what :func:`stateful` returned.

    Attributes
    ----------
    tokens : int
        Length of the state.
    """

    def __init__(self, network: CompiledNetwork):
        self._network = network
        self._request, give_back = network.lend_request()
        weakref.finalize(self, give_back)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._request.reset_state()
        self._rows: np.ndarray | None = None
        self.tokens = 0

    def infer(self, inputs: Sequence[np.ndarray], new: int) -> list[np.ndarray]:
        """Run the network on what it keeps and on some new tokens; return its outputs.

        Parameters
        ----------
        inputs : sequence of ndarray
            Without :data:`ROWS`.
        new : int
            Number of tokens that the state grows by.
        """
        rows = np.arange(len(inputs[0]), dtype=np.int32) if self._rows is None else self._rows
        results = self._network.infer_by(self._request, [*inputs, rows])
        self._rows = None
        self.tokens += new
        return results

    def select(self, rows: np.ndarray) -> None:
        """Let the rows of the next call continue these rows."""
        if not self.tokens:
            return
        before = self._rows
        self._rows = np.asarray(rows if before is None else before[rows], dtype=np.int32)

    def repeat(self, times: int) -> None:
        """Let so many rows of the next call continue each row."""
        held = self.read()[0].shape[0] if self.tokens else 0
        self.select(np.arange(held, dtype=np.int32).repeat(times))

    def crop(self, tokens: int) -> None:
        """Forget all but the first tokens."""
        self.write([each[:, :, :tokens] for each in self.read()])

    def read(self) -> list[np.ndarray]:
        """Return copies of the variables, in the order of the pairs."""
        values = [np.array(each.state.data) for each in self._variables()]
        return values if self._rows is None else [each[self._rows] for each in values]

    def write(self, values: Sequence[np.ndarray]) -> None:
        """Set the variables, in the order of the pairs."""
        for variable, value in zip(self._variables(), values, strict=True):
            variable.state = openvino.Tensor(np.ascontiguousarray(value, np.float32))
        self._rows = None
        self.tokens = values[0].shape[_TOKENS]

    def _variables(self) -> list[Any]:
        """The variables; their names begin with ``before.0``."""

        def place(variable: Any) -> int:
            return int(variable.name.partition("before.")[2].partition("after.")[0])

        return sorted(self._request.query_state(), key=place)
