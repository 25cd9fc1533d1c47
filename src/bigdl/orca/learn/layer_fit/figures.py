"""From what the ranks recorded of their steps to the figures of an epoch."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bigdl.orca.learn.sums import EpochSums

__all__ = ["PHASES", "LayerFigures"]

PHASES = (
    "get_weights_s",
    "compute_s",
    "put_gradient_s",
    "aggregate_s",
    "compute_weight_s",
)


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

    def add(self, records: Sequence[Sequence[dict]], seconds: float) -> None:
        """Add a group of steps.

        Parameters
        ----------
        records : list of list of dict
            Of :meth:`~bigdl.orca.sync.parameter_layer.transport.Transport.run`.
        seconds : float
            That the group took.
        """
        self._wall += seconds
        self.rows = []
        before, count = dict(self._phases), len(records[0])
        for step in zip(*records, strict=True):
            self._steps += 1
            sources = step[0]["sources"]
            self.rows.append(self._add_step(sources, seconds / count))
            for phase in PHASES:
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


class _Known:
    """Gathers what is known already."""

    def __init__(self, sums):
        self._sums = sums

    def all_gather(self, values):
        return [own.values() for own in self._sums]
