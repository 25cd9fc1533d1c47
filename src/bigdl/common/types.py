"""Types of annotations that several packages use; importing this module imports no library."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf
    import torch

StrPath: TypeAlias = "str | os.PathLike[str]"
"""Path of a file or a directory."""

Tensor: TypeAlias = "np.ndarray | torch.Tensor | tf.Tensor"
"""Array or tensor of a framework."""

Tensors: TypeAlias = "Tensor | Sequence[Tensors] | Mapping[str, Tensors]"
"""Tensor, or a nest of lists, tuples and dicts of them: a batch, or a model's input or output."""

ColumnNames: TypeAlias = "str | Sequence[str]"
"""Name of a column, or names of several columns."""
