"""Acceleration methods and the registry of each framework.

A framework registers its methods with :func:`register_methods` when it is imported. Other packages
use :func:`register_method` or an entry point. :meth:`Method.missing` runs before every use; it
returns one sentence if the method cannot run on this machine. :meth:`Method.build` gets a
:class:`ModelSource` (the user's model and a sample of its input) and returns a new model with the
same signature. Neither changes the user's model.
"""

from __future__ import annotations

import abc
import importlib.util
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import UsageError
from bigdl.common.plugins import Registry
from bigdl.nano.acceleration.accuracy import AccuracyGoal, AccuracyOptions
from bigdl.nano.acceleration.precision import (
    BF16,
    FP32,
    INT4,
    INT8,
    PRECISIONS,
    Precision,
    WeightOptions,
)
from bigdl.nano.acceleration.structure import Structure

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


ORIGINAL = "original"
"""Name of the method that does not change the model."""


class Probe(NamedTuple):
    """A test input with the original model's result.

    Attributes
    ----------
    description : str
        Text for messages, e.g. ``"the sample"``.
    inputs : list
        Flat list of tensors.
    expected
        The original's result.
    resized : bool
        True if its sizes differ from the sample's.
    """

    description: str
    inputs: list
    expected: Any
    resized: bool = False


@dataclass(frozen=True)
class BuildOptions:
    """Options for building a model, named like keywords of ``build``, ``trace``, ``quantize``.

    Attributes
    ----------
    thread_num : int or None
        Number of threads of the runtime; None leaves it to the runtime.
    dynamic_axes : bool or dict
        True: the first dimension of every input may change. A dict names other dimensions.
    output_tensors : bool
        True to return tensors of the framework, False for ndarrays.
    inplace : bool
        True to convert the user's module in place instead of a copy.
    onnxruntime_session_options : onnxruntime.SessionOptions, optional
        Used unchanged, except for the thread counts if ``thread_num`` is given.
    simplification : bool
        True to simplify the exported ONNX graph.
    device : str
        OpenVINO device: ``"CPU"``, ``"GPU"``, ``"GPU.1"``, ``"NPU"``.
    openvino_config : mapping or None
        Properties for ``compile_model``; they override those of the method.
    jit_method : str or None
        ``"trace"``, ``"script"``, or None for the first that works.
    jit_strict : bool
        Passed to ``torch.jit.trace``.
    sample_size : int
        Largest number of calibration samples (rows, not batches) for int8.
    weight_options : WeightOptions or None
        Options of weight-only quantization.
    conversion : mapping
        Further keywords of ``torch.onnx.export`` or of the conversion to OpenVINO. The latter are
        ``mean_value``, ``scale_values``, ``layout``, ``input``, ``input_shape``, ``data_type``.
    goal : AccuracyGoal or None
        With a goal, layers that lose too much accuracy stay unquantized.
    rejected_exporters : frozenset of str
        Names of exporters whose result was wrong.
    share_weights : bool
        True if the converted network may share memory with the module: the method replaces all
        weights before it returns.

    Examples
    --------
    >>> from bigdl.nano.acceleration import BuildOptions
    >>> options = BuildOptions(thread_num=4, dynamic_axes=False)
    >>> options.thread_num, options.device, options.sample_size
    (4, 'CPU', 100)
    """

    thread_num: int | None = None
    dynamic_axes: bool | Mapping[str, Any] = True
    output_tensors: bool = True
    inplace: bool = False
    onnxruntime_session_options: Any = None
    simplification: bool = True
    device: str = "CPU"
    openvino_config: Mapping[str, Any] | None = None
    jit_method: str | None = None
    jit_strict: bool = True
    sample_size: int = 100
    weight_options: WeightOptions | None = None
    conversion: Mapping[str, Any] = field(default_factory=dict)
    goal: AccuracyGoal | None = None
    rejected_exporters: frozenset[str] = frozenset()
    share_weights: bool = False

    @classmethod
    def of(cls, keywords: Mapping[str, Any], **others: Any) -> Self:  # others: fields
        """Create BuildOptions from keywords and ignore unknown keywords."""
        return replace(options_from_keywords(cls, keywords), **others)


Options = TypeVar("Options", bound="DataclassInstance")


def options_from_keywords(options: type[Options], keywords: Mapping[str, Any]) -> Options:
    """Create an options dataclass from keywords and ignore unknown keywords."""
    names = {each.name for each in fields(options)}.intersection(keywords)
    return options(**{name: keywords[name] for name in names})


class RuntimeNetwork(Protocol):
    """A network compiled by a runtime; inputs and outputs are flat lists of arrays."""

    thread_num: int | None

    def infer(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run the network once and return its outputs; the caller owns the arrays."""


class ModelSource(Protocol):
    """A user's model with a sample of its input.

    Each framework implements this protocol. Networks of other runtimes take and return flat lists
    of arrays; the source maps the user's nested arguments and results to these lists.

    Attributes
    ----------
    model
        The user's model; methods do not change it.
    exporter : str or None
        The exporter used last, e.g. ``"trace"``; None if the framework has only one.
    conversion_warning : str or None
        Warning about the last conversion, shown if the model is accepted.
    cache_key : str or None
        Key of the last network that was taken from the cache on disk: the quantized one, or the
        converted one of a method that does not quantize. None if it was made here.
    """

    model: Any
    exporter: str | None
    conversion_warning: str | None
    cache_key: str | None

    @property
    def outputs(self) -> Structure:
        """Structure of the model's result."""

    def calibration_arrays(self, options: BuildOptions) -> Iterator[list[np.ndarray]]:
        """Yield a flat list of ndarrays for each batch of the calibration data."""

    def sample_arrays(self) -> list[np.ndarray]:
        """Return the sample as a flat list of ndarrays."""

    def probes(self, options: BuildOptions) -> Sequence[Probe]:
        """Return the inputs for comparing an accelerated model; the first is the sample."""

    def original(self, inputs: Any, noise: float = 0.0) -> object:
        """Run the original model on flat inputs, optionally with noise on its weights."""

    def run(self, model: Any, inputs: Any) -> object:
        """Run an accelerated model on flat inputs and return its results."""

    def alternative(self, inputs: Any) -> object:  # inputs: flat arrays
        """Return the result of an equally valid code path of the framework, or None."""

    def refused_negatives(self) -> list[int]:
        """Return the positions of integer inputs for which the model rejects negative values."""

    def check_side_effects(self, model: Any, method: Any) -> None:
        """Raise or warn if the model has side effects that the accelerated model lacks."""

    def runs_code(self, model: Any) -> bool:
        """Return True if an accelerated model runs the Python code of the original."""


SourceT = TypeVar("SourceT", bound=ModelSource, contravariant=True)
MethodT = TypeVar("MethodT", bound="Method")


@dataclass(frozen=True)
class Method(abc.ABC, Generic[SourceT]):
    """Acceleration method for the model sources of one framework or of all frameworks.

    Attributes
    ----------
    name : str
        Public name, e.g. ``"openvino_int8"``.
    precision : Precision
        Entry of :data:`~bigdl.nano.acceleration.PRECISIONS`, or its name.
    accelerator : str or None
        The runtime as ``trace`` and ``quantize`` name it: ``"openvino"``, ``"onnxruntime"``,
        ``"jit"``, or None for the framework itself.
    option : str
        Description that ``get_best_model`` returns, e.g. ``"openvino + int8"``.
    default : bool
        True if ``optimize`` tries it by default.
    channels_last : bool
        True if images are stored with channels last.
    ipex : bool
        True if the method replaces one of BigDL 2.x that used Intel Extension for PyTorch.
    extended : bool
        True if it is new since BigDL 2.x; only ``search_mode="extended"`` tries it.

    Examples
    --------
    >>> from bigdl.nano.pytorch import InferenceOptimizer
    >>> method = InferenceOptimizer.ALL_INFERENCE_ACCELERATION_METHOD["openvino_int8"]
    >>> method.precision, method.accelerator, method.option, method.default
    ('int8', 'openvino', 'openvino + int8', True)
    >>> print(method.missing())  # why it cannot be used here
    None
    """

    name: str
    precision: Precision = FP32
    accelerator: str | None = None
    option: str = ""
    default: bool = False
    channels_last: bool = False
    ipex: bool = False
    extended: bool = False

    variants: tuple[str | None, ...] = (None,)
    """Values of ``quantize``'s argument `method` that select it among int8 methods."""
    dynamic: tuple[str | None, ...] = ()
    """Values of ``quantize``'s argument `method` that select it if ``approach="dynamic"``."""
    packages: tuple[str, ...] = ()
    """Modules that must be importable."""
    extra: str = "nano"
    """Extra of the distribution that installs `packages`."""
    arguments: tuple[str, ...] = ()
    """Further keywords of ``quantize`` that apply, besides those of accelerator and precision."""

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, PRECISIONS)
        object.__setattr__(self, "precision", PRECISIONS[self.precision])

    def get_precision(self) -> Precision:
        """Return the precision of the method."""
        return self.precision

    def get_accelerator(self) -> str | None:
        """Return the name of the method's runtime; None if the framework itself runs the model."""
        return self.accelerator

    def missing(self) -> str | None:
        """Return the reason why this method cannot run on this machine, or None.

        Returns
        -------
        str or None
            One sentence; None if the method can run.
        """
        for package in self.packages:
            if not is_installed(package):
                return f"{package} is not installed; run: pip install 'bigdl[{self.extra}]'"
        return None

    def require(self) -> None:
        """Raise an error if this method cannot run on this machine.

        Raises
        ------
        UsageError
            With the sentence of :meth:`missing`.
        """
        reason = self.missing()
        if reason:
            raise UsageError(
                f"Method {self.name!r} cannot be used: {reason}",
                code="package-missing",
                method=self.name,
            )

    @abc.abstractmethod
    def build(self, source: SourceT, options: BuildOptions) -> object:
        """Build the accelerated model.

        Parameters
        ----------
        source : ModelSource
            The user's model and a sample of its input.
        options : BuildOptions
            The user's options.

        Returns
        -------
        An accelerated model of the source's framework.

        Raises
        ------
        UsageError
            If the model, an option or the data does not fit the method.
        """


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ModuleNotFoundError, ValueError):  # no parent package, or a stub in sys.modules
        return False


def _checked(name: str, method: object) -> Method:
    framework, _, method_name = name.partition(".")
    if not isinstance(method, Method) or framework not in FRAMEWORKS or method.name != method_name:
        raise UsageError(
            f"An acceleration method should be an instance of a subclass of Method, registered for "
            f"{' or '.join(map(repr, FRAMEWORKS))} under its name, but got {method!r} for "
            f"{name!r}",
            code="argument-type",
            argument="method",
        )
    return method


FRAMEWORKS = ("torch", "keras")
REGISTRY = Registry[Method]("bigdl.methods", "an acceleration method", _checked)
"""All methods by ``<framework>.<name>``, including those of other packages."""


class MethodTable(Mapping[str, Method]):
    """Read-only table of a framework's methods, in the order in which ``optimize`` tries them.

    Methods of the extended search come last. Methods registered later appear in the table.

    Parameters
    ----------
    framework : str
    keep : callable, optional
        Returns True for methods that belong to the table; all by default.
    """

    def __init__(self, framework: str, keep: Callable[[Method], bool] = lambda method: True):
        self._prefix, self._keep = f"{framework}.", keep

    def __getitem__(self, name: str) -> Method:
        method = REGISTRY.get(f"{self._prefix}{name}")
        if method is None or not self._keep(method):
            raise KeyError(name)
        return method

    def __iter__(self) -> Iterator[str]:
        every = sorted(REGISTRY.loaded(self._prefix).values(), key=attrgetter("extended"))
        return (method.name for method in every if self._keep(method))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def register_methods(framework: str, listed: Iterable[Method]) -> MethodTable:
    """Register several methods of a framework; return the table of all its methods."""
    for method in listed:
        register_method(method, framework)
    return MethodTable(framework)


def register_method(method: MethodT, framework: str = "torch") -> MethodT:
    """Register an acceleration method for ``build``, ``optimize`` and ``trace``.

    A package that the program does not import can register its Method with an entry point of the
    group ``bigdl.methods`` named ``<framework>.<name>``, e.g. ``torch.half_precision``.

    Parameters
    ----------
    method : Method
    framework : {"torch", "keras"}

    Returns
    -------
    Method
        The registered method.

    Raises
    ------
    UsageError
        If the name is taken, or the object is not a Method.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> import torch
    >>> from bigdl.nano.acceleration import Method, register_method
    >>> from bigdl.nano.pytorch import InferenceOptimizer
    >>> @dataclass(frozen=True)
    ... class Frozen(Method):
    ...     def build(self, source, options):
    ...         return torch.jit.freeze(torch.jit.script(source.model.eval()))
    >>> method = register_method(Frozen("frozen", extended=True))
    >>> InferenceOptimizer.build(torch.nn.Linear(2, 1), "frozen")(torch.ones(3, 2)).shape
    torch.Size([3, 1])
    """
    REGISTRY.register(f"{framework}.{getattr(method, 'name', '')}", method)
    return method


def methods(framework: str = "torch") -> Mapping[str, Method]:
    """Return a framework's methods in the order in which ``optimize`` tries them.

    Parameters
    ----------
    framework : str
        ``"torch"`` or ``"keras"``; its ``InferenceOptimizer`` must have been imported.

    Returns
    -------
    mapping of str to Method
        Read-only.

    Raises
    ------
    UsageError
        If the framework has not registered any methods.

    Examples
    --------
    >>> from bigdl.nano.acceleration import methods
    >>> from bigdl.nano.pytorch import InferenceOptimizer
    >>> [name for name, method in methods("torch").items() if method.precision == "fp32"]
    ['original', ...'openvino_fp32', ...'onnxruntime_fp32', ...]
    """
    table = MethodTable(framework)
    if "original" not in table:
        raise UsageError(
            f"No methods are registered for {framework!r}; import InferenceOptimizer from "
            "bigdl.nano.pytorch or bigdl.nano.tf.keras first",
            code="name-unknown",
        )
    return table


def find_method(name: str, framework: str = "torch") -> Method:
    """Return a framework's method by its name.

    Raises
    ------
    UsageError
        If no method has this name.

    Examples
    --------
    >>> from bigdl.nano.acceleration import find_method
    >>> from bigdl.nano.pytorch import InferenceOptimizer
    >>> find_method("openvino_bf16").precision
    'bf16'
    >>> find_method("openvino_int4")
    Traceback (most recent call last):
        ...
    bigdl.common.errors.UsageError: There is no method 'openvino_int4'; choose one of original, ...
    """
    known = methods(framework)
    if name not in known:
        raise UsageError(
            f"There is no method {name!r}; choose one of {', '.join(known)}",
            code="name-unknown",
            method=name,
            allowed=list(known),
        )
    return known[name]


_RUNTIMES = ("openvino", "onnxruntime")
# Options that users do not set.
_INTERNAL = {"conversion", "goal", "rejected_exporters"}
_ALWAYS = {"input_sample", "example_kwarg_inputs", "thread_num"}
_QUANTIZED = {each.name for each in fields(AccuracyOptions)} | {"calib_data", "sample_size"}
_BY_ACCELERATOR: dict[str | None, set[str]] = {
    "openvino": {"device", "openvino_config", "dynamic_axes", "output_tensors"},
    "onnxruntime": {
        *("onnxruntime_session_options", "simplification", "dynamic_axes", "output_tensors"),
    },
    "jit": {"jit_strict", "jit_method", "inplace"},
    None: {"inplace"},
}


@dataclass(frozen=True)
class MethodChoice:
    """Arguments of ``trace`` and ``quantize`` that select the method.

    Attributes
    ----------
    precision, accelerator, approach
        See ``quantize``.
    variant : str or None
        The argument `method` of ``quantize``.
    use_ipex, channels_last : bool
        See ``trace`` of PyTorch.
    """

    precision: str = FP32
    accelerator: str | None = None
    approach: str = "static"
    variant: str | None = None
    use_ipex: bool = False
    channels_last: bool = False


def select_trace_method(framework: str, choice: MethodChoice, options: BuildOptions) -> Method:
    """Select the method for the arguments of ``trace``.

    Raises
    ------
    UsageError
        If no method matches the arguments.
    """
    if "precision" in options.conversion:
        raise UsageError(
            "Don't pass precision when call InferenceOptimizer.trace, otherwise you should "
            "call InferenceOptimizer.quantize(precision=...)",
            code="argument-conflict",
            argument="precision",
        )
    _check_accelerator(framework, choice.accelerator, options.device)
    if choice.accelerator is None and not (choice.use_ipex or choice.channels_last):
        known = methods(framework).values()
        names = " or ".join(map(repr, filter(None, _accelerators(framework))))
        has_flags = any(method.ipex for method in known)
        flags = ", or use_ipex=True or channels_last=True" if has_flags else ""
        raise UsageError(
            f"There is nothing to do without accelerator; pass accelerator={names}{flags}",
            code="argument-missing",
            argument="accelerator",
        )
    return _with_flags(_of_precision(framework, FP32, choice.accelerator), choice)


def select_quantize_method(framework: str, choice: MethodChoice, options: BuildOptions) -> Method:
    """Select the method for the arguments of ``quantize``.

    Raises
    ------
    UsageError
        If no method matches the arguments.
    """
    precision, accelerator, device = choice.precision, choice.accelerator, options.device
    lower = [each for each in PRECISIONS.values() if each != FP32]
    if precision not in lower:
        raise UsageError(
            f"Only support {', '.join(map(repr, lower))} now, no support for {precision}.",
            code="argument-value",
            argument="precision",
            allowed=lower,
        )
    if choice.approach not in ("static", "dynamic"):
        raise UsageError(
            f"Approach should be 'static' or 'dynamic', {choice.approach} is invalid.",
            code="argument-value",
            argument="approach",
            allowed=["static", "dynamic"],
        )
    if accelerator is None and not _of_precision(framework, precision, None):
        accelerator = "openvino"
    _check_accelerator(framework, accelerator, device)
    candidates = _of_precision(framework, precision, accelerator)
    if not candidates:
        bf16 = f"Accelerator {accelerator} is invalid for BF16."
        other = f"{precision} is not supported on {accelerator} accelerator."
        raise UsageError(
            bf16 if precision == BF16 else other, code="unsupported", argument="precision"
        )
    if precision == BF16 and device != "CPU":
        raise UsageError(
            f"Device {device} don't support bfloat16.", code="unsupported", argument="device"
        )
    if PRECISIONS[precision].quantized:
        candidates = _of_variant(framework, accelerator, choice)
    return _with_flags(candidates, choice)


def _of_precision(framework: str, precision: str, accelerator: str | None) -> list[Method]:
    return [
        method
        for method in methods(framework).values()
        if (method.precision, method.accelerator) == (precision, accelerator)
    ]


def _of_variant(framework: str, accelerator: str | None, choice: MethodChoice) -> list[Method]:
    precision, variant = choice.precision, choice.variant
    candidates = _of_precision(framework, precision, accelerator)
    if precision == INT8 and variant == "int4_weight_only":  # spelling of earlier versions
        candidates += _of_precision(framework, INT4, accelerator)
    known = dict.fromkeys(each for method in candidates for each in method.variants)
    if variant not in known:
        names = ", ".join(repr(each) for each in known if each)
        raise UsageError(
            f"method {variant!r} is invalid for {precision} with accelerator {accelerator!r}; "
            f"leave it out{f' or choose one of {names}' if names else ''}",
            code="argument-value",
            argument="method",
            allowed=list(known),
        )
    if choice.approach == "static":
        return [method for method in candidates if variant in method.variants]
    if not any(method.dynamic for method in candidates):
        raise UsageError(
            f"Accelerator {accelerator!r} quantizes with approach 'static' only; the "
            "dynamic approach exists for accelerator None and 'onnxruntime'",
            code="unsupported",
            argument="approach",
        )
    chosen = [method for method in candidates if variant in method.dynamic]
    if not chosen:
        raise UsageError(
            f"method {variant!r} cannot be combined with approach 'dynamic'; leave it out",
            code="argument-conflict",
            argument="method",
        )
    return chosen


def _with_flags(candidates: list[Method], choice: MethodChoice) -> Method:
    """Return the candidate with the given `use_ipex` and `channels_last`, or else the first one."""
    flags = bool(choice.use_ipex), bool(choice.channels_last)
    fitting = (each for each in candidates if (each.ipex, each.channels_last) == flags)
    return next(fitting, candidates[0])


def _accelerators(framework: str) -> dict[str | None, None]:
    return dict.fromkeys(method.accelerator for method in methods(framework).values())


def _check_accelerator(framework: str, accelerator: str | None, device: str) -> None:
    if accelerator not in _accelerators(framework):
        raise UsageError(
            f"Accelerator {accelerator} is invalid.", code="argument-value", argument="accelerator"
        )
    name = str(device).partition(".")[0]
    if name not in ("CPU", "GPU", "VPUX", "NPU"):
        raise UsageError(
            f"Now we only support CPU, GPU and VPUX, not {device}",
            code="argument-value",
            argument="device",
        )
    if name != "CPU" and accelerator != "openvino":
        raise UsageError(
            f"Device {device} is available with accelerator 'openvino' only, not with "
            f"{accelerator!r}; pass accelerator='openvino' or device='CPU'",
            code="argument-conflict",
            argument="device",
        )


def check_applicable(
    method: Method,
    choice: MethodChoice,
    options: BuildOptions,
    *others: DataclassInstance,
    always: Collection[str] = (),
) -> None:
    """Raise UsageError for options with non-default values that a method does not support.

    Parameters
    ----------
    method : Method
    choice : MethodChoice
    options : BuildOptions
    *others
        ``AccuracyOptions``, and the framework's dataclass of data arguments.
    always : collection of str
        Option names that the framework accepts with every method.
    """
    applies = _ALWAYS.union(always, _BY_ACCELERATOR[method.accelerator], method.arguments)
    if method.precision.quantized:
        applies |= _QUANTIZED
    refused = {
        field.name: (getattr(each, field.name), field.default)
        for each in (options, *others)
        for field in fields(each)
        if field.name not in applies | _INTERNAL
    }
    for name, allowed in (("channels_last", method.channels_last), ("use_ipex", method.ipex)):
        if not allowed:
            refused[name] = (bool(getattr(choice, name)), False)
    if method.accelerator not in _RUNTIMES and "openvino_config" not in method.arguments:
        refused |= {name: (value, None) for name, value in options.conversion.items()}
    refuse_inapplicable(method.name, refused)


def refuse_inapplicable(name: str, arguments: Mapping[str, tuple[object, object]]) -> None:
    """Raise UsageError for arguments with non-default values that a method does not support.

    Parameters
    ----------
    name : str
    arguments : mapping of str to (value, default)
    """
    for argument, (value, default) in arguments.items():
        if value is not default and (default is None or value != default):
            raise UsageError(
                f"{argument}={value!r} does not apply to method {name!r}; leave it out",
                code="argument-conflict",
                argument=argument,
                method=name,
            )


def check_threads(value: int | None) -> int | None:
    """Check that a number of threads is valid or None, and return it."""
    return None if value is None else check_positive("thread_num", value)
