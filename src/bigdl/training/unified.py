"""Validation data in the types of the training data.

Both may come from places of their own: numbers that were saved as integers in one and as floats in
the other reach the model in the dtype of the training data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.runtime.shards.texts import TEXT

__all__ = ["casts", "form_of", "in_dtype", "in_form"]


def casts(
    names: Sequence[str], own: list, others: list, *, is_target: bool
) -> Iterator[tuple[int, str | None, Callable]]:
    """What brings columns of the validation data into the types of the training data.

    Parameters
    ----------
    names : sequence of str
        Of the columns, for messages.
    own, others : list
        Key, dtype and row shape of every array of every column, see ``TensorShard.inputs``.
    is_target : bool
        Targets may differ in more than their dtype: the loss looks at them.

    Yields
    ------
    number, key, cast
        Which column, the key of its array, and a function of a tensor.

    Raises
    ------
    UsageError
        For features of which one is boolean and the other a number, or whose keys, dimensions or
        numbers differ.
    """
    if len(own) != len(others) and not is_target:
        raise UsageError(
            f"validation_data has {len(own)} columns of features but the training data has "
            f"{len(others)}; give both the same"
        )
    for number, (name, here, there) in enumerate(zip(names, own, others, strict=False)):
        known = {key: kind for key, *kind in there}
        for key, *kind in here:
            dtype = _dtype_like(kind, known.get(key), name, is_target)
            if dtype is not None:
                yield number, key, functools.partial(in_dtype, dtype=dtype, name=name)


def _dtype_like(own, others, name, is_target):
    """The dtype in which values are given to the model; None leaves them as they are."""
    import torch

    is_alike = (
        others is not None
        and len(own[1]) == len(others[1])
        and all((own[0] == kind) == (others[0] == kind) for kind in ("bool", TEXT))
    )
    if is_alike:
        return None if own[0] == others[0] else getattr(torch, others[0])
    if is_target:
        return None
    raise UsageError(
        f"'{name}' is {_spoken(own)} in validation_data but {_spoken(others)} in the training "
        "data; give both the same type"
    )


def _spoken(kind):
    if kind is None:
        return "a dict without one of its keys"
    dtype, shape = kind
    dtype = "text" if dtype == TEXT else dtype
    return f"{dtype} of {len(shape)} dimension{'s' * (len(shape) != 1)} per row" if shape else dtype


def in_dtype(tensor, dtype, name: str):
    """Numbers in another dtype; one that it cannot hold is refused."""
    import torch

    cast = tensor.to(dtype)
    if not dtype.is_floating_point and not torch.equal(back := cast.to(tensor.dtype), tensor):
        first = tensor[back != tensor][0].item()
        raise UsageError(
            f"'{name}' of validation_data holds {first}, which is no {str(dtype)[6:]}, its type in "
            "the training data; give both the same type"
        )
    return cast


# -- batches of a loader, whose types are seen when they are made ----------------------------------


def form_of(batch: Any) -> Any:
    """dtype and dimensions of every tensor of a batch, in the structure of the batch."""
    import torch

    if isinstance(batch, torch.Tensor):
        return batch.dtype, batch.ndim
    if isinstance(batch, Mapping):
        return {key: form_of(value) for key, value in batch.items()}
    return [form_of(value) for value in batch] if isinstance(batch, list | tuple) else None


def in_form(batch: Any, form: Any, name: str = "batch") -> Any:
    """A batch with numbers in the dtypes of another one; what is of another form stays."""
    import torch

    if isinstance(batch, torch.Tensor):
        is_alike = (
            isinstance(form, tuple)
            and form[1] == batch.ndim
            and (form[0] == torch.bool) == (batch.dtype == torch.bool)
        )
        return in_dtype(batch, form[0], name) if is_alike and form[0] != batch.dtype else batch
    if isinstance(batch, Mapping) and isinstance(form, dict):
        return {key: in_form(value, form.get(key), str(key)) for key, value in batch.items()}
    if type(batch) in (list, tuple) and isinstance(form, list) and len(form) == len(batch):
        made = [
            in_form(v, f, f"{name}[{i}]") for i, (v, f) in enumerate(zip(batch, form, strict=True))
        ]
        return type(batch)(made)
    return batch
