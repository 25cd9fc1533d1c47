"""Layers that the models share, and columns as their input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bigdl.common.errors import UsageError


class FieldEmbeddings(nn.Module):
    """Embeddings of several columns, in one table.

    One look-up finds the vectors of all columns.  A number that a column did not have when the
    table was sized stands for 0, the number of unknown values.

    Parameters
    ----------
    sizes : iterable of int
        How many numbers each column has.
    dim : int
        Length of a vector.
    """

    if TYPE_CHECKING:  # TorchScript would read them
        sizes: Tensor
        begins: Tensor

    def __init__(self, sizes: Iterable[int], dim: int):
        super().__init__()
        sizes = [max(1, size) for size in sizes]
        self.table = nn.Embedding(sum(sizes), dim)
        nn.init.normal_(self.table.weight, std=0.05)
        self.register_buffer("sizes", torch.tensor(sizes, dtype=torch.int64), persistent=False)
        begins = torch.tensor([0, *accumulate(sizes)][:-1], dtype=torch.int64)
        self.register_buffer("begins", begins, persistent=False)

    def forward(self, columns: Sequence[Tensor]) -> Tensor:
        """Vectors of shape ``(..., fields, dim)`` for columns of numbers of shape ``(...)``."""
        numbers = torch.stack([column.to(torch.int64) for column in columns], -1)
        known = (numbers >= 0) & (numbers < self.sizes)
        return self.table(torch.where(known, numbers, 0) + self.begins)


def mlp(width: int, hidden: Sequence[int], dropout: float = 0.0, activation=nn.ReLU):
    """Layers of the widths `hidden`, each with an activation.

    Parameters
    ----------
    width : int
        Of the input.
    hidden : sequence of int
    dropout : float
        Share of the activations that is left out while training.
    activation : callable
        Makes a module.

    Returns
    -------
    torch.nn.Sequential
    """
    layers: list[nn.Module] = []
    for into, out in pairwise([width, *hidden]):
        layers += [nn.Linear(into, out), activation()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def stack_numbers(columns: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Columns of shape ``(n,)`` as a matrix ``(n, columns)``."""
    return torch.stack([column.to(dtype) for column in columns], -1)


class TableModel(nn.Module):
    """Base of the models whose inputs are columns of a table.

    Attributes
    ----------
    feature_cols : list of str
        The columns that ``forward`` takes, in its order: what ``fit`` of an Estimator needs.
    """

    def __init__(self, feature_cols: Iterable[str]):
        super().__init__()
        self.feature_cols = list(feature_cols)

    def _checked(self, columns: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if len(columns) != len(self.feature_cols):
            raise UsageError(
                f"{type(self).__name__} takes {len(self.feature_cols)} columns "
                f"{self.feature_cols}, but got {len(columns)}; pass feature_cols=model.feature_cols"
            )
        return columns


class TabularInput(nn.Module):
    """Embeddings of categories beside numbers, as one vector for each row.

    Parameters
    ----------
    categories : mapping of str to int
        Columns of whole numbers, and how many there are.
    numbers : sequence of str
        Columns of numbers, which should be scaled.
    dim : int
        Length of an embedding.
    sequences : mapping of str to int
        Columns of arrays of whole numbers, of which 0 is padding: their embeddings are averaged.

    Attributes
    ----------
    feature_cols : list of str
        `categories`, `sequences` and `numbers`, in this order.
    width : int
        Length of the vector.
    """

    def __init__(
        self,
        categories: Mapping[str, int],
        numbers: Sequence[str] = (),
        dim: int = 16,
        sequences: Mapping[str, int] | None = None,
    ):
        super().__init__()
        sequences = sequences or {}
        if not categories and not numbers and not sequences:
            raise UsageError("The model has no columns; name categories or numbers")
        self.feature_cols = [*categories, *sequences, *numbers]
        self.width = (len(categories) + len(sequences)) * dim + len(numbers)
        self._counts = (len(categories), len(sequences))
        self.fields = FieldEmbeddings(categories.values(), dim) if categories else None
        self.bags = nn.ModuleList(FieldEmbeddings([size], dim) for size in sequences.values())

    def forward(self, columns: Sequence[Tensor]) -> Tensor:
        """A matrix ``(n, width)`` for the columns."""
        first, second = self._counts[0], sum(self._counts)
        parts = []
        if self.fields is not None:
            parts.append(self.fields(columns[:first]).flatten(1))
        for bag, numbers in zip(self.bags, columns[first:second], strict=True):
            parts.append(_mean_of_known(bag, numbers))
        if len(columns) > second:
            dtype = parts[0].dtype if parts else torch.get_default_dtype()
            parts.append(stack_numbers(columns[second:], dtype))
        return torch.cat(parts, 1)


def _mean_of_known(bag: nn.Module, numbers: Tensor) -> Tensor:
    vectors = bag([numbers]).squeeze(-2)
    known = (numbers != 0).unsqueeze(-1).to(vectors.dtype)
    return (vectors * known).sum(1) / known.sum(1).clamp(min=1)
