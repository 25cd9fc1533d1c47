"""Keywords of ``trace``, ``quantize`` and ``build``: the method that they name, and its options.

Each framework has one :class:`MethodTable`, which finds the method, and one :class:`Keywords`,
which refuses what does not apply to it and sorts the rest into
:class:`~bigdl.nano.acceleration.options.BuildOptions`. Defaults stand in the signatures of the
framework's functions and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.method import Method
from bigdl.nano.acceleration.options import (
    AccuracyGoal,
    BuildOptions,
    Calibration,
    JitOptions,
    OnnxOptions,
    OpenVINOOptions,
)

__all__ = ["Keywords", "MethodTable", "check_threads", "options_of", "refuse_inapplicable"]

_INT8_METHODS: dict[str | None, dict[str | None, str]] = {
    "openvino": {
        None: "openvino_int8",
        "bf16": "openvino_int8_bf16",
        "weight_only": "openvino_int8_weight_only",
    },
    "onnxruntime": {
        None: "onnxruntime_int8_qlinear",
        "qlinear": "onnxruntime_int8_qlinear",
        "integer": "onnxruntime_int8_integer",
        "nncf": "onnxruntime_int8_nncf",
    },
}
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
    *("sample_size", "smooth"),
}
_BY_ACCELERATOR: dict[str | None, set[str]] = {
    "openvino": {"device", "openvino_config", "streams", "dynamic_axes", "output_tensors"},
    "onnxruntime": {
        *("onnxruntime_session_options", "simplification", "dynamic_axes", "output_tensors"),
    },
    "jit": {"jit_strict", "jit_method", "inplace"},
    None: {"inplace"},
}


@dataclass(frozen=True)
class MethodTable:
    """Names of a framework's methods by the arguments of ``trace`` and ``quantize``.

    Attributes
    ----------
    accelerators : tuple of str or None
    int8 : mapping
        For each accelerator but OpenVINO and ONNX Runtime, the methods by ``method``.
    dynamic : mapping of str or None to str
        Methods of ``approach="dynamic"`` by accelerator.
    """

    accelerators: tuple[str | None, ...]
    int8: Mapping[str | None, Mapping[str | None, str]]
    dynamic: Mapping[str | None, str] = field(default_factory=dict)

    def traced(
        self,
        accelerator: str | None,
        device: str,
        keywords: Collection[str],
        *,
        use_ipex: bool = False,
        channels_last: bool = False,
    ) -> str:
        """Return the name of the method that ``trace`` means.

        Raises
        ------
        UsageError
            If no method is like this.
        """
        if "precision" in keywords:
            raise UsageError(
                "Don't pass precision when call InferenceOptimizer.trace, otherwise you should "
                "call InferenceOptimizer.quantize(precision=...)"
            )
        self._check(accelerator, device)
        if accelerator in _RUNTIMES:
            return f"{accelerator}_fp32"
        if accelerator is None and not (use_ipex or channels_last):
            flags = ", or use_ipex=True or channels_last=True" if "jit" in self.accelerators else ""
            names = " or ".join(repr(name) for name in self.accelerators if name)
            raise UsageError(
                f"There is nothing to do without accelerator; pass accelerator={names}{flags}"
            )
        return _with_flags("jit_fp32" if accelerator else "fp32", use_ipex, channels_last)

    def quantized(
        self,
        precision: str,
        accelerator: str | None,
        device: str,
        approach: str,
        method: str | None,
        *,
        use_ipex: bool = False,
        channels_last: bool = False,
    ) -> str:
        """Return the name of the method that ``quantize`` means.

        Raises
        ------
        UsageError
            If no method is like this.
        """
        if precision not in ("int8", "bf16", "fp16"):
            raise UsageError(
                f"Only support 'int8', 'bf16', 'fp16' now, no support for {precision}."
            )
        self._check_approach(approach)
        if precision == "fp16" and accelerator is None:
            accelerator = "openvino"
        self._check(accelerator, device)
        if precision == "fp16":
            if accelerator != "openvino":
                raise UsageError(f"fp16 is not supported on {accelerator} accelerator.")
            return "openvino_fp16"
        if precision == "int8":
            return self._int8(accelerator, approach, method, use_ipex, channels_last)
        if accelerator == "onnxruntime":
            raise UsageError(f"Accelerator {accelerator} is invalid for BF16.")
        if accelerator == "openvino":
            if device != "CPU":
                raise UsageError(f"Device {device} don't support bfloat16.")
            return "openvino_bf16"
        return _with_flags("jit_bf16" if accelerator else "bf16", use_ipex, channels_last)

    def _int8(
        self,
        accelerator: str | None,
        approach: str,
        method: str | None,
        use_ipex: bool,
        channels_last: bool,
    ) -> str:
        known = {**_INT8_METHODS, **self.int8}[accelerator]
        if method not in known:
            names = ", ".join(repr(name) for name in known if name)
            raise UsageError(
                f"method {method!r} is invalid for int8 with accelerator {accelerator!r}; leave "
                f"it out{f' or choose one of {names}' if names else ''}"
            )
        if approach == "dynamic":
            if accelerator not in self.dynamic:
                raise UsageError(
                    f"Accelerator {accelerator!r} quantizes with approach 'static' only; the "
                    "dynamic approach is there for accelerator None and 'onnxruntime'"
                )
            if method not in (None, "integer", "fx", "eager"):
                raise UsageError(
                    f"method {method!r} does not go with approach 'dynamic'; leave it out"
                )
            return self.dynamic[accelerator]
        if use_ipex and accelerator is None and method in (None, "ipex"):
            return known["ipex"]
        return known[method] + "_channels_last" * bool(channels_last and accelerator == "jit")

    def _check(self, accelerator: str | None, device: str) -> None:
        if accelerator not in self.accelerators:
            raise UsageError(f"Accelerator {accelerator} is invalid.")
        name = str(device).partition(".")[0]
        if name not in ("CPU", "GPU", "VPUX", "NPU"):
            raise UsageError(f"Now we only support CPU, GPU and VPUX, not {device}")
        if name != "CPU" and accelerator != "openvino":
            raise UsageError(
                f"Device {device} is there with accelerator 'openvino' only, not with "
                f"{accelerator!r}; pass accelerator='openvino' or device='CPU'"
            )

    def _check_approach(self, approach: str) -> None:
        if not self.dynamic and approach != "static":
            raise UsageError("Only 'static' approach is supported now.")
        if approach not in ("static", "dynamic"):
            raise UsageError(f"Approach should be 'static' or 'dynamic', {approach} is invalid.")


class Keywords:
    """Keywords of a framework's ``trace``, ``quantize`` and ``build`` with their defaults.

    Parameters
    ----------
    *functions : callable
        ``trace`` and ``quantize``: their signatures hold the defaults.
    only_build : collection of str
        Keywords of ``build`` alone, which are None by default.
    always : collection of str
        Further keywords that are accepted with every method.
    """

    def __init__(
        self,
        *functions: Callable[..., Any],
        only_build: Collection[str] = (),
        always: Collection[str] = (),
    ):
        parameters = [each for f in functions for each in inspect.signature(f).parameters.values()]
        self.defaults: dict[str, Any] = {
            **dict.fromkeys(only_build),
            **{each.name: each.default for each in parameters if each.name not in _SELECTION},
        }
        self.always = _ALWAYS.union(always)

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
        applies = self.always | _BY_ACCELERATOR[method.accelerator] | {*method.arguments}
        if method.precision == "int8":
            applies |= _INT8
        refused = {
            name: (arguments[name], default)
            for name, default in self.defaults.items()
            if name in arguments and name not in applies
        }
        for flag in ("channels_last", "ipex"):
            name = flag if flag == "channels_last" else "use_ipex"
            if not getattr(method, flag):
                refused[name] = (bool(arguments.get(name)), False)
        if not _converts(method):
            refused |= {key: (each, None) for key, each in (arguments.get("kwargs") or {}).items()}
        refuse_inapplicable(method.name, refused)
        return {name: arguments.get(name, default) for name, default in self.defaults.items()}

    def refuse_unknown(self, method: Method, arguments: Collection[str]) -> set[str]:
        """Return the names of arguments of the conversion, or refuse them where there is none."""
        unknown = set(arguments) - set(self.defaults)
        if unknown and not _converts(method):
            raise UsageError(
                f"Method {method.name!r} has no argument {', '.join(map(repr, sorted(unknown)))}; "
                f"it takes {', '.join(sorted(self.always & set(self.defaults)))}"
            )
        return unknown


def options_of(
    method: Method,
    values: Mapping[str, Any],
    conversion: Mapping[str, Any] | None,
    goal: AccuracyGoal | None,
) -> BuildOptions:
    """Sort keywords into options.

    Parameters
    ----------
    method : Method
    values : mapping
        As :meth:`Keywords.checked` returns them.
    conversion : mapping or None
        Keywords of the conversion.
    goal : AccuracyGoal or None
    """
    on_onnx = method.accelerator == "onnxruntime"
    conversion = dict(conversion or {})
    return BuildOptions(
        threads=check_threads(values["thread_num"]),
        streams=values.get("streams"),
        dynamic_axes=values.get("dynamic_axes", True),
        output_tensors=values.get("output_tensors", True),
        inplace=values.get("inplace", False),
        onnx=OnnxOptions(
            values["onnxruntime_session_options"],
            values.get("simplification", True),
            conversion if on_onnx else {},
        ),
        openvino=OpenVINOOptions(
            values["device"],
            dict(values["openvino_config"] or {}),
            {} if on_onnx else conversion,
        ),
        jit=JitOptions(values.get("jit_method"), values.get("jit_strict", True)),
        calibration=Calibration(
            values.get("calib_data"),
            values["sample_size"],
            smooth=values.get("smooth"),
            goal=goal,
        ),
    )


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
                f"{argument}={value!r} does not apply to method {name!r}; leave it out"
            )


def check_threads(value: int | None) -> int | None:
    """Return a number of threads, or None."""
    return None if value is None else check_positive("thread_num", value)


def _converts(method: Method) -> bool:
    return method.accelerator in _RUNTIMES or "openvino_config" in method.arguments


def _with_flags(stem: str, use_ipex: bool, channels_last: bool) -> str:
    return stem + "_ipex" * bool(use_ipex) + "_channels_last" * bool(channels_last)
