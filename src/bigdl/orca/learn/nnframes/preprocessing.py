"""Preprocessing of feature and label columns for NNFrames.

A preprocessing step maps the tensor of one row. The steps of this module process a whole batch in
one operation. A user function is called row by row, and its results are stacked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bigdl.common.errors import UsageError

__all__ = [
    "ArrayToTensor",
    "ChainedPreprocessing",
    "FeatureLabelPreprocessing",
    "MLlibVectorToTensor",
    "Preprocessing",
    "ScalarToTensor",
    "SeqToMultipleTensors",
    "SeqToTensor",
    "TensorToSample",
]


class Preprocessing:
    """Base class of preprocessing steps; subclasses override :meth:`batch`.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.nnframes import Preprocessing
    >>> class Centred(Preprocessing):
    ...     def batch(self, rows):
    ...         return rows - rows.mean(dim=1, keepdim=True)
    >>> Centred().batch(torch.tensor([[1.0, 3.0], [4.0, 4.0]]))
    tensor([[-1.,  1.],
            [ 0.,  0.]])
    """

    def __call__(self, value):
        """Preprocess one row: a number, a vector, nested lists or a tensor.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
        """
        if hasattr(value, "toArray"):  # Spark vectors
            value = value.toArray()
        row = torch.as_tensor(value)
        made = self.batch((row.float() if row.dtype == torch.float64 else row).unsqueeze(0))
        return tuple(t[0] for t in made) if isinstance(made, tuple) else made[0]

    def batch(self, rows: torch.Tensor) -> torch.Tensor:
        """Preprocess all rows of a batch.

        Parameters
        ----------
        rows : torch.Tensor, shape (n, ...)

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            Tensors of n rows; a tuple has one tensor per model input.
        """
        return rows


class TensorToSample(Preprocessing):
    """Identity preprocessing step, for compatibility with programs for BigDL 2.x.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.nnframes import ChainedPreprocessing, SeqToTensor, TensorToSample
    >>> ChainedPreprocessing([SeqToTensor([2, 2]), TensorToSample()]).batch(torch.zeros(5, 4)).shape
    torch.Size([5, 2, 2])
    """


class SeqToTensor(Preprocessing):
    """Conversion of numeric rows to tensors of a given shape.

    Parameters
    ----------
    size : sequence of int, optional
        Shape of one row; default its current shape, or ``(1,)`` for a number.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.nnframes import SeqToTensor
    >>> SeqToTensor([2, 2]).batch(torch.zeros(5, 4)).shape  # five rows with four numbers each
    torch.Size([5, 2, 2])
    """

    def __init__(self, size: Sequence[int] | int | None = None):
        size = (size,) if isinstance(size, int) else size
        self.size = None if size is None else tuple(size)
        if not all(_is_size(s) for s in self.size or ()):
            raise UsageError(
                f"The size of a row must be a list of ints >= 1, got {list(self.size or ())}",
                code="argument-value",
                argument="size",
            )

    def batch(self, rows):
        if self.size is None:
            return rows.unsqueeze(1) if rows.ndim == 1 else rows
        try:
            return rows.reshape(len(rows), *self.size)
        except RuntimeError:
            raise UsageError(
                f"A row of shape {tuple(rows.shape[1:])} cannot be reshaped to {list(self.size)}; "
                "both must have the same number of elements",
                code="data-shape",
            ) from None

    def __repr__(self):
        return f"{type(self).__name__}({'' if self.size is None else list(self.size)})"


class ArrayToTensor(SeqToTensor):
    """Conversion of an array column to tensors of shape `size`.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.nnframes import ArrayToTensor
    >>> ArrayToTensor([1, 28, 28]).batch(torch.zeros(5, 784)).shape
    torch.Size([5, 1, 28, 28])
    """


class MLlibVectorToTensor(SeqToTensor):
    """Conversion of a column of Spark ML vectors to tensors of shape `size`.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.nnframes import MLlibVectorToTensor
    >>> MLlibVectorToTensor([4]).batch(torch.zeros(5, 4)).shape
    torch.Size([5, 4])
    """


class ScalarToTensor(SeqToTensor):
    """Conversion of numbers to tensors of shape ``(1,)``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.nnframes import ScalarToTensor
    >>> ScalarToTensor().batch(torch.tensor([0.5, 0.7]))
    tensor([[0.5000],
            [0.7000]])
    """

    def __init__(self):
        super().__init__((1,))

    def __repr__(self):
        return "ScalarToTensor()"


class SeqToMultipleTensors(Preprocessing):
    """Preprocessing step that splits a flat row into several model inputs of given shapes.

    Parameters
    ----------
    sizes : sequence of sequence of int

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.nnframes import SeqToMultipleTensors
    >>> rows = torch.tensor([[1.0, 2.0, 3.0]])  # a user with one and an item with two numbers
    >>> SeqToMultipleTensors([[1], [2]]).batch(rows)
    (tensor([[1.]]), tensor([[2., 3.]]))
    """

    def __init__(self, sizes: Sequence[Sequence[int]]):
        self.parts = [SeqToTensor(size) for size in sizes]

    def batch(self, rows):
        widths = [math.prod(part.size) for part in self.parts]
        flat = rows.reshape(len(rows), -1)
        if flat.shape[1] != sum(widths):
            raise UsageError(
                f"A row of {flat.shape[1]} numbers cannot be split by {self!r}, which needs "
                f"{sum(widths)}",
                code="data-shape",
            )
        cut = flat.split(widths, dim=1)
        return tuple(part.batch(piece) for part, piece in zip(self.parts, cut, strict=True))

    def __repr__(self):
        return f"SeqToMultipleTensors({[list(part.size) for part in self.parts]})"


class ChainedPreprocessing(Preprocessing):
    """Sequence of preprocessing steps.

    Parameters
    ----------
    transformers : sequence of Preprocessing, callable or size

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.nnframes import ChainedPreprocessing, SeqToTensor
    >>> chain = ChainedPreprocessing([SeqToTensor([2, 2]), lambda row: row / 255])
    >>> chain.batch(torch.tensor([[0.0, 255.0, 0.0, 255.0]]))
    tensor([[[0., 1.],
             [0., 1.]]])
    """

    def __init__(self, transformers: Sequence[Any]):
        self.steps = [as_preprocessing(each) for each in transformers]

    def batch(self, rows):
        for number, step in enumerate(self.steps):
            if isinstance(rows, tuple):
                raise UsageError(
                    f"Step {number} of {self!r} cannot follow a step that returns several tensors",
                    code="argument-conflict",
                )
            rows = step.batch(rows)
        return rows

    def __repr__(self):
        return f"ChainedPreprocessing({self.steps})"


class FeatureLabelPreprocessing:
    """Preprocessing of features and labels, for ``setSamplePreprocessing``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.nnframes import (
    ...     FeatureLabelPreprocessing, NNEstimator, ScalarToTensor, SeqToTensor,
    ... )
    >>> estimator = NNEstimator(torch.nn.Linear(3, 1), torch.nn.MSELoss())
    >>> preprocessing = FeatureLabelPreprocessing(SeqToTensor([3]), ScalarToTensor())
    >>> _ = estimator.setSamplePreprocessing(preprocessing)
    """

    def __init__(self, feature_transformer: object, label_transformer: object = None):
        self.feature = as_preprocessing(feature_transformer)
        self.label = as_preprocessing(label_transformer)


class RowFunction(Preprocessing):
    """Preprocessing step that applies a user function to the tensor of each row.

    Parameters
    ----------
    function : callable
        Returns a tensor (or a value that torch converts to one), or a tuple of these. All rows must
        have the same shape.
    """

    def __init__(self, function: Callable[[torch.Tensor], Any]):
        self.function = function

    def batch(self, rows):
        made = [self.function(row) for row in rows]
        if made and isinstance(made[0], tuple):
            return tuple(self._stacked(column) for column in zip(*made, strict=True))
        return self._stacked(made) if made else torch.empty(0)

    def _stacked(self, made):
        try:
            return torch.stack([torch.as_tensor(each) for each in made])
        except RuntimeError as error:
            raise UsageError(
                f"{self!r} must return tensors of the same shape for all rows: {error}",
                code="data-shape",
            ) from None

    def __repr__(self):
        return getattr(self.function, "__name__", type(self.function).__name__)


def as_preprocessing(value: object) -> Preprocessing | None:
    """Convert ``feature_preprocessing=`` or ``label_preprocessing=`` to a Preprocessing.

    Parameters
    ----------
    value : Preprocessing, callable, sequence of int, sequence of sequence of int or None
        A list of ints is the shape of a row; a list of such lists has the shapes of several inputs.
    """
    if value is None or isinstance(value, Preprocessing):
        return value
    if isinstance(value, type) and issubclass(value, Preprocessing):
        raise UsageError(
            f"A preprocessing must be an instance; write {value.__name__}()", code="argument-type"
        )
    if isinstance(value, list | tuple) and value:
        if all(_is_size(each) for each in value):
            return SeqToTensor(value)
        if all(isinstance(each, list | tuple) and all(map(_is_size, each)) for each in value):
            return SeqToMultipleTensors(value)
        if all(isinstance(each, Preprocessing) or callable(each) for each in value):
            return ChainedPreprocessing(value)
    elif callable(value):
        return RowFunction(value)
    raise UsageError(
        "A preprocessing must be a Preprocessing, a function of one row, or the size of a row as a "
        f"list of ints, got {value!r}",
        code="argument-type",
    )


def _is_size(value):
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
