"""Checks of what users ask for, which all frameworks share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from bigdl.common.errors import UsageError

__all__ = [
    "INT8_METHODS",
    "check_accelerator",
    "check_device",
    "check_int8_method",
    "check_precision",
    "refuse_inapplicable",
    "refuse_precision",
    "thread_count",
]

INT8_METHODS: dict[str | None, dict[str | None, str]] = {
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
"""What ``method`` of ``quantize`` means for the runtimes that serve every framework."""


def refuse_precision(keywords: Mapping[str, Any]) -> None:
    """Refuse a precision among the further keywords of ``trace``."""
    if "precision" in keywords:
        raise UsageError(
            "Don't pass precision when call InferenceOptimizer.trace, otherwise you should call "
            "InferenceOptimizer.quantize(precision=...)"
        )


def check_precision(precision: str) -> None:
    """Refuse a precision that ``quantize`` does not know."""
    if precision not in ("int8", "bf16", "fp16"):
        raise UsageError(f"Only support 'int8', 'bf16', 'fp16' now, no support for {precision}.")


def check_accelerator(accelerator: str | None, known: Collection[str | None]) -> None:
    """Refuse an accelerator that a framework does not know."""
    if accelerator not in known:
        raise UsageError(f"Accelerator {accelerator} is invalid.")


def check_int8_method(
    method: str | None, known: Collection[str | None], accelerator: str | None
) -> None:
    """Refuse a ``method`` of ``quantize`` that an accelerator does not have for int8."""
    if method not in known:
        names = ", ".join(repr(name) for name in known if name)
        raise UsageError(
            f"method {method!r} is invalid for int8 with accelerator {accelerator!r}; leave it out"
            + (f" or choose one of {names}" if names else "")
        )


def check_device(accelerator: str | None, device: str) -> None:
    """Refuse a device that is not known, or that the accelerator does not run on."""
    kind = str(device).partition(".")[0]
    if kind not in ("CPU", "GPU", "VPUX", "NPU"):
        raise UsageError(f"Now we only support CPU, GPU and VPUX, not {device}")
    if kind != "CPU" and accelerator != "openvino":
        raise UsageError(
            f"Device {device} is there with accelerator 'openvino' only, not with {accelerator!r}; "
            "pass accelerator='openvino' or device='CPU'"
        )


def refuse_inapplicable(name: str, given: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse arguments that the chosen method has no use for.

    Parameters
    ----------
    name : str
        The method.
    given : mapping of str to (value, default)
        Arguments that do not apply to it.
    """
    for argument, (value, default) in given.items():
        if value is not default and value != default:
            raise UsageError(
                f"{argument}={value!r} does not apply to method {name!r}; leave it out"
            )


def thread_count(value: Any) -> int | None:
    """A number of threads, or None.

    Raises
    ------
    UsageError
    """
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"thread_num must be an int of at least 1, not {value!r}")
    return value
