"""Keras models as networks of other runtimes.

OpenVINO reads a frozen graph of TensorFlow by itself. What it has no rule for, it is given as ONNX,
in which tf2onnx has made one operator of some loops.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigdl.common.environment import scratch_home
from bigdl.common.errors import UsageError, one_line, require
from bigdl.nano.acceleration.options import BuildOptions
from bigdl.nano.acceleration.quiet import quiet

if TYPE_CHECKING:
    from bigdl.nano.tf.inference.source import KerasSource

__all__ = ["to_onnx", "to_openvino"]

_OPSET = 18  # the newest that tf2onnx knows


def to_openvino(source: KerasSource, options: BuildOptions) -> Any:
    """A source's model as an ``openvino.Model`` with the source's flat inputs and outputs.

    Raises
    ------
    UsageError
        If OpenVINO cannot convert it, or a keyword of the conversion does not fit.
    """
    openvino = require("openvino", "nano")
    from bigdl.nano.acceleration.openvino_preprocess import preprocessed

    known = getattr(source.model, "ov_model", None)
    if known is not None:  # a model in OpenVINO already
        return preprocessed(known.clone(), _keywords(source, options))
    with tempfile.TemporaryDirectory(prefix="bigdl-keras-", dir=scratch_home()) as folder:
        network = _converted(openvino, source, Path(folder))
    return preprocessed(network, _keywords(source, options))


def to_onnx(source: KerasSource, path: str, options: BuildOptions) -> None:
    """Write a source's model as an ONNX file with the source's flat inputs and outputs.

    Raises
    ------
    UsageError
        If it cannot be converted, or a keyword of the conversion does not fit.
    """
    tf2onnx = require("tf2onnx", "tf")
    keywords = dict(options.onnx.export)
    opset = keywords.pop("opset", keywords.pop("opset_version", _OPSET))
    if keywords:
        raise UsageError(
            f"The export of a Keras model to ONNX has no argument {', '.join(sorted(keywords))}; "
            "it takes opset"
        )
    try:
        with quiet():
            tf2onnx.convert.from_function(
                source.graph,
                input_signature=source.graph.input_signature,
                opset=opset,
                custom_op_handlers={"Erfc": (_erfc, [])},
                output_path=path,
            )
    except Exception as error:
        raise UsageError(
            f"tf2onnx cannot convert {type(source.model).__name__}: {one_line(error)}"
        ) from error


def _keywords(source: KerasSource, options: BuildOptions) -> dict[str, Any]:
    """Keywords of the conversion; images of Keras have their channels last."""
    asked = dict(options.openvino.convert)
    if asked and "layout" not in asked:
        pairs = zip(source.onnx_names(), source.inputs.ports, strict=True)
        images = {name: "NHWC" for name, port in pairs if len(port.shape) == 4}
        asked |= {"layout": images} if images else {}
    return asked


def _converted(openvino: Any, source: KerasSource, folder: Path) -> Any:
    try:
        file, inputs, outputs = _frozen(source, folder)
        return _in_order(openvino, _read(openvino, file), source, inputs, outputs)
    except Exception as error:
        file = folder / "model.onnx"
        try:
            to_onnx(source, str(file), BuildOptions())
            network = _read(openvino, file)
        except Exception:  # OpenVINO has errors of its own; the first one tells more
            raise UsageError(
                f"OpenVINO cannot convert {type(source.model).__name__}: {one_line(error)}"
            ) from error
        outputs = [tensor.name for tensor in source.concrete.outputs]
        return _in_order(openvino, network, source, source.onnx_names(), outputs)


def _frozen(source: KerasSource, folder: Path) -> tuple[Path, list[str], list[str]]:
    """A file of the function with constants for variables, and the names of its ends."""
    tf = require("tensorflow", "tf")
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    function = convert_variables_to_constants_v2(source.concrete)
    tf.io.write_graph(function.graph.as_graph_def(), str(folder), "model.pb", as_text=False)
    names = [[tensor.name for tensor in ends] for ends in (function.inputs, function.outputs)]
    return folder / "model.pb", *names


def _read(openvino: Any, file: Path) -> Any:
    with quiet():
        return openvino.convert_model(str(file))


def _in_order(
    openvino: Any, network: Any, source: KerasSource, inputs: list[str], outputs: list[str]
) -> Any:
    """The network with the function's inputs and outputs in its order, and no others.

    OpenVINO makes outputs of what nobody reads, and leaves out inputs that nobody reads.
    """
    ends = _named(network.outputs, outputs)
    if None in ends:
        raise UsageError("an output was lost")
    begins = _named(network.inputs, inputs)
    parameters = []
    for found, port, name in zip(begins, source.inputs.ports, source.onnx_names(), strict=True):
        shape = [-1 if size is None else size for size in port.shape]
        if found is None:
            parameter = openvino.opset13.parameter(shape, source.port_type(port))
        else:
            parameter = found.get_node()
        parameter.set_friendly_name(name)
        parameter.output(0).set_names({name})
        parameters.append(parameter)
    results = [openvino.opset13.result(end.get_node().input_value(0)) for end in ends]
    return openvino.Model(results, parameters, type(source.model).__name__)


def _named(ports: list, names: list[str]) -> list:
    """The port of each name, None where there is none."""
    found = {name.removesuffix(":0"): port for port in ports for name in port.get_names()}
    return [found.get(name.removesuffix(":0")) for name in names]


def _erfc(context: Any, node: Any, name: str, arguments: Any) -> None:
    """Write ``erfc(x)``, of which GELU is made and which ONNX lacks, as ``1 - erf(x)``."""
    import numpy as np
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
