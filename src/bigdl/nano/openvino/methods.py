"""OpenVINO for all frameworks: conversion keywords and acceleration methods.

A framework calls :func:`openvino_methods` with its converter and its model wrapper. Conversion
keywords are those of OpenVINO's former Model Optimizer, implemented with ``PrePostProcessor`` and
``reshape``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from bigdl.common.errors import LazyModule, UsageError, as_usage_error, user_stacklevel
from bigdl.nano.acceleration.accuracy import keep_accuracy
from bigdl.nano.acceleration.agreement import UnusableNetworkError, check_agreement
from bigdl.nano.acceleration.method import BuildOptions, Method, ModelSource
from bigdl.nano.acceleration.precision import BF16, FP16, FP32, INT4, INT8, Precision, WeightOptions
from bigdl.nano.acceleration.search.results import fingerprint
from bigdl.nano.openvino.cached import load_network, quantized_key, store_network
from bigdl.nano.openvino.network import (
    CompiledNetwork,
    ShapedNetwork,
    checked_device,
    named_values,
    network_bytes,
    positions,
    read_network,
    reason,
    reshaped,
    supports_bf16,
    with_private_constants,
)
from bigdl.nano.openvino.quantization import Quantizer

if TYPE_CHECKING:
    import openvino as ov

    from bigdl.nano.openvino.network import Shapes

openvino = LazyModule("openvino", "nano")

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
_BRACKETS = re.compile(r"\[[^\]]*\]")


def preprocessed(network, keywords: Mapping[str, Any]):
    """Return a network with the preprocessing, shapes and types of conversion keywords.

    Parameters
    ----------
    network : openvino.Model
        Network, which may be changed.
    keywords : mapping
        ``mean_value``, ``scale_values``
            Mean to subtract from each channel of an input, and scale to divide it by: a number, a
            sequence, text such as ``"[123.7,116.3,103.5]"`` or ``"x[1,2,3],y[4]"``, or a mapping of
            inputs.
        ``layout``
            ``"NCHW"``, a mapping of inputs, or ``"nchw->nhwc"``: the layout that the network was
            built for, and the layout of its inputs.
        ``input_shape``, ``input``
            Shapes, as text or sequences, and the names of their inputs.
        ``data_type``
            Storage type of weights: ``"FP32"`` or ``"FP16"``.
        ``reverse_input_channels``
            True if inputs are BGR but the network was built for RGB.

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
                f"{', '.join(_KEYWORDS)}",
                code="argument-unknown",
                argument=name,
                allowed=list(_KEYWORDS),
            )
    shapes = _shapes(keywords, network)
    if shapes is not None:
        network = reshaped(network, shapes)
    network = _with_steps(network, keywords)
    data_type = str(keywords.get("data_type", "FP32")).upper()
    if data_type not in _HALF + _SINGLE:
        raise UsageError(
            f"data_type must be 'FP32' or 'FP16', not {keywords['data_type']!r}",
            code="argument-value",
            argument="data_type",
            allowed=["FP32", "FP16"],
        )
    return half_weights(network) if data_type in _HALF else network


def half_weights(network):
    """Return a copy of a network with its fp32 constants stored in fp16."""
    return read_network(network_bytes(network, half=True))


def _with_steps(network, keywords: Mapping[str, Any]):
    means = keywords.get("mean_value", keywords.get("mean_values"))
    scales = keywords.get("scale_values", keywords.get("scale"))
    layout, reverse = keywords.get("layout"), keywords.get("reverse_input_channels")
    if means is None and scales is None and layout is None and not reverse:
        return network
    layouts = _by_input(layout, network, _layout)
    means, scales = (_by_input(each, network, _numbers) for each in (means, scales))
    steps = openvino.preprocess.PrePostProcessor(network)
    with as_usage_error(
        "mean_value, scale_values or layout do not fit the network",
        text=reason,
        code="argument-value",
    ):
        for position, port in enumerate(network.inputs):
            mean, scale = means.get(position), scales.get(position)
            names = layouts.get(position) or _USUAL_LAYOUTS.get(len(port.partial_shape))
            if names and (mean or scale or reverse or position in layouts):
                steps.input(position).model().set_layout(openvino.Layout(names[0]))
                steps.input(position).tensor().set_layout(openvino.Layout(names[-1]))
            process = steps.input(position).preprocess()
            if reverse:
                process.reverse_channels()
            if mean:
                process.mean(mean if len(mean) > 1 else mean[0])
            if scale:
                process.scale(scale if len(scale) > 1 else scale[0])
        return steps.build()


def _by_input(value: object, network: ov.Model, parse: Callable[[Any], Any]) -> dict[int, Any]:
    """Parse a conversion option, given by input name or for all float inputs, for each input."""
    if isinstance(value, str) and any(bracket in value for bracket in "[("):
        value = named_values(value)
        value = value.get("", value)
    if value is None:
        return {}
    if isinstance(value, Mapping):
        named = ((positions(name, network), parse(each)) for name, each in value.items())
        return {position: each for numbers, each in named for position in numbers}
    ports = enumerate(network.inputs)
    return {i: parse(value) for i, port in ports if port.get_element_type().is_real()}


def _numbers(value: Any) -> list[float]:
    try:
        if isinstance(value, str):
            value = value.split(",")
        return [float(each) for each in (value if isinstance(value, Sequence) else [value])]
    except (TypeError, ValueError):
        raise UsageError(
            f"mean_value and scale_values are numbers such as [123.7, 116.3, 103.5], not {value!r}",
            code="argument-value",
        ) from None


def _layout(value: object) -> tuple[str, ...]:
    """Parse ``"NCHW"``, or ``"NCHW->NHWC"`` for a network built for NCHW that will receive NHWC."""
    parts = tuple(part.strip().upper() for part in str(value).split("->"))
    if not all(parts) or len(parts) > 2:
        raise UsageError(
            f"layout is text such as 'NCHW' or 'nchw->nhwc', not {value!r}",
            code="argument-value",
            argument="layout",
        )
    return parts


def _shapes(keywords: Mapping[str, Any], network: ov.Model) -> Shapes | None:
    """Return the input shapes that the keywords ``input`` and ``input_shape`` set, or None."""
    named, shapes = keywords.get("input"), keywords.get("input_shape")
    names = _BRACKETS.sub("", named).split(",") if isinstance(named, str) else named or ()
    names = [name.strip() for name in names]
    for name in names:
        positions(name, network)  # refuses unknown inputs
    if shapes is None:
        within = isinstance(named, Mapping) or (isinstance(named, str) and "[" in named)
        return named if within else None
    if isinstance(shapes, str):
        if _BRACKETS.sub("", shapes).strip(" ,"):  # with the names of inputs
            return shapes
        shapes = _BRACKETS.findall(shapes)
    elif not any(isinstance(each, Sequence) for each in shapes):
        shapes = [shapes]
    if names and len(names) != len(shapes):
        raise UsageError(
            f"input names {len(names)} inputs, but input_shape holds {len(shapes)} shapes",
            code="argument-value",
            argument="input_shape",
        )
    return cast("Shapes", dict(zip(names or range(len(shapes)), shapes, strict=True)))


Convert = Callable[[Any, BuildOptions], Any]
"""Function that converts a source's model to an ``openvino.Model`` with flat inputs and outputs."""
Wrap = Callable[[Any, CompiledNetwork, str, BuildOptions], Any]
"""Function that returns the accelerated model for a source, its network and a method's name."""


@dataclass(frozen=True)
class OpenVINOMethod(Method[ModelSource]):
    """Inference with OpenVINO in the precision of the model's operators.

    By default the first dimension of each input stays dynamic; small networks are also compiled for
    each of the first few batch sizes.
    """

    accelerator: str | None = "openvino"
    packages: tuple[str, ...] = ("openvino",)

    computes: str = "f32"
    """Type of floating-point operators: ``INFERENCE_PRECISION_HINT`` on a CPU."""
    convert: Convert = field(kw_only=True)
    wrap: Wrap = field(kw_only=True)

    def missing(self) -> str | None:
        reason = super().missing()
        if reason or self.computes != "bf16":
            return reason
        return None if supports_bf16() else "Platform doesn't support BF16 format"

    def build(self, source: ModelSource, options: BuildOptions) -> object:
        self.check(options)
        network = self.converted(source, options)
        if self.precision == FP16:
            network = half_weights(network)
        return self.model_of(network, source, options)

    def converted(self, source: ModelSource, options: BuildOptions) -> ov.Model:
        """Convert a source's model to a network and check its results before weights are rounded.

        Raises
        ------
        DisagreementError
            If its results differ, which would be hard to detect after rounding.
        """
        network = self.convert(source, options)
        ports = (*network.inputs, *network.outputs)
        if any(port.get_element_type() == openvino.Type.f64 for port in ports):
            warnings.warn(
                f"{type(source.model).__name__} computes in float64, which OpenVINO computes in "
                "float32: results keep the type, but have only 7 digits; use "
                "accelerator='onnxruntime' or 'jit' for more",
                stacklevel=user_stacklevel(),
            )
        if self.precision != FP32 and options.device == "CPU":
            plain = replace(self, precision=FP32, computes="f32")
            model = OpenVINOMethod.model_of(plain, network.clone(), source, options)
            check_agreement(source, model, plain, source.probes(options))
        return network

    def check(self, options: BuildOptions) -> None:
        """Refuse a device that does not exist or cannot run the network.

        Raises
        ------
        UsageError
            If the device does not exist or cannot run the network.
        """
        on_npu = options.device in ("VPUX", "NPU")
        if on_npu and self.precision != FP32 and "mean_value" not in options.conversion:
            raise UsageError(
                f"If you want to quantize with openvino on {options.device} device, must specify "
                "mean_value, e.g. mean_value=[123.7, 116.3, 103.5]",
                code="argument-missing",
                argument="mean_value",
            )
        device = checked_device(options.device)
        if device != "CPU" and options.dynamic_axes and "input_shape" not in options.conversion:
            raise UsageError(
                "For model has dynamic axes, if you want to inference on non-CPU device, must "
                "define input_shape, e.g. input_shape='[1,3,224,224]', or pass dynamic_axes=False",
                code="argument-missing",
                argument="input_shape",
            )

    def model_of(self, network: ov.Model, source: ModelSource, options: BuildOptions) -> object:
        """Compile a network and wrap it as the framework's accelerated model."""
        config = dict(options.openvino_config or {})
        if self.computes == "bf16" and self.precision.quantized:
            config = {**BF16.hints, **config}
        try:
            compiled = ShapedNetwork(
                network,
                options.device,
                precision=self.precision,
                thread_num=options.thread_num,
                config=config,
            )
        except UsageError as error:
            if options.openvino_config:
                raise
            raise UnusableNetworkError(str(error)) from error.__cause__
        return self.wrap(source, compiled, self.name, options)


@dataclass(frozen=True)
class QuantizedOpenVINOMethod(OpenVINOMethod):
    """Inference with OpenVINO and integer weights and activations, quantized by NNCF.

    With an accuracy goal, layers stay in floating point, first those whose quantization changes the
    network's outputs most.

    Attributes
    ----------
    weights_only : bool
        True to quantize weights only, which needs no calibration data unless the
        ``WeightOptions`` do.
    """

    precision: Precision = INT8
    packages: tuple[str, ...] = ("openvino", "nncf")
    weights_only: bool = False

    def build(self, source: ModelSource, options: BuildOptions) -> object:
        self.check(options)
        weights = options.weight_options or WeightOptions() if self.weights_only else None
        calibrates = weights is None or weights.needs_calibration
        network = self.converted(source, replace(options, share_weights=self.weights_only))
        batches = source.calibration_arrays(options) if calibrates else [source.sample_arrays()]
        quantizer = Quantizer(network, list(batches), self.precision, weights)
        base_key = quantized_key(network, quantizer.batches, self.precision.name, weights)

        def build(excluded: tuple[str, ...]) -> object:
            key = None if base_key is None else fingerprint(base_key, excluded)
            quantized = load_network(key)
            # the network whose key agreement.py removes if the results differ
            source.cache_key = None if quantized is None else key
            if quantized is None:
                about = {"model": type(source.model).__name__, "network": self.precision.name}
                made = quantizer.quantized(excluded)
                if self.weights_only:
                    made = with_private_constants(made)
                quantized = store_network(key, made, about)
            return self.model_of(quantized, source, options)

        return keep_accuracy(build, lambda: quantizer.ranking, options.goal, source.model)


def openvino_methods(convert: Convert, wrap: Wrap) -> list[OpenVINOMethod]:
    """Return the methods that run a framework's models in OpenVINO.

    Parameters
    ----------
    convert, wrap : callable
        See :data:`Convert` and :data:`Wrap`.
    """
    ends: dict[str, Any] = {"convert": convert, "wrap": wrap}
    plain, quantized = OpenVINOMethod, QuantizedOpenVINOMethod
    weights: dict[str, Any] = {"weights_only": True, "extended": True, **ends}
    weights["arguments"] = ("weight_options",)
    bf16: dict[str, Any] = {"computes": "bf16", **ends}
    return [
        plain("openvino_fp32", option="openvino", default=True, **ends),
        plain("openvino_bf16", BF16, option="openvino + bf16", **bf16),
        plain("openvino_fp16", FP16, option="openvino + fp16", **ends),
        quantized("openvino_int8", option="openvino + int8", default=True, **ends),
        quantized(
            "openvino_int8_bf16",
            option="openvino + int8 + bf16",
            variants=("bf16",),
            extended=True,
            **bf16,
        ),
        quantized(
            "openvino_int8_weight_only",
            option="openvino + int8 + weight_only",
            variants=("weight_only",),
            **weights,
        ),
        quantized(
            "openvino_int4_weight_only",
            INT4,
            option="openvino + int4 + weight_only",
            variants=(None, "weight_only", "int4_weight_only"),
            **weights,
        ),
    ]
