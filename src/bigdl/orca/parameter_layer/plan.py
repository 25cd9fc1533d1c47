"""Settings and steps of a training run, and the interface of transports.

A **Transport** sends the bytes of one training between ranks.  The driver opens it with the rows,
sets the state of every rank with :meth:`Transport.start`, and then runs groups of steps.  Between
groups the transport keeps the state on the executors or moves it along; :meth:`Transport.states`
fetches it to the driver, e.g. for a checkpoint.

A failed group changes nothing.  After :class:`~bigdl.common.errors.WorkerLost` the driver restarts
from its newest state and runs the same steps, with bitwise the same result.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    import torch

    from bigdl.orca.parameter_layer.messages import RankState


def slice_bounds(total: int, ranks: int) -> list[tuple[int, int]]:
    """Split `total` elements into `ranks` slices, whose sizes differ by at most one.

    Returns
    -------
    list of (start, stop)
    """
    if total < ranks:
        raise UsageError(
            f"The model has {total} trainable numbers, fewer than the {ranks} workers that "
            "share them; use fewer workers",
            code="argument-value",
        )
    base, extra = divmod(total, ranks)
    starts = [rank * base + min(rank, extra) for rank in range(ranks + 1)]
    return list(itertools.pairwise(starts))


ArrayT = TypeVar("ArrayT", np.ndarray, "torch.Tensor")


@dataclass(frozen=True)
class ParameterSegment:
    """Part of a parameter that lies in one slice of the flat vector.

    Attributes
    ----------
    parameter : int
        Index of the parameter in the flat vector.
    start, stop : int
        Range of elements in the slice.
    width : int
        Elements of a row if the parameter is a table with sparse gradients; else 0.
    row : int
        Index of the segment's first row in the table.
    """

    parameter: int
    start: int
    stop: int
    width: int = 0
    row: int = 0

    def of(self, vector: ArrayT) -> ArrayT:
        """Return a view of this segment in a slice vector; two-dimensional for a table."""
        here = vector[self.start : self.stop]
        return here.reshape(-1, self.width) if self.width else here

    def touched(self, rows: np.ndarray) -> np.ndarray:
        """Select the touched rows that lie in this segment, relative to its first row."""
        end = self.row + (self.stop - self.start) // self.width
        first, last = np.searchsorted(rows, [self.row, end])
        return rows[first:last] - self.row


class FlatLayout:
    """Layout of parameters in a flat vector, and its slices.

    A gradient is a flat vector, too. It has all elements of dense parameters, and only the
    *touched* rows of tables, which a batch has read. Their indices accompany the gradient.

    Parameters
    ----------
    sizes : sequence of int
        Elements of each parameter, in order.
    ranks : int
    widths : sequence of int, optional
        Row width of each table, 0 for other parameters. Slices are split between rows.

    Attributes
    ----------
    total : int
        Number of elements of the vector.
    bounds : list of (int, int)
        Start and stop of each slice.
    """

    def __init__(self, sizes: Sequence[int], ranks: int, widths: Sequence[int] = ()):
        self.sizes = tuple(sizes)
        self.widths = tuple(widths) or (0,) * len(self.sizes)
        self.offsets = list(itertools.accumulate(self.sizes, initial=0))
        self.total = self.offsets[-1]
        stops = [self._whole_rows(stop) for _, stop in slice_bounds(self.total, ranks)]
        self.bounds = list(itertools.pairwise([0, *stops]))

    def _whole_rows(self, offset: int) -> int:
        """Round an element offset down to the start of its table row."""
        for start, stop, width in zip(self.offsets, self.offsets[1:], self.widths, strict=False):
            if width and start <= offset < stop:
                return offset - (offset - start) % width
        return offset

    def segments(self, rank: int) -> list[ParameterSegment]:
        """Return the segments of a rank's slice, in order; a parameter may span several slices."""
        low, high = self.bounds[rank]
        segments = []
        for number in range(bisect.bisect_right(self.offsets, low) - 1, len(self.sizes)):
            start, stop = self.offsets[number : number + 2]
            if start >= high:
                break
            first, last = max(start, low), min(stop, high)
            if first < last:
                width = self.widths[number]
                row = (first - start) // width if width else 0
                segments.append(ParameterSegment(number, first - low, last - low, width, row))
        return segments

    def cut(self, touched: Mapping[int, np.ndarray]) -> list[tuple[slice, dict[int, np.ndarray]]]:
        """Split a gradient of touched rows; return the range and the touched rows of each slice.

        Parameters
        ----------
        touched : dict of int to ndarray
            Touched rows of every table, by parameter index, in ascending order.

        Returns
        -------
        list of (slice, dict)
            Range of the gradient, and the touched rows relative to the first row of the slice.
        """
        if not any(self.widths):
            return [(slice(low, high), {}) for low, high in self.bounds]
        parts, start = [], 0
        for rank in range(len(self.bounds)):
            segments = self.segments(rank)
            tables = [each for each in segments if each.width]
            rows = {each.parameter: each.touched(touched[each.parameter]) for each in tables}
            stop = start + sum(span.stop - span.start for span in ranges_of(segments, rows))
            parts.append((slice(start, stop), rows))
            start = stop
        return parts

    def flatten(self, arrays: Sequence) -> np.ndarray:
        """Concatenate arrays of the parameters to one float32 vector."""
        return np.concatenate([np.asarray(a, dtype=np.float32).reshape(-1) for a in arrays])

    def parts(self, vector: np.ndarray) -> list:
        """Split a vector into flat views of the parameters."""
        return [vector[start:stop] for start, stop in itertools.pairwise(self.offsets)]


def ranges_of(
    segments: Sequence[ParameterSegment], touched: Mapping[int, np.ndarray]
) -> list[slice]:
    """Return each segment's range in a vector that holds only the touched rows of tables."""
    lengths = [
        len(touched[each.parameter]) * each.width if each.width else each.stop - each.start
        for each in segments
    ]
    return [slice(*ends) for ends in itertools.pairwise(itertools.accumulate(lengths, initial=0))]


@dataclass(frozen=True)
class LayerStep:
    """Epoch, batch and optimizer settings of one training step.

    Attributes
    ----------
    epoch, number : int
        Epoch, and index of the batch in it.
    hyper : tuple of dict
        The optimizer's parameter groups in this step, without their parameters. Schedules are
        evaluated before a group of steps starts, so they are exact within it.
    ranges : tuple of (int, int)
        Rows of the batch on every rank, as positions in the rank's order of the epoch.
    limit : float, optional
        Seconds after which the contribution of a rank is dropped.
    """

    epoch: int
    number: int
    hyper: tuple[dict, ...]
    ranges: tuple[tuple[int, int], ...] = ()
    limit: float | None = None

    def rows(self, rank: int) -> int:
        """Return a rank's number of rows in the batch; 0 if unknown."""
        if not self.ranges:
            return 0
        start, stop = self.ranges[rank]
        return stop - start


@dataclass(frozen=True)
class LayerPlan:
    """Settings of a training run that are equal on all ranks.

    Attributes
    ----------
    sizes : tuple of int
        Number of elements of each parameter, in the order of the optimizer's groups.
    groups : tuple of int
        Parameter group of each parameter.
    optimizer : type
    ranks : int
        Number of parts of the rows, each of which contributes to every step.
    compression : str
        Name of a codec.
    loss_is_sum : bool
        True if the loss is a sum over the rows, not a mean.
    clamp : tuple of (float, float), optional
        Range to which every element of the gradient is clipped.
    norm : float, optional
        L2 norm to which the whole gradient is then scaled down.
    slices : int, optional
        Number of slices of the weights, owned by the first ranks; default one per rank. Results do
        not depend on it.
    max_drop : float
        Share of late contributions above which a step is discarded.
    slack : float
        Added to the L2 norm of a gradient; default as in ``torch.nn.utils.clip_grad_norm_``.
    needs_norms : bool
        True if the optimizer needs the norms of whole parameters.
    widths : tuple of int
        Row width of each table that sends only touched rows, 0 for other parameters; empty without
        such tables.
    """

    sizes: tuple[int, ...]
    groups: tuple[int, ...]
    optimizer: type
    ranks: int
    compression: str = "fp32"
    loss_is_sum: bool = False
    clamp: tuple[float, float] | None = None
    norm: float | None = None
    slices: int | None = None
    max_drop: float = 1.0
    slack: float = 1e-6
    needs_norms: bool = False
    widths: tuple[int, ...] = ()

    @property
    def owners(self) -> int:
        """Number of slices of the weights; each slice belongs to one rank."""
        return self.ranks if self.slices is None else self.slices

    @property
    def geometry(self) -> FlatLayout:
        return FlatLayout(self.sizes, self.owners, self.widths)

    @property
    def needs_statistics(self) -> bool:
        """True if ranks exchange statistics of the summed gradients before the update."""
        return self.norm is not None or self.needs_norms


class Transport(contextlib.AbstractContextManager):
    """Interface for running groups of steps on N ranks."""

    #: default number of steps of a group
    group_size: int
    #: whether a failed call can be repeated without :meth:`start`
    keeps_state: bool = False

    @abstractmethod
    def rows(self) -> list[dict]:
        """Return each replica's description of its rank's rows."""

    @abstractmethod
    def start(self, states: Sequence[RankState]) -> None:
        """Set the states of the ranks, one for each slice.

        Previous states may be lost. With the same number of slices the rows may be lost, too.
        """

    @abstractmethod
    def run(self, steps: Sequence[LayerStep]) -> list[list[dict]]:
        """Run a group of steps.

        Returns
        -------
        list of list of dict
            Times of every owner and every step. Those of rank 0 also have ``sources``, the records
            of all ranks, and ``is_void``, whether this step or an earlier one was discarded.

        Raises
        ------
        UsageError, WorkerError
            Errors of user code.
        WorkerLost
            If the group could not be finished.
        """

    @abstractmethod
    def states(self) -> list[RankState]:
        """Return the state of each slice's owner after the last group of steps.

        Raises
        ------
        WorkerLost
        """

    @abstractmethod
    def close(self) -> None:
        """Free all resources; calling this method again has no effect."""

    def __exit__(self, *_):
        self.close()
