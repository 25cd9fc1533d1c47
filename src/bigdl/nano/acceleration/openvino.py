"""OpenVINO for every framework: keywords of the conversion, and the methods.

A framework calls :func:`openvino_methods` with its converter and its class of models. Keywords of
the conversion are those of OpenVINO's old model optimizer; they are carried out with
``PrePostProcessor`` and ``reshape``.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bigdl.common.environment import scratch_home
from bigdl.common.errors import UsageError, require
from bigdl.nano.acceleration.accuracy import keep_accuracy
from bigdl.nano.acceleration.method import Method, Source
from bigdl.nano.acceleration.options import BuildOptions
from bigdl.nano.openvino.compiled import CompiledNetwork, ShapedNetwork
from bigdl.nano.openvino.network import (
    checked_device,
    port_name,
    read_network,
    reason,
    reshaped,
    supports_bf16,
)
from bigdl.nano.openvino.quantization import Quantizer

__all__ = ["QuantizedMethod", "openvino_methods", "preprocessed"]


_KEYWORDS = (
    "data_type",
    "input",
    "input_shape",
    "layout",
    "mean_value",
    "mean_values",
    "reverse_input_channels",
    "scale",
    "scale_values",
)
_HALF = ("FP16", "HALF", "F16")
_SINGLE = ("FP32", "FLOAT", "F32")
_USUAL_LAYOUTS = {2: ("NC",), 3: ("NCW",), 4: ("NCHW",), 5: ("NCDHW",)}
_PER_INPUT = re.compile(r"\s*([^\[\]()]*?)\s*[\[(]([^\[\]()]*)[\])]\s*,?")


def preprocessed(network, keywords: Mapping[str, Any]):
    """A network with what the keywords of a conversion ask for.

    Parameters
    ----------
    network : openvino.Model
        May be changed.
    keywords : mapping
        ``mean_value``, ``scale_values``
            Subtracted from an input, then divided by, for each channel: a number, a sequence, text
            such as ``"[123.7,116.3,103.5]"`` or ``"x[1,2,3],y[4]"``, or a mapping of inputs.
        ``layout``
            ``"NCHW"``, a mapping of inputs, or ``"nchw->nhwc"``: the network was built for the
            first and takes the second.
        ``input_shape``, ``input``
            Shapes, as text or sequences; `input` names the inputs that they are of.
        ``data_type``
            Type in which weights are stored: ``"FP32"`` or ``"FP16"``.
        ``reverse_input_channels``
            Whether the network takes BGR where it was built for RGB.

    Returns
    -------
    openvino.Model

    Raises
    ------
    UsageError
        If a keyword is unknown, or a value does not fit the network.
    """
    for name in keywords:
        if name not in _KEYWORDS:
            raise UsageError(
                f"{name!r} is no keyword of the conversion to OpenVINO; it takes "
                f"{', '.join(_KEYWORDS)}"
            )
    _check_names(keywords.get("input"), network)
    shapes = _shapes(keywords)
    if shapes is not None:
        network = reshaped(network, shapes)
    network = _with_steps(network, keywords)
    return half_weights(network) if wants_half_weights(keywords) else network


def wants_half_weights(keywords: Mapping[str, Any]) -> bool:
    """Return True if ``data_type`` asks for weights in fp16."""
    wanted = str(keywords.get("data_type", "FP32")).upper()
    if wanted not in _HALF + _SINGLE:
        raise UsageError(f"data_type must be 'FP32' or 'FP16', not {keywords['data_type']!r}")
    return wanted in _HALF


def half_weights(network):
    """A copy of a network whose constants in fp32 are stored in fp16."""
    openvino = require("openvino", "nano")
    with tempfile.TemporaryDirectory(prefix="bigdl-network-", dir=scratch_home()) as folder:
        text = Path(folder, "network.xml")
        openvino.save_model(network, text, compress_to_fp16=True)
        return read_network((text.read_bytes(), text.with_suffix(".bin").read_bytes()))


def _with_steps(network, keywords: Mapping[str, Any]):
    means = keywords.get("mean_value", keywords.get("mean_values"))
    scales = keywords.get("scale_values", keywords.get("scale"))
    layout, reverse = keywords.get("layout"), keywords.get("reverse_input_channels")
    if means is None and scales is None and layout is None and not reverse:
        return network
    openvino = require("openvino", "nano")
    from openvino.preprocess import PrePostProcessor

    ports = list(network.inputs)
    layouts = _by_input(layout, ports, _layout)
    means, scales = _by_input(means, ports, _numbers), _by_input(scales, ports, _numbers)
    steps = PrePostProcessor(network)
    try:
        for position, port in enumerate(ports):
            mean, scale = means.get(position), scales.get(position)
            own = layouts.get(position) or _USUAL_LAYOUTS.get(len(port.partial_shape))
            if own and (mean or scale or reverse or position in layouts):
                steps.input(position).model().set_layout(openvino.Layout(own[0]))
                steps.input(position).tensor().set_layout(openvino.Layout(own[-1]))
            process = steps.input(position).preprocess()
            if reverse:
                process.reverse_channels()
            if mean:
                process.mean(mean if len(mean) > 1 else mean[0])
            if scale:
                process.scale(scale if len(scale) > 1 else scale[0])
        return steps.build()
    except RuntimeError as error:
        raise UsageError(
            f"mean_value, scale_values or layout do not fit the network: {reason(error)}"
        ) from error


def _by_input(value: Any, ports: list, parse) -> dict[int, Any]:
    """Values by position of the input: of those named, or of all that hold numbers."""
    if value is None:
        return {}
    found = _PER_INPUT.findall(value) if isinstance(value, str) else ()
    if found:
        value = dict(found) if found[0][0] else found[0][1]
    if not isinstance(value, Mapping):
        real = [i for i, port in enumerate(ports) if port.get_element_type().is_real()]
        return dict.fromkeys(real, parse(value))
    names = [port_name(port) for port in ports]
    unknown = [name for name in value if name not in names]
    if unknown:
        raise UsageError(
            f"The network has no input {', '.join(map(repr, unknown))}; it has {', '.join(names)}"
        )
    return {names.index(name): parse(each) for name, each in value.items()}


def _numbers(value: Any) -> list[float]:
    try:
        if isinstance(value, str):
            value = value.split(",")
        return [float(each) for each in (value if isinstance(value, Sequence) else [value])]
    except (TypeError, ValueError):
        raise UsageError(
            f"mean_value and scale_values are numbers such as [123.7, 116.3, 103.5], not {value!r}"
        ) from None


def _layout(value: Any) -> tuple[str, ...]:
    """Return the layout that the network was built for, and the one that it takes if it differs."""
    parts = tuple(part.strip().upper() for part in str(value).split("->"))
    if not all(parts) or len(parts) > 2:
        raise UsageError(f"layout is text such as 'NCHW' or 'nchw->nhwc', not {value!r}")
    return parts


def _names(value: Any) -> list[str]:
    if value is None or isinstance(value, Mapping):
        return list(value or ())
    if isinstance(value, str):
        return [name.strip() for name in re.sub(r"\[[^\]]*\]", "", value).split(",")]
    return [str(each) for each in value]


def _check_names(value: Any, network) -> None:
    known = [port_name(port) for port in network.inputs]
    for name in _names(value):
        if name not in known:
            raise UsageError(f"The network has no input {name!r}; it has {', '.join(known)}")


def _shapes(keywords: Mapping[str, Any]) -> Any:
    """The shapes that ``input`` and ``input_shape`` ask for; None without any."""
    named, shapes = keywords.get("input"), keywords.get("input_shape")
    if shapes is None:
        within = isinstance(named, Mapping) or (isinstance(named, str) and "[" in named)
        return named if within else None
    if isinstance(shapes, str):
        listed = _PER_INPUT.findall(shapes)
        if any(name for name, _ in listed) or not listed:
            return shapes
        shapes = [f"[{sizes}]" for _, sizes in listed]
    elif not any(isinstance(each, Sequence) for each in shapes):
        shapes = [shapes]
    names = _names(named)
    if names and len(names) != len(shapes):
        raise UsageError(
            f"input names {len(names)} inputs, but input_shape holds {len(shapes)} shapes"
        )
    return dict(zip(names or range(len(shapes)), shapes, strict=True))


Convert = Callable[[Any, BuildOptions], Any]
"""Returns a source's model as an ``openvino.Model`` with flat inputs and outputs."""
Wrap = Callable[[Any, CompiledNetwork, str, BuildOptions], Any]
"""Returns the accelerated model of a source and the network that it became, by a method."""


@dataclass(frozen=True)
class OpenVINOMethod(Method[Source]):
    """OpenVINO in the precision of the model's operators.

    The first dimension of each input stays dynamic by default; small networks are compiled for
    each of the first few batch sizes that they meet.
    """

    accelerator: str | None = "openvino"
    packages: tuple[str, ...] = ("openvino",)

    computes: str = "f32"
    """Type of what is left in floating point: ``INFERENCE_PRECISION_HINT`` on a CPU."""
    convert: Convert = field(kw_only=True)
    wrap: Wrap = field(kw_only=True)

    def missing(self) -> str | None:
        reason = super().missing()
        if reason or self.computes != "bf16":
            return reason
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
        network = self.convert(source, options)
        if self.precision != "fp16":
            return network

        return half_weights(network)

    def model_of(self, network: Any, source: Source, options: BuildOptions) -> Any:
        """The accelerated model of a network: compiled, and handed to the framework."""
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
        return self.wrap(source, compiled, self.name, options)


@dataclass(frozen=True)
class QuantizedMethod(OpenVINOMethod):
    """OpenVINO with weights and activations in 8-bit integers, by NNCF.

    With an accuracy goal, layers are left in floating point, those first whose quantization
    changes the network's outputs most.
    """

    precision: str = "int8"
    packages: tuple[str, ...] = ("openvino", "nncf")

    def build(self, source: Source, options: BuildOptions) -> Any:
        self.check(options)
        network = self.convert(source, options)
        quantizer = Quantizer(network, self.batches(source, options), options.calibration.smooth)

        def build(excluded: tuple[str, ...] = ()):
            return self.model_of(self.quantized(quantizer, excluded), source, options)

        goal = options.calibration.goal
        if goal is None:
            return build()
        return keep_accuracy(build, quantizer.rank, goal, source.model)

    def batches(self, source: Source, options: BuildOptions) -> list[list]:
        """Flat lists of ndarrays to calibrate with."""
        return list(source.calibration_arrays(options))

    def quantized(self, quantizer: Quantizer, excluded: tuple[str, ...]) -> Any:
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

    def quantized(self, quantizer: Quantizer, excluded: tuple[str, ...]) -> Any:
        return quantizer.weights_quantized(excluded)


def openvino_methods(convert: Convert, wrap: Wrap) -> list[OpenVINOMethod]:
    """Return the methods that run a framework's models in OpenVINO.

    Parameters
    ----------
    convert, wrap : callable
        See :data:`Convert` and :data:`Wrap`.
    """
    ends: dict[str, Any] = {"convert": convert, "wrap": wrap}
    plain, int8 = OpenVINOMethod, QuantizedMethod
    return [
        plain("openvino_fp32", option="openvino", default=True, **ends),
        plain("openvino_bf16", "bf16", option="openvino + bf16", computes="bf16", **ends),
        plain("openvino_fp16", "fp16", option="openvino + fp16", **ends),
        int8("openvino_int8", option="openvino + int8", default=True, **ends),
        int8("openvino_int8_bf16", option="openvino + int8 + bf16", computes="bf16", **ends),
        WeightOnlyMethod(
            "openvino_int8_weight_only", option="openvino + int8 + weight_only", **ends
        ),
    ]
