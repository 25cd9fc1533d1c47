"""Computations of one rank in a step, whoever carries the bytes from rank to rank."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from bigdl.common.memory import tuned_allocator
from bigdl.orca.parameter_layer.messages import Message, codec_for, pack, unpack
from bigdl.orca.parameter_layer.optimizers import SliceOptimizer
from bigdl.orca.parameter_layer.plan import LayerPlan, Segment, Step
from bigdl.orca.parameter_layer.state import RankState, merged
from bigdl.orca.parameter_layer.stragglers import run_within

__all__ = ["Contribution", "Rank", "Replica", "Sum", "close_replicas", "replica_of"]

_BLOCK = 1 << 15  # numbers that are summed at a time: what is read twice stays in the cache


@dataclass
class Contribution:
    """Gradient and figures of a rank's rows of a batch.

    Attributes
    ----------
    gradient : ndarray of float32 or None
        Of all parameters; None without rows.
    counted : float
        What the loss was divided by.
    rows : int
    absent : list of int
        Parameters that have no gradient.
    buffers : dict of int to ndarray
        Buffers that have changed.
    record : dict
        JSON-able; for the driver.
    """

    gradient: np.ndarray | None = None
    counted: float = 0.0
    rows: int = 0
    absent: Sequence[int] = ()
    buffers: dict[int, np.ndarray] = field(default_factory=dict)
    record: dict = field(default_factory=dict)


class Replica(Protocol):
    """A copy of the model beside its part of the rows."""

    def describe(self) -> dict:
        """Return what the driver needs to know of the rows; JSON-able."""

    def compute(
        self, step: Step, weights: np.ndarray, buffers: dict[int, np.ndarray]
    ) -> Contribution:
        """The gradient at `weights`; buffers that are not given are as they were at the start.

        A function of its arguments alone, so that it can be computed again.
        """


@dataclass
class Sum:
    """The gradient of a slice over all ranks.

    Attributes
    ----------
    gradient : ndarray of float32
    absent : list of int
        Parameters that have a gradient on no rank.
    buffers : dict of int to ndarray
        Merged.
    record : dict
    is_void : bool
        True if the step is not made: it is discarded, or one before it in the group was.
    """

    gradient: np.ndarray
    absent: list[int]
    buffers: dict[int, np.ndarray]
    record: dict[str, Any]
    is_void: bool = False

    def pack(self) -> bytes:
        doc = [self.absent, list(self.buffers), self.record, self.is_void]
        return pack(doc, [self.gradient, *self.buffers.values()])

    @classmethod
    def unpack(cls, data: Any) -> Sum:
        (absent, numbers, record, is_void), arrays = unpack(data)
        buffers = dict(zip(numbers, arrays[1:], strict=True))
        return cls(arrays[0].copy(), absent, buffers, record, is_void)


class Rank:
    """The part of one rank in every step.

    Parameters
    ----------
    plan : LayerPlan
    rank : int
        One that owns no slice only computes gradients.
    """

    def __init__(self, plan: LayerPlan, rank: int):
        self._plan, self.rank = plan, rank
        self._geometry = plan.geometry
        self._codec = codec_for(plan.compression)
        self._weights_codec = codec_for(self._codec.weights)
        self._read: tuple[float, float] | None = None  # when it began, and how long it took

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """While what the next method works on comes in, which belongs to its time."""
        began, started = time.time(), time.perf_counter()
        yield
        self._read = began, time.perf_counter() - started

    def _take_read(self) -> tuple[float | None, float]:
        read, self._read = self._read, None
        return read or (None, 0.0)

    @functools.cached_property
    def _segments(self) -> list[Segment]:
        return self._geometry.segments(self.rank)

    def weights(self, state: RankState) -> Message:
        """The own slice of the weights and buffers, for all ranks; it views the state."""
        encoded = self._weights_codec.encode(state.weights)
        doc = [list(state.buffers), state.is_halted]
        return Message(doc, [encoded, *state.buffers.values()])

    @property
    def sends_exact_weights(self) -> bool:
        """True if nothing is lost of the weights that :meth:`weights` gives."""
        return self._codec.weights == "fp32"

    def own_weights(self, data: Any) -> np.ndarray:
        """The own slice from what :meth:`weights` gave."""
        _, (encoded, *_) = unpack(data)
        return self._weights_codec.decode(encoded).copy()

    def gradients(
        self,
        replica: Replica,
        step: Step,
        weights: Sequence,
        residual: np.ndarray | None = None,
    ) -> tuple[list[Message], np.ndarray | None]:
        """Compute on the own rows.

        Parameters
        ----------
        weights : sequence of bytes-like or Message
            What :meth:`weights` gave on every owner.
        residual : ndarray, optional
            Of the state.

        Returns
        -------
        list of Message, ndarray or None
            A piece for every owner, and the new residual.
        """
        (began_at, read_s), now = self._take_read(), time.time()
        started = time.perf_counter()
        vector = np.empty(self._geometry.total, np.float32)
        buffers: dict[int, np.ndarray] = {}
        for (low, high), data in zip(self._geometry.bounds, weights, strict=True):
            (numbers, is_halted), (encoded, *arrays) = unpack(data)
            vector[low:high] = self._weights_codec.decode(encoded)
            buffers.update(zip(numbers, arrays, strict=True))
        got = time.perf_counter()
        is_late, contribution = False, Contribution(record={"loss": 0.0, "counted": 0.0})
        if not is_halted:
            computed_contribution = run_within(
                step.limit, lambda: replica.compute(step, vector, buffers)
            )
            is_late = computed_contribution is None
            if computed_contribution is None:
                contribution.record["dropped"] = step.rows(self.rank)
            else:
                contribution = computed_contribution
        computed = time.perf_counter()
        encoded, residual = self._encoded(contribution.gradient, residual)
        record = {
            **contribution.record,
            "rows": contribution.rows,
            "began_at": now if began_at is None else began_at,
            "get_weights_s": read_s + got - started,
            "compute_s": computed - got,
            "put_gradient_s": time.perf_counter() - computed,
            "bytes": sum(map(len, encoded)),
            "ended_at": time.time(),
        }
        pieces = []
        for owner, data in enumerate(encoded):
            owner_buffers = {
                i: b for i, b in contribution.buffers.items() if i % self._plan.owners == owner
            }
            doc = {
                "halted": is_halted,
                "late": is_late,
                "counted": contribution.counted,
                "rows": contribution.rows,
                "absent": list(contribution.absent),
                "buffers": list(owner_buffers),
                "record": record if owner == 0 else None,
            }
            pieces.append(Message(doc, [data, *owner_buffers.values()]))
        return pieces, residual

    def _encoded(self, gradient, residual):
        """The gradient's pieces in the codec, and what was lost by that."""
        bounds = self._geometry.bounds
        if gradient is None:
            return [b""] * len(bounds), residual
        if not self._codec.feedback:
            return [self._codec.encode(gradient[low:high]) for low, high in bounds], None
        corrected = gradient if residual is None else gradient + residual
        pieces, lost = [], np.empty_like(gradient)
        for low, high in bounds:
            pieces.append(self._codec.encode(corrected[low:high]))
            lost[low:high] = corrected[low:high] - self._codec.decode(pieces[-1])
        return pieces, lost

    def reduce(self, pieces: Sequence) -> Sum:
        """Sum the pieces of the own slice, in the order of the ranks that they are from."""
        (began_at, read_s), now = self._take_read(), time.time()
        started = time.perf_counter()
        contributions = [unpack(data) for data in pieces]
        present = [(doc, arrays) for doc, arrays in contributions if doc["counted"]]
        is_void = self._is_void([doc for doc, _ in contributions], len(present))
        if is_void:
            present = []
        total = sum(doc["counted"] for doc, _ in present)
        low, high = self._geometry.bounds[self.rank]
        gradient = _weighted_sum(
            [self._codec.decode(arrays[0]) for _, arrays in present],
            [np.float32(1.0 if self._plan.sums else doc["counted"] / total) for doc, _ in present],
            high - low,
        )
        absent = set(range(len(self._plan.sizes)))
        for doc, _ in present:
            absent.intersection_update(doc["absent"])
        buffers = merged(
            [
                (doc["rows"], dict(zip(doc["buffers"], arrays[1:], strict=True)))
                for doc, arrays in ([] if is_void else contributions)
            ]
        )
        if self._plan.clamp is not None:
            np.clip(gradient, *self._plan.clamp, out=gradient)
        late = [source for source, (doc, _) in enumerate(contributions) if doc["late"]]
        record: dict[str, Any] = {
            "late": late,
            "began_at": now if began_at is None else began_at,
            "aggregate_s": read_s + time.perf_counter() - started,
            "ended_at": time.time(),
        }
        if self.rank == 0:
            record["sources"] = [doc["record"] for doc, _ in contributions]
            record["is_void"] = is_void
        return Sum(gradient, sorted(absent), buffers, record, is_void)

    def _is_void(self, docs, present: int) -> bool:
        """Return True if too few have contributed for the step to be made; alike on all owners."""
        late = sum(doc["late"] for doc in docs)
        too_few = present < (present + late) * (1 - self._plan.max_drop)
        return docs[0]["halted"] or bool(late and (too_few or not present))

    def statistics(self, found: Sum, state: RankState) -> bytes:
        """Sums of squares of the own slice, for all ranks."""
        plan = self._plan
        squares = [_squares(found.gradient)]
        if plan.needs_norms:
            both = np.zeros((len(plan.sizes), 2))
            for segment in self._segments:
                here = slice(segment.start, segment.stop)
                both[segment.parameter] = (
                    _squares(state.weights[here]),
                    _squares(found.gradient[here]),
                )
            squares += both.reshape(-1).tolist()
        return np.asarray(squares, np.float64).tobytes()

    def update(
        self, step: Step, found: Sum, state: RankState, statistics: Sequence | None = None
    ) -> None:
        """Change the own slice.

        Parameters
        ----------
        found : Sum
            Of :meth:`reduce`.
        state : RankState
            It is changed.
        statistics : sequence of bytes, optional
            What :meth:`statistics` gave on every owner, if the plan needs it.
        """
        (began_at, read_s), record = self._take_read(), found.record
        if began_at is not None:  # in a stage of its own
            record["wait_s"] = max(0.0, began_at - record["ended_at"])
        started = time.perf_counter()
        if found.is_void:
            state.is_halted = True
        else:
            self._make_update(step, found, state, statistics)
        record["compute_weight_s"] = read_s + time.perf_counter() - started
        record["send_weights_s"] = 0.0
        record["ended_at"] = time.time()
        state.records.append(record)

    @contextlib.contextmanager
    def sending(self, state: RankState) -> Iterator[None]:
        """While the weights of the step that was made last are handed to their carrier."""
        started = time.perf_counter()
        yield
        if state.records:  # else it is the beginning of a group
            state.records[-1]["send_weights_s"] = time.perf_counter() - started
            state.records[-1]["ended_at"] = time.time()

    def _make_update(self, step, summed, state, statistics):
        norms, plan = None, self._plan
        if statistics is not None:
            squares = np.frombuffer(statistics[0], np.float64).copy()
            for data in statistics[1:]:
                squares += np.frombuffer(data, np.float64)
            scale = 1.0
            if plan.norm is not None:
                found_norm = float(np.sqrt(squares[0])) + plan.slack
                scale = plan.norm / max(found_norm, plan.norm)
                if scale < 1.0:
                    summed.gradient *= np.float32(scale)
            if plan.needs_norms:
                pairs = np.sqrt(squares[1:].reshape(-1, 2)) * (1.0, scale)
                norms = {i: (float(norm), float(slope)) for i, (norm, slope) in enumerate(pairs)}
        optimizer = SliceOptimizer(
            plan.optimizer, plan.groups, step.hyper, self._segments, state.weights, state.optimizer
        )
        optimizer.step(summed.gradient, set(summed.absent), norms)
        state.optimizer = optimizer.state()
        state.buffers.update(summed.buffers)


def _weighted_sum(vectors, shares, length: int) -> np.ndarray:
    """The sum of each share times its vector of `length` numbers, from the first to the last."""
    if not vectors:
        return np.zeros(length, np.float32)
    total, scratch = np.empty(length, np.float32), np.empty(_BLOCK, np.float32)
    for start in range(0, length, _BLOCK):
        here = total[start : start + _BLOCK]
        part = scratch[: len(here)]
        np.multiply(vectors[0][start : start + _BLOCK], shares[0], out=here)
        for vector, share in zip(vectors[1:], shares[1:], strict=True):
            np.multiply(vector[start : start + _BLOCK], share, out=part)
            np.add(here, part, out=here)
    return total


def _squares(values) -> float:
    wide = values.astype(np.float64)
    return float(wide @ wide)


_open: dict[tuple, tuple[Any, Any]] = {}  # training and rank -> what it was made for, replica
_memory = contextlib.ExitStack()


def replica_of(training: str, rank: int, version: Any, make: Callable[[], Any]) -> Any:
    """This process' replica of a rank; those of other trainings are closed.

    Parameters
    ----------
    training : str
    rank : int
    version : object
        What it depends on; a replica of another version is made anew.
    make : callable
    """
    close_replicas(except_of=training)
    entry = _open.get((training, rank))
    if entry is None or entry[0] != version:
        if entry is not None:
            del _open[training, rank]
            _close(entry[1])
        replica = make()
        if not _open:
            _memory.enter_context(tuned_allocator())
        entry = _open[training, rank] = version, replica
    return entry[1]


def close_replicas(except_of: str | None = None) -> None:
    """Close the replicas in this process."""
    for place in [p for p in _open if p[0] != except_of]:
        _close(_open.pop(place)[1])
    if not _open:
        _memory.close()


def _close(replica):
    close = getattr(replica, "close", None)
    if close is not None:
        close()
