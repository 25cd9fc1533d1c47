"""Two towers, for retrieval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigdl.common.errors import UsageError
from bigdl.friesian.models.layers import TableModel, TabularInput, mlp
from bigdl.friesian.ops.schema import FeatureSchema, cardinalities, check_numbers


class Tower(TableModel):
    """A vector of length 1 for the columns of a user, or of an item.

    Parameters
    ----------
    categories : mapping of str to int
        Columns of whole numbers, and how many there are.
    numbers : sequence of str
        Columns of scaled numbers.
    dim : int, default 32
        Length of an embedding, and of the vector.
    hidden : sequence of int, default (64,)
    sequences : mapping of str to int
        Columns of arrays of whole numbers, of which 0 is padding; their embeddings are averaged.
    """

    def __init__(
        self,
        categories: Mapping[str, int],
        numbers: Sequence[str] = (),
        dim: int = 32,
        hidden: Sequence[int] = (64,),
        sequences: Mapping[str, int] | None = None,
    ):
        table = TabularInput(categories, numbers, dim, sequences)
        super().__init__(table.feature_cols)
        self.input = table
        self.hidden = mlp(table.width, hidden)
        self.head = nn.Linear(hidden[-1] if hidden else table.width, dim)

    @classmethod
    def from_schema(
        cls,
        schema: FeatureSchema,
        categories: Iterable[str],
        numbers: Iterable[str] = (),
        sequences: Iterable[str] = (),
        **options,
    ) -> Self:
        """A tower of the size of a table.

        Parameters
        ----------
        schema : FeatureSchema
        categories, numbers, sequences : list of str
        **options
            Of the class.
        """
        return cls(
            cardinalities(schema, categories),
            check_numbers(schema, numbers),
            sequences=cardinalities(schema, sequences),
            **options,
        )

    def forward(self, *columns: Tensor) -> Tensor:
        """Vectors of shape ``(n, dim)`` for the columns `feature_cols`."""
        vectors = self.head(self.hidden(self.input(self._checked(columns))))
        return F.normalize(vectors, dim=1)


class TwoTower(TableModel):
    """Vectors of users and of items, whose product says how well they fit.

    Both towers are models of their own, so that vectors of items can be stored and searched
    (Covington et al., "Deep Neural Networks for YouTube Recommendations", RecSys 2016).

    Parameters
    ----------
    user, item : Tower

    Attributes
    ----------
    user, item : Tower
    """

    def __init__(self, user: Tower, item: Tower):
        super().__init__([*user.feature_cols, *item.feature_cols])
        self.user, self.item = user, item

    @classmethod
    def from_schema(
        cls,
        schema: FeatureSchema,
        user: Iterable[str],
        item: Iterable[str],
        user_numbers: Iterable[str] = (),
        item_numbers: Iterable[str] = (),
        user_sequences: Iterable[str] = (),
        **options,
    ) -> TwoTower:
        """A model of the size of a table.

        Parameters
        ----------
        schema : FeatureSchema
        user, item : list of str
            Columns of whole numbers.
        user_numbers, item_numbers : list of str
        user_sequences : list of str
            Columns of arrays, such as histories.
        **options
            Of both towers.
        """
        return cls(
            Tower.from_schema(schema, user, user_numbers, user_sequences, **options),
            Tower.from_schema(schema, item, item_numbers, **options),
        )

    def forward(self, *columns: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors of users and of items, of shape ``(n, dim)`` each."""
        columns = self._checked(columns)
        users = len(self.user.feature_cols)
        return self.user(*columns[:users]), self.item(*columns[users:])


class InBatchSoftmax(nn.Module):
    """The other items of a batch are the negatives of each of its rows.

    Frequent items come up as negatives more often; the logarithm of the probability of an item is
    taken off for that (Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
    Recommendations", RecSys 2019).  The target is the number of the item: the same item in another
    row is no negative.  With several workers the negatives are those of the worker's own rows.

    Parameters
    ----------
    temperature : float, default 0.1
        By which the products are divided.
    item_counts : sequence of number, optional
        How often each item number occurs in the data; without it nothing is taken off.
    """

    if TYPE_CHECKING:  # TorchScript would read it
        log_share: Tensor | None

    def __init__(self, temperature: float = 0.1, item_counts: Sequence[float] | None = None):
        super().__init__()
        if not temperature > 0:
            raise UsageError(f"temperature should be a number above 0, got {temperature!r}")
        self.temperature = temperature
        if item_counts is None:
            self.register_buffer("log_share", None)
        else:
            counts = torch.as_tensor(item_counts, dtype=torch.float32).clamp(min=1)
            self.register_buffer("log_share", torch.log(counts / counts.sum()))

    def forward(self, user: Tensor, item: Tensor, number: Tensor) -> Tensor:
        """The mean over the rows.

        Parameters
        ----------
        user, item : Tensor of shape (n, dim)
        number : Tensor of shape (n,)
            Of the items.
        """
        number = number.reshape(-1).to(torch.int64)
        logits = user @ item.T / self.temperature
        if self.log_share is not None:
            logits = logits - self.log_share[number]
        place = torch.arange(len(number), device=number.device)
        again = (number[:, None] == number) & (place[:, None] != place)
        return F.cross_entropy(logits.masked_fill(again, torch.finfo(logits.dtype).min), place)
