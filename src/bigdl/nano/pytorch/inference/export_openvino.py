"""From a module of PyTorch to a network of OpenVINO.

A module is traced, which gives the smallest networks. A trace holds one way through the module;
where the module decides by its data it is lost. Then the module is exported with ``torch.export``,
which refuses to lose anything, or scripted, which keeps branches and loops. What OpenVINO cannot
take as it is goes through ONNX, whose operators are simpler.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from bigdl.common.environment import scratch_home
from bigdl.common.errors import UsageError, require
from bigdl.nano.acceleration.openvino_preprocess import preprocessed
from bigdl.nano.acceleration.options import BuildOptions
from bigdl.nano.acceleration.quiet import quiet
from bigdl.nano.openvino.network import core
from bigdl.nano.pytorch.inference.accelerated import AcceleratedModel
from bigdl.nano.pytorch.inference.graphs import export_flat
from bigdl.nano.pytorch.inference.source import TorchSource, evaluating

__all__ = ["to_openvino"]

_LIBRARIES = str(Path(torch.__file__).parent)


def to_openvino(source: TorchSource, options: BuildOptions):
    """A source's model as a network whose inputs and outputs are the flat lists of tensors.

    Parameters
    ----------
    source : TorchSource
        Also of a model that runs in OpenVINO already; its network is copied.
    options : BuildOptions
        ``dynamic_axes`` says which sizes of the inputs may change, ``openvino.convert`` what is
        built in before the network (see
        :func:`bigdl.nano.acceleration.openvino_preprocess.preprocessed`).

    Returns
    -------
    openvino.Model
        It shares no memory with the model.

    Raises
    ------
    UsageError
        If the model cannot be converted, or an option does not fit it.
    """
    convert = options.openvino.convert
    if isinstance(source.model, AcceleratedModel):
        if convert:
            raise UsageError(
                f"{', '.join(map(repr, convert))} has to be given when the model is converted, not "
                "for one that is in OpenVINO already; pass the original model"
            )
        return source.model.ov_model.clone()
    network = _converted(source, options)
    for port, name in zip(network.inputs, source.inputs.names, strict=True):
        port.get_tensor().set_names({name})
    _set_shapes(network, source, options.dynamic_axes)
    return preprocessed(network, convert)


def _converted(source: TorchSource, options: BuildOptions):
    name = type(source.model).__name__
    traced, lost, why = None, None, ""
    try:
        traced, lost = _traced(source)
    except Exception as error:  # tracers, exporters and frontends raise whatever they like
        why = _cause(error)
    if traced is not None and lost is None:
        return traced
    others = (_exported, _scripted) if traced is not None else (_exported, _scripted, _from_onnx)
    for convert in others:
        try:
            return convert(source, options)
        except Exception as error:
            why = why or _cause(error)
    if traced is None:
        raise UsageError(f"{name} cannot be converted to OpenVINO: {why}")
    warnings.warn(
        f"{name} decides by its data ({lost.filename}, line {lost.lineno}); in OpenVINO it always "
        "goes the way that the sample goes",
        stacklevel=2,
    )
    return traced


def _traced(source: TorchSource):
    """The network of a trace, and the first warning that it depends on the sample's data."""
    openvino = require("openvino", "nano")
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    sample = tuple(source.sample_tensors)
    with source.flat_module() as module, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        # Checking a trace takes two more traces; shared weights would change with the model's.
        decoder = TorchScriptPythonDecoder(
            module,
            example_input=sample,
            shared_memory=False,
            trace_kwargs={"check_trace": False},
        )
        network = openvino.convert_model(decoder, example_input=sample, share_weights=False)
    # PyTorch's own modules give this warning for checks of shapes.
    lost = (
        each
        for each in seen
        if issubclass(each.category, torch.jit.TracerWarning)
        and not each.filename.startswith(_LIBRARIES)
    )
    return _checked(network, source), next(lost, None)


def _exported(source: TorchSource, options: BuildOptions):
    openvino = require("openvino", "nano")
    with source.flat_module() as module, quiet():
        program = export_flat(module, source.sample_tensors, options.dynamic_axes)
        return _checked(openvino.convert_model(program, share_weights=False), source)


def _scripted(source: TorchSource, options: BuildOptions):
    """The network of a scripted module; only tensors that are arguments themselves are possible."""
    openvino = require("openvino", "nano")
    inputs, outputs = source.inputs, source.outputs
    flat = outputs.kind == "tensor" or (
        outputs.kind == "tuple" and all(child.kind == "tensor" for child in outputs.children)
    )
    if inputs.names != inputs.parameters or not flat:
        raise UsageError("The module's inputs or outputs are nested")
    with evaluating(source.model) as model, quiet():
        script = torch.jit.freeze(torch.jit.script(model))
        network = _checked(openvino.convert_model(script, share_weights=False), source)
    # A script does not say its inputs' types, and without them operators stay undecided.
    for parameter, array in zip(network.get_parameters(), source.sample_arrays(), strict=True):
        parameter.set_element_type(openvino.Type(array.dtype))
        parameter.set_partial_shape(openvino.PartialShape([-1] * array.ndim))
    network.validate_nodes_and_infer_types()
    core().compile_model(network, "CPU")  # the plugin lacks operators that scripts may have
    return network


def _from_onnx(source: TorchSource, options: BuildOptions):
    openvino = require("openvino", "nano")
    with tempfile.TemporaryDirectory(prefix="bigdl-onnx-", dir=scratch_home()) as folder, quiet():
        file = Path(folder, "model.onnx")
        source.to_onnx(str(file), options)
        return _checked(openvino.convert_model(file), source)


def _checked(network, source: TorchSource):
    """The network, if it has all inputs and outputs: a converter may drop one without a word."""
    expected = (len(source.inputs.names), len(source.outputs.paths("")))
    found = (len(network.inputs), len(network.outputs))
    if found != expected:
        raise UsageError(
            f"{expected[0]} inputs and {expected[1]} outputs became {found[0]} and {found[1]}"
        )
    return network


def _set_shapes(network, source: TorchSource, dynamic_axes: bool | Mapping) -> None:
    openvino = require("openvino", "nano")
    names = source.inputs.names
    if isinstance(dynamic_axes, Mapping) and not set(dynamic_axes).intersection(names):
        raise UsageError(
            f"dynamic_axes names none of the inputs {', '.join(names)}, but "
            f"{', '.join(map(str, dynamic_axes))}"
        )
    shapes = {}
    for position, (name, tensor) in enumerate(zip(names, source.sample_tensors, strict=True)):
        sizes = list(tensor.shape)
        for axis in _dynamic(dynamic_axes, name, tensor.ndim):
            sizes[axis] = -1
        shapes[position] = openvino.PartialShape(sizes)
    try:
        network.reshape(shapes)
    except RuntimeError as error:
        raise UsageError(
            f"{type(source.model).__name__} cannot have inputs of the sizes "
            f"{', '.join(map(str, shapes.values()))}: {_cause(error)}; pass other dynamic_axes"
        ) from error


def _dynamic(dynamic_axes: bool | Mapping, name: str, dimensions: int) -> Iterator[int]:
    """Axes of an input whose size may change."""
    axes = dynamic_axes.get(name, ()) if isinstance(dynamic_axes, Mapping) else ()
    if dynamic_axes is True and dimensions:
        axes = (0,)
    for axis in axes:
        if not isinstance(axis, int) or not -dimensions <= axis < dimensions:
            raise UsageError(
                f"dynamic_axes names the axis {axis!r} of {name!r}, which has {dimensions} axes"
            )
        yield axis


def _cause(error: Exception) -> str:
    """The line of an error's text that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "No conversion rule" in line or "Error" in line]
    return (telling or lines or [type(error).__name__])[0][:300]
