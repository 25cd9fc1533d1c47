"""DeepFM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bigdl.common.errors import UsageError
from bigdl.friesian.models.columns import cardinalities, check_numbers
from bigdl.friesian.models.inputs import TableModel
from bigdl.friesian.models.layers import FieldEmbeddings, mlp, stack_numbers

if TYPE_CHECKING:
    from bigdl.friesian.ops.schema import FeatureSchema

__all__ = ["DeepFM"]


class DeepFM(TableModel):
    """The probability of a click, by products of all pairs of fields and a network on them.

    Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI
    2017.  A number is a field whose embedding is a vector times the number.

    Parameters
    ----------
    categories : mapping of str to int
        Columns of whole numbers, and how many there are.
    numbers : sequence of str
        Columns of scaled numbers.
    dim : int, default 16
        Length of an embedding.
    hidden : sequence of int, default (128, 64)
    dropout : float, default 0.0
    """

    def __init__(
        self,
        categories: Mapping[str, int],
        numbers: Sequence[str] = (),
        dim: int = 16,
        hidden: Sequence[int] = (128, 64),
        dropout: float = 0.0,
    ):
        if not categories:
            raise UsageError("categories has no columns; name those that are embedded")
        super().__init__([*categories, *numbers])
        self._categories = len(categories)
        self.linear = FieldEmbeddings(categories.values(), 1)
        nn.init.zeros_(self.linear.table.weight)
        self.fields = FieldEmbeddings(categories.values(), dim)
        if numbers:
            self.slopes = nn.Parameter(torch.zeros(len(numbers)))
            self.directions = nn.Parameter(torch.randn(len(numbers), dim) * 0.05)
        self.bias = nn.Parameter(torch.zeros(()))
        self.hidden = mlp(len(self.feature_cols) * dim, hidden, dropout)
        self.head = nn.Linear(hidden[-1], 1)

    @classmethod
    def from_schema(
        cls,
        schema: FeatureSchema,
        categories: Iterable[str],
        numbers: Iterable[str] = (),
        **options,
    ) -> DeepFM:
        """A model of the size of a table.

        Parameters
        ----------
        schema : FeatureSchema
        categories : list of str
            Columns of whole numbers.
        numbers : list of str
        **options
            Of the class.
        """
        return cls(cardinalities(schema, categories), check_numbers(schema, numbers), **options)

    def forward(self, *columns: Tensor) -> Tensor:
        """Probabilities of shape ``(n,)`` for the columns `feature_cols`."""
        columns = self._checked(columns)
        categories, numbers = columns[: self._categories], columns[self._categories :]
        first = self.bias + self.linear(categories).sum((1, 2))
        fields = self.fields(categories)
        if numbers:
            values = stack_numbers(numbers, fields.dtype)
            first = first + values @ self.slopes
            fields = torch.cat([fields, values.unsqueeze(-1) * self.directions], 1)
        # the sum of the products of all pairs is half of (square of the sum − sum of the squares)
        pairs = (fields.sum(1).square() - fields.square().sum(1)).sum(1) / 2
        deep = self.head(self.hidden(fields.flatten(1))).squeeze(1)
        return torch.sigmoid(first + pairs + deep)
