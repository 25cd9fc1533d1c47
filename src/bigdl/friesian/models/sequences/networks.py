"""Sequence models: SASRec and eSASRec, HSTU, GRU4Rec and BERT4Rec."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigdl.common.checks import check_choice, check_number, check_positive
from bigdl.common.errors import UsageError
from bigdl.friesian.models.sequences.items import ItemVectors
from bigdl.friesian.models.sequences.layers import (
    BidirectionalBlock,
    HSTUBlock,
    LiGRBlock,
    SASRecBlock,
)
from bigdl.friesian.models.sequences.losses import NextItemLoss, hashed, loss_of, uniform
from bigdl.friesian.models.torch import TableModel

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from bigdl.friesian.ops.schema import FeatureSchema

TIME_BUCKETS = 129
_LOG_BASE = 0.301  # width of a bucket of log time
_TEMPERATURE = 0.05  # of cosine similarities


def time_buckets(times: Tensor, earlier: Tensor) -> Tensor:
    """Return the logarithmic buckets of time distances, broadcast over both arguments.

    Parameters
    ----------
    times, earlier : Tensor of int64
        Seconds; float32 does not hold seconds since 1970.
    """
    passed = (times - earlier).abs().clamp(min=1)
    return (torch.log(passed.float()) / _LOG_BASE).long().clamp(max=TIME_BUCKETS - 1)


class NextItemOutput(NamedTuple):
    """Output of a sequence model that gets labels.

    Attributes
    ----------
    loss : Tensor
        Mean over the positions whose next item is known.
    logits : Tensor of int64, shape (n,)
        In evaluation, the rank of the last label among the items that are not in the history, for
        the metrics NDCG, HitRate and MRR of an Estimator; otherwise empty.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models.sequences import SASRec
    >>> model = SASRec(items=3, max_len=2, dim=4).eval()
    >>> model(torch.tensor([[1, 0]]), labels=torch.tensor([[2, 0]])).logits
    tensor([1])
    """

    loss: Tensor
    logits: Tensor


class SequenceModel(TableModel):
    """Base class of models that predict the next item from a user's history.

    Without ``labels``, the models return a vector per user, whose products with ``items.matrix()``
    are the scores of all items. With ``labels``, they return a :class:`NextItemOutput`, with which
    an Estimator trains and evaluates.

    Parameters
    ----------
    items : int
        Largest item id plus 1; 0 is padding.
    max_len : int, default 50
        Length of the histories.
    dim : int, default 64
        Length of vectors.
    loss : str or NextItemLoss, default "softmax"
        ``"softmax"`` (all items), ``"sampled_softmax"``, ``"bce"`` or ``"gbce"``.
    dropout : float, default 0.2
    embedding, item_features, item_feature_sizes, item_vectors
        As ``embedding``, ``features``, ``feature_sizes`` and ``vectors`` of :class:`ItemVectors`.
    cosine : bool, default False
        Compare vectors by their cosine divided by 0.05, instead of the dot product.
    item_col, time_col, label_col : str
        Columns of histories, their times, and the next items.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models.sequences import SASRec, SequenceModel
    >>> model: SequenceModel = SASRec(items=100, max_len=4, dim=8).eval()
    >>> vectors = model(torch.tensor([[3, 5, 0, 0], [7, 0, 0, 0]]))
    >>> (vectors @ model.items.matrix().T).shape  # scores of all ids for two users
    torch.Size([2, 100])
    """

    uses_times = False
    step: Tensor

    def __init__(
        self,
        items: int,
        max_len: int = 50,
        dim: int = 64,
        *,
        loss: str | NextItemLoss = "softmax",
        dropout: float = 0.2,
        embedding: str = "dense",
        item_features: ArrayLike | None = None,
        item_feature_sizes: Sequence[int] | None = None,
        item_vectors: ArrayLike | None = None,
        cosine: bool = False,
        item_col: str = "item_seq",
        time_col: str = "time_seq",
        label_col: str = "next_seq",
    ):
        super().__init__([item_col, *([time_col] if self.uses_times else [])])
        self.label_cols = [label_col]
        self.max_len = check_positive("max_len", max_len)
        self.items = ItemVectors(
            items,
            dim,
            embedding=embedding,
            features=item_features,
            feature_sizes=item_feature_sizes,
            vectors=item_vectors,
            cosine=cosine,
        )
        self.loss = loss_of(loss)
        self.dropout = nn.Dropout(check_number("dropout", dropout, 0, below=1))
        self.cosine = cosine
        # Workers keep the maximum at the end of an epoch, also those without rows in a step.
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    @classmethod
    def from_schema(
        cls,
        schema: FeatureSchema,
        item: str = "item_seq",
        **options: int | float | bool | str | NextItemLoss | ArrayLike,
    ) -> Self:
        """Build a model whose sizes come from the schema of ``FeatureTable.sequences``.

        Parameters
        ----------
        schema : FeatureSchema
        item : str, default "item_seq"
            Column of the histories.
        **options
            Other arguments of the class.
        """
        sizes = schema.cardinality(item), schema.length(item)
        return cls(*sizes, item_col=item, **options)  # type: ignore[arg-type]

    @abstractmethod
    def user_vectors(self, item_seq: Tensor, time_seq: Tensor | None = None) -> Tensor:
        """Return a vector of each history, for the item after its last one.

        Parameters
        ----------
        item_seq : Tensor of shape (n, max_len)
            Item ids, the oldest first, padded with 0 at the end.
        time_seq : Tensor of shape (n, max_len), optional
            Times in seconds.
        """

    @abstractmethod
    def _labelled(
        self, item_seq: Tensor, time_seq: Tensor | None, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the vectors and targets of the positions in the loss, and their random keys."""

    def forward(
        self, item_seq: Tensor, *columns: Tensor, labels: Tensor | None = None
    ) -> Tensor | NextItemOutput:
        """Return user vectors, or with `labels` the loss.

        Parameters
        ----------
        item_seq : Tensor of shape (n, max_len)
        *columns : Tensor of shape (n, max_len)
            Times, for a model that uses them.
        labels : Tensor of shape (n, max_len), optional
            Next item at each position; 0 where there is none.
        """
        self._checked((item_seq, *columns))
        item_seq = item_seq.long()
        time_seq = columns[0].long() if columns else None
        if labels is None:
            return self.user_vectors(item_seq, time_seq)
        labels = labels.long()
        if self.training:
            self.step += 1
        vectors, target, keys = self._labelled(item_seq, time_seq, labels)
        losses = self.loss(vectors, target, self.items, keys, self.step)
        ranks = torch.zeros(0, dtype=torch.int64)
        if not self.training and self.items.embedding == "dense":
            ranks = self._ranks(item_seq, time_seq, labels)
        return NextItemOutput(losses.sum() / max(len(losses), 1), ranks)

    def _ranks(self, item_seq: Tensor, time_seq: Tensor | None, labels: Tensor) -> Tensor:
        """Return the rank of the last label among the items that are not in the history.

        Items with an equal score come first, so that a model with equal scores gets no hits.
        """
        count = (labels != 0).sum(1)
        is_known = torch.arange(self.max_len, device=labels.device) < count[:, None]
        history = item_seq * is_known
        last = labels.gather(1, (count - 1).clamp(min=0)[:, None])
        scores = self.user_vectors(history, time_seq) @ self.items.matrix().T
        target = scores.gather(1, last)
        scores = scores.scatter(1, history, -torch.inf)
        scores[:, 0] = -torch.inf
        ranks = 1 + (scores >= target).sum(1) - (scores.gather(1, last) >= target)[:, 0].long()
        return torch.where(count > 0, ranks, 0)

    def compared(self, vectors: Tensor) -> Tensor:
        """Scale output vectors for products with item vectors."""
        return F.normalize(vectors, dim=-1, eps=1e-6) / _TEMPERATURE if self.cosine else vectors

    def _keys(self, item_seq: Tensor, labels: Tensor) -> Tensor:
        """Return random numbers that depend on the step, the row's content and the position."""
        at = torch.arange(item_seq.shape[1], device=item_seq.device)
        content = hashed(item_seq * 1_000_003 + labels + hashed(at)).sum(1, keepdim=True)
        return hashed(hashed(content) + at + hashed(self.step))


@dataclass
class SequenceCache:
    """Keys and values, or states, of the events that :meth:`CausalModel.extend` has read.

    Attributes
    ----------
    length : int
        Number of events.
    layers : list of tuple of Tensor
    times : Tensor or None, shape (n, length)

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models.sequences import SASRec
    >>> model = SASRec(10, max_len=8, dim=4).eval()
    >>> _, cache = model.extend(torch.tensor([[1, 2, 3]]))
    >>> cache.length
    3
    """

    length: int = 0
    layers: list[tuple[Tensor, ...]] = field(default_factory=list)
    times: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        sizes = [each.nbytes for layer in self.layers for each in layer]
        return sum(sizes) + (0 if self.times is None else self.times.nbytes)


class CausalModel(SequenceModel):
    """Base class of sequence models whose rows depend on earlier rows only.

    All positions are trained at once, and new events can be added to a cached history.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models.sequences import CausalModel, SASRec
    >>> model: CausalModel = SASRec(items=100, max_len=4, dim=8).eval()
    >>> hidden, cache = model.extend(torch.tensor([[3, 5]]))
    >>> hidden, cache = model.extend(torch.tensor([[8]]), cache=cache)  # one new event
    >>> hidden.shape, cache.length
    (torch.Size([1, 1, 8]), 3)
    """

    reads_padding = False
    """Whether padding changes the cache, so that only sequences of one length are read together."""

    def row_of(self, cache: SequenceCache, row: int, length: int) -> SequenceCache:
        """Return the cache of one sequence of a padded batch.

        Parameters
        ----------
        cache : SequenceCache
            Result of :meth:`extend` for several sequences, padded at the end.
        row : int
        length : int
            Number of events of the sequence.
        """
        times = None if cache.times is None else cache.times[row : row + 1, :length].clone()
        if self.reads_padding:  # states of shape (layers, n, dim)
            layers = [tuple(each[:, row : row + 1].clone() for each in cache.layers[0])]
        else:
            layers = [
                tuple(each[row : row + 1, :, :length].clone() for each in layer)
                for layer in cache.layers
            ]
        return SequenceCache(length, layers, times)

    def extend(
        self, item_seq: Tensor, time_seq: Tensor | None = None, cache: SequenceCache | None = None
    ) -> tuple[Tensor, SequenceCache]:
        """Read the events that follow a cached history.

        Parameters
        ----------
        item_seq : Tensor of shape (n, events)
            Item ids without padding between or before them; padding at the end has no effect on
            other rows.
        time_seq : Tensor of shape (n, events), optional
        cache : SequenceCache, optional
            Result of the call for the earlier events. It is not changed.

        Returns
        -------
        Tensor of shape (n, events, dim)
            The vector after each event; it predicts the next item.
        SequenceCache

        Raises
        ------
        UsageError
            For more than `max_len` events; start again with the newest ones.

        Examples
        --------
        >>> import torch
        >>> from bigdl.friesian.models.sequences import GRU4Rec
        >>> model = GRU4Rec(10, dim=4).eval()
        >>> whole, _ = model.extend(torch.tensor([[1, 2, 3]]))
        >>> _, cache = model.extend(torch.tensor([[1, 2]]))
        >>> added, _ = model.extend(torch.tensor([[3]]), cache=cache)
        >>> torch.allclose(added[:, 0], whole[:, 2])
        True
        """
        cache = cache or SequenceCache()
        length = cache.length + item_seq.shape[1]
        if length > self.max_len:
            raise UsageError(
                f"The history has {length} events, more than max_len={self.max_len}; start without "
                f"cache= from its newest events",
                code="data-size",
            )
        times = None
        if self.uses_times:
            if time_seq is None:
                raise UsageError(
                    f"{type(self).__name__} needs the times of the events; pass time_seq",
                    code="argument-missing",
                    argument="time_seq",
                )
            times = time_seq if cache.times is None else torch.cat([cache.times, time_seq], 1)
        hidden, layers = self._rows(self.items(item_seq), times, cache)
        return self.compared(hidden), SequenceCache(length, layers, times)

    @abstractmethod
    def _rows(
        self, x: Tensor, times: Tensor | None, cache: SequenceCache
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """Return the output rows of new item vectors, and the layers of the new cache."""

    def user_vectors(self, item_seq: Tensor, time_seq: Tensor | None = None) -> Tensor:
        """Return a vector of each history, for the item after its last one."""
        hidden, _ = self.extend(item_seq, time_seq)
        last = (item_seq != 0).sum(1).clamp(min=1) - 1
        # gather, because a traced graph would keep the number of rows of an arange
        return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]

    def _labelled(
        self, item_seq: Tensor, time_seq: Tensor | None, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden, _ = self.extend(item_seq, time_seq)
        counted = (labels != 0) & (item_seq != 0)
        return hidden[counted], labels[counted], self._keys(item_seq, labels)[counted]


class SASRec(CausalModel):
    """SASRec: transformer with causal attention over the items of a history.

    Parameters
    ----------
    items : int
        Largest item id plus 1; 0 is padding.
    max_len : int, default 50
    dim : int, default 64
    blocks : int, default 2
    heads : int, default 1
    block : {"sasrec", "ligr"}, default "sasrec"
        ``"ligr"`` has gated residuals and SwiGLU layers; together with ``loss="sampled_softmax"``
        it is eSASRec.
    **options
        See :class:`SequenceModel`.

    References
    ----------
    Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018; "eSASRec: Enhancing
    Transformer-based Recommendations in a Modular Fashion", RecSys 2025.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models.sequences import SASRec
    >>> model = SASRec(items=1000, max_len=4, dim=16, block="ligr", loss="sampled_softmax")
    >>> history, following = torch.tensor([[3, 5, 0, 0]]), torch.tensor([[5, 9, 0, 0]])
    >>> model(history).shape  # vectors of users
    torch.Size([1, 16])
    >>> model(history, labels=following).loss.shape
    torch.Size([])
    """

    def __init__(
        self,
        items: int,
        max_len: int = 50,
        dim: int = 64,
        *,
        blocks: int = 2,
        heads: int = 1,
        block: str = "sasrec",
        **options: float | bool | str | NextItemLoss | ArrayLike,
    ):
        super().__init__(items, max_len, dim, **options)  # type: ignore[arg-type]
        check_choice("block", block, ("sasrec", "ligr"))
        _check_heads(dim, heads)
        self.positions = nn.Embedding(max_len, dim)
        layer = SASRecBlock if block == "sasrec" else LiGRBlock
        rate = self.dropout.p
        self.blocks = nn.ModuleList(
            layer(dim, heads, rate) for _ in range(check_positive("blocks", blocks))
        )
        self.after = nn.LayerNorm(dim) if block == "sasrec" else nn.Identity()
        _initialize(self, self.blocks)
        nn.init.normal_(self.positions.weight, std=0.02)

    def _rows(
        self, x: Tensor, times: Tensor | None, cache: SequenceCache
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        x = x + self.positions.weight[cache.length : cache.length + x.shape[1]]
        x, layers = self.dropout(x), []
        for number, block in enumerate(self.blocks):
            x, layer = block(x, cache.layers[number] if cache.layers else None)
            layers.append(layer)
        return self.after(x), layers


class HSTU(CausalModel):
    """HSTU: pointwise attention with a learned bias per distance in rows and in time.

    Time distances are those to the row's own event, so neither training nor serving needs the time
    of the next event.

    Parameters
    ----------
    items : int
        Largest item id plus 1; 0 is padding.
    max_len : int, default 50
    dim : int, default 64
    blocks : int, default 2
    heads : int, default 1
    use_times : bool, default True
        Whether to use times; they are the second column of the model.
    cosine : bool, default True
    **options
        See :class:`SequenceModel`.

    References
    ----------
    Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
    Generative Recommendations", ICML 2024.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models.sequences import HSTU
    >>> model = HSTU(items=1000, max_len=4, dim=16)
    >>> model.feature_cols
    ['item_seq', 'time_seq']
    >>> model(torch.tensor([[3, 5, 0, 0]]), torch.tensor([[60, 90, 0, 0]])).shape
    torch.Size([1, 16])
    """

    def __init__(
        self,
        items: int,
        max_len: int = 50,
        dim: int = 64,
        *,
        blocks: int = 2,
        heads: int = 1,
        use_times: bool = True,
        cosine: bool = True,
        **options: float | bool | str | NextItemLoss | ArrayLike,
    ):
        self.__dict__["uses_times"] = use_times  # before the base class names the columns
        super().__init__(items, max_len, dim, cosine=cosine, **options)  # type: ignore[arg-type]
        _check_heads(dim, heads)
        self.positions = nn.Embedding(max_len, dim)
        buckets = TIME_BUCKETS if use_times else 0
        self.blocks = nn.ModuleList(
            HSTUBlock(dim, heads, max_len, self.dropout.p, buckets)
            for _ in range(check_positive("blocks", blocks))
        )
        _initialize(self, self.blocks)
        nn.init.normal_(self.positions.weight, std=0.02)

    def _rows(
        self, x: Tensor, times: Tensor | None, cache: SequenceCache
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        buckets = None
        if times is not None:
            buckets = time_buckets(times[:, cache.length :, None], times[:, None])
        x = x + self.positions.weight[cache.length : cache.length + x.shape[1]]
        x, layers = self.dropout(x), []
        for number, block in enumerate(self.blocks):
            x, layer = block(x, cache.layers[number] if cache.layers else None, buckets)
            layers.append(layer)
        return x, layers


class GRU4Rec(CausalModel):
    """GRU4Rec: recurrent network over the items of a history.

    Parameters
    ----------
    items : int
        Largest item id plus 1; 0 is padding.
    max_len : int, default 50
    dim : int, default 64
    layers : int, default 1
    **options
        See :class:`SequenceModel`.

    References
    ----------
    Hidasi et al., "Session-based Recommendations with Recurrent Neural Networks", ICLR 2016.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models.sequences import GRU4Rec
    >>> GRU4Rec(items=1000, max_len=4, dim=16)(torch.tensor([[3, 5, 0, 0]])).shape
    torch.Size([1, 16])
    """

    def __init__(
        self,
        items: int,
        max_len: int = 50,
        dim: int = 64,
        *,
        layers: int = 1,
        **options: float | bool | str | NextItemLoss | ArrayLike,
    ):
        super().__init__(items, max_len, dim, **options)  # type: ignore[arg-type]
        self.reads_padding = True
        self.network = nn.GRU(dim, dim, check_positive("layers", layers), batch_first=True)
        self.after = nn.Linear(dim, dim)
        _initialize(self, self.after)

    def _rows(
        self, x: Tensor, times: Tensor | None, cache: SequenceCache
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        state = cache.layers[0][0] if cache.layers else None
        hidden, state = self.network(self.dropout(x), state)
        return self.after(self.dropout(hidden)), [(state,)]


class BERT4Rec(SequenceModel):
    """BERT4Rec: bidirectional transformer, trained to fill in masked items.

    New events change all rows, so it has no cache for serving.

    Parameters
    ----------
    items : int
        Largest item id plus 1; 0 is padding.
    max_len : int, default 50
    dim : int, default 64
    blocks : int, default 2
    heads : int, default 1
    mask_share : float, default 0.2
        Share of the items in the loss: 80 % of them are masked, 10 % replaced by random items, and
        10 % unchanged.
    **options
        See :class:`SequenceModel`.

    References
    ----------
    Sun et al., "BERT4Rec: Sequential Recommendation with Bidirectional Encoder Representations from
    Transformer", CIKM 2019.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models.sequences import BERT4Rec
    >>> BERT4Rec(items=1000, max_len=4, dim=16)(torch.tensor([[3, 5, 0, 0]])).shape
    torch.Size([1, 16])
    """

    def __init__(
        self,
        items: int,
        max_len: int = 50,
        dim: int = 64,
        *,
        blocks: int = 2,
        heads: int = 1,
        mask_share: float = 0.2,
        **options: float | bool | str | NextItemLoss | ArrayLike,
    ):
        super().__init__(items, max_len, dim, **options)  # type: ignore[arg-type]
        _check_heads(dim, heads)
        self.mask_share = check_number("mask_share", mask_share, above=0, below=1)
        self.positions = nn.Embedding(max_len + 1, dim)
        self.mask = nn.Parameter(torch.zeros(dim))
        self.blocks = nn.ModuleList(
            BidirectionalBlock(dim, heads, self.dropout.p)
            for _ in range(check_positive("blocks", blocks))
        )
        self.after = nn.LayerNorm(dim)
        _initialize(self, self.blocks)
        for weight in (self.positions.weight, self.mask):
            nn.init.normal_(weight, std=0.02)

    def user_vectors(self, item_seq: Tensor, time_seq: Tensor | None = None) -> Tensor:
        """Return a vector of each history, for the item after its last one."""
        count = (item_seq != 0).sum(1, keepdim=True)
        padded = F.pad(item_seq, (0, 1))
        masked = torch.arange(padded.shape[1], device=padded.device) == count
        return self._encoded(padded, masked)[masked]

    def _encoded(self, item_seq: Tensor, masked: Tensor) -> Tensor:
        x = torch.where(masked[..., None], self.mask, self.items(item_seq))
        x = self.dropout(x + self.positions.weight[: x.shape[1]])
        visible = ((item_seq != 0) | masked)[:, None, None, :]
        for block in self.blocks:
            x = block(x, visible)
        return self.compared(self.after(x))

    def _labelled(
        self, item_seq: Tensor, time_seq: Tensor | None, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        known = torch.cat([item_seq[:, :1], labels], 1)
        at = torch.arange(known.shape[1], device=known.device)
        count = (known != 0).sum(1, keepdim=True)
        is_last = at == count - 1
        keys = self._keys(known, known)
        if not self.training:
            masked = is_last & (count > 1)
            return self._encoded(known, masked)[masked], known[masked], keys[masked]
        chosen = (uniform(keys) < self.mask_share) & (known != 0)
        chosen |= is_last & ~chosen.any(1, keepdim=True)
        how = uniform(keys + 1)
        other = 1 + (uniform(keys + 2) * (self.items.size - 1)).long()
        changed = torch.where(chosen & (how >= 0.8) & (how < 0.9), other, known)
        hidden = self._encoded(changed, chosen & (how < 0.8))
        return hidden[chosen], known[chosen], hashed(keys)[chosen]


def _check_heads(dim: int, heads: int) -> None:
    if dim % check_positive("heads", heads):
        raise UsageError(
            f"dim should be a multiple of heads, got dim={dim} and heads={heads}",
            code="argument-value",
            argument="heads",
        )


def _initialize(model: nn.Module, layers: nn.Module) -> None:
    """Initialize the linear layers of `layers` as the papers do."""
    for module in layers.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
