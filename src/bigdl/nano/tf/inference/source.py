"""A user's Keras model together with what is known of its input."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import keras
import numpy as np

from bigdl.common.errors import UsageError, one_line, require
from bigdl.nano.acceleration.options import BuildOptions
from bigdl.nano.acceleration.structure import flatten
from bigdl.nano.tf.inference.batches import batches_of, first_rows
from bigdl.nano.tf.inference.calls import CallInputs, CallOutputs, Port, plain

__all__ = ["KerasSource", "inference_call"]

# For dimensions, but the batch, that a random sample has to have and the model leaves open.
_OPEN_SIZE = 8
_RANDOM_ROWS = 8


class KerasSource:
    """A model and a sample, as methods see them.

    Parameters
    ----------
    model : keras.Model
        Not changed, but built if it was not.
    input_spec : optional
        Nested ``tf.TensorSpec`` of the input: one, or a list of them for each argument.
    x, y : optional
        Data for calibration: ndarrays, tensors, nests of them, or a ``tf.data.Dataset``.
    batch : int, optional
        Rows of a batch of calibration.

    Raises
    ------
    UsageError
        If something other than a model is given; later, where the input has to be known, if
        nothing tells it.
    """

    def __init__(
        self,
        model: Any,
        input_spec: Any = None,
        x: Any = None,
        y: Any = None,
        batch: int | None = None,
    ):
        if not isinstance(model, keras.Model):
            raise UsageError(f"model should be a Keras Model. A {type(model).__name__} was given.")
        self.model = model
        self._input_spec = input_spec
        self._data = (x, y)
        self._batch = batch

    @cached_property
    def inputs(self) -> CallInputs:
        """The arguments of the model's calls."""
        if self._input_spec is not None:
            return CallInputs.of_specs(self.model, self._specified())
        if getattr(self.model, "inputs", None):
            return CallInputs.of_specs(self.model, [_symbolic(self.model)])
        if self._data[0] is not None:
            return CallInputs.of_specs(self.model, _arguments_like(self.model, *self._data))
        raise UsageError(
            f"The input of {type(self.model).__name__} is not known, as it is a subclass of "
            "keras.Model; pass input_spec, e.g. tf.TensorSpec((None, 224, 224, 3), tf.float32)"
        )

    def _specified(self) -> list:
        spec, model = self._input_spec, self.model
        if getattr(model, "inputs", None):
            return [_like(_symbolic(model), spec)]
        if isinstance(spec, (list, tuple)) and len(_positional(model)) >= len(spec) > 1:
            return list(spec)
        return [spec[0] if isinstance(spec, (list, tuple)) and len(spec) == 1 else spec]

    @cached_property
    def _traced(self) -> tuple[Any, CallOutputs]:
        """The model as a graph of flat inputs and outputs, and what its result looks like."""
        tf = require("tensorflow", "tf")
        structures: list = []
        call = inference_call(self.model)

        def flat(*tensors):
            leaves, structure = flatten(plain(call(*self.inputs.pack(tensors))))
            structures.append(structure)
            return tuple(tf.identity(leaf) for leaf in leaves)

        specs = [
            tf.TensorSpec(port.shape, port.dtype, name=_graph_name(port.name))
            for port in self.inputs.ports
        ]
        kind = type(self.model).__name__
        try:
            if not self.model.built:
                call(*self.inputs.pack(self.random_arrays(1)))
            graph = tf.function(flat, input_signature=specs, autograph=False)
            concrete = graph.get_concrete_function()
        except Exception as error:
            raise UsageError(
                f"{kind} cannot be called with its input in a graph: {one_line(error)}; pass "
                "another input_spec"
            ) from error
        if not concrete.outputs:
            raise UsageError(f"{kind} returns no tensor, so it cannot be converted")
        names = structures[-1].paths("")
        ports = [
            Port(
                name,
                tuple(tensor.shape) if tensor.shape.rank is not None else (),
                tensor.dtype.name,
            )
            for name, tensor in zip(names, concrete.outputs, strict=True)
        ]
        # The function owns the variables' graph and has to live as long as what is made of it.
        return (graph, concrete), CallOutputs(structures[-1], tuple(ports))

    @property
    def graph(self) -> Any:
        """The ``tf.function`` of the flat inputs and outputs."""
        return self._traced[0][0]

    @property
    def concrete(self) -> Any:
        """Its concrete function."""
        return self._traced[0][1]

    @property
    def outputs(self) -> CallOutputs:
        """What the model returns."""
        return self._traced[1]

    @cached_property
    def sample(self) -> list[np.ndarray]:
        """One row of the data as a flat list, or random numbers where there are none."""
        if self._data[0] is not None:
            return first_rows(self._data, self.inputs, 1)
        return self.random_arrays(1)

    def random_arrays(self, rows: int) -> list[np.ndarray]:
        """Numbers from 0 to 1 (or zeros and ones) of the input's shapes."""
        random = np.random.default_rng(0)
        arrays = []
        for port in self.inputs.ports:
            shape = [rows, *(size or _OPEN_SIZE for size in port.shape[1:])]
            if np.issubdtype(_dtype(port), np.floating):
                arrays.append(random.random(shape).astype(_dtype(port)))
            else:
                arrays.append(random.integers(0, 2, shape).astype(_dtype(port)))
        return arrays

    def sample_arrays(self) -> list[np.ndarray]:
        """The sample as a flat list of ndarrays."""
        return self.sample

    def calibration_arrays(self, options: BuildOptions) -> Iterator[list[np.ndarray]]:
        """Flat lists of ndarrays of the calibration data, as many as hold its sample size.

        Without data, random numbers are given.
        """
        if self._data[0] is None:
            for _ in range(2):
                yield self.random_arrays(_RANDOM_ROWS)
            return
        rows = 0
        for batch in batches_of(self._data, self.inputs, self._batch or _RANDOM_ROWS):
            yield batch.arrays
            rows += batch.rows
            if rows >= options.calibration.sample_size:
                break
        if not rows:
            raise UsageError("The calibration data x hold no batch; give at least one")

    def to_openvino(self, options: BuildOptions) -> Any:
        """The model as an ``openvino.Model``."""
        from bigdl.nano.tf.inference.export import to_openvino

        return to_openvino(self, options)

    def from_openvino(self, network: Any, method: str, options: BuildOptions) -> Any:
        """The accelerated model of a ``CompiledNetwork`` of this model's inputs and outputs."""
        from bigdl.nano.tf.inference.network_models import KerasOpenVINOModel, KerasQuantizedModel

        kind = KerasQuantizedModel if method == "static_int8" else KerasOpenVINOModel
        return kind.of(self, network, method, options)

    def to_onnx(self, path: str, options: BuildOptions) -> None:
        """Write the model as an ONNX file."""
        from bigdl.nano.tf.inference.export import to_onnx

        to_onnx(self, path, options)

    @staticmethod
    def port_type(port: Port) -> np.dtype:
        """The type of arrays for a tensor."""
        return _dtype(port)

    def onnx_names(self) -> list[str]:
        """Names of the inputs in the ONNX file."""
        return [_graph_name(name) for name in self.inputs.names]

    def from_onnx(self, network: Any, method: str, options: BuildOptions) -> Any:
        """The accelerated model of an ``OnnxNetwork`` of this model's inputs and outputs."""
        from bigdl.nano.tf.inference.network_models import KerasONNXRuntimeModel

        return KerasONNXRuntimeModel.of(self, network, method, options)


def inference_call(model: Any) -> Any:
    """The model as a function that never trains."""
    parameters = inspect.signature(model.call).parameters
    knows = "training" in parameters or any(
        each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()
    )
    return (lambda *args: model(*args, training=False)) if knows else model


def _graph_name(name: str) -> str:
    """A name that is allowed in a graph of TensorFlow."""
    safe = "".join(each if each.isalnum() or each in "_.-" else "_" for each in name)
    return safe if safe[:1].isalnum() else f"x{safe}"


def _dtype(port: Port) -> np.dtype:
    return np.dtype(np.float32 if port.dtype == "bfloat16" else port.dtype)


def _positional(model: Any) -> list[str]:
    return [
        name
        for name, each in inspect.signature(model.call).parameters.items()
        if name not in ("training", "mask") and each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]


def _symbolic(model: Any) -> Any:
    """The inputs of a functional or sequential model; a list of one as that one."""
    struct = plain(model.inputs if isinstance(model, keras.Sequential) else model.input)
    return struct[0] if isinstance(struct, (list, tuple)) and len(struct) == 1 else struct


def _like(struct: Any, spec: Any) -> Any:
    """Specs in the nesting of a functional model's inputs."""
    own, structure = flatten(struct)
    given = list(spec.values()) if isinstance(spec, dict) else spec
    given = list(given) if isinstance(given, (list, tuple)) else [given]
    if isinstance(spec, dict) and structure.kind == "dict" and set(spec) == set(structure.keys):
        return {key: spec[key] for key in structure.keys}
    if len(given) != len(own):
        raise UsageError(f"input_spec describes {len(given)} inputs, but the model has {len(own)}")
    return structure.rebuild(given)


def _arguments_like(model: Any, x: Any, y: Any) -> Sequence[Any]:
    """The arguments of a call for the first row of the data."""
    from bigdl.nano.tf.inference.batches import first_element

    x = first_element(x, y)
    if isinstance(x, (list, tuple)) and len(_positional(model)) >= len(x) > 1:
        return list(x)
    return [x]
