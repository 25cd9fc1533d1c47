"""Preprocessing of the features and label columns, before the model or the loss sees them.

A preprocessing is called with the tensor of one row.  Those of this module know what they do to a
whole batch, so a batch costs them one operation; a function of the user is called row by row and
its results are stacked.
"""

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
    """Base class: :meth:`batch` says what becomes of the rows of a batch.

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
        """One row: a number, a vector, nested lists or a tensor.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
        """
        if hasattr(value, "toArray"):  # Spark's vectors
            value = value.toArray()
        row = torch.as_tensor(value)
        made = self.batch((row.float() if row.dtype == torch.float64 else row).unsqueeze(0))
        return tuple(t[0] for t in made) if isinstance(made, tuple) else made[0]

    def batch(self, rows: torch.Tensor) -> Any:
        """All rows of a batch.

        Parameters
        ----------
        rows : torch.Tensor, shape (n, ...)

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            Of n rows each; a tuple is several inputs of the model.
        """
        return rows


class TensorToSample(Preprocessing):
    """Leave rows as they are; the last link of chains in programs for BigDL 2.x.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.nnframes import ChainedPreprocessing, SeqToTensor, TensorToSample
    >>> ChainedPreprocessing([SeqToTensor([2, 2]), TensorToSample()]).batch(torch.zeros(5, 4)).shape
    torch.Size([5, 2, 2])
    """


class SeqToTensor(Preprocessing):
    """Numbers to a tensor of a shape.

    Parameters
    ----------
    size : sequence of int, optional
        Shape of one row; default the shape that it has, and ``(1,)`` for a number.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.nnframes import SeqToTensor
    >>> SeqToTensor([2, 2]).batch(torch.zeros(5, 4)).shape  # five rows of four numbers
    torch.Size([5, 2, 2])
    """

    def __init__(self, size: Sequence[int] | int | None = None):
        size = (size,) if isinstance(size, int) else size
        self.size = None if size is None else tuple(size)
        if not all(_is_size(s) for s in self.size or ()):
            raise UsageError(
                "The size of a row must be a list of ints of at least 1, got "
                f"{list(self.size or ())}",
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
                "the two must hold as many numbers",
                code="data-shape",
            ) from None

    def __repr__(self):
        return f"{type(self).__name__}({'' if self.size is None else list(self.size)})"


class ArrayToTensor(SeqToTensor):
    """An array column to a tensor of the shape `size`.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.nnframes import ArrayToTensor
    >>> ArrayToTensor([1, 28, 28]).batch(torch.zeros(5, 784)).shape
    torch.Size([5, 1, 28, 28])
    """


class MLlibVectorToTensor(SeqToTensor):
    """A column of Spark ML vectors to a tensor of the shape `size`.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.nnframes import MLlibVectorToTensor
    >>> MLlibVectorToTensor([4]).batch(torch.zeros(5, 4)).shape
    torch.Size([5, 4])
    """


class ScalarToTensor(SeqToTensor):
    """A number to a tensor of the shape ``(1,)``.

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
    """A flat row cut in several inputs of the model, each of its own shape.

    Parameters
    ----------
    sizes : sequence of sequence of int

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.nnframes import SeqToMultipleTensors
    >>> rows = torch.tensor([[1.0, 2.0, 3.0]])  # a user and an item of two numbers
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
                f"A row of {flat.shape[1]} numbers cannot be cut in {self!r}, which takes "
                f"{sum(widths)}",
                code="data-shape",
            )
        cut = flat.split(widths, dim=1)
        return tuple(part.batch(piece) for part, piece in zip(self.parts, cut, strict=True))

    def __repr__(self):
        return f"SeqToMultipleTensors({[list(part.size) for part in self.parts]})"


class ChainedPreprocessing(Preprocessing):
    """One preprocessing after the other.

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
                    f"Step {number} of {self!r} cannot follow one that gives several tensors",
                    code="argument-conflict",
                )
            rows = step.batch(rows)
        return rows

    def __repr__(self):
        return f"ChainedPreprocessing({self.steps})"


class FeatureLabelPreprocessing:
    """The preprocessing of features and of labels in one object, for ``setSamplePreprocessing``.

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

    def __init__(self, feature_transformer: Any, label_transformer: Any = None):
        self.feature = as_preprocessing(feature_transformer)
        self.label = as_preprocessing(label_transformer)


class RowFunction(Preprocessing):
    """A function of the user, of the tensor of one row.

    Parameters
    ----------
    function : callable
        Gives a tensor (or what becomes one), or a tuple of them, of one shape for all rows.
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
                f"{self!r} must return tensors of one shape for all rows: {error}",
                code="data-shape",
            ) from None

    def __repr__(self):
        return getattr(self.function, "__name__", type(self.function).__name__)


def as_preprocessing(given: Any) -> Preprocessing | None:
    """Convert the value of ``feature_preprocessing=`` or ``label_preprocessing=``.

    Parameters
    ----------
    given : Preprocessing, callable, sequence of int, sequence of sequence of int or None
        A list of ints is the shape of a row, a list of such lists the shapes of several inputs.
    """
    if given is None or isinstance(given, Preprocessing):
        return given
    if isinstance(given, type) and issubclass(given, Preprocessing):
        raise UsageError(
            f"A preprocessing must be an instance; write {given.__name__}()", code="argument-type"
        )
    if isinstance(given, list | tuple) and given:
        if all(_is_size(each) for each in given):
            return SeqToTensor(given)
        if all(isinstance(each, list | tuple) and all(map(_is_size, each)) for each in given):
            return SeqToMultipleTensors(given)
        if all(isinstance(each, Preprocessing) or callable(each) for each in given):
            return ChainedPreprocessing(given)
    elif callable(given):
        return RowFunction(given)
    raise UsageError(
        "A preprocessing must be a Preprocessing, a function of one row, or the size of a row as a "
        f"list of ints, got {given!r}",
        code="argument-type",
    )


def _is_size(value):
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
