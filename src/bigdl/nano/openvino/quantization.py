"""Quantization of OpenVINO networks with NNCF, and the error that each quantized layer adds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.cpu import saturates_int8
from bigdl.common.errors import UsageError, as_usage_error, require
from bigdl.common.platform import memory as platform_memory
from bigdl.nano.acceleration.accuracy import relative_error
from bigdl.nano.acceleration.precision import INT4, INT8, Precision, WeightOptions
from bigdl.nano.acceleration.quiet import quiet
from bigdl.nano.acceleration.structure import as_array
from bigdl.nano.openvino.network import CompiledNetwork, loose_shapes, port_name, reason

if TYPE_CHECKING:
    import nncf
    import openvino as ov


@contextmanager
def kept_signal_stack() -> Iterator[None]:
    """Context manager that restores this thread's alternate signal stack on exit.

    Every ``openvino.Core`` with a loaded CPU plugin sets a signal stack and restores the previous
    one when it is deleted. If two of them are deleted in the order of creation, the second restores
    a stack that the first has freed. The next signal that Python handles, such as Ctrl-C or the end
    of a child process, then ends the process silently. NNCF creates several (openvino 2026.4,
    nncf 3.4).
    """
    with platform_memory.kept_signal_stack():
        yield


RECURRENT = ("GRUSequence", "LSTMSequence", "RNNSequence", "GRUCell", "LSTMCell", "RNNCell")
"""Operators kept in floating point: OpenVINO 2026.4 loses the last state if they are quantized."""


def metric_of(
    network: ov.Model, metric: Any, batches: list[tuple[list, np.ndarray | None]]
) -> float:
    """Return a metric's value, computed from a network's first output and the targets."""
    if any(target is None for _, target in batches):
        raise UsageError(
            "A metric needs targets, but a batch has only inputs", code="data-structure"
        )
    runner = CompiledNetwork(network)
    pairs = [(runner.infer(inputs)[0], target) for inputs, target in batches]
    both = map(np.concatenate, zip(*pairs, strict=True))
    if hasattr(metric, "update") and hasattr(metric, "compute"):
        metric.reset()
        both = map(require("torch", "nano").from_numpy, both)
    return float(metric(*both))


def split_batch(batch: object, names: list[str]) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Split a batch into the network's inputs in order and the target, or None."""
    inputs: Any = (batch,)
    rest: Sequence[Any] = ()
    if isinstance(batch, tuple | list):
        nested = batch and isinstance(batch[0], tuple | list | Mapping)
        inputs, rest = (
            (batch[0], batch[1:]) if nested else (batch[: len(names)], batch[len(names) :])
        )
    elif isinstance(batch, Mapping):
        inputs = batch
    if isinstance(inputs, Mapping):
        missing = [name for name in names if name not in inputs]
        if missing:
            raise UsageError(
                f"A batch lacks the input {', '.join(missing)} of the network",
                code="model-input",
                argument=missing[0],
            )
        inputs = [inputs[name] for name in names]
    if len(inputs) != len(names):
        raise UsageError(
            f"The network has {len(names)} inputs ({', '.join(names)}), but a batch has "
            f"{len(inputs)}",
            code="model-input",
        )
    arrays = [np.asarray(as_array(value)) for value in inputs]
    return arrays, np.asarray(as_array(rest[0])) if rest else None


# Operators with weights or two activations; quantizing others costs little accuracy.
_LAYERS = (
    "Convolution",
    "ConvolutionBackpropData",
    "Gather",
    "GroupConvolution",
    "GroupConvolutionBackpropData",
    "MatMul",
)
# Number of batches on which the cost of each layer is measured.
_RANKED_ON = 2


@dataclasses.dataclass
class Quantizer:
    """Quantization of one network, with all or some of its layers.

    Parameters
    ----------
    network : openvino.Model
        Network to quantize; not changed.
    batches : list of list of ndarray
        Calibration data: flat lists of inputs.
    precision : Precision
        Precision of weights; activations always have 8 bits.
    weights : WeightOptions or None
        Options to quantize weights only. With 8 bits each channel has a scale. With 4 bits,
        embeddings and the last layer have 8.
    smooth : bool or None
        True applies SmoothQuant (Xiao et al., 2022), which moves outliers of activations into the
        weights; False does not. None quantizes networks with attention both ways and uses the one
        with the smaller error, because smoothing can also increase it.
    options : mapping
        Further arguments of ``nncf.quantize``.

    Raises
    ------
    UsageError
        If a weight option is incompatible with the precision, or activations would have 4 bits.
    """

    network: Any
    batches: list[list]
    precision: Precision = INT8
    weights: WeightOptions | None = None
    smooth: bool | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        weights = self.weights
        if weights is None and self.precision == INT4:
            raise UsageError(
                "Activations cannot be quantized to int4; pass weights_only=True",
                code="argument-conflict",
                argument="precision",
            )
        if self.precision == INT8 and weights not in (
            None,
            *(WeightOptions(symmetric=each) for each in (True, False)),
        ):
            raise UsageError(
                f"{weights} does not go with int8, whose weights have one scale for each channel; "
                "set only symmetric, or use precision='int4'",
                code="argument-conflict",
                argument="weight_options",
            )

    def quantized(self, excluded: tuple[str, ...] = ()) -> ov.Model:
        """Return the network quantized to integers.

        Parameters
        ----------
        excluded : tuple of str
            Names of layers to keep in floating point, the first ones of :attr:`ranking`.

        Raises
        ------
        UsageError
            If the network is already quantized, or the data do not fit it.
        """
        network, smooth = self._fully
        if not excluded:
            return network
        if len(excluded) == len(self.ranking):
            return self.network
        return self._quantized(excluded, smooth)

    @cached_property
    def _fully(self) -> tuple[Any, bool | None]:
        """The network with all layers quantized, and the value of `smooth` that was used."""
        alternatives = [self.smooth]
        if self.smooth is None and self.weights is None and has_attention(self.network):
            alternatives = [False, True]
        made = [(self._quantized((), smooth), smooth) for smooth in alternatives]
        return made[0] if len(made) == 1 else min(made, key=lambda pair: self._error(pair[0]))

    def _quantized(self, excluded: tuple[str, ...], smooth: bool | None) -> ov.Model:
        nncf = require("nncf", "nano")
        keywords = dict(self.options)
        scope = keywords.pop("ignored_scope", None)
        types = RECURRENT if self.weights else _in_floats(self.network)
        scope = scope or nncf.IgnoredScope(types=list(types), validate=False)
        keywords["ignored_scope"] = dataclasses.replace(scope, names=[*scope.names, *excluded])
        if self.weights:
            return self._with_small_weights(self.weights, keywords)
        if smooth is not None:
            keywords["model_type"] = nncf.ModelType.TRANSFORMER
        elif excluded:
            # Zero points cost no measurable time here, and more layers can be quantized.
            keywords.setdefault("preset", nncf.QuantizationPreset.MIXED)
        advanced: dict[str, Any] = {}
        if saturates_int8():
            # Use 7 bits for weights, and do not quantize products of two activations.
            advanced["overflow_fix"] = nncf.OverflowFix.ENABLE
            scope = keywords["ignored_scope"]
            products = [op.get_friendly_name() for op in _products_of_activations(self.network)]
            keywords["ignored_scope"] = dataclasses.replace(scope, names=[*scope.names, *products])
        if smooth is False:
            advanced["smooth_quant_alphas"] = nncf.AdvancedSmoothQuantParameters(
                matmul=-1, convolution=-1
            )
        if advanced:
            chosen = keywords.get("advanced_parameters") or nncf.AdvancedQuantizationParameters()
            keywords["advanced_parameters"] = dataclasses.replace(chosen, **advanced)
        return self._made(nncf.quantize, {"calibration_dataset": self._data(), **keywords})

    def _with_small_weights(self, weights: WeightOptions, keywords: dict[str, Any]) -> ov.Model:
        """Return the network with integer weights that are dequantized on use."""
        nncf = require("nncf", "nano")
        name = f"{self.precision}_{'sym' if weights.symmetric else 'asym'}".upper()
        keywords["mode"] = nncf.CompressWeightsMode[name]
        if self.precision == INT4:
            adjusted = nncf.GroupSizeFallbackMode.ADJUST
            groups = nncf.AdvancedCompressionParameters(group_size_fallback_mode=adjusted)
            keywords.setdefault("advanced_parameters", groups)
            keywords["group_size"] = weights.group_size or -1
            if weights.int8_ratio:
                keywords["ratio"] = 1.0 - weights.int8_ratio
        if weights.needs_calibration:
            keywords |= {"awq": weights.awq, "scale_estimation": weights.scale_estimation}
            keywords["dataset"] = self._data()
            return self._made(nncf.compress_weights, keywords)
        sentence = "NNCF cannot quantize the weights of the network"
        with (
            as_usage_error(sentence, text=reason, code="model-unsupported"),
            quiet(),
            kept_signal_stack(),
        ):
            return nncf.compress_weights(self.network.clone(), **keywords)

    def _data(self) -> nncf.Dataset:
        names = [port_name(port) for port in self.network.inputs]
        batches = [dict(zip(names, batch, strict=True)) for batch in self.batches]
        return require("nncf", "nano").Dataset(batches)

    def _made(self, make: Callable[..., Any], keywords: Mapping[str, Any]) -> ov.Model:
        """Call an NNCF function with a copy of the network that accepts the calibration batches."""
        clone, shapes = _for_any_batch(self.network)
        sentence = "NNCF cannot quantize the network with these data"
        with (
            as_usage_error(sentence, text=reason, code="model-unsupported"),
            quiet(),
            kept_signal_stack(),
        ):
            made = make(clone, subset_size=len(self.batches), **keywords)
        made.reshape(shapes)
        return made

    @cached_property
    def _expected(self) -> list:
        return _outputs(self.network, self.batches[:_RANKED_ON])

    def _error(self, network: ov.Model) -> float:
        """Return the error of a network's outputs, relative to the original, on a few batches."""
        return relative_error(self._expected, _outputs(network, self.batches[:_RANKED_ON]))

    @cached_property
    def ranking(self) -> list[str]:
        """Names of the quantized layers, by the error that quantization adds, largest first.

        A layer's cost is the decrease of the outputs' error if only this layer is restored.
        """
        original = {op.get_friendly_name(): op for op in self.network.get_ops()}
        quantized, _ = self._fully
        names = [op.get_friendly_name() for op in _quantized_layers(quantized)]
        errors = {
            name: self._error(_restored(quantized, name, original[name]))
            for name in names
            if name in original
        }
        return sorted(errors, key=errors.__getitem__)


def has_attention(network: ov.Model) -> bool:
    """Return True if a network multiplies activations by activations and has a softmax."""
    types = {op.get_type_name() for op in network.get_ops()}
    if "ScaledDotProductAttention" in types:
        return True
    return "Softmax" in types and any(_products_of_activations(network))


def _in_floats(network: ov.Model) -> Sequence[str]:
    """Return the types of operators whose activations stay in floating point when quantized.

    In networks with scatter operations, such as graph networks, these are all operators except
    products: calibration cannot find the range of degrees and sums over edges. With 8 bits for them
    a GCN had an error of 0.43 on graphs of other degrees, and 0.15 without.
    """
    types = {op.get_type_name() for op in network.get_ops()}
    if "ScatterElementsUpdate" not in types:
        return RECURRENT
    return [*RECURRENT, *sorted(types.difference(_LAYERS, ["Constant"])), "Gather"]


def _products_of_activations(network: ov.Model) -> Iterator[Any]:
    """Yield the MatMul nodes of a network that multiply two activations."""
    for op in network.get_ops():
        if op.get_type_name() == "MatMul" and not any(map(_constant_behind, op.input_values())):
            yield op


def _constant_behind(value: ov.Output) -> ov.Node | None:
    """Return the constant that conversions, scaling or reshaping turn into `value`, or None."""
    node = value.get_node()
    for _ in range(6):
        if node.get_type_name() == "Constant":
            return node
        if node.get_type_name() not in ("Convert", "Multiply", "Subtract", "Reshape", "Transpose"):
            return None
        node = node.input_value(0).get_node()
    return None


def _for_any_batch(network):
    """Return a copy that accepts any batch size if possible, and the original input shapes."""
    shapes = {position: port.partial_shape for position, port in enumerate(network.inputs)}
    clone = network.clone()
    try:
        clone.reshape(loose_shapes(network))
    except RuntimeError:  # the batch size is fixed
        return network.clone(), shapes
    return clone, shapes


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
    """Return the input of the FakeQuantize node that computes `value`, or None for other nodes."""
    node = value.get_node()
    return node.input_value(0) if node.get_type_name() == "FakeQuantize" else None


def _is_compressed(value: ov.Output) -> bool:
    """Return True if a value is a weight that is stored as integers and dequantized on use."""
    constant = _constant_behind(value)
    return (
        constant is not None
        and constant.get_element_type().is_integral()
        and value.get_element_type().is_real()
    )


def _restored(network, name: str, original) -> ov.Model:
    """Return a copy of a quantized network with one layer restored to floating point."""
    clone = network.clone()
    layer = next(op for op in clone.get_ops() if op.get_friendly_name() == name)
    for position, port in enumerate(layer.inputs()):
        value = port.get_source_output()
        before = _unquantized(value)
        if before is None and _is_compressed(value):
            before = _constant_of(original, position)
        if before is not None:
            port.replace_source_output(before)
    return clone


def _constant_of(original, position: int):
    """Return a copy of a layer's weights, or None if the weights are not constant."""
    from openvino import opset13

    node = original.input_value(position).get_node()
    if node.get_type_name() != "Constant":
        return None
    return opset13.constant(node.get_data()).output(0)
