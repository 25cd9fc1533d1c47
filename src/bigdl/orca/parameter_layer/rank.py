"""Computations of one rank in a step of the parameter layer, for every transport.

BatchNorm statistics and other buffers are merged after every step, so they depend neither on the
transport nor on the group size.  Only buffers that a rank has changed are sent.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from bigdl.common.memory import tuned_allocator
from bigdl.orca.parameter_layer.messages import ArrayMessage, Packable, RankState, codec_for, unpack
from bigdl.orca.parameter_layer.optimizers import update_slice
from bigdl.orca.parameter_layer.plan import LayerPlan, LayerStep, ParameterSegment, ranges_of
from bigdl.orca.parameter_layer.stragglers import run_within
from bigdl.runtime.task import read_to_end

_BLOCK = 1 << 15  # numbers per block of a sum, so that it fits into the cache


def changed(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    """Return the arrays of `after` that differ bitwise from `before`, by their list index."""
    return {
        number: new
        for number, (old, new) in enumerate(zip(before, after, strict=True))
        if old.tobytes() != new.tobytes()
    }


def merge(values: Sequence[np.ndarray], rows: Sequence[int]) -> np.ndarray:
    """Merge the values that several ranks have for one buffer.

    A floating-point buffer becomes the mean weighted by the rows of each rank, an integer buffer (a
    counter) the maximum.
    """
    first = values[0]
    if all(value.tobytes() == first.tobytes() for value in values[1:]):
        return first.copy()
    if not np.issubdtype(first.dtype, np.inexact):
        return np.asarray(np.maximum.reduce(values))
    return np.average(values, axis=0, weights=rows).astype(first.dtype)


def merged(contributions: Sequence[tuple[int, Mapping[int, np.ndarray]]]) -> dict[int, np.ndarray]:
    """Merge the buffers that ranks changed; `contributions` are pairs of row count and buffers."""
    numbers = sorted({number for _, buffers in contributions for number in buffers})
    return {
        number: merge(
            [buffers[number] for _, buffers in contributions if number in buffers],
            [rows for rows, buffers in contributions if number in buffers],
        )
        for number in numbers
    }


@dataclass
class Contribution(Packable):
    """Gradient of one rank's rows, one slice of it, or a sum of slices, along with statistics.

    Attributes
    ----------
    gradient : ndarray of float32, bytes-like or None
        Gradient of all parameters, None without rows; in a piece the encoded part of a slice.
    touched : dict of int to ndarray
        Rows of each table that the gradient has, in ascending order; the gradient of other rows is
        0. In a piece or a sum they are relative to the first row of the slice.
    counted : float
        Divisor of the loss.
    rows : int
    absent : list of int
        Parameters without a gradient.
    buffers : dict of int to ndarray
        Changed buffers.
    record : dict or None
        JSON-serializable record for the driver.
    is_late : bool
        True if the contribution is late and therefore dropped.
    is_void : bool
        True if this step, or an earlier one of the group, is discarded.
    """

    gradient: Any = None
    counted: float = 0.0
    rows: int = 0
    absent: Sequence[int] = ()
    buffers: dict[int, np.ndarray] = field(default_factory=dict)
    record: Any = field(default_factory=lambda: {"loss": 0.0, "counted": 0.0})
    is_late: bool = False
    is_void: bool = False
    touched: dict[int, np.ndarray] = field(default_factory=dict)

    numbered = "buffers", "touched"


class Replica(Protocol):
    """Model replica that computes gradients on a rank's rows."""

    def describe(self) -> dict:
        """Return the JSON-serializable facts about the rows that the driver needs."""

    def compute(
        self, step: LayerStep, weights: np.ndarray, buffers: dict[int, np.ndarray]
    ) -> Contribution:
        """Compute the gradient at `weights`; missing buffers have their initial values.

        The result depends only on the arguments, so that it can be recomputed. The replica may use
        the memory of `weights` until the next call, but must not change it.
        """


class Rank:
    """Computations of one rank: gradients of its rows and updates of its slice of the weights.

    Parameters
    ----------
    plan : LayerPlan
    rank : int
        Index of the rank; a rank without a slice only computes gradients.
    stays : bool
        True if the object makes all steps of a group. From the second step on it then sends only
        the changed rows of tables.
    """

    def __init__(self, plan: LayerPlan, rank: int, *, stays: bool = False):
        self._plan, self.rank = plan, rank
        self._geometry = plan.geometry
        self._keeps_vector = stays and any(plan.widths)
        self._vector: np.ndarray | None = None  # all weights, if they are kept between steps
        self._touched: dict[int, np.ndarray] | None = None  # of the last update; None: all
        self._codec = codec_for(plan.compression)
        self._weights_codec = codec_for(self._codec.weights)
        self._read: tuple[float, float] | None = None  # start and duration of the last read

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Context manager that measures the time to receive a phase's input."""
        began, started = time.time(), time.perf_counter()
        yield
        self._read = began, time.perf_counter() - started

    def _begin(self) -> tuple[float, float]:
        """Return the start time of the current phase as wall-clock and performance-counter time.

        The start is moved back by the duration of the preceding read.
        """
        (began_at, read_s), self._read = self._read or (time.time(), 0.0), None
        return began_at, time.perf_counter() - read_s

    @functools.cached_property
    def _segments(self) -> list[ParameterSegment]:
        return self._geometry.segments(self.rank)

    def weights(self, state: RankState) -> ArrayMessage:
        """Return this rank's slice of the weights, or its changed rows, and its buffers."""
        weights, rows = state.weights, self._touched
        if rows is not None:
            parts = [_elements(weights, each, rows).reshape(-1) for each in self._segments]
            weights = np.concatenate([weights[:0], *parts])  # a slice may have no segments
        return ArrayMessage(
            {
                "weights": self._weights_codec.encode(weights),
                "touched": None if rows is None else list(rows.items()),
                "buffers": list(state.buffers.items()),
                "halted": state.is_halted,
            }
        )

    @property
    def sends_exact_weights(self) -> bool:
        """True if :meth:`weights` contains the weights in full precision."""
        return self._codec.weights == "fp32"

    def vector(self) -> tuple[np.ndarray, list[np.ndarray] | None]:
        """Return a vector for all weights, and views of its slices to use as receive buffers.

        The views are None if ranks send only changed rows: the vector then holds the weights of the
        previous step.
        """
        if self._vector is not None:
            return self._vector, None
        vector = np.empty(self._geometry.total, np.float32)
        if self._keeps_vector:
            self._vector = vector
        return vector, [vector[low:high] for low, high in self._geometry.bounds]

    def _put(self, received: dict, vector: np.ndarray, owner: int) -> None:
        """Copy the weights, or only the changed rows, received from an owner into the vector."""
        low, high = self._geometry.bounds[owner]
        decoded, part = self._weights_codec.decode(received["weights"]), vector[low:high]
        if received["touched"] is None:
            if decoded.ctypes.data != part.ctypes.data:
                part[:] = decoded
            return
        rows, segments = dict(received["touched"]), self._geometry.segments(owner)
        for segment, span in zip(segments, ranges_of(segments, rows), strict=True):
            here, values = segment.of(part), decoded[span]
            if segment.width:
                here[rows[segment.parameter]] = values.reshape(-1, segment.width)
            else:
                here[:] = values

    def gradients(
        self,
        replica: Replica,
        step: LayerStep,
        weights: Sequence,
        residual: np.ndarray | None = None,
        vector: np.ndarray | None = None,
    ) -> tuple[list[ArrayMessage], np.ndarray | None]:
        """Compute the gradient of the local rows; split it into one message for each slice's owner.

        Parameters
        ----------
        weights : sequence of bytes-like or ArrayMessage
            Results of :meth:`weights` of every owner.
        residual : ndarray, optional
            Residual of the rank's state.
        vector : ndarray of float32, optional
            Vector of :meth:`vector`, which may already contain received weights.

        Returns
        -------
        list of ArrayMessage, ndarray or None
            Pieces for every owner, and the new residual.
        """
        began_at, started = self._begin()
        vector = self.vector()[0] if vector is None else vector
        buffers: dict[int, np.ndarray] = {}
        for owner, data in enumerate(weights):
            received = unpack(data)
            self._put(received, vector, owner)
            buffers.update(received["buffers"])
            is_void = received["halted"]  # the same on all owners
        got = time.perf_counter()
        contribution = Contribution(is_void=is_void)
        if not is_void:
            in_time = run_within(step.limit, lambda: replica.compute(step, vector, buffers))
            contribution = in_time or Contribution(is_late=True)
        if contribution.is_late:
            contribution.record["dropped"] = step.rows(self.rank)
        computed = time.perf_counter()
        has_gradient = contribution.gradient is not None
        parts = self._geometry.cut(contribution.touched) if has_gradient else []
        encoded, residual = self.encoded_parts(contribution.gradient, parts, residual)
        record = {
            **contribution.record,
            "rows": contribution.rows,
            "began_at": began_at,
            "get_weights_s": got - started,
            "compute_s": computed - got,
            "put_gradient_s": time.perf_counter() - computed,
            "bytes": sum(map(len, encoded)) + sum(r.nbytes for r in contribution.touched.values()),
            "ended_at": time.time(),
        }
        owners, pieces = self._plan.owners, []
        for owner, data in enumerate(encoded):
            of_owner = {n: b for n, b in contribution.buffers.items() if n % owners == owner}
            piece = replace(
                contribution,
                gradient=data,
                touched=parts[owner][1] if parts else {},
                buffers=of_owner,
                record=None if owner else record,
            )
            pieces.append(piece.message())
        return pieces, residual

    def encoded_parts(self, gradient, parts, residual):
        """Encode the slices of a gradient; return the encoded slices and the encoding error."""
        if gradient is None:
            return [b""] * self._plan.owners, residual
        if not self._codec.feedback:
            return [self._codec.encode(gradient[part]) for part, _ in parts], None
        corrected = gradient if residual is None else gradient + residual
        pieces, lost = [], np.empty_like(gradient)
        for part, _ in parts:
            pieces.append(self._codec.encode(corrected[part]))
            lost[part] = corrected[part] - self._codec.decode(pieces[-1])
        return pieces, lost

    def reduce(self, pieces: Sequence, coming: Iterable[int] = ()) -> Contribution:
        """Add up the contributions that all ranks sent for this rank's slice, in rank order.

        Parameters
        ----------
        pieces : sequence of bytes-like, ArrayMessage or ReceivedMessage
        coming : iterable of int, optional
            Yields the number of received bytes of each gradient; at its end all are complete.
        """
        began_at, started = self._begin()
        contributions = [Contribution.unpack(data) for data in pieces]
        sources = [each.record for each in contributions]
        present = [each for each in contributions if each.counted]
        late = [source for source, each in enumerate(contributions) if each.is_late]
        too_few = len(present) < (len(present) + len(late)) * (1 - self._plan.max_drop)
        # the same on all owners
        is_void = contributions[0].is_void or bool(late and (too_few or not present))
        if is_void:
            contributions, present = [], []
        total = sum(each.counted for each in present)
        coming, has_tables = iter(coming), any(self._plan.widths)
        if has_tables or not self.sends_exact_weights:  # otherwise decode returns a view
            read_to_end(coming)
        vectors = [self._codec.decode(each.gradient) for each in present]
        shares = [
            np.float32(1.0 if self._plan.loss_is_sum else each.counted / total) for each in present
        ]
        touched: dict[int, np.ndarray] = {}
        if has_tables:
            rows_of = [each.touched for each in present]
            gradient, touched = _sum_with_tables(self._segments, vectors, rows_of, shares)
        else:
            low, high = self._geometry.bounds[self.rank]
            gradient = _weighted_sum(vectors, shares, high - low, coming)
        read_to_end(coming)
        absent = set(range(len(self._plan.sizes)))
        for each in present:
            absent.intersection_update(each.absent)
        buffers = merged([(each.rows, each.buffers) for each in contributions])
        if self._plan.clamp is not None:
            np.clip(gradient, *self._plan.clamp, out=gradient)
        record: dict[str, Any] = {
            "late": late,
            "began_at": began_at,
            "aggregate_s": time.perf_counter() - started,
            "ended_at": time.time(),
        }
        if self.rank == 0:
            record |= {"sources": sources, "is_void": is_void}
        return Contribution(
            gradient,
            total,
            absent=sorted(absent),
            buffers=buffers,
            record=record,
            is_void=is_void,
            touched=touched,
        )

    def statistics(self, summed: Contribution, state: RankState) -> ArrayMessage:
        """Return the sums of squares of this rank's slice as a message for all ranks."""
        plan = self._plan
        squares = [_squares(summed.gradient)]
        if plan.needs_norms:
            both = np.zeros((len(plan.sizes), 2))
            spans = ranges_of(self._segments, summed.touched)
            for segment, span in zip(self._segments, spans, strict=True):
                slices = state.weights[segment.start : segment.stop], summed.gradient[span]
                both[segment.parameter] = [_squares(part) for part in slices]
            squares += both.reshape(-1).tolist()
        return ArrayMessage(np.asarray(squares))

    def update(
        self,
        step: LayerStep,
        summed: Contribution,
        state: RankState,
        statistics: Sequence | None = None,
    ) -> None:
        """Update this rank's slice of the weights.

        Parameters
        ----------
        summed : Contribution
            Result of :meth:`reduce`.
        state : RankState
            State of this rank, which is updated in place.
        statistics : sequence of bytes-like or ArrayMessage, optional
            Results of :meth:`statistics` of every owner, if the plan needs them.
        """
        (began_at, started), record = self._begin(), summed.record
        if self._keeps_vector:
            self._touched = summed.touched
        record["wait_s"] = max(0.0, began_at - record["ended_at"])
        if summed.is_void:
            state.is_halted = True
        else:
            self._make_update(step, summed, state, statistics)
        record["compute_weight_s"] = time.perf_counter() - started
        record["send_weights_s"] = 0.0
        record["ended_at"] = time.time()
        state.records.append(record)

    @contextlib.contextmanager
    def sending(self, state: RankState) -> Iterator[None]:
        """Context manager that adds the time to send the weights to the last step's record."""
        started = time.perf_counter()
        yield
        if state.records:  # empty at the start of a group
            state.records[-1]["send_weights_s"] = time.perf_counter() - started
            state.records[-1]["ended_at"] = time.time()

    def _make_update(self, step, summed, state, statistics):
        norms, plan = None, self._plan
        if statistics is not None:
            squares, scale = sum(map(unpack, statistics)), 1.0
            if plan.norm is not None:
                scale = plan.norm / max(float(np.sqrt(squares[0])) + plan.slack, plan.norm)
                if scale < 1.0:
                    summed.gradient *= np.float32(scale)
            if plan.needs_norms:
                norms = (np.sqrt(squares[1:].reshape(-1, 2)) * (1.0, scale)).tolist()
        gradient, absent = summed.gradient, set(summed.absent)
        update_slice(
            plan, step.hyper, self._segments, state, gradient, absent, norms, summed.touched
        )
        state.buffers.update(summed.buffers)


def _weighted_sum(vectors, shares, length: int, coming: Iterator[int]) -> np.ndarray:
    """Return the sum of `vectors` weighted by `shares`, computed while their bytes arrive.

    `coming` yields how many bytes of each vector have arrived; the sum waits for them block by
    block.
    """
    if not vectors:
        return np.zeros(length, np.float32)
    total, scratch = np.empty(length, np.float32), np.empty(_BLOCK, np.float32)
    size = total.itemsize
    available: float = 0
    for start in range(0, length, _BLOCK):
        while available < min(start + _BLOCK, length) * size:
            available = next(coming, math.inf)
        here = total[start : start + _BLOCK]
        part = scratch[: len(here)]
        np.multiply(vectors[0][start : start + _BLOCK], shares[0], out=here)
        for vector, share in zip(vectors[1:], shares[1:], strict=True):
            np.multiply(vector[start : start + _BLOCK], share, out=part)
            np.add(here, part, out=here)
    return total


def _sum_with_tables(
    segments: Sequence[ParameterSegment],
    vectors: Sequence[np.ndarray],
    touched: Sequence[Mapping[int, np.ndarray]],
    shares: Sequence[np.float32],
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Return the sum of `vectors` weighted by `shares`, and the union of their touched rows.

    Vectors and their sum have only the touched rows of tables.
    """
    rows = {
        each.parameter: _union([of_rank[each.parameter] for of_rank in touched])
        for each in segments
        if each.width
    }
    spans = ranges_of(segments, rows)
    total = np.zeros(spans[-1].stop if spans else 0, np.float32)
    spans_of_ranks = [ranges_of(segments, of_rank) for of_rank in touched]
    for number, (segment, here) in enumerate(zip(segments, spans, strict=True)):
        parts = [v[of[number]] for v, of in zip(vectors, spans_of_ranks, strict=True)]
        if not segment.width:
            total[here] = _weighted_sum(parts, shares, here.stop - here.start, iter(()))
            continue
        of_table, all_rows = total[here].reshape(-1, segment.width), rows[segment.parameter]
        for part, share, of_rank in zip(parts, shares, touched, strict=True):
            where = np.searchsorted(all_rows, of_rank[segment.parameter])
            of_table[where] += part.reshape(-1, segment.width) * share
    return total, rows


def _union(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.unique(np.concatenate(rows)) if rows else np.empty(0, np.int64)


def _elements(
    vector: np.ndarray, segment: ParameterSegment, rows: Mapping[int, np.ndarray]
) -> np.ndarray:
    """Return a segment of a slice; for a table only the rows that `rows` selects."""
    here = segment.of(vector)
    return here[rows[segment.parameter]] if segment.width else here


def _squares(values) -> float:
    wide = values.astype(np.float64)
    return float(wide @ wide)


_open: dict[tuple, Any] = {}  # replicas by training, rank and version
_memory = contextlib.ExitStack()


def replica_of(training: str, rank: int, version: tuple, make: Callable[[], Replica]) -> Replica:
    """Return this process's replica of a rank; close the replicas of other training runs.

    Parameters
    ----------
    training : str
    rank : int
    version : tuple
        Version of its data; a replica of another version is recreated.
    make : callable
    """
    close_replicas(lambda key: key[0] != training or (key[1] == rank and key[2] != version))
    key = training, rank, version
    if key not in _open:
        replica = make()
        if not _open:
            _memory.enter_context(tuned_allocator())
        _open[key] = replica
    return _open[key]


def close_replicas(is_over: Callable[[tuple], bool] = lambda key: True) -> None:
    """Close the replicas in this process whose keys satisfy `is_over`, by default all."""
    for key in filter(is_over, list(_open)):
        replica = _open.pop(key)
        getattr(replica, "close", lambda: None)()
    if not _open:
        _memory.close()
