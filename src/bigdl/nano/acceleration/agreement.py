"""Comparison of an accelerated model's results with the original's.

A conversion can lose data-dependent behaviour: a branch, a size, or a value computed in Python.
Both models therefore run on the sample and on inputs derived from it: other values (several times
if the sample has few rows), more rows, and one row. The original runs before the conversion. The
converted model is rejected if the results differ by more than the precision allows. Differences
are relative to the typical magnitude of results over all of these inputs, because logits of a
single sample may be near zero.

The ``error_bound`` of the method's precision is the limit. Some models react to the smallest
change of their weights, e.g. because they round or compare. They may differ as much as the
original's result changes under weight noise of the precision's ``rounding`` size.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bigdl.common.errors import UsageError, as_usage_error, user_stacklevel
from bigdl.nano.acceleration.method import BuildOptions, Method, Probe
from bigdl.nano.acceleration.network_cache import remove_entry
from bigdl.nano.acceleration.precision import BF16, FP16, FP32, Precision
from bigdl.nano.acceleration.structure import Structure, as_array, flatten

if TYPE_CHECKING:
    pass

PREPROCESSING = frozenset(
    ("mean_value", "mean_values", "scale", "scale_values", "layout", "reverse_input_channels")
)
"""Conversion keywords that change what the network computes: preprocessing of its input."""
# Allowed difference as a multiple of the change that weight noise causes in the original's result.
_TIMES_NOISE = 4.0
_NOISY_CALLS = 3
# Magnitudes below this are fp32 rounding errors and are not compared.
_NOTHING = 1e-6


class DisagreementError(UsageError):
    """Raised when the results of an accelerated model differ from the original's."""

    code = "accuracy"


class UnusableNetworkError(UsageError):
    """Raised when a runtime rejects the network that an exporter produced."""

    code = "model-unsupported"


class Difference(NamedTuple):
    """Description and size of a difference; the size is infinite unless rounding is the cause."""

    description: str
    size: float = math.inf


def build_and_check(
    method: Method,
    source: Any,
    options: BuildOptions,
    *,
    scored: bool = False,
    strict: bool = True,
) -> Any:  # a model of the framework of `source`
    """Build a method's accelerated model and check that it agrees with the original.

    A framework may have several exporters. If the result of one is wrong or cannot be compiled,
    the next one is tried.

    Parameters
    ----------
    method : Method
    source : ModelSource
    options : BuildOptions
    scored : bool
        True if a metric judges the accuracy: numbers may then differ by any amount.
    strict : bool
        False to skip the comparison.

    Raises
    ------
    DisagreementError
        If no exporter reproduces the original's results.
    UsageError
        If the model cannot be converted.
    """
    probes = source.probes(options) if strict else ()
    first: UsageError | None = None
    while True:
        source.exporter = source.conversion_warning = source.cache_key = None
        try:
            built = method.build(source, options)
            if strict:
                computed = _as_computed(method, options)
                check_agreement(source, built, computed, probes, scored=scored)
        except (DisagreementError, UnusableNetworkError) as error:
            if source.cache_key is not None and _is_cache_to_blame(error, method, options):
                remove_entry(source.cache_key)
                continue
            first = first or error
            if source.exporter is None or source.exporter in options.rejected_exporters:
                raise first from None
            options = replace(
                options, rejected_exporters=options.rejected_exporters | {source.exporter}
            )
        except UsageError:
            if first is not None:  # more helpful than why the last exporter failed
                raise first from None
            raise
        else:
            if source.conversion_warning is not None:
                warnings.warn(source.conversion_warning, stacklevel=user_stacklevel())
            network = getattr(built, "nano_network", None)
            if strict and network is not None and hasattr(network, "forbid_negative"):
                network.forbid_negative(source.refused_negatives())
            return built


def _is_cache_to_blame(error: UsageError, method: Method, options: BuildOptions) -> bool:
    """Return True if a wrong network in the cache may be the cause of an error.

    A lower precision of the runtime can be the cause, too, and converting again does not change it.
    """
    precision = _as_computed(method, options).precision
    unusable = isinstance(error, UnusableNetworkError)
    return unusable or precision == FP32 or precision.quantized


def _as_computed(method: Method, options: BuildOptions) -> Method:
    """Return the method, with the precision that OpenVINO's options set, if any."""
    if method.precision.quantized:
        return method
    hint = str((options.openvino_config or {}).get("INFERENCE_PRECISION_HINT", "")).lower()
    data_type = str(options.conversion.get("data_type", "")).lower()
    if "bf16" in hint:
        return replace(method, precision=BF16)
    half = "f16" in hint or data_type in ("fp16", "half", "f16")
    return replace(method, precision=FP16) if half and method.precision == FP32 else method


def check_agreement(
    source: Any,
    model: object,
    method: Method,
    probes: Iterable[Probe],
    *,
    scored: bool = False,
) -> None:
    """Raise DisagreementError if a model's results differ from the original's.

    Parameters
    ----------
    source : ModelSource
    model
        The accelerated model.
    method : Method
    probes : iterable of Probe
    scored : bool
        See :func:`build_and_check`.

    Raises
    ------
    DisagreementError
        Names the output that differs, the size of the difference and the input.
    """
    bound = method.precision.error_bound
    source.check_side_effects(model, method)
    probes = list(probes)
    scales = typical_magnitudes(probe.expected for probe in probes if probe.expected is not None)
    classes = _ArgmaxAgreement()
    for probe in probes:
        sentence = f"The model was converted by method {method.name!r} but does not run on"
        try:
            with as_usage_error(
                f"{sentence} {probe.description}", code="model-unsupported", method=method.name
            ):
                actual = source.run(model, probe.inputs)
        except UsageError:
            if probe.resized:  # a rejected size cannot give a wrong result
                continue
            raise
        if probe.expected is None:
            continue
        classes.count(probe.expected, actual)
        distance = difference(probe.expected, actual, bound, scales)
        if distance is None or (scored and distance.size < math.inf):
            continue
        other = source.alternative(probe.inputs)
        if other is not None and difference(other, actual, bound, scales) is None:
            source.conversion_warning = source.conversion_warning or (
                f"{type(source.model).__name__} by method {method.name!r} gives other values at "
                "padded positions than the fast path of PyTorch's transformer layers, which gives "
                "zeros there; all others agree"
            )
            continue
        if _is_explained(source, model, probe, actual, distance, method, scales):
            continue
        raise DisagreementError(
            f"{type(source.model).__name__} by method {method.name!r} gives another result than "
            f"the original for {probe.description}: {distance.description}"
            f"{_of_bound(distance, method.precision)}{classes.description}; "
            f"{_advice(method, probe)}"
        )


class _ArgmaxAgreement:
    """Counter of rows whose argmax equals the original's."""

    def __init__(self) -> None:
        self._rows = self._same = 0

    def count(self, expected: Any, actual: Any) -> None:
        pairs = zip(_parts(expected), _parts(actual), strict=False)
        for (_, one), (_, other) in pairs:
            rows = isinstance(one, np.ndarray) and one.ndim == 2 and one.shape[1] > 1
            if rows and _number_class(one) == "real" and np.shape(other) == one.shape and one.size:
                self._rows += len(one)
                self._same += int(np.sum(one.argmax(1) == other.argmax(1)))

    @property
    def description(self) -> str:
        if not self._rows:
            return ""
        return f"; the argmax of a row is the same in {self._same} of {self._rows} rows"


def typical_magnitudes(results: Iterable[Any]) -> dict[str, float]:
    """Return the typical magnitude of each output tensor: the median RMS over samples.

    Parameters
    ----------
    results : iterable
        Results as nested tensors, one per sample.

    Returns
    -------
    dict of str to float
        Root mean squares by path of the tensor.
    """
    sizes: dict[str, list[float]] = {}
    for result in results:
        for path, value in _parts(result):
            if (
                isinstance(value, np.ndarray)
                and value.size
                and _number_class(value) in ("real", "complex")
            ):
                wide = np.abs(value).astype(np.float64)
                finite = wide[np.isfinite(wide)]
                if finite.size:
                    sizes.setdefault(path, []).append(float(np.sqrt(np.mean(finite**2))))
    return {path: float(np.median(each)) for path, each in sizes.items()}


def _advice(method: Method, probe: Probe) -> str:
    fixed = method.accelerator in ("openvino", "onnxruntime") or "dynamic_axes" in method.arguments
    if probe.resized and fixed:
        return (
            "pass dynamic_axes=False if all inputs have the sample's sizes, or use another method"
        )
    return "use another method, or pass strict_check=False to accept the difference"


def _of_bound(distance: Difference, precision: Precision) -> str:
    at_most = f" (at most {100 * precision.error_bound:.2g} % in {precision})"
    return at_most if distance.size < math.inf else ""


def _is_explained(
    source: Any,
    model: Any,
    probe: Probe,
    actual: Any,
    distance: Difference,
    method: Method,
    scales: Mapping[str, float],
) -> bool:
    """Return True if randomness or rounding in the original model explains a difference."""
    again = source.original(probe.inputs)
    if again is None or difference(probe.expected, again, FP32.error_bound) is not None:
        if source.runs_code(model):
            return True
        repeated = source.run(model, probe.inputs)
        if difference(actual, repeated, FP32.error_bound) is not None:
            return distance.size < math.inf
        raise DisagreementError(
            f"{type(source.model).__name__} gives different results for one input, because of "
            f"random numbers, the time, or state kept between calls; method {method.name!r} would "
            "make constants of these; pass them to the model as inputs, or use precision='bf16' "
            "without an accelerator, which runs the original Python code"
        )
    for _ in range(_NOISY_CALLS):
        moved = source.original(probe.inputs, noise=method.precision.rounding)
        by_noise = None if moved is None else difference(probe.expected, moved, 0.0, scales)
        if by_noise is not None and distance.size <= _TIMES_NOISE * by_noise.size:
            return True
    return False


def difference(
    expected: Any, actual: Any, bound: float, scales: Mapping[str, float] | None = None
) -> Difference | None:
    """Return the largest difference between two nested results, or None if it is within a bound.

    Parameters
    ----------
    expected, actual
        Nested tensors; their floating-point dtypes may differ.
    bound : float
        The ``error_bound`` of a precision.
    scales : mapping of str to float, optional
        See :func:`typical_magnitudes`: lower limits of the reference magnitudes.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.nano.acceleration.agreement import difference
    >>> one = {"scores": np.array([3.0, 4.0]), "rows": 2}
    >>> difference(one, {"scores": np.array([3.0, 4.0]), "rows": 2}, 1e-4)
    >>> difference(one, {"scores": np.array([3.0, 4.5]), "rows": 2}, 1e-4)
    Difference(description="'scores' differs by 10 %", size=0.1)
    >>> difference(one, {"scores": np.array([3.0, 4.0]), "rows": 7}, 1e-4).description
    "'rows' is 7 instead of 2"
    """
    left, right = dict(_parts(expected)), dict(_parts(actual))
    if list(left) != list(right) and set(left) != set(right):
        odd = sorted(set(left) ^ set(right))
        return Difference(f"it holds {len(right)} values instead of {len(left)} ({odd[0]!r})")
    worst = None
    for path, one in left.items():
        each = _difference(one, right[path], (scales or {}).get(path, 0.0))
        if each is not None and each.size > bound and (worst is None or each.size > worst.size):
            named = f"{path!r} " if path else "it "
            worst = Difference(named + each.description, each.size)
    return worst


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    leaves, structure = flatten(value)
    return _labelled(structure, iter(leaves), "")


def _labelled(structure: Structure, leaves: Iterator, path: str) -> Iterator[tuple[str, Any]]:
    if structure.node_type == "tensor":
        yield path, np.asarray(as_array(next(leaves)))
    elif structure.node_type == "constant":
        yield path, structure.value
    elif not structure.children:
        yield path, structure.node_type
    for key, child in zip(structure.labels(), structure.children, strict=True):
        yield from _labelled(child, leaves, f"{path}.{key}" if path else str(key))


def _difference(one: Any, other: Any, scale: float = 0.0) -> Difference | None:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return _of_arrays(one, other, scale)
    if isinstance(one, np.ndarray) != isinstance(other, np.ndarray):
        return Difference(f"is a {type(other).__name__} instead of a {type(one).__name__}")
    if isinstance(one, float) and isinstance(other, float):
        distance = _of_arrays(np.asarray(one), np.asarray(other))
        return distance and Difference(f"is {other:.4g} instead of {one:.4g}", distance.size)
    plain = bool, int, str, type(None)
    if not isinstance(one, plain) or not isinstance(other, plain):
        return None if type(one) is type(other) else Difference(f"is a {type(other).__name__}")
    return None if one == other else Difference(f"is {other!r} instead of {one!r}")


def _of_arrays(one: np.ndarray, other: np.ndarray, scale: float = 0.0) -> Difference | None:
    if one.shape != other.shape:
        return Difference(f"has the shape {list(other.shape)} instead of {list(one.shape)}")
    if _number_class(one) != _number_class(other):
        return Difference(f"is of {other.dtype} instead of {one.dtype}")
    if not one.size:
        return None
    if _number_class(one) == "whole":
        share = float(np.mean(one != other))
        return Difference(f"differs in {100 * share:.2g} % of its elements", share)
    if _number_class(one) == "other":
        return None if np.array_equal(one, other) else Difference("differs")
    size = _relative_error(one, other, scale)
    if math.isinf(size):
        return Difference("has numbers that are not finite", size)
    return Difference(f"differs by {100 * size:.2g} %", size)


def _number_class(array: np.ndarray) -> str:
    classes = {"b": "whole", "i": "whole", "u": "whole", "f": "real", "c": "complex"}
    return classes.get(array.dtype.kind, "real" if array.dtype.name == "bfloat16" else "other")


def _relative_error(one: np.ndarray, other: np.ndarray, scale: float) -> float:
    wide = np.complex128 if one.dtype.kind == "c" else np.float64
    one, other = one.astype(wide), other.astype(wide)
    finite = np.isfinite(one)
    if not finite.all():  # NaN and infinity must be at the same positions in both
        odd, others = one[~finite], other[~finite]
        if not np.array_equal(odd, others, equal_nan=True):
            return math.inf
        one, other = one[finite], other[finite]
    if not np.isfinite(other).all():
        return math.inf
    size = float(np.linalg.norm(one.ravel()))
    error = float(np.linalg.norm((other - one).ravel()))
    return error / max(size, max(scale, _NOTHING) * math.sqrt(max(one.size, 1)))
