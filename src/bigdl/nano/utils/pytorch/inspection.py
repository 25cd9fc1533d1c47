"""What a module's forward takes."""

from __future__ import annotations

from typing import Any

import torch

from bigdl.nano.pytorch.inference.source import forward_parameters

__all__ = [
    "get_conditional_args",
    "get_forward_annotations",
    "get_forward_args",
    "get_forward_defaults",
]


def get_forward_args(model: torch.nn.Module) -> list[str]:
    """Names of forward's named parameters, in order.

    For a model in another runtime these are the parameters of the module that it was made from.
    """
    return [p.name for p in _named(model)]


def get_forward_defaults(model: torch.nn.Module) -> tuple:
    """Defaults of forward's last parameters, in order; empty if there are none."""
    return tuple(p.default for p in _named(model) if p.default is not p.empty)


def get_forward_annotations(model: torch.nn.Module) -> dict[str, Any]:
    """Annotations of forward's parameters that have one, by name."""
    return {p.name: p.annotation for p in _named(model) if p.annotation is not p.empty}


def get_conditional_args(
    model: torch.nn.Module, include: Any = "all", exclude: Any = ()
) -> list[str]:
    """Names of forward's parameters whose default is of a type.

    Parameters
    ----------
    model : Module
    include : "all", type or tuple of type
        Types of defaults; parameters without a default count as tensors. ``"all"`` takes any.
    exclude : type or tuple of type
        Types that are left out.

    Returns
    -------
    list of str
        In order.
    """
    wanted = object if include == "all" else _types(include)
    unwanted = _types(exclude)

    def kind(parameter):
        return torch.Tensor if parameter.default is parameter.empty else type(parameter.default)

    return [
        p.name
        for p in _named(model)
        if issubclass(kind(p), wanted) and not issubclass(kind(p), unwanted)
    ]


def _named(model):
    parameters = forward_parameters(model).values()
    return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _types(given) -> tuple[type, ...]:
    types = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    return tuple(type(None) if each is None else each for each in types)
