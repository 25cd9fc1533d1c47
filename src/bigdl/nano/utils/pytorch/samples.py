"""Samples of a module's input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.inference.source import (
    Batch,
    batches_of,
    forward_parameters,
    sample_arguments,
)

__all__ = ["complement_input_sample", "get_input_example"]

# Loaders of a LightningModule, in the order in which a sample is looked for.
_LOADERS = ("predict_dataloader", "train_dataloader", "val_dataloader", "test_dataloader")


def get_input_example(
    model: torch.nn.Module, input_sample: Any, forward_args: Sequence[str] | None = None
) -> Any:
    """A sample of a module's input.

    Parameters
    ----------
    model : Module
    input_sample : Tensor, tuple, dict, DataLoader or None
        Of a DataLoader the first batch counts, without its targets. For None the model's
        ``example_input_array`` is taken, or the first batch of one of its data loaders.
    forward_args : sequence of str, optional
        Names of the arguments that are wanted: as many values are returned at most.

    Returns
    -------
    Tensor, tuple or dict
        The argument if it is one, a tuple of several by position, a dict of those by name.

    Raises
    ------
    UsageError
        If there is no sample.
    """
    sample = getattr(model, "example_input_array", None) if input_sample is None else input_sample
    data = _loader(model) if sample is None else sample
    if isinstance(data, torch.utils.data.DataLoader):
        batch = next(batches_of(model, data), None)
        if batch is None:
            raise UsageError("The data hold no batch, so there is no sample of the input")
    else:
        batch = Batch(*sample_arguments(model, data))
    if batch.kwargs:
        return dict(zip(_names(model)[: len(batch.args)], batch.args, strict=True)) | batch.kwargs
    args = batch.args if forward_args is None else batch.args[: len(forward_args)]
    return args[0] if len(args) == 1 else args


def complement_input_sample(model: torch.nn.Module, input_sample: Any) -> tuple:
    """The values of all of forward's arguments, defaults where the sample has none.

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
    """
    args, kwargs = sample_arguments(model, input_sample)
    values = list(args)
    named = [p for p in forward_parameters(model).values() if _is_named(p)]
    for parameter in named[len(args) :]:
        value = kwargs.get(parameter.name, parameter.default)
        if value is parameter.empty:
            raise UsageError(
                f"The sample has no value for {parameter.name!r}, which has no default; give "
                f"one for each of {', '.join(_names(model))}"
            )
        values.append(value)
    return tuple(values)


def _loader(model) -> torch.utils.data.DataLoader:
    for name in _LOADERS:
        try:
            loader = getattr(model, name)()
        except Exception:
            continue
        if isinstance(loader, torch.utils.data.DataLoader):
            return loader
    raise UsageError(
        f"A sample of the input of {type(model).__name__} is needed; pass input_sample"
    )


def _names(model) -> list[str]:
    return [p.name for p in forward_parameters(model).values() if _is_named(p)]


def _is_named(parameter) -> bool:
    return parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
