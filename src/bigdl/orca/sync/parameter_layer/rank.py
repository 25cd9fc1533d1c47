"""What one rank computes in a step, whoever carries the bytes from rank to rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from bigdl.orca.sync.parameter_layer.buffers import merged
from bigdl.orca.sync.parameter_layer.codec import codec_for
from bigdl.orca.sync.parameter_layer.geometry import Geometry
from bigdl.orca.sync.parameter_layer.messages import pack, unpack
from bigdl.orca.sync.parameter_layer.optimizers import SliceOptimizer
from bigdl.orca.sync.parameter_layer.state import RankState

__all__ = ["Contribution", "LayerPlan", "Rank", "Replica", "Step", "Sum"]

_SMALL = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class Step:
    """One step of the training.

    Attributes
    ----------
    epoch, number : int
        Which batch of which epoch.
    hyper : tuple of dict
        The optimizer's parameter groups in this step, without their parameters: schedules are
        worked out before a group of steps begins, so they are exact within it.
    ranges : tuple of (int, int)
        For every rank, the rows of the batch: positions in the rank's order of the epoch.
    """

    epoch: int
    number: int
    hyper: tuple[dict, ...]
    ranges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class LayerPlan:
    """What all ranks know of a training.

    Attributes
    ----------
    sizes : tuple of int
        Elements of the parameters, in the order of the optimizer's groups.
    groups : tuple of int
        The parameter group of each.
    optimizer : type
    ranks : int
    compression : str
        Name of a codec.
    sums : bool
        Whether the loss adds up over the rows instead of averaging.
    clamp : tuple of (float, float), optional
        Every element of the gradient is brought into this range.
    norm : float, optional
        The whole gradient is scaled down to this L2 norm, after that.
    """

    sizes: tuple[int, ...]
    groups: tuple[int, ...]
    optimizer: type
    ranks: int
    compression: str = "fp32"
    sums: bool = False
    clamp: tuple[float, float] | None = None
    norm: float | None = None

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.sizes, self.ranks)

    @property
    def needs_norms(self) -> bool:
        """Whether the optimizer looks at norms of whole parameters."""
        return getattr(self.optimizer, "needs_norms", False)

    @property
    def needs_statistics(self) -> bool:
        """Whether ranks tell each other about their sums before the update."""
        return self.norm is not None or self.needs_norms


@dataclass
class Contribution:
    """What a rank found out from its rows of a batch.

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
        """What the driver needs to know of the rows; JSON-able."""

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
    """

    gradient: np.ndarray
    absent: list[int]
    buffers: dict[int, np.ndarray]
    record: dict[str, Any]

    def pack(self) -> bytes:
        doc = [self.absent, list(self.buffers), self.record]
        return pack(doc, [self.gradient, *self.buffers.values()])

    @classmethod
    def unpack(cls, data) -> Sum:
        (absent, numbers, record), arrays = unpack(data)
        buffers = dict(zip(numbers, arrays[1:], strict=True))
        return cls(arrays[0].copy(), absent, buffers, record)


class Rank:
    """The part of one rank in every step.

    Parameters
    ----------
    plan : LayerPlan
    rank : int
    """

    def __init__(self, plan: LayerPlan, rank: int):
        self._plan, self.rank = plan, rank
        self._geometry = plan.geometry
        self._segments = self._geometry.segments(rank)
        self._codec = codec_for(plan.compression)
        self._weights_codec = codec_for(self._codec.weights)

    def weights(self, state: RankState) -> bytes:
        """The own slice of the weights and buffers, for all ranks."""
        encoded = self._weights_codec.encode(state.weights)
        return pack(list(state.buffers), [encoded, *state.buffers.values()])

    def gradients(
        self,
        replica: Replica,
        step: Step,
        weights: Sequence,
        residual: np.ndarray | None = None,
    ) -> tuple[list[bytes], np.ndarray | None]:
        """Compute on the own rows.

        Parameters
        ----------
        weights : sequence of bytes
            What :meth:`weights` gave on every rank.
        residual : ndarray, optional
            Of the state.

        Returns
        -------
        list of bytes, ndarray or None
            A piece for every rank, and the new residual.
        """
        started = time.perf_counter()
        vector = np.empty(self._geometry.total, np.float32)
        buffers: dict[int, np.ndarray] = {}
        for (low, high), data in zip(self._geometry.bounds, weights, strict=True):
            numbers, (encoded, *arrays) = unpack(data)
            vector[low:high] = self._weights_codec.decode(encoded)
            buffers.update(zip(numbers, arrays, strict=True))
        got = time.perf_counter()
        found = replica.compute(step, vector, buffers)
        computed = time.perf_counter()
        encoded, residual = self._encoded(found.gradient, residual)
        record = {
            **found.record,
            "rows": found.rows,
            "get_weights_s": got - started,
            "compute_s": computed - got,
            "put_gradient_s": time.perf_counter() - computed,
            "bytes": sum(map(len, encoded)),
        }
        pieces = []
        for owner, data in enumerate(encoded):
            own = {i: b for i, b in found.buffers.items() if i % self._plan.ranks == owner}
            doc = {
                "counted": found.counted,
                "rows": found.rows,
                "absent": list(found.absent),
                "buffers": list(own),
                "record": record if owner == 0 else None,
            }
            pieces.append(pack(doc, [data, *own.values()]))
        return pieces, residual

    def _encoded(self, gradient, residual):
        """The gradient's pieces in the codec, and what was lost by that."""
        bounds = self._geometry.bounds
        if gradient is None:
            return [b""] * len(bounds), residual
        if not self._codec.feedback:
            return [self._codec.encode(gradient[low:high]) for low, high in bounds], None
        wanted = gradient if residual is None else gradient + residual
        pieces, lost = [], np.empty_like(gradient)
        for low, high in bounds:
            pieces.append(self._codec.encode(wanted[low:high]))
            lost[low:high] = wanted[low:high] - self._codec.decode(pieces[-1])
        return pieces, lost

    def reduce(self, pieces: Sequence) -> Sum:
        """Sum the pieces of the own slice, in the order of the ranks that they are from."""
        started = time.perf_counter()
        found = [unpack(data) for data in pieces]
        present = [(doc, arrays) for doc, arrays in found if doc["counted"]]
        total = sum(doc["counted"] for doc, _ in present)
        low, high = self._geometry.bounds[self.rank]
        gradient = None
        for doc, arrays in present:
            share = np.float32(1.0 if self._plan.sums else doc["counted"] / total)
            part = self._codec.decode(arrays[0]) * share
            gradient = part if gradient is None else np.add(gradient, part, out=gradient)
        if gradient is None:
            gradient = np.zeros(high - low, np.float32)
        absent = set(range(len(self._plan.sizes)))
        for doc, _ in present:
            absent.intersection_update(doc["absent"])
        buffers = merged(
            [
                (doc["rows"], dict(zip(doc["buffers"], arrays[1:], strict=True)))
                for doc, arrays in found
            ]
        )
        if self._plan.clamp is not None:
            np.clip(gradient, *self._plan.clamp, out=gradient)
        record: dict[str, Any] = {"aggregate_s": time.perf_counter() - started}
        if self.rank == 0:
            record["sources"] = [doc["record"] for doc, _ in found]
        return Sum(gradient, sorted(absent), buffers, record)

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
            What :meth:`statistics` gave on every rank, if the plan needs it.
        """
        started = time.perf_counter()
        norms, plan = None, self._plan
        if statistics is not None:
            squares = np.frombuffer(statistics[0], np.float64).copy()
            for data in statistics[1:]:
                squares += np.frombuffer(data, np.float64)
            scale = 1.0
            if plan.norm is not None:
                scale = min(1.0, plan.norm / (float(np.sqrt(squares[0])) + _SMALL))
                if scale < 1.0:
                    found.gradient *= np.float32(scale)
            if plan.needs_norms:
                pairs = np.sqrt(squares[1:].reshape(-1, 2)) * (1.0, scale)
                norms = {i: (float(own), float(slope)) for i, (own, slope) in enumerate(pairs)}
        optimizer = SliceOptimizer(
            plan.optimizer, plan.groups, step.hyper, self._segments, state.weights, state.optimizer
        )
        optimizer.step(found.gradient, set(found.absent), norms)
        state.optimizer = optimizer.state()
        state.buffers.update(found.buffers)
        found.record["compute_weight_s"] = time.perf_counter() - started
        state.records.append(found.record)


def _squares(values) -> float:
    wide = values.astype(np.float64)
    return float(wide @ wide)
