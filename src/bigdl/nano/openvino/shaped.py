"""Networks that are compiled once more for the shapes that they are called with.

A network with dynamic shapes works out sizes and looks up kernels in every node at every call. In
a small network that costs more than the arithmetic: MobileNetV3 takes 3.9 ms for one image, and
1.6 ms if it is compiled for one image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.nano.openvino.compiled import CompiledNetwork

__all__ = ["ShapedNetwork"]

# Each form has weights of its own, so large networks, which gain little, have one form only.
_MOST_SHAPES = 4
_MOST_BYTES = 128 * 2**20


class ShapedNetwork(CompiledNetwork):
    """A network on a CPU with a compiled form for each of the first few shapes of its inputs.

    The first call with a new shape takes as long as compiling, up to some tenths of a second. All
    calls with equal shapes go through the same form, so their results are equal to the last bit.
    Further shapes, and networks of more than 128 MiB, share the dynamic form. Parameters are those
    of :class:`CompiledNetwork`.
    """

    def __init__(self, network: Any, device: str = "CPU", **keywords: Any):
        super().__init__(network, device, **keywords)
        self._forget()

    def infer(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        if self._of is not self._now:  # another network or other shapes by now
            self._forget()
        if not self._worthwhile:
            return super().infer(inputs)
        shapes = tuple(np.shape(each) for each in inputs)
        form = self._forms.get(shapes)
        if form is None and len(self._forms) < _MOST_SHAPES:
            form = self._compiled_for(shapes)
        return super().infer(inputs) if form is None else form.infer(inputs)

    def _compiled_for(self, shapes: tuple) -> CompiledNetwork | None:
        """A form for these shapes; None if the network does not take them."""
        with self._lock:
            if shapes in self._forms:
                return self._forms[shapes]
            if not _take(self.network.inputs, shapes):
                return None
            try:
                form = CompiledNetwork(
                    self.network,
                    self.device,
                    precision=self.precision,
                    thread_num=self.thread_num,
                    config=self.additional_config,
                    shapes=dict(enumerate(shapes)),
                )
            except UsageError:  # the dynamic form says what is wrong with the shapes
                return None
            self._forms[shapes] = form
            return form

    def _forget(self) -> None:
        self._of = self._now
        self._forms: dict[tuple, CompiledNetwork] = {}
        self._worthwhile = (
            self.device == "CPU"
            and any(port.partial_shape.is_dynamic for port in self.network.inputs)
            and _constant_bytes(self.network) <= _MOST_BYTES
        )

    def __getstate__(self) -> dict:
        state = super().__getstate__()
        return {key: value for key, value in state.items() if key not in ("_of", "_forms")}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._forget()

    def __deepcopy__(self, memo: dict) -> ShapedNetwork:
        twin = super().__deepcopy__(memo)
        twin._forget()
        return twin


def _take(ports: Sequence[Any], shapes: tuple) -> bool:
    """Whether inputs are declared so that they take arrays of these shapes."""
    openvino = require("openvino", "nano")
    return len(ports) == len(shapes) and all(
        port.partial_shape.compatible(openvino.PartialShape(shape))
        for port, shape in zip(ports, shapes, strict=True)
    )


def _constant_bytes(network) -> int:
    return sum(op.get_byte_size() for op in network.get_ops() if op.get_type_name() == "Constant")
