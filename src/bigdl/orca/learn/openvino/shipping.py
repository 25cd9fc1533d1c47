"""A network of OpenVINO on its way from the driver to the tasks that predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError

__all__ = ["Network"]


@dataclass(frozen=True)
class Network:
    """A network, which is :class:`~bigdl.orca.learn.prediction.shipping.Shippable`.

    Attributes
    ----------
    files : pair of bytes
        Content of the ``.xml`` and the ``.bin`` file.
    inputs, outputs : tuple of str
        Names in the order of the network.
    rows : int or None
        How many rows a call takes; None for any number.
    config : mapping
        Properties of OpenVINO.
    order : tuple of int
        Which of the features each input is.
    threads : int
        Of a task.
    """

    files: tuple[bytes, bytes]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rows: int | None
    config: Mapping[str, Any] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    threads: int = 1

    @classmethod
    def read(cls, path: str) -> Network:
        """From the ``.xml`` file at a local path or fsspec URL, with the ``.bin`` beside it.

        Raises
        ------
        UsageError
            If the files are not there or hold no network.
        """
        from bigdl.nano.openvino.network import port_name, read_network
        from bigdl.orca.inference.runtimes import read_openvino

        files = read_openvino(path)
        network = read_network(files)
        return cls(
            files,
            tuple(map(port_name, network.inputs)),
            tuple(map(port_name, network.outputs)),
            _rows_of(network),
        )

    def for_call(self, input_cols: Sequence[str] | None, config: Mapping | None, threads: int):
        """The same for the arguments of ``predict``.

        Raises
        ------
        UsageError
            If `input_cols` are not the network's inputs, or `config` is no mapping.
        """
        if config is not None and not isinstance(config, Mapping):
            raise UsageError(f"config should be a dict of properties of OpenVINO, got {config!r}")
        from bigdl.nano.openvino.network import renamed_properties

        names = self.inputs if input_cols is None else input_cols
        if sorted(names) != sorted(self.inputs):
            raise UsageError(
                f"input_cols should name the network's inputs {list(self.inputs)} in the order of "
                f"the features, got {list(names)}"
            )
        order = tuple(names.index(name) for name in self.inputs)
        return replace(self, config=renamed_properties(config or {}), order=order, threads=threads)

    def ready(self, device) -> _Ready:
        """The compiled network; it computes on the CPU wherever it is."""
        from bigdl.nano.openvino import CompiledNetwork
        from bigdl.nano.openvino.network import loose_shapes, read_network

        network = read_network(self.files)
        compiled = CompiledNetwork(
            network,
            thread_num=None if "INFERENCE_NUM_THREADS" in self.config else self.threads,
            config=self.config,
            shapes=loose_shapes(network) if self.rows is None else None,
        )
        return _Ready(compiled, self)


class _Ready:
    """A compiled network that is called with a batch of numpy columns."""

    squeezes = False

    def __init__(self, compiled, network: Network):
        self._compiled = compiled
        self._network = network

    def __call__(self, batch: list) -> tuple:
        network = self._network
        if len(batch) != len(network.inputs):
            raise UsageError(
                f"The network has {len(network.inputs)} inputs ({', '.join(network.inputs)}), got "
                f"{len(batch)} features"
            )
        inputs = [batch[place] for place in network.order]
        if network.rows is None:
            return tuple(self._compiled.infer(inputs))
        pieces = [self._padded(inputs, low) for low in range(0, len(inputs[0]), network.rows)]
        return tuple(np.concatenate(each) for each in zip(*pieces, strict=True))

    def _padded(self, inputs, low) -> list[np.ndarray]:
        """Outputs for the rows of one call, of which the last one has too few."""
        size = self._network.rows
        parts = [array[low : low + size] for array in inputs]
        count = len(parts[0])
        if count < size:
            parts = [np.concatenate([p, np.repeat(p[-1:], size - count, 0)]) for p in parts]
        return [output[:count] for output in self._compiled.infer(parts)]


def _rows_of(network) -> int | None:
    """The rows of a call, if the network cannot take another number of them."""
    shapes = [port.partial_shape for port in network.inputs]
    if any(shape.rank.is_dynamic or not len(shape) for shape in shapes):
        return None
    fixed = {int(shape[0].get_length()) for shape in shapes if shape[0].is_static}
    if not fixed:
        return None
    if len(fixed) > 1:
        raise UsageError(
            f"The first dimension of every input should be the rows, but they have {sorted(fixed)}"
        )
    return None if _takes_any_rows(network) else fixed.pop()


def _takes_any_rows(network) -> bool:
    from bigdl.nano.openvino.network import loose_shapes

    twin = network.clone()
    try:
        twin.reshape(loose_shapes(twin))
    except RuntimeError:  # a constant in it says how many rows there are
        return False
    outputs = [port.partial_shape for port in twin.outputs]
    return all(s.rank.is_static and len(s) and s[0].is_dynamic for s in outputs)
