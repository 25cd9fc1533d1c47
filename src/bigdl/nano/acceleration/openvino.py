"""Methods that run a model in OpenVINO.

They know no framework: a source converts its model into a network and makes an accelerated model
of what was compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.accuracy import keep_accuracy
from bigdl.nano.acceleration.method import Method, Source
from bigdl.nano.acceleration.options import BuildOptions

__all__ = ["OPENVINO", "OpenVINOMethod"]


@dataclass(frozen=True)
class OpenVINOMethod(Method):
    """OpenVINO in the precision of the model's operators.

    The first dimension of each input stays dynamic by default; small networks are compiled for
    each of the first few batch sizes that they meet.
    """

    accelerator: str | None = "openvino"
    packages: tuple[str, ...] = ("openvino",)

    computes: str = "f32"
    """Type of what is left in floating point: ``INFERENCE_PRECISION_HINT`` on a CPU."""

    def missing(self) -> str | None:
        reason = super().missing()
        if reason or self.computes != "bf16":
            return reason
        from bigdl.nano.openvino.network import supports_bf16

        return None if supports_bf16() else "Platform doesn't support BF16 format"

    def build(self, source: Source, options: BuildOptions) -> Any:
        self.check(options)
        return self.model_of(self.network_of(source, options), source, options)

    def check(self, options: BuildOptions) -> None:
        """Refuse a device that is not there, or that cannot run what is asked for.

        Raises
        ------
        UsageError
        """
        from bigdl.nano.openvino.network import checked_device

        asked = options.openvino
        on_npu = asked.device in ("VPUX", "NPU")
        if on_npu and self.precision != "fp32" and "mean_value" not in asked.convert:
            raise UsageError(
                f"If you want to quantize with openvino on {asked.device} device, must specify "
                "mean_value, e.g. mean_value=[123.7, 116.3, 103.5]"
            )
        device = checked_device(asked.device)
        if device != "CPU" and options.dynamic_axes and "input_shape" not in asked.convert:
            raise UsageError(
                "For model has dynamic axes, if you want to inference on non-CPU device, must "
                "define input_shape, e.g. input_shape='[1,3,224,224]', or pass dynamic_axes=False"
            )

    def network_of(self, source: Source, options: BuildOptions) -> Any:
        """The source's model as an ``openvino.Model`` in this method's precision."""
        network = source.to_openvino(options)
        if self.precision != "fp16":
            return network
        from bigdl.nano.acceleration.openvino_preprocess import half_weights

        return half_weights(network)

    def model_of(self, network: Any, source: Source, options: BuildOptions) -> Any:
        """The accelerated model of a network: compiled, and handed to the framework."""
        from bigdl.nano.openvino.shaped import ShapedNetwork

        config = dict(options.openvino.config)
        if options.streams is not None:
            config.setdefault("NUM_STREAMS", options.streams)
        if self.computes == "bf16" and self.precision == "int8":
            config.setdefault("INFERENCE_PRECISION_HINT", "bf16")
        compiled = ShapedNetwork(
            network,
            options.openvino.device,
            precision=self.precision,
            thread_num=options.threads,
            config=config,
        )
        return source.from_openvino(compiled, self.name, options)


@dataclass(frozen=True)
class QuantizedMethod(OpenVINOMethod):
    """OpenVINO with weights and activations in 8-bit integers, by NNCF.

    With an accuracy goal, layers are left in floating point, those first whose quantization
    changes the network's outputs most.
    """

    precision: str = "int8"
    packages: tuple[str, ...] = ("openvino", "nncf")

    def build(self, source: Source, options: BuildOptions) -> Any:
        from bigdl.nano.acceleration.openvino_int8 import Quantizer

        self.check(options)
        network = source.to_openvino(options)
        quantizer = Quantizer(network, self.batches(source, options), options)

        def build(excluded: tuple[str, ...] = ()):
            return self.model_of(self.quantized(quantizer, excluded), source, options)

        goal = options.calibration.goal
        if goal is None:
            return build()
        return keep_accuracy(build, quantizer.rank, goal, source.model)

    def batches(self, source: Source, options: BuildOptions) -> list[list]:
        """Flat lists of ndarrays to calibrate with."""
        return list(source.calibration_arrays(options))

    def quantized(self, quantizer: Any, excluded: tuple[str, ...]) -> Any:
        """The network in int8 but for some layers."""
        return quantizer.quantized(excluded)


@dataclass(frozen=True)
class WeightOnlyMethod(QuantizedMethod):
    """OpenVINO with weights in 8-bit integers, by NNCF; it needs no calibration data."""

    def batches(self, source: Source, options: BuildOptions) -> list[list]:
        if options.calibration.data is None:
            return [source.sample_arrays()]
        few = replace(options, calibration=replace(options.calibration, sample_size=1))
        return list(source.calibration_arrays(few))

    def quantized(self, quantizer: Any, excluded: tuple[str, ...]) -> Any:
        return quantizer.weights_quantized(excluded)


OPENVINO = [
    OpenVINOMethod("openvino_fp32", option="openvino", default=True),
    OpenVINOMethod("openvino_bf16", precision="bf16", option="openvino + bf16", computes="bf16"),
    OpenVINOMethod("openvino_fp16", precision="fp16", option="openvino + fp16"),
    QuantizedMethod("openvino_int8", option="openvino + int8", default=True),
    QuantizedMethod("openvino_int8_bf16", option="openvino + int8 + bf16", computes="bf16"),
    WeightOnlyMethod("openvino_int8_weight_only", option="openvino + int8 + weight_only"),
]
