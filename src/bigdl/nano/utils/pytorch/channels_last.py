"""Where the channels of images lie in memory, input by input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.inference.graphs import LAYOUTS, layouts_of

__all__ = ["apply_proper_channels_last", "generate_channels_last_available"]


def generate_channels_last_available(inputs: Sequence[Any]) -> list[str]:
    """For each input ``"channels_last"`` (4-D), ``"channels_last_3d"`` (5-D) or ``"original"``.

    Parameters
    ----------
    inputs : sequence
        Tensors; anything else counts as ``"original"``.
    """
    tensors = [each if torch.is_tensor(each) else torch.empty(()) for each in inputs]
    return layouts_of(tensors)


def apply_proper_channels_last(flag: str, input_item: Any) -> Any:
    """A tensor in the layout that `flag` names, which is one of the above.

    What is no tensor comes back as it is.

    Raises
    ------
    UsageError
        If there is no such layout.
    """
    if flag not in (*LAYOUTS, "original"):
        names = ", ".join(map(repr, (*LAYOUTS, "original")))
        raise UsageError(f"There is no layout {flag!r}; choose one of {names}")
    if flag == "original" or not torch.is_tensor(input_item):
        return input_item
    return input_item.contiguous(memory_format=LAYOUTS[flag])
