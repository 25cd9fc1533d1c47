"""Methods in int8 that stay with PyTorch: torchao quantizes, TorchInductor compiles.

Static quantization is torchao's PT2E with the recipe for x86: activations in uint8 by tensor,
weights in int8 by channel.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch

from bigdl.common.errors import UsageError, first_line
from bigdl.nano.acceleration.accuracy import keep_accuracy, relative_error
from bigdl.nano.acceleration.method import Method
from bigdl.nano.acceleration.options import BuildOptions
from bigdl.nano.acceleration.quiet import quiet
from bigdl.nano.pytorch.inference.graph_model import (
    GraphModel,
    PytorchIPEXQuantizationModel,
    PytorchJITINT8Model,
    PytorchQuantizedModel,
)
from bigdl.nano.pytorch.inference.graphs import CompiledGraph, export_flat
from bigdl.nano.pytorch.inference.source import FlatModule, TorchSource
from bigdl.nano.pytorch.methods.compiled import compiler_missing

__all__ = ["JIT_INT8", "NEURAL_COMPRESSOR", "STATIC_INT8", "TORCHAO"]

_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_QUANTIZED = (torch.nn.Linear, *_CONVOLUTIONS)
# Rounding that falls the other way changes results by a step of 8 bits here and there.
_LARGEST_ERROR = 0.2


@dataclass(frozen=True)
class _Int8Method(Method):
    precision: str = "int8"
    packages: tuple[str, ...] = ("torchao",)
    arguments: tuple[str, ...] = ("dynamic_axes",)

    def missing(self) -> str | None:
        return super().missing() or compiler_missing()


@dataclass(frozen=True)
class StaticInt8Method(_Int8Method):
    """PT2E with calibration, compiled ahead of time."""

    model_class: type[GraphModel] = PytorchQuantizedModel

    def build(self, source: TorchSource, options: BuildOptions) -> GraphModel:
        calibration = options.calibration
        batches = list(source.calibration_tensors(options))

        def quantized(excluded: Sequence[str] = ()) -> GraphModel:
            graph = _ExportedGraph(self._converted(source, options, batches, excluded))
            return self.model_class.of(graph, source, self, options)

        if calibration.goal is None:
            chosen = quantized()
        else:
            chosen = keep_accuracy(
                quantized, lambda: _by_harm(source, batches[0]), calibration.goal, source.model
            )
        exported = chosen.nano_graph
        chosen.nano_graph = CompiledGraph.compile(exported.program, source.inputs.names)
        _check_compiled(chosen.nano_graph, exported, batches[0], source)
        return chosen

    def _converted(self, source, options, batches, excluded) -> torch.export.ExportedProgram:
        sample = source.sample_tensors
        excluded = {*excluded, *_of_one_channel(source.model)}
        with source.flat_module() as module, quiet():
            program = export_flat(module, sample, options.dynamic_axes)
            try:
                converted = self._quantized(_calls_apart(program), batches, excluded)
            except Exception as error:
                raise UsageError(
                    f"{type(source.model).__name__} cannot be quantized: {first_line(error)}"
                ) from error
            return export_flat(converted, sample, options.dynamic_axes, names=source.inputs.names)

    def _quantized(self, graph, batches, excluded):
        """The graph with quantized weights and activations, but for the layers named."""
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
    """Static quantization by Intel Neural Compressor 3, compiled ahead of time."""

    packages: tuple[str, ...] = ("neural_compressor", "torchao")
    extra: str = "inc"

    def _quantized(self, graph, batches, excluded):
        from neural_compressor.torch.quantization import StaticQuantConfig, convert, prepare

        # marks of its own exporter, which knows of no dynamic sizes; those of the graph stay
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
    """Linear layers in int8 without calibration, by torchao's ``quantize_``."""

    config: str = ""

    def build(self, source: TorchSource, options: BuildOptions) -> GraphModel:
        import torchao.quantization as torchao

        module = copy.deepcopy(source.model).eval()
        if not any(isinstance(part, torch.nn.Linear) for part in module.modules()):
            raise UsageError(
                f"{type(source.model).__name__} has no linear layer, and method {self.name!r} "
                "quantizes no other; use a static method instead"
            )
        with torch.no_grad(), quiet():
            torchao.quantize_(module, getattr(torchao, self.config)())
            flat = FlatModule(module, source.inputs).eval()
            program = export_flat(flat, source.sample_tensors, options.dynamic_axes)
            graph = CompiledGraph.compile(program, source.inputs.names)
        model = PytorchQuantizedModel.of(graph, source, self, options)
        goal = options.calibration.goal
        if goal is not None:
            # there is nothing to leave out layer by layer: it is good enough or it is not
            keep_accuracy(lambda excluded: model, lambda: (), goal, source.model)
        return model


class _ExportedGraph:
    """A quantized program before it is compiled: right, and slow."""

    def __init__(self, program: torch.export.ExportedProgram):
        self.program = program
        self._module = program.module()

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(self._module(*tensors))


def _calls_apart(program: torch.export.ExportedProgram) -> torch.fx.GraphModule:
    """The graph of a program, with a name of its own for each call of a module.

    The quantizer finds what it fuses by modules. It refuses one with several results, as the ReLU
    that residual blocks use more than once.
    """
    graph = program.module()
    for node in graph.graph.nodes:
        stack = dict(node.meta.get("nn_module_stack") or {})
        if stack:
            key, (name, kind) = stack.popitem()
            _, again, number = key.rpartition("@")
            if again:
                node.meta["nn_module_stack"] = {**stack, key: (f"{name}@{number}", kind)}
    return graph


def _of_one_channel(model: torch.nn.Module) -> list[str]:
    """Names of convolutions of one channel, which have to stay in floating point.

    A tensor of one channel is laid out with its channels first and last at once. TorchInductor
    (torch 2.13) takes the result of a quantized convolution of it to be in the other layout.
    """
    return [
        f"model.{name}"
        for name, part in model.named_modules()
        if isinstance(part, _CONVOLUTIONS) and part.in_channels == 1
    ]


def _check_compiled(compiled, exported, tensors: list[torch.Tensor], source: TorchSource) -> None:
    """Refuse compiled code that computes something else than what it was compiled from."""
    with torch.no_grad():
        results = [[each.float().numpy() for each in g(tensors)] for g in (exported, compiled)]
    error = relative_error(*results)
    if error > _LARGEST_ERROR:
        raise UsageError(
            f"TorchInductor compiles the quantized {type(source.model).__name__} into something "
            f"else (relative error {error:.2g}); use accelerator='openvino' or 'onnxruntime'"
        )


def _by_harm(source: TorchSource, tensors: list[torch.Tensor]) -> list[str]:
    """Names of the layers, those first whose own output int8 changes most."""
    errors: dict[str, float] = {}

    def measure(name):
        def hook(layer, inputs, output):
            rounded = _fake_quantized(layer, inputs[0])
            errors[name] = relative_error([output.float().numpy()], [rounded.float().numpy()])

        return hook

    with ExitStack() as stack, torch.no_grad():
        flat = stack.enter_context(source.flat_module())
        for name, part in source.model.named_modules():
            if isinstance(part, _QUANTIZED):
                handle = part.register_forward_hook(measure(f"model.{name}"))
                stack.callback(handle.remove)
        flat(*tensors)
    return sorted(errors, key=lambda name: -errors[name])


def _fake_quantized(layer, activations: torch.Tensor) -> torch.Tensor:
    """A layer's output with its input rounded to 8 bits by tensor, its weights by channel."""
    low, high = min(0.0, float(activations.min())), max(0.0, float(activations.max()))
    scale = max((high - low) / 255, np.finfo(np.float32).tiny)
    zero = round(-low / scale)
    rounded = torch.fake_quantize_per_tensor_affine(activations, scale, zero, 0, 255)
    weights = layer.weight
    scales = weights.abs().flatten(1).amax(1).clamp(min=1e-12) / 127
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    coarse = torch.fake_quantize_per_channel_affine(weights, scales, zeros, 0, -127, 127)
    return torch.func.functional_call(
        layer, {"weight": coarse}, (rounded,), tie_weights=False, strict=False
    )


STATIC_INT8 = [
    StaticInt8Method("static_int8", option="inc", default=True),
    StaticInt8Method(
        "static_int8_ipex",
        option="inc + ipex",
        ipex=True,
        model_class=PytorchIPEXQuantizationModel,
    ),
]
_JIT_INT8 = StaticInt8Method(
    "jit_int8", accelerator="jit", option="int8 + jit", model_class=PytorchJITINT8Model
)
JIT_INT8 = [
    _JIT_INT8,
    replace(
        _JIT_INT8,
        name="jit_int8_channels_last",
        option="int8 + jit + channels_last",
        channels_last=True,
    ),
]
NEURAL_COMPRESSOR = [
    NeuralCompressorMethod("neural_compressor_int8", option="int8 + neural_compressor")
]
TORCHAO = [
    TorchaoMethod(
        "torchao_int8", option="int8 + torchao", config="Int8DynamicActivationInt8WeightConfig"
    ),
    TorchaoMethod(
        "int8_weight_only", option="int8 weights + torchao", config="Int8WeightOnlyConfig"
    ),
]
