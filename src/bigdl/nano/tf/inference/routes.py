"""Which method the arguments of ``trace`` and ``quantize`` mean for a Keras model."""

from __future__ import annotations

from collections.abc import Mapping

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.arguments import (
    INT8_METHODS,
    check_accelerator,
    check_device,
    check_int8_method,
    check_precision,
    refuse_precision,
)

__all__ = ["quantize_method", "trace_method"]

_ACCELERATORS = (None, "onnxruntime", "openvino")
_INT8 = {**INT8_METHODS, None: {None: "static_int8"}}


def trace_method(accelerator: str | None, device: str, keywords: Mapping) -> str:
    """Name of the method that ``trace`` means.

    Raises
    ------
    UsageError
        If no method is like this.
    """
    refuse_precision(keywords)
    check_accelerator(accelerator, _ACCELERATORS)
    if accelerator is None:
        raise UsageError(
            "There is nothing to do without accelerator; pass accelerator='openvino' or "
            "'onnxruntime'"
        )
    check_device(accelerator, device)
    return f"{accelerator}_fp32"


def quantize_method(
    precision: str, accelerator: str | None, device: str, approach: str, method: str | None
) -> str:
    """Name of the method that ``quantize`` means.

    Raises
    ------
    UsageError
        If no method is like this.
    """
    check_precision(precision)
    check_accelerator(accelerator, _ACCELERATORS)
    if precision == "bf16":
        return _bf16(accelerator, device)
    if precision == "fp16":
        check_device("openvino", device)
        if accelerator not in (None, "openvino"):
            raise UsageError(f"fp16 is not supported on {accelerator} accelerator.")
        return "openvino_fp16"
    check_device(accelerator, device)
    if approach != "static":
        raise UsageError("Only 'static' approach is supported now.")
    known = _INT8[accelerator]
    check_int8_method(method, known, accelerator)
    return known[method]


def _bf16(accelerator: str | None, device: str) -> str:
    if accelerator == "onnxruntime":
        raise UsageError(f"Accelerator {accelerator} is invalid for BF16.")
    if device != "CPU" and accelerator == "openvino":
        raise UsageError(f"Device {device} don't support bfloat16.")
    check_device(accelerator, device)
    return "bf16" if accelerator is None else "openvino_bf16"
