"""Acceleration methods of PyTorch, in the order in which ``optimize`` tries them.

TorchScript, and TorchInductor with frozen weights, build graphs. For int8, torchao quantizes and
TorchInductor compiles. Static quantization is torchao's PT2E with the recipe for x86: per-tensor
uint8 activations and per-channel int8 weights.

Intel Extension for PyTorch is discontinued (its last version is for torch 2.8), and PyTorch has its
optimizations. Methods with ``ipex`` in their names use it only if the installed version matches
torch; otherwise TorchInductor compiles the graph with frozen weights.
"""

from __future__ import annotations

import abc
import copy
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import numpy as np
import torch

from bigdl.common.cpu import isa_flags
from bigdl.common.environment import ipex_fits
from bigdl.common.errors import UsageError, as_usage_error, first_line, user_stacklevel
from bigdl.nano.acceleration.accuracy import keep_accuracy, relative_error
from bigdl.nano.acceleration.method import BuildOptions, Method, MethodTable, register_methods
from bigdl.nano.acceleration.onnxruntime import onnxruntime_methods
from bigdl.nano.acceleration.precision import BF16, FP32, INT8, Precision
from bigdl.nano.acceleration.quiet import quiet
from bigdl.nano.openvino.methods import openvino_methods
from bigdl.nano.pytorch.inference import graphs
from bigdl.nano.pytorch.inference.accelerated import Settings, remember_settings
from bigdl.nano.pytorch.inference.network_models import (
    PytorchONNXRuntimeModel,
    PytorchOpenVINOModel,
    to_onnx,
    to_openvino,
)
from bigdl.nano.pytorch.inference.source import FlatModule, TorchSource

_log = logging.getLogger("bigdl.nano")
_BF16_SETS = ("avx512_bf16", "amx_bf16", "bf16", "avx_ne_convert")
_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_QUANTIZED = (torch.nn.Linear, *_CONVOLUTIONS)
# Different rounding changes some results by one step of 8 bits.
_LARGEST_ERROR = 0.2


@dataclass(frozen=True)
class OriginalMethod(Method[TorchSource]):
    """Method that returns the user's model unchanged."""

    def build(self, source: TorchSource, options: BuildOptions):
        remember_settings(source.model, Settings(threads=options.thread_num))
        return source.model


@dataclass(frozen=True)
class AutocastMethod(Method[TorchSource]):
    """Method that runs a copy of the model under autocast to bfloat16."""

    def build(self, source: TorchSource, options: BuildOptions) -> graphs.BF16Model:
        if not source.has_sample and not isa_flags().intersection(_BF16_SETS):
            warnings.warn(
                "This processor has no instructions for bfloat16, so bf16 may be slower than fp32",
                stacklevel=user_stacklevel(),
            )
        module = source.model if options.inplace else copy.deepcopy(source.model)
        return graphs.BF16Model(
            module,
            channels_last=self.channels_last,
            layouts=graphs.layouts_of(source.sample_tensors) if source.has_sample else (),
            threads=options.thread_num,
            method=self.name,
        ).nano_attach(source.model)


@dataclass(frozen=True)
class _CompiledMethod(Method[TorchSource]):
    """Method whose graph TorchInductor compiles."""

    arguments: tuple[str, ...] = ("dynamic_axes",)

    def missing(self) -> str | None:
        reason = super().missing()
        if reason or shutil.which("g++") or shutil.which("clang++"):
            return reason
        return "no C++ compiler is installed, which TorchInductor needs; install g++"


@dataclass(frozen=True)
class _GraphMethod(Method[TorchSource]):
    """Base class of methods that build a graph of a module."""

    def build(self, source: TorchSource, options: BuildOptions) -> torch.nn.Module:
        source.outputs  # noqa: B018 - raises a clear error
        if self.ipex and ipex_fits():
            graph = self._with_ipex(source, options)
        else:
            graph = self.graph(source, options)
        return graphs.graph_model(graph, source, self, options)

    @abc.abstractmethod
    def graph(self, source: TorchSource, options: BuildOptions):
        """Build the graph of the source's module."""

    def prepare(self, source: TorchSource, options: BuildOptions) -> FlatModule:
        """Return a copy of the module in this method's precision and memory layout."""
        module = source.model if options.inplace else copy.deepcopy(source.model)
        prepared = graphs.convert_in_place(
            module.eval(), self.precision == BF16, self.channels_last
        )
        return FlatModule(prepared, source.inputs).eval()

    @contextmanager
    def precision_context(self) -> Iterator[None]:
        """Context manager that enables autocast if the method's precision is bf16."""
        bf16 = self.precision == BF16
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            yield

    def _with_ipex(self, source, options):
        import intel_extension_for_pytorch as ipex

        dtype = torch.bfloat16 if self.precision == BF16 else torch.float32
        prepared = self.prepare(source, options)
        prepared.model = ipex.optimize(prepared.model, dtype=dtype)
        with self.precision_context():
            if self.accelerator == "jit":
                return graphs.ScriptGraph.make(prepared, source, "trace", options)
            return graphs.ModuleGraph(prepared, compiled=False)


@dataclass(frozen=True)
class LayoutMethod(_GraphMethod):
    """Method that runs the module in channels-last format."""

    def graph(self, source, options):
        return graphs.ModuleGraph(self.prepare(source, options), compiled=False)


@dataclass(frozen=True)
class ScriptMethod(_GraphMethod):
    """Method that runs a frozen TorchScript module.

    Scripting needs no sample of the input; tracing does.
    """

    def build(self, source: TorchSource, options: BuildOptions) -> torch.nn.Module:
        if source.has_sample or options.jit_method != "script":
            return super().build(source, options)
        bf16 = self.precision == BF16
        model_class = graphs.ScriptedBF16Model if bf16 else graphs.ScriptedModel
        module = source.model if options.inplace else copy.deepcopy(source.model)
        return model_class.scripted(
            module,
            channels_last=self.channels_last,
            threads=options.thread_num,
            method=self.name,
        ).nano_attach(source.model)

    def graph(self, source, options):
        with self.precision_context():
            prepared = self.prepare(source, options)
            return graphs.ScriptGraph.make(prepared, source, options.jit_method, options)


@dataclass(frozen=True)
class InductorMethod(_CompiledMethod, _GraphMethod):
    """Method that compiles a graph ahead of time, with frozen weights.

    A module without a sample, or one that cannot be exported as one graph, for example because its
    control flow depends on data, uses ``torch.compile`` instead, which compiles parts of it.
    """

    def build(self, source: TorchSource, options: BuildOptions) -> torch.nn.Module:
        if source.has_sample or self.accelerator is not None:
            return super().build(source, options)
        if self.ipex:
            _warn_without_ipex()
        bf16 = self.precision == BF16
        model_class = graphs.CompiledBF16Model if bf16 else graphs.CompiledModel
        module = source.model if options.inplace else copy.deepcopy(source.model)
        return model_class(
            module,
            channels_last=self.channels_last,
            threads=options.thread_num,
            method=self.name,
        ).nano_attach(source.model)

    def graph(self, source, options):
        if self.ipex:
            _warn_without_ipex()
        # no copy is needed: weights become constants of the graph
        with source.flat_module() as module, self.precision_context():
            try:
                if "torch.export" in options.rejected_exporters:
                    raise UsageError(
                        f"{type(source.model).__name__} gave other results as a graph",
                        code="accuracy",
                    )
                program = graphs.export_flat(module, source, options.dynamic_axes)
            except UsageError as error:
                _log.info("%s; its parts are compiled instead", error)
                return graphs.ModuleGraph(self.prepare(source, options), compiled=True)
            source.exporter = "torch.export"
            return graphs.CompiledGraph.compile(program, source.inputs.names)


@cache
def _warn_without_ipex() -> None:
    _log.warning(
        "Intel Extension for PyTorch is not installed for torch %s; methods with ipex in their "
        "names compile the graph with TorchInductor and frozen weights",
        torch.__version__,
    )


def _both_layouts(method: Method) -> list[Method]:
    """Return a method and its variant with channels last."""
    other = replace(
        method,
        name=f"{method.name}_channels_last",
        option=f"{method.option} + channels_last".removeprefix(" + "),
        channels_last=True,
    )
    return [method, other]


@dataclass(frozen=True)
class _Int8Method(_CompiledMethod):
    precision: Precision = INT8
    packages: tuple[str, ...] = ("torchao",)


@dataclass(frozen=True)
class StaticInt8Method(_Int8Method):
    """Static int8 quantization with PT2E and calibration, compiled ahead of time."""

    def build(self, source: TorchSource, options: BuildOptions) -> graphs.GraphModel:
        batches = list(source.calibration_tensors(options))

        def quantized(excluded: Sequence[str]) -> graphs.GraphModel:
            graph = _ExportedGraph(self._converted(source, options, batches, excluded))
            return graphs.graph_model(graph, source, self, options)

        chosen = keep_accuracy(
            quantized, lambda: _rank_by_error(source, batches[0]), options.goal, source.model
        )
        exported = chosen.nano_graph
        chosen.nano_graph = graphs.CompiledGraph.compile(exported.program, source.inputs.names)
        _check_compiled(chosen.nano_graph, exported, batches[0], source)
        return chosen

    def _converted(self, source, options, batches, excluded) -> torch.export.ExportedProgram:
        excluded = {*excluded, *_single_channel_convolutions(source.model)}
        with source.flat_module() as module, quiet():
            program = graphs.export_flat(module, source, options.dynamic_axes)
            sentence = f"{type(source.model).__name__} cannot be quantized"
            with as_usage_error(sentence, text=first_line, code="model-unsupported"):
                converted = self._quantized(_with_unique_call_names(program), batches, excluded)
            return graphs.export_flat(converted, source, options.dynamic_axes)

    def _quantized(self, graph, batches, excluded):
        """Quantize weights and activations of a graph, except in the excluded layers."""
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
        for name in excluded:
            quantizer.set_module_name_qconfig(name, None)
        prepared = prepare_pt2e(graph, quantizer)
        for tensors in batches:
            prepared(*tensors)
        return convert_pt2e(prepared)


@dataclass(frozen=True)
class NeuralCompressorMethod(StaticInt8Method):
    """Static int8 quantization with Intel Neural Compressor 3, compiled ahead of time."""

    packages: tuple[str, ...] = ("neural_compressor", "torchao")
    extra: str = "inc"

    def _quantized(self, graph, batches, excluded):
        from neural_compressor.torch.quantization import StaticQuantConfig, convert, prepare

        # set by the compressor's exporter, which lacks dynamic sizes; the graph keeps its sizes
        graph.dynamic_shapes, graph._exported = None, True
        config = StaticQuantConfig()
        for name in excluded:
            config.set_local(name, StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))
        prepared = prepare(graph, config)
        for tensors in batches:
            prepared(*tensors)
        prepared.dynamic_shapes = None
        return convert(prepared)


@dataclass(frozen=True)
class TorchaoMethod(_Int8Method):
    """Int8 quantization of linear layers without calibration, with torchao's ``quantize_``."""

    config: str = ""

    def build(self, source: TorchSource, options: BuildOptions) -> torch.nn.Module:
        import torchao.quantization as torchao

        module = copy.deepcopy(source.model).eval()
        if not any(isinstance(part, torch.nn.Linear) for part in module.modules()):
            raise UsageError(
                f"{type(source.model).__name__} has no linear layer, and method {self.name!r} "
                "quantizes no other; use a static method instead",
                code="model-unsupported",
                method=self.name,
            )
        if not source.has_sample:
            compiled = graphs.CompiledInt8Model(
                module, config=self.config, threads=options.thread_num, method=self.name
            )
            return compiled.nano_attach(source.model)
        with torch.no_grad(), quiet():
            torchao.quantize_(module, getattr(torchao, self.config)())
            flat = FlatModule(module, source.inputs).eval()
            program = graphs.export_flat(flat, source, options.dynamic_axes)
            graph = graphs.CompiledGraph.compile(program, source.inputs.names)
        model = graphs.graph_model(graph, source, self, options)
        # layers cannot be excluded: the model meets the goal or it does not
        return keep_accuracy(lambda excluded: model, lambda: (), options.goal, source.model)


class _ExportedGraph:
    """Callable that runs a quantized program without compilation: exact but slow."""

    def __init__(self, program: torch.export.ExportedProgram):
        self.program = program
        self._module = program.module()

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(self._module(*tensors))


def _with_unique_call_names(program: torch.export.ExportedProgram) -> torch.fx.GraphModule:
    """Return a program's graph with a unique name for each call of a module.

    The quantizer of torchao 0.16 finds fusions by module. It rejects a module that is called more
    than once, such as the shared ReLU of a residual block. It assumes that summands are tensors, so
    a number is added with the operator for scalars.
    """
    graph = program.module()
    add = torch.ops.aten.add
    for node in graph.graph.nodes:
        is_sum = node.target in (add.Tensor, torch.ops.aten.add_.Tensor) and len(node.args) > 1
        if is_sum and not isinstance(node.args[1], torch.fx.Node):
            node.target = add.Scalar
            for key in ("source_fn_stack", "torch_fn"):  # the quantizer finds sums by these
                node.meta.pop(key, None)
        stack = dict(node.meta.get("nn_module_stack") or {})
        if stack:
            key, (name, cls) = stack.popitem()
            _, again, number = key.rpartition("@")
            if again:
                node.meta["nn_module_stack"] = {**stack, key: (f"{name}@{number}", cls)}
    return graph


def _single_channel_convolutions(model: torch.nn.Module) -> list[str]:
    """Return the names of one-channel convolutions, which must stay in floating point.

    The memory layouts channels first and channels last are equal for one channel. TorchInductor
    (torch 2.13) then assumes the wrong layout for the result of a quantized convolution.
    """
    return [
        f"model.{name}"
        for name, part in model.named_modules()
        if isinstance(part, _CONVOLUTIONS) and part.in_channels == 1
    ]


def _check_compiled(compiled, exported, tensors: list[torch.Tensor], source: TorchSource) -> None:
    """Raise UsageError if results of the compiled code differ from the exported program's."""
    with torch.no_grad():
        results = [[each.float().numpy() for each in g(tensors)] for g in (exported, compiled)]
    error = relative_error(*results)
    if error > _LARGEST_ERROR:
        raise UsageError(
            f"TorchInductor compiles the quantized {type(source.model).__name__} into something "
            f"else (relative error {error:.2g}); use accelerator='openvino' or 'onnxruntime'",
            code="accuracy",
        )


def _rank_by_error(source: TorchSource, tensors: list[torch.Tensor]) -> list[str]:
    """Return layer names sorted by the error that int8 causes in their outputs, largest first."""
    errors: dict[str, float] = {}

    def measure(name):
        def hook(layer, inputs, output):
            if name in errors:  # the call below, or a repeated call of the layer
                return
            errors[name] = 0.0
            rounded = _fake_quantized(layer, inputs[0])
            errors[name] = relative_error([output.float().numpy()], [rounded.float().numpy()])

        return hook

    with source.flat_module() as flat, ExitStack() as hooks:
        for name, part in source.model.named_modules():
            if isinstance(part, _QUANTIZED):
                handle = part.register_forward_hook(measure(f"model.{name}"))
                hooks.callback(handle.remove)
        flat(*tensors)
    return sorted(errors, key=lambda name: -errors[name])


def _fake_quantized(layer, activations: torch.Tensor) -> torch.Tensor:
    """Return a layer's output with its input rounded per tensor and its weights per channel."""
    low, high = min(0.0, float(activations.min())), max(0.0, float(activations.max()))
    scale = max((high - low) / 255, cast("float", np.finfo(np.float32).tiny))
    zero = round(-low / scale)
    rounded = torch.fake_quantize_per_tensor_affine(activations, scale, zero, 0, 255)
    weights = layer.weight
    scales = weights.abs().flatten(1).amax(1).clamp(min=1e-12) / 127
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    coarse = torch.fake_quantize_per_channel_affine(weights, scales, zeros, 0, -127, 127)
    return torch.func.functional_call(
        layer, {"weight": coarse}, (rounded,), tie_weights=False, strict=False
    )


_FX = (None, "fx", "eager")

METHODS: Mapping[str, Method] = register_methods(
    "torch",
    [
        OriginalMethod("original", option="original", default=True),
        _both_layouts(LayoutMethod("fp32"))[1],
        *_both_layouts(InductorMethod("fp32_ipex", option="ipex", ipex=True)),
        AutocastMethod("bf16", BF16, option="bf16", default=True),
        AutocastMethod(
            "bf16_channels_last", BF16, option="bf16 + channels_last", channels_last=True
        ),
        *_both_layouts(InductorMethod("bf16_ipex", BF16, option="bf16 + ipex", ipex=True)),
        StaticInt8Method("static_int8", option="inc", default=True, variants=_FX),
        StaticInt8Method(
            "static_int8_ipex", option="inc + ipex", ipex=True, variants=(None, "ipex")
        ),
        *_both_layouts(ScriptMethod("jit_fp32", FP32, "jit", "jit")),
        *_both_layouts(ScriptMethod("jit_bf16", BF16, "jit", "bf16 + jit")),
        *_both_layouts(
            InductorMethod("jit_fp32_ipex", FP32, "jit", "ipex + jit", default=True, ipex=True)
        ),
        *_both_layouts(
            InductorMethod(
                "jit_bf16_ipex", BF16, "jit", "bf16 + ipex + jit", default=True, ipex=True
            )
        ),
        *_both_layouts(
            StaticInt8Method("jit_int8", INT8, "jit", "int8 + jit", variants=(None, "fx"))
        ),
        *openvino_methods(to_openvino, PytorchOpenVINOModel.of),
        *onnxruntime_methods(to_onnx, PytorchONNXRuntimeModel.of, "onnxscript"),
        InductorMethod("inductor_fp32", option="inductor", extended=True),
        InductorMethod("inductor_bf16", BF16, option="bf16 + inductor", extended=True),
        TorchaoMethod(
            "torchao_int8",
            option="int8 + torchao",
            variants=("torchao",),
            dynamic=_FX,
            config="Int8DynamicActivationInt8WeightConfig",
            extended=True,
        ),
        TorchaoMethod(
            "int8_weight_only",
            option="int8 weights + torchao",
            variants=("weight_only",),
            config="Int8WeightOnlyConfig",
            extended=True,
        ),
        NeuralCompressorMethod(
            "neural_compressor_int8",
            option="int8 + neural_compressor",
            variants=("inc",),
            extended=True,
        ),
    ],
)
ALL_METHODS: Mapping[str, Method] = MethodTable("torch", lambda method: not method.extended)
"""Methods of BigDL 2.x, and methods registered by users."""
DEFAULT_METHODS: Mapping[str, Method] = MethodTable(
    "torch", lambda method: method.default and not method.extended
)
"""Methods of :data:`ALL_METHODS` that ``optimize`` tries by default."""
