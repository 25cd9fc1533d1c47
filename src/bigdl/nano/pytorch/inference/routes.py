"""Which method the arguments of ``trace`` and ``quantize`` mean, and which of them apply to it."""

from __future__ import annotations

from collections.abc import Mapping

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.arguments import (
    INT8_METHODS,
    check_accelerator,
    check_device,
    check_int8_method,
    check_precision,
    refuse_inapplicable,
    refuse_precision,
)

__all__ = ["check_device", "quantize_method", "refuse_inapplicable", "trace_method"]

_ACCELERATORS = (None, "jit", "onnxruntime", "openvino")


def trace_method(
    accelerator: str | None, use_ipex: bool, channels_last: bool, device: str, keywords: Mapping
) -> str:
    """Name of the method that ``trace`` means.

    Raises
    ------
    UsageError
        If no method is like this.
    """
    refuse_precision(keywords)
    check_accelerator(accelerator, _ACCELERATORS)
    check_device(accelerator, device)
    if accelerator in ("openvino", "onnxruntime"):
        return f"{accelerator}_fp32"
    if accelerator is None and not (use_ipex or channels_last):
        raise UsageError(
            "There is nothing to do without accelerator; pass accelerator='openvino', "
            "'onnxruntime' or 'jit', or use_ipex=True or channels_last=True"
        )
    return _joined("jit_fp32" if accelerator == "jit" else "fp32", use_ipex, channels_last)


def quantize_method(
    precision: str,
    accelerator: str | None,
    use_ipex: bool,
    channels_last: bool,
    device: str,
    approach: str,
    method: str | None,
) -> str:
    """Name of the method that ``quantize`` means.

    Raises
    ------
    UsageError
        If no method is like this.
    """
    check_precision(precision)
    check_accelerator(accelerator, _ACCELERATORS)
    if approach not in ("static", "dynamic"):
        raise UsageError(f"Approach should be 'static' or 'dynamic', {approach} is invalid.")
    if precision == "fp16" and accelerator is None:
        accelerator = "openvino"
    check_device(accelerator, device)
    if precision == "bf16":
        return _bf16(accelerator, use_ipex, channels_last, device)
    if precision == "fp16":
        if accelerator != "openvino":
            raise UsageError(f"Accelerator {accelerator} is invalid for FP16.")
        return "openvino_fp16"
    return _int8(accelerator, use_ipex, channels_last, approach, method)


def _bf16(accelerator, use_ipex, channels_last, device) -> str:
    if accelerator == "onnxruntime":
        raise UsageError(f"Accelerator {accelerator} is invalid for BF16.")
    if accelerator == "openvino":
        if device != "CPU":
            raise UsageError(f"Device {device} don't support bfloat16.")
        return "openvino_bf16"
    return _joined("jit_bf16" if accelerator == "jit" else "bf16", use_ipex, channels_last)


_INT8 = {
    **INT8_METHODS,
    "jit": {None: "jit_int8", "fx": "jit_int8"},
    None: {
        None: "static_int8",
        "fx": "static_int8",
        "eager": "static_int8",
        "ipex": "static_int8_ipex",
        "torchao": "torchao_int8",
        "weight_only": "int8_weight_only",
        "inc": "neural_compressor_int8",
    },
}
_INT8_DYNAMIC = {"onnxruntime": "onnxruntime_int8_integer", None: "torchao_int8"}


def _int8(accelerator, use_ipex, channels_last, approach, method) -> str:
    known = _INT8[accelerator]
    check_int8_method(method, known, accelerator)
    if approach == "dynamic":
        if accelerator not in _INT8_DYNAMIC:
            raise UsageError(
                f"Accelerator {accelerator!r} quantizes with approach 'static' only; the dynamic "
                "approach is there for accelerator None and 'onnxruntime'"
            )
        if method not in (None, "integer", "fx", "eager"):
            raise UsageError(f"method {method!r} does not go with approach 'dynamic'; leave it out")
        return _INT8_DYNAMIC[accelerator]
    if use_ipex and accelerator is None and method in (None, "ipex"):
        return "static_int8_ipex"
    if channels_last and accelerator == "jit":
        return "jit_int8_channels_last"
    return known[method]


def _joined(stem: str, use_ipex: bool, channels_last: bool) -> str:
    return stem + "_ipex" * bool(use_ipex) + "_channels_last" * bool(channels_last)
