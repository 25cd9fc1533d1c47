"""Vectors of items: an embedding per id, plus features and pre-computed vectors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_EPSILON = 1e-6


class ItemVectors(nn.Module):
    """Vectors of items, used for the items of a history and for the scores of the next item.

    The vector of an item is the sum of its id embedding, the embeddings of its features, and a
    linear projection of its pre-computed vector, such as that of a text or an image.

    Parameters
    ----------
    size : int
        Number of ids including 0, the id of padding.
    dim : int
        Length of a vector.
    embedding : {"dense", "sharded", "growing"}, default "dense"
        ``"sharded"`` is a :class:`~bigdl.orca.torch.ShardedEmbedding`, for catalogues that exceed
        the memory of a worker; ``"growing"`` is a :class:`~bigdl.orca.torch.GrowingEmbedding`,
        which adds rows for new ids. Both need a loss with sampled negatives, and an optimizer for
        sparse gradients.
    features : array of int, shape (size, columns), optional
        Category ids of each item; 0 is unknown. Row 0 belongs to padding.
    feature_sizes : sequence of int, optional
        Largest id plus 1 of each column of `features`. Default: those of `features`.
    vectors : array of float, shape (size, length), optional
        Pre-computed vectors, which are not trained; zeros for items without one.
    cosine : bool, default False
        Normalize the vectors to length 1.

    Raises
    ------
    UsageError
        If `features` or `vectors` have another number of rows.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models.sequences import ItemVectors
    >>> items = ItemVectors(5, 8, features=[[0], [1], [1], [2], [2]])
    >>> items(torch.tensor([[1, 4]])).shape, items.matrix().shape
    (torch.Size([1, 2, 8]), torch.Size([5, 8]))
    """

    features: Tensor | None
    vectors: Tensor | None

    def __init__(
        self,
        size: int,
        dim: int,
        *,
        embedding: str = "dense",
        features: ArrayLike | None = None,
        feature_sizes: Sequence[int] | None = None,
        vectors: ArrayLike | None = None,
        cosine: bool = False,
    ):
        super().__init__()
        self.size = check_positive("size", size)
        self.dim, self.cosine = check_positive("dim", dim), cosine
        self.embedding = check_choice("embedding", embedding, ("dense", "sharded", "growing"))
        init = partial(nn.init.normal_, std=max(0.02, (2 / (size + dim)) ** 0.5))
        self.table = _table(self.embedding, size, dim, init)
        self.register_buffer("features", None)
        self.register_buffer("vectors", None)
        if features is not None:
            codes = torch.as_tensor(np.asarray(features), dtype=torch.int64)
            self._check("features", codes)
            self._check("features", codes)
            counts = list(feature_sizes or (codes.max(0).values + 1).tolist())
            offsets = torch.tensor([0, *accumulate(counts)][:-1], dtype=torch.int64)
            self.features = codes + offsets
            self.of_features = nn.Embedding(sum(counts), dim)
            init(self.of_features.weight)
        if vectors is not None:
            self.vectors = torch.as_tensor(np.asarray(vectors), dtype=torch.float32)
            self._check("vectors", self.vectors)
            self.projection = nn.Linear(self.vectors.shape[1], dim, bias=False)
            nn.init.xavier_normal_(self.projection.weight)

    def _check(self, name: str, values: Tensor) -> None:
        if values.ndim != 2 or len(values) != self.size:
            raise UsageError(
                f"{name} should have the shape ({self.size}, columns), one row per item id, got "
                f"{tuple(values.shape)}",
                code="data-shape",
                argument=name,
            )

    def forward(self, ids: Tensor) -> Tensor:
        """Return vectors of shape ``(..., dim)`` for ids of shape ``(...)``."""
        result = self.table(ids)
        if self.features is not None:
            result = result + self.of_features(self.features[ids]).sum(-2)
        if self.vectors is not None:
            result = result + self.projection(self.vectors[ids])
        return F.normalize(result, dim=-1, eps=_EPSILON) if self.cosine else result

    def matrix(self) -> Tensor:
        """Return the vectors of all ids, of shape ``(size, dim)``.

        Raises
        ------
        UsageError
            For an embedding of which each worker holds a part.
        """
        if self.embedding == "growing" or getattr(self.table, "is_placed", False):
            raise UsageError(
                f"embedding={self.embedding!r} has no matrix of all items in a worker; choose a "
                "loss with sampled negatives, such as SampledSoftmax(256)",
                code="unsupported",
                argument="embedding",
            )
        if self.embedding == "sharded":
            return self(torch.arange(self.size))
        result: Tensor = self.table.get_parameter("weight")
        if self.features is not None:
            result = result + self.of_features(self.features).sum(-2)
        if self.vectors is not None:
            result = result + self.projection(self.vectors)
        return F.normalize(result, dim=-1, eps=_EPSILON) if self.cosine else result


def _table(embedding: str, size: int, dim: int, init: partial) -> nn.Module:
    if embedding == "dense":
        table = nn.Embedding(size, dim)
        init(table.weight)
        return table
    from bigdl.orca.torch import GrowingEmbedding, ShardedEmbedding

    if embedding == "sharded":
        return ShardedEmbedding(size, dim, init=init)
    return GrowingEmbedding(dim, init=init)
