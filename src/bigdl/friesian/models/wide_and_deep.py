"""Wide & Deep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bigdl.common.errors import UsageError
from bigdl.friesian.models.columns import cardinalities, check_numbers
from bigdl.friesian.models.inputs import TableModel, TabularInput
from bigdl.friesian.models.layers import FieldEmbeddings, mlp

if TYPE_CHECKING:
    from bigdl.friesian.ops.schema import FeatureSchema

__all__ = ["WideAndDeep"]


class WideAndDeep(TableModel):
    """The probability of a click, by a linear model of crosses and a network.

    The linear part remembers which crossed categories came with clicks, the network generalises
    over embeddings: Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016.

    Parameters
    ----------
    wide : mapping of str to int
        Columns of the linear part, such as those of ``cross_columns``, and how many values each
        has.
    categories : mapping of str to int
        Columns that are embedded for the network; they may be in `wide` too.
    numbers : sequence of str
        Columns of scaled numbers, for the network.
    dim : int, default 16
        Length of an embedding.
    hidden : sequence of int, default (128, 64)
    dropout : float, default 0.0
    """

    def __init__(
        self,
        wide: Mapping[str, int],
        categories: Mapping[str, int],
        numbers: Sequence[str] = (),
        dim: int = 16,
        hidden: Sequence[int] = (128, 64),
        dropout: float = 0.0,
    ):
        if not wide:
            raise UsageError("wide has no columns; name those of the linear part")
        super().__init__(dict.fromkeys([*wide, *categories, *numbers]))
        self.linear = FieldEmbeddings(wide.values(), 1)
        nn.init.zeros_(self.linear.table.weight)
        self.input = TabularInput(categories, numbers, dim)
        self.hidden = mlp(self.input.width, hidden, dropout)
        self.head = nn.Linear(hidden[-1], 1)
        self._wide = [self.feature_cols.index(name) for name in wide]
        self._deep = [self.feature_cols.index(name) for name in self.input.feature_cols]

    @classmethod
    def from_schema(
        cls,
        schema: FeatureSchema,
        wide: Iterable[str],
        categories: Iterable[str],
        numbers: Iterable[str] = (),
        **options,
    ) -> WideAndDeep:
        """A model of the size of a table.

        Parameters
        ----------
        schema : FeatureSchema
        wide, categories : list of str
            Columns of whole numbers.
        numbers : list of str
        **options
            Of the class.
        """
        sizes = cardinalities(schema, wide), cardinalities(schema, categories)
        return cls(*sizes, check_numbers(schema, numbers), **options)

    def forward(self, *columns: Tensor) -> Tensor:
        """Probabilities of shape ``(n,)`` for the columns `feature_cols`."""
        columns = self._checked(columns)
        wide = self.linear([columns[i] for i in self._wide]).sum((1, 2))
        deep = self.head(self.hidden(self.input([columns[i] for i in self._deep]))).squeeze(1)
        return torch.sigmoid(wide + deep)
