"""Modules of PyTorch in other runtimes: their conversion, and the models that run them.

For OpenVINO a module is traced, which gives the smallest networks. A trace holds one way through
the module; where the module decides by its data it is lost. Then the module is exported with
``torch.export``, which refuses to lose anything, or scripted, which keeps branches and loops. What
OpenVINO cannot take as it is goes through ONNX, whose operators are simpler.
"""

import copy
import importlib
import inspect
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch

from bigdl.common.errors import LazyModule, UsageError, as_usage_error, first_line, require
from bigdl.common.private_folders import scratch_folder
from bigdl.common.program_state import preserve_program_state
from bigdl.nano.acceleration.method import BuildOptions, RuntimeNetwork, find_method
from bigdl.nano.acceleration.onnx_quantization import save
from bigdl.nano.acceleration.onnxruntime import OnnxRuntimeFacade
from bigdl.nano.acceleration.precision import FP16
from bigdl.nano.acceleration.quiet import quiet
from bigdl.nano.attribute_patch import AttributePatch
from bigdl.nano.openvino.methods import preprocessed
from bigdl.nano.openvino.model import OpenVINOFacade, plain, saved_properties
from bigdl.nano.openvino.network import core
from bigdl.nano.pytorch.inference.accelerated import (
    AcceleratedModel,
    LoadOptions,
    NetworkModel,
    ask_for_original,
    load_weights,
    save_weights,
)
from bigdl.nano.pytorch.inference.graphs import export_flat
from bigdl.nano.pytorch.inference.source import (
    ForwardInputs,
    TorchSource,
    evaluating,
    split_batch,
)

openvino = LazyModule("openvino", "nano")

_log = logging.getLogger(__name__)

# Keywords of torch.onnx.export that other arguments of trace and quantize stand for.
_OURS = {
    "model": "model",
    "args": "input_sample",
    "f": "InferenceOptimizer.save",
    "kwargs": "example_kwarg_inputs",
    "input_names": "the names of forward's parameters",
    "dynamic_axes": "dynamic_axes",
    "dynamic_shapes": "dynamic_axes",
    "optimize": "simplification",
    "external_data": "the size of the model",
    "verbose": "logging",
}


def onnx_names(inputs: ForwardInputs) -> list[str]:
    """Names of a network's inputs with letters, digits and underscores only, each once."""
    names = [re.sub(r"\W", "_", path) for path in inputs.names]
    if len(set(names)) == len(names):
        return names
    return [f"{name}_{position}" for position, name in enumerate(names)]


def to_onnx(source: TorchSource, path: str, options: BuildOptions) -> list[str]:
    """Write a source's model with flat inputs and outputs.

    It is read by ``torch.export``; a model that this cannot read is traced, which fixes what its
    Python code decides. The log says so.

    Parameters
    ----------
    source : TorchSource
    path : str
    options : BuildOptions
        ``dynamic_axes``, ``simplification`` and ``conversion`` count.

    Returns
    -------
    list of str
        Names of the inputs; the file may lack ones that the model does not use.

    Raises
    ------
    UsageError
        If a keyword is not one of ``torch.onnx.export``, ``dynamic_axes`` does not fit the
        sample, or the model cannot be exported.
    """
    require("onnxscript", "nano")
    names, _ = onnx_names(source.inputs), source.outputs  # says by itself what is wrong with them
    keywords = _checked_keywords(options.conversion)
    dims = source.dynamic_dimensions(options.dynamic_axes)
    wants_export = keywords.pop("dynamo", None)
    tensors = source.general_sample(dims)
    ways = {"torch.export": _by_export, "trace": _by_trace, "script": _by_script}
    wanted = {True: ("torch.export",), False: ("trace",), None: tuple(ways)}[wants_export]
    failures: list[str] = []
    with source.flat_module() as module:
        for way in wanted:
            if way in options.rejected_exporters or (
                way == "script" and not options.rejected_exporters
            ):
                continue
            try:
                with quiet():
                    ways[way](module, tensors, path, names, dims, options, keywords)
            except Exception as error:
                failures.append(_first_cause(error))
                continue
            source.exporter = way
            if failures and way == "trace":
                _log.warning(
                    "%s was traced for ONNX, so branches of its code are fixed: torch.export "
                    "cannot read it (%s)",
                    type(source.model).__name__,
                    failures[0],
                )
            return names
    why = failures[0] if failures else "no exporter is left"
    raise UsageError(
        f"{type(source.model).__name__} cannot be exported to ONNX: {why}", code="model-unsupported"
    )


def _first_cause(error: BaseException) -> str:
    """Return in one line what happened, which exporters wrap in explanations of several pages."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


def _by_export(module, tensors, path, names, dims, options: BuildOptions, keywords) -> None:
    # What was asked for has to be possible; by default a size that the model fixes stays fixed.
    size = torch.export.Dim.AUTO if options.dynamic_axes is True else torch.export.Dim.DYNAMIC
    shapes = [dict.fromkeys(each, size) for each in dims]
    exported = torch.onnx.export(
        module,
        tuple(tensors),
        input_names=names,
        dynamo=True,
        dynamic_shapes=(tuple(shapes),),
        optimize=options.simplification,
        verbose=False,
        **keywords,
    )
    program = cast("torch.onnx.ONNXProgram", exported)
    inputs = set(program.model.graph.inputs)
    for node in program.model.graph.all_nodes():
        for value in node.outputs:  # an argument named as an operation has its result's name
            if value.name in names and value not in inputs:
                value.name = f"{value.name}_result"
    program.save(path)


def _by_trace(module, tensors, path, names, dims, options: BuildOptions, keywords) -> None:
    axes = {
        name: {dim: "batch_size" if dim == 0 else f"{name}_{dim}" for dim in each}
        for name, each in zip(names, dims, strict=True)
    }
    with _without_dumps():
        torch.onnx.export(
            module,
            tuple(tensors),
            path,
            input_names=names,
            dynamo=False,
            dynamic_axes=axes,
            **keywords,
        )
    if options.simplification:
        onnx, optimizer = require("onnx", "nano"), require("onnxscript.optimizer", "nano")
        save(optimizer.optimize(onnx.load(path)), Path(path))


@contextmanager
def _without_dumps() -> Iterator[None]:
    """Keep the exporter from printing the graph of what it cannot export.

    It switches its log on where the log's state is asked for, whatever that is (torch 2.13).
    """
    patch = AttributePatch()
    with suppress(ImportError):
        exporter = importlib.import_module("torch.onnx._internal.torchscript_exporter.utils")
        patch.set(exporter, "setup_onnx_logging", lambda verbose: nullcontext())
    try:
        yield
    finally:
        patch.undo()


def _by_script(module, tensors, path, names, dims, options: BuildOptions, keywords) -> None:
    """Export a script, which keeps branches and loops; of flat inputs and outputs only."""
    model, inputs = module.model, module.inputs
    if inputs.names != inputs.parameters:
        raise UsageError("The module's inputs are nested", code="model-unsupported")
    _by_trace(torch.jit.script(model), tensors, path, names, dims, options, keywords)


def _checked_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    known = inspect.signature(torch.onnx.export).parameters
    for name in keywords:
        if name in _OURS:
            raise UsageError(
                f"Argument {name!r} of torch.onnx.export cannot be passed on: "
                f"{_OURS[name]} decides about it",
                code="argument-conflict",
                argument=name,
            )
        if name not in known:
            raise UsageError(
                f"There is no argument {name!r}, neither here nor of torch.onnx.export; leave it "
                "out",
                code="argument-unknown",
                argument=name,
            )
    return dict(keywords)


_LIBRARIES = str(Path(torch.__file__).parent)


def to_openvino(source: TorchSource, options: BuildOptions):
    """A source's model as a network whose inputs and outputs are the flat lists of tensors.

    Parameters
    ----------
    source : TorchSource
        Also of a model that runs in OpenVINO already; its network is copied.
    options : BuildOptions
        ``dynamic_axes`` says which sizes of the inputs may change, ``conversion`` what is
        built in before the network (see
        :func:`bigdl.nano.openvino.methods.preprocessed`).

    Returns
    -------
    openvino.Model
        It shares no memory with the model.

    Raises
    ------
    UsageError
        If the model cannot be converted, or an option does not fit it.
    """
    convert, _ = options.conversion, source.outputs  # says by itself what cannot be converted
    if isinstance(source.model, AcceleratedModel):
        if convert:
            raise UsageError(
                f"{', '.join(map(repr, convert))} has to be given when the model is converted, not "
                "for one that is in OpenVINO already; pass the original model",
                code="argument-conflict",
                argument=next(iter(convert)),
            )
        return source.model.ov_model.clone()
    network = _converted(source, options)
    for port, name in zip(network.inputs, source.inputs.names, strict=True):
        port.get_tensor().set_names({name})
    _set_shapes(network, source, options.dynamic_axes)
    return preprocessed(network, convert)


def _converted(source: TorchSource, options: BuildOptions):
    """The network by the first way that is possible and was not refused."""
    name, refused = type(source.model).__name__, options.rejected_exporters
    traced, lost, why = None, None, ""
    if "trace" not in refused:
        try:
            traced, lost = _traced(source)
        except Exception as error:  # tracers, exporters and frontends raise whatever they like
            why = _cause(error)
    if traced is not None and lost is None:
        source.exporter = "trace"
        return traced
    others = {"torch.export": _exported, "script": _scripted}
    if traced is None:
        others["onnx"] = _from_onnx
    for way, convert in others.items():
        if way in refused:
            continue
        try:
            network = convert(source, options)
        except Exception as error:
            why = why or _cause(error)
        else:
            source.exporter = way
            return network
    if traced is None or lost is None:
        raise UsageError(f"{name} cannot be converted to OpenVINO: {why}", code="model-unsupported")
    source.exporter = "trace"
    source.conversion_warning = (
        f"{name} decides by its data ({lost.filename}, line {lost.lineno}); in OpenVINO it always "
        "goes the way that the sample goes"
    )
    return traced


def _traced(source: TorchSource):
    """The network of a trace, and the first warning that it depends on the sample's data."""
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    sample = tuple(source.sample_tensors)
    # OpenVINO leaves the level of the root logger changed where it cannot convert.
    with (
        source.flat_module() as module,
        preserve_program_state(),
        warnings.catch_warnings(record=True) as seen,
    ):
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
    with source.flat_module() as module, quiet():
        program = export_flat(module, source, options.dynamic_axes)
        return _checked(openvino.convert_model(program, share_weights=False), source)


def _scripted(source: TorchSource, options: BuildOptions):
    """The network of a scripted module; only tensors that are arguments themselves are possible."""
    inputs, outputs = source.inputs, source.outputs
    flat = outputs.kind == "tensor" or (
        outputs.kind == "tuple" and all(child.kind == "tensor" for child in outputs.children)
    )
    if inputs.names != inputs.parameters or not flat:
        raise UsageError("The module's inputs or outputs are nested", code="model-unsupported")
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
    with scratch_folder("onnx") as folder, quiet():
        file = Path(folder, "model.onnx")
        to_onnx(source, str(file), replace(options, conversion={}))
        return _checked(openvino.convert_model(file), source)


def _checked(network, source: TorchSource):
    """The network, if it has all inputs and outputs: a converter may drop one without a word."""
    expected = (len(source.inputs.names), len(source.outputs.paths("")))
    actual = (len(network.inputs), len(network.outputs))
    if actual != expected:
        raise UsageError(
            f"{expected[0]} inputs and {expected[1]} outputs became {actual[0]} and {actual[1]}",
            code="model-unsupported",
        )
    return network


def _set_shapes(network, source: TorchSource, dynamic_axes: bool | Mapping) -> None:
    tensors = source.sample_tensors
    shapes = {}
    for position, axes in enumerate(source.dynamic_dimensions(dynamic_axes)):
        sizes = [-1 if axis in axes else size for axis, size in enumerate(tensors[position].shape)]
        shapes[position] = openvino.PartialShape(sizes)
    wanted = ", ".join(map(str, shapes.values()))
    sentence = f"{type(source.model).__name__} cannot have inputs of the sizes {wanted}"
    with as_usage_error(
        sentence,
        "; pass other dynamic_axes",
        text=_cause,
        code="argument-value",
        argument="dynamic_axes",
    ):
        network.reshape(shapes)


def _cause(error: Exception) -> str:
    """The line of an error's text that says most."""
    lines = (line.strip() for line in str(error).splitlines())
    telling = ("No conversion rule", "Conversion is failed for", "Error")
    causes = (line.lstrip("- ")[:300] for line in lines if any(part in line for part in telling))
    return next(causes, first_line(error))


class PytorchONNXRuntimeModel(OnnxRuntimeFacade, NetworkModel):
    """A network of ONNX Runtime that is called as the user's module is."""

    @classmethod
    def load_from(cls, directory: Path, meta: Mapping[str, Any], options: LoadOptions) -> Self:
        if meta.get("compression") != "bf16":
            return super().load_from(directory, meta, options)
        # the file is complete, but programs of BigDL 2 count on being asked
        source = TorchSource(*ask_for_original(options))
        loaded = super().load_from(directory, meta, options)
        # a sample, and so an original, that is not of this network is refused
        source.run(loaded, source.sample_tensors)
        return loaded


_WEIGHTS = "saved_weight.pt"
_REBUILT_WITH = ("dynamic_axes", "conversion")


class PytorchOpenVINOModel(OpenVINOFacade, NetworkModel):
    """A network of OpenVINO that is called as the user's module is.

    Attributes
    ----------
    rebuilt_with : dict
        What a loaded model has to be converted with again if only its weights are saved.
    """

    rebuilt_with: dict[str, Any]

    @classmethod
    def of(
        cls, source: TorchSource, network: RuntimeNetwork, method: str, options: BuildOptions
    ) -> Self:
        model = super().of(source, network, method, options)
        model.rebuilt_with = {name: getattr(options, name) for name in _REBUILT_WITH}
        return model

    def nano_arrays_of(self, call: object) -> list[np.ndarray]:
        if isinstance(call, Mapping) and set(call) <= set(self.nano_inputs.parameters):
            return self.nano_to_arrays((), dict(call))
        # an element of a loader may hold targets, too
        batch = split_batch(self, call, self.nano_inputs)
        return self.nano_to_arrays(batch.args, batch.kwargs)

    def save_to(self, directory: Path, compression: str = "fp32") -> dict[str, Any]:
        rebuilt_with = plain(self.rebuilt_with)
        precision = self.nano_network.precision
        # the weights of some methods are stored smaller already
        if compression != "bf16" or precision.quantized or precision == FP16:
            return {**super().save_to(directory), **rebuilt_with}
        if self.nano_source is None:
            raise UsageError(
                "compression='bf16' stores the weights of the original model, which is not there; "
                "pass model when loading, or save with compression='fp32'",
                code="argument-missing",
                argument="model",
            )
        save_weights(self.nano_source, directory / _WEIGHTS, "bf16")
        weights = {"checkpoint": _WEIGHTS, "compression": "bf16"}
        return {**self.nano_describe(), **self.nano_network_facts(), **rebuilt_with, **weights}

    @classmethod
    def load_from(cls, directory: Path, meta: Mapping[str, Any], options: LoadOptions) -> Self:
        if meta.get("compression") == "bf16":
            return cls._converted_again(directory, meta, options)
        loaded = super().load_from(directory, meta, options)
        loaded.rebuilt_with = {name: meta[name] for name in _REBUILT_WITH if name in meta}
        return loaded

    @staticmethod
    def _converted_again(directory: Path, meta: Mapping[str, Any], options: LoadOptions) -> Any:
        """Convert the original again with the weights that were saved."""
        model, input_sample = ask_for_original(options)
        module = load_weights(copy.deepcopy(model), directory / meta["checkpoint"])
        config, _ = saved_properties(meta)
        if options.cache_dir is not None:
            config["CACHE_DIR"] = str(options.cache_dir)
        device = options.device or meta["device"]
        build_options = BuildOptions.of({**meta, "openvino_config": config, "device": device})
        method = find_method(meta.get("method") or "openvino_fp32")
        built = method.build(TorchSource(module, input_sample), build_options)
        if options.shapes is not None:
            reshaped, error = built.reshape(options.shapes)
            if not reshaped:
                raise UsageError(error, code="argument-value", argument="shapes")
        return built.nano_attach(model)
