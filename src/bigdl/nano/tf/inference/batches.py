"""Data that a user gives for calibration, timing and metrics, as batches of flat lists."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.structure import flatten, is_tensor
from bigdl.nano.tf.inference.calls import CallInputs

__all__ = ["Batch", "batches_of", "first_element", "first_rows"]


@dataclass(frozen=True)
class Batch:
    """Rows of the data.

    Attributes
    ----------
    arrays : list of ndarray
        The inputs as a flat list.
    targets
        Nested ndarrays; None where the data have none.
    """

    arrays: list
    targets: Any = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.arrays[0])


def batches_of(data: tuple[Any, Any], inputs: CallInputs, size: int) -> Iterator[Batch]:
    """Batches of data.

    Parameters
    ----------
    data : tuple
        ``x`` and ``y``. `x` may be an ndarray, a tensor, a nest of them, or a ``tf.data.Dataset``
        (or another iterable) of ``x``, ``(x, y)`` or ``(x, y, weight)``, batched or not.
    inputs : CallInputs
    size : int
        Rows of a batch; batches of the user's making stay as they are.
    """
    x, y = data
    if not _is_stream(x):
        leaves = _leaves(x, inputs)
        for start in range(0, len(leaves[0]), size):
            rows = slice(start, start + size)
            yield Batch([leaf[rows] for leaf in leaves], _sliced(y, rows))
        return
    elements = iter(x)
    while chunk := list(itertools.islice(elements, 1)):
        features, targets = _split(chunk[0])
        if _is_batched(features, inputs):
            yield Batch(_leaves(features, inputs), _plain_targets(targets))
            continue
        rest = [_split(each) for each in itertools.islice(elements, size - 1)]
        pairs = [(features, targets), *rest]
        stacked = _leaves(_stacked([features for features, _ in pairs]), inputs)
        yield Batch(stacked, None if targets is None else _stacked([t for _, t in pairs]))


def first_rows(data: tuple[Any, Any], inputs: CallInputs, count: int) -> list[np.ndarray]:
    """The first rows of the data's inputs as a flat list of arrays; fewer if there are fewer.

    Raises
    ------
    UsageError
        If there is none.
    """
    found: list[list[np.ndarray]] = []
    rows = 0
    for batch in batches_of(data, inputs, count):
        found.append(batch.arrays)
        rows += batch.rows
        if rows >= count:
            break
    if not rows:
        raise UsageError("x holds no row; give at least one")
    return [np.concatenate(column)[:count] for column in zip(*found, strict=True)]


def first_element(x: Any, y: Any = None) -> Any:
    """Inputs of one element of the data, with a batch as their first dimension.

    A stream that yields single rows cannot be told from one of batches without a model's inputs;
    it is taken for one of batches.
    """
    if not _is_stream(x):
        return x
    for element in x:
        return _split(element)[0]
    raise UsageError("x holds no row; give at least one")


def _is_stream(x: Any) -> bool:
    if is_tensor(x) or isinstance(x, (list, tuple, Mapping)):
        return False
    if not isinstance(x, Iterable):
        raise UsageError(
            "x must be an array, a tensor, a list or dict of them, or a tf.data.Dataset, not a "
            f"{type(x).__name__}"
        )
    return True


def _split(element: Any) -> tuple[Any, Any]:
    if isinstance(element, tuple):
        return element[0], element[1] if len(element) > 1 else None
    return element, None


def _leaves(x: Any, inputs: CallInputs) -> list[np.ndarray]:
    several = isinstance(x, (list, tuple)) and len(inputs.parameters) == len(x) > 1
    return inputs.arrays(x if several else [x])


def _is_batched(features: Any, inputs: CallInputs) -> bool:
    """Whether an element holds rows; one row has a dimension less than the model's input."""
    ranks = [np.ndim(leaf) for leaf in flatten(features)[0]]
    return any(rank >= len(port.shape) for rank, port in zip(ranks, inputs.ports, strict=False))


def _sliced(y: Any, rows: slice) -> Any:
    if y is None:
        return None
    leaves, structure = flatten(y)
    return structure.rebuild([np.asarray(leaf)[rows] for leaf in leaves])


def _plain_targets(y: Any) -> Any:
    if y is None:
        return None
    leaves, structure = flatten(y)
    return structure.rebuild([np.asarray(leaf) for leaf in leaves])


def _stacked(values: list) -> Any:
    columns = zip(*(flatten(each)[0] for each in values), strict=True)
    structure = flatten(values[0])[1]
    return structure.rebuild([np.stack([np.asarray(x) for x in column]) for column in columns])
