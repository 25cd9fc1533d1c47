"""Programs that compute in float64, in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.patching.replaced import Replaced, show_torch_to_dynamo

__all__ = ["get_dtype_status", "patch_dtype", "unpatch_dtype"]

_TYPES = {
    **dict.fromkeys(("fp64", "float64", "double", torch.float64), torch.float64),
    **dict.fromkeys(("fp32", "float32", "float", torch.float32), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", torch.bfloat16), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half", torch.float16), torch.float16),
}
_METHODS = {torch.float64: "double", torch.float32: "float", torch.bfloat16: "bfloat16"}
_FACTORIES = """
    arange as_tensor asarray empty empty_like eye full full_like linspace logspace ones
    ones_like rand rand_like randn randn_like tensor zeros zeros_like
"""

_replaced = Replaced()
_types: dict[str, torch.dtype] = {}


def get_dtype_status() -> dict[str, torch.dtype]:
    """The arguments of the :func:`patch_dtype` that is in force; empty if none is."""
    return dict(_types) if _replaced.active else {}


def patch_dtype(from_dtype: Any = "fp64", to_dtype: Any = "fp32") -> None:
    """Let a program that names one type of floating-point numbers use another.

    ``dtype=`` of functions that make tensors, ``.to(dtype)``, and the methods that are named after
    the type, such as ``.double()``, are changed; the type of NumPy's arrays is not.

    Parameters
    ----------
    from_dtype, to_dtype : str or torch.dtype
        ``"fp64"``, ``"fp32"``, ``"bf16"`` or ``"fp16"``.

    Raises
    ------
    UsageError
        If a type is unknown, or another one is replaced already.
    """
    for value in (from_dtype, to_dtype):
        if value not in _TYPES:
            raise UsageError(
                f"There is no type {value!r} to replace; choose 'fp64', 'fp32', 'bf16' or 'fp16'"
            )
    if _replaced.active:
        raise UsageError("A type is replaced already; call unpatch_dtype first")
    show_torch_to_dynamo()
    old, new = _TYPES[from_dtype], _TYPES[to_dtype]
    _types.update(from_dtype=old, to_dtype=new)
    for name in _FACTORIES.split():
        _replaced.set(torch, name, _with_type(getattr(torch, name), old, new))
    for owner in (torch.Tensor, torch.nn.Module):
        _replaced.set(owner, "to", _with_type(owner.to, old, new))
        method = _METHODS.get(old, "half")
        _replaced.set(owner, method, lambda value, *args, **kwargs: value.to(new))


def unpatch_dtype() -> None:
    """Put everything back; again does nothing."""
    _replaced.undo()


def _with_type(function: Callable, old: torch.dtype, new: torch.dtype) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dtype") is old:
            kwargs["dtype"] = new
        return function(*(new if value is old else value for value in args), **kwargs)

    return call
