"""Conversion of PyTorch modules to ONNX and OpenVINO, and the models that run the networks.

For OpenVINO a module is traced first, which gives the smallest networks. A trace records a single
path through the code and loses data-dependent control flow. In that case the module is exported
with ``torch.export``, which fails instead of losing control flow, or scripted, which keeps branches
and loops. If OpenVINO cannot convert these, the module is converted through ONNX, whose operators
are simpler.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from bigdl.common.errors import LazyModule, UsageError, as_usage_error, first_line, require
from bigdl.common.private_folders import scratch_folder
from bigdl.common.program_state import preserve_program_state
from bigdl.nano.acceleration.method import BuildOptions, RuntimeNetwork, find_method
from bigdl.nano.acceleration.network_cache import largest_size, surroundings
from bigdl.nano.acceleration.onnx_quantization import save
from bigdl.nano.acceleration.onnxruntime import OnnxRuntimeFacade
from bigdl.nano.acceleration.precision import FP16
from bigdl.nano.acceleration.quiet import quiet
from bigdl.nano.acceleration.search.results import fingerprint
from bigdl.nano.attribute_patch import AttributePatch
from bigdl.nano.openvino.cached import load_network, store_network
from bigdl.nano.openvino.methods import preprocessed
from bigdl.nano.openvino.model import OpenVINOFacade, plain, saved_properties
from bigdl.nano.openvino.network import core
from bigdl.nano.pytorch.inference.accelerated import (
    AcceleratedModel,
    LoadOptions,
    NetworkModel,
    load_weights,
    require_original,
    save_weights,
)
from bigdl.nano.pytorch.inference.graph_digest import graph_digest
from bigdl.nano.pytorch.inference.graphs import export_flat
from bigdl.nano.pytorch.inference.source import (
    ForwardInputs,
    TorchSource,
    evaluating,
    split_batch,
)

if TYPE_CHECKING:
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

openvino = LazyModule("openvino", "nano")

_log = logging.getLogger(__name__)

# Keywords of torch.onnx.export that other arguments of trace and quantize replace.
_REPLACED_BY = {
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
    """Return unique names of a network's inputs with letters, digits and underscores only."""
    names = [re.sub(r"\W", "_", path) for path in inputs.names]
    if len(set(names)) == len(names):
        return names
    return [f"{name}_{position}" for position, name in enumerate(names)]


def to_onnx(source: TorchSource, path: str, options: BuildOptions) -> list[str]:
    """Export a source's model to an ONNX file with flat inputs and outputs.

    ``torch.export`` is tried first. If it fails, the model is traced, which fixes branches of its
    Python code; a warning is logged.

    Parameters
    ----------
    source : TorchSource
    path : str
    options : BuildOptions
        Uses ``dynamic_axes``, ``simplification`` and ``conversion``.

    Returns
    -------
    list of str
        Input names; the file may lack inputs that the model does not use.

    Raises
    ------
    UsageError
        If ``torch.onnx.export`` lacks a keyword, ``dynamic_axes`` does not fit the sample, or the
        model cannot be exported.
    """
    require("onnxscript", "nano")
    names, _ = onnx_names(source.inputs), source.outputs  # both raise clear errors
    keywords = _checked_keywords(options.conversion)
    dims = source.dynamic_dimensions(options.dynamic_axes)
    wants_export = keywords.pop("dynamo", None)
    tensors = source.general_sample(dims)
    exporters = {"torch.export": _by_export, "trace": _by_trace, "script": _by_script}
    wanted = {True: ("torch.export",), False: ("trace",), None: tuple(exporters)}[wants_export]
    failures: list[str] = []
    with source.flat_module() as module:
        for exporter in wanted:
            if exporter in options.rejected_exporters or (
                exporter == "script" and not options.rejected_exporters
            ):
                continue
            try:
                with quiet():
                    exporters[exporter](module, tensors, path, names, dims, options, keywords)
            except Exception as error:
                failures.append(_first_cause(error))
                continue
            source.exporter = exporter
            if failures and exporter == "trace":
                _log.warning(
                    "%s was traced for ONNX, so branches of its code are fixed: torch.export "
                    "cannot read it (%s)",
                    type(source.model).__name__,
                    failures[0],
                )
            return names
    why = failures[0] if failures else "every exporter was rejected"
    raise UsageError(
        f"{type(source.model).__name__} cannot be exported to ONNX: {why}", code="model-unsupported"
    )


def _first_cause(error: BaseException) -> str:
    """Return the root cause of an exception in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


def _by_export(module, tensors, path, names, dims, options: BuildOptions, keywords) -> None:
    # Requested dimensions must be dynamic; by default a size that the model fixes stays fixed.
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
        for value in node.outputs:  # an operation's result can have the name of an argument
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
    """Temporarily prevent the exporter from printing a graph that it cannot export.

    The exporter of torch 2.13 enables this log regardless of its state.
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
    """Export a module to ONNX via TorchScript to keep branches; inputs and outputs must be flat."""
    model, inputs = module.model, module.inputs
    if inputs.names != inputs.parameters:
        raise UsageError("The module's inputs are nested", code="model-unsupported")
    _by_trace(torch.jit.script(model), tensors, path, names, dims, options, keywords)


def _checked_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    known = inspect.signature(torch.onnx.export).parameters
    for name in keywords:
        if name in _REPLACED_BY:
            raise UsageError(
                f"Argument {name!r} of torch.onnx.export cannot be passed on: "
                f"{_REPLACED_BY[name]} decides about it",
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
    """Convert a source's model to an OpenVINO network with flat inputs and outputs.

    Parameters
    ----------
    source : TorchSource
        Source of a module, or of a model that already runs in OpenVINO, whose network is copied.
    options : BuildOptions
        ``dynamic_axes`` selects the input sizes that may change; ``conversion`` adds
        preprocessing (see :func:`bigdl.nano.openvino.methods.preprocessed`).

    Returns
    -------
    openvino.Model
        Network that shares no memory with the module, unless ``options.share_weights``.

    Raises
    ------
    UsageError
        If the model cannot be converted, or an option does not fit it.
    """
    convert, _ = options.conversion, source.outputs  # raises a clear error
    if isinstance(source.model, AcceleratedModel):
        if convert:
            raise UsageError(
                f"{', '.join(map(repr, convert))} must be passed when the model is converted, but "
                "it is in OpenVINO already; pass the original model",
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
    """Convert a source's model with the first exporter that works and was not rejected."""
    name, refused = type(source.model).__name__, options.rejected_exporters
    traced, lost, why = None, None, ""
    if "trace" not in refused:
        try:
            traced, lost = _traced(source, options.share_weights)
        except Exception as error:  # tracers, exporters and frontends may raise anything
            why = _key_line(error)
    if traced is not None and lost is None:
        source.exporter = "trace"
        return traced
    others = {"torch.export": _exported, "script": _scripted}
    if traced is None:
        others["onnx"] = _from_onnx
    for exporter, convert in others.items():
        if exporter in refused:
            continue
        try:
            network = convert(source, options)
        except Exception as error:
            why = why or _key_line(error)
        else:
            source.exporter = exporter
            return network
    if traced is None or lost is None:
        raise UsageError(f"{name} cannot be converted to OpenVINO: {why}", code="model-unsupported")
    source.exporter = "trace"
    source.conversion_warning = (
        f"{name} branches on its data ({lost.filename}, line {lost.lineno}); in OpenVINO it always "
        "takes the sample's branch"
    )
    return traced


def source_fingerprint(source: TorchSource) -> str | None:
    """Return a digest of a source's modules, their code, and its sample's shapes.

    It costs less than a trace and is for estimates: code can read values that it does not cover.
    """
    sample = tree_map_only(torch.Tensor, _shape_of, source.arguments)
    return fingerprint("traced", source.model, sample, surroundings())


def _shape_of(tensor: torch.Tensor) -> tuple:
    return str(tensor.dtype), tuple(tensor.shape), tensor.is_contiguous()


def _traced(source: TorchSource, share_weights: bool):
    """Convert a traced model; return the network and the first data-dependence warning, if any.

    If it depends on no data, an equal trace's network is taken from the cache on disk.
    """
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    sample = tuple(source.sample_tensors)
    about = {"model": type(source.model).__name__, "network": "converted"}
    if source.fingerprint is not None:
        about["source"] = source.fingerprint
    # OpenVINO changes the root logger's level if the conversion fails.
    with (
        source.flat_module() as module,
        preserve_program_state(),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        # check_trace would trace twice more; shared weights would change with the module's.
        decoder = TorchScriptPythonDecoder(
            module,
            example_input=sample,
            shared_memory=share_weights,
            trace_kwargs={"check_trace": False},
        )
        # PyTorch's modules give this warning for shape checks.
        lost = next(
            (
                each
                for each in seen
                if issubclass(each.category, torch.jit.TracerWarning)
                and not each.filename.startswith(_LIBRARIES)
            ),
            None,
        )
        key = _conversion_key(decoder, sample) if lost is None else None
        network = load_network(key)
        if network is not None:
            source.cache_key = key
            return network, None
        network = openvino.convert_model(decoder, example_input=sample, share_weights=share_weights)
    return store_network(key, _checked(network, source), about), lost


def _conversion_key(decoder: TorchScriptPythonDecoder, sample: tuple) -> str | None:
    """Return the key of a traced network in the cache on disk; None if it is not cached."""
    if not largest_size() or decoder.config is not None:
        return None
    digest = graph_digest(decoder.graph_element, decoder.pt_module)
    if digest is None:
        return None
    count = len(decoder.inputs())
    names = [decoder.get_input_signature_name(index) for index in range(count)]
    return fingerprint("graph", digest, names, [*map(_shape_of, sample)], surroundings())


def _exported(source: TorchSource, options: BuildOptions):
    with source.flat_module() as module, quiet():
        program = export_flat(module, source, options.dynamic_axes)
        network = openvino.convert_model(program, share_weights=options.share_weights)
        return _checked(network, source)


def _scripted(source: TorchSource, options: BuildOptions):
    """Convert a scripted module; inputs and outputs must be flat tensors."""
    inputs, outputs = source.inputs, source.outputs
    flat = outputs.node_type == "tensor" or (
        outputs.node_type == "tuple"
        and all(child.node_type == "tensor" for child in outputs.children)
    )
    if inputs.names != inputs.parameters or not flat:
        raise UsageError("The module's inputs or outputs are nested", code="model-unsupported")
    with evaluating(source.model) as model, quiet():
        script = torch.jit.freeze(torch.jit.script(model))
        network = _checked(openvino.convert_model(script, share_weights=False), source)
    # A script lacks input dtypes, without which operators cannot be resolved.
    for parameter, array in zip(network.get_parameters(), source.sample_arrays(), strict=True):
        parameter.set_element_type(openvino.Type(array.dtype))
        parameter.set_partial_shape(openvino.PartialShape([-1] * array.ndim))
    network.validate_nodes_and_infer_types()
    core().compile_model(network, "CPU")  # raises if the plugin lacks an operator
    return network


def _from_onnx(source: TorchSource, options: BuildOptions):
    with scratch_folder("onnx") as folder, quiet():
        file = Path(folder, "model.onnx")
        to_onnx(source, str(file), replace(options, conversion={}))
        return _checked(openvino.convert_model(file), source)


def _checked(network, source: TorchSource):
    """Return the network; raise UsageError if the converter dropped an input or output."""
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
        text=_key_line,
        code="argument-value",
        argument="dynamic_axes",
    ):
        network.reshape(shapes)


def _key_line(error: Exception) -> str:
    """Return the most informative line of an error message."""
    lines = (line.strip() for line in str(error).splitlines())
    telling = ("No conversion rule", "Conversion is failed for", "Error")
    causes = (line.lstrip("- ")[:300] for line in lines if any(part in line for part in telling))
    return next(causes, first_line(error))


class PytorchONNXRuntimeModel(OnnxRuntimeFacade, NetworkModel):
    """Accelerated model that runs a network in ONNX Runtime."""

    @classmethod
    def load_from(cls, directory: Path, meta: Mapping[str, Any], options: LoadOptions) -> Self:
        if meta.get("compression") != "bf16":
            return super().load_from(directory, meta, options)
        # the file is complete, but BigDL 2 required these arguments
        source = TorchSource(*require_original(options))
        loaded = super().load_from(directory, meta, options)
        # raises if the sample, and thus the original, does not fit the network
        source.run(loaded, source.sample_tensors)
        return loaded


_WEIGHTS = "saved_weight.pt"
_REBUILT_WITH = ("dynamic_axes", "conversion")


class PytorchOpenVINOModel(OpenVINOFacade, NetworkModel):
    """Accelerated model that runs a network in OpenVINO.

    Attributes
    ----------
    rebuilt_with : dict
        Options for converting the model again if only its weights are saved.
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
        # an element of a loader may include targets
        batch = split_batch(self, call, self.nano_inputs)
        return self.nano_to_arrays(batch.args, batch.kwargs)

    def save_to(self, directory: Path, compression: str = "fp32") -> dict[str, Any]:
        rebuilt_with = cast("dict[str, Any]", plain(self.rebuilt_with))
        precision = self.nano_network.precision
        # quantized and fp16 weights are smaller already
        if compression != "bf16" or precision.quantized or precision == FP16:
            return {**super().save_to(directory), **rebuilt_with}
        if self.nano_source is None:
            raise UsageError(
                "compression='bf16' stores the weights of the original model, which is missing; "
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
            return cast("Self", cls._convert_again(directory, meta, options))
        loaded = super().load_from(directory, meta, options)
        loaded.rebuilt_with = {name: meta[name] for name in _REBUILT_WITH if name in meta}
        return loaded

    @staticmethod
    def _convert_again(
        directory: Path, meta: Mapping[str, Any], options: LoadOptions
    ) -> PytorchOpenVINOModel:
        """Convert the original model again with the saved weights."""
        model, input_sample = require_original(options)
        module = load_weights(copy.deepcopy(model), directory / meta["checkpoint"])
        config, _ = saved_properties(meta)
        if options.cache_dir is not None:
            config["CACHE_DIR"] = str(options.cache_dir)
        device = options.device or meta["device"]
        build_options = BuildOptions.of({**meta, "openvino_config": config, "device": device})
        method = find_method(meta.get("method") or "openvino_fp32")
        source = TorchSource(module, input_sample)
        built = cast("PytorchOpenVINOModel", method.build(source, build_options))
        if options.shapes is not None:
            reshaped, error = built.reshape(options.shapes)
            if not reshaped:
                raise UsageError(error, code="argument-value", argument="shapes")
        return built.nano_attach(model)
