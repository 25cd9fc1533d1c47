"""The global order of a table's rows in one epoch: which row stands at which position.

An order is a function of (seed, epoch) and of how it is cut, never of the number of ranks or of
the batch size: these only decide who reads which positions, and when.  No order needs memory for
the rows; any position can be asked for.

:class:`ShardOrder`
    The table is cut by rows into V virtual shards of equal size, each of them is permuted, and
    they are interleaved: each round of V positions has one row of every shard, in an order of its
    own.  With one shard it is one permutation of all rows.
:class:`WindowOrder`
    For tables of which only a part fits on the disk: blocks of consecutive rows are permuted, some
    of them form a window, and the rows of a window are permuted.
:class:`TableOrder`
    The rows as they lie in the table.

The numbers of an order are fixed: a position that was saved by one version means the same row in
the next ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bigdl.common.errors import UsageError

SHARDS = 64
"""Virtual shards of a table; a smaller table than that many rows of each has one."""

_FEWEST = 64  # rows of a virtual shard
_BLOCKS = 64  # blocks of a window
_ROUNDS = 4
_MASK = (1 << 64) - 1


def _mixed(*values: int) -> int:
    """Hash integers to 64 bits (SplitMix64; Steele et al. 2014)."""
    state = 0
    for value in values:
        state = (state ^ value) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


class _Permutations:
    """A family of permutations of ``range(size)``, one for each tweak, of which none is stored.

    Parameters
    ----------
    bits : int
        All sizes are at most ``2 ** bits``.
    key : tuple of int

    Notes
    -----
    Rounds of xor-shifts and products with odd numbers are permutations of all numbers of `bits`
    bits; numbers that are too large are permuted again until they are not ("cycle walking"; Black
    and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """

    def __init__(self, bits: int, *key: int):
        self._dtype = dtype = np.dtype(np.uint32 if bits <= 32 else np.uint64)
        self._mask = dtype.type((1 << bits) - 1)
        self._shift = dtype.type(max(1, bits // 2))
        words = [_mixed(*key, each) & int(self._mask) for each in range(2 * _ROUNDS)]
        self._factors = [dtype.type(each | 1) for each in words[:_ROUNDS]]
        self._terms = [dtype.type(each) for each in words[_ROUNDS:]]

    def __call__(
        self, index: np.ndarray, size: int | np.ndarray, tweak: np.ndarray | None = None
    ) -> np.ndarray:
        """Return where the permutation of each tweak (uint32) takes an index below its size."""
        values = index.astype(self._dtype)
        if tweak is not None:
            tweak = tweak.astype(self._dtype)
        self._step(values, tweak)
        outside = np.flatnonzero(values >= size)
        while len(outside):
            again = values[outside]
            self._step(again, None if tweak is None else tweak[outside])
            values[outside] = again
            limit = size if isinstance(size, int) else size[outside]
            outside = outside[again >= limit]
        return values

    def _step(self, values: np.ndarray, tweak: np.ndarray | None) -> None:
        """Permute numbers of `bits` bits, in place."""
        scratch = np.empty_like(values)
        for number, (factor, term) in enumerate(zip(self._factors, self._terms, strict=True)):
            if tweak is not None and number % 2 == 0:
                values += tweak >> self._dtype.type(number)
            values += term
            values *= factor
            values &= self._mask
            np.right_shift(values, self._shift, out=scratch)
            values ^= scratch


def _bits(size: int) -> int:
    return max(1, (size - 1).bit_length())


@dataclass(frozen=True)
class Window:
    """Positions that are read together.

    Attributes
    ----------
    start, stop : int
        A range of positions.
    ranges : list of (int, int)
        The rows of the table that stand there, in the order in which they are stored.
    """

    start: int
    stop: int
    ranges: list[tuple[int, int]]


class TableOrder:
    """The rows as they lie in the table.

    Parameters
    ----------
    rows : int
    """

    def __init__(self, rows: int):
        self.rows = rows

    def rows_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the rows of the table at some positions."""
        return positions


class ShardOrder:
    """The rows of V virtual shards, each permuted, one of each in turn.

    Parameters
    ----------
    rows, shards, seed, epoch : int

    Notes
    -----
    Shard v has the rows from ``v * q + min(v, r)`` on, where ``q, r = divmod(rows, V)``: one row
    more if v < r.  Position p is the row number ``p // V`` of some shard; the last, short round
    has rows of the first r shards.
    """

    def __init__(self, rows: int, shards: int, seed: int, epoch: int):
        self.rows, self._shards = rows, shards
        self._quotient, self._rest = divmod(rows, shards)
        largest = max(1, -(-rows // shards))
        self._in_shard = _Permutations(_bits(largest), seed, epoch, 0)
        self._in_round = _Permutations(_bits(shards), seed, epoch, 1)
        tweaks = [_mixed(seed, epoch, 2, shard) & 0xFFFFFFFF for shard in range(shards)]
        self._tweaks = np.array(tweaks, np.uint32)
        numbers = np.arange(shards, dtype=np.int64)
        self._first = numbers * self._quotient + np.minimum(numbers, self._rest)
        self._sizes = self._quotient + (numbers < self._rest)

    def rows_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the rows of the table at some positions."""
        if self._shards == 1:
            return self._in_shard(positions, self.rows).astype(np.int64)
        rounds = positions // self._shards
        slots = positions - rounds * self._shards
        width: int | np.ndarray = self._shards
        if len(rounds) and int(rounds.max()) == self._quotient:  # the last, short one is among them
            width = np.where(rounds < self._quotient, self._shards, self._rest)
        # the same hash as of a tweak, cheap enough for every round
        spread = rounds.astype(np.uint32) * np.uint32(0x9E3779B1)
        shards = self._in_round(slots, width, spread ^ (spread >> np.uint32(15)))
        within = self._in_shard(rounds, self._sizes[shards], self._tweaks[shards])
        numbers: np.ndarray = self._first[shards] + within
        return numbers


class WindowOrder:
    """Blocks of consecutive rows in permuted order, and within windows of them permuted rows.

    Parameters
    ----------
    rows : int
    window : int
        Rows of a window.
    seed, epoch : int
    shuffle : bool
        False leaves the rows as they lie in the table.
    """

    def __init__(self, rows: int, window: int, seed: int, epoch: int, *, shuffle: bool = True):
        self.rows, self._seed, self._epoch, self._shuffle = rows, seed, epoch, shuffle
        block = max(1, window // _BLOCKS)
        starts = np.arange(0, rows, block, dtype=np.int64)
        if shuffle:
            permuted = _Permutations(_bits(len(starts)), seed, epoch, 3)
            starts = starts[permuted(np.arange(len(starts)), len(starts))]
        self.windows: list[Window] = []
        start = 0
        for first in range(0, len(starts), _BLOCKS):
            blocks = [(int(s), min(int(s) + block, rows)) for s in starts[first : first + _BLOCKS]]
            stop = start + sum(high - low for low, high in blocks)
            self.windows.append(Window(start, stop, blocks))
            start = stop

    def number(self, position: int) -> int:
        """Return the number of the window that has a position."""
        return next(n for n, each in enumerate(self.windows) if position < each.stop)

    def stored_at(self, number: int, positions: np.ndarray) -> np.ndarray:
        """Return the indices, among the stored rows of a window, of the rows at its positions."""
        window = self.windows[number]
        size = window.stop - window.start
        index = positions - window.start
        if not self._shuffle:
            return index
        permuted = _Permutations(_bits(size), self._seed, self._epoch, 4, number)
        return permuted(index, size).astype(np.int64)

    def rows_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the rows of the table at some positions."""
        out = np.empty(len(positions), np.int64)
        for number, window in enumerate(self.windows):
            here = (positions >= window.start) & (positions < window.stop)
            if here.any():
                stored = self.stored_at(number, positions[here])
                lengths = np.array([high - low for low, high in window.ranges])
                ends = np.cumsum(lengths)
                block = np.searchsorted(ends, stored, side="right")
                lows = np.array([low for low, _ in window.ranges])
                out[here] = lows[block] + stored - (ends - lengths)[block]
        return out


Order = TableOrder | ShardOrder | WindowOrder


def order_facts(rows: int, shuffle: bool | str, window: int | None) -> dict[str, int | str]:
    """Return how the order of a table is cut, JSON-able, for :func:`make_order`.

    Parameters
    ----------
    rows : int
    shuffle : bool or "global"
    window : int or None
        Rows of a window of a table that is read in windows.
    """
    if window is not None:
        return {"kind": "windows" if shuffle else "table windows", "rows": window}
    if not shuffle:
        return {"kind": "table"}
    is_one = shuffle == "global" or rows < SHARDS * _FEWEST
    return {"kind": "shards", "shards": 1 if is_one else SHARDS}


def make_order(facts: dict[str, int | str], rows: int, seed: int, epoch: int) -> Order:
    """Return the order of one epoch."""
    kind = facts.get("kind")
    if kind == "table":
        return TableOrder(rows)
    if kind == "shards":
        return ShardOrder(rows, int(facts["shards"]), seed, epoch)
    if kind in ("windows", "table windows"):
        return WindowOrder(rows, int(facts["rows"]), seed, epoch, shuffle=kind == "windows")
    raise UsageError(
        f"The order {facts} is not known here; read it by the version of BigDL that saved it",
        code="version-unsupported",
    )


def ranges_of(start: int, stop: int, world_size: int) -> list[tuple[int, int]]:
    """Cut the positions of a step in one contiguous range for each rank, as even as can be."""
    count = stop - start
    ends: Sequence[int] = [start + count * rank // world_size for rank in range(world_size + 1)]
    return list(itertools.pairwise(ends))
