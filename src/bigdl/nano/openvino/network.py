"""Networks of OpenVINO before they are compiled: read, named, reshaped and written."""

from __future__ import annotations

import functools
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bigdl.common.errors import UsageError, require

__all__ = [
    "SAVED_NAME",
    "checked_device",
    "core",
    "loose_shapes",
    "network_bytes",
    "parse_shapes",
    "port_name",
    "read_network",
    "reason",
    "renamed_properties",
    "reshaped",
    "supports_bf16",
    "write_network",
]

SAVED_NAME = "ov_saved_model"
"""Name, without suffix, of the two files of a network in a directory of its own."""

_READABLE = (".xml", ".onnx")
# What properties of OpenVINO were called before 2022.
_RENAMED = {
    "CPU_THREADS_NUM": "INFERENCE_NUM_THREADS",
    "CPU_THROUGHPUT_STREAMS": "NUM_STREAMS",
    "CPU_BIND_THREAD": "ENABLE_CPU_PINNING",
}
_RENAMED_VALUES = {"CPU_THROUGHPUT_AUTO": "AUTO", "CPU_THROUGHPUT_NUMA": "NUMA"}
_NAMED_SHAPE = re.compile(r"\s*(?P<name>[^\[\],]*?)\s*\[(?P<dims>[^\[\]]*)\]\s*(?:,|$)")


@functools.cache
def core():
    """The ``openvino.Core`` of this process; it is safe to use from several threads."""
    return require("openvino", "nano").Core()


def checked_device(device: str) -> str:
    """Return the name of a device as this version of OpenVINO spells it.

    Parameters
    ----------
    device : str
        ``"CPU"``, ``"GPU"``, ``"GPU.1"``, ``"NPU"`` (``"VPUX"`` is its old name), or one of
        OpenVINO's combinations such as ``"AUTO:GPU,CPU"``.

    Returns
    -------
    str

    Raises
    ------
    UsageError
        If this machine does not have the device.
    """
    name = str(device).upper().replace("VPUX", "NPU")
    kind, _, listed = name.partition(":")
    combined = kind in ("AUTO", "MULTI", "HETERO", "BATCH")
    wanted = [each.partition("(")[0] for each in listed.split(",") if each] if combined else [name]
    present = core().available_devices
    for each in wanted:
        each = each.lstrip("-")  # "AUTO:-GPU" leaves one out
        if not any(have == each or have.startswith(f"{each}.") for have in present):
            raise UsageError(
                f"Your machine don't have {each} device (only have {','.join(present)}), "
                "please modify the incoming device value."
            )
    return name


def supports_bf16(device: str = "CPU") -> bool:
    """Return True if a device has instructions for bfloat16."""
    return "BF16" in core().get_property(device, "OPTIMIZATION_CAPABILITIES")


def renamed_properties(config: Mapping[str, Any]) -> dict[str, Any]:
    """Properties under the names that OpenVINO has for them today."""
    return {
        _RENAMED.get(key, key): _RENAMED_VALUES.get(value, value) for key, value in config.items()
    }


def read_network(source: Any):
    """Return a network from any of its forms.

    Parameters
    ----------
    source : str, Path, pair of bytes, or openvino.Model
        An ``.xml`` file with its ``.bin`` beside it, an ``.onnx`` file, a directory that
        :func:`write_network` made, the content of the two files, or a network itself, which is
        returned as it is.

    Returns
    -------
    openvino.Model

    Raises
    ------
    UsageError
        If there is no such file or it holds no network.
    """
    openvino = require("openvino", "nano")
    if isinstance(source, openvino.Model):
        return source
    if isinstance(source, tuple) and len(source) == 2:
        return _read(*source, what="the given bytes")
    if not isinstance(source, str | os.PathLike):
        raise UsageError(
            "A network is the path of an .xml or .onnx file or an openvino.Model, "
            f"not {type(source).__name__}"
        )
    path = Path(source)
    if path.is_dir():
        path = path / f"{SAVED_NAME}.xml"
    if path.suffix not in _READABLE:
        raise UsageError(f"A network is read from an .xml or .onnx file, not from {str(source)!r}")
    if not path.is_file():
        raise UsageError(f"{str(path)!r} doesn't exist.")
    return _read(path, what=repr(str(path)))


def write_network(network, path: str | os.PathLike) -> Path:
    """Write a network as a pair of files, ``.xml`` and ``.bin``.

    The files come into being at once when they are complete, so that a network may be written
    over the files that it was read from, whose weights are still mapped into memory.

    Parameters
    ----------
    network : openvino.Model
        What to write; its constants keep their types.
    path : str or Path
        The ``.xml`` file, or a directory, which is created, for ``ov_saved_model.xml``.

    Returns
    -------
    Path
        The ``.xml`` file.
    """
    openvino = require("openvino", "nano")
    target = Path(path)
    if target.suffix != ".xml":
        target = target / f"{SAVED_NAME}.xml"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".saving-") as folder:
        aside = Path(folder, target.name)
        openvino.save_model(network, aside, compress_to_fp16=False)
        # The weights first: a reader that finds the new text also finds the new weights.
        os.replace(aside.with_suffix(".bin"), target.with_suffix(".bin"))
        os.replace(aside, target)
    return target


def network_bytes(network) -> tuple[bytes, bytes]:
    """Content of the ``.xml`` and the ``.bin`` file of a network, as `read_network` takes them."""
    with tempfile.TemporaryDirectory(prefix="bigdl-network-") as folder:
        text = write_network(network, folder)
        return text.read_bytes(), text.with_suffix(".bin").read_bytes()


def port_name(port) -> str:
    """Name of an input or output; the name of its node where it has none of its own."""
    return port.get_any_name() if port.get_names() else port.get_node().get_friendly_name()


def parse_shapes(shapes: Any, network) -> dict[int, Any]:
    """Wanted shapes of a network's inputs.

    Parameters
    ----------
    shapes : str, mapping or sequence
        ``"[1,3,224,224]"`` for the only input (or for all), ``"x[1,3],y[?,4]"``, a mapping of
        names to shapes, one shape, or one shape for each input. A dimension is a number, a range
        such as ``1..8``, or ``?`` or -1 for any size.
    network : openvino.Model
        The network that has the inputs.

    Returns
    -------
    dict of int to openvino.PartialShape
        By position of the input; an input that is not named keeps its shape.

    Raises
    ------
    UsageError
        If there is no such input, or `shapes` cannot be understood.
    """
    openvino = require("openvino", "nano")
    ports = list(network.inputs)
    if isinstance(shapes, str):
        shapes = _named_shapes(shapes)
    if isinstance(shapes, openvino.PartialShape) or not isinstance(shapes, Mapping | Sequence):
        shapes = {"": shapes}
    elif not isinstance(shapes, Mapping):
        nested = any(isinstance(each, Sequence | openvino.PartialShape) for each in shapes)
        shapes = dict(enumerate(shapes)) if nested else {"": shapes}
    wanted = {}
    for key, shape in shapes.items():
        for position in _positions(key, ports):
            wanted[position] = _partial_shape(shape)
    return wanted


def reshaped(network, shapes: Any):
    """The network itself if its inputs have these shapes, else a copy whose inputs do.

    Parameters
    ----------
    network : openvino.Model
    shapes : str, mapping or sequence
        See :func:`parse_shapes`.

    Raises
    ------
    UsageError
        If the network cannot have such inputs.
    """
    wanted = parse_shapes(shapes, network)
    if all(network.inputs[i].partial_shape == shape for i, shape in wanted.items()):
        return network
    twin = network.clone()
    try:
        twin.reshape(wanted)
    except RuntimeError as error:
        raise UsageError(f"The network cannot have inputs {shapes}: {reason(error)}") from error
    return twin


def loose_shapes(network) -> dict[int, Any]:
    """Shapes of the inputs with any number of rows, by position; of those that have rows."""
    openvino = require("openvino", "nano")
    shapes = {position: port.partial_shape for position, port in enumerate(network.inputs)}
    return {
        position: openvino.PartialShape([-1, *list(shape)[1:]])
        for position, shape in shapes.items()
        if shape.rank.is_static and len(shape)
    }


def _named_shapes(text: str) -> dict[str, str]:
    found, end = {}, 0
    while end < len(text):
        match = _NAMED_SHAPE.match(text, end)
        if match is None:
            raise UsageError(
                f"Shapes are written as '[1,3,224,224]' or 'x[1,3],y[1,4]', not as {text!r}"
            )
        found[match["name"]] = match["dims"]
        end = match.end()
    return found


def _positions(key: str | int, ports: list) -> list[int]:
    if key == "":
        return list(range(len(ports)))
    for position, port in enumerate(ports):
        if key == position or key in port.get_names() or key == port_name(port):
            return [position]
    names = ", ".join(map(port_name, ports))
    raise UsageError(f"The network has no input {key!r}; it has {names}")


def _partial_shape(shape: Any):
    openvino = require("openvino", "nano")
    try:
        if isinstance(shape, str):
            return openvino.PartialShape(f"[{shape.strip().strip('[]')}]")
        return openvino.PartialShape(shape)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"{shape!r} is not a shape: {reason(error)}") from error


def _read(model: Any, weights: bytes | None = None, *, what: str):
    try:
        return core().read_model(model) if weights is None else core().read_model(model, weights)
    except RuntimeError as error:
        raise UsageError(f"OpenVINO cannot read {what}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Return the text of an exception of OpenVINO without the places in its source files."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return said[-1] if said else " ".join(lines)
