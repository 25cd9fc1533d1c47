"""Keras models in other runtimes, and in bfloat16: their conversion, and the models that run them.

OpenVINO reads a frozen graph of TensorFlow by itself. What it has no rule for, it is given as ONNX,
in which tf2onnx has made one operator of some loops.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bigdl.common.environment import scratch_home
from bigdl.common.errors import UsageError, one_line, require
from bigdl.nano.acceleration.method import BuildOptions
from bigdl.nano.acceleration.onnxruntime import OnnxRuntimeFacade
from bigdl.nano.acceleration.openvino import preprocessed
from bigdl.nano.acceleration.quiet import quiet, refusing
from bigdl.nano.openvino.model import OpenVINOFacade
from bigdl.nano.tf.inference.accelerated import AcceleratedKerasModel
from bigdl.nano.tf.inference.source import (
    CallInputs,
    KerasSource,
    numpy_type,
)
from bigdl.nano.tf.serialization import packed, unpacked

_OPSET = 18  # the newest that tf2onnx knows


def to_openvino(source: KerasSource, options: BuildOptions) -> Any:
    """Return a source's model as an ``openvino.Model`` with the source's flat inputs and outputs.

    Raises
    ------
    UsageError
        If OpenVINO cannot convert it, or a keyword of the conversion does not fit.
    """
    openvino = require("openvino", "nano")
    with tempfile.TemporaryDirectory(prefix="bigdl-keras-", dir=scratch_home()) as folder:
        network = _converted(openvino, source, Path(folder))
    return preprocessed(network, _keywords(source, options))


def to_onnx(source: KerasSource, path: str, options: BuildOptions) -> list[str]:
    """Write a source's model as an ONNX file with flat inputs and outputs; return its input names.

    Raises
    ------
    UsageError
        If it cannot be converted, or a keyword of the conversion does not fit.
    """
    tf2onnx = require("tf2onnx", "tf")
    keywords = dict(options.conversion)
    opset = keywords.pop("opset", keywords.pop("opset_version", _OPSET))
    if keywords:
        raise UsageError(
            f"The export of a Keras model to ONNX has no argument {', '.join(sorted(keywords))}; "
            "it takes opset"
        )
    with refusing(f"tf2onnx cannot convert {type(source.model).__name__}"), quiet():
        tf2onnx.convert.from_function(
            source.graph,
            input_signature=source.graph.input_signature,
            opset=opset,
            custom_op_handlers={"Erfc": (_erfc, [])},
            output_path=path,
        )
    return source.graph_names()


def _keywords(source: KerasSource, options: BuildOptions) -> dict[str, Any]:
    """Keywords of the conversion; images of Keras have their channels last."""
    asked = dict(options.conversion)
    if asked and "layout" not in asked:
        pairs = zip(source.graph_names(), source.inputs.ports, strict=True)
        images = {name: "NHWC" for name, port in pairs if len(port.shape) == 4}
        asked |= {"layout": images} if images else {}
    return asked


def _converted(openvino: Any, source: KerasSource, folder: Path) -> Any:
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    try:
        frozen = convert_variables_to_constants_v2(source.concrete)
        tf.io.write_graph(frozen.graph.as_graph_def(), str(folder), "model.pb", as_text=False)
        with quiet():
            network = openvino.convert_model(folder / "model.pb")
        inputs, outputs = (
            [tensor.name for tensor in ends] for ends in (frozen.inputs, frozen.outputs)
        )
        return _in_order(openvino, network, source, inputs, outputs)
    except Exception as error:
        file = folder / "model.onnx"
        try:
            inputs = to_onnx(source, str(file), BuildOptions())
            with quiet():
                network = openvino.convert_model(file)
        except Exception:  # OpenVINO has errors of its own; the first one tells more
            raise UsageError(
                f"OpenVINO cannot convert {type(source.model).__name__}: {one_line(error)}"
            ) from error
        outputs = [tensor.name for tensor in source.concrete.outputs]
        return _in_order(openvino, network, source, inputs, outputs)


def _in_order(
    openvino: Any, network: Any, source: KerasSource, inputs: list[str], outputs: list[str]
) -> Any:
    """Return the network with the function's inputs and outputs in its order, and no others.

    OpenVINO makes outputs of what nobody reads, and leaves out inputs that nobody reads.
    """
    ends = _named(network.outputs, outputs)
    if None in ends:
        raise UsageError("an output was lost")
    begins = _named(network.inputs, inputs)
    parameters = []
    for begin, port, name in zip(begins, source.inputs.ports, source.graph_names(), strict=True):
        shape = [-1 if size is None else size for size in port.shape]
        if begin is None:
            parameter = openvino.opset13.parameter(shape, numpy_type(port.dtype))
        else:
            parameter = begin.get_node()
        parameter.set_friendly_name(name)
        parameter.output(0).set_names({name})
        parameters.append(parameter)
    results = [openvino.opset13.result(end.get_node().input_value(0)) for end in ends]
    return openvino.Model(results, parameters, type(source.model).__name__)


def _named(ports: list, names: list[str]) -> list:
    """Return the port of each name, None where there is none."""
    by_name = {name.removesuffix(":0"): port for port in ports for name in port.get_names()}
    return [by_name.get(name.removesuffix(":0")) for name in names]


def _erfc(context: Any, node: Any, name: str, arguments: Any) -> None:
    """Write ``erfc(x)``, of which GELU is made and which ONNX lacks, as ``1 - erf(x)``."""
    from tf2onnx import utils

    dtype, shape = context.get_dtype(node.output[0]), context.get_shape(node.output[0])
    one = np.array(1, utils.map_onnx_to_numpy_type(dtype))
    constant = context.make_const(utils.make_name("one"), one).output[0]
    erf = context.make_node("Erf", [node.input[0]]).output[0]
    outputs = list(node.output)
    context.remove_node(node.name)
    context.make_node(
        "Sub", [constant, erf], outputs=outputs, name=node.name, dtypes=[dtype], shapes=[shape]
    )


class KerasOpenVINOModel(OpenVINOFacade, AcceleratedKerasModel):
    """A network of OpenVINO that is called as the user's model is; by any number of threads."""

    def nano_arrays_of(self, call: Any) -> list[np.ndarray]:
        return self.nano_inputs.arrays([call])

    def nano_result_of(self, results: list[np.ndarray]) -> Any:
        return self._rebuilt(results, tf.convert_to_tensor)


class KerasQuantizedModel(KerasOpenVINOModel):
    """A network with 8-bit integers that the registry chose the runtime of, which is OpenVINO."""


class KerasONNXRuntimeModel(OnnxRuntimeFacade, AcceleratedKerasModel):
    """A network of ONNX Runtime that is called as the user's model is; by any number of threads."""


_FILE = "saved_model.keras"


class KerasBF16Model(AcceleratedKerasModel):
    """A clone of the user's model under the policy ``mixed_bfloat16``, run as a graph.

    Weights are in float32, layers compute in bfloat16, and results have the original's types.
    """

    def save_to(self, directory: Path) -> dict:
        self.nano_network.source.model.save(directory / _FILE)
        return {**self.nano_describe(), "checkpoint": _FILE}

    @classmethod
    def load_network(cls, directory: Path, meta: Mapping, *, device: str | None) -> BF16Graph:
        clone = keras.saving.load_model(directory / meta["checkpoint"], compile=False)
        return BF16Graph(clone, CallInputs.from_json(meta["inputs"]))


class BF16Graph:
    """A model whose layers compute in bfloat16, as a graph of flat inputs and outputs.

    Parameters
    ----------
    model : keras.Model
        See :func:`bf16_clone`.
    inputs : CallInputs
    threads : int, optional
        Threads that were asked for; they are those of TensorFlow.
    """

    def __init__(self, model: Any, inputs: CallInputs, threads: int | None = None):
        self.source = KerasSource(model)
        self.source.inputs = inputs
        self.thread_num = threads

    def infer(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Run the graph on a flat list of arrays."""
        return [np.asarray(result) for result in self.source.graph(*arrays)]


def bf16_clone(model: Any) -> Any:
    """Return a copy of a model, with its weights, whose float32 layers compute in bfloat16.

    Raises
    ------
    UsageError
        If Keras cannot rebuild the model from its configuration.
    """
    clone = unpacked(packed(model, compiled=False))
    policy = keras.dtype_policies.get("mixed_bfloat16")
    for layer in clone._flatten_layers():
        if getattr(layer.dtype_policy, "name", None) == "float32":
            layer.dtype_policy = policy
    return clone
