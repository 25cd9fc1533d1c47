"""What is built into a network of OpenVINO at its inputs when it is converted.

The keywords are those of OpenVINO's old model optimizer; they are carried out with
``PrePostProcessor`` and ``reshape``.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bigdl.common.environment import scratch_home
from bigdl.common.errors import UsageError, require
from bigdl.nano.openvino.network import port_name, read_network, reason, reshaped

__all__ = ["half_weights", "preprocessed", "wants_half_weights"]

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
    """Whether ``data_type`` asks for weights in fp16."""
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
    """What the network was built for, and what it takes."""
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
