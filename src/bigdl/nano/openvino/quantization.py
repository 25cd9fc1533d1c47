"""Networks of OpenVINO in 8-bit integers, by NNCF, and what each of their layers costs."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import UsageError, require
from bigdl.nano.acceleration.accuracy import relative_error
from bigdl.nano.acceleration.quiet import quiet
from bigdl.nano.acceleration.structure import as_array
from bigdl.nano.openvino.compiled import CompiledNetwork
from bigdl.nano.openvino.network import loose_shapes, port_name, reason

__all__ = ["Quantizer", "has_attention", "quantized_network"]


class _Stack(ctypes.Structure):
    """``stack_t`` of ``sigaltstack(2)`` on Linux."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("size", ctypes.c_size_t),
    )


@contextmanager
def kept_signal_stack() -> Iterator[None]:
    """Leave this thread with the alternate signal stack that it had.

    Every ``openvino.Core`` whose CPU plugin is loaded sets one and takes it back when it goes. Of
    two that go in the order in which they came, the second brings back what the first has freed;
    then the next signal that Python handles, such as Ctrl-C or the end of a child process, ends
    the process without a word. NNCF makes several (openvino 2026.4, nncf 3.4).
    """
    sigaltstack = _sigaltstack()
    if sigaltstack is None:
        yield
        return
    before = _Stack()
    known = sigaltstack(None, ctypes.byref(before)) == 0
    try:
        yield
    finally:
        if known:
            sigaltstack(ctypes.byref(before), None)


@functools.cache
def _sigaltstack():
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).sigaltstack
    function.argtypes = [ctypes.POINTER(_Stack), ctypes.POINTER(_Stack)]
    return function


RECURRENT = ("GRUSequence", "LSTMSequence", "RNNSequence", "GRUCell", "LSTMCell", "RNNCell")
"""Operators that stay in floating point: OpenVINO 2026.4 loses the last state of quantized ones."""


def quantized_network(
    network,
    data: Iterable[Any],
    *,
    metric: Callable[[Any, Any], float] | None = None,
    validation: Iterable[Any] | None = None,
    higher_better: bool = True,
    drop_type: str = "relative",
    maximal_drop: float = 0.01,
    max_iterations: int | None = None,
    sample_size: int = 300,
    **options: Any,
):
    """Quantize a network with the activations that it has on samples of data.

    Parameters
    ----------
    network : openvino.Model
        The network; it stays as it is.
    data : iterable
        Batches: an array, a mapping of names to arrays, or a tuple or list whose first elements
        are the inputs (they may be a tuple themselves). What follows the inputs is the target.
        It is iterated more than once unless it is an iterator.
    metric : callable or torchmetrics.Metric, optional
        ``metric(predictions, targets) -> float`` on arrays of all batches, joined; an object with
        ``update``, ``compute`` and ``reset`` gets each batch as tensors. With it, layers are
        taken back to floating point until the figure is good enough
        (``nncf.quantize_with_accuracy_control``).
    validation : iterable, optional
        Batches with targets for `metric`, by default those of `data`.
    higher_better : bool
        Whether a higher figure is better.
    drop_type : str
        Whether `maximal_drop` is ``"relative"`` to the figure of `network` or ``"absolute"``.
    maximal_drop : float
        By how much the figure may get worse.
    max_iterations : int, optional
        Rounds of taking layers back; by default as many as needed.
    sample_size : int
        Samples to calibrate with. Batches are counted by the first dimension of the first input.
    **options
        Further arguments of ``nncf.quantize``, e.g. ``preset`` or ``ignored_scope`` (by default
        recurrent layers).

    Returns
    -------
    openvino.Model

    Raises
    ------
    UsageError
        If there are no samples, a batch does not fit the network, targets are missing, or an
        argument makes no sense.
    """
    nncf = require("nncf", "nano")
    check_choice("drop_type", drop_type, ("relative", "absolute"))
    check_positive("sample_size", sample_size)
    names = [port_name(port) for port in network.inputs]
    if iter(data) is data:  # an iterator can be gone through once only
        data = list(data)
    batches = _Calibration(data, names, sample_size)
    calibration = nncf.Dataset(batches)
    subset_size = len(batches)
    options.setdefault("ignored_scope", nncf.IgnoredScope(types=list(RECURRENT), validate=False))
    if metric is None:
        with quiet(), kept_signal_stack():
            return nncf.quantize(network, calibration, subset_size=subset_size, **options)
    restoring = nncf.AdvancedAccuracyRestorerParameters(max_num_iterations=max_iterations or 2**31)
    with kept_signal_stack():  # not quietly: it calls the user's metric
        return nncf.quantize_with_accuracy_control(
            network,
            calibration,
            nncf.Dataset(data if validation is None else validation),
            _NetworkMetric(metric, names, higher_better),
            subset_size=subset_size,
            max_drop=maximal_drop,
            drop_type=nncf.DropType.RELATIVE if drop_type == "relative" else nncf.DropType.ABSOLUTE,
            advanced_accuracy_restorer_parameters=restoring,
            **options,
        )


class _Calibration:
    """The first batches of data, as mappings of input names to arrays.

    It is iterated several times; its length is the number of batches.
    """

    def __init__(self, data: Iterable[Any], names: list[str], sample_size: int):
        self._data = data
        self._names = names
        self._count = 0
        samples = 0
        for batch in data:
            inputs, _ = _split_batch(batch, names)
            self._count += 1
            first = inputs[names[0]]
            samples += first.shape[0] if first.ndim else 1
            if samples >= sample_size:
                break
        if not self._count:
            raise UsageError("Quantizing needs samples to calibrate with, but the data is empty")

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (_split_batch(batch, self._names)[0] for batch in islice(self._data, self._count))


class _NetworkMetric:
    """The figure of a compiled network on data, as NNCF wants it: higher is better.

    NNCF measures a relative drop by the ratio of the figures, so that a metric of which less is
    better only has to be negated, but it cannot divide by a figure of 0.
    """

    def __init__(self, metric: Any, names: list[str], higher_better: bool):
        self._metric = metric
        self._names = names
        self._sign = 1 if higher_better else -1

    def __call__(self, compiled, batches: Iterable[Any]) -> tuple[float, None]:
        figure = self._figure(compiled, batches)
        return self._sign * (figure or float(np.finfo(np.float32).tiny)), None

    def _figure(self, compiled, batches: Iterable[Any]) -> float:
        pairs = self._pairs(compiled, batches)
        if hasattr(self._metric, "update") and hasattr(self._metric, "compute"):
            return self._merged(pairs)
        predictions, targets = zip(*pairs, strict=True)
        return float(self._metric(np.concatenate(predictions), np.concatenate(targets)))

    def _merged(self, pairs: Iterator[tuple[np.ndarray, np.ndarray]]) -> float:
        torch = require("torch", "nano")
        self._metric.reset()
        for prediction, target in pairs:
            self._metric.update(torch.from_numpy(prediction), torch.from_numpy(target))
        return float(self._metric.compute())

    def _pairs(self, compiled, batches: Iterable[Any]):
        for batch in batches:
            inputs, target = _split_batch(batch, self._names)
            if target is None:
                raise UsageError("A metric compares with targets, but a batch has inputs only")
            yield np.array(compiled(inputs)[0]), target


def _split_batch(batch: Any, names: list[str]) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Inputs by name, and the target if there is one."""
    inputs, rest = _inputs_and_rest(batch, len(names))
    if isinstance(inputs, Mapping):
        missing = [name for name in names if name not in inputs]
        if missing:
            raise UsageError(f"A batch lacks the input {', '.join(missing)} of the network")
        arrays = {name: _array(inputs[name]) for name in names}
    elif len(inputs) == len(names):
        arrays = dict(zip(names, map(_array, inputs), strict=True))
    else:
        raise UsageError(
            f"The network has {len(names)} inputs ({', '.join(names)}), but a batch has "
            f"{len(inputs)}"
        )
    return arrays, _array(rest[0]) if rest else None


def _inputs_and_rest(batch: Any, count: int) -> tuple[Any, Sequence[Any]]:
    if not isinstance(batch, tuple | list):
        return (batch if isinstance(batch, Mapping) else (batch,)), ()
    if batch and isinstance(batch[0], tuple | list | Mapping):
        return batch[0], batch[1:]
    return batch[:count], batch[count:]


def _array(value: Any) -> np.ndarray:
    return np.asarray(as_array(value))


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
    smooth : bool or None
        True to smooth, False not to; None decides for networks with attention.
    """

    def __init__(self, network: Any, batches: list[list], smooth: bool | None):
        self._network = network
        self._batches = batches
        self._smooth = smooth
        self._fully: Any = None
        self._smooths: bool | None = None
        self._expected: list | None = None

    def quantized(self, excluded: tuple[str, ...] = ()):
        """The network with weights and activations in int8.

        Networks with attention are quantized with and without smoothing (Xiao et al., 2022: it
        moves outliers of activations into the weights) unless it is said which; the one with
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
        smooth = self._smooth
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
        return sorted(errors, key=errors.__getitem__)

    def _remember(self, network, excluded):
        if not excluded:
            self._fully = network
        return network


def has_attention(network: Any) -> bool:
    """Return True if a network multiplies activations by activations and takes a softmax."""
    ops = network.get_ops()
    kinds = {op.get_type_name() for op in ops}
    if "ScaledDotProductAttention" in kinds:
        return True
    return "Softmax" in kinds and any(
        op.get_type_name() == "MatMul" and not any(map(_is_constant, op.input_values()))
        for op in ops
    )


def _is_constant(value) -> bool:
    """Return True if a value does not depend on the inputs, as far as few steps back can tell."""
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
    """Return what an activation was before it was quantized; None if it was not."""
    node = value.get_node()
    return node.input_value(0) if node.get_type_name() == "FakeQuantize" else None


def _is_compressed(value) -> bool:
    """Return True if a value is weights in integers that are scaled."""
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
