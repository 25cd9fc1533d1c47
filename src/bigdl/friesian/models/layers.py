"""Layers that the models share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

__all__ = ["FieldEmbeddings", "mlp", "stack_numbers"]


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
