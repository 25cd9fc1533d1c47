"""Acceleration methods and the registry of each framework.

A framework registers its methods with :func:`register_methods` when it is imported. Other packages
use :func:`register_method` or an entry point. :meth:`Method.missing` runs before every use; it
returns one sentence if the method cannot run on this machine. :meth:`Method.build` gets a
:class:`ModelSource` (the user's model and a sample of its input) and returns a new model with the
same signature. Neither changes the user's model.
"""

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
"""Name of the method that leaves the model as it is."""


class Probe(NamedTuple):
    """One input, and what the original gives for it.

    Attributes
    ----------
    description : str
        What it is, e.g. ``"the sample"``.
    inputs : list
        Flat list of tensors.
    expected
        The original's result.
    resized : bool
        True if it has other sizes than the sample.
    """

    description: str
    inputs: list
    expected: Any
    resized: bool = False


@dataclass(frozen=True)
class BuildOptions:
    """Options of a method, named as the keywords of ``trace``, ``quantize`` and ``build``.

    Attributes
    ----------
    thread_num : int or None
        Number of threads of the runtime; None leaves it to the runtime.
    dynamic_axes : bool or dict
        True: the first dimension of every input may change. A dict names other ones.
    output_tensors : bool
        Tensors of the framework, or ndarrays.
    inplace : bool
        True to convert the user's module itself instead of a copy.
    onnxruntime_session_options : onnxruntime.SessionOptions, optional
        Taken as they are, but for the thread counts where ``thread_num`` is given.
    simplification : bool
        True to simplify the exported ONNX graph.
    device : str
        Of OpenVINO: ``"CPU"``, ``"GPU"``, ``"GPU.1"``, ``"NPU"``.
    openvino_config : mapping or None
        Properties for ``compile_model``; they win over the method's own.
    jit_method : str or None
        ``"trace"``, ``"script"``, or None for the first that works.
    jit_strict : bool
        Passed to ``torch.jit.trace``.
    sample_size : int
        Number of samples (rows, not batches) that int8 is calibrated with at most.
    weight_options : WeightOptions or None
        How weights are quantized by the methods that leave activations as they are.
    conversion : mapping
        Further keywords: of ``torch.onnx.export``, or of the conversion to OpenVINO, which are
        ``mean_value``, ``scale_values``, ``layout``, ``input``, ``input_shape``, ``data_type``.
    goal : AccuracyGoal or None
        With a goal, layers that cost too much accuracy are left unquantized.
    rejected_exporters : frozenset of str
        Ways of conversion whose result was wrong.

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

    @classmethod
    def of(cls, keywords: Mapping[str, Any], **others: Any) -> Self:
        """Return the options that are among some keywords."""
        return replace(options_from_keywords(cls, keywords), **others)


Options = TypeVar("Options", bound="DataclassInstance")


def options_from_keywords(options: type[Options], keywords: Mapping[str, Any]) -> Options:
    """Return the options of a dataclass that are among some keywords."""
    names = {each.name for each in fields(options)}.intersection(keywords)
    return options(**{name: keywords[name] for name in names})


class RuntimeNetwork(Protocol):
    """A model of a runtime, which takes and returns flat lists of arrays."""

    thread_num: int | None

    def infer(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run it once; the results are the caller's."""


class ModelSource(Protocol):
    """A user's model and a sample of its input.

    Each framework has one class of this kind. A network of another runtime takes and returns flat
    lists of arrays; the source knows how the user's nested arguments and results map to these.

    Attributes
    ----------
    model
        The user's model, which methods do not change.
    exporter : str or None
        How it was converted last, where a framework has several ways.
    conversion_warning : str or None
        What the last conversion may have lost, to be told if the model is not refused.
    """

    model: Any
    exporter: str | None
    conversion_warning: str | None

    @property
    def outputs(self) -> Structure:
        """The structure of the model's result."""

    def calibration_arrays(self, options: BuildOptions) -> Iterator[list[np.ndarray]]:
        """Flat lists of ndarrays, one for each batch of the calibration data."""

    def sample_arrays(self) -> list[np.ndarray]:
        """The sample as a flat list of ndarrays."""

    def probes(self, options: BuildOptions) -> Sequence[Probe]:
        """Inputs on which an accelerated model is compared; the first is the sample."""

    def original(self, inputs: Any, noise: float = 0.0) -> Any:
        """Return the model's results for flat inputs, if it takes them; noise is on its numbers."""

    def run(self, model: Any, inputs: Any) -> Any:
        """Return an accelerated model's results for flat inputs."""

    def alternative(self, inputs: Any) -> Any:
        """Return what the model gives by another way of its framework, which is as right; else
        None."""

    def refused_negatives(self) -> list[int]:
        """Return positions of integer inputs in which the model takes no negative number."""

    def check_side_effects(self, model: Any, method: Any) -> None:
        """Refuse, or warn of, what calls of the model change and those of an accelerated one do
        not."""

    def runs_code(self, model: Any) -> bool:
        """True if an accelerated model runs the Python code of the original."""


SourceT = TypeVar("SourceT", bound=ModelSource, contravariant=True)
MethodT = TypeVar("MethodT", bound="Method")


@dataclass(frozen=True)
class Method(abc.ABC, Generic[SourceT]):
    """One acceleration method for the sources of a framework, or of every one.

    Attributes
    ----------
    name : str
        Its public name, e.g. ``"openvino_int8"``.
    precision : Precision
        Of the table :data:`~bigdl.nano.acceleration.PRECISIONS`; its name is taken, too.
    accelerator : str or None
        The runtime as ``trace`` and ``quantize`` name it: ``"openvino"``, ``"onnxruntime"``,
        ``"jit"``, or None for the framework itself.
    option : str
        What ``get_best_model`` says of it, e.g. ``"openvino + int8"``.
    default : bool
        True if ``optimize`` tries it unasked.
    channels_last : bool
        True if images are laid out with their channels last.
    ipex : bool
        True if the method stands for one that used Intel's extension of PyTorch.
    extended : bool
        True if BigDL 2.x did not have it, so that only ``search_mode="extended"`` tries it.

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
    """Values of the argument `method` of ``quantize`` that mean it, among methods of int8."""
    dynamic: tuple[str | None, ...] = ()
    """The same with ``approach="dynamic"``."""
    packages: tuple[str, ...] = ()
    """Modules that have to be importable."""
    extra: str = "nano"
    """The extra of the distribution that brings them."""
    arguments: tuple[str, ...] = ()
    """Keywords of ``quantize`` that apply to it beyond those of its accelerator and precision."""

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, PRECISIONS)
        object.__setattr__(self, "precision", PRECISIONS[self.precision])

    def get_precision(self) -> Precision:
        """Return the precision."""
        return self.precision

    def get_accelerator(self) -> str | None:
        """Return the runtime."""
        return self.accelerator

    def missing(self) -> str | None:
        """Return why this method is not possible on this machine.

        Returns
        -------
        str or None
            One sentence; None if it is possible.
        """
        for package in self.packages:
            if not is_installed(package):
                return f"{package} is not installed; run: pip install 'bigdl[{self.extra}]'"
        return None

    def require(self) -> None:
        """Raise an error where the method is not possible.

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
    def build(self, source: SourceT, options: BuildOptions) -> Any:
        """Make the accelerated model.

        Parameters
        ----------
        source : ModelSource
            The user's model and a sample of its input.
        options : BuildOptions
            What the user asked for.

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
    framework, _, own = name.partition(".")
    if framework not in FRAMEWORKS or not isinstance(method, Method) or method.name != own:
        raise UsageError(
            f"An acceleration method should be an object of a class over Method, registered for "
            f"{' or '.join(map(repr, FRAMEWORKS))} under its own name, but got {method!r} for "
            f"{name!r}",
            code="argument-type",
            argument="method",
        )
    return method


FRAMEWORKS = ("torch", "keras")
REGISTRY = Registry[Method]("bigdl.methods", "an acceleration method", _checked)
"""All methods, also those that other packages offer, as ``<framework>.<name>``."""


class MethodTable(Mapping[str, Method]):
    """The methods of a framework by name, in the order in which ``optimize`` tries them.

    Those that only an extended search tries come last. What is registered later is in it.

    Parameters
    ----------
    framework : str
    keep : callable, optional
        Tells which methods are in the table; default all.
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
    """Register several methods of a framework, and return the table of all."""
    for method in listed:
        register_method(method, framework)
    return MethodTable(framework)


def register_method(method: MethodT, framework: str = "torch") -> MethodT:
    """Register an acceleration method, so that ``build``, ``optimize`` and ``trace`` find it.

    A package that a program need not import offers its Method by an entry point of the group
    ``bigdl.methods``, under ``<framework>.<name>``, such as ``torch.half_precision``.

    Parameters
    ----------
    method : Method
    framework : {"torch", "keras"}

    Returns
    -------
    Method
        The same.

    Raises
    ------
    UsageError
        If another method has the name, or it is no Method.

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
    """Return the methods of a framework in the order in which ``optimize`` tries them.

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
        If the framework has registered none.

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
    """Return the method of this name.

    Raises
    ------
    UsageError
        If there is none.

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
# Not of the user.
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
    """Arguments of ``trace`` and ``quantize`` that choose the method.

    Attributes
    ----------
    precision, accelerator, approach
        As of ``quantize``.
    variant : str or None
        Its argument `method`.
    use_ipex, channels_last : bool
        As of ``trace`` of PyTorch.
    """

    precision: str = FP32
    accelerator: str | None = None
    approach: str = "static"
    variant: str | None = None
    use_ipex: bool = False
    channels_last: bool = False


def select_trace_method(framework: str, choice: MethodChoice, options: BuildOptions) -> Method:
    """Return the method that ``trace`` means.

    Raises
    ------
    UsageError
        If no method is like this.
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
    """Return the method that ``quantize`` means.

    Raises
    ------
    UsageError
        If no method is like this.
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
    if precision == INT8 and variant == "int4_weight_only":  # before int4 was a precision
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
            "dynamic approach is there for accelerator None and 'onnxruntime'",
            code="unsupported",
            argument="approach",
        )
    chosen = [method for method in candidates if variant in method.dynamic]
    if not chosen:
        raise UsageError(
            f"method {variant!r} does not go with approach 'dynamic'; leave it out",
            code="argument-conflict",
            argument="method",
        )
    return chosen


def _with_flags(candidates: list[Method], choice: MethodChoice) -> Method:
    """Return the method with these flags; where there is none, one that will refuse them."""
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
            f"Device {device} is there with accelerator 'openvino' only, not with "
            f"{accelerator!r}; pass accelerator='openvino' or device='CPU'",
            code="argument-conflict",
            argument="device",
        )


def check_applicable(
    method: Method,
    choice: MethodChoice,
    options: BuildOptions,
    *others: "DataclassInstance",
    always: Collection[str] = (),
) -> None:
    """Refuse options that are not the default and that a method has no use for.

    Parameters
    ----------
    method : Method
    choice : MethodChoice
    options : BuildOptions
    *others
        ``AccuracyOptions``, and a dataclass of the framework's data.
    always : collection of str
        Names that the framework accepts with every method.
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
    """Refuse arguments that the method of this name has no use for.

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
    """Return a number of threads, or None."""
    return None if value is None else check_positive("thread_num", value)
