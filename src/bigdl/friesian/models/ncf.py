"""Neural collaborative filtering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bigdl.friesian.models.inputs import TableModel
from bigdl.friesian.models.layers import FieldEmbeddings, mlp

if TYPE_CHECKING:
    from bigdl.friesian.ops.schema import FeatureSchema

__all__ = ["NCF"]


class NCF(TableModel):
    """The probability that a user chooses an item, of their two numbers alone (NeuMF).

    A product of embeddings (generalised matrix factorisation) and a network on other embeddings
    are weighed together: He et al., "Neural Collaborative Filtering", WWW 2017.

    Parameters
    ----------
    user_size, item_size : int
        The largest numbers plus 1.
    factors : int, default 16
        Length of the embeddings of the product.
    hidden : sequence of int, default (64, 32, 16)
        Widths of the network; the embeddings of user and item make its first layer's input and are
        half as long as its width each.
    dropout : float, default 0.0
    user, item : str
        Names of the columns.
    """

    def __init__(
        self,
        user_size: int,
        item_size: int,
        factors: int = 16,
        hidden: Sequence[int] = (64, 32, 16),
        dropout: float = 0.0,
        user: str = "user",
        item: str = "item",
    ):
        super().__init__([user, item])
        sizes, half = (user_size, item_size), hidden[0] // 2
        self.product = FieldEmbeddings(sizes, factors)
        self.network = FieldEmbeddings(sizes, half)
        self.hidden = mlp(2 * half, hidden, dropout)
        self.head = nn.Linear(factors + hidden[-1], 1)

    @classmethod
    def from_schema(
        cls, schema: FeatureSchema, user: str = "user", item: str = "item", **options
    ) -> NCF:
        """A model of the size of a table.

        Parameters
        ----------
        schema : FeatureSchema
        user, item : str
            Columns of whole numbers.
        **options
            Of the class.
        """
        sizes = schema.cardinality(user), schema.cardinality(item)
        return cls(*sizes, user=user, item=item, **options)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Probabilities of shape ``(n,)`` for numbers of shape ``(n,)``."""
        pair = (user, item)
        product = self.product(pair).prod(1)
        hidden = self.hidden(self.network(pair).flatten(1))
        return torch.sigmoid(self.head(torch.cat([product, hidden], 1))).squeeze(1)
