"""Plan of a training, the steps of a group, and the contract of what carries their bytes.

A **Transport** carries the bytes of one training from rank to rank.  It is opened on the driver
with the rows, is given the state of every rank by :meth:`Transport.start`, and then runs groups of
steps.  Between two groups the state stays on the executors or moves along, as the transport
likes; :meth:`Transport.states` brings it to the driver, e.g. for a checkpoint.

A group that fails has changed nothing.  After :class:`~bigdl.common.errors.WorkerLost` the driver
starts again from the newest state that it has and runs the same steps, which gives the same bits.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    from bigdl.orca.parameter_layer.messages import RankState


def slice_bounds(total: int, ranks: int) -> list[tuple[int, int]]:
    """Cut `total` elements in `ranks` slices; the first ``total % ranks`` have one element more.

    Returns
    -------
    list of (start, stop)
    """
    if total < ranks:
        raise UsageError(
            f"The model has {total} trainable numbers, fewer than the {ranks} workers that would "
            "share them; ask for fewer workers",
            code="argument-value",
        )
    base, extra = divmod(total, ranks)
    starts = [rank * base + min(rank, extra) for rank in range(ranks + 1)]
    return list(itertools.pairwise(starts))


@dataclass(frozen=True)
class ParameterSegment:
    """The part of a parameter that lies in a slice.

    Attributes
    ----------
    parameter : int
        Its number in the flat vector's order.
    start, stop : int
        Elements of the slice.
    width : int
        Elements of a row if the parameter is a table, whose gradients have some rows; else 0.
    row : int
        Number of the table's row that it begins with.
    """

    parameter: int
    start: int
    stop: int
    width: int = 0
    row: int = 0

    def of(self, vector: Any) -> Any:
        """Return the segment of a slice, a view; that of a table in rows."""
        here = vector[self.start : self.stop]
        return here.reshape(-1, self.width) if self.width else here

    def touched(self, rows: np.ndarray) -> np.ndarray:
        """Return those of a table's ascending rows that are here, counted from its first one."""
        end = self.row + (self.stop - self.start) // self.width
        first, last = np.searchsorted(rows, [self.row, end])
        return rows[first:last] - self.row


class FlatLayout:
    """The flat vector of some parameters and its slices.

    A gradient is a vector, too. It has all elements of most parameters, and of tables those rows
    alone that somebody has read: they are its *touched* rows, whose numbers are said beside it.

    Parameters
    ----------
    sizes : sequence of int
        Elements of each parameter, in order.
    ranks : int
    widths : sequence of int, optional
        Elements of a row of each table, and 0 of all others. No row lies in two slices.

    Attributes
    ----------
    total : int
        Elements of the vector.
    bounds : list of (int, int)
        Of each slice.
    """

    def __init__(self, sizes: Sequence[int], ranks: int, widths: Sequence[int] = ()):
        self.sizes = tuple(sizes)
        self.widths = tuple(widths) or (0,) * len(self.sizes)
        self.offsets = list(itertools.accumulate(self.sizes, initial=0))
        self.total = self.offsets[-1]
        stops = [self._whole_rows(stop) for _, stop in slice_bounds(self.total, ranks)]
        self.bounds = list(itertools.pairwise([0, *stops]))

    def _whole_rows(self, place: int) -> int:
        """Return the start of the row that an element is in, or its place where there are none."""
        for start, stop, width in zip(self.offsets, self.offsets[1:], self.widths, strict=False):
            if width and start <= place < stop:
                return place - (place - start) % width
        return place

    def segments(self, rank: int) -> list[ParameterSegment]:
        """Return the segments of a rank's slice, in order; a parameter may be in several slices."""
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
        """Cut a gradient in the parts of the slices.

        Parameters
        ----------
        touched : dict of int to ndarray
            The touched rows of every table, by its number, in ascending order.

        Returns
        -------
        list of (slice, dict)
            Elements of the gradient, and the touched rows, counted from the first one of the slice.
        """
        if not any(self.widths):
            return [(slice(low, high), {}) for low, high in self.bounds]
        parts, start = [], 0
        for rank in range(len(self.bounds)):
            segments = self.segments(rank)
            tables = [each for each in segments if each.width]
            rows = {each.parameter: each.touched(touched[each.parameter]) for each in tables}
            stop = start + sum(place.stop - place.start for place in ranges_of(segments, rows))
            parts.append((slice(start, stop), rows))
            start = stop
        return parts

    def flatten(self, arrays: Sequence) -> np.ndarray:
        """Arrays of the parameters as one vector of float32."""
        return np.concatenate([np.asarray(a, dtype=np.float32).reshape(-1) for a in arrays])

    def parts(self, vector: np.ndarray) -> list:
        """Views of the parameters, flat, in a vector."""
        return [vector[start:stop] for start, stop in itertools.pairwise(self.offsets)]


def ranges_of(
    segments: Sequence[ParameterSegment], touched: Mapping[int, np.ndarray]
) -> list[slice]:
    """Return where segments lie in a vector that has the touched rows of tables alone."""
    lengths = [
        len(touched[each.parameter]) * each.width if each.width else each.stop - each.start
        for each in segments
    ]
    return [slice(*ends) for ends in itertools.pairwise(itertools.accumulate(lengths, initial=0))]


@dataclass(frozen=True)
class LayerStep:
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
    limit : float, optional
        Seconds after which nobody waits for the contribution of a rank any more.
    """

    epoch: int
    number: int
    hyper: tuple[dict, ...]
    ranges: tuple[tuple[int, int], ...] = ()
    limit: float | None = None

    def rows(self, rank: int) -> int:
        """Return the number of rows of the batch that a rank has; 0 where that is not known."""
        if not self.ranges:
            return 0
        start, stop = self.ranges[rank]
        return stop - start


@dataclass(frozen=True)
class LayerPlan:
    """Everything that all ranks know of a training.

    Attributes
    ----------
    sizes : tuple of int
        Elements of the parameters, in the order of the optimizer's groups.
    groups : tuple of int
        The parameter group of each.
    optimizer : type
    ranks : int
        Parts of the rows, each of which contributes to every step.
    compression : str
        Name of a codec.
    loss_is_sum : bool
        True if the loss adds up over the rows instead of averaging.
    clamp : tuple of (float, float), optional
        Every element of the gradient is brought into this range.
    norm : float, optional
        The whole gradient is scaled down to this L2 norm, after that.
    slices : int, optional
        Slices of the weights, owned by the first so many ranks; default one for each rank. What is
        computed does not depend on it.
    max_drop : float
        If more than this share of the contributions to a step is late, the step is discarded.
    slack : float
        Added to the L2 norm that a gradient has; default as in ``torch.nn.utils.clip_grad_norm_``.
    needs_norms : bool
        True if the optimizer looks at norms of whole parameters.
    widths : tuple of int
        Elements of a row of each table whose rows travel alone, and 0 of other parameters; empty if
        there is none.
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
        """Number of slices."""
        return self.ranks if self.slices is None else self.slices

    @property
    def geometry(self) -> FlatLayout:
        return FlatLayout(self.sizes, self.owners, self.widths)

    @property
    def needs_statistics(self) -> bool:
        """True if ranks tell each other about their sums before the update."""
        return self.norm is not None or self.needs_norms


class Transport(contextlib.AbstractContextManager):
    """Runs groups of steps on N ranks; see the module for who calls what."""

    #: steps of a group, if nothing else is said
    group_size: int
    #: whether what failed can be asked for again without :meth:`start`
    keeps_state: bool = False

    @abstractmethod
    def rows(self) -> list[dict]:
        """Return what the replica of every rank says of its rows."""

    @abstractmethod
    def start(self, states: Sequence[RankState]) -> None:
        """Go on from these states, one for each slice.

        What the transport had may be lost, but for the rows where there are more or fewer slices.
        """

    @abstractmethod
    def run(self, steps: Sequence[LayerStep]) -> list[list[dict]]:
        """One group of steps.

        Returns
        -------
        list of list of dict
            For every owner of a slice and every step its times; those of rank 0 hold ``sources``,
            what every rank had to say of its rows, and ``is_void``: whether the step was discarded,
            or one before it.

        Raises
        ------
        UsageError, WorkerError
            For what user code raised.
        WorkerLost
            When the group could not be ended.
        """

    @abstractmethod
    def states(self) -> list[RankState]:
        """The state of every owner after the last group.

        Raises
        ------
        WorkerLost
        """

    @abstractmethod
    def close(self) -> None:
        """Free everything; safe to call twice."""

    def __exit__(self, *_):
        self.close()
