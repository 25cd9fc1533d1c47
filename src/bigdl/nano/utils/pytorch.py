"""Helpers for PyTorch modules, under the names of BigDL 2.x.

They are thin wrappers around :mod:`bigdl.nano.pytorch.inference`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from bigdl.common.checks import check_choice
from bigdl.common.errors import UsageError, one_line
from bigdl.nano.acceleration.method import BuildOptions
from bigdl.nano.acceleration.quiet import quiet
from bigdl.nano.acceleration.structure import Structure, flatten
from bigdl.nano.lazy_names import public_names
from bigdl.nano.pytorch.inference.graphs import LAYOUTS, layouts_of
from bigdl.nano.pytorch.inference.network_models import to_onnx
from bigdl.nano.pytorch.inference.serialization import load_model, save_model
from bigdl.nano.pytorch.inference.source import (
    ModelBatch,
    TorchSource,
    batches_of,
    evaluating,
    module_loader,
    named_parameters,
    sample_arguments,
    trainer_loader,
)

T = TypeVar("T")

# BigDL requires newer versions of all of them.
TORCH_VERSION_LESS_1_10 = TORCH_VERSION_LESS_1_11 = TORCH_VERSION_LESS_1_12 = False
TORCH_VERSION_LESS_1_13 = TORCH_VERSION_LESS_2_0 = False
TORCHVISION_VERSION_LESS_1_12 = TORCHVISION_VERSION_LESS_1_14 = False


def get_forward_args(model: torch.nn.Module) -> list[str]:
    """Return the names of forward's named parameters, in order.

    For a model in another runtime these are the parameters of the original module.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.utils.pytorch import get_forward_args
    >>> get_forward_args(torch.nn.Bilinear(2, 2, 1))
    ['input1', 'input2']
    """
    return [p.name for p in named_parameters(model)]


def get_forward_defaults(model: torch.nn.Module) -> tuple:
    """Return the defaults of forward's last parameters, in order; empty if there are none.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.utils.pytorch import get_forward_defaults
    >>> class Scaled(torch.nn.Module):
    ...     def forward(self, x, factor=2.0):
    ...         return x * factor
    >>> get_forward_defaults(Scaled())
    (2.0,)
    """
    return tuple(p.default for p in named_parameters(model) if p.default is not p.empty)


def get_forward_annotations(model: torch.nn.Module) -> dict[str, Any]:
    """Return the annotations of forward's annotated parameters, by name.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.utils.pytorch import get_forward_annotations
    >>> class Scaled(torch.nn.Module):
    ...     def forward(self, x, factor: float = 2.0):
    ...         return x * factor
    >>> get_forward_annotations(Scaled())
    {'factor': <class 'float'>}
    """
    return {p.name: p.annotation for p in named_parameters(model) if p.annotation is not p.empty}


def get_conditional_args(
    model: torch.nn.Module, include: object = "all", exclude: object = ()
) -> list[str]:
    """Return the names of forward's parameters, filtered by the types of their defaults.

    Parameters
    ----------
    model : Module
    include : "all", type or tuple of type
        Types of defaults; parameters without a default count as tensors. ``"all"`` includes all.
    exclude : type or tuple of type
        Types to exclude.

    Returns
    -------
    list of str
        In order.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.utils.pytorch import get_conditional_args
    >>> class Scaled(torch.nn.Module):
    ...     def forward(self, x, factor=2.0):
    ...         return x * factor
    >>> get_conditional_args(Scaled(), include=torch.Tensor), get_conditional_args(Scaled(), float)
    (['x'], ['factor'])
    """
    wanted = object if include == "all" else _types(include)
    unwanted = _types(exclude)

    def type_of(parameter: inspect.Parameter) -> type:
        return torch.Tensor if parameter.default is parameter.empty else type(parameter.default)

    return [
        p.name
        for p in named_parameters(model)
        if issubclass(type_of(p), wanted) and not issubclass(type_of(p), unwanted)
    ]


def _types(value: object) -> tuple[type, ...]:
    types = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(type(None) if each is None else each for each in types)


def get_input_example(
    model: torch.nn.Module, input_sample: object, forward_args: Sequence[str] | None = None
) -> object:
    """Return a sample of a module's input.

    Parameters
    ----------
    model : Module
    input_sample : Tensor, tuple, dict, DataLoader or None
        A DataLoader stands for its first batch, without targets. None uses the model's
        ``example_input_array``, or the first batch of one of its data loaders.
    forward_args : sequence of str, optional
        Names of arguments; at most this many values are returned.

    Returns
    -------
    Tensor, tuple or dict
        A single argument, a tuple of positional arguments, or a dict of named ones.

    Raises
    ------
    UsageError
        If there is no sample.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.utils.pytorch import get_input_example
    >>> rows = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.zeros(4))
    >>> get_input_example(torch.nn.Linear(2, 1), torch.utils.data.DataLoader(rows, 3))
    tensor([[1., 1.],
            [1., 1.],
            [1., 1.]])
    """
    sample = getattr(model, "example_input_array", None) if input_sample is None else input_sample
    data = (trainer_loader(model) or module_loader(model)) if sample is None else sample
    if isinstance(data, torch.utils.data.DataLoader):
        batch = next(batches_of(model, data), None)
        if batch is None:
            raise UsageError(
                "The data hold no batch, so there is no sample of the input", code="data-empty"
            )
    else:
        batch = ModelBatch(*sample_arguments(model, data))
    if batch.kwargs:
        return (
            dict(zip(get_forward_args(model)[: len(batch.args)], batch.args, strict=True))
            | batch.kwargs
        )
    args = batch.args if forward_args is None else batch.args[: len(forward_args)]
    return args[0] if len(args) == 1 else args


def complement_input_sample(model: torch.nn.Module, input_sample: object) -> tuple:
    """Return the values of all arguments of forward, with defaults for missing ones.

    Parameters
    ----------
    model : Module
    input_sample : Tensor, tuple, list or dict

    Returns
    -------
    tuple
        In the order of the parameters.

    Raises
    ------
    UsageError
        If a parameter has neither a value nor a default.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.utils.pytorch import complement_input_sample
    >>> class Scaled(torch.nn.Module):
    ...     def forward(self, x, factor=2.0):
    ...         return x * factor
    >>> complement_input_sample(Scaled(), torch.ones(2))
    (tensor([1., 1.]), 2.0)
    """
    args, kwargs = sample_arguments(model, input_sample)
    values = list(args)
    for parameter in named_parameters(model)[len(args) :]:
        value = kwargs.get(parameter.name, parameter.default)
        if value is parameter.empty:
            raise UsageError(
                f"The sample has no value for {parameter.name!r}, which has no default; pass "
                f"one for each of {', '.join(get_forward_args(model))}",
                code="argument-missing",
                argument=parameter.name,
            )
        values.append(value)
    return tuple(values)


def export_to_onnx(
    model: torch.nn.Module,
    input_sample: object = None,
    onnx_path: str = "model.onnx",
    dynamic_axes: bool | Mapping = True,
    **kwargs: Any,
) -> None:
    """Export a module to an ONNX file.

    Parameters
    ----------
    model : Module
        Module to export; not changed.
    input_sample : Tensor, tuple, list or dict, optional
        Sample input. Default: ``model.example_input_array``.
    onnx_path : str or path
    dynamic_axes : bool or dict
        True makes the first dimension of each input dynamic; a dict names dynamic axes.
    **kwargs
        Arguments of ``torch.onnx.export``.

    Raises
    ------
    UsageError
        If there is no sample, or the module cannot be exported.

    Examples
    --------
    >>> import onnx
    >>> import torch
    >>> from bigdl.nano.utils.pytorch import export_to_onnx
    >>> export_to_onnx(torch.nn.ReLU(), torch.ones(1, 2), "relu.onnx")
    >>> [node.op_type for node in onnx.load("relu.onnx").graph.node]
    ['Relu']
    """
    options = BuildOptions(dynamic_axes=dynamic_axes, conversion=kwargs)
    to_onnx(TorchSource(model, input_sample), str(onnx_path), options)


def jit_convert(
    model: torch.nn.Module,
    input_sample: object = None,
    jit_method: str | None = None,
    jit_strict: bool = True,
    example_kwarg_inputs: Mapping | None = None,
) -> torch.jit.ScriptModule:
    """Convert a module in evaluation mode to TorchScript.

    Parameters
    ----------
    model : Module
        Module to convert; not changed.
    input_sample : Tensor, tuple, list or dict, optional
        Sample input, required for tracing.
    jit_method : {"trace", "script"}, optional
        None traces the module, or scripts it if tracing fails.
    jit_strict : bool
        Argument ``strict`` of ``torch.jit.trace``.
    example_kwarg_inputs : mapping, optional
        Keyword arguments of the sample.

    Raises
    ------
    UsageError
        If the method is unknown, or the module cannot be converted.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.utils.pytorch import jit_convert
    >>> script = jit_convert(torch.nn.ReLU(), torch.ones(1, 2))
    >>> script(torch.tensor([[-1.0, 2.0]]))
    tensor([[0., 2.]])
    """
    if jit_method not in (None, "trace", "script"):
        raise UsageError(
            f"jit_method {jit_method} is invalid.",
            code="argument-value",
            argument="jit_method",
            allowed=[None, "trace", "script"],
        )
    attempts = [jit_method] if jit_method else ["trace", "script"]
    reasons = []
    for method in attempts:
        try:
            with evaluating(model), quiet():
                if method == "script":
                    return torch.jit.script(model)
                return _traced(model, input_sample, example_kwarg_inputs, jit_strict)
        except Exception as error:
            reasons.append(f"{method}: {one_line(error)}")
    raise UsageError(
        f"{type(model).__name__} cannot be converted to TorchScript: {'; '.join(reasons)}",
        code="model-unsupported",
    )


def _traced(
    model: torch.nn.Module, sample: object, example_kwargs: Mapping | None, strict: bool
) -> torch.jit.ScriptModule:
    args, kwargs = sample_arguments(model, () if sample is None else sample, example_kwargs)
    if not args and not kwargs:
        raise UsageError(
            "tracing needs input_sample", code="argument-missing", argument="input_sample"
        )
    inputs: dict[str, Any] = {"example_inputs": args}
    if kwargs:  # torch.jit.trace takes all arguments by position or all by name
        named = dict(zip(get_forward_args(model), args, strict=False))
        inputs = {"example_kwarg_inputs": {**named, **kwargs}}
    return torch.jit.trace(model, **inputs, strict=strict, check_trace=False)


def patch_attrs_from_model_to_object(model: torch.nn.Module, instance: object) -> None:
    """Copy a module's public attributes to another object, except those of ``nn.Module``.

    Existing attributes of the object stay.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> import torch
    >>> from bigdl.nano.utils.pytorch import patch_attrs_from_model_to_object
    >>> target = SimpleNamespace()
    >>> patch_attrs_from_model_to_object(torch.nn.Linear(2, 1), target)
    >>> target.in_features
    2
    """
    for name in sorted(set(dir(model)) - set(dir(torch.nn.Module()))):
        if not name.startswith("_") and not hasattr(instance, name):
            setattr(instance, name, getattr(model, name))


def generate_channels_last_available(inputs: Sequence[Any]) -> list[str]:
    """Return ``"channels_last"`` (4-D), ``"channels_last_3d"`` (5-D) or ``"original"`` per input.

    Parameters
    ----------
    inputs : sequence
        Tensors; other values yield ``"original"``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.utils.pytorch import generate_channels_last_available
    >>> generate_channels_last_available([torch.ones(1, 3, 8, 8), torch.ones(1, 4)])
    ['channels_last', 'original']
    """
    tensors = [each if torch.is_tensor(each) else torch.empty(()) for each in inputs]
    return layouts_of(tensors)


def apply_proper_channels_last(flag: str, input_item: T) -> T:
    """Return a tensor in the memory layout that `flag` names; other values stay unchanged.

    Raises
    ------
    UsageError
        If the layout is unknown.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.utils.pytorch import apply_proper_channels_last
    >>> image = apply_proper_channels_last("channels_last", torch.ones(1, 3, 8, 8))
    >>> image.is_contiguous(memory_format=torch.channels_last)
    True
    """
    check_choice("flag", flag, (*LAYOUTS, "original"))
    if flag == "original" or not torch.is_tensor(input_item):
        return input_item
    return cast("T", input_item.contiguous(memory_format=LAYOUTS[flag]))


class MetaData:
    """Static methods for the nested structure of a model's outputs, named as in BigDL 2.x.

    Examples
    --------
    >>> from bigdl.nano.utils.pytorch import MetaData
    >>> import torch
    >>> nesting = MetaData.construct_matadata({"scores": torch.ones(1), "boxes": [torch.zeros(1)]})
    >>> MetaData.reconstruct_output([torch.ones(2), torch.zeros(2)], nesting)
    {'scores': tensor([1., 1.]), 'boxes': [tensor([0., 0.])]}
    """

    @staticmethod
    def construct_matadata(outputs: object) -> Structure:
        """Return the nesting of the tensors in `outputs`, which ``to_json`` serializes."""
        return flatten(outputs)[1]

    @staticmethod
    def reconstruct_output(outputs: Sequence[object], metadata: Structure) -> object:
        """Nest a flat sequence of tensors or ndarrays according to `metadata`.

        A single tensor need not be in a sequence.
        """
        single = not isinstance(outputs, (list, tuple))
        return metadata.rebuild([outputs] if single else outputs)


__all__ = ["load_model", "save_model", *public_names(__name__)]
__all__ += [name for name in list(globals()) if name.startswith("TORCH")]
