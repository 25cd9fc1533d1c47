"""Causal models that read one event in NumPy, for servers.

For a single row, the calls of PyTorch take longer than the arithmetic. The formulas are those of
:mod:`~bigdl.friesian.models.sequences.layers` in evaluation; the weights are not copied.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
import torch

from bigdl.friesian.models.sequences.layers import Attention, HSTUBlock, LiGRBlock, SASRecBlock
from bigdl.friesian.models.sequences.networks import (
    HSTU,
    TIME_BUCKETS,
    SASRec,
    SequenceCache,
    SequenceModel,
    time_buckets,
)

_FREE_ROWS = 16  # by which a full buffer grows


class _KeyValueBuffer:
    """Keys and values of all blocks, ``(blocks, 2, heads, capacity, width)``, and free rows."""

    def __init__(self, rows: np.ndarray, filled: int):
        self.rows, self.filled = rows, filled
        self._lock = threading.Lock()

    def reserve(self, length: int, most: int) -> _KeyValueBuffer:
        """Return a buffer whose row `length` the caller may write.

        Two requests may extend the same history. The second one gets a copy, because rows that the
        first one has written are part of its result.
        """
        with self._lock:
            if self.filled == length < self.rows.shape[3]:
                self.filled += 1
                return self
        capacity = min(length + _FREE_ROWS, most)
        return _KeyValueBuffer(_with_capacity(self.rows[..., :length, :], capacity), length + 1)


def _with_capacity(rows: np.ndarray, capacity: int) -> np.ndarray:
    grown = np.empty((*rows.shape[:3], capacity, rows.shape[4]), np.float32)
    grown[..., : rows.shape[3], :] = rows
    return grown


@dataclass(frozen=True)
class HistoryState:
    """Keys and values of a history; later events do not change it.

    Attributes
    ----------
    length : int
        Number of events.
    """

    length: int
    _buffer: _KeyValueBuffer

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return self._buffer.rows.nbytes


class OneEventModel:
    """Model that reads the events of a history one by one.

    Parameters
    ----------
    network : SASRec or HSTU
        Trained model; changes of its weights are visible.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.friesian.models.sequences import SASRec
    >>> from bigdl.friesian.models.sequences.one_event import OneEventModel
    >>> model = SASRec(10, max_len=4, dim=4).eval()
    >>> whole, cache = model.extend(torch.tensor([[1, 2, 3]]))
    >>> _, cache = model.extend(torch.tensor([[1, 2]]))
    >>> reader = OneEventModel(model)
    >>> ids, times = np.array([1, 2, 3]), np.zeros(3, np.int64)
    >>> vector, state = reader.extend(reader.state_of(cache, 0, 2), ids, times)
    >>> np.allclose(vector, whole[0, 2].detach(), atol=1e-6), state.length
    (True, 3)
    """

    def __init__(self, network: SASRec | HSTU):
        self._network = network
        self._positions = _values(network.positions.weight)
        self._blocks = [_BLOCKS[type(block)](block) for block in network.blocks]
        after = getattr(network, "after", None)
        self._after = _NormalizationStep(after) if isinstance(after, torch.nn.LayerNorm) else None
        self._first_of_bucket = _first_of_buckets() if network.uses_times else None
        items = network.items
        is_plain = items.embedding == "dense" and not items.cosine
        is_plain = is_plain and items.features is None and items.vectors is None
        self._items = _values(items.table.get_parameter("weight")) if is_plain else None

    @classmethod
    def of(cls, network: SequenceModel) -> Self | None:
        """Return a reader of a model, or None if its classes have no formulas here."""
        # a derived class may compute something else
        if type(network) in (SASRec, HSTU):
            assert isinstance(network, SASRec | HSTU)
            if all(type(each) in _BLOCKS for each in network.blocks):
                return cls(network)
        return None

    def state_of(self, batch: SequenceCache, row: int, length: int) -> HistoryState:
        """Return the state of one history of a batch.

        Parameters
        ----------
        batch : SequenceCache
            Result of ``network.extend``.
        row : int
        length : int
            Number of events of the history.
        """
        heads, _, width = batch.layers[0][0].shape[1:]
        capacity = min(length + _FREE_ROWS, self._network.max_len)
        rows = np.empty((len(batch.layers), 2, heads, capacity, width), np.float32)
        for block, layer in enumerate(batch.layers):
            for number, part in enumerate(layer):
                rows[block, number, :, :length] = _values(part[row, :, :length])
        return HistoryState(length, _KeyValueBuffer(rows, length))

    def extend(
        self, state: HistoryState, ids: np.ndarray, times: np.ndarray
    ) -> tuple[np.ndarray, HistoryState]:
        """Read the events of a history that follow those of a state.

        Parameters
        ----------
        state : HistoryState
            It is not changed.
        ids, times : ndarray of int64
            The whole history; at least one event more than `state`, and at most ``max_len``.

        Returns
        -------
        vector : ndarray of shape (dim,)
            It predicts the next item.
        HistoryState
        """
        vector = self._positions[0]
        for length in range(state.length, len(ids)):
            buffer = state._buffer.reserve(length, self._network.max_len)
            vector = self._read(buffer.rows, length, int(ids[length]), times)
            state = HistoryState(length + 1, buffer)
        if self._network.cosine:
            compared = self._network.compared(torch.from_numpy(vector))
            vector = compared.numpy()
        return vector, state

    def _read(self, rows: np.ndarray, length: int, item: int, times: np.ndarray) -> np.ndarray:
        x = self._item(item) + self._positions[length]
        buckets = None
        if self._first_of_bucket is not None:
            passed = np.abs(times[length] - times[: length + 1])
            buckets = self._first_of_bucket.searchsorted(passed, "right")
        for block, part in zip(self._blocks, rows, strict=True):
            x = block(x, part[:, :, : length + 1], buckets)
        return x if self._after is None else self._after(x)

    def _item(self, item: int) -> np.ndarray:
        if self._items is not None:
            row: np.ndarray = self._items[item]
            return row
        with torch.inference_mode():
            computed: np.ndarray = self._network.items(torch.tensor(item)).numpy()
        return computed


@cache
def _first_of_buckets() -> np.ndarray:
    """Return the smallest time distance of each bucket from 1, for a binary search."""
    wanted = torch.arange(1, TIME_BUCKETS)
    low, high = torch.ones_like(wanted), torch.full_like(wanted, 2**62)
    while (low < high).any():
        middle = (low + high) // 2
        is_reached = time_buckets(middle, torch.zeros_like(middle)) >= wanted
        low, high = torch.where(is_reached, low, middle + 1), torch.where(is_reached, middle, high)
    return low.numpy()


def _values(weight: torch.Tensor) -> np.ndarray:
    values: np.ndarray = weight.detach().numpy()
    return values


def _sigmoid(x: np.ndarray) -> np.ndarray:
    half: np.ndarray = np.tanh(0.5 * x)  # without the overflow of exp
    half += 1
    half *= 0.5
    return half


class _NormalizationStep:
    """LayerNorm of one row."""

    def __init__(self, layer: torch.nn.LayerNorm):
        self.weight, self.bias, self.epsilon = _values(layer.weight), _values(layer.bias), layer.eps
        self.mean = np.full(len(self.weight), 1 / len(self.weight), np.float32)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        centered = x - self.mean @ x
        variance = float(centered @ centered) * float(self.mean[0])
        centered *= 1 / math.sqrt(variance + self.epsilon)
        centered *= self.weight
        centered += self.bias
        return centered


class _LinearStep:
    """Linear layer of one row."""

    def __init__(self, layer: torch.nn.Linear):
        self.weight = _values(layer.weight)
        self.bias = None if layer.bias is None else _values(layer.bias)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        out: np.ndarray = self.weight @ x
        if self.bias is not None:
            out += self.bias
        return out


class _BlockStep(ABC):
    """One block of a model, with its layers; it writes the key and the value of the new row."""

    def __init__(self, block: torch.nn.Module):
        for name, layer in block.named_children():
            if isinstance(layer, torch.nn.Linear):
                setattr(self, name, _LinearStep(layer))
            elif isinstance(layer, torch.nn.LayerNorm):
                setattr(self, name, _NormalizationStep(layer))
            elif isinstance(layer, Attention):
                setattr(self, name, _AttentionStep(layer))

    @abstractmethod
    def __call__(self, x: np.ndarray, rows: np.ndarray, buckets: np.ndarray | None) -> np.ndarray:
        """Return the output row; the last of `rows` is that of the new event."""


def _write(rows: np.ndarray, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Write the last key and value of ``(2, heads, steps, width)``; return those of all steps."""
    keys, values = rows
    shape = len(keys), -1
    keys[:, -1], values[:, -1] = key.reshape(shape), value.reshape(shape)
    return keys, values


class _AttentionStep:
    """Softmax attention of one row."""

    def __init__(self, layer: Attention):
        self.query, self.key_value = _LinearStep(layer.query), _LinearStep(layer.key_value)
        self.join = _LinearStep(layer.join)

    def __call__(self, queries: np.ndarray, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        key_value, dim = self.key_value(x), len(queries)
        keys, values = _write(rows, key_value[:dim], key_value[dim:])
        query = self.query(queries).reshape(len(keys), -1, 1)
        query *= 1 / math.sqrt(query.shape[1])
        weights = keys @ query
        weights -= weights.max(1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(1, keepdims=True)
        return self.join((weights.transpose(0, 2, 1) @ values).reshape(dim))


class _SASRecStep(_BlockStep):
    before: _NormalizationStep
    attention: _AttentionStep
    between: _NormalizationStep
    inner: _LinearStep
    outer: _LinearStep

    def __call__(self, x: np.ndarray, rows: np.ndarray, buckets: np.ndarray | None) -> np.ndarray:
        query = self.before(x)
        y = self.between(query + self.attention(query, x, rows))
        inner = self.inner(y)
        np.maximum(inner, 0, out=inner)
        return y + self.outer(inner)


class _LiGRStep(_BlockStep):
    before: _NormalizationStep
    attention: _AttentionStep
    first_gate: _LinearStep
    between: _NormalizationStep
    inner: _LinearStep
    outer: _LinearStep
    second_gate: _LinearStep

    def __call__(self, x: np.ndarray, rows: np.ndarray, buckets: np.ndarray | None) -> np.ndarray:
        y = self.before(x)
        x = x + _sigmoid(self.first_gate(x)) * self.attention(y, y, rows)
        gate, value = self.inner(self.between(x)).reshape(2, -1)
        out = self.outer(gate * _sigmoid(gate) * value)
        return x + _sigmoid(self.second_gate(x)) * out


class _HSTUStep(_BlockStep):
    before: _NormalizationStep
    mix: _LinearStep
    after: _NormalizationStep
    join: _LinearStep

    def __init__(self, block: HSTUBlock):
        super().__init__(block)
        self.max_len = block.max_len
        self.by_distance = _values(block.of_distance)[::-1]  # the oldest row first
        self.of_time = None if block.of_time is None else _values(block.of_time)

    def __call__(self, x: np.ndarray, rows: np.ndarray, buckets: np.ndarray | None) -> np.ndarray:
        mixed = self.mix(self.before(x))
        mixed *= _sigmoid(mixed)
        gate, value, query, key = mixed.reshape(4, -1)
        keys, values = _write(rows, key, value)
        weights = (keys @ query.reshape(len(keys), -1, 1))[:, :, 0]
        weights += self.by_distance[self.max_len - keys.shape[1] :]
        if self.of_time is not None and buckets is not None:
            weights += self.of_time[buckets]
        weights *= _sigmoid(weights) / self.max_len
        summed = (weights[:, None] @ values).reshape(len(x))
        return x + self.join(self.after(summed) * gate)


_BLOCKS: dict[type, type[_BlockStep]] = {
    SASRecBlock: _SASRecStep,
    LiGRBlock: _LiGRStep,
    HSTUBlock: _HSTUStep,
}
