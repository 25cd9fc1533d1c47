"""Acceleration methods for Keras models, in the order in which ``optimize`` tries them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from bigdl.nano.acceleration import autotune
from bigdl.nano.acceleration.method import (
    BuildOptions,
    Method,
    MethodTable,
    ModelSource,
    register_methods,
)
from bigdl.nano.acceleration.onnxruntime import onnxruntime_methods
from bigdl.nano.acceleration.precision import BF16
from bigdl.nano.openvino.methods import QuantizedOpenVINOMethod, openvino_methods
from bigdl.nano.openvino.network import supports_bf16
from bigdl.nano.tf.inference.accelerated import (
    BF16Graph,
    KerasBF16Model,
    KerasONNXRuntimeModel,
    KerasOpenVINOModel,
    bf16_clone,
    to_onnx,
    to_openvino,
)
from bigdl.nano.tf.inference.source import KerasSource

if TYPE_CHECKING:
    import openvino as ov


@dataclass(frozen=True)
class Original(Method[ModelSource]):
    """The original model without acceleration."""

    def build(self, source: ModelSource, options: BuildOptions) -> object:
        return source.model


@dataclass(frozen=True)
class MixedBF16(Method[KerasSource]):
    """Inference with Keras under the policy ``mixed_bfloat16``."""

    packages: tuple[str, ...] = ("tensorflow",)
    extra: str = "tf"

    def build(self, source: KerasSource, options: BuildOptions) -> KerasBF16Model:
        clone = bf16_clone(source.model)
        graph = BF16Graph(clone, source.inputs, options.thread_num)
        return KerasBF16Model.of(source, graph, self.name, options)


@dataclass(frozen=True)
class StaticInt8(QuantizedOpenVINOMethod):
    """Inference with OpenVINO: int8 weights and activations, and the faster float dtype elsewhere.

    The other type is float32, or bfloat16 if a measurement finds it faster. BigDL 2.x used Neural
    Compressor, which no longer supports Keras.
    """

    accelerator: str | None = None

    def model_of(self, network: ov.Model, source: ModelSource, options: BuildOptions) -> object:
        is_set = "INFERENCE_PRECISION_HINT" in (options.openvino_config or {})
        if is_set or options.device != "CPU" or not supports_bf16():
            return super().model_of(network, source, options)
        arrays = source.sample_arrays()
        models = {
            computes: QuantizedOpenVINOMethod.model_of(
                replace(self, computes=computes), network.clone(), source, options
            )
            for computes in ("f32", "bf16")
        }
        sizes = [(list(each.shape), str(each.dtype)) for each in arrays]
        layers = [op.get_type_name() for op in network.get_ops()]
        key = autotune.cache_key("rest of int8", layers, sizes, options.thread_num)
        calls = {
            name: partial(cast("KerasOpenVINOModel", each).nano_network.infer, arrays)
            for name, each in models.items()
        }
        return models[autotune.load_or_measure(key, "f32", calls).name]


_IN_ORDER: tuple[Method, ...] = (
    Original("original", option="original"),
    StaticInt8(
        "static_int8",
        option="int8",
        convert=to_openvino,
        wrap=KerasOpenVINOModel.of,
        arguments=("device", "openvino_config"),
    ),
    MixedBF16("bf16", precision=BF16, option="bf16"),
    *openvino_methods(to_openvino, KerasOpenVINOModel.of),
    *onnxruntime_methods(to_onnx, KerasONNXRuntimeModel.of, "tf2onnx", "nano,tf"),
)
METHODS: Mapping[str, Method] = register_methods(
    "keras", [replace(method, default=not method.extended) for method in _IN_ORDER]
)
DEFAULT_METHODS: Mapping[str, Method] = MethodTable("keras", lambda method: method.default)
"""The methods of BigDL 2.x, which ``optimize`` tries by default."""
