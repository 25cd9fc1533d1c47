"""Modules converted, written and read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.options import BuildOptions, OnnxOptions
from bigdl.nano.acceleration.quiet import quiet
from bigdl.nano.pytorch.inference.export import to_onnx
from bigdl.nano.pytorch.inference.serialization import load_model, save_model
from bigdl.nano.pytorch.inference.source import TorchSource, evaluating, sample_arguments
from bigdl.nano.utils.pytorch.inspection import get_forward_args

__all__ = [
    "export_to_onnx",
    "jit_convert",
    "load_model",
    "patch_attrs_from_model_to_object",
    "save_model",
]


def export_to_onnx(
    model: torch.nn.Module,
    input_sample: Any = None,
    onnx_path: str = "model.onnx",
    dynamic_axes: bool | Mapping = True,
    **kwargs: Any,
) -> None:
    """Write a module as an ONNX file.

    Parameters
    ----------
    model : Module
        Not changed.
    input_sample : Tensor, tuple, list or dict, optional
        ``model.example_input_array`` by default.
    onnx_path : str or path
    dynamic_axes : bool or dict
        Whether the first dimension of each input, or the ones named, may change.
    **kwargs
        Of ``torch.onnx.export``.

    Raises
    ------
    UsageError
        If there is no sample, or the module cannot be exported.
    """
    options = BuildOptions(dynamic_axes=dynamic_axes, onnx=OnnxOptions(export=kwargs))
    to_onnx(TorchSource(model, input_sample), str(onnx_path), options)


def jit_convert(
    model: torch.nn.Module,
    input_sample: Any = None,
    jit_method: str | None = None,
    jit_strict: bool = True,
    example_kwarg_inputs: Mapping | None = None,
) -> torch.jit.ScriptModule:
    """A TorchScript of a module in evaluation mode.

    Parameters
    ----------
    model : Module
        Not changed.
    input_sample : Tensor, tuple, list or dict, optional
        Needed for tracing.
    jit_method : {"trace", "script"}, optional
        None traces, and scripts what cannot be traced.
    jit_strict : bool
        Of ``torch.jit.trace``.
    example_kwarg_inputs : mapping, optional
        Keyword arguments of the sample.

    Raises
    ------
    UsageError
        If the method is unknown, or the module cannot be converted.
    """
    if jit_method not in (None, "trace", "script"):
        raise UsageError(f"jit_method {jit_method} is invalid.")
    attempts = [jit_method] if jit_method else ["trace", "script"]
    reasons = []
    for method in attempts:
        try:
            with evaluating(model), quiet():
                if method == "script":
                    return torch.jit.script(model)
                return _traced(model, input_sample, example_kwarg_inputs, jit_strict)
        except Exception as error:
            reasons.append(f"{method}: {' '.join(str(error).split())[:300]}")
    raise UsageError(
        f"{type(model).__name__} cannot be converted to TorchScript: {'; '.join(reasons)}"
    )


def _traced(model, sample, example_kwargs, strict) -> torch.jit.ScriptModule:
    args, kwargs = sample_arguments(model, () if sample is None else sample, example_kwargs)
    if not args and not kwargs:
        raise UsageError("tracing needs input_sample")
    inputs: dict[str, Any] = {"example_inputs": args}
    if kwargs:  # a trace takes all by position or all by name
        named = dict(zip(get_forward_args(model), args, strict=False))
        inputs = {"example_kwarg_inputs": {**named, **kwargs}}
    return torch.jit.trace(model, **inputs, strict=strict, check_trace=False)


def patch_attrs_from_model_to_object(model: torch.nn.Module, instance: Any) -> None:
    """Set a module's public attributes and methods, but for every module's, on another object.

    What the object has already stays.
    """
    for name in sorted(set(dir(model)) - set(dir(torch.nn.Module()))):
        if not name.startswith("_") and not hasattr(instance, name):
            setattr(instance, name, getattr(model, name))
