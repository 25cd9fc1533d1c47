"""8-bit networks of OpenVINO, and what each of their layers costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bigdl.common.errors import UsageError, require
from bigdl.nano.acceleration.accuracy import relative_error
from bigdl.nano.acceleration.options import BuildOptions
from bigdl.nano.acceleration.quiet import quiet
from bigdl.nano.openvino.compiled import CompiledNetwork
from bigdl.nano.openvino.network import loose_shapes, port_name, reason
from bigdl.nano.openvino.quantization import RECURRENT
from bigdl.nano.openvino.signal_stack import kept_signal_stack

__all__ = ["Quantizer", "has_attention"]

# Operators with weights or of two activations; what runs between them costs little accuracy.
_LAYERS = (
    "Convolution",
    "ConvolutionBackpropData",
    "Gather",
    "GroupConvolution",
    "GroupConvolutionBackpropData",
    "MatMul",
)
# Batches on which the cost of each layer is measured.
_RANKED_ON = 2


class Quantizer:
    """Quantizes one network, with all of its layers or with some.

    Parameters
    ----------
    network : openvino.Model
        Not changed.
    batches : list of list of ndarray
        Flat lists of inputs.
    options : BuildOptions
        Its ``calibration`` and its device.
    """

    def __init__(self, network: Any, batches: list[list], options: BuildOptions):
        self._network = network
        self._batches = batches
        self._options = options
        self._fully: Any = None
        self._smooths: bool | None = None
        self._expected: list | None = None

    def quantized(self, excluded: tuple[str, ...] = ()):
        """The network with weights and activations in int8.

        Networks with attention are quantized with and without smoothing (Xiao et al., 2022: it
        moves outliers of activations into the weights) unless the options say which; the one with
        the smaller error is taken, for smoothing can also do harm.

        Parameters
        ----------
        excluded : tuple of str
            Names of layers that stay in floating point.

        Raises
        ------
        UsageError
            If the network is quantized already, or the data do not fit it.
        """
        smooth = self._options.calibration.smooth
        if smooth is not None or not has_attention(self._network):
            return self._remember(self._quantized(excluded, smooth), excluded)
        if self._smooths is None:
            both = {smooth: self._quantized((), smooth) for smooth in (False, True)}
            self._smooths = min(both, key=lambda smooth: self._error(both[smooth]))
            self._remember(both[self._smooths], ())
        if not excluded:
            return self._fully
        return self._quantized(excluded, self._smooths)

    def _quantized(self, excluded: tuple[str, ...], smooth: bool | None):
        nncf = require("nncf", "nano")
        keywords: dict[str, Any] = {}
        if smooth is not None:
            keywords["model_type"] = nncf.ModelType.TRANSFORMER
        elif excluded:
            # Zero points cost nothing measurable here, and save layers from being left out.
            keywords["preset"] = nncf.QuantizationPreset.MIXED
        if smooth is False:
            keywords["advanced_parameters"] = nncf.AdvancedQuantizationParameters(
                smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=-1, convolution=-1)
            )
        twin, shapes = _for_any_batch(self._network)
        names = [port_name(port) for port in twin.inputs]
        data = nncf.Dataset([dict(zip(names, batch, strict=True)) for batch in self._batches])
        scope = nncf.IgnoredScope(names=list(excluded), types=list(RECURRENT), validate=False)
        try:
            with quiet(), kept_signal_stack():
                made = nncf.quantize(
                    twin, data, subset_size=len(self._batches), ignored_scope=scope, **keywords
                )
        except Exception as error:  # NNCF has errors of its own and passes on those of OpenVINO
            raise UsageError(
                f"NNCF cannot quantize the network with these data: {reason(error)}"
            ) from error
        made.reshape(shapes)
        return made

    def _error(self, network) -> float:
        """Error of a network's outputs on a few batches."""
        batches = self._batches[:_RANKED_ON]
        if self._expected is None:
            self._expected = _outputs(self._network, batches)
        return relative_error(self._expected, _outputs(network, batches))

    def weights_quantized(self, excluded: tuple[str, ...] = ()):
        """The network with weights in int8, each channel with a scale of its own."""
        nncf = require("nncf", "nano")
        scope = nncf.IgnoredScope(names=list(excluded)) if excluded else None
        with quiet(), kept_signal_stack():
            made = nncf.compress_weights(
                self._network.clone(),
                mode=nncf.CompressWeightsMode.INT8_SYM,
                ignored_scope=scope,
            )
        return self._remember(made, excluded)

    def rank(self) -> list[str]:
        """Names of the quantized layers, the one whose quantization costs most first.

        A layer's cost is what the outputs' error shrinks by when it alone is in floating point.
        """
        original = {op.get_friendly_name(): op for op in self._network.get_ops()}
        names = [op.get_friendly_name() for op in _quantized_layers(self._fully)]
        errors = {
            name: self._error(_restored(self._fully, name, original[name]))
            for name in names
            if name in original
        }
        return sorted(errors, key=errors.get)

    def _remember(self, network, excluded):
        if not excluded:
            self._fully = network
        return network


def has_attention(network: Any) -> bool:
    """Whether a network multiplies activations by activations and takes a softmax."""
    ops = network.get_ops()
    kinds = {op.get_type_name() for op in ops}
    if "ScaledDotProductAttention" in kinds:
        return True
    return "Softmax" in kinds and any(
        op.get_type_name() == "MatMul" and not any(map(_is_constant, op.input_values()))
        for op in ops
    )


def _is_constant(value) -> bool:
    """Whether a value does not depend on the inputs, as far as few steps back can tell."""
    node = value.get_node()
    for _ in range(6):
        if node.get_type_name() == "Constant":
            return True
        if node.get_type_name() not in ("Convert", "Multiply", "Subtract", "Reshape", "Transpose"):
            return False
        node = node.input_value(0).get_node()
    return False


def _for_any_batch(network):
    """A copy that takes any number of rows, and the shapes that the network has."""
    shapes = {position: port.partial_shape for position, port in enumerate(network.inputs)}
    twin = network.clone()
    try:
        twin.reshape(loose_shapes(network))
    except RuntimeError:  # the number of rows is built in
        return network.clone(), shapes
    return twin, shapes


def _outputs(network, batches) -> list:
    runner = CompiledNetwork(network)
    return [array for batch in batches for array in runner.infer(batch)]


def _quantized_layers(network) -> Iterator[Any]:
    for op in network.get_ordered_ops():
        if op.get_type_name() in _LAYERS and any(
            _unquantized(value) is not None or _is_compressed(value) for value in op.input_values()
        ):
            yield op


def _unquantized(value):
    """What an activation was before it was quantized; None if it was not."""
    node = value.get_node()
    return node.input_value(0) if node.get_type_name() == "FakeQuantize" else None


def _is_compressed(value) -> bool:
    """Whether a value is weights in integers that are scaled."""
    node = value.get_node()
    for _ in range(6):
        kind = node.get_type_name()
        if kind == "Constant":
            return node.get_element_type().is_integral() and value.get_element_type().is_real()
        if kind not in ("Convert", "Multiply", "Subtract", "Reshape"):
            return False
        node = node.input_value(0).get_node()
    return False


def _restored(network, name: str, original) -> Any:
    """A copy of a quantized network in which one layer is in floating point again."""
    twin = network.clone()
    layer = next(op for op in twin.get_ops() if op.get_friendly_name() == name)
    for position, port in enumerate(layer.inputs()):
        value = port.get_source_output()
        before = _unquantized(value)
        if before is None and _is_compressed(value):
            before = _constant_of(original, position)
        if before is not None:
            port.replace_source_output(before)
    return twin


def _constant_of(original, position: int):
    """A copy of the weights of a layer."""
    from openvino import opset13

    node = original.input_value(position).get_node()
    if node.get_type_name() != "Constant":
        return None
    return opset13.constant(node.get_data()).output(0)
