"""Layers of sequence models: causal attention, gated and pointwise blocks.

A layer takes all rows of a sequence, or only the new ones together with the keys and values of the
earlier rows. Rows depend on earlier rows only.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

KeyValue: TypeAlias = "tuple[Tensor, Tensor]"
"""Keys and values of the earlier rows, of shape ``(n, heads, steps, width)``."""


def causal_mask(rows: int, steps: int, device: torch.device) -> Tensor:
    """Return a bool matrix, True where one of the last `rows` of `steps` sees a step."""
    return torch.ones(rows, steps, dtype=torch.bool, device=device).tril(steps - rows)


def _joined(cache: KeyValue | None, key: Tensor, value: Tensor) -> KeyValue:
    if cache is None:
        return key, value
    return torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)


class Attention(nn.Module):
    """Multi-head softmax attention, causal unless a mask is passed."""

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key_value = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.join = nn.Linear(dim, dim)

    def forward(
        self,
        queries: Tensor,
        rows: Tensor,
        cache: KeyValue | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """Return the attended rows, and the keys and values of all rows."""
        query = _heads(self.query(queries), self.heads)
        key, value = (_heads(part, self.heads) for part in self.key_value(rows).chunk(2, -1))
        key, value = _joined(cache, key, value)
        if mask is None and query.shape[2] > 1:  # a single row sees all steps
            mask = causal_mask(query.shape[2], key.shape[2], rows.device)
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, mask, rate)
        return self.join(mixed.transpose(1, 2).flatten(2)), (key, value)


def _heads(rows: Tensor, heads: int) -> Tensor:
    return rows.unflatten(-1, (heads, -1)).transpose(1, 2)


class SASRecBlock(nn.Module):
    """Transformer block of SASRec: only the query is normalized before the attention."""

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.before, self.between = nn.LayerNorm(dim, eps=1e-8), nn.LayerNorm(dim, eps=1e-8)
        self.attention = Attention(dim, heads, dropout)
        self.inner, self.outer = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: KeyValue | None = None) -> tuple[Tensor, KeyValue]:
        """Return the output rows, and the keys and values of all rows."""
        query = self.before(x)
        mixed, cache = self.attention(query, x, cache)
        x = query + self.dropout(mixed)
        y = self.between(x)
        return y + self.dropout(self.outer(self.dropout(self.inner(y).relu()))), cache


class LiGRBlock(nn.Module):
    """Transformer block with gated residuals and SwiGLU, as in eSASRec."""

    def __init__(self, dim: int, heads: int, dropout: float, widening: int = 4):
        super().__init__()
        self.before, self.between = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout)
        self.first_gate, self.second_gate = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.inner = nn.Linear(dim, 2 * widening * dim, bias=False)
        self.outer = nn.Linear(widening * dim, dim, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: KeyValue | None = None) -> tuple[Tensor, KeyValue]:
        """Return the output rows, and the keys and values of all rows."""
        y = self.before(x)
        mixed, cache = self.attention(y, y, cache)
        x = x + torch.sigmoid(self.first_gate(x)) * self.dropout(mixed)
        gate, value = self.inner(self.between(x)).chunk(2, -1)
        out = self.outer(F.silu(gate) * value)
        return x + torch.sigmoid(self.second_gate(x)) * self.dropout(out), cache


class BidirectionalBlock(nn.Module):
    """Pre-normalized transformer block with GELU, in which all rows see each other."""

    def __init__(self, dim: int, heads: int, dropout: float, widening: int = 4):
        super().__init__()
        self.before, self.between = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout)
        self.inner = nn.Linear(dim, widening * dim)
        self.outer = nn.Linear(widening * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the output rows; `mask` is True for the steps that a row sees."""
        y = self.before(x)
        x = x + self.dropout(self.attention(y, y, None, mask)[0])
        return x + self.dropout(self.outer(self.dropout(F.gelu(self.inner(self.between(x))))))


class HSTUBlock(nn.Module):
    """Hierarchical sequential transduction unit: pointwise attention with a bias per distance.

    Parameters
    ----------
    dim, heads : int
    max_len : int
        Constant divisor of the attention, so that rows do not depend on later rows.
    dropout : float
    time_buckets : int
        Number of logarithmic buckets of time distances; 0 without times.
    """

    def __init__(self, dim: int, heads: int, max_len: int, dropout: float, time_buckets: int):
        super().__init__()
        self.heads, self.max_len = heads, max_len
        self.before, self.after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix, self.join = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)
        self.of_distance = nn.Parameter(torch.zeros(max_len))
        self.of_time = nn.Parameter(torch.zeros(time_buckets)) if time_buckets else None

    def forward(
        self, x: Tensor, cache: KeyValue | None = None, buckets: Tensor | None = None
    ) -> tuple[Tensor, KeyValue]:
        """Return the output rows, and the keys and values of all rows.

        Parameters
        ----------
        x : Tensor of shape (n, rows, dim)
        cache : tuple of Tensor, optional
        buckets : Tensor of shape (n, rows, steps), optional
            Bucket of the time from each step to each row.
        """
        gate, value, query, key = F.silu(self.mix(self.before(x))).chunk(4, -1)
        query, key, value = (_heads(part, self.heads) for part in (query, key, value))
        key, value = _joined(cache, key, value)
        rows, steps = query.shape[2], key.shape[2]
        at = torch.arange(steps, device=x.device)
        distance = (at[steps - rows :, None] - at).clamp(min=0)
        bias = self.of_distance[distance]
        if self.of_time is not None and buckets is not None:
            bias = bias + self.of_time[buckets][:, None]
        weights = F.silu(query @ key.transpose(-1, -2) + bias) / self.max_len
        if rows > 1:  # a single row sees all steps
            weights = weights * causal_mask(rows, steps, x.device)
        mixed = (weights @ value).transpose(1, 2).flatten(2)
        return x + self.join(self.dropout(self.after(mixed) * gate)), (key, value)
