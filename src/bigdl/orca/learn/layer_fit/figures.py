"""From what the ranks recorded of their steps to the figures of an epoch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from bigdl.training.sums import EpochSums

__all__ = ["PHASES", "LayerFigures"]

PHASES = (
    "launch_s",
    "dispatch_s",
    "get_weights_s",
    "compute_s",
    "put_gradient_s",
    "aggregate_s",
    "compute_weight_s",
    "send_weights_s",
)
"""Where the time of a step goes: means over the ranks, in seconds.

``launch_s`` is a step's share of the time from the call for a group to its first gradient, and
``dispatch_s`` passes between the tasks of one stage and those of the next, by the clocks of their
machines: scheduling, and what the JVM does with the bytes. The others are those of BigDL's metrics
("get weights average" and so on); waiting for what is fetched belongs to who fetches it.
"""

_TIMED = PHASES[2:]


class LayerFigures:
    """Sums over the steps of an epoch, for every rank.

    Parameters
    ----------
    ranks : int
    weighted : bool
        Whether rows count their weights instead of 1.
    sums : bool
        Whether the loss adds up over the rows.

    Attributes
    ----------
    of_ranks : list of EpochSums
    dropped : dict of str to int
        What stragglers cost: contributions and rows that were left out, discarded steps.
    rows : list of list of float
        Of the last group: loss, counted and rows of each step.
    phases : dict of str to float
        Of the last group: mean seconds per step of the phases and of the whole step.
    """

    def __init__(self, ranks: int, *, weighted: bool, sums: bool):
        self._weighted, self._is_sum = weighted, sums
        self.of_ranks = [EpochSums() for _ in range(ranks)]
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._steps = self._wall = 0.0
        self._bytes = 0
        self.dropped = {"dropped_contributions": 0, "dropped_rows": 0, "discarded_steps": 0}
        self.rows: list[list[float]] = []
        self.phases: dict[str, float] = {}

    def add(self, records: Sequence[Sequence[dict]], seconds: float, began_at: float) -> None:
        """Add a group of steps.

        Parameters
        ----------
        records : list of list of dict
            Of :meth:`~bigdl.orca.parameter_layer.transport.Transport.run`.
        seconds : float
            That the group took.
        began_at : float
            When it was asked for, in seconds since 1970.
        """
        self._wall += seconds
        self.rows = []
        before, count = dict(self._phases), len(records[0])
        ended = began_at
        for number, step in enumerate(zip(*records, strict=True)):
            self._steps += 1
            sources = step[0]["sources"]
            self.rows.append(self._add_step(sources, seconds / count))
            waits = _waits(step, ended)
            self._phases["dispatch_s" if number else "launch_s"] += waits[0]
            self._phases["dispatch_s"] += sum(waits[1:])
            ended = max(owner["ended_at"] for owner in step)
            for phase in _TIMED:
                holders = step if phase in step[0] else sources
                self._phases[phase] += sum(each[phase] for each in holders) / len(holders)
            self._bytes += sum(source["bytes"] for source in sources)
            late = [source["dropped"] for source in sources if "dropped" in source]
            self.dropped["dropped_contributions"] += len(late)
            self.dropped["dropped_rows"] += sum(late)
        self.phases = {name: (self._phases[name] - before[name]) / count for name in PHASES}
        self.phases["step_s"] = seconds / count

    def _add_step(self, sources, seconds):
        total = sum(source["counted"] for source in sources)
        batch_rows = sum(source["rows"] for source in sources)
        loss = counted = 0.0
        for own, source in zip(self.of_ranks, sources, strict=True):
            parts = self._parts(source, total, batch_rows)
            own.add(
                *parts,
                source["rows"],
                fetch_s=source.get("fetch_s", 0.0),
                forward_s=source.get("forward_s", 0.0),
                backward_s=source.get("backward_s", 0.0),
                step_s=seconds,
            )
            loss, counted = loss + parts[0], counted + parts[1]
        return [loss, counted, float(batch_rows)]

    def _parts(self, source, total, batch_rows):
        """What adds up to the loss of a batch, and what it counts."""
        loss, counted = source["loss"], source["counted"]
        if self._weighted:
            return (loss if self._is_sum else loss * counted), counted
        if not self._is_sum:
            loss = loss * (counted / total if total else 0.0) * batch_rows
        return loss, float(source["rows"])

    def mean(self) -> float | None:
        """Mean loss so far."""
        counted = sum(own.counted for own in self.of_ranks)
        return sum(own.loss for own in self.of_ranks) / counted if counted else None

    def entry(self) -> dict | None:
        """The figures of the epoch; None if no step was made.

        Beside those of other backends ``profile`` has the mean seconds per step of the phases of
        the parameter layer, ``sync_s`` (all that is not ``compute_s``), and ``bytes_per_step``,
        which all ranks together sent as gradients.
        """
        found = EpochSums().reduce(_Known(self.of_ranks))
        if found is None or not self._steps:
            return found
        profile = found["profile"]
        profile.update({name: value / self._steps for name, value in self._phases.items()})
        profile["step_s"] = self._wall / self._steps
        profile["sync_s"] = profile["step_s"] - profile["compute_s"]
        profile["bytes_per_step"] = self._bytes / self._steps
        profile["ended_at"] = time.time()
        return found


def _waits(owners, ended: float) -> list[float]:
    """Seconds before the tasks of each stage of a step, of which those before end at `ended`."""
    sources = owners[0]["sources"]
    computed = max(source["ended_at"] for source in sources)
    return [
        max(0.0, statistics.fmean(source["began_at"] for source in sources) - ended),
        max(0.0, statistics.fmean(owner["began_at"] for owner in owners) - computed),
        statistics.fmean(owner.get("wait_s", 0.0) for owner in owners),
    ]


class _Known:
    """Gathers what is known already."""

    def __init__(self, sums):
        self._sums = sums

    def all_gather(self, values):
        return [own.values() for own in self._sums]
