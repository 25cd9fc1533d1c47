"""Which method the arguments of ``trace`` and ``quantize`` mean for a Keras model."""

from __future__ import annotations

from collections.abc import Mapping

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.arguments import INT8_METHODS, check_device

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
    if "precision" in keywords:
        raise UsageError(
            "Don't pass precision when call InferenceOptimizer.trace, otherwise you should call "
            "InferenceOptimizer.quantize(precision=...)"
        )
    _check_accelerator(accelerator)
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
    if precision not in ("int8", "bf16", "fp16"):
        raise UsageError(f"Only support 'int8', 'bf16', 'fp16' now, no support for {precision}.")
    _check_accelerator(accelerator)
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
    if method not in known:
        names = ", ".join(repr(name) for name in known if name)
        raise UsageError(
            f"method {method!r} is invalid for int8 with accelerator {accelerator!r}; leave it out"
            + (f" or choose one of {names}" if names else "")
        )
    return known[method]


def _bf16(accelerator: str | None, device: str) -> str:
    if accelerator == "onnxruntime":
        raise UsageError(f"Accelerator {accelerator} is invalid for BF16.")
    if device != "CPU" and accelerator == "openvino":
        raise UsageError(f"Device {device} don't support bfloat16.")
    check_device(accelerator, device)
    return "bf16" if accelerator is None else "openvino_bf16"


def _check_accelerator(accelerator: str | None) -> None:
    if accelerator not in _ACCELERATORS:
        raise UsageError(f"Accelerator {accelerator} is invalid.")
