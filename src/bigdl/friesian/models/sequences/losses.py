"""Losses of next-item predictions: full and sampled softmax, and binary cross-entropy.

Negatives are drawn by hashing the step, the row and the position instead of by a random generator,
so any number of workers draws the same negatives for the same row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigdl.common.checks import check_number, check_positive
from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from torch.autograd.function import FunctionCtx

    from bigdl.friesian.models.sequences.items import ItemVectors

_GOLDEN = -7046029254386353131  # odd multipliers of the splitmix64 hash, as signed integers
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685


def hashed(keys: Tensor) -> Tensor:
    """Return a hash of int64 keys (splitmix64)."""
    keys = keys * _GOLDEN
    keys = (keys ^ ((keys >> 30) & ((1 << 34) - 1))) * _FIRST
    keys = (keys ^ ((keys >> 27) & ((1 << 37) - 1))) * _SECOND
    return keys ^ ((keys >> 31) & ((1 << 33) - 1))


def uniform(keys: Tensor) -> Tensor:
    """Return float64 numbers from 0 to below 1 that depend on int64 keys only."""
    return ((hashed(keys) >> 11) & ((1 << 53) - 1)).double() / float(1 << 53)


class _WholeCrossEntropy(torch.autograd.Function):
    """Cross-entropy over the rows of a matrix of one chunk; the exponentials are computed once."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        exponentials = hidden @ weight.T
        of_target = exponentials.gather(1, target[:, None])[:, 0]
        largest = exponentials.amax(1)
        total = exponentials.sub_(largest[:, None]).exp_().sum(1)
        ctx.save_for_backward(hidden, weight, target, exponentials, total)
        return total.log().add_(largest).sub_(of_target)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        hidden, weight, target, exponentials, total = ctx.saved_tensors  # type: ignore[attr-defined]
        scale = (gradient / total)[:, None]
        of_hidden = (exponentials @ weight).mul_(scale)
        of_hidden.sub_(gradient[:, None] * weight[target])
        of_weight = exponentials.T @ (hidden * scale)
        of_weight.index_add_(0, target, hidden * gradient[:, None], alpha=-1)
        return of_hidden, of_weight, None


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy over the rows of a matrix, whose logits exist for one chunk at a time."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, target: Tensor, chunk: int
    ) -> Tensor:
        log_sum = hidden.new_full((len(hidden),), -math.inf)
        for first in range(0, len(weight), chunk):
            logits = hidden @ weight[first : first + chunk].T
            log_sum = torch.logaddexp(log_sum, logits.logsumexp(1))
        ctx.save_for_backward(hidden, weight, target, log_sum)
        ctx.chunk = chunk  # type: ignore[attr-defined]
        return log_sum - (hidden * weight[target]).sum(1)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient,) = gradients
        hidden, weight, target, log_sum = ctx.saved_tensors  # type: ignore[attr-defined]
        of_hidden, of_weight = torch.zeros_like(hidden), torch.empty_like(weight)
        chunk: int = ctx.chunk  # type: ignore[attr-defined]
        for first in range(0, len(weight), chunk):
            part = weight[first : first + chunk]
            shares = (hidden @ part.T).sub_(log_sum[:, None]).exp_().mul_(gradient[:, None])
            of_hidden.addmm_(shares, part)
            of_weight[first : first + chunk] = shares.T @ hidden
        of_hidden.sub_(gradient[:, None] * weight[target])
        of_weight.index_add_(0, target, hidden * gradient[:, None], alpha=-1)
        return of_hidden, of_weight, None, None


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, chunk: int = 8192
) -> Tensor:
    """Return the cross-entropy of ``hidden @ weight.T`` in memory for `chunk` classes.

    It equals ``torch.nn.functional.cross_entropy(hidden @ weight.T, target, reduction="none")`` up
    to rounding. With more than `chunk` classes, the backward pass computes the logits again.

    Parameters
    ----------
    hidden : Tensor of shape (n, dim)
    weight : Tensor of shape (classes, dim)
    target : Tensor of shape (n,)
        Classes.
    chunk : int, default 8192
        Number of classes whose logits are in memory.

    Returns
    -------
    Tensor of shape (n,)

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models.sequences import chunked_cross_entropy
    >>> hidden, weight = torch.eye(3)[:2], torch.eye(3)
    >>> chunked_cross_entropy(hidden, weight, torch.tensor([0, 2]), chunk=2)
    tensor([0.5514, 1.5514])
    """
    with torch.autocast(hidden.device.type, enabled=False):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        losses: Tensor
        if len(weight) <= check_positive("chunk", chunk):
            losses = _WholeCrossEntropy.apply(hidden, weight, target)  # type: ignore[no-untyped-call]
        else:
            losses = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
                hidden, weight, target, chunk
            )
        return losses


class NextItemLoss(nn.Module, ABC):
    """Base class of losses that compare the output of a sequence model with the next item.

    Examples
    --------
    >>> from bigdl.friesian.models.sequences import NextItemLoss, SASRec
    >>> class Distance(NextItemLoss):  # squared distance to the vector of the next item
    ...     def forward(self, hidden, target, items, keys, step):
    ...         return (hidden - items(target)).square().sum(1)
    >>> model = SASRec(1000, loss=Distance())
    """

    @abstractmethod
    def forward(
        self, hidden: Tensor, target: Tensor, items: ItemVectors, keys: Tensor, step: Tensor
    ) -> Tensor:
        """Return the loss of each position.

        Parameters
        ----------
        hidden : Tensor of shape (n, dim)
            Output of the model at the positions that count.
        target : Tensor of shape (n,)
            Ids of the next items.
        items : ItemVectors
        keys : Tensor of shape (n,)
            Random int64 numbers of the positions, the same for any number of workers.
        step : Tensor
            Number of the training step.
        """


class FullSoftmax(NextItemLoss):
    """Cross-entropy over all items, in chunks of items.

    Parameters
    ----------
    chunk : int, default 8192
        Number of items whose logits are in memory; the result does not depend on it.

    Examples
    --------
    >>> from bigdl.friesian.models.sequences import SASRec, FullSoftmax
    >>> model = SASRec(1000, loss=FullSoftmax(chunk=256))
    """

    def __init__(self, chunk: int = 8192):
        super().__init__()
        self.chunk = check_positive("chunk", chunk)

    def forward(
        self, hidden: Tensor, target: Tensor, items: ItemVectors, keys: Tensor, step: Tensor
    ) -> Tensor:
        """Return the loss of each position; see :meth:`NextItemLoss.forward`."""
        return chunked_cross_entropy(hidden, items.matrix()[1:], target - 1, self.chunk)


class _Sampled(NextItemLoss):
    """Base class of losses with sampled negatives."""

    shares: Tensor | None

    def __init__(self, negatives: int, shared: bool, item_counts: ArrayLike | None):
        super().__init__()
        self.negatives, self.shared = check_positive("negatives", negatives), shared
        self.register_buffer("shares", None, persistent=False)
        if item_counts is not None:
            counts = torch.as_tensor(np.asarray(item_counts), dtype=torch.float64).clone()
            counts[0] = 0
            if not bool((counts[1:] >= 0).all()) or not float(counts.sum()) > 0:
                raise UsageError(
                    "item_counts should be numbers of at least 0 by item id, not all of them 0",
                    code="argument-value",
                    argument="item_counts",
                )
            self.shares = counts / counts.sum()

    def _scores(
        self, hidden: Tensor, target: Tensor, items: ItemVectors, keys: Tensor, step: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the target's score, those of the negatives, their ids, and a mask of hits."""
        number = torch.arange(self.negatives, device=hidden.device)
        keys = step if self.shared else keys[:, None]
        draws = uniform(hashed(keys) + number)
        if self.shares is None:
            ids = 1 + (draws * (items.size - 1)).long()
        else:
            ids = torch.searchsorted(self.shares.cumsum(0), draws, right=True)
            ids = ids.clamp(1, items.size - 1)
        positive = (hidden * items(target)).sum(-1)
        vectors = items(ids)
        product = hidden @ vectors.T if self.shared else (vectors @ hidden[:, :, None])[..., 0]
        return positive, product, ids, ids == target[:, None]


class SampledSoftmax(_Sampled):
    """Softmax over the next item and sampled negatives.

    Negatives that equal the target are left out. If they are drawn by frequency, the loss subtracts
    the log of the expected counts from their scores (logQ correction), so that the expected sum
    over the negatives is that over all items.

    Parameters
    ----------
    negatives : int, default 256
        Number of negatives.
    shared : bool, default True
        Draw the negatives once per step for all positions of all workers. False draws them for each
        position, which takes more memory and time.
    item_counts : array of number, shape (size,), optional
        Frequencies by item id, to draw negatives by frequency. Default: uniform.

    References
    ----------
    Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations",
    RecSys 2019.

    Examples
    --------
    >>> from bigdl.friesian.models.sequences import SASRec, SampledSoftmax
    >>> model = SASRec(1_000_000, dim=16, loss=SampledSoftmax(512))
    """

    def __init__(
        self, negatives: int = 256, *, shared: bool = True, item_counts: ArrayLike | None = None
    ):
        super().__init__(negatives, shared, item_counts)

    def forward(
        self, hidden: Tensor, target: Tensor, items: ItemVectors, keys: Tensor, step: Tensor
    ) -> Tensor:
        """Return the loss of each position; see :meth:`NextItemLoss.forward`."""
        positive, negative, ids, hits = self._scores(hidden, target, items, keys, step)
        if self.shares is not None:
            expected = torch.log(self.negatives * self.shares.clamp(min=1e-12))
            negative = negative - expected.to(negative.dtype)[ids]
        negative = negative.masked_fill(hits, -math.inf)
        return torch.logsumexp(torch.cat([positive[:, None], negative], 1), 1) - positive


class BinaryNextItem(_Sampled):
    """Binary cross-entropy of the next item and sampled negatives, also generalized (gBCE).

    Parameters
    ----------
    negatives : int, default 1
        Number of negatives; gBCE usually has 256.
    calibration : float, default 0.0
        Parameter t of gBCE, from 0 (binary cross-entropy) to 1. 0.75 is usual. It corrects the
        overconfidence that comes from sampling.
    shared : bool, default False
        As in :class:`SampledSoftmax`.
    item_counts : array of number, shape (size,), optional
        As in :class:`SampledSoftmax`, without a correction.

    References
    ----------
    Petrov and Macdonald, "gSASRec: Reducing Overconfidence in Sequential Recommendation Trained
    with Negative Sampling", RecSys 2023.

    Examples
    --------
    >>> from bigdl.friesian.models.sequences import BinaryNextItem, SASRec
    >>> model = SASRec(1000, loss=BinaryNextItem(256, calibration=0.75, shared=True))
    """

    def __init__(
        self,
        negatives: int = 1,
        *,
        calibration: float = 0.0,
        shared: bool = False,
        item_counts: ArrayLike | None = None,
    ):
        super().__init__(negatives, shared, item_counts)
        self.calibration = check_number("calibration", calibration, 0, 1)

    def forward(
        self, hidden: Tensor, target: Tensor, items: ItemVectors, keys: Tensor, step: Tensor
    ) -> Tensor:
        """Return the loss of each position; see :meth:`NextItemLoss.forward`."""
        positive, negative, _, hits = self._scores(hidden, target, items, keys, step)
        rate, t = min(1.0, self.negatives / max(items.size - 2, 1)), self.calibration
        beta = rate * (t * (1 - 1 / rate) + 1 / rate)
        of_negatives = F.softplus(negative).masked_fill(hits, 0.0).sum(1)
        return (beta * F.softplus(-positive) + of_negatives) / (self.negatives + 1)


def loss_of(loss: str | NextItemLoss) -> NextItemLoss:
    """Return the loss with a name; return a loss unchanged.

    Raises
    ------
    UsageError
        For another name.
    """
    if isinstance(loss, NextItemLoss):
        return loss
    if loss == "softmax":
        return FullSoftmax()
    if loss == "sampled_softmax":
        return SampledSoftmax()
    if loss == "bce":
        return BinaryNextItem()
    if loss == "gbce":
        return BinaryNextItem(256, calibration=0.75, shared=True)
    raise UsageError(
        f'loss should be "softmax", "sampled_softmax", "bce", "gbce" or a NextItemLoss, got '
        f"{loss!r}",
        code="argument-value",
        argument="loss",
        allowed=["softmax", "sampled_softmax", "bce", "gbce"],
    )
