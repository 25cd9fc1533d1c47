"""The acceleration methods of Keras, in the order in which ``optimize`` tries them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bigdl.nano.acceleration.method import Method, Source
from bigdl.nano.acceleration.onnxruntime import ONNXRUNTIME
from bigdl.nano.acceleration.openvino import OPENVINO, QuantizedMethod
from bigdl.nano.acceleration.options import BuildOptions

__all__ = ["METHODS", "NAMES_OF_BIGDL_2"]

_EXPORTER = ("onnx", "onnxruntime", "tf2onnx")


@dataclass(frozen=True)
class Original(Method):
    """The model as it is."""

    def build(self, source: Source, options: BuildOptions) -> Any:
        return source.model


@dataclass(frozen=True)
class BF16(Method):
    """Keras itself, with layers that compute in bfloat16."""

    packages: tuple[str, ...] = ("tensorflow",)
    extra: str = "tf"

    def build(self, source: Source, options: BuildOptions) -> Any:
        from bigdl.nano.tf.inference.bf16_model import KerasBF16Model

        return KerasBF16Model.of(source, self.name, options)


@dataclass(frozen=True)
class StaticInt8(QuantizedMethod):
    """Weights and activations in 8-bit integers, the rest in bfloat16 where that is native.

    BigDL 2.x left the runtime to Neural Compressor, which has no Keras any more; here it is
    OpenVINO.
    """

    accelerator: str | None = None

    def build(self, source: Source, options: BuildOptions) -> Any:
        from bigdl.nano.openvino.network import supports_bf16

        computes = "bf16" if supports_bf16() else "f32"
        return QuantizedMethod.build(replace(self, computes=computes), source, options)


def _tried(method: Method) -> Method:
    return replace(method, default=True)


def _exported(method: Method) -> Method:
    others = tuple(p for p in method.packages if p not in (*_EXPORTER, "onnxscript"))
    return replace(method, packages=(*_EXPORTER, *others), extra="nano,tf")


_ONNXRUNTIME = [_exported(method) for method in ONNXRUNTIME]

METHODS = [
    Original("original", option="original", default=True),
    StaticInt8("static_int8", option="int8", default=True),
    BF16("bf16", precision="bf16", option="bf16", default=True),
    *map(_tried, OPENVINO[:4]),
    *map(_tried, _ONNXRUNTIME[:3]),
    *OPENVINO[4:],
    *_ONNXRUNTIME[3:],
]
NAMES_OF_BIGDL_2 = frozenset(method.name for method in METHODS[:10])
