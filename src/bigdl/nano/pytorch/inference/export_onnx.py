"""Modules of PyTorch as ONNX files."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bigdl.common.errors import UsageError, require
from bigdl.nano.acceleration.options import BuildOptions
from bigdl.nano.acceleration.quiet import quiet
from bigdl.nano.pytorch.inference.inputs import ForwardInputs

__all__ = ["onnx_names", "to_onnx"]

_log = logging.getLogger(__name__)

# Keywords of torch.onnx.export that other arguments of trace and quantize stand for.
_OURS = {
    "model": "model",
    "args": "input_sample",
    "f": "InferenceOptimizer.save",
    "kwargs": "example_kwarg_inputs",
    "input_names": "the names of forward's parameters",
    "dynamic_axes": "dynamic_axes",
    "dynamic_shapes": "dynamic_axes",
    "optimize": "simplification",
    "external_data": "the size of the model",
    "verbose": "logging",
}


def onnx_names(inputs: ForwardInputs) -> list[str]:
    """Names of a network's inputs with letters, digits and underscores only, each once."""
    names: list[str] = []
    for path in inputs.names:
        name = plain = re.sub(r"\W", "_", path)
        count = 1
        while name in names:
            count += 1
            name = f"{plain}_{count}"
        names.append(name)
    return names


def to_onnx(source, path: str, options: BuildOptions) -> None:
    """Write a source's model with flat inputs and outputs.

    It is read by ``torch.export``; a model that this cannot read is traced, which fixes what its
    Python code decides. The log says so.

    Parameters
    ----------
    source : TorchSource
    path : str
    options : BuildOptions
        ``dynamic_axes`` and ``onnx`` count.

    Raises
    ------
    UsageError
        If a keyword is not one of ``torch.onnx.export``, ``dynamic_axes`` does not fit the
        sample, or the model cannot be exported.
    """
    require("onnxscript", "nano")
    names = onnx_names(source.inputs)
    keywords = _checked(options.onnx.export)
    dims = _dynamic_dims(options.dynamic_axes, names, source.inputs.names, source.sample_tensors)
    wants_export = keywords.pop("dynamo", None)
    tensors = _with_general_sizes(source, dims)
    with source.flat_module() as module:
        reason = None
        if wants_export is not False:
            reason = _attempt(_by_export, module, tensors, path, names, dims, options, keywords)
            if reason is None:
                return
        if wants_export is not True:
            again = _attempt(_by_trace, module, tensors, path, names, dims, options, keywords)
            if again is None:
                if reason is not None:
                    _log.warning(
                        "%s was traced for ONNX, so branches of its code are fixed: torch.export "
                        "cannot read it (%s)",
                        type(source.model).__name__,
                        reason,
                    )
                return
            reason = reason or again
    raise UsageError(f"{type(source.model).__name__} cannot be exported to ONNX: {reason}")


def _attempt(export, *arguments) -> str | None:
    """Run an exporter; returns in one line why it failed."""
    try:
        with quiet():
            export(*arguments)
    except Exception as error:
        # Exporters wrap what happened in explanations of several pages.
        while error.__cause__ is not None:
            error = error.__cause__
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
    return None


def _by_export(module, tensors, path, names, dims, options: BuildOptions, keywords) -> None:
    # What was asked for has to be possible; by default a size that the model fixes stays fixed.
    kind = torch.export.Dim.AUTO if options.dynamic_axes is True else torch.export.Dim.DYNAMIC
    shapes = [dict.fromkeys(each, kind) for each in dims]
    program = torch.onnx.export(
        module,
        tuple(tensors),
        input_names=names,
        dynamo=True,
        dynamic_shapes=(tuple(shapes),),
        optimize=options.onnx.simplify,
        verbose=False,
        **keywords,
    )
    program.save(path)


def _by_trace(module, tensors, path, names, dims, options: BuildOptions, keywords) -> None:
    axes = {
        name: {dim: "batch_size" if dim == 0 else f"{name}_{dim}" for dim in each}
        for name, each in zip(names, dims, strict=True)
    }
    torch.onnx.export(
        module,
        tuple(tensors),
        path,
        input_names=names,
        dynamo=False,
        dynamic_axes=axes,
        **keywords,
    )
    if options.onnx.simplify:
        _simplify(Path(path))


def _simplify(path: Path) -> None:
    onnx = require("onnx", "nano")
    optimizer = require("onnxscript.optimizer", "nano")
    from bigdl.nano.acceleration.onnx_graph import save

    save(optimizer.optimize(onnx.load(path)), path)


def _checked(keywords: Mapping[str, Any]) -> dict[str, Any]:
    known = inspect.signature(torch.onnx.export).parameters
    for name in keywords:
        if name in _OURS:
            raise UsageError(
                f"Argument {name!r} of torch.onnx.export cannot be passed on: "
                f"{_OURS[name]} decides about it"
            )
        if name not in known:
            raise UsageError(
                f"There is no argument {name!r}, neither here nor of torch.onnx.export; leave it "
                "out"
            )
    return dict(keywords)


def _dynamic_dims(axes, names: Sequence[str], paths: Sequence[str], tensors) -> list[list[int]]:
    """Dimensions of each input that may change."""
    if axes is True:
        return [[0] if tensor.ndim else [] for tensor in tensors]
    if not axes:
        return [[] for _ in tensors]
    if not isinstance(axes, Mapping):
        raise UsageError(f"dynamic_axes must be True, False or a dict, not {axes!r}")
    unknown = set(axes) - set(names) - set(paths)
    if unknown:
        raise UsageError(
            f"dynamic_axes names {', '.join(map(repr, sorted(unknown)))}, but the inputs are "
            f"{', '.join(names)}"
        )
    dims = []
    for name, path, tensor in zip(names, paths, tensors, strict=True):
        given = sorted(int(dim) for dim in axes.get(name, axes.get(path, ())))
        if any(not -tensor.ndim <= dim < tensor.ndim for dim in given):
            raise UsageError(
                f"dynamic_axes gives {given} for {name!r}, which has {tensor.ndim} dimensions"
            )
        dims.append(sorted({dim % tensor.ndim for dim in given}))
    return dims


def _with_general_sizes(source, dims) -> list[torch.Tensor]:
    """The sample with 2 in place of 1 in dimensions that may change, if the model takes that.

    ``torch.export`` takes a size of 1 for a constant, since it broadcasts.
    """
    tensors = source.sample_tensors
    sizes = {tensor.shape[dim] for tensor, each in zip(tensors, dims, strict=True) for dim in each}
    if 1 not in sizes:
        return tensors
    grown = list(tensors)
    for position, each in enumerate(dims):
        for dim in each:
            if grown[position].shape[dim] == 1:
                grown[position] = grown[position].repeat_interleave(2, dim)
    try:
        with source.flat_module() as module:
            module(*grown)
    except Exception:
        return tensors
    return grown
