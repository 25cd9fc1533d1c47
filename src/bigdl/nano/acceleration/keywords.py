"""Keywords of ``trace``, ``quantize`` and ``build``: the method that they name, and its options.

:func:`traced_method` and :func:`quantized_method` find the method in a framework's registry. The
framework's :class:`Keywords` refuse what does not apply to it. Defaults stand in the signatures of
the framework's functions and nowhere else.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.method import Method, methods

_RUNTIMES = ("openvino", "onnxruntime")
# Keywords that choose the method, or are the model or its other names.
_SELECTION = {
    *("model", "precision", "accelerator", "approach", "method", "kwargs"),
    *("use_ipex", "channels_last", "calib_dataloader"),
}
# Accepted with every method; some of them change nothing and are kept for old programs.
_ALWAYS = {
    *("input_sample", "example_kwarg_inputs", "thread_num", "logging", "strict_check"),
    *("conf", "tuning_strategy", "q_config", "weights_prepack", "enable_onednn"),
}
_INT8 = {
    *("calib_data", "eval_func", "metric", "accuracy_criterion", "timeout", "max_trials"),
    "sample_size",
}
_BY_ACCELERATOR: dict[str | None, set[str]] = {
    "openvino": {"device", "openvino_config", "dynamic_axes", "output_tensors"},
    "onnxruntime": {
        *("onnxruntime_session_options", "simplification", "dynamic_axes", "output_tensors"),
    },
    "jit": {"jit_strict", "jit_method", "inplace"},
    None: {"inplace"},
}


def traced_method(framework: str, arguments: Mapping[str, Any]) -> Method:
    """Return the method that ``trace`` means.

    Parameters
    ----------
    framework : str
    arguments : mapping
        Those of ``trace``.

    Raises
    ------
    UsageError
        If no method is like this.
    """
    if "precision" in arguments["kwargs"]:
        raise UsageError(
            "Don't pass precision when call InferenceOptimizer.trace, otherwise you should "
            "call InferenceOptimizer.quantize(precision=...)",
            code="argument-conflict",
            argument="precision",
        )
    accelerator = arguments["accelerator"]
    _check_accelerator(framework, accelerator, arguments["device"])
    if accelerator is None and not any(map(arguments.get, ("use_ipex", "channels_last"))):
        names = " or ".join(map(repr, filter(None, _accelerators(framework))))
        flags = ", or use_ipex=True or channels_last=True" if "use_ipex" in arguments else ""
        raise UsageError(
            f"There is nothing to do without accelerator; pass accelerator={names}{flags}",
            code="argument-missing",
            argument="accelerator",
        )
    return _with_flags(_of_precision(framework, "fp32", accelerator), arguments)


def quantized_method(framework: str, arguments: Mapping[str, Any]) -> Method:
    """Return the method that ``quantize`` means.

    Parameters
    ----------
    framework : str
    arguments : mapping
        Those of ``quantize``.

    Raises
    ------
    UsageError
        If no method is like this.
    """
    precision, accelerator = arguments["precision"], arguments["accelerator"]
    device, approach = arguments["device"], arguments["approach"]
    if precision not in ("int8", "bf16", "fp16"):
        raise UsageError(
            f"Only support 'int8', 'bf16', 'fp16' now, no support for {precision}.",
            code="argument-value",
            argument="precision",
            allowed=["int8", "bf16", "fp16"],
        )
    if approach not in ("static", "dynamic"):
        raise UsageError(
            f"Approach should be 'static' or 'dynamic', {approach} is invalid.",
            code="argument-value",
            argument="approach",
            allowed=["static", "dynamic"],
        )
    if precision == "fp16" and accelerator is None:
        accelerator = "openvino"
    _check_accelerator(framework, accelerator, device)
    if precision == "fp16" and accelerator != "openvino":
        raise UsageError(
            f"fp16 is not supported on {accelerator} accelerator.",
            code="unsupported",
            argument="precision",
        )
    if precision == "bf16" and accelerator == "onnxruntime":
        raise UsageError(
            f"Accelerator {accelerator} is invalid for BF16.",
            code="unsupported",
            argument="precision",
        )
    if precision == "bf16" and device != "CPU":
        raise UsageError(
            f"Device {device} don't support bfloat16.", code="unsupported", argument="device"
        )
    candidates = _of_precision(framework, precision, accelerator)
    if precision == "int8":
        candidates = _of_variant(candidates, accelerator, approach, arguments["method"])
    return _with_flags(candidates, arguments)


def _of_precision(framework: str, precision: str, accelerator: str | None) -> list[Method]:
    return [
        method
        for method in methods(framework).values()
        if (method.precision, method.accelerator) == (precision, accelerator)
    ]


def _of_variant(
    candidates: list[Method], accelerator: str | None, approach: str, variant: str | None
) -> list[Method]:
    known = dict.fromkeys(each for method in candidates for each in method.variants)
    if variant not in known:
        names = ", ".join(repr(each) for each in known if each)
        raise UsageError(
            f"method {variant!r} is invalid for int8 with accelerator {accelerator!r}; leave "
            f"it out{f' or choose one of {names}' if names else ''}",
            code="argument-value",
            argument="method",
            allowed=list(known),
        )
    if approach == "static":
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


def _with_flags(candidates: list[Method], arguments: Mapping[str, Any]) -> Method:
    """Return the method with these flags; where there is none, one that will refuse them."""
    flags = bool(arguments.get("use_ipex")), bool(arguments.get("channels_last"))
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


class Keywords:
    """Keywords of a framework's ``trace``, ``quantize`` and ``build`` with their defaults.

    Parameters
    ----------
    *functions : callable
        ``trace`` and ``quantize``: their signatures hold the defaults.
    always : collection of str
        Further keywords that are accepted with every method.
    """

    def __init__(self, *functions: Callable[..., Any], always: Collection[str] = ()):
        parameters = [each for f in functions for each in inspect.signature(f).parameters.values()]
        self.defaults: dict[str, Any] = {
            each.name: each.default for each in parameters if each.name not in _SELECTION
        }
        self._always = _ALWAYS.union(always)

    def checked(self, method: Method, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return all keywords with their values, defaults included.

        Parameters
        ----------
        method : Method
        arguments : mapping
            Keywords of ``quantize``, and as ``kwargs`` those of the conversion.

        Raises
        ------
        UsageError
            If one does not apply to the method.
        """
        applies = self._always | _BY_ACCELERATOR[method.accelerator] | {*method.arguments}
        if method.precision == "int8":
            applies |= _INT8
        refused = {
            name: (arguments[name], default)
            for name, default in self.defaults.items()
            if name in arguments and name not in applies
        }
        for name, allowed in (("channels_last", method.channels_last), ("use_ipex", method.ipex)):
            if not allowed:
                refused[name] = (bool(arguments.get(name)), False)
        if method.accelerator not in _RUNTIMES and "openvino_config" not in method.arguments:
            refused |= {name: (value, None) for name, value in arguments["kwargs"].items()}
        refuse_inapplicable(method.name, refused)
        values = {name: arguments.get(name, default) for name, default in self.defaults.items()}
        check_threads(values["thread_num"])
        return values


def refuse_inapplicable(name: str, arguments: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse arguments that the method of this name has no use for.

    Parameters
    ----------
    name : str
    arguments : mapping of str to (value, default)
    """
    for argument, (value, default) in arguments.items():
        if value is not default and value != default:
            raise UsageError(
                f"{argument}={value!r} does not apply to method {name!r}; leave it out",
                code="argument-conflict",
                argument=argument,
                method=name,
            )


def check_threads(value: int | None) -> int | None:
    """Return a number of threads, or None."""
    return None if value is None else check_positive("thread_num", value)
