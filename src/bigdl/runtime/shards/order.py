"""Global row orders of a table for one epoch.

An order depends on (seed, epoch) and on its division into shards or windows, never on the number of
ranks or the batch size: these only decide which rank reads which positions, and when.  No order
needs memory for the rows; any position can be computed.

:class:`ShardOrder`
    The table is cut into V virtual shards of equal size.  Each shard is permuted, and the shards
    are interleaved: each round of V positions has one row of every shard, in a random order.  With
    one shard it is one permutation of all rows.  Optionally a shard is permuted block by block, so
    that V blocks are read at a time.
:class:`WindowOrder`
    For tables that do not fit on the disk: blocks of consecutive rows are permuted, several blocks
    form a window, and the rows of a window are permuted.
:class:`TableOrder`
    The rows in the order of the table.

Orders never change between versions: a saved position means the same row in later versions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bigdl.common.errors import UsageError

SHARDS = 64
"""Number of virtual shards of a table; small tables have a single shard."""

_FEWEST = 64  # minimum rows of a virtual shard
_BLOCKS = 64  # blocks per window
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
    """Family of pseudo-random permutations of ``range(size)``, computed on the fly.

    Parameters
    ----------
    bits : int
        Sizes are at most ``2 ** bits``.
    key : tuple of int

    Notes
    -----
    Xor-shifts and products with odd numbers are permutations of all integers of `bits` bits.
    Results that are too large are permuted again ("cycle walking"; Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002).
    """

    def __init__(self, bits: int, *key: int):
        self._dtype = dtype = np.dtype(np.uint32 if bits <= 32 else np.uint64)
        self._mask = dtype.type((1 << bits) - 1)
        self._shift = dtype.type(max(1, bits // 2))
        hashes = [_mixed(*key, each) & int(self._mask) for each in range(2 * _ROUNDS)]
        self._factors = [dtype.type(each | 1) for each in hashes[:_ROUNDS]]
        self._terms = [dtype.type(each) for each in hashes[_ROUNDS:]]

    def __call__(
        self, index: np.ndarray, size: int | np.ndarray, tweak: np.ndarray | None = None
    ) -> np.ndarray:
        """Permute indices; `tweak` selects the permutation of each index."""
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
        """Permute integers of `bits` bits in place."""
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
    """Range of epoch positions whose rows are read together.

    Attributes
    ----------
    start, stop : int
        A range of positions.
    ranges : list of (int, int)
        Table rows of these positions, in the order in which they are stored.
    """

    start: int
    stop: int
    ranges: list[tuple[int, int]]


class TableOrder:
    """Unshuffled row order of an epoch, equal to the order of the table.

    Parameters
    ----------
    rows : int
    """

    def __init__(self, rows: int):
        self.rows = rows

    def rows_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the table row index for each epoch position."""
        return positions


class ShardOrder:
    """Round-robin order of V virtual shards, each with permuted rows.

    Parameters
    ----------
    rows, shards, seed, epoch : int
    block : int, optional
        Permute the blocks of this number of rows of each shard, and the rows of each block; by
        default all rows of the shard. The last, shorter block of a shard stays the last.

    Notes
    -----
    Shard v starts at row ``v * q + min(v, r)``, where ``q, r = divmod(rows, V)``; the first r
    shards have one more row.  Position p is row ``p // V`` of some shard; the last, short round has
    rows of the first r shards.
    """

    def __init__(self, rows: int, shards: int, seed: int, epoch: int, block: int | None = None):
        self.rows, self._shards, self._block = rows, shards, block
        self._quotient, self._remainder = divmod(rows, shards)
        largest = max(1, -(-rows // shards))
        if block is not None:
            self._of_blocks = _Permutations(_bits(max(1, largest // block)), seed, epoch, 5)
        self._in_shard = _Permutations(_bits(block or largest), seed, epoch, 0)
        self._in_round = _Permutations(_bits(shards), seed, epoch, 1)
        tweaks = [_mixed(seed, epoch, 2, shard) & 0xFFFFFFFF for shard in range(shards)]
        self._tweaks = np.array(tweaks, np.uint32)
        numbers = np.arange(shards, dtype=np.int64)
        self._first = numbers * self._quotient + np.minimum(numbers, self._remainder)
        self._sizes = self._quotient + (numbers < self._remainder)

    def rows_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the table row index for each epoch position."""
        if self._shards == 1:
            return self._in_shard(positions, self.rows).astype(np.int64)
        rounds = positions // self._shards
        slots = positions - rounds * self._shards
        width: int | np.ndarray = self._shards
        if len(rounds) and int(rounds.max()) == self._quotient:  # includes the last, short round
            width = np.where(rounds < self._quotient, self._shards, self._remainder)
        # a cheap hash, since it is needed for every round
        hashed = rounds.astype(np.uint32) * np.uint32(0x9E3779B1)
        shards = self._in_round(slots, width, hashed ^ (hashed >> np.uint32(15)))
        return self._rows_of(rounds, shards)

    def _rows_of(self, rounds: np.ndarray, shards: np.ndarray) -> np.ndarray:
        """Return the table row index of each pair of a round and a shard."""
        sizes, tweaks, block = self._sizes[shards], self._tweaks[shards], self._block
        if block is None:
            numbers: np.ndarray = self._first[shards] + self._in_shard(rounds, sizes, tweaks)
            return numbers
        number, offset = np.divmod(rounds, block)
        full = sizes // block
        width = np.where(number < full, block, sizes - full * block)
        permuted = number.copy()
        is_full = np.flatnonzero(number < full)
        permuted[is_full] = self._of_blocks(number[is_full], full[is_full], tweaks[is_full])
        mixed = tweaks ^ (number.astype(np.uint32) * np.uint32(0x9E3779B1))
        within = permuted * block + self._in_shard(offset, width, mixed)
        numbers = self._first[shards] + within
        return numbers

    def rows_in(
        self, intervals: Sequence[tuple[int, int]], parts: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows at given positions that are in given parts of the table.

        The time is that of the returned rows, and of two rounds per interval.

        Parameters
        ----------
        intervals : sequence of (int, int)
            Disjoint ranges of positions.
        parts : sequence of (int, int)
            Disjoint ranges of row indices, ascending.

        Returns
        -------
        rows : ndarray of int64
            The rows of each interval in turn, in an unspecified order.
        counts : ndarray of int64
            Number of rows of each interval.
        """
        lows, highs = np.array(intervals, np.int64).reshape(-1, 2).T
        # rounds that are completely in an interval have one row of each shard
        first = -(-lows // self._shards)
        last = np.maximum(first, np.minimum(highs // self._shards, self._quotient))
        head = np.minimum(first * self._shards, highs)
        tail = np.minimum(highs, np.maximum(head, last * self._shards))
        positions, of_positions = _numbers_in(
            np.concatenate([lows, tail]), np.concatenate([head, highs])
        )
        of_positions %= len(lows)
        rows = [self.rows_at(positions)]
        owners = [of_positions]
        overlap = [
            (low < self._first + self._sizes) & (self._first < high)
            for low, high in parts
            if low < high
        ]
        shards = np.flatnonzero(np.any(overlap, axis=0)) if overlap else np.empty(0, np.int64)
        rounds, of_rounds = _numbers_in(first, last)
        if len(rounds) and len(shards):
            rows.append(self._rows_of(np.repeat(rounds, len(shards)), np.tile(shards, len(rounds))))
            owners.append(np.repeat(of_rounds, len(shards)))
        return _of_parts(np.concatenate(rows), np.concatenate(owners), len(lows), parts)


def _numbers_in(lows: np.ndarray, highs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the integers of several ranges, and the index of the range of each."""
    counts = highs - lows
    ranges = np.repeat(np.arange(len(lows)), counts)
    starts = lows - (np.cumsum(counts) - counts)
    return np.arange(len(ranges), dtype=np.int64) + starts[ranges], ranges


def _of_parts(
    rows: np.ndarray, owners: np.ndarray, count: int, parts: Sequence[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Select the rows in some parts of the table, sorted by the interval that owns them."""
    edges = np.array(parts, np.int64).reshape(-1)
    is_in = np.searchsorted(edges, rows, side="right") % 2 == 1
    rows, owners = rows[is_in], owners[is_in]
    by_owner = np.argsort(owners, kind="stable")
    return rows[by_owner], np.bincount(owners, minlength=count)


class WindowOrder:
    """Row order that permutes blocks of consecutive rows, then the rows within windows of blocks.

    Parameters
    ----------
    rows : int
    window : int
        Number of rows of a window.
    seed, epoch : int
    shuffle : bool
        False keeps the order of the table.
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
        """Return the number of the window that contains a position."""
        return next(n for n, each in enumerate(self.windows) if position < each.stop)

    def stored_at(self, number: int, positions: np.ndarray) -> np.ndarray:
        """Return the index into a window's stored rows for each epoch position."""
        window = self.windows[number]
        size = window.stop - window.start
        index = positions - window.start
        if not self._shuffle:
            return index
        permuted = _Permutations(_bits(size), self._seed, self._epoch, 4, number)
        return permuted(index, size).astype(np.int64)

    def rows_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the table row index for each epoch position."""
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


def order_facts(
    rows: int, shuffle: bool | str, window: int | None, *, by_shard: bool = False
) -> dict[str, int | str]:
    """Return a JSON-serializable description of a table's order, for :func:`make_order`.

    Parameters
    ----------
    rows : int
    shuffle : bool or "global"
    window : int or None
        Number of rows of a window, for a table that is read in windows.
    by_shard : bool
        Whether a window has a block of each virtual shard, so that each of its batches has rows of
        all parts of the table, instead of random blocks.
    """
    if window is not None and by_shard and shuffle and rows >= SHARDS * _FEWEST:
        return {"kind": "shard windows", "shards": SHARDS, "rows": window}
    if window is not None:
        return {"kind": "windows" if shuffle else "table windows", "rows": window}
    if not shuffle:
        return {"kind": "table"}
    is_one = shuffle == "global" or rows < SHARDS * _FEWEST
    return {"kind": "shards", "shards": 1 if is_one else SHARDS}


def make_order(facts: dict[str, int | str], rows: int, seed: int, epoch: int) -> Order:
    """Create an epoch's row order from the description that :func:`order_facts` returned."""
    order_type = facts.get("kind")
    if order_type == "table":
        return TableOrder(rows)
    if order_type == "shards":
        return ShardOrder(rows, int(facts["shards"]), seed, epoch)
    if order_type == "shard windows":
        shards = int(facts["shards"])
        return ShardOrder(rows, shards, seed, epoch, max(1, int(facts["rows"]) // shards))
    if order_type in ("windows", "table windows"):
        return WindowOrder(rows, int(facts["rows"]), seed, epoch, shuffle=order_type == "windows")
    raise UsageError(
        f"The order {facts} is unknown; read it with the version of BigDL that saved it",
        code="version-unsupported",
    )


def ranges_of(start: int, stop: int, world_size: int) -> list[tuple[int, int]]:
    """Split the positions of a step into one contiguous, nearly equal range per rank."""
    count = stop - start
    ends: Sequence[int] = [start + count * rank // world_size for rank in range(world_size + 1)]
    return list(itertools.pairwise(ends))
